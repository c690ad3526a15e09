"""Checks whether a checkpoint is whole: by its files, or by every byte of it."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch_ckpt._core import _native
from torch_ckpt.errors import CorruptionError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed
from torch_ckpt.options import READ_THREADS, IoOptions
from torch_ckpt.storage.committed_files import Checkpoint, find_checkpoints, open_checkpoint

__all__ = ["Report", "check_sound", "check_whole", "examine"]

_STEP_NBYTES = 256 << 20  # Checked between two calls of watch().

_Advance = Callable[[int, str], None]


@dataclass
class Report:
    """What a check has found.

    Attributes:
        damage: What is damaged, for people to read.
        fqns: What that makes useless.
        doubts: What nobody can tell.
        nbytes: How much was read, in bytes.
    """

    damage: list[str] = field(default_factory=list)
    fqns: set[str] = field(default_factory=set)
    doubts: list[str] = field(default_factory=list)
    nbytes: int = 0


def examine(path: Location, *, watch: Callable[[int, int, str], None] | None = None) -> Report:
    """Checks every byte of a checkpoint.

    Args:
        path: Its directory.
        watch: Called with the bytes checked so far, the bytes to check in all, and the name of the
            file.

    Raises:
        NotFoundError: Nothing is committed there.
        StorageError: Something cannot be read.

    Example::

        assert not examine(Location("run/step-100")).damage
    """
    report = Report()
    checkpoints: list[Checkpoint] = []
    for prefix in find_checkpoints(path):
        try:
            checkpoints.append(open_checkpoint(path, prefix))
        except CorruptionError as error:
            report.damage.append(str(error))
    total = sum(nbytes for checkpoint in checkpoints for _, nbytes in checkpoint.files)

    def advance(nbytes: int, name: str) -> None:
        report.nbytes += nbytes
        if watch is not None:
            watch(report.nbytes, total, name)

    for checkpoint in checkpoints:
        if checkpoint.index is not None:
            if _check_structure(checkpoint, checkpoint.index, report):
                _check_blocks(checkpoint, checkpoint.index, report, advance)
        else:
            _check_archives(checkpoint, report, advance)
    return report


def check_whole(path: Location) -> None:
    """Looks whether a checkpoint opens, and whether its files are there and as long as they were.

    Args:
        path: Directory of the checkpoint.

    Raises:
        NotFoundError: Nothing is committed there.
        CorruptionError: The metadata are torn, or a file is missing or of another length.
        StorageError: The disk failed.
        UnsupportedError: The metadata are of a kind that cannot be read.

    Example::

        check_whole(Location("run/step-100"))
    """
    try:
        _check_files(path)
    except CorruptionError:
        _check_files(path)  # It may have been removed or replaced just then, file by file to us.


def _check_files(path: Location) -> None:
    metadata, index = open_committed(path, "")
    lengths: dict[str, int] = {}
    if index is not None:
        lengths.update(index.files)
    else:
        from torch_ckpt.formats.metadata import load_committed

        stored = load_committed(metadata.read_pickle(), where=str(path / ".metadata"))
        for info in stored.storage_data.values():
            end = info.offset + info.length
            lengths[info.relative_path] = max(end, lengths.get(info.relative_path, 0))
    for name, nbytes in lengths.items():
        try:
            found = (path / name).nbytes()
        except NotFoundError:
            raise CorruptionError(f"{path / name} is missing") from None
        if found < nbytes or (index is not None and found != nbytes):
            raise CorruptionError(f"{path / name} has {found} bytes instead of {nbytes}")


def check_sound(path: Location) -> None:
    """Checks every byte of a checkpoint, as ``torch-ckpt verify`` does.

    Args:
        path: Directory of the checkpoint.

    Raises:
        NotFoundError: Nothing is committed there.
        CorruptionError: Bytes are damaged.
        StorageError: The disk failed.

    Example::

        check_sound(Location("run/step-100"))
    """
    check_whole(path)
    damage = examine(path).damage
    if damage:
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise CorruptionError(f"{path} is damaged: {damage[0]}{more}")


def _check_structure(checkpoint: Checkpoint, index: _native.Index, report: Report) -> bool:
    """Checks all of the metadata and of the index; says whether the latter can be used."""
    try:
        checkpoint.metadata.check()
    except CorruptionError as error:
        report.damage.append(str(error))
    name = checkpoint.path.name.removesuffix(".metadata") + ".index"
    damaged = index.damage()
    report.damage += [
        f"{name} [{begin}, {end}): it fails its checksum, and what it says of the data is unknown"
        for begin, end in damaged
    ]
    if damaged:
        return False
    try:
        index.check()
    except CorruptionError as error:
        report.damage.append(str(error))
        return False
    return True


def _check_blocks(
    checkpoint: Checkpoint, index: _native.Index, report: Report, advance: _Advance
) -> None:
    io, directory = IoOptions(), checkpoint.path.parent
    job = _native.VerifyJob(
        directory.file_system,
        directory.path,
        index,
        io.buffer_nbytes,
        io.block_nbytes,
        READ_THREADS,
        io.direct,
    )
    slices = _slices_by_file(checkpoint)
    for number, (name, nbytes) in enumerate(checkpoint.files):
        damaged: list[tuple[int, int]] = []
        for begin in range(0, max(nbytes, 1), _STEP_NBYTES):
            end = min(begin + _STEP_NBYTES, nbytes)
            try:
                damaged += job.check(number, begin, end)
            except (NotFoundError, CorruptionError, StorageError) as error:
                if isinstance(error, StorageError) and error.errno != errno.EIO:
                    raise  # Nothing is known of the file: it could not be read just now.
                report.damage.append(f"{name} [{begin}, {nbytes}): {error}")
                report.fqns.update(fqn for _, _, fqn in slices[number])
                break
            advance(end - begin, name)
        for begin, end in _joined(damaged):
            hit = [fqn for at, until, fqn in slices[number] if at < end and until > begin]
            report.fqns.update(hit)
            what = ", ".join(hit) if hit else "no tensor or object"
            report.damage.append(f"{name} [{begin}, {end}): {what}")


def _check_archives(checkpoint: Checkpoint, report: Report, advance: _Advance) -> None:
    """Without an index, every slice by itself: what torch.save wrote has the CRCs of zip."""
    io, directory = IoOptions(), checkpoint.path.parent
    job = _native.LoadJob(
        directory.file_system,
        directory.path,
        None,
        io.buffer_nbytes,
        io.block_nbytes,
        READ_THREADS,
        io.direct,
        True,
    )
    for number, slices in sorted(_slices_by_file(checkpoint).items()):
        name, _ = checkpoint.files[number]
        for begin, end, fqn in slices:
            try:
                job.run([], [(name, begin, end - begin, fqn)])
            except (NotFoundError, CorruptionError) as error:
                report.damage.append(f"{name} [{begin}, {end}): {fqn}: {error}")
                report.fqns.add(fqn)
            advance(end - begin, name)
    report.doubts.append(
        f"{checkpoint.path} has no index: only what zip archives state of their records was checked"
    )


def _slices_by_file(checkpoint: Checkpoint) -> defaultdict[int, list[tuple[int, int, str]]]:
    """For each file, where its slices begin and end and their FQNs, ascending."""
    slices: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for fqn, _, boxes in checkpoint.entries or ():
        for _, _, file, offset, nbytes, _, _ in boxes:
            slices[file].append((offset, offset + nbytes, fqn))
    for listed in slices.values():
        listed.sort()
    return slices


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ascending ranges, with those that touch made one."""
    pending: tuple[int, int] | None = None
    for begin, end in ranges:
        if pending is not None and begin <= pending[1]:
            pending = pending[0], max(end, pending[1])
            continue
        if pending is not None:
            yield pending
        pending = begin, end
    if pending is not None:
        yield pending
