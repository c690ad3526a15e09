"""The directory of a new checkpoint appears when it is whole, so scripts may resume from it."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import Forks
from ranks import Worlds
from states import READERS, assert_same, assert_stored, failures_of, full_value, tensors_of
from stops import run_stopped
from syscalls import can_stop
from torch.distributed.checkpoint import DefaultSavePlanner

import torch_ckpt
from torch_ckpt import FastSavePlanner, FastWriter, SafetensorsWriter
from torch_ckpt._core import _native
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.temporary import remove_abandoned, temporary
from torch_ckpt.errors import AlreadyExistsError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id
from torch_ckpt.storage.rank_files import RankFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

needs_stops = pytest.mark.skipif(not can_stop(), reason="no system calls can be stopped here")
SHAPES = {"small": (7, 5), "large": (300, 100)}
TIMEOUT_S = 60
SAVES = ["stock planner", "fast planner"]


def state_of(version: int) -> dict[str, Any]:
    return tensors_of(SHAPES, version, torch.int32) | {"version": torch.tensor(version)}


def save(path: Path, version: int, how: str = "stock planner") -> None:
    planner = DefaultSavePlanner() if how == "stock planner" else FastSavePlanner()
    dcp.save(state_of(version), storage_writer=FastWriter(path), planner=planner, no_dist=True)


def assert_holds(path: Path, version: int) -> None:
    assert_stored(path, state_of(version), no_dist=True)


def _by_whole_names(run: Path) -> int:
    found = map(re.compile(r"checkpoint-(\d+)").fullmatch, os.listdir(run))
    return max(int(match[1]) for match in found if match)


def _by_probes(run: Path) -> int:
    """As torchtitan does, which searches in names and looks for metadata."""
    return max(
        int(match[1])
        for name in os.listdir(run)
        if (match := re.search(r"checkpoint-(\d+)", name)) and (run / name / ".metadata").is_file()
    )


def _by_digits(run: Path) -> int:
    return max(int(digits) for name in os.listdir(run) for digits in re.findall(r"\d+", name))


def _by_parts(run: Path) -> int:
    return max(int(name.split("-")[1]) for name in os.listdir(run) if "-" in name)


SEARCHES = [_by_whole_names, _by_probes, _by_digits, _by_parts]
"""How scripts find the checkpoint to resume from."""


def resume(run: Path, how: str) -> str:
    """Resumes as many scripts do, and saves; returns what they resume from."""
    found = {search.__name__: search(run) for search in SEARCHES}
    (number,) = set(found.values())
    path = run / f"checkpoint-{number}"
    assert_holds(path, number)
    save(run / "checkpoint-3", 3, how)
    return path.name


@needs_stops
@pytest.mark.timeout(900)
@pytest.mark.thin("stock planner")
@pytest.mark.parametrize("how", SAVES)
def test_a_script_that_resumes_from_the_highest_number_survives_a_kill_at_any_call(
    tmp_path: Path, how: str, seed: int, full: bool
) -> None:
    forks = Forks()
    template = tmp_path / "template"
    forks.call(save, template / "checkpoint-1", 1, how)
    found = []
    for number in itertools.count(0, 1) if full else itertools.count(seed % 4, 4):
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
    assert_holds(path, 1)
    assert os.listdir(tmp_path) == ["checkpoint"]


class Hiding(FastWriter):
    """A subclass that promises to write no other files."""

    _hides = True


class _Meddled(Hiding):
    """Somebody makes the directory while the save writes."""

    meddle: Callable[[Path], None]

    def finish(self, *args: Any, **kwargs: Any) -> None:
        """Commits after that."""
        assert not Path(self.path).exists()
        self.meddle(Path(self.path))
        super().finish(*args, **kwargs)


def _make(path: Path) -> None:
    path.mkdir()
    (path / "notes.json").write_text("{}")


def _make_link(path: Path) -> None:
    """A directory cannot be renamed to a link: ENOTDIR."""
    path.with_name("other").mkdir()
    path.symlink_to("other")
    (path / "notes.json").write_text("{}")


@pytest.mark.parametrize("meddle", [_make, _make_link])
def test_a_directory_that_somebody_makes_meanwhile_keeps_its_files(
    tmp_path: Path, meddle: Callable[[Path], None]
) -> None:
    path = tmp_path / "checkpoint"
    writer = _Meddled(path)
    writer.meddle = meddle
    dcp.save(state_of(1), storage_writer=writer, planner=FastSavePlanner(), no_dist=True)
    assert_holds(path, 1)
    assert (path / "notes.json").read_text() == "{}"
    assert len(os.listdir(path)) == 4
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_has_the_name_fails_the_save_which_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    writer = _Meddled(path)
    writer.meddle = lambda path: path.write_text("a file")
    failed = failures_of(dcp.save, state_of(1), storage_writer=writer, no_dist=True)
    assert failed[0].kind == StorageError.__name__
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert path.read_text() == "a file"


def test_a_subclass_may_write_to_the_directory_at_any_time(tmp_path: Path) -> None:
    class Noting(FastWriter):
        def write_data(self, *args: Any) -> Any:
            Path(self.path, "rank.json").write_text("{}")
            return super().write_data(*args)

        def finish(self, *args: Any, **kwargs: Any) -> None:
            """Commits after a file of its own."""
            Path(self.path, "all.json").write_text("{}")
            super().finish(*args, **kwargs)

    path = tmp_path / "checkpoint"
    dcp.save(state_of(1), storage_writer=Noting(path), no_dist=True)
    assert_holds(path, 1)
    assert {"rank.json", "all.json"} < set(os.listdir(path))
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_commit_whose_reply_was_lost_is_a_commit(
    tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where the client then repeats the rename, and finds nothing to rename."""
    path = tmp_path / "checkpoint"
    if exists:
        path.mkdir()
    commit = _native.FileSystem.commit

    def commit_twice(*args: Any) -> None:
        commit(*args)
        raise NotFoundError("cannot rename")

    with monkeypatch.context() as patched:
        patched.setattr(_native.FileSystem, "commit", commit_twice)
        save(path, 1)
    assert_holds(path, 1)
    assert os.listdir(tmp_path) == ["checkpoint"]


