"""What it costs training to save to a local directory, and to promote each step from there.

One process trains on one thread, and saves asynchronously: not at all, to a local directory, and to
a local directory whose steps are promoted at a limited rate; the last two by a thread, and by the
agent. The contenders take turns; a round before the others does not count. Both directories are on
the same disk. Prints the machine, how long training stops in each save, what the saves cost
training in all, and the rates of promotion. Takes 8 minutes, and 6 times `--gib` of disk:

    python benchmarks/bench_tiers.py --dir /data --json result.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_load import Bar, conclude
from bench_tree import print_table
from machine import describe, remove_tree, sync_tree

from torch_ckpt import Run

NONE, LOCAL, PROMOTED = "no saves", "local", "local, promoted"
AGENT_LOCAL, AGENT_PROMOTED = "agent, local", "agent, local, promoted"
PROMOTING = {PROMOTED: LOCAL, AGENT_PROMOTED: AGENT_LOCAL}  # -> the same without promotion.
CONTENDERS = (NONE, LOCAL, PROMOTED, AGENT_LOCAL, AGENT_PROMOTED)
SIZE = 768  # Rows and columns of the matrices that training multiplies.


@dataclass(frozen=True)
class Sample:
    """One training. Times are in seconds; `promote_s` is of the last step, from its save on."""

    contender: str
    round: int
    train_s: float
    stop_s: list[float]
    promote_s: float


def train(folder: Path, contender: str, number: int, options: argparse.Namespace) -> Sample:
    """Trains for a fixed number of steps, and saves a few times."""
    numel = int(options.gib * (1 << 30)) // 4 // 16
    state = {f"w{i}": torch.full((numel,), float(i)) for i in range(16)}
    weights, inputs = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE)
    every = options.steps // options.saves
    is_promoted = contender in PROMOTING
    arguments: dict[str, Any] = {"keep_last": 2, "asynchronous": True}
    arguments["agent"] = contender in (AGENT_LOCAL, AGENT_PROMOTED)
    if is_promoted:
        arguments |= {"local": folder / "local", "promote_bytes_per_s": options.rate * 10**6}
    run = Run(folder / ("run" if is_promoted else "local"), **arguments)
    run.reserve(state)
    run.save(1, state)  # Makes the memory for staging.
    run.wait(promoted=True)
    sync_tree(folder)
    stops = []
    begin = time.perf_counter()
    for step in range(2, options.steps + 2):
        inputs = torch.tanh(inputs @ weights)
        if step % every == 0:
            for tensor in state.values():
                tensor += 1  # Otherwise the files of the former step are linked.
        if contender != NONE and step % every == 0:
            saves = time.perf_counter()
            run.save(step, state)
            stops.append(time.perf_counter() - saves)
    train_s = time.perf_counter() - begin
    run.wait(promoted=True)
    for tensor in state.values():
        tensor += 1
    run.save(options.steps + 2, state)
    run.wait()
    saved = time.perf_counter()
    run.wait(promoted=True)
    promote_s = time.perf_counter() - saved
    run.close()
    return Sample(contender, number, train_s, stops, promote_s)


def median(samples: Sequence[Sample], contender: str, value: Any) -> float:
    """The median of a value of the samples of a contender."""
    return statistics.median(value(s) for s in samples if s.contender == contender)


def report(samples: Sequence[Sample], options: argparse.Namespace) -> list[Bar]:
    """Prints what was measured, and returns the bars."""
    rows = [["contender", "training", "stop of a save, median", "shortest", "longest"]]
    for contender in CONTENDERS:
        stops = [stop for s in samples if s.contender == contender for stop in s.stop_s]
        row = [contender, f"{median(samples, contender, lambda s: s.train_s):.2f} s"]
        for value in (statistics.median, min, max):
            row.append(f"{value(stops) * 1000:.0f} ms" if stops else "-")
        rows.append(row)
    print_table(rows)

    def stop(contender: str) -> float:
        return median(samples, contender, lambda s: statistics.median(s.stop_s))

    def cost(contender: str) -> float:
        """What the saves of a round cost training, by the training without saves beside it."""
        base = {s.round: s.train_s for s in samples if s.contender == NONE}
        return median(samples, contender, lambda s: s.train_s - base[s.round])

    nbytes = options.gib * (1 << 30)
    bars = []
    print()
    for promoted, local in PROMOTING.items():
        rate = nbytes / median(samples, promoted, lambda s: s.promote_s) / 10**6
        print(f"cost of {options.saves} saves: {local} {cost(local):.2f} s, {promoted} ", end="")
        print(f"{cost(promoted):.2f} s of {median(samples, NONE, lambda s: s.train_s):.2f} s")
        print(f"rate of promotion, {promoted}: {rate:.0f} MB/s, limit {options.rate} MB/s")
        whose = f"{promoted} / {local}"
        bars += [
            Bar(f"training stops, {whose}", stop(promoted) / stop(local), 1.05, "x"),
            Bar(f"cost of saves, {whose}", cost(promoted) / cost(local), 1.2, "x"),
            Bar(f"rate / limit, {promoted}", rate / options.rate, 1.1, "x"),
            Bar(f"rate / limit, {promoted}", rate / options.rate, 0.9, "x", at_least=True),
        ]
    print()
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--rate", type=int, default=200, help="limit of promotion, MB/s")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in describe(options.dir).items():
        print(f"{name}: {value}")
    samples = []
    for number in range(-1, options.rounds):
        turn = number % len(CONTENDERS)
        for contender in CONTENDERS[turn:] + CONTENDERS[:turn]:
            folder = Path(tempfile.mkdtemp(prefix="bench-tiers-", dir=options.dir))
            try:
                sample = train(folder, contender, number, options)
            finally:
                remove_tree(folder)
            print(f"{number} {contender}: {sample.train_s:.2f} s", file=sys.stderr, flush=True)
            if number >= 0:
                samples.append(sample)
    conclude(report(samples, options), [asdict(sample) for sample in samples], options)


if __name__ == "__main__":
    main()
