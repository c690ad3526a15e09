"""The error of one rank ends a call on all ranks at once, whatever the others are doing."""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from failing_ranks import (
    AMPLE_S,
    DEADLINE_S,
    LIMIT_S,
    RECORDER,
    Detour,
    LoadPlanner,
    SavePlanner,
    hold,
    release,
    train,
)
from ranks import Worlds
from states import tensors_of
from support.exchanging import Exchanging
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, SafetensorsWriter
from torch_ckpt._core._native import local_file_system
from torch_ckpt.errors import CorruptionError, StorageError
from torch_ckpt.filesystems.location import register
from torch_ckpt.options import IoOptions
from torch_ckpt.storage import rank_files, safetensors_writer

pytestmark = pytest.mark.timeout(180)

PROMPT_S = 3.0  # One second, on a machine that is busy.
SLOW_S = 12.0  # How long the slow rank takes if nobody stops it.
NUMEL = 1 << 22
IO = IoOptions(buffer_nbytes=512 << 10, exchange_nbytes=4 << 20)
PAUSE_MS = round(1000 * SLOW_S / (4 * NUMEL / IO.block_nbytes(local_file_system())))

needs_recorder = pytest.mark.skipif(
    not list(RECORDER.glob("recorder*.so")), reason="tests/check.py builds the module recorder"
)


class End(NamedTuple):
    """How a call ended on a rank."""

    failures: dict[int, str]
    seconds: float


def state_of(version: str) -> dict[str, Any]:
    rank = dist.get_rank()
    shapes = {f"w{rank}": (NUMEL,), f"v{rank}": (3,)}
    return tensors_of(shapes, version)


def disk(path: Path, slow: int) -> Any:
    """The path, on a disk that is slow for one rank."""
    if dist.get_rank() != slow:
        return path
    sys.path.insert(0, str(RECORDER))
    register("slow", importlib.import_module("recorder").SlowFileSystem(PAUSE_MS))
    return f"slow://{path}"


def ended(call: Callable[[], Any]) -> End:
    dist.barrier()
    begin = time.monotonic()
    with pytest.raises(CheckpointException) as caught:
        call()
    seconds = time.monotonic() - begin
    failures = {rank: repr(error) for rank, (error, _) in caught.value.failures.items()}
    train()
    return End(failures, seconds)


def writer_of(kind: str, path: Any) -> FastWriter:
    if kind == "safetensors":
        return SafetensorsWriter(path, io=IO)
    threads = 2 if kind == "threads" else 1
    return FastWriter(path, thread_count=threads, io=IO)


def save_beside_a_full_disk(path: Path, slow: int, failing: int, kind: str) -> End:
    """A rank may not write so long a file; another takes its time."""
    writer = writer_of(kind, disk(path, slow))
    state = state_of("new")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))

    def save() -> None:
        if kind == "background":
            future = torch_ckpt.async_save(state, storage_writer=writer, timeout_s=AMPLE_S)
            future.result(LIMIT_S)  # type: ignore[union-attr]
        else:
            torch_ckpt.save(state, storage_writer=writer, timeout_s=AMPLE_S)

    try:
        return ended(save)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@needs_recorder
@pytest.mark.thin("file-0", "safetensors-0")
@pytest.mark.parametrize("slow", [0, 2])
@pytest.mark.parametrize("kind", ["file", "threads", "background", "safetensors"])
def test_a_rank_that_cannot_write_ends_the_writing_of_all_at_once(
    worlds: Worlds, tmp_path: Path, slow: int, kind: str
) -> None:
    seen = worlds.run(3, save_beside_a_full_disk, tmp_path, slow, 1, kind, timeout_s=LIMIT_S)
    for end in seen:
        assert end.seconds < PROMPT_S, seen
        assert end.failures.keys() == {1}
        assert StorageError.__name__ in end.failures[1]
        assert errno.errorcode[errno.EFBIG] in end.failures[1]
    assert not list(tmp_path.glob("*metadata*"))


def save_with_a_slow_thread(path: Path, failing: int, kind: str) -> End:
    """One of two threads of rank 1 fails at once, and the disk of the other is slow."""
    where = disk(path, 1)
    if kind == "safetensors":
        writer: FastWriter = SafetensorsWriter(where, thread_count=2, io=IO)
        module, name = safetensors_writer._PieceWriter, "write"
    else:
        writer = FastWriter(where, thread_count=2, io=IO)
        module, name = rank_files, "write_data_file"
    write, is_mine, count = getattr(module, name), dist.get_rank() == 1, itertools.count()

    def fail_once(*args: Any, **options: Any) -> Any:
        if is_mine and next(count) == failing:
            time.sleep(0.5)  # The other thread has begun.
            raise OSError(errno.EFBIG, "a file is too long")
        return write(*args, **options)

    rank = dist.get_rank()
    state = {f"{n}{rank}": torch.ones(NUMEL if is_mine else 8) for n in "ab"}
    with mock.patch.object(module, name, fail_once):
        return ended(lambda: torch_ckpt.save(state, storage_writer=writer, timeout_s=AMPLE_S))


