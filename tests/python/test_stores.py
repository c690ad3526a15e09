"""Whole runs on object stores: saves, loads, runs and commands, by a real S3 server and fsspec."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from support.cutting import CuttingSavePlanner
from support.store_server import SeaweedFS, StoreServer
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from waits import SOON_S, until

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, FastWriter, Run, SafetensorsWriter
from torch_ckpt._core import _native
from torch_ckpt.agent import AgentOptions, SnapshotAgent, persist
from torch_ckpt.agent.memory import complete_slots, folder_of, has_agent, run_of
from torch_ckpt.cli.main import main
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError, UnsupportedError
from torch_ckpt.filesystems.location import Location, register
from torch_ckpt.process_state import PROCESS

pytestmark = pytest.mark.timeout(120)


radosgw = pytest.param("radosgw", marks=pytest.mark.slow)
hdfs = pytest.param("hdfs", marks=[pytest.mark.framework("hdfs_native"), pytest.mark.slow])


@pytest.fixture(params=["s3", "memory", radosgw, hdfs])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a folder of a store: of an S3 server, of fsspec's memory, of Ceph, or of HDFS."""
    if request.param == "memory":
        return f"memory://tests/{tmp_path.name}"
    if request.param != "s3":
        return str(request.getfixturevalue(f"{request.param}_url"))
    return str(request.getfixturevalue("store_url"))


def names_in(folder: str) -> list[str]:
    """The names in a folder, without the record and the term of a run.

    SeaweedFS still lists folders that have become empty.
    """
    place = Location(folder)
    names = (name for name in place.names() if not name.startswith(("events.", "term-")))
    return [name for name in names if (place / name).is_file() or (place / name).names()]


def state_of(step: int, rows: int = 300) -> dict[str, Any]:
    return {"w": torch.full((rows, 7), float(step)), "b": torch.arange(5) + step, "step": step}


def assert_of(state: dict[str, Any], step: int) -> None:
    rows = len(state["w"])
    torch.testing.assert_close(state, state_of(step, rows), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [300, 600_000])  # One request, and three parts.
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_replaces_the_former_one(folder: str, asynchronous: bool, rows: int) -> None:
    path = f"{folder}/step"
    for step in (1, 2):
        if asynchronous:
            dcp.async_save(state_of(step, rows), storage_writer=FastWriter(path)).result()
        else:
            writer = FastWriter(path, thread_count=2)
            dcp.save(state_of(step, rows), storage_writer=writer)
            assert "requests" in str(writer.io_mode)
        names = Location(path).names()
        assert len([name for name in names if name.endswith(".distcp")]) == 2 - asynchronous
        assert [name[:6] for name in names if not name.endswith(".distcp")] == [".index", ".metad"]
        loaded = state_of(-1, rows)
        dcp.load(loaded, storage_reader=FastReader(path))
        assert_of(loaded, step)
    with pytest.raises(CheckpointException, match=f"AlreadyExistsError.*{path}"):
        torch_ckpt.save(state_of(3), storage_writer=FastWriter(path, overwrite=False))


