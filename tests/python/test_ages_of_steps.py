"""Retention by age, and the step that a run had at a time."""

from __future__ import annotations

import errno
import json
import os
import re
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import tzset
from typing import Any

import pytest
from command import run_command
from support.flips import flip
from support.run_steps import data_file, restored, save_steps, state_of, steps_in, warned

from torch_ckpt import Run
from torch_ckpt.errors import NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder import step_directories
from torch_ckpt.ladder.step_files import committed_steps

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]

HOUR_S = 3600.0
RUNS: dict[str, dict[str, Any]] = {
    "direct": {},
    "in a thread": {"asynchronous": True},
    "by the agent": {"asynchronous": True, "agent": True},
}


def age(directory: Path, step: int, hours: float) -> None:
    then = time.time() - hours * HOUR_S
    os.utime(directory / f"step-{step}" / ".metadata", (then, then))


def save(run: Run, step: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # A retention that fails only warns.
        assert run.save(step, state_of(step), metrics={"loss": float(step)})
        run.wait()


@pytest.mark.parametrize("name", RUNS)
def test_younger_steps_remain_beside_the_newest(tmp_path: Path, name: str) -> None:
    with Run(tmp_path, keep_last=2, keep_for="24h", **RUNS[name]) as run:
        for step, hours in {10: 90, 20: 25, 30: 23.5, 40: 1, 50: 0}.items():
            save(run, step)
            age(tmp_path, step, hours)
        save(run, 60)
        assert steps_in(tmp_path) == [30, 40, 50, 60]
        age(tmp_path, 30, 25)
        age(tmp_path, 50, 25)
        save(run, 70)
        assert steps_in(tmp_path) == [40, 60, 70]


def test_the_newest_step_remains_at_any_age_and_so_do_those_of_other_rules(tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep_every": 20, "keep_best": 1, "monitor": "loss"}
    with Run(tmp_path, keep_for=timedelta(minutes=90), **options) as run:
        for step in (10, 20, 30, 50):
            save(run, step)
            age(tmp_path, step, 2)
        save(run, 60)
        assert steps_in(tmp_path) == [10, 20, 60]
    with Run(tmp_path, keep_for="1min") as run:
        save(run, 70)
    assert steps_in(tmp_path) == [60, 70]
    age(tmp_path, 60, 1)
    age(tmp_path, 70, 1)
    assert restored(Run(tmp_path, keep_for="1min")) == 70


def test_old_local_steps_are_removed_and_young_ones_are_all_promoted(tmp_path: Path) -> None:
    run_path, local = tmp_path / "run", tmp_path / "local"
    with Run(run_path, local=local, keep_for="24h") as run:
        for step in (10, 20, 30):
            save(run, step)
        run.wait(promoted=True)
        assert steps_in(run_path) == [10, 20, 30]
        assert run.unpromoted == 0
        age(run_path, 10, 25)
        save(run, 40)
        run.wait(promoted=True)
        assert steps_in(run_path) == [20, 30, 40]
        assert steps_in(local) == [40]
    age(run_path, 20, 25)
    with Run(run_path, local=local, keep_for="24h") as run:  # It finds the ages there.
        save(run, 50)
        run.wait(promoted=True)
    assert steps_in(run_path) == [30, 40, 50]


def test_the_clock_of_the_file_system_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(tmp_path, keep_for="1h") as run:
        save(run, 10)
        save(run, 20)
        monkeypatch.setattr(time, "time", lambda now=time.time: now() + 5 * HOUR_S)
        save(run, 30)
        assert steps_in(tmp_path) == [10, 20, 30]
        real = step_directories.now_s
        monkeypatch.setattr(step_directories, "now_s", lambda path: real(path) + 5 * HOUR_S)
        save(run, 40)
        assert steps_in(tmp_path) == [40]


@pytest.mark.parametrize("place", ["store", "memory"])
def test_steps_on_a_store_are_kept_by_their_age(
    place: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = f"memory://tests/{tmp_path.name}"
    if place == "store":
        url = request.getfixturevalue("store_url")
    real, later = step_directories.now_s, 0.0
    monkeypatch.setattr(step_directories, "now_s", lambda path: (real(path) or time.time()) + later)
    with Run(url, keep_for="24h") as run:
        for step in (10, 20):
            save(run, step)
        assert committed_steps(Location(url)) == [20, 10]
        later = 25 * HOUR_S
        save(run, 30)
        assert committed_steps(Location(url)) == [30]


def test_without_times_of_files_all_steps_remain_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Location, "modified_s", lambda file: None)
    with Run(tmp_path, keep_for="24h", record=False) as run:
        save(run, 10)
        told = warned(lambda: [run.save(step, state_of(step)) for step in (20, 30)])
    assert steps_in(tmp_path) == [10, 20, 30]
    assert len(told) == 1
    assert "the file system does not state when files were written" in told[0]
    with pytest.raises(NotFoundError, match="no step at all"):
        Run(tmp_path).step_at(datetime.now())


@pytest.mark.parametrize(
    ("age", "error", "text"),
    [
        ("24", ValueError, "keep_for='24' is not an age such as '90min', '24h' or '7d'"),
        ("1 day", ValueError, "is not an age"),
        ("-1h", ValueError, "is not an age"),
        ("0h", ValueError, "keep_for='0h' is not positive"),
        (timedelta(0), ValueError, "is not positive"),
        (24, TypeError, "keep_for=24 is not an age such as '24h', or a timedelta"),
        (True, TypeError, "is not an age"),
    ],
)
def test_another_age_is_refused(tmp_path: Path, age: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        Run(tmp_path / "run", keep_for=age)
    assert not (tmp_path / "run").exists()


# ---- The step at a time ----


def at(hours: float) -> datetime:
    """A time so many hours ago."""
    return datetime.now() - timedelta(hours=hours)


def aged_run(path: Path, **hours: float) -> Run:
    run = save_steps(path, *(int(name[1:]) for name in hours))
    for name, each in hours.items():
        age(path, int(name[1:]), each)
    return run


TIMES: dict[str, Callable[[datetime], Any]] = {
    "a datetime": lambda time: time,
    "with a time zone": lambda time: time.astimezone(UTC),
    "text": lambda time: str(time),
    "text of UTC": lambda time: time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
}


@pytest.mark.filterwarnings("ignore:step .* was restored")
@pytest.mark.parametrize("name", TIMES)
def test_the_step_at_a_time_is_the_newest_that_was_committed_by_then(
    tmp_path: Path, name: str
) -> None:
    run = aged_run(tmp_path, s10=30, s20=20, s30=10)
    found = [run.step_at(TIMES[name](at(hours))) for hours in (29.9, 20.1, 19.9, 10.1, 9.9, 0)]
    assert found == [10, 10, 20, 20, 30, 30]
    assert restored(run, step=found[2]) == 20


def test_without_a_step_at_a_time_the_error_names_the_oldest(tmp_path: Path) -> None:
    run = aged_run(tmp_path, s10=30, s20=20)
    with pytest.raises(NotFoundError, match=r"had no whole step at .*: step 10, of 20.* oldest"):
        run.step_at(at(31))
    with pytest.raises(NotFoundError, match="no step at all"):
        Run(tmp_path / "empty").step_at(at(0))


def test_a_damaged_step_and_one_that_the_run_has_left_are_not_the_step_at_a_time(
    tmp_path: Path,
) -> None:
    run = aged_run(tmp_path, s10=30, s20=20, s30=10)
    data_file(tmp_path, 20).unlink()
    assert run.step_at(at(15)) == 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(tmp_path)
        assert restored(run, step=10) == 10
        run.save(15, state_of(15))
    age(tmp_path, 15, 5)
    assert run.step_at(at(1)) == 15
    assert run.step_at(at(8)) == 10  # Step 30 is abandoned.


def test_a_step_with_a_damaged_byte_is_not_chosen_if_all_bytes_are_verified(tmp_path: Path) -> None:
    run = Run(tmp_path, verify="full", monitor="loss", mode="max")
    for step in (10, 20):
        save(run, step)
    assert (run.best_step(), run.step_at("9998-01-01")) == (20, 20)
    flip(data_file(tmp_path, 20), 9000)
    assert (run.best_step(), run.step_at("9998-01-01")) == (10, 10)
    quick = Run(tmp_path, monitor="loss", mode="max")
    assert (quick.best_step(), quick.step_at("9998-01-01")) == (20, 20)


def test_a_step_that_cannot_be_read_matters_only_if_it_may_be_the_step_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = aged_run(tmp_path, s10=30, s20=20, s30=10)

    term_of = step_directories.term_of

    def term(path: Location) -> int:
        if path.name == "step-20":
            raise StorageError("cannot read it", errno.EACCES)
        return term_of(path)

    monkeypatch.setattr(step_directories, "term_of", term)
    assert [run.step_at(at(hours)) for hours in (25, 5)] == [10, 30]
    with pytest.raises(StorageError, match="cannot read it"):
        run.step_at(at(15))


def test_the_first_commit_of_a_promoted_step_counts(tmp_path: Path) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local", keep_local=2) as run:
        for step in (10, 20):
            save(run, step)
        run.wait(promoted=True)
        age(tmp_path / "local", 10, 5)
        age(tmp_path / "run", 10, 4)
        age(tmp_path / "local", 20, 3)
        data_file(tmp_path / "local", 10).unlink()  # Its copy in the directory of the run is whole.
        assert [run.step_at(at(hours)) for hours in (4.5, 3.5, 2.5)] == [10, 10, 20]
    for hours in (4.5, 3.5, 2.5):
        status, printed = run_command("ls", tmp_path / "local", "--json", "--at", str(at(hours)))
        assert status == 0
        assert [step["step"] for step in json.loads(printed)["steps"]] == [10 if hours > 3 else 20]


@pytest.mark.parametrize(
    ("time", "error"),
    [("yesterday", ValueError), ("", ValueError), (0, TypeError), (None, TypeError)],
)
def test_another_time_is_refused(tmp_path: Path, time: Any, error: type) -> None:
    with pytest.raises(error, match=f"time={time!r} is not a"):
        save_steps(tmp_path, 10).step_at(time)


@pytest.mark.parametrize("zone", ["Etc/GMT+12", "Etc/GMT-14"])
@pytest.mark.parametrize(
    "time", [datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)]
)
def test_the_first_and_the_last_time_are_times_in_every_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: datetime, zone: str
) -> None:
    monkeypatch.setenv("TZ", zone)
    tzset()
    try:
        with pytest.raises(NotFoundError, match="had no whole step at"):
            Run(tmp_path).step_at(time)
    finally:
        monkeypatch.undo()
        tzset()


def test_ls_lists_the_step_at_a_time(tmp_path: Path) -> None:
    aged_run(tmp_path, s10=30, s20=20)
    status, printed = run_command("ls", tmp_path, "--at", at(25).isoformat(sep=" "))
    assert status == 0
    assert [line.split()[0] for line in printed.splitlines()[1:]] == ["10"]
    status, printed = run_command("ls", tmp_path, "--json", "--at", str(at(19)))
    [step] = json.loads(printed)["steps"]
    assert step["step"] == 20
    assert abs(step["saved_s"] + step["age_s"] - time.time()) < 60
    status, printed = run_command("ls", tmp_path, "--at", str(at(31)))
    assert status == 3
    assert re.search(r"had no whole step at .*: step 10, of 20.* oldest", printed)
    status, printed = run_command("ls", tmp_path, "--at", "yesterday")
    assert status == 2
    assert "argument --at: time='yesterday' is not a time such as" in printed


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_that_is_saved_again_is_young_again(tmp_path: Path) -> None:
    with Run(tmp_path, keep_for="1h", keep_last=1) as run:
        for step in (10, 20, 10, 20):
            assert run.save(step, state_of(step))
            if step == 10:
                age(tmp_path, step, 2)
        assert steps_in(tmp_path) == [20]
        for step in (10, 20):
            assert run.save(step, state_of(step))
        assert steps_in(tmp_path) == [10, 20]
