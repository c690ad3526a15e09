"""Waits. A long wait is logged with its reason, and a forked child never waits."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Executor, Future
from numbers import Real
from typing import Any, TypeVar

from torch_ckpt.errors import CheckpointError
from torch_ckpt.process_state import PROCESS
from torch_ckpt.records.figures import seconds_text

__all__ = [
    "GRACE_S",
    "LOG_S",
    "LongWait",
    "OwnFuture",
    "duration",
    "no_thread",
    "result_of",
    "submitted",
]

T = TypeVar("T")

_LOG = logging.getLogger("torch_ckpt")

LOG_S = 5.0
"""Seconds after which a wait is logged for the first time."""

_LOG_AGAIN_S = 60.0, 300.0, 900.0
"""Seconds after which it is logged again. The last value is also the interval of later lines."""

_MOST_S = 1e9  # Decades. Waits of the system overflow beyond some centuries.

_SIGNAL_POLL_S = 0.5  # Interval at which a wait checks whether a signal ends the process.

_SIGNAL_GRACE_S = 0.5
"""Extra seconds of a wait that a signal ends: the error of another deadline is more specific."""

GRACE_S = 5.0
"""Extra seconds after a deadline, in which the communication thread reports a specific error."""


class LongWait:
    """A wait, which is logged after 5 s, after 1, 5 and 15 minutes, and every 15 minutes.

    ``awaited`` returns the reason of the wait: a rank or process, and its activity; if empty, no
    line is logged yet. If ``is_named``, the line names what is missing and is a warning, otherwise
    it is informational. ``waited_s`` is how long the wait has lasted. Every wait that may take long
    is a loop over :meth:`rounds`, or calls :meth:`log` in a loop. A wait within a call of the
    operating system or a store is logged by :mod:`torch_ckpt.coordination.storage_watch`.

    Example::

        for pause_s in LongWait(lambda: "rank 3, which is writing").rounds(timeout_s):
            if changed.wait(pause_s):
                break
        else:
            raise CheckpointError("rank 3 did not finish in time")
    """

    def __init__(
        self, awaited: Callable[[], str], *, is_named: bool = True, waited_s: float = 0.0
    ) -> None:
        self._awaited = awaited
        self._level = logging.WARNING if is_named else logging.INFO
        self._began = time.monotonic() - waited_s
        self._due = 0.0  # Seconds of the wait after which the next line is due.
        self._plan()

    @property
    def waited_s(self) -> float:
        """Seconds since the begin of the wait."""
        return time.monotonic() - self._began

    def log(self) -> None:
        """Logs the reason of the wait, if a line is due."""
        waited_s = self.waited_s
        if waited_s < self._due:
            return
        if _LOG.isEnabledFor(self._level):
            text = self._awaited()
            if not text:
                return
            _LOG.log(self._level, "waiting for %s (%s so far)", text, seconds_text(waited_s))
        while self._due <= waited_s:
            self._plan()

    def rounds(
        self,
        timeout_s: float = math.inf,
        poll_s: float = math.inf,
        *,
        ends_on_signal: bool = False,
    ) -> Iterator[float]:
        """Yields how many seconds to wait next, at most ``poll_s``, and logs between.

        Ends ``timeout_s`` from now. With ``ends_on_signal``, it also ends when the time that a
        signal left to the process is over (``runs/preemption``), even if the signal arrives during
        the wait. Yields at least once, so that a wait of 0 s checks once. A part of the wait that
        has a shorter limit may call ``rounds`` within a round.
        """
        end_s, preemption, left_s = self.waited_s + timeout_s, None, math.inf
        while True:
            waited_s = self.waited_s
            due_s = self._due - waited_s
            pause_s = min(due_s if due_s > 0 else LOG_S, poll_s, end_s - waited_s)
            preemption = PROCESS.preemption or preemption  # The block may end while a thread waits.
            if ends_on_signal and preemption is not None:
                left_s = preemption.ends_at + _SIGNAL_GRACE_S - time.monotonic()
                pause_s = min(pause_s, _SIGNAL_POLL_S, left_s)
            yield max(pause_s, 0.0)
            self.log()
            if self.waited_s >= end_s or left_s <= 0:
                return

    def _plan(self) -> None:
        """Plans the next line."""
        later = [after for after in (LOG_S, *_LOG_AGAIN_S) if after > self._due]
        self._due = later[0] if later else self._due + _LOG_AGAIN_S[-1]


def result_of(
    future: Future[Any],
    awaited: Callable[[], str],
    *,
    timeout_s: float | None = None,
    is_named: bool = True,
) -> Any:
    """Returns the result of a future, or raises its error. Logs a long wait (:class:`LongWait`).

    Raises TimeoutError after ``timeout_s``, or earlier if a signal ends the process. Pass ``None``
    if another thread ends the wait in time.
    """
    limit_s = math.inf if timeout_s is None else timeout_s
    waiting = LongWait(awaited, is_named=is_named)
    for pause_s in waiting.rounds(limit_s, ends_on_signal=True):
        if futures.wait([future], pause_s).done:
            return future.result(0)
    waited = f"waited {waiting.waited_s:.1f} s for {awaited()}"
    ends = "a signal ends this process, which has " if waiting.waited_s < limit_s else ""
    raise TimeoutError(ends + waited)


class OwnFuture(Future[T]):
    """A future of work in this process. In a forked child, it fails immediately unless it is done.

    A long wait for it is logged: ``awaited`` returns the reason; see :class:`LongWait`.
    """

    def __init__(
        self, awaited: Callable[[], str] = lambda: "a background save", *, is_named: bool = True
    ) -> None:
        super().__init__()
        self.awaited, self.is_named = awaited, is_named
        PROCESS.forkable.add(self)

    def has_ended(self, timeout_s: float = math.inf) -> bool:
        """Waits until the work has ended; returns whether it did within ``timeout_s``.

        With a limit, the wait also ends if a signal ends the process earlier.
        """
        if not self.done():
            waiting = LongWait(self.awaited, is_named=self.is_named)
            for pause_s in waiting.rounds(timeout_s, ends_on_signal=timeout_s < math.inf):
                if futures.wait([self], pause_s).done:
                    break
        return self.done()

    def result(self, timeout: float | None = None) -> T:
        """Returns the result, or raises the error; TimeoutError after ``timeout``."""
        self.has_ended(math.inf if timeout is None else timeout)
        try:
            return super().result(0)
        finally:
            del self  # The error of the future has a traceback that refers to this frame.

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the error, or ``None``; raises TimeoutError after ``timeout``."""
        self.has_ended(math.inf if timeout is None else timeout)
        return super().exception(0)

    def after_fork(self) -> None:
        """Fails the child's copy: only the parent has the thread that would complete it."""
        self._condition = threading.Condition()  # A thread of the parent may hold the old one.
        self.__dict__.update(_done_callbacks=[])  # They would release resources of the parent.
        if not self.done():
            text = (
                "this work belongs to the parent of this forked process, which alone completes it"
            )
            self.set_exception(CheckpointError(text))


