"""Preemption: signals by which a scheduler announces that it will end the processes of a run."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

__all__ = ["Preemption"]

_CHECK_S = 1.0
"""Time between two exchanges of the ranks."""

_MOST_STEPS = 16
"""Steps between two exchanges at most, because the next steps may be slower."""

_Choice = tuple[float | None, int]


class _Decide(Protocol):
    def __call__(
        self,
        what: str,
        own: Callable[[], float | None],
        decide: Callable[[list[float | None]], _Choice],
    ) -> _Choice: ...


class Preemption:
    """Signals that a rank has received, and the decision of all ranks to end at a step.

    Signals arrive at the ranks at different times, and some at one rank only. So the ranks exchange
    whether any has received one: after every step, or about once per second if steps are shorter.

    Args:
        signals: The signals.
        grace_s: Seconds between a signal and the end of the process.
        state: Returns the state to save.
        is_alone: Whether there are no other ranks. Then every step is checked.
    """

    def __init__(
        self,
        signals: Sequence[int],
        grace_s: float,
        state: Callable[[], dict[str, Any]],
        *,
        is_alone: bool,
    ) -> None:
        self.signals, self.state = signals, state
        self._grace_s = grace_s
        self._most_steps = 1 if is_alone else _MOST_STEPS
        self.received: int | None = None
        """The signal that this rank has received first."""
        self._end = 0.0  # Then the process ends, on the monotonic clock.
        self._next: int | None = None  # The step after which the ranks exchange next.
        self._checked: tuple[int, float] | None = None  # The last such step, and its time.

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Records the signals within the block, instead of what they would do.

        If the block ends without an exception after a signal, the signal is sent again.

        Raises:
            ValueError: This is not the main thread, or a signal cannot be handled.
        """
        owner = os.getpid()
        before: dict[int, Any] = {}

        def receive(number: int, _: FrameType | None) -> None:
            if os.getpid() != owner:  # A forked child, such as a worker of a DataLoader.
                signal.signal(number, before[number])
                os.kill(os.getpid(), number)
            elif self.received is None:
                self.received, self._end = number, time.monotonic() + self._grace_s

        try:
            for number in self.signals:
                # A handler that C code has installed is unknown to Python.
                before[number] = signal.getsignal(number) or signal.SIG_DFL
                signal.signal(number, receive)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.received is not None:
            os.kill(os.getpid(), self.received)

    def left_s(self, step: int, decide: _Decide) -> float | None:
        """Returns the seconds until the first rank ends; ``None`` if no rank is about to.

        Args:
            step: The step that has ended, equal on all ranks.
            decide: Decides on the coordinator; see :meth:`Group.decide`.
        """
        if self._next is not None and step < self._next:
            return None
        left_s, self._next = decide(
            "checking for a signal", self._own_left_s, lambda each: self._choose(step, each)
        )
        return left_s

    def _own_left_s(self) -> float | None:
        return None if self.received is None else max(self._end - time.monotonic(), 0.0)

    def _choose(self, step: int, each: list[float | None]) -> _Choice:
        """Returns the least time that a rank has left, and the step of the next exchange."""
        now, steps = time.monotonic(), 1
        if self._checked is not None and step > self._checked[0]:
            step_s = (now - self._checked[1]) / (step - self._checked[0])
            steps = max(1, min(self._most_steps, int(_CHECK_S / max(step_s, 1e-6))))
        self._checked = step, now
        return min((left for left in each if left is not None), default=None), step + steps
