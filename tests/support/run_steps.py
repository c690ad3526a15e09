"""What tests of runs share: the steps on disk, warnings, and removals that are killed."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

from torch_ckpt.filesystems.location import Location
from torch_ckpt.runs.step_directories import StepDirectories

__all__ = ["removes_until_killed", "steps_in", "warned"]


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in directory.glob("step-*"))


def warned(work: Callable[[], object]) -> list[str]:
    """The warnings of a piece of work."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    messages = [str(found.message) for found in caught if found.category is UserWarning]
    return [message for message in messages if "torch.distributed" not in message]


def removes_until_killed(directory: Path, count: int) -> int:
    """Forks a process that removes steps, and is killed before it has deleted ``count`` files."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left, remove = count, Location.remove

    def kill(location: Location) -> None:
        nonlocal left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        remove(location)

    try:
        Location.remove = kill  # type: ignore[assignment,method-assign]
        StepDirectories(Location(directory)).retain(3, last=1, every=None)
    finally:
        os._exit(1)
