"""Loads of a model in FP8 blocks into bf16: dequantised by torch-ckpt, by DCP's reader, by torch.

The first table is of one tensor in MXFP4, whose scales are long. The second one is of one process,
from the page cache: GB of FP8 per second of CPU. The third one is of several ranks, each with
shards of rows, from the disk: the raw read of the same files with O_DIRECT is the ceiling.
Contenders of these two take turns in the same processes:

    python benchmarks/bench_quantized.py --dir /where/models/go
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from contenders import silence
from machine import GIB, MIB, Meter, describe, files_in, make_warm, remove_tree
from report import format_rows
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.append(str(Path(__file__).resolve().parent.parent))
from torch_ckpt import FastReader

OURS, STORED, STOCK, TORCH = "torch-ckpt", "torch-ckpt, stored bits", "stock", "torch, vectorised"
RAW = "raw: O_DIRECT, each byte once"
WIDTH, BLOCK, FILES = 4096, 128, 4

State = dict[str, torch.Tensor]


def write_model(folder: Path, gib: float) -> None:
    """Matrices of 16 MiB in FP8, their scales, an index and a config."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    count = max(int(gib * GIB / WIDTH**2), 1)
    weight_map = {}
    for file in range(FILES):
        tensors: State = {}
        for number in range(file, count, FILES):
            codes = torch.randint(0, 120, (WIDTH, WIDTH), dtype=torch.uint8, generator=generator)
            scales = torch.rand(WIDTH // BLOCK, WIDTH // BLOCK, generator=generator) + 0.1
            tensors[f"{number}.weight"] = codes.view(torch.float8_e4m3fn)
            tensors[f"{number}.weight_scale_inv"] = scales
        name = f"model-{file + 1:05d}-of-{FILES:05d}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


def load_ours(state: State, folder: Path) -> None:
    """By `FastReader`."""
    dcp.load(state, storage_reader=FastReader(folder))


def load_stock(state: State, folder: Path) -> None:
    """By DCP's own reader of quantised models."""
    reader = QuantizedHuggingFaceStorageReader(str(folder), target_dtype=torch.bfloat16)
    dcp.load(state, storage_reader=reader)


def load_torch(state: State, folder: Path) -> None:
    """By the library, and whole matrices at a time in torch."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for fqn, target in state.items():
        with safe_open(folder / weight_map[fqn], framework="pt") as file:
            blocks = file.get_tensor(fqn).float().view(WIDTH // BLOCK, BLOCK, -1, BLOCK)
            blocks.mul_(file.get_tensor(f"{fqn}_scale_inv")[:, None, :, None])
            target.copy_(blocks.view(WIDTH, WIDTH))


CONTENDERS: dict[str, Callable[[State, Path], None]] = {
    OURS: load_ours,
    STORED: load_ours,
    STOCK: load_stock,
    TORCH: load_torch,
}


def targets(folder: Path, dtype: torch.dtype) -> State:
    """Targets for all weights."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    names = sorted(fqn for fqn in weight_map if fqn.endswith(".weight"))
    return {fqn: torch.zeros(WIDTH, WIDTH, dtype=dtype) for fqn in names}


def measure_warm(folder: Path, gib: float, rounds: int) -> None:
    """Prints CPU time and memory of one process that reads from the page cache."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CONTENDERS}
    expected: State = {}
    for number in range(rounds + 1):
        make_warm(folder)
        for name, load in CONTENDERS.items():
            dtype = torch.float8_e4m3fn if name == STORED else torch.bfloat16
            state = targets(folder, dtype)
            gc.collect()
            with Meter() as meter:
                load(state, folder)
            if number:
                usage = meter.usage
                found[name].append((usage.cpu_s, usage.seconds, usage.rss_growth / MIB))
                continue
            if name == OURS:
                expected = state
            elif name != STORED and any(not torch.equal(expected[n], state[n]) for n in state):
                raise SystemExit(f"{name} loads other values")
        expected = {}
    rows = []
    for name, samples in found.items():
        cpu_s = [cpu for cpu, _, _ in samples]
        ratio = statistics.median(
            theirs[0] / ours[0] for theirs, ours in zip(samples, found[OURS], strict=True)
        )
        speed = gib * GIB / 1e9 / min(cpu_s)
        rows.append(
            [
                name,
                f"{min(cpu_s):.2f} / {statistics.median(cpu_s):.2f}",
                f"{speed:.2f}",
                f"{min(wall for _, wall, _ in samples):.2f}",
                f"{max(rss for _, _, rss in samples):.0f}",
                f"{ratio:.1f}x",
            ]
        )
    print(f"\n{gib:g} GiB of FP8 from the page cache, one process")
    header = ["contender", "CPU s, min / median", "GB/s of CPU", "wall s", "more RSS, MiB", "CPU"]
    print(format_rows(header, rows), flush=True)


def measure_mxfp4(folder: Path, gib: float, rounds: int) -> None:
    """Prints CPU time and memory of a load of one tensor in MXFP4, and of its stored bits."""
    folder.mkdir(parents=True)
    shape = (max(int(gib * GIB / WIDTH**2), 1), WIDTH, WIDTH // 16, 16)
    stored: State = {
        "w_blocks": torch.randint(0, 256, shape, dtype=torch.uint8),
        "w_scales": torch.randint(118, 131, shape[:-1], dtype=torch.uint8),
    }
    save_file(stored, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    nbytes = stored["w_blocks"].nbytes
    rows = []
    for name in (OURS, STORED):
        state = stored
        if name == OURS:
            state = {"w": torch.zeros(shape[0], 2 * WIDTH, WIDTH, dtype=torch.bfloat16)}
        samples = []
        for _ in range(rounds):
            with Meter() as meter:
                dcp.load(state, storage_reader=FastReader(folder, dequantize=name == OURS))
            samples.append(meter.usage)
        cpu_s = min(usage.cpu_s for usage in samples)
        rss = max(usage.rss_growth for usage in samples) / MIB
        rows.append([name, f"{cpu_s:.2f}", f"{nbytes / 1e9 / cpu_s:.2f}", f"{rss:.0f}"])
        del state
    scales = stored["w_scales"].nbytes / MIB
    print(f"\nOne tensor of {nbytes / MIB:.0f} MiB in MXFP4, with {scales:.0f} MiB of scales")
    print(
        format_rows(["contender", "CPU s, min", "GB/s of CPU", "more RSS, MiB"], rows), flush=True
    )


def read_raw(folder: Path, rank: int, count: int) -> None:
    """Reads this rank's part of all files, past the page cache."""
    buffer = mmap.mmap(-1, 4 * MIB)
    block = 0
    for path in sorted(folder.glob("*.safetensors")):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for begin in range(0, path.stat().st_size, len(buffer)):
            if block % count == rank:
                os.preadv(fd, [buffer], begin)
            block += 1
        os.close(fd)


def evict(folder: Path) -> None:
    """Drops the files from the page cache, and no others."""
    for path in files_in(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def run_rank(rank: int, options: argparse.Namespace, folder: Path, store: str) -> None:
    """All rounds of cold loads, on one rank; the first one prints."""
    silence()
    ranks = options.ranks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (ranks,))
    state: State = {
        fqn: DTensor.from_local(whole.chunk(ranks)[rank].clone(), mesh, [Shard(0)])
        for fqn, whole in targets(folder, torch.bfloat16).items()
    }
    calls: dict[str, Callable[[], None]] = {
        RAW: lambda: read_raw(folder, rank, ranks),
        OURS: lambda: load_ours(state, folder),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(options.rounds + 1):
        for name, call in calls.items():
            if rank == 0:
                evict(folder)
            dist.barrier()
            with Meter() as meter:
                call()
                dist.barrier()
            if number:
                found[name].append(meter.usage.seconds)
    if rank == 0:
        rows = []
        for name, seconds in found.items():
            ratios = [s / raw for s, raw in zip(seconds, found[RAW], strict=True)]
            row = [f"{min(seconds):.2f}", f"{statistics.median(seconds):.2f}"]
            rows.append([name, *row, f"{min(ratios):.2f} / {statistics.median(ratios):.2f}"])
        print(f"\n{options.cold_gib:g} GiB of FP8 from the disk into bf16 shards, {ranks} ranks")
        print(format_rows(["contender", "min s", "median s", "of the raw read"], rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measures, and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where the models go")
    parser.add_argument("--gib", type=float, default=0.5, help="of the model that is warm")
    parser.add_argument("--cold-gib", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    silence()
    options.dir.mkdir(parents=True, exist_ok=True)
    for name, value in describe(options.dir).items():
        print(f"{name}: {value}")
    torch.set_num_threads(1)
    model = options.dir / "model"
    remove_tree(model)
    measure_mxfp4(model, options.gib, options.rounds)
    for gib, measure in ((options.gib, measure_warm), (options.cold_gib, None)):
        remove_tree(model)
        write_model(model, gib)
        if measure is not None:
            measure(model, gib, options.rounds)
            continue
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (options, model, f"{folder}/store"), nprocs=options.ranks)
    remove_tree(model)


if __name__ == "__main__":
    main()
