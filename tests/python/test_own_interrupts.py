"""An interrupt within a save or load reaches the program as it is, and not within another error."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.faulty_calls import MADE, Answer, FaultyStore
from support.interrupts import interrupts

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter, Run
from torch_ckpt import api as api_module
from torch_ckpt.coordination import exclusive as exclusive_module
from torch_ckpt.coordination.exclusive import Exclusive, exclusive
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import text_of
from torch_ckpt.publishing import snapshot as snapshot_module
from torch_ckpt.publishing.snapshot import Differences
from torch_ckpt.staging import save_staging as save_staging_module
from torch_ckpt.staging import staged as staged_module
from torch_ckpt.staging import stager as stager_module
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.storage import writer as writer_module

pytestmark = pytest.mark.filterwarnings("ignore")

SAVES = [
    (FastSavePlanner, "create_local_plan"),
    (FastSavePlanner, "create_global_plan"),
    (FastWriter, "write_data"),
    (FastWriter, "finish"),
]
LOADS = [
    (FastLoadPlanner, "create_local_plan"),
    (FastLoadPlanner, "create_global_plan"),
    (FastReader, "read_data"),
]


def calls(path: Path) -> Iterator[tuple[str, list[tuple[type, str]], Callable[[], Any]]]:
    """Yields saves and loads: their name, the methods that they call, and the call."""
    state = {"w": torch.ones(1000)}
    torch_ckpt.save(state, checkpoint_id=path / "saved")
    run = Run(path / "run")
    background = Run(path / "background", asynchronous=True)
    run.save(1, state)

    def installed(call: Callable[..., Any], name: str) -> Any:
        with torch_ckpt.installed():
            return call(state, checkpoint_id=path / name)

    def save_in_background() -> Any:
        return torch_ckpt.async_save(state, checkpoint_id=path / "b").result()  # type: ignore[union-attr]

    yield "save", SAVES, lambda: torch_ckpt.save(state, checkpoint_id=path / "a")
    yield "async_save", SAVES, save_in_background
    yield "load", LOADS, lambda: torch_ckpt.load(state, checkpoint_id=path / "saved")
    yield "Run.save", SAVES, lambda: run.save(2, state)
    yield "Run.save", [(FastWriter, "stage")], lambda: background.save(1, state)
    yield "Run.restore", LOADS, lambda: run.restore(state)
    yield "Run.restore", LOADS, lambda: run.restore(state, step=1)
    yield "dcp.save", SAVES, lambda: installed(dcp.save, "c")
    yield "dcp.load", LOADS, lambda: installed(dcp.load, "saved")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_in_one_process_is_raised_as_it_is(
    tmp_path: Path, interrupt: BaseException
) -> None:
    for name, methods, call in calls(tmp_path):
        for owner, method in methods:
            with mock.patch.object(owner, method, side_effect=interrupt):
                try:
                    call()
                    raised: BaseException | None = None
                except BaseException as error:
                    raised = error
            assert raised is interrupt, f"{name}, {owner.__name__}.{method}: {raised!r}"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_while_a_path_is_converted_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: BaseException
) -> None:
    """That of ``pathlib`` is Python code, in which the handler of a signal may run."""
    state = {"w": torch.ones(1000)}
    run = Run(tmp_path / "run", keep_last=2, record=False, monitor="loss")
    for step in (1, 2):
        run.save(step, state, metrics={"loss": step})
    steps = itertools.count(3)
    converted, left = PurePath.__fspath__, 0

    def fspath(path: PurePath) -> str:
        nonlocal left
        left -= threading.current_thread() is threading.main_thread()
        if left == 0:
            raise interrupt
        return converted(path)

    monkeypatch.setattr(PurePath, "__fspath__", fspath)
    calls: dict[str, Callable[[], Any]] = {
        "restore": lambda: run.restore(state),
        "save": lambda: run.save(next(steps), state, metrics={"loss": 1}),
        "torch_ckpt.save": lambda: torch_ckpt.save(state, checkpoint_id=tmp_path / "saved"),
        "torch_ckpt.load": lambda: torch_ckpt.load(state, checkpoint_id=tmp_path / "saved"),
        "discard_after": lambda: run.discard_after(1000),
    }
    for name, call in calls.items():
        for number in range(1, 40):
            left = number
            try:
                call()
                raised: BaseException | None = None
            except BaseException as error:
                raised = error
            has_more, left = left <= 0, 0  # None is interrupted outside of the call.
            if not has_more:
                break
            assert raised is interrupt, f"{name}, path {number}: {raised!r}"
        assert number > 1, name


def test_an_interrupt_within_the_text_of_an_error_is_raised_as_it_is() -> None:
    class Interrupted(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        text_of(Interrupted())


def test_no_binding_converts_paths_by_the_code_of_pybind11() -> None:
    """It turns an interrupt into a TypeError. ``path_argument.h`` does not."""
    folder = Path(__file__).resolve().parents[2] / "csrc" / "bindings"
    sources = {path.name: path.read_text() for path in folder.iterdir()}
    paths = [name for name, text in sources.items() if "filesystem::path" in text]
    assert paths
    assert [name for name, text in sources.items() if "stl/filesystem.h" in text] == []


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_in_the_client_of_a_store_is_raised_as_it_is(interrupt: BaseException) -> None:
    store, state = FaultyStore(), {"w": torch.ones(1000)}
    path = "faulty://interrupts/saved"
    torch_ckpt.save(state, checkpoint_id=path)
    for call in (torch_ckpt.load, torch_ckpt.save):
        for number in range(100):
            here: list[bool] = []

            def interrupted(
                n: int, _: str, number: int = number, here: list[bool] = here
            ) -> Answer:
                if n == number and threading.current_thread() is threading.main_thread():
                    here.append(True)
                    raise interrupt
                return MADE

            ended = store.stop_at_calls(
                interrupted, lambda call=call: call(state, checkpoint_id=path)
            )
            if here:
                assert ended.error is interrupt, f"{ended.calls}: {ended.error!r}"
            if len(ended.calls) <= number:
                break
        assert 1 < number < 99


class Owner:
    """An object that one call at a time may use."""

    timeout_s = 0.2

    def __init__(self) -> None:
        self._exclusive, self._group = Exclusive("the object"), Group(None)

    @exclusive("work")
    def work(self) -> None:
        pass

    def use(self) -> None:
        with self._exclusive.use("work", self.timeout_s):
            pass


@pytest.mark.parametrize("method", ["work", "use"])
def test_an_interrupt_at_any_moment_leaves_no_object_in_use(method: str) -> None:
    owner = Owner()
    other = ThreadPoolExecutor(1)
    raised = []  # A program may keep the errors, and so the frames of the calls.
    for error in interrupts(getattr(owner, method), [exclusive_module, contextlib]):
        raised.append(error)
        if len(raised) % 2:
            owner.work()
        else:
            other.submit(owner.use).result()
    assert len(raised) > 50
    assert {type(error) for error in raised} == {KeyboardInterrupt}


@pytest.mark.parametrize("blocking", [True, False])
def test_an_interrupt_at_any_moment_leaves_no_staging_memory_in_use(
    blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stager_module, "_SLACK_NBYTES", 0)
    stager = SnapshotStager(blocking=blocking)
    numbers = itertools.cycle((1000, 10_000))  # Neither fits in the memory of the other.

    def stage() -> None:
        state = {"w": torch.empty(next(numbers)), "n": 1}
        stager.stage(state)
        stager.wait_staged()
        stager.reserve(state)

    raised = []  # A program may keep the errors, and so the tensors.
    for error in interrupts(stage, [stager_module, staged_module, weakref]):
        raised.append(error)
        deadline = time.monotonic() + 10
        while stager.is_busy and not blocking and time.monotonic() < deadline:
            time.sleep(0.001)  # The thread that copies may not have ended.
        assert not stager.is_busy, f"after interrupt {len(raised)}"
        assert type(error) is KeyboardInterrupt
    assert len(raised) > 300


def test_an_interrupt_of_an_asynchronous_save_leaves_no_staging_memory_in_use(
    tmp_path: Path,
) -> None:
    stager = SnapshotStager()
    state = {"w": torch.ones(1000)}

    def save() -> None:
        writer = FastWriter(tmp_path / "saved", stager=stager)
        future = torch_ckpt.async_save(state, checkpoint_id=writer.path, storage_writer=writer)
        assert isinstance(future, Future)
        future.result()

    raised = []  # As a notebook keeps the last error, and so the frames of the call.
    for error in interrupts(save, [api_module, save_staging_module, writer_module]):
        raised.append(error)
        deadline = time.monotonic() + 10
        while stager.is_busy and time.monotonic() < deadline:
            time.sleep(0.001)  # The save may have begun.
        assert not stager.is_busy, f"after interrupt {len(raised)}"
    assert len(raised) > 100


def test_an_interrupt_leaves_no_lock_of_the_staging_memory_behind() -> None:
    stager = SnapshotStager()
    found: list[bool] = []
    for _ in interrupts(lambda: stager.is_busy, [threading]):
        other = threading.Thread(target=lambda: found.append(stager.is_busy), daemon=True)
        other.start()
        other.join(10)
        assert found == [False], "it is locked"
        found.clear()


def test_an_interrupt_of_a_publish_does_not_leave_its_thread_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot_module, "_WAITING_NBYTES", 2)
    other = ThreadPoolExecutor(1)
    batch: Any = [(0, SimpleNamespace(nbytes=1))]

    def begin() -> tuple[Differences, Future[Any]]:
        return (differences := Differences(10)), other.submit(list, differences)

    def publish() -> None:
        try:
            for _ in range(4):
                differences.put(batch, 1)
        finally:
            try:
                differences.end()
            except BaseException:
                differences.end()
                raise

    differences, taken = begin()
    number = 0
    for _ in interrupts(publish, [snapshot_module, threading]):
        assert len(taken.result(timeout=10)) <= 4
        differences, taken = begin()
        number += 1
    assert len(taken.result(timeout=10)) == 4
    assert number > 100
