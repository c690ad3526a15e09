"""Saves and loads with other values of options, and of the number of read threads, in turns.

Prints the machine, a table of one process, and one of replicas that exchange reads. Needs 1.5 times
`--gib` of disk:

    python benchmarks/bench_options.py --dir /data
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp
from bench_tree import print_table
from contenders import State, silence
from load_contenders import OURS, REPLICATED
from machine import MIB, Meter, Usage, describe, make_cold, make_warm, remove_tree
from rank_group import RankGroup
from rank_loads import LOADERS
from workloads import COLD, SAVE, WARM, large_state, like, require_equal

from torch_ckpt import FastReader, FastSavePlanner, FastWriter
from torch_ckpt.options import READ_THREADS, IoOptions
from torch_ckpt.planning.load_planner import FastLoadPlanner
from torch_ckpt.storage import loading

RANKS = 4


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
        name: The option that is not at its default.
        io: The options.
        threads: Number of read threads.
    """

    name: str
    io: IoOptions
    threads: int = READ_THREADS


DEFAULT = Setting("defaults", IoOptions())
SETTINGS = [
    DEFAULT,
    *(
        Setting(f"buffer_nbytes={mib} MiB", IoOptions(buffer_nbytes=mib * MIB))
        for mib in (8, 16, 256)
    ),
    Setting("direct=False", IoOptions(direct=False)),
    *(Setting(f"{count} read threads", IoOptions(), count) for count in (1, 2, 8)),
]


def _measured(run: Callable[[], object]) -> Usage:
    with Meter() as meter:
        run()
    return meter.usage


def _turn(setting: Setting, state: State, directory: Path) -> dict[str, Usage]:
    """Saves, and loads with a cold and a warm page cache."""
    loaded = like(state)
    found: dict[str, Usage] = {}

    def save() -> None:
        writer = FastWriter(directory, io=setting.io)
        dcp.save(state, storage_writer=writer, planner=FastSavePlanner(), no_dist=True)

    def load() -> None:
        reader = FastReader(directory, io=setting.io)
        dcp.load(loaded, storage_reader=reader, planner=FastLoadPlanner(), no_dist=True)

    if setting.threads == READ_THREADS:
        found[SAVE] = _measured(save)
    else:
        save()
    loading.READ_THREADS = setting.threads
    try:
        make_cold(directory)
        found[COLD] = _measured(load)
        require_equal(state, loaded, setting.name)
        make_warm(directory)
        found[WARM] = _measured(load)
    finally:
        loading.READ_THREADS = READ_THREADS
        remove_tree(directory)
    return found


def _cell(usages: list[Usage]) -> str:
    if not usages:
        return "-"
    seconds, cpu = [usage.seconds for usage in usages], [usage.cpu_s for usage in usages]
    return f"{min(seconds):.2f} / {statistics.median(seconds):.2f}, {statistics.median(cpu):.2f}"


def _exchanges(directory: Path, gib: float, rounds: int) -> list[list[str]]:
    """Cold loads by replicas, with each budget of the exchange in turn; rows of a table."""
    loaders = [name for name in LOADERS if name.startswith("exchange_nbytes=")]
    load = {"kind": REPLICATED, "gib": gib, "folder": "exchanged"}
    found: dict[str, list[float]] = {name: [] for name in loaders}
    with RankGroup(RANKS, directory, timeout_s=600) as ranks:
        ranks.call("save", saved=OURS, **load)
        for number in range(-1, rounds):  # The first warms up.
            for loader in loaders[number % len(loaders) :] + loaders[: number % len(loaders)]:
                make_cold(directory)
                usages = ranks.call("load", loader=loader, check=number < 0, **load)
                if number >= 0:
                    found[loader].append(max(usage["seconds"] for usage in usages))
    spreads = {name: f"{min(s):.2f} / {statistics.median(s):.2f}" for name, s in found.items()}
    return [["", f"{COLD}: s, min / median"], *map(list, spreads.items())]


def _settings(directory: Path, gib: float, rounds: int) -> list[list[str]]:
    """Saves and loads with each setting in turn; rows of a table."""
    state = large_state(gib)
    found: dict[tuple[str, str], list[Usage]] = {}
    turn = functools.partial(_turn, state=state, directory=directory / "checkpoint")
    turn(DEFAULT)  # Warms up.
    for number in range(rounds):
        first = number % len(SETTINGS)
        for setting in SETTINGS[first:] + SETTINGS[:first]:
            for phase, usage in turn(setting).items():
                found.setdefault((setting.name, phase), []).append(usage)
    rows = [["", *(f"{phase}: s, min / median, CPU s" for phase in (SAVE, COLD, WARM))]]
    for setting in SETTINGS:
        cells = (_cell(found.get((setting.name, phase), [])) for phase in (SAVE, COLD, WARM))
        rows.append([setting.name, *cells])
    return rows


TABLES = {
    "settings": (_settings, "in one process, tensors of 32 MiB"),
    "exchange": (_exchanges, f"by {RANKS} replicas, local disk"),
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=list(TABLES), help="repeatable")
    args = parser.parse_args()
    silence()
    for name, value in describe(args.dir).items():
        print(f"{name}: {value}")
    for name in args.only or TABLES:
        rows_of, what = TABLES[name]
        with tempfile.TemporaryDirectory(prefix="bench-options-", dir=args.dir) as folder:
            rows = rows_of(Path(folder), args.gib, args.rounds)
        print(f"\n{args.gib:g} GiB, {what}, {args.rounds} rounds\n")
        print_table(rows)


if __name__ == "__main__":
    main()
