"""Programs that remove files by their age, as on the scratch disks of clusters."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from torch_ckpt import Run, SafetensorsWriter

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]

DAY_S = 24 * 60 * 60.0
State = dict[str, Any]


def state_of(step: int) -> State:
    frozen = {f"frozen.{n}": torch.full((1 << 18,), float(n)) for n in range(4)}
    return frozen | {"tuned": torch.full((10,), float(step))}


def grow_old(folder: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def purge(folder: Path, days: float) -> int:
    """As ``find -type f -mtime +days -delete`` does; returns how many files it has removed."""
    old = [
        p
        for p in folder.rglob("*")
        if p.is_file() and p.stat().st_mtime < time.time() - days * DAY_S
    ]
    for path in old:
        path.unlink()
    return len(old)


RUNS: dict[str, dict[str, Any]] = {
    "direct": {},
    "in a thread": {"asynchronous": True},
    "by the agent": {"asynchronous": True, "agent": True},
    "promoted": {"asynchronous": True, "local": "local"},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_newest_step_of_a_run_survives_a_purge(tmp_path: Path, name: str) -> None:
    options = dict(RUNS[name])
    if "local" in options:
        options["local"] = tmp_path / options["local"]
    path = tmp_path / "run"
    with Run(path, **options) as run:
        for step in (1, 2):
            run.save(step, state_of(step))
            run.wait(promoted="local" in options)
            if step == 1:
                for found in path.glob("step-1/*"):
                    os.utime(found, (0, time.time() - 31 * DAY_S))
    linked = [p for p in path.glob("step-2/*.distcp") if p.stat().st_nlink > 1]
    assert linked
    assert purge(path, 30) > 0
    loaded = {name: torch.zeros_like(value) for name, value in state_of(0).items()}
    torch_ckpt.load(loaded, checkpoint_id=path / "step-2", no_dist=True)
    assert all(loaded[name].equal(value) for name, value in state_of(2).items())


def test_a_model_of_safetensors_survives_a_purge(tmp_path: Path) -> None:
    state = state_of(0)
    for name in ("first", "second"):
        writer = SafetensorsWriter(tmp_path / name, base=tmp_path / "first")
        torch_ckpt.save(state, storage_writer=writer, no_dist=True)
        if name == "first":
            grow_old(tmp_path / name, 31)
    assert all(p.stat().st_nlink == 2 for p in tmp_path.glob("second/*.safetensors"))
    assert purge(tmp_path, 30) == 0  # Both models have the one file.
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    torch_ckpt.load(loaded, checkpoint_id=tmp_path / "second", no_dist=True)
    assert all(loaded[name].equal(value) for name, value in state.items())
