"""States that several ranks hold in part or whole, and who wrote how much of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from states import full_value, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

MIB = 1 << 20


def replicated() -> dict[str, Any]:
    """As DDP has it: one tensor is most of all bytes."""
    state: dict[str, Any] = {
        f"layer.{i}": full_value(f"l{i}", (100 + i, 333), torch.float32) for i in range(30)
    }
    state["embedding"] = full_value("embedding", (9001, 257), torch.bfloat16)
    return {"model": state, "step": 7}


def hsdp() -> dict[str, Any]:
    """Shards along one dimension of the mesh, replicas along the other; uneven."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shapes = {"a": (4003, 301), "b": (5, 70001), "c": (3, 3), "d": (1, 999)}
    return {
        name: sharded(full_value(name, shape, torch.float32), mesh, (Replicate(), Shard(0)))
        for name, shape in shapes.items()
    }


def experts() -> dict[str, Any]:
    """Experts on some ranks each, everything else on all."""
    rank = dist.get_rank()
    state = {
        f"expert.{i}": full_value(f"expert.{i}", (1024, 512), torch.float32)
        for i in range(4)
        if rank // 2 == i // 2
    }
    return {"experts": state, "dense": full_value("dense", (2000, 1500), torch.bfloat16)}


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "replicated": replicated,
    "hsdp": hsdp,
    "experts": experts,
}


def written_nbytes(path: Path, ranks: int) -> list[int]:
    """Bytes in the data files of each rank."""
    per_rank = [0] * ranks
    for file in path.glob("*.distcp"):
        per_rank[int(re.match(r"__(\d+)_", file.name)[1])] += file.stat().st_size
    return per_rank
