"""A run stays in its directory: it leaves another one alone that is at its path later."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt import CheckpointError, Run
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import has_checkpoint
from torch_ckpt.ladder import lineage as lineage_module
from torch_ckpt.ladder import removal
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.step_files import branch_of

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("memory")]

OPTIONS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
}
NOT_HERE = "not the directory of this run|it is gone, and this job has used it"


def _save(run: Run, step: int) -> None:
    run.save(step, {"w": torch.full((9,), float(step))})
    run.wait()


def _steps(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step-*"))


def _replace(run: Path) -> None:
    run.rename(run.with_name("moved"))
    run.with_name("other").rename(run)


def _unmount(run: Path) -> None:
    """As if the run's storage were unmounted, and its mount point remained."""
    run.rename(run.with_name("moved"))
    run.mkdir()


@pytest.fixture
def other(run: Path) -> Path:
    """Another run, with steps."""
    with Run(run.with_name("other")) as other:
        for step in (1, 2, 3):
            _save(other, step)
    return run.with_name("other")


def _contents(directory: Path) -> dict[str, int]:
    return {os.fspath(path): path.stat().st_size for path in directory.rglob("*")}


def _end_of_record(run: Run) -> None:
    """Waits until the run has recorded all that it has done so far."""
    log, is_written = run._log, threading.Event()
    assert log is not None
    log.put(lambda: is_written.set() or "")
    assert is_written.wait(10)


@pytest.mark.parametrize("lose", [_replace, _unmount])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("has_saved", [True, False])
def test_a_run_saves_nothing_to_another_directory_at_its_path_and_removes_nothing(
    run: Path, other: Path, options: str, lose: Callable[[Path], object], has_saved: bool
) -> None:
    """Nor does it add to the record there."""
    going = Run(run, keep_last=1, **OPTIONS[options])
    _save(going, 40)
    if not has_saved:
        going.close()
        going = Run(run, keep_last=1, **OPTIONS[options])
        assert going.restore({"w": torch.zeros(9)}) == 40
    _end_of_record(going)
    lose(run)
    found = _contents(run)
    for step in (50, 51):
        with pytest.raises(CheckpointError, match="not the directory of this run"):
            _save(going, step)
    going.close()
    assert _contents(run) == found


