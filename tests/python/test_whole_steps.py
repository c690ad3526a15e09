"""A step of a run counts in a directory only while it is whole there: the last copy stays."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch
from support.flips import flipped

from torch_ckpt import CheckpointError, Run, load, save
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.promotion_steps import PromotionSteps
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import committed_steps
from torch_ckpt.storage.copying import CheckpointCopy
from torch_ckpt.storage.verify import check_sound

MODES: dict[str, dict[str, object]] = {
    "thread": {},
    "agent": {"asynchronous": True, "agent": True},
}

DAMAGES = [
    "a file is lost",
    "a file is truncated",
    "the index is lost",
    "metadata is lost",
    "metadata is damaged",
]


def _state(step: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((1 << 16,), float(10 * step + i)) for i in range(4)}


def _run(folder: Path, **options: object) -> Run:
    writer = {"thread_count": 4}  # So a step has four data files.
    return Run(folder / "run", local=folder / "local", writer=writer, **options)  # type: ignore[arg-type]


def _steps(directory: Path) -> list[int]:
    return committed_steps(Location(directory))


def _damage(step: Path, how: str) -> None:
    file = sorted(step.glob("__*.distcp"))[1]
    (index,) = step.glob(".index.*")
    if how == "a file is lost":
        file.unlink()
    elif how == "a file is truncated":
        os.truncate(file, 100)
    elif how == "the index is lost":
        index.unlink()
    elif how == "metadata is lost":
        (step / ".metadata").unlink()
    else:
        metadata = step / ".metadata"
        metadata.write_bytes(flipped(metadata.read_bytes(), -1, 3))


def _times(step: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in step.iterdir()}


def _loads(folder: Path, step: int) -> bool:
    state = _state(0)
    with Run(folder) as run, contextlib.suppress(CheckpointError):
        run.restore(state, step=step)
    return all(torch.equal(state[name], value) for name, value in _state(step).items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", DAMAGES)
def test_what_a_promoted_step_has_lost_is_promoted_again_before_its_local_copy_is_removed(
    tmp_path: Path, memory: Path, mode: str, how: str
) -> None:
    with _run(tmp_path) as run:
        run.save(200, _state(200))
    files = _times(tmp_path / "run" / "step-200")
    _damage(tmp_path / "run" / "step-200", how)
    with _run(tmp_path, **MODES[mode]) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = _state(0)
        assert run.restore(state) == 200
        run.save(300, _state(300))
    assert _steps(tmp_path / "local") == [300]
    check_sound(Location(tmp_path / "run" / "step-200"))
    assert _loads(tmp_path / "run", 200)
    after = _times(tmp_path / "run" / "step-200")
    assert set(after) == set(files)
    sent = [name for name, time in after.items() if files[name] != time and "distcp" in name]
    assert len(sent) == (1 if how.startswith("a file") else 0)  # The others have remained.


@pytest.mark.parametrize("how", DAMAGES)
def test_a_step_that_is_damaged_after_its_promotion_is_promoted_again(
    tmp_path: Path, how: str
) -> None:
    with _run(tmp_path, keep_local=2) as run:
        for step in (1, 2):
            run.save(step, _state(step))
            run.wait(promoted=True)
        _damage(tmp_path / "run" / "step-1", how)
        run.save(3, _state(3))
        run.wait(promoted=True)
        assert _steps(tmp_path / "local") == [3, 2]
        check_sound(Location(tmp_path / "run" / "step-1"))
    assert _steps(tmp_path / "run") == [3, 2, 1]


def test_a_step_that_another_job_has_saved_again_in_the_run_remains_and_so_does_the_local_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _run(tmp_path) as run:
        run.save(1, _state(1))
        run.wait(promoted=True)
        save(_state(7), checkpoint_id=tmp_path / "run" / "step-1", no_dist=True)
        for step in (2, 3):
            run.save(step, _state(step))
            run.wait(promoted=True)
        assert _steps(tmp_path / "local") == [3, 1]
    state = _state(0)
    load(state, checkpoint_id=tmp_path / "run" / "step-1", no_dist=True)
    assert torch.equal(state["w0"], _state(7)["w0"])
    assert "step-1 is of another save now" in caplog.text


def test_a_step_that_is_gone_in_the_run_is_promoted_again(tmp_path: Path) -> None:
    with _run(tmp_path) as run:
        run.save(1, _state(1))
        run.wait(promoted=True)
        Location(tmp_path / "run" / "step-1").remove_all()
        run.save(2, _state(2))
    assert _steps(tmp_path / "run") == [2, 1]
    assert _steps(tmp_path / "local") == [2]


def test_steps_that_retention_removes_from_the_run_are_not_taken_for_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _run(tmp_path) as run:
        for step in (1, 2, 3):
            run.save(step, _state(step))
    with _run(tmp_path, keep_last=1) as run:
        for step in (4, 5):
            run.save(step, _state(step))
            run.wait(promoted=True)
    assert _steps(tmp_path / "run") == [5]
    assert not caplog.text


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Promotions copy files once it is set."""
    copy_files, goes_on = CheckpointCopy.copy_files, threading.Event()

    def gated(copy: CheckpointCopy) -> None:
        assert goes_on.wait(60)
        copy_files(copy)

    monkeypatch.setattr(CheckpointCopy, "copy_files", gated)
    return goes_on


