"""ThreadBackend: background saves by a thread of this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from torch_ckpt.api import async_save
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.ladder import Rung
from torch_ckpt.storage.copying import CheckpointCopy
from torch_ckpt.storage.writer import FastWriter

__all__ = ["ThreadBackend"]


class ThreadBackend:
    """Saves with :func:`torch_ckpt.async_save`. No step remains in memory after its save."""

    rungs: Sequence[Rung] = ()
    """Rungs with steps of this backend, other than the disk."""
    can_stay_in_memory = False
    """Whether the backend can retain a step in memory without writing it to disk."""

    def __init__(
        self, process_group: dist.ProcessGroup | None, *, timeout_s: float, writer: FastWriter
    ) -> None:
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._writer = writer

    def save(
        self, step: int, state: dict[str, Any], path: str | os.PathLike[str], *, persist: bool
    ) -> Future[Any]:
        """Begins to save a step to ``path``; ``persist`` has no effect."""
        future = async_save(
            state,
            checkpoint_id=path,
            storage_writer=self._writer,
            process_group=self._process_group,
            timeout_s=self._timeout_s,
        )
        assert isinstance(future, Future)  # The writer stages before it returns.
        return future

    def may_commit(self, step: int) -> bool:
        """Returns whether an agent may still commit a step whose save has not succeeded."""
        return False

    def copy(self, source: Location, target: Location, **options: Any) -> CheckpointCopy:
        """Returns a copy of a checkpoint, whose files this process sends."""
        return CheckpointCopy(source, target, **options)

    def has_newest(self) -> bool:
        """Returns whether :meth:`write_newest` has something to write."""
        return False

    def write_newest(self) -> tuple[int, Future[Any]] | None:
        """Begins to write the last step, if it is in memory only; returns its number and future."""
        return None

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocates memory for states like this, if the backend reserves memory."""

    def claim(self, directory: Location) -> None:
        """Writes the id of the run into its directory, on the first rank, if the run has one.

        Called when a job takes a term. Agents know by the id whose terms a directory has.
        """

    def forget(self, is_discarded: Callable[[int], bool]) -> None:
        """Drops the step that was saved last, if it was discarded from memory."""

    def leave(self) -> None:
        """Leaves the snapshots in memory for the next process."""

    def close(self) -> None:
        """Ends the backend in good order, if it has neither ended nor been left."""
