"""A wrong argument on one rank is an error of all ranks at once, and the next call works.

So is an argument that would be right, but differs from that of the other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from failing_ranks import AMPLE_S
from ranks import Worlds

import torch_ckpt
from torch_ckpt import Run

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("memory")]

AT_ONCE_S = 10.0  # On a busy machine. Without a message of the failure, ranks wait for AMPLE_S.
WRONG_TYPE, WRONG_VALUE = object(), -1

Calls = dict[str, tuple[Callable[..., Any], dict[str, Any]]]


def state() -> dict[str, Any]:
    return {"w": torch.ones(100), "rank": dist.get_rank()}


def with_dcp(name: str) -> Callable[..., Any]:
    def function(given: Any, **arguments: Any) -> Any:
        with torch_ckpt.installed(timeout_s=AMPLE_S):
            return getattr(dcp, name)(given, **arguments)

    return function


def installed_around_a_save(checkpoint_id: Any, **arguments: Any) -> None:
    with torch_ckpt.installed(**arguments):
        dcp.save(state(), checkpoint_id=checkpoint_id)


def opened_and_closed(**arguments: Any) -> None:
    Run(**{"timeout_s": AMPLE_S, **arguments}).close()


def in_background(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **arguments: call(*given, **arguments).result()


def calls_of(path: Path, run: Run) -> Calls:
    """Each call, and its right arguments."""
    place = {"checkpoint_id": path / "saved"}
    ours = {"timeout_s": AMPLE_S, **place}
    return {
        "save": (torch_ckpt.save, {"state_dict": state(), **ours}),
        "async_save": (in_background(torch_ckpt.async_save), {"state_dict": state(), **ours}),
        "load": (torch_ckpt.load, {"state_dict": state(), **ours}),
        "dcp.save": (with_dcp("save"), {"given": state(), **place}),
        "dcp.async_save": (in_background(with_dcp("async_save")), {"given": state(), **place}),
        "dcp.load": (with_dcp("load"), {"given": state(), **place}),
        "installed": (installed_around_a_save, {**place, "timeout_s": AMPLE_S}),
        "Run": (opened_and_closed, {"directory": path / "new", "local": path / "local"}),
        "Run without local": (opened_and_closed, {"directory": path / "alone"}),
        "Run.save": (run.save, {"step": 1, "state": state()}),
        "Run.restore": (run.restore, {"state": state(), "step": 1}),
        "Run.step_at": (run.step_at, {"time": "9999-01-01"}),
        "Run.discard_after": (run.discard_after, {"step": 1}),
    }


NUMBERS_OF_RUN = (
    *("keep_local", "promote_bytes_per_s", "every", "max_overhead", "max_failures"),
    *("keep_last", "keep_every", "keep_best"),
)
CHOICES_OF_RUN = "mode", "on_busy", "on_failure", "verify", "reuse", "keep_for"

WRONG = {
    "save": {
        "state_dict": [WRONG_TYPE],
        "checkpoint_id": [WRONG_TYPE, "nobody://knows"],
        "storage_writer": [WRONG_TYPE],
        "planner": [WRONG_TYPE],
        "timeout_s": [WRONG_TYPE, WRONG_VALUE],
    },
    "async_save": {
        "state_dict": [WRONG_TYPE],
        "checkpoint_id": [WRONG_TYPE, "nobody://knows"],
        "storage_writer": [WRONG_TYPE],
        "planner": [WRONG_TYPE],
        "async_stager": [WRONG_TYPE],
        "async_checkpointer_type": [WRONG_TYPE],
        "timeout_s": [WRONG_TYPE, WRONG_VALUE],
        "on_busy": [WRONG_TYPE, "never"],
    },
    "load": {
        "state_dict": [WRONG_TYPE],
        "checkpoint_id": [WRONG_TYPE, "nobody://knows"],
        "storage_reader": [WRONG_TYPE],
        "planner": [WRONG_TYPE],
        "timeout_s": [WRONG_TYPE, WRONG_VALUE],
    },
    "dcp.save": {
        "given": [WRONG_TYPE],
        "checkpoint_id": [WRONG_TYPE, "nobody://knows"],
        "storage_writer": [WRONG_TYPE],
        "planner": [WRONG_TYPE],
        "unknown": [WRONG_VALUE],
    },
    "dcp.async_save": {
        "given": [WRONG_TYPE],
        "checkpoint_id": [WRONG_TYPE, "nobody://knows"],
        "storage_writer": [WRONG_TYPE],
        "planner": [WRONG_TYPE],
        "unknown": [WRONG_VALUE],
    },
    "dcp.load": {
        "given": [WRONG_TYPE],
        "checkpoint_id": [WRONG_TYPE, "nobody://knows"],
        "storage_reader": [WRONG_TYPE],
        "planner": [WRONG_TYPE],
        "unknown": [WRONG_VALUE],
    },
    "installed": {"timeout_s": [WRONG_TYPE, WRONG_VALUE]},
    "Run": {
        "directory": [WRONG_TYPE, "nobody://knows"],
        "local": [WRONG_TYPE, "nobody://knows"],
        **{name: [WRONG_VALUE] for name in NUMBERS_OF_RUN},
        **{name: [WRONG_TYPE, "never"] for name in CHOICES_OF_RUN},
        "timeout_s": [WRONG_TYPE, WRONG_VALUE],
        "agent": [True],
        "writer": [{"unknown": 1}],
    },
    "Run without local": {
        "writer": [WRONG_TYPE, {"unknown": 1}],
        "reader": [WRONG_TYPE, {"unknown": 1}],
    },
    "Run.save": {
        "step": ["x", 1.5, 2.0, True, WRONG_VALUE],
        "state": [WRONG_TYPE],
        "persist": [False],
    },
    "Run.restore": {"state": [WRONG_TYPE], "step": ["x", 1.0, True, WRONG_VALUE]},
    "Run.step_at": {"time": [WRONG_TYPE, "never"]},
    "Run.discard_after": {"step": ["x", 1.0, True, WRONG_VALUE]},
}
"""What each argument may be wrongly."""


def wrong_on(wrong_rank: int, path: Path, name: str) -> list[tuple[str, float, str]]:
    """Makes a call with each wrong argument on one rank, and then the right one.

    Returns each wrong argument, how long this rank was in the call, and its error.
    """
    found = []
    with Run(path / "run", timeout_s=AMPLE_S) as run:
        run.save(1, state())
        torch_ckpt.save(state(), checkpoint_id=path / "saved")
        call, right = calls_of(path, run)[name]
        for argument, values in WRONG[name].items():
            for value in values:
                is_wrong = dist.get_rank() == wrong_rank
                begin, error = time.monotonic(), ""
                try:
                    call(**{**right, argument: value} if is_wrong else right)
                except BaseException as raised:  # CheckpointException is no Exception.
                    error = f"{type(raised).__name__}: {raised}"
                found.append((f"{argument}={value}", time.monotonic() - begin, error))
                call(**right)
    return found


DIFFERENT: dict[str, dict[str, Any]] = {
    "Run": {
        **{"every": 7, "max_overhead": 0.5, "max_failures": 7, "keep_last": 7, "keep_every": 7},
        **{"keep_local": 7, "monitor": "loss", "mode": "max", "asynchronous": True},
        **{"on_busy": "skip", "on_failure": "warn", "verify": "full", "reuse": "off"},
        **{"local": None, "keep_for": "24h"},
    },
    "Run.save": {"step": 2},
    "Run.restore": {"step": None, "strict": True},
    "Run.step_at": {"time": "9998-01-01"},
    "Run.discard_after": {"step": 2},
}
"""Arguments that are right, if all ranks give them."""


def different_on(other: int, path: Path, name: str) -> list[tuple[str, float, str]]:
    """Makes a call with each different argument on one rank, and then the right one."""
    found = []
    with Run(path / "run", timeout_s=AMPLE_S) as run:
        run.save(2, state())
        run.save(1, state())
        call, right = calls_of(path, run)[name]
        for argument, value in DIFFERENT[name].items():
            begin, error = time.monotonic(), ""
            try:
                call(**{**right, argument: value} if dist.get_rank() == other else right)
            except ValueError as raised:
                error = str(raised)
            found.append((argument, time.monotonic() - begin, error))
            call(**right)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize("name", DIFFERENT)
def test_an_argument_that_differs_between_ranks_is_an_error_of_all_that_names_it(
    worlds: Worlds, tmp_path: Path, name: str, other: int
) -> None:
    for rank in worlds.run(2, different_on, other, tmp_path, name):
        for argument, seconds, error in rank:
            named = f"{argument} is given" if argument == "local" else argument
            assert f"{named}=" in error, (argument, error)
            assert "on rank 0, and" in error, error
            assert "on rank 1" in error, error
            assert seconds < AT_ONCE_S, (argument, seconds)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.thin(
    "Run-1",
    "Run without local-1",
    "installed-0",
    "Run.save-0",
    "Run.restore-1",
    "save-1",
    "async_save-0",
    "dcp.load-1",
)
@pytest.mark.parametrize("wrong_rank", [0, 1])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_on_one_rank_fails_the_call_on_all_at_once(
    worlds: Worlds, tmp_path: Path, name: str, wrong_rank: int
) -> None:
    ranks = worlds.run(2, wrong_on, wrong_rank, tmp_path, name)
    for here, there in zip(*ranks, strict=True):
        print(name, *here, *there[1:], sep=" | ")
    for rank in ranks:
        for argument, seconds, error in rank:
            assert error, f"{argument} is no error"
            assert seconds < AT_ONCE_S, (argument, seconds, error)
