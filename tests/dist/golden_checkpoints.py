"""Writes the golden checkpoints, always the same bytes: ``python golden_checkpoints.py DIRECTORY``.

``tests/golden/checkpoints`` holds what a former version has written, which must load for ever.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import FastWriter

RANKS = 2
DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn")


def full_state() -> dict[str, Any]:
    """What the checkpoints hold, unsharded."""
    generator = torch.Generator().manual_seed(7)
    plain = {
        dtype: torch.randint(0, 2, (6, 11), generator=generator).to(getattr(torch, dtype))
        for dtype in DTYPES
    }
    sharded = {
        "rows": torch.randn(9, 5, generator=generator),
        "columns": torch.randn(4, 7, generator=generator).bfloat16(),
    }
    large = torch.randint(-99, 99, (400, 25), generator=generator, dtype=torch.int16)
    return {
        "plain": plain,
        "sharded": sharded,
        "large": large,  # Ranks write some rows each.
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "step": 7,
        "nested": [{"lr": 0.5, "betas": (0.9, 0.99)}, "text"],
    }


def sharded_state() -> dict[str, Any]:
    """The same, as ranks hold it."""
    mesh = init_device_mesh("cpu", (RANKS,))
    state = full_state()
    for name, dim in (("rows", 0), ("columns", 1)):
        state["sharded"][name] = distribute_tensor(state["sharded"][name], mesh, [Shard(dim)])
    return state


def _write(rank: int, store: str) -> None:
    store = dist.FileStore(store, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    with (
        mock.patch("secrets.token_hex", side_effect=lambda nbytes: "5a" * nbytes),
        mock.patch("torch_ckpt.storage.writer.uuid_of", side_effect=str),  # Ids were no UUIDs.
    ):
        state = sharded_state()
        torch_ckpt.save(state, storage_writer=FastWriter("ours"))
        dcp.save(state, storage_writer=FastWriter("under-dcp", thread_count=2))
        if rank == 0:
            torch_ckpt.save(full_state(), storage_writer=FastWriter("alone"), no_dist=True)
    dist.destroy_process_group()


def main() -> None:
    """Writes them into a directory, which must be there."""
    os.chdir(sys.argv[1])  # Metadata have the path of the checkpoint.
    torch.set_num_threads(1)
    store = str(Path("store").absolute())
    mp.start_processes(_write, args=(store,), nprocs=RANKS, start_method="fork")
    Path("store").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
