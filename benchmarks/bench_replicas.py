"""Saves replicas with each way to compare them, in turns: what `check_replicas` costs.

Gloo ranks hold equal tensors, as in DDP. Each way saves them by `dcp.save` with DCP's planner,
which plans anew each time, and by `torch_ckpt.save`, which reuses its plan from the second save on.
Times are until the save is durable on all ranks. The last columns are of the comparison alone, in
the same processes: its share of the save is measured without the noise of the disk:

    python benchmarks/bench_replicas.py --dir /where/checkpoints/go
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from contenders import silence
from machine import GIB, describe, remove_tree
from report import format_rows

sys.path.append(str(Path(__file__).resolve().parent.parent))
import torch_ckpt
from torch_ckpt import FastWriter
from torch_ckpt.planning.value_digests import value_digests

State = dict[str, torch.Tensor]
MODES = ("off", "sample", "full")


def by_dcp(state: State, directory: Path, mode: Any) -> None:
    """With DCP's planner."""
    dcp.save(state, storage_writer=FastWriter(directory, check_replicas=mode))


def by_torch_ckpt(state: State, directory: Path, mode: Any) -> None:
    """With a cached plan, except in the first round, which does not count."""
    torch_ckpt.save(state, storage_writer=FastWriter(directory, check_replicas=mode))


WAYS: dict[str, Callable[[State, Path, Any], None]] = {
    "dcp.save": by_dcp,
    "torch_ckpt.save": by_torch_ckpt,
}


def seconds_of(save: Callable[[], None]) -> float:
    """Until every rank is done."""
    dist.barrier()
    begin = time.monotonic()
    save()
    dist.barrier()
    return time.monotonic() - begin


def run_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """All rounds, on one rank; the first prints what was measured."""
    silence()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks
    )
    torch.set_num_threads(1)
    numel = int(options.gib * GIB / 4 / options.tensors)
    generator = torch.Generator().manual_seed(1)
    state = {f"t{i}": torch.randn(numel, generator=generator) for i in range(options.tensors)}
    saves: dict[tuple[str, str], list[float]] = {(way, m): [] for way in WAYS for m in MODES}
    checks: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(options.rounds + 1):
        for way, save in WAYS.items():
            for mode in (*MODES[number % 3 :], *MODES[: number % 3]):
                if rank == 0:
                    remove_tree(options.dir / "replicas")
                path = options.dir / "replicas"
                found = seconds_of(lambda: save(state, path, mode))  # noqa: B023
                if number > 0:
                    saves[way, mode].append(found)
        for mode in MODES[1:]:
            tensors = list(state.values())
            checks[mode].append(seconds_of(lambda: value_digests(tensors, mode)))  # type: ignore[arg-type, return-value]  # noqa: B023
    if rank == 0:
        remove_tree(options.dir / "replicas")
        print_found(saves, checks, options)
    dist.destroy_process_group()


def print_found(
    saves: dict[tuple[str, str], list[float]],
    checks: dict[str, list[float]],
    options: argparse.Namespace,
) -> None:
    """Prints a row for each way to save and to compare."""
    rows = []
    for (way, mode), times in saves.items():
        off, alone = saves[way, "off"], checks[mode] or [0.0]
        rows.append(
            [
                way,
                mode,
                f"{min(times):.3f}",
                f"{statistics.median(times):.3f}",
                f"{100 * (statistics.median(times) / statistics.median(off) - 1):+.1f} %",
                f"{1000 * min(alone):.1f}",
                f"{1000 * statistics.median(alone):.1f}",
                f"{100 * statistics.median(alone) / statistics.median(off):.2f} %",
            ]
        )
    print(f"{options.gib:g} GiB in {options.tensors} tensors on each of {options.ranks} ranks")
    heads = ["save", "check", "min s", "median s", "to off", "alone: min ms", "median", "of save"]
    print(format_rows(heads, rows))


def main() -> int:
    """Runs the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--tensors", type=int, default=400, help="number of tensors")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    options = parser.parse_args()
    for key, value in describe(options.dir).items():
        print(f"{key}: {value}")
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        mp.spawn(run_rank, args=(options, store), nprocs=options.ranks)  # type: ignore[no-untyped-call]
    return 0


if __name__ == "__main__":
    sys.exit(main())
