"""Ranks that want the same bytes read them once, and what goes wrong on one reaches all."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import shutil
import signal
import threading
import time
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankError, Ranks, Worlds, on_ranks, run_ranks
from states import assert_same, full_value, shards_of, tensors_of
from support.exchanging import Exchanging
from support.process_io import read_nbytes
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.distributed_c10d import _get_default_group, _get_process_group_store
from torch.distributed.tensor import Replicate, Shard

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastWriter, IoOptions
from torch_ckpt.errors import RankTimeoutError

pytestmark = pytest.mark.timeout(180)

TINY = IoOptions(buffer_nbytes=1 << 20, exchange_nbytes=4 << 20)
SHAPES = {"a": (1031, 1033), "b": (7, 5), "c": (300, 4, 257), "d": (), "e": (0, 3)}
TIMEOUT_S = 4.0  # That one rank waits for another, where one never comes.
LONG_TIMEOUT_S = 20.0  # Where all do.
PROMPT_S = 30  # Within which a failure of one rank must have reached the others.


def state_of(version: str) -> dict[str, Any]:
    return {"model": tensors_of(SHAPES, version), "step": 7 if version == "saved" else 0}


def planner_of(fast: bool) -> DefaultLoadPlanner:
    return FastLoadPlanner() if fast else DefaultLoadPlanner()


def save_alone(path: Path) -> None:
    dcp.save(state_of("saved"), storage_writer=FastWriter(path), no_dist=True)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_alone(tmp_path)
    return tmp_path


@pytest.fixture
def large(tmp_path: Path) -> Path:
    dcp.save(large_state(1), storage_writer=FastWriter(tmp_path), no_dist=True)
    return tmp_path


def copies(folder: Path, count: int, *, faulty: int) -> list[Path]:
    """Copies of the checkpoint in its first folder; every byte of the data of one is another."""
    paths = [folder / str(number) for number in range(count)]
    for path in paths[1:]:
        shutil.copytree(paths[0], path)
    for file in paths[faulty].glob("*.distcp"):
        file.write_bytes(file.read_bytes().translate(bytes(byte ^ 1 for byte in range(256))))
    return paths


@contextlib.contextmanager
def passed_on(by: str) -> Iterator[None]:
    """Has bytes go through sockets; or as they do, between processes of one machine."""
    if by == "memory":
        yield
        return
    with unittest.mock.patch.object(torch_ckpt.storage.reader, "these_processes", return_value=""):
        yield


def load_replicas(path: Path, together: bool, fast: bool, by: str = "memory") -> int:
    """Loads, and returns how many bytes this rank has read from the disk."""
    state = state_of("of no version")
    before = read_nbytes("read_bytes")
    reader = Exchanging(path, io=TINY, exchange="auto" if together else "off")
    with passed_on(by):
        dcp.load(state, storage_reader=reader, planner=planner_of(fast))
    assert_same(state, state_of("saved"))
    return read_nbytes("read_bytes") - before


@pytest.mark.thin(2)
@pytest.mark.parametrize("by", ["memory", "wire"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_together_read_every_byte_once(
    worlds: Worlds, tmp_path: Path, ranks: int, fast: bool, by: str
) -> None:
    save_alone(tmp_path)
    nbytes = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    alone = worlds.run(ranks, load_replicas, tmp_path, False, fast)
    together = worlds.run(ranks, load_replicas, tmp_path, True, fast, by)
    if sum(alone) < ranks * nbytes * 0.9:
        pytest.skip("this file system does not count what is read directly")
    # Objects, and what is left of blocks at ends of files, are read by each.
    assert sum(together) < 1.1 * nbytes + ranks * (256 << 10)


@pytest.mark.parametrize(
    ("saved_nbytes", "wanted_nbytes", "ranks", "pays"),
    [
        (16 << 20, 32 << 20, 256, True),
        ((16 << 20) - 1, 32 << 20, 2, False),
        (100 << 20, 1600 << 20, 2, True),
        (100 << 20, 1601 << 20, 2, False),
        (100 << 20, 200 << 20, 257, False),
    ],
)
def test_few_ranks_exchange_what_saves_much_reading(
    saved_nbytes: int, wanted_nbytes: int, ranks: int, pays: bool
) -> None:
    assert torch_ckpt.storage.exchange.pays(saved_nbytes, wanted_nbytes, ranks) is pays


@pytest.mark.parametrize("placement", ["rows", "columns", "replicas"])
@on_ranks(3)
def test_each_rank_takes_its_part_of_what_blocks_hold(saved: Path, placement: str) -> None:
    placed_as = {"rows": Shard(0), "columns": Shard(-1), "replicas": Replicate()}[placement]
    shapes = {name: shape for name, shape in SHAPES.items() if len(shape) > 1}
    loaded = {"model": shards_of(shapes, "none", placed_as)}
    dcp.load(loaded, storage_reader=Exchanging(saved, io=TINY))
    assert_same(loaded["model"], shards_of(shapes, "saved", placed_as))


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Random bits hold NaNs, of which a cast keeps no bits."""
    torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=0, equal_nan=True)


