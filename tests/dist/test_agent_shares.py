"""Each rank copies its share of the replicas on its machine."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from part_saves import stage_on
from ranks import Ranks, on_ranks
from states import assert_same
from support.agents import kill_agent

from torch_ckpt import CheckpointError, FastReader, Run
from torch_ckpt._core import _native
from torch_ckpt.agent import SnapshotAgent, SnapshotReader
from torch_ckpt.agent.client import Member
from torch_ckpt.agent.memory import (
    NOT_SHARED,
    complete_slots,
    folder_of,
    run_of,
    sharing_of,
    whole_saves,
)

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("memory")]

NBYTES = 4 * (2048 * 1024 + 6 * 30_000 + 10)


def state_of(step: int) -> dict[str, Any]:
    """As DDP has it: the same tensors on all ranks, of which one is most; and own objects."""
    random = torch.Generator().manual_seed(step)
    model = {f"layers.{i}": torch.randn(30_000, generator=random) for i in range(6)}
    model["embedding"] = torch.randn(2048, 1024, generator=random).t()  # Laid out by columns.
    model["bias"] = torch.randn(10, generator=random)
    return {"model": model, "step": step, f"rank-{dist.get_rank()}": dist.get_rank()}


@functools.cache
def agent_of(run: Path) -> SnapshotAgent:
    """The agent's client of this rank, for as long as it lives."""
    return SnapshotAgent(run)


def save(run: Path, step: int, ranks: list[int], also: str = "") -> None:
    """Stages on some ranks, with a tensor that others do not have."""
    agent = agent_of(run)
    state = state_of(step)
    if also:
        state["model"][also] = torch.full((7,), float(step))
    stage_on(ranks, agent, state, run / str(step), step=step, persist=False)


def persist(run: Path, step: int, state: Any = None) -> None:
    """Saves on all ranks, and waits until it is on disk."""
    agent_of(run).async_save(state or state_of(step), run / str(step), step=step).result(60)


def load_from_memory(run: Path, step: int, also: str = "") -> None:
    found = agent_of(run).newest()
    assert found.step == step
    load(SnapshotReader(found), step, also)


def load_from_disk(run: Path, step: int) -> None:
    load(FastReader(run / str(step)), step)


def load(reader: FastReader, step: int, also: str = "") -> None:
    """All that was saved, bit for bit."""
    state = state_of(-1)
    if dist.get_rank() > 1:  # There were two ranks.
        del state[f"rank-{dist.get_rank()}"]
    if also:
        state["model"][also] = torch.zeros(7)
    dcp.load(state, storage_reader=reader)
    if also:
        assert state["model"].pop(also).tolist() == [float(step)] * 7
    if dist.get_rank() < 2:
        assert_same(state, state_of(step))


def slots_of(run: Path, step: int) -> list[tuple[_native.SlotHeader, int]]:
    """The headers of a save, by rank, and the bytes of tensors that are in each slot."""
    found = []
    for header, path in complete_slots(folder_of(run_of(run)), run_of(run)):
        if header.step == step:
            snapshot = _native.Slot.open(os.fsencode(path), False).read()
            found.append((header, sum(nbytes for _, _, nbytes, plain in snapshot.extents if plain)))
    return sorted(found, key=lambda item: item[0].rank)


@pytest.mark.thin("4")
@pytest.mark.parametrize("world_size", [2, 4])
def test_from_the_second_save_on_each_rank_copies_its_share(run: Path, world_size: int) -> None:
    ranks = list(range(world_size))
    with Ranks(world_size) as world:
        world.run(save, run, 1, ranks)
        assert [nbytes for _, nbytes in slots_of(run, 1)] == [NBYTES] * world_size
        for step in (2, 3):
            world.run(save, run, step, ranks)
            held = [nbytes for _, nbytes in slots_of(run, step)]
            assert sum(held) == NBYTES
            assert max(held) <= 1.02 * NBYTES / world_size + (1 << 20)
        world.run(load_from_memory, run, 3)
        world.run(persist, run, 4)
        world.run(load_from_disk, run, 4)


