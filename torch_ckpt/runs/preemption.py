"""Preemption: signals by which a scheduler announces that it will end the processes of a run."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from torch_ckpt.coordination.group import Group
from torch_ckpt.coordination.waiting import duration
from torch_ckpt.process_state import PROCESS
from torch_ckpt.runs.spacing import MOST_STEPS, Spacing

__all__ = ["Preemption"]

_LEAST_S = 1.0
"""Minimum time for the save, because the process may live longer than announced."""

_Signal = tuple[float, int]
"""The seconds that a rank has left, and the signal that it has received."""


class Preemption:
    """The signals that a rank has received, and the decision of all ranks to end at a step.

    Signals arrive at the ranks at different times, and some at one rank only. So the ranks exchange
    whether any has received one: after every step, or after at most 16 steps if these take less
    than a second. Without other ranks (``is_alone``), every step is checked. ``grace_s`` is the
    time between a signal and the end of the process; ValueError unless it is positive. ``state``
    returns the state to save.
    """

    def __init__(
        self,
        signals: Sequence[int],
        grace_s: float,
        state: Callable[[], dict[str, Any]],
        *,
        is_alone: bool,
    ) -> None:
        self.state = state
        self._signals = signals
        self._grace_s = duration("grace_s", grace_s)
        self._spacing = Spacing(1 if is_alone else MOST_STEPS)
        self.received: int | None = None
        """The first signal that this rank received, or the signal on which the ranks agreed."""
        self.has_ended = False
        """Whether :meth:`end` was called."""
        self.ends_at = math.inf
        """The time at which the process is killed, by the monotonic clock."""

    def __str__(self) -> str:
        return "" if self.received is None else signal.Signals(self.received).name

    @property
    def left_s(self) -> float:
        """The seconds until the process is killed, but at least a moment."""
        return max(self.ends_at - time.monotonic(), 0.1)

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Records the signals within the block, instead of their usual effect.

        If the block ends after a signal, but not by :meth:`end`, the signal is sent again. Raises
        RuntimeError if another ``Preemption`` catches signals, and ValueError if this is not the
        main thread, or a signal cannot be handled.
        """
        if PROCESS.preemption is not None:
            raise RuntimeError(
                "saving_on_signal() is in use already: after a signal, the process ends when one "
                "run has saved; enter the block of one run only, and save other runs after it"
            )
        owner = os.getpid()
        before: dict[int, Any] = {}

        def receive(number: int, _: FrameType | None) -> None:
            # In a forked child, such as a DataLoader worker, or if the program has reinstalled this
            # handler after the block.
            if os.getpid() != owner or PROCESS.preemption is not self:
                signal.signal(number, before[number])
                os.kill(os.getpid(), number)
            elif self.received is None:
                self.received, self.ends_at = number, time.monotonic() + self._grace_s

        try:
            PROCESS.preemption = self
            for number in dict.fromkeys(self._signals):
                # Python does not know handlers installed by C code.
                handler = signal.getsignal(number) or signal.SIG_DFL
                try:
                    signal.signal(number, receive)
                except OSError as error:
                    name = signal.Signals(number).name
                    raise ValueError(f"{name} cannot be handled: {error.strerror}") from error
                before[number] = handler
            yield
        finally:
            PROCESS.preemption = None
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.received is not None and not self.has_ended and os.getpid() == owner:
                os.kill(owner, self.received)

    def is_due(self, step: int | None) -> bool:
        """Returns whether the ranks must :meth:`check` after this step, the same on all ranks.

        ``step`` is the step that has ended, equal on all ranks; ``None`` before the first.
        """
        return self._spacing.is_due(-1 if step is None else step)

    def check(self, step: int | None, group: Group, timeout_s: float) -> bool:
        """Returns whether any rank has received a signal, the same on all ranks.

        All ranks call it. This rank waits for the others for ``timeout_s``, or less if it has less
        time.
        """
        step = -1 if step is None else step

        def choose(each: list[_Signal | None]) -> tuple[_Signal | None, int]:
            least = min((signal for signal in each if signal is not None), default=None)
            return least, self._spacing.steps(step)

        chosen, steps = group.decide(
            "checking for a signal",
            lambda: None if self.received is None else (self.left_s, self.received),
            choose,
            timeout_s=min(timeout_s, self.left_s),
        )
        self._spacing.checked(step, steps)
        if chosen is None:
            return False
        left_s, self.received = chosen
        self.ends_at = time.monotonic() + max(left_s, _LEAST_S)
        return True

    def end(self) -> NoReturn:
        """Ends the process by SystemExit, with the status of a process that the signal ended."""
        assert self.received is not None
        self.has_ended = True
        raise SystemExit(128 + self.received)
