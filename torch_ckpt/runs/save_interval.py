"""The save interval: as short as a given share of training time allows.

Based on CheckFreq (Mohan, Phanishayee, Chidambaram, FAST '21): each save measures the cost of
saving during training, and the next interval follows from that cost.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch_ckpt.ladder.step_files import whole_number

__all__ = ["CostClock", "SaveCost", "SaveSchedule"]

_PROFILED_STEPS = 10
"""Number of steps before the first save; they measure the duration of a step."""


@dataclass(frozen=True)
class SaveCost:
    """The measured cost of one save on one rank.

    Training stopped for ``stopped_s``: a whole synchronous save, or the copy of an asynchronous
    one, plus the wait for the previous save. ``slowed_s`` is the total slowdown of the steps during
    an asynchronous save, which lasted ``busy_s`` in the background. ``step_s`` is the duration of a
    step with no save in progress.
    """

    stopped_s: float
    slowed_s: float
    busy_s: float
    step_s: float

    def interval(self, share: float) -> int:
        """Returns the number of steps, at least 1, after which the next save stays within a share.

        ``k`` steps and a save last ``k * step_s + cost``; ``cost`` may be at most ``share``, within
        (0, 1), of that sum. The interval is also long enough for the background save to end before
        the next.

        Example::

            assert SaveCost(stopped_s=1, slowed_s=0, busy_s=0, step_s=0.1).interval(0.05) == 190
        """
        step_s = max(self.step_s, 1e-6)
        cost_s = self.stopped_s + self.slowed_s
        steps = cost_s * (1 - share) / (share * step_s)
        # Rounding errors must not raise an exact whole number to the next.
        return max(1, math.ceil(steps - 1e-9), math.ceil(self.busy_s / step_s - 1e-9))


class SaveSchedule:
    """The next step to save, equal on all ranks without communication.

    The schedule depends only on facts that are equal on all ranks: the steps at which saves were
    attempted, and the intervals that the ranks agreed on. With ``every``, its multiples are saved,
    independently of the cost. Otherwise saves may cost ``share``, within (0, 1), of the time of
    training and saving together.

    Example::

        schedule = SaveSchedule(None, 0.035)
        if schedule.is_due(step, during_save=False):
            schedule.attempted(step)
    """

    def __init__(self, every: int | None, share: float) -> None:
        if every is not None and whole_number("every", every) < 1:
            raise ValueError(f"{every=} is not positive")
        if not 0 < share < 1:
            raise ValueError(f"max_overhead={share} is not between 0 and 1")
        self.clock = CostClock()
        self._every, self._share = every, share
        self._interval = _PROFILED_STEPS
        self._next: int | None = None
        self._attempted: int | None = None
        self._before: tuple[int | None, int | None] = None, None  # The last attempt.

    def is_due(self, step: int, *, during_save: bool) -> bool:
        """Returns whether to save a step. Called once at the end of each step."""
        self.clock.step_ended(step, during_save=during_save)
        if self._every is not None:
            return step % self._every == 0 and step != self._attempted
        if self._next is None:
            self._next = step + self._interval
        return step >= self._next

    def attempted(self, step: int | None) -> None:
        """Schedules the next save one interval later; called when a save begins or is skipped.

        ``step`` is ``None`` if this rank refuses it.
        """
        self._before = self._attempted, self._next
        if step is None:
            return
        self._attempted, self._next = step, step + self._interval

    @contextlib.contextmanager
    def unless_refused(self) -> Iterator[None]:
        """Undoes the last attempt if all ranks refuse its arguments within the block.

        One rank has not even attempted it, so their schedules would differ from then on.
        """
        try:
            yield
        except (TypeError, ValueError):
            self._attempted, self._next = self._before
            raise

    def own_interval(self, step: int, stopped_s: float) -> int:
        """Returns the interval that this rank needs; called when training resumes after a save."""
        return self.clock.saved(step, stopped_s).interval(self._share)

    def agreed(self, step: int, interval: int) -> None:
        """Sets the interval that all ranks agreed on after the save of a step."""
        self._interval, self._next = interval, step + interval

    def restored(self, step: int) -> None:
        """Schedules the next save after the state of a step was restored."""
        self._attempted, self._next = step, step + self._interval


class CostClock:
    """Measures steps and saves on one rank. Owned by the thread that trains.

    A step lasts from one call of :meth:`step_ended` to the next, excluding a save in between.
    Evaluation and logging are part of the step.

    Example::

        clock.step_ended(7, during_save=False)
        cost = clock.saved(7, 0.3)
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._free_s = self._during_save_s = 0.0
        self._free_steps = self._steps_during_save = 0
        self._step_s = 0.0
        self._busy_s = 0.0

    def step_ended(self, step: int, *, during_save: bool) -> None:
        """Records the end of a step. ``during_save``: whether a background save is in progress."""
        now = time.monotonic()
        if self._last is not None and step > self._last[0]:
            steps, seconds = step - self._last[0], now - self._last[1]
            if during_save:
                self._steps_during_save += steps
                self._during_save_s += seconds
            else:
                self._free_steps += steps
                self._free_s += seconds
        self._last = step, now

    def background_save_ended(self, busy_s: float) -> None:
        """Records the duration of a background save."""
        self._busy_s = busy_s

    def saved(self, step: int, stopped_s: float) -> SaveCost:
        """Returns the cost of a save and restarts the measurement; called when training resumes.

        Training stopped for ``stopped_s``. The background times are those of the previous save.
        """
        if self._free_steps:
            self._step_s = self._free_s / self._free_steps
        elif self._steps_during_save:  # A save was in progress during every step.
            self._step_s = self._during_save_s / self._steps_during_save
        slowed_s = max(0.0, self._during_save_s - self._steps_during_save * self._step_s)
        self._free_s = self._during_save_s = 0.0
        self._free_steps = self._steps_during_save = 0
        self._last = step, time.monotonic()
        return SaveCost(stopped_s, slowed_s, self._busy_s, self._step_s)
