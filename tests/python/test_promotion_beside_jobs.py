"""Promotions of a job, such as an evaluation, while another job promotes or removes the steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.run_steps import steps_in
from waits import until

from torch_ckpt import CheckpointError, Run
from torch_ckpt.agent.identity import new_id
from torch_ckpt.commits.hiding import hide
from torch_ckpt.errors import NotFoundError, StorageError, SupersededError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.copying import CheckpointCopy


def _state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(step))}


def _restored(run: Run) -> tuple[int | None, float]:
    state = _state(0)
    return run.restore(state), float(state["w"][0])


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Any]:
    return {"directory": tmp_path / "run", "local": tmp_path / "local"}


def _leave(paths: dict[str, Any], *steps: int) -> None:
    """A training that ends before it has promoted the steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointCopy, "copy_files", _fail)
        training = Run(**paths, keep_local=9, on_failure="warn")
        training.restore(_state(0))
        for step in steps:
            training.save(step, _state(step))
        training.__exit__(KeyError, KeyError(), None)


def _fail(copy: CheckpointCopy) -> None:
    raise StorageError(f"cannot write to {copy.target}")


def _copy(source: Path, target: Location) -> None:
    copy = CheckpointCopy(Location(source), target)
    copy.copy_files()
    copy.commit()


def _meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[Location], object]) -> None:
    """Another job acts before the first data file of a promoted step gets its name."""
    rename = Location.rename

    def later(self: Location, to: Location) -> None:
        if self.name.startswith(".pending-") and to.name.endswith(".distcp"):
            monkeypatch.setattr(Location, "rename", rename)
            act(to.parent)
        rename(self, to)

    monkeypatch.setattr(Location, "rename", later)


# ---- Two jobs promote one step ----


