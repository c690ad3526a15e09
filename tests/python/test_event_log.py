"""The file of a run's record: clocks, rotation, torn lines, stores."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_python
from support.store_proxy import Fault, StoreProxy
from torch.distributed.checkpoint.api import CheckpointException
from waits import until

from torch_ckpt import Run
from torch_ckpt.filesystems.location import Location
from torch_ckpt.records import event_log
from torch_ckpt.records.event import Event
from torch_ckpt.records.event_log import EventLog
from torch_ckpt.records.reading import read_events
from torch_ckpt.records.record import Heard, Record, Recorder

AHEAD_S = 12_345.0  # By which the clock of the other machine is ahead.


class Call:
    """A call in which another rank, whose clock is ahead, has sent messages."""

    number = 7

    def __init__(self, messages: list[tuple[float, float, list[Any]]]) -> None:
        self.messages = messages  # Sent and arrived by this clock, and phases by the other.

    def heard(self) -> list[Heard]:
        messages, self.messages = self.messages, []
        return [
            Heard(1, arrived, json.dumps(["other", sent + AHEAD_S, phases]).encode())
            for sent, arrived, phases in messages
        ]

    def late(self) -> None:
        return None


def events_of(record: Record, path: Path) -> list[Event]:
    return [Event.of_line(line) for line in record.recorder.lines(record).splitlines()]


def test_events_of_other_machines_are_on_the_clock_of_the_first_rank(tmp_path: Path) -> None:
    log = EventLog(Location(tmp_path))
    record = Recorder(0, log).record("save", 5)
    now = time.monotonic()
    phase = [7, "write", now - 3 + AHEAD_S, now - 1 + AHEAD_S, {"bytes": 8}]
    record.joined(Call([(now - 1.0, now - 0.999, [phase]), (now, now + 0.001, [])]))
    (found,) = events_of(record, tmp_path)
    assert (found.rank, found.host, found.phase, found.step) == (1, "other", "write", 5)
    assert found.start == pytest.approx(time.time() - 3, abs=0.3)
    assert found.seconds == pytest.approx(2, abs=1e-3)
    log.close()


def test_a_message_that_takes_longer_than_others_is_an_event(tmp_path: Path) -> None:
    log = EventLog(Location(tmp_path))
    record = Recorder(0, log).record("save", 5)
    now = time.monotonic()
    phase = [7, "write", now - 3 + AHEAD_S, now - 1 + AHEAD_S, {}]
    record.joined(Call([(now - 9, now - 8.999, []), (now - 1, now + 2, [phase])]))
    write, message = events_of(record, tmp_path)
    assert write.phase == "write"
    assert (message.phase, message.rank, message.details) == ("message", 1, {"of": "write"})
    assert message.seconds == pytest.approx(3, abs=0.01)
    assert message.start == pytest.approx(write.end, abs=0.01)
    log.close()


def test_what_arrives_after_the_end_is_of_its_own_save(tmp_path: Path) -> None:
    log = EventLog(Location(tmp_path))
    recorder = Recorder(0, log)
    first, second = recorder.record("save", 5), recorder.record("save", 6)
    first.joined(Call([]))
    first.end()
    now = time.monotonic()
    later = Call([(now, now, [[7, "persist", now - 2 + AHEAD_S, now - 1 + AHEAD_S, {}]])])
    later.number = 8
    second.joined(later)
    (found,) = events_of(second, tmp_path)
    assert (found.call, found.step, found.phase) == (first.call, 5, "persist")
    log.close()


def line_of(number: int) -> str:
    return Event("a-1", "save", number, 0, "here", "write", 1.0, 2.0, {}).line()


def steps_in(directory: Path) -> list[int | None]:
    return [event.step for event in read_events(Location(directory))]


def test_a_long_file_is_replaced_and_the_older_one_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_LOCAL_NBYTES", 3 * len(line_of(1)))
    log = EventLog(Location(tmp_path))
    for number in range(1, 8):
        log.put(lambda number=number: line_of(number))
    log.close()
    assert steps_in(tmp_path) == [4, 5, 6, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.1.jsonl", "events.jsonl"]


def test_a_line_that_a_crash_has_torn_costs_no_other_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(line_of(1) + line_of(2)[:20])
    log = EventLog(Location(tmp_path))
    log.put(lambda: line_of(3))
    log.close()
    assert steps_in(tmp_path) == [1, 3]


def test_nothing_is_made_where_there_is_no_run(tmp_path: Path) -> None:
    with Run(tmp_path / "run") as run:
        assert run.restore({}) is None
    assert not (tmp_path / "run").exists()


def test_a_store_has_the_record_of_all_processes(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_STORE_NBYTES", 3 * len(line_of(1)))
    run = Location(f"{store_url}/run")
    for numbers in ((1, 2), (3,), (4, 5)):
        log = EventLog(run)
        for number in numbers:
            log.put(lambda number=number: line_of(number))
        log.close()
    assert [event.step for event in read_events(run)] == [1, 2, 3, 4, 5]
    assert (run / "events.1.jsonl").is_file()


def test_a_phase_that_lasts_long_is_written_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_WATCH_S", 0.05)
    monkeypatch.setattr("torch_ckpt.records.record._HANGS_S", 0.1)
    log = EventLog(Location(tmp_path))
    record = Recorder(3, log).record("save", 5)
    ended = threading.Event()

    def write() -> None:
        with record.phase("write"):
            assert ended.wait(30)

    thread = threading.Thread(target=write)
    thread.start()
    until((tmp_path / "events.jsonl").exists)
    ended.set()
    thread.join()
    record.end()
    log.close()
    *unfinished, last = read_events(Location(tmp_path))
    assert all(event.details["unfinished"] and event.seconds >= 0.1 for event in unfinished)
    assert "unfinished" not in last.details
    assert len(unfinished) < 8  # Each only if it lasts twice as long.


_EXITS = """
import sys, time, torch
from torch_ckpt import Run
from torch_ckpt.records.event_log import EventLog
append = EventLog._append_to_file
EventLog._append_to_file = lambda *arguments: time.sleep(0.2) or append(*arguments)  # Slow storage.
run = Run(sys.argv[1])
for step in range(int(sys.argv[2])):
    run.save(step, {"w": torch.zeros(16)})
