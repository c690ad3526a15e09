"""A state whose values change from step to step, as training changes them during a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import assert_same, full_value, sharded
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from torch_ckpt import FastReader

EXECUTORS = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
LARGE = (513, 4099)  # About 8 MB: its file is still being written when `async_save` returns.


def state_at(step: int) -> dict[str, Any]:
    """A shard, a replica and an object. Their values differ between steps."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    large = full_value(f"sharded {step}", LARGE, torch.float32)
    return {
        "model": {
            # Not a view: stock stagers cannot copy a DTensor that begins inside of a CPU storage.
            "sharded": sharded(large, mesh, (Shard(0),), as_view=False),
            "replicated": full_value(f"replicated {step}", (33, 7), torch.bfloat16),
        },
        "step": step,
    }


def become(state: dict[str, Any], step: int) -> None:
    """Overwrites the tensors of ``state`` in place, as an optimizer does."""
    new = state_at(step)
    for name, tensor in state["model"].items():
        tensor.copy_(new["model"][name])
    state["step"] = step


def assert_saved(path: Path, step: int) -> None:
    loaded = state_at(-1)
    dcp.load(loaded, storage_reader=FastReader(path))
    assert_same(loaded, state_at(step))
