"""The methods of FastWriter for its directory: where a save writes and publishes its files.

A save to a directory that exists has a pending file there (:mod:`torch_ckpt.storage.gc`). A new
checkpoint is written to a hidden directory (:mod:`torch_ckpt.storage.temporary`), which the commit
renames.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import socket
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_ckpt.coordination.group import current_call
from torch_ckpt.errors import AlreadyExistsError, CheckpointError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import (
    commit,
    committed_id,
    is_committed,
    pending_name,
    prefixes_among,
)
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.staging.staging_writer import StagingWriter
from torch_ckpt.storage import late_names
from torch_ckpt.storage.commit_probe import can_be_renamed_to, check_commit
from torch_ckpt.storage.gc import (
    Found,
    collect_garbage,
    find,
    pending_pattern,
    remove_files,
)
from torch_ckpt.storage.late_names import still_missing
from torch_ckpt.storage.temporary import (
    PARTIAL,
    end_partials,
    remove_abandoned,
    remove_temporary,
    temporary,
)

__all__ = ["Claim", "DirectoryWriter"]

_METADATA = ".metadata"


@dataclass(frozen=True)
class Claim:
    """What the coordinator, on ``host``, has created before any rank writes.

    ``name`` is of the hidden directory beside that of the checkpoint, or of the pending file.
    ``is_new`` says that it has created the directory of the checkpoint as well.
    """

    name: str
    is_hidden: bool
    host: str
    is_new: bool

    def beside(self, storage_data: Any) -> Any:
        """Returns DCP's ``storage_data`` of a plan with this claim attached."""
        placed = copy.copy(storage_data)
        setattr(placed, _CLAIM_ATTRIBUTE, dataclasses.astuple(self))
        return placed

    @staticmethod
    def of(storage_data: Any) -> Claim | None:
        """Returns the claim of a plan's ``storage_data``; ``None`` if there is none."""
        values = getattr(storage_data, _CLAIM_ATTRIBUTE, None)
        return None if values is None else Claim(*values)


_CLAIM_ATTRIBUTE = "torch_ckpt_claim"


