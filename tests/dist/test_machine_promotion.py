"""Runs on several machines, each with a local directory of its own, and a common directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Worlds
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from torch_ckpt import Run
from torch_ckpt.filesystems.location import Location
from torch_ckpt.runs.step_files import committed_steps

pytestmark = pytest.mark.timeout(240)


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


def save_steps(
    folder: Path, machines: Sequence[int], steps: Sequence[int], options: dict[str, Any]
) -> None:
    with run_on(folder, machines, **options) as run:
        for step in steps:
            run.save(step, state_of(step))


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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_machines_save_their_own_files_and_the_run_gets_all(
    worlds: Worlds, tmp_path: Path, asynchronous: bool
) -> None:
    machines = [0, 0, 1, 1]
    options = {"asynchronous": asynchronous, "keep_last": 2}
    worlds.run(4, save_steps, tmp_path, machines, [1, 2, 3], options)
    assert steps_in(tmp_path / "machine-0") == steps_in(tmp_path / "machine-1") == [3]
    assert steps_in(tmp_path / "run")[0] == 3
    here, there = (
        {name for name in os.listdir(tmp_path / f"machine-{m}" / "step-3") if "distcp" in name}
        for m in (0, 1)
    )
    assert here
    assert there
    assert here.isdisjoint(there)
    assert here | there < set(os.listdir(tmp_path / "run" / "step-3"))
    for lost in ((), ("machine-1",), ("machine-0",)):
        for name in lost:
            shutil.rmtree(tmp_path / name)
        assert worlds.run(4, restore, tmp_path, machines) == [3] * 4
