"""The command ``torch-ckpt``: looks into checkpoints and checks them.

Where a checkpoint has an index, neither imports torch nor unpickles anything.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch_ckpt import _native
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError
from torch_ckpt.options import IoOptions
from torch_ckpt.seal import check_unsealed

__all__ = ["main"]

SOUND, DAMAGED, UNKNOWN, FAILED = 0, 1, 2, 3
"""How the command exits."""

_STEP_NBYTES = 256 << 20  # Checked between two looks at the clock.
_METADATA = re.compile(r"((?:__\d+)?)\.(metadata|index)")
_RANK = re.compile(r"__(\d+)_\d+")


@dataclass
class _Checkpoint:
    """One set of metadata: a whole checkpoint's, or that of a rank that saved by itself."""

    path: Path
    index: _native.Index | None
    files: list[tuple[str, int]]  # Name, length in bytes.
    entries: list[_native.IndexEntry]
    save_id: str | None


@dataclass
class _Report:
    """What a check has found."""

    damage: list[str] = field(default_factory=list)
    fqns: set[str] = field(default_factory=set)
    doubts: list[str] = field(default_factory=list)
    nbytes: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns how it should exit."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except CheckpointError as error:
        print(f"torch-ckpt: {error}", file=sys.stderr)
        return DAMAGED if isinstance(error, CorruptionError) else FAILED
    except BrokenPipeError:  # The reader of a long list has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SOUND


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"torch-ckpt: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="torch-ckpt", description="Looks into checkpoints and checks them.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    verify = commands.add_parser(
        "verify",
        help="check every byte of a checkpoint",
        description="Checks every byte of a checkpoint against its index. Exits 0 where all are "
        "sound; 1 where some are damaged, which it lists; 2 where that cannot be told, because a "
        "checkpoint of stock DCP has only the CRCs of its zip archives, and those match; 3 where "
        "there is no checkpoint or it cannot be read.",
    )
    verify.add_argument("path", type=Path, help="directory of the checkpoint")
    verify.add_argument("--quiet", action="store_true", help="no progress bar")
    verify.set_defaults(command=_verify)

    inspect = commands.add_parser(
        "inspect",
        help="list what is in a checkpoint",
        description="Lists the tensors and objects of a checkpoint: names, dtypes, shapes, boxes, "
        "files, sizes, and how evenly the ranks have written.",
    )
    inspect.add_argument("path", type=Path, help="directory of the checkpoint")
    inspect.add_argument("--json", action="store_true", help="as JSON, with every box")
    inspect.set_defaults(command=_inspect)
    return parser


# Opening


def _find(directory: Path) -> list[str]:
    """Prefixes of the metadata in a directory: none, or ``__0`` of those of rank 0 alone."""
    fs = _native.local_file_system()
    names = [os.fsdecode(name) for name in fs.list_directory(os.fsencode(directory))]
    found = {match[1] for match in map(_METADATA.fullmatch, names) if match}
    if not found:
        raise NotFoundError(f"no checkpoint is committed in {directory}")
    return sorted(found)


def _open(directory: Path, prefix: str) -> _Checkpoint:
    path = directory / f"{prefix}.metadata"
    try:
        pickled, index, other, newer, why = _native.open_checkpoint(
            _native.local_file_system(), os.fsencode(directory), path.name, f"{prefix}.index"
        )
    except NotFoundError as error:
        raise CorruptionError(
            f"the checkpoint in {directory} has lost its metadata: {prefix}.index is there, "
            f"{path.name} is not"
        ) from error
    entries = None if index is None else index.entries
    if index is not None and entries is not None:
        return _Checkpoint(path, index, index.files, entries, index.save_id)
    if index is None:
        check_unsealed(pickled, other, newer=newer, why=why, where=str(path))
    return _open_pickled(path, pickled, index)


def _open_pickled(
    path: Path,
    pickled: bytes,
    index: _native.Index | None,
) -> _Checkpoint:
    """Only metadata say what is stored: torch's classes are needed to read them."""
    from torch_ckpt.index import to_entries
    from torch_ckpt.metadata import load_committed

    metadata = load_committed(pickled, where=str(path))
    if index is not None:
        files = index.files
    else:
        names = {str(getattr(info, "relative_path", "")) for info in metadata.storage_data.values()}
        files = [(name, _size_of(path.parent / name)) for name in sorted(names)]
    entries = to_entries(metadata, [name for name, _ in files])
    if entries is None:
        raise CorruptionError(f"{path} describes its tensors in a way of its own")
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return _Checkpoint(path, index, files, entries, save_id)


def _size_of(path: Path) -> int:
    """The length of a file; 0 where it is missing, which whoever reads it will find out."""
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0


# verify


