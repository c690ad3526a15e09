"""Shared memory for tests of the agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

__all__ = ["SOON_S", "own_memory", "until"]

SOON_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    """Returns once it holds."""
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


def own_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Has agents use memory of their own, and end with it."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="torch_ckpt-test-"))
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(folder))
    yield folder
    for lock in folder.glob("*/*/agent.lock"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(lock.read_text()), signal.SIGKILL)
    shutil.rmtree(folder)
