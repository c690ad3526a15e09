"""Agents of two machines that save a run on a store together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from torch_ckpt import FastReader, Run, load
from torch_ckpt.agent import AgentOptions
from torch_ckpt.filesystems.location import Location

pytestmark = pytest.mark.timeout(120)

SOON_S = 60.0

IN_MEMORY = AgentOptions(persist_on_failure=False)
"""Agents that leave steps in memory alone when training fails."""


def state_of(step: int) -> dict[str, Any]:
    """Shards, a replica and an object."""
    rows = torch.arange(35, dtype=torch.float32).view(7, 5) + 1000 * step
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return {"rows": distribute_tensor(rows, mesh, [Shard(0)]), "all": rows.clone(), "step": step}


def assert_of(state: dict[str, Any], step: int) -> None:
    expected = state_of(step)
    assert torch.equal(state["rows"].to_local(), expected["rows"].to_local())
    assert torch.equal(state["all"], expected["all"])
    assert state["step"] == step


def begin(url: str, memory: Path, local: Path | None = None) -> Run:
    """Each rank is on a machine of its own, which its folder of shared memory makes it.

    It has a local directory of its own there, if it has any.
    """
    folder = memory / f"machine-{dist.get_rank()}"
    folder.mkdir(exist_ok=True)
    os.environ["TORCH_CKPT_MEMORY"] = str(folder)
    local = None if local is None else local / folder.name
    return Run(url, local=local, asynchronous=True, agent=IN_MEMORY, keep_last=2, timeout_s=SOON_S)


def train(url: str, memory: Path) -> None:
    run = begin(url, memory)
    assert run.restore(state_of(-1)) is None
    for step in range(3):
        run.save(step, state_of(step), persist=step < 2)
        run.wait()
    state = state_of(-1)
    load(state, storage_reader=FastReader(f"{url}/step-1"))
    assert_of(state, 1)
    os._exit(1)  # As a crash ends it, with the third step in memory alone.


def train_again(url: str, memory: Path) -> None:
    run = begin(url, memory)
    state = state_of(-1)
    assert run.restore(state) == 2
    assert_of(state, 2)
    for step in (2, 3):
        run.save(step, state_of(step))
        run.wait()
    state = state_of(-1)
    load(state, storage_reader=FastReader(f"{url}/step-3"))
    assert_of(state, 3)
    run.close()


def test_two_machines_save_to_a_store_and_start_again_from_memory(
    store_url: str, memory: Path
) -> None:
    with Ranks(2) as world, pytest.raises(AssertionError, match="ended"):
        world.run(train, store_url, memory)
    run = Location(store_url)
    assert not (run / "step-2" / ".metadata").is_file()
    with Ranks(2) as world:
        world.run(train_again, store_url, memory)
    for step in run.names():  # SeaweedFS still lists folders that have become empty.
        names = (run / step).names()
        assert len(names) == (4 if step in ("step-2", "step-3") else 0), (step, names)
        assert not any(name.startswith(".agents") for name in names)


def train_locally(url: str, memory: Path, local: Path) -> None:
    with begin(url, memory, local) as run:
        for step in (1, 2):
            run.save(step, state_of(step))
            run.wait()
    state = state_of(-1)
    load(state, storage_reader=FastReader(f"{url}/step-2"))
    assert_of(state, 2)


def test_two_machines_save_to_local_directories_and_promote_to_a_store(
    store_url: str, memory: Path, tmp_path: Path
) -> None:
    with Ranks(2) as world:
        world.run(train_locally, store_url, memory, tmp_path)
    here, there = (
        {path.name for path in (tmp_path / f"machine-{machine}" / "step-2").glob("__*")}
        for machine in (0, 1)
    )
    assert here
    assert there
    assert here.isdisjoint(there)
    assert here | there < set(Location(f"{store_url}/step-2").names())
    for folder in Location(f"{store_url}/.agents").names():  # SeaweedFS lists empty ones.
        assert not Location(f"{store_url}/.agents/{folder}").names()
