"""Waits for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

SOON_S = 30.0


def until(condition: Callable[[], bool], timeout_s: float = SOON_S) -> None:
    """Returns once a condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.02)


def until_committed(path: Path) -> None:
    """Returns once a checkpoint is at a path."""
    until((path / ".metadata").exists, 2 * SOON_S)
