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
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_tree import print_table
from contenders import OURS
from machine import GIB, MIB, describe, make_cold, pick_fio
from rank_group import RankError, RankGroup
from rank_loads import (
    LOADERS,
    ONE,
    OURS_OFF,
    REPLICATED,
    ROWS,
    SAVED,
    STOCK,
    nbytes_of,
    takes_exchange,
)
from throttled_disk import ThrottledDisk, missing

RAW = "raw: O_DIRECT, each byte once"
THROTTLED, LOCAL = "throttled", "local"
TINY_GIB = 1 / 256  # Of the load that every contender begins with, to have its imports done.
SPARE_MEMORY = 2 * GIB
SAVING_RANKS, RESHARDED_RANKS = 2, 3
OVERLAP_RANKS = {THROTTLED: 4, LOCAL: 2}
BUFFERS_MIB = 256 + 64  # Of the exchange, and of reads.


@dataclass(frozen=True)
class Sample:
    """One call of all ranks at once.

    Attributes:
        scenario: Its name on the command line.
        storage: `THROTTLED` or `LOCAL`.
        ranks: How many loaded.
        contender: A key of `LOADERS`, `RAW`, or a stage.
        round: Counts from 0.
        nbytes: Bytes of the whole model.
        seconds: From the barrier to the end of the slowest rank.
        read_nbytes: Fetched from storage by all ranks together, as the kernel counts.
        cpu_s: Of all ranks together.
        rss_growth: Of the rank whose memory grew most, at its peak.
        load_average: The machine's, over the last minute.
    """

    scenario: str
    storage: str
    ranks: int
    contender: str
    round: int
    nbytes: int
    seconds: float
    read_nbytes: int
    cpu_s: float
    rss_growth: int
    load_average: float = field(default_factory=lambda: os.getloadavg()[0])


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


@dataclass(frozen=True)
class Storage:
    """Where ranks load from: a directory, or the same on a throttled disk."""

    saved: Path
    node: Path
    disk: ThrottledDisk | None = None

    @property
    def name(self) -> str:
        """As samples have it."""
        return THROTTLED if self.disk else LOCAL

    def group(self, ranks: int, timeout_s: float) -> RankGroup:
        """Processes that load from there."""
        directory = self.node if self.disk else self.saved
        return RankGroup(ranks, directory, disk=self.disk, timeout_s=timeout_s)

    def make_cold(self, group: RankGroup) -> None:
        """Empties the page cache."""
        if self.disk:
            group.call("mount")
        else:
            make_cold(self.saved)

    def call(self, group: RankGroup, function: str, **arguments: Any) -> tuple[list[Any], int]:
        """Has all ranks do something; returns their answers, and the bytes read from storage."""
        before = self.disk.limit.read_nbytes() if self.disk else 0
        answers = group.call(function, **arguments)
        if self.disk:
            return answers, self.disk.limit.read_nbytes() - before
        return answers, sum(answer["device_read"] for answer in answers)


@dataclass
class Bench:
    """One run: its options, and what was measured so far."""

    directory: Path
    options: argparse.Namespace
    samples: list[Sample] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def of(self, scenario: str, storage: str, ranks: int, contender: str) -> list[Sample]:
        """Samples of one row of a table, by round."""
        wanted = (scenario, storage, ranks, contender)
        return [s for s in self.samples if (s.scenario, s.storage, s.ranks, s.contender) == wanted]

    def times_stock(self, scenario: str, storage: str, ranks: int, contender: str) -> float | None:
        """How many times as fast as stock: the median of the rounds' ratios, or None."""
        stock = {s.round: s.seconds for s in self.of(scenario, storage, ranks, STOCK)}
        found = self.of(scenario, storage, ranks, contender)
        ratios = [stock[s.round] / s.seconds for s in found if s.round in stock]
        return statistics.median(ratios) if ratios else None

    def median(
        self, row: tuple[str, str, int, str], value: Callable[[Sample], float]
    ) -> float | None:
        """Of the samples of one row, or None."""
        found = [value(sample) for sample in self.of(*row)]
        return statistics.median(found) if found else None

    def contenders(self, names: list[str] | None = None) -> list[str]:
        """Those that take part, of `names` where given."""
        return [name for name in self.options.contenders if names is None or name in names]


def _note(bench: Bench, text: str) -> None:
    bench.left_out.append(text)
    print(text, file=sys.stderr, flush=True)


# Measuring -------------------------------------------------------------------------------------


@contextmanager
def _saved(
    bench: Bench, kind: str, gib: float, *, ranks: int, formats: list[str]
) -> Iterator[Path]:
    """Saves a state dict and a tiny one like it; yields the directory of the folders."""
    directory = bench.directory / "saved"
    directory.mkdir()
    try:
        with RankGroup(ranks, directory, timeout_s=bench.options.timeout_s) as group:
            for saved in formats:
                for size in (gib, TINY_GIB):
                    arguments = {"kind": kind, "gib": size, "folder": _folder(saved, size)}
                    group.call("save", saved=saved, **arguments)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _folder(saved: str, gib: float) -> str:
    return f"{saved}-{gib:g}"


