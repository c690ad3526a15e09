"""Gathers and scatters along trees of several fan-outs, and as torch does: real, and reckoned.

First on gloo ranks of this machine: the messages, bytes and seconds of the coordinator and of the
busiest rank below it, contenders interleaved. Then, from what a message and a byte have cost here,
the simulation of worlds up to 16,384 ranks. Takes about a minute:

    python benchmarks/bench_tree.py

The tables of benchmarks/README.md, from the costs that stand there:

    python benchmarks/bench_tree.py --model
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from machine import MIB, describe
from tree_model import Cost, Costs, World, reckon, simulate

RANKS = 8
FAN_OUTS = [2, 4, 8]
PAYLOADS = {"2 KB": 2_000, "1 MB": 1_000_000}
TORCH = "torch"
BULK_NBYTES = 64 * MIB
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


def _measured_costs(rank: int, rounds: int) -> Costs:
    """What a first message and a byte cost between ranks 0 and 1: half of a way there and back."""
    import torch
    import torch.distributed as dist

    from torch_ckpt.coordination.tree_exchange import _FIRST_NBYTES

    found = []
    for nbytes in (_FIRST_NBYTES, BULK_NBYTES):
        tensor, times = torch.zeros(nbytes, dtype=torch.uint8), []
        for _ in range(rounds):
            dist.barrier()
            if rank > 1:
                continue
            both = [dist.send, dist.recv]
            begin = time.perf_counter()
            for operation in both if rank == 0 else reversed(both):
                operation(tensor, 1 - rank)
            times.append((time.perf_counter() - begin) / 2)
        found.append(min(times, default=1.0))  # The others wait, but do not do nothing.
    return replace(Costs(), message_s=found[0], bytes_per_s=BULK_NBYTES / found[1])


def _real(rank: int, folder: str, rounds: int, replies: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.utils import _DistWrapper

    from torch_ckpt.coordination.roll_call import RollCalls
    from torch_ckpt.coordination.tree_exchange import TreeExchange, _Passing

    torch.set_num_threads(1)
    method = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    group = dist.distributed_c10d._get_default_group()
    messages: list[tuple[int, int]] = []
    begun = _Passing._begun

    def noted(self: Any, operation: Any, tensors: Any, peers: Any, number: int) -> Any:
        messages.extend(zip(peers, (tensor.nbytes for tensor in tensors), strict=True))
        return begun(self, operation, tensors, peers, number)

    costs = _measured_costs(rank, rounds)
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    calls = RollCalls(group, 600)
    for _ in range(rounds + 1):  # The first warms up.
        for payload, nbytes in PAYLOADS.items():
            for contender in [TORCH, *FAN_OUTS]:
                part = os.urandom(nbytes)
                parts = [os.urandom(nbytes) for _ in range(RANKS)] if rank == 0 else None
                if contender == TORCH:
                    torchs = _DistWrapper(None, True, 0)
                    both = {
                        "gather": lambda: torchs.gather_object(part),  # noqa: B023
                        "scatter": lambda: torchs.scatter_object(parts),  # noqa: B023
                    }
                else:
                    ours = TreeExchange(calls, root=0, fan_out=contender)
                    pickled = pickle.dumps(part)
                    sent = parts and [pickle.dumps(one) for one in parts]
                    both = {
                        "gather": lambda: ours.gather(pickled),  # noqa: B023
                        "scatter": lambda: ours.scatter(sent),  # noqa: B023
                    }
                for name, run in both.items():
                    calls.wait_for_all(name)
                    dist.barrier()
                    messages.clear()
                    with mock.patch.object(_Passing, "_begun", noted):
                        begin = time.perf_counter()
                        run()
                        own_s = time.perf_counter() - begin
                        dist.barrier()
                        all_s = time.perf_counter() - begin
                    entry = found.setdefault((payload, name, f"{contender}"), {"s": []})
                    entry["s"].append(own_s if name == "gather" else all_s)
                    entry["messages"] = len(messages)
                    entry["peers"] = len({peer for peer, _ in messages})
                    entry["nbytes"] = sum(nbytes for _, nbytes in messages)
    replies.put((rank, costs, found))
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
        got = {rank: (costs, found) for rank, costs, found in (replies.get() for _ in processes)}
        for process in processes:
            process.join()
    costs, coordinators = got[0]
    rows = [
        [
            *("payload", "exchange", "fan-out", "coordinator: messages", "peers", "KB"),
            *("inner rank: messages", "peers", "KB", "min ms", "median ms"),
        ]
    ]
    for key, found in coordinators.items():
        inner = max((got[rank][1][key] for rank in range(1, RANKS)), key=lambda one: one["nbytes"])
        cells = [*key]
        for one in (found, inner):
            none = key[2] == TORCH
            cells += ["-" if none else f"{one[name]}" for name in ("messages", "peers")]
            cells.append("-" if none else f"{one['nbytes'] / 1e3:.0f}")
        times = found["s"][1:]
        cells += [f"{min(times) * 1e3:.2f}", f"{statistics.median(times) * 1e3:.2f}"]
        rows.append(cells)
    print(f"\n{RANKS} gloo ranks on one node; until the coordinator has all, or all have theirs\n")
    print_table(rows)
    return costs


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
