"""Measures the table of README.md: runs the benchmark behind each row, and prints the rows.

`--quick` takes at most 10 minutes, with fewer rounds of the same sizes; without it, a run takes
half an hour. Rows that this machine cannot measure say why::

    python benchmarks/all.py --quick --dir /where/checkpoints/go

`--json` appends the figures as one line to `benchmarks/history.jsonl`, once for each release, and
names the rows that are 10 % slower than in the last line of the same machine. The throttled disk
needs root (throttled_disk.py), and the row of DeepSpeed needs `deepspeed`.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from async_contenders import OURS as ASYNC_OURS
from async_contenders import STOCK_THREAD
from bench_async import SAVES
from bench_tree import print_table
from contenders import OURS, STOCK_DEFAULT
from convert_rank import CONVERTED, DIRECT
from load_contenders import OURS as LOAD_OURS
from load_contenders import STOCK as LOAD_STOCK
from machine import describe
from report import Pairs, round_pairs
from workloads import COLD, SAVE, WARM

HERE = Path(__file__).resolve().parent
HISTORY = HERE / "history.jsonl"
QUICK_S = 570  # Leaves time to end the benchmark that is running.
SLOWER = 0.9  # Of the last line's ratio: a regression.

Figures = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One benchmark: its program and arguments, rounds by default and with `--quick`."""

    program: str
    arguments: tuple[str, ...]
    rounds: int
    quick_rounds: int
    cuda: bool = False
    package: str = "torch"

    def missing(self) -> str | None:
        """What this machine lacks for it."""
        if self.cuda and not torch.cuda.is_available():
            return "no CUDA device"
        return None if find_spec(self.package) else f"{self.package} is not installed"


CHECKPOINT = ("--workload", "large-bf16", "--contenders", f"{OURS},{STOCK_DEFAULT}")
ASYNC = ("--only", SAVES, "--contender", ASYNC_OURS, "--contender", STOCK_THREAD)
REPLICAS = ("--only", "replicas", "--replicas", "8", "--contenders", f"{LOAD_OURS},{LOAD_STOCK}")
CUDA = ("--device", "cuda")

RUNS = {
    "checkpoint": Run("bench_checkpoint.py", CHECKPOINT, 5, 3),
    "async": Run("bench_async.py", ASYNC, 5, 3),
    "async cuda": Run(
        "bench_async.py", (*ASYNC, *CUDA, "--ranks", "1", "--gib", "2"), 5, 2, cuda=True
    ),
    "checkpoint cuda": Run("bench_checkpoint.py", (*CHECKPOINT, *CUDA), 5, 2, cuda=True),
    "convert": Run("bench_convert.py", (), 5, 1, package="deepspeed"),
    "replicas": Run("bench_load.py", REPLICAS, 3, 2),
}


@dataclass(frozen=True)
class Row:
    """A row of README's table: its first cell, the run of it, and seconds of the run's rounds."""

    label: str
    run: str
    pairs: Callable[[Any], Pairs]


def _checkpoint(phase: str) -> Callable[[Any], Pairs]:
    def pairs(result: Any) -> Pairs:
        samples = [s for s in result["samples"] if s["phase"] == phase]
        return round_pairs(samples, OURS, STOCK_DEFAULT, lambda s: s["total_seconds"])

    return pairs


def _stops(result: Any) -> Pairs:
    samples = [s for s in result["samples"] if s["block"] == SAVES]
    return round_pairs(samples, ASYNC_OURS, STOCK_THREAD, lambda s: s["values"]["call_s"])


def _resumes(result: Any) -> Pairs:
    rounds = zip(result["rounds"][DIRECT], result["rounds"][CONVERTED], strict=True)
    return [(ours["total_s"], theirs["total_s"]) for ours, theirs in rounds]


def _replicas(result: Any) -> Pairs:
    return round_pairs(result["samples"], LOAD_OURS, LOAD_STOCK, lambda s: s["seconds"])


