"""How bench_load.py measures: state dicts are saved, then loaded in turns by one group of ranks."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_contenders import CONTENDERS, OURS_OFF, STOCK, nbytes_of
from machine import GIB, make_cold
from rank_group import RankError, RankGroup
from throttled_disk import ThrottledDisk, missing

RAW = "raw: O_DIRECT, each byte once"
THROTTLED, LOCAL = "throttled", "local"
TINY_GIB = 1 / 256  # Of the load that every contender begins with, to have its imports done.
SPARE_MEMORY = 2 * GIB


@dataclass(frozen=True)
class Sample:
    """One call of all ranks at once.

    Attributes:
        scenario: Its name on the command line.
        storage: `THROTTLED` or `LOCAL`.
        ranks: How many loaded.
        contender: A key of `CONTENDERS`, `RAW`, or a stage.
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
class Storage:
    """Where ranks load from: a directory, or the same on a throttled disk."""

    saved: Path
    node: Path
    disk: ThrottledDisk | None = None

    @property
    def name(self) -> str:
        """As samples have it."""
        return THROTTLED if self.disk else LOCAL

    def group(self, ranks: int, timeout_s: float, *, cuda: bool) -> RankGroup:
        """Processes that load from there."""
        directory = self.node if self.disk else self.saved
        return RankGroup(ranks, directory, cuda=cuda, disk=self.disk, timeout_s=timeout_s)

    def make_cold(self, group: RankGroup) -> None:
        """Empties the page cache."""
        if self.disk:
            group.call("mount")
        else:
            make_cold(self.saved)

    def make_warm(self) -> None:
        """Fills the page cache, from the local disk."""
        for file in self.saved.glob("*/*"):
            file.read_bytes()

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

    def contenders(self, names: Sequence[str] | None = None) -> list[str]:
        """Those that take part, of `names` where given."""
        return [name for name in self.options.contenders if names is None or name in names]


def note(bench: Bench, text: str) -> None:
    """Keeps why something was left out, and shows it at once."""
    bench.left_out.append(text)
    print(text, file=sys.stderr, flush=True)


@contextmanager
def saved_state(
    bench: Bench, kind: str, gib: float, *, ranks: int, formats: list[str]
) -> Iterator[Path]:
    """Saves a state dict and a tiny one like it; yields the directory of the folders."""
    directory = bench.directory / "saved"
    directory.mkdir()
    try:
        with RankGroup(ranks, directory, timeout_s=bench.options.timeout_s) as group:
            if OURS_OFF in bench.options.contenders and not group.call("takes_exchange")[0]:
                bench.options.contenders.remove(OURS_OFF)
            for saved in formats:
                for size in (gib, TINY_GIB):
                    arguments = {"kind": kind, "gib": size, "folder": folder_of(saved, size)}
                    group.call("save", saved=saved, **arguments)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def folder_of(saved: str, gib: float) -> str:
    """Where a state dict is saved, in the directory of all."""
    return f"{saved}-{gib:g}"


@contextmanager
def open_storages(bench: Bench, saved: Path, names: set[str]) -> Iterator[dict[str, Storage]]:
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
                note(bench, f"no throttled disk: {why}")
        yield found


class Turns:
    """Ranks that load for one contender after another; where one fails, the ranks start anew."""

    def __init__(
        self,
        bench: Bench,
        scenario: str,
        storage: Storage,
        ranks: int,
        kind: str,
        gib: float,
        *,
        is_warm: bool = False,
    ) -> None:
        self.bench, self.scenario, self.storage, self.ranks = bench, scenario, storage, ranks
        self.kind, self.gib, self.is_warm = kind, gib, is_warm
        self.nbytes = nbytes_of(kind, gib)
        self.group = self._start()

    def _start(self) -> RankGroup:
        options = self.bench.options
        return self.storage.group(self.ranks, options.timeout_s, cuda=options.device == "cuda")

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.group.close()

    def leave_out(self, contender: str, why: object) -> None:
        """Says why there are no figures of a contender."""
        where = f"{self.scenario}, {self.storage.name}, {self.ranks} ranks"
        note(self.bench, f"{where}: no {contender}: {why}")

    def fit(self, contenders: list[str]) -> list[str]:
        """Those that load a tiny state dict, and whose memory this machine has."""
        fit = []
        for name in contenders:
            needed = int(self.ranks * self.nbytes * (1 + CONTENDERS[name].temporary))
            spare = available_memory() - SPARE_MEMORY
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
        """One load by all ranks, checked in the first rounds; None, and why, if it fails."""
        gib = gib or self.gib
        arguments: dict[str, Any] = {
            "loader": contender,
            "folder": folder_of(CONTENDERS[contender].saved, gib),
        }
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
        if self.is_warm:
            self.storage.make_warm()
        else:
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


def available_memory() -> int:
    """Bytes that processes could still have."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


def load_in_turns(turns: Turns, contenders: list[str]) -> None:
    """All rounds; each begins with the next contender."""
    raw_folder = folder_of(CONTENDERS[contenders[0]].saved, turns.gib)
    contenders = [RAW, *turns.fit(contenders)]
    for round_number in range(turns.bench.options.rounds):
        shift = round_number % len(contenders)
        for name in contenders[shift:] + contenders[:shift]:
            if name == RAW:
                turns.stage(RAW, "read_raw", round_number, folder=raw_folder)
            elif turns.load(name, round_number=round_number) is None:
                contenders = [other for other in contenders if other != name]
