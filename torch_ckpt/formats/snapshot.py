"""Opens the snapshots of one save in shared memory as a checkpoint.

A slot is a file of tmpfs, and its table lists the extent of each item. So a load from memory uses
the same plans as a load from disk, and works with another number of ranks or other shards. The
tables have checksums; the payloads do not.

If the ranks are on several machines, the slots of one machine cover only the shards of its ranks.
The checkpoint then has *holes*: boxes in a file that does not exist. A plan that reads a hole fails
before anything is loaded.
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
from torch_ckpt.formats.expansion import ExpansionError
from torch_ckpt.formats.object_pickles import load_object
from torch_ckpt.formats.opened import ForeignFiles, Opened
from torch_ckpt.formats.pickles import ForbiddenPickleError

__all__ = ["ELSEWHERE", "holes", "open_snapshot"]

ELSEWHERE = "another machine"
"""Stands for the file name of boxes that are not in the memory of this machine."""

_Box = tuple[tuple[int, ...], tuple[int, ...]]

_Place = tuple[_native.StoredSnapshot, int]  # Snapshot and number of the item.


def open_snapshot(folder: Path, slots: Sequence[Path], *, trust_pickle: bool) -> Opened:
    """Opens the slots of one save, of all ranks on this machine, as a checkpoint.

    Of several replicas, a load uses the one in the first slot, so the caller's own slot should come
    first. Raises NotFoundError if a slot has no complete snapshot, and MismatchError if the slots
    are not all slots of one save on this machine.
    """
    foreign = ForeignFiles(Location(folder), Location(folder), "snapshot", is_own=True)
    merged = _Merged(foreign, _Objects(trust_pickle))
    found = [(path, _native.Slot.open(path, False).read()) for path in slots]
    headers = [snapshot.header for _, snapshot in found]
    saves = {(h.run, h.save, h.step, h.world_size, h.share) for h in headers}
    ranks = {header.rank for header in headers}
    first = headers[0]
    is_local = first.node_count == 1
    is_whole = ranks == set(range(first.world_size)) if is_local else len(ranks) == first.ranks_here
    if len(saves) != 1 or not is_whole:
        raise MismatchError(
            f"cannot load the snapshots of ranks {sorted(ranks)} in {folder}: they are not from "
            "one save"
        )
    for path, snapshot in found:
        merged.add(path, snapshot)
    if not is_local:
        merged.add_holes()
    return merged.opened(names_files=is_local)


class _Objects:
    """Objects, and tensors that only torch can read."""

    def __init__(self, trust_pickle: bool) -> None:
        self._trust_pickle = trust_pickle
        self._places: dict[str, list[_Place]] = {}

    def add(self, fqn: str, place: _Place) -> None:
        self._places.setdefault(fqn, []).append(place)

    def value(self, fqn: str) -> object:
        places = self._places[fqn]
        if len(places) > 1:
            raise UnsupportedError(
                f"cannot load {fqn!r} from memory: it has {len(places)} boxes that only torch can "
                "read"
            )
        snapshot, number = places[0]
        stream = io.BytesIO(snapshot.object_bytes(number))
        try:
            return load_object(stream, trust_pickle=self._trust_pickle)
        except ExpansionError as error:
            raise UnsupportedError(f"cannot load {fqn!r} from memory: {error}") from error
        except ForbiddenPickleError as error:
            raise UnsupportedError(
                f"cannot load {fqn!r} from memory: its pickle asks for {error}"
            ) from error


@dataclass
class _Merged:
    """The items of several slots, with the boxes of each tensor collected."""

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
        session, sequence = snapshot.header.save
        self.identity = session + sequence.to_bytes(8, "little")
        work = _native.Work(_native.ItemTable.decode(snapshot.items))
        for item, offset, nbytes, plain in snapshot.extents:
            fqn, facts, _, offsets, sizes, _ = work.describe(item)
            boxes = self.boxes.setdefault(fqn, {})
            if not _agree(self.facts.setdefault(fqn, facts), facts):
                raise CorruptionError(
                    f"cannot load {fqn!r} of {self.foreign.path}: ranks disagree on its dtype or "
                    "sizes"
                )
            key = tuple(offsets)
            if key in boxes:
                continue
            boxes[key] = (offsets, sizes, number, offset, nbytes, plain, ())
            if not plain:
                self.objects.add(fqn, (snapshot, item))
        if snapshot.paths is not None:
            for fqn, keys in _native.decode_paths(snapshot.paths):
                self.paths.setdefault(fqn, keys)

    def add_holes(self) -> None:
        """Adds a hole for each box that only other machines have.

        Tensors of which this machine has no box at all are not in the metadata.
        """
        number = len(self.foreign.files)
        file_nbytes = 0
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
                file_nbytes = max(file_nbytes, nbytes)
        if file_nbytes:
            self.foreign.files.append((ELSEWHERE, file_nbytes))

    def opened(self, *, names_files: bool) -> Opened:
        for fqn, boxes in sorted(self.boxes.items()):  # In the same order on all ranks.
            self.foreign.entries.append((fqn, self.facts[fqn], list(boxes.values())))
        self.foreign.paths = self.paths
        return self.foreign.opened(self.objects, self.identity, names_files=names_files)


def _agree(first: _native.TensorFacts | None, second: _native.TensorFacts | None) -> bool:
    """Returns whether two ranks' facts about an FQN agree in dtype and sizes.

    Other properties may differ. As in DCP, those of the first rank apply.
    """
    if first is None or second is None:
        return first is second
    return first[0] == second[0] and list(first[4]) == list(second[4])


def holes(whole: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[_Box]:
    """Returns the region of a tensor that no box covers, as disjoint boxes: offsets and sizes.

    Example::

        assert holes([4, 2], [([1, 0], [2, 2])]) == [((0, 0), (1, 2)), ((3, 0), (1, 2))]
    """
    remaining: list[_Box] = [((0,) * len(whole), tuple(whole))]
    for offsets, sizes in boxes:
        remaining = [rest for hole in remaining for rest in _subtract(hole, offsets, sizes)]
    return remaining


def _subtract(hole: _Box, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[_Box]:
    """Yields the region of a hole outside a box, as disjoint boxes."""
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
