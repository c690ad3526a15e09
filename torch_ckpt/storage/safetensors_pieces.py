"""The ranges of a model's files that a rank writes: boxes of tensors, and headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torch_ckpt.errors import CheckpointError, MismatchError
from torch_ckpt.formats.safetensors.layout import FilePlace, ModelLayout, TensorFacts
from torch_ckpt.planning.replicas import item_nbytes, work_of

__all__ = ["Piece", "dtype_name", "group_pieces", "is_sequence", "pieces_of"]


@dataclass(frozen=True)
class Piece:
    """A range of a file that a rank writes: a box, or the header (without item and place)."""

    file: int
    offset: int
    nbytes: int
    item: WriteItem | None = None
    place: FilePlace | None = None


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def pieces_of(plan: SavePlan, layout: ModelLayout) -> list[Piece]:
    """Returns the boxes that a rank writes according to its final plan."""
    items = (item for item in work_of(plan) if item.index.fqn not in layout.omitted)
    return [_piece_of(item, layout) for item in items]


def is_sequence(pieces: Sequence[Piece]) -> bool:
    """Returns whether pieces can be written in the order of their offsets, each in one piece."""
    return all(
        _is_whole_run(piece.item.tensor_data.chunk.sizes, piece.place.facts.sizes)
        for piece in pieces
        if piece.nbytes and piece.item and piece.item.tensor_data and piece.place
    )


def _piece_of(item: WriteItem, layout: ModelLayout) -> Piece:
    data = item.tensor_data
    place = layout.places.get(item.index.fqn)
    if data is None or place is None:
        raise CheckpointError(f"cannot write {item.index.fqn!r}: the file layout does not have it")
    facts = TensorFacts(item.index.fqn, dtype_name(data.properties.dtype), tuple(data.size))
    if facts != place.facts:
        raise MismatchError(
            f"cannot write {facts.fqn!r}: it is {facts.dtype} of {list(facts.sizes)}, and the file "
            f"layout has {place.facts.dtype} of {list(place.facts.sizes)}"
        )
    offset, stride = place.offset, data.properties.dtype.itemsize
    for size, begin in zip(reversed(data.size), reversed(data.chunk.offsets), strict=True):
        offset += begin * stride
        stride *= size
    return Piece(place.file, offset, item_nbytes(item), item, place)


def group_pieces(pieces: Sequence[Piece], count: int, *, whole_files: bool) -> list[list[Piece]]:
    """Splits pieces, in the given order, into up to ``count`` groups of about equal bytes."""
    total = sum(piece.nbytes for piece in pieces)
    groups: list[list[Piece]] = [[] for _ in range(count)]
    done, group = 0, groups[0]
    for before, piece in zip([None, *pieces], pieces, strict=False):
        if not whole_files or before is None or piece.file != before.file:
            middle = done + piece.nbytes // 2
            group = groups[min(middle * count // max(total, 1), count - 1)]
        group.append(piece)
        done += piece.nbytes
    return [group for group in groups if group]


def _is_whole_run(sizes: Sequence[int], whole: Sequence[int]) -> bool:
    """Returns whether a box is one range of the row-major elements of a tensor."""
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return list(sizes[first + 1 :]) == list(whole[first + 1 :])
