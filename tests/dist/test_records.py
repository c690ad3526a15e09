"""The record of a run: each phase of each rank, on one clock, also of saves that fail or hang."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_machines import run_on
from ranks import RankError, Ranks, Worlds
from record_states import Slow, state_of
from waits import until

from torch_ckpt import Run
from torch_ckpt.errors import CheckpointError
from torch_ckpt.records.event import PHASES, Event

pytestmark = pytest.mark.timeout(180)


def events_in(folder: Path) -> list[Event]:
    path = folder / "events.jsonl"
    return [Event.of_line(line) for line in path.read_text().splitlines()] if path.exists() else []


def state_with(rank: int, slow_s: float = 0.0) -> dict[str, Any]:
    return state_of() | ({f"object of {rank}": Slow(slow_s)} if slow_s else {})


def save_and_load(folder: Path, options: dict[str, Any]) -> None:
    with Run(folder, timeout_s=60, **options) as run:
        run.save(1, state_of())
        run.wait()
        run.save(2, state_of())
        run.wait()
        assert run.restore(state_of()) == 2


SYNCHRONOUS = {"begin", "plan", "write", "commit"}
OF_FIRST = {"commit", "retain"}


@pytest.mark.parametrize(
    ("options", "first", "others"),
    [
        ({}, {*SYNCHRONOUS, "retain"}, SYNCHRONOUS - OF_FIRST),
        (
            {"asynchronous": True},
            {*SYNCHRONOUS, "stage", "retain"},
            {*SYNCHRONOUS, "stage"} - OF_FIRST,
        ),
        (
            {"asynchronous": True, "agent": True},
            {"begin", "stage", "persist", "retain"},
            {"begin", "stage", "persist"},
        ),
    ],
    ids=["synchronous", "asynchronous", "agent"],
)
def test_each_phase_of_each_rank_is_an_event(
    memory: Path,  # Before the ranks, which have its environment.
    pair: Ranks,
    tmp_path: Path,
    options: dict[str, Any],
    first: set[str],
    others: set[str],
) -> None:
    begin = time.time()
    pair.run(save_and_load, tmp_path / "run", options)
    end = time.time()
    events = events_in(tmp_path / "run")
    calls = list(dict.fromkeys(event.call for event in events))
    assert len(calls) == 3
    for number, call in enumerate(calls):
        of_call = [event for event in events if event.call == call]
        kind, step = ("save", number + 1) if number < 2 else ("load", 2)
        assert {(event.kind, event.step) for event in of_call} == {(kind, step)}
        for rank, phases in ((0, first), (1, others)):
            found = {event.phase for event in of_call if event.rank == rank} - {"message"}
            expected = phases if kind == "save" else {"choose", "plan", "read"}
            assert found == expected or (rank, number) == (1, 1), (rank, number)
    for event in events:
        assert event.phase in PHASES
        assert begin - 0.1 < event.start <= event.end < end + 0.1
        is_background = "asynchronous" in options and event.kind == "save"
        # A message, such as that of a long wait, is about a phase.
        phase = event.details.get("of", event.phase)
        is_background = is_background and phase not in ("begin", "stage")
        assert event.details.get("background", False) == is_background, event
        if event.phase == "read":
            assert event.details["bytes"] >= 32 * 100_000 * 4
            assert event.details["requests"] > 0
        if event.phase == "write":
            assert event.details["bytes"] >= 32 * 100_000 * 4 or event.step == 2
            assert 0 <= event.details["waited"] <= event.seconds
            assert event.details["mode"] in ("direct", "buffered")


def save_slowly(folder: Path, slow: int, seconds: float) -> None:
    rank = dist.get_rank()
    with Run(folder, timeout_s=60, reuse="off") as run:
        run.save(1, state_with(rank, seconds if rank == slow else 0.0))


@pytest.mark.parametrize("slow", [0, 1])
def test_the_write_of_a_slow_rank_is_as_long_as_it_took(
    worlds: Worlds, tmp_path: Path, slow: int
) -> None:
    worlds.run(2, save_slowly, tmp_path / "run", slow, 0.6)
    writes = {e.rank: e for e in events_in(tmp_path / "run") if e.phase == "write"}
    assert writes[slow].seconds >= 0.6
    assert writes[1 - slow].seconds < writes[slow].seconds
    assert writes[slow].details["waited"] < writes[slow].seconds - 0.5


def save_with_a_failure(folder: Path) -> None:
    rank = dist.get_rank()
    with Run(folder, timeout_s=60) as run:
        run.save(1, state_with(rank))
        state = state_with(rank)
        if rank == 1:
            state["bad"] = threading.Lock()
        with pytest.raises(BaseException, match="pickle"):
            run.save(2, state)


def test_a_save_that_fails_says_where(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save_with_a_failure, tmp_path / "run")
    failed = [event for event in events_in(tmp_path / "run") if "error" in event.details]
    where = {(event.step, event.rank, event.phase) for event in failed}
    assert where == {(2, 1, "write"), (2, 0, "wait")}
    assert all("pickle" in event.details["error"] for event in failed)


def hang(folder: Path, timeout_s: float) -> list[Event]:
    """Rank 1 does not end its write in time. Returns what the record has before the save fails."""
    rank = dist.get_rank()
    seen: list[Event] = []

    def look() -> None:
        time.sleep(12)
        seen.extend(events_in(folder))

    looking = threading.Thread(target=look)
    with Run(folder, timeout_s=timeout_s) as run:
        run.save(1, state_with(rank))
        looking.start()
        with contextlib.suppress(CheckpointError):
            run.save(2, state_with(rank, timeout_s + 5 if rank == 1 else 0.0))
            raise AssertionError
        looking.join()
    return seen


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_while_it_hangs_and_after_the_failure(
    worlds: Worlds, tmp_path: Path
) -> None:
    seen, _ = worlds.run(2, hang, tmp_path / "run", 15.0, timeout_s=100)
    for events in (seen, events_in(tmp_path / "run")):
        late = [event for event in events if event.details.get("unfinished")]
        assert {(event.step, event.rank, event.phase) for event in late} == {(2, 1, "write")}
        assert max(event.seconds for event in late) > 5
        assert all(event.host for event in late)
        assert any(event.rank == 0 and event.phase == "write" for event in events)


def late_for_a_save(folder: Path) -> None:
    rank = dist.get_rank()
    with Run(folder, timeout_s=2) as run:
        run.save(1, state_with(rank))
        with contextlib.suppress(CheckpointError):
            run.save(2, state_with(rank, 5.0 if rank == 1 else 0.0))
            raise AssertionError


def test_a_rank_that_is_too_late_is_named(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, late_for_a_save, tmp_path / "run")
    late = [event for event in events_in(tmp_path / "run") if event.details.get("unfinished")]
    assert {(event.step, event.rank, event.phase) for event in late} == {(2, 1, "write")}


def save_on_machines(folder: Path, machines: list[int]) -> None:
    with run_on(folder, machines) as run:
        for step in (1, 2):
            run.save(step, state_of())
            run.wait(promoted=True)
        run.save(3, state_of())


def test_promotions_of_all_machines_are_events(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save_on_machines, tmp_path, [0, 1])
    events = events_in(tmp_path / "run")
    promoted = [event for event in events if event.phase == "promote" and event.step == 1]
    assert {event.rank for event in promoted} == {0, 1}
    calls = {event.call for event in events if event.phase == "write" and event.step == 1}
    assert {event.call for event in promoted} == calls
    for rank in (0, 1):
        assert max(e.details.get("bytes", 0) for e in promoted if e.rank == rank) > 1 << 20


def save_without(folder: Path) -> None:
    with Run(folder, record=False) as run:
        run.save(1, state_of())
        run.restore(state_of())


def test_a_run_without_a_record_has_no_file_of_it(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save_without, tmp_path / "run")
    assert not list((tmp_path / "run").glob("events*"))


def save_beside_a_bad_record(folder: Path) -> None:
    with Run(folder, timeout_s=30) as run:
        for step in (1, 2):
            run.save(step, state_of())
        assert run.restore(state_of()) == 2


def test_a_record_that_cannot_be_written_harms_nothing(worlds: Worlds, tmp_path: Path) -> None:
    (tmp_path / "run/events.jsonl").mkdir(parents=True)
    worlds.run(2, save_beside_a_bad_record, tmp_path / "run")


def stalled_record(folder: Path) -> float:
    """The record's file is a pipe that nobody reads: a write to it hangs, as on a lost mount."""
    if dist.get_rank() == 0:
        folder.mkdir()
        os.mkfifo(folder / "events.jsonl")
    dist.barrier()
    begin = time.monotonic()
    with Run(folder, timeout_s=30) as run:
        run.save(1, state_of())
    return time.monotonic() - begin


