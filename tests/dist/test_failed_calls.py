"""Each system call of a save fails once: a typed error, and the old checkpoint or the new one."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forks import Forks
from states import assert_stored, tensors_of
from stops import is_in, serve_stops
from syscalls import Listener, Stop, can_stop
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt import FastWriter

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.skipif(not can_stop(), reason="no system calls can be stopped here"),
]

TIMEOUT_S = 30
SHAPES = {"small": (7, 5), "large": (300, 1000)}
# What the save can do without: the next save removes these files.
PROBE_REMOVAL = "unlink .tmp"  # Of an empty file. The next save removes it.
BEST_EFFORT = ["unlink .index", "unlink data", PROBE_REMOVAL]


class Saved(NamedTuple):
    """How a save went."""

    calls: list[str]  # As "fsync data", in order.
    error: BaseException | None


def state_of(version: int) -> dict[str, Any]:
    return {**tensors_of(SHAPES, version, torch.int32), "version": version}


def save_watched(path: Path, version: int) -> BaseException | None:
    # What begins at a page by chance would be written in place, by other calls.
    state = {
        name: torch.cat([value.new_zeros(1), value.flatten()])[1:].view_as(value)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state_of(version).items()
    }
    try:
        dcp.save(state, storage_writer=FastWriter(path), no_dist=True)
    except CheckpointException as error:
        return error.failures[0][0]
    return None


def save(forks: Forks, path: Path, version: int, *, fail: int = -1, error: int = 0) -> Saved:
    """Saves in a process whose call number ``fail`` that concerns ``path`` fails."""
    calls: list[str] = []

    def at_stop(listener: Listener, stop: Stop) -> bool:
        is_counted = is_in(stop, path)
        if is_counted:
            name = stop.path.removeprefix(str(path)).removeprefix("/")
            kind = "data" if name.endswith(".distcp") else ".".join(name.split(".")[:2])
            calls.append(f"{stop.call} {kind or 'folder'}")
        if is_counted and len(calls) - 1 == fail:
            listener.fail(stop, error)
        else:
            listener.let_through(stop)
        return True

    ended = serve_stops(forks, at_stop, calls, save_watched, path, version, timeout_s=TIMEOUT_S)
    assert ended is not None
    returned, raised = ended
    assert raised is None, raised
    return Saved(calls, returned)


def assert_holds(path: Path, version: int) -> None:
    assert_stored(path, state_of(version), no_dist=True)


@pytest.mark.thin("EIO")
@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
def test_every_call_that_fails_leaves_the_old_checkpoint_or_the_new(
    tmp_path: Path, number: int, full: bool
) -> None:
    forks = Forks()
    old = tmp_path / "old"
    save(forks, old, 1)
    whole = save(forks, shutil.copytree(old, tmp_path / "whole"), 2)
    assert whole.error is None
    commit = whole.calls.index("rename .metadata")
    for fail, call in list(enumerate(whole.calls))[:: 1 if full else 3]:
        path = shutil.copytree(old, tmp_path / f"{fail}")
        seen = save(forks, path, 2, fail=fail, error=number)
        assert seen.calls[fail] == call
        if call in BEST_EFFORT:
            assert seen.error is None, call
        else:
            assert type(seen.error).__name__ == "StorageError", call
            assert getattr(seen.error, "errno", None) == number, call
            assert str(path) in str(seen.error), call
        is_saved = fail > commit or call == PROBE_REMOVAL
        assert_holds(path, 2 if is_saved else 1)
        if not is_saved:
            files = {file.name: file.read_bytes() for file in path.iterdir()}
            before = {file.name: file.read_bytes() for file in old.iterdir()}
            assert files == before, f"{call} leaves something behind"
        else:
            assert save(forks, path, 3).error is None
            assert_holds(path, 3)
            assert len(list(path.iterdir())) == 3, f"{call} leaves something for good"
    assert {call.split()[0] for call in whole.calls} >= {"create", "pwrite64", "fsync", "rename"}


@pytest.mark.thin("pwrite64", "rename")
@pytest.mark.parametrize("call", ["create", "pwrite64", "fallocate", "ftruncate", "rename"])
def test_a_call_that_a_signal_interrupts_is_made_again(tmp_path: Path, call: str) -> None:
    forks = Forks()
    save(forks, tmp_path, 1)
    whole = save(forks, tmp_path, 2)
    numbers = [number for number, made in enumerate(whole.calls) if made.startswith(f"{call} ")]
    assert numbers, f"no {call} among {whole.calls}"
    for number in numbers:
        seen = save(forks, tmp_path, 3, fail=number, error=errno.EINTR)
        assert seen.error is None, whole.calls[number]
        assert_holds(tmp_path, 3)
