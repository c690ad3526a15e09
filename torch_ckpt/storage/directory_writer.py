"""The methods of FastWriter for its directory: where a save writes and publishes its files.

A save to a directory that exists has a pending file there (:mod:`torch_ckpt.storage.gc`). A new
checkpoint is written to a hidden directory (:mod:`torch_ckpt.storage.temporary`), which the commit
renames.
"""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Collection, Iterable, Mapping

from torch.distributed.checkpoint.planner import SavePlan

from torch_ckpt.errors import AlreadyExistsError, CheckpointError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id, metadata_prefixes
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.staging.staging_writer import StagingWriter
from torch_ckpt.storage.gc import (
    Found,
    collect_garbage,
    find,
    pending_name,
    pending_pattern,
    remove_files,
)
from torch_ckpt.storage.temporary import (
    can_be_renamed,
    remove_abandoned,
    temporaries_of,
    temporary,
)

__all__ = ["DIRECTORY_ATTRIBUTE", "TAKEN", "DirectoryWriter"]

_METADATA = ".metadata"
_INDEX = ".index"

DIRECTORY_ATTRIBUTE = "torch_ckpt_directory"
"""Attribute of DCP's ``storage_data`` with the name of the hidden directory."""

TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
"""Errors of renaming a directory to the name of one that is not empty."""


