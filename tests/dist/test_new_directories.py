"""The directory of a new checkpoint appears when it is whole, so scripts may resume from it."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import Forks
from ranks import Worlds
from states import READERS, assert_same, failures_of, full_value
from stops import run_stopped
from syscalls import can_stop
from torch.distributed.checkpoint import DefaultSavePlanner

import torch_ckpt
from torch_ckpt import FastSavePlanner, FastWriter, SafetensorsWriter
from torch_ckpt.errors import AlreadyExistsError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.temporary import remove_abandoned

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

needs_stops = pytest.mark.skipif(not can_stop(), reason="no system calls can be stopped here")
SHAPES = {"small": (7, 5), "large": (300, 100)}
SAVES = ["stock planner", "fast planner", "file", "shards"]


def state_of(version: int) -> dict[str, Any]:
    tensors = {n: full_value(f"{n} {version}", shape, torch.int32) for n, shape in SHAPES.items()}
    return tensors | {"version": torch.tensor(version)}


def writer_for(path: Path, how: str) -> FastWriter:
    if how in ("file", "shards"):
        return SafetensorsWriter(path, max_shard_nbytes=1 if how == "shards" else 1 << 30)
    return FastWriter(path)


def save(path: Path, version: int, how: str = "stock planner") -> None:
    planner = DefaultSavePlanner() if how == "stock planner" else FastSavePlanner()
    writer = writer_for(path, how)
    dcp.save(state_of(version), storage_writer=writer, planner=planner, no_dist=True)


def assert_holds(path: Path, version: int, how: str = "stock planner") -> None:
    for name, reader in READERS.items():
        if name == "stock" and how in ("file", "shards"):
            continue
        state = {key: torch.zeros_like(value) for key, value in state_of(version).items()}
        dcp.load(state, storage_reader=reader(path), no_dist=True)
        assert_same(state, state_of(version))


def highest(run: Path) -> Path:
    """The directory that many scripts resume from."""
    found = {
        int(m[1]): m[0]
        for m in map(re.compile(r"checkpoint-(\d+)").fullmatch, os.listdir(run))
        if m
    }
    return run / found[max(found)]


def resume(run: Path, how: str) -> str:
    """Resumes as many scripts do, and saves; returns what they resume from."""
    path = highest(run)
    assert_holds(path, int(path.name.partition("-")[2]), how)
    save(run / "checkpoint-3", 3, how)
    return path.name


@needs_stops
@pytest.mark.timeout(900)
@pytest.mark.thin("stock planner", "shards")
@pytest.mark.parametrize("how", SAVES)
def test_a_script_that_resumes_from_the_highest_number_survives_a_kill_at_any_call(
    tmp_path: Path, how: str
) -> None:
    forks = Forks()
    template = tmp_path / "template"
    forks.call(save, template / "checkpoint-1", 1, how)
    found = []
    for number in itertools.count():
        run = shutil.copytree(template, tmp_path / f"{number}")
        killed = run_stopped(
            forks, run, lambda at, _, n=number: at < n, save, run / "checkpoint-2", 2, how
        )
        where = f"before call {number} of {killed.calls}"
        assert killed.error is None, killed.error
        found.append(forks.call(resume, run, how))
        assert killed.was_killed or found[-1] == "checkpoint-2", where
        assert all(re.fullmatch(r"checkpoint-[123]", name) for name in os.listdir(run)), where
        if not killed.was_killed:
            break
        shutil.rmtree(run)
    assert found == sorted(found)
    assert len(set(found)) == 2


@pytest.mark.parametrize("how", SAVES)
def test_a_directory_that_exists_is_written_to_and_stays_the_same(tmp_path: Path, how: str) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    inode = path.stat().st_ino
    save(path, 1, how)
    assert path.stat().st_ino == inode
    assert_holds(path, 1, how)
    assert os.listdir(tmp_path) == ["checkpoint"]


class _Meddled(FastWriter):
    """Somebody makes the directory while the save writes."""

    def finish(self, *args: Any, **kwargs: Any) -> None:
        """Commits after that."""
        _meddle(Path(self.path))
        super().finish(*args, **kwargs)


class _MeddledModel(SafetensorsWriter):
    def finish(self, *args: Any, **kwargs: Any) -> None:
        """Commits after somebody has made the directory."""
        _meddle(Path(self.path))
        super().finish(*args, **kwargs)


def _meddle(path: Path) -> None:
    assert not path.exists()
    path.mkdir()
    (path / "notes.json").write_text("{}")


@pytest.mark.parametrize("how", ["fast planner", "file", "shards"])
def test_a_directory_that_somebody_makes_meanwhile_keeps_its_files(
    tmp_path: Path, how: str
) -> None:
    path = tmp_path / "checkpoint"
    most = 1 if how == "shards" else 1 << 30
    writer = _Meddled(path) if how == "fast planner" else _MeddledModel(path, max_shard_nbytes=most)
    dcp.save(state_of(1), storage_writer=writer, planner=FastSavePlanner(), no_dist=True)
    assert_holds(path, 1, how)
    assert (path / "notes.json").read_text() == "{}"
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert len(os.listdir(path)) == {"fast planner": 4, "file": 2, "shards": 5}[how]


def test_a_checkpoint_that_another_save_commits_meanwhile_is_not_overwritten_against_the_will(
    tmp_path: Path,
) -> None:
    path = tmp_path / "checkpoint"

    class Late(FastWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            """Commits after another save."""
            save(path, 1)
            super().finish(*args, **kwargs)

    failed = failures_of(
        dcp.save, state_of(2), storage_writer=Late(path, overwrite=False), no_dist=True
    )
    assert failed[0].kind == AlreadyExistsError.__name__
    assert_holds(path, 1)
    assert os.listdir(tmp_path) == ["checkpoint"]


def fail_to_save(path: Path) -> None:
    class Failing(FastWriter):
        def _check_files(self, files: Any) -> None:
            raise OSError("a test")

    failed = failures_of(dcp.save, state_of(1), storage_writer=Failing(path), no_dist=True)
    assert failed


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    fail_to_save(tmp_path / "checkpoint")
    assert not os.listdir(tmp_path)


def leave_partial(run: Path) -> str:
    """Dies in the middle of a save."""

    class Dying(FastWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            """Never commits."""
            os._exit(0)

    dcp.save(state_of(1), storage_writer=Dying(run / "checkpoint-1"), no_dist=True)
    raise AssertionError


def partials(run: Path) -> list[Path]:
    return sorted(run.glob(".*.partial"))


def leave_dead_partial(forks: Forks, run: Path) -> Path:
    with pytest.raises(AssertionError, match="ended without a word"):
        forks.call(leave_partial, run)
    (path,) = partials(run)
    return path


def test_directories_of_dead_saves_are_removed_and_those_of_running_ones_never(
    tmp_path: Path,
) -> None:
    forks = Forks()
    leave_dead_partial(forks, tmp_path)
    seen = []

    class Watching(FastWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            """Commits after another checkpoint."""
            (dead, own) = partials(tmp_path)
            save(tmp_path / "checkpoint-5", 5)
            forks.call(save, tmp_path / "checkpoint-6", 6)
            seen.append(partials(tmp_path) in ([dead], [own]))
            super().finish(*args, **kwargs)

    dcp.save(state_of(4), storage_writer=Watching(tmp_path / "checkpoint-4"), no_dist=True)
    assert seen == [True]
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint-{n}" for n in (4, 5, 6)]
    assert_holds(tmp_path / "checkpoint-4", 4)


def test_directories_of_other_machines_are_removed_once_nobody_has_written_for_a_day(
    tmp_path: Path,
) -> None:
    dead = leave_dead_partial(Forks(), tmp_path)
    owner = re.search(r"\.([0-9a-f]{8})-\d+-\d+\.partial", dead.name)
    assert owner is not None
    elsewhere = dead.with_name(dead.name.replace(owner[1], "01234567"))
    dead.rename(elsewhere)
    save(tmp_path / "checkpoint-2", 2)
    assert elsewhere.exists()
    day_ago = time.time() - 25 * 3600
    for file in [*elsewhere.iterdir(), elsewhere]:
        os.utime(file, (day_ago, day_ago))
    save(tmp_path / "checkpoint-3", 3)
    assert not elsewhere.exists()
    # The directory of a save that is replaced by this one is removed at once.
    dead = leave_dead_partial(Forks(), tmp_path)
    dead.rename(elsewhere)
    save(tmp_path / "checkpoint-1", 1)
    assert not elsewhere.exists()


def save_on_ranks(path: Path, how: str) -> list[str]:
    """Saves on all ranks; returns what is beside the checkpoint."""
    rank = dist.get_rank()
    state = {f"of rank {rank}": full_value(f"{rank}", (40, 5), torch.int32)}
    if how == "process":
        future = dcp.async_save(
            state,
            storage_writer=FastWriter(path),
            async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
        )
        assert not isinstance(future, dcp.state_dict_saver.AsyncSaveResponse)
        future.result()
    elif how == "thread":
        torch_ckpt.async_save(state, storage_writer=FastWriter(path)).result()
    elif how == "ours":
        torch_ckpt.save(state, checkpoint_id=path)
    elif how == "own metadata":
        dcp.save(state, storage_writer=FastWriter(path), use_collectives=False)
    elif how == "plan caching":
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=FastWriter(path), planner=planner)
    else:
        dcp.save(state, storage_writer=FastWriter(path))
    dist.barrier()
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(loaded, storage_reader=READERS["fast"](path))
    assert_same(loaded, state)
    return sorted(os.listdir(path.parent))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "how", ["stock", "ours", "thread", "process", "own metadata", "plan caching"]
)
def test_all_ranks_write_to_one_directory(worlds: Worlds, tmp_path: Path, how: str) -> None:
    for number in range(2):
        seen = worlds.run(2, save_on_ranks, tmp_path / f"{number}", how)
        assert seen == [[f"{n}" for n in range(number + 1)]] * 2


def test_names_that_are_no_temporaries_are_left_alone(tmp_path: Path) -> None:
    names = [".checkpoint-1.partial", ".x.0123456789abcdef.partial", ".a.b.c.partial", "x.partial"]
    for name in names:
        (tmp_path / name).mkdir()
    remove_abandoned(Location(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(names)