@needs_recorder
@pytest.mark.thin("file-0")
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", ["file", "safetensors"])
def test_an_error_of_one_thread_of_a_rank_does_not_wait_for_its_other_thread(
    worlds: Worlds, tmp_path: Path, failing: int, kind: str
) -> None:
    for end in worlds.run(2, save_with_a_slow_thread, tmp_path, failing, kind, timeout_s=LIMIT_S):
        assert end.seconds < PROMPT_S
        assert end.failures.keys() == {1}
        assert "a file is too long" in end.failures[1]


def load_without_a_network(path: Path) -> End:
    """Rank 1 cannot connect to exchange reads."""
    interface = {"GLOO_SOCKET_IFNAME": "nonet0"} if dist.get_rank() == 1 else {}
    loaded = {"w0": torch.zeros(NUMEL)}
    reader = Exchanging(path, io=IO)
    with mock.patch.dict(os.environ, interface):
        return ended(lambda: torch_ckpt.load(loaded, storage_reader=reader, timeout_s=AMPLE_S))


def test_a_rank_that_cannot_connect_to_exchange_reads_ends_the_load_of_all_at_once(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(3, save_state, tmp_path)
    for end in worlds.run(3, load_without_a_network, tmp_path, timeout_s=LIMIT_S):
        assert end.seconds < PROMPT_S
        assert end.failures.keys() == {1}
        assert "cannot connect to the other ranks" in end.failures[1]


def load_beside_damage(paths: list[Path], slow: int, exchange: bool) -> End:
    """Each rank reads a copy of its own, and that of one is damaged."""
    kind = Exchanging if exchange else FastReader
    where = disk(paths[dist.get_rank()], slow)
    options: dict[str, Any] = {} if exchange else {"exchange": "off"}
    reader = kind(where, io=IO, **options)
    rank = 0 if exchange else dist.get_rank()
    loaded = {f"w{rank}": torch.zeros(NUMEL)}
    return ended(lambda: torch_ckpt.load(loaded, storage_reader=reader, timeout_s=AMPLE_S))


def save_state(path: Path) -> None:
    torch_ckpt.save(state_of("saved"), checkpoint_id=path, timeout_s=AMPLE_S)


@needs_recorder
@pytest.mark.thin("False-0")
@pytest.mark.parametrize("slow", [0, 2])
@pytest.mark.parametrize("exchange", [False, True])
def test_a_rank_that_reads_damage_ends_the_reading_of_all_at_once(
    worlds: Worlds, tmp_path: Path, slow: int, exchange: bool
) -> None:
    paths = [tmp_path / f"{rank}" for rank in range(3)]
    worlds.run(3, save_state, paths[0])
    for path in paths[1:]:
        shutil.copytree(paths[0], path)
    damaged = next(paths[1].glob(f"__{0 if exchange else 1}_*.distcp"))
    with damaged.open("r+b") as file:
        for offset in range(200_000, 4 * NUMEL, 200_000):
            file.seek(offset)
            file.write(b"damage")
    seen = worlds.run(3, load_beside_damage, paths, slow, exchange, timeout_s=LIMIT_S)
    for end in seen:
        assert end.seconds < PROMPT_S, seen
        assert end.failures.keys() == {1}, seen
        assert CorruptionError.__name__ in end.failures[1]


def lose_a_tensor() -> None:
    raise OSError(errno.EFBIG, "a file is too long")


class Both(Detour):
    """Holds one rank, and fails another."""

    def __init__(self, where: str, fifo: Path) -> None:
        super().__init__(where, 0, hold, fifo)
        self.failing = Detour(where, 1, lose_a_tensor)

    def __call__(self, where: str) -> Any:
        self.failing(where)
        return super().__call__(where)


def call_beside_a_stuck_rank(path: Path, fifo: Path, where: str, is_first: bool) -> End:
    """Rank 0 is stuck for longer than the deadline, in code that nobody can stop."""
    group = dist.new_group(backend="gloo")
    state = state_of("new")
    options: dict[str, Any] = {"process_group": group, "checkpoint_id": path}
    if not is_first or where == "read":
        torch_ckpt.save(state, **options, timeout_s=AMPLE_S)
    options["timeout_s"] = DEADLINE_S
    detour = Both(where, fifo)

    def call() -> None:
        if where == "read":
            torch_ckpt.load(state, planner=LoadPlanner(detour), **options)
        else:
            torch_ckpt.save(state, planner=SavePlanner(detour), **options)

    dist.barrier()
    begin = time.monotonic()
    with pytest.raises(CheckpointException) as caught:
        call()
    end = time.monotonic() - begin
    if dist.get_rank() == 1:
        time.sleep(2 * DEADLINE_S)
        release(fifo)
    train()
    torch_ckpt.save(state, process_group=group, checkpoint_id=path, timeout_s=AMPLE_S)
    failures = {rank: repr(error) for rank, (error, _) in caught.value.failures.items()}
    return End(failures, end)


@pytest.mark.thin("local plan-True", "read-False")
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("where", ["local plan", "write", "read"])
def test_the_first_cause_wins_over_the_deadline_of_a_rank_that_is_stuck(
    worlds: Worlds, tmp_path: Path, where: str, is_first: bool
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    function = call_beside_a_stuck_rank
    seen = worlds.run(3, function, tmp_path / "c", fifo, where, is_first, timeout_s=LIMIT_S)
    for rank, end in enumerate(seen):
        assert end.failures.keys() == {1}
        assert "a file is too long" in end.failures[1]
        assert end.seconds < DEADLINE_S or rank == 0, seen
