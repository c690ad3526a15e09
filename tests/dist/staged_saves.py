"""Asynchronous saves of steps by one stager, of which a rank stages its own part, or everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from changing_states import EXECUTORS
from states import assert_same, full_value, sharded
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, FastWriter, SnapshotStager
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.staging.stager import _Placed

SAVE_TIMEOUT_S = 60
LAYERS = 12
LAYER = (256, 512)
LAYER_NBYTES = 4 * 256 * 512


def state_at(step: int, change: str = "", group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Replicas, a shard, and objects; with a change, of which only the last rank knows."""
    mesh = (
        init_device_mesh("cpu", (dist.get_world_size(),))
        if group is None
        else DeviceMesh.from_group(group, "cpu")
    )
    model: dict[str, Any] = {
        f"layer.{i}": full_value(f"{i} at {step}", LAYER, torch.float32) for i in range(LAYERS)
    }
    model["sharded"] = sharded(
        full_value(f"sharded {step}", (64, 3), torch.float32), mesh, (Shard(0),)
    )
    if change == "dtype" or (change and dist.get_rank() == dist.get_world_size() - 1):
        if change == "key":
            model["new"] = full_value(f"new {step}", (300, 700), torch.float32)
        elif change == "gone":
            del model["layer.3"]
        elif change == "dtype":
            model["layer.0"] = full_value(f"0 at {step}", (999, 512), torch.bfloat16)
    return {"model": model, "step": step, "odd": (step, torch.full((3,), step))}


def spoil(state: dict[str, Any]) -> None:
    for tensor in state["model"].values():
        local_part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local_part.fill_(-1)


class Saves:
    """Saves steps asynchronously, and knows how many bytes each has staged."""

    def __init__(
        self,
        path: Path,
        stager: type[SnapshotStager] = SnapshotStager,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.path = path
        self.among = group
        self.group = group or dist.new_group(backend="gloo")
        self.stager = stager()
        self.staged: list[int] = []
        plan_cache().forget()

    def begin(
        self, state: dict[str, Any], planner: Any = FastSavePlanner, executor: str = "thread"
    ) -> Any:
        copy_all = _Placed.copy_all

        def copy_counted(placed: _Placed, *where: Any) -> None:
            self.staged.append(sum(live.nbytes for _, live, _ in placed._copies))
            copy_all(placed, *where)

        writer = FastWriter(self.path / str(state["step"]), stager=self.stager)
        with mock.patch.object(_Placed, "copy_all", copy_counted):
            future = torch_ckpt.async_save(
                state,
                storage_writer=writer,
                process_group=self.group,
                planner=planner(),
                async_checkpointer_type=EXECUTORS[executor],
                timeout_s=SAVE_TIMEOUT_S,
            )
        spoil(state)
        return future

    def save(self, step: int, change: str = "", **options: Any) -> None:
        """Saves a step, and looks after it."""
        state, wanted, found = (state_at(step, change, self.among) for _ in range(3))
        self.begin(state, **options).result(SAVE_TIMEOUT_S)
        spoil(found)
        reader = FastReader(self.path / str(step))
        dcp.load(found, storage_reader=reader, process_group=self.group)
        assert_same(found["model"], wanted["model"])