@pytest.mark.thin("3")
@pytest.mark.parametrize("after", [1, 2, 3])
def test_what_ranks_have_shared_out_is_loaded_on_another_number(run: Path, after: int) -> None:
    with Ranks(2) as world:
        for step in (1, 2):
            world.run(save, run, step, [0, 1])
        assert sum(nbytes for _, nbytes in slots_of(run, 2)) == NBYTES
        world.kill()
    with Ranks(after) as world:
        world.run(load_from_memory, run, 2)
        world.run(persist, run, 3)
        world.run(load_from_disk, run, 3)


def save_with_new(run: Path, step: int) -> None:
    """The second rank has a tensor that the first does not have."""
    save(run, step, [0, 1], "new" if dist.get_rank() == 1 else "")


def is_shared(run: Path, step: int) -> list[bool]:
    return [header.share != NOT_SHARED for header, _ in slots_of(run, step)]


def test_where_a_rank_holds_something_new_all_copy_everything_once(pair: Ranks, run: Path) -> None:
    for step in (1, 2):
        pair.run(save, run, step, [0, 1])
    assert is_shared(run, 2) == [True, True]
    pair.run(save_with_new, run, 3)
    assert is_shared(run, 3) == [False, False]
    pair.run(load_from_memory, run, 3, "new")
    pair.run(save_with_new, run, 4)
    assert is_shared(run, 4) == [True, True]
    assert sum(nbytes for _, nbytes in slots_of(run, 4)) == NBYTES + 28
    pair.run(load_from_memory, run, 4, "new")


def state_without(step: int) -> dict[str, Any]:
    """What the second rank has left."""
    state: dict[str, Any] = state_of(step)
    if dist.get_rank() == 1:
        state["model"] = {"bias": state["model"]["bias"]}
    return state


def persist_without(run: Path, step: int) -> None:
    persist(run, step, state_without(step))


def test_where_a_rank_has_lost_something_all_copy_everything_once(pair: Ranks, run: Path) -> None:
    for step in (1, 2):
        pair.run(save, run, step, [0, 1])
    for step in (3, 4):
        pair.run(persist_without, run, step)
        assert is_shared(run, step) == [step == 4] * 2
        pair.run(load_from_disk, run, step)


def fail_on_one_rank(run: Path, step: int) -> None:
    stage_on([0], agent_of(run), state_of(step), run / str(step), step=step, persist=False)


def test_a_save_that_one_rank_does_not_complete_does_not_end_the_sharing(
    pair: Ranks, run: Path
) -> None:
    pair.run(fail_on_one_rank, run, 1)
    pair.run(save, run, 2, [0, 1])
    assert is_shared(run, 2) == [False, False]  # Not all had copied everything in the first.
    pair.run(save, run, 3, [0, 1])
    pair.run(fail_on_one_rank, run, 4)
    pair.run(load_from_memory, run, 3)
    pair.run(save, run, 5, [0, 1])
    assert is_shared(run, 5) == [True, True]
    pair.run(load_from_memory, run, 5)


def lose_slots(run: Path) -> None:
    """Removes what the first rank has copied, of which the second must know how to share out."""
    if dist.get_rank() == 0:
        for path in folder_of(run_of(run)).glob("rank-0.*"):
            _native.Slot.open(os.fsencode(path), True).clear()


def stage_with_what_is_lost(run: Path, step: int) -> None:
    with pytest.raises(CheckpointError, match="slots of the previous save are gone"):
        agent_of(run).stage(state_of(step), run / str(step), step=step, persist=False)


def test_where_no_rank_can_tell_its_share_the_next_save_copies_everything(
    pair: Ranks, run: Path
) -> None:
    pair.run(save, run, 1, [0, 1])
    pair.run(lose_slots, run)
    pair.run(stage_with_what_is_lost, run, 2)
    for step in (3, 4):
        pair.run(save, run, step, [0, 1])
        assert is_shared(run, step) == [step == 4] * 2
    pair.run(load_from_memory, run, 4)


