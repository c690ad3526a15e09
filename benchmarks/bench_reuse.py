"""What a save costs if most of the state has not changed since the last one, and if all of it has.

One process saves a frozen model beside a few tensors that change (as LoRA does), and a state of the
same size of which everything changes. Contenders take turns: a run with `reuse="off"` and one with
`"auto"`, both directly and asynchronously. A round before the others does not count. Prints the
machine, the times of saves, how long training stops, and the bytes written to the bytes changed.
Takes 3 minutes, and 4 times `--gib` of disk:

    python benchmarks/bench_reuse.py --dir /data --json result.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench_load import Bar, conclude
from bench_tree import print_table
from machine import GIB, MIB, describe, remove_tree, sync_tree

from torch_ckpt import Run
from torch_ckpt.runs.step_saves import Reuse

FROZEN, CHANGING = "mostly frozen", "all changes"
CHANGED_NBYTES = 20 * MIB
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sample:
    """The saves of one run. `first_s` is the first save; bytes are those of the last step alone."""

    state: str
    reuse: Reuse
    asynchronous: bool
    round: int
    first_s: float
    save_s: list[float]
    stop_s: list[float]
    changed_nbytes: int
    written_nbytes: int


def state_of(kind: str, nbytes: int) -> tuple[State, State]:
    """A state, and the part of it that changes."""
    tensors = 32
    state = {f"base.{n}": torch.rand(nbytes // 4 // tensors) for n in range(tensors)}
    if kind == CHANGING:
        return state, state
    tuned = {f"lora.{n}": torch.rand(CHANGED_NBYTES // 4 // tensors) for n in range(tensors)}
    return state | tuned, tuned


def written(step: Path) -> int:
    """Bytes of the files of a step that no other step has."""
    stats = [file.stat() for file in step.iterdir()]
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


def train(
    folder: Path, kind: str, reuse: Reuse, asynchronous: bool, number: int, nbytes: int, saves: int
) -> Sample:
    """Saves a few steps, between which the state changes."""
    state, changing = state_of(kind, nbytes)
    save_s, stop_s = [], []
    with Run(folder, keep_last=2, asynchronous=asynchronous, reuse=reuse) as run:
        run.reserve(state)
        for step in range(saves + 1):
            for tensor in changing.values():
                tensor += 1
            sync_tree(folder)
            begin = time.perf_counter()
            run.save(step, state)
            stop_s.append(time.perf_counter() - begin)
            run.wait()
            save_s.append(time.perf_counter() - begin)
        last = written(folder / f"step-{saves}")
    changed = sum(tensor.nbytes for tensor in changing.values())
    sample = Sample(
        *(kind, reuse, asynchronous, number, save_s[0], save_s[1:], stop_s[1:], changed, last)
    )
    print(f"{number} {kind}, {reuse}: {statistics.median(save_s[1:]):.3f} s", file=sys.stderr)
    return sample


def contenders() -> Iterator[tuple[str, bool, Reuse]]:
    """State, whether saves are asynchronous, and reuse; those to compare one after another."""
    for kind in (FROZEN, CHANGING):
        for asynchronous in (False, True):
            yield kind, asynchronous, "off"
            yield kind, asynchronous, "auto"


def report(samples: list[Sample]) -> list[Bar]:
    """Prints what was measured, and returns the bars."""

    def each(kind: str, asynchronous: bool, reuse: Reuse, *, stops: bool = False) -> list[float]:
        chosen = [
            sample
            for sample in samples
            if (sample.state, sample.asynchronous, sample.reuse) == (kind, asynchronous, reuse)
        ]
        return [value for s in chosen for value in (s.stop_s if stops else s.save_s)]

    rows = [["state", "saves", "reuse", "save, min", "median", "training stops, min", "median"]]
    for kind, asynchronous, reuse in contenders():
        cells = [kind, "asynchronous" if asynchronous else "direct", reuse]
        for stops in (False, True):
            values = each(kind, asynchronous, reuse, stops=stops)
            cells += [f"{min(values):.3f} s", f"{statistics.median(values):.3f} s"]
        rows.append(cells)
    print_table(rows)

    def ratio(kind: str, asynchronous: bool, *, stops: bool = False) -> float:
        on, off = (
            statistics.median(each(kind, asynchronous, reuse, stops=stops))
            for reuse in ("auto", "off")
        )
        return on / off

    frozen = [s for s in samples if s.state == FROZEN and s.reuse == "auto"]
    bytes_ratio = max(s.written_nbytes / s.changed_nbytes for s in frozen)
    return [
        Bar("mostly frozen: bytes written / changed", bytes_ratio, 1.05, "x"),
        Bar("mostly frozen: time of a save / without reuse", ratio(FROZEN, False), 0.15, "x"),
        Bar("mostly frozen: training stops / without", ratio(FROZEN, True, stops=True), 1.0, "x"),
        Bar("all changes: time of a save / without reuse", ratio(CHANGING, False), 1.02, "x"),
        Bar("all changes: training stops / without", ratio(CHANGING, True, stops=True), 1.0, "x"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=3, help="of each run, after the first one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, value in describe(options.dir).items():
        print(f"{name}: {value}")
    samples = []
    turns = list(contenders())
    for number in range(-1, options.rounds):
        for begin in range(0, len(turns), 2):
            pair = turns[begin : begin + 2]
            for kind, asynchronous, reuse in pair if number % 2 else reversed(pair):
                folder = Path(tempfile.mkdtemp(prefix="bench-reuse-", dir=options.dir))
                nbytes = int(options.gib * GIB)
                try:
                    sample = train(
                        *(folder, kind, reuse, asynchronous, number, nbytes, options.saves)
                    )
                finally:
                    remove_tree(folder)
                if number >= 0:
                    samples.append(sample)
    conclude(report(samples), [asdict(sample) for sample in samples], options)


if __name__ == "__main__":
    main()
