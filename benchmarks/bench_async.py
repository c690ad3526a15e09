"""Asynchronous saves with torch-ckpt and its contenders, interleaved, in one run.

How long `async_save` keeps training from going on; the same for the first save of a process; how
long until all is on disk; and how much training time that costs. Prints the machine and raw
speeds first, then a table for each, then what is asked. Two gloo ranks hold 1 GiB together, as row
shards. Takes 5 minutes, 2 GiB of disk and 8 GiB of memory:

    python benchmarks/bench_async.py --dir /data --json result.json

With ``--device cuda --ranks 1``, the tensors and the training are on a GPU. One contender is
measured only then: it copies after the call has returned.

Everything is timed from a barrier to the end on the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from async_contenders import (
    ASYNC,
    ASYNC_CUDA,
    FROM_DISK,
    FROM_MEMORY,
    MEMCPY,
    OURS,
    OURS_AGENT,
    OURS_AGENT_RESERVED,
    OURS_RESERVED,
    OURS_SYNC,
    STOCK_FROM_DISK,
    STOCK_PROCESS,
    STOCK_THREAD,
    TORCH_SAVE,
)
from bench_load import Bar
from bench_tree import print_table
from fragmented_memory import fragmented
from machine import GIB, describe, make_cold, pick_fio, remove_tree
from rank_group import RankGroup

TIMEOUT_S = 300
SAVES, FIRST, TRAINING, RESTART = "saves", "first save", "training", "restart"
FIO = "fio, O_DIRECT"


@dataclass
class Sample:
    """One turn of a contender: what the slowest rank took."""

    block: str
    contender: str
    round: int
    values: dict[str, float]


@dataclass
class Bench:
    """One run."""

    directory: Path
    rounds: int
    gib: float
    rank_count: int
    cuda: bool
    contenders: tuple[str, ...]
    fragments_memory: bool = False
    samples: list[Sample] = field(default_factory=list)

    def add(self, block: str, contender: str, round_number: int, values: dict[str, float]) -> None:
        """Keeps a sample, and shows it on stderr."""
        self.samples.append(Sample(block, contender, round_number, values))
        shown = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        print(f"{block} round {round_number} {contender}: {shown}", file=sys.stderr, flush=True)

    def of(self, block: str, contender: str, value: str) -> list[float]:
        """What was measured, round by round."""
        return [
            sample.values[value]
            for sample in self.samples
            if (sample.block, sample.contender) == (block, contender) and value in sample.values
        ]

    def ratio(
        self, block: str, value: str, contender: str, other: str, of_other: str = ""
    ) -> float | None:
        """The median of the rounds' ratios of one contender to another."""
        pairs = zip(
            self.of(block, contender, value), self.of(block, other, of_other or value), strict=False
        )
        ratios = [mine / theirs for mine, theirs in pairs if theirs > 0]
        return statistics.median(ratios) if ratios else None

    def turns(self, contenders: tuple[str, ...]) -> Iterator[tuple[int, str]]:
        """Rounds of all contenders, each beginning with the next one."""
        for number in range(self.rounds):
            shift = number % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                yield number, contender

    def ranks(self) -> RankGroup:
        """New processes that hold the state."""
        group = RankGroup(
            self.rank_count,
            self.directory,
            cuda=self.cuda,
            timeout_s=TIMEOUT_S,
            program="async_rank.py",
        )
        try:
            group.call("prepare", gib=self.gib)
        except BaseException:
            group.close()
            raise
        return group


