"""What the record of a run costs: time of a save, time of a training step, and bytes at scale.

Two ranks save `--gib` in turns with and without the record, in `--rounds` rounds. Such saves differ
by more than the record costs, which does not depend on their bytes. So the ranks also save a few
kilobytes in turns, many times, and the median of the differences is what the record costs.
`--ranks` simulated ranks then report the phases of one save to one recorder. `torch-ckpt report`
reads a record of 44 MB. Prints the machine, and takes two minutes:

    python benchmarks/bench_record.py --dir /data --json result.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_load import Bar, conclude
from machine import GIB, MIB, describe, remove_tree, sync_tree

from torch_ckpt import Run
from torch_ckpt.filesystems.location import Location
from torch_ckpt.records.event_log import EVENTS, EventLog
from torch_ckpt.records.record import Heard, Recorder, note

RANKS = 2
PHASES = ("begin", "stage", "plan", "write", "commit")
DETAILS = {"bytes": 1 << 30, "requests": 256, "waited": 0.123456, "mode": "direct"}
REPORTED_NBYTES = 44_000_000


def save_in_turns(rank: int, folder: str, nbytes: int, rounds: int) -> None:
    """Saves with and without the record; the first rank writes the times to `folder`."""
    Path(folder).mkdir(exist_ok=True)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    state = {f"{rank}.{n}": torch.rand(nbytes // 4 // RANKS // 16) for n in range(16)}
    runs = [
        Run(f"{folder}/{name}", record=name == "recorded", keep_last=1, reuse="off")
        for name in ("recorded", "plain")
    ]
    seconds: list[list[float]] = [[], []]
    steps: list[list[float]] = [[], []]
    for step in range(rounds + 1):
        for which in (0, 1) if step % 2 else (1, 0):
            sync_tree(Path(folder))
            dist.barrier()
            begin = time.perf_counter()
            runs[which].save(step, state)
            if step:  # The first one makes directories.
                seconds[which].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            for _ in range(1000):
                runs[which].should_save(step)
            steps[which].append((time.perf_counter() - begin) / 1000)
    for run in runs:
        run.close()
    if rank == 0:
        Path(f"{folder}/times.json").write_text(json.dumps([seconds, steps]))
    dist.destroy_process_group()


def own_seconds(folder: Path) -> float:
    """Returns the time that the record's functions take for one save, on the first rank."""
    log = EventLog(Location(folder))
    recorder = Recorder(0, log)
    saves = 200
    begin = time.perf_counter()
    for step in range(saves):
        record = recorder.record("save", step)
        with record.current():
            for name in PHASES:
                with record.phase(name):
                    note(**DETAILS)
        record.end()
    seconds = (time.perf_counter() - begin) / saves
    log.close()
    return seconds


class SimulatedCall:
    """A call of many ranks, each of which has reported the phases of one save."""

    number = 0

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def heard(self) -> list[Heard]:
        now = time.monotonic()
        phases = [(0, name, now - 2.123456, now - 1.123456, DETAILS) for name in PHASES]
        return [
            Heard(rank, now, json.dumps([f"node-{rank // 8}", now, phases]).encode())
            for rank in range(1, self._ranks)
        ]

    def late(self) -> None:
        return None


def at_scale(folder: Path, ranks: int, step: int = 100) -> tuple[str, float]:
    """Returns the record of one save of many ranks, and the time to write it."""
    log = EventLog(Location(folder))
    record = Recorder(0, log).record("save", step)
    record.joined(SimulatedCall(ranks))
    begin = time.thread_time()
    lines = record.recorder.lines(record)
    seconds = time.thread_time() - begin
    log.close()
    return lines, seconds


def report_seconds(folder: Path, nbytes: int) -> list[float]:
    """Returns how long `torch-ckpt report` takes for a record of saves of 256 ranks."""
    folder.mkdir()
    with open(folder / EVENTS, "w") as record:
        while record.tell() < nbytes:
            record.write(at_scale(folder, 256, record.tell())[0])
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        command = [sys.executable, "-m", "torch_ckpt", "report", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small-rounds", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=16_384, help="simulated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, value in describe(options.dir).items():
        print(f"{name}: {value}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp(prefix="bench-record-", dir=options.dir))
    try:
        times = []
        for name, saved_nbytes, rounds in (
            ("large", int(options.gib * GIB), options.rounds),
            ("small", 64 << 10, options.small_rounds),
        ):
            mp.spawn(save_in_turns, (str(folder / name), saved_nbytes, rounds), nprocs=RANKS)
            times.append(json.loads((folder / name / "times.json").read_text()))
        ((recorded, plain), (steps, plain_steps)), (small, _) = times
        own_s = own_seconds(folder)
        lines, seconds = at_scale(folder, options.ranks)
        nbytes = len(lines)
        reports = report_seconds(folder / "reported", REPORTED_NBYTES)
    finally:
        remove_tree(folder)
    for name, times in (("recorded", recorded), ("without a record", plain)):
        print(f"save, {name}: {min(times):.3f} / {statistics.median(times):.3f} s (min / median)")
    ratios = [one / other for one, other in zip(recorded, plain, strict=True)]
    print(f"save, ratio in each round: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    more = sorted(one - other for one, other in zip(*small, strict=True))
    low, more_s, high = (more[len(more) * part // 4] for part in (1, 2, 3))
    print(
        f"small save, recorded: {1e3 * statistics.median(small[0]):.2f} ms, without a record: "
        f"{1e3 * statistics.median(small[1]):.2f} ms (medians of {len(more)})"
    )
    print(f"difference: {1e3 * more_s:.2f} ms (quartiles {1e3 * low:.2f} and {1e3 * high:.2f})")
    print(f"the record's own time in a save: {1e6 * own_s:.0f} us")
    print(f"{options.ranks} ranks: {nbytes / MIB:.1f} MiB, {seconds:.2f} CPU s to merge")
    print(
        f"report of a record of {REPORTED_NBYTES / 1e6:.0f} MB: {min(reports):.2f} / "
        f"{statistics.median(reports):.2f} s (min / median)"
    )
    more_ms = 1e3 * (statistics.median(steps) - statistics.median(plain_steps))
    bars = [
        Bar("cost of the record / save", max(more_s, own_s) / statistics.median(plain), 0.01, "x"),
        Bar("training step, more", max(more_ms, 0.0), 0.2, "ms"),
        Bar(f"record of a save of {options.ranks} ranks", nbytes / 1e6, 20.0, "MB"),
        Bar("report of a long record", min(reports), 1.0, "s"),
    ]
    samples: list[Any] = [
        {"recorded": recorded, "plain": plain, "small": small, "own_s": own_s, "nbytes": nbytes}
    ]
    conclude(bars, samples, options)


if __name__ == "__main__":
    main()
