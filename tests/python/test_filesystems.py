"""One door to files: everything reaches a checkpoint through the file system of its location."""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import data_files
from support.commit_files import index_file
from support.run_steps import names_in_run
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, Run, SafetensorsWriter
from torch_ckpt.cli.main import main
from torch_ckpt.errors import NotFoundError, StorageError, UnsupportedError
from torch_ckpt.filesystems.location import Location, register

ELSEWHERE = "/no-such-directory"

_THERE = re.compile(f"(elsewhere:/*)?{ELSEWHERE}")
_opened: list[tuple[str, str]] = []
_watches = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watches:
        return
    for argument in arguments:
        if isinstance(argument, str | bytes | Path) and _THERE.match(os.fsdecode(argument)):
            _opened.append((event, os.fsdecode(argument)))


sys.addaudithook(_watch)  # For good: no hook can be removed.


@pytest.fixture
def elsewhere(recorder: Any, tmp_path: Path) -> Iterator[Path]:
    """A folder that has what ``elsewhere://`` is told to keep.

    Fails where Python was asked for a file under the path that follows the scheme.
    """
    global _watches
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    register("elsewhere", recorder.ElsewhereFileSystem(str(folder)))
    _opened.clear()
    _watches = True
    yield folder
    _watches = False
    assert not _opened
    assert not Path(ELSEWHERE).exists()


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((300, 7), float(step)), "b": torch.arange(5) + step, "step": step}


