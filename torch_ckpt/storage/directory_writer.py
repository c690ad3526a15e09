"""The methods of FastWriter for its directory: the transaction of the present save."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping

from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.garbage import remove_files
from torch_ckpt.commits.transaction import Claim, Transaction
from torch_ckpt.coordination.current_call import current_call
from torch_ckpt.filesystems.location import Location
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.staging.staging_writer import StagingWriter

__all__ = ["DirectoryWriter"]


class DirectoryWriter(StagingWriter):
    """A storage writer whose files appear by a transaction."""

    overwrite: bool
    file_id: str  # Id of the present save, in the names of its files.
    sync_files: bool

    def __init__(self, path: str | os.PathLike[str], stager: SnapshotStager | None) -> None:
        super().__init__(path, stager)
        self.location = self._directory.absolute
        """Directory of the present save. Links in its path are resolved when a save begins."""
        self.small_files: Mapping[str, bytes] | None = None
        """The small files of a step, by name; see :class:`CheckpointTransaction`."""
        self.rank: int | None = None
        self.use_collectives = True
        self._commits = False  # Whether this rank commits the present save.
        self._transaction: Transaction | None = None  # Of the present save.
        self._finished: list[str] = []  # The complete files of this rank.

    @property
    def path(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint: a path of this machine, or a URL."""
        return self._directory.given.checkpoint_id

    @property
    def _write_directory(self) -> Location:
        """The directory in which this save writes its files."""
        return self.location if self._transaction is None else self._transaction.directory

    @property
    def _checkpoint(self) -> CheckpointTransaction:
        """The transaction of the present save, which may not have begun."""
        if self._transaction is None:
            self._transaction = CheckpointTransaction(
                *(self.location, self.file_id),
                rank=None if self.use_collectives else self.rank,
                sync=self.sync_files,
                may_replace=self.overwrite,
                name=self.path,
                small_files=self.small_files,
            )
        assert isinstance(self._transaction, CheckpointTransaction)
        return self._transaction

    @property
    def _hides(self) -> bool:
        """Whether nobody but this class writes to the directory before the commit."""
        return False

    def _begin(self, *, can_hide: bool) -> None:
        """Begins the save on the rank that commits, before any rank writes.

        Called once the plans of all ranks have arrived. By then, each rank has removed the remains
        of an earlier failed save, which may include the directory.
        """
        self._checkpoint.begin(can_hide=can_hide and self._hides)
        self._warn_if_replacing()

    def _warn_if_replacing(self) -> None:
        assert self._transaction is not None
        if self._transaction.replaces and not self.rank:
            warnings.warn(
                f"Detected an existing checkpoint in {self.path}, overwriting since "
                f"{self.overwrite=}.",
                stacklevel=2,
            )

    def _enter(self, claim: Claim | None) -> None:
        """Begins to write on any rank.

        Raises StorageError if it does not find what the claim names. The claim is ``None`` if this
        rank cannot find it by its name.
        """
        if not self._commits:
            self._checkpoint.join(claim, self.rank)
        elif not self._checkpoint.has_begun:  # A subclass replaced `prepare_global_plan`.
            self._begin(can_hide=False)

    def end_failed_save(self) -> None:
        """Removes what a save that has failed has written: each rank its own files.

        The last rank also removes the pending file, and the directory if the save has created it.

        A save of this package calls it when any rank has failed. DCP's own functions do not
        report failures of other ranks to a writer. Then the next save removes the files.
        """
        transaction, self._transaction = self._transaction, None
        finished, self._finished = self._finished, []
        call = current_call()
        have_all_failed = call is not None and call.is_uncommitted
        if transaction is not None and (self._commits or have_all_failed):
            transaction.abandon(finished if have_all_failed else ())

    def _abandon(
        self, names: Iterable[str], error: BaseException, *, may_others_begin: bool = False
    ) -> None:
        """Removes the files of a save that has failed with ``error``.

        The pending file stays if other ranks may yet search it (``may_others_begin``): without it,
        they would take the directory for one that is not shared. Raises the error of the call if
        another rank has failed and removed its files first, and StorageError if files are missing
        for an unknown reason.
        """
        transaction = self._transaction or self._checkpoint
        names = list(names)
        is_ended = transaction.is_ended(names, error)
        remove_files(transaction.directory, names)
        if transaction.is_hidden or not may_others_begin:
            self.end_failed_save()
        if is_ended:
            raise transaction.files_are_missing(error) from error
