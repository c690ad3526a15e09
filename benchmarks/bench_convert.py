"""Resumes of a DeepSpeed ZeRO-3 checkpoint: directly, and by DeepSpeed's own conversion.

Contenders take turns in one run. The direct one loads onto FSDP2 with stock `dcp.load` and
FastReader. The other converts to a universal folder with the default number of workers, and loads
it into an engine of DeepSpeed. Imports, models and engines are made before. Needs `deepspeed`:

    python benchmarks/bench_convert.py --dir /data --json result.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from bench_load import Bar
from bench_tree import print_table
from convert_rank import CONVERTED, DIRECT
from machine import GIB, describe
from rank_group import RankGroup

CONTENDERS = (DIRECT, CONVERTED)
TIMEOUT_S = 500
ASKED = 4.0

Rounds = dict[str, list[dict[str, float]]]  # By contender.


def measure(directory: Path, ranks: int, gib: float, rounds: int) -> tuple[int, Rounds]:
    """Resumes in turns; returns the bytes of the state, and what each round took."""
    found: Rounds = {name: [] for name in CONTENDERS}
    with RankGroup(ranks, directory, timeout_s=TIMEOUT_S, program="convert_rank.py") as group:
        nbytes = group.call("prepare", gib=gib)[0]
        for number in range(rounds):
            for name in CONTENDERS[number % 2 :] + CONTENDERS[: number % 2]:
                os.sync()
                answers = group.call("resume", contender=name)
                group.call("forget")
                slowest = {key: max(answer[key] for answer in answers) for key in answers[0]}
                found[name].append({**slowest, "load_average": os.getloadavg()[0]})
                print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return nbytes, found


def spread(samples: list[dict[str, float]], key: str) -> str:
    """Minimum and median, in seconds."""
    values = [sample[key] for sample in samples]
    return f"{min(values):.2f} / {statistics.median(values):.2f}"


def ratio(found: Rounds) -> float:
    """Median over the rounds: how many times as fast the direct resume is."""
    pairs = zip(found[CONVERTED], found[DIRECT], strict=True)
    return statistics.median(theirs["total_s"] / ours["total_s"] for theirs, ours in pairs)


def main() -> None:
    """Runs what the command line asks for; leaves no files but the one of `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--gib", type=float, default=1.0, help="fp32 weights and the state of Adam")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-convert-", dir=args.dir)).resolve()
    machine = describe(directory.parent)
    width = max(map(len, machine))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in machine.items()), flush=True)
    try:
        nbytes, found = measure(directory, args.ranks, args.gib, args.rounds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    rows = [
        [
            *("contender", "total s, min / median", "conversion s", "load s"),
            *("peak RSS of a rank, +MiB", "of the conversion, MiB", "load average"),
        ]
    ]
    for name, samples in found.items():
        times = [spread(samples, key) for key in ("total_s", "convert_s", "load_s")]
        loads = [sample["load_average"] for sample in samples]
        peaks = [max(sample[key] for sample in samples) for key in ("rank_rss", "convert_rss")]
        cells = [f"{peak:.0f}" for peak in peaks]
        rows.append([name, *times, *cells, f"{min(loads):.1f}-{max(loads):.1f}"])
    print(f"\nResume of {nbytes / GIB:.2f} GiB of ZeRO-3 state on {args.ranks} ranks.\n")
    print_table(rows)
    print("\nAsked\n")
    bar = Bar("direct resume, times as fast", ratio(found), ASKED, "x", at_least=True)
    print_table([["what", "asked", "found", "verdict"], bar.cells()])
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
