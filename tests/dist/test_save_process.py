"""Saves in another process: their ranks, their results, their memory, and failures nobody reads.

Ranks 1 and 2 of three save in most tests, in two processes that these share: one takes seconds of
CPU time to import torch. The first rank of their group is not the first rank of the job.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attribute_parts import assert_whole, blank, parts, spoil
from forks import forked_saves, run_python
from ranks import on_ranks
from staged_saves import LAYER_NBYTES, Saves
from support.freezing import freeze
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, FastWriter, SnapshotStager
from torch_ckpt.coordination import background
from torch_ckpt.errors import CheckpointError
from torch_ckpt.process_state import PROCESS

pytestmark = pytest.mark.timeout(180)

WAIT_S = 60


def save(path: Path, value: int, **options: Any) -> Future[Any]:
    """Begins to save a tensor of this value in the process."""
    future = torch_ckpt.async_save(
        {"w": torch.full((1000,), value)},
        storage_writer=FastWriter(path, stager=SnapshotStager()),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        **options,
    )
    assert isinstance(future, Future)
    return future


@functools.cache
def upper() -> dist.ProcessGroup | None:
    """The group of ranks 1 and 2; a collective of the world. Nothing on rank 0, which has no part.

    Their processes live as long as the group.
    """
    group = dist.new_group([1, 2], backend="gloo")
    return group if dist.get_rank() else None


def assert_saved(path: Path, value: int) -> None:
    loaded = {"w": torch.zeros(1000, dtype=torch.int64)}
    dcp.load(loaded, storage_reader=FastReader(path), no_dist=True)
    assert loaded["w"].unique().tolist() == [value]


@pytest.mark.slow
@on_ranks(3, timeout_s=120)
def test_groups_of_other_ranks_save_in_processes_of_their_own(path: Path) -> None:
    upper, lower = dist.new_group([1, 2], backend="gloo"), dist.new_group([0, 1], backend="gloo")
    for attempt in range(2):
        save(path / f"all-{attempt}", attempt, timeout_s=40).result(WAIT_S)
        for name, group, ranks in (("upper", upper, (1, 2)), ("lower", lower, (0, 1))):
            if dist.get_rank() in ranks:
                done = save(path / f"{name}-{attempt}", 5, timeout_s=40, process_group=group)
                done.result(WAIT_S)
                assert_saved(path / f"{name}-{attempt}", 5)


@on_ranks(3, timeout_s=120)
def test_errors_name_the_ranks_of_the_training_processes(path: Path) -> None:
    if (group := upper()) is None:
        return
    state: dict[str, Any] = {"w": torch.ones(4), "bad": lambda: 0} if dist.get_rank() == 2 else {}
    future = torch_ckpt.async_save(
        state,
        storage_writer=FastWriter(path),
        process_group=group,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        timeout_s=40,
    )
    assert "rank 2 failed" in str(future.exception(WAIT_S)) or dist.get_rank() == 2


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.slow)])
@on_ranks(3, timeout_s=120)
def test_each_of_several_saves_in_flight_returns_its_own_result(path: Path, count: int) -> None:
    if (group := upper()) is None:
        return
    (path / "file").touch(exist_ok=True)
    folders = [path / ("file" if at % 2 == 0 else "") for at in range(count)]
    futures = [
        save(folder / f"{at}", at, timeout_s=40, process_group=group)
        for at, folder in enumerate(folders)
    ]
    for at, future in enumerate(futures):
        error = future.exception(WAIT_S)
        if at % 2 == 0:
            assert isinstance(error, CheckpointException), at
        else:
            assert error is None, (at, error)
            assert_saved(path / f"{at}", at)


class Local:
    """Is unpickled in the process that has pickled it, and in no other."""

    def __getstate__(self) -> int:
        return os.getpid()

    def __setstate__(self, pid: int) -> None:
        if os.getpid() != pid:
            raise ValueError("of another process")


@on_ranks(3, timeout_s=120)
def test_another_process_saves_all_that_a_thread_would_not(path: Path) -> None:
    if (group := upper()) is None:
        return
    saves = Saves(path, group=group)
    executors = ["thread", "thread", "process", "process", "thread", "thread", "process"]
    for step, executor in enumerate(executors):
        change = "gone" if executor == "process" else ""  # Ranks share it out anew.
        saves.save(step, change, executor=executor)
    shared = saves.staged[1] < saves.staged[0] / 2 + LAYER_NBYTES * 2
    assert shared, saves.staged


@on_ranks(3, timeout_s=120)
def test_parts_by_attributes_are_parts_in_the_process(path: Path) -> None:
    if (group := upper()) is None:
        return
    state = parts("class", dist.get_rank(group), 2, filled=True)
    stager = SnapshotStager()
    future = torch_ckpt.async_save(
        state,
        storage_writer=FastWriter(path, stager=stager),
        planner=FastSavePlanner(),
        process_group=group,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        timeout_s=40,
    )
    stager.wait_staged()
    spoil(state)
    future.result(WAIT_S)
    whole = blank()
    dcp.load(whole, storage_reader=FileSystemReader(path), no_dist=True)
    assert_whole(whole)


class Moving(FastSavePlanner):
    """A planner that makes a link lead elsewhere."""

    link = Path()

    def create_local_plan(self) -> Any:
        moved = self.link.with_name(f"moved by {os.getpid()}")
        moved.symlink_to("b")
        moved.replace(self.link)
        return super().create_local_plan()


@on_ranks(3, timeout_s=120)
def test_the_process_saves_where_a_link_led_when_the_save_began(path: Path) -> None:
    if (group := upper()) is None:
        return
    planner = Moving()
    planner.link = path / "link"
    if dist.get_rank(group) == 0:
        (path / "a").mkdir()
        (path / "b").mkdir()
        planner.link.symlink_to("a")
    dist.barrier(group)
    save(planner.link, 3, planner=planner, process_group=group, timeout_s=40).result(WAIT_S)
    assert planner.link.readlink() == Path("b")
    assert_saved(path / "a", 3)
    assert list((path / "b").iterdir()) == []


@on_ranks(3, timeout_s=120)
def test_state_that_the_process_cannot_unpickle_fails_the_save_on_all_ranks(path: Path) -> None:
    if (group := upper()) is None:
        return
    for attempt in (1, 2):
        future = torch_ckpt.async_save(
            {"w": torch.ones(4), "local": Local() if dist.get_rank() == 2 else None},
            storage_writer=FastWriter(path / "0"),
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            timeout_s=40,
        )
        error = str(future.exception(WAIT_S))
        assert "cannot unpickle the state: ValueError: of another process" in error, error
        save(path / f"{attempt}", attempt, timeout_s=40, process_group=group).result(WAIT_S)
        assert_saved(path / f"{attempt}", attempt)


@on_ranks(3, timeout_s=120)
def test_failed_save_frees_its_staging_memory_though_its_error_is_kept(path: Path) -> None:
    if (group := upper()) is None:
        return
    (path / "file").touch(exist_ok=True)
    writer = FastWriter(path / "file" / "step", stager=SnapshotStager())
    options: dict[str, Any] = {"timeout_s": 30, "process_group": group}
    options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
    state = {"w": torch.ones(1 << 20)}
    future = torch_ckpt.async_save(state, storage_writer=writer, **options)
    error = future.exception(WAIT_S)
    assert error is not None
    begin = time.monotonic()
    again = torch_ckpt.async_save(
        state, checkpoint_id=path / "step", storage_writer=writer, **options
    )
    assert time.monotonic() - begin < 10
    again.result(WAIT_S)
    assert error.__traceback__ is not None  # It is still there.


class Slow(FastSavePlanner):
    """A planner that plans once it may."""

    may_plan = threading.Event()

    def create_local_plan(self) -> Any:
        self.may_plan.wait(WAIT_S)
        return super().create_local_plan()


@on_ranks(3, timeout_s=120)
def test_save_waits_for_the_memory_of_an_earlier_one_no_longer_than_its_timeout(
    path: Path,
) -> None:
    if (group := upper()) is None:
        return
    state = {"w": torch.ones(1 << 20)}
    options = {
        "storage_writer": FastWriter(path / "first", stager=SnapshotStager()),
        "process_group": group,
    }
    first = torch_ckpt.async_save(state, planner=Slow(), timeout_s=60, **options)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=r"no snapshot was free within 2 s|rank . failed"):
        torch_ckpt.async_save(state, timeout_s=2, **options)
    assert time.monotonic() - begin < 10
    Slow.may_plan.set()
    first.result(WAIT_S)


def own_process() -> int:
    """That of the group that came last."""
    *_, process = PROCESS.save_processes.values()
    return process._process.pid


@on_ranks(3, timeout_s=120)
def test_save_process_that_is_frozen_fails_its_save_on_all_ranks_and_not_the_next(
    path: Path,
) -> None:
    if (group := upper()) is None:
        return
    save(path / "0", 0, timeout_s=60, process_group=group).result(WAIT_S)
    pid = own_process()
    if dist.get_rank() == 2:
        freeze(pid)
    begin = time.monotonic()
    error = save(path / "1", 1, timeout_s=5, process_group=group).exception(WAIT_S)
    assert time.monotonic() - begin < 5 + 5 + 5
    assert isinstance(error, CheckpointError)
    assert "rank 2" in str(error)
    with forked_saves():  # A new process of each rank.
        save(path / "2", 2, timeout_s=60, process_group=group).result(WAIT_S)
    assert_saved(path / "2", 2)


@pytest.mark.slow
@on_ranks(1, timeout_s=120)
def test_save_process_of_a_single_rank_that_is_frozen_fails_its_save(path: Path) -> None:
    save(path / "0", 0, timeout_s=1e300).result(WAIT_S)  # Longer than a socket can wait.
    freeze(own_process())
    begin = time.monotonic()
    # More than a pipe holds.
    future = torch_ckpt.async_save(
        {"text": "x" * (8 << 20)},
        checkpoint_id=path / "1",
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        timeout_s=3,
    )
    error = future.exception(WAIT_S)
    assert time.monotonic() - begin < 10
    assert "the save process of rank 0 sent no heartbeat for 3 s" in str(error)
    save(path / "2", 2, timeout_s=60).result(WAIT_S)


@pytest.mark.slow
@on_ranks(1, timeout_s=120)
def test_the_start_of_a_save_process_has_the_timeout_of_the_save(path: Path) -> None:
    for process in PROCESS.save_processes.values():  # Left by former tests in these ranks.
        process.end()
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match="the save process of rank 0 sent no heartbeat for"):
        save(path / "0", 0, timeout_s=0.1)  # It imports torch first.
    assert time.monotonic() - begin < 10
    save(path / "1", 1, timeout_s=60).result(WAIT_S)


class Sleeping(FastSavePlanner):
    """A planner that is busy for longer than the timeout."""

    def create_local_plan(self) -> Any:
        time.sleep(6)
        return super().create_local_plan()


@pytest.mark.slow
@on_ranks(1, timeout_s=120)
def test_save_process_that_is_busy_for_longer_than_the_timeout_is_waited_for(path: Path) -> None:
    save(path / "0", 0, timeout_s=60).result(WAIT_S)
    save(path / "1", 1, timeout_s=3, planner=Sleeping()).result(WAIT_S)


@pytest.mark.slow
@on_ranks(2, timeout_s=120)
def test_save_process_whose_port_somebody_wants_has_it_already(path: Path) -> None:
    takers = []
    begin = background._SaveProcess.__init__

    def take_the_port(self: Any, address: Any, *args: Any) -> None:
        assert address[0] != "0.0.0.0"
        if dist.get_rank() == 0:
            takers.append(socket.socket())
            with contextlib.suppress(OSError):
                takers[0].bind(tuple(address))
                takers[0].listen()
        begin(self, address, *args)

    group = dist.new_group(backend="gloo")
    with mock.patch.object(background._SaveProcess, "__init__", take_the_port):
        save(path / "0", 0, timeout_s=30, process_group=group).result(WAIT_S)
    assert_saved(path / "0", 0)
    for taker in takers:
        taker.close()


FAILING_SAVE = """
import logging, sys, time
import torch, torch_ckpt
if sys.argv[2] == "logged":
    logging.basicConfig(filename=sys.argv[3], level=logging.WARNING)
