"""A run with a local directory: saves commit there, and steps are promoted in the background."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command import run_command
from support.flips import flipped
from waits import until

from torch_ckpt import CheckpointError, Run, save
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import index_name
from torch_ckpt.ladder.promotion import OldSteps
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import committed_steps
from torch_ckpt.storage.copying import CheckpointCopy
from torch_ckpt.storage.writer import FastWriter

MODES: dict[str, dict[str, Any]] = {
    "direct": {},
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
}


def _state(step: int, nbytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.rand(nbytes // 4, generator=generator), "step": torch.tensor(step)}


def _restored(run: Run) -> int | None:
    state = _state(0)
    step = run.restore(state)
    if step is not None:
        assert torch.equal(state["w"], _state(step)["w"])
    return step


def _steps(directory: Path) -> list[int]:
    return committed_steps(Location(directory))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_saved_locally_and_promoted_and_stock_reads_both(
    tmp_path: Path, mode: str, memory: Path
) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local", **MODES[mode]) as run:
        run.save(1, _state(1))
        run.wait()
        assert _steps(tmp_path / "local") == [1]
        run.wait(promoted=True)
        assert _steps(tmp_path / "run") == [1]
    for directory in ("run", "local"):
        state = _state(0)
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / directory / "step-1"))
        assert torch.equal(state["w"], _state(1)["w"])
        assert not [p for p in (tmp_path / directory / "step-1").iterdir() if "pending" in p.name]


@pytest.mark.parametrize("mode", ["direct", "thread"])
def test_a_wait_for_promotion_may_end_before_it(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    commit: tuple[type, str] = (CheckpointCopy, "commit")
    if mode == "thread":
        commit = (FastWriter, "finish")
    original = getattr(*commit)

    def gated(*arguments: Any, **options: Any) -> Any:
        assert goes_on.wait(60)
        return original(*arguments, **options)

    monkeypatch.setattr(*commit, gated)
    with Run(tmp_path / "run", local=tmp_path / "local", **MODES[mode]) as run:
        run.save(1, _state(1))
        assert not run._saves.wait_for_promotion(0.2, must_end=False)
        with pytest.raises(CheckpointError, match=r"still being .* after a wait of 0\.2 s"):
            run._saves.wait_for_promotion(0.2)
        assert _steps(tmp_path / "run") == []
        goes_on.set()
        assert run._saves.wait_for_promotion(60, must_end=False)
        assert _steps(tmp_path / "run") == [1]


@pytest.mark.parametrize("call", [OldSteps.whole_in_run, CheckpointCopy.copy_files])
def test_the_end_of_a_run_does_not_wait_for_storage_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], Any]
) -> None:
    def promotions() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("torch_ckpt-promote")}

    goes_on, before = threading.Event(), promotions()

    def gated(owner: Any) -> Any:
        if (tmp_path / "local" / "step-1").exists():
            goes_on.wait(6)
        return call(owner)

    owner = OldSteps if call is OldSteps.whole_in_run else CheckpointCopy
    monkeypatch.setattr(owner, call.__name__, gated)
    monkeypatch.setattr("torch_ckpt.ladder.promotion_wait.END_S", 0.1)
    run = Run(tmp_path / "run", local=tmp_path / "local", timeout_s=0.5)
    run.save(1, _state(1))
    where = re.escape(f"machine {socket.gethostname()}, {tmp_path}/local: the promotion of step 1")
    with pytest.raises(CheckpointError, match=f"nothing was copied for 0.5 s: {where}"):
        run.close()
    goes_on.set()
    until(lambda: promotions() <= before)
    with Run(tmp_path / "run", local=tmp_path / "local") as again:
        assert _restored(again) == 1
    assert _steps(tmp_path / "run") == [1]


def test_the_end_of_a_run_waits_for_a_slow_promotion_while_bytes_arrive(tmp_path: Path) -> None:
    rate, timeout_s = 2 << 20, 1.5
    with Run(
        tmp_path / "run", local=tmp_path / "local", promote_bytes_per_s=rate, timeout_s=timeout_s
    ) as run:
        run.save(1, _state(1, 5 << 20))
        begin = time.monotonic()
    assert time.monotonic() - begin > timeout_s
    assert _steps(tmp_path / "run") == [1]


def test_steps_are_removed_locally_once_promoted_and_in_the_run_by_its_retention(
    tmp_path: Path,
) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local", keep_local=2, keep_last=3) as run:
        for step in range(1, 7):
            run.save(step, _state(step))
            run.wait(promoted=True)
        assert _steps(tmp_path / "local") == [6, 5]
        assert _steps(tmp_path / "run") == [6, 5, 4]


def test_a_commit_that_fails_leaves_nothing_that_no_retention_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, run = (StepDirectories(Location(tmp_path / name)) for name in ("local", "run"))
    for step in (1, 2):
        save(_state(step), checkpoint_id=tmp_path / "local" / f"step-{step}", no_dist=True)
    with monkeypatch.context() as full:
        _fail_commits(full)
        copy = CheckpointCopy(local.path(1), run.path(1))
        copy.copy_files()
        with pytest.raises(StorageError):
            copy.commit()
    local.path(1).remove_all()  # So nobody tries again.
    assert run.path(1).names()
    copy = CheckpointCopy(local.path(2), run.path(2))
    copy.copy_files()
    copy.commit()
    Retention(keep_last=1).apply(run, 2)
    assert run.directory.names() == ["step-2"]


def test_damaged_metadata_and_a_damaged_index_are_not_promoted(
    tmp_path: Path, rng: random.Random
) -> None:
    local, run = Location(tmp_path / "local" / "step-1"), Location(tmp_path / "run" / "step-1")
    save(_state(1), checkpoint_id=local.checkpoint_id, no_dist=True)
    for path in [local / name for name in local.names() if not name.endswith(".distcp")]:
        whole = path.read()
        for at in {0, len(whole) - 1, *rng.sample(range(len(whole)), 40)}:
            path.replace(flipped(whole, at, rng.randrange(8)), sync=False)
            with pytest.raises(CheckpointError):
                CheckpointCopy(local, run)
        path.replace(whole, sync=False)
    CheckpointCopy(local, run)


def _fail_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index cannot be written, since there is a directory of its name, which is removed."""
    commit = CheckpointTransaction.commit

    def fail(self: CheckpointTransaction, *args: Any) -> None:
        assert self.target.local_path is not None
        obstacle = self.target.local_path / index_name(self.save_id)
        obstacle.mkdir()
        commit(self, *args)

    monkeypatch.setattr(CheckpointTransaction, "commit", fail)


