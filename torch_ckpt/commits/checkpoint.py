"""CheckpointTransaction: a checkpoint of DCP, committed by its metadata.

How it appears depends on the storage. If directories can be renamed, a new checkpoint is written to
a hidden directory, which the commit renames. In an existing directory, the commit renames the
pending file to ``.metadata``. On a store, which cannot rename, the commit writes ``.metadata`` on
the condition that it has not changed since the save began.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from errno import EEXIST
from typing import Any

from torch_ckpt._core import _native
from torch_ckpt.commits.garbage import collect_garbage, find, pending_pattern, remove_files
from torch_ckpt.commits.probe import can_be_renamed_to, check_commit
from torch_ckpt.commits.small_files import write_small_files
from torch_ckpt.commits.temporary import PARTIAL, end_partials, remove_temporary, temporary
from torch_ckpt.commits.terms import check_term, term_in
from torch_ckpt.commits.transaction import Transaction
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError, warn_after_commit
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import (
    committed_id,
    index_name,
    metadata_prefixes,
    pending_name,
    prefixes_among,
)

__all__ = ["CheckpointTransaction", "is_committed"]

_METADATA = ".metadata"
_DATA_FILE = re.compile(r".*__\d+_\d+_[0-9a-f]{16}\.distcp")


class CheckpointTransaction(Transaction):
    """A checkpoint that appears with its ``.metadata``; see :class:`Transaction`.

    Args:
        target: Directory of the checkpoint.
        save_id: As for :class:`Transaction`.
        rank: The rank that saves alone, beside the checkpoints of other ranks; ``None`` if all
            ranks save together.
        keeps_files: Whether this is a copy of a committed checkpoint. Several processes may
            commit it at the same time, and all files remain after a failed commit, because the
            caller retries.
        small_files: Contents of the small files of a step, by name. A new checkpoint appears
            together with them. If a checkpoint is replaced, they are written after the commit, and
            other small files are removed. ``None``: small files in the target are not changed.
        can_hide: Whether all processes that write files receive the claim. A new target then
            appears with the commit, if the storage permits that.
        options: As for :class:`Transaction`.
    """

    def __init__(
        self,
        target: Location,
        save_id: str,
        *,
        rank: int | None = None,
        keeps_files: bool = False,
        small_files: Mapping[str, bytes] | None = None,
        can_hide: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(target, save_id, **options)
        self._rank, self._keeps_files, self._small_files = rank, keeps_files, small_files
        self._can_hide = can_hide
        self._prefix = "" if rank is None else f"__{rank}"
        self.commit_name = f"{self._prefix}{_METADATA}"
        self.committed_names = frozenset({self.commit_name})
        self.pending_pattern = pending_pattern(rank)
        self._beside: list[str] = []  # Temporaries beside the target whose owners may be alive.
        self._has_small_files = False  # Whether it has written them in the target.

    # ---- Begin ----

    def begin(self) -> None:
        """Begins the save, as :meth:`Transaction.begin` does."""
        self.commits = True
        self._beside = self._remove_abandoned()
        if not (self._can_hide and can_be_renamed_to(self.target)):
            self._begin_in_target()
            return
        check_commit(self.target.parent, self.target, sync=self.sync)
        self._hidden = temporary(self.target, PARTIAL)
        self._hidden.create_directories()
        for name, contents in (self._small_files or {}).items():
            (self._hidden / name).write(contents, sync=self.sync)

    def create_pending(self) -> None:
        """Creates the pending file, unless another process of this save has."""
        try:
            self._create_pending()
        except StorageError as error:
            if error.errno != EEXIST:
                raise

    def resume(self) -> None:
        """Resumes a save that has a pending file, and whose commit may have begun.

        If another save removes the pending file meanwhile, the commit will detect that.
        """
        self.commits = True
        pending = self._pending_file
        if not self._keeps_files:  # Otherwise another process may commit the same bytes now.
            with contextlib.suppress(NotFoundError):
                if pending.nbytes():  # A commit was killed, and may have left the index, too.
                    pending.replace(b"", sync=False)
            self._index_file.discard()
        found = find(self.target, self.pending_pattern, self.commit_name)
        self.found = replace(found, pending=found.pending - {pending.name})
        self._find_committed()
        self._pending = pending

    @property
    def has_pending(self) -> bool:
        """Whether the pending file of this process or of an earlier one exists."""
        return self._pending_file.exists()

    @property
    def _pending_file(self) -> Location:
        return self.target / f"{self._prefix}{pending_name(self.save_id)}"

    @property
    def _index_file(self) -> Location:
        return self.target / f"{self._prefix}{index_name(self.save_id)}"

    def _create_pending(self) -> Location:
        self._pending_file.write(b"", sync=False)
        return self._pending_file

    # ---- Commit ----

    def commit(self, metadata: bytes, index: bytes, files: Collection[str]) -> None:
        """Commits the contents of ``.metadata`` and its index; removes the files that they replace.

        ``files`` are the names of the data files. They are removed if the commit has certainly
        failed.

        Raises:
            AlreadyExistsError: Another save was committed, and this one may not replace it.
            StorageError: Another save was committed meanwhile and has removed files of this one. Or
                a call has failed, and it is unknown whether the checkpoint is committed.
            SupersededError: The checkpoint is a step of a run, and a later job of the run saves.
        """
        try:
            self._check_term()
            if term := term_in(self._small_files):
                metadata = _native.with_term(metadata, term)
            if self._hidden is not None:
                try:
                    self._publish(metadata, index, files)
                except StorageError:
                    # Files remain only if the directory could not be renamed.
                    if not self._has_hidden(files):
                        raise
                    self._check_term()  # A later job may have committed the step meanwhile.
                    self._move_files(files)
                else:
                    end_partials(self.target, self._beside)
                    return
            if not self.replaces:
                self._write_small_files()
            self._publish(metadata, index, files)
        except BaseException:
            self._settle_small_files()
            if not self._keeps_files:  # If the pending file exists, nothing was published.
                self.abandon(() if self._pending is None else files)
            raise
        if self.replaces:
            self.replace_small_files()
        collect_garbage(
            self.target,
            self.found,
            referenced=[*files, self._index_file.name],
            rank=self._rank,
            is_committed=lambda: is_committed(self.target, self.save_id, self._prefix),
        )

    def _check_term(self) -> None:
        """Raises SupersededError if the job of the step may no longer commit."""
        check_term(self.target.parent, term_in(self._small_files), self.target)

    def _write_small_files(self) -> None:
        """Writes the small files of a new checkpoint, before it appears."""
        if self._small_files is None:
            return
        if self._pending is not None and self._pending.is_missing():  # Else another save has some.
            raise self.files_are_missing(NotFoundError(f"there is no {self._pending}"))
        self._has_small_files = True
        try:
            write_small_files(self.target, self._small_files, sync=self.sync)
        except BaseException:
            remove_files(self.target, self._small_files)
            raise

    def _settle_small_files(self) -> None:
        """Writes or removes the small files after a failed commit, if its outcome is known.

        If another save was committed, they belong to that one, and remain. On a store they always
        remain, because the checkpoint may still appear.
        """
        with contextlib.suppress(CheckpointError):
            if self._small_files is None:
                return
            if is_committed(self.target, self.save_id, self._prefix):  # Only the response was lost.
                self.replace_small_files()
                return
            is_store = self.target.file_system.publishes_by_condition
            if self._has_small_files and not is_store and self._committed_id() is None:
                remove_files(self.target, self._small_files)

    def replace_small_files(self) -> None:
        """Writes the small files after the checkpoint has replaced another one."""
        if self._small_files is None:
            return
        try:
            write_small_files(self.target, self._small_files, sync=self.sync)
        except CheckpointError as error:  # The checkpoint is committed.
            message = f"small files of {self._name} were not written: {error}"
            warn_after_commit(message, stacklevel=2)

    def _publish(self, metadata: bytes, index: bytes, files: Collection[str]) -> None:
        """Makes the checkpoint appear; see ``csrc/engine/commit.h``."""
        directory, self._pending = self.directory, None
        file_system = directory.file_system
        try:
            file_system.commit(
                *(directory.path, self.commit_name, f"{self._prefix}.index"),
                *(metadata, index, self.save_id),
                None if self._keeps_files else sorted(files),
                self.sync,
                None if self._hidden is None else self.target.path,
                self.found.version,
            )
        except (NotFoundError, StorageError) as error:
            self._raise_unless_committed(error)
        self._hidden, self._has_created, self._is_committed = None, False, True

    def _raise_unless_committed(self, error: NotFoundError | StorageError) -> None:
        is_missing = isinstance(error, NotFoundError)
        is_conditional = self.target.file_system.publishes_by_condition
        if not is_missing and (error.errno, is_conditional) != (EEXIST, True):
            raise error
        # A network file system may have committed, lost the reply, and asked for it again. Or
        # another process has committed the same copy.
        if not is_missing or self._committed_id() != self.save_id:
            if self._keeps_files:
                self._index_file.discard()  # Another save has ended this one.
            raise self.files_are_missing(error) from error
        if self.sync:
            (self.target if self._hidden is None else self.target.parent).sync()

    def _has_hidden(self, files: Collection[str]) -> bool:
        """Returns whether the hidden directory exists, with all files."""
        with contextlib.suppress(CheckpointError):
            return set(files).issubset(self.directory.names())
        return False

    def _move_files(self, files: Collection[str]) -> None:
        """Moves the files from the hidden directory, which cannot be renamed, to the target.

        Raises AlreadyExistsError if the target has a checkpoint that must remain, and StorageError
        if a file cannot be moved, or another save has removed it.
        """
        hidden = self.directory
        self._begin_in_target()
        try:
            for name in files:
                (hidden / name).rename(self.target / name)
        except BaseException as error:
            remove_files(self.target, files)
            self.abandon()
            if isinstance(error, NotFoundError):
                raise self.files_are_missing(error) from error
            raise
        self._hidden = None
        remove_temporary(hidden)

    def _committed_id(self) -> str | None:
        return committed_id(self.target, self._prefix)

    def _marks_data_files(self, pending: Location) -> bool:
        """Returns whether the directory has data files of a save, and no checkpoint.

        Dead ranks left these files. Without a pending file, they would count as a checkpoint that
        was copied without its metadata, and would never be removed.
        """
        try:
            names = pending.parent.names()
        except NotFoundError:
            return False
        except CheckpointError:  # It may have such files. The next save or retention removes both.
            return True
        return not prefixes_among(names) and any(map(_DATA_FILE.fullmatch, names))


def is_committed(directory: Location, save_id: str, prefix: str = "") -> bool:
    """Returns whether a save is the committed one: of all ranks, or of the rank with a prefix.

    Raises StorageError if the files cannot be read, so that this is unknown.
    """
    prefixes = metadata_prefixes(directory)
    is_mixed = "" in prefixes and len(prefixes) > 1
    return not is_mixed and committed_id(directory, prefix) == save_id
