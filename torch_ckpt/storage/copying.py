"""Copies a committed checkpoint to another directory or store, file by file, ``.metadata`` last.

Each file gets its final name at the target once it is complete, so an interrupted copy can
resume. Several machines may copy the files of one checkpoint, each the files on its disk. Then
one of them commits when all files have arrived. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch_ckpt._core import _native
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.late_names import still_missing
from torch_ckpt.commits.probe import check_commit
from torch_ckpt.commits.small_files import SMALL_FILES, write_small_files
from torch_ckpt.commits.transaction import rename
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
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
"""The save that wrote a file, its length, and the checksums of its blocks."""


def _identity(index: _native.Index, number: int) -> _Identity:
    _, nbytes, sums, origin = index.file(number)
    return origin, nbytes, sums


class CheckpointCopy:
    """Copies one committed checkpoint. Used by one thread, except :meth:`cancel` and :meth:`leave`.

    Each block is verified against the checksums of the index. ``nbytes_per_s`` limits the rate; 0
    for no limit. The copy has the save id of the source, so the same checkpoint is never copied
    twice. A checkpoint at the target is replaced. Files missing from the copy are sent again.
    Several processes may copy the same checkpoint at once: the first commits it, and removes the
    pending files of the others, whose copies then end as well.

    Args:
        source: Directory of the checkpoint.
        target: Directory of the copy.
        nbytes_per_s: Maximum bytes per second.
        niceness: Niceness of the thread that copies.
        base: Directory of another checkpoint on the storage of the target. If both checkpoints
            contain a file of an older save, it is linked, or copied within the store.

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
        # After an error, the arrived files and their pending file remain for another attempt.
        self._transaction = CheckpointTransaction(target, self.save_id, keeps_files=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(nbytes for _, nbytes in self._files)

    @property
    def read_nbytes(self) -> int:
        """Number of bytes read and verified so far."""
        return self._job.copied_nbytes

    @property
    def done_nbytes(self) -> int:
        """Number of bytes copied or linked so far."""
        return self.read_nbytes + self._linked_nbytes

    def cancel(self) -> None:
        """Makes the copy fail with CancelledError. Any thread may call it."""
        self._job.cancel()

    def leave(self) -> None:
        """Cancels the copy in this process. An agent may continue its part of the copy."""
        self.cancel()

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is committed at the target, and whole there."""
        with contextlib.suppress(NotFoundError):  # It is removed now.
            return self._is_committed and not self.missing_files()
        return False

    @property
    def _is_committed(self) -> bool:
        """Whether the checkpoint is committed at the target. Its files may have been lost."""
        return committed_id(self.target) == self.save_id

    @property
    def is_of_source(self) -> bool:
        """Whether the source still has this checkpoint, rather than one of a later save."""
        return committed_id(self.source) == self.save_id

    def copy_files(self) -> None:
        """Copies the data files that exist at the source, and not yet at the target.

        Raises:
            CancelledError: :meth:`cancel` was called.
            CorruptionError: A file of the source is damaged.
            StorageError: A file cannot be read or written.
        """
        self.target.parent.create_directories()
        check_commit(self.target.parent, self.target, sync=True)
        self.target.create_directories()
        if not self._is_committed:
            self._transaction.create_pending()  # Marks the copy for other saves and gc.
        try:
            self._copy_missing()
        except (NotFoundError, StorageError):
            if not self._is_done_by_another():
                raise
        self.target.sync()

    def _copy_missing(self) -> None:
        here = set(self.source.names())
        ours = [entry for entry in self._files if entry[0] in here]  # Not on other machines.
        arrived = files_in(self.target, ours)
        for number, (name, _) in enumerate(self._files):
            if name in here and name not in arrived and not self._link(number, name):
                self._copy(number, name)

    def _is_done_by_another(self) -> bool:
        """Returns whether a process that copies the same checkpoint has committed it, whole.

        Its commit removes the pending files of this copy, and the source may be removed next.
        """
        with contextlib.suppress(CheckpointError):
            return self.is_done
        return False

    def copy_small_files(self) -> None:
        """Copies the small files of a step, before the commit.

        Raises:
            StorageError: A file cannot be read or written.
        """
        names = SMALL_FILES.intersection(self.source.names())
        files = {name: (self.source / name).read() for name in names}
        write_small_files(self.target, files, sync=True)

    def missing_files(self) -> list[str]:
        """Returns the names of the data files that the target lacks, or has with other lengths."""
        files, arrived = self._files, set(self.target.names())
        # Usual while other machines send files; avoids reading lengths.
        if absent := [name for name, _ in files if name not in arrived]:
            return absent
        sound = files_in(self.target, files)
        return [name for name, _ in files if name not in sound]

    def await_others(
        self, ended: Callable[[], Sequence[str] | None], pause: Callable[[], None]
    ) -> None:
        """Waits until the files that other machines copy have arrived.

        ``ended`` returns why each of them copies no more files, empty if it has copied all its
        files; or ``None`` while one may still copy some. ``pause`` waits for a moment.

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
            reasons = ended()  # First, so that files that arrived before are found below.
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
        """Waits for files that may appear late on this machine; returns those still missing."""
        lengths = {self.target / n: nbytes for n, nbytes in self._files if n in names}

        def is_found(file: Location) -> bool:
            with contextlib.suppress(NotFoundError):
                return file.nbytes() == lengths[file]
            return False

        return [file.name for file in still_missing(list(lengths), "another machine", is_found)]

    def commit(self, check: Callable[[], None] = lambda: None) -> None:
        """Commits the copy. All data files must have arrived.

        ``check`` is called once the checkpoint to be replaced is known.

        Raises:
            CheckpointError: A data file is missing.
            StorageError: Another save was committed at the target meanwhile, or the store failed.
                In the second case, the checkpoint may be committed.
        """
        is_committed = self._is_committed  # Only data files were missing.
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
        """Links a file from the base, if it is the same file there; returns whether it did.

        It is if one save wrote both, and length and checksums are equal.
        """
        found = None
        if self._index.origin(number):
            found = self._in_base.get(_identity(self._index, number))
        if self.base is None or found is None:
            return False
        try:
            if (self.base / found).nbytes() != self._files[number][1]:
                return False
            with self._unpublished(name) as partial:
                (self.base / found).link(partial, sync=True)
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
        source = self.source / name
        with self._unpublished(name) as partial:
            self._job.copy(
                *(number, source.file_system, source.path),
                *(partial.file_system, partial.path, self._niceness),
            )

    @contextlib.contextmanager
    def _unpublished(self, name: str) -> Iterator[Location]:
        """Yields the location of a new file, which gets its name at the end of the block.

        So it replaces an incomplete file, or the same one of another process, at once.
        """
        target = partial = self.target / name
        if target.file_system.writes_at_offsets:
            partial = target.with_name(f"{UNPUBLISHED}{secrets.token_hex(8)}-{name}")
        try:
            yield partial
            if partial is not target:
                rename(partial, target)
        except BaseException:
            if partial is not target:  # A store has no incomplete file, but perhaps another's.
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
    pickled = opened.read_pickle()  # Verified: the copy must have the same bytes.
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
    """Returns whether a checkpoint is also committed and whole at the target.

    Raises StorageError if that is unknown because files cannot be read.
    """
    with contextlib.suppress(CorruptionError, NotFoundError, UnsupportedError):
        index = open_committed(target, "")[1]
        if index is not None and index.save_id == committed_id(source):
            return len(files_in(target, index.files)) == len(index.files)
    return False


def is_of_another_save(source: Location, target: Location) -> bool:
    """Returns whether the checkpoint at the target is from another save.

    If the metadata there is damaged, the names of data files decide: each save uses its own. Raises
    StorageError if that is unknown because files cannot be read.
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
