"""Waits for futures. A long wait is logged with what it is for, and a forked child never waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from torch_ckpt.errors import CheckpointError
from torch_ckpt.process_state import PROCESS

__all__ = ["GRACE_S", "LOG_S", "LongWait", "OwnFuture", "no_thread", "result_of", "submitted"]

T = TypeVar("T")

_LOG = logging.getLogger("torch_ckpt")

LOG_S = 5.0
"""Seconds after which a wait is logged."""

GRACE_S = 5.0
"""Extra seconds after a deadline, in which the communication thread reports a specific error."""


class LongWait:
    """The duration of a wait, and its log line: a warning if the line names what is missing."""

    def __init__(self, level: int = logging.WARNING) -> None:
        self._began, self._level = time.monotonic(), level
        self._is_logged = False

    @property
    def waited_s(self) -> float:
        """Seconds since the begin of the wait."""
        return time.monotonic() - self._began

    def log(self, awaited: Callable[[], str]) -> None:
        """Logs, once and after :data:`LOG_S`, what the wait is for; nothing if that is empty."""
        if self._is_logged or self.waited_s < LOG_S:
            return
        self._is_logged = True
        if _LOG.isEnabledFor(self._level) and (text := awaited()):
            _LOG.log(self._level, "waiting for %s", text)


def result_of(
    future: Future[Any],
    awaited: Callable[[], str],
    *,
    timeout_s: float | None = None,
    is_named: bool = True,
) -> Any:
    """Returns the result of a future, or raises its error.

    ``awaited`` returns what the wait is for, for the log: a warning if it ``is_named``, because it
    names what is missing, and otherwise information. Raises TimeoutError after ``timeout_s``;
    ``None`` if another thread ends the wait in time.
    """
    wait = LongWait(logging.WARNING if is_named else logging.INFO)
    first_s = LOG_S if timeout_s is None else min(LOG_S, timeout_s)
    if not futures.wait([future], first_s).done:
        wait.log(awaited)
    remaining_s = None if timeout_s is None else max(timeout_s - wait.waited_s, 0.0)
    return future.result(remaining_s)


class OwnFuture(Future[T]):
    """A future of work of this process. In a forked child, it fails at once unless it is done."""

    def __init__(self) -> None:
        super().__init__()
        PROCESS.forkable.add(self)

    def after_fork(self) -> None:
        """Fails the child's copy: the thread that would complete it is the parent's."""
        self._condition = threading.Condition()  # A thread of the parent may hold the former one.
        self.__dict__.update(_done_callbacks=[])  # They would end what the parent still uses.
        if not self.done():
            text = (
                "this save belongs to the parent of this forked process, which alone completes it"
            )
            self.set_exception(CheckpointError(text))


def submitted(executor: Executor, function: Callable[..., T], *arguments: Any) -> OwnFuture[T]:
    """Calls a function in a thread of an executor.

    Raises CheckpointError if the system has no more threads.
    """
    future: OwnFuture[T] = OwnFuture()
    work = [(function, arguments)]

    def run() -> None:
        if not future.set_running_or_notify_cancel():
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
        # The executor has queued the work before it failed, and would run it later.
        future.cancel()
        work.clear()
        raise no_thread(reason)
    return future


def no_thread(reason: str) -> CheckpointError:
    """Returns the error of a background save whose thread cannot be started."""
    return CheckpointError(f"cannot start a thread for a background save: {reason}")
