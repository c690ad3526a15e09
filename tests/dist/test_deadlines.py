"""No rank hangs because another raised, died or is slow, and no checkpoint comes of it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from failing_ranks import (
    AMPLE_S,
    DEADLINE_S,
    LIMIT_S,
    MARGIN_S,
    RECORDER,
    SHAPES,
    Detour,
    Failure,
    LoadPlanner,
    SavePlanner,
    StickyError,
    answers,
    failure_of,
    hold,
    load,
    mortal_ranks,
    own_state,
    release,
    save,
    save_and_wait,
    train,
)
from ranks import Worlds
from states import assert_same, shards_of
from support.freezing import freeze
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.distributed_c10d import _get_default_group, _get_process_group_store
from torch.distributed.tensor import Shard

import torch_ckpt
from torch_ckpt import CheckpointError, FastReader, FastWriter, Run
from torch_ckpt.agent import SnapshotAgent
from torch_ckpt.errors import RankTimeoutError
from torch_ckpt.filesystems.location import register
from torch_ckpt.process_state import PROCESS

pytestmark = pytest.mark.timeout(120)


def state_of(version: str) -> dict[str, Any]:
    return shards_of(SHAPES, version, Shard(0), as_view=False)


def save_version(path: Path, version: str) -> None:
    torch_ckpt.save(state_of(version), checkpoint_id=path, timeout_s=AMPLE_S)


def assert_holds(path: Path, version: str) -> None:
    loaded = state_of("of no version")
    torch_ckpt.load(loaded, checkpoint_id=path, timeout_s=AMPLE_S)
    assert_same(loaded, state_of(version))


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def call_with_a_late_rank(
    call: Callable[..., None], path: Path, fifo: Path, late: int, where: str
) -> Failure:
    state = state_of("new")
    dist.barrier()
    begin = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        call(state, path, Detour(where, late, hold, fifo))
    if dist.get_rank() != late:
        assert time.monotonic() - begin < DEADLINE_S + MARGIN_S
    if dist.get_rank() == (late + 1) % dist.get_world_size():
        release(fifo)
    train()
    return failure_of(caught.value)


LATE = {
    "a_rank_in_planning": (1, "local plan", "planning"),
    "the_coordinator_in_planning_for_all": (0, "global plan", "planning"),
    "a_rank_in_writing": (2, "write", "writing"),
    "the_coordinator_in_writing": (0, "write", "writing"),
    "the_coordinator_in_committing": (0, "finish", "committing"),
}


@pytest.mark.thin("a_rank_in_planning", "the_coordinator_in_committing")
@pytest.mark.parametrize(("late", "where", "phase"), LATE.values(), ids=LATE.keys())
def test_save_with_a_rank_past_the_deadline_is_given_up_by_all_and_commits_nothing(
    worlds: Worlds, path: Path, fifo: Path, late: int, where: str, phase: str
) -> None:
    worlds.run(3, save_version, path, "old")
    metadata = (path / ".metadata").read_bytes()

    seen = worlds.agree(3, call_with_a_late_rank, save, path, fifo, late, where, timeout_s=LIMIT_S)
    assert seen[:3] == ((late,), phase, False)
    assert f"rank {late} " in seen.message
    assert (path / ".metadata").read_bytes() == metadata
    worlds.run(3, assert_holds, path, "old")
    worlds.run(3, save_version, path, "newer")
    worlds.run(3, assert_holds, path, "newer")


def test_save_given_up_while_the_checkpoint_is_being_published_says_that_it_may_appear(
    worlds: Worlds, path: Path, fifo: Path
) -> None:
    worlds.run(3, save_version, path, "old")
    seen = worlds.agree(3, call_with_a_late_rank, save, path, fifo, 0, "publish", timeout_s=LIMIT_S)
    assert seen[:3] == ((0,), "committing", True)
    assert "may yet appear" in seen.message
    worlds.run(3, assert_holds, path, "new")


class Ending(NamedTuple):
    """How a save ended on a rank."""

    returned: bool
    may_be_committed: bool
    committed: bool


def commit_about_when_the_deadline_ends(path: Path, offsets_s: list[float]) -> list[Ending]:
    endings = []
    for number, offset_s in enumerate(offsets_s):
        folder, error = path / f"{number}", None
        late = Detour("finish", 0, time.sleep, DEADLINE_S / 2 + offset_s)
        state = state_of(f"{number}")
        dist.barrier()
        try:
            save(state, folder, late, DEADLINE_S / 2)
        except RankTimeoutError as caught:
            error = caught
        dist.barrier()
        committed = (folder / ".metadata").exists()
        may_be_committed = error is not None and error.may_be_committed
        endings.append(Ending(error is None, may_be_committed, committed))
    return endings


def test_save_that_commits_about_when_the_deadline_ends_ends_in_the_same_way_on_every_rank(
    worlds: Worlds, path: Path, full: bool
) -> None:
    offsets_s = [step * 0.003 for step in (range(-6, 6) if full else range(-2, 3))]
    first, *others = worlds.run(3, commit_about_when_the_deadline_ends, path, offsets_s)
    assert others == [first] * 2
    for ending in first:
        assert ending.committed == (ending.returned or ending.may_be_committed)


@pytest.mark.thin("2-read-reading")
@pytest.mark.parametrize(
    ("late", "where", "phase"), [(1, "local plan", "planning"), (2, "read", "reading")]
)
def test_load_with_a_rank_past_the_deadline_is_given_up_by_all(
    worlds: Worlds, path: Path, fifo: Path, late: int, where: str, phase: str
) -> None:
    worlds.run(3, save_version, path, "old")
    seen = worlds.agree(3, call_with_a_late_rank, load, path, fifo, late, where, timeout_s=LIMIT_S)
    assert seen[:3] == ((late,), phase, False)
    worlds.run(3, assert_holds, path, "old")


def load_from_a_disk_that_hangs(path: Path, fifo: Path, exchange: Any) -> Failure:
    if dist.get_rank() == 1:
        sys.path.insert(0, str(RECORDER))
        register("hanging", importlib.import_module("recorder").HangingFileSystem(str(fifo)))
        reader = FastReader(f"hanging://{path}", exchange=exchange)
    else:
        reader = FastReader(path, exchange=exchange)
    with pytest.raises(RankTimeoutError) as caught:
        torch_ckpt.load(state_of("of no version"), storage_reader=reader, timeout_s=DEADLINE_S)
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            # For as long as the other may open it, which it may more than once.
            stack.callback(os.close, os.open(fifo, os.O_RDWR))
        train()
    return failure_of(caught.value)


# Ranks that may exchange open the files to find out what they want of them.
@pytest.mark.thin("auto-planning")
@pytest.mark.parametrize(("exchange", "phase"), [("auto", "planning"), ("off", "reading")])
def test_load_in_which_the_disk_of_one_rank_hangs_is_given_up_by_all(
    worlds: Worlds, path: Path, fifo: Path, exchange: str, phase: str
) -> None:
    if not list(RECORDER.glob("recorder*.so")):
        pytest.skip("the module recorder is built by tests/check.py")
    worlds.run(3, save_version, path, "old")
    seen = worlds.agree(3, load_from_a_disk_that_hangs, path, fifo, exchange, timeout_s=LIMIT_S)
    assert seen[:3] == ((1,), phase, False)


def save_with_a_slow_rank(path: Path, where: str) -> None:
    save(state_of("new"), path, Detour(where, 1, time.sleep, DEADLINE_S), 10 * DEADLINE_S)


@pytest.mark.thin("write")
@pytest.mark.parametrize("where", ["local plan", "write"])
def test_save_with_a_slow_rank_within_the_deadline_succeeds(
    worlds: Worlds, path: Path, where: str
) -> None:
    worlds.run(2, save_with_a_slow_rank, path, where)
    worlds.run(2, assert_holds, path, "new")


def lose_a_tensor(kind: type[Exception]) -> None:
    raise kind("a tensor is lost")


def save_with_a_rank_that_raises(
    path: Path, failing: int, where: str, kind: type[Exception]
) -> dict[int, str]:
    with pytest.raises(CheckpointException) as caught:
        save(state_of("new"), path, Detour(where, failing, lose_a_tensor, kind), AMPLE_S)
    train()
    return {rank: repr(cause) for rank, (cause, _) in caught.value.failures.items()}


@pytest.mark.thin(1)
@pytest.mark.parametrize(
    ("failing", "where"), [(1, "local plan"), (0, "global plan"), (0, "finish")]
)
@pytest.mark.parametrize("kind", [LookupError, StickyError])
def test_rank_that_raises_fails_the_save_on_all_at_once_and_training_goes_on(
    worlds: Worlds, path: Path, failing: int, where: str, kind: type[Exception]
) -> None:
    worlds.run(3, save_version, path, "old")
    seen = worlds.agree(
        3, save_with_a_rank_that_raises, path, failing, where, kind, timeout_s=LIMIT_S
    )
    assert seen.keys() == {failing}
    assert "a tensor is lost" in seen[failing]
    worlds.run(3, assert_holds, path, "old")


def sticky() -> dict[str, Any]:
    return {"sticky": lambda: None}


def call_with_a_value_that_does_not_pickle(
    path: Path, call: str, where: str, rank: int
) -> dict[int, str]:
    function = {"save": save, "load": load}[call]
    with pytest.raises(CheckpointException) as caught:
        function(state_of("new"), path, Detour(where, rank, sticky), AMPLE_S)
    train()
    assert {type(cause) for cause, _ in caught.value.failures.values()} == {CheckpointError}
    return {rank: str(cause) for rank, (cause, _) in caught.value.failures.items()}


@pytest.mark.parametrize(
    ("call", "where", "rank", "version"),
    [
        ("save", "local plan", 1, "old"),
        ("save", "global plan", 0, "old"),
        ("save", "results", 1, "old"),
        ("save", "committed", 0, "new"),
        ("load", "local plan", 1, "old"),
        ("load", "global plan", 0, "old"),
    ],
)
def test_value_that_does_not_pickle_fails_the_call_on_all_at_once_and_training_goes_on(
    worlds: Worlds, path: Path, call: str, where: str, rank: int, version: str
) -> None:
    worlds.run(3, save_version, path, "old")
    function = call_with_a_value_that_does_not_pickle
    seen = worlds.agree(3, function, path, call, where, rank, timeout_s=LIMIT_S)
    assert seen.keys() == {rank}
    assert f"rank {rank} cannot pickle" in seen[rank]
    assert seen[rank].endswith("the checkpoint is committed") == (version == "new")
    worlds.run(3, assert_holds, path, version)


def save_interrupted(path: Path, fifo: Path) -> Failure | None:
    """Rank 1 is interrupted as it waits for rank 0."""
    state = state_of("new")
    held = Detour("global plan", 0, hold, fifo)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
        with pytest.raises(KeyboardInterrupt):
            save(state, path, held, AMPLE_S)
        release(fifo)
        train()
        return None
    with pytest.raises(RankTimeoutError) as caught:
        save(state, path, held, AMPLE_S)
    train()
    return failure_of(caught.value)


def test_interrupt_of_a_rank_that_waits_is_told_to_the_others_at_once(
    worlds: Worlds, path: Path, fifo: Path
) -> None:
    worlds.run(3, save_version, path, "old")
    first, second, third = worlds.run(3, save_interrupted, path, fifo, timeout_s=LIMIT_S)
    assert second is None
    assert first == third
    assert first[:3] == ((1,), "planning", False)
    assert "KeyboardInterrupt" in first.message
    worlds.run(3, assert_holds, path, "old")


class Model:
    """Fails to give its state on one rank: before that rank meets the others."""

    def __init__(self, failing: int) -> None:
        self.failing = failing

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == self.failing:
            lose_a_tensor(LookupError)
        return {"weight": torch.ones(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def leave_before_the_first_exchange(path: Path, failing: int, call: str) -> Failure | None:
    group = dist.new_group(backend="gloo")
    state = {"model": Model(failing)}
    options: dict[str, Any] = {
        "checkpoint_id": path,
        "process_group": group,
        "timeout_s": AMPLE_S,
    }
    function = {"save": torch_ckpt.save, "load": torch_ckpt.load, "async_save": save_and_wait}[call]
    expected = LookupError if dist.get_rank() == failing else RankTimeoutError
    with pytest.raises(expected) as caught:
        function(state, **options)
    train()
    torch_ckpt.save(state_of("new"), checkpoint_id=path, process_group=group, timeout_s=AMPLE_S)
    return None if dist.get_rank() == failing else failure_of(caught.value)


@pytest.mark.parametrize("call", ["save", "async_save", "load"])
def test_rank_that_raises_before_it_meets_the_others_is_named_to_them_at_once(
    worlds: Worlds, path: Path, call: str
) -> None:
    worlds.run(3, save_version, path, "old")
    seen = worlds.run(3, leave_before_the_first_exchange, path, 1, call, timeout_s=LIMIT_S)
    assert seen[1] is None
    assert seen[0] == seen[2]
    assert seen[0].ranks == (1,)
    verb = "load" if call == "load" else "save"
    assert f"LookupError: cannot {verb} 'model': a tensor is lost" in seen[0].message
    worlds.run(3, assert_holds, path, "new")


def save_in_the_background(path: Path, fifo: Path, executor: str) -> Failure:
    """Rank 1 is held in the second of three saves."""
    group = dist.new_group(backend="gloo")
    options: dict[str, Any] = {
        "process_group": group,
        "async_checkpointer_type": AsyncCheckpointerType(executor),
    }
    # Starts the process, which imports torch.
    started = torch_ckpt.async_save(
        state_of("old"), checkpoint_id=path, timeout_s=AMPLE_S, **options
    )
    started.result(LIMIT_S)
    first = torch_ckpt.async_save(
        state_of("new"),
        checkpoint_id=path,
        planner=SavePlanner(Detour("write", 1, hold, fifo)),
        timeout_s=3 * DEADLINE_S,
        **options,
    )
    train()
    if dist.get_rank() == 0:
        first.exception(LIMIT_S)
        release(fifo)
    failure = failure_of(first.exception(LIMIT_S))
    second = torch_ckpt.async_save(
        state_of("newer"), checkpoint_id=path, timeout_s=AMPLE_S, **options
    )
    second.result(LIMIT_S)
    return failure


@pytest.mark.thin("thread")
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_background_save_with_a_rank_past_the_deadline_fails_its_future_on_every_rank(
    worlds: Worlds, path: Path, fifo: Path, executor: str
) -> None:
    seen = worlds.agree(2, save_in_the_background, path, fifo, executor, timeout_s=90)
    assert seen[:3] == ((1,), "writing", False)
    worlds.run(2, assert_holds, path, "newer")


def wait_for_a_late_rank(path: Path, fifo: Path) -> str:
    """Rank 1 is held in a save of which rank 0 writes its part for a while, when it waits."""
    run = Run(path, asynchronous=True, timeout_s=3 * DEADLINE_S)
    run.save(1, state_of("old"))
    run.wait()
    written = FastWriter.write_data

    def write_late(writer: FastWriter, *arguments: Any) -> Any:
        hold(fifo) if dist.get_rank() == 1 else time.sleep(DEADLINE_S / 2)
        return written(writer, *arguments)

    with mock.patch.object(FastWriter, "write_data", write_late):
        run.save(2, state_of("new"))
        with pytest.raises(CheckpointError) as caught:
            run.wait()
        if dist.get_rank() == 0:
            release(fifo)
        train()
    run.save(3, state_of("newer"))
    run.close()
    return str(caught.value)


def test_wait_for_a_background_save_that_a_late_rank_fails_names_the_rank(
    worlds: Worlds, path: Path, fifo: Path
) -> None:
    first, second = worlds.run(2, wait_for_a_late_rank, path, fifo)
    for text in (first, second):
        assert text.startswith("step 2 was not saved: RankTimeoutError: rank 1 is slow")
    worlds.run(2, assert_holds, path / "step-3", "newer")


def use_plain_dcp(path: Path, fifo: Path) -> list[Failure]:
    """Rank 1 is late for a save, for one in the background and for a load."""
    group = dist.new_group(backend="gloo")
    detour = Detour("local plan", 1, hold, fifo)
    failures = []

    def note(error: BaseException | None) -> None:
        failures.append(failure_of(error))
        if dist.get_rank() == 0:
            release(fifo)
        train()

    with torch_ckpt.installed(timeout_s=AMPLE_S), torch_ckpt.installed(timeout_s=DEADLINE_S):
        with pytest.raises(RankTimeoutError) as caught:
            dcp.save(state_of("new"), checkpoint_id=path, planner=SavePlanner(detour))
        note(caught.value)
        with pytest.raises(RankTimeoutError) as caught:
            dcp.load(state_of("new"), checkpoint_id=path, planner=LoadPlanner(detour))
        note(caught.value)
        future = dcp.async_save(
            state_of("new"), checkpoint_id=path, planner=SavePlanner(detour), process_group=group
        )
    if dist.get_rank() == 0:
        future.exception(LIMIT_S)
        release(fifo)
    failures.append(failure_of(future.exception(LIMIT_S)))
    return failures


def test_installed_bounds_what_is_called_of_dcp_itself(
    worlds: Worlds, path: Path, fifo: Path
) -> None:
    worlds.run(2, save_version, path, "old")
    seen = worlds.agree(2, use_plain_dcp, path, fifo, timeout_s=LIMIT_S)
    assert [failure[:3] for failure in seen] == [((1,), "planning", False)] * 3
    worlds.run(2, assert_holds, path, "old")


def keys_of_store_after_each_save(path: Path) -> list[int]:
    """Rank 1 fails the second save."""
    counts = []
    store = _get_process_group_store(_get_default_group())
    for number in range(6):
        if number == 1:
            with pytest.raises(CheckpointException):
                save(state_of("new"), path, Detour("write", 1, lose_a_tensor, LookupError))
        else:
            save_version(path, f"{number}")
            assert_holds(path, f"{number}")
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


def test_saves_do_not_fill_the_store(worlds: Worlds, path: Path) -> None:
    for counts in worlds.run(2, keys_of_store_after_each_save, path):
        assert max(counts[1:]) <= counts[0] + 1


HUGE = pytest.param(10**400, id="an integer of 401 digits")


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "10", None, HUGE])
def test_deadline_that_is_none_is_refused(tmp_path: Path, seconds: Any) -> None:
    run = Run(tmp_path / "run")
    calls: list[Callable[[], object]] = [
        lambda: torch_ckpt.save({}, checkpoint_id=tmp_path, no_dist=True, timeout_s=seconds),
        lambda: torch_ckpt.installed(timeout_s=seconds).__enter__(),
        lambda: Run(tmp_path / "run", timeout_s=seconds),
        lambda: SnapshotAgent(tmp_path / "run", timeout_s=seconds),
        lambda: run.saving_on_exception(dict, timeout_s=seconds).__enter__(),
        lambda: run.saving_on_signal(dict, grace_s=seconds).__enter__(),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="not a positive number of seconds"):
            call()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("seconds", [1e300, Fraction(121, 2), np.float32(5), np.int64(60)])
def test_any_positive_number_is_a_deadline(tmp_path: Path, seconds: Any) -> None:
    state = {"w": torch.ones(3)}
    with Run(tmp_path / "run", local=tmp_path / "local", timeout_s=seconds) as run:
        run.save(1, state)
        assert run.restore(state) == 1
        run.wait(promoted=True)
    with torch_ckpt.installed(timeout_s=seconds):
        dcp.async_save(state, checkpoint_id=tmp_path / "saved", no_dist=True).result()
        dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    agent = SnapshotAgent(tmp_path / "agent", timeout_s=seconds)
    saved = agent.async_save(state, tmp_path / "agent" / "step-1", step=1)
    assert saved is not None
    saved.result()
    agent.close()


def assert_ranks_hold(path: Path, ranks: int, version: str) -> None:
    for rank in range(ranks):
        loaded = own_state(rank, "of no version")
        torch_ckpt.load(loaded, checkpoint_id=path, no_dist=True)
        assert_same(loaded, own_state(rank, version))


def take(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def call_with_a_rank_that_dies(
    path: Path, victim: int, call: str, where: str, number: signal.Signals
) -> Failure:
    rank = dist.get_rank()
    torch_ckpt.save(own_state(rank, "old"), checkpoint_id=path, timeout_s=AMPLE_S)
    function = {"save": save, "load": load}[call]
    begin = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        function(own_state(rank, "new"), path, Detour(where, victim, take, number))
    timeout_s = 2 * MARGIN_S if number == signal.SIGSTOP else MARGIN_S
    assert time.monotonic() - begin < DEADLINE_S + timeout_s
    return failure_of(caught.value)


DEATHS = {
    "a_rank_in_writing": (2, "save", "write", None, ("writing", False)),
    "the_coordinator_in_writing": (0, "save", "write", None, ("writing", False)),
    "the_coordinator_in_committing": (0, "save", "finish", None, ("writing", False)),
    "the_coordinator_in_publishing": (0, "save", "publish", None, ("committing", True)),
    "the_rank_that_serves_the_store": (0, "save", "write", 0, ("writing", False)),
    "the_rank_that_serves_the_store_by_freezing": (0, "save", "write", 0, ("writing", False)),
    "a_rank_in_loading": (1, "load", "read", None, ("reading", False)),
}


@pytest.mark.thin(
    "a_rank_in_writing",
    "the_coordinator_in_publishing",
    "the_rank_that_serves_the_store_by_freezing",
)
@pytest.mark.parametrize(
    ("victim", "call", "where", "store_on", "expected"), DEATHS.values(), ids=DEATHS.keys()
)
def test_death_of_a_rank_is_told_to_the_others_and_keeps_the_old_checkpoint(
    request: pytest.FixtureRequest,
    path: Path,
    victim: int,
    call: str,
    where: str,
    store_on: int | None,
    expected: tuple[str, bool],
) -> None:
    survivors = set(range(3)) - {victim}
    freezes = "freezing" in request.node.callspec.id
    number = signal.SIGSTOP if freezes else signal.SIGKILL
    args = call_with_a_rank_that_dies, path, victim, call, where, number
    with mortal_ranks(3, store_on, *args) as pipes:
        seen = answers([pipes[rank] for rank in survivors])
    for failure in seen:
        assert failure[:3] == ((victim,), *expected)
        assert f"rank {victim}" in failure.message
    assert_ranks_hold(path, 3, "old")


def save_as_the_store_pauses(path: Path, fifo: Path, is_known: bool) -> Failure:
    """Rank 1 stops rank 0, which serves the store, for its own first save and not for the second.

    Args:
        is_known: Whether the group has saved before, and rank 1 so has its connection.
    """
    rank = dist.get_rank()
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    group = dist.new_group(backend="gloo")
    options: dict[str, Any] = {"checkpoint_id": path, "process_group": group}
    if is_known:
        torch_ckpt.save(own_state(rank, "old"), **options, timeout_s=AMPLE_S)
    dist.barrier()
    if rank == 1:
        freeze(pids[0])
    # Rank 0 learns of it when it comes, or it would wait for all of its time.
    options_of_first = {**options, "timeout_s": DEADLINE_S if rank == 1 else AMPLE_S}
    planner = SavePlanner(Detour("local plan", 0, hold, fifo))
    begin = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        torch_ckpt.save(own_state(rank, "lost"), planner=planner, **options_of_first)
    assert time.monotonic() - begin < DEADLINE_S + 2 * MARGIN_S
    if rank == 1:
        os.kill(pids[0], signal.SIGCONT)
        release(fifo)
    torch_ckpt.save(own_state(rank, "new"), **options, timeout_s=AMPLE_S)
    return failure_of(caught.value)


@pytest.mark.thin("known")
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "met_for_the_first_time"])
def test_rank_that_pauses_with_the_store_fails_one_save_in_time_and_not_the_next(
    path: Path, fifo: Path, is_known: bool
) -> None:
    with mortal_ranks(2, 0, save_as_the_store_pauses, path, fifo, is_known) as pipes:
        for failure in answers(pipes):
            assert ("rank 0 is stuck" if is_known else "rank 1 ") in failure.message
            assert failure.ranks == ((0,) if is_known else ())
    assert_ranks_hold(path, 2, "new")


def save_with_groups_that_come_and_go(path: Path) -> list[int]:
    """Returns how many descriptors are open after each."""
    counts = []
    for number in range(4):
        before = set(threading.enumerate())
        group = dist.new_group(backend="gloo")
        state = own_state(dist.get_rank(), f"{number}")
        torch_ckpt.save(state, checkpoint_id=path, process_group=group, timeout_s=AMPLE_S)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        for thread in set(threading.enumerate()) - before - {*PROCESS.storage_watch.values()}:
            thread.join(MARGIN_S)
            assert not thread.is_alive(), thread.name
        counts.append(len(os.listdir("/proc/self/fd")))
        dist.barrier()
    return counts


def test_groups_that_come_and_go_leave_no_threads_and_no_descriptors(path: Path) -> None:
    with mortal_ranks(2, None, save_with_groups_that_come_and_go, path) as pipes:
        for counts in answers(pipes):
            assert counts[1:] == counts[:1] * 3
