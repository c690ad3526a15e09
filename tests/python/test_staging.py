"""SnapshotStager: what it copies, where to, and for how long."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import blanked, random_state, same
from support.tight import TightStager
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import torch_ckpt
from torch_ckpt import (
    CheckpointError,
    FastReader,
    FastSavePlanner,
    FastWriter,
    IoOptions,
    RankState,
    SnapshotStager,
)
from torch_ckpt._core import _native
from torch_ckpt.errors import StorageError, UnsupportedError
from torch_ckpt.staging import stager as staging
from torch_ckpt.storage import rank_files
from torch_ckpt.storage.data_file import write_data_file

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


def test_later_changes_are_not_seen_and_views_of_one_storage_stay_that() -> None:
    state = state_of(3)
    staged = SnapshotStager().stage(state)
    state["large"].fill_(4)
    state["list"][0].zero_()
    state["list"].append("more")
    assert same(staged, state_of(3))
    assert staged["rows"].data_ptr() == staged["large"].data_ptr() + 4096 * 4


@pytest.mark.parametrize("reserves", [False, True])
def test_the_memory_is_the_same_from_save_to_save_and_long_tensors_begin_at_pages(
    reserves: bool,
) -> None:
    stager = SnapshotStager()
    addresses = set()
    with mock.patch.object(_native, "Snapshot", wraps=_native.Snapshot) as made:
        if reserves:
            stager.reserve(state_of(1))
            assert made.call_count == 1
        for value in range(3):
            staged = stager.stage(state_of(value))
            assert same(staged, state_of(value))
            assert staged["large"].data_ptr() % 4096 == 0
            addresses.add(staged["large"].data_ptr())
            del staged
    assert made.call_count == 1
    assert len(addresses) == 1


class Weights:
    """A ``Stateful`` that is far larger than its state dict, and cannot be pickled."""

    def __init__(self) -> None:
        self.tensor, self.unsaved = torch.ones(1 << 10), torch.ones(1 << 23)
        self.lock = threading.Lock()

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["w"]


def test_reserve_allocates_what_an_asynchronous_save_of_objects_needs(tmp_path: Path) -> None:
    random_state_of_rank = RankState(torch.get_rng_state, torch.set_rng_state)
    state = {"model": Weights(), "more": [Weights()], "rng": random_state_of_rank}
    writer = FastWriter(tmp_path, stager=SnapshotStager())
    with mock.patch.object(_native, "Snapshot", wraps=_native.Snapshot) as made:
        writer.stager.reserve(state)
        assert made.call_args.args[0] < 1 << 20
        torch_ckpt.async_save(state, storage_writer=writer).result()
    assert made.call_count == 1


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


def test_a_copy_that_only_garbage_refers_to_is_freed_before_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "time_limit_s", lambda: 0.1)
    stager = SnapshotStager()
    for _ in range(3):
        staged: dict[str, Any] = stager.stage({"w": torch.ones(5000)})
        staged["itself"] = staged  # As the frames of an error that a program has caught.
        del staged
    assert stager.waited == 0


class Finalized:
    """Is alive again in the first collection, as what a finalizer has used may be."""

    def __init__(self, staged: Any, alive: list[Any]) -> None:
        self.itself, self.staged, self.alive = self, staged, alive

    def __del__(self) -> None:
        self.alive.append(self)


def test_a_copy_that_garbage_with_a_finalizer_refers_to_is_freed_before_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[Any] = []
    monkeypatch.setattr(staging, "time_limit_s", lambda: 10.0)
    gc.callbacks.append(end := lambda phase, _: alive.clear() if phase == "stop" else None)
    try:
        stager = SnapshotStager()
        for _ in range(3):
            Finalized(stager.stage({"w": torch.ones(5000)}), alive)
        assert stager.waited == 0
    finally:
        gc.callbacks.remove(end)


def test_garbage_of_a_save_whose_thread_lives_on_is_freed_before_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "time_limit_s", lambda: 10.0)
    writer = FastWriter(tmp_path / "step")
    copied: Any = writer.stage({"w": torch.ones(5000)})
    dcp.save(copied, storage_writer=writer, no_dist=True)
    cycle: list[Any] = [copied]
    cycle.append(cycle)
    del copied, cycle
    begin = time.monotonic()
    assert writer.stage({"w": torch.zeros(5000)})
    assert time.monotonic() - begin < 9


def test_a_wait_that_lasts_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "time_limit_s", lambda: 0.1)
    stager = SnapshotStager()
    held = stager.stage(state_of(1))
    with pytest.raises(CheckpointError, match=r"no snapshot was free within 0\.1 s"):
        stager.stage(state_of(2))
    assert same(held, state_of(1))


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not this one")


def tensor_without_memory() -> torch.Tensor:
    empty = torch.ones(5)
    empty.untyped_storage().resize_(0)
    return empty


@pytest.mark.parametrize(
    ("broken", "odd", "kind", "said"),
    [
        ((_native, "Snapshot"), int, StorageError, "gone"),
        ((staging._Placed, "copy_all"), int, StorageError, "gone"),
        (None, Uncopyable, RuntimeError, "not this one"),
        (
            None,
            tensor_without_memory,
            ValueError,
            r"sizes \(5,\): its storage has 0 bytes of 20",
        ),
    ],
)
def test_a_copy_that_fails_costs_no_slot_while_its_error_is_kept(
    broken: Any, odd: Callable[[], Any], kind: type[Exception], said: str
) -> None:
    stager = SnapshotStager()
    with (
        mock.patch.object(*broken, side_effect=StorageError("gone"))
        if broken
        else contextlib.nullcontext(),
        pytest.raises(kind, match=said) as kept,
    ):
        stager.stage({**state_of(1), "odd": odd()})
    assert same(stager.stage(state_of(1)), state_of(1))
    del kept


def test_tensors_side_by_side_in_one_storage_each_begin_at_a_page() -> None:
    flat = torch.arange(1 << 21, dtype=torch.float32)
    state = {"a": flat[3 : 1 << 19], "b": flat[1 << 19 : 5 << 18].view(-1, 3, 4).transpose(1, 2)}
    staged = SnapshotStager().stage(state)
    assert same(staged, state)
    assert [staged[name].data_ptr() % 4096 for name in state] == [0, 0]
    assert staged["b"].stride() == state["b"].stride()


def test_a_parameter_stays_what_its_metadata_say() -> None:
    state = {"w": torch.nn.Parameter(torch.ones(3)), "frozen": torch.ones(2)}
    staged = SnapshotStager().stage(state)
    assert {name: tensor.requires_grad for name, tensor in staged.items()} == {
        "w": True,
        "frozen": False,
    }


class FailingPlanner(DefaultSavePlanner):
    """Cannot plan."""

    def create_local_plan(self) -> Any:
        raise RuntimeError("not planned")


@pytest.mark.parametrize("fails", [True, False])
def test_a_planner_and_a_failed_save_that_are_kept_do_not_keep_the_memory(
    world_of_one: None, tmp_path: Path, fails: bool
) -> None:
    stager, kept = SnapshotStager(), []
    planner = FailingPlanner() if fails else FastSavePlanner()
    for step in range(3):
        writer = FastWriter(tmp_path / f"{step}", stager=stager)
        kept.append(dcp.async_save(state_of(step), storage_writer=writer, planner=planner))
    assert all(not fails or "not planned" in str(future.exception(20)) for future in kept)
    assert same(stager.stage(state_of(1)), state_of(1))


class SlowWriter(FastWriter):
    """Begins to write so late that training goes on meanwhile, unless it waits."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        time.sleep(0.3)
        return super().write_data(plan, planner)


