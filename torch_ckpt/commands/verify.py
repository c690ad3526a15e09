"""``torch-ckpt verify``: checks every byte of a checkpoint."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_ckpt import _native
from torch_ckpt.commands.opened import (
    DAMAGED,
    SOUND,
    UNKNOWN,
    Checkpoint,
    find_checkpoints,
    open_checkpoint,
    printable,
)
from torch_ckpt.errors import CorruptionError, NotFoundError, StorageError
from torch_ckpt.options import IoOptions

__all__ = ["Report", "add_to", "examine"]

_STEP_NBYTES = 256 << 20  # Checked between two looks at the clock.


def add_to(commands: Any) -> None:
    """Adds the command to a parser's."""
    parser = commands.add_parser(
        "verify",
        help="check every byte of a checkpoint",
        description="Checks every byte of a checkpoint against its index. Exits 0 where all are "
        "sound; 1 where some are damaged, which it lists; 2 where that cannot be told, because a "
        "checkpoint of stock DCP has only the CRCs of its zip archives, and those match; 3 where "
        "there is no checkpoint or it cannot be read.",
    )
    parser.add_argument("path", type=Path, help="directory of the checkpoint")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(command=_verify)


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


def examine(path: Path, *, progress: bool = False) -> Report:
    """Checks every byte of a checkpoint.

    Args:
        path: Its directory.
        progress: Whether to show a bar on the terminal.

    Raises:
        NotFoundError: Nothing is committed there.
        StorageError: Something cannot be read.

    Example::

        assert not examine(Path("run/step-100")).damage
    """
    report = Report()
    checkpoints: list[Checkpoint] = []
    for prefix in find_checkpoints(path):
        try:
            checkpoints.append(open_checkpoint(path, prefix))
        except CorruptionError as error:
            report.damage.append(str(error))
    total = sum(nbytes for checkpoint in checkpoints for _, nbytes in checkpoint.files)
    bar = _Progress(total, shown=progress)
    for checkpoint in checkpoints:
        if checkpoint.index is not None:
            if _check_structure(checkpoint, checkpoint.index, report):
                _check_blocks(checkpoint, checkpoint.index, report, bar)
        else:
            _check_archives(checkpoint, report, bar)
    bar.close()
    return report


def _verify(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    report = examine(options.path, progress=not options.quiet and sys.stderr.isatty())
    seconds = max(time.monotonic() - begin, 1e-9)
    speed = f"{report.nbytes} bytes in {seconds:.2f} s, {report.nbytes / seconds / 1e9:.2f} GB/s"
    for line in report.damage:
        print(printable(f"damaged: {line}"))
    if report.damage:
        if report.fqns:
            print(
                printable(f"{len(report.fqns)} FQNs are damaged: {', '.join(sorted(report.fqns))}")
            )
        print(f"damaged ({speed})")
        return DAMAGED
    for line in report.doubts:
        print(printable(f"cannot tell: {line}"))
    print(f"{'no damage found' if report.doubts else 'sound'} ({speed})")
    return UNKNOWN if report.doubts else SOUND


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
    checkpoint: Checkpoint, index: _native.Index, report: Report, progress: _Progress
) -> None:
    io = IoOptions()
    job = _native.VerifyJob(
        _native.local_file_system(),
        os.fsencode(checkpoint.path.parent),
        index,
        io.buffer_nbytes,
        io.block_nbytes,
        io.threads,
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
            report.nbytes += end - begin
            progress.advance(end - begin, name)
        for begin, end in _joined(damaged):
            hit = [fqn for at, until, fqn in slices[number] if at < end and until > begin]
            report.fqns.update(hit)
            what = ", ".join(hit) if hit else "no tensor or object"
            report.damage.append(f"{name} [{begin}, {end}): {what}")


def _check_archives(checkpoint: Checkpoint, report: Report, progress: _Progress) -> None:
    """Without an index, every slice by itself: what torch.save wrote has the CRCs of zip."""
    io = IoOptions()
    job = _native.LoadJob(
        _native.local_file_system(),
        os.fsencode(checkpoint.path.parent),
        None,
        io.buffer_nbytes,
        io.block_nbytes,
        io.threads,
        io.direct,
        True,
        False,
    )
    for number, slices in sorted(_slices_by_file(checkpoint).items()):
        name, _ = checkpoint.files[number]
        for begin, end, fqn in slices:
            try:
                job.run([], [(name, begin, end - begin, fqn)])
            except (NotFoundError, CorruptionError) as error:
                report.damage.append(f"{name} [{begin}, {end}): {fqn}: {error}")
                report.fqns.add(fqn)
            report.nbytes += end - begin
            progress.advance(end - begin, name)
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


class _Progress:
    """A bar on the terminal."""

    _WIDTH = 30

    def __init__(self, total_nbytes: int, *, shown: bool) -> None:
        self._total = max(total_nbytes, 1)
        self._done = 0
        self._shown = shown
        self._begin = time.monotonic()

    def advance(self, nbytes: int, name: str) -> None:
        self._done += nbytes
        if not self._shown:
            return
        part = min(self._done / self._total, 1.0)
        bar = "#" * round(part * self._WIDTH)
        speed = self._done / max(time.monotonic() - self._begin, 1e-9) / 1e9
        sys.stderr.write(f"\r[{bar:{self._WIDTH}}] {part:4.0%} {speed:6.2f} GB/s  {name}\x1b[K")
        sys.stderr.flush()

    def close(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