def _save_with_one_that_fails(path: Path, how: str) -> list[str]:
    """Rank 1 cannot write; returns what the ranks have left."""
    rank = dist.get_rank()
    state = {f"of rank {rank}": full_value(f"{rank}", (400, 50), torch.int32)}
    write = RankFiles.write

    def fail(self: RankFiles, *args: Any, **options: Any) -> Any:
        if rank == 1:
            raise OSError(errno.ENOSPC, "no space")
        return write(self, *args, **options)

    with mock.patch.object(RankFiles, "write", fail):
        assert failures_of(FAILING[how], state, storage_writer=FastWriter(path))
    gc.collect()
    dist.barrier()
    return os.listdir(path.parent)


def _save_in_thread(state: dict[str, Any], **options: Any) -> None:
    torch_ckpt.async_save(state, **options).result()


FAILING = {"stock": dcp.save, "ours": torch_ckpt.save, "thread": _save_in_thread}


@pytest.mark.timeout(180)
@pytest.mark.thin("ours", "stock")
@pytest.mark.parametrize("how", [*FAILING])
def test_saves_that_fail_on_another_rank_do_not_fill_the_disk(
    worlds: Worlds, tmp_path: Path, how: str
) -> None:
    for number in range(3):
        left, _ = worlds.run(2, _save_with_one_that_fails, tmp_path / f"{number}", how)
        assert len(left) <= (how == "stock")
    (tmp_path / "latest").mkdir()
    worlds.run(2, save_on_ranks, tmp_path / "latest", how)
    assert os.listdir(tmp_path) == ["latest"]


def _look_ups(path: Path) -> list[str]:
    """Returns the names beside the checkpoint that a save looks up on this rank."""
    seen = []
    for name in ("exists", "list_directory", "create_directories", "renames_directories"):
        function = getattr(_native.FileSystem, name)

        def record(self: Any, path: Any, function: Any = function) -> Any:
            seen.append(str(path))
            return function(self, path)

        setattr(_native.FileSystem, name, record)
    dist.barrier()
    dcp.save({"a": torch.ones(3)}, storage_writer=FastWriter(path))
    return seen


def test_only_the_coordinator_looks_up_what_is_not_there_yet(tmp_path: Path) -> None:
    forks = Worlds()
    try:
        first, second = forks.run(2, _look_ups, tmp_path / "checkpoint")
    finally:
        forks.close()
    assert str(tmp_path / "checkpoint") in first
    assert str(tmp_path / "checkpoint") not in second


def test_a_checkpoint_that_another_save_commits_meanwhile_is_not_overwritten_against_the_will(
    tmp_path: Path,
) -> None:
    path = tmp_path / "checkpoint"

    class Late(Hiding):
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


