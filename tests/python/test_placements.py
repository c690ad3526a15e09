"""The boxes of strided shards, in the order that ``full_tensor()`` gives them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ckpt.formats.placements import shard_boxes

MESHES = list(itertools.product((2, 3, 4, 6), (2, 3, 4)))


def chunk(rows: torch.Tensor, count: int, number: int) -> torch.Tensor:
    chunks = rows.chunk(count)
    return chunks[number] if number < len(chunks) else rows[:0]


def ours(rows: int, mesh: tuple[int, int], at: tuple[int, int]) -> list[int]:
    """The rows of a rank of FSDP over tensor parallelism."""
    placements = [_StridedShard(0, split_factor=mesh[1]), Shard(0)]
    boxes = shard_boxes([rows], mesh, at, placements)
    return [row for box in boxes for row in range(box.offsets[0], box.offsets[0] + box.sizes[0])]


def in_mesh_order(rows: int, mesh: tuple[int, int], at: tuple[int, int]) -> list[int]:
    """The rows of a rank as ``distribute_tensor`` cuts them."""
    strided = _StridedShard(0, split_factor=mesh[1])
    parts, _ = strided._split_tensor(torch.arange(rows), mesh[0], with_padding=False)
    return chunk(parts[at[0]], mesh[1], at[1]).tolist()


@pytest.fixture
def sizes(full: bool) -> range:
    """Numbers of rows, with all remainders of the meshes."""
    return range(1, 60, 1 if full else 5)


def test_fsdp_over_tensor_parallelism_cuts_the_chunks_of_the_latter(sizes: range) -> None:
    for rows, mesh in itertools.product(sizes, MESHES):
        for at in itertools.product(*map(range, mesh)):
            expected = chunk(chunk(torch.arange(rows), mesh[1], at[1]), mesh[0], at[0])
            assert ours(rows, mesh, at) == expected.tolist()


def test_shards_of_the_other_order_with_other_rows_have_other_sizes_on_some_rank(
    sizes: range,
) -> None:
    """So a rank refuses its local tensor, where another one cannot know."""
    cannot_know = 0
    for rows, mesh in itertools.product(sizes, MESHES):
        placements = [_StridedShard(0, split_factor=mesh[1]), Shard(0)]
        for first in range(mesh[0]):
            has_other_size = False
            for second in range(mesh[1]):
                at = first, second
                mine, other = ours(rows, mesh, at), in_mesh_order(rows, mesh, at)
                size, _ = _compute_local_shape_and_global_offset([rows], mesh, at, placements)
                assert size == (len(other),)
                has_other_size = has_other_size or len(mine) != len(other)
                if mine != other:
                    assert has_other_size
                    cannot_know += len(mine) == len(other)
    assert cannot_know
