"""Ranks that each use a GPU of their own pass pieces on from GPU to GPU, over NCCL."""

import functools
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, IoOptions, RankTimeoutError, loading

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

pytestmark = pytest.mark.timeout(280)

TIMEOUT_S = 20.0
IO = IoOptions(exchange_on_gpus=True)


def in_world(rank: int, work: Callable[[], None], size: int, folder: str) -> None:
    # Kernels of all links must run at a time.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    dist.all_reduce(torch.ones(1, device="cuda"))
    work()
    dist.destroy_process_group()


def run(work: Callable[[], None], *, dying: int | None = None) -> None:
    """Runs it on all GPUs, up to eight; only the dying rank may end otherwise than well."""
    size = min(8, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        arguments = (work, size, folder)
        world = mp.spawn(in_world, arguments, nprocs=size, join=False)
        end = time.monotonic() + 240
        for rank, process in enumerate(world.processes):
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
            expected = -signal.SIGKILL if rank == dying else 0
            assert process.exitcode == expected, f"rank {rank}"


def state_of(seed: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {
        f"w{i}": torch.randn(1000 + i, 1000, generator=generator).to(device) for i in range(16)
    }
    state["strided"] = torch.randn(2000, 500, generator=generator).to(device).t()
    return state


def load_and_compare(path: Path) -> None:
    for _ in range(3):
        state = state_of(1, "cuda")
        reader = FastReader(path, io=IO, exchange="ring")
        torch_ckpt.load(state, storage_reader=reader, timeout_s=TIMEOUT_S)
        for name, tensor in state_of(0, "cpu").items():
            assert torch.equal(state[name].cpu(), tensor), name


def test_replicas_on_gpus_are_loaded_bit_for_bit(tmp_path: Path) -> None:
    dcp.save(state_of(0, "cpu"), storage_writer=FastWriter(tmp_path), no_dist=True)
    run(functools.partial(load_and_compare, tmp_path))


def load_beside_a_dying_rank(path: Path, dying: int) -> None:
    copy_to = loading._copy_to

    def die(*args: object) -> None:
        if dist.get_rank() == dying:
            os.kill(os.getpid(), signal.SIGKILL)
        copy_to(*args)  # type: ignore[arg-type]

    loading._copy_to = die
    # Of another dtype: each is copied once it is whole, in the midst of the exchange.
    state = {name: tensor.double() for name, tensor in state_of(1, "cuda").items()}
    reader = FastReader(path, io=IO, exchange="ring")
    began = time.monotonic()
    with pytest.raises((CheckpointException, RankTimeoutError)):
        torch_ckpt.load(state, storage_reader=reader, timeout_s=TIMEOUT_S)
    assert time.monotonic() - began < 3 * TIMEOUT_S
    os._exit(0)  # The process group has lost a rank: its end would wait.


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_is_killed_in_mid_transfer_holds_up_no_other(
    tmp_path: Path, dying: int
) -> None:
    dcp.save(state_of(0, "cpu"), storage_writer=FastWriter(tmp_path), no_dist=True)
    run(functools.partial(load_beside_a_dying_rank, tmp_path, dying), dying=dying)