def test_a_run_saves_removes_and_restores(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Run(f"{folder}/run", keep_last=2, asynchronous=True, verify="full") as run:
        for step in range(4):
            run.save(step, state_of(step), metrics={"loss": 1.0 / (step + 1)})
        run.wait()
        loaded = state_of(-1)
        assert run.restore(loaded) == 3
        assert_of(loaded, 3)
        with run.lease(2) as leased:
            assert leased == f"{folder}/run/step-2"
            run.save(4, state_of(4), metrics={"loss": 0.0})
            run.wait()
    assert names_in(f"{folder}/run") == ["step-2", "step-3", "step-4"]
    with Run(f"{folder}/run", keep_last=2) as run:
        run.save(5, state_of(5))
    assert names_in(f"{folder}/run") == ["step-4", "step-5"]
    capsys.readouterr()
    assert main(["ls", f"{folder}/run"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown if "iB" in line] == ["5", "4"]
    assert main(["rm", f"{folder}/run", "--after", "4", "--yes"]) == 0
    assert names_in(f"{folder}/run") == ["step-4"]


def test_commands_read_a_store(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{folder}/step"
    torch_ckpt.save(state_of(1), storage_writer=FastWriter(path))
    for command in ("verify", "inspect"):
        assert main([command, path]) == 0
    assert "w" in capsys.readouterr().out
    assert main(["convert", path, f"{folder}/other", "--to", "dcp"]) == 0
    assert main(["diff", path, f"{folder}/other"]) == 0
    loaded = state_of(-1)
    dcp.load(loaded, storage_reader=FastReader(f"{folder}/other"))
    assert_of(loaded, 1)


def test_what_is_not_there_is_told(folder: str) -> None:
    with pytest.raises(CheckpointException, match=f"no checkpoint.*{folder}/step"):
        dcp.load(state_of(1), storage_reader=FastReader(f"{folder}/step"))
    with pytest.raises(NotFoundError, match=re.escape(f"{folder}/file")):
        Location(f"{folder}/file").read()


def test_damage_between_wanted_tensors_fails_no_load(folder: str) -> None:
    """A request for two tensors also reads the one between them."""
    two = torch.full((1 << 15,), 2.0)
    state = {"a": torch.ones(1 << 18), "b": two, "c": torch.full((1 << 18,), 3.0)}
    torch_ckpt.save(state, checkpoint_id=f"{folder}/step")
    (data,) = [name for name in Location(f"{folder}/step").names() if name.endswith(".distcp")]
    file = Location(f"{folder}/step/{data}")
    contents = bytearray(file.read())
    contents[contents.find(two.numpy().tobytes()) + 70_000] ^= 1
    file.replace(bytes(contents), sync=True)
    loaded = {name: torch.zeros_like(state[name]) for name in ("a", "c")}
    torch_ckpt.load(loaded, checkpoint_id=f"{folder}/step")
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)
    with pytest.raises(BaseException, match=r"cannot load 'b'"):
        torch_ckpt.load({"b": torch.zeros_like(two)}, checkpoint_id=f"{folder}/step")


def test_a_location_reaches_its_object(folder: str) -> None:
    place = Location(folder) / "of" / "locations"
    assert place.names() == []
    file = place / "file"
    file.write(b"0123456789", sync=True)
    file.write(b"0123456789", sync=True)  # As a client repeats a request whose answer was lost.
    with pytest.raises(StorageError, match=r"EEXIST|another one"):
        file.write(b"", sync=False)
    assert (file.is_file(), place.is_file(), place.is_directory()) == (True, False, True)
    assert (file.read(), file.read_range(8, 5), file.nbytes()) == (b"0123456789", (10, b"89"), 10)
    file.replace(b"other", sync=True)
    assert abs(Location(str(file)).modified_s() - file.modified_s()) < 1  # type: ignore[operator]
    file.rename(place / "second")
    (place / "empty").write(b"", sync=True)
    assert (place / "empty").read() == b""
    (place / "deep" / "third").write(b"3", sync=True)
    assert place.names() == ["deep", "empty", "second"]
    with pytest.raises(StorageError):
        place.rename(Location(folder) / "elsewhere")
    (place / "second").remove()
    (place / "second").discard()
    place.remove_all()
    assert names_in(str(place)) == []


def test_the_root_of_a_bucket_is_a_folder_as_any_other(
    store_server: StoreServer, store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = f"{store_url.rpartition('/')[0]}-root"
    assert isinstance(store_server, SeaweedFS)
    store_server.create_bucket(root.rpartition("/")[2])
    assert str(Location(root).parent) == root
    with pytest.raises(CheckpointException, match="no checkpoint"):
        torch_ckpt.load(state_of(1), checkpoint_id=root)
    with Run(root, keep_last=2) as run:
        for step in range(3):
            run.save(step, state_of(step))
        assert run.restore(state_of(-1)) == 2
        assert run.discard_after(1) == [2]
    assert main(["rm", root, "--after", "0", "--yes"]) != 0  # Nothing would remain.
    assert main(["ls", root]) == 0
    Location(f"{root}/step-1").remove_all()
    torch_ckpt.save(state_of(1), checkpoint_id=root)
    loaded = state_of(-1)
    torch_ckpt.load(loaded, checkpoint_id=root)
    assert_of(loaded, 1)
    with pytest.raises(NotFoundError, match="it is a checkpoint, not a run"):
        Run(root).restore(state_of(1))
    assert main(["verify", root]) == 0
    store_server.remove_bucket(root.rpartition("/")[2])


# ---- Models ----


def model_of(step: int, rows: int = 300) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state_of(step, rows).items() if name != "step"}


def assert_model(path: str, step: int, rows: int = 300) -> None:
    """FastReader and the loaders of Hugging Face find the same model there, and no other file."""
    loaded = model_of(-1, rows)
    dcp.load(loaded, storage_reader=FastReader(path))
    torch.testing.assert_close(loaded, model_of(step, rows), rtol=0, atol=0)
    place, found = Location(path), names_in(path)
    files = ["model.safetensors"]
    if "model.safetensors" not in found:
        index = json.loads((place / "model.safetensors.index.json").read())
        files = sorted(set(index["weight_map"].values()))
    tensors = [safetensors.torch.load((place / name).read()) for name in files]
    whole = {name: tensor for file in tensors for name, tensor in file.items()}
    torch.testing.assert_close(whole, model_of(step, rows), rtol=0, atol=0)
    assert set(found) - {"model.safetensors.index.json"} == set(files)


@pytest.mark.parametrize("rows", [300, 600_000])  # One request for a file, and three parts.
def test_a_model_replaces_the_former_one(folder: str, rows: int) -> None:
    path = f"{folder}/model"
    several = {"max_shard_nbytes": rows * 28 + 4096, "thread_count": 2}
    for step, options in enumerate([{}, {}, several, several, {}]):
        writer = SafetensorsWriter(path, **options)
        if step % 2:
            dcp.async_save(model_of(step, rows), storage_writer=writer).result()
        else:
            torch_ckpt.save(model_of(step, rows), storage_writer=writer)
        assert "requests" in str(writer.io_mode)
        assert_model(path, step, rows)
        assert (step == 0) == ("model.safetensors" in names_in(path))
        if options:
            assert len(names_in(path)) == 3
    with pytest.raises(CheckpointException, match=f"AlreadyExistsError.*{path}"):
        torch_ckpt.save(model_of(5), storage_writer=SafetensorsWriter(path, overwrite=False))
    assert_model(path, 4, rows)


def test_a_model_of_boxes_out_of_order_is_stored(folder: str) -> None:
    """By way of a checkpoint, as that of several ranks: a file is one stream."""
    state = model_of(1, 5000)
    for number in range(3):
        planner = CuttingSavePlanner(Random(number))
        writer = SafetensorsWriter(f"{folder}/model", max_shard_nbytes=100_000)
        torch_ckpt.save(state, storage_writer=writer, planner=planner)
        assert_model(f"{folder}/model", 1, 5000)


@pytest.mark.parametrize(
    "value", ["an object", torch.zeros(2, dtype=torch.complex128)], ids=["object", "dtype"]
)
def test_what_safetensors_cannot_have_is_refused_before_anything_is_written(
    folder: str, value: object
) -> None:
    path = f"{folder}/model"
    with pytest.raises(CheckpointException, match=r"UnsupportedError: cannot store 'z'"):
        torch_ckpt.save({**model_of(1), "z": value}, storage_writer=SafetensorsWriter(path))
    assert names_in(path) == []


class _Failing(DefaultSavePlanner):
    """A planner that does not give the last tensor of its plan."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "w":
            raise ValueError("no such tensor")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("step", [0, 1])
def test_a_save_of_a_model_that_fails_leaves_the_former_one_alone(folder: str, step: int) -> None:
    path = f"{folder}/model"
    if step:
        torch_ckpt.save(model_of(step), storage_writer=SafetensorsWriter(path))
    writer = SafetensorsWriter(path, max_shard_nbytes=5000)
    with pytest.raises(CheckpointException, match="no such tensor"):
        torch_ckpt.save(model_of(2), storage_writer=writer, planner=_Failing())
    if step:
        assert_model(path, step)
    else:
        assert names_in(path) == []


def test_files_of_a_model_without_their_index_are_no_model(folder: str) -> None:
    """Else a reader would find a part of the model while it is written."""
    path = f"{folder}/model"
    for step in (1, 2):
        writer = SafetensorsWriter(path, max_shard_nbytes=5000)
        torch_ckpt.save(model_of(step), storage_writer=writer)
    Location(f"{path}/model.safetensors.index.json").remove()
    assert len(names_in(path)) == 2
    with pytest.raises(CheckpointException, match=f"no checkpoint.*{path}"):
        dcp.load(model_of(-1), storage_reader=FastReader(path))
    torch_ckpt.save(model_of(3), storage_writer=SafetensorsWriter(path))
    assert_model(path, 3)


def test_of_two_saves_of_a_model_at_once_one_commits(folder: str) -> None:
    for first in (0, 1):
        path = f"{folder}/model-{first}"
        torch_ckpt.save(model_of(0), storage_writer=SafetensorsWriter(path))
        writers = [_HeldModel(path), _HeldModel(path)]
        for writer, state in zip(writers, [model_of(1), model_of(2)], strict=True):
            writer.begin(state)
        writers[first].commit()
        with pytest.raises(StorageError, match="another save"):
            writers[1 - first].commit()
        assert_model(path, first + 1)


def test_a_conversion_to_safetensors_streams_and_replaces(folder: str) -> None:
    target = f"{folder}/model"
    for step in (1, 2):
        torch_ckpt.save(model_of(step, 700_000), storage_writer=FastWriter(f"{folder}/step"))
        convert = ["convert", f"{folder}/step", target, "--to", "safetensors"]
        assert main(convert + ["--overwrite"] * (step - 1)) == 0
        assert_model(target, step, 700_000)
        assert main(convert) != 0
        assert_model(target, step, 700_000)


def test_a_conversion_to_a_format_of_several_files_goes_by_a_local_directory(folder: str) -> None:
    tensors = {"w": torch.randn(3000, 1000), "b": torch.arange(5)}
    torch_ckpt.save(tensors, storage_writer=FastWriter(f"{folder}/step"))
    target = f"{folder}/torch/model.pt"
    assert main(["convert", f"{folder}/step", target, "--to", "torch"]) == 0
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, storage_reader=FastReader(target))
    torch.testing.assert_close(loaded, tensors, rtol=0, atol=0)
    assert main(["convert", f"{folder}/step", target, "--to", "torch", "--overwrite"]) != 0


# ---- Saves at the same time ----


def test_of_two_saves_at_once_one_commits(folder: str) -> None:
    """The other one says so, whichever commits first."""
    for first in (0, 1):
        path = f"{folder}/step-{first}"
        torch_ckpt.save(state_of(0), storage_writer=FastWriter(path))
        writers = [_Held(path), _Held(path)]
        states = [state_of(1), state_of(2)]
        for writer, state in zip(writers, states, strict=True):
            writer.begin(state)
        writers[first].commit()
        with pytest.raises(StorageError, match="another save"):
            writers[1 - first].commit()
        loaded = state_of(-1)
        dcp.load(loaded, storage_reader=FastReader(path))
        assert_of(loaded, first + 1)
        assert len(Location(path).names()) == 3


class _Held(FastWriter):
    """A writer whose save stops before its commit."""

    def begin(self, state: dict[str, Any]) -> None:
        planner = FastSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        self.set_up_storage_writer(True)
        plan = self.prepare_local_plan(planner.create_local_plan())
        plans, self.metadata = planner.create_global_plan([plan])
        plan = self.prepare_global_plan(plans)[0]
        self.results = self.write_data(planner.finish_plan(plan), planner).wait()

    def commit(self) -> None:
        self.finish(self.metadata, [self.results])


class _HeldModel(SafetensorsWriter, _Held):
    """The same of a model."""


# ---- The agent, and saves in another process ----

on_s3 = pytest.mark.parametrize("folder", ["s3", radosgw], indirect=True)
on_stores = pytest.mark.parametrize("folder", ["s3", radosgw, hdfs], indirect=True)
"""Processes do not share fsspec's memory."""

with_agent = pytest.mark.usefixtures("memory")

IN_MEMORY = AgentOptions(persist_on_failure=False)
"""An agent that leaves steps in memory alone when training fails."""

TRAINING = """
import os, signal, sys, torch, torch_ckpt
with torch_ckpt.Run(sys.argv[1] + "/", asynchronous=True, agent=True, keep_last=2) as run:
    for step in range(4):
        run.save(step, {"w": torch.full((300, 7), float(step)), "step": step}, persist=step < 3)
        run.wait()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@contextlib.contextmanager
def training(run: str) -> Iterator[Run]:
    """A run with an agent, which an exception ends: what is in memory stays there."""
    with contextlib.suppress(ZeroDivisionError), warnings.catch_warnings():
        warnings.simplefilter("error")
        with Run(run, asynchronous=True, agent=IN_MEMORY) as made:
            yield made
            raise ZeroDivisionError


def restored(run: str) -> int | None:
    """The step that a new start finds; its values are those of the step."""
    with training(run) as made:
        state = {"w": torch.zeros(300, 7), "step": -1}
        step = made.restore(state)
        assert state["step"] == (-1 if step is None else step)
        assert state["w"].eq(step or 0).all()
    return step


def end_agent(run: str) -> None:
    """Ends the agent and frees its memory, as when the machine starts again."""
    memory = folder_of(run_of(run))
    os.kill(int((memory / "agent.lock").read_text()), signal.SIGKILL)
    until(lambda: not has_agent(memory))
    shutil.rmtree(memory)


@on_stores
@with_agent
def test_the_next_training_finds_what_the_agent_has_in_memory_and_has_written(
    folder: str, run_python: Callable[..., str]
) -> None:
    run = f"{folder}/run"
    with pytest.raises(AssertionError, match="exit status -9"):
        run_python(TRAINING, run)
    until(lambda: Location(f"{run}/step-3/.metadata").is_file())  # By the agent alone.
    assert names_in(run) == ["run-id", "step-1", "step-2", "step-3"]
    end_agent(run)
    assert restored(run) == 3
    assert main(["watch", run, "--once", "--all", "--exec", "true {path}"]) == 0
    with training(run) as made:
        made.save(4, {"w": torch.full((300, 7), 4.0), "step": 4}, persist=False)
    assert restored(run) == 4
    assert main(["rm", run, "--after", "2", "--yes"]) == 0
    assert restored(run) == 2, "also what was in memory alone is gone"


@on_stores
@with_agent
def test_memory_of_a_run_that_was_removed_from_its_store_is_not_restored(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = f"{folder}/run"
    with training(run) as made:
        made.save(1, state_of(1))
        made.save(2, state_of(2), persist=False)
    Location(run).remove_all()
    assert restored(run) is None
    (told,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert run in told
    assert "steps 1, 2" in told


@on_s3
@with_agent
def test_an_agent_whose_credentials_have_expired_is_replaced_and_leaves_the_memory(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"{folder}/run"
    with training(run) as made:
        made.save(1, {"w": torch.full((300, 7), 1.0), "step": 1}, persist=False)
    memory = folder_of(run_of(run))
    os.kill(int((memory / "agent.lock").read_text()), signal.SIGKILL)
    until(lambda: not has_agent(memory))
    (memory / "agent.socket").unlink()
    command = [sys.executable, "-m", "torch_ckpt.cli.main", "agent", run]
    environment = {**os.environ, "AWS_SECRET_ACCESS_KEY": "of yesterday"}
    with subprocess.Popen(command, env=environment) as former:
        until((memory / "agent.socket").exists)
        assert restored(run) == 1
        assert former.wait(SOON_S) == 0
    assert restored(run) == 1


@on_s3
@with_agent
@pytest.mark.parametrize("scheme", ["registered", "s3"])
def test_an_agent_that_does_not_reach_the_store_of_its_ranks_is_refused(
    folder: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that is registered counts in its process alone."""
    monkeypatch.setattr(PROCESS, "file_systems", {})
    monkeypatch.setattr(PROCESS, "registered", set())
    place = Location(folder.replace("s3://", "s3a://"))
    assert place.names() == []  # Its client is connected from now on.
    register(scheme, place.file_system)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # As the agent finds it.
    run = folder.replace("s3://", f"{scheme}://") + "/run"
    with pytest.raises(StorageError if scheme == "s3" else UnsupportedError) as raised:
        SnapshotAgent(run, has_directory=True)
    assert "register counts in their processes alone" in str(raised.value)
    assert f"cannot reach {scheme}://" in str(raised.value)
    with pytest.warns(UserWarning, match=f"without an agent: .*{scheme}://"):
        Run(run, asynchronous=True, agent=True).close()


@on_stores
@with_agent
def test_of_an_agent_and_another_save_at_once_one_commits(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = f"{folder}/run/step-1"
    run = f"{folder}/run"
    agent = SnapshotAgent(run)
    for value in (1, 2):  # The second replaces the first.
        agent.async_save(state_of(value), step, step=1).result()
        loaded = state_of(-1)
        dcp.load(loaded, storage_reader=FastReader(step))
        assert_of(loaded, value)
        assert len(Location(step).names()) == 3
    ((_, slot), *_) = complete_slots(agent.folder, run_of(run))
    snapshot = _native.Slot.open(os.fsencode(slot), False).read()
    commit = CheckpointTransaction.commit
    others: list[FastWriter] = []

    def commit_late(*arguments: Any) -> None:
        """The other save commits after the last look, and before the commit."""
        if not others:
            others.append(FastWriter(step))
            torch_ckpt.save(state_of(3), storage_writer=others[0])
        commit(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointTransaction, "commit", commit_late)
        with pytest.raises(CheckpointError, match=f"cannot save to {step}: another save, "):
            persist.persist([snapshot], persist.Writing(torch_ckpt.IoOptions()))
    loaded = state_of(-1)
    dcp.load(loaded, storage_reader=FastReader(step))
    assert_of(loaded, 3)
    assert len(Location(step).names()) == 3
    agent.close(drop=True)


@on_s3
@with_agent
def test_an_agent_does_not_share_the_memory_that_fsspec_serves(folder: str) -> None:
    run = folder.replace("s3://", "memory://") + "/run"
    with pytest.warns(UserWarning, match=f"without an agent: .* it finds no run at {run}, where"):
        made = Run(run, asynchronous=True, agent=True)
    made.save(1, state_of(1))
    made.wait()
    assert made.latest_step() == 1
    made.close()


@pytest.mark.slow
@on_stores
@with_agent
def test_an_agent_that_is_killed_while_it_writes_to_a_store_is_replaced(
    folder: str, seed: int
) -> None:
    run, rows = f"{folder}/run", 1_000_000
    random = Random(seed)
    with Run(run, asynchronous=True, agent=True, keep_last=2) as made:
        for step in range(12):
            made.save(step, state_of(step, rows))
            time.sleep(random.uniform(0, 0.5))
            os.kill(int((folder_of(run_of(run)) / "agent.lock").read_text()), signal.SIGKILL)
            made.wait()
            place = Location(f"{run}/step-{step}")
            loaded = state_of(-1, rows)
            dcp.load(loaded, storage_reader=FastReader(str(place)))
            assert_of(loaded, step)
            assert len([name for name in place.names() if name.endswith(".distcp")]) == 1


IN_PROCESS = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "timeout_s": 60}


@pytest.mark.slow
@on_stores
def test_the_process_of_a_save_reaches_the_store(folder: str) -> None:
    writer = FastWriter(f"{folder}/step")
    torch_ckpt.async_save(state_of(1), storage_writer=writer, **IN_PROCESS).result()
    loaded = state_of(-1)
    dcp.load(loaded, storage_reader=FastReader(f"{folder}/step"))
    assert_of(loaded, 1)


@pytest.mark.slow
@on_s3
def test_the_process_of_a_save_says_that_it_does_not_reach_the_store(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROCESS, "file_systems", dict(PROCESS.file_systems))
    monkeypatch.setattr(PROCESS, "registered", set())
    register("s3", Location(folder.replace("s3://", "s3a://")).file_system)
    writer = FastWriter(f"{folder}/step")
    future = torch_ckpt.async_save(state_of(2), storage_writer=writer, **IN_PROCESS)
    assert "register" in str(future.exception())


def test_a_forked_process_is_refused_at_once(folder: str) -> None:
    file = Location(f"{folder}/file")
    file.write(b"1", sync=True)
    pid = os.fork()
    if not pid:
        try:
            file.read()
        except UnsupportedError as error:
            os._exit(0 if "start processes with 'spawn' or 'forkserver'" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert file.read() == b"1"
