"""Output directories that each machine has for itself, and saves that fail on one rank."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from states import failures_of
from torch.distributed.checkpoint import DefaultSavePlanner

import torch_ckpt
from torch_ckpt import FastSavePlanner, FastWriter, SafetensorsWriter
from torch_ckpt.commits import late_names
from torch_ckpt.errors import StorageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

CALLS = {"dcp.save": dcp.save, "torch_ckpt.save": torch_ckpt.save}
PLANNERS = {"stock planner": DefaultSavePlanner, "fast planner": FastSavePlanner}


def state_of_rank() -> dict[str, torch.Tensor]:
    return {f"w{dist.get_rank()}": torch.arange(1000.0), "both": torch.ones(30)}


def save_locally(folder: Path, call: str, planner: str, writer: Any) -> Any:
    """Saves to a directory of this rank's own machine; returns the errors, and its files."""
    path = folder / f"machine {dist.get_rank()}" / "run" / "checkpoint"
    options = {"storage_writer": writer(path), "planner": PLANNERS[planner]()}
    with mock.patch.object(late_names, "APPEARS_S", 0.3):
        failed = failures_of(CALLS[call], state_of_rank(), **options)
    dist.barrier()
    return failed, sorted(os.listdir(path)) if path.exists() else None


@pytest.mark.thin(2)
@pytest.mark.parametrize("writer", [FastWriter, SafetensorsWriter])
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("exists", [True, False], ids=["exists", "new"])
def test_a_directory_that_is_not_shared_is_named_and_gets_no_files(
    worlds: Worlds, tmp_path: Path, exists: bool, call: str, planner: str, writer: Any
) -> None:
    for rank in (0, 1):
        if exists:
            (tmp_path / f"machine {rank}" / "run" / "checkpoint").mkdir(parents=True)
    host = socket.gethostname()
    found = worlds.run(2, save_locally, tmp_path, call, planner, writer)
    for rank, (failed, files) in enumerate(found):
        assert list(failed) == [1]
        assert failed[1].kind == StorageError.__name__
        text = failed[1].message
        assert f"rank 1 on host {host} does not find {tmp_path / 'machine 1'}" in text
        assert f"which the coordinator on host {host} has created" in text
        assert "on storage that all ranks share" in text
        assert exists or "another save" not in text
        if rank == 1 or call == "torch_ckpt.save":  # DCP's own tells no rank of other ranks.
            assert not files
        if rank == 1 and not exists:
            assert files is None
            assert not (tmp_path / "machine 1").exists()


class _Failing(FastWriter):
    """Fails on rank 1 once rank 0 has written its files."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = None if dist.get_rank() else super().write_data(plan, planner)
        dist.barrier()
        if written is None:
            raise OSError("the disk is broken")
        return written


class _Stock(FastWriter):
    """Reads the names of its files as a subclass of stock's writer does, and fails on rank 0.

    Rank 1 ends the failed save after rank 0.
    """

    has_failed = False

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert plan.storage_data.prefix == f"__{dist.get_rank()}_"
        written = super().write_data(plan, planner)
        self.has_failed = True
        if dist.get_rank() == 0:
            raise OSError("the disk is broken")
        return written

    def end_failed_save(self) -> None:
        if self.has_failed and dist.get_rank() == 1:
            dist.barrier()
        super().end_failed_save()
        if self.has_failed and dist.get_rank() == 0:
            dist.barrier()


def fail_and_list(path: Path, planner: str) -> Any:
    options = {"storage_writer": _Stock(path), "planner": PLANNERS[planner]()}
    failed = failures_of(torch_ckpt.save, state_of_rank(), **options)
    dist.barrier()
    return failed, path.exists()


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_last_rank_that_removes_its_files_removes_the_directory(
    worlds: Worlds, tmp_path: Path, planner: str
) -> None:
    for failed, exists in worlds.run(2, fail_and_list, tmp_path / "checkpoint", planner):
        assert failed[0].message == "the disk is broken"
        assert not exists


def save_and_fail(path: Path, planner: str) -> tuple[bool, list[str]]:
    torch_ckpt.save(state_of_rank(), storage_writer=FastWriter(path))
    dist.barrier()
    before = sorted(os.listdir(path))
    options = {"storage_writer": _Failing(path), "planner": PLANNERS[planner]()}
    failed = failures_of(torch_ckpt.save, state_of_rank(), **options)
    dist.barrier()
    after = sorted(os.listdir(path))
    dist.barrier()
    torch_ckpt.save(state_of_rank(), storage_writer=FastWriter(path))
    return list(failed) == [1] and after == before, after


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_rank_that_has_written_removes_its_files_if_another_one_fails(
    worlds: Worlds, tmp_path: Path, planner: str
) -> None:
    for has_ended_clean, names in worlds.run(2, save_and_fail, tmp_path / "checkpoint", planner):
        assert has_ended_clean, names
