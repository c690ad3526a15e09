"""Freezes processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from waits import until

__all__ = ["freeze", "is_frozen"]


def freeze(pid: int) -> None:
    """Stops a process. Its threads may go on for a moment after the signal: this waits for them."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: is_frozen(pid))


def is_frozen(pid: int) -> bool:
    """Returns whether no thread of a process runs code any more.

    A thread within a long system call (D), such as fsync, stops when that returns. Those of the
    kernel's io_uring do not count.
    """
    try:
        states = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # A thread has just ended.
        return False
    own = [state for state in states if "(iou-" not in state]
    return not any(state.rpartition(")")[2].split()[0] in "RS" for state in own)
