"""Writes a sharded model as safetensors: all ranks at once, beside what else there is.

Gloo ranks hold a model of bf16 tensors, in shards of rows (as FSDP has them) or of columns (as
tensor parallelism has them). The contenders: `SafetensorsWriter`; stock DCP's
`HuggingFaceStorageWriter`, which writes the shards and then puts them together; and one rank that
has the whole model already and calls `safetensors.torch.save_file`, gathering not counted. Times
are until all files are durable. Contenders take turns in the same processes:

    python benchmarks/bench_safetensors.py --dir /where/models/go
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from contenders import silence
from machine import GIB, describe, remove_tree, sync_tree
from report import format_rows
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.append(str(Path(__file__).resolve().parent.parent))
from torch_ckpt import SafetensorsWriter

OURS, STOCK, ONE = "torch-ckpt", "stock, consolidated", "save_file, one rank"
ROWS, COLUMNS = "rows", "columns"
WIDTH = 4096  # Of a tensor: a row of it is 8 KiB, and of its shard on two ranks 4 KiB.

State = dict[str, torch.Tensor]


def whole_model(gib: float) -> State:
    """Matrices of 32 MiB, and a vector beside each."""
    state: State = {}
    generator = torch.Generator().manual_seed(1)
    for number in range(max(int(gib * GIB / (2 * WIDTH * WIDTH)), 1)):
        bits = torch.randint(1 << 15, (WIDTH, WIDTH), dtype=torch.int16, generator=generator)
        state[f"layers.{number}.weight"] = bits.view(torch.bfloat16)
        state[f"layers.{number}.norm"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    return state


def shard(whole: State, how: str) -> State:
    """This rank's part; vectors are cut by rows in any case."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards: State = {}
    for name, tensor in whole.items():
        dim = 1 if how == COLUMNS and tensor.ndim == 2 else 0
        local = tensor.chunk(mesh.size(), dim)[mesh.get_rank()].contiguous()
        shards[name] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    return shards


def save_ours(shards: State, whole: State, directory: Path) -> None:
    """By `SafetensorsWriter`."""
    dcp.save(shards, storage_writer=SafetensorsWriter(directory))


def save_stock(shards: State, whole: State, directory: Path) -> None:
    """By DCP's own writer."""
    writer = HuggingFaceStorageWriter(
        str(directory), save_distributed=True, enable_consolidation=True
    )
    dcp.save(shards, storage_writer=writer)


def save_one(shards: State, whole: State, directory: Path) -> None:
    """By the library, without DCP."""
    if dist.get_rank() == 0:
        save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})


CONTENDERS: dict[str, Callable[[State, State, Path], None]] = {
    OURS: save_ours,
    STOCK: save_stock,
    ONE: save_one,
}


def measure(
    save: Callable[[State, State, Path], None], shards: State, whole: State, directory: Path
) -> tuple[float, float]:
    """Seconds until every rank is done and all is durable, and CPU seconds of this rank."""
    if dist.get_rank() == 0:
        remove_tree(directory)
        directory.mkdir()
    dist.barrier()
    begin, cpu_begin = time.monotonic(), time.process_time()
    save(shards, whole, directory)
    if dist.get_rank() == 0:
        sync_tree(directory)
    dist.barrier()
    return time.monotonic() - begin, time.process_time() - cpu_begin


def check(directory: Path, whole: State) -> None:
    """Raises unless the file holds the model."""
    for name, tensor in load_file(next(directory.glob("*.safetensors"))).items():
        if not torch.equal(tensor.view(torch.int16), whole[name].view(torch.int16)):
            raise SystemExit(f"{name} in {directory} is not what was saved")


def run_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """All rounds, on one rank; the first prints what was measured."""
    silence()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks
    )
    torch.set_num_threads(1)
    whole = whole_model(options.gib)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for how in (ROWS, COLUMNS):
        shards = shard(whole, how)
        of_all = found.setdefault(how, {name: [] for name in CONTENDERS})
        for number in range(options.rounds + 1):
            for name, save in CONTENDERS.items():
                seconds, cpu_s = measure(save, shards, whole, options.dir / "model")
                total = torch.tensor(cpu_s)
                dist.all_reduce(total)
                if number == 0 and rank == 0:
                    check(options.dir / "model", whole)
                elif number > 0:
                    of_all[name].append((seconds, float(total)))
    if rank == 0:
        remove_tree(options.dir / "model")
        print_found(found, options)
    dist.barrier()
    dist.destroy_process_group()


def print_found(
    found: dict[str, dict[str, list[tuple[float, float]]]], options: argparse.Namespace
) -> None:
    """Prints a table for each way of sharding, and writes the samples where asked to."""
    for how, of_all in found.items():
        rows = []
        for name, samples in of_all.items():
            seconds = [taken for taken, _ in samples]
            pairs = zip(samples, of_all[OURS], strict=True)
            ratio = statistics.median(theirs / ours for (theirs, _), (ours, _) in pairs)
            cpu_s = statistics.median(cpu for _, cpu in samples)
            row = [f"{min(seconds):.2f}", f"{statistics.median(seconds):.2f}", f"{cpu_s:.2f}"]
            rows.append([name, *row, "-" if name == OURS else f"{ratio:.2f}x"])
        print(f"\n{options.gib:g} GiB in shards of {how} on {options.ranks} ranks")
        header = ["contender", "min s", "median s", "CPU s, all ranks", "ours is faster by"]
        print(format_rows(header, rows), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found))


def main() -> None:
    """Measures, and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where the models go")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write every sample")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    for name, value in describe(options.dir).items():
        print(f"{name}: {value}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (options, f"{folder}/store"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
