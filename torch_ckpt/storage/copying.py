"""Copies a committed checkpoint to another directory or store, file by file, ``.metadata`` last.

Each file gets its name at the target when it is complete there. So a copy that was interrupted goes
on where it ended. The files of one checkpoint may be copied by several machines, each those of its
own disk: then one of them commits, when all files have arrived. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence

from torch_ckpt._core import _native
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.late_names import still_missing
from torch_ckpt.commits.probe import check_commit
from torch_ckpt.commits.small_files import SMALL_FILES, write_small_files
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    UnsupportedError,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.filesystems.store_client import PENDING as UNPUBLISHED
from torch_ckpt.formats.committed import (
    committed_id,
    files_in,
    has_checkpoint,
    index_name,
    open_committed,
)

__all__ = ["CheckpointCopy", "is_of_another_save", "is_whole_copy"]


_Identity = tuple[int, int, bytes]
"""The save that has written a file, its length, and the checksums of its blocks."""


def _identity(index: _native.Index, number: int) -> _Identity:
    _, nbytes, sums, origin = index.file(number)
    return origin, nbytes, sums


class CheckpointCopy:
    """Copies one committed checkpoint. Used by one thread, except :meth:`cancel` and :meth:`leave`.

    Each block is verified by the checksums of the index. ``nbytes_per_s`` bounds the rate; there is
    no bound if it is 0. The copy has the save id of the source, so the same checkpoint is never
    copied twice. A checkpoint at the target is replaced, and files that the copy has lost are sent
    again.

    Args:
        source: Directory of the checkpoint.
        target: Directory of the copy.
        nbytes_per_s: Most bytes in a second.
        niceness: Niceness of the thread that copies.
        base: Directory of another checkpoint on the storage of the target. A file that both
            checkpoints have from an older save is linked, or copied by the store itself.

    Raises:
        NotFoundError: No checkpoint is committed at ``source``.
        CorruptionError: The metadata at ``source`` is damaged.
        UnsupportedError: The checkpoint has no index: stock DCP wrote it.

    Example::

        copy = CheckpointCopy(Location("/nvme/run/step-100"), Location("s3://bucket/run/step-100"))
        copy.copy_files()
        copy.commit()
    """

    def __init__(
        self,
        source: Location,
        target: Location,
        *,
        nbytes_per_s: int = 0,
        niceness: int = 0,
        base: Location | None = None,
    ) -> None:
        self.source, self.target, self.base = source, target, base
        self._niceness, self._linked_nbytes = niceness, 0
        self._index, self._metadata, self._encoded_index = _opened(source)
        self.save_id: str = self._index.save_id
        """Save id of the checkpoint."""
        self._files: Sequence[tuple[str, int]] = self._index.files
        self._job = _native.CopyJob(self._index, nbytes_per_s)
        # After an error, the files that have arrived stay, with their mark, for another try.
        self._transaction = CheckpointTransaction(target, self.save_id, keeps_files=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(nbytes for _, nbytes in self._files)

    @property
    def read_nbytes(self) -> int:
        """Bytes that were read and verified so far."""
        return self._job.copied_nbytes

    @property
    def done_nbytes(self) -> int:
        """Bytes that were copied or linked so far."""
        return self.read_nbytes + self._linked_nbytes

    def cancel(self) -> None:
        """Makes the copy fail with CancelledError. Any thread may call it."""
        self._job.cancel()

    def leave(self) -> None:
        """Cancels the part of this process in the copy. An agent may go on with its own."""
        self.cancel()

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is committed at the target, and whole there."""
        return self._is_committed and not self.missing_files()

    @property
    def _is_committed(self) -> bool:
        """Whether the checkpoint is committed at the target. Files of it may be lost."""
        return committed_id(self.target) == self.save_id

    @property
    def is_of_source(self) -> bool:
        """Whether the source still has this checkpoint, and not that of a later save."""
        return committed_id(self.source) == self.save_id

    def copy_files(self) -> None:
        """Copies the data files that the source has, and the target does not have yet.

        Raises:
            CancelledError: :meth:`cancel` was called.
            CorruptionError: A file of the source is damaged.
            StorageError: A file cannot be read or written.
        """
        self.target.parent.create_directories()
        check_commit(self.target.parent, self.target, sync=True)
        self.target.create_directories()
        if not self._is_committed:
            self._transaction.create_pending()  # Other saves and garbage collection know it by it.
        here = set(self.source.names())
        ours = [entry for entry in self._files if entry[0] in here]  # Not of other machines.
        arrived = files_in(self.target, ours)
        for number, (name, _) in enumerate(self._files):
            if name in here and name not in arrived and not self._link(number, name):
                self._copy(number, name)
        self.target.sync()

    def copy_small_files(self) -> None:
        """Copies the small files of a step, before the commit.

        Raises:
            StorageError: A file cannot be read or written.
        """
        names = SMALL_FILES.intersection(self.source.names())
        files = {name: (self.source / name).read() for name in names}
        write_small_files(self.target, files, sync=True)

    def missing_files(self) -> list[str]:
        """Returns the names of the data files that the target does not have with their lengths."""
        files, arrived = self._files, set(self.target.names())
        # Usual while other machines send theirs: then no lengths are read.
        if absent := [name for name, _ in files if name not in arrived]:
            return absent
        sound = files_in(self.target, files)
        return [name for name, _ in files if name not in sound]

    def await_others(
        self, ended: Callable[[], Sequence[str] | None], pause: Callable[[], None]
    ) -> None:
        """Waits until the files have arrived that other machines copy.

        ``ended`` returns why each of these copies no more files, with an empty text if it has
        copied all that it has, or ``None`` while one may copy some. ``pause`` waits for a moment.

        Raises:
            CorruptionError: No machine copies some of the files.
        """
        missing: Sequence[str] = ()
        others = LongWait(
            lambda: (
                f"{len(missing)} files of {self.target}, including {missing[0]}, which other "
                "machines copy"
            )
        )
        while True:
            reasons = ended()  # First: what has arrived before is found below.
            missing = self.missing_files()
            if not missing:
                return
            if reasons is not None:
                problems = list(filter(None, reasons))
                if problems or not reasons or (missing := self._still_missing(missing)):
                    raise CorruptionError(
                        f"no machine has {len(missing)} of its files any more, including "
                        f"{missing[0]}. {'; '.join(problems) or self.source}"
                    )
            others.log()
            pause()

    def _still_missing(self, names: Collection[str]) -> list[str]:
        """Waits for files that this machine may find late; returns those that do not appear."""
        lengths = {self.target / n: nbytes for n, nbytes in self._files if n in names}

        def is_found(file: Location) -> bool:
            with contextlib.suppress(NotFoundError):
                return file.nbytes() == lengths[file]
            return False

        return [file.name for file in still_missing(list(lengths), "another machine", is_found)]

    def commit(self, check: Callable[[], None] = lambda: None) -> None:
        """Commits the copy. All data files must have arrived.

        ``check`` is called when it is known which checkpoint would be replaced.

        Raises:
            CheckpointError: A data file is missing.
            StorageError: Another save was committed at the target meanwhile, or the store failed.
                In the second case, the checkpoint may be committed.
        """
        is_committed = self._is_committed  # Then it had lost only data files.
        if not is_committed:
            self._transaction.resume()
        check()
        if missing := self.missing_files():
            raise CheckpointError(
                f"cannot commit {self.target}: {len(missing)} data files of {self.source} have not "
                f"arrived, including {missing[0]}"
            )
        if is_committed:
            return
        names = [name for name, _ in self._files]
        self._transaction.commit(self._metadata, self._encoded_index, names)

    def _link(self, number: int, name: str) -> bool:
        """Takes a file from the base, if both are links to one file; returns whether it did.

        Both have been written by one save, and have the same length and checksums.
        """
        found = None
        if self._index.origin(number):
            found = self._in_base.get(_identity(self._index, number))
        if self.base is None or found is None:
            return False
        try:
            (self.target / name).discard()  # What is there is incomplete.
            if (self.base / found).nbytes() != self._files[number][1]:
                return False
            (self.base / found).link(self.target / name, sync=True)
        except CheckpointError:
            return False
        self._linked_nbytes += self._files[number][1]
        return True

    @functools.cached_property
    def _in_base(self) -> Mapping[_Identity, str]:
        """The files of the base."""
        index = None
        if self.base is not None:
            with contextlib.suppress(CheckpointError):
                index = open_committed(self.base, "")[1]
        if index is None:
            return {}
        return {_identity(index, n): name for n, (name, _) in enumerate(index.files)}

    def _copy(self, number: int, name: str) -> None:
        target = self.target / name
        partial = target
        if target.file_system.writes_at_offsets:
            partial = target.with_name(f"{UNPUBLISHED}{secrets.token_hex(8)}-{name}")
        source = self.source / name
        try:
            self._job.copy(
                *(number, source.file_system, source.path),
                *(partial.file_system, partial.path, self._niceness),
            )
            if partial is not target:
                partial.rename(target)
        except BaseException:
            partial.discard()
            raise


