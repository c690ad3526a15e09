"""Replicas in peers' memory: what is restored after machines are lost, and what is refused."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from machines import RANKS_PER_MACHINE, memory_of, on_machine
from ranks import Ranks
from states import assert_same
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from waits import until

from torch_ckpt import Run
from torch_ckpt.agent import AgentOptions
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
def run_on(run: Path, memory: Path, more: str) -> Run:
    """That of this rank, which has one for as long as it lives."""
    on_machine(memory)
    options = options_of(dist.get_rank(), **json.loads(more))
    return Run(run, asynchronous=True, agent=options, timeout_s=SOON_S)


def save(run: Path, memory: Path, step: int, persist: bool, more: dict[str, Any]) -> None:
    made = run_on(run, memory, json.dumps(more))
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
            world.run(save, run, memory, step, False, QUIET)
            until_replicated(memory, run, step)
        world.kill()


def lose(memory: Path, machine: int, run: Path) -> None:
    """Ends the agent of a machine, whose ranks have ended, and removes its memory."""
    agent = int((folder_on(memory, machine, run) / "agent.lock").read_text())
    os.kill(agent, signal.SIGKILL)
    shutil.rmtree(memory_of(memory, machine))


def restore(run: Path, memory: Path, machines: Sequence[int], step: int, dim: int) -> float:
    """Returns how long it took."""
    folder = memory_of(memory, machines[dist.get_rank() // RANKS_PER_MACHINE])
    folder.mkdir(exist_ok=True)
    os.environ["TORCH_CKPT_MEMORY"] = str(folder)
    options = AgentOptions(replicas=1, failure_domain=str(folder), **QUIET)
    made = Run(run, asynchronous=True, agent=options, timeout_s=SOON_S)
    state = state_of(-1, dim=dim)
    began = time.monotonic()
    assert made.restore(state) == step
    took_s = time.monotonic() - began
    assert_same(state, state_of(step, dim=dim))
    made.save(step + 1, state_of(step + 1), persist=False)
    made.wait()
    made.close()
    return took_s


QUIET: dict[str, Any] = {"persist_on_failure": False}  # The memory alone counts.


def saved_steps(run: Path) -> list[str]:
    return [path.parent.name for path in run.glob("step-*/.metadata")]


@pytest.mark.parametrize(
    ("lost", "machines", "dim"),
    [
        (0, [3, 1, 2], 0),
        (1, [2, 0, 3], 1),  # The others have other numbers, and all ranks other shards.
        (2, [0, 1], 0),
        (0, [2, 1], 1),
    ],
)
def test_after_the_loss_of_one_machine_the_newest_step_is_restored_from_memory(
    tmp_path: Path, memory: Path, lost: int, machines: list[int], dim: int
) -> None:
    run = tmp_path / "run"
    with Ranks(RANKS) as world:
        for step in (1, 2):
            world.run(save, run, memory, step, False, QUIET)
            until_replicated(memory, run, step)
        world.kill()
    lose(memory, lost, run)
    with Ranks(RANKS_PER_MACHINE * len(machines)) as world:
        world.run(restore, run, memory, machines, 2, dim)
    assert saved_steps(run) in ([], ["step-3"])  # The end of the run has written that.