def large_state(value: float) -> dict[str, Any]:
    return {"step": value, **{f"w{i}": torch.full((1 << 18,), value) for i in range(8)}}


@pytest.mark.parametrize("planner", [FastSavePlanner, DefaultSavePlanner])
@pytest.mark.parametrize("threads", [1, 2])
def test_tensors_that_do_not_fit_in_memory_are_written_before_async_save_returns(
    world_of_one: None, tmp_path: Path, planner: Any, threads: int
) -> None:
    state = large_state(1.0)
    writer = SlowWriter(tmp_path, thread_count=threads, stager=TightStager())
    with (
        mock.patch.object(_native, "Snapshot", wraps=_native.Snapshot) as made,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        future = dcp.async_save(state, storage_writer=writer, planner=planner())
    told = [str(warning.message) for warning in warned]
    assert any("needs 8388608 more bytes; the container's limit" in message for message in told)
    for i in range(8):
        state[f"w{i}"].fill_(-1)
    future.result()
    assert made.call_args.args[0] == 4096
    loaded = {f"w{i}": torch.zeros(1 << 18) for i in range(8)}
    dcp.load(loaded, storage_reader=FastReader(tmp_path))
    for name, tensor in loaded.items():
        assert torch.equal(tensor, torch.ones(1 << 18)), name


def test_training_does_not_wait_for_threads_of_low_priority(
    world_of_one: None, tmp_path: Path
) -> None:
    writer = FastWriter(tmp_path, stager=TightStager())
    with mock.patch.object(rank_files, "write_data_file", wraps=write_data_file) as written:
        dcp.async_save(large_state(1.0), storage_writer=writer).result()
    assert [call.args[4].niceness for call in written.call_args_list] == [0]


def test_an_unstaged_save_that_fails_before_it_writes_does_not_hang(
    world_of_one: None, tmp_path: Path
) -> None:
    writer = FastWriter(tmp_path, stager=TightStager())
    future = dcp.async_save(large_state(1.0), storage_writer=writer, planner=FailingPlanner())
    assert "not planned" in str(future.exception(20))


def test_a_stager_raises_if_nobody_would_write_the_unstaged_tensors_in_time(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot stage 8388608 bytes"):
        TightStager().stage(large_state(1.0))
    writer = FastWriter(tmp_path, stager=TightStager())
    with pytest.raises(UnsupportedError, match="another process"):
        pickle.dumps(writer.stage(large_state(1.0)))
    writer.synchronize_staging()  # It does not wait for a save that will not be.


def test_training_goes_on_before_the_copy_is_made_and_waits_for_it_before_it_changes_anything(
    world_of_one: None, tmp_path: Path
) -> None:
    stager = SnapshotStager(blocking=False)
    state, go = state_of(1), threading.Event()
    copy_all = staging._Placed.copy_all

    def copy_when_told(*args: Any) -> None:
        assert go.wait(30)
        copy_all(*args)

    with mock.patch.object(staging._Placed, "copy_all", copy_when_told):
        response = dcp.async_save(state, storage_writer=FastWriter(tmp_path, stager=stager))
        assert isinstance(response, AsyncSaveResponse)
        assert not response.staging_completion.done()
        state["step"] = 2  # What is no tensor has been copied.
        go.set()
        stager.wait_staged()
    state["large"].fill_(-1)
    response.upload_completion.result()
    loaded = {**blanked(state_of(1)), "step": 0}
    dcp.load(loaded, storage_reader=FastReader(tmp_path))
    assert same(loaded, state_of(1))


def test_a_copy_in_the_background_that_fails_fails_the_wait_and_the_save(
    world_of_one: None, tmp_path: Path
) -> None:
    stager = SnapshotStager(blocking=False)
    with mock.patch.object(staging._Placed, "copy_all", side_effect=StorageError("gone")):
        response = dcp.async_save(state_of(1), storage_writer=FastWriter(tmp_path, stager=stager))
        with pytest.raises(StorageError, match="gone"):
            stager.wait_staged()
        later = FastWriter(tmp_path, stager=stager)
        unwatched = dcp.async_save(state_of(1), storage_writer=later)
        # Within: the copy may not have begun yet.
        assert isinstance(response.upload_completion.exception(20), StorageError)
        assert isinstance(unwatched.upload_completion.exception(20), StorageError)
    assert same(stager.stage(state_of(1)).result(20), state_of(1))


@pytest.mark.parametrize("on_busy", ["skip", "error"])
def test_a_save_that_would_wait_is_skipped_or_refused_and_counted(
    tmp_path: Path, on_busy: Any
) -> None:
    stager = SnapshotStager()
    writer = FastWriter(tmp_path, stager=stager)

    def saved() -> Any:
        state = state_of(2)
        return torch_ckpt.async_save(state, storage_writer=writer, on_busy=on_busy, no_dist=True)

    held = stager.stage(state_of(1))
    for _ in range(2):
        if on_busy == "skip":
            assert saved() is None
        else:
            with pytest.raises(CheckpointError, match="still in progress"):
                saved()
    assert same(held, state_of(1))
    assert (stager.waited, stager.skipped, stager.refused) == (
        (0, 2, 0) if on_busy == "skip" else (0, 0, 2)
    )
    del held
    saved().result()


def niceness_while(is_over: Callable[[], bool]) -> set[int]:
    """The nice values of all threads of this process."""
    seen = set()
    while not is_over():
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                seen.add(os.getpriority(os.PRIO_PROCESS, int(thread)))
    return seen


def test_threads_that_write_staged_tensors_are_nice_and_no_others(
    world_of_one: None, tmp_path: Path
) -> None:
    state = {"w": torch.ones(32 << 20)}
    own = os.getpriority(os.PRIO_PROCESS, 0)
    writer = FastWriter(tmp_path, io=IoOptions(background_nice=3))
    for _ in range(2):
        future = dcp.async_save(state, checkpoint_id=tmp_path, storage_writer=writer)
        assert niceness_while(future.done) == {own, own + 3}
    saving = threading.Thread(
        target=dcp.save, args=(state,), kwargs={"checkpoint_id": tmp_path, "storage_writer": writer}
    )
    saving.start()
    assert niceness_while(lambda: not saving.is_alive()) == {own}
