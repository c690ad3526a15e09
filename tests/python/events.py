"""Events of simulated saves and loads, and their record on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch_ckpt.records.event import Event

BEGAN = 1_800_000_000.0
"""When the first call begins."""

SECONDS = {"begin": 0.02, "stage": 0.2, "plan": 0.1, "write": 2.0}
"""How long each phase of a save takes on all ranks."""


def event(rank: int, phase: str, start: float, seconds: float, **values: Any) -> Event:
    """One event: seconds of its start since the first call begins, and its details."""
    call, kind = values.pop("call", "1"), values.pop("kind", "save")
    step, host = values.pop("step", 400), values.pop("host", f"host-{rank // 8}")
    begin = BEGAN + start
    return Event(call, kind, step, rank, host, phase, begin, begin + seconds, values)


def save(
    ranks: int = 4, *, start: float = 0.0, number: int = 1, step: int = 400, **slower: Any
) -> list[Event]:
    """A sound save of 2 GB by each rank; 8 ranks are on one machine.

    ``slower`` gives the seconds of other phases of a rank: ``write_3=20.0``.
    """
    events: list[Event] = []
    named = {"call": str(number), "step": step}
    now = {}
    for rank in range(ranks):
        at = start
        for phase, usual in SECONDS.items():
            seconds = slower.get(f"{phase}_{rank}", usual * (1 + 0.1 * (rank % 3)))
            details = {"bytes": 2_000_000_000} if phase == "write" else {}
            events.append(event(rank, phase, at, seconds, **named, **details))
            at += seconds
        now[rank] = at
    events.append(event(0, "commit", max(now.values()), 0.1, **named))
    return events


def write_record(run: Path, events: Iterable[Event], older: Sequence[Event] = ()) -> Path:
    """Writes the record of a run, and returns the run. Its texts may be odd ones."""
    run.mkdir(parents=True, exist_ok=True)
    for name, written in (("events.jsonl", events), ("events.1.jsonl", older)):
        lines = []
        for each in written:
            named = {name: value for name, value in each._asdict().items() if name != "details"}
            lines.append(json.dumps({**named, **each.details}) + "\n")
        if lines or name == "events.jsonl":
            (run / name).write_text("".join(lines))
    return run
