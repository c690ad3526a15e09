"""What ranks that were killed have left in memory, and what others make of it."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from part_saves import before_slot, stage_on
from ranks import Ranks, Worlds, on_ranks
from states import assert_same
from support.agents import agent_pid, kill_agent
from support.freezing import freeze
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from waits import until, until_committed

from torch_ckpt import FastLoadPlanner, FastReader, RankState, Run
from torch_ckpt.agent import AgentOptions, SnapshotAgent, SnapshotReader, client, member
from torch_ckpt.agent.client import AgentClient
from torch_ckpt.agent.memory import folder_of, has_agent, open_folder, run_of
from torch_ckpt.coordination import addresses
from torch_ckpt.errors import CancelledError, CheckpointError, StorageError, UnsupportedError
from torch_ckpt.planning.local_shards import LocalShards

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("memory")]

SOON_S = 60.0  # For a machine that is busy.


def state_of(step: int) -> dict[str, Any]:
    """Shards of uneven sizes, replicas, and an object."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    rows = torch.arange(7 * 5, dtype=torch.float32).view(7, 5) + 1000 * step
    return {
        "rows": distribute_tensor(rows.clone(), mesh, [Shard(0)]),
        "columns": distribute_tensor(rows.t().contiguous(), mesh, [Shard(1)]),
        "all": distribute_tensor(rows.clone(), mesh, [Replicate()]),
        "step": step,
    }


@functools.cache
def agent_of(run: Path) -> SnapshotAgent:
    """That of this rank, which has one for as long as it lives."""
    return SnapshotAgent(run)


def save(run: Path, step: int, ranks: list[int], persist: bool) -> None:
    """Stages on some ranks only."""
    agent = agent_of(run)
    stage_on(ranks, agent, state_of(step), run / f"step-{step}", step=step, persist=persist)
    dist.barrier()


def save_at_all_moments(run: Path, saves: int) -> None:
    """Ranks complete small saves while the agent asks itself who has."""
    agent = agent_of(run)
    delays = random.Random(dist.get_rank())
    for step in range(saves):
        dist.barrier()
        time.sleep(delays.random() * 0.004)
        future = agent.async_save(state_of(step), run / "step", step=step)
        future.result(SOON_S)


def restored(run: Path, step: int | None) -> None:
    """Finds this step in memory, and nothing else."""
    found = agent_of(run).newest()
    assert (found and found.step) == step
    if found:
        loads(SnapshotReader(found), step)


def on_disk(run: Path, step: int) -> None:
    loads(FastReader(run / f"step-{step}"), step)


def loads(reader: FastReader, step: int) -> None:
    state = state_of(-1)
    dcp.load(state, storage_reader=reader)
    assert_same(state, state_of(step))


def test_a_step_that_some_ranks_have_completed_is_none(run: Path) -> None:
    with Ranks(2) as world:
        world.run(save, run, 1, [0, 1], False)
        world.run(save, run, 2, [0], True)
        world.kill()
    with Ranks(2) as world:
        world.run(restored, run, 1)
        world.kill()
    until_committed(run / "step-1")  # Which was for memory alone.
    assert not (run / "step-2").exists()


ROWS = torch.arange(16.0).view(8, 2)
BOXES = [[(0, 3), (5, 0)], [(3, 2), (5, 3)]]  # First row and rows of each rank.


def save_with_empty_shard(run: Path) -> None:
    boxes = [((at, 0), ROWS[at : at + rows].clone()) for at, rows in BOXES[dist.get_rank()]]
    state = {"x": LocalShards((8, 2), boxes)}
    agent_of(run).async_save(state, run / "step-1", step=1).result(SOON_S)


def restored_whole(run: Path) -> None:
    found = agent_of(run).newest()
    assert found is not None
    for reader in (SnapshotReader(found), FastReader(run / "step-1")):
        for planner in (FastLoadPlanner(), DefaultLoadPlanner()):
            state = {"x": torch.full((8, 2), -1.0)}
            dcp.load(state, storage_reader=reader, planner=planner)
            assert torch.equal(state["x"], ROWS)


