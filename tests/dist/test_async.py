"""Asynchronous saves hold the values of the moment they began, whatever training does meanwhile."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from changing_states import EXECUTORS, assert_saved, become, state_at
from ranks import on_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import torch_ckpt
from torch_ckpt import FastWriter
from torch_ckpt.errors import RankTimeoutError, StorageError

pytestmark = pytest.mark.timeout(180)

SAVE_TIMEOUT_S = 60
STEPS = 3


@pytest.mark.thin("thread-1", "thread-2")
@pytest.mark.parametrize(("executor", "threads"), [("thread", 1), ("process", 1), ("thread", 2)])
@on_ranks(2, timeout_s=120)
def test_async_save_holds_the_values_of_when_it_was_called(
    path: Path, executor: str, threads: int
) -> None:
    """Saves some steps, each while the next one overwrites the tensors and uses its own group."""
    group = dist.new_group(backend="gloo")
    writer = FastWriter(path / "0", thread_count=threads)
    state = state_at(0)
    for step in range(STEPS):
        future = dcp.async_save(
            state,
            checkpoint_id=path / f"{step}",
            storage_writer=writer,
            process_group=group,
            async_checkpointer_type=EXECUTORS[executor],
        )
        become(state, step + 1)
        dist.all_reduce(torch.ones(1000))  # Training goes on with the group of its own.
        assert isinstance(future.result(SAVE_TIMEOUT_S), Metadata)
    for step in range(STEPS):
        assert_saved(path / f"{step}", step)


@pytest.mark.thin("thread")
@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(2, timeout_s=120)
def test_async_save_takes_a_stager_that_stages_in_the_background(path: Path, executor: str) -> None:
    """Stages in the background; training waits for the staging only."""
    group = dist.new_group(backend="gloo")
    state = state_at(0)
    for step in range(STEPS):
        # Of this save alone: in torch 2.11 a stager forgets after the first how to copy objects.
        stager = DefaultStager(StagingOptions(False, False, True, False))
        response = dcp.async_save(
            state,
            storage_writer=FastWriter(path / f"{step}"),
            process_group=group,
            async_checkpointer_type=EXECUTORS[executor],
            async_stager=stager,
        )
        assert isinstance(response, AsyncSaveResponse)
        response.staging_completion.result(SAVE_TIMEOUT_S)
        become(state, step + 1)
        response.upload_completion.result(SAVE_TIMEOUT_S)
        stager.close()
    for step in range(STEPS):
        assert_saved(path / f"{step}", step)


@on_ranks(2)
def test_async_save_that_fails_on_one_rank_fails_its_future_on_every_rank(path: Path) -> None:
    group = dist.new_group(backend="gloo")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:  # Every write past this fails with EFBIG.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        future = dcp.async_save(state_at(0), storage_writer=FastWriter(path), process_group=group)
        error = future.exception(SAVE_TIMEOUT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(error, CheckpointException)
    assert {rank: type(cause) for rank, (cause, _) in error.failures.items()} == {1: StorageError}
    assert not (path / ".metadata").exists()


class Unpicklable(FastWriter):
    def __reduce__(self) -> Any:
        raise TypeError("this writer does not pickle")


@pytest.mark.slow
@on_ranks(3, timeout_s=120)
def test_a_rank_whose_process_gets_no_order_fails_the_save_on_every_rank_at_once(
    path: Path,
) -> None:
    group = dist.new_group(backend="gloo")
    options: dict[str, Any] = {
        "process_group": group,
        "async_checkpointer_type": AsyncCheckpointerType.PROCESS,
        "timeout_s": 1000,
    }
    for step, kind in enumerate((FastWriter, Unpicklable, FastWriter)):
        writer = (kind if dist.get_rank() == 1 else FastWriter)(path / f"{step}")
        future = torch_ckpt.async_save(state_at(step), storage_writer=writer, **options)
        error = future.exception(SAVE_TIMEOUT_S)
        if kind is FastWriter:
            assert error is None
            assert_saved(path / f"{step}", step)
        elif dist.get_rank() == 1:
            assert "does not pickle" in str(error)
        else:
            assert isinstance(error, RankTimeoutError)
            assert "rank 1 failed" in str(error)
