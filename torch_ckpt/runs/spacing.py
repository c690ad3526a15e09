"""Spacing: decides after which steps the ranks check for an event, about once per second."""

from __future__ import annotations

import time

__all__ = ["MOST_STEPS", "Spacing"]

_CHECK_S = 1.0
"""Time between two checks."""

MOST_STEPS = 16
"""Maximum number of steps between two checks, because the next steps may be slower."""


class Spacing:
    """The steps after which all ranks make a check that needs an exchange.

    A check is due after every step, or after at most ``most_steps`` steps if these take less than a
    second. Times differ between ranks, so one rank decides :meth:`steps` for all.

    Example::

        spacing = Spacing()
        if spacing.is_due(step):
            spacing.checked(step, decided(lambda: spacing.steps(step)))
    """

    def __init__(self, most_steps: int = MOST_STEPS) -> None:
        self._most_steps = most_steps
        self._next = 0  # The step after which the next check is due.
        self._last: tuple[int, float] | None = None  # The step of the last check, and its time.

    def is_due(self, step: int) -> bool:
        """Returns whether to check after this step, the same on all ranks."""
        # After a step below the last check, the run has gone back.
        return self._last is None or not self._last[0] <= step < self._next

    def steps(self, step: int) -> int:
        """Returns how many steps after this one take about a second, on this rank."""
        if self._last is None or step <= self._last[0]:
            return 1
        step_s = (time.monotonic() - self._last[1]) / (step - self._last[0])
        return max(1, min(self._most_steps, int(_CHECK_S / max(step_s, 1e-6))))

    def checked(self, step: int, steps: int) -> None:
        """Records that all ranks have checked after this step. The next follows ``steps`` later."""
        self._next, self._last = step + steps, (step, time.monotonic())
