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
from typing import Any, TypeVar, cast

from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError

__all__ = ["Exclusive", "exclusive"]

M = TypeVar("M", bound=Callable[..., Any])


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

    @contextlib.contextmanager
    def use(self, activity: str, timeout_s: float) -> Iterator[None]:
        """Waits until no other thread uses the object, which is then used within the block.

        The activity is for messages, such as ``"save step 100"``. Raises CheckpointError if this
        thread uses the object already, if another thread used it until the timeout, or if this
        process is a forked child.
        """
        if self.is_forked:
            raise CheckpointError(
                f"cannot {activity}: {self._name} belongs to process {self._pid}, of which this "
                "process is a forked child"
            )
        thread = threading.get_ident()
        if thread in self._threads:
            raise CheckpointError(
                f"cannot {activity}: {self._name} is in use by a call in this thread, which a "
                "signal handler has interrupted. Set a flag in the handler, and save after the step"
            )
        self._threads.add(thread)  # Before the lock, so that a signal handler always finds it.
        try:
            used = LongWait(lambda: f"another thread, which uses {self._name}, to {activity}")
            if not any(self._lock.acquire(timeout=s) for s in used.rounds(timeout_s)):
                raise CheckpointError(
                    f"cannot {activity}: another thread used {self._name} for {timeout_s:g} s"
                )
            try:
                yield
            finally:
                self._lock.release()
        finally:
            self._threads.discard(thread)


def exclusive(activity: str) -> Callable[[M], M]:
    """Makes a method use its object exclusively. The activity is for messages.

    The object has an :class:`Exclusive` as ``_exclusive``, and ``timeout_s``.
    """

    def decorate(method: M) -> M:
        @functools.wraps(method)
        def exclusively(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._exclusive.use(activity, self.timeout_s):
                return method(self, *args, **kwargs)

        return cast(M, exclusively)

    return decorate