future = torch_ckpt.async_save({"w": torch.ones(4)}, checkpoint_id=sys.argv[1])
if sys.argv[2] == "read":
    assert future.exception() is not None
elif sys.argv[2] == "dropped":
    del future
    while torch_ckpt.process_state.PROCESS.background_futures:
        time.sleep(0.01)
    print("still running")
"""


@pytest.mark.parametrize("how", ["read", "dropped", "logged", "held"])
def test_failure_that_nobody_reads_is_reported_on_stderr_and_in_the_log(
    how: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = run_python(
        "-c", FAILING_SAVE, tmp_path / "file/step", how, tmp_path / "log", folder=tmp_path
    )
    said = f"the asynchronous save to {tmp_path / 'file/step'} failed: "
    assert done.returncode == 0
    assert done.stdout.count(said) == (how != "read"), done.stdout
    assert "StorageError" in done.stdout or how == "read"
    if how == "dropped":
        assert done.stdout.index(said) < done.stdout.index("still running")
    if how == "logged":
        assert said in (tmp_path / "log").read_text()


OF_MAIN = """
import sys, warnings
import torch, torch.distributed.checkpoint as dcp, torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
import torch_ckpt
from torch_ckpt import FastReader, FastWriter

class Note:
    def __init__(self):
        self.text, self.number = "note", 3

