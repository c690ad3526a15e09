"""Several jobs of one run: whose steps a restore finds, and who may replace or remove them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from command import run_command
from support.run_steps import steps_in, warned
from torch.distributed.checkpoint import CheckpointException

import torch_ckpt.commits.checkpoint
import torch_ckpt.ladder.step_directories
from torch_ckpt import CheckpointError, FastWriter, Run
from torch_ckpt._core import _native
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.terms import newest_term, take_term, term_of
from torch_ckpt.errors import CorruptionError, NotFoundError, StorageError, SupersededError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import committed_steps
from torch_ckpt.storage.copying import CheckpointCopy

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:step .* is newer"),
    pytest.mark.usefixtures("memory"),
]

AGENT: dict[str, Any] = {"asynchronous": True, "agent": True}
MODES: dict[str, dict[str, Any]] = {"direct": {}, "thread": {"asynchronous": True}, "agent": AGENT}


def refuse(*_: object, **__: object) -> None:
    raise StorageError("refused by the test", errno.EIO)


def save(run: Run, step: int, job: int) -> None:
    """Saves a step whose values are those of a job."""
    run.save(step, {"w": torch.full((1000,), float(step)), "job": job})
    run.wait()


def restored(run: Run, **options: Any) -> tuple[int | None, int]:
    """The step that a run restores, and its job."""
    state = {"w": torch.full((1000,), -1.0), "job": -1}
    step = run.restore(state, **options)
    assert state["w"].eq(-1 if step is None else step).all()
    return step, int(state["job"])  # type: ignore[call-overload]


def job_of(run: Path, step: Path) -> int:
    """Which of the jobs of a run saved a step: 1 for the first one."""
    numbers = sorted(int(file.name.removeprefix("term-")) for file in run.glob("term-*"))
    return 1 + numbers.index(term_of(Location(step)))


def as_earlier(step: Path) -> None:
    """Leaves the term of a step in ``branch.json`` alone, where earlier builds had it."""
    metadata = step / ".metadata"
    metadata.write_bytes(_native.with_term(metadata.read_bytes(), 0))


@contextlib.contextmanager
def left(run: Run) -> Iterator[Run]:
    """A job that dies: it does not wait for its promotions."""
    with contextlib.suppress(ZeroDivisionError), run:
        yield run
        raise ZeroDivisionError


def refused(*_: object) -> None:
    raise StorageError("the store is down")


# ---- Jobs that believe each other dead ----


@pytest.mark.parametrize("mode", MODES)
def test_a_job_that_was_believed_dead_replaces_and_removes_nothing_of_its_successor(
    mode: str, run: Path
) -> None:
    old = Run(run, keep_last=2, **MODES[mode])
    save(old, 200, 1)
    with Run(run, keep_last=2) as new:
        assert restored(new) == (200, 1)
        save(new, 210, 2)
        save(new, 220, 2)
        for step in (220, 300):  # The same step as the successor's, and a later one.
            with pytest.raises(SupersededError, match=r"a newer job saves there \(term \d+, pro"):
                save(old, step, 1)
        with pytest.raises(SupersededError):
            old.discard_after(200)
    assert steps_in(run) == [210, 220]
    assert restored(Run(run)) == (220, 2)
    with contextlib.suppress(CheckpointError):
        old.close()


def test_a_job_that_restored_before_a_newer_one_saved_does_not_decide_what_is_removed(
    run: Path,
) -> None:
    with Run(run) as first:
        save(first, 1, 1)
    old = Run(run, keep_last=1)
    assert restored(old) == (1, 1)
    old_lineage = old._saves.lineage  # The promotion of a step of another job asks it.
    assert old_lineage.newest() == newest_term(Location(run))
    with Run(run) as newer:
        assert restored(newer) == (1, 1)
        save(newer, 2, 2)
    with pytest.raises(SupersededError):
        old_lineage.newest()


@pytest.mark.parametrize("mode", ["thread", "agent"])
def test_a_save_in_the_background_is_not_committed_after_one_of_a_newer_job(
    mode: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with left(Run(run, **MODES[mode])) as old:
        save(old, 100, 1)
        lineage = old._saves.lineage
        monkeypatch.setattr(type(lineage), "check_here", lambda _: None)  # It has looked before.
        with Run(run) as new:
            restored(new)
            save(new, 110, 2)
        old.save(110, {"w": torch.zeros(1000), "job": 1})
        with pytest.raises(CheckpointError, match="a newer job saves there"):
            old.wait()
    assert restored(Run(run)) == (110, 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_slow_promotion_does_not_replace_the_step_of_a_newer_job(
    mode: str, run: Path, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks when all files have arrived."""
    goes_on, waits = threading.Event(), threading.Event()
    commit = CheckpointCopy.commit

    def slow(copy: CheckpointCopy, *arguments: Any) -> None:
        if copy.source.name == "step-300" and "old" in str(copy.source):
            waits.set()
            assert goes_on.wait(60)
        commit(copy, *arguments)

    monkeypatch.setattr(CheckpointCopy, "commit", slow)
    options: dict[str, Any] = {"keep_last": 3, **MODES[mode]}
    old = Run(run, local=tmp_path / "old", **options)
    save(old, 290, 1)
    old.wait(promoted=True)
    save(old, 300, 1)
    assert waits.wait(60)
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(memory / "machine-new"))
    with Run(run, local=tmp_path / "new", **options) as new:
        assert restored(new) == (290, 1)
        save(new, 300, 2)
        new.wait(promoted=True)
        assert job_of(run, run / "step-300") == 2
        goes_on.set()
        with pytest.raises(SupersededError, match="step 300 was not promoted"):
            old.wait(promoted=True)
        with pytest.raises(SupersededError):
            save(old, 310, 1)
        save(new, 310, 2)
    with contextlib.suppress(CheckpointError):
        old.close()
    assert restored(Run(run)) == (310, 2)
    assert restored(Run(run), step=300) == (300, 2)