def test_a_step_that_is_gone_before_its_promotion_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, goes_on: threading.Event
) -> None:
    with _run(tmp_path) as run:
        for step in (1, 2):
            run.save(step, _state(step))
        Location(tmp_path / "local" / "step-2").remove_all()
        goes_on.set()
        run.wait(promoted=True)
    assert _steps(tmp_path / "run") == [1]
    assert "steps [2] are not in" in caplog.text


def test_a_step_that_is_gone_during_its_promotion_is_named(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    goes_on: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gated, begun = CheckpointCopy.copy_files, threading.Event()

    def copy_files(copy: CheckpointCopy) -> None:
        begun.set()
        gated(copy)

    monkeypatch.setattr(CheckpointCopy, "copy_files", copy_files)
    with _run(tmp_path) as run:
        run.save(1, _state(1))
        assert begun.wait(60)
        Location(tmp_path / "local" / "step-1").remove_all()
        goes_on.set()
        run.save(2, _state(2))
        run.wait(promoted=True)
    assert _steps(tmp_path / "run") == [2]
    assert "steps [1] are not in" in caplog.text


def test_a_step_that_retention_does_not_keep_is_removed_without_a_look_at_the_run(
    tmp_path: Path,
) -> None:
    with _run(tmp_path, keep_last=1) as run:
        run.save(1, _state(1))
        run.wait(promoted=True)
        _damage(tmp_path / "run" / "step-1", "a file is lost")
        run.save(2, _state(2))
        run.wait(promoted=True)
    assert _steps(tmp_path / "local") == _steps(tmp_path / "run") == [2]


def _part_of_a_step(folder: Path, step: int) -> None:
    """A local step of which other machines have the other files, and which was not promoted."""
    with contextlib.suppress(KeyError), _run(folder, keep_local=9) as run:
        run._promotion.cancel()  # type: ignore[union-attr]
        run.save(step, _state(step))
        raise KeyError("the job is killed")
    sorted((folder / "local" / f"step-{step}").glob("__*.distcp"))[0].unlink()


def test_a_part_of_a_step_that_other_machines_have_left_is_not_promoted(tmp_path: Path) -> None:
    with _run(tmp_path) as run:
        run.save(1, _state(1))
    _part_of_a_step(tmp_path, 2)
    with _run(tmp_path) as run:
        with pytest.warns(UserWarning, match="step 2 is passed over in .*/local: "):
            assert run.restore(_state(0)) == 1
        for step in (3, 4, 5):
            run.save(step, _state(step))
            run.wait(promoted=True)
    assert _steps(tmp_path / "run") == [5, 4, 3, 1]
    assert _steps(tmp_path / "local") == [5]  # The run has left step 2.


def test_a_local_step_that_loses_a_file_before_its_promotion_fails_one_promotion_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, goes_on: threading.Event
) -> None:
    with _run(tmp_path, on_failure="warn", keep_local=9) as run:
        run.save(2, _state(2))
        sorted((tmp_path / "local" / "step-2").glob("__*.distcp"))[0].unlink()
        goes_on.set()
        for step in (3, 4):
            assert run.save(step, _state(step))
            with contextlib.suppress(CheckpointError):
                run.wait(promoted=True)
        assert _steps(tmp_path / "run") == [4, 3]
        assert run.failures == 1
    assert "step 2 was not promoted" in caplog.text


def test_a_step_that_was_removed_after_its_promotion_is_not_reported_as_lost(
    tmp_path: Path,
) -> None:
    steps = PromotionSteps(StepDirectories(Location(tmp_path)), Retention())
    steps.found_here([1])
    steps.examined({1: 1}, ())
    steps.begin_save(2, [2, 1])
    steps.saved(2)
    steps.promoted(1)  # Another place may be slower, and its coordinator chooses the step again.
    assert steps.removable([2, 1], [2, 1], keep=1, whole={1}) == [1]
    steps.choose([2, 1])
    assert steps.lost([2]) == {}
    assert steps.ended_here() == {1: "the step is not there"}
    assert list(steps.lost([])) == [2]


def test_the_metric_of_a_step_that_was_saved_again_is_that_of_the_newer_save(
    tmp_path: Path,
) -> None:
    for step, loss in {1: 5, 2: 9, 3: 7}.items():
        save(_state(step), checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
        (tmp_path / f"step-{step}" / "metrics.json").write_text(f'{{"loss": {loss}}}')
    retention = Retention(keep_last=1, keep_best=1, monitor="loss")
    steps = PromotionSteps(StepDirectories(Location(tmp_path)), retention)
    steps.found([2], {2: 1.0}, {}, {2: 1})  # The run has an earlier save of step 2.
    steps.found_here([1, 2, 3])
    steps.examined({1: 1, 2: 1, 3: 1}, ())
    assert steps.choice([3, 2, 1], None, may_choose=True).chosen == [3, 1]