def test_a_record_whose_file_hangs_delays_only_the_close(worlds: Worlds, tmp_path: Path) -> None:
    assert max(worlds.run(2, stalled_record, tmp_path / "run")) < 15


def test_ranks_that_were_killed_leave_what_had_ended(tmp_path: Path) -> None:
    with Ranks(2) as ranks, pytest.raises(RankError):
        ranks.run(kill_self_after_a_save, tmp_path / "run")
    events = events_in(tmp_path / "run")
    assert {event.rank for event in events if event.phase == "write"} == {0, 1}


def kill_self_after_a_save(folder: Path) -> None:
    run = Run(folder)
    run.save(1, state_of())
    if dist.get_rank() == 0:
        until(lambda: events_in(folder))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def save_with_listeners(folder: Path) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []

    def bad(_: Event) -> None:
        raise ValueError("a bad listener")

    with Run(folder) as run:
        run.on_event(bad)
        run.on_event(lambda event: found.append((event.kind, event.rank, event.phase)))
        run.save(1, state_of())
        run.restore(state_of())
    return found


def test_a_listener_gets_the_events_of_all_ranks_on_the_first(
    worlds: Worlds, tmp_path: Path
) -> None:
    found, others = worlds.run(2, save_with_listeners, tmp_path / "run")
    assert others == []
    assert {("save", 0, "commit"), ("save", 1, "write"), ("load", 1, "read")} <= set(found)
    assert len(found) == len(events_in(tmp_path / "run"))


