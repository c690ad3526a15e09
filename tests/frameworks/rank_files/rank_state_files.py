"""Hand-made state dicts of two ranks: DTensors, and ShardedTensors as FSDP1 has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

WHOLE = torch.arange(24.0).view(6, 4)
PARTS = WHOLE[:4], WHOLE[4:]


@contextlib.contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Makes this process one of two ranks, which do not communicate."""
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def dtensor(rank: int) -> DTensor:
    part = WHOLE.chunk(2)[rank].clone()
    return DTensor.from_local(part, DeviceMesh("cpu", [0, 1]), [Shard(0)], run_check=False)


def sharded_tensor(rank: int) -> ShardedTensor:
    shards = [
        ShardMetadata([4 * one, 0], list(PARTS[one].shape), placement=f"rank:{one}/cpu")
        for one in range(2)
    ]
    metadata = ShardedTensorMetadata(shards, WHOLE.size(), TensorProperties(torch.float32))
    local = [LocalShard(PARTS[rank].clone(), shards[rank])]
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


def write(path: Path, rank: int, state: Any) -> None:
    """Writes the file of a model as accelerate does."""
    path.mkdir(exist_ok=True)
    torch.save(state, path / f"pytorch_model_fsdp_0_rank{rank}.bin")


def write_both(path: Path) -> None:
    for rank in range(2):
        with as_rank(rank):
            write(path, rank, {"d": dtensor(rank), "s": sharded_tensor(rank), "rank": rank})