sys.exit(3)
"""


def test_a_process_that_exits_without_close_has_written_its_record(
    tmp_path: Path, full: bool
) -> None:
    for count in (1, 3) if full else (3,):
        ended = run_python("-c", _EXITS, tmp_path / str(count), count, folder=tmp_path)
        assert ended.returncode == 3, ended.stdout
        steps = steps_in(tmp_path / str(count))
        assert set(steps) == set(range(count))


def test_a_store_that_cannot_be_read_once_loses_no_older_event(
    store_proxy: StoreProxy, store_url: str
) -> None:
    run = Location(f"{store_url}/run")
    for number in (1, 2):
        log = EventLog(run)
        if number == 2:
            fault = Fault("status", requests=("get", "head"), path="events", status=403, times=1)
            store_proxy.add(fault)
            log.put(lambda: line_of(7))  # Is lost.
        log.put(lambda number=number: line_of(number))
        log.close()
    assert [event.step for event in read_events(run)] == [1, 2]


def test_an_error_in_a_record_costs_no_other_record(tmp_path: Path) -> None:
    log = EventLog(Location(tmp_path))
    log.put(lambda: str(1 // 0))
    log.put(lambda: line_of(2))
    log.close()
    assert steps_in(tmp_path) == [2]


def test_a_log_whose_thread_cannot_start_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    log = EventLog(Location(tmp_path))
    log.put(lambda: line_of(1))
    log.close()
    assert not list(tmp_path.iterdir())


def test_records_are_found_while_other_threads_add_some(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    log = EventLog(Location(tmp_path))
    recorder = Recorder(0, log)
    ended = threading.Event()

    def add() -> None:
        while not ended.is_set():
            recorder.record("load", 1).end()

    thread = threading.Thread(target=add)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(20_000):
            recorder.save_of(7)
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    log.close()


def test_records_that_have_ended_are_forgotten_while_others_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_WATCH_S", 0.05)
    log = EventLog(Location(tmp_path))
    recorder = Recorder(0, log)
    end = time.monotonic() + 1
    while time.monotonic() < end:  # The queue is never empty for long.
        recorder.record("save", 1).end()
        time.sleep(0.005)
    assert len(log._watched) < 50
    log.close()


def test_the_last_save_after_an_error_is_in_the_record(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {"w": torch.ones(8)}

    def train(run: Run) -> None:
        with run.saving_on_exception(state):
            run.save(1, state())
            run.should_save(2)
            raise ValueError("training failed")

    with Run(tmp_path) as run, pytest.raises(ValueError, match="training failed"):
        train(run)
    assert set(steps_in(tmp_path)) == {1, 2}


class UnknownError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Unpicklable:
    def __reduce__(self) -> Any:
        raise UnknownError


def test_an_error_without_a_text_remains_the_error_of_the_save(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1, {"w": torch.ones(8)})
        with pytest.raises(CheckpointException) as raised:
            run.save(2, {"w": Unpicklable()})
    assert isinstance(raised.value.failures[0][0], UnknownError)
    errors = [event.details.get("error") for event in read_events(Location(tmp_path))]
    assert "UnknownError: (no text: its __str__ raises ValueError)" in errors


def test_clocks_that_drift_make_no_slow_messages(tmp_path: Path) -> None:
    recorder, drift, latency_s = Recorder(0, EventLog(Location(tmp_path))), 2e-5, 1e-3
    for hour in range(24):  # The other clock is slower by 20 ppm: 1.7 s in a day.
        record = recorder.record("save", hour)
        now = 3600.0 * hour
        call = Call([])
        call.messages = [(now * (1 - drift), now + latency_s, [])]
        record.joined(call)
        assert recorder.lines(record) == ""


def test_a_slow_listener_delays_no_line(tmp_path: Path) -> None:
    log = EventLog(Location(tmp_path))
    recorder = Recorder(0, log)
    waits = threading.Event()
    recorder.listeners.append(lambda _: assert_set(waits))
    for step in range(3):
        record = recorder.record("save", step)
        with record.phase("write"):
            pass
        record.end()
        until((tmp_path / "events.jsonl").exists)
    log_lines = (tmp_path / "events.jsonl").read_text
    time.sleep(0.1)
    waits.set()
    log.close()
    assert len(log_lines().splitlines()) == 3


def assert_set(event: threading.Event) -> None:
    assert event.wait(30)


def test_two_threads_send_each_phase_once() -> None:
    """A save in the background sends phases while the next one begins."""
    recorder = Recorder(1, None)
    record, number = recorder.record("save", 3), 20_000
    for _ in range(number):
        record.add("write", 0.0, None)
    start = threading.Barrier(2, timeout=30)
    interval = sys.getswitchinterval()

    def take() -> bytes:
        start.wait()
        return recorder.take()

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as threads:
            taken = [each.result(30) for each in [threads.submit(take) for _ in range(2)]]
    finally:
        sys.setswitchinterval(interval)
    assert sum(len(json.loads(each)[2]) for each in taken) == number


def test_an_error_while_a_rank_waits_is_an_event(tmp_path: Path) -> None:
    record = Recorder(0, EventLog(Location(tmp_path))).record("save", 3)
    with record.phase("write"):
        pass
    record.failed(KeyboardInterrupt())
    write, wait = events_of(record, tmp_path)
    assert "error" not in write.details
    assert (wait.phase, wait.details["error"]) == ("wait", "KeyboardInterrupt: ")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, CheckpointException])
def test_a_listener_that_raises_loses_no_events_of_others(
    tmp_path: Path, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def listener(_: Event) -> None:
        raise kind("from a listener", {})

    others: list[Event] = []
    with Run(tmp_path / "run") as run:
        run.on_event(listener)
        run.on_event(others.append)
        for step in (1, 2):
            run.save(step, {"w": torch.ones(4)})
            until(lambda step=step: any(event.step == step for event in others))  # type: ignore[misc]
    assert {event.step for event in read_events(Location(tmp_path / "run"))} == {1, 2}
    assert "a listener of the record" in caplog.text