ROWS = [
    Row("save 2 GiB until durable", "checkpoint", _checkpoint(SAVE)),
    Row("load 2 GiB, cold page cache", "checkpoint", _checkpoint(COLD)),
    Row("load 2 GiB, warm page cache", "checkpoint", _checkpoint(WARM)),
    Row("asynchronous save of 1 GiB, 2 ranks: training stops", "async", _stops),
    Row("asynchronous save of 2 GiB of CUDA tensors: training stops", "async cuda", _stops),
    Row("save 2 GiB of CUDA tensors until durable", "checkpoint cuda", _checkpoint(SAVE)),
    Row("load 2 GiB into CUDA tensors, warm page cache", "checkpoint cuda", _checkpoint(WARM)),
    Row(
        "resume 1 GiB of DeepSpeed ZeRO-3 on FSDP2; DeepSpeed: `ds_to_universal`, then its engine",
        "convert",
        _resumes,
    ),
    Row("8 replicas load 1 GiB, storage of 200 MB/s", "replicas", _replicas),
]


def figures(pairs: Pairs) -> Figures:
    """The median ratio of the rounds, and minimum and median seconds of both contenders."""
    ours, theirs = ([pair[which] for pair in pairs] for which in (0, 1))
    return {
        "faster": statistics.median(other / mine for mine, other in pairs),
        "ours_s": [min(ours), statistics.median(ours)],
        "other_s": [min(theirs), statistics.median(theirs)],
        "rounds": len(pairs),
    }


def _result(run: Run, rounds: int, directory: Path, timeout_s: float | None) -> Any:
    """Runs a benchmark, its tables to stderr; returns what it measured, or why it did not."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / run.program), *run.arguments]
        command += ["--rounds", str(rounds), "--dir", folder, "--json", str(file)]
        process = subprocess.Popen(command, stdout=sys.stderr)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "no time left"
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # It removes its files, and ends its ranks.
                process.wait(60)
        return json.loads(file.read_text()) if status == 0 else f"{run.program} failed"


def measure(directory: Path, *, quick: bool) -> dict[str, Figures | str]:
    """Figures for each row of README's table, by its label, or why there are none."""
    end = time.monotonic() + QUICK_S
    results: dict[str, Any] = {}
    for name, run in RUNS.items():
        rounds, left = (run.quick_rounds, end - time.monotonic()) if quick else (run.rounds, None)
        results[name] = run.missing() or _result(run, rounds, directory, left)
    found: dict[str, Figures | str] = {}
    for row in ROWS:
        result = results[row.run]
        pairs = [] if isinstance(result, str) else row.pairs(result)
        reason = result if isinstance(result, str) else "left out, see above"
        found[row.label] = figures(pairs) if pairs else reason
    return found


def regressions(lines: Sequence[str], line: Any) -> list[str]:
    """Rows of `line` that are 10 % slower than in the last of `lines` of the same machine."""
    same = [old for old in map(json.loads, lines) if old["machine"] == line["machine"]]
    before = same[-1] if same else {"rows": {}}
    slower = []
    for label, row in line["rows"].items():
        old = before["rows"].get(label)
        if old is not None and row["faster"] < SLOWER * old["faster"]:
            slower.append(
                f"{label}: {row['faster']:.1f}x, and {old['faster']:.1f}x in {before['version']}"
            )
    return slower


def _cells(label: str, found: Figures | str) -> list[str]:
    if isinstance(found, str):
        return [label, f"not measured: {found}", "", ""]
    times = [" / ".join(f"{value:.2f}" for value in found[who]) for who in ("ours_s", "other_s")]
    return [label, f"**{found['faster']:.1f}x**", *times]


def main() -> None:
    """Runs what the command line asks for, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, at most 10 minutes")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument(
        "--json", action="store_true", help="append the figures to benchmarks/history.jsonl"
    )
    args = parser.parse_args()
    machine = describe(args.dir)
    found = measure(args.dir, quick=args.quick)
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), end="\n\n")
    head = ["workload", "faster by", "torch-ckpt, s (min / median)", "other, s (min / median)"]
    print_table([head, *(_cells(label, row) for label, row in found.items())])
    if not args.json:
        return
    sys.path.append(str(HERE.parent))
    from torch_ckpt import __version__

    line = {
        "version": __version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": ", ".join([machine["cpu"], f"{machine['cores']} cores", machine["kernel"]]),
        "torch": torch.__version__,
        "rows": {label: row for label, row in found.items() if isinstance(row, dict)},
    }
    lines = HISTORY.read_text().splitlines() if HISTORY.exists() else []
    for text in regressions(lines, line):
        print(f"slower than before: {text}")
    HISTORY.write_text("".join(f"{each}\n" for each in [*lines, json.dumps(line)]))


if __name__ == "__main__":
    main()
