"""Empty shards of a ShardedTensor hide no others of the rank, at whatever offsets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from states import full_value
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter

pytestmark = pytest.mark.timeout(120)

WHOLE = full_value("w", (6, 2), torch.float32)
# First row and end of the shards of each rank: empty ones before, twice, and after others.
ROWS = [[(0, 0), (0, 0), (0, 2)], [(2, 2), (4, 6), (2, 4), (6, 6)]]
NO_ROWS = [[(0, 0), (0, 0)], [(0, 0)]]


def sharded(full: torch.Tensor, rows: list[list[tuple[int, int]]]) -> ShardedTensor:
    placed = [
        [ShardMetadata([begin, 0], [end - begin, 2], f"rank:{rank}/cpu") for begin, end in of_rank]
        for rank, of_rank in enumerate(rows)
    ]
    own = dist.get_rank()
    shards = [
        Shard(full[begin:end].clone(), where)
        for (begin, end), where in zip(rows[own], placed[own], strict=True)
    ]
    everywhere = [shard for of_rank in placed for shard in of_rank]
    metadata = ShardedTensorMetadata(everywhere, full.size(), TensorProperties())
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)


def state_of(full: torch.Tensor) -> dict[str, Any]:
    return {"w": sharded(full, ROWS), "empty": sharded(full[:0], NO_ROWS)}


@pytest.mark.parametrize("planner", [FastSavePlanner, DefaultSavePlanner])
@on_ranks(2)
def test_empty_shards_hide_no_others_of_their_rank(planner: type[Any], path: Path) -> None:
    dcp.save(state_of(WHOLE), storage_writer=FastWriter(path), planner=planner())
    for load_planner in (FastLoadPlanner, DefaultLoadPlanner):
        state = state_of(torch.zeros(6, 2))
        dcp.load(state, storage_reader=FastReader(path), planner=load_planner())
        for (begin, end), shard in zip(
            ROWS[dist.get_rank()], state["w"].local_shards(), strict=True
        ):
            assert torch.equal(shard.tensor, WHOLE[begin:end])
        whole = {"w": torch.zeros(6, 2), "empty": torch.ones(0, 2)}
        dcp.load(whole, checkpoint_id=path)
        assert torch.equal(whole["w"], WHOLE)
