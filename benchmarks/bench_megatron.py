"""Saves and loads of Megatron-Core's dist_checkpointing, with its own strategies and with ours.

Contenders take turns in one run, both within FullyParallelSaveStrategyWrapper. Loads have a cold
page cache. Prints the machine, a table, and what is asked. Takes 3 minutes:

    python benchmarks/bench_megatron.py --dir /data --json result.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_load import Bar
from bench_tree import print_table
from machine import MIB, describe, make_cold, remove_tree
from megatron_rank import ALONE, MEGATRONS, OURS
from rank_group import RankGroup

TIMEOUT_S = 300
CONTENDERS = (OURS, MEGATRONS)
FLOOR = "the floor"  # Reads each data file once, and keeps nothing; or copies the tensors.

Samples = dict[tuple[str, str], list[dict[str, float]]]  # By task and contender.


def measure(directory: Path, ranks: int, args: argparse.Namespace) -> tuple[int, Samples]:
    """Saves and loads in turns; the first save of a process is a task of its own.

    Each contender has processes of its own. Megatron's queue forks, and a process that has forked
    copies each page that it then writes.
    """
    found: Samples = {}
    with contextlib.ExitStack() as stack:
        groups = {
            name: stack.enter_context(
                RankGroup(ranks, directory, timeout_s=TIMEOUT_S, program="megatron_rank.py")
            )
            for name in CONTENDERS
        }
        for group in groups.values():
            nbytes = group.call("prepare", hidden=args.hidden, layers=args.layers)[0]

        def record(task: str, name: str, answers: list[dict[str, float]]) -> None:
            slowest = {key: max(answer[key] for answer in answers) for key in answers[0]}
            if "cpu_s" in slowest:
                slowest["cpu_s"] = sum(answer["cpu_s"] for answer in answers)
            found.setdefault((task, name), []).append(slowest)
            print(f"{ranks} ranks, {task}, {name}: {slowest}", file=sys.stderr, flush=True)

        for number in range(-1, args.rounds):
            for name in CONTENDERS[:: 1 if number % 2 else -1]:
                first, call = number < 0, groups[name].call
                answers = call("save_by", contender=name, folder="saved")
                record("first save" if first else "save", name, answers)
                make_cold(directory / "saved")
                answers = call("load_by", contender=name, folder="saved")
                if not first:
                    record("load", name, answers)
                if name == OURS:
                    make_cold(directory / "saved")
                    record("load", ALONE, call("load_by", contender=ALONE, folder="saved"))
                make_cold(directory / "saved")
                record("load", FLOOR, call("read", folder="saved"))
                remove_tree(directory / "saved")
                if name == OURS:
                    record("copy", FLOOR, call("copy"))
                answers = call("save_asynchronously", contender=name, folder="saved", reserve=first)
                record("first async save" if first else "async save", name, answers)
                remove_tree(directory / "saved")
    return nbytes, found


def median(samples: Any, key: str) -> float:
    """Median of a value."""
    return statistics.median(sample[key] for sample in samples)


def main() -> None:
    """Runs what the command line asks for; leaves no files but the one of `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--hidden", type=int, default=640, help="width of the model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-megatron-", dir=args.dir)).resolve()
    machine = describe(directory.parent)
    width = max(map(len, machine))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in machine.items()), flush=True)
    rows = [["ranks", "task", "contender", "s, min / median", "CPU s"]]
    bars: list[Bar] = []
    samples = []
    try:
        for ranks in args.ranks:
            nbytes, found = measure(directory, ranks, args)
            print(f"{ranks} ranks: {nbytes / MIB:.0f} MiB", flush=True)
            for (task, name), each in found.items():
                key = next(k for k in ("wall_s", "stop_s", "copy_s") if k in each[0])
                values = [sample[key] for sample in each]
                row = [str(ranks), task, name, f"{min(values):.2f} / {median(each, key):.2f}"]
                row.append(f"{median(each, 'cpu_s'):.2f}" if "cpu_s" in each[0] else "")
                rows.append(row)
                samples.append({"ranks": ranks, "task": task, "contender": name, "samples": each})

            def times(task: str, key: str, found: Samples = found) -> float:
                return median(found[task, MEGATRONS], key) / median(found[task, OURS], key)

            def bar(what: str, value: float, asked: float, unit: str, ranks: int = ranks) -> None:
                at_least = unit == "x"
                bars.append(Bar(f"{ranks} ranks: {what}", value, asked, unit, at_least=at_least))

            bar("save, times as fast", times("save", "wall_s"), 1.5, "x")
            bar("save, times less CPU", times("save", "cpu_s"), 2.5, "x")
            bar("first save, times as fast", times("first save", "wall_s"), 6.0, "x")
            bar("load, times as fast", times("load", "wall_s"), 1.2, "x")
            ours = found["async save", OURS]
            copied = median(ours, "stop_s") / median(found["copy", FLOOR], "copy_s")
            bar("stop of an async save, times a copy", copied, 1.25, " times")
            bar("longest poll", 1e3 * max(each["poll_s"] for each in ours), 20.0, " ms")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print()
    print_table(rows)
    print("\nAsked\n")
    print_table([["what", "asked", "found", "verdict"], *(bar.cells() for bar in bars)])
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "samples": samples}, indent=1) + "\n")


if __name__ == "__main__":
    main()