@pytest.mark.parametrize("how", ["fast", "file", "shards"])
def test_a_directory_that_exists_is_not_overwritten_against_the_will_either(
    tmp_path: Path, how: str
) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()

    has_begun, may_commit, has_committed = (threading.Event() for _ in range(3))

    class First(SafetensorsWriter if how != "fast" else FastWriter):  # type: ignore[misc]
        def finish(self, *args: Any, **kwargs: Any) -> None:
            """Commits while the other save is in progress, of which it does not know."""
            has_begun.set()
            assert may_commit.wait(TIMEOUT_S)
            super().finish(*args, **kwargs)
            has_committed.set()

    class Second(SafetensorsWriter if how != "fast" else FastWriter):  # type: ignore[misc]
        def finish(self, *args: Any, **kwargs: Any) -> None:
            """Commits after the other save."""
            may_commit.set()
            assert has_committed.wait(TIMEOUT_S)
            super().finish(*args, **kwargs)

    def save_as(writer: Any, version: int) -> None:
        most = {"max_shard_nbytes": 1} if how == "shards" else {}
        writer = writer(path, overwrite=False, **most)
        state = state_of(version)
        dcp.save(state, storage_writer=writer, planner=FastSavePlanner(), no_dist=True)

    first = threading.Thread(target=save_as, args=(First, 1))
    first.start()
    assert has_begun.wait(TIMEOUT_S)
    failed = failures_of(save_as, Second, 2)
    first.join()
    assert failed[0].kind == AlreadyExistsError.__name__
    state = {key: torch.zeros_like(value) for key, value in state_of(1).items()}
    dcp.load(state, storage_reader=READERS["fast"](path), no_dist=True)
    assert_same(state, state_of(1))
    assert len(os.listdir(path)) == {"fast": 3, "file": 1, "shards": 4}[how]


