"""A step is an integer, of whatever library; any other value is refused by every call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_ckpt import Run

INTEGERS = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor([3])]
OTHERS = [
    *(2.0, 2.5, True, "2", None, np.float64(2), np.bool_(True), np.array([1, 2])),
    *(torch.tensor(2.0), torch.tensor(True), torch.tensor([1, 2]), 2 + 0j),
]


def state() -> dict[str, Any]:
    return {"w": torch.ones(3)}


def leased(run: Run, step: Any) -> str:
    with run.lease(step) as path:
        return Path(path).name


@pytest.mark.parametrize("step", INTEGERS, ids=repr)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_integer_of_any_library_is_the_step(
    tmp_path: Path, step: Any, asynchronous: bool
) -> None:
    with Run(tmp_path / "run", every=3, asynchronous=asynchronous) as run:
        assert run.should_save(step)
        assert run.save(step, state(), metrics={"loss": 1.0})
        run.wait()
        run.save(4, state())
        run.wait()
        assert leased(run, step) == "step-3"
        assert run.discard_after(step) == [4]
        assert run.latest_step() == 3
        found = run.restore(state(), step=step)
        assert (found, type(found)) == (3, int)
    assert Run(tmp_path / "run").restore(state()) == 3


CALLS: dict[str, Callable[[Run, Any], Any]] = {
    "save": lambda run, step: run.save(step, state()),
    "should_save": lambda run, step: run.should_save(step),
    "restore": lambda run, step: run.restore(state(), step=step),
    "discard_after": lambda run, step: run.discard_after(step),
    "lease": leased,
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_step_that_is_no_integer_is_refused_and_named(
    tmp_path: Path, name: str, asynchronous: bool
) -> None:
    with Run(tmp_path / "run", asynchronous=asynchronous, on_busy="skip") as run:
        for step in (1, 2):
            run.save(step, state())
            run.wait()
        for step in OTHERS:
            if step is None and name == "restore":  # The newest step.
                continue
            with pytest.raises(TypeError) as error:
                CALLS[name](run, step)
            assert repr(step) in str(error.value)
        assert run.latest_step() == 2


@pytest.mark.parametrize("mode", [{}, {"asynchronous": True, "agent": True}])
@pytest.mark.usefixtures("memory")
def test_the_last_step_is_the_same_with_an_agent_and_without(
    tmp_path: Path, mode: dict[str, Any]
) -> None:
    with Run(tmp_path / "run", **mode) as run:
        for name in CALLS:
            for step in (2**63, 10**5000, np.uint64(2**63)):
                with pytest.raises(ValueError, match=r"step is too large.* 2\*\*63 - 1"):
                    CALLS[name](run, step)
        assert run.save(2**63 - 1, state())
        run.wait()
        assert run.latest_step() == 2**63 - 1
    assert Run(tmp_path / "run").restore(state()) == 2**63 - 1


@pytest.mark.parametrize("value", [1.5, 1.0, "1", True])
@pytest.mark.parametrize(
    "name",
    [
        *("keep_last", "keep_every", "keep_best", "every", "max_failures"),
        *("keep_local", "promote_bytes_per_s"),
    ],
)
def test_a_number_of_steps_or_bytes_that_is_no_integer_is_refused_at_once(
    tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(TypeError, match=f"{name}={value!r} is not an integer"):
        Run(tmp_path / "run", local=tmp_path / "local", monitor="loss", **{name: value})
    with pytest.raises(ValueError, match=f"{name} is too large"):
        Run(tmp_path / "run", local=tmp_path / "local", monitor="loss", **{name: 2**63})
    accepted = np.int64(1 << 20 if name == "promote_bytes_per_s" else 1)  # The end waits for it.
    options = {name: accepted, "monitor": "loss"}
    with Run(tmp_path / "run", local=tmp_path / "local", **options) as run:
        run.save(1, state(), metrics={"loss": 1.0})
