"""Resumes and conversions of a DeepSpeed ZeRO-3 checkpoint, with DeepSpeed's tools and ours.

Contenders take turns in one run. The direct resume loads onto FSDP2 with stock `dcp.load` and
FastReader. The other converts to a universal folder with the default number of workers, and loads
it into an engine of DeepSpeed. Imports, models and engines are made before. Ours syncs what it
writes, and DeepSpeed's tools do not. Needs `deepspeed`:

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
from convert_rank import CONVERTED, DIRECT, OURS, OURS_WEIGHTS, WEIGHTS
from machine import GIB, describe
from rank_group import RankGroup

CONTENDERS = (DIRECT, CONVERTED)
CONVERSIONS = (OURS, OURS_WEIGHTS, WEIGHTS)
TIMEOUT_S = 500

Rounds = dict[str, list[dict[str, float]]]  # By contender.


def measure(directory: Path, ranks: int, gib: float, rounds: int) -> tuple[int, Rounds]:
    """Resumes and converts in turns; returns the bytes of the state, and what each round took."""
    found: Rounds = {name: [] for name in CONTENDERS + CONVERSIONS}
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
            for name in CONVERSIONS:
                os.sync()
                seconds, peak, growth = group.call("convert", contender=name)[0]
                group.call("forget")
                sample = {"convert_s": seconds, "peak_rss": peak, "convert_rss": growth}
                found[name].append(sample)
                print(f"{name}: {sample}", file=sys.stderr, flush=True)
    return nbytes, found


def spread(samples: list[dict[str, float]], key: str) -> str:
    """Minimum and median, in seconds."""
    values = [sample[key] for sample in samples]
    return f"{min(values):.2f} / {statistics.median(values):.2f}"


def ratio(found: Rounds, theirs: str, ours: str, key: str) -> float:
    """Median over the rounds: theirs divided by ours."""
    pairs = zip(found[theirs], found[ours], strict=True)
    return statistics.median(their[key] / our[key] for their, our in pairs)


def bars(found: Rounds) -> list[Bar]:
    """What is asked, and what was found."""
    direct = ratio(found, CONVERTED, DIRECT, "total_s")
    converted = ratio(found, CONVERTED, OURS, "convert_s")
    memory = ratio(found, OURS, CONVERTED, "convert_rss")
    return [
        Bar("direct resume, times as fast", direct, 4.0, "x", at_least=True),
        Bar("conversion to a universal folder, times as fast", converted, 3.0, "x", at_least=True),
        Bar("its peak memory beyond the imports, of DeepSpeed's", memory, 0.25, "x"),
    ]


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
    rows = [["resume", "total s, min / median", "conversion s", "load s", "peak RSS, +MiB"]]
    for name in CONTENDERS:
        times = [spread(found[name], key) for key in ("total_s", "convert_s", "load_s")]
        peak = max(sample["rank_rss"] for sample in found[name])
        rows.append([name, *times, f"{peak:.0f}"])
    loads = [sample["load_average"] for name in CONTENDERS for sample in found[name]]
    print(
        f"\nResume of {nbytes / GIB:.2f} GiB of ZeRO-3 state on {args.ranks} ranks. Load average "
        f"{min(loads):.1f} to {max(loads):.1f}.\n"
    )
    print_table(rows)
    rows = [["conversion", "s, min / median", "peak RSS beyond the imports, MiB"]]
    for name in (CONVERTED, *CONVERSIONS):
        peak = max(sample["convert_rss"] for sample in found[name])
        rows.append([name.partition(",")[0], spread(found[name], "convert_s"), f"{peak:.0f}"])
    print("\nConversion of the same checkpoint, by one process and its workers.\n")
    print_table(rows)
    print("\nAsked\n")
    print_table([["what", "asked", "found", "verdict"], *(bar.cells() for bar in bars(found))])
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
