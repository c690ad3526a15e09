"""A conversion that is killed at any call leaves the old target, and no file for good."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forks import Forks
from states import assert_same, tensors_of
from stops import run_stopped
from syscalls import can_stop

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.conversion.convert import convert
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.skipif(not can_stop(), reason="no system calls can be stopped here"),
]

SHAPE = (40, 5)
LARGE = (700, 500)  # Its file is written by a job, not in one call.
BESIDE = {"source", "target", "latest_universal"}


def state_of(version: int) -> dict[str, Any]:
    tensors = tensors_of({"large": LARGE, "small": SHAPE}, version)
    return {f"model.{name}": tensor.nan_to_num() for name, tensor in tensors.items()}


def make_source(path: Path, version: int) -> None:
    states = {
        "optim.state.large.exp_avg": torch.ones(LARGE),
        "optim.state.small.exp_avg": torch.ones(SHAPE),
    }
    groups = [{"params": ["large", "small"], "lr": 0.1}]
    values = {**state_of(version), **states}
    state: dict[str, Any] = {"optim": {"param_groups": groups}} | values
    dcp.save(state, storage_writer=FastWriter(path), no_dist=True)


def convert_source(folder: Path, to: str) -> None:
    prefix = "" if to == "universal" else "model."
    location = Location(folder / "target")
    convert(Location(folder / "source"), location, to, prefix=prefix, overwrite=True)


def found(folder: Path, to: str) -> int | None:
    """The version at the target, whole; ``None`` if there is none."""
    prefix = "model." if to in ("universal", "torch_checkpointing") else ""
    state = {
        f"{prefix}large": torch.zeros(LARGE),
        f"{prefix}small": torch.zeros(SHAPE),
    }
    try:
        dcp.load(state, storage_reader=FastReader(folder / "target"), no_dist=True)
    except BaseException as error:
        failures = getattr(error, "failures", {})
        if failures and isinstance(failures[0][0], NotFoundError):
            return None
        raise
    for version in (1, 2, 3):
        wanted = {f"{prefix}{n[6:]}": value for n, value in state_of(version).items()}
        if all(torch.equal(state[name], wanted[name]) for name in wanted):
            assert_same(state, wanted)
            return version
    raise AssertionError("a mix of versions")


def prepare(folder: Path, to: str, overwrites: bool) -> None:
    """Makes a source of version 2, over a target of version 1 or over nothing."""
    source = folder / "source"
    if overwrites:
        make_source(source, 1)
        convert_source(folder, to)
        shutil.rmtree(source)
    make_source(source, 2)


def convert_after(folder: Path, to: str) -> tuple[int | None, int | None]:
    """Converts version 3; returns the versions at the target before and after."""
    before = found(folder, to)
    shutil.rmtree(folder / "source")
    make_source(folder / "source", 3)
    convert_source(folder, to)
    return before, found(folder, to)


@pytest.mark.thin("over an old one-universal")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("to", ["torch", "universal", "dcp", "safetensors", "torch_checkpointing"])
@pytest.mark.parametrize("overwrites", [True, False], ids=["over an old one", "new"])
def test_a_conversion_killed_at_any_call(
    tmp_path: Path, to: str, overwrites: bool, seed: int, full: bool
) -> None:
    forks = Forks()
    template = tmp_path / "template"
    forks.call(prepare, template, to, overwrites)
    old = 1 if overwrites else None
    for number in itertools.count(0, 1) if full else itertools.count(seed % 16, 16):
        folder = shutil.copytree(template, tmp_path / f"{number}")
        killed = run_stopped(
            forks, folder, lambda at, _, number=number: at < number, convert_source, folder, to
        )
        where = f"before call {number} of {killed.calls}"
        assert killed.error is None, killed.error
        before, after = forks.call(convert_after, folder, to)
        assert before in ((old, 2) if killed.was_killed else (2,)), where
        assert after == 3, where
        assert {path.name for path in folder.iterdir()} <= BESIDE, where
        if not killed.was_killed:
            break
        shutil.rmtree(folder)