def load_oddly(path: Path, fast: bool) -> None:
    """Targets that only copies reach, of which one is there twice."""
    saved = state_of("saved")["model"]
    state = state_of("of no version")["model"]
    state["a"] = state["a"].double() if dist.get_rank() == 0 else state["a"].t().contiguous().t()
    state["c"] = torch.nn.Parameter(state["c"].bfloat16())
    state["b"] = torch.zeros(14, 10)[::2, ::2]
    tied = {**state, "tied": state["a"]}
    held = {"model": tied if dist.get_rank() == 1 else state}
    planner = planner_of(fast)
    dcp.load(held, storage_reader=Exchanging(path, io=TINY), planner=planner)
    for name, value in state.items():
        if name == "a" and dist.get_rank() == 1:
            continue  # Whichever of the two came last.
        assert_equal(value, saved[name].to(value.dtype))
    if dist.get_rank() == 1:
        assert_equal(state["a"], full_value("tied", SHAPES["a"], torch.float32))


@pytest.mark.parametrize("fast", [False, True])
def test_targets_that_need_copies_are_exchanged_too(
    worlds: Worlds, tmp_path: Path, fast: bool
) -> None:
    state = state_of("saved")
    state["model"]["tied"] = full_value("tied", SHAPES["a"], torch.float32)
    dcp.save(state, storage_writer=FastWriter(tmp_path), no_dist=True)
    worlds.run(3, load_oddly, tmp_path, fast)


class Reordering(DefaultLoadPlanner):
    """Changes the plans of all ranks in place: whatever a list can do, their items can."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        for plan in global_plan:
            assert all(isinstance(item, ReadItem) for item in plan.items)
            assert copy.copy(plan.items) == plan.items == list(plan.items)
            plan.items = plan.items[1:] + plan.items[:1]
            plan.items.sort(key=lambda item: item.dest_index.fqn)
            plan.items.reverse()
            plan.items.remove(next(item for item in plan.items if item.dest_index.fqn == "step"))
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        names = [item.dest_index.fqn for item in new_plan.items]
        assert names == sorted(names, reverse=True)
        return super().finish_plan(new_plan)


def load_all(reader: Any, planner: Any = None, step: int = 7, **options: Any) -> None:
    """Loads what was saved, all of it but for the step that is expected."""
    state = state_of("of no version")
    dcp.load(state, storage_reader=reader, planner=planner, **options)
    assert_same(state, {**state_of("saved"), "step": step})


@on_ranks(2)
def test_a_planner_may_change_what_all_ranks_read(saved: Path) -> None:
    load_all(FastReader(saved), Reordering(), step=0)


class Swapping(DefaultLoadPlanner):
    """Plans one tensor of all, and has every rank read what the next one has planned."""

    def __init__(self, own: str) -> None:
        super().__init__()
        self.own = own

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        own = [item for item in plan.items if item.dest_index.fqn == self.own]
        return dataclasses.replace(plan, items=own)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [*global_plan[1:], global_plan[0]]


class Twice(Exchanging):
    """Reads everything twice, the last rank when all others have."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        super().read_data(plan, planner)
        if dist.get_rank() == dist.get_world_size() - 1:
            for rank in range(dist.get_rank()):
                dist.recv(torch.zeros(1), rank)
        for tensor in planner.state_dict.values():
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
        future = super().read_data(plan, planner)
        if dist.get_rank() < dist.get_world_size() - 1:
            dist.send(torch.zeros(1), dist.get_world_size() - 1)
        return future


