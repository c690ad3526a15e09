"""What has not changed is not written again, on several ranks, and where their number changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from support.states import same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, FastWriter, Run
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.verify import examine

SAVES = ["stock planner", "fast planner", "async"]


def _values(version: int) -> dict[str, torch.Tensor]:
    """A frozen base, and what is tuned."""
    generator = torch.Generator().manual_seed(0)
    values = {f"base.{n}": torch.rand(96, 1000, generator=generator) for n in range(3)}
    return values | {"lora.a": torch.full((48, 10), float(version)), "lora.b": torch.ones(7)}


def _state(version: int) -> dict[str, Any]:
    """Rows of some tensors on each rank, and others on all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for name, value in _values(version).items():
        placement = Replicate() if name in ("base.2", "lora.b") else Shard(0)
        state[name] = distribute_tensor(value, mesh, [placement])
    return state | {"plain": _values(version)["base.0"] + 1, "version": version}


def _save(path: Path, base: Path, version: int, how: str) -> None:
    writer = FastWriter(path, base=base)
    if how == "async":
        torch_ckpt.async_save(_state(version), storage_writer=writer).result()  # type: ignore[union-attr]
    else:
        planner = FastSavePlanner() if how == "fast planner" else None
        dcp.save(_state(version), storage_writer=writer, planner=planner)


def _check(path: Path, version: int) -> None:
    for reader in (FastReader(path), dcp.FileSystemReader(path)):
        state = _state(-1)
        dcp.load(state, storage_reader=reader)
        found = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
        expected = _values(version) | {"plain": _values(version)["base.0"] + 1, "version": version}
        assert same(found, expected, any_order=True)
    assert not examine(Location(path)).damage
    dist.barrier()


def _written(path: Path) -> int:
    return sum(f.stat().st_size for f in path.glob("*.distcp") if f.stat().st_nlink == 1)


def _saves(folder: Path, first: int, how: str) -> list[int]:
    written = []
    for step in (first, first + 1):
        _save(folder / f"{step}", folder / f"{step - 1}", step, how)
        _check(folder / f"{step}", step)
        written.append(_written(folder / f"{step}"))
        dist.barrier()
    return written


@pytest.mark.thin(0.5)
@pytest.mark.parametrize("how", SAVES)
def test_ranks_link_what_they_have_written_and_another_number_writes_what_it_needs(
    worlds: Worlds, tmp_path: Path, how: str
) -> None:
    step = 0
    for count in (2, 3, 1, 2):
        written = worlds.run(count, _saves, tmp_path, step, how)
        # The first save of another number of ranks has other boxes.
        assert all(each[1] < 100_000 for each in written), (count, written)
        step += 2


def _run(folder: Path, first: int, keep: int) -> list[int]:
    written = []
    with Run(folder, keep_last=keep, asynchronous=first % 2 == 1) as run:
        for step in range(first, first + 3):
            run.save(step, _state(step))
            run.wait()
            _check(folder / f"step-{step}", step)
            written.append(_written(folder / f"step-{step}"))
            dist.barrier()
    return written


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_links_after_a_restart_also_if_only_the_newest_step_remains(
    worlds: Worlds, tmp_path: Path, keep: int
) -> None:
    for first in (1, 4):
        written = worlds.run(2, _run, tmp_path, first, keep)
    # With one step alone, nothing is linked twice any more. What counts is what the disk has.
    if keep == 2:
        assert all(nbytes < 100_000 for each in written for nbytes in each)
    inodes = {f.stat().st_ino: f.stat().st_size for f in tmp_path.glob("*/*.distcp")}
    assert sum(inodes.values()) < 1.2 * sum(v.nbytes for v in _values(0).values()) + 500_000
