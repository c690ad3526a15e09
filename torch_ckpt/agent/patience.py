"""How long an agent waits for those of other machines."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Patience"]

HURRY_S = 30.0
"""For how long an agent that has to go on waits for others."""

_SHORTEST_S, _LONGEST_S = 0.02, 0.5


class Patience:
    """How long to wait for other machines.

    Args:
        timeout_s: Seconds.
        is_hurried: Whether, from now on, only for a moment.
    """

    def __init__(self, timeout_s: float, is_hurried: Callable[[], bool]) -> None:
        self.timeout_s = timeout_s
        self._is_hurried = is_hurried
        self.restart()

    def extend(self, seconds: float) -> None:
        """Does not count what was no waiting."""
        self._deadline += seconds

    def restart(self) -> None:
        """Begins to wait."""
        self._since = time.monotonic()
        self._deadline = self._since + self.timeout_s
        self._in_hurry = False
        self._pause_s = _SHORTEST_S

    @property
    def is_over(self) -> bool:
        """Whether it has been long enough."""
        if not self._in_hurry and self._is_hurried():
            self._in_hurry = True
            self._deadline = min(self._deadline, time.monotonic() + HURRY_S)
        return time.monotonic() > self._deadline

    @property
    def in_hurry(self) -> bool:
        """Whether it was cut short."""
        return self._in_hurry

    def pause(self) -> None:
        """Sleeps, longer each time."""
        time.sleep(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, _LONGEST_S)

    def __str__(self) -> str:
        return f"{time.monotonic() - self._since:.0f} s"
