"""What a run prints: tables of what was measured, ratios, and the bars that it is held to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from contenders import (
    MMAP_LOADER,
    OURS,
    OURS_OF_SAFETENSORS,
    OURS_UNVERIFIED,
    STOCK_DEFAULT,
    STOCK_LOADERS,
    STOCK_SAVERS,
)
from machine import MIB
from workloads import ALL_SLICES, COLD, FIO, SAVE, SMALL_COUNT, WARM, Sample

Pairs = list[tuple[float, float]]  # Seconds of a round: ours, the other contender's.

BUFFER_BUDGET_MIB = 64
RSS_SLACK_MIB = 32
FULL_GIB = 2.0
FULL_ROUNDS = 5


def _select(samples: Iterable[Sample], workload: str, phase: str, contender: str) -> list[Sample]:
    wanted = (workload, phase, contender)
    return [s for s in samples if (s.workload, s.phase, s.contender) == wanted]


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def ratio(
    samples: Sequence[Sample], workload: str, phase: str, other: str, *, ours: str = OURS
) -> float | None:
    """Returns how many times as fast `ours` was as `other`: the median of the rounds' ratios.

    For a save, the time is until durable. None where one of them has no sample.
    """
    mine = {s.round: s.usage.total_seconds for s in _select(samples, workload, phase, ours)}
    theirs = {s.round: s.usage.total_seconds for s in _select(samples, workload, phase, other)}
    return _median(theirs[r] / mine[r] for r in mine.keys() & theirs.keys())


def _cpu_ratio(samples: Sequence[Sample], workload: str, phase: str, other: str) -> float | None:
    """Returns how many times as much CPU time `other` used as ours: the median of the rounds."""
    mine = {s.round: s.usage.cpu_s for s in _select(samples, workload, phase, OURS)}
    theirs = {s.round: s.usage.cpu_s for s in _select(samples, workload, phase, other)}
    return _median(theirs[r] / mine[r] for r in mine.keys() & theirs.keys())


def round_pairs(
    samples: Iterable[dict[str, Any]], ours: str, other: str, seconds: Callable[[Any], float]
) -> Pairs:
    """Seconds of both contenders in each round that has both, of samples from a result file."""
    rounds: dict[int, dict[str, float]] = {}
    for sample in samples:
        if sample["contender"] in (ours, other):
            rounds.setdefault(sample["round"], {})[sample["contender"]] = seconds(sample)
    return [(one[ours], one[other]) for one in rounds.values() if {ours, other} <= one.keys()]


# Tables ----------------------------------------------------------------------------------------


def format_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a text table, the first column left-aligned and the others right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *rest]).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def _number(value: float | None, digits: int = 3, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def _us_per_tensor(samples: Iterable[Sample]) -> float | None:
    shares = [s.share_cpu_s for s in samples if s.share_cpu_s is not None]
    cpu_s = _median(shares)
    return None if cpu_s is None else cpu_s / SMALL_COUNT * 1e6


def _row(samples: Sequence[Sample], workload: str, phase: str, contender: str) -> list[str]:
    mine = _select(samples, workload, phase, contender)
    seconds = sorted(s.usage.total_seconds for s in mine)
    median = statistics.median(seconds)
    row = [
        contender,
        _number(_median(s.usage.seconds for s in mine)) if phase == SAVE else "-",
        *(_number(value) for value in (seconds[0], median, seconds[-1])),
        _number(mine[0].nbytes / median / 1e9, 2),
        _number(_median(s.usage.cpu_s for s in mine), 2),
        _number(_median(s.usage.device_read / MIB for s in mine), 1),
        _number(_median(s.usage.syscall_read / MIB for s in mine), 1),
        _number(_median(s.usage.device_written / MIB for s in mine), 1),
        "-" if contender == FIO else _number(max(s.usage.rss_growth for s in mine) / MIB, 1),
    ]
    if workload == "small-4k":
        row.append(_number(_us_per_tensor(mine), 1))
    if workload == "row-slices":
        row.append(_number(_median(s.read_bytes / s.nbytes for s in mine), 2, "x"))
    times = ratio(samples, workload, phase, contender)
    return [*row, "-" if contender == OURS else _number(times, 2, "x")]


def _table(samples: Sequence[Sample], workload: str, phase: str) -> str:
    header = ["contender", "returns s", "min s", "median s", "max s", "GB/s", "CPU s"]
    header += ["device read MiB", "syscall read MiB", "written MiB", "peak RSS +MiB"]
    header += {"small-4k": ["share us/tensor"], "row-slices": ["read/wanted"]}.get(workload, [])
    header.append("ours is faster by")
    names = _distinct(s.contender for s in samples if (s.workload, s.phase) == (workload, phase))
    names.sort(key=lambda name: (name != FIO, name != OURS))
    rows = [_row(samples, workload, phase, name) for name in names]
    note = " (min, median, max: until durable)" if phase == SAVE else ""
    return f"{workload}: {phase}{note}\n{format_rows(header, rows)}"


def _load_line(samples: Sequence[Sample], workload: str) -> str:
    rounds: dict[int, list[float]] = {}
    for sample in samples:
        if sample.workload == workload:
            rounds.setdefault(sample.round, []).append(sample.load_average)
    spans = (f"{min(loads):.1f}-{max(loads):.1f}" for loads in rounds.values())
    return f"{workload}: load average in each round: {', '.join(spans)}"


def _residency_lines(samples: Sequence[Sample]) -> list[str]:
    lines = []
    for s in samples:
        wrong = s.resident is not None and (
            s.resident < 0.99 if s.phase == WARM else s.resident > 0.01
        )
        if wrong:
            lines.append(
                f"warning: {s.workload} round {s.round} {s.phase} {s.contender} began with "
                f"{s.resident:.1%} of the files in the page cache"
            )
    return lines


def format_samples(samples: Sequence[Sample]) -> str:
    """Returns a table for each phase of each workload, with ratios, and warnings after them."""
    parts = []
    for workload in _distinct(s.workload for s in samples):
        phases = _distinct(s.phase for s in samples if s.workload == workload)
        parts += [_table(samples, workload, phase) for phase in phases]
        parts.append(_load_line(samples, workload))
    return "\n\n".join([*parts, *_residency_lines(samples)])


# Bars ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A limit that torch-ckpt is held to.

    Attributes:
        what: What is measured.
        measured: None where this run did not measure it.
        limit: The worst value that passes.
        sense: Whether at least or at most `limit` passes.
        unit: Printed after both numbers.
    """

    what: str
    measured: float | None
    limit: float
    sense: Literal["at least", "at most", "more than"]
    unit: str

    @property
    def verdict(self) -> str:
        """Whether it is met: "PASS", "FAIL" or "not measured"."""
        if self.measured is None:
            return "not measured"
        passes = {
            "at least": self.measured >= self.limit,
            "at most": self.measured <= self.limit,
            "more than": self.measured > self.limit,
        }[self.sense]
        return "PASS" if passes else "FAIL"


