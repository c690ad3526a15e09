"""The log lines of saves and loads, and their progress bar."""

from __future__ import annotations

import io
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from progress_bars import SavePlanner, Terminal, on_a_terminal
from waits import until

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, SafetensorsWriter, SnapshotStager
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage import progress
from torch_ckpt.storage.verify import examine

SOON_S = 20


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    assert {record.name for record in caplog.records} <= {"torch_ckpt"}
    return [r.getMessage() for r in caplog.records if r.levelno == level]


@pytest.fixture
def state() -> dict[str, Any]:
    return {"w": torch.randn(1 << 20), "v": torch.randn(3, 5), "step": 7}


def test_each_save_and_load_is_one_line(
    state: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_ckpt")
    dcp.save(state, storage_writer=FastWriter(tmp_path / "1"))
    dcp.load(state, storage_reader=FastReader(tmp_path / "1"))
    torch_ckpt.async_save(state, checkpoint_id=tmp_path / "2").result()
    tensors = {name: state[name] for name in ("w", "v")}
    dcp.save(tensors, storage_writer=SafetensorsWriter(tmp_path / "3"))
    saved, loaded, in_background, exported = lines(caplog, logging.INFO)
    numbers = r"4\.\d\d MiB in \d+\.\d\d s, \d+\.\d\d GB/s"
    mode = r"(io_uring|threads), (O_DIRECT|page cache).*"
    assert re.fullmatch(rf"saved {tmp_path}/1: {numbers}, 1 rank, {mode}", saved)
    assert re.fullmatch(rf"loaded {tmp_path}/1: {numbers}, 1 rank, without an exchange", loaded)
    assert re.fullmatch(
        rf"saved {tmp_path}/2: {numbers}, 1 rank, {mode}, in the background", in_background
    )
    assert re.fullmatch(rf"saved {tmp_path}/3: {numbers}, 1 rank, {mode}", exported)


def test_each_phase_is_logged_at_debug_level(
    state: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "torch_ckpt")
    dcp.save(state, storage_writer=FastWriter(tmp_path))
    dcp.load(state, storage_reader=FastReader(tmp_path))
    phases = [re.fullmatch(r".*: (\w+) took [\d.]+ s", m) for m in lines(caplog, logging.DEBUG)]
    assert [match and match[1] for match in phases] == [
        *("planning", "writing", "committing"),
        *("opening", "planning", "reading"),
    ]


@pytest.mark.parametrize("blocking", [True, False])
def test_the_copy_of_an_asynchronous_save_is_logged_at_debug_level(
    state: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, blocking: bool
) -> None:
    caplog.set_level(logging.DEBUG, "torch_ckpt")
    stager = SnapshotStager(blocking=blocking)
    writer = FastWriter(tmp_path, stager=stager)
    saved: Any = torch_ckpt.async_save(state, storage_writer=writer)
    (saved if blocking else saved.upload_completion).result()
    nbytes = state["w"].nbytes + state["v"].nbytes
    copied, *_ = lines(caplog, logging.DEBUG)
    assert re.fullmatch(
        rf"the snapshot of {tmp_path}: copied {nbytes} bytes in [\d.]+ s", copied
    ), copied


def test_a_second_read_is_logged_without_the_times_of_the_first(
    state: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save(state, storage_writer=FastWriter(tmp_path))
    reader, planner = FastReader(tmp_path), dcp.DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    reader.read_data(plan, planner)
    caplog.set_level(logging.DEBUG, "torch_ckpt")
    reader.read_data(plan, planner)
    assert re.fullmatch(
        rf"{tmp_path}: reading took [\d.]+ s", "".join(lines(caplog, logging.DEBUG))
    )


def wait_for_bar(terminal: Terminal) -> None:
    end = time.monotonic() + SOON_S
    while "B/s" not in terminal.getvalue() and time.monotonic() < end:
        time.sleep(0.01)


class SlowSavePlanner(dcp.DefaultSavePlanner):
    terminal: Terminal

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.tensor_data is None:  # Tensors are resolved before the writes begin.
            wait_for_bar(self.terminal)
        return super().resolve_data(write_item)


class SlowLoadPlanner(dcp.DefaultLoadPlanner):
    terminal: Terminal

    def create_local_plan(self) -> Any:
        until(lambda: "planning to load" in self.terminal.getvalue(), SOON_S)
        return super().create_local_plan()

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        wait_for_bar(self.terminal)
        super().load_bytes(read_item, value)


def test_a_long_save_or_load_shows_a_bar_on_a_terminal(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "_BAR_AFTER_S", 0.05)
    monkeypatch.setattr(progress, "_BAR_INTERVAL_S", 0.01)
    for kind in (SlowSavePlanner, SlowLoadPlanner):
        monkeypatch.setattr(kind, "terminal", terminal, raising=False)
    torch_ckpt.save(state, checkpoint_id=tmp_path, planner=SlowSavePlanner())
    assert f"saving {tmp_path}: 100%" in terminal.getvalue()

    terminal.truncate(0)
    torch_ckpt.load(dict(state), checkpoint_id=tmp_path, planner=SlowLoadPlanner())
    assert f"planning to load {tmp_path} [00:0" in terminal.getvalue()
    assert f"reading {tmp_path}: 100%" in terminal.getvalue()


def test_a_short_save_shows_no_bar(state: dict[str, Any], tmp_path: Path) -> None:
    with on_a_terminal() as terminal:
        torch_ckpt.save(state, checkpoint_id=tmp_path)
        torch_ckpt.load(state, checkpoint_id=tmp_path)
    assert terminal.getvalue() == ""


def test_a_save_in_the_background_shows_no_bar(state: dict[str, Any], tmp_path: Path) -> None:
    planner = SavePlanner()
    with on_a_terminal():
        torch_ckpt.save(state, checkpoint_id=tmp_path / "1", planner=planner)
        assert planner.had_bar
        torch_ckpt.async_save(state, checkpoint_id=tmp_path / "2", planner=planner).result()
    assert planner.had_bar is False


class WaitsForBar(io.BytesIO):
    """Something to pickle, which takes until the terminal has a bar."""

    terminal: Terminal

    def __deepcopy__(self, _: object) -> WaitsForBar:
        return self

    def __reduce__(self) -> Any:
        until(lambda: "saving" in self.terminal.getvalue(), SOON_S)
        return complex, (1.0, 2.0)


@pytest.mark.parametrize("agent", [False, True])
def test_a_run_that_waits_for_its_background_save_shows_a_bar(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "_BAR_AFTER_S", 0.05)
    monkeypatch.setattr(progress, "_BAR_INTERVAL_S", 0.01)
    monkeypatch.setattr(WaitsForBar, "terminal", terminal, raising=False)
    with torch_ckpt.Run(tmp_path, asynchronous=True, agent=agent) as run:
        run.save(1, state if agent else state | {"slow": WaitsForBar()})
        if not agent:
            assert "saving" not in terminal.getvalue()
        run.close()
        if not agent:
            assert f"saving {tmp_path}/step-1: 100%" in terminal.getvalue()


@pytest.mark.parametrize("stream", ["missing", "closed", "without isatty"])
def test_a_process_may_have_no_stderr(
    stream: str, state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    streams = {"missing": None, "closed": closed, "without isatty": object()}
    monkeypatch.setattr("sys.stderr", streams[stream])
    expected = state["w"].clone()
    with torch_ckpt.Run(tmp_path / "run", local=tmp_path / "local", asynchronous=True) as run:
        run.save(1, state)
        run.wait(promoted=True)
        state["w"].zero_()
        assert run.restore(state) == 1
    assert torch.equal(state["w"], expected)
    assert examine(Location(tmp_path / "run/step-1")).damage == []
