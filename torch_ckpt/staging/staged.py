"""What was staged for one save, and how long its memory is in use."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from torch_ckpt.errors import CheckpointError, UnsupportedError

__all__ = ["POLL_S", "PartlyStaged", "Staged"]

POLL_S = 0.01
"""How often somebody who waits for a save looks whether it has ended."""


class Staged:
    """The memory of one save.

    Args:
        address: Of its snapshot.
        nbytes: Of that.
        name: What it holds, for messages.
        has_left: Whether tensors were left where they are, to be written from there first.
        release: Gives the snapshot back.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        *,
        name: str,
        has_left: bool,
        release: Callable[[Staged], None],
    ) -> None:
        self.has_left = has_left
        self._name = name
        self._address, self._nbytes = address, nbytes
        self._release = release
        self._deciding = threading.Lock()
        self._thread: threading.Thread | None = None
        self._first_written = threading.Event()
        self._aborted = False

    def begin_save(self) -> bool:
        """Called by the thread that saves what was staged.

        Returns:
            Whether it is that thread, and not one that saves something else later.
        """
        with self._deciding:
            if self._thread is None:
                self._thread = threading.current_thread()
        return self._thread is threading.current_thread()

    def __str__(self) -> str:
        if self._thread is None:
            return (
                f"{self._name}: no thread saves it, but something refers to what stage() returned"
            )
        return f"{self._name}: thread {self._thread.name!r} is saving it"

    @property
    def is_over(self) -> bool:
        """Whether the save has certainly ended."""
        return self._thread is not None and not self._thread.is_alive()

    def release(self) -> None:
        """Gives the snapshot back; once."""
        self._release(self)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where in the snapshot a tensor of the copy begins, in bytes; ``None`` if not in there."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < self._nbytes else None

    def can_wait(self, source: torch.Tensor | None) -> bool:
        """Whether what is stored from a tensor, or an object, need not be written first."""
        return source is not None and (not source.numel() or self.offset_of(source) is not None)

    def first_are_written(self) -> None:
        """Called when all that was left where it is has been written.

        Raises:
            CheckpointError: It may have changed meanwhile, since nobody has waited for this.
        """
        self._first_written.set()
        if self._aborted:
            raise CheckpointError(
                "what max_host_nbytes has left may have changed before it was written: the call of "
                "async_save did not wait for it to the end"
            )

    def wait_for_first(self, timeout_s: float) -> None:
        """Waits for :meth:`first_are_written`, or for the end of the save.

        Raises:
            CheckpointError: It has not come within the time.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not (self._first_written.wait(POLL_S) or self.is_over):
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"what max_host_nbytes has left was not written within {timeout_s:g} s"
                    )
        except BaseException:
            self._aborted = True
            raise


class PartlyStaged(dict[str, Any]):
    """A state dict some of whose tensors are the training process's own."""

    def __init__(self, staged: Staged, state: dict[str, Any]) -> None:
        super().__init__(state)
        self._staged = staged

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For another process that saves, which needs all of it staged."""
        with contextlib.suppress(CheckpointError):
            self._staged.first_are_written()  # Nothing is going to be.
        raise UnsupportedError(
            "a save by another process needs all of the state staged, and max_host_nbytes does "
            "not hold it"
        )
