"""Opens the snapshots of one save in shared memory as a checkpoint.

A slot is a file in tmpfs, and its table lists the extent of each item. So a load from memory uses
the same plans as a load from disk, and works with other numbers of ranks or other shards. Tables
are checksummed; payloads are not.

If the ranks are on several machines, the slots of one machine cover only the shards of its ranks.
Other boxes are in files of other machines, which the ranks there read.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.errors import CorruptionError, MismatchError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.expansion import ExpansionError
from torch_ckpt.formats.object_pickles import load_object
from torch_ckpt.formats.opened import ForeignFiles, Opened
from torch_ckpt.formats.pickles import ForbiddenPickleError

__all__ = ["SlotTable", "merged_index", "open_snapshot"]

_Region = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets and sizes of a box.
_SlotItem = tuple[_native.StoredSnapshot, int]  # Snapshot and number of the item.


@dataclass(frozen=True)
class SlotTable:
    """The table of a slot, as a rank sends it to others.

    ``name`` and ``nbytes`` describe the file. The other fields are from StoredSnapshot.
    """

    name: str
    nbytes: int
    items: bytes
    extents: Sequence[tuple[int, int, int, bool]]
    paths: bytes | None

    @classmethod
    def of(cls, path: Path, snapshot: _native.StoredSnapshot) -> SlotTable:
        """Returns the table of a complete slot."""
        nbytes = path.stat().st_size
        return cls(path.name, nbytes, snapshot.items, snapshot.extents, snapshot.paths)

    @classmethod
    def read(cls, path: Path) -> SlotTable:
        """Returns the table of a slot. Raises NotFoundError if it has no complete snapshot."""
        return cls.of(path, _native.Slot.open(path, False).read())


def merged_index(tables: Iterable[SlotTable]) -> _native.Index:
    """Returns an index of the slots of all machines, with one extent for each box."""
    foreign = ForeignFiles(Location("memory"), Location("memory"), "snapshot", is_own=True)
    merged = _Merged(foreign, _Objects(False))
    for table in tables:
        merged.add(table)
    paths = [(fqn, list(keys)) for fqn, keys in merged.paths.items()]
    return _native.foreign_index("0" * 16, foreign.files, merged.entries(), {}, paths)


def open_snapshot(
    save: tuple[bytes, int],
    folder: Path,
    slots: Sequence[Path],
    *,
    trust_pickle: bool,
    others: _native.Index | None = None,
) -> Opened:
    """Opens the slots of a save, which its session and sequence identify, as a checkpoint.

    If a tensor has several replicas, a load uses the one in the first slot, so the caller's own
    slot should be first. If some slots are on other machines, ``others`` is an index of all slots.
    Raises NotFoundError if a slot has no complete snapshot, and MismatchError if the slots do not
    belong to the save.
    """
    foreign = ForeignFiles(Location(folder), Location(folder), "snapshot", is_own=True)
    merged = _Merged(foreign, _Objects(trust_pickle))
    found = [(path, _native.Slot.open(path, False).read()) for path in slots]
    ranks = {snapshot.header.rank for _, snapshot in found}
    saves = {snapshot.header.save for _, snapshot in found}
    is_whole = others is not None or ranks == set(range(found[0][1].header.world_size))
    if not saves <= {save} or not is_whole:
        raise MismatchError(
            f"cannot load the snapshots of ranks {sorted(ranks)} in {folder}: they are not from "
            "one save"
        )
    for path, snapshot in found:
        merged.add(SlotTable.of(path, snapshot), snapshot)
    if others is not None:
        merged.add_index(others)
    return merged.opened(save)


class _Objects:
    """Objects, and tensors that only torch can read."""

    def __init__(self, trust_pickle: bool) -> None:
        self._trust_pickle = trust_pickle
        self._items: dict[str, list[_SlotItem]] = {}

    def add(self, fqn: str, item: _SlotItem) -> None:
        self._items.setdefault(fqn, []).append(item)

    def value(self, fqn: str) -> object:
        items = self._items[fqn]
        if len(items) > 1:
            raise UnsupportedError(
                f"cannot load {fqn!r} from memory: it has {len(items)} boxes that only torch can "
                "read"
            )
        snapshot, number = items[0]
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
    boxes: dict[str, dict[_Region, _native.IndexBox]] = field(default_factory=dict)
    paths: dict[str, Sequence[str | int]] = field(default_factory=dict)

    def add(self, table: SlotTable, snapshot: _native.StoredSnapshot | None = None) -> None:
        """Adds a slot. ``snapshot`` is given for slots of this machine."""
        number = len(self.foreign.files)
        self.foreign.files.append((table.name, table.nbytes))
        work = _native.Work(_native.ItemTable.decode(table.items))
        for item, offset, nbytes, plain in table.extents:
            try:
                fqn, facts, _, offsets, sizes, _ = work.describe(item)
            except UnicodeDecodeError as error:
                raise CorruptionError(
                    f"cannot load {table.name} of {self.foreign.path}: a text of its table is not "
                    f"UTF-8: {error}"
                ) from None
            box = (offsets, sizes, number, offset, nbytes, plain, ())
            if self._add_box(fqn, facts, box) and not plain and snapshot is not None:
                self.objects.add(fqn, (snapshot, item))
        for fqn, keys in _native.decode_paths(table.paths) if table.paths is not None else ():
            self.paths.setdefault(fqn, keys)

    def add_index(self, index: _native.Index) -> None:
        """Adds the boxes that exist only on other machines."""
        numbers: dict[int, int] = {}
        files = index.files
        for fqn, facts, boxes in index:
            for offsets, sizes, file, offset, nbytes, plain, _ in boxes:
                number = numbers.get(file, len(self.foreign.files))
                if self._add_box(fqn, facts, (offsets, sizes, number, offset, nbytes, plain, ())):
                    if file not in numbers:
                        self.foreign.files.append(files[file])
                    numbers[file] = number
        for fqn, keys in index.paths or ():
            self.paths.setdefault(fqn, keys)

    def _add_box(self, fqn: str, facts: _native.TensorFacts | None, box: _native.IndexBox) -> bool:
        """Adds a box unless an equal one exists; returns whether it was added.

        As on disk, an empty box is added only once, and only if its tensor has no elements.
        """
        boxes = self.boxes.setdefault(fqn, {})
        if not _agree(self.facts.setdefault(fqn, facts), facts):
            raise CorruptionError(
                f"cannot load {fqn!r} of {self.foreign.path}: ranks disagree on its dtype or sizes"
            )
        offsets, sizes = box[:2]
        if facts is not None and not math.prod(sizes) and (boxes or math.prod(facts[4])):
            return False
        return boxes.setdefault((tuple(offsets), tuple(sizes)), box) is box

    def entries(self) -> list[_native.IndexEntry]:
        """Returns the entries of an index, in the same order on all ranks."""
        return [
            (fqn, self.facts[fqn], list(boxes.values()))
            for fqn, boxes in sorted(self.boxes.items())
        ]

    def opened(self, save: tuple[bytes, int]) -> Opened:
        """Returns the slots of a save as an open checkpoint."""
        self.foreign.entries, self.foreign.paths = self.entries(), self.paths
        session, sequence = save
        identity = session + sequence.to_bytes(8, "little")
        return self.foreign.opened(self.objects, identity, names_files=False)


def _agree(first: _native.TensorFacts | None, second: _native.TensorFacts | None) -> bool:
    """Returns whether two ranks' facts about an FQN agree in dtype and sizes.

    Other properties may differ. As in DCP, the properties of the first rank apply.
    """
    if first is None or second is None:
        return first is second
    return first[0] == second[0] and list(first[4]) == list(second[4])
