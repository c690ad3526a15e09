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
