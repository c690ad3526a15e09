"""Shared storage that shows new names late, as NFS and Lustre do: saves wait for them.

A seccomp listener plays the client of a network file system. A name that another process has made
is missing for a while, from the first time that this rank looks it up. The listing of a directory
is empty for a while.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from states import assert_same, failures_of
from syscalls import Listener, Stop, can_stop, have_answered, stop_before_lookups

import torch_ckpt
from torch_ckpt import FastWriter, Run, SafetensorsWriter
from torch_ckpt.commits import late_names
from torch_ckpt.coordination import waiting
from torch_ckpt.ladder.step_directories import StepDirectories

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not can_stop(), reason="needs seccomp on x86-64"),
]

LATE_S = 0.7
NEVER_S = 1e6


def see_late(folder: Path, late_s: float) -> None:
    """Makes this rank see the names of others late, from now on."""
    own, found = set[Path](), dict[Path, float]()  # When each name was looked up first.

    def is_late(path: Path) -> bool:
        now = time.time()
        return now < found.setdefault(path, now) + late_s

    def is_hidden(path: Path) -> bool:
        """What was in a directory before it appeared here appears with it."""
        appeared_s = 0.0
        for each in (*reversed(path.parents), path):
            if folder not in each.parents or each in own:
                continue
            with contextlib.suppress(FileNotFoundError):
                if each.stat().st_ctime < appeared_s:
                    continue
            if is_late(each):
                return True
            appeared_s = found[each] + late_s
        return False

    def answer(listener: Listener, stop: Stop) -> None:
        path = Path(os.path.normpath(stop.path))
        if stop.call in ("create", "mkdir", "rename", "link"):
            if not path.exists():
                own.add(path)
            listener.let_through(stop)
        elif folder not in path.parents:
            listener.let_through(stop)
        elif stop.call == "list" and is_late(path / "listed"):
            listener.end_listing(stop)  # As it was when it was new.
        elif stop.call != "list" and is_hidden(path):
            listener.fail(stop, errno.ENOENT)
        else:
            listener.let_through(stop)

    have_answered(stop_before_lookups, answer)


def state_of(rank: int, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"of rank {rank}": torch.full((1000,), value), "both": torch.full((30,), value)}


def save_new(path: Path, state: dict[str, Any]) -> None:
    torch_ckpt.save(state, checkpoint_id=path)


def save_existing(path: Path, state: dict[str, Any]) -> None:
    torch_ckpt.save(state, checkpoint_id=path)


def save_by_dcp(path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=FastWriter(path))


def save_in_background(path: Path, state: dict[str, Any]) -> None:
    future: Any = torch_ckpt.async_save(state, checkpoint_id=path)
    future.result()


def save_model(path: Path, state: dict[str, Any]) -> None:
    torch_ckpt.save(state, storage_writer=SafetensorsWriter(path, max_shard_nbytes=4096))


WAYS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "new": save_new,
    "existing": save_existing,
    "dcp.save": save_by_dcp,
    "async_save": save_in_background,
    "safetensors": save_model,
}


@contextlib.contextmanager
def impatient(appears_s: float) -> Iterator[None]:
    with mock.patch.object(late_names, "APPEARS_S", appears_s):
        yield


def save_late(way: str, late: int, path: Path, late_s: float, appears_s: float) -> Any:
    """Saves while one rank sees names late; returns the errors, and what was logged."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch_ckpt").addHandler(handler)
    torch_ckpt.save(state_of(dist.get_rank(), 0.0), checkpoint_id=path.parent / "first")
    dist.barrier()
    if dist.get_rank() == late:
        see_late(path.parent, late_s)
    with impatient(appears_s), mock.patch.object(waiting, "LOG_S", 0.3):
        failed = failures_of(WAYS[way], path, state_of(dist.get_rank()))
    dist.barrier()
    return failed, lines


