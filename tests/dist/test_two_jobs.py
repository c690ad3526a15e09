"""Several jobs save to one path: it has a whole checkpoint of a save that has returned, always."""

from __future__ import annotations

import itertools
import random
import shutil
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forks import Forks
from states import READERS, assert_same, tensors_of
from stops import run_stopped
from syscalls import can_stop

from torch_ckpt import FastSavePlanner, FastWriter, SafetensorsWriter
from torch_ckpt._core import _native
from torch_ckpt.commits import late_names
from torch_ckpt.commits.garbage import find, pending_pattern, stale_files
from torch_ckpt.commits.model import ModelTransaction
from torch_ckpt.coordination import owner
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

needs_stops = pytest.mark.skipif(not can_stop(), reason="no system calls can be stopped here")
TIMEOUT_S = 60
SHAPES = {"small": (7, 5), "large": (300, 100)}


def state_of(version: int) -> dict[str, torch.Tensor]:
    return tensors_of(SHAPES, version, torch.int32) | {"version": torch.tensor(version)}


def save(path: Path, version: int, how: str) -> None:
    """Saves a version as a job does that has one rank."""
    state = state_of(version)
    with mock.patch.object(late_names, "APPEARS_S", 0.3):  # Names appear at once on this disk.
        if how == "fast":
            dcp.save(state, storage_writer=FastWriter(path), no_dist=True)
        else:
            most = 1 if how == "shards" else 1 << 30
            writer = SafetensorsWriter(path, max_shard_nbytes=most)
            dcp.save(state, storage_writer=writer, planner=FastSavePlanner(), no_dist=True)


def loaded(path: Path, how: str) -> int:
    """The version that each reader finds, whole."""
    found = set()
    for name, reader in READERS.items():
        if name == "stock" and how != "fast":
            continue
        state = state_of(-1)
        dcp.load(state, storage_reader=reader(path), no_dist=True)
        version = int(state["version"])
        assert_same(state, state_of(version))
        found.add(version)
    assert len(found) == 1, found
    return found.pop()


def aftermath(path: Path, how: str) -> tuple[int, str | None, int]:
    """Returns the version that is there and its save id, and the version after another save."""
    before, save_id = loaded(path, how), committed_id(Location(path))
    save(path, 4, how)
    return before, save_id, loaded(path, how)


def save_elsewhere(path: Path, version: int, how: str) -> None:
    """Saves as a job of another machine, which does not know whether processes here live."""
    owner._machine = lambda: "01234567"
    save(path, version, how)


COMMITTED = {
    "fast": ".metadata",
    "file": "model.safetensors",
    "shards": "model.safetensors.index.json",
}


@needs_stops
@pytest.mark.timeout(600)
@pytest.mark.thin("overwrite-here-fast", "first save-here-shards")
@pytest.mark.parametrize("how", ["fast", "file", "shards"])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("overwrites", [True, False], ids=["overwrite", "first save"])
def test_a_save_within_a_save_at_every_call(
    tmp_path: Path, overwrites: bool, how: str, where: str, seed: int, full: bool
) -> None:
    forks = Forks()
    inner = save if where == "here" else save_elsewhere
    template = tmp_path / "template"
    forks.call(save, template, 1, how)
    failed: list[str] = []
    for number in itertools.count(0, 1) if full else itertools.count(seed % 8, 8):
        path = tmp_path / f"{number}"
        if overwrites:
            shutil.copytree(template, path)

        def before(at: int, call: str, path: Path = path, number: int = number) -> bool:
            if at == number:
                forks.call(inner, path, 3, how)
            return True

        whole = run_stopped(forks, tmp_path, before, save, path, 2, how)
        if number >= len(whole.calls):
            break
        at = f"at call {number} of {whole.calls}"
        found, save_id, after = forks.call(aftermath, path, how)
        if whole.error is None:
            commits = {f"rename {number}", f"rename {number}/{COMMITTED[how]}"}
            commit = max(at for at, call in enumerate(whole.calls) if call in commits)
            assert found == (2 if number <= commit else 3), at
        else:
            failed.append(whole.calls[number])
            assert found == 3, at
            assert "another save" in whole.error, f"{at}: {whole.error}"
            if how == "fast":
                assert str(save_id) in whole.error, f"{at}: {whole.error}"
        assert after == 4, at
        assert len(list(path.iterdir())) <= 4, f"{at} leaves {sorted(path.iterdir())}"
        assert not list(tmp_path.glob(".*")), at
    assert failed or not overwrites or not full, "no save has lost"


