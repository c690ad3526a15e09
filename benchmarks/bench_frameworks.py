"""Saves of FSDP1 models: flat shards, and FSDP1's own state dicts with both writers.

A second table has what the boxes of cut tensors cost: flattened buffers that the ranks cut into
equal ranges, beside the same buffers cut between tensors. The second is what a save could gain at
most if ranks sent each other the pieces of cut tensors first, without the cost of sending.

Contenders take turns in one run. Prints the machine, the tables, and what is asked:

    python benchmarks/bench_frameworks.py --dir /data --json result.json
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
from bench_tree import print_table
from frameworks_rank import CUT, FLAT, GATHERED, STOCK, WHOLE
from machine import MIB, describe, remove_tree
from rank_group import RankGroup

CONTENDERS = (FLAT, GATHERED, STOCK)
TIMEOUT_S = 300
ASKED = 3.0

# Number of buffers, tensors of each, sizes of each tensor.
BUFFERS: dict[str, tuple[int, int, list[int]]] = {
    "24 layers of 10 matrices, 1 GiB": (24, 10, [1024, 1092]),
    "1,000 layers of 10 small tensors, 39 MiB": (1000, 10, [64, 16]),
    "10,000 small tensors in one buffer, 39 MiB": (1, 10_000, [64, 16]),
}

Rounds = dict[str, list[dict[str, float]]]  # By contender.


def measure(directory: Path, ranks: int, gib: float, orig: bool, rounds: int) -> Rounds:
    """Saves in turns, after one save of each."""
    found: Rounds = {name: [] for name in CONTENDERS}
    with RankGroup(ranks, directory, timeout_s=TIMEOUT_S, program="frameworks_rank.py") as group:
        group.call("prepare", gib=gib, use_orig_params=orig)
        for number in range(-1, rounds):
            shift = max(number, 0) % len(CONTENDERS)
            for name in CONTENDERS[shift:] + CONTENDERS[:shift]:
                answers = group.call("save_by", contender=name, folder="saved")
                remove_tree(directory / "saved")
                slowest = {key: max(answer[key] for answer in answers) for key in answers[0]}
                if number >= 0:
                    found[name].append(slowest)
                    print(f"{ranks} ranks, {name}: {slowest}", file=sys.stderr, flush=True)
    return found


def measure_buffers(directory: Path, ranks: int, workload: str, rounds: int) -> Rounds:
    """Saves flattened buffers in turns, after one save of each."""
    found: Rounds = {CUT: [], WHOLE: []}
    buffers, tensors, shape = BUFFERS[workload]
    with RankGroup(ranks, directory, timeout_s=TIMEOUT_S, program="frameworks_rank.py") as group:
        group.call("prepare_buffers", buffers=buffers, tensors=tensors, shape=shape)
        for number in range(-1, rounds):
            for name in (CUT, WHOLE) if number % 2 else (WHOLE, CUT):
                answers = group.call("save_buffers", contender=name, folder="saved")
                remove_tree(directory / "saved")
                if number >= 0:
                    found[name].append(max(answers, key=lambda answer: answer["total_s"]))
    print(f"{ranks} ranks, {workload}: {found}", file=sys.stderr, flush=True)
    return found


def buffer_rows(found: Rounds, *first: str) -> list[str]:
    """A row of the second table."""
    pairs = zip(found[CUT], found[WHOLE], strict=True)
    factor = statistics.median(cut["total_s"] / whole["total_s"] for cut, whole in pairs)
    boxes = [f"{found[name][0]['boxes']:.0f}" for name in (CUT, WHOLE)]
    times = [spread(found[name], "total_s") for name in (CUT, WHOLE)]
    return [*first, f"{factor:.2f}x", *times, *boxes]


def spread(samples: list[dict[str, float]], key: str) -> str:
    """Minimum and median, in seconds."""
    values = [sample[key] for sample in samples]
    return f"{min(values):.2f} / {statistics.median(values):.2f}"


def ratio(found: Rounds, name: str) -> float:
    """Median over the rounds: how many times as fast as this contender flat shards are."""
    pairs = zip(found[name], found[FLAT], strict=True)
    return statistics.median(theirs["total_s"] / ours["total_s"] for theirs, ours in pairs)


def main() -> None:
    """Runs what the command line asks for; leaves no files but the one of `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--gib", type=float, default=1.0, help="of the model and its optimizer")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench-frameworks-", dir=args.dir)).resolve()
    machine = describe(directory.parent)
    width = max(map(len, machine))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in machine.items()), flush=True)
    rows = [
        [
            *("ranks", "use_orig_params", "contender", "flat shards are faster by"),
            *("state dicts s, min / median", "save s, min / median", "MiB on the wire"),
        ]
    ]
    buffers = [
        [
            *("ranks", "buffers", "ranges take", "ranges s, min / median"),
            *("whole tensors s", "boxes of ranges", "of whole tensors"),
        ]
    ]
    bars, samples = [], []
    try:
        for ranks in args.ranks:
            for workload in BUFFERS:
                found = measure_buffers(directory, ranks, workload, 2 * args.rounds)
                samples.append({"ranks": ranks, "buffers": workload, "rounds": found})
                buffers.append(buffer_rows(found, str(ranks), workload))
        for ranks in args.ranks:
            for orig in (True, False):
                found = measure(directory, ranks, args.gib, orig, args.rounds)
                samples.append({"ranks": ranks, "use_orig_params": orig, "rounds": found})
                for name, each in found.items():
                    wire = statistics.median(sample["wire"] for sample in each) / MIB
                    cells = [str(ranks), str(orig), name, f"{ratio(found, name):.2f}x"]
                    of_state, of_save = spread(each, "state_s"), spread(each, "save_s")
                    rows.append([*cells, of_state, of_save, f"{wire:.1f}"])
                what = f"{ranks} ranks, use_orig_params={orig}: times as fast as {GATHERED}"
                bars.append(Bar(what, ratio(found, GATHERED), ASKED, "x", at_least=True))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print("\nState dicts and save of an FSDP1 model with AdamW.\n")
    print_table(rows)
    print("\nSave of flattened buffers, cut into equal ranges or between tensors.\n")
    print_table(buffers)
    print("\nAsked\n")
    print_table([["what", "asked", "found", "verdict"], *(bar.cells() for bar in bars)])
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "samples": samples}, indent=1) + "\n")


if __name__ == "__main__":
    main()