def test_the_nearest_directory_serves_and_the_other_one_if_it_is_lost(tmp_path: Path) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local", keep_last=3) as run:
        for step in (1, 2):
            run.save(step, _state(step))
    (tmp_path / "run" / "step-2" / ".metadata").unlink()
    with Run(tmp_path / "run", local=tmp_path / "local") as run:
        assert _restored(run) == 2
    Location(tmp_path / "local").remove_all()
    with Run(tmp_path / "run", local=tmp_path / "local") as run:
        assert run.latest_step() == 2  # It was promoted again.
        assert _restored(run) == 2


def test_a_local_directory_of_another_run_is_refused_and_its_steps_are_not_restored(
    tmp_path: Path,
) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local") as run:
        run.save(7, _state(7))
    Location(tmp_path / "run").remove_all()
    with pytest.raises(CheckpointError, match=r"its 1 steps are of run .* was removed"):
        Run(tmp_path / "run", local=tmp_path / "local")
    with Run(tmp_path / "run") as other:
        other.save(1, _state(1))
    with pytest.raises(CheckpointError, match=r"cannot use .*local as the local directory"):
        Run(tmp_path / "run", local=tmp_path / "local")
    with pytest.raises(CheckpointError, match="of another run"):  # Nor that of a run without one.
        Run(tmp_path / "elsewhere", local=tmp_path / "run")
    Location(tmp_path / "local").remove_all()
    with Run(tmp_path / "run", local=tmp_path / "local") as run:
        assert _restored(run) == 1


def test_a_moved_local_directory_and_a_new_machine_go_on_with_the_run(tmp_path: Path) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local") as run:
        run.save(1, _state(1))
    (tmp_path / "local").rename(tmp_path / "moved")
    for local in ("moved", "new"):
        with Run(tmp_path / "run", local=tmp_path / local) as run:
            assert _restored(run) == 1