def _fastest(samples: Sequence[Sample], phase: str, names: Sequence[str]) -> str:
    """Returns the one of `names` with the least median time; the first where none was measured."""
    medians = {
        name: _median(s.usage.total_seconds for s in _select(samples, "large-bf16", phase, name))
        for name in names
    }
    measured = {name: median for name, median in medians.items() if median is not None}
    return min(measured, key=measured.__getitem__, default=names[0])


def _stock_bars(samples: Sequence[Sample], phase: str, limit: float) -> list[Bar]:
    """Returns the bars against stock DCP: as it comes, and with the fastest settings measured."""
    fastest = _fastest(samples, phase, STOCK_SAVERS if phase == SAVE else STOCK_LOADERS)
    what = "durable save" if phase == SAVE else phase
    return [
        Bar(
            f"{what}, times as fast as {role} ({name})",
            ratio(samples, "large-bf16", phase, name),
            limit,
            "at least",
            "x",
        )
        for role, name in (("stock's default", STOCK_DEFAULT), ("the fastest stock", fastest))
    ]


def _large_bars(samples: Sequence[Sample]) -> list[Bar]:
    def percent_of_fio(phase: str) -> float | None:
        found = ratio(samples, "large-bf16", phase, FIO)
        return None if found is None else 100 * found

    def percent_for_verifying(phase: str) -> float | None:
        found = ratio(samples, "large-bf16", phase, OURS_UNVERIFIED)
        return None if found is None else 100 * (1 / found - 1)

    saved, loaded = percent_of_fio(SAVE), percent_of_fio(COLD)
    cpu_s = _median(s.usage.cpu_s for s in _select(samples, "large-bf16", SAVE, OURS))
    mmap = ratio(samples, "large-bf16", COLD, MMAP_LOADER)
    safetensors = [
        ratio(samples, "large-bf16", WARM, name, ours=OURS_OF_SAFETENSORS)
        for name in ("safetensors", "fastsafetensors")
    ]
    of_best = min((value for value in safetensors if value is not None), default=None)
    return [
        Bar("durable save, of fio's O_DIRECT write rate", saved, 90, "at least", "%"),
        *_stock_bars(samples, SAVE, 3),
        Bar("durable save, CPU time", cpu_s, 0.8, "at most", " s"),
        Bar("cold load, of fio's O_DIRECT read rate", loaded, 90, "at least", "%"),
        *_stock_bars(samples, COLD, 2),
        Bar(f"cold load, times as fast as {MMAP_LOADER} plus copy", mmap, 1, "more than", "x"),
        *_stock_bars(samples, WARM, 3),
        Bar(
            "warm load of a safetensors file, times as fast as others", of_best, 1, "at least", "x"
        ),
        Bar("cold load, time that verifying adds", percent_for_verifying(COLD), 5, "at most", "%"),
        Bar("warm load, time that verifying adds", percent_for_verifying(WARM), 5, "at most", "%"),
    ]


