"""Gathers and scatters along trees of several fan-outs, and as torch does: real, and reckoned.

First on gloo ranks of this machine: the seconds that an exchange takes, contenders interleaved.
Then, from what a message and a byte have cost here, the simulation of worlds up to 16,384 ranks.
Takes about a minute:

    python benchmarks/bench_tree.py

The tables of docs/decisions/cost-model.md, from the costs there:

    python benchmarks/bench_tree.py --model
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from machine import describe
from tree_model import Cost, Costs, World, reckon, simulate

RANKS = 8
FAN_OUTS = [2, 4, 8]
PAYLOADS = {"2 KB": 2_000, "1 MB": 1_000_000}
TORCH = "torch"
MODEL_FAN_OUTS = [None, 2, 4, 8, 16, 32, 64]
MODEL_TABLES = {128_000: [256, 2_048, 16_384], 2_000: [16_384]}  # By bytes of each rank: worlds.
ITEMS = 2_000  # That a rank names in 128,000 bytes.


def model_rows(costs: Costs, nbytes: int) -> Iterator[list[str]]:
    """The rows of a table of README, header first, for payloads of so many bytes."""
    yield [
        *("ranks", "fan-out", "coordinator: peers", "MB", "s"),
        *("inner rank: peers", "MB", "s", "gather s", "simulated", "scatter s, simulated"),
    ]
    for ranks in MODEL_TABLES[nbytes]:
        for fan_out in MODEL_FAN_OUTS:
            world = World(ranks, fan_out=fan_out, nbytes=nbytes)
            yield _model_row(world, reckon(world, costs), simulate(world, costs))


def _model_row(world: World, reckoned: Cost, simulated: Cost) -> list[str]:
    cells = [f"{world.ranks:,}", str(world.fan_out or "flat")]
    for load in (reckoned.coordinator, reckoned.inner):
        cells += [f"{load.peers:,}", f"{load.nbytes / 1e6:.1f}", f"{load.seconds:.4f}"]
    times = (reckoned.gather_s, simulated.gather_s, simulated.scatter_s)
    return cells + [f"{seconds:.4f}" for seconds in times]


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """In Markdown."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("| " + " | ".join(cells) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")


# Real ranks ------------------------------------------------------------------------------------


def _timed(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


class _Ranks:
    """Eight ranks of this machine, and what they have measured."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._found: dict[tuple[str, str], list[float]] = {}

    def contenders(self) -> dict[str, Callable[[bytes, list[bytes] | None], Any]]:
        """Each gathers a part of every rank and scatters others, in one exchange."""
        import torch.distributed as dist
        from torch.distributed.checkpoint.utils import _DistWrapper

        from torch_ckpt.coordination import connect
        from torch_ckpt.coordination.group import group_of

        torchs = _DistWrapper(None, True, 0)

        def by_torch(part: bytes, parts: list[bytes] | None) -> bytes:
            return torchs.reduce_scatter("plan", lambda: part, lambda _: parts)

        found: dict[str, Callable[[bytes, list[bytes] | None], Any]] = {TORCH: by_torch}
        for fan_out in FAN_OUTS:
            call = group_of(dist.new_group(backend="gloo")).call(600)
            with mock.patch.object(connect, "FAN_OUT", fan_out):
                call.barrier("connecting")

            def by_tree(part: bytes, parts: list[bytes] | None, call: Any = call) -> bytes:
                return call.reduce_scatter("plan", lambda: part, lambda _: parts)

            found[f"{fan_out}"] = by_tree
        return found

    def measure(self, rank: int) -> dict[tuple[str, str], list[float]]:
        """Contenders interleaved; seconds until this rank has its part."""
        import torch.distributed as dist

        contenders = self.contenders()
        for number in range(self._rounds + 1):  # The first warms up.
            for payload, nbytes in PAYLOADS.items():
                for name, run in contenders.items():
                    part = os.urandom(nbytes)
                    parts = [os.urandom(nbytes) for _ in range(RANKS)] if rank == 0 else None
                    dist.barrier()
                    seconds = _timed(lambda: run(part, parts))  # noqa: B023
                    if number:
                        self._found.setdefault((payload, name), []).append(seconds)
        return self._found


def _costs(found: dict[tuple[str, str], list[float]]) -> Costs:
    """What a message and a byte have cost, by the widest tree: all other ranks are children."""
    small, large = (min(found[payload, f"{FAN_OUTS[-1]}"]) for payload in PAYLOADS)
    others = RANKS - 1
    nbytes = 2 * others * (PAYLOADS["1 MB"] - PAYLOADS["2 KB"])
    return replace(Costs(), message_s=small / (2 * others), bytes_per_s=nbytes / (large - small))


def _real(rank: int, folder: str, rounds: int, replies: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    replies.put((rank, _Ranks(rounds).measure(rank)))
    dist.barrier()


def _run_real(rounds: int) -> Costs:
    """Prints the table of real ranks; returns what messages and bytes have cost."""
    context = get_context("spawn")
    replies = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="bench-tree-") as folder:
        processes = [
            context.Process(target=_real, args=(rank, folder, rounds, replies), daemon=True)
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        got = dict(replies.get() for _ in processes)
        for process in processes:
            process.join()
    rows = [["payload", "fan-out", "min ms", "median ms"]]
    for payload, name in got[0]:
        # An exchange is over when the last rank has its part.
        of_ranks = [found[payload, name] for found in got.values()]
        times = [max(each) for each in zip(*of_ranks, strict=True)]
        row = [payload, name, f"{min(times) * 1e3:.2f}", f"{statistics.median(times) * 1e3:.2f}"]
        rows.append(row)
    print(f"\n{RANKS} gloo ranks on one node; until all have gathered, and have their parts\n")
    print_table(rows)
    return _costs(got[0])


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", action="store_true", help="only what is reckoned")
    arguments = parser.parse_args()
    costs = Costs()
    if not arguments.model:
        for key, value in describe(Path.cwd()).items():
            print(f"{key}: {value}")
        costs = _run_real(arguments.rounds)
    print(f"\n{costs}")
    for nbytes in MODEL_TABLES:
        print(f"\n{nbytes:,} bytes from each rank, 8 ranks on a node\n")
        print_table(list(model_rows(costs, nbytes)))
    print(f"\nBesides, the coordinator reads and plans {ITEMS:,} items of each rank:")
    for ranks in MODEL_TABLES[128_000]:
        print(f"{ranks:,} ranks: {costs.planning_s(ranks * ITEMS):.1f} s")


if __name__ == "__main__":
    main()