def submitted(
    executor: Executor,
    function: Callable[..., T],
    *arguments: Any,
    future: OwnFuture[T],
) -> OwnFuture[T]:
    """Calls a function in a thread of an executor, and returns a future of the result.

    Raises CheckpointError if the system has no more threads.
    """
    work = [(function, arguments)]

    def run() -> None:
        if not work or not (future.running() or future.set_running_or_notify_cancel()):
            return
        function, arguments = work.pop()
        try:
            result = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    reason = ""
    try:
        executor.submit(run)
    except RuntimeError as error:
        reason = str(error)  # The error itself would keep the arguments alive.
    if reason:
        # The executor queued the work before it failed, and would run it later.
        future.cancel()
        work.clear()
        raise no_thread(reason)
    return future


def no_thread(reason: str) -> CheckpointError:
    """Returns the error of a background save or load whose thread cannot be started."""
    return CheckpointError(f"cannot start a thread for a background save or load: {reason}")


def duration(name: str, seconds: object) -> float:
    """Returns an argument that is a number of seconds, as every wait of the system accepts it.

    Raises ValueError, which names the argument, unless it is a positive number, and finite.
    """
    with contextlib.suppress(OverflowError):  # An integer of hundreds of digits.
        if isinstance(seconds, Real) and math.isfinite(seconds) and float(seconds) > 0:
            return min(float(seconds), _MOST_S)
    raise ValueError(f"{name}={seconds!r} is not a positive number of seconds")