def _verify(options: argparse.Namespace) -> int:
    report = _Report()
    checkpoints: list[_Checkpoint] = []
    for prefix in _find(options.path):
        try:
            checkpoints.append(_open(options.path, prefix))
        except CorruptionError as error:
            report.damage.append(str(error))
    total = sum(nbytes for checkpoint in checkpoints for _, nbytes in checkpoint.files)
    progress = _Progress(total, shown=not options.quiet and sys.stderr.isatty())
    begin = time.monotonic()
    for checkpoint in checkpoints:
        if checkpoint.index is not None:
            _check_blocks(checkpoint, checkpoint.index, report, progress)
        else:
            _check_archives(checkpoint, report, progress)
    progress.close()
    seconds = max(time.monotonic() - begin, 1e-9)
    speed = f"{report.nbytes} bytes in {seconds:.2f} s, {report.nbytes / seconds / 1e9:.2f} GB/s"
    for line in report.damage:
        print(_shown(f"damaged: {line}"))
    if report.damage:
        if report.fqns:
            print(_shown(f"{len(report.fqns)} FQNs are damaged: {', '.join(sorted(report.fqns))}"))
        print(f"damaged ({speed})")
        return DAMAGED
    for line in report.doubts:
        print(_shown(f"cannot tell: {line}"))
    print(f"{'no damage found' if report.doubts else 'sound'} ({speed})")
    return UNKNOWN if report.doubts else SOUND


def _check_blocks(
    checkpoint: _Checkpoint, index: _native.Index, report: _Report, progress: _Progress
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
            except CheckpointError as error:  # The file is gone, or the disk gives no bytes.
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


def _check_archives(checkpoint: _Checkpoint, report: _Report, progress: _Progress) -> None:
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
            except CheckpointError as error:
                report.damage.append(f"{name} [{begin}, {end}): {fqn}: {error}")
                report.fqns.add(fqn)
            report.nbytes += end - begin
            progress.advance(end - begin, name)
    report.doubts.append(
        f"{checkpoint.path} has no index: only what zip archives state of their records was checked"
    )


def _slices_by_file(checkpoint: _Checkpoint) -> defaultdict[int, list[tuple[int, int, str]]]:
    """For each file, where its slices begin and end and their FQNs, ascending."""
    slices: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for fqn, _, boxes in checkpoint.entries:
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


# inspect


def _inspect(options: argparse.Namespace) -> int:
    summaries = [_summary(_open(options.path, prefix)) for prefix in _find(options.path)]
    if options.json:
        json.dump(summaries[0] if len(summaries) == 1 else summaries, sys.stdout, indent=1)
        print()
        return SOUND
    for summary in summaries:
        _print_summary(summary)
    return SOUND


def _summary(checkpoint: _Checkpoint) -> dict[str, Any]:
    files = [name for name, _ in checkpoint.files]
    per_rank: defaultdict[int | None, int] = defaultdict(int)
    tensors: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for fqn, properties, boxes in checkpoint.entries:
        places = []
        for offsets, sizes, file, offset, nbytes, _, transforms in boxes:
            per_rank[_rank_of(files[file])] += nbytes
            place = {"file": files[file], "offset": offset, "nbytes": nbytes}
            if transforms:
                place["transforms"] = list(transforms)
            if properties is not None:
                place = {"offsets": list(offsets), "sizes": list(sizes), **place}
            places.append(place)
        if properties is None:
            objects.append({"fqn": fqn, **places[0]})
        else:
            dtype, _, _, _, shape = properties
            tensors.append({"fqn": fqn, "dtype": dtype, "shape": list(shape), "boxes": places})
    return {
        "metadata": str(checkpoint.path),
        "index": checkpoint.index is not None,
        "save_id": checkpoint.save_id,
        "tensors": tensors,
        "objects": objects,
        "files": [
            {"name": name, "nbytes": nbytes, "rank": _rank_of(name)}
            for name, nbytes in checkpoint.files
        ],
        "ranks": [
            {"rank": rank, "nbytes": nbytes}
            for rank, nbytes in sorted(per_rank.items(), key=lambda item: (item[0] is None, item))
        ],
    }


def _rank_of(file: str) -> int | None:
    found = _RANK.match(file)
    return int(found[1]) if found else None


def _print_summary(summary: dict[str, Any]) -> None:
    nbytes = sum(file["nbytes"] for file in summary["files"])
    kind = "with an index" if summary["index"] else "without an index (stock DCP's)"
    print(f"{summary['metadata']}: {kind}, save id {summary['save_id']}")
    rows = [
        (
            tensor["fqn"],
            tensor["dtype"],
            str(tensor["shape"]),
            f"{len(tensor['boxes'])} boxes",
            _size(sum(box["nbytes"] for box in tensor["boxes"])),
        )
        for tensor in summary["tensors"]
    ]
    rows += [(o["fqn"], "object", "", "", _size(o["nbytes"])) for o in summary["objects"]]
    _print_table(rows)
    print(f"{len(summary['tensors'])} tensors, {len(summary['objects'])} objects")
    _print_table([(file["name"], _size(file["nbytes"])) for file in summary["files"]])
    print(f"{len(summary['files'])} files, {_size(nbytes)}")
    per_rank = [rank["nbytes"] for rank in summary["ranks"]]
    for rank in summary["ranks"]:
        print(f"  rank {'?' if rank['rank'] is None else rank['rank']}: {_size(rank['nbytes'])}")
    if per_rank and sum(per_rank):
        most = max(per_rank) * len(per_rank) / sum(per_rank)
        print(f"the busiest of {len(per_rank)} ranks wrote {most:.2f} times the mean")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    rows = [[_shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = itertools.starmap(str.ljust, zip(row, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())


def _shown(name: str) -> str:
    """A name from a file, without what a terminal would act on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


if __name__ == "__main__":
    sys.exit(main())