def test_the_newest_step_is_promoted_first_and_one_that_would_not_remain_is_skipped(
    tmp_path: Path,
) -> None:
    # Copying a step takes two seconds.
    rate = 512 << 10
    run = Run(tmp_path / "run", local=tmp_path / "local", keep_last=2, promote_bytes_per_s=rate)
    for step in range(1, 7):
        run.save(step, _state(step, 1 << 20))
        assert 1 in _steps(tmp_path / "local")  # It is being promoted: its last whole copy.
    assert _steps(tmp_path / "run") == []
    run.close()
    assert _steps(tmp_path / "run") == [6, 5]
    assert run.unpromoted == 3  # Steps 2, 3 and 4.
    assert _steps(tmp_path / "local") == [6]


@pytest.mark.parametrize(("nbytes", "rate"), [(24 << 20, 24 << 20), (400_000, 800_000)])
def test_the_rate_is_kept(nbytes: int, rate: int, tmp_path: Path) -> None:
    begin = time.monotonic()
    with Run(tmp_path / "run", local=tmp_path / "local", promote_bytes_per_s=rate) as run:
        run.save(1, _state(1, nbytes))
    lasted = time.monotonic() - begin
    assert lasted > nbytes / rate


def test_an_interrupted_promotion_goes_on_where_it_ended(tmp_path: Path) -> None:
    local, directory = tmp_path / "local", tmp_path / "run"
    run = Run(directory, local=local, writer={"thread_count": 4}, promote_bytes_per_s=24 << 20)
    state = {f"w{i}": torch.full((2 << 20,), float(i)) for i in range(8)}  # 64 MiB in 4 files.
    run.save(1, state)
    while not list(directory.glob("step-1/__*.distcp")):
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="training failed"), run:
        raise RuntimeError("training failed")  # The run does not wait for the promotion.
    arrived = {path: path.stat().st_ino for path in directory.glob("step-1/__*.distcp")}
    assert 0 < len(arrived) < 4
    with Run(directory, local=local):
        pass
    assert {path: path.stat().st_ino for path in arrived} == arrived
    found = {name: torch.zeros(2 << 20) for name in state}
    with Run(directory) as restored:
        assert restored.restore(found) == 1
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert sorted(path.suffix for path in (directory / "step-1").iterdir()) == sorted(
        path.suffix for path in (local / "step-1").iterdir()
    )


def test_a_damaged_local_step_is_not_promoted(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "run", local=tmp_path / "local", keep_local=2, on_failure="warn", max_failures=9
    )
    run.save(1, _state(1))
    run.wait(promoted=True)
    run._promotion.cancel()  # type: ignore[union-attr]
    run.save(2, _state(2))
    (file,) = (tmp_path / "local" / "step-2").glob("__*.distcp")
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"step 2 was not promoted.*checksum of the block"):
        Run(tmp_path / "run", local=tmp_path / "local").close()
    assert _steps(tmp_path / "run") == [1]
    with Run(tmp_path / "run", local=tmp_path / "local", on_failure="warn") as again:
        with pytest.warns(UserWarning, match="step 2 is passed over"):
            assert _restored(again) == 1
        again.save(3, _state(3))


