"""Attempt: the promotion of a step that is in progress."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.records.figures import nbytes_text
from torch_ckpt.storage.copying import CheckpointCopy
from torch_ckpt.storage.progress import progress_bar

__all__ = ["Attempt"]


@dataclass
class Attempt:
    """The promotion of a step that is in progress.

    It is stopped if the step was saved again, the run ends, or another place cannot send its files,
    for the reason ``failure``.
    """

    step: int
    directory: Location
    copy: CheckpointCopy | None = None
    is_stopped: bool = False
    failure: CheckpointError | None = None

    def stop(self, failure: CheckpointError | None = None, *, leaves: bool = False) -> None:
        """Stops it; with ``leaves``, an agent may go on to copy files for a later attempt."""
        if not self.is_stopped:
            self.is_stopped, self.failure = True, failure
        if self.copy is not None:
            (self.copy.leave if leaves else self.copy.cancel)()

    @property
    def done_nbytes(self) -> int:
        """Bytes that were copied or linked so far."""
        return 0 if self.copy is None else self.copy.done_nbytes

    def awaited(self) -> str:
        """Returns what is in progress, for the log of those who wait for it."""
        copied = "" if self.copy is None else f", {nbytes_text(self.done_nbytes)} copied"
        return f"the promotion of step {self.step} to {self.directory}{copied}"

    @contextlib.contextmanager
    def bar(self) -> Iterator[None]:
        """Shows how far the copy is, while the block waits for it."""
        copy = self.copy
        if copy is None:
            yield
            return
        with progress_bar(
            "promoting", self.directory, lambda: copy.nbytes, lambda: self.done_nbytes
        ):
            yield
