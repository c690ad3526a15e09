"""A save that fails leaves no directory of its step, in every mode of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.run_steps import names_in_run, save_steps, steps_in
from waits import until

import torch_ckpt
from torch_ckpt import FastWriter, Run
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.errors import RankTimeoutError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import metrics_of
from torch_ckpt.runs import step_saves
from torch_ckpt.runs.step_boundary import StepBoundary

pytestmark = pytest.mark.timeout(120)

MODES: dict[str, dict[str, Any]] = {
    "direct": {},
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
}


def large_state() -> dict[str, Any]:
    """More bytes than the small disk has."""
    return {"w": torch.ones(3 << 20)}


def names_in(directory: Path) -> list[str]:
    """The steps of a run, without its own files, or the files of a step."""
    names = names_in_run(directory)
    return sorted(name for name in names if not name.startswith(".lease") and name != "run-id")


def fails(run: Run, step: int, state: dict[str, Any], **options: Any) -> None:
    def save() -> None:
        run.save(step, state, **options)
        run.wait()

    with pytest.raises(BaseException, match=r"No space left|too little"):
        save()


@pytest.mark.parametrize("metrics", [None, {"loss": 1.0}], ids=["", "metrics"])
@pytest.mark.parametrize("mode", MODES)
def test_a_save_that_fails_leaves_no_directory(
    mode: str, metrics: dict[str, float] | None, small_disk: Path, memory: Path
) -> None:
    with Run(small_disk / "run", **MODES[mode]) as run:
        fails(run, 7, large_state(), metrics=metrics)
        run.save(8, {"w": torch.ones(3)}, metrics=metrics)
    assert names_in(small_disk / "run") == ["step-8"]
    assert metrics_of(Location(small_disk / "run/step-8")) == (metrics or {})
    assert Run(small_disk / "run").latest_step() == 8


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_save_of_a_run_that_ends_leaves_no_directory(
    mode: str, small_disk: Path, memory: Path
) -> None:
    with Run(small_disk / "run", **MODES[mode]) as run:
        run.save(6, {"w": torch.ones(3)})
        fails(run, 7, large_state(), metrics={"loss": 1.0})
    deadline = time.monotonic() + 30
    while names_in(small_disk / "run") != ["step-6"] and time.monotonic() < deadline:
        time.sleep(0.02)  # The agent tries once more when the run has ended.
    assert names_in(small_disk / "run") == ["step-6"]


TRAINING = """
import os, signal, sys, pytest, torch, torch_ckpt
from pathlib import Path
from support.agents import kill_agent
how, run = sys.argv[1], Path(sys.argv[2])
filler = run.parent / "filler"
filler.write_bytes(bytes(6 << 20))
made = torch_ckpt.Run(run, asynchronous=True, agent=True)
if how == "in memory alone":
    made.save(7, {"w": torch.ones(1 << 20)}, metrics={"loss": 1.0}, persist=False)
else:
    made.save(7, {"w": torch.ones(1 << 20)}, metrics={"loss": 1.0})
    with pytest.raises(BaseException, match="No space left"):
        made.wait()
filler.unlink()
if how == "the agent dies first":
    kill_agent(run)
if how == "the training ends":
    made.close()
else:
    os._exit(1)
