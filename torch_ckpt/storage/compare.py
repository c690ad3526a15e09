"""Compares two checkpoints of any formats in bounded memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torch_ckpt._core.tensors import DTYPE_CODES
from torch_ckpt.errors import NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.reader import FastReader

__all__ = ["Comparison", "compare"]

_PIECE_NBYTES = 64 << 20
"""Bytes of each checkpoint in memory at a time, if each element had at least 8 bytes."""

_Box = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets, sizes.


@dataclass
class Comparison:
    """The result of a comparison.

    Attributes:
        equal: Number of equal values.
        differences: FQN -> how the values differ.
        unknown: FQN -> why the values cannot be compared.
    """

    equal: int = 0
    differences: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def compare(
    a: Location,
    b: Location,
    *,
    prefix: str = "",
    atol: float = 0.0,
    rtol: float = 0.0,
    trust_pickle: bool = False,
) -> Comparison:
    """Compares two checkpoints, value by value.

    Args:
        a: The first checkpoint, of any format that :class:`FastReader` loads.
        b: The second checkpoint.
        prefix: Compare only FQNs with this prefix, without it. If one checkpoint has no such FQN,
            all of it is compared.
        atol: Absolute tolerance. With both tolerances 0, tensors must be equal bit for bit.
        rtol: Tolerance relative to ``b``.
        trust_pickle: Whether pickles may contain any class and run any code.

    Raises:
        CheckpointError: A checkpoint cannot be read.
        NotFoundError: Neither checkpoint has an FQN with the prefix.
    """
    sides = [_Side(path, prefix, trust_pickle) for path in (a, b)]
    one, two = sides
    if not one.has_prefix and not two.has_prefix:
        raise NotFoundError(f"neither {a} nor {b} has a name that begins with {prefix!r}")
    found = Comparison()
    for fqn in sorted(one.names.keys() ^ two.names.keys()):
        where = "A" if fqn in one.names else "B"
        found.differences[fqn] = f"only in {where}"
    tensors: list[str] = []
    objects: list[str] = []
    for fqn in sorted(one.names.keys() & two.names.keys()):
        entries = [side.entry(fqn) for side in sides]
        kinds = [isinstance(entry, TensorStorageMetadata) for entry in entries]
        if not all(kinds):
            if any(kinds):
                found.differences[fqn] = "a tensor in one, an object in the other"
            else:
                objects.append(fqn)
            continue
        facts = [f"{entry.properties.dtype} {list(entry.size)}" for entry in entries]
        if facts[0] != facts[1]:
            found.differences[fqn] = f"{facts[0]} in A, {facts[1]} in B"
        elif entries[0].properties.dtype not in DTYPE_CODES:
            found.unknown[fqn] = f"only torch can read tensors of {entries[0].properties.dtype}"
        else:
            tensors.append(fqn)
    _compare_tensors(sides, tensors, found, atol, rtol)
    _compare_objects(sides, objects, found)
    return found


class _Side:
    """One of the two checkpoints."""

    def __init__(self, path: Location, prefix: str, trust_pickle: bool) -> None:
        self._reader = FastReader(path.checkpoint_id, trust_pickle=trust_pickle, exchange="off")
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        stored = list(self._metadata.state_dict_metadata)
        chosen = [fqn for fqn in stored if fqn.startswith(prefix)]
        self.has_prefix = bool(chosen) or not prefix
        self.names: Mapping[str, str] = (
            {fqn.removeprefix(prefix): fqn for fqn in chosen}
            if chosen
            else {fqn: fqn for fqn in stored}
        )

    def entry(self, fqn: str) -> Any:
        return self._metadata.state_dict_metadata[self.names[fqn]]

    def load(self, boxes: Sequence[tuple[str, _Box]]) -> list[torch.Tensor]:
        """Loads boxes of tensors."""
        targets, items = [], []
        for number, (fqn, (offsets, sizes)) in enumerate(boxes):
            entry = self.entry(fqn)
            targets.append(torch.empty(sizes, dtype=entry.properties.dtype))
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for item in create_read_items_for_chunk_list(self.names[fqn], entry, [chunk]):
                # The planner finds the target by its number.
                index = MetadataIndex(item.dest_index.fqn, item.dest_index.offset, number)
                items.append(_with_destination(item, index))
        self._read(items, _Pieces(targets))
        return targets

    def objects(self, fqns: Sequence[str]) -> list[Any]:
        """Loads objects."""
        state: dict[str, Any] = dict.fromkeys(self.names[fqn] for fqn in fqns)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self._metadata, True)
        self._read(planner.create_local_plan().items, planner)
        return [planner.state_dict[self.names[fqn]] for fqn in fqns]

    def _read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        self._reader.read_data(LoadPlan(items), planner).wait()


def _with_destination(item: ReadItem, index: MetadataIndex) -> ReadItem:
    return ReadItem(
        item.type,
        index,
        item.dest_offsets,
        item.storage_index,
        item.storage_offsets,
        item.lengths,
    )


class _Pieces(DefaultLoadPlanner):
    """A planner whose targets are the pieces themselves."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        return narrow_tensor_by_index(
            self._targets[number], read_item.dest_offsets, read_item.lengths
        )

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...


