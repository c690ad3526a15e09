"""Replicas in peers' memory: what is restored after machines are lost, and what is refused."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from machines import RANKS_PER_MACHINE, memory_of, on_machine
from ranks import Ranks
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from waits import until

from torch_ckpt import Run
from torch_ckpt.agent import AgentOptions, SnapshotAgent
from torch_ckpt.agent.memory import run_of
from torch_ckpt.agent.replica_files import whole_replicas

pytestmark = pytest.mark.timeout(300)

SOON_S = 60.0  # For a machine that is busy.
MACHINES = 3
RANKS = MACHINES * RANKS_PER_MACHINE


@pytest.fixture(autouse=True)
def memory(memory: Path) -> Path:
    """Shared memory of this test alone, with a folder for each machine."""
    return memory


def options_of(rank: int, **more: Any) -> AgentOptions:
    return AgentOptions(replicas=1, failure_domain=f"{rank // RANKS_PER_MACHINE}", **more)


def folder_on(memory: Path, machine: int, run: Path) -> Path:
    return memory_of(memory, machine) / f"torch_ckpt-{os.getuid()}" / run_of(run).hex()


def state_of(step: int, columns: int = 5, dim: int = 0) -> dict[str, Any]:
    """Shards of uneven sizes, replicas, what one machine alone has, and an object."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    rows = torch.arange(13 * columns, dtype=torch.float32).view(13, columns) + 1000 * step
    return {
        "rows": distribute_tensor(rows.clone(), mesh, [Shard(dim)]),
        "all": distribute_tensor(rows.clone(), mesh, [Replicate()]),
        "step": step,
    }


@functools.cache
def run_on(run: Path, memory: Path, **more: Any) -> Run:
    """That of this rank, which has one for as long as it lives."""
    on_machine(memory)
    options = options_of(dist.get_rank(), **more)
    return Run(run, asynchronous=True, agent=options, timeout_s=SOON_S)


def save(run: Path, memory: Path, step: int, persist: bool = False) -> None:
    made = run_on(run, memory)
    made.save(step, state_of(step), persist=persist)
    made.wait()


def replicated_steps(memory: Path, run: Path, machine: int) -> list[int]:
    found = whole_replicas(folder_on(memory, machine, run), run_of(run))
    return sorted({slots[0][0].step for slots in found.values()})


def until_replicated(memory: Path, run: Path, step: int) -> None:
    for machine in range(MACHINES):
        until(lambda machine=machine: step in replicated_steps(memory, run, machine))


def test_each_save_arrives_in_the_memory_of_the_buddy(tmp_path: Path, memory: Path) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        for step in range(1, 4):
            world.run(save, run, memory, step)
            until_replicated(memory, run, step)
        world.kill()