def _slowest(answers: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


def _saves(bench: Bench) -> None:
    """Saves in turns, after one of each; only fio is measured alone."""
    fio = pick_fio(bench.directory, block_mib=4, depth=16)
    with bench.ranks() as ranks:
        contenders = (MEMCPY, *bench.contenders, OURS_SYNC, TORCH_SAVE, *([FIO] if fio else []))
        if OURS_AGENT in contenders:
            ranks.call("reserve", contender=OURS_AGENT)
        for contender in contenders:
            if contender not in (MEMCPY, FIO):
                ranks.call("save_by", contender=contender, folder="warm-up")
                if contender != TORCH_SAVE:
                    ranks.call("restore", contender=FROM_DISK, folder="warm-up")
                remove_tree(bench.directory / "warm-up")
        for number, contender in bench.turns(contenders):
            if contender == MEMCPY:
                values = _slowest(ranks.call("memcpy"))
            elif contender == FIO:
                assert fio is not None
                path = bench.directory / "ceiling"
                values = {"durable_s": fio.measure(path, int(bench.gib * GIB), write=True).seconds}
                path.unlink()
            else:
                values = _slowest(ranks.call("save_by", contender=contender, folder="saved"))
                remove_tree(bench.directory / "saved")
            bench.add(SAVES, contender, number, values)
        ranks.call("leave")


def _first(bench: Bench) -> None:
    """The first save of new processes, and then a memcpy in these."""
    contenders = (OURS_RESERVED, OURS_AGENT_RESERVED, OURS, STOCK_THREAD)
    for number, contender in bench.turns(contenders):
        with (
            fragmented() if bench.fragments_memory else contextlib.nullcontext(),
            bench.ranks() as ranks,
        ):
            if contender in (OURS_RESERVED, OURS_AGENT_RESERVED):
                ranks.call("reserve", contender=contender)
            values = _slowest(ranks.call("save_by", contender=contender, folder="saved"))
            copies = [_slowest(ranks.call("memcpy"))["call_s"] for _ in range(4)]
            values["memcpy_s"] = statistics.median(copies[1:])
            if contender == OURS_AGENT_RESERVED:
                ranks.call("leave")
        remove_tree(bench.directory / "saved")
        bench.add(FIRST, contender, number, values)


def _training(bench: Bench) -> None:
    """Training time that a save in the background costs: steps not made, at the rate before it."""
    with bench.ranks() as ranks:
        for contender in bench.contenders:
            ranks.call("train", contender=contender, folder="warm-up", base_s=0.1)
            remove_tree(bench.directory / "warm-up")
        for number, contender in bench.turns(bench.contenders):
            answers = ranks.call("train", contender=contender, folder="saved", base_s=1.5)
            remove_tree(bench.directory / "saved")
            base, during = (min(a[name] for a in answers) for name in ("base", "during"))
            seconds = max(answer["seconds"] for answer in answers)
            lost_s = (1 - during / base) * seconds
            values = {"base": base, "during": during, "seconds": seconds, "lost_s": lost_s}
            bench.add(TRAINING, contender, number, values)
        ranks.call("leave")


def _restart(bench: Bench) -> None:
    """Ranks are killed once they have saved; new ones load."""
    for number in range(bench.rounds):
        with bench.ranks() as ranks:
            ranks.call("save_by", contender=OURS_AGENT, folder="saved")
            ranks.kill()
        with bench.ranks() as ranks:
            contenders = (FROM_MEMORY, FROM_DISK, STOCK_FROM_DISK)
            for contender in contenders[number % 3 :] + contenders[: number % 3]:
                make_cold(bench.directory / "saved")
                values = _slowest(ranks.call("restore", contender=contender, folder="saved"))
                bench.add(RESTART, contender, number, values)
            ranks.call("leave")
        remove_tree(bench.directory / "saved")


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{min(values):.3f} / {statistics.median(values):.3f} / {max(values):.3f}"


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _by(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _contenders(bench: Bench, block: str) -> list[str]:
    return list(dict.fromkeys(s.contender for s in bench.samples if s.block == block))


def _print_tables(bench: Bench) -> None:
    print("\nSaves: `async_save` blocks for so long, and so long passes until all is durable.\n")
    rows = [["contender", "blocks, of a memcpy", "blocks s, min / median / max", "copied s"]]
    rows[0] += ["durable, of our synchronous save", "durable s", "CPU s of a rank"]
    for name in _contenders(bench, SAVES):
        rows.append(
            [
                name,
                _by(bench.ratio(SAVES, "call_s", name, MEMCPY)),
                _spread(bench.of(SAVES, name, "call_s")),
                _spread(bench.of(SAVES, name, "staged_s")),
                _by(bench.ratio(SAVES, "durable_s", name, OURS_SYNC)),
                _spread(bench.of(SAVES, name, "durable_s")),
                _spread(bench.of(SAVES, name, "cpu_s")),
            ]
        )
    print_table(rows)
    print("\nThe first save of new processes.\n")
    rows = [["contender", "blocks, of a memcpy", "blocks s, min / median / max"]]
    for name in _contenders(bench, FIRST):
        ratio = bench.ratio(FIRST, "call_s", name, name, "memcpy_s")
        rows.append([name, _by(ratio), _spread(bench.of(FIRST, name, "call_s"))])
    print_table(rows)
    print("\nTraining time that a save costs once `async_save` has returned.\n")
    rows = [["contender", "lost s, min / median / max", "of stock's thread", "saving for s"]]
    for name in _contenders(bench, TRAINING):
        lost, seconds = (bench.of(TRAINING, name, column) for column in ("lost_s", "seconds"))
        of_stock = bench.ratio(TRAINING, "lost_s", name, STOCK_THREAD)
        rows.append([name, _spread(lost), _by(of_stock), _spread(seconds)])
    print_table(rows)
    print("\nRanks that were killed load what they had saved.\n")
    rows = [["contender", "of a load from memory", "s, min / median / max"]]
    for name in _contenders(bench, RESTART):
        ratio = bench.ratio(RESTART, "restore_s", name, FROM_MEMORY)
        rows.append([name, _by(ratio), _spread(bench.of(RESTART, name, "restore_s"))])
    print_table(rows)


def bars(bench: Bench) -> list[Bar]:
    """What is asked, and what was found."""
    sync = bench.ratio(SAVES, "durable_s", OURS, OURS_SYNC)
    stock = bench.ratio(SAVES, "durable_s", STOCK_THREAD, OURS)
    process = bench.ratio(SAVES, "durable_s", STOCK_PROCESS, OURS)
    lost_s, agent_lost_s = (_median(bench.of(TRAINING, n, "lost_s")) for n in (OURS, OURS_AGENT))
    first = bench.ratio(FIRST, "call_s", OURS_RESERVED, OURS_RESERVED, "memcpy_s")
    unreserved = bench.ratio(FIRST, "call_s", OURS, OURS, "memcpy_s")
    agent_blocks = bench.ratio(SAVES, "call_s", OURS_AGENT, MEMCPY)
    agent_first = bench.ratio(FIRST, "call_s", OURS_AGENT_RESERVED, OURS_AGENT_RESERVED, "memcpy_s")
    agent_sync = bench.ratio(SAVES, "durable_s", OURS_AGENT, OURS_SYNC)
    restart = bench.ratio(RESTART, "restore_s", FROM_DISK, FROM_MEMORY)
    return [
        Bar(
            "async_save blocks, of a memcpy", bench.ratio(SAVES, "call_s", OURS, MEMCPY), 1.25, "x"
        ),
        Bar("the first one, memory reserved", first, 1.5, "x"),
        Bar("the first one, not reserved", unreserved, 3, "x"),
        Bar("durable, of the synchronous save", sync, 1.15, "x"),
        Bar("durable, times as fast as stock's thread", stock, 2, "x", at_least=True),
        Bar("durable, times as fast as stock's process", process, 2, "x", at_least=True),
        Bar("training time that a save costs", lost_s, 0.25, "s"),
        Bar("agent: async_save blocks, of a memcpy", agent_blocks, 1.25, "x"),
        Bar("agent: the first one, memory reserved", agent_first, 1.5, "x"),
        Bar("agent: durable, of the synchronous save", agent_sync, 1.15, "x"),
        Bar("agent: training time that a save costs", agent_lost_s, 0.25, "s"),
        Bar("restored from memory, times as fast as from disk", restart, 3, "x", at_least=True),
    ]


BLOCKS = {SAVES: _saves, FIRST: _first, TRAINING: _training, RESTART: _restart}


def main() -> None:
    """Runs what the command line asks for; leaves no files but the one of `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument(
        "--gib", type=float, default=1.0, help="of the state, on all ranks together"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the tensors")
    parser.add_argument("--ranks", type=int, default=2, help="on a GPU, one for each")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--only", action="append", choices=list(BLOCKS), help="repeatable")
    parser.add_argument(
        "--contender", action="append", choices=ASYNC_CUDA, help="repeatable; default: all"
    )
    parser.add_argument(
        "--fragment-memory",
        action="store_true",
        help="leave no free huge pages during the first saves",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    contenders = tuple(args.contender or (ASYNC_CUDA if cuda else ASYNC))
    if not cuda and (left := set(contenders) - set(ASYNC)):
        parser.error(f"{'; '.join(sorted(left))}: only with --device cuda")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    directory = Path(tempfile.mkdtemp(prefix="bench-async-", dir=args.dir)).resolve()
    machine: dict[str, Any] = describe(directory.parent)
    width = max(map(len, machine))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in machine.items()), flush=True)
    print(f"{args.ranks} ranks, tensors on {args.device}", flush=True)
    bench = Bench(
        *(directory, args.rounds, args.gib, args.ranks, cuda, contenders), args.fragment_memory
    )
    try:
        for name in args.only or list(BLOCKS):
            BLOCKS[name](bench)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _print_tables(bench)
    print("\nAsked\n")
    found = bars(bench)
    print_table([["what", "asked", "found", "verdict"], *(bar.cells() for bar in found)])
    if args.json is not None:
        samples = [asdict(sample) for sample in bench.samples]
        result = {"machine": machine, "samples": samples, "bars": [asdict(bar) for bar in found]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
