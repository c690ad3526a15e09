"""Runs: saved and restored steps, steps on disk, warnings, and removals that are killed."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_ckpt import Run
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories

__all__ = [
    "CHANGES",
    "data_file",
    "names_in_run",
    "removes_until_killed",
    "restored",
    "save_steps",
    "state_of",
    "steps_in",
    "warned",
]

CHANGES = ("rename", "sync", "remove")
"""The calls with which a removal changes files."""


def names_in_run(directory: Path) -> list[str]:
    """What the directory of a run has, sorted, without the record, which appears a little later.

    And without its newest term, and the announcements of removals that were killed, which remain
    for five minutes.
    """
    others = ("events.", ".pending-", "term-")
    return sorted(name for name in os.listdir(directory) if not name.startswith(others))


def state_of(step: int, numel: int = 5000) -> dict[str, Any]:
    """A state whose values differ between steps."""
    return {"w": torch.full((numel,), float(step)), "step": step}


def save_steps(directory: Path, *steps: int, **options: Any) -> Run:
    """Saves steps by a run with these options, which it returns."""
    run = Run(directory, **options)
    for step in steps:
        assert run.save(step, state_of(step))
    return run


def restored(run: Run, **options: Any) -> int | None:
    """The step that a run restores, with the values of that step, or with no value changed."""
    state = state_of(-1)
    step = run.restore(state, **options)
    expected = state_of(-1 if step is None else step)
    assert torch.equal(state["w"], expected["w"])
    assert state["step"] == expected["step"]
    return step


def data_file(directory: Path, step: int) -> Path:
    """The only data file of a step."""
    [path] = (directory / f"step-{step}").glob("*.distcp")
    return path


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in directory.glob("step-*"))


def warned(work: Callable[[], object]) -> list[str]:
    """The warnings of a piece of work."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    messages = [str(found.message) for found in caught if found.category is UserWarning]
    return [message for message in messages if "torch.distributed" not in message]


def removes_until_killed(directory: Path, count: int, calls: Sequence[str] = ("remove",)) -> int:
    """Forks a process that retains step 3 alone, and is killed before one of its calls.

    Args:
        directory: Directory of the run.
        count: Number of calls before the kill.
        calls: Names of the methods of ``Location`` that count.

    Returns:
        The exit code of the process; 1 if it has ended before.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = count

    def killed_before(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Location) -> None:
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            method(*arguments)

        return call

    try:
        for name in calls:
            setattr(Location, name, killed_before(getattr(Location, name)))
        Retention(keep_last=1).apply(StepDirectories(Location(directory)), 3)
    finally:
        os._exit(1)