@pytest.mark.thin("new-0", "existing-1", "safetensors-1")
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_save_waits_for_the_names_of_other_ranks_that_appear_late(
    tmp_path: Path, way: str, late: int
) -> None:
    path = tmp_path / "runs" / "checkpoint"
    path.parent.mkdir()
    if way in ("existing", "dcp.save"):
        path.mkdir()
    with Ranks(2) as ranks:
        found = ranks.run(save_late, way, late, path, LATE_S, 30.0)
    assert [failed for failed, _ in found] == [{}, {}]
    state = state_of(0, 0.0) | state_of(1, 0.0)
    reader = torch_ckpt.FastReader(path)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert_same(state, state_of(0) | state_of(1))
    if (way, late) != ("safetensors", 0):  # The first rank has created all files of a model.
        lines = found[late][1]
        assert any("to appear on this machine" in line for line in lines), lines


@pytest.mark.thin("new-1", "existing-0")
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("way", ["new", "existing", "safetensors"])
def test_a_name_that_never_appears_fails_the_save_and_blames_nobody(
    tmp_path: Path, way: str, late: int
) -> None:
    path = tmp_path / "runs" / "checkpoint"
    path.parent.mkdir()
    if way == "existing":
        path.mkdir()
    with Ranks(2) as ranks:
        found = ranks.run(save_late, way, late, path, NEVER_S, 0.5)
    if (way, late) == ("safetensors", 0):  # The first rank has created all files of a model.
        assert [failed for failed, _ in found] == [{}, {}]
        return
    failed, _ = found[0]
    assert list(failed) == [late]
    text = failed[late].message
    assert "not find" in text
    assert "within 0.5 s" in text
    assert str(path.parent) in text
    assert "another save or program has removed" not in text
    left = [name for name in os.listdir(path.parent) if name != "first"]
    assert left in ([], ["checkpoint"])
    assert not path.exists() or not os.listdir(path)


def restore_late(path: Path) -> Any:
    run, rank = Run(path), dist.get_rank()
    run.save(1, state_of(rank))
    run.close()
    dist.barrier()
    if rank == 1:
        see_late(path, LATE_S)
    state = state_of(rank, 0.0)
    with Run(path) as run:
        step = run.restore(state)
    assert_same(state, state_of(rank))
    return step


def test_a_restore_waits_for_a_step_that_appears_late_on_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Ranks(2) as ranks:
        assert ranks.run(restore_late, path) == [1, 1]


def restore_missing(path: Path) -> Any:
    run, rank = Run(path), dist.get_rank()
    run.save(1, state_of(rank))
    began = time.monotonic()
    failed = failures_of(lambda: run.restore(state_of(rank), step=7))
    took_s = time.monotonic() - began
    run.close()
    return took_s, [failure.message for failure in failed.values()]


@pytest.mark.parametrize("size", [1, 2])
def test_a_restore_of_a_step_that_was_never_saved_does_not_wait_for_it(
    tmp_path: Path, size: int
) -> None:
    with Ranks(size) as ranks:
        for took_s, messages in ranks.run(restore_missing, tmp_path / "run"):
            assert took_s < late_names.APPEARS_S / 3
            assert messages
            assert all("no checkpoint is committed" in text for text in messages)


def restore_removed(path: Path) -> Any:
    """Restores while the newest step is removed after it was chosen."""
    run, rank = Run(path), dist.get_rank()
    for step in (1, 2):
        run.save(step, state_of(rank, step))
    reader_of, state = StepDirectories.reader_of, state_of(rank, 0.0)

    def remove_first(self: StepDirectories, step: int, *args: Any) -> Any:
        if rank == 0 and step == 2:
            shutil.rmtree(path / "step-2", ignore_errors=True)
        return reader_of(self, step, *args)

    began = time.monotonic()
    with (
        mock.patch.object(StepDirectories, "reader_of", remove_first),
        pytest.warns(UserWarning, match="step 2 is passed over"),
    ):
        found = run.restore(state)
    took_s = time.monotonic() - began
    assert_same(state, state_of(rank))
    run.close()
    return found, took_s < late_names.APPEARS_S / 3


@pytest.mark.parametrize("size", [1, 2])
def test_a_restore_does_not_wait_for_a_step_that_is_removed_meanwhile(
    tmp_path: Path, size: int
) -> None:
    with Ranks(size) as ranks:
        assert ranks.run(restore_removed, tmp_path / "run") == [(1, True)] * size