def test_a_later_job_may_replace_what_a_former_one_has_promoted(run: Path, tmp_path: Path) -> None:
    with left(Run(run, local=tmp_path / "one")) as one:
        save(one, 100, 1)
        one.wait(promoted=True)
        two = Run(run, local=tmp_path / "two")
        assert restored(two) == (100, 1)
        save(one, 110, 1)
        one.wait(promoted=True)
    with two:
        save(two, 110, 2)
        two.wait(promoted=True)
    assert restored(Run(run)) == (110, 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_a_job_saved_twice_before_it_died_is_promoted(
    mode: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    with monkeypatch.context() as broken, left(Run(run, local=local, **MODES[mode])) as job:
        save(job, 100, 1)
        job.wait(promoted=True)
        broken.setattr(CheckpointCopy, "commit", refused)
        save(job, 100, 2)
    with Run(run, local=local, **MODES[mode]) as again:
        again.wait(promoted=True)
        assert restored(Run(run)) == (100, 2)
        assert restored(again) == (100, 2)


@pytest.mark.parametrize("mode", MODES)
def test_jobs_that_share_a_local_directory_replace_and_remove_nothing_of_a_newer_one(
    mode: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a process that hangs, and the one that was started in its place."""
    local = tmp_path / "local"
    options: dict[str, Any] = {"local": local, "keep_last": 1, "on_failure": "warn", **MODES[mode]}
    if mode == "agent":  # An agent serves one job.
        options |= {"agent": False}
    old = Run(run, **options)
    save(old, 100, 1)
    old.wait(promoted=True)
    with monkeypatch.context() as broken:
        broken.setattr(CheckpointCopy, "commit", refuse)
        new = Run(run, **options)
        assert restored(new) == (100, 1)
        save(new, 110, 2)
        for step in (110, 120):
            with pytest.raises(SupersededError):
                save(old, step, 1)
        old._saves.lineage.check_here = lambda: None  # type: ignore[method-assign]
        with pytest.raises((CheckpointException, CheckpointError), match="a newer job saves there"):
            save(old, 120, 1)
        assert steps_in(local) == [110]
        assert job_of(run, local / "step-110") == 2
    save(new, 130, 2)
    new.close()
    assert restored(Run(run)) == (130, 2)
    with contextlib.suppress(CheckpointError):
        old.close()


@pytest.mark.parametrize("has_local", [False, True])
def test_a_step_that_a_newer_job_saves_during_the_commit_is_not_replaced(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_local: bool
) -> None:
    options: dict[str, Any] = {"local": tmp_path / "local"} if has_local else {}
    old, new = Run(run, **options), Run(run, **options)
    assert restored(old)[0] is restored(new)[0] is None
    publish = CheckpointTransaction._publish

    def late(*arguments: Any) -> None:
        monkeypatch.undo()
        save(new, 100, 2)
        publish(*arguments)

    monkeypatch.setattr(CheckpointTransaction, "_publish", late)
    with pytest.raises((CheckpointException, SupersededError), match="a newer job saves there"):
        save(old, 100, 1)
    new.close()
    assert restored(Run(run, **options)) == (100, 2)


def test_a_step_that_another_job_has_left_in_the_local_directory_is_retained_and_promoted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    options: dict[str, Any] = {"local": local, "keep_last": 2, "on_failure": "warn"}
    waiting = Run(run, **options)
    with monkeypatch.context() as broken:
        broken.setattr(CheckpointCopy, "commit", refuse)
        other = Run(run, **options)
        save(other, 100, 1)
        assert restored(waiting) == (100, 1)
        save(waiting, 110, 2)
        assert steps_in(local) == [100, 110]
        with contextlib.suppress(StorageError):
            waiting.wait(promoted=True)
    waiting.wait(promoted=True)
    assert steps_in(run) == [100, 110]


def test_a_job_passes_over_what_a_superseded_one_saves_to_the_same_local_directory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    waiting, old, other = Run(run, local=local), Run(run, local=local), Run(run)
    save(old, 100, 1)
    old.wait(promoted=True)
    assert restored(waiting) == restored(other) == (100, 1)
    save(other, 110, 2)
    save(old, 120, 1)
    with pytest.raises(SupersededError):
        old.wait(promoted=True)
    waiting.wait(promoted=True)
    assert restored(waiting) == (110, 2)
    save(waiting, 130, 3)
    waiting.close()
    assert restored(Run(run)) == (130, 3)
    assert steps_in(run) == [100, 110, 130]


@pytest.mark.parametrize("number", [2**63, 2**64, int("9" * 240)])
def test_a_file_whose_name_has_too_large_a_number_is_no_term(number: int, run: Path) -> None:
    for step in (1, 2):
        with Run(run) as job:
            save(job, step, job=step)
        newest = newest_term(Location(run)).number
        (run / f"term-{number}").write_bytes((run / f"term-{newest}").read_bytes())
    assert restored(Run(run)) == (2, 2)


def test_a_job_that_fails_to_take_a_term_supersedes_nobody(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = Run(run)
    save(going, 100, 1)
    with monkeypatch.context() as broken:
        broken.setattr(Location, "sync", refuse)
        with pytest.raises(StorageError):
            save(Run(run), 110, 2)
    save(going, 110, 1)
    assert restored(Run(run)) == (110, 1)


@pytest.mark.parametrize("next_step", [105, 120])
@pytest.mark.parametrize("is_first", [False, True], ids=["later term", "first term"])
def test_a_job_is_not_superseded_by_a_term_that_it_has_failed_to_take(
    is_first: bool, next_step: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    with Run(run, local=local) as job:
        save(job, 100, 1)
        save(job, 110, 1)
    job = Run(run, local=local)
    if not is_first:
        restored(job)
        save(job, 115, 2)
        job.wait(promoted=True)  # Its promotion is not to fail.
    assert restored(job, step=100) == (100, 1)
    with monkeypatch.context() as broken:
        broken.setattr(Location, "sync", refuse)
        broken.setattr(Location, "remove", refuse)
        with pytest.raises(StorageError):
            save(job, 105, 3)
    newest = newest_term(Location(run))
    assert len(list(run.glob("term-*"))) == (2 if is_first else 3), "it remains"
    assert newest.lineage[term_of(Location(run) / "step-100")] == 100
    save(job, next_step, 3)
    job.close()
    assert restored(Run(run)) == (next_step, 3)
    assert newest_term(Location(run)).number > newest.number


# ---- Failures ----


def test_a_step_whose_term_cannot_be_read_is_not_passed_over(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Run(run)
    save(job, 100, 1)
    save(job, 110, 1)
    with monkeypatch.context() as broken:
        broken.setattr(_native, "MetadataFile", refuse)
        with pytest.raises(StorageError, match="refused"):
            restored(Run(run))
    assert restored(Run(run)) == (110, 1)


@pytest.mark.thin(2)
@pytest.mark.parametrize("record", [None, b"", b'{"term": ', b'{"term": 1}'])
@pytest.mark.parametrize("has_local", [False, True], ids=["run", "local"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_whose_record_is_lost_or_damaged_is_not_left_by_the_run(
    mode: str, has_local: bool, record: bytes | None, run: Path, tmp_path: Path
) -> None:
    with Run(run) as first:
        save(first, 100, 1)
    local = tmp_path / "local" if has_local else None
    with Run(run, local=local, keep_last=2, **MODES[mode]) as second:
        restored(second)
        for step in (110, 120):
            save(second, step, 2)
        second.wait(promoted=True)
        places = [run] if local is None else [run, local]
        for file in (place / f"step-{step}/branch.json" for place in places for step in (110, 120)):
            file.unlink(missing_ok=True)
            if record is not None and file.parent.exists():
                file.write_bytes(record)
        assert restored(second) == restored(Run(run)) == (120, 2)
        save(second, 130, 2)
        second.wait(promoted=True)
    assert steps_in(run) == [120, 130]
    assert "left by the run" not in run_command("ls", run)[1]


def test_a_step_of_an_earlier_build_has_the_term_of_its_record(run: Path) -> None:
    for job in (1, 2):
        with Run(run, keep_last=2) as training:
            restored(training)
            for step in (100 * job, 100 * job + 10):
                save(training, step, job)
        for path in run.glob("step-*"):
            as_earlier(path)
    assert restored(Run(run)) == (210, 2)
    assert [job_of(run, run / f"step-{step}") for step in (200, 210)] == [2, 2]
    with Run(run, keep_last=2) as third:
        assert restored(third, step=200) == (200, 2)
        save(third, 205, 3)
    assert restored(Run(run)) == (205, 3)
    assert steps_in(run) == [200, 205, 210]


@pytest.mark.parametrize("mode", ["direct", "thread"])
@pytest.mark.parametrize("has_local", [False, True], ids=["run", "local"])
def test_a_commit_that_fails_leaves_the_term_of_the_step_that_it_would_replace(
    has_local: bool, mode: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(run) as first:
        save(first, 100, 1)
        save(first, 110, 1)
    local = tmp_path / "local" if has_local else None
    publish = CheckpointTransaction._publish

    def publish_elsewhere(transaction: CheckpointTransaction, *arguments: Any) -> None:
        if transaction.target.path == run / "step-110":
            refuse()
        publish(transaction, *arguments)

    with monkeypatch.context() as broken, contextlib.suppress(CheckpointError):
        broken.setattr(CheckpointTransaction, "_publish", publish_elsewhere)
        with left(Run(run, local=local, **MODES[mode])) as second:
            assert restored(second, step=100) == (100, 1)
            with contextlib.suppress(CheckpointException, CheckpointError):
                save(second, 110, 2)
                second.wait(promoted=True)
    assert restored(Run(run)) == (100, 1)
    assert restored(Run(run), step=110) == (110, 1)


@pytest.mark.parametrize("mode", ["direct", "thread"])
def test_a_step_has_its_term_although_its_small_files_could_not_be_replaced(
    mode: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(run) as first:
        save(first, 100, 1)
        save(first, 110, 1)
    with monkeypatch.context() as broken:
        broken.setattr(torch_ckpt.commits.checkpoint, "write_small_files", refuse)
        second = Run(run, **MODES[mode])
        assert restored(second, step=100) == (100, 1)
        with pytest.warns(UserWarning, match="small files of"):
            save(second, 110, 2)
    assert restored(Run(run)) == (110, 2)
    second.close()
    again = Run(run)
    restored(again)
    save(again, 110, 3)
    assert job_of(run, run / "step-110") == 3


# ---- Abandoned branches ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_local", [False, True], ids=["run", "local"])
def test_retention_counts_no_step_that_the_run_has_left(
    has_local: bool, mode: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(run) as first:
        for step in (100, 110, 130):
            save(first, step, 1)
    local = tmp_path / "local" if has_local else None
    with Run(run, keep_last=2, local=local, on_failure="warn", **MODES[mode]) as going:
        restored(going, step=100)
        with monkeypatch.context() as broken:  # All are promoted later, if there is a local one.
            broken.setattr(CheckpointCopy, "commit", refuse)
            save(going, 105, 2)
            save(going, 120, 2)
            save(going, 140, 2)
        going.wait(promoted=True)
        assert steps_in(run) == [120, 130, 140]
    shutil.rmtree(run / "step-140")
    assert restored(Run(run)) == (120, 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_restore_ignores_the_steps_that_the_run_has_left_on_another_machine(
    mode: str, run: Path, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(machine: str) -> Run:
        monkeypatch.setenv("TORCH_CKPT_MEMORY", str(memory / f"machine-{machine}"))
        return Run(run, local=tmp_path / machine, keep_last=2, **MODES[mode])

    with monkeypatch.context() as broken, left(job("one")) as first:
        save(first, 100, 1)
        first.wait(promoted=True)
        broken.setattr(CheckpointCopy, "commit", refused)
        save(first, 150, 1)
    with job("two") as second:
        assert restored(second) == (100, 1)
        save(second, 120, 2)
        save(second, 130, 2)
    with job("one") as third:
        messages = warned(lambda: restored(third))
        assert [m for m in messages if m.startswith(f"step 150 is passed over: {run} has left it")]
        assert restored(third) == (130, 2)
        save(third, 140, 3)
        third.wait(promoted=True)
        assert committed_steps(Location(run)) == [140, 130]
    assert restored(Run(run)) == (140, 3)
    with job("one") as fourth:
        assert restored(fourth) == (140, 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_goes_back_and_saves_has_left_its_newer_steps(mode: str, run: Path) -> None:
    with Run(run, **MODES[mode]) as going:
        for step in (300, 500, 700):
            save(going, step, 1)
        assert restored(going, step=300) == (300, 1)
        assert restored(going) == (700, 1), "nothing was saved since"
        restored(going, step=300)
        save(going, 310, 2)
        assert restored(going) == (310, 2)
    assert f"{run}/step-310" in run_command("verify", run)[1]
    with Run(run, **MODES[mode]) as again:
        assert restored(again) == (310, 2)
        assert restored(again, step=500) == (500, 1)
        save(again, 510, 3)
        assert restored(again) == (510, 3)
        (run / "step-510/.metadata").write_bytes(b"")
    last = Run(run)
    assert restored(last) == (500, 1)
    left = ["left by the run" in line for line in run_command("ls", run)[1].splitlines()[1:]]
    assert left == [True, False, False, True, False]  # 700, 510, 500, 310 and 300.


def test_a_step_that_the_run_has_left_is_neither_the_best_one_nor_the_last_that_remains(
    run: Path, tmp_path: Path
) -> None:
    metrics = {100: 5.0, 200: 1.0, 300: 2.0}
    for local in (None, tmp_path / "local"):
        with Run(run, local=local, keep_local=9, monitor="loss") as going:
            for step, loss in metrics.items():
                going.save(step, {"w": torch.full((1000,), float(step))}, metrics={"loss": loss})
            going.wait(promoted=True)
            going.restore({"w": torch.zeros(1000)}, step=100)
            assert going.best_step() == 200
            going.save(250, {"w": torch.full((1000,), 250.0)}, metrics={"loss": 3.0})
            assert going.best_step() == 250
            going.wait(promoted=True)
            for directory in filter(None, (run, local)):
                shutil.rmtree(directory / "step-100")
            with pytest.raises(NotFoundError, match="except step 200, which the run has left"):
                going.discard_after(200)
            assert run_command("rm", local or run, "--after", "200", "--yes")[0] == 3
            assert steps_in(run) == [200, 250, 300]
            assert going.discard_after(260) == [300]
            assert going.best_step() == 250
        shutil.rmtree(run)


@pytest.mark.filterwarnings("ignore:step .* is passed over")
def test_the_bytes_of_a_step_that_the_run_has_left_are_not_read_before_it_is_passed_over(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(run) as going:
        for step in (100, 200, 300):
            save(going, step, 1)
        restored(going, step=100)
        save(going, 250, 2)
    read: list[int] = []
    check_sound = torch_ckpt.ladder.step_directories.check_sound

    def noted(directory: Location, **options: Any) -> None:
        read.append(int(directory.name[5:]))
        check_sound(directory, **options)

    monkeypatch.setattr("torch_ckpt.ladder.step_directories.check_sound", noted)
    for local in (None, tmp_path / "local"):
        assert restored(Run(run, local=local, verify="full")) == (250, 2)
    assert read == [250, 250]


def test_a_job_that_goes_on_from_a_branch_that_was_left_has_the_older_steps_of_this_branch(
    run: Path,
) -> None:
    save(Run(run), 100, 1)
    for number, begins_at, steps in [(2, 100, [110, 120]), (3, 110, [115]), (4, 100, [105])]:
        job = Run(run)
        restored(job, step=begins_at)
        for step in steps:
            save(job, step, number)
    job = Run(run)
    assert restored(job, step=115) == (115, 3)
    save(job, 130, 5)
    terms = [0, *(term_of(Location(run) / f"step-{step}") for step in (100, 110, 115))]
    assert newest_term(Location(run)).lineage == dict(zip(terms, (99, 100, 110, 115), strict=True))
    for step, number in [(130, 5), (115, 3), (110, 2), (100, 1)]:
        assert restored(Run(run)) == (step, number)
        shutil.rmtree(run / f"step-{step}")


def test_an_evaluation_of_an_older_step_leaves_no_step(run: Path) -> None:
    with Run(run) as first:
        for step in (300, 500, 700):
            save(first, step, 1)
    training = Run(run)
    assert restored(training) == (700, 1)
    assert restored(training, step=300) == (300, 1)
    save(training, 710, 1)
    assert restored(training, step=500) == (500, 1)
    save(training, 720, 1)
    for damaged in (720, 710):
        (run / f"step-{damaged}/.metadata").write_bytes(b"")
    assert restored(Run(run)) == (700, 1)


def test_a_reader_takes_no_term(run: Path) -> None:
    training = Run(run)
    save(training, 1, 1)
    reader = Run(run)
    assert restored(reader) == (1, 1)
    assert reader.latest_step() == 1
    with reader.lease(1):
        save(training, 2, 1)
    reader.close()
    save(training, 3, 1)
    assert len(list(run.glob("term-*"))) == 1


def test_a_run_of_which_only_abandoned_steps_are_left_does_not_begin_anew(run: Path) -> None:
    going = Run(run)
    save(going, 300, 1)
    save(going, 700, 1)
    restored(going, step=300)
    save(going, 310, 1)
    shutil.rmtree(run / "step-310")
    shutil.rmtree(run / "step-300")
    with pytest.raises(CorruptionError, match=r"restore\(state, step=700\)"):
        restored(Run(run))
    assert restored(Run(run), step=700) == (700, 1)


def test_steps_without_a_term_count_up_to_where_the_first_job_has_gone_on(run: Path) -> None:
    """Such as those of an earlier version, and of stock DCP."""
    save(Run(run), 100, 0)
    save(Run(run), 200, 0)
    for path in [*run.glob("term-*"), *run.glob("step-*/branch.json")]:
        path.unlink()
    for step in (100, 200):
        as_earlier(run / f"step-{step}")
    assert restored(Run(run)) == (200, 0)
    job = Run(run)
    restored(job, step=100)
    save(job, 110, 1)
    assert restored(Run(run)) == (110, 1)
    assert newest_term(Location(run)).lineage == {0: 100}


# ---- Terms ----


def test_jobs_that_begin_at_the_same_time_take_different_terms(run: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(lambda _: take_term(Location(run), {}).number, range(40)))
    assert len(set(taken)) == 40
    assert newest_term(Location(run)).number == max(taken)
    assert len(list(run.iterdir())) <= 25, "older ones are removed"


@pytest.mark.parametrize("way", ["begun again", "backup"])
def test_a_run_whose_directory_was_lost_leaves_the_steps_of_a_machine_that_was_away(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    began_s = time.time()

    def job_on(machine: str) -> Run:
        nonlocal began_s
        began_s += 60
        monkeypatch.setattr(time, "time", lambda: began_s)
        return Run(run, local=tmp_path / machine, keep_local=9)

    with job_on("first") as job:
        save(job, 100, 1)
    shutil.copytree(run, tmp_path / "backup")
    with job_on("second") as job:
        save(job, 110, 2)
        save(job, 120, 2)
    shutil.rmtree(run)
    if way == "backup":
        shutil.move(tmp_path / "backup", run)
    else:
        run.mkdir()
        shutil.copy(tmp_path / "first" / "run-id", run)
    with job_on("first") as job:
        assert restored(job) == (100, 1)
        save(job, 110, 3)
    with job_on("second") as job:
        with pytest.warns(UserWarning, match="step 120 is passed over"):
            assert restored(job) == (110, 3)
        assert restored(Run(run)) == (110, 3)


def test_a_job_that_takes_its_term_beside_one_with_a_later_clock_is_the_newest(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(Run(run), 1, 1)
    ahead, behind, write = Run(run), Run(run), Location.write
    now_s = time.time()

    def writes_later(file: Location, *args: Any, **options: Any) -> None:
        if file.name.startswith("term-"):
            monkeypatch.setattr(Location, "write", write)
            with monkeypatch.context() as clock:
                clock.setattr(time, "time", lambda: now_s + 3600)
                save(ahead, 2, 2)
        write(file, *args, **options)

    for job in (ahead, behind):
        assert restored(job) == (1, 1)
    monkeypatch.setattr(Location, "write", writes_later)
    save(behind, 3, 3)
    save(behind, 4, 3)
    assert restored(Run(run)) == (4, 3)
    with pytest.raises(SupersededError):
        save(ahead, 5, 2)


def test_a_directory_that_was_created_for_a_term_does_not_remain_without_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would not be the directory of the run: no save would use it."""
    write = Location.write

    def fails(file: Location, *args: Any, **options: Any) -> None:
        if file.name.startswith("term-"):
            raise StorageError("the disk is full", errno.ENOSPC)
        write(file, *args, **options)

    going = Run(run, record=False)
    save(going, 1, 1)
    shutil.rmtree(run)
    with monkeypatch.context() as full:
        full.setattr(Location, "write", fails)
        with pytest.raises(StorageError, match="the disk is full"):
            save(going, 2, 1)
    assert not run.exists()
    save(going, 3, 1)
    assert restored(going) == (3, 1)


@pytest.mark.parametrize("jobs", [1, 22])
def test_an_older_job_whose_term_was_removed_names_the_newer_one(run: Path, jobs: int) -> None:
    old = Run(run)
    save(old, 1, 1)
    own = run / f"term-{newest_term(Location(run)).number}"
    for step in range(2, 2 + jobs):
        job = Run(run)
        restored(job)
        save(job, step, 2)
    own.unlink(missing_ok=True)
    assert old.latest_step() == 1 + jobs
    with pytest.raises(SupersededError):
        save(old, 100, 1)


@pytest.mark.parametrize("now_s", [-1.0, 0.0, 1e18, math.inf])
def test_a_term_begins_whatever_the_clock_says(
    run: Path, monkeypatch: pytest.MonkeyPatch, now_s: float
) -> None:
    save(Run(run), 1, 1)
    monkeypatch.setattr(time, "time", lambda: now_s)
    job = Run(run)
    assert restored(job) == (1, 1)
    save(job, 2, 2)
    monkeypatch.undo()
    job = Run(run)
    assert restored(job) == (2, 2)
    save(job, 3, 3)
    assert restored(Run(run)) == (3, 3)


@pytest.mark.parametrize(
    ("entry", "value", "restored"),
    [("began_s", 1e18, 1), ("began_s", math.inf, 1), ("pid", math.inf, 2)],
)
def test_a_term_with_numbers_out_of_range_is_no_error(
    entry: str, value: float, restored: int, run: Path
) -> None:
    state = {"n": 0}
    for step in (1, 2):
        Run(run).save(step, {"n": step})
    first, second = sorted(run.glob("term-*"))
    former = int(first.name.removeprefix("term-"))
    facts = json.loads(second.read_text()) | {"lineage": [[former, 1]], entry: value}
    second.with_name(f"{second.name}0").write_text(json.dumps(facts))  # A wrong clock, or damage.
    with warnings.catch_warnings(record=True) as passed_over:
        warnings.simplefilter("always")
        assert Run(run).restore(state) == restored
    assert (state["n"], len(passed_over)) == (restored, 2 - restored)


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b'{"lineage": [[1]]}'])
def test_a_term_whose_job_died_while_it_wrote_the_file_is_passed_over(
    run: Path, contents: bytes
) -> None:
    save(Run(run), 1, 1)
    incomplete = newest_term(Location(run)).number + 1000
    (run / f"term-{incomplete}").write_bytes(contents)
    assert restored(Run(run)) == (1, 1)
    job = Run(run)
    restored(job)
    save(job, 2, 2)
    assert newest_term(Location(run)).number == incomplete + 1
    assert restored(Run(run)) == (2, 2)


# ---- Copied and moved directories ----


@pytest.mark.parametrize("mode", MODES)
def test_a_copied_directory_is_another_run(
    mode: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, fork = tmp_path / "local", tmp_path / "fork"
    with monkeypatch.context() as broken, left(Run(run, local=local, **MODES[mode])) as going:
        save(going, 300, 1)
        going.wait(promoted=True)
        shutil.copytree(run, fork)
        broken.setattr(CheckpointCopy, "commit", refused)
        save(going, 400, 1)
    with pytest.raises(CheckpointError, match=r"its \d steps are of run .* is of run"):
        Run(fork, local=local, **MODES[mode])
    with Run(fork, local=tmp_path / "other", **MODES[mode]) as forked:
        assert restored(forked) == (300, 1)
        save(forked, 310, 2)
    assert restored(Run(fork)) == (310, 2)
    with Run(run, local=local, **MODES[mode]) as again:
        assert restored(again) == (400, 1)
        again.wait(promoted=True)
    assert restored(Run(run)) == (400, 1)
    with Run(fork, local=tmp_path / "other", **MODES[mode]) as forked:
        assert restored(forked) == (310, 2)


def test_a_local_directory_of_a_run_that_was_copied_before_its_first_save_is_refused(
    run: Path, tmp_path: Path
) -> None:
    Run(run, local=tmp_path / "local").close()
    shutil.copytree(run, tmp_path / "copy")
    with Run(run, local=tmp_path / "local") as going:
        save(going, 100, 1)
    with pytest.raises(CheckpointError, match="is a copy of that, or its original"):
        Run(tmp_path / "copy", local=tmp_path / "local")
    with Run(run, local=tmp_path / "local") as again:
        assert restored(again) == (100, 1)


@pytest.mark.parametrize("move", ["renamed", "copied, and the original removed", "linked", "same"])
def test_a_moved_directory_is_the_same_run(move: str, run: Path, tmp_path: Path) -> None:
    local, moved = tmp_path / "local", tmp_path / "moved"
    with Run(run, local=local) as going:
        save(going, 300, 1)
    if move == "renamed":
        run.rename(moved)
    elif move == "linked":
        moved.symlink_to(run)
    elif move == "same":
        moved = run
    else:
        shutil.copytree(run, moved)
        shutil.rmtree(run)
    for step in (310, 320):
        with Run(moved, local=local) as again:
            assert restored(again)[0] == step - 10
            save(again, step, 1)
    assert steps_in(moved) == [300, 310, 320]


def test_two_mounts_of_one_directory_are_the_same_run(
    run: Path, tmp_path: Path, mount_tmpfs: Any
) -> None:
    mounted, local = mount_tmpfs("size=10m"), tmp_path / "local"
    with Run(mounted, local=local) as going:
        save(going, 300, 1)
    run.mkdir()
    subprocess.run(["mount", "--bind", mounted, run], check=True)
    try:
        with Run(run, local=local) as again:
            assert restored(again) == (300, 1)
    finally:
        subprocess.run(["umount", run], check=True)


# ---- Jobs that begin, and go back ----


def fails_to_save(run: Run, step: int) -> None:
    """A save that does not commit."""
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(CheckpointTransaction, "_publish", refused)
        with pytest.raises((CheckpointException, CheckpointError)):
            save(run, step, -1)


def test_a_restored_step_remains_if_it_is_saved_again_and_that_fails(run: Path) -> None:
    with Run(run) as first:
        save(first, 90, 1)
        save(first, 100, 1)
    second = Run(run)
    assert restored(second) == (100, 1)
    fails_to_save(second, 100)
    assert restored(Run(run)) == (100, 1)


def test_a_job_that_restored_before_a_newer_one_saved_does_not_supersede_it(run: Path) -> None:
    with Run(run) as first:
        save(first, 100, 1)
    slow, new = Run(run), Run(run)
    assert restored(slow) == restored(new) == (100, 1)
    save(new, 110, 2)
    with pytest.raises(SupersededError):
        save(slow, 105, 3)
    save(new, 120, 2)
    assert restored(Run(run)) == (120, 2)


def test_a_job_that_saves_while_another_one_loads_is_not_superseded_by_it(run: Path) -> None:
    class Loads:
        def state_dict(self) -> dict[str, Any]:
            return {"w": torch.zeros(1)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if not taken:
                taken.append(Run(run))
                assert restored(taken[0]) == (100, 1)
                save(taken[0], 110, 2)

    taken: list[Run] = []
    slow = Run(run)
    slow.save(100, {"w": torch.full((1000,), 100.0), "job": 1, "slow": Loads()})
    slow = Run(run)
    assert slow.restore({"slow": Loads()}, strict=False) == 100
    with pytest.raises(SupersededError):
        save(slow, 105, 3)
    save(taken[0], 120, 2)
    assert restored(Run(run), strict=False) == (120, 2)


def test_ls_lists_a_step_whose_term_cannot_be_read(run: Path) -> None:
    job = Run(run)
    save(job, 100, 1)
    save(job, 110, 1)
    as_earlier(run / "step-110")
    (run / "step-110/branch.json").unlink()
    (run / "step-110/branch.json").mkdir()
    status, printed = run_command("ls", run)
    assert status == 0
    assert [line.split()[0] for line in printed.splitlines()] == ["step", "110", "100"]
    assert "left by the run" not in printed


def test_a_save_in_the_background_from_which_a_newer_job_goes_on_is_committed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, finish = threading.Event(), FastWriter.finish

    def slow(*arguments: Any, **options: Any) -> None:
        assert goes_on.wait(60)
        finish(*arguments, **options)

    with Run(run, asynchronous=True) as one, monkeypatch.context() as gated:
        gated.setattr(FastWriter, "finish", slow)
        one.save(10, {"w": torch.full((1000,), 10.0), "job": 1})
        own = newest_term(Location(run)).number
        take_term(Location(run), {own: 19})  # As another Run takes one that saves step 20.
        goes_on.set()
        one.wait()
    assert restored(Run(run)) == (10, 1)


def test_a_discard_that_fails_leaves_the_steps_on_the_lineage(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(run) as training:
        for step in (1, 2, 3, 4):
            save(training, step, 1)
        with monkeypatch.context() as patch:
            removal = "torch_ckpt.runs.step_saves.discard_after"
            patch.setattr(removal, mock.Mock(side_effect=StorageError("EIO")))
            with pytest.raises(StorageError, match="EIO"):
                training.discard_after(2)
        save(training, 5, 1)
    shutil.rmtree(run / "step-5")
    assert restored(Run(run)) == (4, 1)


@pytest.mark.parametrize("restores", [True, False])
def test_steps_that_were_discarded_are_not_on_the_lineage_of_a_higher_one(
    run: Path, tmp_path: Path, restores: bool
) -> None:
    """Although the job had restored one of them."""
    with Run(run, local=tmp_path / "one", keep_local=9) as first:
        for step in (100, 200, 300):
            save(first, step, 1)
    with Run(run, local=tmp_path / "two") as second:
        assert restored(second) == (300, 1)
        second.discard_after(200)
        if restores:
            assert restored(second) == (200, 1)
        save(second, 310, 2)
    shutil.rmtree(run / "step-310")
    with Run(run, local=tmp_path / "one") as third:
        assert restored(third) == (200, 1)


def test_steps_that_were_discarded_do_not_return_from_another_machine(
    run: Path, tmp_path: Path
) -> None:
    with Run(run, local=tmp_path / "one") as first:
        for step in (100, 200, 300):
            save(first, step, 1)
    with Run(run, local=tmp_path / "two") as second:
        assert restored(second) == (300, 1)
        save(second, 310, 2)
        second.discard_after(200)
        assert restored(second) == (200, 1)
        save(second, 210, 2)
        save(second, 220, 2)
    with Run(run, local=tmp_path / "one") as third:
        assert restored(third) == (220, 2)
        third.wait(promoted=True)
    assert steps_in(run) == [100, 200, 210, 220]
