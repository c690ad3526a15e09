"""Exclusive: for objects that only one call of one process may use at a time.

A call in another thread waits. A call in the same thread cannot wait: a signal handler has
interrupted the first call, which continues only after the handler. A forked child may not use an
object of its parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError

__all__ = ["Exclusive", "exclusive", "has_ended"]

_POLL_S = 0.01  # Interval at which a wait checks whether the other use has ended.

M = TypeVar("M", bound=Callable[..., Any])


class _Group(Protocol):
    def method(self, activity: str, timeout_s: float) -> AbstractContextManager[None]: ...


def has_ended(frame: FrameType) -> bool:
    """Returns whether a function call has ended, by a return or by an exception.

    An interrupt may leave a function between any two instructions, so a flag set by the function is
    unreliable. The state of its frame is reliable.
    """
    try:
        frame.clear()  # Raises while the frame executes. Otherwise, frees its variables.
    except RuntimeError:
        return False
    return True


class _Use(AbstractContextManager[None]):
    """One use of an object, by a function call that is in progress."""

    def __init__(self, of: Exclusive, by: FrameType, activity: str, timeout_s: float) -> None:
        self._of, self._activity, self._timeout_s = of, activity, timeout_s
        self.by, self.thread = by, threading.get_ident()

    def __enter__(self) -> None:
        self._of._begin(self, self._activity, self._timeout_s)

    def __exit__(self, *_: object) -> None:
        self._of._end(self)


class Exclusive:
    """Exclusive use of an object. Its name is for messages.

    A use ends with its block, and at the latest with the function that contains the block. So an
    interrupt at any moment leaves no lock behind.

    Example::

        exclusive = Exclusive("the run")
        with exclusive.use("save step 100", timeout_s=600):
            ...
    """

    def __init__(self, name: str) -> None:
        self._name, self._pid = name, os.getpid()
        # The first use that has not ended owns the object, and the others wait.
        self._uses: list[_Use] = []

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that created the object."""
        return os.getpid() != self._pid

    def check(self, activity: str) -> None:
        """Raises CheckpointError if :meth:`use` would refuse this thread or process immediately."""
        if self.is_forked:
            raise CheckpointError(
                f"cannot {activity}: {self._name} belongs to process {self._pid}, of which this "
                "process is a forked child"
            )
        thread = threading.get_ident()
        if any(use.thread == thread and not has_ended(use.by) for use in list(self._uses)):
            raise CheckpointError(
                f"cannot {activity}: {self._name} is in use by a call in this thread, which a "
                "signal handler has interrupted. Set a flag in the handler, and save after the step"
            )

    def use(self, activity: str, timeout_s: float) -> AbstractContextManager[None]:
        """Waits until no other thread uses the object, then runs the block with exclusive use.

        The block must not ``yield``. The activity is for messages, such as ``"save step 100"``.
        Raises CheckpointError if this thread already uses the object, if another thread still uses
        it after the timeout, or if this process is a forked child.
        """
        return _Use(self, sys._getframe(1), activity, timeout_s)

    def use_by_all(
        self, activity: str, group: _Group, timeout_s: float
    ) -> AbstractContextManager[None]:
        """Like :meth:`use`, for a block that all ranks of a group enter (``Group.method``)."""
        use = _Use(self, sys._getframe(1), activity, timeout_s)
        return self._used_by_all(use, activity, group, timeout_s)

    @contextlib.contextmanager
    def _used_by_all(
        self, use: _Use, activity: str, group: _Group, timeout_s: float
    ) -> Iterator[None]:
        self.check(activity)  # A refused call must not consume a number.
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(use)
            except BaseException:
                with group.method(activity, timeout_s):
                    raise
            stack.enter_context(group.method(activity, timeout_s))
            yield

    def _begin(self, use: _Use, activity: str, timeout_s: float) -> None:
        self.check(activity)
        self._uses.append(use)
        if self._first() is use:
            return
        waiting = LongWait(lambda: f"another thread, which uses {self._name}, to {activity}")
        for pause_s in waiting.rounds(timeout_s, _POLL_S, ends_on_signal=True):
            if self._first() is use:
                return
            time.sleep(pause_s)
        self._end(use)
        seconds = min(timeout_s, round(waiting.waited_s, 1))
        raise CheckpointError(
            f"cannot {activity}: another thread used {self._name} for {seconds:g} s"
        )

    def _end(self, use: _Use) -> None:
        with contextlib.suppress(ValueError):  # Another thread has already removed it.
            self._uses.remove(use)

    def _first(self) -> _Use | None:
        """Returns the use in progress. Removes earlier ones, whose functions have ended."""
        for use in list(self._uses):
            if not has_ended(use.by):
                return use
            self._end(use)
        return None


def exclusive(activity: str) -> Callable[[M], M]:
    """Makes a method use its object exclusively. The activity is for messages.

    The object must have the attributes ``_exclusive`` (an :class:`Exclusive`), ``_group`` (a group
    of ranks) and ``timeout_s``. All ranks call the method. If it raises on one rank, it fails on
    all ranks (``Group.method``).
    """

    def decorate(method: M) -> M:
        @functools.wraps(method)
        def exclusively(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._exclusive.use_by_all(activity, self._group, self.timeout_s):
                return method(self, *args, **kwargs)

        return cast(M, exclusively)

    return decorate
