"""Runs in which files belong to another user, and must not be read.

Such a step may be whole: it is never taken for damaged.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forks import Forks
from support.commit_files import index_file

import torch_ckpt
from torch_ckpt import Run
from torch_ckpt.errors import StorageError

NOBODY = 65534
FILES = {
    ".metadata": lambda step: step / ".metadata",
    "index": index_file,
    "data": lambda step: next(step.glob("*.distcp")),
}
OF_STEPS = {**FILES, "metrics": lambda step: step / "metrics.json"}


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())  # tmp_path is closed to other users.
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(step))}


def become_nobody() -> None:
    if os.geteuid() == 0:  # Root may read everything.
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def refused(directory: Path) -> list[tuple[int | None, str, float]]:
    """Returns the error of each way to find the newest step, and what the state has then."""
    Run(directory).restore({"w": torch.zeros(1000)})  # Imports what this user may not import.
    become_nobody()
    run, state = Run(directory), state_of(0)
    found = []
    for call in (run.latest_step, lambda: run.restore(state)):
        with pytest.raises(StorageError) as caught:
            call()
        found.append((caught.value.errno, str(caught.value), state["w"].sum().item()))
    return found


@pytest.mark.parametrize("kind", FILES)
def test_a_restore_never_passes_over_a_step_that_it_must_not_read(folder: Path, kind: str) -> None:
    run = Run(folder / "run", record=False)
    for step in (1, 2):
        run.save(step, state_of(step))
    file = FILES[kind](folder / "run" / "step-2")
    file.chmod(0)
    for number, message, loaded in Forks().call(refused, folder / "run"):
        assert number == errno.EACCES
        assert str(file) in message
        assert loaded == 0


def close_and_save(directory: Path, kind: str) -> None:
    run = Run(directory, keep_last=1, keep_best=1, monitor="loss")
    for step in (1, 2):
        run.save(step, state_of(step), metrics={"loss": step})
    if os.geteuid() == 0:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        os.chown(OF_STEPS[kind](directory / "step-1"), 0, 0)
    OF_STEPS[kind](directory / "step-1").chmod(0)
    become_nobody()
    for step in (3, 4):
        run.save(step, state_of(step), metrics={"loss": step})


@pytest.mark.parametrize("kind", OF_STEPS)
def test_retention_keeps_the_best_step_although_it_must_not_be_read(
    folder: Path, kind: str
) -> None:
    Forks().call(close_and_save, folder / "run", kind)
    OF_STEPS[kind](folder / "run" / "step-1").chmod(0o600)
    state = state_of(0)
    Run(folder / "run", record=False).restore(state, step=1)
    assert state["w"][0] == 1


def restored_with_local(directory: Path) -> list[tuple[int | None, float]]:
    """Returns the newest step and the given steps 1 and 2, and what the state has then."""
    options = {"local": directory / "local", "keep_local": 2, "record": False}
    Run(directory / "run", **options).restore(state_of(0))  # Imports what nobody may import.
    become_nobody()
    run, found = Run(directory / "run", **options), []
    for given in ({}, {"step": 1}, {"step": 2}):
        state = state_of(0)
        found.append((run.restore(state, **given), state["w"][0].item()))
    return found


def save_with_local(folder: Path) -> None:
    """Saves steps 1 and 2 in both directories, as the user whom nobody knows."""
    with Run(folder / "run", local=folder / "local", record=False, keep_local=2) as run:
        for each in (1, 2):
            run.save(each, state_of(each), metrics={"loss": each})
            run.wait(promoted=True)
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)


PARTS = {**FILES, "directory": lambda step: step}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize(("place", "step"), [("local", 1), ("local", 2), ("run", 1), ("run", 2)])
def test_a_step_that_must_not_be_read_matters_only_if_nowhere_else_is_that_step_or_a_newer_one(
    folder: Path, place: str, step: int, kind: str
) -> None:
    save_with_local(folder)
    if (place, step) == ("run", 1):
        shutil.rmtree(folder / "run" / "step-2")
    PARTS[kind](folder / place / f"step-{step}").chmod(0)
    assert Forks().call(restored_with_local, folder) == [(2, 2), (1, 1), (2, 2)]


def best_with_local(directory: Path, locked: Path) -> tuple[int | None, type | None, int | None]:
    """Returns the best step of two, the error if it can be read nowhere, and that after it."""
    options = {"local": directory / "local", "keep_local": 2, "record": False, "monitor": "loss"}
    Run(directory / "run", **options).best_step()
    become_nobody()
    run, error = Run(directory / "run", **options), None
    first = run.best_step()
    for place in ("run", "local"):
        (directory / place / "step-1" / ".metadata").chmod(0)
    try:
        run.best_step()
    except StorageError as raised:
        error = type(raised)
    locked.chmod(0o600)
    return first, error, run.best_step()


@pytest.mark.parametrize("place", ["local", "run"])
def test_the_best_step_must_be_read_in_one_place_only(folder: Path, place: str) -> None:
    save_with_local(folder)
    locked = folder / place / "step-1" / ".metadata"
    locked.chmod(0)
    assert Forks().call(best_with_local, folder, locked) == (1, StorageError, 1)


def promoted_once_it_can_be_read(folder: Path, path: Path, mode: int) -> list[list[str]]:
    """Returns the steps in both directories while step 2 cannot be read, and afterwards."""
    options = {"local": folder / "local", "keep_last": 2, "record": False}
    Run(folder / "other").restore(state_of(0))  # Imports what nobody may import.
    become_nobody()
    found = []
    with Run(folder / "run", **options) as run:
        run.save(3, state_of(3))
        run.wait(promoted=True)
        found += [steps_in(folder / "local"), steps_in(folder / "run")]
        path.chmod(mode)
        run.wait(promoted=True)
        found.append(steps_in(folder / "run"))
    return found


def steps_in(directory: Path) -> list[str]:
    return sorted(step.name for step in directory.glob("step-*"))


@pytest.mark.parametrize("kind", PARTS)
def test_a_local_step_that_cannot_be_read_remains_and_is_promoted_later(
    folder: Path, kind: str
) -> None:
    save_with_local(folder)
    for step in (1, 2):
        shutil.rmtree(folder / "run" / f"step-{step}")
    path = PARTS[kind](folder / "local" / "step-2")
    mode = path.stat().st_mode & 0o777
    path.chmod(0)
    local, run, later = Forks().call(promoted_once_it_can_be_read, folder, path, mode)
    assert {"step-2", "step-3"} <= set(local)
    assert "step-3" in run
    assert "step-2" not in run
    assert {"step-2", "step-3"} <= set(later)


def loaded_stock(directory: Path) -> float:
    state = state_of(0)
    torch_ckpt.load(state, checkpoint_id=directory, no_dist=True)
    become_nobody()
    state = state_of(0)
    torch_ckpt.load(state, checkpoint_id=directory, no_dist=True)
    return state["w"][0].item()


def test_a_checkpoint_without_an_index_loads_beside_an_index_that_must_not_be_read(
    folder: Path,
) -> None:
    dcp.save(state_of(1), checkpoint_id=folder / "stock", no_dist=True)
    (folder / "stock").chmod(0o755)
    index = folder / "stock" / ".index.0123456789abcdef"
    index.touch()
    index.chmod(0)
    assert Forks().call(loaded_stock, folder / "stock") == 1


def close_folder_and_save(directory: Path) -> None:
    run = Run(directory, keep_last=1, keep_every=2)
    run.save(2, state_of(2))
    if os.geteuid() == 0:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    (directory / "step-2").chmod(0)
    become_nobody()
    for step in (3, 5):
        run.save(step, state_of(step))


@pytest.mark.filterwarnings("ignore:everything is written")
def test_retention_keeps_a_step_whose_folder_must_not_be_read(folder: Path) -> None:
    Forks().call(close_folder_and_save, folder / "run")
    (folder / "run" / "step-2").chmod(0o700)
    state = state_of(0)
    Run(folder / "run", record=False).restore(state, step=2)
    assert state["w"][0] == 2
    assert not (folder / "run" / "step-3").exists()