def assert_of(state: dict[str, Any], step: int) -> None:
    torch.testing.assert_close(state, state_of(step), rtol=0, atol=0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_and_a_load_use_no_other_door(elsewhere: Path, asynchronous: bool) -> None:
    path = f"elsewhere://{ELSEWHERE}/step"
    for step in (1, 2):  # The second replaces the first.
        if asynchronous:
            dcp.async_save(state_of(step), storage_writer=FastWriter(path)).result()
        else:
            dcp.save(state_of(step), storage_writer=FastWriter(path, thread_count=2))
        step_directory = elsewhere / ELSEWHERE[1:] / "step"
        assert len(data_files(step_directory)) == (1 if asynchronous else 2)
        names = {file.name for file in step_directory.iterdir() if file.suffix != ".distcp"}
        assert names == {".metadata", index_file(step_directory).name}
        for stored in (path, elsewhere / ELSEWHERE[1:] / "step"):
            loaded = state_of(-1)
            dcp.load(loaded, storage_reader=FastReader(stored))
            assert_of(loaded, step)
    with pytest.raises(CheckpointException, match=f"AlreadyExistsError.*{path}"):
        torch_ckpt.save(state_of(3), storage_writer=FastWriter(path, overwrite=False))


def test_a_run_uses_no_other_door(elsewhere: Path) -> None:
    directory = f"elsewhere://{ELSEWHERE}/run"
    with Run(directory, keep_last=2, asynchronous=True, verify="full") as run:
        assert run.directory == directory
        for step in range(4):
            run.save(step, state_of(step))
        run.wait()
        loaded = state_of(-1)
        assert run.restore(loaded) == 3
        assert_of(loaded, 3)
    kept = elsewhere / ELSEWHERE[1:] / "run"
    assert names_in_run(kept) == ["step-2", "step-3"]
    damaged = next((kept / "step-3").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with Run(directory) as run, pytest.warns(UserWarning, match="step 3 is passed over"):
        assert run.restore(loaded) == 2


def test_commands_use_no_other_door(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"elsewhere://{ELSEWHERE}/step"
    torch_ckpt.save(state_of(1), storage_writer=FastWriter(path))
    assert main(["verify", path]) == 0
    assert main(["inspect", path]) == 0
    assert "w" in capsys.readouterr().out


@pytest.mark.parametrize("max_shard_nbytes", [100, 1 << 30])
def test_safetensors_use_no_other_door(elsewhere: Path, max_shard_nbytes: int) -> None:
    path = f"elsewhere://{ELSEWHERE}/model"
    tensors = {"w": torch.randn(30, 7), "b": torch.arange(5)}
    writer = SafetensorsWriter(path, max_shard_nbytes=max_shard_nbytes)
    for _ in range(2):
        dcp.save(tensors, storage_writer=writer)
    loaded = {fqn: torch.zeros_like(tensor) for fqn, tensor in tensors.items()}
    dcp.load(loaded, storage_reader=FastReader(path))
    torch.testing.assert_close(loaded, tensors, rtol=0, atol=0)


def test_files_of_torch_save_use_no_other_door(elsewhere: Path) -> None:
    """Also where torch has to make tensors, of storages that no process can map."""
    quantised = torch.quantize_per_tensor(torch.randn(40), 0.1, 3, torch.quint8)
    saved = {"w": torch.randn(2000), "q": quantised, "nested": {"step": 7}}
    folder = elsewhere / ELSEWHERE[1:]
    folder.mkdir()
    stream = io.BytesIO()
    torch.save(saved, stream)
    (folder / "model.pt").write_bytes(stream.getvalue())
    loaded = {
        "w": torch.zeros(2000),
        "q": torch.quantize_per_tensor(torch.zeros(40), 0.1, 3, torch.quint8),
        "nested": {"step": 0},
    }
    dcp.load(loaded, storage_reader=FastReader(f"elsewhere://{ELSEWHERE}/model.pt"))
    assert torch.equal(loaded["w"], saved["w"])
    assert torch.equal(loaded["q"].int_repr(), quantised.int_repr())
    assert loaded["nested"] == {"step": 7}


def test_a_file_url_is_a_path_of_this_machine(tmp_path: Path) -> None:
    torch_ckpt.save(state_of(1), checkpoint_id=f"file://{tmp_path}/step")
    assert (tmp_path / "step" / ".metadata").exists()
    loaded = state_of(-1)
    torch_ckpt.load(loaded, checkpoint_id=f"file://{tmp_path}/step")
    assert_of(loaded, 1)
    assert FastWriter(f"file://{tmp_path}/step").path == tmp_path / "step"


@pytest.mark.parametrize("make", [FastWriter, SafetensorsWriter, FastReader, Run])
def test_a_scheme_that_nobody_has_registered_is_refused(make: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=re.escape("cannot reach nowhere://bucket/run: no file")
    ):
        make("nowhere://bucket/run")


def test_a_location_has_the_names_of_its_path(tmp_path: Path) -> None:
    location = Location(tmp_path) / "folder" / "file"
    assert (location.name, str(location.parent)) == ("file", str(tmp_path / "folder"))
    assert location.with_name("other") == Location(tmp_path / "folder" / "other")
    assert pickle.loads(pickle.dumps(location)) == location
    assert [str(above) for above in Location("/a/b/c").parents] == ["/a/b", "/a", "/"]


def test_a_location_reaches_its_file(tmp_path: Path) -> None:
    folder = Location(tmp_path) / "new" / "folder"
    assert not folder.is_file()
    with pytest.raises(NotFoundError):
        folder.names()
    folder.create_directories()
    file = folder / "file"
    with pytest.raises(NotFoundError):
        file.nbytes()
    file.write(b"0123456789", sync=True)
    with pytest.raises(StorageError, match="exists"):
        file.write(b"", sync=False)
    assert (file.is_file(), folder.is_file(), file.nbytes()) == (True, False, 10)
    assert (file.read(), file.read_range(8, 5)) == (b"0123456789", (10, b"89"))
    with file.open() as stream:
        stream.seek(-4, io.SEEK_END)
        assert stream.read(2) == b"67"
        stream.seek(1, io.SEEK_CUR)
        assert stream.read() == b"9"
    file.rename(folder / "other")
    assert folder.names() == ["other"]
    (folder / "other").discard()
    (folder / "other").discard()
    assert folder.names() == []


def test_a_directory_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("stays")
    folder = tmp_path / "folder"
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "deep" / "file").write_text("goes")
    (folder / "link").symlink_to(outside)
    Location(folder).remove_all()
    assert not folder.exists()
    assert (outside / "file").read_text() == "stays"
    Location(folder).remove_all()  # Two may do so at a time.
