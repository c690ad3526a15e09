"""Which rows of a tensor a rank of a device mesh has, by the definition of DTensor's placements."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["shard_ranges"]

_MAX_PIECES = 1 << 16
"""A split factor is a number of ranks of a mesh dimension."""

_Ranges = list[tuple[int, int]]


def shard_ranges(
    sizes: Sequence[int],
    mesh_sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[_Ranges]:
    """Returns the ranges ``[begin, end)`` of each dimension that the rank of a coordinate has.

    Each dimension has one range, or none if it is empty, unless a strided shard has several.
    Raises ValueError if the split factor of a strided shard is not a number of ranks.
    """
    ranges: list[_Ranges] = [[(0, size)] if size else [] for size in sizes]
    for count, rank, placement in zip(mesh_sizes, coordinate, placements, strict=True):
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        pieces = int(getattr(placement, "split_factor", 1))
        if not 0 < pieces <= _MAX_PIECES:
            raise ValueError(f"a split factor of {pieces}")
        whole, out = ranges[placement.dim], _Joined()
        if len(whole) * pieces > _MAX_PIECES:
            raise ValueError(f"a split factor of {pieces} after others")
        for piece in range(pieces):
            for one in _chunk(_chunk(whole, pieces, piece), count, rank):
                out.add(*one)
        ranges[placement.dim] = out.ranges
    return ranges


class _Joined:
    """Ranges, those that follow one another as one."""

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