class DirectoryWriter(StagingWriter):
    """A storage writer that knows where one save writes its files.

    Args:
        path: Directory of the checkpoint, as a path or URL.
        stager: As for :class:`StagingWriter`.
    """

    overwrite: bool
    save_id: str
    sync_files: bool

    def __init__(self, path: str | os.PathLike[str], stager: SnapshotStager | None) -> None:
        super().__init__(path, stager)
        self.location = self._directory.absolute
        """Directory of the present save. Links in its path are resolved when a save begins."""
        self.rank: int | None = None
        self.use_collectives = True
        self._write_directory = self.location  # Where this save writes its files.
        self._is_new = False  # Whether the commit may rename a directory to `location`.
        self._found = Found()  # What the directory had before this save.
        self._found_beside: frozenset[str] = frozenset()  # Directories of other first saves.
        # On the rank that commits: the pending file, or the directory that the commit renames.
        self._pending: Location | None = None

    @property
    def path(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint: a path of this machine, or a URL."""
        return self._directory.given.checkpoint_id

    # ---- Begin ----

    def _find_directory(self) -> None:
        """Chooses where to write, on every rank.

        Raises:
            AlreadyExistsError: A checkpoint is committed and ``overwrite`` is false.
        """
        self._write_directory = self.location
        is_coordinated = self.use_collectives or self.rank is None
        self._is_new = is_coordinated and can_be_renamed(self.location)
        if not self._is_new:
            self._open_directory()

    def _open_directory(self) -> None:
        """Creates and lists the directory of the checkpoint.

        Raises:
            AlreadyExistsError: A checkpoint is committed and ``overwrite`` is false.
        """
        self.location.create_directories()
        self._found = find(self.location, self._pending_pattern)
        if self._committed_names.isdisjoint(self._found.names):
            return
        if not self.overwrite:
            raise AlreadyExistsError(
                f"cannot save to {self.path}: Checkpoint already exists, and overwrite is false"
            )
        if not self.rank:
            warnings.warn(
                f"Detected an existing checkpoint in {self.path}, overwriting since "
                f"{self.overwrite=}.",
                stacklevel=2,
            )

    @property
    def _pending_pattern(self) -> str:
        return pending_pattern(None if self.use_collectives else self.rank)

    def _begin(self, can_hide: bool) -> None:
        """Begins the save on the rank that commits.

        Creates the pending file, or for a new checkpoint the hidden directory that the commit
        renames.

        Args:
            can_hide: Whether all ranks receive the name of a hidden directory.
        """
        if self._is_new and can_hide:
            self._found_beside = temporaries_of(self.location)
            self._write_directory = self._pending = temporary(
                self.location, "partial", self.save_id
            )
            self._write_directory.create_directories()
            return
        if self._is_new:
            self._open_directory()
        self._pending = self._create_pending()

    def _create_pending(self) -> Location:
        """Creates the pending file."""
        pending = self.location / self._own_name(pending_name(self.save_id))
        pending.write(b"", sync=False)
        return pending

    @property
    def _hidden_name(self) -> str | None:
        """Name of the hidden directory in which this save writes; ``None`` if there is none."""
        return None if self._write_directory == self.location else self._write_directory.name

    def _directory_of(self, plan: SavePlan) -> str | None:
        """Returns the name of the hidden directory in a plan of the coordinator."""
        return getattr(plan.storage_data, DIRECTORY_ATTRIBUTE, None)

    def _enter(self, hidden: str | None) -> None:
        """Begins to write on any rank.

        Raises:
            StorageError: The hidden directory of the coordinator is not there.
        """
        if hidden == self._hidden_name:
            if hidden is None and self._is_new:
                self.location.create_directories()
            return
        self._write_directory = self.location if hidden is None else self.location.with_name(hidden)
        if not self._write_directory.is_directory():
            raise StorageError(
                f"cannot save to {self.path}: this rank does not find {self._write_directory}, "
                "which the coordinator has created; is the storage the same on all ranks?"
            )

    def _enter_existing(self, names: Mapping[str, str]) -> None:
        """Moves the files to the directory of the checkpoint, which somebody else has made.

        Args:
            names: Name of each file in the hidden directory, and its new name.
        """
        hidden, self._write_directory, self._pending = self._write_directory, self.location, None
        try:
            self._open_directory()
            self._pending = self._create_pending()
            for before, after in names.items():
                (hidden / before).rename(self.location / after)
            if self.sync_files:
                self.location.sync()
        except BaseException:
            self._remove_files(names.values())
            self._end()
            raise
        finally:
            with contextlib.suppress(CheckpointError):
                hidden.remove_all()

    # ---- Failure ----

    def _end(self) -> None:
        """Removes the pending file of a save that has failed, or its directory if it is empty."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.discard()
        self._write_directory = self.location

    def _abandon(self, names: Iterable[str], error: BaseException) -> None:
        """Removes the files of a save that has failed.

        Raises:
            StorageError: The save failed because another one has removed a file of this one.
        """
        names, is_ended = list(names), False
        if isinstance(error, NotFoundError | StorageError):
            # The other save has removed the pending file first. Only one rank has such a file.
            own = (
                [self._pending]
                if self._pending
                else [self._write_directory / name for name in names]
            )
            with contextlib.suppress(CheckpointError):
                is_ended = not all(file.exists() for file in own)
        self._remove_files(names)
        self._end()
        if is_ended:
            raise self._ended_by_other() from error

    def _ended_by_other(self) -> StorageError:
        other = None
        with contextlib.suppress(CheckpointError):
            other = self._other_save()
        who = "save or program" if other is None else f"save, {other}, was committed there and"
        return StorageError(
            f"cannot save to {self.path}: another {who} has removed the files of this one"
        )

    def _other_save(self) -> str | None:
        """Returns the id of the committed save."""
        return committed_id(self.location, self._own_name(""))

    # ---- Commit ----

    def _check_files(self, files: Collection[str]) -> None:
        """Checks that the data files of this save are in the directory.

        Raises:
            StorageError: Files are missing.
        """
        unlisted = set(files).difference(self._write_directory.names())
        # Check each file by name as well: a network file system may return a stale listing.
        missing = sorted(name for name in unlisted if not (self._write_directory / name).exists())
        if missing:
            raise StorageError(
                f"cannot commit {self.path}: {len(missing)} data files of this save are missing, "
                f"including {missing[0]}; is the storage the same on all ranks, or has a link in "
                "the path led them to different directories?"
            )

    def _remove_files(self, names: Iterable[str]) -> None:
        remove_files(self._write_directory, names)

    def _publish_files(self, metadata: bytes, index: bytes, files: Collection[str]) -> None:
        """Commits, and removes replaced files.

        Args:
            metadata: Content of ``.metadata``.
            index: Content of ``.index``.
            files: Names of the data files.

        Raises:
            StorageError: The commit failed.
        """
        if self._hidden_name is not None:
            if self._commit(metadata, index, files):
                self._appeared()
                return
            self._enter_existing(dict(zip(files, files, strict=True)))
        self._commit(metadata, index, files)
        collect_garbage(
            self.location,
            self._found,
            referenced=files,
            rank=None if self.use_collectives else self.rank,
            is_committed=self._is_committed,
        )

    def _commit(self, metadata: bytes, index: bytes, files: Collection[str]) -> bool:
        """Commits. Returns false if a hidden directory cannot get its name, which somebody uses."""
        is_hidden = self._hidden_name is not None
        self._pending = None
        try:
            self.location.file_system.commit(
                self._write_directory.path,
                self._own_name(_METADATA),
                self._own_name(_INDEX),
                metadata,
                index,
                self.save_id,
                sorted(files),
                self.sync_files,
                self.location.path if is_hidden else None,
            )
        except NotFoundError as error:
            raise self._ended_by_other() from error
        except StorageError as error:
            if is_hidden and error.errno in TAKEN:
                return False
            raise
        return True

    def _appeared(self) -> None:
        """Ends a save whose directory has its name, and removes those of dead saves."""
        self._write_directory = self.location
        remove_abandoned(self.location.parent, found=self._found_beside)

    def _is_committed(self) -> bool:
        """Returns whether this save is the committed one, of all ranks or of this rank alone."""
        prefixes = metadata_prefixes(self.location)
        own = self._own_name("")
        is_mixed = "" in prefixes and len(prefixes) > 1
        return not is_mixed and committed_id(self.location, own) == self.save_id

    @property
    def _committed_names(self) -> frozenset[str]:
        """A directory with a committed checkpoint has a file of one of these names."""
        return frozenset({self._own_name(_METADATA)})

    def _own_name(self, name: str) -> str:
        """Returns the name of ``.metadata`` or ``.index``; one per rank without coordination."""
        return name if self.use_collectives or self.rank is None else f"__{self.rank}{name}"
