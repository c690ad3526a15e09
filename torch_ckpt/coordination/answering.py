"""Reads, with a time limit, of a disk or store that may never answer."""

from __future__ import annotations

import atexit
import contextvars
import errno
import os
import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

from torch_ckpt.coordination.waiting import GRACE_S, LongWait
from torch_ckpt.errors import StorageError

__all__ = ["answered_within"]

T = TypeVar("T")


def answered_within(timeout_s: float, read: Callable[[], T], activity: str, place: object) -> T:
    """Calls ``read`` in a thread and returns its result. Raises StorageError if it takes too long.

    The limit is slightly shorter than ``timeout_s``, so that the error reaches other ranks before
    they time out. The thread continues after the error, so ``read`` must have no side effects.
    ``place`` names what does not answer, for the message.
    """
    future: futures.Future[T] = futures.Future()

    def work() -> None:
        try:
            future.set_result(read())
        except BaseException as error:
            future.set_exception(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(work,), name="torch_ckpt-read", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # The system has no more threads.
        return read()
    # This wait logs nothing: the storage watch logs long calls of storage.
    waiting = LongWait(lambda: "")
    for pause_s in waiting.rounds(timeout_s - min(GRACE_S, timeout_s / 10)):
        if futures.wait([future], pause_s).done:
            try:
                return future.result(0)
            finally:
                del future  # The traceback of its error refers to this frame.
    # The interpreter must not end while native code of the thread runs.
    atexit.register(_join, thread, os.getpid())
    waited = f"has not answered for {waiting.waited_s:.1f} s"
    raise StorageError(f"{activity}: {place} {waited}", errno.ETIMEDOUT)


def _join(thread: threading.Thread, pid: int) -> None:
    if pid == os.getpid():  # A forked child has no such thread.
        thread.join(GRACE_S)