@pytest.mark.parametrize("name", MODES)
def test_saves_succeed_again_after_an_outage_has_filled_the_local_disk(
    tmp_path: Path, small_disk: Path, memory: Path, name: str
) -> None:
    """The promotions that free the disk do not wait for a save that succeeds."""
    run = Run(
        *(tmp_path / "run",),
        **{"local": small_disk / "local", "on_failure": "warn", "max_failures": 999},
        **{"reuse": "off", **MODES[name]},
    )

    def save(step: int) -> bool:
        run.save(step, {"w": torch.full((1 << 19,), float(step))})
        with contextlib.suppress(StorageError):
            run.wait()
        return step in _steps(small_disk / "local")

    assert save(1)
    run.wait(promoted=True)
    (tmp_path / "run").rename(tmp_path / "not mounted")
    steps = itertools.count(2)
    until(lambda: not save(next(steps)))
    (tmp_path / "not mounted").rename(tmp_path / "run")
    until(lambda: save(next(steps)))
    run.close()
    assert set(_steps(tmp_path / "run")) >= {1, 2, next(steps) - 1}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_while_the_directory_of_the_run_is_full(
    tmp_path: Path,
    small_disk: Path,
    asynchronous: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filler = small_disk / "filler"
    run = Run(
        small_disk / "run",
        local=tmp_path / "local",
        keep_last=2,
        on_failure="warn",
        asynchronous=asynchronous,
    )
    filler.write_bytes(bytes(_free(small_disk) - (64 << 10)))
    for step in range(1, 6):
        assert run.save(step, _state(step))
        run.wait()
        until(lambda step=step: run.failures == step and len(_steps(tmp_path / "local")) <= 2)
    assert run.failures == 5
    assert _steps(small_disk / "run") == []
    warned = [each for each in caplog.records if "was not promoted" in each.getMessage()]
    assert len(warned) == 1
    assert "No space left" in warned[0].getMessage()
    monkeypatch.setattr("torch_ckpt.ladder.failures.MIN_OUTAGE_S", 0.0)
    with pytest.raises(CheckpointError, match=r"was not promoted to .*No space left"):
        run.save(6, _state(6))
    filler.unlink()
    run.close()  # Tries once more.
    assert _steps(small_disk / "run") == [5, 4]


def test_a_failed_promotion_is_raised_by_the_next_save_by_default(
    tmp_path: Path, small_disk: Path
) -> None:
    run = Run(small_disk / "run", local=tmp_path / "local")
    filler = small_disk / "filler"
    filler.write_bytes(bytes(_free(small_disk) - (64 << 10)))
    run.save(1, _state(1))
    failed = r"step 1 was not promoted to .*No space left"
    with pytest.raises(CheckpointError, match=failed):
        run.wait(promoted=True)
    with pytest.raises(CheckpointError, match=failed):
        run.save(2, _state(2))
    with pytest.raises(CheckpointError, match="step 1 was not promoted"):
        run.close()
    filler.unlink()
    with Run(small_disk / "run", local=tmp_path / "local") as run:
        assert _restored(run) == 1
    assert _steps(small_disk / "run") == [1]


def test_steps_are_discarded_in_both_directories(tmp_path: Path) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local", keep_local=3) as run:
        for step in (1, 2, 3):
            run.save(step, _state(step))
        run.wait(promoted=True)
        assert run.discard_after(1) == [3, 2]
        assert _steps(tmp_path / "local") == _steps(tmp_path / "run") == [1]
        assert _restored(run) == 1
        run.save(2, _state(12))  # Other values under a step that was promoted before.
    state = _state(0)
    with Run(tmp_path / "run") as promoted:
        assert promoted.restore(state) == 2
    assert torch.equal(state["w"], _state(12)["w"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_leased", [False, True])
def test_a_step_that_newer_ones_had_displaced_in_the_run_is_promoted_again_once_they_are_discarded(
    tmp_path: Path, mode: str, is_leased: bool
) -> None:
    """The directory of the run had removed it, and the local one had not."""
    run, local = tmp_path / "run", tmp_path / "local"
    keep = {"keep_last": 1, "keep_local": 1 if is_leased else 3}
    with Run(run, local=local, **keep, **MODES[mode]) as training:
        for step in (1, 2, 3):
            training.save(step, _state(step))
        training.wait(promoted=True)
        with training.lease(3) if is_leased else contextlib.nullcontext():
            for step in (4, 5):
                training.save(step, _state(step))
                training.wait(promoted=True)
            assert 3 not in committed_steps(Location(run))
            assert 5 in training.discard_after(3)
            training.wait(promoted=True)
            assert committed_steps(Location(run)) == [3]
    shutil.rmtree(local)
    with Run(run, local=local) as training:
        restored = _state(0)
        assert training.restore(restored) == 3
        assert torch.equal(restored["w"], _state(3)["w"])


def test_each_discard_promotes_what_it_uncovers(tmp_path: Path) -> None:
    """Also steps that a promotion has skipped because newer ones were there."""
    run = tmp_path / "run"
    with Run(run, local=tmp_path / "local", keep_last=2, keep_local=6) as training:
        for step in range(1, 7):
            training.save(step, _state(step))
            training.wait(promoted=True)
        for discarded, remaining in [(5, [5, 4]), (3, [3, 2]), (1, [1])]:
            training.discard_after(discarded)
            training.wait(promoted=True)
            assert committed_steps(Location(run)) == remaining


def test_a_failed_promotion_of_a_discarded_step_is_not_raised(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", local=tmp_path / "local", keep_local=3)
    run.save(1, _state(1))
    run.wait(promoted=True)
    (tmp_path / "run").rename(tmp_path / "gone")
    (tmp_path / "run").touch()
    run.save(2, _state(2))
    with pytest.raises(CheckpointError, match="step 2 was not promoted"):
        run.wait(promoted=True)
    (tmp_path / "run").unlink()
    (tmp_path / "gone").rename(tmp_path / "run")
    assert run.discard_after(1) == [2]
    run.save(3, _state(3))
    run.close()
    assert _steps(tmp_path / "run") == [3, 1]


def test_a_step_that_is_saved_again_is_promoted_again(tmp_path: Path) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local") as run:
        for values in (1, 2):
            run.save(5, _state(values))
            run.wait(promoted=True)
    state = _state(0)
    with Run(tmp_path / "run") as promoted:
        promoted.restore(state)
    assert torch.equal(state["w"], _state(2)["w"])


def test_a_step_whose_second_save_has_failed_is_promoted_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is full", errno.ENOSPC)

    run = Run(tmp_path / "run", local=tmp_path / "local", on_failure="warn")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointCopy, "commit", refuse)
        run.save(1, _state(1))
        until(lambda: run.failures)
    with monkeypatch.context() as patch:
        patch.setattr("torch_ckpt.runs.step_saves.save", refuse)
        with pytest.raises(StorageError, match="the disk is full"):
            run.save(1, _state(2))
    run.close()
    assert _steps(tmp_path / "run") == [1]


_EXITS = """
import sys, time, torch
from pathlib import Path
from torch_ckpt import Run
folder = sys.argv[1]
run = Run(f"{folder}/run", local=f"{folder}/local", promote_bytes_per_s=60 << 20)
run.save(1, {"w": torch.zeros(16 << 20)})
while not list(Path(folder).glob("run/step-1/.pending-*")):
    time.sleep(0.01)
sys.exit(3)
"""


def test_a_process_that_exits_without_close_does_not_abort(tmp_path: Path, full: bool) -> None:
    for number in range(3 if full else 1):
        ended = subprocess.run(
            [sys.executable, "-c", _EXITS, tmp_path / str(number)], stderr=subprocess.PIPE
        )
        assert ended.returncode == 3, ended.stderr


@pytest.mark.parametrize("thread_count", [1, 4])
def test_a_step_that_is_saved_again_while_it_is_promoted_is_promoted_with_the_new_values(
    tmp_path: Path, thread_count: int
) -> None:
    # Copying takes about two seconds. One file is open meanwhile; of several, the later are gone.
    run = Run(
        tmp_path / "run",
        local=tmp_path / "local",
        promote_bytes_per_s=32 << 20,
        writer={"thread_count": thread_count},
    )
    state = {f"w{i}": torch.ones(4 << 20) for i in range(4)}
    run.save(5, state)
    while not list((tmp_path / "run").glob("step-5/.pending-*")):
        time.sleep(0.01)
    for value in state.values():
        value.fill_(2)
    run.save(5, state)
    run.close()
    with Run(tmp_path / "run") as promoted:
        found = {name: torch.zeros(4 << 20) for name in state}
        assert promoted.restore(found) == 5
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_step_that_is_saved_again_without_metrics_has_none_in_the_run(tmp_path: Path) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local") as run:
        run.save(1, _state(1), metrics={"loss": 1.0})
        run.wait(promoted=True)
        assert (tmp_path / "run" / "step-1" / "metrics.json").exists()
        run.save(1, _state(2))
    assert not (tmp_path / "run" / "step-1" / "metrics.json").exists()


@pytest.mark.parametrize(
    "use",
    [
        lambda run: run.save(3, _state(3)),
        lambda run: run.restore(_state(0)),
        lambda run: run.latest_step(),
        lambda run: run.step_at("2999-01-01"),
        lambda run: run.discard_after(1),
        lambda run: run.lease(1).__enter__(),
    ],
    ids=["save", "restore", "latest_step", "step_at", "discard_after", "lease"],
)
def test_a_run_whose_local_directory_another_run_has_taken_over_does_not_use_it(
    use: Callable[[Run], object], tmp_path: Path
) -> None:
    first = Run(tmp_path / "first", local=tmp_path / "local", keep_local=3)
    with Run(tmp_path / "second", local=tmp_path / "local", keep_local=3) as second:
        second.save(1, _state(1))
        second.save(2, _state(2))
        with pytest.raises(CheckpointError, match=r"cannot use .*local: it belongs to run"):
            use(first)
    assert _steps(tmp_path / "second") == [2, 1]
    assert _steps(tmp_path / "local") == [2, 1]
    with contextlib.suppress(CheckpointError):
        first.close()  # It does not promote the other run's steps.
    assert _steps(tmp_path / "first") == []


def test_an_error_of_a_damaged_id_does_not_state_that_the_directory_was_removed(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run", local=tmp_path / "local")
    (tmp_path / "run" / "run-id").write_text("damaged")
    run.save(1, _state(1))
    with pytest.raises(
        CheckpointError, match=r"cannot use .*run: it has no sound run-id, for exam"
    ):
        run.wait(promoted=True)
    with pytest.raises(CheckpointError, match=r"run has no sound run-id: it may be new"):
        Run(tmp_path / "run", local=tmp_path / "local")


def test_steps_are_not_promoted_to_the_directory_of_another_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", local=tmp_path / "local")
    run.save(1, _state(1))
    run.wait(promoted=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    run.save(2, _state(2))
    with pytest.raises(CheckpointError, match=r"step 2 was not promoted.*was removed or moved"):
        run.wait(promoted=True)
    assert not (tmp_path / "run").exists()
    other = Run(tmp_path / "run", local=tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"step 2 was not promoted.*belongs to run"):
        run.close()
    other.close()
    assert _steps(tmp_path / "run") == []


@pytest.mark.parametrize("moment", ["between saves", "within a save"])
def test_a_local_directory_that_was_removed_meanwhile_is_used_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    run = Run(tmp_path / "run", local=local, keep_local=2, on_failure="warn")
    run.save(1, _state(1))
    run.wait(promoted=True)
    if moment == "between saves":
        shutil.rmtree(local)
        run.save(2, _state(2))
    else:
        with monkeypatch.context() as patch:
            begin = FastWriter.set_up_storage_writer

            def remove(writer: FastWriter, *args: Any, **options: Any) -> None:
                shutil.rmtree(local)
                begin(writer, *args, **options)

            patch.setattr(FastWriter, "set_up_storage_writer", remove)
            run.save(2, _state(2))
    run.save(3, _state(3))
    run.close()
    assert _steps(tmp_path / "run") == [3, 2, 1]
    assert _steps(local) == [3, 2]
    with Run(tmp_path / "run", local=local) as run:
        assert run.restore(_state(0)) == 3
        (local / "local-of").unlink()
        run.save(4, _state(4))
        assert (local / "local-of").exists()


def test_best_steps_remain_in_both_directories(tmp_path: Path) -> None:
    values = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 2.0}
    options = {"keep_last": 1, "keep_best": 1, "monitor": "loss"}
    with Run(tmp_path / "run", local=tmp_path / "local", **options) as run:  # type: ignore[arg-type]
        for step, value in values.items():
            run.save(step, _state(step), metrics={"loss": value})
        run.wait(promoted=True)
        assert run.best_step() == 2
        assert _steps(tmp_path / "run") == [5, 2]
        assert _steps(tmp_path / "local") == [5]
        with run.lease(2) as path:
            assert Path(path) == tmp_path / "run" / "step-2"
        with run.lease(5) as path:
            assert Path(path) == tmp_path / "local" / "step-5"


def test_a_store_gets_the_same_files(tmp_path: Path) -> None:
    for url in ("memory://promotion/run",):
        with Run(url, local=tmp_path / "local", keep_last=2, keep_local=2) as run:
            for step in (1, 2, 3):
                run.save(step, _state(step))
        local = Location(tmp_path / "local")
        for step in _steps(tmp_path / "local"):
            here = local / f"step-{step}"
            there = Location(url) / f"step-{step}"
            assert here.names() == there.names()
            assert all((here / name).read() == (there / name).read() for name in here.names())
        Location(tmp_path / "local").remove_all()
        with Run(url, local=tmp_path / "local") as run:
            assert _restored(run) == 3


def test_ls_of_the_local_directory_shows_where_each_step_is(tmp_path: Path) -> None:
    with Run(tmp_path / "run", local=tmp_path / "local", keep_last=2) as run:
        run.save(1, _state(1))
        run.wait(promoted=True)
        run.save(2, _state(2))
    Location(tmp_path / "run" / "step-2").remove_all()
    status, printed = run_command("ls", tmp_path / "local")
    assert status == 0
    _, newest, older = printed.splitlines()
    assert "files present (local), newest" in newest
    assert "files present (run)" in older
    _, printed = run_command("ls", "--json", tmp_path / "local")
    assert [step["tiers"] for step in json.loads(printed)["steps"]] == [["local"], ["run"]]
    (file,) = (tmp_path / "local" / "step-2").glob("__*.distcp")
    os.truncate(file, 10)
    status, printed = run_command("ls", tmp_path / "local")
    assert status == 1
    assert "damaged" in printed


def test_a_stale_local_directory_replaces_no_step_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(tmp_path / "run", local=tmp_path / "old", keep_local=2) as run:
        for step in (1, 2):
            run.save(step, _state(step))
    Location(tmp_path / "run" / "step-2").remove_all()
    with Run(tmp_path / "run", local=tmp_path / "new") as run:
        for step in (2, 3):
            run.save(step, _state(10 * step))
    with Run(tmp_path / "run", local=tmp_path / "old") as run:
        assert run.latest_step() == 3
    assert "steps [2] of" in caplog.text
    state = _state(0)
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "run" / "step-2"))
    assert torch.equal(state["w"], _state(20)["w"])


def test_numbers_and_directories_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_local=0 is not positive"):
        Run(tmp_path / "run", local=tmp_path / "local", keep_local=0)
    with pytest.raises(ValueError, match="promote_bytes_per_s=0 is not positive"):
        Run(tmp_path / "run", local=tmp_path / "local", promote_bytes_per_s=0)
    with pytest.raises(ValueError, match="is the directory of the run itself"):
        Run(tmp_path / "run", local=tmp_path / "run")


@pytest.mark.parametrize("folder", [".", "run", "new"])
def test_the_directory_of_the_run_under_another_mount_is_no_local_directory(
    mount_tmpfs: Callable[[str], Path], tmp_path: Path, folder: str
) -> None:
    disk, other = mount_tmpfs("size=8m"), tmp_path / "bound"
    (disk / "run").mkdir()
    other.mkdir()
    subprocess.run(["mount", "--bind", disk, other], check=True)
    try:
        with pytest.raises(ValueError, match="is the directory of the run itself"):
            Run(disk / folder, local=other / folder)
        with Run(disk / "run", local=other / "local", keep_last=2) as run:
            run.save(1, {"w": torch.ones(3)})
    finally:
        subprocess.run(["umount", other], check=True)


def _free(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_bsize


def test_a_damaged_step_takes_no_place_among_the_best_ones_that_are_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(copy: CheckpointCopy) -> None:
        raise StorageError("the store is down", errno.EIO)

    local = tmp_path / "local"
    options: dict[str, Any] = {"keep_last": 1, "keep_best": 1, "monitor": "loss"}
    run = Run(tmp_path / "run", local=local, on_failure="warn", **options)
    with run, monkeypatch.context() as patch:
        patch.setattr(CheckpointCopy, "copy_files", fail)
        run.save(1, {"w": torch.ones(1000)}, metrics={"loss": 0.1})
        (data,) = (local / "step-1").glob("*.distcp")
        data.write_bytes(data.read_bytes()[:-100])
        run.save(2, {"w": torch.ones(1000)}, metrics={"loss": 0.2})
        run.save(3, {"w": torch.ones(1000)}, metrics={"loss": 0.3})
        with pytest.raises(StorageError, match="the store is down"):
            run.wait(promoted=True)
    assert set(committed_steps(Location(tmp_path / "run"))) == {2, 3}
