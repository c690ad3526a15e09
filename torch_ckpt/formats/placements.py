"""Computes the boxes of a tensor on a rank of a device mesh from DTensor's placements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["MAX_BOXES", "ShardBox", "shard_boxes"]

MAX_BOXES = 1 << 16
"""Maximum number of boxes of a shard, by default. It also bounds split factors."""

_Ranges = list[tuple[int, int]]


class ShardBox(NamedTuple):
    """A box of a tensor, with its offsets in the tensor and in the rank's local tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


def shard_boxes(
    sizes: Sequence[int],
    mesh_sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    limit: int = MAX_BOXES,
) -> list[ShardBox]:
    """Returns the boxes of a tensor that form the local tensor of the rank at a coordinate.

    Returns one box, unless strided shards give the rank several ranges of a dimension. A rank
    without elements has an empty box, with the same offsets as in DCP. Raises ValueError if the
    split factor of a strided shard is not a number of ranks, or if the rank has more boxes than
    ``limit``.
    """
    ranges = _ranges(sizes, mesh_sizes, coordinate, placements, limit)
    local_sizes = tuple(sum(end - begin for begin, end in of_dim) for of_dim in ranges)
    if not math.prod(local_sizes):
        first = (
            of_dim[0][0] if of_dim else size for of_dim, size in zip(ranges, sizes, strict=True)
        )
        return [ShardBox(tuple(first), local_sizes, (0,) * len(sizes))]
    if math.prod(map(len, ranges)) > limit:
        raise ValueError(f"more than {limit} boxes")
    boxes = []
    for box in itertools.product(*map(_placed, ranges)):
        offsets, box_sizes, local = zip(*box, strict=True) if box else ((), (), ())
        boxes.append(ShardBox(offsets, box_sizes, local))
    return boxes


def _placed(ranges: _Ranges) -> Iterator[tuple[int, int, int]]:
    """Yields begin and length of each range, and its begin in the joined ranges."""
    local = 0
    for begin, end in ranges:
        yield begin, end - begin, local
        local += end - begin


def _ranges(
    sizes: Sequence[int],
    mesh_sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    limit: int,
) -> list[_Ranges]:
    """Returns the ranges ``[begin, end)`` of each dimension; none for an empty dimension."""
    ranges: list[_Ranges] = [[(0, size)] if size else [] for size in sizes]
    for mesh_dim, dim, pieces in _cuts(mesh_sizes, placements):
        count, rank = mesh_sizes[mesh_dim], coordinate[mesh_dim]
        whole, out = ranges[dim], _Joined()
        if len(whole) * pieces > limit:
            raise ValueError(f"a split factor of {pieces} makes more than {limit} boxes")
        for piece in range(pieces):
            for one in _chunk(_chunk(whole, pieces, piece), count, rank):
                out.add(*one)
        ranges[dim] = out.ranges
    return ranges


def _cuts(mesh_sizes: Sequence[int], placements: Sequence[Placement]) -> list[tuple[int, int, int]]:
    """Returns the cuts of a tensor in their order: mesh dimension, its own dimension, pieces.

    Each piece is cut into as many chunks as the mesh dimension has ranks.
    """
    cuts = []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, (Shard, _StridedShard)):
            pieces = int(getattr(placement, "split_factor", 1))
            if not 0 < pieces <= MAX_BOXES:
                raise ValueError(f"a split factor of {pieces}")
            cuts.append((mesh_dim, placement.dim, pieces))
    return _reordered(mesh_sizes, cuts) or cuts


def _reordered(
    mesh_sizes: Sequence[int], cuts: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int]] | None:
    """Returns cuts of one piece each, in the order that split factors state; ``None`` if none.

    If a split factor is the number of chunks of later mesh dimensions, these dimensions cut first,
    as under FSDP over tensor parallelism. For uneven sizes, the shards differ from those of cuts in
    the order of the mesh dimensions. Torch uses both orders: ``full_tensor()`` joins shards in this
    one (``DTensorSpec._maybe_convert_StridedShard_to_shard_order``), and refuses shards that
    ``distribute_tensor`` and the offsets of DCP cut in the other one.

    A local tensor does not state its order, but its size reveals a wrong one. Both orders cut the
    same pieces, and their places depend only on sizes. So if the orders give a rank different
    elements, that rank, or an earlier one in the last mesh dimension, has a different number of
    elements, and refuses its local tensor.
    """
    orders: dict[int, list[int]] = {}
    for mesh_dim, dim, pieces in reversed(cuts):
        order = orders.setdefault(dim, [])
        at, chunks = 0, 1
        while chunks != pieces:
            if at == len(order):
                return None
            chunks *= mesh_sizes[order[at]]
            at += 1
        order.insert(at, mesh_dim)
    return [(mesh_dim, dim, 1) for dim, order in orders.items() for mesh_dim in order]


class _Joined:
    """Ranges. Adjacent ranges are joined."""

    def __init__(self) -> None:
        self.ranges: _Ranges = []

    def add(self, begin: int, end: int) -> None:
        if self.ranges and self.ranges[-1][1] == begin:
            begin = self.ranges.pop()[0]
        self.ranges.append((begin, end))


def _chunk(ranges: _Ranges, count: int, number: int) -> _Ranges:
    """Returns the elements that ``torch.chunk`` puts into one of ``count`` chunks."""
    numel = sum(end - begin for begin, end in ranges)
    step = -(-numel // count)
    low, high = number * step, (number + 1) * step
    out: _Ranges = []
    for begin, end in ranges:
        first, last = max(begin + low, begin), min(begin + high, end)
        if first < last:
            out.append((first, last))
        low, high = low - (end - begin), high - (end - begin)
    return out