def test_a_save_that_fails_leaves_the_small_files_of_another_one(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    class Late(Hiding):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            """Commits after another save has committed."""
            other = FastWriter(path)
            other.small_files = {"metrics.json": b"of the other"}
            dcp.save(state_of(1), storage_writer=other, no_dist=True)
            super().finish(*args, **kwargs)

    late = Late(path, overwrite=False)
    late.small_files = {"metrics.json": b"of the late one"}
    failed = failures_of(dcp.save, state_of(2), storage_writer=late, no_dist=True)
    assert failed[0].kind == AlreadyExistsError.__name__
    assert_holds(path, 1)
    assert (path / "metrics.json").read_bytes() == b"of the other"


def test_a_save_that_is_ended_while_it_moves_its_files_names_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"

    class Late(Hiding):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            """Commits after another save, of a machine that does not know that this one lives."""
            (self.hidden,) = partials(tmp_path)
            save(path, 1)
            super().finish(*args, **kwargs)

    create = CheckpointTransaction._create_pending
    writer = Late(path)

    def lose_and_create(self: CheckpointTransaction) -> Location:
        if self.is_hidden:
            shutil.rmtree(writer.hidden)
        return create(self)

    monkeypatch.setattr(CheckpointTransaction, "_create_pending", lose_and_create)
    failed = failures_of(dcp.save, state_of(2), storage_writer=writer, no_dist=True)
    assert f"another save, {committed_id(Location(path))}" in failed[0].message
    assert_holds(path, 1)
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert len(os.listdir(path)) == 3


def _save_that_is_ended_on_rank_1(path: Path) -> str:
    write = RankFiles.write

    def lose_and_write(self: RankFiles, *args: Any, **options: Any) -> Any:
        dist.barrier()
        if dist.get_rank() == 1:
            for partial in partials(path.parent):  # Renamed first: the other rank writes to it.
                shutil.rmtree(partial.rename(path.parent / "ended"))
        return write(self, *args, **options)

    with mock.patch.object(RankFiles, "write", lose_and_write):
        state = {f"of rank {dist.get_rank()}": torch.ones(30)}
        return failures_of(dcp.save, state, storage_writer=FastWriter(path))[1].message


@pytest.mark.timeout(180)
def test_a_rank_whose_first_file_cannot_be_opened_says_what_may_have_removed_it(
    worlds: Worlds, tmp_path: Path
) -> None:
    failed, _ = worlds.run(2, _save_that_is_ended_on_rank_1, tmp_path / "checkpoint")
    assert "files of this save are gone" in failed
    assert "another save or program may have removed them, or a rank of this save" in failed
    assert not os.listdir(tmp_path)


def _save_as_nobody(path: Path) -> None:
    if os.geteuid() == 0:  # Root may list everything.
        os.seteuid(65534)
    failures_of(save, path, 1)  # It cannot sync the parent of the directory that it has made.
    save(path, 1)
    assert_holds(path, 1)


def test_a_parent_that_must_not_be_listed_gets_no_hidden_directory() -> None:
    parent = Path(tempfile.mkdtemp())
    try:
        parent.chmod(0o333)
        Forks().call(_save_as_nobody, parent / "checkpoint")
        parent.chmod(0o700)
        assert os.listdir(parent) == ["checkpoint"]
    finally:
        parent.chmod(0o700)
        shutil.rmtree(parent)


def fail_to_save(path: Path) -> None:
    class Failing(Hiding):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            with mock.patch.object(CheckpointTransaction, "check", side_effect=OSError("a test")):
                super().finish(*args, **kwargs)

    failed = failures_of(dcp.save, state_of(1), storage_writer=Failing(path), no_dist=True)
    assert failed


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    fail_to_save(tmp_path / "checkpoint")
    assert not os.listdir(tmp_path)


def leave_partial(run: Path, name: str = "checkpoint-1") -> str:
    """Dies in the middle of a save."""

    class Dying(Hiding):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            """Never commits."""
            os._exit(0)

    dcp.save(state_of(1), storage_writer=Dying(run / name), no_dist=True)
    raise AssertionError


def partials(run: Path) -> list[Path]:
    return sorted(run.glob(".*"))


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

    class Watching(Hiding):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            """Commits after another checkpoint."""
            (own,) = partials(tmp_path)
            save(tmp_path / "checkpoint-5", 5)
            forks.call(save, tmp_path / "checkpoint-6", 6)
            seen.append(partials(tmp_path) == [own])
            super().finish(*args, **kwargs)

    dcp.save(state_of(4), storage_writer=Watching(tmp_path / "checkpoint-4"), no_dist=True)
    assert seen == [True]
    assert sorted(os.listdir(tmp_path)) == [f"checkpoint-{n}" for n in (4, 5, 6)]
    assert_holds(tmp_path / "checkpoint-4", 4)


def test_directories_of_other_machines_are_removed_once_nobody_has_written_for_a_day(
    tmp_path: Path,
) -> None:
    dead = leave_dead_partial(Forks(), tmp_path)
    *parts, _, pid, start = dead.name.split(".")
    elsewhere = dead.with_name(".".join([*parts, "aaaaaaaa", pid, start]))
    dead.rename(elsewhere)
    save(tmp_path / "checkpoint-2", 2)
    assert elsewhere.exists()
    deep = elsewhere / "zero" / "layer" / "fp32.pt"
    deep.parent.mkdir(parents=True)
    deep.write_text("as in a universal folder")
    day_ago = time.time() - 25 * 3600
    for file in [*(set(elsewhere.rglob("*")) - {deep}), elsewhere]:
        os.utime(file, (day_ago, day_ago))
    save(tmp_path / "checkpoint-3", 3)
    assert elsewhere.exists()
    with mock.patch.object(
        time, "time", return_value=day_ago + 50 * 3600
    ):  # A clock that is ahead.
        save(tmp_path / "checkpoint-3", 3)
    assert elsewhere.exists()
    os.utime(deep, (day_ago, day_ago))
    with mock.patch.object(time, "time", return_value=day_ago):  # A clock that is behind.
        save(tmp_path / "checkpoint-3", 3)
    assert not elsewhere.exists()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    # The directory of a save that is replaced by this one is removed at once.
    dead = leave_dead_partial(Forks(), tmp_path)
    dead.rename(elsewhere)
    save(tmp_path / "checkpoint-1", 1)
    assert not elsewhere.exists()


def test_a_dead_first_save_is_removed_by_a_save_to_a_directory_that_exists(tmp_path: Path) -> None:
    leave_dead_partial(Forks(), tmp_path)
    (tmp_path / "checkpoint-1").mkdir()
    save(tmp_path / "checkpoint-1", 1)
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_a_name_may_be_as_long_as_the_file_system_permits(tmp_path: Path) -> None:
    path = tmp_path / ("y" * 255)
    forks = Forks()
    with pytest.raises(AssertionError, match="ended without a word"):
        forks.call(leave_partial, tmp_path / "run", path.name)
    assert not list((tmp_path / "run").glob("y*"))
    save(path, 1)
    assert_holds(path, 1)


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
    "how",
    [
        *("stock", "ours", "thread", "own metadata", "plan caching"),
        pytest.param("process", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_write_to_one_directory(worlds: Worlds, tmp_path: Path, how: str) -> None:
    for number in range(2):
        seen = worlds.run(2, save_on_ranks, tmp_path / f"{number}", how)
        assert seen == [[f"{n}" for n in range(number + 1)]] * 2


def test_names_that_are_no_temporaries_are_left_alone(tmp_path: Path) -> None:
    own = temporary(Location(tmp_path / "x"), "partial").name
    names = [
        ".checkpoint-1.partial",
        ".partial.a.b.c",
        "x.partial",
        own[1:],
        own.replace("partial", "another"),
        f"{own}{'p' * 20}",
        own.rpartition(".")[0].rpartition(".")[0] + f".{'p' * 20}.g",  # No process id is so long.
    ]
    for name in names:
        (tmp_path / name).mkdir()
    remove_abandoned(Location(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(names)


def test_names_of_temporaries_have_no_digits(tmp_path: Path) -> None:
    name = temporary(Location(tmp_path / "step-7"), "partial").name
    assert re.fullmatch(r"[a-z.]+", name)