@pytest.mark.slow
def test_ranks_share_out_beside_a_new_agent_as_beside_the_former(pair: Ranks, run: Path) -> None:
    for step in (1, 2):
        pair.run(save, run, step, [0, 1])
    kill_agent(run)
    pair.run(save, run, 3, [0, 1])
    assert is_shared(run, 3) == [True, True]
    pair.run(load_from_memory, run, 3)


def stage_all(run: Path, step: int, extra: dict[str, Any]) -> None:
    agent = agent_of(run)
    state = state_of(step) | extra
    assert agent.stage(state, run / str(step), step=step, persist=False) is not None


def load_newest(run: Path, step: int, state: dict[str, Any]) -> dict[str, Any]:
    dist.barrier()  # All have staged.
    found = agent_of(run).newest()
    assert found.step == step
    dcp.load(state, storage_reader=SnapshotReader(found))
    return state


@on_ranks()
def test_what_only_one_rank_holds_may_change_at_any_time(run: Path) -> None:
    agent_of(run)
    for step in range(1, 7):
        own = {"own": torch.arange(float(step))} if dist.get_rank() == 1 else {}
        stage_all(run, step, own)
        blank = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        loaded = load_newest(run, step, blank)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in own.items())
        dist.barrier()


def hand_over(run: Path) -> None:
    """One rank gives a tensor to another."""
    agent_of(run)
    for step in (1, 2, 3):
        is_holder = dist.get_rank() == (2 if step == 3 else 1)
        own = {"expert": torch.full((50,), float(step))} if is_holder else {}
        stage_all(run, step, own)
    loaded = load_newest(run, 3, {"expert": torch.zeros(50)})
    assert loaded["expert"].tolist() == [3.0] * 50


def test_what_one_rank_hands_over_to_another_is_not_lost(run: Path) -> None:
    with Ranks(3) as world:
        world.run(hand_over, run)


@pytest.mark.slow
@on_ranks()
def test_a_run_saves_what_ranks_hold_by_turns(run: Path) -> None:
    """A rank loses a tensor, and has it again, in turns."""
    with Run(run, asynchronous=True, agent=True, timeout_s=60) as made:
        for step in range(1, 6):
            made.save(step, state_without(step) if step % 2 else state_of(step))
            made.wait()
        for step in range(1, 6):
            state = state_of(-1)
            assert made.restore(state, step=step) == step
            assert_same(state, state_of(step))


def save_with_a_flag(run: Path) -> None:
    """In step 3, the tensors of rank 1 alone require gradients."""
    agent_of(run)
    for step in (1, 2, 3):
        state: dict[str, Any] = state_of(step)
        if step == 3 and dist.get_rank() == 1:
            for tensor in state["model"].values():
                tensor.requires_grad_(True)
        stage_all(run, step, state)
    dist.barrier()
    load_from_memory(run, 3)


@pytest.mark.slow
def test_a_flag_that_differs_from_rank_to_rank_makes_no_other_tensor(run: Path) -> None:
    with Ranks(3) as world:
        world.run(save_with_a_flag, run)


def test_slots_that_were_shared_out_in_two_ways_are_no_save() -> None:
    members = [Member(b"r" * 16, b"s" * 16, rank, 2, 0, 1, [0, 1]) for rank in range(2)]
    first, second = (member.header(3, 30, persist=True) for member in members)
    for header in first, second:
        header.tensors_id, header.share = b"a" * 16, b"x" * 16
    assert whole_saves([(first, None), (second, None)])
    second.share = NOT_SHARED
    assert not whole_saves([(first, None), (second, None)])
    shared = sharing_of([first, second])
    second.tensors_id = b"b" * 16
    assert sharing_of([first, second]) != shared
