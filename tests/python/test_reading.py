"""A reader without a run holds a checkpoint: retention and later saves leave its files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command import run_command
from support.run_steps import save_steps, state_of, steps_in
from torch.distributed.checkpoint import FileSystemReader

import torch_ckpt
from torch_ckpt import FastReader, Run
from torch_ckpt.commits import leases
from torch_ckpt.errors import NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return save_steps(tmp_path / "run", 1, keep_last=1)


def leases_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob(".lease-*"))


# ---- Steps of a run ----


def test_a_step_that_is_read_by_its_path_survives_retention_until_the_block_ends(run: Run) -> None:
    path = Path(run.directory)
    with torch_ckpt.reading(path / "step-1") as step:
        run.save(2, state_of(2))
        run.save(3, state_of(3))
        assert steps_in(path) == [1, 3]
        state = state_of(-1)
        torch_ckpt.load(state, checkpoint_id=step)
        assert torch.equal(state["w"], state_of(1)["w"])
        dcp.load(state, storage_reader=FileSystemReader(step))
    assert leases_in(path) == []
    run.save(4, state_of(4))
    assert steps_in(path) == [4]


def test_ls_counts_the_leases_of_each_step_and_rm_and_gc_respect_them(run: Run) -> None:
    path = Path(run.directory)
    assert "leases" not in run_command("ls", path)[1]
    with torch_ckpt.reading(path / "step-1"), torch_ckpt.reading(path / "step-1"), run.lease(1):
        run.save(2, state_of(2))
        header, newer, older = run_command("ls", path)[1].splitlines()
        at = header.index("leases")
        assert older[at : at + 6].strip() == "3"
        assert newer[at : at + 6].strip() == ""
        status, printed = run_command("rm", path, "--step", "1", "--yes")
        assert status != 0
        assert "another process reads step 1 under a lease" in printed
        assert run_command("gc", path)[1] == "nothing to remove\n"
        assert steps_in(path) == [1, 2]


def test_a_link_that_moves_within_the_block_is_resolved_once(run: Run) -> None:
    path = Path(run.directory)
    link = path / "latest"
    link.symlink_to("step-1")
    with torch_ckpt.reading(link) as step:
        assert Path(step) == path.resolve() / "step-1"
        run.save(2, state_of(2))
        link.unlink()
        link.symlink_to("step-2")
        assert steps_in(path) == [1, 2]
        assert Path(step) == path.resolve() / "step-1"


def test_a_relative_path_is_a_path(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(run.directory) / "step-1")
    reading = torch_ckpt.reading(".")
    monkeypatch.chdir("/")  # A relative path is one at the time of the call.
    with reading:
        assert leases_in(Path(run.directory))[0].startswith(".lease-1-")


def test_a_step_of_a_store_is_held(store_url: str) -> None:
    with Run(store_url, keep_last=1, record=False) as run:
        run.save(1, state_of(1))
        with torch_ckpt.reading(f"{store_url}/step-1") as step:
            assert step == f"{store_url}/step-1"
            run.save(2, state_of(2))
            torch_ckpt.load(state_of(-1), checkpoint_id=step)
        run.save(3, state_of(3))
        with pytest.raises(NotFoundError):
            FastReader(step).read_metadata()


READER = """
import sys, torch_ckpt
with torch_ckpt.reading(sys.argv[1]):
    assert "torch" not in sys.modules
    print("reading", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["run/step-1", "model"])