def load_swapped(path: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, other = f"w{rank}", f"w{(rank + 1) % ranks}"
    state = {name: torch.zeros(5) for name in (own, other)}
    dcp.load(state, storage_reader=FastReader(path, exchange="off"), planner=Swapping(own))
    assert torch.equal(state[other], torch.full((5,), float((rank + 1) % ranks)))
    assert torch.equal(state[own], torch.zeros(5))


def test_a_rank_reads_what_the_plan_says_even_if_another_has_planned_it(
    worlds: Worlds, tmp_path: Path
) -> None:
    state = {f"w{rank}": torch.full((5,), float(rank)) for rank in range(3)}
    dcp.save(state, storage_writer=FastWriter(tmp_path), no_dist=True)
    worlds.run(3, load_swapped, tmp_path)


def load_in_time(reader: FastReader, planner: DefaultLoadPlanner, **options: Any) -> None:
    state = state_of("of no version")
    options = {"timeout_s": LONG_TIMEOUT_S, **options}
    torch_ckpt.load(state, storage_reader=reader, planner=planner, **options)
    assert_same(state, state_of("saved"))


@pytest.mark.parametrize("mode", ["off", "auto"])
@on_ranks(2)
def test_a_plan_may_be_read_twice(saved: Path, mode: Any) -> None:
    load_in_time(Twice(saved, exchange=mode), DefaultLoadPlanner())


class Renewing(DefaultLoadPlanner):
    """Makes new plans of all, or of all but the first rank's."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        new = [LoadPlan(list(plan.items)) for plan in global_plan]
        return [*global_plan[: self.first], *new[self.first :]]


@pytest.mark.parametrize("first", [0, 1])
@on_ranks(2)
def test_a_planner_may_make_new_plans_as_with_the_stock_reader(saved: Path, first: int) -> None:
    for reader in (dcp.FileSystemReader(saved), Exchanging(saved)):
        load_all(reader, Renewing(first))


@on_ranks(4)
def test_a_group_exchanges_among_itself_and_a_lone_rank_not_at_all(saved: Path) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        load_all(Exchanging(saved, io=TINY), process_group=group)
    load_all(Exchanging(saved), no_dist=True)


@contextlib.contextmanager
def connected_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Otherwise a rank may fail, and hang up, while another one connects."""
    connect = torch_ckpt.storage.exchange._connect

    def connect_together(*args: Any) -> Any:
        connected = connect(*args)
        dist.barrier(group)
        return connected

    with unittest.mock.patch.object(torch_ckpt.storage.exchange, "_connect", connect_together):
        yield


def load_copies(paths: list[Path], faulty: int, by: str) -> tuple[float, dict[int, str]]:
    """Loads each rank's own copy, and then that of rank 0, which is sound again."""
    began = time.monotonic()
    reader = Exchanging(paths[dist.get_rank()], io=TINY)
    with passed_on(by), connected_together(), pytest.raises(CheckpointException) as caught:
        dcp.load(state_of("of no version"), storage_reader=reader)
    took_s = time.monotonic() - began
    kinds = {rank: type(error).__name__ for rank, (error, _) in caught.value.failures.items()}
    assert "a.saved" not in str(caught.value.failures[faulty][0])
    sound = paths[(faulty + 1) % len(paths)]
    load_replicas(sound, together=True, fast=False)
    return took_s, kinds


@pytest.mark.parametrize("by", ["memory", "wire"])
@pytest.mark.parametrize("faulty", range(3))
def test_damage_that_one_rank_reads_fails_all_and_the_next_load_is_whole(
    worlds: Worlds, tmp_path: Path, faulty: int, by: str
) -> None:
    save_alone(tmp_path / "0")
    paths = copies(tmp_path, 3, faulty=faulty)
    for took_s, kinds in worlds.run(3, load_copies, paths, faulty, by):
        assert took_s < PROMPT_S
        assert kinds.pop(faulty) == "CorruptionError"
        assert set(kinds.values()) == {"CancelledError"}


def load_damaged_as_group(paths: list[Path]) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return
    reader = Exchanging(paths[dist.get_rank() == 3], io=TINY)
    with (
        passed_on("wire"),
        connected_together(group),
        pytest.raises(CheckpointException) as caught,
    ):
        dcp.load(state_of("of no version"), storage_reader=reader, process_group=group)
    assert "rank 3" in str(caught.value.failures[0][0])


def test_a_rank_of_a_group_is_named_by_its_number_in_the_job(
    worlds: Worlds, tmp_path: Path
) -> None:
    save_alone(tmp_path / "0")
    paths = copies(tmp_path, 2, faulty=1)
    worlds.run(4, load_damaged_as_group, paths)


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def keep_errors(paths: list[Path]) -> int:
    """Keeps the errors of loads; returns the bytes of memory that all but the first add."""
    kept = []
    before = 0
    state = large_state(-1)  # Which an error refers to as well.
    io = IoOptions(exchange_nbytes=64 << 20)
    for number in range(4):
        reader = Exchanging(paths[dist.get_rank()], io=io)
        with pytest.raises(CheckpointException) as caught:
            dcp.load(state, storage_reader=reader)
        kept.append(caught.value)
        if number == 0:
            before = resident_nbytes()
    return resident_nbytes() - before


def test_errors_that_somebody_keeps_keep_no_buffers(tmp_path: Path) -> None:
    dcp.save(large_state(0), storage_writer=FastWriter(tmp_path / "0"), no_dist=True)
    paths = copies(tmp_path, 2, faulty=1)
    with Ranks(2) as world:
        assert max(world.run(keep_errors, paths)) < 48 << 20


class Deadly(DefaultLoadPlanner):
    """Kills its process, raises, or sleeps, when the first tensor is to be read."""

    def __init__(self, how: str, sleep_s: float = 8) -> None:
        super().__init__()
        self.how = how
        self.sleep_s = sleep_s

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        if self.how == "raise early":
            raise RuntimeError("not this plan")
        if self.how == "kill early":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "raise":
            raise RuntimeError("not this tensor")
        if self.how == "sleep":
            self.how = ""
            time.sleep(self.sleep_s)
        return super().resolve_tensor(read_item)


def load_with_a_deadly_rank(path: Path, how: str, deadly: int, timeout_s: float = 4) -> float:
    began = time.monotonic()
    planner = Deadly(how if dist.get_rank() == deadly else "")
    reader = Exchanging(path, io=TINY)
    with pytest.raises((CheckpointException, RankTimeoutError)):
        torch_ckpt.load(
            state_of("of no version"), storage_reader=reader, planner=planner, timeout_s=timeout_s
        )
    return time.monotonic() - began


@pytest.mark.thin("raise early")
@pytest.mark.parametrize("how", ["raise", "raise early", "sleep"])
def test_no_rank_waits_for_one_that_does_not_take_part(tmp_path: Path, how: str) -> None:
    save_alone(tmp_path)
    for deadly in range(2) if how == "raise" else [1]:
        results = run_ranks(2, load_with_a_deadly_rank, tmp_path, how, deadly)
        assert max(results) < PROMPT_S


def survive(path: Path, how: str) -> None:
    took_s = load_with_a_deadly_rank(path, how, 1, timeout_s=100)
    (path / "survived 0").write_text(f"{took_s} ")


def took_of_survivors(path: Path, ranks: list[int], what: str) -> float:
    """How long the longest took; each says how its load has ended."""
    found = [(path / f"survived {rank}").read_text().split(" ", 1) for rank in ranks]
    assert all(said.startswith(what) for _, said in found)
    return max(float(took_s) for took_s, _ in found)


@pytest.mark.parametrize("how", ["kill", "kill early"])  # While it reads, before it connects.
def test_ranks_survive_one_that_is_killed(tmp_path: Path, how: str) -> None:
    save_alone(tmp_path)
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(2, survive, tmp_path, how, grace_s=PROMPT_S)
    assert took_of_survivors(tmp_path, [0], "") < PROMPT_S


class Freezing(dist.Store):
    """A store whose process freezes or dies once its address is there."""

    def __init__(self, store: dist.Store, sig: signal.Signals) -> None:
        super().__init__()
        self.store = store
        self.sig = sig

    def clone(self) -> Freezing:
        return self

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)
        if key.endswith(f"/wire/0/{dist.get_rank()}"):
            os.kill(os.getpid(), self.sig)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check(keys))

    def wait(self, keys: list[str], timeout: Any) -> None:
        self.store.wait(keys, timeout)


