"""Snapshots in shared memory: the slots of all ranks of one save, as one checkpoint.

Of ranks that are on several machines, each machine has the slots of its own. Then the checkpoint
has holes, which are boxes in a file that is not there: who plans to read from it wants what only
another machine has, and learns it before anything is loaded.

A slot is a file of tmpfs, and its table says where in it each item lies. So what ranks have left in
memory is loaded by the same plan as what they have left on disk, and by ranks that are fewer, or
more, or hold other shards. Nothing in memory has checksums but the tables.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torch_ckpt._core import _native
from torch_ckpt.errors import CorruptionError, MismatchError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.object_pickles import load_object
from torch_ckpt.formats.opened import ForeignFiles, Opened
from torch_ckpt.formats.pickles import ForbiddenPickleError

__all__ = ["ELSEWHERE", "holes", "open_snapshot"]

ELSEWHERE = "another machine"
"""Instead of the name of a file: what is stored there is not in the memory of this machine."""

_Box = tuple[tuple[int, ...], tuple[int, ...]]

_Place = tuple[_native.StoredSnapshot, int]  # The number of the item.


def open_snapshot(folder: Path, slots: Sequence[Path], *, trust_pickle: bool) -> Opened:
    """Opens the slots of one save as a checkpoint.

    Args:
        folder: Where they lie.
        slots: Of all ranks, or, of those on several machines, of all of one. Of what several hold,
            the first counts: that of the machine's own rank had better be first.
        trust_pickle: Whether objects may be unpickled whatever they ask for.

    Raises:
        NotFoundError: One of them holds no complete snapshot.
        CorruptionError: One is damaged.
        MismatchError: They are not those of one save.
    """
    merged = _Merged(ForeignFiles(Location(folder), Location(folder)), _Objects(trust_pickle))
    found = [(path, _native.Slot.open(path, False).read()) for path in slots]
    saves = {(s.header[:4], s.header[5], s.header[11]) for _, s in found}
    ranks = {snapshot.header[4] for _, snapshot in found}
    world_size, _, node_count, ranks_here = found[0][1].header[5:9]
    is_whole = ranks == set(range(world_size)) if node_count == 1 else len(ranks) == ranks_here
    if len(saves) != 1 or not is_whole:
        raise MismatchError(
            f"the snapshots in {folder}, of ranks {sorted(ranks)}, are not those of one save"
        )
    for path, snapshot in found:
        merged.add(path, snapshot)
    if node_count > 1:
        merged.add_holes()
    return merged.opened(names_files=node_count == 1)


class _Objects:
    """What is not plain: objects, and tensors that only torch can read."""

    def __init__(self, trust_pickle: bool) -> None:
        self._trust_pickle = trust_pickle
        self._places: dict[str, list[_Place]] = {}

    def add(self, fqn: str, place: _Place) -> None:
        self._places.setdefault(fqn, []).append(place)

    def value(self, fqn: str) -> object:
        places = self._places[fqn]
        if len(places) > 1:
            raise UnsupportedError(
                f"cannot load {fqn!r} from memory: it is in {len(places)} parts that only torch "
                "can read"
            )
        snapshot, number = places[0]
        stream = io.BytesIO(snapshot.object_bytes(number))
        try:
            return load_object(stream, trust_pickle=self._trust_pickle)
        except ForbiddenPickleError as error:
            raise UnsupportedError(
                f"cannot load {fqn!r} from memory: its pickle asks for {error}"
            ) from error


@dataclass
class _Merged:
    """What slots hold, put together."""

    foreign: ForeignFiles
    objects: _Objects
    facts: dict[str, tuple[str, str, bool, bool, Sequence[int]] | None] = field(
        default_factory=dict
    )
    boxes: dict[str, dict[tuple[int, ...], _native.IndexBox]] = field(default_factory=dict)
    paths: dict[str, Sequence[str | int]] = field(default_factory=dict)
    identity: bytes = b""

    def add(self, path: Path, snapshot: _native.StoredSnapshot) -> None:
        number = len(self.foreign.files)
        self.foreign.files.append((path.name, path.stat().st_size))
        self.identity = snapshot.header[1] + snapshot.header[2].to_bytes(8, "little")
        work = _native.Work(_native.ItemTable.decode(snapshot.items))
        for item, offset, nbytes, plain in snapshot.extents:
            fqn, facts, _, offsets, sizes, _ = work.describe(item)
            of_fqn = self.boxes.setdefault(fqn, {})
            if not _agree(self.facts.setdefault(fqn, facts), facts):
                raise CorruptionError(f"ranks disagree on what {fqn!r} is in {self.foreign.path}")
            key = tuple(offsets)
            if key in of_fqn:
                continue
            of_fqn[key] = (offsets, sizes, number, offset, nbytes, plain, ())
            if not plain:
                self.objects.add(fqn, (snapshot, item))
        if snapshot.paths is not None:
            for fqn, keys in _native.decode_paths(snapshot.paths):
                self.paths.setdefault(fqn, keys)

    def add_holes(self) -> None:
        """Adds what only other machines have of the tensors that are here in part."""
        number = len(self.foreign.files)
        most_nbytes = 0
        for fqn, facts in self.facts.items():
            boxes = self.boxes[fqn]
            if facts is None or sum(math.prod(box[1]) for box in boxes.values()) == math.prod(
                facts[4]
            ):
                continue
            element_nbytes = getattr(torch, facts[0].removeprefix("torch.")).itemsize
            for offsets, sizes in holes(facts[4], [box[:2] for box in boxes.values()]):
                nbytes = math.prod(sizes) * element_nbytes
                boxes[offsets] = (offsets, sizes, number, 0, nbytes, True, ())
                most_nbytes = max(most_nbytes, nbytes)
        if most_nbytes:
            self.foreign.files.append((ELSEWHERE, most_nbytes))

    def opened(self, *, names_files: bool) -> Opened:
        for fqn, boxes in self.boxes.items():
            self.foreign.entries.append((fqn, self.facts[fqn], list(boxes.values())))
        self.foreign.paths = self.paths
        return self.foreign.opened(self.objects, self.identity, names_files=names_files)


def _agree(one: _native.TensorFacts | None, other: _native.TensorFacts | None) -> bool:
    """Whether ranks that say this of an FQN mean the same: the first describes it, as in DCP."""
    if one is None or other is None:
        return one is other
    return one[0] == other[0] and list(one[4]) == list(other[4])


def holes(whole: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[_Box]:
    """What boxes leave of a tensor, as boxes: offsets and sizes.

    Example::

        assert holes([4, 2], [([1, 0], [2, 2])]) == [((0, 0), (1, 2)), ((3, 0), (1, 2))]
    """
    left: list[_Box] = [((0,) * len(whole), tuple(whole))]
    for offsets, sizes in boxes:
        left = [part for hole in left for part in _without(hole, offsets, sizes)]
    return left


def _without(hole: _Box, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[_Box]:
    """What a box leaves of a hole."""
    lows, highs = list(hole[0]), [o + n for o, n in zip(*hole, strict=True)]
    if any(
        not size or offset >= high or offset + size <= low
        for offset, size, low, high in zip(offsets, sizes, lows, highs, strict=True)
    ):
        yield hole
        return
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        for low, high in ((lows[dim], offset), (offset + size, highs[dim])):
            if low < high:
                begin, end = [*lows], [*highs]
                begin[dim], end[dim] = low, high
                yield tuple(begin), tuple(e - b for b, e in zip(begin, end, strict=True))
        lows[dim], highs[dim] = max(lows[dim], offset), min(highs[dim], offset + size)
