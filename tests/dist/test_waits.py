"""No wait outlasts its reason: a rank that dies early, a store that is gone, a lack of threads."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from failing_ranks import (
    AMPLE_S,
    DEADLINE_S,
    LIMIT_S,
    MARGIN_S,
    Detour,
    LoadPlanner,
    answers,
    hold,
    mortal_ranks,
    own_state,
    release,
    save,
    save_and_wait,
    train,
)
from ranks import Ranks, Worlds, on_ranks
from states import assert_same, full_value
from support.exchanging import Exchanging
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import FastWriter, Run
from torch_ckpt.agent import SnapshotAgent
from torch_ckpt.coordination import waiting
from torch_ckpt.coordination.group import group_of
from torch_ckpt.errors import CheckpointError, RankTimeoutError
from torch_ckpt.options import IoOptions

pytestmark = pytest.mark.timeout(180)

NOTICED_S = 10.0  # By when others know of a process that has ended.
IO = IoOptions(buffer_nbytes=1 << 20, exchange_nbytes=4 << 20)


def die_soon() -> None:
    time.sleep(1)  # Once its thread has told the others where it is.
    os.kill(os.getpid(), signal.SIGKILL)


def first_call_beside_a_death(path: Path, victim: int, absent: int) -> RankTimeoutError | None:
    """A rank dies in the first call of all, to which another never comes."""
    if dist.get_rank() == absent:
        return None
    begin = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        save(
            own_state(dist.get_rank(), "new"), path, Detour("local plan", victim, die_soon), AMPLE_S
        )
    assert time.monotonic() - begin < NOTICED_S
    return caught.value


@pytest.mark.thin("1-2-None")
@pytest.mark.parametrize(
    ("victim", "absent", "store_on"),
    [(0, 2, None), (1, 2, None), (2, 1, None), (1, -1, None), (0, -1, None), (0, 2, 0)],
)
def test_a_rank_that_dies_before_all_have_connected_is_named_in_time(
    tmp_path: Path, victim: int, absent: int, store_on: int | None
) -> None:
    args = first_call_beside_a_death, tmp_path, victim, absent
    with mortal_ranks(3, store_on, *args) as pipes:
        seen = answers([pipes[rank] for rank in {0, 1, 2} - {victim, absent}])
    for error in seen:
        if store_on is None:
            assert error.ranks == (victim,)
            assert f"rank {victim} is gone" in str(error)
        else:
            assert re.search(r"store of its process group at 127.0.0.1:\d+", str(error))


def load_beside_a_lost_store(path: Path, number: signal.Signals) -> RankTimeoutError:
    """Rank 0, which serves the store, ends or freezes before the ranks of a load exchange reads."""
    rank = dist.get_rank()
    state = {"shared": full_value("saved", (1000, 1000), torch.float32)}
    torch_ckpt.save(state, checkpoint_id=path, timeout_s=AMPLE_S)
    timeout_s = AMPLE_S if number == signal.SIGKILL else 5 * DEADLINE_S
    planner = LoadPlanner(Detour("read", 0, os.kill, os.getpid(), number))
    loaded = {"shared": torch.zeros(1000, 1000)}
    begin = time.monotonic()
    reader = Exchanging(path, io=IO)
    with pytest.raises(RankTimeoutError) as caught:
        torch_ckpt.load(loaded, storage_reader=reader, planner=planner, timeout_s=timeout_s)
    limit_s = NOTICED_S if number == signal.SIGKILL else 2 * timeout_s
    assert time.monotonic() - begin < limit_s + MARGIN_S, rank
    return caught.value


@pytest.mark.thin("9")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_is_lost_before_an_exchange_of_reads_ends_the_load_in_time(
    tmp_path: Path, number: signal.Signals
) -> None:
    with mortal_ranks(3, 0, load_beside_a_lost_store, tmp_path, number) as pipes:
        for error in answers([pipes[1], pipes[2]]):
            assert error.ranks == (0,)


@contextlib.contextmanager
def without_threads(name: str, rank: int = 1) -> Iterator[None]:
    """The system has no more threads for this name, on one rank."""
    if dist.get_rank() != rank:
        yield
        return
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", refuse):
        yield


def first_save_without_threads(path: Path) -> RankTimeoutError:
    group = dist.new_group(backend="gloo")
    state = own_state(dist.get_rank(), "new")
    options: dict[str, Any] = {"checkpoint_id": path, "process_group": group, "timeout_s": AMPLE_S}
    begin = time.monotonic()
    with without_threads("torch_ckpt"), pytest.raises(RankTimeoutError) as caught:
        torch_ckpt.save(state, **options)
    assert time.monotonic() - begin < NOTICED_S
    torch_ckpt.save(state, **options)
    return caught.value


def test_a_rank_without_threads_fails_the_first_call_on_all_and_not_the_next(
    worlds: Worlds, tmp_path: Path
) -> None:
    for error in worlds.run(3, first_save_without_threads, tmp_path, timeout_s=LIMIT_S):
        assert error.ranks == (1,)
        assert "can't start new thread" in str(error)


def background_save_without_threads(path: Path) -> str:
    group = dist.new_group(backend="gloo")
    state = own_state(dist.get_rank(), "new")
    options: dict[str, Any] = {"checkpoint_id": path, "process_group": group, "timeout_s": AMPLE_S}
    torch_ckpt.save(state, **options)
    begin = time.monotonic()
    with without_threads("torch_ckpt-save"), pytest.raises(CheckpointError) as caught:
        save_and_wait(state, **options)
    assert time.monotonic() - begin < NOTICED_S
    save_and_wait(state, **options)
    return str(caught.value)


def test_a_rank_without_threads_fails_a_background_save_on_all_and_not_the_next(
    worlds: Worlds, tmp_path: Path
) -> None:
    for message in worlds.run(3, background_save_without_threads, tmp_path, timeout_s=LIMIT_S):
        assert "cannot start a thread for a background save or load: can't start new" in message


def background_load_without_threads(path: Path) -> str:
    """What each rank raises, if one of them has no threads for a background load."""
    state = {"w": torch.ones(10)}
    torch_ckpt.save(state, checkpoint_id=path)
    begin = time.monotonic()
    with without_threads("torch_ckpt-load"), pytest.raises(CheckpointError) as caught:
        torch_ckpt.async_load(state, checkpoint_id=path, timeout_s=AMPLE_S).result()
    assert time.monotonic() - begin < NOTICED_S
    torch_ckpt.async_load(state, checkpoint_id=path, timeout_s=AMPLE_S).result()
    return str(caught.value)


def test_a_rank_without_threads_fails_a_background_load_on_all_and_not_the_next(
    worlds: Worlds, tmp_path: Path
) -> None:
    for message in worlds.run(3, background_load_without_threads, tmp_path, timeout_s=LIMIT_S):
        assert "cannot start a thread for a background save or load: can't start new" in message


def address_space_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def load_without_threads(path: Path) -> dict[int, str]:
    """Rank 1 has no memory for the stack of another thread when it connects to the others."""
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def limit() -> None:
        threading.stack_size(256 << 20)
        nbytes = address_space_nbytes() + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, limits[1]))

    loaded = {"shared": torch.zeros(1000, 1000)}
    dist.barrier()
    begin = time.monotonic()
    try:
        with pytest.raises(CheckpointException) as caught:
            torch_ckpt.load(
                loaded,
                storage_reader=Exchanging(path, io=IO),
                planner=LoadPlanner(Detour("read", 1, limit)),
                timeout_s=AMPLE_S,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        threading.stack_size(0)
    assert time.monotonic() - begin < NOTICED_S
    torch_ckpt.load(loaded, storage_reader=Exchanging(path, io=IO), timeout_s=AMPLE_S)
    assert_same(loaded, {"shared": full_value("saved", (1000, 1000), torch.float32)})
    return {rank: repr(error) for rank, (error, _) in caught.value.failures.items()}


def test_a_rank_without_threads_fails_an_exchange_of_reads_on_all_and_not_the_next(
    worlds: Worlds, tmp_path: Path
) -> None:
    state = {"shared": full_value("saved", (1000, 1000), torch.float32)}
    torch_ckpt.save(state, checkpoint_id=tmp_path, no_dist=True)
    seen = worlds.agree(3, load_without_threads, tmp_path, timeout_s=LIMIT_S)
    assert seen.keys() == {1}
    assert "cannot start the threads of an exchange of reads" in seen[1]


def in_child(function: Any) -> int:
    """Returns the exit status of a forked child that calls a function; it is killed if it hangs."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except CheckpointError as error:
            os._exit(0 if "process" in str(error) else 3)
        except BaseException:
            os._exit(2)
        os._exit(1)
    end = time.monotonic() + MARGIN_S
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def fork_during_saves(path: Path, fifo: Path) -> dict[str, int]:
    finish = FastWriter.finish

    def held(self: FastWriter, *args: Any, **options: Any) -> None:
        hold(fifo)
        finish(self, *args, **options)

    state = {"weight": torch.ones(100)}
    with mock.patch.object(FastWriter, "finish", held):
        run = Run(path / "run", asynchronous=True, timeout_s=AMPLE_S)
        run.save(1, state)
        statuses = {
            "wait": in_child(run.wait),
            "save": in_child(lambda: run.save(2, state)),
            "restore": in_child(lambda: run.restore(state)),
            "latest_step": in_child(run.latest_step),
        }
        release(fifo)
        run.close()
        future: Any = torch_ckpt.async_save(state, checkpoint_id=path / "other")
        statuses["result"] = in_child(future.result)
        statuses["exception"] = in_child(lambda: raised(future.exception()))
        release(fifo)
        future.result(LIMIT_S)
    return statuses