def _compare_tensors(
    sides: Sequence[_Side], fqns: Sequence[str], found: Comparison, atol: float, rtol: float
) -> None:
    different: dict[str, tuple[int, float]] = {}  # Count, largest absolute difference.
    for batch in _batches(sides[0], fqns):
        for (fqn, _), x, y in zip(batch, *(side.load(batch) for side in sides), strict=True):
            count, largest = _difference(x, y, atol, rtol)
            if count:
                known = different.get(fqn, (0, 0.0))
                different[fqn] = known[0] + count, _larger(known[1], largest)
    for fqn in fqns:
        if fqn in different:
            count, largest = different[fqn]
            numel = sides[0].entry(fqn).size.numel()
            found.differences[fqn] = f"{count} of {numel} elements differ, by {largest:.6g} at most"
    found.equal += len(fqns) - len(different)


def _batches(side: _Side, fqns: Sequence[str]) -> Iterator[list[tuple[str, _Box]]]:
    """Yields batches of boxes that need at most 64 MiB, except for single elements."""
    batch: list[tuple[str, _Box]] = []
    nbytes = 0
    for fqn in fqns:
        entry = side.entry(fqn)
        itemsize = max(entry.properties.dtype.itemsize, 8)  # Unequal elements become float64.
        for box in _pieces(tuple(entry.size), itemsize):
            box_nbytes = math.prod(box[1]) * itemsize
            if batch and nbytes + box_nbytes > _PIECE_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append((fqn, box))
            nbytes += box_nbytes
    if batch:
        yield batch


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[_Box]:
    """Cuts a tensor into boxes of at most 64 MiB."""
    sizes = list(shape)
    for dim in range(len(sizes)):
        below = math.prod(shape[dim + 1 :]) * itemsize
        sizes[dim] = min(shape[dim], max(1, _PIECE_NBYTES // max(below, 1)))
        if below <= _PIECE_NBYTES:
            break
    steps = [range(0, full, size) for full, size in zip(shape, sizes, strict=True) if full]
    if len(steps) < len(shape):
        return  # A tensor without elements.
    for offsets in itertools.product(*steps):
        ends = (min(o + s, full) for o, s, full in zip(offsets, sizes, shape, strict=True))
        yield offsets, tuple(end - o for end, o in zip(ends, offsets, strict=True))


def _difference(x: torch.Tensor, y: torch.Tensor, atol: float, rtol: float) -> tuple[int, float]:
    """Returns the number of different elements, and the largest absolute difference."""
    x, y = x.reshape(-1), y.reshape(-1)
    unequal = (x.view(torch.uint8) != y.view(torch.uint8)).view(-1, x.dtype.itemsize).any(dim=1)
    if not unequal.any():
        return 0, 0.0
    x, y = x[unequal], y[unequal]
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    distances = (x.to(wide) - y.to(wide)).abs()
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        # int64 is exact for close integers. It overflows for distant ones, which need float64.
        exact = (x.to(torch.int64) - y.to(torch.int64)).abs()
        distances = torch.where(distances < 2**53, exact.to(wide), distances)
    if atol or rtol:
        same = (distances <= atol + rtol * y.to(wide).abs()) | (x == y) | ((x != x) & (y != y))
        distances = distances[~same]
    if not len(distances):
        return 0, 0.0
    return len(distances), float(distances.max())


def _larger(x: float, y: float) -> float:
    return math.nan if math.isnan(x) or math.isnan(y) else max(x, y)


def _compare_objects(sides: Sequence[_Side], fqns: Sequence[str], found: Comparison) -> None:
    if not fqns:
        return
    try:
        loaded = [side.objects(fqns) for side in sides]
    except UnsupportedError as error:  # An object of a forbidden class.
        if len(fqns) == 1:
            found.unknown[fqns[0]] = str(error)
            return
        for fqn in fqns:
            _compare_objects(sides, [fqn], found)
        return
    for fqn, x, y in zip(fqns, *loaded, strict=True):
        try:
            same = _is_equal(x, y)
        except Exception as error:
            found.unknown[fqn] = f"objects of {type(x).__name__} cannot be compared: {error}"
            continue
        if same:
            found.equal += 1
        else:
            found.differences[fqn] = f"{_short(x)} in A, {_short(y)} in B"


def _is_equal(x: Any, y: Any) -> bool:
    if x is y:  # None, or a class or function.
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, torch.Tensor):
        return x.dtype == y.dtype and x.shape == y.shape and not _difference(x, y, 0, 0)[0]
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_is_equal(value, y[key]) for key, value in x.items())
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(_is_equal, x, y))
    if isinstance(x, float):
        return x == y or (math.isnan(x) and math.isnan(y))
    if isinstance(x, torch.Generator):
        return torch.equal(x.get_state(), y.get_state())
    if type(x).__module__ == "numpy" and hasattr(x, "tobytes"):
        return bool(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())
    if getattr(type(x), "__eq__", None) is object.__eq__:
        raise TypeError("their class has no comparison")
    return bool(x == y)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
