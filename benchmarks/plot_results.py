"""Draws how many times faster torch-ckpt is than stock DCP, from results of the benchmarks.

Each bar is the median of the ratios within the rounds of one run, and each dot one round::

    python benchmarks/bench_checkpoint.py --workload large-bf16 --dir /data --json checkpoint.json
    python benchmarks/bench_async.py --only saves --dir /data --json async.json
    python benchmarks/bench_load.py --only replicas --dir /data --json load.json
    python benchmarks/plot_results.py checkpoint.json async.json load.json --to docs/results.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from async_contenders import OURS as ASYNC_OURS
from async_contenders import STOCK_THREAD
from bench_async import SAVES
from contenders import OURS, STOCK_DEFAULT
from load_contenders import OURS as LOAD_OURS
from load_contenders import STOCK as LOAD_STOCK
from load_turns import THROTTLED
from report import round_pairs
from workloads import COLD, SAVE, WARM

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Rows = Iterator[tuple[str, list[float]]]


def ratios(samples: list[dict[str, Any]], ours: str, stock: str, seconds: Any) -> list[float]:
    """Stock's seconds over ours, of each round that has both."""
    return [other / mine for mine, other in round_pairs(samples, ours, stock, seconds)]


def checkpoint_rows(samples: list[dict[str, Any]]) -> Rows:
    """Saves and loads of one process (bench_checkpoint.py)."""
    for phase, label in (
        (SAVE, "save until durable"),
        (COLD, "load, cold page cache"),
        (WARM, "load, warm page cache"),
    ):
        found = [s for s in samples if (s["workload"], s["phase"]) == ("large-bf16", phase)]
        yield label, ratios(found, OURS, STOCK_DEFAULT, lambda s: s["total_seconds"])


def async_rows(samples: list[dict[str, Any]]) -> Rows:
    """Asynchronous saves of two ranks (bench_async.py)."""
    found = [s for s in samples if s["block"] == SAVES]
    for value, label in (("call_s", "training stop"), ("durable_s", "until durable")):
        read = ratios(found, ASYNC_OURS, STOCK_THREAD, lambda s, v=value: s["values"][v])
        yield f"asynchronous save: {label}", read


def load_rows(samples: list[dict[str, Any]]) -> Rows:
    """Loads of replicas by several ranks, from shared storage (bench_load.py)."""
    shared = [s for s in samples if (s["scenario"], s["storage"]) == ("replicas", THROTTLED)]
    for ranks in sorted({s["ranks"] for s in shared}):
        found = [s for s in shared if s["ranks"] == ranks]
        label = f"load of {ranks} replicas, storage of 200 MB/s"
        yield label, ratios(found, LOAD_OURS, LOAD_STOCK, lambda s: s["seconds"])


def rows_of(path: Path) -> Rows:
    """The rows of one result file, whichever benchmark wrote it."""
    samples = json.loads(path.read_text())["samples"]
    for field, rows in (("phase", checkpoint_rows), ("block", async_rows), ("storage", load_rows)):
        if field in samples[0]:
            return rows(samples)
    raise SystemExit(f"{path}: not a result of bench_checkpoint, bench_async or bench_load")


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, help="files written by --json")
    parser.add_argument("--to", type=Path, required=True, help="picture to write, .svg or .png")
    args = parser.parse_args()
    rows = [(label, found) for path in args.results for label, found in rows_of(path) if found]
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(rows) + 1.2))
    for at, (label, found) in enumerate(reversed(rows)):
        median = statistics.median(found)
        axes.barh(at, median, color="#4477aa", height=0.6)
        axes.plot(found, [at] * len(found), "o", color="#222222", markersize=3)
        axes.annotate(f" {median:.1f}x", (max(found), at), va="center")
        print(f"{label}: {median:.2f}x, rounds {', '.join(f'{r:.2f}' for r in found)}")
    axes.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)])
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.set_xlim(0.9, 80)
    axes.axvline(1, color="#999999", linewidth=1)
    axes.set_xlabel("times faster than stock DCP (logarithmic); bar: median, dots: rounds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.to, metadata={"Date": None} if args.to.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
