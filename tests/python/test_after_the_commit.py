"""After the commit of a step, no error and no warning states that the step was not saved."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.run_steps import restored, save_steps, state_of, steps_in

from torch_ckpt import CheckpointError, Run
from torch_ckpt.commits import checkpoint
from torch_ckpt.errors import StorageError
from torch_ckpt.ladder.retention import Retention

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]

MODES: dict[str, dict[str, Any]] = {
    "direct": {},
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
}


def add_copy_without_dotfiles(run: Path, step: int) -> None:
    """Adds a step that no retention removes, with a warning."""
    (run / f"step-{step}").mkdir(parents=True)
    (run / f"step-{step}/x.distcp").touch()


def notes_after_an_error(run: Run) -> list[str]:
    """The notes of an error of training after step 5."""
    try:
        with run.saving_on_exception(lambda: state_of(5)):
            run.should_save(5)
            raise ZeroDivisionError
    except ZeroDivisionError as error:
        return error.__notes__


@pytest.mark.parametrize("has_local", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_warning_of_a_step_that_remains_fails_no_save_where_warnings_are_errors(
    mode: str, has_local: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    add_copy_without_dotfiles(run, 2)
    options = MODES[mode] | ({"local": tmp_path / "local"} if has_local else {})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="step 2")
        with Run(run, keep_last=1, **options) as training:
            for step in (1, 3, 7):
                training.save(step, state_of(step))
                training.wait(promoted=True)
    assert steps_in(run) == [2, 7]
    assert [r.levelname for r in caplog.records if "step 2 was not removed" in r.message] == [
        "WARNING"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert restored(Run(run)) == 7


def test_the_last_step_counts_as_saved_where_a_warning_is_an_error(tmp_path: Path) -> None:
    run = save_steps(tmp_path, 3, keep_last=1)
    add_copy_without_dotfiles(tmp_path, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="step 2")
        assert notes_after_an_error(run) == ["torch_ckpt: step 5 was saved after this error"]


@pytest.mark.parametrize("mode", ["thread", "agent"])
def test_what_fails_after_a_background_save_is_reported_as_such(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of the retention")

    with Run(tmp_path / "run", keep_last=1, **MODES[mode]) as run:
        with monkeypatch.context() as patch:
            patch.setattr(Retention, "apply", fail)
            run.save(1, state_of(1))
            with pytest.raises(CheckpointError) as raised:
                run.wait()
        assert str(raised.value) == (
            "step 1 was saved, but then: ZeroDivisionError: of the retention"
        )
        assert not isinstance(raised.value, StorageError)
        assert restored(run) == 1
        run.save(2, state_of(2))
    assert steps_in(tmp_path / "run") == [2]


def test_what_fails_after_the_last_save_is_no_failure_of_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of the retention")

    run = Run(tmp_path)
    monkeypatch.setattr(Retention, "apply", fail)
    assert notes_after_an_error(run) == ["torch_ckpt: step 5 was saved after this error"]
    assert "step 5 was saved, but then: ZeroDivisionError: of the retention" in caplog.text
    assert restored(Run(tmp_path)) == 5


def test_metrics_that_cannot_be_written_fail_no_save_where_warnings_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("no space left")

    run = save_steps(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "write_small_files", fail)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.filterwarnings("error", message="small files")
        assert run.save(1, state_of(1), metrics={"loss": 1.0})
    assert "were not written: no space left" in caplog.text
