"""Waits, for tests of the agent."""

from __future__ import annotations

import time
from collections.abc import Callable

SOON_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    """Returns once it holds."""
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)
