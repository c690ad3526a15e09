"""Snapshots in shared memory: the slots of all ranks of one save, as one checkpoint.

A slot is a file of tmpfs, and its table says where in it each item lies. So what ranks have left in
memory is loaded by the same plan as what they have left on disk, and by ranks that are fewer, or
more, or hold other shards. Nothing in memory has checksums but the tables.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torch_ckpt import _native
from torch_ckpt.errors import CorruptionError, MismatchError, UnsupportedError
from torch_ckpt.formats.opened import ForeignFiles, Opened
from torch_ckpt.pickles import ForbiddenPickleError, load_object

__all__ = ["open_snapshot"]

_Place = tuple[_native.StoredSnapshot, int]  # The number of the item.


def open_snapshot(folder: Path, slots: Sequence[Path], *, trust_pickle: bool) -> Opened:
    """Opens the slots of one save as a checkpoint.

    Args:
        folder: Where they lie.
        slots: Of all ranks. Of what several hold, the first counts: that of the machine's own rank
            had better be first.
        trust_pickle: Whether objects may be unpickled whatever they ask for.

    Raises:
        NotFoundError: One of them holds no complete snapshot.
        CorruptionError: One is damaged.
        MismatchError: They are not those of one save.
    """
    merged = _Merged(ForeignFiles(folder, folder), _Objects(trust_pickle))
    found = [(path, _native.Slot.open(os.fsencode(path), False).read()) for path in slots]
    saves = {(snapshot.header[:4], snapshot.header[5]) for _, snapshot in found}
    ranks = {snapshot.header[4] for _, snapshot in found}
    if len(saves) != 1 or ranks != set(range(found[0][1].header[5])):
        raise MismatchError(
            f"the snapshots in {folder}, of ranks {sorted(ranks)}, are not those of one save"
        )
    for path, snapshot in found:
        merged.add(path, snapshot)
    return merged.opened()


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
            if self._trust_pickle:
                return torch.load(stream, weights_only=False)
            return load_object(stream)
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
            if self.facts.setdefault(fqn, facts) != facts:
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

    def opened(self) -> Opened:
        for fqn, boxes in self.boxes.items():
            self.foreign.entries.append((fqn, self.facts[fqn], list(boxes.values())))
        self.foreign.paths = self.paths
        return self.foreign.opened(self.objects, self.identity)