class Noting(Exchanging):
    """Notes how reading fails, and after how long."""

    failed: tuple[str, float] | None = None

    def read_data(self, plan: Any, planner: Any) -> Any:
        began = time.monotonic()
        try:
            return super().read_data(plan, planner)
        except Exception as error:
            self.failed = (f"{type(error).__name__}: {error}", time.monotonic() - began)
            raise


def load_beside(path: Path, victim: int, sig: signal.Signals) -> None:
    """Loads beside a rank that does not connect; leaves a file that says how reading failed."""
    rank = dist.get_rank()
    store = _get_process_group_store(_get_default_group())
    if rank == victim:
        store.set("victim", str(os.getpid()))
        store = Freezing(store, sig)
    reader = Noting(path, io=TINY)
    with (
        unittest.mock.patch.object(
            torch_ckpt.storage.exchange, "_get_process_group_store", return_value=store
        ),
        pytest.raises((CheckpointException, RankTimeoutError)),
    ):
        torch_ckpt.load(state_of("of no version"), storage_reader=reader, timeout_s=TIMEOUT_S)
    what, took_s = reader.failed
    (path / f"survived {rank}").write_text(f"{took_s} {what}")
    store.set(f"failed {rank}", "")
    if rank == 0:
        store.wait([f"failed {other}" for other in range(dist.get_world_size()) if other != victim])
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(store.get("victim")), signal.SIGKILL)


