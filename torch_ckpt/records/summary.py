"""The numbers of a report: one line about a call, a table of its phases, and the run's trend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from torch_ckpt.records.calls import DURABLE, Call
from torch_ckpt.records.figures import nbytes_text, percent, rate_text, seconds_text

__all__ = ["figures", "heading", "phase_table", "rate_column", "seconds_column", "trend"]


def heading(call: Call) -> str:
    """Returns one line about a call: number of ranks, time, number of bytes, and duration."""
    step = "" if call.step is None else f" of step {call.step}"
    machines = len(set(call.hosts.values()))
    facts = [
        f"{len(call.hosts)} rank{'s' if len(call.hosts) > 1 else ''} on {machines} "
        f"machine{'s' if machines > 1 else ''}",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(call.start)),
    ]
    if call.nbytes:
        rate = "" if call.rate is None else f" at {rate_text(call.rate)}"
        facts.append(nbytes_text(call.nbytes) + rate)
    if call.kind in DURABLE:
        facts.append(f"blocked {seconds_text(call.blocked_s)}")
        durable = call.durable_s
        facts.append("not durable" if durable is None else f"durable in {seconds_text(durable)}")
    else:
        facts.append(f"took {seconds_text(call.seconds)}")
    return f"{call.kind.capitalize()}{step}: {', '.join(facts)}"


def figures(call: Call) -> dict[str, Any]:
    """Returns the numbers of a call and of its phases, in seconds and bytes; for programs."""
    return {
        "kind": call.kind,
        "step": call.step,
        "ranks": len(call.hosts),
        "start": call.start,
        "blocked_s": call.blocked_s,
        "durable_s": call.durable_s,
        "seconds": call.seconds,
        "bytes": call.nbytes,
        "result": call.result,
        "phases": _phases(call),
    }


def _phases(call: Call) -> list[dict[str, Any]]:
    """Returns the numbers of each phase, with the slowest rank and its machine."""
    phases = []
    for phase, parts in call.parts.items():
        seconds = [part.seconds for part in parts.values()]
        slowest = max(parts, key=lambda rank: parts[rank].seconds)
        phases.append(
            {
                "phase": phase,
                "min_s": min(seconds),
                "median_s": median(seconds),
                "max_s": max(seconds),
                "slowest_rank": slowest,
                "slowest_host": parts[slowest].host,
                "share": call.fraction(phase),
                "bytes": sum(part.nbytes or 0 for part in parts.values()),
            }
        )
    return phases


def phase_table(call: Call) -> list[list[str]]:
    """Returns a header and a row for each phase, with the slowest rank and its machine."""
    rows = [["phase", "min s", "median", "max", "slowest rank", "share", "GB/s"]]
    for row in _phases(call):
        nbytes, longest, share = row["bytes"], row["max_s"], row["share"]
        rows.append(
            [
                row["phase"],
                *(seconds_column(row[name]) for name in ("min_s", "median_s", "max_s")),
                f"{row['slowest_rank']} {row['slowest_host']}",
                "-" if share is None else percent(share),
                rate_column(nbytes / longest) if nbytes and longest else "",
            ]
        )
    return rows


def trend(calls: Sequence[Call], last: int | None = None) -> list[dict[str, Any]]:
    """Returns the numbers of each call. ``interval`` is the time since the last of its kind began.

    With ``last``, returns only the last calls.
    """
    lines = []
    first = 0 if last is None else len(calls) - last
    before: dict[str, float] = {call.kind: call.start for call in calls[: max(first, 0)]}
    for call in calls[max(first, 0) :]:
        durable = call.durable_s if call.kind in DURABLE else call.seconds
        lines.append(
            {
                "kind": call.kind,
                "step": call.step,
                "start": call.start,
                "blocked_s": call.blocked_s,
                "durable_s": durable if call.result == "ok" else None,
                "interval_s": call.start - before[call.kind] if call.kind in before else None,
                "gb_per_s": None if call.rate is None else call.rate / 1e9,
                "result": call.result,
            }
        )
        before[call.kind] = call.start
    return lines


def seconds_column(value: float) -> str:
    """Returns seconds for a column of a table."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def rate_column(bytes_per_s: float) -> str:
    """Returns GB/s for a column of a table."""
    return f"{bytes_per_s / 1e9:.2f}" if bytes_per_s < 1e11 else f"{bytes_per_s / 1e9:.0f}"