def _race(
    pipe: connection.Connection, path: Path, how: str, versions: list[int], seed: int
) -> None:
    """A job: saves some versions; sends what became of each."""
    rng = random.Random(seed)
    pipe.send("ready")
    pipe.recv()
    for version in versions:
        time.sleep(rng.choice([0, 0, rng.uniform(0, 0.02)]))
        try:
            save(path, version, how)
        except BaseException as error:
            pipe.send((version, f"{error}"))
        else:
            pipe.send((version, None))
    pipe.send(None)


def race(forks: Forks, path: Path, how: str, seed: int, saves: int = 6) -> list[str]:
    """Two or three jobs save at once; returns what is wrong then."""
    rng = random.Random(seed)
    jobs = rng.choice([2, 2, 3])
    started = [
        forks.start(_race, path, how, [100 * job + n for n in range(saves)], rng.random())
        for job in range(jobs)
    ]
    outcomes: dict[int, str | None] = {}
    try:
        for _, pipe in started:
            assert pipe.poll(TIMEOUT_S)
            pipe.recv()
        for _, pipe in started:
            pipe.send("go")
        waiting = [pipe for _, pipe in started]
        while waiting:
            ready = connection.wait(waiting, TIMEOUT_S)
            assert ready, "hangs"
            for pipe in ready:
                got = pipe.recv()
                if got is None:
                    waiting.remove(pipe)
                else:
                    outcomes[got[0]] = got[1]
    finally:
        for process, pipe in started:
            process.kill()
            process.join()
            pipe.close()
    wrong = [
        f"seed {seed}: {version} failed: {error}"
        for version, error in outcomes.items()
        if error is not None and "another save" not in error
    ]
    returned = [version for version, error in outcomes.items() if error is None]
    try:
        found = forks.call(loaded, path, how)
    except AssertionError as error:
        return [*wrong, f"seed {seed}: {len(returned)} saves have returned, and {error}"]
    if found not in returned:
        wrong.append(f"seed {seed}: found {found}, whose save has failed: {outcomes}")
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["fast", "shards"])
def test_jobs_that_race_leave_a_checkpoint_that_loads(
    tmp_path: Path, seed: int, full: bool, how: str
) -> None:
    forks = Forks()
    wrong = []
    for number in range(200 if full else 4):
        wrong += race(forks, tmp_path / f"{number}", how, seed + number)
    assert not wrong, "\n".join(wrong)


def test_metadata_of_a_rank_that_commits_between_two_listings_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the data files in the first listing would belong to no checkpoint."""
    pending = tmp_path / "__1.metadata.0123456789abcdef.tmp"
    for path in (pending, tmp_path / "__1_0_0123456789abcdef.distcp"):
        path.write_text("of rank 1 alone")
    names = Location.names

    def list_and_commit(self: Location) -> list[str]:
        found = names(self)
        if pending.exists():
            pending.rename(tmp_path / "__1.metadata")
        return found

    monkeypatch.setattr(Location, "names", list_and_commit)
    found = find(Location(tmp_path), pending_pattern(None))
    assert not stale_files(found.names, (), None)


def test_a_save_that_fails_does_not_keep_an_old_model_beside_a_new_one(tmp_path: Path) -> None:
    """Some loaders open the name of a single file first."""
    path = tmp_path / "model"
    save(path, 1, "file")
    other = ModelTransaction(Location(path), "0123456789abcdef")
    other.begin()

    class Sharded(SafetensorsWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            """Commits after the other save has failed, and has removed its files."""
            other.abandon()
            super().finish(*args, **kwargs)

    writer = Sharded(path, max_shard_nbytes=1)
    dcp.save(state_of(2), storage_writer=writer, planner=FastSavePlanner(), no_dist=True)
    assert loaded(path, "shards") == 2
    assert not (path / "model.safetensors").exists()


def test_a_model_whose_reply_was_lost_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where the client then repeats the rename, and finds nothing to rename."""
    path = tmp_path / "model"
    rename = _native.FileSystem.rename

    def rename_twice(self: Any, one: Any, other: Any) -> None:
        rename(self, one, other)
        if str(other).endswith("model.safetensors"):
            raise NotFoundError("cannot rename")

    with monkeypatch.context() as patched:
        patched.setattr(_native.FileSystem, "rename", rename_twice)
        save(path, 1, "file")
    assert loaded(path, "file") == 1