def test_the_lease_of_a_process_that_was_killed_ends_at_once(
    name: str, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / name
    torch_ckpt.save(state_of(1), checkpoint_id=tmp_path / "model")
    with subprocess.Popen(
        [sys.executable, "-c", READER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        run.save(2, state_of(2))
        assert (1 in steps_in(tmp_path / "run")) == (name != "model")
        assert leases.is_leased(Location(path))
        reader.send_signal(signal.SIGKILL)
    assert not leases.is_leased(Location(path))
    run.save(3, state_of(3))
    assert steps_in(tmp_path / "run") == [3]
    assert leases_in(tmp_path) == []


# ---- Other checkpoints ----


def data_files(path: Path) -> set[str]:
    return {file.name for file in path.glob("*.distcp")}


@pytest.mark.parametrize("name", ["model", "run/step-1"])
def test_a_save_that_replaces_a_checkpoint_leaves_the_files_of_its_reader(
    name: str, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / name
    torch_ckpt.save(state_of(1), checkpoint_id=path)
    old = data_files(path)
    state = state_of(-1)
    with torch_ckpt.reading(path) as found:
        reader = FastReader(found)
        reader.read_metadata()
        opened = reader._opened  # A load opens once, and reads afterwards.
        torch_ckpt.save(state_of(2), checkpoint_id=path)
        assert old < data_files(path)
        reader._open = lambda *_: opened  # type: ignore[method-assign]
        torch_ckpt.load(state, storage_reader=reader)
        assert torch.equal(state["w"], state_of(1)["w"])
    torch_ckpt.load(state, checkpoint_id=path)
    assert torch.equal(state["w"], state_of(2)["w"])
    torch_ckpt.save(state_of(3), checkpoint_id=path)
    assert len(data_files(path)) == len(old)
    assert not old & data_files(path)


def test_a_save_on_a_store_leaves_the_objects_of_a_reader(store_url: str) -> None:
    path = Location(f"{store_url}/model")
    torch_ckpt.save(state_of(1), checkpoint_id=path.checkpoint_id)
    old = {name for name in path.names() if name.endswith(".distcp")}
    with torch_ckpt.reading(path.checkpoint_id):
        torch_ckpt.save(state_of(2), checkpoint_id=path.checkpoint_id)
        assert old < set(path.names())
    torch_ckpt.save(state_of(3), checkpoint_id=path.checkpoint_id)
    assert not old.intersection(path.names())
    assert not [name for name in path.names() if name.startswith(".lease-")]


def test_a_checkpoint_under_a_lease_loads_and_verifies_as_before(tmp_path: Path) -> None:
    torch_ckpt.save(state_of(1), checkpoint_id=tmp_path / "model")
    with torch_ckpt.reading(tmp_path / "model") as path:
        assert leases_in(tmp_path / "model")[0].startswith(".lease-")
        assert run_command("verify", path)[0] == 0
        state = state_of(-1)
        dcp.load(state, storage_reader=FileSystemReader(path))
        assert torch.equal(state["w"], state_of(1)["w"])


def test_an_expired_lease_of_another_machine_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "is_dead", lambda _: None)
    path = tmp_path / "model"
    torch_ckpt.save(state_of(1), checkpoint_id=path)
    old = data_files(path)
    with torch_ckpt.reading(path):
        [file] = path.glob(".lease-*")
        long_ago = time.time() - 400
        os.utime(file, (long_ago, long_ago))
        torch_ckpt.save(state_of(2), checkpoint_id=path)
        assert not old & data_files(path)
        assert leases_in(path) == []


# ---- Errors ----


def test_what_is_not_a_committed_checkpoint_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path / "run" / "step-7": f"cannot lease step 7 of {tmp_path / 'run'}: it is not a",
        tmp_path / "run": f"cannot lease {tmp_path / 'run'}: it is not a committed checkpoint",
        tmp_path / "empty": "it is not a committed checkpoint",
        tmp_path / "absent": "it is not a committed checkpoint",
    }
    for path, text in cases.items():
        with pytest.raises(NotFoundError) as caught, torch_ckpt.reading(path):
            pass
        assert text in str(caught.value)
    assert leases_in(tmp_path) == []


@pytest.mark.parametrize("name", ["model", "run/step-1"])
def test_a_lease_that_cannot_be_written_is_an_error(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ckpt.save(state_of(1), checkpoint_id=tmp_path / "model")

    def refuse(self: Location, *_: object, **__: object) -> None:
        raise StorageError(f"cannot write {self}: read-only file system (EROFS)")

    monkeypatch.setattr(Location, "replace", refuse)
    with (
        pytest.raises(StorageError, match=r"\.lease-.*EROFS"),
        torch_ckpt.reading(tmp_path / name),
    ):
        pass


def test_an_error_in_the_block_ends_the_lease(run: Run) -> None:
    with pytest.raises(ZeroDivisionError), torch_ckpt.reading(f"{run.directory}/step-1"):
        raise ZeroDivisionError
    assert leases_in(Path(run.directory)) == []