def test_training_continues_when_another_job_has_promoted_the_step_first(
    paths: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(**paths) as training:
        _meanwhile(monkeypatch, lambda target: _copy(paths["local"] / "step-1", target))
        training.save(1, _state(1))
        training.wait(promoted=True)
    shutil.rmtree(paths["local"])
    assert _restored(Run(paths["directory"])) == (1, 1)


def test_a_save_replaces_one_that_an_older_job_has_promoted_meanwhile(
    paths: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave(paths, 1)
    with Run(paths["directory"], local=tmp_path / "other") as newer:
        _meanwhile(monkeypatch, lambda target: _copy(paths["local"] / "step-1", target))
        newer.save(1, _state(7))
        newer.wait(promoted=True)
    assert _restored(Run(paths["directory"])) == (1, 7)


def test_a_promotion_that_fails_without_another_job_is_reported(
    paths: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_pending(target: Location) -> None:
        for name in target.names():
            (target / name).remove()

    with Run(**paths) as training:
        _meanwhile(monkeypatch, remove_pending)
        training.save(1, _state(1))
        with pytest.raises(CheckpointError, match=r"step 1 was not promoted to .* cannot rename"):
            training.wait(promoted=True)


def test_an_older_job_whose_half_copy_was_removed_is_superseded(
    paths: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def supersede(target: Location) -> None:
        Run(paths["directory"]).save(5, _state(5))
        target.remove_all()

    old = Run(**paths)
    _meanwhile(monkeypatch, supersede)
    old.save(1, _state(1))
    with pytest.raises(SupersededError):
        old.wait(promoted=True)
    old.close()


@pytest.mark.parametrize("on", ["disk", "store"])
def test_a_copy_that_fails_removes_no_file_that_another_process_has_committed(
    on: str, paths: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    directory = paths["directory"] if on == "disk" else request.getfixturevalue("store_url")
    _leave(paths, 1)
    source, target = paths["local"] / "step-1", Location(f"{directory}/step-1")

    def copy(*_: object) -> None:
        _copy(source, target)
        raise NotFoundError("training has removed the source")

    late: Any = CheckpointCopy(Location(source), target)
    late._job = Mock(copy=copy, copied_nbytes=0)
    late.copy_files()
    assert CheckpointCopy(Location(source), target).is_done


@pytest.mark.parametrize("on", ["disk", "store"])
def test_jobs_that_begin_a_run_at_the_same_moment_agree_on_its_id(
    on: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run" if on == "disk" else request.getfixturevalue("store_url")
    local, others = tmp_path / "local", []

    def begin_other() -> str:
        monkeypatch.setattr("torch_ckpt.ladder.local_directory.new_id", new_id)
        others.append(Run(directory, local=local))
        return new_id()

    monkeypatch.setattr("torch_ckpt.ladder.local_directory.new_id", begin_other)
    with Run(directory, local=local) as training:
        training.save(1, _state(1))
        training.wait(promoted=True)
    assert _restored(others[0]) == (1, 1)
    others[0].close()


# ---- A job that saves nothing ----


def test_an_evaluation_promotes_what_training_has_left_and_removes_nothing(
    paths: dict[str, Any],
) -> None:
    with Run(**paths, keep_local=2) as training:
        for step in (1, 2, 3):
            training.save(step, _state(step))
    _leave(paths, 4, 5)
    # Steps that another process removes now; it restores them if they are leased.
    removed = [hide(Location(paths[each]) / "step-3") for each in paths]
    with Run(**paths, keep_last=1) as evaluation:
        assert _restored(evaluation) == (5, 5)
    assert steps_in(paths["local"]) == [2, 4, 5]
    assert set(steps_in(paths["directory"])) == {1, 2, 5}
    for each in removed:
        each.restore()
    assert steps_in(paths["local"]) == [2, 3, 4, 5]
    assert set(steps_in(paths["directory"])) == {1, 2, 3, 5}


def test_a_job_that_continues_removes_old_steps_from_its_first_save_on(
    paths: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(**paths) as training:
        for step in (1, 2):
            training.save(step, _state(step))
    _leave(paths, 3)

    job = Run(**paths, keep_last=2)
    job.wait(promoted=True)
    assert steps_in(paths["directory"]) == [1, 2, 3]
    monkeypatch.setattr(CheckpointCopy, "copy_files", _fail)
    job.save(4, _state(4))
    with pytest.raises(StorageError):
        job.wait(promoted=True)
    assert steps_in(paths["directory"]) == [2, 3]
    monkeypatch.undo()
    job.close()
    assert steps_in(paths["directory"]) == [3, 4]


def test_a_failed_promotion_before_the_first_save_does_not_prevent_the_save(
    paths: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave(paths, 1)
    monkeypatch.setattr(CheckpointCopy, "copy_files", _fail)
    job: Any = Run(**paths)
    until(lambda: job._promotion.progress(0).report.failure is not None)
    monkeypatch.undo()
    job.save(2, _state(2))  # Then old steps are removed, and there may be space.
    job.close()
    assert steps_in(paths["directory"]) == [1, 2]


def test_a_job_may_go_back_before_its_first_save(paths: dict[str, Any]) -> None:
    _leave(paths, 3, 5)
    with Run(**paths, keep_last=1) as job:
        job.wait(promoted=True)
        job.discard_after(3)
        job.save(4, _state(4))
        job.wait(promoted=True)
    assert steps_in(paths["directory"]) == [4]


@pytest.mark.usefixtures("memory")
def test_a_job_with_an_agent_promotes_what_appears_after_it_has_begun(
    paths: dict[str, Any],
) -> None:
    with Run(**paths, asynchronous=True, agent=True) as job:
        _leave(paths, 1)  # As the agent of a former job.
        assert _restored(job) == (1, 1)
    assert steps_in(paths["directory"]) == [1]


def test_an_evaluation_promotes_no_step_of_a_training_beside_it(paths: dict[str, Any]) -> None:
    evaluation = Run(**paths)
    _leave(paths, 1)
    assert _restored(evaluation) == (1, 1)
    evaluation.close()
    assert steps_in(paths["directory"]) == []
    with Run(**paths) as training:  # A job that continues it does.
        assert _restored(training) == (1, 1)
    assert steps_in(paths["directory"]) == [1]


def test_an_evaluation_passes_over_a_step_that_training_removes_meanwhile(
    paths: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _leave(paths, 1, 2, 3)
    caplog.clear()

    def remove(target: Location) -> None:
        target.remove_all()
        shutil.rmtree(paths["local"] / "step-2")

    _meanwhile(monkeypatch, remove)
    with Run(**paths) as evaluation:
        evaluation.wait(promoted=True)
    assert steps_in(paths["directory"]) == [1]
    assert steps_in(paths["local"]) == [1, 3]
    assert not caplog.records
