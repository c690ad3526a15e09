"""Verifies checkpoints: the presence and length of all files, or every byte of them."""

from __future__ import annotations

import math
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch_ckpt._core import _native
from torch_ckpt.errors import (
    CorruptionError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    is_damage,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import metadata_prefixes, open_committed
from torch_ckpt.options import READ_THREADS, IoOptions
from torch_ckpt.storage.stored_entries import (
    Checkpoint,
    open_checkpoint,
    open_checkpoints,
)

__all__ = ["Report", "check_here", "check_sound", "check_whole", "examine"]

_RECORD_NBYTES = 4 << 20  # Bytes read at a time from a record of torch.save.
_STEP_NBYTES = 256 << 20  # Bytes checked between two calls of watch().
_WHOLE_ELEMENTS_REVISION = 1  # The first writer revision that never cuts an element.
_IN_PLACE_NBYTES = 256 << 10  # Shorter tensors were not written from their own memory.
_MOST_NAMES = 8

_Watch = Callable[[int, int], None]
_Advance = Callable[[int], None]


@dataclass
class Report:
    """The result of a verification.

    ``damage`` contains messages about damaged files and ranges, and ``doubts`` messages about
    properties that could not be verified. ``fqns`` are the FQNs of damaged tensors and objects.
    ``nbytes`` is the number of bytes read.
    """

    damage: list[str] = field(default_factory=list)
    fqns: set[str] = field(default_factory=set)
    doubts: list[str] = field(default_factory=list)
    nbytes: int = 0


def examine(
    path: Location,
    *,
    watch: _Watch | None = None,
    trust_pickle: bool = False,
    rules: str | None = None,
    is_part: bool = False,
) -> Report:
    """Verifies every byte of a checkpoint of any format and reports all damage.

    ``watch`` is called with the bytes checked so far and the total bytes. With ``is_part``, other
    machines have the files that are missing here.

    Example::

        assert not examine(Location("run/step-100")).damage
    """
    path = path.resolved()  # Once: a link in the path may move.
    report = Report()
    prefixes = metadata_prefixes(path)
    if rules is not None or not prefixes:
        _examine_files(path, report, watch, trust_pickle, rules)
        return report
    checkpoints: list[Checkpoint] = []
    for prefix in prefixes:
        try:
            checkpoints.append(open_checkpoint(path, prefix, trust_pickle=trust_pickle))
        except CorruptionError as error:
            report.damage.append(str(error))
    advance = _advancing(report, checkpoints, watch)
    for checkpoint in checkpoints:
        if checkpoint.index is not None:
            if _check_structure(checkpoint, checkpoint.index, report):
                _check_blocks(checkpoint, checkpoint.index, report, advance, is_part=is_part)
                _check_writer(checkpoint, checkpoint.index, report)
        else:
            _check_archives(checkpoint, report, advance)
    return report


def _advancing(report: Report, checkpoints: list[Checkpoint], watch: _Watch | None) -> _Advance:
    """Returns a function that counts checked bytes and calls ``watch``."""
    total = sum(nbytes for checkpoint in checkpoints for _, nbytes in checkpoint.files)

    def advance(nbytes: int) -> None:
        report.nbytes += nbytes
        if watch is not None:
            watch(report.nbytes, total)

    advance(0)
    return advance


def _examine_files(
    path: Location,
    report: Report,
    watch: _Watch | None,
    trust_pickle: bool,
    rules: str | None,
) -> None:
    """Checks files of other formats: their structure, and the CRCs of the records of torch.save."""
    from torch_ckpt.formats.reading import reading  # Imports torch.
    from torch_ckpt.formats.torch_save import is_archive

    try:
        (checkpoint,) = open_checkpoints(path, trust_pickle=trust_pickle, rules=rules)
    except CorruptionError as error:
        report.damage.append(str(error))
        return
    advance = _advancing(report, [checkpoint], watch)
    _report_unreadable(checkpoint, report)
    directory = checkpoint.directory
    for name, _ in checkpoint.files:
        if not is_archive((directory / name).read_range(0, 512)[1]):
            report.doubts.append(f"{name} has no checksums: only its structure was verified")
            continue
        try:
            with reading(name):
                _check_records(directory / name, report, advance)
        except CorruptionError as error:
            report.damage.append(str(error))


def _check_records(path: Location, report: Report, advance: _Advance) -> None:
    """Checks the CRC of each record of a file of torch.save."""
    with path.open() as stream, zipfile.ZipFile(stream) as archive:
        for record in archive.infolist():
            try:
                with archive.open(record) as contents:
                    while data := contents.read(_RECORD_NBYTES):
                        advance(len(data))
            except (zipfile.BadZipFile, EOFError) as error:
                report.damage.append(f"{path.name}: {error}")


def _report_unreadable(checkpoint: Checkpoint, report: Report) -> None:
    """Reports values that cannot be loaded, as detected when the checkpoint was opened."""
    for fqn, why in checkpoint.unreadable.items():
        if isinstance(why, UnsupportedError):
            report.doubts.append(str(why))
        else:
            report.damage.append(str(why) if repr(fqn) in str(why) else f"{fqn}: {why}")
            report.fqns.add(fqn)


def check_whole(path: Location, *, trust_pickle: bool = False) -> int:
    """Checks that a checkpoint opens, and that its files exist with the right lengths.

    Returns the term in its metadata; 0 without one. Raises NotFoundError if none is committed,
    CorruptionError if it is not whole, and UnsupportedError if this version cannot open it.
    """
    path = path.resolved()  # Once: a link in the path may move.
    try:
        return _check_files(path, trust_pickle)
    except CorruptionError:
        # A concurrent removal or commit may have caused the first error.
        return _check_files(path, trust_pickle)


def _check_files(path: Location, trust_pickle: bool) -> int:
    metadata, index = open_committed(path, "")
    lengths: dict[str, int] = {}
    if index is not None:
        lengths.update(index.files)
    else:
        from torch_ckpt.formats.metadata import load_committed

        stored = load_committed(
            metadata.read_pickle(), where=str(path / ".metadata"), trust_pickle=trust_pickle
        )
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
    return metadata.term


def check_here(path: Location) -> int:
    """Checks the lengths of the data files of a checkpoint that exist on this machine.

    Returns the term as :func:`check_whole`. Raises NotFoundError if none is committed, and
    CorruptionError if it is damaged here.
    """
    metadata, index = open_committed(path, "")
    names = set(path.names())
    for name, nbytes in () if index is None else index.files:
        if name in names and (found := (path / name).nbytes()) != nbytes:
            raise CorruptionError(f"{path / name} has {found} bytes instead of {nbytes}")
    return metadata.term


def check_sound(path: Location, *, trust_pickle: bool = False) -> None:
    """Verifies every byte of a checkpoint, like ``torch-ckpt verify``, and raises on damage.

    Raises NotFoundError if none is committed, and CorruptionError if it is damaged.
    """
    path = path.resolved()  # Once: a link in the path may move.
    check_whole(path, trust_pickle=trust_pickle)
    damage = examine(path, trust_pickle=trust_pickle).damage
    if damage:
        more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
        raise CorruptionError(f"{path} is damaged: {damage[0]}{more}")


def _check_structure(checkpoint: Checkpoint, index: _native.Index, report: Report) -> bool:
    """Checks the metadata and the index completely; returns whether the index is usable."""
    assert checkpoint.metadata is not None
    try:
        checkpoint.metadata.check()
    except CorruptionError as error:
        report.damage.append(str(error))
    damaged = index.damage()
    report.damage += [
        f"the index of {checkpoint.path.name} [{begin}, {end}): its checksum differs, so the data "
        "cannot be verified"
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
    checkpoint: Checkpoint,
    index: _native.Index,
    report: Report,
    advance: _Advance,
    *,
    is_part: bool,
) -> None:
    io, directory = IoOptions(), checkpoint.directory
    job = _native.VerifyJob(
        directory.file_system,
        directory.path,
        index,
        io.buffer_nbytes,
        io.block_nbytes(directory.file_system),
        READ_THREADS,
        io.direct,
    )
    slices, has_all = _slices_by_file(checkpoint), True
    for number, (name, nbytes) in enumerate(checkpoint.files):
        damaged: list[tuple[int, int]] = []
        for begin in range(0, max(nbytes, 1), _STEP_NBYTES):
            end = min(begin + _STEP_NBYTES, nbytes)
            try:
                damaged += job.check(number, begin, end)
            except (NotFoundError, CorruptionError, StorageError) as error:
                if not is_damage(error):
                    raise
                if is_part and isinstance(error, NotFoundError):
                    report.doubts.append(f"{name} is missing here: another machine may have it")
                    has_all = False
                    break
                fqns = [fqn for _, high, fqn in slices[number] if high > begin]
                report.fqns.update(fqn for _, _, fqn in slices[number])
                report.damage.append(f"{name} [{begin}, {nbytes}): {error}: {_named(fqns)}")
                break
            advance(end - begin)
        for begin, end in _merge_adjacent(damaged):
            fqns = [fqn for low, high, fqn in slices[number] if low < end and high > begin]
            report.fqns.update(fqns)
            report.damage.append(f"{name} [{begin}, {end}): {_named(fqns)}")
    if has_all and not report.damage:
        _check_digests(index, job, report)


def _named(fqns: Sequence[str]) -> str:
    more = f" and {len(fqns) - _MOST_NAMES} more" if len(fqns) > _MOST_NAMES else ""
    return ", ".join(fqns[:_MOST_NAMES]) + more if fqns else "no tensor or object"


def _check_digests(index: _native.Index, job: _native.VerifyJob, report: Report) -> None:
    """Checks the digests by which the next save detects unchanged tensors."""
    for number, (fqn, _, boxes) in enumerate(index):
        try:
            others = job.check_digests(number)
        except (NotFoundError, CorruptionError) as error:  # It was removed or cut meanwhile.
            report.damage.append(str(error))
            return
        for box in others:
            report.fqns.add(fqn)
            report.damage.append(
                f"{fqn} at {list(boxes[box][0])}: its elements do not have the digest in the index"
            )


def _check_writer(checkpoint: Checkpoint, index: _native.Index, report: Report) -> None:
    """Names the tensors that a bug of an old writer may have stored incorrectly.

    Before revision 1, a buffered write ended a window at any byte after a tensor that was written
    from its own memory. An element of a later strided tensor could then be cut. The index does not
    record whether a tensor was strided, or whether writes were buffered.
    """
    if index.writer_revision >= _WHOLE_ELEMENTS_REVISION:
        return
    itemsizes = dict(zip(_native.DTYPE_NAMES, _native.DTYPE_ITEMSIZES, strict=True))
    by_file: defaultdict[int, list[tuple[int, int, int, str]]] = defaultdict(list)
    for fqn, properties, boxes in checkpoint.entries or ():
        itemsize = itemsizes.get(properties[0]) if properties is not None else None
        for _, sizes, file, offset, _, plain, _ in boxes:
            if plain and itemsize is not None:
                by_file[file].append((offset, itemsize, math.prod(sizes) * itemsize, fqn))
    affected: dict[str, None] = {}
    for tensors in by_file.values():
        phases: set[int] = set()  # Offsets of windows, modulo 64, that are not 0.
        for _, itemsize, nbytes, fqn in sorted(tensors):
            if any(phase % itemsize for phase in phases):
                affected[fqn] = None
            if nbytes >= _IN_PLACE_NBYTES:
                phases |= {nbytes % 64} - {0}
    if affected:
        report.doubts.append(
            f"{checkpoint.path.parent}: a version before 0.3.0 wrote {_named(list(affected))}. If "
            "it wrote without O_DIRECT, and these tensors were not contiguous, their values may be "
            "wrong (CHANGELOG.md, 0.3.0)"
        )


def _check_archives(checkpoint: Checkpoint, report: Report, advance: _Advance) -> None:
    """Checks every slice by the CRCs of its zip archive, for checkpoints without an index."""
    _report_unreadable(checkpoint, report)
    io, directory = IoOptions(), checkpoint.directory
    job = _native.LoadJob(
        directory.file_system,
        directory.path,
        None,
        io.buffer_nbytes,
        io.block_nbytes(directory.file_system),
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
            advance(end - begin)
    report.doubts.append(
        f"{checkpoint.path} has no index: only the checksums of zip records were verified"
    )


def _slices_by_file(checkpoint: Checkpoint) -> defaultdict[int, list[tuple[int, int, str]]]:
    """Returns file number -> begin, end and FQN of each slice, in ascending order."""
    slices: defaultdict[int, set[tuple[int, int, str]]] = defaultdict(set)
    for fqn, _, boxes in checkpoint.entries or ():
        for _, _, file, offset, nbytes, _, _ in boxes:  # Several boxes may share a slice.
            slices[file].add((offset, offset + nbytes, fqn))
    return defaultdict(list, {file: sorted(of_file) for file, of_file in slices.items()})


def _merge_adjacent(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields ascending ranges, with adjacent ranges merged."""
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
