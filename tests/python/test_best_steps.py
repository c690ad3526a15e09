"""Metrics of steps, the best steps, leases, and `torch-ckpt watch`."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from forks import run_python
from support.run_steps import state_of, steps_in
from waits import until

from torch_ckpt import FastReader, FastWriter, Run, load
from torch_ckpt.cli.main import main
from torch_ckpt.commits import leases
from torch_ckpt.errors import NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.removal import leased_paths, remove_directories
from torch_ckpt.ladder.step_files import leased_steps, metrics_of

pytestmark = pytest.mark.timeout(120)

LOSSES = {10: 3.0, 20: 1.0, 30: math.nan, 40: 2.0, 50: 4.0}


def save_all(run: Run, losses: dict[int, float]) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # A retention that fails only warns.
        for step, loss in losses.items():
            run.save(step, state_of(step), metrics={"loss": loss, "accuracy": -loss})
            run.wait()
    return run


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_best_steps_remain_beside_the_newest(asynchronous: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep_best": 2, "asynchronous": asynchronous}
    with Run(tmp_path / "min", monitor="loss", **options) as run:
        save_all(run, LOSSES)
        assert run.best_step() == 20
    assert steps_in(tmp_path / "min") == [20, 40, 50]
    with Run(tmp_path / "max", monitor="loss", mode="max", keep_last=2, **options) as run:
        save_all(run, LOSSES)
        assert run.best_step() == 50
    assert steps_in(tmp_path / "max") == [10, 40, 50]


def test_a_failed_read_of_metrics_removes_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(tmp_path, keep_best=1, monitor="loss") as run:
        save_all(run, {10: 1.0, 20: 2.0})
        real = Location.read_range

        def fails(file: Location, *arguments: Any) -> Any:
            if str(file).endswith("step-10/metrics.json"):
                raise StorageError("cannot read it", errno.EIO)
            return real(file, *arguments)

        monkeypatch.setattr(Location, "read_range", fails)
        save_all(run, {30: 3.0})
        with pytest.raises(StorageError, match="cannot read it"):
            run.best_step()
        monkeypatch.undo()
        save_all(run, {40: 4.0})
    assert steps_in(tmp_path) == [10, 40]


def test_metrics_that_a_second_scan_reads_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_all(Run(tmp_path, monitor="loss"), {10: 1.0})
    real, failures = Location.read, [StorageError("cannot read it", errno.EIO)]

    def fails_once(file: Location, *arguments: Any, **options: Any) -> Any:
        if file.name == "metrics.json" and failures:
            raise failures.pop()
        return real(file, *arguments, **options)

    monkeypatch.setattr(Location, "read", fails_once)
    assert run.best_step() == 10
    assert not failures


def test_a_step_with_damaged_metrics_is_not_removed(tmp_path: Path) -> None:
    run = save_all(Run(tmp_path, keep_best=1, monitor="loss"), {10: 1.0, 20: 2.0})
    (tmp_path / "step-10/metrics.json").write_text('{"loss": 1.0')
    with pytest.warns(UserWarning, match=r"step-10/metrics.json is damaged.* may be the best step"):
        run.save(30, state_of(30), metrics={"loss": 3.0})
    assert steps_in(tmp_path) == [10, 20, 30]
    assert run.best_step() == 20


def test_metrics_of_the_run_count_if_those_of_the_local_copy_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local", keep_local=9, monitor="loss") as run:
        save_all(run, {10: 1.0})
        run.wait(promoted=True)
        save_all(run, {20: 2.0})
        run.wait(promoted=True)
        real = Location.read

        def fails(file: Location, *arguments: Any, **options: Any) -> Any:
            if str(file).endswith("local/step-10/metrics.json"):
                raise StorageError("cannot read it", errno.EIO)
            return real(file, *arguments, **options)

        monkeypatch.setattr(Location, "read", fails)
        assert run.best_step() == 10
        monkeypatch.undo()


def test_a_failed_read_of_local_metrics_removes_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run", local=tmp_path / "local", keep_best=1, monitor="loss")
    with run:
        run._promotion.cancel()  # As during an outage of the run's directory.
        real = Location.read

        def fails(file: Location, *arguments: Any, **options: Any) -> Any:
            if str(file).endswith("local/step-20/metrics.json"):
                raise StorageError("cannot read it", errno.ESTALE)
            return real(file, *arguments, **options)

        monkeypatch.setattr(Location, "read", fails)
        save_all(run, {10: 3.0, 20: 1.0, 30: 2.0})
        monkeypatch.undo()
        save_all(run, {40: 4.0})
        assert {20, 40} <= {*steps_in(tmp_path / "local")}
    with Run(tmp_path / "run", local=tmp_path / "local", keep_best=1, monitor="loss") as run:
        run.wait(promoted=True)
        assert run.best_step() == 20


@pytest.mark.parametrize("is_new_job", [True, False])
@pytest.mark.parametrize("metrics", [{"loss": 9.0}, None], ids=["worse", "none"])
def test_the_metric_of_a_step_is_that_of_the_save_that_a_restore_loads(
    metrics: dict[str, float] | None, is_new_job: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"local": tmp_path / "local", "keep_local": 9, "monitor": "loss"}
    run = save_all(Run(tmp_path / "run", **options), {4: 2.0, 5: 1.0})
    run.wait(promoted=True)
    if is_new_job:
        run.close()
        run = Run(tmp_path / "run", **options)
        assert run.restore(state_of(0)) == 5
    run._promotion.cancel()
    run.save(5, state_of(9), metrics=metrics)
    assert run.best_step() == 4
    assert Run(tmp_path / "run", monitor="loss").best_step() == 5, "it is not promoted yet"


@pytest.mark.parametrize("is_new_job", [True, False])
@pytest.mark.parametrize("metrics", [{"loss": 9.0}, None], ids=["worse", "none"])
def test_the_metric_of_a_later_save_that_is_not_whole_does_not_count(
    metrics: dict[str, float] | None, is_new_job: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"local": tmp_path / "local", "keep_local": 9, "monitor": "loss"}
    run = save_all(Run(tmp_path / "run", **options), {4: 2.0, 5: 1.0})
    run.wait(promoted=True)
    if is_new_job:
        run.close()
        run = Run(tmp_path / "run", **options)
        assert run.restore(state_of(0)) == 5
    run._promotion.cancel()
    run.save(5, state_of(9), metrics=metrics)
    next((tmp_path / "local" / "step-5").glob("*.distcp")).unlink()
    state = state_of(0)
    assert run.restore(state) == 5
    assert state["w"].eq(state_of(5)["w"]).all()
    assert run.best_step() == 5


def test_a_restore_of_a_given_step_prefers_the_later_save(tmp_path: Path) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local", keep_local=9) as first:
        save_all(first, {5: 1.0})
    with Run(tmp_path / "run") as second:
        assert second.restore(state_of(0)) == 5
        second.save(5, state_of(7))
    state = state_of(0)
    third = Run(tmp_path / "run", local=tmp_path / "local")
    assert third.restore(state, step=5) == 5
    assert state["w"].eq(state_of(7)["w"]).all()


def test_metrics_survive_the_process_and_belong_to_their_step(tmp_path: Path) -> None:
    save_all(Run(tmp_path), LOSSES)
    assert metrics_of(Location(tmp_path / "step-10")) == {"loss": 3.0, "accuracy": -3.0}
    assert Run(tmp_path, monitor="accuracy", mode="max").best_step() == 20
    run = Run(tmp_path, monitor="loss", mode="max")
    assert run.best_step() == 50
    run.save(50, state_of(50))  # Without metrics: the old ones no longer apply.
    assert run.best_step() == 10
    (tmp_path / "step-40" / "metrics.json").write_text("{")
    (tmp_path / "step-10" / "metrics.json").write_text('["loss"]')
    with pytest.warns(UserWarning, match="is damaged"):
        assert run.best_step() == 20
    (tmp_path / "step-20" / ".metadata").unlink()  # No longer committed.
    assert run.best_step() is None


def _damage(step: Path) -> None:
    (data,) = step.glob("*.distcp")
    os.truncate(data, 5)


def test_the_next_best_step_remains_in_place_of_a_damaged_one(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1, keep_best=2, monitor="loss")
    save_all(run, {10: 3.0, 20: 1.0})
    _damage(tmp_path / "step-20")
    save_all(run, {30: 2.0, 40: 9.0})
    assert steps_in(tmp_path) == [10, 30, 40]


def test_a_damaged_step_is_not_the_best_one(tmp_path: Path) -> None:
    run = save_all(Run(tmp_path, monitor="loss"), {10: 3.0, 20: 1.0, 30: 2.0})
    _damage(tmp_path / "step-20")
    assert run.best_step() == 30
    assert run.restore(state_of(0), step=30) == 30  # Without a warning: it is the best one.
    _damage(tmp_path / "step-30")
    _damage(tmp_path / "step-10")
    assert run.best_step() is None


def test_a_best_step_that_cannot_be_read_remains_and_so_does_the_next_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, keep_last=1, keep_best=1, monitor="loss")
    save_all(run, {10: 3.0, 20: 1.0})
    read = Location.nbytes

    def nbytes(file: Location) -> int:
        if file.parent.name == "step-20":
            raise StorageError("the server does not answer", 5)
        return read(file)

    with monkeypatch.context() as broken:
        broken.setattr(Location, "nbytes", nbytes)
        save_all(run, {30: 2.0, 40: 9.0})
    assert steps_in(tmp_path) == [20, 30, 40]
    save_all(run, {50: 9.0})
    assert steps_in(tmp_path) == [20, 50]


def test_a_checkpoint_keeps_its_metrics_until_another_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_all(Run(tmp_path), {10: 3.0})
    with monkeypatch.context() as broken:
        broken.setattr(FastWriter, "finish", Mock(side_effect=OSError("no space")))
        with pytest.raises(BaseException, match="no space"):
            run.save(10, state_of(11), metrics={"loss": 1.0})
    assert metrics_of(Location(tmp_path / "step-10"))["loss"] == 3.0
    run.save(10, state_of(11), metrics={"loss": 2.0})
    assert metrics_of(Location(tmp_path / "step-10"))["loss"] == 2.0


def test_each_step_of_slow_background_saves_has_its_own_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = FastWriter.finish

    def finish_late(*arguments: Any, **named: Any) -> None:
        time.sleep(0.2)  # The next save has begun.
        finish(*arguments, **named)

    monkeypatch.setattr(FastWriter, "finish", finish_late)
    with Run(tmp_path, asynchronous=True, keep_best=1, keep_last=1, monitor="loss") as run:
        for step, loss in ((10, 1.0), (20, 3.0), (30, 2.5)):
            run.save(step, state_of(step), metrics={"loss": loss})
    assert steps_in(tmp_path) == [10, 30]
    assert metrics_of(Location(tmp_path / "step-30")) == {"loss": 2.5}


@pytest.mark.parametrize(
    "value", ["low", None, 10**400, torch.ones(2)], ids=["text", "none", "huge", "several"]
)
def test_a_metric_that_is_no_number_is_an_error_before_the_save(value: Any, tmp_path: Path) -> None:
    run = save_all(Run(tmp_path), {10: 3.0})
    with pytest.raises(ValueError, match="step 10 was not saved: metrics has no number as 'loss'"):
        run.save(10, state_of(11), metrics={"loss": value})
    state = state_of(-1)
    run.restore(state)
    assert state["w"][0] == 10
    (tmp_path / "step-10" / "metrics.json").write_text('{"loss": 1%s}' % ("0" * 400))
    assert metrics_of(Location(tmp_path / "step-10")) == {}


def test_steps_without_metrics_are_retained_as_usual(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_best=1, monitor="loss", keep_last=1)
    for step in (1, 2, 3):
        run.save(step, state_of(step), metrics={"loss": 0.5} if step == 1 else None)
    assert steps_in(tmp_path) == [1, 3]


def test_a_misspelt_metric_is_an_error_before_the_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass monitor"):
        Run(tmp_path, keep_best=1)
    with pytest.raises(ValueError, match="pass monitor"):
        Run(tmp_path).best_step()
    with pytest.raises(ValueError, match="mode='least' is not one of min, max"):
        Run(tmp_path, mode="least")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step 1 was not saved: metrics has no 'loss'"):
        Run(tmp_path, monitor="loss").save(1, state_of(1), metrics={"los": 1.0})
    assert steps_in(tmp_path) == []


# ---- Leases ----


def test_a_leased_step_is_removed_only_after_the_lease(tmp_path: Path) -> None:
    run = save_all(Run(tmp_path, keep_last=1), {1: 1.0})
    with Run(tmp_path).lease(1) as path:
        assert Path(path) == tmp_path / "step-1"
        save_all(run, {2: 1.0, 3: 1.0})
        assert steps_in(tmp_path) == [1, 3]
        loaded = state_of(-1)
        load(loaded, storage_reader=FastReader(path))
        assert loaded["w"][0] == 1
    save_all(run, {4: 1.0})
    assert steps_in(tmp_path) == [4]
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")]


LEASER = """
import os, sys, time
from torch_ckpt import Run
with Run(sys.argv[1]).lease(1):
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(50)
"""


def test_the_lease_of_another_process_protects_until_it_has_died_and_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_all(Run(tmp_path, keep_last=1), {1: 1.0})
    leased = tmp_path / "leased"
    with ThreadPoolExecutor() as pool:
        leaser = pool.submit(run_python, "-c", LEASER, tmp_path, leased, folder=tmp_path)
        until(lambda: leaser.done() or (leased.exists() and leased.read_text()))
        assert not leaser.done(), leaser.result()
        save_all(run, {2: 1.0})
        os.kill(int(leased.read_text()), signal.SIGKILL)
        assert leaser.result().returncode == -signal.SIGKILL
    with monkeypatch.context() as elsewhere:  # Another machine does not know that it has died.
        elsewhere.setattr(leases, "is_dead", lambda _: None)
        save_all(run, {3: 1.0})
        assert steps_in(tmp_path) == [1, 3]
    assert list(tmp_path.glob(".lease-*"))
    monkeypatch.setattr(leases, "LEASE_S", 0.0)
    (tmp_path / ".pending-0123456789abcdef").write_text("of a renewal that was killed")
    save_all(run, {4: 1.0})
    assert not list(tmp_path.glob(".lease-*"))
    assert not list(tmp_path.glob(".pending-*"))
    save_all(run, {5: 1.0})
    assert steps_in(tmp_path) == [5]


def test_a_lease_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_RENEW_S", 0.01)
    save_all(Run(tmp_path), {1: 1.0})
    with Run(tmp_path).lease(1):
        (file,) = tmp_path.glob(".lease-1-*")
        first = file.stat().st_mtime_ns
        end = time.monotonic() + 20
        while file.stat().st_mtime_ns == first and time.monotonic() < end:
            time.sleep(0.01)
        assert file.stat().st_mtime_ns > first


@pytest.mark.parametrize("age_s", [-1000, 1000], ids=["future", "past"])
def test_an_old_lease_protects_nothing_whatever_it_contains(age_s: int, tmp_path: Path) -> None:
    run = save_all(Run(tmp_path, keep_last=1), {1: 1.0})
    lease = tmp_path / ".lease-1-00"
    lease.touch()  # Empty, as a power cut leaves it.
    then = time.time() - age_s
    os.utime(lease, (then, then))
    save_all(run, {2: 1.0})
    assert steps_in(tmp_path) == [2]
    assert not lease.exists()


def test_a_lease_protects_by_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_all(Run(tmp_path, keep_last=1), {1: 1.0})
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)  # This machine is an hour ahead.
    with Run(tmp_path).lease(1):
        save_all(run, {2: 1.0})
        assert steps_in(tmp_path) == [1, 2]
    save_all(run, {3: 1.0})
    assert steps_in(tmp_path) == [3]
    assert not list(tmp_path.glob(".*"))


def test_a_step_that_is_not_there_cannot_be_leased(tmp_path: Path) -> None:
    (tmp_path / "step-2").mkdir()
    for step in (1, 2):
        with pytest.raises(NotFoundError, match=f"cannot lease step {step} of"):
            Run(tmp_path).lease(step).__enter__()
    assert not list(tmp_path.glob(".*"))


def test_a_lease_that_begins_during_a_removal_wins_or_raises(tmp_path: Path) -> None:
    save_all(Run(tmp_path), {1: 1.0})
    path = Location(tmp_path / "step-1")
    assert remove_directories([path], leased=lambda: [path]).leased == [path]
    assert steps_in(tmp_path) == [1]
    seen: list[str] = []

    def lease_often() -> None:
        while (tmp_path / "step-1").exists() or "left" not in seen:
            try:
                with Run(tmp_path).lease(1) as path:
                    seen.append("leased")
                    load(state_of(-1), storage_reader=FastReader(path), no_dist=True)
            except NotFoundError:
                seen.append("left")

    leaser = threading.Thread(target=lease_often)
    leaser.start()
    location = Location(tmp_path)
    while steps_in(tmp_path):
        if 1 not in leased_steps(location):
            remove_directories([path], leased=lambda: leased_paths(location))
    leaser.join()
    assert "left" in seen


# ---- watch ----


def watch(run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_ckpt.cli.main", "watch", str(run), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_watch_runs_a_command_on_each_step(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    save_all(Run(run), {1: 1.0, 3: 1.0, 12: 1.0})
    (run / "step-20").mkdir()  # Not committed.
    done = watch(run, "--once", "--exec", "echo 'step {step}' {path}")
    assert (done.returncode, done.stdout) == (0, f"step 12 {run}/step-12\n")
    done = watch(run, "--once", "--all", "--exec", "sh -c 'echo $TORCH_CKPT_STEP; ls $PWD'")
    assert [line for line in done.stdout.split() if line.isdigit()] == ["1", "3", "12"]
    leases = watch(run, "--once", "--exec", f"sh -c 'ls -A \"{run}\" | grep lease'")
    assert leases.stdout.startswith(".lease-12-")
    assert not list(run.glob(".lease-*"))


def test_watch_reports_commands_that_fail_and_goes_on(tmp_path: Path) -> None:
    save_all(Run(tmp_path), {1: 1.0, 2: 1.0})
    done = watch(tmp_path, "--once", "--all", "--exec", "sh -c 'exit {step}'")
    assert done.returncode == 3
    assert [line.split(": ")[1:] for line in done.stderr.splitlines()] == [
        ["step 1", "sh ended with 1"],
        ["step 2", "sh ended with 2"],
    ]
    done = watch(tmp_path, "--once", "--exec", "no-such-program {path}")
    assert done.returncode == 3
    assert "cannot run no-such-program: No such file" in done.stderr


def test_watch_finds_steps_that_appear_while_it_waits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch_ckpt.cli.main", "watch", str(tmp_path)]
    options = ["--interval", "0.05", "--until-step", "20", "--exec", "echo {step}"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        run = Run(tmp_path)
        for step in (10, 20):
            run.save(step, state_of(step))
            assert watching.stdout.readline() == f"{step}\n"
        assert watching.wait(20) == 0


def test_watch_passes_over_steps_that_the_run_has_left(tmp_path: Path) -> None:
    run = save_all(Run(tmp_path), {1: 1.0, 5: 1.0, 7: 1.0})
    with pytest.warns(UserWarning, match="is newer"):
        run.save(2, state_of(2))
    run.save(3, state_of(3))
    options = ["--until-step", "4", "--once", "--exec", "echo {step}"]
    assert watch(tmp_path, *options).stdout == "3\n"
    assert watch(tmp_path, "--all", *options).stdout == "1\n2\n3\n"


def test_watch_finds_a_lower_step_of_a_run_that_resumed_earlier(tmp_path: Path) -> None:
    run = save_all(Run(tmp_path), {10: 1.0, 30: 1.0})
    command = [sys.executable, "-m", "torch_ckpt.cli.main", "watch", str(tmp_path)]
    options = ["--interval", "0.05", "--exec", "echo {step}"]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        threading.Timer(60, watching.kill).start()  # Otherwise a step that is missed is awaited.
        assert watching.stdout.readline() == "30\n"
        for step in (20, 30):
            run.save(step, state_of(step))
            assert watching.stdout.readline() == f"{step}\n"
        again = Run(tmp_path)
        assert again.restore(state_of(0)) == 30
        again.save(30, state_of(31))
        assert watching.stdout.readline() == "30\n"
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 130
        assert "torch-ckpt:" not in watching.stderr.read()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_watch_ends_by_an_interrupt_that_a_destructor_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(Run(tmp_path), {10: 1.0})

    class Interrupted:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    def run(*_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        Interrupted()
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr("torch_ckpt.cli.watch.subprocess.run", run)
    before = signal.getsignal(signal.SIGINT)
    assert main(["watch", str(tmp_path), "--once", "--exec", "true"]) == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_better_steps_of_a_branch_that_was_left_do_not_count_as_the_best_ones(
    tmp_path: Path,
) -> None:
    save_all(Run(tmp_path), {1: 0.5, 2: 0.6, 3: 0.1})

    run = Run(tmp_path, keep_best=1, monitor="loss")
    with pytest.warns(UserWarning, match="step 3 .* is newer"):
        run.save(2, state_of(2), metrics={"loss": 0.7})

    assert steps_in(tmp_path) == [1, 2, 3]
