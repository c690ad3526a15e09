"""A wrong argument on one rank is an error of all ranks at once, and the next call works."""

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
        "Run.save": (run.save, {"step": 1, "state": state()}),
        "Run.restore": (run.restore, {"state": state(), "step": 1}),
        "Run.discard_after": (run.discard_after, {"step": 1}),
    }


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
    "Run.save": {
        "step": ["x", 1.5, 2.0, True, WRONG_VALUE],
        "state": [WRONG_TYPE],
        "persist": [False],
    },
    "Run.restore": {"state": [WRONG_TYPE], "step": ["x", 1.0, True, WRONG_VALUE]},
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


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.thin("Run.save-0", "Run.restore-1", "save-1", "async_save-0", "dcp.load-1")
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
