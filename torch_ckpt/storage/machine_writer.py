"""MachineWriter: saves a checkpoint to the local disks of several machines.

Each machine has the data files of its own ranks, and a copy of ``.metadata`` and the index, which
name the files of all machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt.commits.transaction import Claim
from torch_ckpt.storage.writer import FastWriter

__all__ = ["MachineWriter"]


@dataclasses.dataclass(frozen=True)
class _CommitFiles:
    """What every machine commits: the contents of ``.metadata`` and of its index."""

    file_id: str
    metadata: bytes
    index: bytes
    files: Collection[str]


class MachineWriter(FastWriter):
    """Saves to a directory that has the same path on several machines, but is not shared.

    The coordinator commits on its machine. Then :meth:`commit_here` commits on the others, by the
    first rank of each (``is_first``). So :func:`torch_ckpt.save` must save, and not DCP. Otherwise
    it is a :class:`FastWriter`, with the same arguments.
    """

    def __init__(self, *args: Any, is_first: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_first = is_first
        self._committed: _CommitFiles | None = None

    @property
    def _hides(self) -> bool:
        return False  # Other machines cannot know whether the owner of a hidden directory lives.

    def _enter(self, claim: Claim | None) -> None:
        if self._save.commits:
            return
        if self._is_first:
            self._begin(can_hide=False)
        else:
            self.location.create_directories()

    def _check(self, files: Collection[str]) -> None:
        super()._check([])  # Each rank has written its own, and other machines have theirs.

    def _publish(self, metadata: bytes, index: bytes, files: Collection[str]) -> None:
        super()._publish(metadata, index, files)
        self._committed = _CommitFiles(self.file_id, metadata, index, files)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits on the coordinator's machine, and passes on what the others commit."""
        super().finish(metadata, results)
        assert self._committed is not None
        setattr(metadata, _ATTRIBUTE, self._committed)
        self._committed = None

    def commit_here(self, metadata: Metadata) -> None:
        """Commits on this machine, after the coordinator has. Called on all ranks."""
        committed: _CommitFiles | None = metadata.__dict__.pop(_ATTRIBUTE, None)
        if committed is None or self._save.commits or not self._is_first:
            return
        self.file_id = committed.file_id  # Until then, each rank has its own id.
        self._checkpoint.adopt_id(committed.file_id)
        self._checkpoint.commit(committed.metadata, committed.index, committed.files)


_ATTRIBUTE = "torch_ckpt_commit_files"
