"""What calls leave alive: nothing, also in a program that has turned Python's collector off."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.flips import flip
from torch.distributed.checkpoint.api import _wrap_exception
from waits import until

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, Run, SafetensorsWriter
from torch_ckpt.coordination.portable import first_error
from torch_ckpt.integrations.installation import installed

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory", "without_collector")]

State = dict[str, Any]
FAILURES = (Exception, dcp.CheckpointException)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def state_of(step: int = 0) -> State:
    return {"w": torch.full((5000,), float(step)), "n": {"step": step}}


def leaves_nothing(call: Callable[[State], Any], *, fails: bool = False, **values: Any) -> bool:
    """Makes a call, which is to fail or not; returns whether its tensors are freed afterwards."""
    state = {**state_of(), **values}
    alive = weakref.ref(state["w"])
    failed = False
    try:
        call(state)
    except FAILURES:
        failed = True
    assert failed == fails
    del state, values
    with contextlib.suppress(AssertionError):  # A thread may be about to end.
        until(lambda: alive() is None, 3)
    return alive() is None


def saved(path: Path, steps: int = 1) -> Path:
    for step in range(1, steps + 1):
        torch_ckpt.save(state_of(step), checkpoint_id=path / f"step-{step}", no_dist=True)
    return path / f"step-{steps}"


SAVES: dict[str, Callable[[State, Path], Any]] = {
    "save": lambda state, path: torch_ckpt.save(state, checkpoint_id=path),
    "dcp.save": lambda state, path: dcp.save(state, storage_writer=FastWriter(path)),
    "async_save": lambda state, path: torch_ckpt.async_save(state, checkpoint_id=path).result(),
    "safetensors": lambda state, path: dcp.save(
        {k: v for k, v in state.items() if k != "n"}, storage_writer=SafetensorsWriter(path)
    ),
    "installed": lambda state, path: installed_save(state, path),
    "with a base, which is missing at first": lambda state, path: torch_ckpt.save(
        {"w": state["w"]}, storage_writer=SafetensorsWriter(path, base=path)
    ),
    "FastWriter with a base, which is missing at first": lambda state, path: torch_ckpt.save(
        state, storage_writer=FastWriter(path, base=path)
    ),
}
LOADS: dict[str, Callable[[State, Path], Any]] = {
    "load": lambda state, path: torch_ckpt.load(state, checkpoint_id=path),
    "dcp.load": lambda state, path: dcp.load(state, storage_reader=FastReader(path)),
    "installed": lambda state, path: installed_load(state, path),
}


def installed_save(state: State, path: Path) -> None:
    with installed():
        dcp.save(state, checkpoint_id=path)


def installed_load(state: State, path: Path) -> None:
    with installed():
        dcp.load(state, checkpoint_id=path)


@pytest.mark.parametrize("name", SAVES)
def test_a_save_keeps_no_state_alive(tmp_path: Path, name: str) -> None:
    save = SAVES[name]
    for _ in range(2):  # The second one removes the files of the first.
        assert leaves_nothing(lambda state: save(state, tmp_path / "checkpoint"))


# DCP's own functions, which dcp.save and dcp.load are here, leave the frames of an error alive.
OURS = ["save", "async_save", "installed"]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("fault", ["a lock", "a file in the way"])
def test_a_save_that_fails_keeps_no_state_alive(tmp_path: Path, name: str, fault: str) -> None:
    save, path = SAVES[name], tmp_path / "checkpoint"
    values: State = {}
    if fault == "a lock":
        values = {"bad": threading.Lock()}
    else:
        path.write_text("")
    assert leaves_nothing(lambda state: save(state, path), fails=True, **values)


@pytest.mark.parametrize("name", LOADS)
def test_a_load_keeps_no_state_alive(tmp_path: Path, name: str) -> None:
    path, load = saved(tmp_path), LOADS[name]
    assert leaves_nothing(lambda state: load(state, path))


@pytest.mark.parametrize("name", ["load", "installed"])
@pytest.mark.parametrize("fault", ["a missing key", "a flipped bit", "no checkpoint"])
def test_a_load_that_fails_keeps_no_state_alive(tmp_path: Path, name: str, fault: str) -> None:
    path, load = saved(tmp_path), LOADS[name]
    values: State = {"more": torch.ones(3)} if fault == "a missing key" else {}
    if fault == "a flipped bit":
        (data,) = path.glob("*.distcp")
        flip(data, data.stat().st_size // 2)
    elif fault == "no checkpoint":
        path = tmp_path / "nothing"
    assert leaves_nothing(lambda state: load(state, path), fails=True, **values)


RUNS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "in a thread": {"asynchronous": True},
    "by the agent": {"asynchronous": True, "agent": True},
    "promoted": {"asynchronous": True, "local": "local"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_keeps_no_state_alive(tmp_path: Path, name: str) -> None:
    options = dict(RUNS[name])
    if "local" in options:
        options["local"] = tmp_path / options["local"]
    with Run(tmp_path / "run", keep_last=1, **options) as run:
        for step in range(1, 5):

            def save(state: State, step: int = step) -> None:
                run.save(step, state)
                run.wait()

            assert leaves_nothing(save)
        assert leaves_nothing(run.restore)
        assert leaves_nothing(lambda state: run.restore(state, step=77), fails=True)
        if name == "synchronous":  # Python's ExitStack, in the others, leaves its error alive.
            bad = {"bad": threading.Lock()}
            assert leaves_nothing(lambda state: run.save(9, state), fails=True, **bad)
            for data in (tmp_path / "run" / "step-4").glob("*.distcp"):
                os.truncate(data, 100)
            assert leaves_nothing(run.restore, fails=True)


def test_the_error_of_a_rank_leaves_nothing_where_all_ranks_raise_it() -> None:
    def decide(state: State) -> None:
        with first_error("in a test"):
            raise dcp.CheckpointException("plan", {0: _wrap_exception(ValueError(len(state)))})

    assert leaves_nothing(decide, fails=True)