@contextmanager
def _storages(bench: Bench, saved: Path, names: set[str]) -> Iterator[dict[str, Storage]]:
    """Yields those of the storages called `names` that this machine can have."""
    node = bench.directory / "node"
    node.mkdir(exist_ok=True)
    found = {LOCAL: Storage(saved, node)}
    with ExitStack() as stack:
        if THROTTLED in names:
            why = missing()
            try:
                if why is None:
                    rate = int(bench.options.rate_mb * 1e6)
                    disk = ThrottledDisk(saved, bench.directory / "disk.img", rate)
                    stack.callback(disk.close)
                    found[THROTTLED] = Storage(saved, node, disk)
            except (OSError, RuntimeError) as error:
                why = str(error)
            if why is not None:
                _note(bench, f"no throttled disk: {why}")
        yield found


class Turns:
    """Ranks that load for one contender after another; where one fails, the ranks start anew."""

    def __init__(
        self, bench: Bench, scenario: str, storage: Storage, ranks: int, kind: str, gib: float
    ) -> None:
        self.bench, self.scenario, self.storage, self.ranks = bench, scenario, storage, ranks
        self.kind, self.gib = kind, gib
        self.nbytes = nbytes_of(kind, gib)
        self.group = self._start()

    def _start(self) -> RankGroup:
        return self.storage.group(self.ranks, self.bench.options.timeout_s)

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.group.close()

    def leave_out(self, contender: str, why: object) -> None:
        """Says why there are no figures of a contender."""
        where = f"{self.scenario}, {self.storage.name}, {self.ranks} ranks"
        _note(self.bench, f"{where}: no {contender}: {why}")

    def fit(self, contenders: list[str]) -> list[str]:
        """Those that load a tiny state dict, and whose memory this machine has."""
        fit = []
        for name in contenders:
            needed = int(self.ranks * self.nbytes * (1 + LOADERS[name].temporary))
            spare = _available_memory() - SPARE_MEMORY
            if needed > spare:
                why = f"needs about {needed / GIB:.1f} GiB of memory, {spare / GIB:.1f} are free"
                self.leave_out(name, why)
                continue
            if self.load(name, round_number=-1, gib=TINY_GIB) is not None:
                fit.append(name)
        return fit

    def load(
        self, contender: str, *, round_number: int, function: str = "load", gib: float | None = None
    ) -> Sample | None:
        """One cold load by all ranks, checked in the first rounds; None, and why, if it fails."""
        gib = gib or self.gib
        arguments = {"loader": contender, "folder": _folder(LOADERS[contender].saved, gib)}
        if function == "load":
            arguments["check"] = round_number <= 0
        try:
            sample = self._measure(contender, round_number, function, gib, arguments)
        except RankError as error:
            self.leave_out(contender, error)
            self.group = self._start()
            return None
        if round_number >= 0:
            self.bench.samples.append(sample)
        return sample

    def stage(self, name: str, function: str, round_number: int, **arguments: Any) -> None:
        """One call of a stage, by all ranks."""
        sample = self._measure(name, round_number, function, self.gib, arguments)
        self.bench.samples.append(sample)

    def _measure(
        self, name: str, round_number: int, function: str, gib: float, arguments: dict[str, Any]
    ) -> Sample:
        self.storage.make_cold(self.group)
        if function != "read_raw":
            arguments = {"kind": self.kind, "gib": gib, **arguments}
        answers, read_nbytes = self.storage.call(self.group, function, **arguments)
        sample = Sample(
            scenario=self.scenario,
            storage=self.storage.name,
            ranks=self.ranks,
            contender=name,
            round=round_number,
            nbytes=self.nbytes,
            seconds=max(a["end"] for a in answers) - min(a["begin"] for a in answers),
            read_nbytes=read_nbytes,
            cpu_s=sum(a["cpu_s"] for a in answers),
            rss_growth=max(a["rss_growth"] for a in answers),
        )
        if round_number >= 0:
            print(
                f"{self.scenario} {self.storage.name}, {self.ranks} ranks, round {round_number}, "
                f"{name}: {sample.seconds:.3f} s (load {sample.load_average:.1f})",
                file=sys.stderr,
                flush=True,
            )
        return sample


def _available_memory() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


def _load_in_turns(turns: Turns, contenders: list[str]) -> None:
    """All rounds; each begins with the next contender."""
    raw_folder = _folder(LOADERS[contenders[0]].saved, turns.gib)
    contenders = [RAW, *turns.fit(contenders)]
    for round_number in range(turns.bench.options.rounds):
        shift = round_number % len(contenders)
        for name in contenders[shift:] + contenders[:shift]:
            if name == RAW:
                turns.stage(RAW, "read_raw", round_number, folder=raw_folder)
            elif turns.load(name, round_number=round_number) is None:
                contenders = [other for other in contenders if other != name]