@pytest.mark.thin("9")
@pytest.mark.parametrize("sig", [signal.SIGSTOP, signal.SIGKILL])
def test_ranks_wait_no_longer_than_they_may_for_one_that_does_not_connect(
    tmp_path: Path, sig: signal.Signals
) -> None:
    save_alone(tmp_path)
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(4, load_beside, tmp_path, 1, sig, grace_s=PROMPT_S)
    # Gloo or the group may notice first that a rank was killed.
    what = "CancelledError" if sig == signal.SIGSTOP else ""
    assert took_of_survivors(tmp_path, [0, 2, 3], what) < 2 * TIMEOUT_S


def test_a_rank_that_cannot_connect_says_what_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError(
            "connectFullMesh failed with [/gloo/pair.cc:9] no route. This is typically caused by"
        )

    exchange = torch_ckpt.storage.exchange
    monkeypatch.setattr(exchange, "ProcessGroupGloo", fail)
    monkeypatch.setattr(exchange, "_store", lambda assigned: dist.HashStore())
    with pytest.raises(torch_ckpt.errors.CheckpointError) as caught:
        exchange._connect(exchange.Assigned(b"", "token", b"", 0, (0,), {}), LONG_TIMEOUT_S)
    assert str(caught.value) == (
        "cannot connect to the other ranks: connectFullMesh failed with no route; "
        'set GLOO_SOCKET_IFNAME to the network to use, or pass FastReader(exchange="off") to load '
        "without connections"
    )


