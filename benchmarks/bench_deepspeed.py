"""Saves of DeepSpeed engines, with DeepSpeed's own checkpoint engine and with ours.

Contenders take turns in one run. Both are durable: DeepSpeed does not sync, so its ranks sync its
files after it. Prints the machine, a table, and what is asked. Takes 3 minutes:

    python benchmarks/bench_deepspeed.py --dir /data --json result.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from bench_load import Bar
from bench_megatron import median
from bench_tree import print_table
from deepspeed_rank import DEEPSPEEDS, OURS
from machine import MIB, describe, remove_tree
from rank_group import RankGroup

TIMEOUT_S = 300
CONTENDERS = (OURS, DEEPSPEEDS)
FLOOR = "the floor"  # Copies the tensors.

Samples = dict[tuple[str, str], list[dict[str, float]]]  # By task and contender.


def measure(
    directory: Path, ranks: int, stage: int, gib: float, rounds: int
) -> tuple[int, Samples]:
    """Saves in turns, after one save of each that is not counted."""
    found: Samples = {}
    with RankGroup(ranks, directory, timeout_s=TIMEOUT_S, program="deepspeed_rank.py") as group:
        nbytes = group.call("prepare", stage=stage, gib=gib)[0]

        def record(number: int, task: str, name: str, answers: list[dict[str, float]]) -> None:
            slowest = {key: max(answer[key] for answer in answers) for key in answers[0]}
            print(f"ZeRO-{stage}, {task}, {name}: {slowest}", file=sys.stderr, flush=True)
            if number >= 0:
                found.setdefault((task, name), []).append(slowest)

        for number in range(-1, rounds):
            for name in CONTENDERS[:: 1 if number % 2 else -1]:
                record(number, "save", name, group.call("save_by", contender=name, folder="saved"))
                remove_tree(directory / "saved")
            answers = group.call("save_asynchronously", folder="saved")
            record(number, "async save", OURS, answers)
            record(number, "copy", FLOOR, group.call("copy", folder="saved"))
            remove_tree(directory / "saved")
    return nbytes, found


def main() -> None:
    """Runs what the command line asks for; leaves no files but the one of `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--gib", type=float, default=1.0, help="of the checkpoint")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3], help="of ZeRO")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-deepspeed-", dir=args.dir)).resolve()
    machine = describe(directory.parent)
    width = max(map(len, machine))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in machine.items()), flush=True)
    rows = [["ZeRO", "task", "contender", "s, min / median"]]
    bars: list[Bar] = []
    samples = []
    try:
        for stage in args.stages:
            nbytes, found = measure(directory, args.ranks, stage, args.gib, args.rounds)
            print(f"ZeRO-{stage}, {args.ranks} ranks: {nbytes / MIB:.0f} MiB", flush=True)
            for (task, name), each in found.items():
                key = next(k for k in ("stop_s", "wall_s", "copy_s") if k in each[0])
                values = [sample[key] for sample in each]
                rows.append(
                    [f"{stage}", task, name, f"{min(values):.3f} / {median(each, key):.3f}"]
                )
                samples.append({"stage": stage, "task": task, "contender": name, "samples": each})
            pairs = zip(found["save", DEEPSPEEDS], found["save", OURS], strict=True)
            factor = statistics.median(theirs["wall_s"] / ours["wall_s"] for theirs, ours in pairs)
            what = f"ZeRO-{stage}: save, times as fast"
            bars.append(Bar(what, factor, 2.0, "x", at_least=True))
            stops = zip(found["async save", OURS], found["copy", FLOOR], strict=True)
            copied = statistics.median(stop["stop_s"] / copy["copy_s"] for stop, copy in stops)
            what = f"ZeRO-{stage}: stop of an async save, times a copy"
            bars.append(Bar(what, copied, 1.25, " times", at_least=False))
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