# Scenarios -------------------------------------------------------------------------------------


def _replicas(bench: Bench, storages: dict[str, Storage]) -> None:
    """Replicas that all load all of a model, from the throttled disk."""
    if THROTTLED in storages:
        for ranks in bench.options.replicas:
            turns = Turns(
                *(bench, "replicas", storages[THROTTLED], ranks, REPLICATED, bench.options.gib)
            )
            with turns:
                _load_in_turns(turns, bench.contenders())


def _local(bench: Bench, storages: dict[str, Storage]) -> None:
    """Two of them, from the local disk, whose page cache they share."""
    with Turns(bench, "local", storages[LOCAL], 2, REPLICATED, bench.options.gib) as turns:
        _load_in_turns(turns, bench.contenders())


STAGES = {
    "read and verify alone": "load_share",
    "transfer alone": "transfer",
    "unpack alone": "unpack",
}


def _overlap(bench: Bench, storages: dict[str, Storage]) -> None:
    """A whole load by replicas, and each of its stages alone."""
    for storage in storages.values():
        ranks = OVERLAP_RANKS[storage.name]
        folder = _folder(OURS, bench.options.gib)
        piece_mib = bench.options.piece_mib
        with Turns(bench, "overlap", storage, ranks, REPLICATED, bench.options.gib) as turns:
            if not turns.fit([OURS]):
                continue
            for round_number in range(bench.options.rounds):
                turns.load(OURS, round_number=round_number)
                for name, function in STAGES.items():
                    rest = {"folder": folder} if function == "load_share" else {}
                    rest |= {"piece_mib": piece_mib} if function != "load_share" else {}
                    turns.stage(name, function, round_number, **rest)


def _reshard(bench: Bench, storages: dict[str, Storage]) -> None:
    """Row shards of 2 ranks, loaded by 3."""
    storage = storages.get(THROTTLED, storages[LOCAL])
    shards = bench.contenders([name for name, loader in LOADERS.items() if loader.shards])
    with Turns(bench, "reshard", storage, RESHARDED_RANKS, ROWS, bench.options.gib) as turns:
        _load_in_turns(turns, shards)


def _memory(bench: Bench, storages: dict[str, Storage]) -> None:
    """One large tensor, each time the first load of new processes."""
    gib = bench.options.memory_gib
    for ranks in (1, 2):
        for name in bench.contenders([OURS, STOCK]):
            with Turns(bench, "memory", storages[LOCAL], ranks, ONE, gib) as turns:
                needed = int(ranks * turns.nbytes * (2.1 if name == STOCK else 1.1))
                if needed > _available_memory() - SPARE_MEMORY:
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
        wanted = {LOADERS[name].saved for name in bench.contenders()}
        formats = [saved for saved in SAVED if saved in wanted]
        if kind == ONE:
            formats = [saved for saved in formats if saved in (OURS, STOCK)]
        ranks = some[0].saving_ranks
        where = frozenset().union(*(scenario.storages for scenario in some))
        with (
            _saved(bench, kind, gib, ranks=ranks, formats=formats) as saved,
            _storages(bench, saved, set(where)) as storages,
        ):
            for scenario in some:
                scenario.run(bench, storages)


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
    """The whole by the slowest stage: the median of the rounds."""
    ranks = OVERLAP_RANKS[storage]
    rows = [bench.of("overlap", storage, ranks, name) for name in (OURS, *STAGES)]
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
    print(f"throttled disk: {options.rate_mb:g} MB/s for all ranks together", flush=True)


def _arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",")]
        if unknown := [name for name in found if name not in LOADERS]:
            raise argparse.ArgumentTypeError(f"{unknown} not in {', '.join(LOADERS)}")
        return found

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="repeatable")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--gib", type=float, default=1.0, help="size of a model")
    parser.add_argument("--memory-gib", type=float, default=4.0, help="size of the large tensor")
    parser.add_argument("--rate-mb", type=float, default=200.0, help="MB/s of the throttled disk")
    counts = {"type": lambda text: [int(count) for count in text.split(",")], "default": [2, 4, 8]}
    parser.add_argument("--replicas", **counts, help="how many, comma-separated")  # type: ignore[arg-type]
    parser.add_argument("--contenders", type=names, default=list(LOADERS), help="comma-separated")
    parser.add_argument(
        "--piece-mib", type=float, default=4.0, help="of transfers and copies alone"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for any one load")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    options = parser.parse_args()
    if options.rounds < 1 or min(options.gib, options.memory_gib, options.rate_mb) <= 0:
        parser.error("--rounds, --gib, --memory-gib and --rate-mb must be positive")
    if OURS_OFF in options.contenders and not takes_exchange():
        options.contenders.remove(OURS_OFF)
    return options


def main() -> None:
    """Runs what the command line asks for; leaves no files but the one of `--json`."""
    options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    scenarios = options.only or list(SCENARIOS)
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
