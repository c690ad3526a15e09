"""Loads by several ranks, with torch-ckpt and its contenders, interleaved, in one run.

Replicas that want the same bytes, from a disk that gives all of them together so many a second, and
from the local one; how well the stages of such a load overlap; row shards on another number of
ranks; memory. Prints the machine and raw speeds first, then a table per scenario, then what is
asked. On two cores, everything takes 40 minutes, 12 GiB of disk and as much memory:

    python benchmarks/bench_load.py --dir /data --json result.json

Ranks are gloo processes. The throttled disk needs root (see throttled_disk.py); what needs it is
left out elsewhere, and says so. Contenders that are not installed, or fail, are left out as well:
fastsafetensors and runai-model-streamer (which imports humanize) are on PyPI.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_tree import print_table
from load_contenders import (
    BY_OWN_FILES,
    CONTENDERS,
    EXCHANGING,
    ONE,
    OURS,
    REPLICATED,
    ROWS,
    SAVED,
    STOCK,
)
from load_turns import (
    LOCAL,
    SPARE_MEMORY,
    THROTTLED,
    Bench,
    Storage,
    Turns,
    available_memory,
    folder_of,
    load_in_turns,
    open_storages,
    saved_state,
)
from machine import GIB, MIB, describe, pick_fio

SAVING_RANKS, RESHARDED_RANKS = 2, 3
OVERLAP_RANKS = {THROTTLED: 4, LOCAL: 2}
BUFFERS_MIB = 256 + 64  # Of the exchange, and of reads.


@dataclass(frozen=True)
class Bar:
    """What is asked: at least, or at most, so much; `found` is None where it was not measured."""

    what: str
    found: float | None
    asked: float
    unit: str
    at_least: bool = False

    def cells(self) -> list[str]:
        """A row of the last table."""
        word = "at least" if self.at_least else "at most"
        cells = [self.what, f"{word} {self.asked:g} {self.unit}"]
        if self.found is None:
            return [*cells, "-", "not measured"]
        holds = self.found >= self.asked if self.at_least else self.found <= self.asked
        return [*cells, f"{self.found:.3f} {self.unit}", "met" if holds else "MISSED"]


def conclude(bars: Sequence[Bar], samples: list[Any], options: argparse.Namespace) -> None:
    """Prints what was asked and found, and writes the samples if `--json` asks for them."""
    print_table([["figure", "asked", "found", ""], *(bar.cells() for bar in bars)])
    if options.json:
        facts = {"samples": samples, "gib": options.gib}
        options.json.write_text(json.dumps(facts, indent=1))


# Scenarios -------------------------------------------------------------------------------------


def _replicas(bench: Bench, storages: dict[str, Storage]) -> None:
    """Replicas that all load all of a model, from the throttled disk."""
    if THROTTLED in storages:
        for ranks in bench.options.replicas:
            turns = Turns(
                *(bench, "replicas", storages[THROTTLED], ranks, REPLICATED, bench.options.gib)
            )
            with turns:
                load_in_turns(turns, bench.contenders(BY_OWN_FILES))


def _local(bench: Bench, storages: dict[str, Storage]) -> None:
    """Two of them, from the local disk, whose page cache they share."""
    with Turns(bench, "local", storages[LOCAL], 2, REPLICATED, bench.options.gib) as turns:
        load_in_turns(turns, bench.contenders(BY_OWN_FILES))


def _exchange(bench: Bench, storages: dict[str, Storage]) -> None:
    """Replicas with and without an exchange, from the local disk."""
    for ranks in bench.options.replicas:
        with Turns(
            bench, "exchange", storages[LOCAL], ranks, REPLICATED, bench.options.gib
        ) as turns:
            load_in_turns(turns, bench.contenders(EXCHANGING))


def _cached(bench: Bench, storages: dict[str, Storage]) -> None:
    """The same replicas, from the page cache."""
    for ranks in bench.options.replicas:
        scenario = ("cached", storages[LOCAL], ranks, REPLICATED, bench.options.gib)
        with Turns(bench, *scenario, is_warm=True) as turns:
            load_in_turns(turns, bench.contenders(EXCHANGING))


PIPELINE = "pipeline: read_data alone"
STAGES = {
    "read and verify alone": "read_share",
    "transfer alone": "transfer",
    "unpack alone": "unpack",
}


def _overlap(bench: Bench, storages: dict[str, Storage]) -> None:
    """Replicas: a whole load, its part after planning, and each stage of that alone."""
    for storage in storages.values():
        ranks = OVERLAP_RANKS[storage.name]
        folder = folder_of(OURS, bench.options.gib)
        piece_mib = bench.options.piece_mib
        with Turns(bench, "overlap", storage, ranks, REPLICATED, bench.options.gib) as turns:
            if not turns.fit([OURS]):
                continue
            for round_number in range(bench.options.rounds):
                turns.load(OURS, round_number=round_number)
                turns.stage(PIPELINE, "read_data", round_number, folder=folder)
                for name, function in STAGES.items():
                    reads = function == "read_share"
                    rest = {"folder": folder} if reads else {"piece_mib": piece_mib}
                    turns.stage(name, function, round_number, **rest)


def _reshard(bench: Bench, storages: dict[str, Storage]) -> None:
    """Row shards of 2 ranks, loaded by 3."""
    storage = storages.get(THROTTLED, storages[LOCAL])
    shards = bench.contenders([name for name, who in CONTENDERS.items() if who.shards])
    with Turns(bench, "reshard", storage, RESHARDED_RANKS, ROWS, bench.options.gib) as turns:
        load_in_turns(turns, shards)


def _memory(bench: Bench, storages: dict[str, Storage]) -> None:
    """One large tensor, each time the first load of new processes."""
    gib = bench.options.memory_gib
    for ranks in (1, 2):
        for name in bench.contenders([OURS, STOCK]):
            with Turns(bench, "memory", storages[LOCAL], ranks, ONE, gib) as turns:
                needed = int(ranks * turns.nbytes * (2.1 if name == STOCK else 1.1))
                if needed > available_memory() - SPARE_MEMORY:
                    turns.leave_out(name, f"needs {needed / GIB:.1f} GiB of memory")
                else:
                    turns.load(name, round_number=0, function="load_new")


@dataclass(frozen=True)
class Scenario:
    """What is saved for it, from how many ranks, and on which storage it is loaded."""

    run: Callable[[Bench, dict[str, Storage]], None]
    kind: str
    saving_ranks: int
    storages: frozenset[str]


SCENARIOS = {
    "replicas": Scenario(_replicas, REPLICATED, 1, frozenset([THROTTLED])),
    "exchange": Scenario(_exchange, REPLICATED, 1, frozenset([LOCAL])),
    "cached": Scenario(_cached, REPLICATED, 1, frozenset([LOCAL])),
    "local": Scenario(_local, REPLICATED, 1, frozenset([LOCAL])),
    "overlap": Scenario(_overlap, REPLICATED, 1, frozenset([THROTTLED, LOCAL])),
    "reshard": Scenario(_reshard, ROWS, SAVING_RANKS, frozenset([THROTTLED])),
    "memory": Scenario(_memory, ONE, 1, frozenset([LOCAL])),
}


def _run(bench: Bench, names: list[str]) -> None:
    """Runs scenarios; those that load the same save it once."""
    for kind in (REPLICATED, ROWS, ONE):
        some = [SCENARIOS[name] for name in names if SCENARIOS[name].kind == kind]
        if not some:
            continue
        gib = bench.options.memory_gib if kind == ONE else bench.options.gib
        wanted = {CONTENDERS[name].saved for name in bench.contenders()}
        formats = [saved for saved in SAVED if saved in wanted]
        if kind == ONE:
            formats = [saved for saved in formats if saved in (OURS, STOCK)]
        ranks = some[0].saving_ranks
        where = frozenset().union(*(scenario.storages for scenario in some))
        with (
            saved_state(bench, kind, gib, ranks=ranks, formats=formats) as saved,
            open_storages(bench, saved, set(where)) as found,
        ):
            for scenario in some:
                scenario.run(bench, found)


# Printing --------------------------------------------------------------------------------------


def _print_samples(bench: Bench, scenario: str) -> None:
    rows = [
        [
            *("storage", "ranks", "contender", "times stock", "s, min / median / max"),
            *("read GiB", "of the model", "read MB/s", "CPU s", "peak RSS +MiB"),
        ]
    ]
    keys = dict.fromkeys(
        (s.storage, s.ranks, s.contender) for s in bench.samples if s.scenario == scenario
    )
    for storage, ranks, contender in keys:
        found = bench.of(scenario, storage, ranks, contender)
        seconds = [s.seconds for s in found]
        times = bench.times_stock(scenario, storage, ranks, contender)
        read = statistics.median(s.read_nbytes for s in found)
        middle = statistics.median(seconds)
        rows.append(
            [
                *(storage, str(ranks), contender, f"{times:.2f}" if times else "-"),
                f"{min(seconds):.2f} / {middle:.2f} / {max(seconds):.2f}",
                f"{read / GIB:.3f}",
                f"{read / found[0].nbytes:.3f}",
                f"{read / middle / 1e6:.0f}",
                f"{statistics.median(s.cpu_s for s in found):.2f}",
                f"{max(s.rss_growth for s in found) / MIB:.0f}",
            ]
        )
    if len(rows) > 1:
        loads = [s.load_average for s in bench.samples if s.scenario == scenario]
        does = SCENARIOS[scenario].run.__doc__ or ""
        print(f"\n{scenario}: {does} Load average {min(loads):.1f} to {max(loads):.1f}.\n")
        print_table(rows)


def _worst_overlap(bench: Bench, storage: str) -> float | None:
    """The pipeline by the slowest stage: the median of the rounds."""
    ranks = OVERLAP_RANKS[storage]
    rows = [bench.of("overlap", storage, ranks, name) for name in (PIPELINE, *STAGES)]
    ratios = [
        whole.seconds / max(stage.seconds for stage in stages)
        for whole, *stages in zip(*rows, strict=False)
    ]
    return statistics.median(ratios) if ratios else None


def _bars(bench: Bench) -> list[Bar]:
    def read(scenario: str, ranks: int) -> float | None:
        row = (scenario, THROTTLED, ranks, OURS)
        return bench.median(row, lambda s: s.read_nbytes / s.nbytes)

    def beyond_tensor(ranks: int) -> float | None:
        row = ("memory", LOCAL, ranks, OURS)
        return bench.median(row, lambda s: (s.rss_growth - s.nbytes) / MIB)

    def times(scenario: str, storage: str, ranks: int) -> float | None:
        return bench.times_stock(scenario, storage, ranks, OURS)

    stock = "times as fast as stock"
    mib, slack = "MiB", BUFFERS_MIB + 32
    return [
        Bar("replicas: 4 read, of the model", read("replicas", 4), 1.02, "x"),
        Bar(f"replicas: 4, {stock}", times("replicas", THROTTLED, 4), 3, "x", at_least=True),
        Bar(f"replicas: 8, {stock}", times("replicas", THROTTLED, 8), 5, "x", at_least=True),
        Bar(f"local: 2, {stock}", times("local", LOCAL, 2), 2, "x", at_least=True),
        Bar(
            "overlap: throttled, by the slowest stage", _worst_overlap(bench, THROTTLED), 1.15, "x"
        ),
        Bar("overlap: local, by the slowest stage", _worst_overlap(bench, LOCAL), 1.15, "x"),
        Bar("reshard: read, of the model", read("reshard", RESHARDED_RANKS), 1.02, "x"),
        Bar("memory: 1 rank, beyond the tensor", beyond_tensor(1), slack, mib),
        Bar("memory: 2 ranks, beyond the tensor", beyond_tensor(2), slack, mib),
    ]


def _print_head(directory: Path, options: argparse.Namespace) -> None:
    for key, value in describe(directory.parent).items():
        print(f"{key}: {value}")
    fio = pick_fio(directory, block_mib=4, depth=16)
    if fio is not None:
        path, nbytes = directory / "ceiling", int(options.gib * GIB)
        try:
            fio.measure(path, nbytes, write=True)
            rates = [nbytes / fio.measure(path, nbytes, write=False).seconds / 1e9 for _ in "123"]
        finally:
            path.unlink(missing_ok=True)
        print(f"local disk, fio O_DIRECT reads ({fio.engine}): ", end="")
        print(" ".join(f"{rate:.2f}" for rate in sorted(rates)), "GB/s")
    print(f"throttled disk: {options.rate_mb:g} MB/s for all ranks together")
    print(f"tensors are on: {options.device}", flush=True)


def _arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",")]
        if unknown := [name for name in found if name not in CONTENDERS]:
            raise argparse.ArgumentTypeError(f"{unknown} not in {', '.join(CONTENDERS)}")
        return found

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="repeatable")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: replicas only, no shards"
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--gib", type=float, default=1.0, help="size of a model")
    parser.add_argument("--memory-gib", type=float, default=4.0, help="size of the large tensor")
    parser.add_argument("--rate-mb", type=float, default=200.0, help="MB/s of the throttled disk")
    counts = {"type": lambda text: [int(count) for count in text.split(",")], "default": [2, 4, 8]}
    parser.add_argument("--replicas", **counts, help="how many, comma-separated")  # type: ignore[arg-type]
    parser.add_argument(
        "--contenders", type=names, default=list(CONTENDERS), help="comma-separated"
    )
    parser.add_argument(
        "--piece-mib", type=float, default=4.0, help="of transfers and copies alone"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for any one load")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args()
    if options.rounds < 1 or min(options.gib, options.memory_gib, options.rate_mb) <= 0:
        parser.error("--rounds, --gib, --memory-gib and --rate-mb must be positive")
    on_device = [n for n, s in SCENARIOS.items() if options.device == "cpu" or s.kind == REPLICATED]
    options.only = options.only or on_device
    if left := set(options.only) - set(on_device):
        parser.error(f"{', '.join(sorted(left))}: not with --device {options.device}")
    return options


def main() -> None:
    """Runs what the command line asks for; leaves no files but the one of `--json`."""
    options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    scenarios = options.only
    directory = Path(tempfile.mkdtemp(prefix="bench-load-", dir=options.dir)).resolve()
    bench = Bench(directory, options)
    try:
        _print_head(directory, options)
        _run(bench, scenarios)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for scenario in scenarios:
            _print_samples(bench, scenario)
        for line in bench.left_out:
            print(f"\n{line}")
        print("\nWhat is asked, of the default sizes:\n")
        bars = _bars(bench)
        print_table([["", "asked", "found", ""], *(bar.cells() for bar in bars)])
    if options.json is not None:
        result = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "samples": [asdict(sample) for sample in bench.samples],
            "bars": [asdict(bar) for bar in bars],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
