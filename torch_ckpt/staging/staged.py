"""The staged tensors of one save, and the lifetime of their memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from torch_ckpt.coordination.background import SaveThread
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError, UnsupportedError

__all__ = ["POLL_S", "PartlyStaged", "Staged"]

POLL_S = 0.01
"""Poll interval of threads that wait for a save, in seconds."""


class Staged:
    """The snapshot of one save, which ``release`` returns to its stager.

    If ``max_host_nbytes`` is too small for all tensors, the snapshot has unstaged tensors: they are
    written first, directly from the memory of training.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        *,
        name: str,
        has_unstaged: bool,
        release: Callable[[Staged], None],
    ) -> None:
        self.has_unstaged = has_unstaged
        self.name = name
        self._address, self._nbytes = address, nbytes
        self._release = release
        self._thread_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._unstaged_written = threading.Event()
        self._aborted = False

    def begin_save(self) -> bool:
        """Registers the current thread as the one that writes the snapshot.

        Returns whether the current thread is that thread. Another thread may call it later, to save
        something else.
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
        return not thread.is_alive() or (isinstance(thread, SaveThread) and not thread.is_saving)

    def release(self) -> None:
        """Returns the snapshot to its stager. Further calls have no effect."""
        self._release(self)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Returns a tensor's offset in the snapshot, in bytes; ``None`` if it is not in there."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < self._nbytes else None

    def can_wait(self, source: torch.Tensor | None) -> bool:
        """Returns whether an item may be written after the unstaged tensors.

        Its source is ``None`` for an object.
        """
        return source is not None and (not source.numel() or self.offset_of(source) is not None)

    @property
    def blocks_training(self) -> bool:
        """Whether unstaged tensors are not written yet, so that training waits."""
        return self.has_unstaged and not self._unstaged_written.is_set()

    def unstaged_are_written(self) -> None:
        """Marks the unstaged tensors as written.

        Raises CheckpointError if they may have changed, because the wait for them was aborted.
        """
        self._unstaged_written.set()
        if self._aborted:
            raise CheckpointError(
                "cannot save: tensors that did not fit in memory may have changed before they were "
                "written, because async_save did not wait until then"
            )

    def wait_for_unstaged(self, timeout_s: float) -> None:
        """Waits until the unstaged tensors are written, or the save has ended.

        Raises CheckpointError if neither happened within ``timeout_s``.
        """
        waiting = LongWait(
            lambda: f"the tensors of {self.name} that did not fit in memory to be written"
        )
        try:
            for pause_s in waiting.rounds(timeout_s, POLL_S):
                if self._unstaged_written.wait(pause_s) or self.is_over:
                    return
            raise CheckpointError(
                "cannot save: tensors that did not fit in memory were not written within "
                f"{timeout_s:g} s"
            )
        except BaseException:
            self._aborted = True
            raise


class PartlyStaged(dict[str, Any]):
    """A staged state dict in which unstaged tensors are those of training."""

    def __init__(self, staged: Staged, state: dict[str, Any]) -> None:
        super().__init__(state)
        self._staged = staged

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to pickle the state dict for a save process, which needs all tensors staged."""
        with contextlib.suppress(CheckpointError):
            self._staged.unstaged_are_written()  # Ends the wait, because no save follows.
        raise UnsupportedError(
            "cannot save in another process: max_host_nbytes, or the memory limit of the "
            "container, is too small to stage all tensors"
        )
