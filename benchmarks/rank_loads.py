"""What ranks save and load in bench_load.py: state dicts, their bits, and who loads them.

The bits of a tensor follow from its name, so that any rank can fill or check any part of it.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from load_contenders import (
    ON_STOCKS_FILES,
    ON_STOCKS_FILES_OFF,
    OURS,
    OURS_OFF,
    OURS_PLANNED,
    ROWS,
    STOCK,
    shapes,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# An installed package wins; the source tree serves where the native module was built in place.
sys.path.append(str(Path(__file__).resolve().parent.parent))

State = dict[str, torch.Tensor]

SAFETENSORS_FILES = 8
_PIECE_WORDS = 4 << 20


@functools.cache
def _mesh(device: str) -> dist.DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


def empty(kind: str, gib: float, *, cuda: bool = False) -> State:
    """This rank's tensors, zero, their pages touched; of `ROWS`, DTensors sharded by rows.

    Args:
        kind: Of state dict.
        gib: Its size.
        cuda: Whether they are on the current GPU.
    """
    device = "cuda" if cuda else "cpu"
    found: State = {}
    for name, shape in shapes(kind, gib).items():
        if kind == ROWS:
            found[name] = zeros(
                shape, dtype=torch.bfloat16, device_mesh=_mesh(device), placements=[Shard(0)]
            )
        else:
            found[name] = torch.zeros(shape, dtype=torch.bfloat16, device=device).fill_(0)
    return found


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What this rank has of `tensor`, and the number of its first row."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), offset[0]


def _pieces(name: str, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields parts of what this rank has of a tensor, as words of 8 bytes, and the bits due."""
    rows, first = local_rows(tensor)
    words = rows.view(torch.int64).flatten()
    before = first * (words.numel() // max(rows.shape[0], 1))
    key = (zlib.crc32(name.encode()) << 32) - (1 << 63)
    for begin in range(0, words.numel(), _PIECE_WORDS):
        part = words[begin : begin + _PIECE_WORDS]
        counted = torch.arange(part.numel(), device=part.device)
        yield part, counted.add_(key + before + begin).mul_(0x1E3779B97F4A7C15)


def fill(state: State) -> None:
    """Gives every tensor the bits of its name."""
    for name, tensor in state.items():
        for part, bits in _pieces(name, tensor):
            part.copy_(bits)


def first_difference(state: State) -> str | None:
    """The name of the first tensor that has other bits than its own, or None."""
    for name, tensor in state.items():
        if not all(torch.equal(part, bits) for part, bits in _pieces(name, tensor)):
            return name
    return None


# Saving ----------------------------------------------------------------------------------------


def save(saved: str, kind: str, gib: float, directory: Path) -> None:
    """Saves a filled state dict into `directory`, from all ranks, in the format `saved`."""
    if saved in (OURS, STOCK):
        state = empty(kind, gib)
        fill(state)
        if saved == STOCK:
            dcp.save(state, storage_writer=FileSystemWriter(directory))
            return
        from torch_ckpt import FastWriter

        dcp.save(state, storage_writer=FastWriter(directory))
    elif dist.get_rank() == 0:
        directory.mkdir(parents=True)
        whole = {n: torch.empty(s, dtype=torch.bfloat16) for n, s in shapes(kind, gib).items()}
        fill(whole)
        if saved == "torch.save":
            torch.save(whole, directory / "state.pt")
        else:
            _save_safetensors(whole, directory)


def _save_safetensors(state: State, directory: Path) -> None:
    from safetensors.torch import save_file

    names = list(state)
    for number in range(min(SAFETENSORS_FILES, len(names))):
        part = {name: state[name] for name in names[number::SAFETENSORS_FILES]}
        save_file(part, _safetensors_file(directory, number))


def _safetensors_file(directory: Path, number: int) -> Path:
    return directory / f"model-{number + 1:05}-of-{SAFETENSORS_FILES:05}.safetensors"


EXCHANGES_MIB = (16, 64, 256, 1024)
"""Budgets of exchanges that `bench_options.py` compares."""


# Loading ---------------------------------------------------------------------------------------


def _load_ours(state: State, directory: Path, **options: str) -> None:
    from torch_ckpt import FastReader

    dcp.load(state, storage_reader=FastReader(directory, **options))  # type: ignore[arg-type]


def _load_ours_planned(state: State, directory: Path) -> None:
    from torch_ckpt import FastLoadPlanner, FastReader

    dcp.load(state, storage_reader=FastReader(directory), planner=FastLoadPlanner())


def _load_ours_within(state: State, directory: Path, *, exchange_mib: int) -> None:
    from torch_ckpt import FastReader, IoOptions

    io = IoOptions(exchange_nbytes=exchange_mib << 20)
    dcp.load(state, storage_reader=FastReader(directory, io=io))


def _load_stock(state: State, directory: Path) -> None:
    dcp.load(state, storage_reader=FileSystemReader(directory))


def _load_torch(state: State, directory: Path, *, mmap: bool) -> None:
    loaded = torch.load(directory / "state.pt", mmap=mmap)
    for name, tensor in state.items():
        tensor.copy_(loaded[name])


def _load_safetensors(state: State, directory: Path) -> None:
    from safetensors import safe_open

    for path in sorted(directory.iterdir()):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                rows, first = local_rows(state[name])
                if rows is state[name]:
                    rows.copy_(file.get_tensor(name))
                else:
                    rows.copy_(file.get_slice(name)[first : first + rows.shape[0]])


def _load_fastsafetensors(state: State, directory: Path) -> None:
    """Files are shared out over the ranks, and their tensors broadcast."""
    from fastsafetensors import ParallelLoader

    files = [str(path) for path in sorted(directory.iterdir())]
    loader = ParallelLoader(
        dist.group.WORLD, files, use_tqdm_on_load=False, device="cpu", nogds=True
    )
    try:
        for name, tensor in loader.iterate_weights():
            state[name].copy_(tensor)
    finally:
        loader.close()


def _load_runai(state: State, directory: Path) -> None:
    """Tensors are shared out over the ranks, and broadcast."""
    os.environ["RUNAI_STREAMER_DIST"] = "1"  # Without, over gloo, every rank reads everything.
    from runai_model_streamer import SafetensorsStreamer

    files = [str(path) for path in sorted(directory.iterdir())]
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device="cpu", is_distributed=True, owned=False)
        for name, tensor in streamer.get_tensors():
            state[name].copy_(tensor)


# By contender: each loads the tensors of every rank of the default group, in place.
LOADERS: dict[str, Callable[[State, Path], None]] = {
    OURS: _load_ours,
    OURS_OFF: functools.partial(_load_ours, exchange="off"),
    OURS_PLANNED: _load_ours_planned,
    ON_STOCKS_FILES: _load_ours,
    ON_STOCKS_FILES_OFF: functools.partial(_load_ours, exchange="off"),
    STOCK: _load_stock,
    "torch.load": functools.partial(_load_torch, mmap=False),
    "torch.load-mmap": functools.partial(_load_torch, mmap=True),
    "safetensors": _load_safetensors,
    "fastsafetensors": _load_fastsafetensors,
    "runai": _load_runai,
    **{
        f"exchange_nbytes={mib} MiB": functools.partial(_load_ours_within, exchange_mib=mib)
        for mib in EXCHANGES_MIB
    },
}


def takes_exchange() -> bool:
    """Whether FastReader can be told not to exchange what it reads."""
    from torch_ckpt import FastReader

    return "exchange" in inspect.signature(FastReader).parameters
