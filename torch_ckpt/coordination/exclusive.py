"""Exclusive: one rule for objects that only one call of one process may use at a time.

A call in another thread waits. A call in the same thread cannot wait: a signal handler has
interrupted the first call, which continues only after the handler. A forked child may not use an
object of its parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError

__all__ = ["Exclusive", "exclusive"]

M = TypeVar("M", bound=Callable[..., Any])


class _Group(Protocol):
    def method(self, activity: str, timeout_s: float) -> AbstractContextManager[None]: ...


class Exclusive:
    """Exclusive use of an object, which has a name for messages.

    Example::

        exclusive = Exclusive("the run")
        with exclusive.use("save step 100", timeout_s=600):
            ...
    """

    def __init__(self, name: str) -> None:
        self._name, self._pid = name, os.getpid()
        self._lock = threading.Lock()
        self._threads: set[int] = set()  # The threads that use the object, or wait for it.

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that has made the object."""
        return os.getpid() != self._pid

    def check(self, activity: str) -> None:
        """Raises CheckpointError if :meth:`use` would refuse this thread or process at once."""
        if self.is_forked:
            raise CheckpointError(
                f"cannot {activity}: {self._name} belongs to process {self._pid}, of which this "
                "process is a forked child"
            )
        if threading.get_ident() in self._threads:
            raise CheckpointError(
                f"cannot {activity}: {self._name} is in use by a call in this thread, which a "
                "signal handler has interrupted. Set a flag in the handler, and save after the step"
            )

    @contextlib.contextmanager
    def use(self, activity: str, timeout_s: float) -> Iterator[None]:
        """Waits until no other thread uses the object, which is then used within the block.

        The activity is for messages, such as ``"save step 100"``. Raises CheckpointError if this
        thread uses the object already, if another thread used it until the timeout, or if this
        process is a forked child.
        """
        self.check(activity)
        thread = threading.get_ident()
        self._threads.add(thread)  # Before the lock, so that a signal handler always finds it.
        try:
            used = LongWait(lambda: f"another thread, which uses {self._name}, to {activity}")
            if not any(
                self._lock.acquire(timeout=s) for s in used.rounds(timeout_s, ends_on_signal=True)
            ):
                seconds = min(timeout_s, round(used.waited_s, 1))
                raise CheckpointError(
                    f"cannot {activity}: another thread used {self._name} for {seconds:g} s"
                )
            try:
                yield
            finally:
                self._lock.release()
        finally:
            self._threads.discard(thread)

    @contextlib.contextmanager
    def use_by_all(self, activity: str, group: _Group, timeout_s: float) -> Iterator[None]:
        """Like :meth:`use`, for a block that all ranks of a group enter (``Group.method``)."""
        self.check(activity)  # A call that is refused has no number.
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.use(activity, timeout_s))
            except BaseException:
                with group.method(activity, timeout_s):
                    raise
            stack.enter_context(group.method(activity, timeout_s))
            yield


def exclusive(activity: str) -> Callable[[M], M]:
    """Makes a method use its object exclusively. The activity is for messages.

    The object has an :class:`Exclusive` as ``_exclusive``, a group of ranks as ``_group``, and
    ``timeout_s``. All ranks call the method. A rank whose call raises fails it on all ranks
    (``Group.method``).
    """

    def decorate(method: M) -> M:
        @functools.wraps(method)
        def exclusively(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._exclusive.use_by_all(activity, self._group, self.timeout_s):
                return method(self, *args, **kwargs)

        return cast(M, exclusively)

    return decorate
