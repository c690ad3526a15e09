"""SnapshotStager: what it copies, where to, and for how long."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from random_states import random_state, same

from torch_ckpt import CheckpointError, FastReader, FastWriter, StorageError, _native
from torch_ckpt.staging import SnapshotStager

pytestmark = pytest.mark.timeout(120)


def state_of(value: float) -> dict[str, Any]:
    large = torch.full((1 << 20,), float(value))
    return {
        "large": large,
        "rows": large[4096:8192].view(4, 1024),
        "small": torch.tensor([float(value)]),
        "empty": torch.empty(0, 3),
        "step": int(value),
        "list": [torch.full((300, 301), float(value)), {"deep": torch.tensor(float(value))}],
    }


def test_what_is_staged_is_what_was_there_whatever_it_is(rng: random.Random) -> None:
    stager = SnapshotStager()
    for _ in range(100):
        state = random_state(rng)
        staged = stager.stage(state)
        assert same(staged, state)
        del staged


def test_later_changes_are_not_seen() -> None:
    state = state_of(3)
    staged = SnapshotStager().stage(state)
    state["large"].fill_(4)
    state["list"][0].zero_()
    state["list"].append("more")
    assert same(staged, state_of(3))


def test_views_of_one_storage_are_views_of_one_storage() -> None:
    staged = SnapshotStager().stage(state_of(3))
    assert staged["rows"].data_ptr() == staged["large"].data_ptr() + 4096 * 4


def test_the_memory_is_the_same_from_save_to_save_and_long_tensors_begin_at_pages() -> None:
    stager = SnapshotStager()
    addresses = set()
    with mock.patch.object(_native, "Snapshot", wraps=_native.Snapshot) as made:
        for value in range(3):
            staged = stager.stage(state_of(value))
            assert staged["large"].data_ptr() % 4096 == 0
            addresses.add(staged["large"].data_ptr())
            del staged
    assert made.call_count == 1
    assert len(addresses) == 1


def test_a_state_that_grows_or_shrinks_gets_memory_that_fits() -> None:
    stager = SnapshotStager()
    with mock.patch.object(_native, "Snapshot", wraps=_native.Snapshot) as made:
        for numel in (1 << 20, 1 << 24, 3 << 24, 1 << 20):
            staged = stager.stage({"w": torch.ones(numel)})
            assert torch.equal(staged["w"], torch.ones(numel))
            assert made.call_args.args[0] < 2 * 4 * numel + (65 << 20)
            del staged
    assert made.call_count == 4


def test_while_a_save_holds_what_was_staged_the_next_waits_for_it() -> None:
    stager = SnapshotStager()
    first = stager.stage(state_of(1))
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(stager.stage(state_of(2))))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert same(first, state_of(1))
    del first
    gc.collect()
    thread.join(30)
    assert same(done[0], state_of(2))


def test_a_wait_that_lasts_too_long_is_an_error_and_another_slot_is_none() -> None:
    stager = SnapshotStager(timeout_s=0.1)
    held = stager.stage(state_of(1))
    with pytest.raises(CheckpointError, match=r"not ended within 0\.1 s"):
        stager.stage(state_of(2))
    assert same(held, state_of(1))
    two = SnapshotStager(slots=2, timeout_s=0.1)
    staged = [two.stage(state_of(value)) for value in (1, 2)]
    with pytest.raises(CheckpointError):
        two.stage(state_of(3))
    assert same(staged, [state_of(1), state_of(2)])
    with pytest.raises(ValueError, match="slots=0"):
        SnapshotStager(slots=0)


def test_memory_that_is_not_to_be_had_costs_no_slot() -> None:
    stager = SnapshotStager(timeout_s=1)
    with (
        mock.patch.object(_native, "Snapshot", side_effect=StorageError("no memory")),
        pytest.raises(StorageError),
    ):
        stager.stage(state_of(1))
    assert same(stager.stage(state_of(1)), state_of(1))


def test_a_state_that_cannot_be_copied_costs_no_slot() -> None:
    class Uncopyable:
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("not this one")

    stager = SnapshotStager(timeout_s=1)
    with pytest.raises(RuntimeError, match="not this one"):
        stager.stage({**state_of(1), "odd": Uncopyable()})
    gc.collect()
    assert same(stager.stage(state_of(1)), state_of(1))


def test_an_async_save_stores_what_was_there_when_it_began(
    world_of_one: None, tmp_path: Path
) -> None:
    state = state_of(1)
    for step in range(1, 4):
        path = tmp_path / str(step)
        state["large"].fill_(step)
        future = dcp.async_save(state, storage_writer=FastWriter(path))
        state["large"].fill_(-1)
        future.result()
        loaded = {"large": torch.zeros(1 << 20)}
        dcp.load(loaded, storage_reader=FastReader(path))
        assert torch.equal(loaded["large"], torch.full((1 << 20,), float(step)))
