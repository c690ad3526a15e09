"""MachineWriter: saves a checkpoint to the local disks of several machines."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt.commits.machine import CommitFiles, MachineTransaction
from torch_ckpt.storage.writer import FastWriter

__all__ = ["MachineWriter"]


class MachineWriter(FastWriter):
    """Saves to a directory that has the same path on several machines, but is not shared.

    Each machine commits its part: see :class:`MachineTransaction`, which also describes
    ``is_first``. So it works only with :func:`torch_ckpt.save`, not with DCP's functions. Otherwise
    it is a :class:`FastWriter`, with the same arguments.
    """

    def __init__(self, *args: Any, is_first: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_first = is_first
        self._new_checkpoint = functools.partial(MachineTransaction, is_first=is_first)

    @property
    def _part(self) -> MachineTransaction:
        assert isinstance(self._save.transaction, MachineTransaction)
        return self._save.transaction

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits on the coordinator's machine, and passes the files to commit to the others."""
        super().finish(metadata, results)
        setattr(metadata, _ATTRIBUTE, self._part.committed)
        self._part.committed = None

    def commit_here(self, metadata: Metadata) -> None:
        """Commits on this machine, after the coordinator has. Called on all ranks."""
        committed: CommitFiles | None = metadata.__dict__.pop(_ATTRIBUTE, None)
        if committed is not None and self._is_first and not self._save.commits:
            self.file_id = committed.save_id  # Before, each rank has a different id.
            self._part.commit_as(committed)


_ATTRIBUTE = "torch_ckpt_commit_files"