def test_a_listener_needs_a_record(tmp_path: Path) -> None:
    with (
        Run(tmp_path / "run", record=False) as run,
        pytest.raises(ValueError, match="record=False"),
    ):
        run.on_event(print)


def fail_and_forget(folder: Path) -> bool:
    """Returns whether the state of a failed save is alive after the next one."""
    rank = dist.get_rank()
    with Run(folder, timeout_s=60) as run:
        state = state_of() | {"tensor": torch.zeros(8)}
        if rank == 1:
            state["bad"] = threading.Lock()
        tensor = weakref.ref(state["tensor"])
        with contextlib.suppress(BaseException):
            run.save(1, state)
        del state
        run.save(2, state_of())
        gc.collect()
        return tensor() is not None


def test_the_record_does_not_keep_the_state_of_a_failed_save(
    worlds: Worlds, tmp_path: Path
) -> None:
    assert worlds.run(2, fail_and_forget, tmp_path / "run") == [False, False]


def wait_for_the_previous_save(folder: Path) -> float:
    with Run(folder, timeout_s=60, asynchronous=True, on_failure="warn") as run:
        run.save(1, state_with(dist.get_rank(), 0.8))
        begin = time.monotonic()
        run.save(2, state_of())
        return time.monotonic() - begin


def test_the_wait_for_the_previous_save_is_recorded_if_failures_only_warn(
    worlds: Worlds, tmp_path: Path
) -> None:
    waited = min(worlds.run(2, wait_for_the_previous_save, tmp_path / "run"))
    of_2 = [e for e in events_in(tmp_path / "run") if (e.step, e.phase) == (2, "begin")]
    for rank in (0, 1):
        assert sum(e.seconds for e in of_2 if e.rank == rank) > waited / 2


def save_while_the_same_step_is_saved(folder: Path) -> None:
    slow_s = 4.0 if dist.get_rank() == 0 else 0.0
    with (
        contextlib.suppress(CheckpointError),
        Run(folder, timeout_s=1.5, asynchronous=True) as run,
    ):
        run.save(1, state_with(dist.get_rank(), slow_s))
        run.save(1, state_of())


def test_a_save_that_fails_while_its_step_is_saved_is_in_the_record(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, save_while_the_same_step_is_saved, tmp_path / "run")
    errors = [e for e in events_in(tmp_path / "run") if e.phase == "begin" and "error" in e.details]
    assert errors


def test_a_failure_of_the_agent_is_an_error_of_the_save(tmp_path: Path) -> None:
    with (
        contextlib.suppress(CheckpointError),
        Run(tmp_path / "run", asynchronous=True, agent=True) as run,
    ):
        run.save(1, {"w": torch.ones(8)})
        run.wait()
        (tmp_path / "run/step-2").write_text("no directory")
        run.save(2, {"w": torch.ones(8)})
    failed = [event for event in events_in(tmp_path / "run") if "error" in event.details]
    assert [(event.step, event.phase) for event in failed] == [(2, "persist")]
