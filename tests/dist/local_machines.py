"""A run on several machines, each with a local directory of its own, and a common directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from torch_ckpt import Run
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import committed_steps

__all__ = ["restore", "run_on", "state_of", "steps_in"]


def state_of(step: int) -> dict[str, Any]:
    """Shards of all ranks, a replica, a tensor of one rank, and an object."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    rows = torch.arange(7 * 50_000, dtype=torch.float32).view(7, -1) + 1000 * step
    return {
        "rows": distribute_tensor(rows.clone(), mesh, [Shard(0)]),
        "columns": distribute_tensor(rows.clone(), mesh, [Shard(1)]),
        "all": distribute_tensor(rows.clone(), mesh, [Replicate()]),
        "step": step,
    }


def run_on(folder: Path, machines: Sequence[int], **options: Any) -> Run:
    """The run of this rank, whose machine is the entry of ``machines`` for it."""
    local = folder / f"machine-{machines[dist.get_rank()]}"
    return Run(folder / "run", local=local, timeout_s=60, **options)


def restore(folder: Path, machines: Sequence[int]) -> int | None:
    with run_on(folder, machines) as run:
        state = state_of(0)
        step = run.restore(state)
        if step is not None:
            for name, value in state_of(step).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(state[name].to_local(), value.to_local()), name
                else:
                    assert state[name] == value
        return step


def steps_in(directory: Path) -> list[int]:
    return committed_steps(Location(directory))
