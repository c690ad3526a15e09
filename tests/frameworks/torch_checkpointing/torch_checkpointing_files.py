"""Hand-made directories of torch_checkpointing: two ranks with a part of one tensor each."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

WHOLE = torch.arange(24.0).view(6, 4)
MESH = {"device_type": "cpu", "mesh_shape": (2,), "mesh_data": (0, 1), "mesh_dim_names": None}


def dtensor_sharding(**changes: Any) -> dict[str, Any]:
    facts = {
        "global_shape": [6, 4],
        "dtype": "torch.float32",
        "stride": [4, 1],
        "mesh_spec": MESH,
        "placements": [{"type": "Shard", "dim": 0}],
        **changes,
    }
    return {"type": "DTensorShardingMetadata", "data": facts}


def boxes(at: Any, sizes: Any, local: Any = ((0, 0),)) -> dict[str, Any]:
    facts = {
        "global_shape": [6, 4],
        "global_offsets": at,
        "local_offsets": local,
        "local_sizes": sizes,
        "dtype": "torch.float32",
    }
    return {"type": "default_tensor_v1", "data": facts}


def write(
    path: Path,
    *shardings: dict[str, Any],
    parts: tuple[torch.Tensor, ...] = (WHOLE[:3], WHOLE[3:]),
    **changes: Any,
) -> None:
    """Two ranks with a part each: both of the only sharding, or each of its own."""
    path.mkdir(exist_ok=True)
    for rank, part in enumerate(parts):
        torch.save({"w": part.clone()}, path / f"model_{rank}.pt")
    groups = [{"sharding_metadata": shardings[0], "ranks": (0, 1)}]
    if len(shardings) > 1:
        groups = [
            {"sharding_metadata": one, "ranks": (rank,)} for rank, one in enumerate(shardings)
        ]
    item = {"nested_path_to_metadata": {'["w"]': groups}, "rank_to_layout_info": {0: None, 1: None}}
    metadata = {"metadata": {"model": item}, "world_size": 2, "version": "2.0", **changes}
    (path / "metadata.pkl").write_bytes(pickle.dumps(metadata))
