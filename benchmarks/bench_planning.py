"""Plans saves and loads of very many tensors, beside stock DCP: CPU seconds, memory, bytes sent.

One process stands for all ranks, except where saves are repeated, which has two gloo ranks. Prints
a table for each workload, ratios first, and then what is asked of them. For many ranks stock DCP
plans fewer tensors and is compared per tensor and rank. Takes some fifteen minutes of CPU, 6 GiB of
memory and 2 GiB of disk:

    python benchmarks/bench_planning.py --dir /data

Gathers and scatters along a tree of ranks are in bench_tree.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_index import SHAPES, checkpoint_of
from bench_tree import print_table
from machine import GIB, MIB, describe
from planning_rows import OURS, OURS_UNPLANNED, STOCK

QUICK = 100  # So many times fewer tensors.
COORDINATORS = [(100_000, 256), (10_000, 2_048)]  # Tensors, ranks.
STOCK_COORDINATOR_ITEMS = 51_200
REPLICAS = 100_000
FEW_REPLICAS = 10_000  # Of which stock DCP takes its turns; of more it plans once.
REPLICA_RANKS = 8
SMALL = 10_000
MANY = 100_000
CACHED = 10_000

Found = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Of the command line."""

    directory: Path
    rounds: int
    quick: bool

    def scaled(self, count: int) -> int:
        """A number of tensors, or less of it."""
        return max(count // QUICK, 25) if self.quick else count


@dataclass(frozen=True)
class Bar:
    """What is asked: at least, or at most, so much."""

    what: str
    found: float
    asked: float
    unit: str
    at_least: bool = False

    def cells(self) -> list[str]:
        """A row of the last table."""
        holds = self.found >= self.asked if self.at_least else self.found <= self.asked
        word = "at least" if self.at_least else "at most"
        return [
            self.what,
            f"{word} {self.asked:g} {self.unit}",
            f"{self.found:.3g} {self.unit}",
            "holds" if holds else "MISSED",
        ]


def _measure(row: str, **arguments: Any) -> Any:
    """Runs a function of planning_rows.py in a process of its own."""
    program = Path(__file__).with_name("planning_rows.py")
    command = [sys.executable, str(program), row, json.dumps(arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    few, middle = min(values) * scale, statistics.median(values) * scale
    return f"{few:.{digits}f} / {middle:.{digits}f}"


def _title(text: str) -> None:
    print(f"\n{text}\n", flush=True)


# Workloads -------------------------------------------------------------------------------------


def _coordinators(options: Options) -> list[Bar]:
    bars: list[Bar] = []
    rows = [
        [
            *("tensors x ranks", "contender", "times stock", "us an item", "unpickle s", "plan s"),
            *("pickle s", "engine: plan s", "assignments s", "peak RSS GiB", "bytes an item"),
            *("items alone", "answer KB a rank", "set-up: items/s"),
        ]
    ]
    for tensors, ranks in COORDINATORS:
        if options.quick:
            tensors, ranks = tensors // QUICK, ranks // 8
        sizes = {STOCK: max(STOCK_COORDINATOR_ITEMS // ranks, 1), OURS: tensors}
        if options.quick:
            sizes[STOCK] = 10
        us_of_stock = None
        for contender, count in sizes.items():
            one = _measure("coordinator", contender=contender, tensors=count, ranks=ranks)
            items = count * ranks
            us = sum(one[name] for name in ("unpickle", "plan", "pickle")) / items * 1e6
            us_of_stock = us_of_stock or us
            own = contender == OURS
            rows.append(
                [
                    f"{count:,} x {ranks:,}",
                    contender,
                    f"{us_of_stock / us:.0f}",
                    f"{us:.2f}",
                    *(f"{one[name]:.2f}" for name in ("unpickle", "plan", "pickle")),
                    f"{one['engine: global plan']:.2f}" if own else "-",
                    f"{one['engine: assignments']:.3f}" if own else "-",
                    f"{one['peak_rss'] / GIB:.2f}",
                    f"{one['wire_nbytes'] / items:.1f}",
                    f"{one['items_nbytes'] / items:.1f}" if own else "-",
                    f"{one['answer_nbytes'] / ranks / 1e3:.1f}",
                    f"{items / one['list']:,.0f}",
                ]
            )
        name = f"{tensors:,} x {ranks:,} sharded"
        seconds = one["unpickle"] + one["plan"] + one["pickle"]
        bars.append(Bar(f"{name}: CPU of the coordinator", seconds, 30, "s"))
        bars.append(Bar(f"{name}: peak RSS", one["peak_rss"] / GIB, 6, "GiB"))
    _title(
        "Coordinator, all tensors sharded over all ranks: from what ranks have sent to what they\n"
        "get. CPU seconds. Peak RSS is of the process, with what was sent; items alone leave out\n"
        "paths of the state dict. Listing and encoding is set-up, in Python"
    )
    print_table(rows)
    return bars


def _replicas(options: Options) -> list[Bar]:
    many, few = options.scaled(REPLICAS), options.scaled(FEW_REPLICAS)
    runs = [(OURS, few), (STOCK, few), (OURS, many), (STOCK, many)]
    found: dict[tuple[str, int], list[Found]] = {}
    for number in range(options.rounds):
        for contender, tensors in runs:
            if number > 0 and (contender, tensors) == (STOCK, many):
                continue  # Minutes.
            one = _measure("replicas", contender=contender, tensors=tensors, ranks=REPLICA_RANKS)
            found.setdefault((contender, tensors), []).append(one)

    def us(contender: str, tensors: int) -> float:
        return min(one["cpu_s"] for one in found[contender, tensors]) / tensors * 1e6

    parts = ("local plans", "wire", "global plan", "finish")
    rows = [
        [
            *("contender", "tensors", "times stock", "CPU s, min / median", "us a tensor"),
            *(f"{part} s" for part in parts),
            *("RSS MiB", "MB sent"),
        ]
    ]
    for contender, tensors in runs:
        some = found[contender, tensors]
        rows.append(
            [
                contender,
                f"{tensors:,}",
                f"{us(STOCK, tensors) / us(contender, tensors):.1f}",
                _spread([one["cpu_s"] for one in some], digits=3),
                f"{us(contender, tensors):.1f}",
                *(f"{min(one[part] for one in some):.3f}" for part in parts),
                f"{max(one['rss'] for one in some) / MIB:.0f}",
                f"{some[0]['wire_nbytes'] / 1e6:.1f}",
            ]
        )
    _title(
        f"Replicated tensors on {REPLICA_RANKS} ranks, end to end: local plans, pickles, dedup,\n"
        "validation. CPU seconds of all ranks together; us are of a tensor, on all ranks"
    )
    print_table(rows)
    times = us(STOCK, many) / us(OURS, many)
    return [Bar(f"{many:,} replicas x {REPLICA_RANKS}", times, 30, "times", at_least=True)]


def _small(options: Options) -> list[Bar]:
    tensors = options.scaled(SMALL)
    with tempfile.TemporaryDirectory(prefix="bench-planning-", dir=options.directory) as folder:
        times = _measure("small", directory=folder, tensors=tensors, rounds=options.rounds)
    bars = []
    rows = [["", "contender", "times stock, of min / median", "CPU us a tensor, min / median"]]
    others = [OURS_UNPLANNED, STOCK]
    saves = [f"save {OURS}", "save again", *(f"save {contender}" for contender in others)]
    for name in [*saves, *(f"load {contender}" for contender in (OURS, *others))]:
        verb, _, contender = name.partition(" ")
        stock = times[f"{verb} {STOCK}"]
        ratios = [by(stock) / by(times[name]) for by in (min, statistics.median)]
        first = f"{verb}, planned before" if contender == "again" else verb
        who = OURS if contender == "again" else contender
        us = _spread(times[name], 1e6 / tensors, 1)
        rows.append([first, who, " / ".join(f"{ratio:.1f}" for ratio in ratios), us])
        if contender == OURS:
            what = f"{tensors:,} tensors of 4 KiB: {verb}"
            bars.append(Bar(what, ratios[1], 6, "times", at_least=True))
    _title(f"{tensors:,} tensors of 4 KiB in one process, end to end")
    print_table(rows)
    return bars


def _many(options: Options) -> list[Bar]:
    tensors = options.scaled(MANY)
    with tempfile.TemporaryDirectory(prefix="bench-planning-", dir=options.directory) as folder:
        times = _measure("many", directory=folder, tensors=tensors, rounds=options.rounds)
    parts = ("list", "plan", "write", "commit", "all")
    rows = [["save", *parts]]
    for save in ("first", "later"):
        of_parts = [times[f"{save} {part}"] for part in parts]
        rows.append([save, *(_spread(seconds, 1e6 / tensors) for seconds in of_parts)])
    _title(
        f"torch_ckpt.save of {tensors:,} tensors of 64 bytes in one process: CPU us a tensor.\n"
        "A later save finds its plan in the cache"
    )
    print_table(rows)
    return [
        Bar(
            f"{tensors:,} tensors, {save} save: listing and planning",
            min(map(sum, zip(times[f"{save} list"], times[f"{save} plan"], strict=True)))
            * (1e6 / tensors),
            2,
            "us a tensor",
        )
        for save in ("first", "later")
    ]


def _cached(options: Options) -> list[Bar]:
    tensors, bars = options.scaled(CACHED), []
    rows = [
        [
            *("of the tensors, DTensors", "save", "CPU ms, min / median", "set_up_planner"),
            *("create_local_plan", "create_global_plan", "finish_plan"),
            *("bytes sent", "hits", "misses"),
        ]
    ]
    parts = rows[0][3:7]
    for dtensors in (tensors // 2, tensors):
        with tempfile.TemporaryDirectory(prefix="bench-planning-", dir=options.directory) as folder:
            arguments = {"tensors": tensors, "dtensors": dtensors, "rounds": options.rounds}
            ranks = _measure("cached", directory=folder, **arguments)
        for which in (slice(0, 1), slice(1, None)):
            # Rank 0, which coordinates as well.
            saves = ranks[0][which]
            sums = [sum(save.get(part, 0.0) for part in parts) for save in saves]
            rows.append(
                [
                    f"{dtensors:,} of {tensors:,}",
                    "first" if which.start == 0 else "later",
                    _spread(sums, 1e3, 1),
                    *(f"{min(save[part] for save in saves) * 1e3:.2f}" for part in parts),
                    f"{max(save['sent_nbytes'] for rank in ranks for save in rank[which]):,}",
                    *(
                        " ".join(f"{rank[which][-1][key]}" for rank in ranks)
                        for key in ("hits", "misses")
                    ),
                ]
            )
        assert all(rank[-1]["hits"] == options.rounds and rank[-1]["misses"] == 1 for rank in ranks)
        what = f"later save of {tensors:,}, {dtensors:,} DTensors"
        bars.append(Bar(what, statistics.median(sums) * 1e3, 60, "ms"))
    _title(
        f"{tensors:,} tensors a rank saved again by 2 gloo ranks: planning on rank 0, which\n"
        "coordinates. Bytes sent are the pickle of what a rank sends, hits and misses of each rank"
    )
    print_table(rows)
    return bars


def _million(options: Options) -> list[Bar]:
    bars: list[Bar] = []
    labels = {
        "one-cold": "open, one FQN; not in the page cache",
        "one": "open, one FQN",
        "plan-cold": "open, plan 1/256; not in the page cache",
        "plan": "open, plan 1/256",
        "stock": "stock DCP unpickles .metadata",
    }
    for fqns, boxes in SHAPES:
        with checkpoint_of(options.directory, options.scaled(fqns), boxes) as checkpoint:
            found = {
                what: [checkpoint.measure(what) for _ in range(rounds)]
                for what in labels
                for rounds in [1 if what == "stock" else options.rounds]
            }
            title = checkpoint.describe()
        stock = found["stock"][0]["cpu_s"]
        rows = [["", "times stock", "ms, min / median", "CPU ms, min / median", "RSS +MiB"]]
        for what, label in labels.items():
            cpu = [one["cpu_s"] for one in found[what]]
            rss = max(one["rss_mib"] for one in found[what])
            ms = _spread([one["s"] for one in found[what]], 1e3)
            times = f"{stock / statistics.median(cpu):,.0f}"
            rows.append([label, times, ms, _spread(cpu, 1e3), f"{rss:.1f}"])
        _title(f"A million shards, all in a process of its own. {title}")
        print_table(rows)
        name = f"{checkpoint.fqns:,} x {boxes} shards"
        ms = {what: statistics.median(one["s"] for one in found[what]) * 1e3 for what in found}
        bars.append(Bar(f"{name}: open, one FQN", ms["one"], 5, "ms"))
        bars.append(Bar(f"{name}: open, plan 1/256", ms["plan"], 500, "ms"))
        rss = max(one["rss_mib"] for one in found["plan"])
        bars.append(Bar(f"{name}: RSS of that", rss, 200, "MiB"))
    return bars


WORKLOADS: dict[str, Callable[[Options], list[Bar]]] = {
    "coordinator": _coordinators,
    "replicas": _replicas,
    "small": _small,
    "many": _many,
    "cached": _cached,
    "million": _million,
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="for checkpoints")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help=f"about 1/{QUICK} of the tensors")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="repeatable")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be positive")
    for key, value in describe(arguments.dir).items():
        print(f"{key}: {value}")
    options = Options(arguments.dir, arguments.rounds, arguments.quick)
    bars = []
    for name in arguments.workload or WORKLOADS:
        bars += WORKLOADS[name](options)
    _title(
        "What is asked, of the full sizes" + (", and these are not they" if options.quick else "")
    )
    print_table([["", "asked", "found", ""], *(bar.cells() for bar in bars)])
    print("\nGathers and scatters along a tree: python benchmarks/bench_tree.py")


if __name__ == "__main__":
    main()