def test_a_run_that_has_restored_creates_its_directory_again_and_says_so(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(run) as first:
        _save(first, 40)
    with Run(run) as going:
        assert going.restore({"w": torch.zeros(9)}) == 40
        _move_away(run)
        _save(going, 50)
    assert "is gone; this save creates it again" in caplog.text


def _move_away(run: Path) -> None:
    run.rename(run.with_name("moved"))


READS: dict[str, Callable[[Run], object]] = {
    "restore": lambda run: run.restore({"w": torch.zeros(9)}),
    "restore of a step": lambda run: run.restore({"w": torch.zeros(9)}, step=3),
    "latest_step": lambda run: run.latest_step(),
    "best_step": lambda run: run.best_step(),
    "step_at": lambda run: run.step_at("2999-01-01"),
    "lease": lambda run: run.lease(3).__enter__(),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("lose", [_replace, _unmount, _move_away])
@pytest.mark.parametrize("options", [*OPTIONS, "local"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("has_saved", [True, False])
def test_a_run_reads_no_step_of_another_directory_at_its_path(
    run: Path,
    other: Path,
    read: str,
    options: str,
    lose: Callable[[Path], object],
    has_saved: bool,
) -> None:
    """It would continue from the values of another run, or start over without an error."""
    local = {"local": run.with_name("local")} if options == "local" else OPTIONS[options]
    with contextlib.ExitStack() as stack:
        going = stack.enter_context(Run(run, monitor="loss", **local))
        going.save(40, {"w": torch.full((9,), 40.0)}, metrics={"loss": 1.0})
        going.wait(promoted=True)
        if not has_saved:
            going.close()
            going = stack.enter_context(Run(run, monitor="loss", **local))
            assert going.restore({"w": torch.zeros(9)}) == 40
        lose(run)
        with pytest.raises(CheckpointError, match=NOT_HERE):
            READS[read](going)
        if run.exists():
            run.rename(run.with_name("third"))
        run.with_name("moved").rename(run)
        assert going.restore({"w": torch.zeros(9)}) == 40


@pytest.mark.parametrize("read", ["latest_step", "restore", "step_at", "best_step"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_warns_once_if_an_old_copy_of_its_directory_is_at_its_path(
    run: Path, options: str, read: str
) -> None:
    with Run(run, monitor="loss", **OPTIONS[options]) as going:
        for step in (1, 2, 3):
            going.save(step, {"w": torch.full((9,), float(step))}, metrics={"loss": 1.0})
            going.wait()
            if step == 1:
                shutil.copytree(run, run.with_name("other"))
        _replace(run)
        # The agent's memory has the newest step. The others read the directory only.
        found = 3 if options == "agent" and read in ("latest_step", "restore") else 1
        with pytest.warns(UserWarning, match="step 3, which this job saved, is not in .*/run any"):
            assert READS[read](going) == found
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert READS[read](going) == found


def test_an_evaluation_finds_its_run_after_many_jobs(run: Path) -> None:
    """Their terms do not build on the one that it has seen, whose file is removed."""
    with Run(run) as first:
        _save(first, 1)
    with Run(run) as second, Run(run) as evaluation:
        assert second.restore({"w": torch.zeros(9)}) == 1
        _save(second, 2)
        assert evaluation.restore({"w": torch.zeros(9)}) == 2
        second.discard_after(1)
        for step in range(3, 27):
            with Run(run) as job:
                assert job.restore({"w": torch.zeros(9)}) == (1 if step == 3 else step - 1)
                _save(job, step)
            assert evaluation.latest_step() == step


def test_discard_after_warns_of_an_old_copy_as_well(run: Path) -> None:
    with Run(run) as going:
        _save(going, 1)
        shutil.copytree(run, run.with_name("other"))
        _save(going, 2)
        _replace(run)
        with pytest.warns(UserWarning, match="step 2, which this job saved, is not in .*/run any"):
            assert going.discard_after(1) == []


def test_a_run_warns_of_no_step_that_it_or_a_newer_job_has_removed(run: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Run(run, keep_last=1) as going:
            for step in (1, 2, 3):
                _save(going, step)
            going.discard_after(3)
            assert going.latest_step() == 3
            with Run(run, keep_last=1) as newer:
                assert newer.restore({"w": torch.zeros(9)}) == 3
                _save(newer, 4)
            assert going.latest_step() == 4


@pytest.mark.thin(2)
@pytest.mark.parametrize("lose", [_replace, _unmount, _move_away])
@pytest.mark.parametrize("begins", ["with a save", "with a restore"])
@pytest.mark.parametrize("has_local", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_discards_no_step_while_its_directory_is_not_at_its_path(
    run: Path, other: Path, options: str, has_local: bool, begins: str, lose: Callable[[Path], None]
) -> None:
    """The local copies alone would be removed, or the steps of another run."""
    local = {"local": run.with_name("local"), "keep_local": 2} if has_local else {}
    going = Run(run, **local, **OPTIONS[options])
    for step in (1, 2, 3):
        _save(going, step)
    if begins == "with a restore":
        going.close()
        going = Run(run, **local, **OPTIONS[options])
        going.restore({"w": torch.zeros(9)})
    going.wait(promoted=True)
    lose(run)
    with pytest.raises(CheckpointError, match=NOT_HERE):
        going.discard_after(1)
    if run.exists():
        assert _steps(run) == (["step-1", "step-2", "step-3"] if lose is _replace else [])
        run.rename(run.with_name("third"))
    run.with_name("moved").rename(run)
    assert going.restore({"w": torch.zeros(9)}) == 3
    assert going.discard_after(1) == [3, 2]
    going.close()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lose", [_replace, _unmount, _move_away])
def test_a_run_with_a_local_directory_goes_back_only_in_its_directory(
    run: Path, other: Path, lose: Callable[[Path], None], options: str
) -> None:
    """A term in the directory of another run would end that one."""
    with Run(run, local=run.with_name("local"), **OPTIONS[options]) as going:
        _save(going, 2)
        going.wait(promoted=True)
        lose(run)
        found = sorted(run.glob("term-*"))
        with pytest.raises(CheckpointError, match=NOT_HERE):
            _save(going, 1)
        assert sorted(run.glob("term-*")) == found
        if run.exists():
            run.rename(run.with_name("third"))
        run.with_name("moved").rename(run)
        _save(going, 4)
    assert _steps(run)[-1] == "step-4"
    assert branch_of(Location(run / "step-4")) is None


@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_creates_its_directory_again_if_nothing_is_at_its_path(
    run: Path, options: str
) -> None:
    with Run(run, keep_last=1, **OPTIONS[options]) as going:
        _save(going, 40)
        run.rename(run.with_name("moved"))
        for step in (50, 51):
            _save(going, step)
    assert _steps(run) == ["step-51"]
    assert _steps(run.with_name("moved")) == ["step-40"]
    with Run(run, **OPTIONS[options]) as again:
        assert again.restore({"w": torch.zeros(9)}) == 51
        _save(again, 52)


@pytest.mark.parametrize("has_saved", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_bound", [True, False])
def test_a_run_is_not_created_again_below_its_mount_point(
    mount_tmpfs: Callable[[str], Path], options: str, has_saved: bool, is_bound: bool
) -> None:
    """Also if the storage is a directory of the file system that has the mount point."""
    mounted = mount_tmpfs("size=10m")
    if is_bound:
        storage, mounted = mounted / "storage", mounted / "mounted"
        storage.mkdir()
        mounted.mkdir()
        subprocess.run(["mount", "--bind", storage, mounted], check=True)
    going = Run(mounted / "runs" / "gpt", **OPTIONS[options])
    if has_saved:
        _save(going, 40)
    subprocess.run(["umount", "-l", mounted], check=True)
    for step in (50, 51):
        with pytest.raises(CheckpointError, match="not the directory of this run"):
            _save(going, step)
    going.close()
    assert not any(mounted.iterdir())


@pytest.mark.parametrize("begins", ["before", "between"])
def test_a_run_may_begin_before_its_storage_is_mounted_or_mounted_again(
    mount_tmpfs: Callable[[str], Path], begins: str
) -> None:
    mounted, other = mount_tmpfs("size=10m"), mount_tmpfs("size=10m")
    between = Run(mounted / "gpt")
    subprocess.run(["umount", "-l", mounted], check=True)
    going = {"before": Run(mounted / "gpt"), "between": between}[begins]
    subprocess.run(["mount", "--bind", other, mounted], check=True)
    _save(going, 40)
    assert _steps(other / "gpt") == ["step-40"]


@pytest.mark.parametrize("options", OPTIONS)
def test_saves_to_a_local_directory_do_not_resolve_the_path_of_the_run_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """Its storage may hang."""
    resolve = os.path.realpath

    def refuse(path: Any, **others: Any) -> Any:
        if os.fspath(path).startswith(os.fspath(run)):
            raise OSError(errno.EIO, "it does not answer")
        return resolve(path, **others)

    with Run(run, local=run.with_name("local"), **OPTIONS[options]) as going:
        _save(going, 40)
        monkeypatch.setattr(os.path, "realpath", refuse)
        for step in (41, 42):
            _save(going, step)
        state = {"w": torch.full((9,), 43.0)}
        with contextlib.suppress(ZeroDivisionError), going.saving_on_exception(lambda: state):
            going.should_save(43)
            raise ZeroDivisionError
        going.wait(promoted=True)
        monkeypatch.undo()
    assert Run(run).restore({"w": torch.zeros(9)}) == 43


def test_a_lease_of_a_local_step_does_not_need_the_directory_of_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StorageError("it does not answer", errno.EIO)

    local = run.with_name("local")
    with Run(run, local=local) as going:
        _save(going, 40)
        with monkeypatch.context() as broken:
            broken.setattr("torch_ckpt.commits.terms.term_at", refuse)
            with going.lease(40) as path:
                assert path == local / "step-40"


def test_a_run_continues_after_a_program_has_removed_its_old_files(run: Path) -> None:
    with Run(run, keep_last=2) as going:
        _save(going, 40)
        for term in run.glob("term-*"):
            term.unlink()
        for step in (50, 60):
            _save(going, step)
    assert _steps(run) == ["step-50", "step-60"]


def test_a_run_continues_in_its_first_directory_once_that_is_back(run: Path) -> None:
    with Run(run, keep_last=2) as going:
        _save(going, 40)
        run.rename(run.with_name("moved"))
        _save(going, 50)
        run.rename(run.with_name("second"))
        run.with_name("moved").rename(run)
        _save(going, 60)
    assert _steps(run) == ["step-40", "step-60"]


def test_retention_removes_nothing_if_the_directory_was_replaced_since_the_commit(
    run: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = Lineage.newest

    def later(lineage: Lineage) -> Any:
        monkeypatch.undo()
        _replace(run)
        return newest(lineage)

    going = Run(run, keep_last=1)
    _save(going, 40)
    monkeypatch.setattr(Lineage, "newest", later)
    with pytest.warns(UserWarning, match="old steps were not removed: .* moved"):
        _save(going, 50)
    assert _steps(run) == ["step-1", "step-2", "step-3"]
    assert _steps(run.with_name("moved")) == ["step-40", "step-50"]


def test_promotions_fail_while_the_directory_of_the_run_is_moved_and_steps_remain(
    run: Path, tmp_path: Path
) -> None:
    moved = run.with_name("moved")
    made = Run(run, local=tmp_path / "local", keep_last=9)
    _save(made, 1)
    made.wait(promoted=True)
    run.rename(moved)
    _save(made, 2)
    with pytest.raises(CheckpointError, match="step 2 was not promoted"):
        made.wait(promoted=True)
    assert not run.exists()
    moved.rename(run)
    made.close()
    assert _steps(run) == ["step-1", "step-2"]


def test_a_new_directory_with_the_id_of_the_lost_one_gets_the_local_steps(
    run: Path, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    with Run(run, local=local) as made:
        _save(made, 1)
    run.rename(run.with_name("lost"))
    with pytest.raises(CheckpointError, match="has no sound run-id"):
        Run(run, local=local)
    run.mkdir()
    shutil.copy(local / "run-id", run)
    with Run(run, local=local) as again:
        assert again.restore({"w": torch.zeros(9)}) == 1
    assert _steps(run) == ["step-1"]


def test_a_run_warns_of_no_step_that_a_failed_removal_has_removed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(run) as going:
        for step in (1, 2, 3):
            _save(going, step)
        with monkeypatch.context() as patched:  # As if it was leased after the check.
            patched.setattr(removal, "leased_paths", lambda _: {Location(run) / "step-2"})
            with pytest.raises(CheckpointError, match="were removed"):
                going.discard_after(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert going.latest_step() == 2


def test_a_lease_warns_of_no_step_that_is_removed_meanwhile(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings(), Run(run, keep_last=1, keep_every=2) as going:
        warnings.simplefilter("error")
        for step in (2, 3):
            _save(going, step)

        def saved_meanwhile(path: Location) -> bool:
            monkeypatch.setattr(lineage_module, "has_checkpoint", has_checkpoint)
            _save(going, 5)
            return has_checkpoint(path)

        monkeypatch.setattr(lineage_module, "has_checkpoint", saved_meanwhile)
        with going.lease(2):
            pass
        assert going.latest_step() == 5