class DirectoryWriter(StagingWriter):
    """A storage writer that knows where one save writes its files."""

    overwrite: bool
    file_id: str  # Id of the present save, in the names of its files.
    sync_files: bool

    def __init__(self, path: str | os.PathLike[str], stager: SnapshotStager | None) -> None:
        super().__init__(path, stager)
        self.location = self._directory.absolute
        """Directory of the present save. Links in its path are resolved when a save begins."""
        self.small_files: Mapping[str, bytes] = {}
        """Files that appear with a new checkpoint, by name, on the rank that commits. A commit to a
        directory that exists does not write them."""
        self.rank: int | None = None
        self.use_collectives = True
        self._commits = False  # Whether this rank commits the present save.
        self._hidden: Location | None = None  # Where this save writes, if not to `location`.
        self._pending: Location | None = None  # The pending file, on the rank that commits.
        self._before: object = None  # The identity of the metadata before this save, on that rank.
        self._claimed: Claim | None = None  # What that rank has created, on the others.
        self._created: Location | None = None  # The directory, if this save has created it there.
        self._finished: list[str] = []  # The complete files of this rank.
        self._found = Found()  # What the directory had before this save.
        self._found_beside: list[str] = []  # Temporaries of running saves and conversions.

    @property
    def path(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint: a path of this machine, or a URL."""
        return self._directory.given.checkpoint_id

    @property
    def _write_directory(self) -> Location:
        """The directory in which this save writes its files."""
        return self.location if self._hidden is None else self._hidden

    # ---- Begin ----

    @property
    def _hides(self) -> bool:
        """Whether nobody but this class writes to the directory before the commit."""
        return False

    def _open_directory(self) -> None:
        """Creates and lists the directory of the checkpoint, on the rank that commits.

        Other ranks do not look up a directory that is not there yet: the client of a network file
        system would remember that it is missing, after the commit on another machine. Raises
        AlreadyExistsError if a checkpoint is there that the save may not overwrite.
        """
        if self.location.file_system.has_folders and self.location.is_missing():
            self._created = self.location
        self.location.create_directories()
        try:
            check_commit(self.location, self.location, sync=self.sync_files)
        except BaseException:
            if self._created is not None:
                self._created.discard()
            raise
        self._found = find(self.location, self._pending_pattern, self._commit_name)
        self._check_may_replace(self._found.names)
        if not self._committed_names.isdisjoint(self._found.names) and not self.rank:
            warnings.warn(
                f"Detected an existing checkpoint in {self.path}, overwriting since "
                f"{self.overwrite=}.",
                stacklevel=2,
            )

    def _check_may_replace(self, names: Collection[str]) -> None:
        """Raises AlreadyExistsError if a checkpoint is there that the save may not overwrite."""
        if not self.overwrite and not self._committed_names.isdisjoint(names):
            raise AlreadyExistsError(
                f"cannot save to {self.path}: Checkpoint already exists, and overwrite is false"
            )

    @property
    def _pending_pattern(self) -> str:
        return pending_pattern(None if self.use_collectives else self.rank)

    def _claim_directory(self, can_hide: bool) -> None:
        """Begins the save on the rank that commits, before any rank writes.

        Called once the plans of all ranks have arrived. By then, each rank has removed the remains
        of an earlier failed save, which may include the directory. Creates the pending file. For a
        new checkpoint, creates instead the hidden directory that the commit renames, if all ranks
        receive its name (``can_hide``). Removes hidden directories of dead saves, which may have
        filled the disk. Raises as :meth:`_open_directory`.
        """
        parent = self.location.parent
        parent.create_directories()
        if parent.file_system.renames_directories(parent.path):
            self._found_beside = remove_abandoned(parent)
        is_coordinated = self.use_collectives or self.rank is None
        if can_hide and self._hides and is_coordinated and can_be_renamed_to(self.location):
            check_commit(parent, self.location, sync=self.sync_files)
            self._before, self._hidden = None, temporary(self.location, PARTIAL)
            self._hidden.create_directories()
            for name, contents in self.small_files.items():
                (self._hidden / name).write(contents, sync=self.sync_files)
            return
        self._open_directory()
        self._before = (self.location / self._commit_name).identity()
        self._pending = self._create_pending()

    def _create_pending(self) -> Location:
        pending = self.location / self._own_name(pending_name(self.file_id))
        pending.write(b"", sync=False)
        return pending

    def _claim(self) -> Claim | None:
        """Returns what the other ranks must find before they write.

        Only paths of this machine may lead to another directory on another machine.
        """
        created = self._pending if self._hidden is None else self._hidden
        if created is None or created.local_path is None:
            return None
        is_new = self._created is not None
        return Claim(created.name, self._hidden is not None, socket.gethostname(), is_new)

    def _enter(self, claim: Claim | None) -> None:
        """Begins to write on any rank.

        Raises StorageError if it does not find what the claim names. The claim is ``None`` if this
        rank cannot find it by its name.
        """
        if self._commits:
            if self._pending is None and self._hidden is None:
                self._claim_directory(can_hide=False)  # A subclass replaced `prepare_global_plan`.
            return
        if claim is None:
            self.location.create_directories()
            return
        created = self.location / claim.name
        if claim.is_hidden:
            created = self._hidden = self.location.with_name(claim.name)
        if still_missing([created], f"the coordinator on host {claim.host}", _is_found):
            raise self._not_found(created, claim.host)
        self._claimed = claim

    def _not_found(self, created: Location, host: str) -> StorageError:
        """Returns the error of a rank that does not find what the coordinator has created."""
        directory = created.parent
        removed = ""
        if not directory.is_missing():
            removed = ". Otherwise another save, or a rank that failed, may have removed it"
        return StorageError(
            f"cannot save to {self.path}: rank {self.rank} on host {socket.gethostname()} does not "
            f"find {created}, which the coordinator on host {host} has created, within "
            f"{late_names.APPEARS_S:g} s. Make sure that {directory} is on storage that all ranks "
            f"share, and that links in the path lead to the same directory on all hosts{removed}"
        )

    # ---- Failure ----

    def end_failed_save(self) -> None:
        """Removes what a save that has failed has written: each rank its own files.

        The last rank also removes the pending file, and the directory if the save has created it.

        A save of this package calls it when any rank has failed. DCP's own functions do not
        report failures of other ranks to a writer. Then the next save removes the files.
        """
        pending, self._pending = self._pending, None
        hidden, self._hidden = self._hidden, None
        created, self._created = self._created, None
        finished, self._finished = self._finished, []
        claim, self._claimed = self._claimed, None
        call = current_call()
        if hidden is None and call is not None and call.is_uncommitted:
            remove_files(self.location, finished)
            if claim is not None:  # The last rank finds no data files any more.
                pending = self.location / claim.name
                created = self.location if claim.is_new else None
        if pending is not None and not _marks_data_files(pending):
            pending.discard()
        if created is not None:
            created.discard()
        if hidden is not None and self._commits:
            remove_temporary(hidden)

    def _abandon(
        self, names: Iterable[str], error: BaseException, *, may_others_begin: bool = False
    ) -> None:
        """Removes the files of a save that has failed with ``error``.

        The pending file stays if other ranks may yet search it (``may_others_begin``): without it,
        they would take the directory for one that is not shared. Raises the error of the call if
        another rank has failed and removed its files first, and StorageError if files are missing
        for an unknown reason.
        """
        names = list(names)
        is_ended = self._is_ended(names, error)
        remove_files(self._write_directory, names)
        if self._hidden is not None or not may_others_begin:
            self.end_failed_save()
        if is_ended:
            raise self._files_are_missing(error) from error

    def _is_ended(self, names: Iterable[str], error: BaseException) -> bool:
        """Returns whether a save failed because files that this rank has found are gone."""
        if not isinstance(error, NotFoundError | StorageError):
            return False
        # Another save removes the pending file first. Only one rank has such a file.
        if self._pending is not None:
            return self._pending.is_missing()
        directory = self._write_directory
        if self._hidden is not None:
            return directory.is_missing()
        return directory.is_missing() or any((directory / name).is_missing() for name in names)

    def _files_are_missing(self, error: BaseException) -> StorageError:
        """Returns the error of a rank whose files are gone. Says who did it only if that is known.

        Raises the error of the call if another rank has failed: it removes the files of the save.
        """
        call = current_call()
        if call is not None:
            call.raise_if_failed()
        if (other := self._other_save()) is not None:
            return StorageError(
                f"cannot save to {self.path}: another save, {other}, was committed there "
                "meanwhile, and files of this one are gone"
            )
        return StorageError(
            f"cannot save to {self.path}: files of this save are gone ({error}): another save or "
            "program may have removed them, or a rank of this save that failed"
        )

    def _other_save(self) -> str | None:
        """Returns the id of a save that was committed since this one began, if that is known."""
        with contextlib.suppress(CheckpointError):
            # Only the rank that commits knows what was there before, or where nothing was.
            is_new = (self.location / self._commit_name).identity() != self._before
            if is_new and (self._commits or self._hidden is not None):
                return committed_id(self.location, self._own_name(""))
        return None

    # ---- Commit ----

    def _check_files(self, files: Collection[str]) -> None:
        """Checks that the data files are in the directory, and no checkpoint that must stay.

        Raises StorageError if files are missing for 30 s, and AlreadyExistsError if another save
        has committed.
        """
        names = self._write_directory.names()
        self._check_may_replace(names)
        # A store may ignore the condition of the commit.
        is_marked = self._pending is None or self._pending.name in names
        if not is_marked and self.location.file_system.publishes_by_condition:
            raise self._files_are_missing(NotFoundError(f"there is no {self._pending}"))
        # Check each file by name as well: a network file system may return a stale listing.
        unlisted = [self._write_directory / name for name in sorted(set(files).difference(names))]
        missing = still_missing(unlisted, "its rank", Location.exists)
        if missing:
            raise StorageError(
                f"cannot commit {self.path}: the coordinator on host {socket.gethostname()} does "
                f"not find {len(missing)} data files that ranks have written, including "
                f"{missing[0]}, within {late_names.APPEARS_S:g} s. Make sure that this directory "
                "is on storage that all ranks share, and that links in the path lead to the same "
                "directory on all hosts"
            )

    def _publish_files(self, metadata: bytes, index: bytes, files: Collection[str]) -> None:
        """Commits the contents of ``.metadata`` and its index, and removes replaced files.

        Raises AlreadyExistsError if another save has committed, and ``overwrite`` is false.
        """
        try:
            if self._hidden is not None:
                try:
                    self._commit(metadata, index, files)
                except StorageError:
                    # Files remain only if the directory could not be renamed.
                    if not self._has_hidden(files):
                        raise
                    self._move_files(files)
                else:
                    end_partials(self.location, self._found_beside)
                    return
            self._commit(metadata, index, files)
        except BaseException:
            self.end_failed_save()
            raise
        collect_garbage(
            self.location,
            self._found,
            referenced=files,
            rank=None if self.use_collectives else self.rank,
            is_committed=lambda: is_committed(self.location, self.file_id, self._own_name("")),
        )

    def _commit(self, metadata: bytes, index: bytes, files: Collection[str]) -> None:
        directory, self._pending = self._write_directory, None
        try:
            commit(
                *(directory, metadata, index, self.file_id),
                files=sorted(files),
                sync=self.sync_files,
                version=self._found.version,
                prefix=self._own_name(""),
                new_name=None if self._hidden is None else self.location,
            )
        except AlreadyExistsError as error:
            raise self._files_are_missing(error) from error
        self._hidden = self._created = None

    def _has_hidden(self, files: Collection[str]) -> bool:
        """Returns whether the hidden directory is there, with all files."""
        with contextlib.suppress(CheckpointError):
            return set(files).issubset(self._write_directory.names())
        return False

    def _move_files(self, files: Collection[str]) -> None:
        """Moves the files from the hidden directory, which cannot get its name, to the other one.

        Raises AlreadyExistsError if a checkpoint must stay there, and StorageError if a file cannot
        be moved, or another save has removed it.
        """
        hidden = self._write_directory
        self._open_directory()
        try:
            self._pending = self._create_pending()
            for name in files:
                (hidden / name).rename(self.location / name)
        except BaseException as error:
            remove_files(self.location, files)
            self.end_failed_save()
            self.location.discard()  # If this save has created it.
            if isinstance(error, NotFoundError):
                raise self._files_are_missing(error) from error
            raise
        self._hidden = None
        remove_temporary(hidden)

    @property
    def _commit_name(self) -> str:
        """Name of the file that a commit on a store writes."""
        return self._own_name(_METADATA)

    @property
    def _committed_names(self) -> frozenset[str]:
        """A directory with a committed checkpoint has a file of one of these names."""
        return frozenset({self._own_name(_METADATA)})

    def _own_name(self, name: str) -> str:
        """Returns the name of metadata or index; one per rank without coordination."""
        return name if self.use_collectives or self.rank is None else f"__{self.rank}{name}"


def _marks_data_files(pending: Location) -> bool:
    """Returns whether the directory of a pending file has data files, and no checkpoint.

    Ranks that have died left these. Without a pending file, they would count as a checkpoint that
    was copied without its metadata, which nobody removes.
    """
    with contextlib.suppress(CheckpointError):
        names = pending.parent.names()
        return not prefixes_among(names) and any(name.endswith(".distcp") for name in names)
    return False


def _is_found(created: Location) -> bool:
    """Returns whether this rank finds what the coordinator has created.

    The client of a network file system may remember that the directory of it was missing. Only a
    request to create the directory then asks the server.
    """
    if not created.is_missing():
        return True
    missing = [folder for folder in created.parents if folder.is_missing()]
    if missing:
        with contextlib.suppress(CheckpointError):
            created.parent.create_directories()
        if not created.is_missing():
            return True
    for folder in missing:
        folder.discard()
    return False