@on_ranks(2)
def test_ranks_wait_for_one_that_is_late_within_the_deadline(saved: Path) -> None:
    # Later than gloo is told to wait for connections.
    timeout_s = LONG_TIMEOUT_S / 2
    planner = Deadly("sleep" if dist.get_rank() == 1 else "", timeout_s / 5 + 1)
    load_in_time(Exchanging(saved, io=TINY), planner, timeout_s=timeout_s)


def large_state(value: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"model": {f"w{i}": torch.full((4 << 20,), value + i, dtype=dtype) for i in range(4)}}


def load_beside_a_dying_rank(path: Path, by: str, dying: int, tensors: int) -> None:
    """Kills a rank when it has so many of its tensors; leaves a file that says how it ended."""
    rank = dist.get_rank()
    copies = torch_ckpt.storage.target_copies.TargetCopies
    copy_to = copies.put
    whole = []

    def copy_or_die(*args: Any) -> None:
        copy_to(*args)
        whole.append(args[0])
        if len(whole) == tensors and rank == dying:
            os.kill(os.getpid(), signal.SIGKILL)

    reader = Noting(path, io=TINY)
    # With another dtype, each tensor is copied once it is whole.
    state = large_state(-1, torch.float64)
    began = time.monotonic()
    with (
        passed_on(by),
        unittest.mock.patch.object(copies, "put", copy_or_die),
        pytest.raises((CheckpointException, RankTimeoutError)),
    ):
        torch_ckpt.load(state, storage_reader=reader, timeout_s=TIMEOUT_S)
    (path / f"survived {rank}").write_text(f"{time.monotonic() - began} {reader.failed[0]}")


@pytest.mark.thin(1)
@pytest.mark.parametrize("by", ["memory", "wire"])
@pytest.mark.parametrize("tensors", [1, 3])
def test_ranks_survive_one_that_dies_with_pieces_half_sent(
    tmp_path: Path, by: str, tensors: int
) -> None:
    dcp.save(large_state(1), storage_writer=FastWriter(tmp_path), no_dist=True)
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(3, load_beside_a_dying_rank, tmp_path, by, 1, tensors, grace_s=PROMPT_S)
    assert took_of_survivors(tmp_path, [0, 2], "CancelledError") < 3 * TIMEOUT_S


