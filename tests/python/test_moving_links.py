"""A save or load uses one directory, although a link in its path moves or the process moves on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import blank, differences, files, loads, save
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, SafetensorsWriter, SnapshotStager
from torch_ckpt._core import _native
from torch_ckpt.agent import SnapshotAgent
from torch_ckpt.commits.transaction import Transaction
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.verify import check_sound, examine

pytestmark = pytest.mark.timeout(120)


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((300, 301), value), "large": torch.full((1 << 19,), value)}


def move(link: Path, to: str) -> None:
    """As a training script moves ``latest``: no reader ever finds no link."""
    pending = link.with_name(f".{link.name}.pending")
    pending.symlink_to(to)
    pending.replace(link)


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A link to the directory ``a``, which has a checkpoint of 1. That of ``b`` is of 2."""
    for value, name in ((1, "a"), (2, "b")):
        save(state_of(value), FastWriter(tmp_path / name))
    (tmp_path / "latest").symlink_to("a")
    return tmp_path / "latest"


class Mover:
    """Moves the link to ``b`` at the first call of one of its methods."""

    def __init__(self, method: str, link: Path) -> None:
        super().__init__()
        self.method, self.link = method, link

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name == own.get("method"):
            own["method"] = ""
            move(own["link"], "b")
        return super().__getattribute__(name)


class MovingPlanner(Mover, DefaultSavePlanner):
    """Moves the link while a save plans or writes."""


class MovingLoadPlanner(Mover, DefaultLoadPlanner):
    """Moves the link while a load plans or reads."""


@contextlib.contextmanager
def moved_after(owner: type, method: str, then: Callable[[], None]) -> Iterator[None]:
    """Moves the link after a method of a transaction."""
    real = getattr(owner, method)

    def call(*args: Any) -> None:
        real(*args)
        then()

    with mock.patch.object(owner, method, call):
        yield


class MovingWriter(FastWriter):
    """Moves the link while a save commits."""

    moment = ""

    def _move_at(self, moment: str) -> None:
        if moment == self.moment:
            move(Path(self.path), "b")

    def finish(self, metadata: Any, results: Any) -> None:
        self._move_at("finish")
        with (
            moved_after(Transaction, "check", lambda: self._move_at("commit")),
            moved_after(_native.FileSystem, "commit", lambda: self._move_at("removal")),
        ):
            super().finish(metadata, results)


class MovingSafetensorsWriter(MovingWriter, SafetensorsWriter):
    """The same, for a model."""


def dcp_save(state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, no_dist=True, **options)


def save_now(state: dict[str, Any], **options: Any) -> None:
    torch_ckpt.save(state, **options)


def dcp_async_save(state: dict[str, Any], **options: Any) -> None:
    dcp.async_save(state, **options).result()


def save_in_thread(state: dict[str, Any], **options: Any) -> None:
    torch_ckpt.async_save(state, **options).result()


def save_with_stager(state: dict[str, Any], **options: Any) -> None:
    torch_ckpt.async_save(state, async_stager=SnapshotStager(), **options).result()


def save_in_process(state: dict[str, Any], **options: Any) -> None:
    process = AsyncCheckpointerType.PROCESS
    torch_ckpt.async_save(state, async_checkpointer_type=process, **options).result()


def save_installed(state: dict[str, Any], storage_writer: Any = None, **options: Any) -> None:
    """Under ``installed()``, with stock's writer."""
    with torch_ckpt.installed():
        if storage_writer is not None:
            storage_writer = FileSystemWriter(storage_writer.path)
        dcp.async_save(state, storage_writer=storage_writer, **options).result()


IN_PROCESS = pytest.param(save_in_process, marks=pytest.mark.slow, id="save_in_process")
IN_BACKGROUND = [dcp_async_save, save_in_thread, save_with_stager, save_installed, IN_PROCESS]


def assert_saved(link: Path, to: str, value: float, **others: float) -> None:
    """Asserts what each directory holds, and that it holds no other files."""
    for name, expected in {to: value, **others}.items():
        folder = link.with_name(name)
        assert loads(folder, state_of(expected)) == [], name
        assert len(list(folder.iterdir())) == 3, name
        check_sound(Location(folder))


@pytest.mark.thin(1)
@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("save", [*IN_BACKGROUND, dcp_save, save_now])
@pytest.mark.parametrize(
    "method",
    ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data"],
)
def test_a_save_plans_and_writes_for_the_directory_that_a_link_named_when_it_began(
    method: str, save: Callable[..., None], by_id: bool, link: Path, world_of_one: None
) -> None:
    if save in (dcp_save, save_now) and method == "set_up_planner":
        pytest.skip("a synchronous save has not begun yet")
    options = {"checkpoint_id": link} if by_id else {"storage_writer": FastWriter(link)}
    if by_id and save in (dcp_save, dcp_async_save):
        options["storage_writer"] = FastWriter(link)
    save(state_of(3), planner=MovingPlanner(method, link), **options)
    assert link.readlink() == Path("b")
    assert_saved(link, "a", 3, b=2)


