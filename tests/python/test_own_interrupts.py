"""An interrupt within a save or load reaches the program as it is, and not within another error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter, Run

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