"""


@pytest.mark.parametrize(
    "how",
    ["the training ends", "the training dies", "the agent dies first", "in memory alone"],
)
def test_a_step_that_the_agent_commits_after_a_failed_save_has_its_metrics(
    how: str, small_disk: Path, memory: Path, run_python: Callable[..., str]
) -> None:
    """Its trainers have removed what the failed save has left, or never wrote such a step."""
    run = small_disk / "run"
    with contextlib.suppress(AssertionError):  # The training dies.
        run_python(TRAINING, how, run)
    if how == "the agent dies first":  # The next training starts another agent.
        torch_ckpt.Run(run, asynchronous=True, agent=True).close()
    until(lambda: (run / "step-7/.metadata").exists())
    assert metrics_of(Location(run / "step-7")) == {"loss": 1.0}
    assert Run(run, keep_best=1, monitor="loss").best_step() == 7


def late_save(is_committed: bool) -> Callable[..., None]:
    """Returns a function that saves, or does nothing, and then fails as a late rank makes it."""
    save = step_saves.save

    def save_and_be_late(*args: Any, **options: Any) -> None:
        if is_committed:
            save(*args, **options)
        raise RankTimeoutError("rank 1 is late", [1], "committing", 1.0, True)

    return save_and_be_late


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_save_whose_outcome_is_unknown_is_settled_later(
    is_committed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(tmp_path / "run", keep_last=1) as run:
        run.save(1, {"w": torch.ones(3)}, metrics={"loss": 1.0})
        with monkeypatch.context() as patched:
            patched.setattr(step_saves, "save", late_save(is_committed))
            with pytest.raises(RankTimeoutError):
                run.save(2, {"w": torch.ones(3)}, metrics={"loss": 2.0})
        run.wait()
        assert run.saved == 1 + is_committed
    left = 1 + is_committed  # Retention has removed step 1 if step 2 is committed.
    assert names_in(tmp_path / "run") == [f"step-{left}"]
    assert metrics_of(Location(tmp_path / f"run/step-{left}")) == {"loss": float(left)}


@pytest.mark.parametrize("is_committed", [False, True])
def test_an_older_checkpoint_of_a_step_does_not_count_as_a_save_whose_outcome_was_unknown(
    is_committed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(tmp_path / "run") as run:
        run.save(1, {"w": torch.ones(3)})
        with monkeypatch.context() as patched:
            patched.setattr(step_saves, "save", late_save(is_committed))
            with pytest.raises(RankTimeoutError):
                run.save(1, {"w": torch.ones(3)})
        run.wait()
        assert run.saved == 1 + is_committed
    assert names_in(tmp_path / "run") == ["step-1"]


def test_a_step_that_is_committed_late_leaves_what_is_known_of_a_newer_one() -> None:
    boundary = StepBoundary()
    boundary.save_began(2)
    boundary.committed(2)
    boundary.committed(1)
    assert (boundary.stored, boundary.is_on_disk) == (2, True)


@pytest.mark.parametrize("mode", ["direct", "thread"])
def test_the_metrics_appear_with_the_step(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no script finds a directory whose save is in progress."""
    seen: list[list[str]] = []
    commit = CheckpointTransaction.commit

    def see_and_commit(self: CheckpointTransaction, *args: Any) -> None:
        seen.append(names_in(tmp_path))
        commit(self, *args)

    monkeypatch.setattr(CheckpointTransaction, "commit", see_and_commit)
    with Run(tmp_path, **MODES[mode]) as run:
        run.save(7, {"w": torch.ones(3)}, metrics={"loss": 1.0})
    assert not any(name.startswith("step") for name in seen[0])
    assert metrics_of(Location(tmp_path / "step-7")) == {"loss": 1.0}


def test_retention_removes_what_a_dead_rank_has_left_of_a_failed_save(small_disk: Path) -> None:
    step = small_disk / "run/step-7"
    step.mkdir(parents=True)
    (step / "__1_0_0123456789abcdef.distcp").touch()
    with Run(small_disk / "run", keep_last=1) as run:
        fails(run, 7, large_state())
        run.save(8, {"w": torch.ones(3)})
    assert names_in(small_disk / "run") == ["step-8"]


class OwnWriter(FastWriter):
    """A subclass writes to the directory itself."""


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_save_removes_the_directory_that_it_has_created(
    exists: bool, small_disk: Path
) -> None:
    directory = small_disk / "saved"
    if exists:
        directory.mkdir()
    with pytest.raises(BaseException, match="No space left"):
        torch_ckpt.save(large_state(), storage_writer=OwnWriter(directory))
    assert directory.exists() == exists
    assert not exists or names_in(directory) == []


def test_a_failed_save_leaves_its_mark_if_it_cannot_find_out_whether_data_files_remain(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = run / "step-1"
    step.mkdir(parents=True)
    failed = CheckpointTransaction(Location(step), "0123456789abcdef")
    failed.begin()
    (step / "__0_0_0123456789abcdef.distcp").write_bytes(b"data")

    def refuse(_: Location) -> list[str]:
        raise StorageError("refused by the test")

    with monkeypatch.context() as broken:
        broken.setattr(Location, "names", refuse)
        failed.abandon()
    save_steps(run, 2, 3, keep_last=1)
    assert steps_in(run) == [3]