def raised(error: BaseException | None) -> None:
    assert error is not None
    raise error


def test_a_forked_child_does_not_wait_for_saves_of_its_parent(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with Ranks(1) as ranks:
        (statuses,) = ranks.run(fork_during_saves, tmp_path, fifo)
    assert statuses == dict.fromkeys(statuses, 0)


def first_call_of_a_forked_child() -> int:
    """The child would take the place of its parent among the ranks."""
    group = dist.new_group(backend="gloo")
    status = in_child(lambda: group_of(group).call(DEADLINE_S).barrier("planning"))
    group_of(group).call(AMPLE_S).barrier("planning")
    return status


def test_a_forked_child_is_refused_before_its_parent_has_connected(worlds: Worlds) -> None:
    assert worlds.run(2, first_call_of_a_forked_child, timeout_s=LIMIT_S) == [0, 0]


def restore_without_memory(path: Path) -> tuple[int | None, float]:
    """The step is gone from memory between the choice of the step and its load."""
    state = {"weight": torch.full((100,), 7.0 + dist.get_rank()), "step": 1}
    own = {f"{dist.get_rank()}": state}
    run = Run(path, asynchronous=True, agent=True, timeout_s=AMPLE_S)
    run.save(1, own)
    run.wait()
    found = SnapshotAgent.slot_report
    calls = []

    def forgetting(agent: SnapshotAgent) -> Any:
        calls.append(agent)
        return found(agent) if len(calls) == 1 else (0, [])

    loaded = {f"{dist.get_rank()}": {"weight": torch.zeros(100), "step": 0}}
    begin = time.monotonic()
    with mock.patch.object(SnapshotAgent, "slot_report", forgetting):
        step = run.restore(loaded)
    seconds = time.monotonic() - begin
    assert_same(loaded[f"{dist.get_rank()}"], state)
    run.save(2, own)
    run.close()
    train()
    return step, seconds


@pytest.mark.usefixtures("memory")
def test_a_step_that_is_gone_from_memory_before_it_is_loaded_is_restored_from_disk(
    tmp_path: Path,
) -> None:
    with Ranks(2) as ranks:
        for step, seconds in ranks.run(restore_without_memory, tmp_path / "run", timeout_s=LIMIT_S):
            assert step == 1
            assert seconds < NOTICED_S


@on_ranks(2)
def test_a_long_wait_is_logged_with_what_it_is_for(path: Path) -> None:
    if dist.get_rank() == 0:
        os.mkfifo(path / "logged")
    group = group_of(dist.new_group(backend="gloo"))
    group.call(AMPLE_S).barrier("beginning")
    records: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(f"{record.levelname} {record.getMessage()}")
            if len(records) == 1:
                release(path / "logged")

    logger, recorder = logging.getLogger("torch_ckpt"), Recorder()
    logger.addHandler(recorder)
    try:
        if dist.get_rank() == 1:
            hold(path / "logged")
        with mock.patch.object(waiting, "LOG_S", 1.0):
            group.call(AMPLE_S).barrier("planning")
    finally:
        logger.removeHandler(recorder)
    if dist.get_rank() == 0:
        (record,) = records
        expected = r"WARNING waiting for ranks: rank 1 is still planning \(\d+(\.\d)? s so far\)"
        assert re.fullmatch(expected, record), record
