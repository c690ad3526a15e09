"""Chain: the deltas between two versions, merged into one change of the tensors of a subscriber.

Only the blocks that its parts touch are read. A delta is the XOR of two versions, so several of
them add up to one XOR, and an XOR undoes itself.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from torch_ckpt._core import _native
from torch_ckpt.commits.delta import DELTA
from torch_ckpt.errors import CorruptionError, MismatchError, add_name
from torch_ckpt.filesystems.location import Location
from torch_ckpt.planning.value_digests import THREADS
from torch_ckpt.publishing.parts import Part, view_of
from torch_ckpt.publishing.version_files import (
    BLOCK_NBYTES,
    ENTRY_NBYTES,
    WHOLE,
    StoredBox,
    Version,
    read_version,
    table_nbytes,
)

__all__ = ["Chain", "Ranges", "in_threads", "pieces_of", "read_line"]

T = TypeVar("T")
R = TypeVar("R")

_REQUESTS = 8
"""Requests at a time."""

_GAP_NBYTES = 256 << 10
"""Bytes between two ranges that are read with them, because another request takes longer."""

_ENCODED_NBYTES = BLOCK_NBYTES + 64
"""Most bytes of an encoded block."""


def in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Returns the result of ``work`` for each item, of up to eight at a time."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_REQUESTS, len(items)), "torch_ckpt-update") as executor:
        return list(executor.map(work, items))


class Ranges:
    """Ranges of files, read together with few requests."""

    def __init__(self, wanted: Iterable[tuple[Location, int, int]]) -> None:
        by_file: dict[Location, list[tuple[int, int]]] = {}
        for file, begin, end in wanted:
            if begin < end:
                by_file.setdefault(file, []).append((begin, end))
        self._begins: dict[Location, list[int]] = {}
        self._memory: dict[tuple[Location, int], bytearray] = {}
        requests: list[tuple[Location, int, memoryview]] = []
        for file, ranges in by_file.items():
            for begin, end in _joined(ranges):
                self._begins.setdefault(file, []).append(begin)
                memory = self._memory[file, begin] = bytearray(end - begin)
                most = file.file_system.request_nbytes
                for at in range(0, end - begin, most):
                    requests.append((file, begin + at, memoryview(memory)[at : at + most]))
        self.nbytes = sum(map(len, self._memory.values()))
        in_threads(_read, requests)

    def get(self, file: Location, begin: int, end: int) -> memoryview:
        """Returns one of the ranges."""
        if begin == end:
            return memoryview(b"")
        begins = self._begins[file]
        first = begins[bisect.bisect_right(begins, begin) - 1]
        return memoryview(self._memory[file, first])[begin - first : end - first]


def _joined(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    ranges.sort()
    first, last = ranges[0]
    for begin, end in ranges[1:]:
        if begin <= last + _GAP_NBYTES:
            last = max(last, end)
        else:
            yield first, last
            first, last = begin, end
    yield first, last


def _read(request: tuple[Location, int, memoryview]) -> None:
    file, offset, memory = request
    nbytes, found = file.read_range(offset, len(memory), exact=True)
    if len(found) != len(memory):
        raise CorruptionError(
            f"{file} is damaged: it has {nbytes} bytes, and bytes up to {offset + len(memory)} "
            "belong to the version"
        )
    memory[:] = found


@dataclass
class Piece:
    """The blocks of a stored box that a part touches.

    ``table`` and ``payload`` have the rows and the bytes of blocks ``[first, end)``. The whole
    table of the box is in its file from ``box.table`` on.
    """

    file: Location
    box: StoredBox
    first: int
    end: int
    is_inside: bool
    """Whether the part has all of the box."""
    table: memoryview = field(default_factory=lambda: memoryview(b""))
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    begin: int = 0
    """Offset of the payload in the file."""
    nbytes: int = 0


def read_line(root: Location, version: Version, line: Sequence[tuple[int, str]]) -> list[Version]:
    """Reads what some versions of a line state, of which ``version`` is the last one.

    Raises CorruptionError if one has other tensors, and NotFoundError if one was removed.
    """

    def read(at: tuple[int, str]) -> Version:
        if at[0] == version.number:
            return version
        found = read_version(root, *at, kind=WHOLE if at == version.line[0] else DELTA)
        if found.tensors != version.tensors:
            raise CorruptionError(
                f"version {at[0]} of {root} is damaged: its tensors are not those of version "
                f"{version.number}, which is added to it"
            )
        return found

    return in_threads(read, line)


def pieces_of(root: Location, version: Version, part: Part) -> list[Piece]:
    """Returns the pieces of a version that a part touches, without their contents.

    Raises CorruptionError if the stored boxes do not cover the part.
    """
    _, sizes = version.tensors[fqn := version.ties.get(part.fqn, part.fqn)]
    itemsize = version.itemsize(fqn)
    pieces, covered = [], 0
    files = version.files_in(root)
    for name, box in version.boxes.get(fqn, ()):
        low = [max(pair) for pair in zip(part.offsets, box.offsets, strict=True)]
        ends = zip(part.offsets, part.sizes, box.offsets, box.sizes, strict=True)
        high = [min(a + m, b + n) for a, m, b, n in ends]
        lengths = [end - begin for begin, end in zip(low, high, strict=True)]
        if any(length <= 0 for length in lengths):
            continue
        covered += math.prod(lengths)
        first, last = 0, 0  # Positions of the corners in the box.
        for begin, end, at, size in zip(low, high, box.offsets, box.sizes, strict=True):
            first, last = first * size + begin - at, last * size + end - 1 - at
        blocks = first * itemsize // BLOCK_NBYTES, last * itemsize // BLOCK_NBYTES + 1
        is_inside = tuple(lengths) == tuple(box.sizes)
        pieces.append(Piece(files[name], box, *blocks, is_inside))
    if covered != math.prod(part.sizes):
        raise CorruptionError(
            f"version {version.number} of {root} is damaged: its boxes of {fqn!r} of "
            f"{list(sizes)} do not cover {list(part.sizes)} at {list(part.offsets)}"
        )
    return pieces


class Chain:
    """The versions whose differences make up one change of some parts, in order.

    Reads all that they need. Memory: the encoded bytes.

    Args:
        root: Directory of the versions.
        versions: The versions, without the one that the parts have. A whole version is no change:
            it only has the digests of its blocks.
        parts: The parts that change.

    Raises:
        CorruptionError: A file is damaged.
        NotFoundError: A version was removed meanwhile.
    """

    def __init__(self, root: Location, versions: Sequence[Version], parts: Sequence[Part]) -> None:
        self._pieces = {
            part.key: [pieces_of(root, version, part) for version in versions] for part in parts
        }
        pieces = [piece for of in self._pieces.values() for each in of for piece in each]
        self.nbytes = 0
        """Bytes that were read."""
        # Fresh memory for each mask would take longer than to fill it.
        longest = max((part.nbytes for part in parts), default=0)
        self._memory = torch.empty(longest, dtype=torch.uint8, device="cpu")
        if pieces:
            self._read_tables(pieces, versions[-1])
            self._read_payloads(pieces)

    def _read_tables(self, pieces: Sequence[Piece], newest: Version) -> None:
        """Reads the block table of each box as a whole, since its digest is of the whole."""
        tables = {(piece.file, piece.box.table): piece.box for piece in pieces}
        lengths = {
            key: table_nbytes(box.sizes, newest.itemsize(box.fqn)) for key, box in tables.items()
        }
        ranges = Ranges((file, begin, begin + lengths[file, begin]) for file, begin in tables)
        self.nbytes += ranges.nbytes
        begins: dict[tuple[Location, int], list[int]] = {}
        for (file, begin), box in tables.items():
            table = ranges.get(file, begin, begin + lengths[file, begin])
            if _native.xxh3(table) != box.digest:
                raise CorruptionError(
                    f"{file} is damaged: the block table of {box.fqn!r} does not match its digest"
                )
            at = [box.begin]
            for _, _, nbytes, _ in struct.iter_unpack("<QQII", table):
                at.append(at[-1] + nbytes)
            if at[-1] > min(box.table, box.begin + _ENCODED_NBYTES * (len(at) - 1)):
                raise CorruptionError(
                    f"{file} is damaged: its blocks of {box.fqn!r} cannot have "
                    f"{at[-1] - box.begin} bytes"
                )
            begins[file, begin] = at
        for piece in pieces:
            key = piece.file, piece.box.table
            at, rows = begins[key], (ENTRY_NBYTES * piece.first, ENTRY_NBYTES * piece.end)
            piece.table = ranges.get(*key, key[1] + lengths[key])[rows[0] : rows[1]]
            piece.begin, piece.nbytes = at[piece.first], at[piece.end] - at[piece.first]

    def _read_payloads(self, pieces: Sequence[Piece]) -> None:
        ranges = Ranges((each.file, each.begin, each.begin + each.nbytes) for each in pieces)
        self.nbytes += ranges.nbytes
        for piece in pieces:
            piece.payload = ranges.get(piece.file, piece.begin, piece.begin + piece.nbytes)

    def is_inside(self, part: Part) -> bool:
        """Returns whether the part has each block that it touches as a whole."""
        return all(piece.is_inside for of in self._pieces[part.key] for piece in of)

    def mask(self, part: Part, target: torch.Tensor | None) -> Any:
        """Returns the XOR of the part's bytes before and after, in row-major order.

        It is in the same memory as that of the last call. With a ``target``, verifies as
        :meth:`verify`.
        """
        mask: Any = self._memory[: part.nbytes].zero_().numpy()
        self._merge(part, target, mask)
        return mask

    def verify(self, part: Part, target: torch.Tensor) -> None:
        """Verifies a part before and after each version, of each block that it has as a whole.

        ``target`` has its values before, in host memory. Raises CorruptionError if an encoded block
        is damaged, and MismatchError if the target has other values. Both name the tensor and the
        file.
        """
        if len(self._pieces[part.key]) > 1:
            self.mask(part, target)
        else:  # Nothing is added to the mask.
            self._merge(part, target, None)

    def _merge(self, part: Part, target: torch.Tensor | None, mask: Any) -> None:
        view = None if target is None else view_of(target, part.fqn)
        for pieces in self._pieces[part.key]:
            for piece in pieces:
                try:
                    _native.merge_blocks(
                        mask,
                        view,
                        (part.offsets, part.sizes),
                        (piece.box.offsets, piece.box.sizes),
                        part.tensor.itemsize,
                        piece.table,
                        piece.first,
                        piece.payload,
                        THREADS,
                    )
                except (CorruptionError, MismatchError) as error:
                    error.args = (f"{piece.file}: {error.args[0]}", *error.args[1:])
                    add_name(error, "update", part.fqn)
                    raise
