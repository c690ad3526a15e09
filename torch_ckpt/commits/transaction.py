"""Transaction: the files of one save, which appear in a directory together, or not at all.

The committing process begins a transaction before any file of the save is written, and commits it
once all files are complete. In between, other processes write files to its directory; each joins
with the :class:`Claim` of the process that has begun it. How the files appear depends on the
storage: see the subclasses in :mod:`torch_ckpt.commits.checkpoint` and
:mod:`torch_ckpt.commits.model`.

Several saves to one directory may overlap. Each has a pending file, which shows it to the others
(:mod:`torch_ckpt.commits.garbage`). Removing that file ends the save.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import socket
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch_ckpt.commits import late_names
from torch_ckpt.commits.garbage import Found, find, remove_files
from torch_ckpt.commits.late_names import still_missing
from torch_ckpt.commits.probe import created
from torch_ckpt.commits.temporary import (
    has_temporaries,
    remove_abandoned,
    remove_temporary,
)
from torch_ckpt.coordination.current_call import current_call
from torch_ckpt.errors import AlreadyExistsError, CheckpointError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location

__all__ = ["Claim", "Transaction", "rename", "sync_with_folders_above"]


@dataclass(frozen=True)
class Claim:
    """What the committing process, on ``host``, has created before other processes write.

    ``name`` is the name of the hidden directory beside the target, or of the pending file in the
    target. ``is_new``: whether that process has created the target as well.
    """

    name: str
    is_hidden: bool
    host: str
    is_new: bool

    def attach_to(self, storage_data: Any) -> Any:
        """Returns DCP's ``storage_data`` of a plan with this claim attached."""
        placed = copy.copy(storage_data)
        setattr(placed, _ATTRIBUTE, dataclasses.astuple(self))
        return placed

    @staticmethod
    def of(storage_data: Any) -> Claim | None:
        """Returns the claim of a plan's ``storage_data``; ``None`` without one."""
        values = getattr(storage_data, _ATTRIBUTE, None)
        return None if values is None else Claim(*values)


_ATTRIBUTE = "torch_ckpt_claim"