@pytest.mark.thin(1)
@pytest.mark.parametrize("moment", ["finish", "commit", "removal"])
@pytest.mark.parametrize("save", [dcp_save, save_in_thread, IN_PROCESS])
def test_a_save_commits_in_the_directory_that_a_link_named_when_it_began(
    moment: str, save: Callable[..., None], link: Path, world_of_one: None
) -> None:
    writer = MovingWriter(link)
    writer.moment = moment
    save(state_of(3), storage_writer=writer)
    assert link.readlink() == Path("b")
    assert_saved(link, "a", 3, b=2)


def test_a_model_is_published_in_the_directory_that_a_link_named(
    link: Path, world_of_one: None
) -> None:
    for value, name in ((1, "a"), (2, "b")):
        torch_ckpt.save(state_of(value), storage_writer=SafetensorsWriter(link.with_name(name)))
    before = files(link.with_name("b"))
    writer = MovingSafetensorsWriter(link)
    writer.moment = "finish"
    save_in_thread(state_of(3), storage_writer=writer)
    assert link.readlink() == Path("b")
    assert files(link.with_name("b")) == before
    assert loads(link.with_name("a") / "model.safetensors", state_of(3)) == []


@pytest.mark.parametrize("save", [dcp_save, save_in_thread, IN_PROCESS])
def test_each_save_of_a_writer_goes_where_the_link_leads_when_it_begins(
    save: Callable[..., None], link: Path, world_of_one: None
) -> None:
    writer = FastWriter(link)
    save(state_of(3), storage_writer=writer)
    move(link, "b")
    dcp_save(state_of(4), storage_writer=writer)
    assert_saved(link, "a", 3, b=4)
    move(link, "a")
    save(state_of(5), storage_writer=writer)
    assert_saved(link, "a", 5, b=4)
    assert writer.path == writer.checkpoint_id == link


def test_a_save_whose_thread_never_ran_leaves_no_directory_behind(
    link: Path, world_of_one: None
) -> None:
    writer = FastWriter(link)
    writer.stage(state_of(0))
    move(link, "b")
    dcp_save(state_of(3), storage_writer=writer)
    assert_saved(link, "a", 1, b=3)


def test_saves_to_a_link_that_moves_all_the_time_lose_no_checkpoint(
    link: Path, world_of_one: None, full: bool
) -> None:
    ended = threading.Event()

    def move_on() -> None:
        while not ended.is_set():
            for to in ("b", "a"):
                move(link, to)

    moving = threading.Thread(target=move_on)
    moving.start()
    try:
        for number in range(40 if full else 6):
            dcp_async_save(state_of(number), storage_writer=FastWriter(link))
            for name in ("a", "b"):
                check_sound(Location(link.with_name(name)))
    finally:
        ended.set()
        moving.join()
    saved = [len(list(link.with_name(name).iterdir())) for name in ("a", "b")]
    assert saved == [3, 3]


@pytest.mark.parametrize("method", ["set_up_planner", "create_local_plan", "resolve_tensor"])
@pytest.mark.parametrize("format", ["ours", "stock", "safetensors", "torch.save"])
def test_a_load_reads_the_checkpoint_that_a_link_named_when_it_began(
    method: str, format: str, tmp_path: Path, world_of_one: None
) -> None:
    link = tmp_path / "latest"
    for value, name in ((1, "a"), (2, "b")):
        state, path = state_of(value), tmp_path / name
        if format == "ours":
            dcp_save(state, storage_writer=FastWriter(path))
        elif format == "stock":
            dcp_save(state, storage_writer=FileSystemWriter(path))
        elif format == "safetensors":
            torch_ckpt.save(state, storage_writer=SafetensorsWriter(path))
        else:
            torch.save(state, path)
    link.symlink_to("a")
    loaded = blank(state_of(0))
    torch_ckpt.load(loaded, checkpoint_id=link, planner=MovingLoadPlanner(method, link))
    assert link.readlink() == Path("b")
    assert differences(state_of(1), loaded) == []


def test_a_verification_reads_one_checkpoint(link: Path) -> None:
    report = examine(Location(link), watch=lambda *_: link.exists() and move(link, "b"))
    assert link.readlink() == Path("b")
    assert report.damage == []


@pytest.mark.parametrize("agent", [None, False, True])
def test_a_run_stays_in_its_directory(
    agent: bool | None, tmp_path: Path, memory: Path, world_of_one: None
) -> None:
    """Its steps, what it retains, and what it restores."""
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        save(state_of(value), FastWriter(tmp_path / name / "step-1"))
    link = tmp_path / "latest"
    link.symlink_to("a")
    options = {} if agent is None else {"asynchronous": True, "agent": agent}
    with torch_ckpt.Run(link, keep_last=1, **options) as run:
        move(link, "b")
        run.save(2, state_of(3))
        loaded = blank(state_of(0))
        assert run.restore(loaded) == 2
        assert differences(state_of(3), loaded) == []
    assert [path.name for path in (tmp_path / "a").glob("step-*")] == ["step-2"]
    assert loads(tmp_path / "a" / "step-2", state_of(3)) == []
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["step-1"]


