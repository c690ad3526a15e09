"""``torch-ckpt report``: where the time of saves and loads went."""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch_ckpt
from torch_ckpt.cli.arguments import add_json, path_of
from torch_ckpt.cli.terminal import SOUND, fail, print_columns, print_json, printable, width
from torch_ckpt.filesystems.location import Location
from torch_ckpt.records.calls import Call, calls_of
from torch_ckpt.records.diagnosis import first_sentence
from torch_ckpt.records.exports import chrome_trace, prometheus_text
from torch_ckpt.records.page import page
from torch_ckpt.records.reading import missing_replicas, read_events
from torch_ckpt.records.summary import (
    figures,
    heading,
    phase_table,
    rate_column,
    seconds_column,
    trend,
)

__all__ = ["add_to"]

_NARROW = 80  # Columns.
_HOST_WIDTH = 18  # In so many columns.
_PHASE_WIDTH = 12
_TREND = 10  # Calls.


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="report where the time of saves and loads went",
        description="Reports on the newest save or load in the record of a run: what to examine "
        "first, a table of its phases (seconds of the fastest, the median and the slowest rank), "
        "and the last saves and loads. 'Share' is the part of the whole that the slowest rank "
        "spent in a phase; GB/s is that of all ranks. 'Blocked' is the time in which training "
        "stood still, 'durable' the time until the commit. Exit status: 0; 3 if the run has no "
        "record, or no such step.",
    )
    parser.add_argument("run", type=path_of, help="directory of the run")
    parser.add_argument("--step", type=int, help="report on this step; a save rather than a load")
    parser.add_argument("--html", type=path_of, metavar="FILE", help="write a page for a browser")
    parser.add_argument(
        "--trace", type=path_of, metavar="FILE", help="write a trace for Perfetto or Chrome"
    )
    parser.add_argument(
        "--prometheus",
        type=path_of,
        metavar="FILE",
        help="write gauges of the newest save and load for node_exporter",
    )
    add_json(parser)
    parser.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    events = read_events(options.run)
    calls = calls_of(events)
    if not calls:
        return fail(f"the record of {options.run} is empty: nothing was saved or loaded yet")
    call = _chosen(calls, options.step)
    if call is None:
        return fail(f"the record of {options.run} has no save or load of step {options.step}")
    unreplicated = missing_replicas(reversed(events))
    if options.json:
        facts = {"run": str(options.run), "sentence": first_sentence(call)}
        print_json(
            {**facts, "unreplicated": unreplicated or None, **figures(call), "trend": trend(calls)}
        )
    else:
        _print_report(call, calls)
        if unreplicated:
            print()
            for line in textwrap.wrap(printable(f"Warning: {unreplicated}."), width()):
                print(line)
    if options.html is not None:
        run, version = str(options.run), torch_ckpt.__version__
        _write(options.html, page(call, calls, run=run, version=version))
    if options.trace is not None:
        _write(options.trace, chrome_trace(call))
    if options.prometheus is not None:
        _write(options.prometheus, prometheus_text(calls, str(options.run)))
    return SOUND


def _write(file: Location, text: str) -> None:
    file.replace(text.encode(errors="replace"), sync=False)


def _chosen(calls: Sequence[Call], step: int | None) -> Call | None:
    """Returns the newest call, or for a step its newest save, or else its newest load."""
    if step is None:
        return calls[-1]
    of_step = [call for call in calls if call.step == step]
    saves = [call for call in of_step if call.kind == "save"]
    return (saves or of_step)[-1] if of_step else None


def _print_report(call: Call, calls: Sequence[Call]) -> None:
    sentence = printable(first_sentence(call))
    for line in textwrap.wrap(f"{sentence[:1].upper()}{sentence[1:]}.", width()):
        print(line)
    print()
    for line in textwrap.wrap(printable(heading(call)), width()):
        print(line)
    header, *rows = phase_table(call)
    for row in rows:
        rank, host = row[4].split(" ", 1)
        row[0], row[4] = (
            row[0][:_PHASE_WIDTH],
            f"{rank} {_short(host, _HOST_WIDTH + max(width() - _NARROW, 0))}",
        )
    print_columns([header, *rows], right=(1, 2, 3, 5, 6))
    print()
    shown = trend(calls, _TREND)
    print(f"The last {len(shown)} of {len(calls)} saves and loads:")
    header = ["", "step", "began", "blocked", "durable", "interval", "GB/s", "result"]
    print_columns([header, *map(_trend_row, shown)], right=(1, 2, 3, 4, 5, 6))


def _trend_row(line: Mapping[str, Any]) -> list[str]:
    blocked, durable, interval, rate = (
        line[name] for name in ("blocked_s", "durable_s", "interval_s", "gb_per_s")
    )
    return [
        line["kind"][:7],
        "-" if line["step"] is None else str(line["step"]),
        time.strftime("%d %H:%M:%S", time.localtime(line["start"])),
        seconds_column(blocked),
        "-" if durable is None else seconds_column(durable),
        "" if interval is None else seconds_column(interval),
        "" if rate is None else rate_column(rate * 1e9),
        line["result"],
    ]


def _short(host: str, most: int) -> str:
    """Returns the name of a machine without its domain, and not longer than a column.

    A long name is shortened in the middle, because its end contains the number.
    """
    first = host.partition(".")[0]
    name = host if first.isdigit() else first  # An address has no domain.
    return name if len(name) <= most else f"{name[: most // 3]}..{name[most // 3 + 2 - most :]}"