class Transaction(ABC):
    """The files of one save in the directory ``target``, as one process sees them.

    The process that commits calls :meth:`begin`, :meth:`check` and ``commit``; others call
    :meth:`join`. Any of them may call :meth:`abandon` until then. Used by one thread at a time.

    Args:
        target: Directory in which the files appear.
        save_id: 16 hexadecimal digits, unique to the save. File names contain them.
        sync: Whether the files must survive a power cut once they have appeared.
        may_replace: Whether the files may replace those that an earlier save has committed.
        supersedes: Whether the files may replace those committed since this save began. A store
            never permits that.
        name: Name of the target in messages; its path by default.
    """

    commit_name: str
    """Name of the file whose appearance is the commit on a store."""

    committed_names: frozenset[str]
    """Names of files, one of which exists in every directory with a committed save."""

    pending_pattern: str
    """Pattern of the pending files of saves that may replace each other."""

    def __init__(
        self,
        target: Location,
        save_id: str,
        *,
        sync: bool = True,
        may_replace: bool = True,
        supersedes: bool = True,
        name: object = None,
    ) -> None:
        self.target, self.save_id, self.sync = target, save_id, sync
        self.found = Found()
        """The listing of the target when this process began."""
        self._may_replace, self._supersedes = may_replace, supersedes
        self._name = target if name is None else name
        self._hidden: Location | None = None  # Where the files are written, if not to `target`.
        self._pending: Location | None = None  # The pending file, if this process has created it.
        self._has_created = False  # Whether this process has created the target.
        self._before: object = None  # Identity of the file that the commit replaces.
        self._id_before: str | None = None  # Its save id, if this save must not supersede others.
        self.commits = False
        """Whether this process has begun the save, rather than joined it."""
        self._is_committed = False  # Whether this process has committed it.
        self._claim: Claim | None = None  # Set by `join`.

    @property
    def directory(self) -> Location:
        """The directory to which files are written before the commit."""
        return self.target if self._hidden is None else self._hidden

    @property
    def is_hidden(self) -> bool:
        """Whether the files are written to a hidden directory, which the commit renames."""
        return self._hidden is not None

    @property
    def has_begun(self) -> bool:
        """Whether this process has begun the transaction, and neither ended nor committed it."""
        return self.commits and (self._pending is not None or self._hidden is not None)

    @property
    def replaces(self) -> bool:
        """Whether the target had a committed save when this process began."""
        return not self.committed_names.isdisjoint(self.found.names)

    # ---- Begin ----

    def begin(self) -> None:
        """Begins the save, before any process writes a file of it.

        Creates the target, lists it, and creates the pending file. Other processes must not access
        a directory before it exists: the client of a network file system would cache that it is
        missing. Removes hidden directories of dead saves, which may have filled the disk.

        Raises:
            AlreadyExistsError: The target has a committed save, and this one may not replace it.
            StorageError: The file system refuses a call that a commit needs, or has failed.
        """
        self.commits = True
        self._remove_abandoned()
        self._begin_in_target()

    def warn_if_replacing(self) -> None:
        """Warns, as DCP does, if the save will replace a committed checkpoint."""
        if self.replaces:
            warnings.warn(
                f"Detected an existing checkpoint in {self._name}, overwriting since "
                "self.overwrite=True.",
                stacklevel=2,
            )

    def _remove_abandoned(self) -> list[str]:
        """Returns the temporaries beside the target whose owners may be alive."""
        parent = self.target.parent
        parent.create_directories()
        if parent.file_system.renames_directories(parent.path):
            return remove_abandoned(parent)
        return []

    def _begin_in_target(self) -> None:
        with created(self.target, self.sync) as is_new:
            self.found = find(self.target, self.pending_pattern, self.commit_name)
            if has_temporaries(self.found.names):  # For example of a killed probe.
                remove_abandoned(self.target)
            self._check_may_replace(self.found.names)
            if self._hidden is None:  # Otherwise it began when the target did not exist.
                self._find_committed()
            self._pending = self._create_pending()
        self._has_created = is_new

    def _find_committed(self) -> None:
        self._before = (self.target / self.commit_name).identity()
        self._id_before = None if self._supersedes else self._committed_id()

    @abstractmethod
    def _create_pending(self) -> Location:
        """Creates and returns the pending file, with other files that must exist from then on."""

    def _check_may_replace(self, names: Collection[str]) -> None:
        if not self._may_replace and not self.committed_names.isdisjoint(names):
            raise AlreadyExistsError(
                f"cannot save to {self._name}: Checkpoint already exists, and overwrite is false"
            )

    # ---- Other processes ----

    @property
    def claim(self) -> Claim | None:
        """The claim that other processes must find before they write; ``None`` on a store.

        A path may lead to different directories on different machines, a URL does not.
        """
        created = self._pending if self._hidden is None else self._hidden
        if created is None or created.local_path is None:
            return None
        is_hidden = self._hidden is not None
        return Claim(created.name, is_hidden, socket.gethostname(), self._has_created)

    def join(self, claim: Claim | None, rank: int | None) -> None:
        """Begins to write on a rank that does not commit.

        ``claim`` is ``None`` if there is nothing to find. Raises StorageError if this rank does not
        find the claimed file or directory.
        """
        if claim is None:
            self.target.create_directories()
            return
        created = self.target / claim.name
        if claim.is_hidden:
            created = self.target.with_name(claim.name)
        if still_missing([created], f"the coordinator on host {claim.host}", _is_found):
            raise self._not_found(created, claim.host, rank)
        self._claim = claim
        self._hidden = created if claim.is_hidden else None

    def _not_found(self, created: Location, host: str, rank: int | None) -> StorageError:
        directory = created.parent
        removed = ""
        if not directory.is_missing():
            removed = ". Otherwise another save, or a rank that failed, may have removed it"
        return StorageError(
            f"cannot save to {self._name}: rank {rank} on host {socket.gethostname()} does not "
            f"find {created}, which the coordinator on host {host} has created, within "
            f"{late_names.APPEARS_S:g} s. Make sure that {directory} is on storage that all ranks "
            f"share, and that links in the path lead to the same directory on all hosts{removed}"
        )

    # ---- Before the commit ----

    def check(self, files: Collection[str]) -> None:
        """Checks that all files exist, and that the options allow to replace the committed save.

        Raises:
            AlreadyExistsError: Another save was committed, and this one may not replace it.
            CheckpointError: Another save was committed, and this one may not supersede it.
            StorageError: Files are missing for 30 s, or another save has ended this one.
        """
        names = self.directory.names()
        self._check_may_replace(names)
        if not self._supersedes and (now := self._committed_id()) != self._id_before:
            raise CheckpointError(
                f"cannot commit {self._name}: another save, {now}, was committed there meanwhile"
            )
        # A store may ignore the condition of the commit.
        is_marked = self._pending is None or self._pending.name in names
        if not is_marked and self.target.file_system.publishes_by_condition:
            raise self.files_are_missing(NotFoundError(f"there is no {self._pending}"))
        # Each file by name as well: a network file system may return a stale listing.
        unlisted = [self.directory / name for name in sorted(set(files).difference(names))]
        missing = still_missing(unlisted, "its rank", Location.exists)
        if missing:
            raise StorageError(
                f"cannot commit {self._name}: the coordinator on host {socket.gethostname()} does "
                f"not find {len(missing)} data files that ranks have written, including "
                f"{missing[0]}, within {late_names.APPEARS_S:g} s. Make sure that this directory "
                "is on storage that all ranks share, and that links in the path lead to the same "
                "directory on all hosts"
            )

    # ---- Failure ----

    def remove(self, files: Collection[str], *, may_others_begin: bool) -> None:
        """Removes files of the save, which fails on this process; ignores errors.

        Args:
            files: Names of files that this process has written.
            may_others_begin: Whether others may yet begin to write.
        """
        remove_files(self.directory, set(files) - self.committed_names)

    def abandon(self, files: Iterable[str] = ()) -> None:
        """Ends the save on this process, unless it is committed, and removes its files.

        ``files`` are files of this process that no process can commit any more. The last process
        also removes the pending file, and the target if the save has created it. Ignores errors,
        and has no effect after a commit.
        """
        if self._is_committed:
            return
        pending, self._pending = self._pending, None
        hidden, self._hidden = self._hidden, None
        claim, self._claim = self._claim, None
        if hidden is None:
            remove_files(self.target, files)
            if claim is not None:  # The last rank finds no more data files.
                pending = self.target / claim.name
                self._has_created = claim.is_new
        elif self.commits:
            remove_temporary(hidden)
        if pending is not None and not self._marks_data_files(pending):
            pending.discard()
        self._discard_created()

    def _marks_data_files(self, pending: Location) -> bool:
        """Returns whether garbage collection needs the pending file of a save that has failed."""
        return False

    def discard_pending(self) -> None:
        """Removes the pending file, even if others have not yet removed their data files."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.discard()
        self._discard_created()

    def _discard_created(self) -> None:
        if self._has_created:
            self._has_created = False
            self.target.discard()  # Fails if it has files.

    def is_ended(self, files: Iterable[str], error: BaseException) -> bool:
        """Returns whether a save failed because files that this process has found were removed."""
        if not isinstance(error, NotFoundError | StorageError):
            return False
        # Another save removes the pending file first. Only one process has such a file.
        if self._pending is not None:
            return self._pending.is_missing()
        if self._hidden is not None:
            return self._hidden.is_missing()
        return self.target.is_missing() or any((self.target / f).is_missing() for f in files)

    def files_are_missing(self, error: BaseException) -> StorageError:
        """Returns the error of a process whose files were removed. Names the cause only if known.

        If another rank has failed, raises the error of the call: a failed rank removes the files.
        """
        call = current_call()
        if call is not None:
            call.raise_if_failed()
        if (other := self._other_save()) is not None:
            return StorageError(
                f"cannot save to {self._name}: another save, {other}, was committed there "
                "meanwhile, and files of this one are gone",
                errno.EEXIST,
            )
        return StorageError(
            f"cannot save to {self._name}: files of this save are gone ({error}): another save or "
            "program may have removed them, or a rank of this save that failed"
        )

    def _other_save(self) -> str | None:
        """Returns the id of a save that was committed since this one began, if that is known."""
        with contextlib.suppress(CheckpointError):
            # Only the committing process has read the old identity. A new target has none.
            is_new = (self.target / self.commit_name).identity() != self._before
            if is_new and (self.commits or self._hidden is not None):
                return self._committed_id()
        return None

    def _committed_id(self) -> str | None:
        """Returns the id of the committed save, if its files have one."""
        return None


def _is_found(created: Location) -> bool:
    """Returns whether this process finds the file or directory of a claim.

    The client of a network file system may cache that the parent directory is missing. Only a
    request to create the directory then reaches the server.
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


def rename(path: Location, to: Location) -> None:
    """Renames a file; succeeds also if a network file system has lost the reply, and asks again."""
    identity = path.identity()
    try:
        path.rename(to)
        path.discard()  # If both are links to one file, the rename has changed nothing.
    except NotFoundError:
        if identity is None or identity != to.identity():
            raise


def sync_with_folders_above(directory: Location) -> None:
    """Syncs a directory, and those above it that this process may open."""
    directory.sync()
    for folder in directory.parents:
        try:
            folder.sync()
        except StorageError as error:
            # A directory that this process must not open was not created by this save.
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
