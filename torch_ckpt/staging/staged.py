"""The staged tensors of one save, and the lifetime of their memory."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch_ckpt.coordination.background import BackgroundThread
from torch_ckpt.coordination.exclusive import has_ended
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError, UnsupportedError

__all__ = ["POLL_S", "Staged", "UnstagedState"]

POLL_S = 0.01
"""Poll interval of threads that wait for a save, in seconds."""


class Staged:
    """The use of a stager's snapshot by one save, which ``release`` ends.

    If the tensors do not fit in memory, none is staged (``is_unstaged``): training waits until the
    save has written them from the memory of training. ``by`` is the call that makes the copy; if it
    ends before :meth:`set_memory`, so does the use.
    """

    def __init__(self, *, name: str, by: FrameType, release: Callable[[Staged], None]) -> None:
        self.is_unstaged = False
        self.name = name
        self._by: FrameType | None = by
        self._memory: weakref.ref[memoryview] | None = None
        self._release = release
        self._thread_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._written = threading.Event()
        self._aborted = False

    def set_memory(self, view: memoryview) -> None:
        """Sets the memory of the snapshot, to which all copied tensors refer."""
        self._memory = weakref.ref(view)
        self._by = None  # Its variables would remain in memory.

    def begin_save(self) -> bool:
        """Registers the current thread as the one that writes the snapshot.

        Returns whether the current thread is that thread. Another thread may call this method
        later, for another save.
        """
        with self._thread_lock:
            if self._thread is None:
                self._thread = threading.current_thread()
        return self._thread is threading.current_thread()

    def __str__(self) -> str:
        if self._thread is None:
            return (
                f"{self.name}: no thread writes it, but something refers to what stage() returned"
            )
        return f"{self.name}: thread {self._thread.name!r} is writing it"

    @property
    def is_over(self) -> bool:
        """Whether the thread that writes the snapshot has ended its save."""
        thread = self._thread
        if thread is None:
            return False
        return not thread.is_alive() or (
            isinstance(thread, BackgroundThread) and not thread.is_working
        )

    @property
    def is_unused(self) -> bool:
        """Whether the save is over, or will never begin: no copied tensor is left."""
        if self.is_over:
            return True
        if self._memory is not None:
            return self._memory() is None
        return (by := self._by) is not None and has_ended(by)

    def release(self) -> None:
        """Ends the use of the snapshot. Further calls have no effect."""
        self._release(self)
        self._by = None

    @property
    def blocks_training(self) -> bool:
        """Whether unstaged tensors are not written yet, so that training waits."""
        return self.is_unstaged and not self._written.is_set()

    def end_wait(self) -> None:
        """Ends :meth:`wait_until_written`, because the tensors are no longer read.

        Raises CheckpointError if the wait was aborted, so that the tensors may have changed.
        """
        self._written.set()
        if self._aborted:
            raise CheckpointError(
                "cannot save: tensors that did not fit in memory may have changed before they were "
                "written, because async_save did not wait until then"
            )

    def wait_until_written(self, timeout_s: float) -> None:
        """Waits until unstaged tensors are written, or the save has ended.

        Raises CheckpointError if neither happened within ``timeout_s``.
        """
        waiting = LongWait(
            lambda: f"the tensors of {self.name} that did not fit in memory to be written"
        )
        try:
            for pause_s in waiting.rounds(timeout_s, POLL_S, ends_on_signal=True):
                if self._written.wait(pause_s) or self.is_over:
                    return
            raise CheckpointError(
                "cannot save: tensors that did not fit in memory were not written within "
                f"{timeout_s:g} s"
            )
        except BaseException:
            self._aborted = True
            raise


class UnstagedState(dict[str, Any]):
    """A copied state dict whose tensors share the memory of training."""

    def __init__(self, staged: Staged, state: dict[str, Any]) -> None:
        super().__init__(state)
        self._staged = staged

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to pickle the state dict for a save process, which needs all tensors staged."""
        with contextlib.suppress(CheckpointError):
            self._staged.end_wait()  # No save will follow.
        raise UnsupportedError(
            "cannot save in another process: the memory limit of the container is too small to "
            "stage the tensors"
        )
