"""Two jobs of a run with one local directory may promote the same step at the same time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_ckpt import Run, load, save
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.copying import CheckpointCopy, is_whole_copy


@pytest.fixture(params=["disk", "store"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    is_disk = request.param == "disk"
    folder = tmp_path / "run" if is_disk else request.getfixturevalue("store_url")
    return Location(folder) / "step-1"


def _copies(folder: Path, target: Location) -> list[CheckpointCopy]:
    save({"a": torch.arange(100)}, checkpoint_id=folder, no_dist=True)
    copies = [CheckpointCopy(Location(folder), target) for _ in range(2)]
    for copy in copies:
        copy.copy_files()
    return copies


def _assert_whole(copies: list[CheckpointCopy]) -> None:
    target = copies[0].target
    assert all(copy.is_done for copy in copies)
    assert is_whole_copy(copies[0].source, target)
    assert not [name for name in target.names() if name.endswith(".tmp")]
    state = {"a": torch.zeros(100, dtype=torch.int64)}
    load(state, checkpoint_id=target.checkpoint_id, no_dist=True)
    assert torch.equal(state["a"], torch.arange(100))


def _commit(copy: CheckpointCopy, call: str, meanwhile: Callable[[], object]) -> None:
    """Commits a copy; another job acts just before this call of the commit."""
    called: Callable[..., Any] = getattr(CheckpointTransaction, call)
    with pytest.MonkeyPatch.context() as patch:

        def later(*arguments: Any) -> Any:
            patch.undo()
            meanwhile()
            return called(*arguments)

        patch.setattr(CheckpointTransaction, call, later)
        copy.commit()


@pytest.mark.parametrize("call", ["resume", "commit"])
def test_a_copy_is_whole_after_another_job_has_committed_it_too(
    tmp_path: Path, target: Location, call: str
) -> None:
    first, second = _copies(tmp_path / "local", target)
    _commit(first, call, second.commit)
    _assert_whole([first, second])
    first.commit()
    _assert_whole([first, second])


def test_a_copy_resumes_beside_a_commit_that_has_written_index_and_metadata(
    tmp_path: Path, target: Location
) -> None:
    first, second = _copies(tmp_path / "local", target)
    source = first.source
    index = next(name for name in source.names() if name.startswith(".index."))
    (target / index).write((source / index).read(), sync=False)
    pending = [name for name in target.names() if name.endswith(".tmp")]
    for name in pending:
        (target / name).replace((source / ".metadata").read(), sync=False)

    def end_first() -> None:
        for name in pending:
            (target / name).rename(target / ".metadata")
        first.commit()

    second.commit(end_first)
    _assert_whole([first, second])


def test_a_copy_ends_when_another_job_has_committed_it_before_a_file_got_its_name(
    tmp_path: Path, target: Location
) -> None:
    save({"a": torch.arange(100)}, checkpoint_id=tmp_path / "local", no_dist=True)
    first, second = (CheckpointCopy(Location(tmp_path / "local"), target) for _ in range(2))
    job = first._job

    def copy_first(*arguments: Any) -> None:
        job.copy(*arguments)
        second.copy_files()
        second.commit()

    first._job = SimpleNamespace(copy=copy_first)
    first.copy_files()
    _assert_whole([first, second])
    first.commit()
    _assert_whole([first, second])


def test_a_link_takes_no_file_from_a_copy_that_another_job_has_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": torch.arange(100)}
    with Run(tmp_path / "local") as run:
        run.save(1, state)
        run.save(2, state)
    local, target = Location(tmp_path / "local"), Location(tmp_path / "run")
    _commit_copy(CheckpointCopy(local / "step-1", target / "step-1"))
    of_step_2 = local / "step-2", target / "step-2"
    first, second = (CheckpointCopy(*of_step_2, base=target / "step-1") for _ in range(2))
    link = Location.link

    def link_later(self: Location, to: Location, *, sync: bool) -> None:
        monkeypatch.setattr(Location, "link", link)
        _commit_copy(second)
        link(self, to, sync=sync)
        assert second.is_done

    monkeypatch.setattr(Location, "link", link_later)
    first.copy_files()
    assert first.is_done
    assert first.read_nbytes == 0
    assert not [name for name in first.target.names() if "pending" in name]


def _commit_copy(copy: CheckpointCopy) -> None:
    copy.copy_files()
    copy.commit()


def test_a_copy_that_another_save_has_ended_leaves_that_checkpoint(
    tmp_path: Path, target: Location
) -> None:
    first, _ = _copies(tmp_path / "local", target)
    newer = {"a": torch.ones(3)}
    save_newer = functools.partial(save, newer, checkpoint_id=target.checkpoint_id, no_dist=True)
    with pytest.raises(CheckpointError, match="another save"):
        _commit(first, "commit", save_newer)
    state = {"a": torch.zeros(3)}
    load(state, checkpoint_id=target.checkpoint_id, no_dist=True)
    assert torch.equal(state["a"], newer["a"])
    assert len([name for name in target.names() if name.startswith(".index.")]) == 1