def save(rank, path):
    torch_ckpt.save({"x": (Note(),)}, storage_writer=FastWriter(path))
    dcp.save({"x": (Note(),)}, checkpoint_id=f"{path}-stock", no_dist=True)

def loaded(path, **options):
    state = {"x": None}
    torch_ckpt.load(state, storage_reader=FastReader(path, **options))
    (note,) = state["x"]
    assert type(note) is Note and note.number == 3
    return state

if __name__ == "__main__":
    path = sys.argv[1]
    warnings.simplefilter("ignore")
    torch.serialization.add_safe_globals([Note])
    state, process = {"x": (Note(),)}, AsyncCheckpointerType.PROCESS
    for name in ("first", "again"):
        writer = FastWriter(f"{path}/{name}")
        options = {"storage_writer": writer, "async_checkpointer_type": process}
        torch_ckpt.async_save(state, **options).result()
        state = loaded(f"{path}/{name}")
        stock = {"x": None}
        dcp.load(stock, checkpoint_id=f"{path}/{name}")
        assert type(stock["x"][0]) is Note
    mp.spawn(save, (f"{path}/spawned",))
    loaded(f"{path}/spawned")
    for options in ({}, {"trust_pickle": True}):  # Stock has pickled the name __mp_main__.
        loaded(f"{path}/spawned-stock", **options)
    print("done")
"""


@pytest.mark.slow
def test_a_class_of_the_main_script_loads_after_a_save_in_another_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OF_MAIN)
    command = [sys.executable, script, tmp_path]  # A forked process has the main of its server.
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().endswith("done")
