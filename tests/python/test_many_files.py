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
from torch.distributed.checkpoint import FileSystemWriter

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, SafetensorsWriter
from torch_ckpt.conversion.convert import convert
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.compare import compare
from torch_ckpt.storage.verify import examine

COUNT = 150
FEW = 30
"""Descriptors that a save may add: less than one for each file."""

MANY, OPEN = 320, 290
"""Files to read, and descriptors that a read may add: two for each of 128 files, and some."""


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


SOURCES: dict[str, Callable[[Path], Any]] = {
    "safetensors": lambda path: WRITERS["safetensors"](path),
    "own": lambda path: WRITERS["a file for each tensor"](path),
    "stock": lambda path: FileSystemWriter(path, single_file_per_rank=False, sync_files=False),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of many files in each format, written when it is first asked for."""
    folder = tmp_path_factory.mktemp("sources")

    def source(name: str) -> Path:
        if not (folder / name).exists():
            writer = SOURCES[name](folder / name)
            dcp.save(state_of(MANY), storage_writer=writer, no_dist=True)
        return folder / name

    return source


def _load(source: Path, target: Path) -> None:
    state = state_of(MANY)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=FastReader(source), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def _convert(source: Path, target: Path, to: str) -> None:
    convert(Location(source), Location(target), to)
    _load(target, target)


def _verify(source: Path, target: Path) -> None:
    assert not examine(Location(source)).damage


def _diff(source: Path, target: Path) -> None:
    found = compare(Location(source), Location(source))
    assert not found.differences
    assert not found.unknown


READS = {"load": _load, "verify": _verify, "diff": _diff} | {
    f"convert to {to}": lambda source, target, to=to: _convert(source, target, to)
    for to in ("dcp", "safetensors", "torch")
}


@pytest.mark.thin(1)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_read_opens_a_bounded_number_of_files(
    sources: Callable[[str], Path], source: str, read: str, tmp_path: Path
) -> None:
    path = sources(source)
    with more_descriptors(2 * OPEN if read == "diff" else OPEN):
        READS[read](path, tmp_path / "target")