def test_the_agent_saves_to_the_directory_that_a_link_named(link: Path, memory: Path) -> None:
    agent = SnapshotAgent(link.with_name("run"))
    staged = agent.stage(state_of(3), link, step=1, persist=False)
    assert staged is not None
    move(link, "b")
    agent.persist(staged)
    agent.close()
    assert_saved(link, "a", 3, b=2)


# ---- Relative paths ----


class LeavingPlanner(DefaultSavePlanner):
    """Goes to another working directory before the save begins to plan."""

    def __init__(self, elsewhere: Path) -> None:
        super().__init__()
        self.elsewhere = elsewhere

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        os.chdir(self.elsewhere)
        super().set_up_planner(*args, **kwargs)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which there is another one."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.thin(1)
@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("save", [*IN_BACKGROUND, dcp_save, save_now])
def test_a_save_goes_to_the_directory_that_a_relative_path_named(
    save: Callable[..., None], by_id: bool, here: Path, world_of_one: None
) -> None:
    options = {"checkpoint_id": "saved"} if by_id else {"storage_writer": FastWriter("saved")}
    if by_id and save in (dcp_save, dcp_async_save):
        options["storage_writer"] = FastWriter("other")
    save(state_of(3), planner=LeavingPlanner(here / "elsewhere"), **options)
    assert loads(here / "saved", state_of(3)) == []
    assert list((here / "elsewhere").iterdir()) == []


def test_writers_and_readers_keep_the_directory_that_a_relative_path_named(
    here: Path, world_of_one: None
) -> None:
    writers = [FastWriter("saved"), SafetensorsWriter("model")]
    readers = [FastReader("saved"), FastReader("model")]
    run = torch_ckpt.Run("run", asynchronous=True)
    os.chdir("elsewhere")
    for writer, reader in zip(writers, readers, strict=True):
        torch_ckpt.save(state_of(3), storage_writer=writer)
        loaded = blank(state_of(0))
        torch_ckpt.load(loaded, storage_reader=reader)
        assert differences(state_of(3), loaded) == []
    with run:
        run.save(1, state_of(4))
    assert loads(here / "run" / "step-1", state_of(4)) == []
    assert [str(writer.path) for writer in writers] == ["saved", "model"]
    assert list((here / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("agent", [None, False, True])
def test_a_run_keeps_the_directory_that_a_relative_path_named(
    agent: bool | None, here: Path, memory: Path, world_of_one: None
) -> None:
    """As Hydra does, the process goes elsewhere after it has made the run."""
    options = {} if agent is None else {"asynchronous": True, "agent": agent}
    with torch_ckpt.Run("runs/exp", keep_last=1, **options) as run:
        os.chdir("elsewhere")
        for step in (1, 2):
            run.save(step, state_of(step), metrics={"loss": 1.0})
        loaded = blank(state_of(0))
        assert run.restore(loaded) == 2
        assert differences(state_of(2), loaded) == []
        with run.lease(2) as path:
            assert Path(path) == here / "runs/exp/step-2"
        with pytest.warns(UserWarning, match="step 1 is saved, but step 2 of"):
            run.save(1, state_of(1))
        run.wait()
        assert run.discard_after(1) == [2]
    os.chdir("..")
    assert [path.name for path in (here / "runs/exp").glob("step-*")] == ["step-1"]
    assert list((here / "elsewhere").iterdir()) == []


def test_a_path_is_named_anew_by_each_call(here: Path, world_of_one: None) -> None:
    """The same text is another directory after the process has gone elsewhere."""
    writer = FastWriter("saved")
    save_in_thread(state_of(3), storage_writer=writer, checkpoint_id="saved")
    os.chdir("elsewhere")
    save_in_thread(state_of(4), storage_writer=writer, checkpoint_id="saved")
    save_now(state_of(5), storage_writer=writer, checkpoint_id="again")
    assert loads(here / "saved", state_of(3)) == []
    assert loads(here / "elsewhere" / "saved", state_of(4)) == []
    assert loads(here / "elsewhere" / "again", state_of(5)) == []


def test_two_dots_after_a_link_lead_to_the_parent_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "there" / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to("there/inside")
    save(state_of(3), FastWriter(tmp_path / "link" / ".." / "saved"))
    assert loads(tmp_path / "there" / "saved", state_of(3)) == []


def test_retention_removes_a_step_that_is_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    with torch_ckpt.Run(tmp_path / "run", keep_last=1) as run:
        run.save(1, state_of(1))
        (tmp_path / "run" / "step-1").rename(tmp_path / "moved")
        (tmp_path / "run" / "step-1").symlink_to("../moved")
        assert run.latest_step() == 1
        run.save(2, state_of(2))
    assert not os.path.lexists(tmp_path / "run" / "step-1")
    assert loads(tmp_path / "moved", state_of(1)) == []
