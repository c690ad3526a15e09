"""Which rows of a tensor a rank of a device mesh has, by the definition of DTensor's placements."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["shard_ranges"]

_Ranges = list[tuple[int, int]]


def shard_ranges(
    sizes: Sequence[int],
    mesh_sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[_Ranges]:
    """Returns the ranges ``[begin, end)`` of each dimension that a rank has.

    Each dimension has one range, unless a strided shard has several.

    Args:
        sizes: Sizes of the whole tensor.
        mesh_sizes: Sizes of the mesh.
        coordinate: Coordinate of the rank in the mesh.
        placements: One for each dimension of the mesh.
    """
    ranges: list[_Ranges] = [[(0, size)] for size in sizes]
    for count, rank, placement in zip(mesh_sizes, coordinate, placements, strict=True):
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        pieces = int(getattr(placement, "split_factor", 1))
        whole = ranges[placement.dim]
        chunks = (_chunk(_chunk(whole, pieces, piece), count, rank) for piece in range(pieces))
        ranges[placement.dim] = functools.reduce(_joined, chunks)
    return ranges


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


def _joined(ranges: _Ranges, more: _Ranges) -> _Ranges:
    """Returns both ranges, those that follow one another as one."""
    if ranges and more and ranges[-1][1] == more[0][0]:
        return [*ranges[:-1], (ranges[-1][0], more[0][1]), *more[1:]]
    return ranges + more