def _transposed_bars(samples: Sequence[Sample]) -> list[Bar]:
    """Stock saves and loads a transposed tensor as it lies in memory; ours is stored by rows."""
    return [
        Bar(
            f"transposed, {phase}, times as little CPU time as {STOCK_DEFAULT}",
            _cpu_ratio(samples, "transposed", phase, STOCK_DEFAULT),
            1,
            "at least",
            "x",
        )
        for phase in (SAVE, WARM)
    ]


def bars(samples: Sequence[Sample]) -> list[Bar]:
    """Returns every bar, with what this run measured for it."""

    def worst(
        workload: str, phases: Sequence[str], value: Callable[[Sample], float]
    ) -> float | None:
        found = [value(s) for phase in phases for s in _select(samples, workload, phase, OURS)]
        return max(found, default=None)

    writer = _us_per_tensor(_select(samples, "small-4k", SAVE, OURS))
    reads = [_us_per_tensor(_select(samples, "small-4k", phase, OURS)) for phase in (COLD, WARM)]
    reader = max((value for value in reads if value is not None), default=None)
    amplification = worst("row-slices", [ALL_SLICES], lambda s: s.read_bytes / s.nbytes)
    budget = BUFFER_BUDGET_MIB + RSS_SLACK_MIB
    save_rss = worst("rss", [SAVE], lambda s: s.usage.rss_growth / MIB)
    load_rss = worst("rss", [COLD, WARM], lambda s: s.usage.rss_growth / MIB)
    return [
        *_large_bars(samples),
        *_transposed_bars(samples),
        Bar("small-4k, writer's CPU time per tensor", writer, 25, "at most", " us"),
        Bar("small-4k, reader's CPU time per tensor", reader, 25, "at most", " us"),
        Bar("row-slices, bytes read per byte wanted", amplification, 1.05, "at most", "x"),
        Bar("rss, growth during a save", save_rss, budget, "at most", " MiB"),
        Bar("rss, growth during a load", load_rss, budget, "at most", " MiB"),
    ]


def format_bars(found: Sequence[Bar], *, gib: float, rounds: int) -> str:
    """Returns the bars with their verdicts; says so where the run is smaller than they ask for."""
    rows = []
    for bar in found:
        required = f"{bar.sense} {bar.limit:g}{bar.unit}"
        rows.append([bar.what, _number(bar.measured, 2, bar.unit), required, bar.verdict])
    text = "bars\n" + format_rows(["bar", "measured", "required", "verdict"], rows)
    if gib != FULL_GIB or rounds < FULL_ROUNDS:
        text += (
            f"\nnote: the bars are set for {FULL_GIB:g} GiB and at least {FULL_ROUNDS} rounds; "
            f"this run used {gib:g} GiB and {rounds}, so its verdicts are only indications"
        )
    return text
