"""``torch-ckpt report``: where the time of saves and loads went."""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from torch_ckpt.cli.terminal import SOUND, fail, print_columns, printable
from torch_ckpt.filesystems.location import Location
from torch_ckpt.records.calls import Call, calls_of
from torch_ckpt.records.diagnosis import first_sentence
from torch_ckpt.records.figures import nbytes_text, percent, rate_text, seconds_text
from torch_ckpt.records.reading import read_events

__all__ = ["add_to"]

_WIDTH = 80
_HOST_WIDTH = 18
_TREND = 10  # Calls.


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="report where the time of saves and loads went",
        description="Reports on the newest save or load in the record of a run: what to look at "
        "first, a table of its phases (seconds of the fastest, the median and the slowest rank), "
        "and the last saves and loads. 'Share' is the part of the whole that the slowest rank "
        "spent in a phase; GB/s is that of all ranks. 'Blocked' is the time in which training "
        "stood still, 'durable' the time until the commit. Exit status: 0; 3 if the run has no "
        "record, or no such step.",
    )
    parser.add_argument("run", type=Location, help="directory of the run")
    parser.add_argument("--step", type=int, help="report on this step; a save rather than a load")
    parser.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    calls = calls_of(read_events(options.run))
    if not calls:
        return fail(f"the record of {options.run} is empty: nothing was saved or loaded yet")
    call = _chosen(calls, options.step)
    if call is None:
        return fail(f"the record of {options.run} has no save or load of step {options.step}")
    _print_report(call, calls)
    return SOUND


def _chosen(calls: Sequence[Call], step: int | None) -> Call | None:
    """Returns the newest call, or that of a step: its newest save, or else its newest load."""
    if step is None:
        return calls[-1]
    of_step = [call for call in calls if call.step == step]
    saves = [call for call in of_step if call.kind == "save"]
    return (saves or of_step)[-1] if of_step else None


def _print_report(call: Call, calls: Sequence[Call]) -> None:
    sentence = printable(first_sentence(call))
    for line in textwrap.wrap(f"{sentence[:1].upper()}{sentence[1:]}.", _WIDTH):
        print(line)
    print()
    for line in textwrap.wrap(printable(_heading(call)), _WIDTH):
        print(line)
    header = ["phase", "min s", "median", "max", "slowest rank", "share", "GB/s"]
    rows = [header, *(_phase_row(call, phase) for phase in call.parts)]
    print_columns(rows, right=(1, 2, 3, 5, 6))
    print()
    shown = list(calls[-_TREND:])
    print(f"The last {len(shown)} of {len(calls)} saves and loads:" if len(shown) > 1 else "Trend:")
    header = ["", "step", "began", "blocked", "durable", "interval", "GB/s", "result"]
    rows = [header]
    for number, one in enumerate(calls):
        if one in shown:
            before = [other.start for other in calls[:number] if other.kind == one.kind]
            rows.append(_trend_row(one, before[-1] if before else None))
    print_columns(rows, right=(1, 2, 3, 4, 5, 6))


def _heading(call: Call) -> str:
    step = "" if call.step is None else f" of step {call.step}"
    machines = len(set(call.hosts.values()))
    facts = [
        f"{len(call.hosts)} rank{'s' if len(call.hosts) > 1 else ''} on {machines} "
        f"machine{'s' if machines > 1 else ''}",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(call.start)),
    ]
    if call.nbytes:
        facts.append(
            nbytes_text(call.nbytes) + (f" at {rate_text(call.rate)}" if call.rate else "")
        )
    if call.kind == "save":
        facts.append(f"blocked {seconds_text(call.blocked_s)}")
        durable = call.durable_s
        facts.append("not durable" if durable is None else f"durable in {seconds_text(durable)}")
    else:
        facts.append(f"took {seconds_text(call.seconds)}")
    return f"{call.kind.capitalize()}{step}: {', '.join(facts)}"


def _phase_row(call: Call, phase: str) -> list[str]:
    parts = call.parts[phase]
    seconds = [part.seconds for part in parts.values()]
    slowest = max(parts, key=lambda rank: parts[rank].seconds)
    nbytes = sum(part.nbytes or 0 for part in parts.values())
    share = call.share(phase)
    return [
        phase[:12],
        *(_seconds(value) for value in (min(seconds), median(seconds), max(seconds))),
        f"{slowest} {_short(parts[slowest].host)}",
        "-" if share is None else percent(share),
        _gb_per_s(nbytes / max(seconds)) if nbytes and max(seconds) else "",
    ]


def _trend_row(call: Call, before: float | None) -> list[str]:
    durable = call.durable_s if call.kind == "save" else call.seconds
    result = "failed" if call.error else "unfinished" if call.unfinished else "ok"
    return [
        call.kind[:6],
        "-" if call.step is None else str(call.step),
        time.strftime("%d %H:%M:%S", time.localtime(call.start)),
        _seconds(call.blocked_s),
        "-" if durable is None or result != "ok" else _seconds(durable),
        "" if before is None else _seconds(call.start - before),
        _gb_per_s(call.rate) if call.rate else "",
        result,
    ]


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _gb_per_s(rate: float) -> str:
    return f"{rate / 1e9:.2f}" if rate < 1e11 else f"{rate / 1e9:.0f}"


def _short(host: str) -> str:
    """Returns the name of a machine without its domain, and not longer than a column."""
    first = host.partition(".")[0]
    name = host if first.isdigit() else first  # An address has no domain.
    return name if len(name) <= _HOST_WIDTH else f"{name[: _HOST_WIDTH - 2]}.."
