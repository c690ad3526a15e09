"""How often to save: as often as a stated share of training time allows.

After CheckFreq (Mohan, Phanishayee, Chidambaram, FAST '21): what a save costs is measured while
training goes on, the interval follows from that, and each further save tunes it anew.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

__all__ = ["CostClock", "SaveCost", "SaveSchedule"]

_PROFILED_STEPS = 10
"""Steps before the first save, whose cost nobody knows: so many tell how long a step takes."""


@dataclass(frozen=True)
class SaveCost:
    """What one save costs a rank, and what it is measured by.

    Attributes:
        stopped_s: For how long training stood still, in seconds: a synchronous save from its
            beginning to its end, the copy of an asynchronous one, and waiting for the one before.
        slowed_s: By how much the steps beside an asynchronous save were slower than others, in
            seconds, all of them together.
        busy_s: How long an asynchronous save went on in the background, in seconds.
        step_s: How long a step takes beside which nothing is saved, in seconds.
    """

    stopped_s: float
    slowed_s: float
    busy_s: float
    step_s: float

    def interval(self, share: float) -> int:
        """After how many steps the next save costs no more than a share of the time.

        ``k`` steps and a save take ``k * step_s + cost``, of which ``cost`` is to be at most
        ``share``. A save in the background is to be over when the next one begins.

        Args:
            share: Of the time of training and saving together; within (0, 1).

        Example::

            assert SaveCost(stopped_s=1, slowed_s=0, busy_s=0, step_s=0.1).interval(0.05) == 190
        """
        step_s = max(self.step_s, 1e-6)
        cost_s = self.stopped_s + self.slowed_s
        steps = cost_s * (1 - share) / (share * step_s)
        # The product of rounded numbers may exceed a whole one by nothing.
        return max(1, math.ceil(steps - 1e-9), math.ceil(self.busy_s / step_s - 1e-9))


class SaveSchedule:
    """The step to save next, which is the same on all ranks without a word between them.

    What changes it is known to all of them: which steps were tried to be saved, and the intervals
    that they have agreed on.

    Args:
        every: Save each step that is a multiple of it, whatever saves cost.
        share: Of the time of training and saving together, for the cost of saves; within (0, 1).

    Example::

        schedule = SaveSchedule(None, 0.035)
        if schedule.is_due(step, beside_a_save=False):
            schedule.tried(step)
    """

    def __init__(self, every: int | None, share: float) -> None:
        self.clock = CostClock()
        self._every, self._share = every, share
        self._interval = _PROFILED_STEPS
        self._next: int | None = None
        self._tried: int | None = None

    def is_due(self, step: int, *, beside_a_save: bool) -> bool:
        """Called once when a step is done; says whether it is to be saved."""
        self.clock.step_ends(step, beside_a_save=beside_a_save)
        if self._every is not None:
            return step % self._every == 0 and step != self._tried
        if self._next is None:
            self._next = step + self._interval
        return step >= self._next

    def tried(self, step: int) -> None:
        """Called when a save of a step begins or is skipped: the next comes an interval later."""
        self._tried, self._next = step, step + self._interval

    def own_interval(self, step: int, stopped_s: float) -> int:
        """The interval that this rank needs, called when training goes on after a save."""
        return self.clock.saved(step, stopped_s).interval(self._share)

    def agreed(self, step: int, interval: int) -> None:
        """Called with what all ranks have agreed on after the save of a step."""
        self._interval, self._next = interval, step + interval

    def restored(self, step: int) -> None:
        """Called when training goes on from a checkpoint."""
        self._tried, self._next = step, step + self._interval


class CostClock:
    """Measures steps and saves on one rank. Owned by the thread that trains.

    A step lasts from one call of :meth:`step_ends` to the next, without the time of a save between
    them. Evaluation and logging are part of the step that they belong to.

    Example::

        clock.step_ends(7, beside_a_save=False)
        with_saving = clock.saved(0.3)
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._free_s = self._beside_s = 0.0
        self._free_steps = self._beside_steps = 0
        self._step_s = 0.0
        self._busy_s = 0.0

    def step_ends(self, step: int, *, beside_a_save: bool) -> None:
        """Called once when a step is done.

        Args:
            step: How many are done.
            beside_a_save: Whether a save goes on in the background.
        """
        now = time.monotonic()
        if self._last is not None and step > self._last[0]:
            steps, seconds = step - self._last[0], now - self._last[1]
            if beside_a_save:
                self._beside_steps += steps
                self._beside_s += seconds
            else:
                self._free_steps += steps
                self._free_s += seconds
        self._last = step, now

    def ended_in_background(self, busy_s: float) -> None:
        """Called when a save in the background is over, which took so long."""
        self._busy_s = busy_s

    def saved(self, step: int, stopped_s: float) -> SaveCost:
        """Called when training goes on after a save; begins to measure anew.

        Args:
            step: How many steps are done.
            stopped_s: For how long training stood still.

        Returns:
            The cost of a save by this one and, of one in the background, the one before.
        """
        if self._free_steps:
            self._step_s = self._free_s / self._free_steps
        elif self._beside_steps:  # All of them: how fast they would be otherwise, nobody knows.
            self._step_s = self._beside_s / self._beside_steps
        slowed_s = max(0.0, self._beside_s - self._beside_steps * self._step_s)
        self._free_s = self._beside_s = 0.0
        self._free_steps = self._beside_steps = 0
        self._last = step, time.monotonic()
        return SaveCost(stopped_s, slowed_s, self._busy_s, self._step_s)