def test_an_empty_shard_does_not_hide_another_one_at_its_offsets(run: Path) -> None:
    with Ranks(2) as world:
        world.run(save_with_empty_shard, run)
        world.run(restored_whole, run)


@pytest.mark.thin("2-3")  # For fewer ranks, there is the test of their slots.
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_memory_is_loaded_on_another_number_of_ranks(run: Path, before: int, after: int) -> None:
    with Ranks(before) as world:
        for step in (1, 2, 3):
            world.run(save, run, step, list(range(before)), step == 2)
        world.kill()
    with Ranks(after) as world:
        world.run(restored, run, 3)
        world.run(save, run, 4, list(range(after)), True)
        until_committed(run / "step-4")
        world.run(on_disk, run, 4)


class Counter:
    """A stateful object, as DCP takes them."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": torch.tensor(self.count), "of": {"name": "counter"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of"] == {"name": "counter"}
        self.count = int(state["count"])


def stateful(numbers: dict[str, Any], count: int) -> dict[str, Any]:
    rank_state = RankState(lambda: dict(numbers), numbers.update)
    return {"counter": Counter(count), "rank": rank_state, "step": count}


def save_stateful(run: Path) -> None:
    agent: Any = agent_of(run)
    state = stateful({"rank": dist.get_rank()}, 7)
    agent.persist(agent.stage(state, run / "1", step=1))


def load_stateful(run: Path) -> None:
    found = agent_of(run).newest()
    for reader in (SnapshotReader(found), FastReader(run / "1")):
        numbers: dict[str, Any] = {}
        state = stateful(numbers, 0)
        dcp.load(state, storage_reader=reader)
        assert (state["counter"].count, state["step"]) == (7, 7)
        assert numbers == {"rank": dist.get_rank()}


def test_stateful_objects_and_states_of_each_rank_are_saved_as_by_dcp(run: Path) -> None:
    with Ranks(2) as world:
        world.run(save_stateful, run)
        world.kill()
    with Ranks(2) as world:
        world.run(load_stateful, run)


def fail_on_one_rank(run: Path) -> None:
    """The second rank fails in every other save, and ends in the last one."""
    agent = SnapshotAgent(run, timeout_s=SOON_S)
    for step in range(1, 8):
        ranks = [0] if step % 2 == 0 or step == 7 else [0, 1]
        state = state_of(step)
        staged = stage_on(ranks, agent, state, run / str(step), step=step, silently=step == 7)
        if staged is None:
            continue
        if ranks == [0]:
            with pytest.raises(CancelledError, match="before it filled a slot"):
                agent.persist(staged)
        else:
            agent.persist(staged)
    agent.close()


def raise_on_one_rank(run: Path) -> None:
    """What the second rank holds cannot be pickled, or it names no directory; all hear why."""
    agent = SnapshotAgent(run, timeout_s=SOON_S)
    is_bad = dist.get_rank() == 1
    bad: dict[str, Any] = {"bad": lambda: None} if is_bad else {}
    with pytest.raises(AttributeError, match="Can't pickle"):
        agent.stage(state_of(1) | bad, run / "1", step=1)
    with pytest.raises(UnsupportedError, match="nobody://1"):
        agent.stage(state_of(1), "nobody://1" if is_bad else run / "1", step=1)
    agent.async_save(state_of(2), run / "2", step=2).result(SOON_S)
    agent.close()


def test_what_one_rank_cannot_save_is_an_error_on_all(pair: Ranks, run: Path) -> None:
    pair.run(raise_on_one_rank, run)
    assert [path.parent.name for path in run.glob("*/.metadata")] == ["2"]


def test_a_rank_that_fails_or_ends_holds_up_no_other(pair: Ranks, run: Path) -> None:
    pair.run(fail_on_one_rank, run)
    assert sorted(path.parent.name for path in run.glob("*/.metadata")) == ["1", "3", "5"]


@on_ranks()
def test_no_rank_waits_for_a_save_that_another_has_passed(run: Path) -> None:
    """Which one rank has told nothing of its last save."""
    agent = agent_of(run)
    state = state_of(1)
    for step in (1, 2):
        assert agent.stage(state, run / str(step), step=step, persist=False) is not None
        dist.barrier()
    with before_slot(lambda: None if dist.get_rank() == 0 else dist.barrier()):
        assert agent.stage(state, run / "3", step=3, persist=False) is not None
    if dist.get_rank() == 0:
        kill_agent(run)
        agent.reserve(state)
        dist.barrier()
    dist.barrier()
    assert agent.newest().step == 3


def find_members(run: Path) -> None:
    """While the agent of a former run removes the folder that both look at."""
    looked = run.parent / "looked"

    def look_first() -> str:
        looked.touch()
        return addresses.this_machine()

    def remove_and_open(name: bytes) -> Path:
        while not looked.exists():
            time.sleep(0.01)
        shutil.rmtree(folder_of(name))
        return open_folder(name)

    first = dist.get_rank() == 0
    patched = ("this_machine", look_first) if first else ("open_folder", remove_and_open)
    with mock.patch.object(member, *patched):
        agent = SnapshotAgent(run)
    assert len(agent.member.ranks_here) == 2
    agent.close(drop=True)


def test_ranks_of_one_machine_know_that_they_are_though_an_agent_ends(
    pair: Ranks, run: Path
) -> None:
    open_folder(run_of(run))
    pair.run(find_members, run)


def test_slots_of_ranks_that_are_no_more_go(run: Path, memory: Path) -> None:
    with Ranks(2) as world:
        world.run(save, run, 1, [0, 1], False)
        world.kill()
    with Ranks(1) as world:
        world.run(restored, run, 1)
        for step in (2, 3):
            world.run(save, run, step, [0], True)
        names = sorted(path.name for path in memory.glob("*/*/rank-*"))
        assert names == ["rank-0.0", "rank-0.1"]


def test_no_save_is_lost_that_a_rank_completes_while_the_agent_looks(
    pair: Ranks, run: Path, full: bool
) -> None:
    pair.run(save_at_all_moments, run, 200 if full else 20, timeout_s=120)


def save_with_little_memory(run: Path) -> None:
    """There is enough for the first rank, and not for the second."""
    numel = 1 << (23 if dist.get_rank() else 10)
    state = {f"of {dist.get_rank()}": torch.zeros(numel), **state_of(1)}
    with Run(run, asynchronous=True, agent=AgentOptions(linger_s=3), timeout_s=SOON_S) as made:
        is_told = dist.get_rank() == 0
        with pytest.warns(UserWarning, match="without") if is_told else contextlib.nullcontext():
            made.save(1, state)
        made.save(2, {**state, **state_of(2)}, persist=False)
        made.wait()
        assert made.saved == 2
        for step in (1, 2):
            loaded = state_of(-1)
            assert made.restore(loaded, step=step) == step
            assert_same(loaded, state_of(step))
    until(lambda: not folder_of(run_of(run)).exists())  # The agent ends by itself.


def test_where_one_rank_has_no_memory_all_save_without_an_agent(
    run: Path, mount_tmpfs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(mount_tmpfs("size=24m")))
    with Ranks(2) as world:
        world.run(save_with_little_memory, run)


def save_without_a_folder(run: Path, elsewhere: str) -> None:
    if dist.get_rank() == 1:
        os.environ["TORCH_CKPT_MEMORY"] = elsewhere
    is_told = dist.get_rank() == 0
    with pytest.warns(UserWarning, match="without") if is_told else contextlib.nullcontext():
        made = Run(run, asynchronous=True, agent=True, timeout_s=SOON_S)
    made.save(1, state_of(1))
    made.close()
    assert made.saved == 1


def test_where_one_rank_has_no_folder_for_memory_none_waits_for_it(
    pair: Ranks, run: Path, tmp_path: Path
) -> None:
    pair.run(save_without_a_folder, run, str(tmp_path / "none" / "there"))


def close_without_space(run: Path, filler: Path) -> tuple[str, list[str]]:
    """Closes a run whose last step is in memory alone, on a full disk; returns the error."""
    options = AgentOptions(linger_s=SOON_S)
    training = Run(run, asynchronous=True, agent=options, timeout_s=SOON_S)
    training.save(1, {"w": torch.ones(300_000)}, persist=False)
    if dist.get_rank() == 0:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
    dist.barrier()
    try:
        training.close()
    except CheckpointError as error:
        return str(error), list(error.__notes__)
    return "", []


def test_each_rank_reports_a_last_step_that_is_in_memory_alone(
    worlds: Worlds, small_disk: Path
) -> None:
    run, filler = small_disk / "run", small_disk / "filler"
    for error, notes in worlds.run(2, close_without_space, run, filler):
        assert "step 1 was not saved" in error
        assert "ENOSPC" in error
        assert ["in the shared memory of this machine only" in note for note in notes] == [True]
    filler.unlink()
    assert worlds.run(2, restored_step, run) == [1, 1]


def restored_step(run: Path) -> int | None:
    state = {"w": torch.zeros(300_000)}
    with Run(run, asynchronous=True, agent=True, timeout_s=SOON_S) as training:
        found = training.restore(state)
    assert bool((state["w"] == 1).all())
    return found


def opened_with_an_agent_that_cannot_start(run: Path, on: int) -> tuple[list[str], float]:
    """Opens a run whose agent cannot start on one rank; returns the warnings and the seconds."""
    fails = mock.patch.object(AgentClient, "_connect", side_effect=StorageError("it cannot start"))
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with fails if dist.get_rank() == on else contextlib.nullcontext():
            made = Run(run, asynchronous=True, agent=True, timeout_s=SOON_S)
        seconds = time.monotonic() - begin
        with made:
            made.save(1, state_of(1))
            assert made.latest_step() == 1
    return [str(w.message) for w in found if "without an agent" in str(w.message)], seconds


@pytest.mark.parametrize("on", [0, 1])
def test_all_ranks_save_without_an_agent_if_that_of_one_rank_cannot_start(
    worlds: Worlds, run: Path, on: int
) -> None:
    (told, one_s), (nothing, other_s) = worlds.run(
        2, opened_with_an_agent_that_cannot_start, run, on
    )
    assert len(told) == 1
    assert f"it cannot start (raised on rank {on} " in told[0]
    assert not nothing
    assert max(one_s, other_s) < SOON_S / 2


def save_without_a_frozen_agent(run: Path, local: Path | None) -> None:
    """Saves a step in memory, then once more, with other values and without the agent."""
    made = Run(run, asynchronous=True, agent=True, timeout_s=SOON_S, local=local)
    made.save(4, state_of(4))
    made.wait()
    made.save(5, state_of(5), persist=False)
    if dist.get_rank() == 0:
        freeze(agent_pid(run))
    dist.barrier()
    with mock.patch.object(client, "_ANSWER_S", 0.5), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save(5, state_of(6) | {"step": 5})
        made.wait()


def restored_from_disk(run: Path) -> None:
    state = state_of(-1)
    assert Run(run).restore(state) == 5
    assert_same(state, state_of(6) | {"step": 5})


@pytest.mark.thin("True")
@pytest.mark.parametrize("has_local", [False, True])
def test_an_older_copy_of_a_step_is_not_written_over_a_save_without_the_agent(
    tmp_path: Path, has_local: bool
) -> None:
    run, local = tmp_path / "run", tmp_path / "local" if has_local else None
    with Ranks(2) as world:
        world.run(save_without_a_frozen_agent, run, local)
        pid = agent_pid(run)
        world.kill()
    os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGTERM)  # It writes the newest step first.
    until(lambda: not has_agent(folder_of(run_of(run))))
    with Ranks(2) as world:
        world.run(restored_from_disk, local or run)
