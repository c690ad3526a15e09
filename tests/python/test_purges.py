"""Programs that remove files by their age, as on the scratch disks of clusters."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from waits import until

import torch_ckpt
from torch_ckpt import Run, SafetensorsWriter
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder import step_directories

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


def grow_older(folder: Path, days: float) -> None:
    """Each file becomes so many days older than it is."""
    for path in folder.rglob("*"):
        then = path.stat().st_mtime - days * DAY_S
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


@pytest.mark.parametrize("name", RUNS)
def test_a_run_outlives_daily_purges(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is older than two days is removed, and a job lasts for a week."""
    monkeypatch.setattr(step_directories, "_RENEW_S", 0.0)  # An hour has passed at each save.
    options = dict(RUNS[name])
    if "local" in options:
        options["local"] = tmp_path / options["local"]
    path, ids = tmp_path / "run", set()
    for first in (1, 7):  # Another job then continues.
        with Run(path, keep_last=2, **options) as run:
            state = state_of(0)
            assert (run.restore(state) or 0) == first - 1
            assert state["tuned"][0] == first - 1
            for step in range(first, first + 6):
                run.save(step, state_of(step))
                run.wait(promoted="local" in options)
                grow_older(tmp_path, 1)
                purge(tmp_path, 2.5)
                ids |= {p.read_text() for p in tmp_path.glob("*/run-id")}
                state = state_of(0)
                assert Run(path, record=False).restore(state) == step
                assert all(state[name].equal(value) for name, value in state_of(step).items())
            assert run.failures == 0
        assert len(list(path.glob("term-*"))) == 1, "the purge has taken no term"
    assert len(ids) == ("agent" in options or "local" in options)


def test_a_job_renews_the_file_of_its_own_term_alone(tmp_path: Path) -> None:
    """On a store, a file that another job removes meanwhile would return."""
    for _ in range(2):
        Run(tmp_path).save(1, state_of(1))
    grow_old(tmp_path, 31)
    files = sorted(tmp_path.glob("term-*"))
    first = int(files[0].name.removeprefix("term-"))
    step_directories.StepDirectories(Location(tmp_path)).sweep(first)
    ages_s = [time.time() - file.stat().st_mtime for file in files]
    assert ages_s[0] < DAY_S < ages_s[1]


@pytest.mark.parametrize("place", ["store", pytest.param("radosgw", marks=pytest.mark.slow)])
def test_copies_of_unchanged_files_on_a_store_are_new_objects(
    place: str, request: pytest.FixtureRequest
) -> None:
    """A rule of the bucket removes objects by their age."""
    url = request.getfixturevalue(f"{place}_url")
    root, times = Location(url), dict[int, dict[str, float]]()
    for step in (1, 2):
        with Run(url) as run:
            run.save(step, state_of(step))
        folder = root / f"step-{step}"
        times[step] = {name: (folder / name).modified_s() or 0.0 for name in folder.names()}
        after = max(times[step].values())
        until(lambda after=after: clock(root) > after)
    assert min(times[2].values()) > max(times[1].values())


def clock(root: Location) -> float:
    (root / "now").replace(b"", sync=False)
    return (root / "now").modified_s() or 0.0


@pytest.mark.parametrize("place", ["disk", "store", "memory"])
def test_a_file_is_renewed_with_its_contents(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = {"disk": str(tmp_path), "memory": f"memory://tests/{tmp_path.name}"}.get(place)
    root = Location(url or request.getfixturevalue("store_url"))
    (root / "run-id").replace(b"abc", sync=True)
    before = (root / "run-id").modified_s() or 0.0
    until(lambda: clock(root) > before)
    (root / "run-id").renew()
    assert ((root / "run-id").modified_s() or 0.0) > before
    assert (root / "run-id").read() == b"abc"
    (root / "absent").renew()
    assert "absent" not in root.names()