class Breaking:
    """Connections of which one breaks at the moment in which the rank closes all by it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.closing: list[int] = []  # The ranks by whose connections all are closed.

    def send(self, *args: Any) -> Any:
        return self.group.send(*args)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if tag < 1 << 30:
            return self.group.recv(tensors, rank, tag)
        self.closing.append(rank)
        return self if len(self.closing) == 1 else self.group.recv(tensors, rank, tag)

    def wait(self, *_: Any) -> None:
        raise RuntimeError("Connection closed by peer")


@on_ranks(3)
def test_a_connection_that_breaks_while_a_rank_fails_keeps_no_other_open(large: Path) -> None:
    exchange, copies = torch_ckpt.storage.exchange, torch_ckpt.storage.target_copies.TargetCopies
    connect, wires = exchange._connect, list[Breaking]()

    def breaking(*args: Any) -> Breaking:
        wires.append(Breaking(connect(*args)))
        return wires[0]

    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(unittest.mock.patch.object(exchange, "_connect", breaking))
            error = RuntimeError("not this tensor")
            stack.enter_context(unittest.mock.patch.object(copies, "put", side_effect=error))
        stack.enter_context(pytest.raises((CheckpointException, RankTimeoutError)))
        state = large_state(-1, torch.float64)
        torch_ckpt.load(state, storage_reader=Exchanging(large, io=TINY), timeout_s=LONG_TIMEOUT_S)
    assert all(len(set(wire.closing)) == 2 for wire in wires)


@on_ranks(3)
def test_ranks_may_differ_in_memory_and_in_what_they_check(saved: Path) -> None:
    rank = dist.get_rank()
    io = IoOptions(exchange_nbytes=(4 << 20) << rank)
    for verify in (True, rank != 1):
        load_all(Exchanging(saved, io=io, verify=verify))


def load_two_at_once(paths: list[Path]) -> None:
    """Loads both at once; each rank begins with another to connect."""
    own = paths[dist.get_rank() % len(paths)]
    began = threading.Event()
    connect = torch_ckpt.storage.exchange._connect
    names: dict[int, Path] = {}

    def connect_in_turn(*args: Any) -> Any:
        if names[threading.get_ident()] == own:
            began.set()
        else:
            assert began.wait(LONG_TIMEOUT_S)
            time.sleep(0.5)  # The other waits for its ranks now.
        return connect(*args)

    groups = [dist.new_group() for _ in paths]
    errors: list[BaseException] = []

    def load(number: int) -> None:
        names[threading.get_ident()] = paths[number]
        reader = Exchanging(paths[number], io=TINY)
        try:
            load_in_time(reader, DefaultLoadPlanner(), process_group=groups[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=load, args=[number]) for number in range(len(paths))]
    with unittest.mock.patch.object(torch_ckpt.storage.exchange, "_connect", connect_in_turn):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for error in errors:
        raise error


@pytest.mark.parametrize("over_tcp", [False, True])
def test_two_loads_at_once_neither_mix_nor_wait_for_each_other(
    tmp_path: Path, over_tcp: bool
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        save_alone(path)
    with Ranks(2, over_tcp=over_tcp) as ranks:
        ranks.run(load_two_at_once, paths)


def load_and_list(path: Path) -> list[str]:
    """What a load has left in the default store."""
    store = _get_process_group_store(_get_default_group())
    load_replicas(path, together=True, fast=True)
    dist.barrier()
    return [key for key in store.list_keys() if "exchange" in key]


@pytest.mark.parametrize("over_tcp", [False, True])
def test_a_load_leaves_nothing_in_the_default_store(tmp_path: Path, over_tcp: bool) -> None:
    save_alone(tmp_path)
    with Ranks(3, over_tcp=over_tcp) as ranks:
        assert ranks.run(load_and_list, tmp_path) == [[]] * 3


MANY = 300  # Files, more than are open at a time.


def many_tensors(version: str) -> dict[str, torch.Tensor]:
    return {
        f"w{i:03}": full_value(f"{i} {version}", (5 + i, 301), torch.float32) for i in range(MANY)
    }


def load_some_of_many(path: Path) -> None:
    loaded, saved = (
        {n: value for n, value in many_tensors(v).items() if int(n[1:]) % 3 != dist.get_rank()}
        for v in ("none", "saved")
    )
    dcp.load(loaded, storage_reader=Exchanging(path, io=TINY))
    assert_same(loaded, saved)


def test_of_many_files_each_rank_has_what_it_wants(worlds: Worlds, tmp_path: Path) -> None:
    writer = FastWriter(tmp_path, single_file_per_rank=False)
    dcp.save(many_tensors("saved"), storage_writer=writer, no_dist=True)
    assert len(list(tmp_path.glob("*.distcp"))) == MANY
    worlds.run(3, load_some_of_many, tmp_path)


def test_a_mode_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exchange='always'"):
        FastReader(tmp_path, exchange="always")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exchange_nbytes=1 "):
        IoOptions(exchange_nbytes=1)