def _opened(source: Location) -> tuple[_native.Index, bytes, bytes]:
    """Returns the index of a checkpoint, and the contents of its ``.metadata`` and index files."""
    opened, index = open_committed(source, "")
    if index is None:
        raise UnsupportedError(
            f"cannot copy {source}: it has no index, since stock DCP wrote it; use "
            "torch-ckpt convert"
        )
    pickled = opened.read_pickle()  # Verified. The copy has the same bytes, or it is none.
    index.check()
    metadata = (source / ".metadata").read()
    encoded = (source / index_name(index.save_id)).read()
    if committed_id(source) != index.save_id:
        raise NotFoundError(f"cannot copy {source}: another save has replaced it meanwhile")
    if not metadata.startswith(pickled):
        raise CorruptionError(
            f"cannot copy {source}: .metadata differs between two reads; its disk or "
            "memory is damaged"
        )
    return index, metadata, encoded


def is_whole_copy(source: Location, target: Location) -> bool:
    """Returns whether a checkpoint is also committed at the target, and whole there.

    Raises StorageError if that is unknown because files cannot be read.
    """
    with contextlib.suppress(CorruptionError, NotFoundError, UnsupportedError):
        index = open_committed(target, "")[1]
        if index is not None and index.save_id == committed_id(source):
            return len(files_in(target, index.files)) == len(index.files)
    return False


def is_of_another_save(source: Location, target: Location) -> bool:
    """Returns whether another save has committed the checkpoint at the target.

    If the metadata there is damaged, the names of the data files show it: each save has its own.
    Raises StorageError if that is unknown because files cannot be read.
    """
    found, index = committed_id(target), None
    with contextlib.suppress(CorruptionError, NotFoundError, UnsupportedError):
        index = open_committed(source, "")[1]
    if found is not None or index is None:
        return found != (None if index is None else index.save_id)
    with contextlib.suppress(NotFoundError):
        return has_checkpoint(target) and not {name for name, _ in index.files}.intersection(
            target.names()
        )
    return False
