"""How much of a step a store with content-defined chunks has not seen in the step before.

Such stores, as Hugging Face's, cut files where a rolling hash of the last 64 bytes has a pattern,
and store each chunk once (8 to 128 KiB, 64 KiB on average). Two steps are saved whole: a frozen
model beside a few tensors that change (as LoRA does), the same with one more tensor in the second
step, and a model of which everything changes. Prints the share of bytes in new chunks, beside the
share of bytes that have changed. Takes a minute:

    python benchmarks/bench_chunks.py
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from bench_tree import print_table
from machine import MIB, describe
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter

import torch_ckpt
from torch_ckpt import FastWriter, SafetensorsWriter

GEAR = np.random.default_rng(0).integers(0, 2**64, 256, dtype=np.uint64)
MASK = np.uint64(0xFFFF << 48)  # 16 bits: a boundary each 64 KiB.
LEAST, MOST, WINDOW = 8 << 10, 128 << 10, 64
State = dict[str, torch.Tensor]


def chunks(data: bytes) -> Iterator[bytes]:
    """The chunks of a file, by a gear hash."""
    values = GEAR[np.frombuffer(data, dtype=np.uint8)]
    hashes = np.zeros(len(values), dtype=np.uint64)
    for age in range(WINDOW):
        hashes[age:] += values[: len(values) - age] << np.uint64(age)
    ends = np.flatnonzero((hashes & MASK) == 0) + 1
    begin = 0
    while begin < len(data):
        next_end = np.searchsorted(ends, begin + LEAST)
        end = int(ends[next_end]) if next_end < len(ends) else len(data)
        end = min(end, begin + MOST, len(data))
        yield data[begin:end]
        begin = end


def digests(folder: Path) -> dict[bytes, int]:
    """The digests of all chunks of a folder, with their bytes."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size)
    cut = (chunk for file in files for chunk in chunks(file.read_bytes()))
    return {hashlib.sha256(chunk).digest(): len(chunk) for chunk in cut}


def state_of(kind: str, step: int) -> State:
    """A state: the frozen tensors are the same in each step."""
    frozen, trained = (torch.Generator().manual_seed(seed) for seed in (1, 100 + step))
    state: State = {"step": torch.tensor(step)}
    layers, nbytes = (6, MIB) if kind == "all changes" else (1, MIB // 4)
    if kind != "all changes":
        names = [f"layers.{n}.frozen" for n in range(6)]
        state |= {name: torch.randn(MIB // 4, generator=frozen) for name in names}
    for name in (f"layers.{n}.{what}" for n in range(layers) for what in ("trained", "exp_avg")):
        state[name] = torch.randn(nbytes // 4, generator=trained)
    if kind == "one tensor more" and step == 2:
        state["a.counter"] = torch.randn(1000, generator=trained)
    return state


def save_stock(state: State, path: Path) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)


def save_ours(state: State, path: Path) -> None:
    torch_ckpt.save(state, storage_writer=FastWriter(path), no_dist=True)


def save_our_safetensors(state: State, path: Path) -> None:
    torch_ckpt.save(state, storage_writer=SafetensorsWriter(path), no_dist=True)


def save_safetensors(state: State, path: Path) -> None:
    path.mkdir()
    save_file(state, path / "model.safetensors")


CONTENDERS: dict[str, Callable[[State, Path], None]] = {
    "FastWriter": save_ours,
    "stock DCP": save_stock,
    "SafetensorsWriter": save_our_safetensors,
    "safetensors": save_safetensors,
}


def changed_share(kind: str) -> float:
    """The share of bytes in tensors of the second step that the first step has not."""
    before, after = state_of(kind, 1), state_of(kind, 2)
    new = sum(t.nbytes for n, t in after.items() if n not in before or not t.equal(before[n]))
    return new / sum(tensor.nbytes for tensor in after.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, fact in describe(options.dir).items():
        print(f"{name}: {fact}")
    rows = [("state", "bytes that have changed", *CONTENDERS)]
    for kind in ("mostly frozen", "one tensor more", "all changes"):
        shares = []
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            for name, save in CONTENDERS.items():
                steps = [Path(folder) / f"{name} {step}" for step in (1, 2)]
                for step, path in enumerate(steps, 1):
                    save(state_of(kind, step), path)
                known, found = map(digests, steps)
                new = sum(nbytes for digest, nbytes in found.items() if digest not in known)
                shares.append(f"{100 * new / sum(found.values()):.1f} %")
        rows.append((kind, f"{100 * changed_share(kind):.1f} %", *shares))
    print_table(rows)


if __name__ == "__main__":
    main()
