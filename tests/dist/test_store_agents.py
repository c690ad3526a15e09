"""Agents of two machines that save a run on a store together."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from part_saves import stage_on
from ranks import Ranks
from support.freezing import freeze
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from waits import until

from torch_ckpt import FastReader, IoOptions, Run, load
from torch_ckpt._core import _native
from torch_ckpt.agent import AgentOptions, SnapshotAgent, joint_save
from torch_ckpt.agent.joint_save import JointSave
from torch_ckpt.agent.memory import complete_slots
from torch_ckpt.agent.persist import Writing
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
    on_own_machine(memory)
    local = None if local is None else local / f"machine-{dist.get_rank()}"
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
        assert len(names) == (5 if step in ("step-2", "step-3") else 0), (step, names)
        assert not any(name.startswith(".agents") for name in names)


def on_own_machine(memory: Path) -> None:
    folder = memory / f"machine-{dist.get_rank()}"
    folder.mkdir(exist_ok=True)
    os.environ["TORCH_CKPT_MEMORY"] = str(folder)


class Places(NamedTuple):
    """Where machines save: to a store, or to disks of their own, from which a run promotes."""

    url: str
    memory: Path
    disks: Path | None

    def steps(self, machine: int) -> str:
        return self.url if self.disks is None else str(self.disks / f"machine-{machine}")


@functools.cache
def agent_of(places: Places) -> SnapshotAgent:
    """The agent of this rank's machine."""
    on_own_machine(places.memory)
    local = None if places.disks is None else places.steps(dist.get_rank())
    return SnapshotAgent(places.url, timeout_s=SOON_S, has_directory=True, local=local)


def save_each(places: Places, steps: list[int]) -> None:
    agent = agent_of(places)
    for step in steps:
        path = f"{places.steps(dist.get_rank())}/step-{step}"
        staged = agent.stage(state_of(step), path, step=step)
        assert staged is not None
        agent.persist(staged)


def request_without(lost: int, has_begun: bool, places: Places, step: int) -> None:
    """Begins a save that one machine never completes; returns once the others wait for it.

    That machine may have published its items, so that the others have written their files.
    """
    agent, path = agent_of(places), f"{places.steps(dist.get_rank())}/step-{step}"
    ranks = [rank for rank in range(dist.get_world_size()) if has_begun or rank != lost]
    staged = stage_on(ranks, agent, state_of(step), path, step=step, persist=False)
    if staged is not None and dist.get_rank() == lost:
        (file,) = (
            file
            for header, file in complete_slots(agent.folder, staged.header.run)
            if header.save == staged.header.save
        )
        slot = _native.Slot.open(os.fsencode(file), False, False)
        JointSave(
            [slot], Writing(IoOptions(), 1), timeout_s=SOON_S, is_shutting_down=lambda: False
        ).begin()
    elif staged is not None:
        threading.Thread(target=agent.persist, args=(staged,), daemon=True).start()
    kind, others = "manifest" if has_begun else "lists", dist.get_world_size() - 1

    def published() -> list[str]:
        if places.disks is None:
            return Location(path).names()
        folder = Location(f"{places.url}/.agents")
        return [name for each in folder.names() for name in (folder / each).names()]

    until(lambda: sum(name.endswith(f".{kind}") for name in published()) == others)
    dist.barrier()


@pytest.mark.thin("2-False-disks")
@pytest.mark.parametrize("kind", ["store", "disks"])
@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_save_that_a_lost_machine_leaves_on_a_store_holds_up_no_later_save(
    store_url: str, memory: Path, tmp_path: Path, lost: int, has_begun: bool, kind: str
) -> None:
    places = Places(store_url, memory, tmp_path if kind == "disks" else None)
    with Ranks(3) as world:
        world.run(save_each, places, [1])
        world.run(request_without, lost, has_begun, places, 2)
        (lock,) = (memory / f"machine-{lost}").glob("*/*/agent.lock")
        agent = int(lock.read_text())
        freeze(agent)  # Else its rank would start another.
        world.kill()
    os.kill(agent, signal.SIGKILL)
    shutil.rmtree(memory / f"machine-{lost}")
    with Ranks(3) as world:
        soon_s = joint_save.SHUTDOWN_WAIT_S - 8.0
        world.run(save_each, places, [3, 4, 5], timeout_s=soon_s)
    for machine in range(3):
        run = Location(places.steps(machine))
        for step in (3, 4, 5):
            names = (run / f"step-{step}").names()
            assert ".metadata" in names
            assert not any(name.startswith(".agents") for name in names)
        assert not (run / "step-2/.metadata").is_file()


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
