"""A self-contained HTML page about a call: timeline, heat map, tables, and the run's trend."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from torch_ckpt.records.calls import Call, number_of
from torch_ckpt.records.diagnosis import headline
from torch_ckpt.records.event import PHASES
from torch_ckpt.records.summary import heading, phase_table, trend

__all__ = ["page"]

_TICKS_PER_S = 10_000
"""Times are integers in the page, which has 28,672 events of 4,096 ranks. As in page.html."""

_BACKGROUND, _UNFINISHED, _FAILED = 1, 2, 4  # As in page.html.

_SHOWN_ELSEWHERE = ("bytes", "background", "unfinished")

_MAX_TREND = 1000  # Calls.


def page(call: Call, calls: Sequence[Call], *, run: str = "", version: str = "") -> str:
    """Returns the page about a call of a run, with all of its events, and sums for other calls.

    The page names the ``run`` and the ``version`` of the package, if given.
    """
    template = files("torch_ckpt.records").joinpath("page.html").read_text(encoding="utf-8")
    step = "" if call.step is None else f" of step {call.step}"
    # No text in the script may end it.
    facts = {**_data(call, calls), "run": run, "version": version}
    data = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")
    of_run = f", {run.rstrip('/').rpartition('/')[2]}" if run else ""
    title = html.escape(f"{call.kind.capitalize()}{step}{of_run}")
    return template.replace("@TITLE@", title).replace("@DATA@", data)


def _data(call: Call, calls: Sequence[Call]) -> dict[str, Any]:
    sentence, error = headline(call)
    ranks = list(call.hosts)
    hosts = list(dict.fromkeys(call.hosts.values()))
    number_of_host = {host: number for number, host in enumerate(hosts)}
    phases = list(call.parts)
    spans, details = _spans(call, ranks, phases)
    short_hosts = _without_domain(hosts)
    for host, short in zip(hosts, short_hosts, strict=True):
        sentence = sentence.replace(host, short) if short != host else sentence
    return {
        "sentence": f"{sentence[:1].upper()}{sentence[1:]}.",
        "error": error,
        "heading": heading(call),
        "kind": call.kind,
        "seconds": call.seconds,
        "ranks": ranks,
        "hosts": hosts,
        "short_hosts": short_hosts,
        "host_of": [number_of_host[host] for host in call.hosts.values()],
        "phases": phases,
        "texts": {name: f"{name}: {PHASES[name]}" for name in phases if name in PHASES},
        "spans": spans,
        "details": details,
        "table": phase_table(call),
        "trend": trend(calls)[-_MAX_TREND:],
    }


def _spans(
    call: Call, ranks: list[int], phases: list[str]
) -> tuple[dict[str, list[int]], dict[int, dict[str, str]]]:
    """Returns columns of all events, and by event number the details without a column."""
    number_of_rank = {rank: number for number, rank in enumerate(ranks)}
    number_of_phase = {phase: number for number, phase in enumerate(phases)}
    spans: dict[str, list[int]] = {name: [] for name in "rpsdfb"}
    details: dict[int, dict[str, str]] = {}
    for number, event in enumerate(call.events):
        known = event.details
        flags = (
            (_BACKGROUND if known.get("background") else 0)
            | (_UNFINISHED if known.get("unfinished") else 0)
            | (_FAILED if known.get("error") else 0)
        )
        row = (
            number_of_rank[event.rank],
            number_of_phase[event.phase],
            round((event.start - call.start) * _TICKS_PER_S),
            round(event.seconds * _TICKS_PER_S),
            flags,
            round(number_of(event, "bytes") or 0),
        )
        for column, value in zip(spans.values(), row, strict=True):
            column.append(value)
        rest = {name: _text(known[name]) for name in known if name not in _SHOWN_ELSEWHERE}
        if rest:
            details[number] = rest
    return spans, details


def _without_domain(hosts: list[str]) -> list[str]:
    """Returns the names of machines without their common suffix, which begins with a dot."""
    names = [host.split(".") for host in hosts]
    common = 0
    while all(len(name) > common + 1 for name in names) and (
        len({name[-1 - common] for name in names}) == 1
    ):
        common += 1
    if not common or any(host.replace(".", "").isdigit() for host in hosts):  # Addresses.
        return hosts
    return [".".join(name[:-common]) for name in names]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
