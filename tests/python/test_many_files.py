"""Saves, loads and other reads of many files with few descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import DefaultSavePlanner

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, SafetensorsWriter
from torch_ckpt.conversion.convert import convert
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.compare import compare
from torch_ckpt.storage.verify import examine

COUNT = 150
FEW = 30
"""Descriptors that a save may add: less than one for each file."""

LOAD = 280
"""Descriptors that a load may add: those of 128 files."""


@contextlib.contextmanager
def more_descriptors(count: int) -> Iterator[None]:
    """Lets this process open so many descriptors more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def state_of(count: int = COUNT) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((64,), float(number)) for number in range(count)}


WRITERS: dict[str, Callable[[Path], Any]] = {
    "safetensors": lambda path: SafetensorsWriter(path, max_shard_nbytes=1, sync_files=False),
    "safetensors, two threads": lambda path: SafetensorsWriter(
        path, max_shard_nbytes=1, sync_files=False, thread_count=2
    ),
    "a file for each tensor": lambda path: FastWriter(
        path, single_file_per_rank=False, sync_files=False
    ),
    "a file for each tensor, two threads": lambda path: FastWriter(
        path, single_file_per_rank=False, sync_files=False, thread_count=2
    ),
}


@pytest.mark.parametrize("save", [dcp.save, torch_ckpt.save])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_save_closes_each_file_at_its_end(
    save: Callable[..., Any], writer: str, tmp_path: Path
) -> None:
    state = state_of()
    with more_descriptors(FEW):
        save(state, storage_writer=WRITERS[writer](tmp_path / "x"), no_dist=True)
    assert len(list((tmp_path / "x").iterdir())) > COUNT
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=FastReader(tmp_path / "x"), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
