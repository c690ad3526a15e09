"""MachineTransaction: one machine's part of a checkpoint on the local disks of several machines.

Each machine stores the data files of its ranks, and a copy of ``.metadata`` and of the index, which
name the files of all machines.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.transaction import Claim
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location

__all__ = ["CommitFiles", "MachineTransaction"]


@dataclass(frozen=True)
class CommitFiles:
    """The files that every machine commits: the contents of ``.metadata`` and of its index."""

    save_id: str
    metadata: bytes
    index: bytes
    files: Collection[str]


class MachineTransaction(CheckpointTransaction):
    """The files of one machine in a directory that has the same path on several machines.

    The coordinator commits on its machine. Then the first rank of each other machine (``is_first``)
    commits the same files, which the coordinator has :attr:`committed`.
    """

    def __init__(self, target: Location, save_id: str, *, is_first: bool, **options: Any) -> None:
        super().__init__(target, save_id, **options)
        self._is_first, self._follows = is_first, False
        self.committed: CommitFiles | None = None

    def join(self, claim: Claim | None, rank: int | None) -> None:
        """Begins to write on a rank other than the coordinator."""
        if self._is_first:
            self.begin()
        else:
            self.target.create_directories()

    def check(self, files: Collection[str]) -> None:
        """Checks as :meth:`Transaction.check`, but not the files, which lie on several machines."""
        super().check(())

    def commit(self, metadata: bytes, index: bytes, files: Collection[str]) -> None:
        """Commits on the coordinator's machine. ``files`` are the files of all machines."""
        super().commit(metadata, index, files)
        self.committed = CommitFiles(self.save_id, metadata, index, files)

    def _check_term(self) -> None:
        if not self._follows:  # Otherwise the coordinator has committed.
            super()._check_term()

    def commit_as(self, committed: CommitFiles) -> None:
        """Commits the coordinator's files on another machine, under the id of that commit."""
        self.save_id, self._follows = committed.save_id, True
        assert self._pending is not None
        try:
            self._pending.rename(self._pending_file)
            self._pending = self._pending_file
            if self.sync:  # The commit writes an index with this id.
                self.target.sync()
        except BaseException as error:
            self.abandon(committed.files)
            if isinstance(error, NotFoundError):
                raise self.files_are_missing(error) from error
            raise
        super().commit(committed.metadata, committed.index, committed.files)
