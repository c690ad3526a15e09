"""Tensors that are parts of others by their attributes, which a planner asks for their boxes."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from support.tensors import bits, full_value
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Sizes = tuple[int, ...]
Box = tuple[Sizes, Sizes, Sizes]  # Offsets in the whole tensor, offsets in the local one, sizes.
State = dict[str, Any]


# ---- Kinds of parts ------------------------------------------------------------------------------


def by_protocol(local: torch.Tensor, shape: Sizes, boxes: Sequence[Box]) -> Any:
    """A ``CheckpointableTensor`` of torch 2.14."""
    part: Any = local
    part.global_shape = shape
    part.global_offsets = tuple(at for at, _, _ in boxes)
    part.local_offsets = tuple(at for _, at, _ in boxes)
    part.local_sizes = tuple(sizes for _, _, sizes in boxes)
    return part


def _write_items(self: Any, fqn: str, _: object) -> list[WriteItem]:
    properties = TensorProperties(dtype=self.dtype)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, self.size()),
        )
        for chunk in self.__create_chunk_list__()
    ]


def _chunk_list(self: Any) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in self.boxes]


def _tensor_shard(self: Any, index: MetadataIndex) -> torch.Tensor:
    (found,) = (box for box in self.boxes if torch.Size(box[0]) == index.offset)
    return _narrowed(self.as_subclass(torch.Tensor), *found)


METHODS = {
    "__create_write_items__": _write_items,
    "__create_chunk_list__": _chunk_list,
    "__get_tensor_shard__": _tensor_shard,
}


class Listing(torch.Tensor):
    """A subclass whose methods read its attributes."""

    boxes: list[tuple[Sizes, Sizes]]


for _name, _method in METHODS.items():
    setattr(Listing, _name, _method)


def by_class(local: torch.Tensor, shape: Sizes, boxes: Sequence[Box]) -> Any:
    """A tensor of a class with methods that list the boxes. It has the sizes of the whole one."""
    part: Any = local.as_subclass(Listing)
    part.boxes = [(at, sizes) for at, _, sizes in boxes]
    return part


def by_methods(local: torch.Tensor, shape: Sizes, boxes: Sequence[Box]) -> Any:
    """A tensor of torch's own class with such methods."""
    part: Any = local
    part.boxes = [(at, sizes) for at, _, sizes in boxes]
    part.__create_write_items__ = functools.partial(_write_items, part)
    part.__create_chunk_list__ = functools.partial(_chunk_list, part)
    part.__get_tensor_shard__ = types.MethodType(_tensor_shard, part)
    return part


KINDS = {"protocol": by_protocol, "class": by_class, "methods": by_methods}


# ---- States of two ranks, and of one -------------------------------------------------------------

WHOLES = {
    "rows": full_value("rows", (8, 4), torch.float32),
    "interleaved": full_value("interleaved", (9, 3), torch.bfloat16),
    "columns": full_value("columns", (5, 6), torch.float64),
    "uneven": full_value("uneven", (7,), torch.int64),
    "on one rank": full_value("on one rank", (3, 2), torch.uint8),
    "replicated": full_value("replicated", (700, 3), torch.float32),
    "parameter": full_value("parameter", (6, 2), torch.float32),
    "large": full_value("large", (1031, 257), torch.float32),
}
PLAIN = full_value("plain", (3, 3), torch.float32)


def spans(name: str, rank: int, ranks: int) -> list[Box]:
    """The boxes of a rank."""
    shape = tuple(WHOLES[name].shape)
    rows = shape[0]
    rest = shape[1:]

    def of_rows(begin: int, end: int, local: int = 0) -> Box:
        zeros = (0,) * len(rest)
        return (begin, *zeros), (local, *zeros), (end - begin, *rest)

    if ranks == 1 or name == "replicated":
        return [of_rows(0, rows)]
    if name == "interleaved":  # With a row of padding before each.
        starts = range(rank, rows, ranks)
        return [of_rows(row, row + 1, 2 * number + 1) for number, row in enumerate(starts)]
    if name == "columns":
        begin, end = (0, 2) if rank == 0 else (2, 6)
        return [((0, begin), (1, 1), (rows, end - begin))]
    if name == "on one rank":
        return [of_rows(0, rows)] if rank == 1 else []
    cut = rows - 2 if name == "uneven" else rows // 2
    return [of_rows(0, cut) if rank == 0 else of_rows(cut, rows)]


def parts(kind: str, rank: int, ranks: int, *, filled: bool) -> State:
    """The parts of a rank, with the values of the whole tensors or without."""
    state: State = {}
    for name, whole in WHOLES.items():
        boxes = spans(name, rank, ranks)
        ends = [
            tuple(at + size + 1 for at, size in zip(local, sizes, strict=True))
            for _, local, sizes in boxes
        ]
        padding = 0 if name in ("uneven", "replicated") else 1
        sizes = tuple(max(each) - 1 + padding for each in zip(*ends, strict=True))
        sizes = sizes or (1,) * whole.dim()
        if kind != "protocol":  # Stock takes the sizes of a part for those of the whole tensor.
            sizes = tuple(whole.shape)
            boxes = [(at, at, box) for at, _, box in boxes]
        local = torch.full(sizes, 7, dtype=whole.dtype)
        if filled:
            for at, local_at, box in boxes:
                _narrowed(local, local_at, box).copy_(_narrowed(whole, at, box))
        if name == "parameter":
            local = torch.nn.Parameter(local)
        state[name] = KINDS[kind](local, tuple(whole.shape), boxes)
    return {**state, "plain": PLAIN.clone() if filled else torch.zeros(3, 3)}


def _narrowed(tensor: torch.Tensor, at: Sizes, sizes: Sizes) -> torch.Tensor:
    for dim, (begin, size) in enumerate(zip(at, sizes, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor


def spoil(state: State) -> None:
    """Changes all values, as training does after an asynchronous save began."""
    with torch.no_grad():
        for tensor in state.values():
            tensor.as_subclass(torch.Tensor).zero_()


def blank() -> State:
    """Whole tensors to load into."""
    return {name: torch.zeros_like(whole) for name, whole in WHOLES.items()} | {
        "plain": torch.zeros(3, 3)
    }


def assert_whole(state: State) -> None:
    """All whole tensors have their values."""
    wrong = [name for name, whole in WHOLES.items() if bits(state[name]) != bits(whole)]
    assert not wrong
    assert bits(state["plain"]) == bits(PLAIN)


def assert_parts(kind: str, state: State, rank: int, ranks: int) -> None:
    """All boxes have their values."""
    expected = parts(kind, rank, ranks, filled=True)
    assert [name for name in expected if bits(state[name]) != bits(expected[name])] == []
