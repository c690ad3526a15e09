"""Call: the events of one save or load, summed by phase and rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_ckpt.records.event import PHASES, Event

__all__ = [
    "AFTERWARDS",
    "DURABLE",
    "Call",
    "Part",
    "calls_of",
    "error_of",
    "in_flight",
    "number_of",
]

AFTERWARDS = "promote"
"""A phase outside the save: the step is copied from the local directory once it is durable."""

DURABLE = ("save", "publish")
"""Kinds of calls that end with a commit."""

_MAX_NUMBER = 1e30  # A larger integer would be no float.

_COMMITS = ("commit", "persist")

_SILENT_S = 20.0


@dataclass
class Part:
    """One rank's part in one phase of a call: the sum of its events.

    ``seconds`` is the sum over all events; ``start`` and ``end`` enclose them. Values that no event
    states are ``None``.
    """

    host: str
    start: float
    end: float
    seconds: float = 0.0
    nbytes: float | None = None
    requests: float | None = None
    waited: float | None = None
    waited_for_ranks: float | None = None
    mode: str | None = None
    unfinished: bool = False

    @property
    def own_seconds(self) -> float:
        """Seconds without waits for other ranks."""
        return max(self.seconds - (self.waited_for_ranks or 0), 0.0)

    @property
    def rate(self) -> float | None:
        """Bytes per second; ``None`` if it moved no bytes."""
        return self.nbytes / self.seconds if self.nbytes and self.seconds else None

    def add(self, event: Event) -> None:
        """Adds an event."""
        details = event.details
        self.start, self.end = min(self.start, event.start), max(self.end, event.end)
        self.seconds += event.seconds
        for detail in details:
            if (name := _NUMBERS.get(detail)) is not None:
                if (value := number_of(event, detail)) is not None:
                    setattr(self, name, (getattr(self, name) or 0) + value)
            elif detail == "mode":
                self.mode = str(details["mode"])
        self.unfinished = self.unfinished or bool(details.get("unfinished"))


_NUMBERS = {
    "bytes": "nbytes",
    "requests": "requests",
    "waited": "waited",
    "waited_for_ranks": "waited_for_ranks",
}
"""Detail of an event -> attribute of a part."""


def number_of(event: Event, detail: str) -> float | None:
    """Returns a detail of an event if it is a non-negative number."""
    value: Any = event.details.get(detail)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 <= value < _MAX_NUMBER else None


def error_of(event: Event) -> str | None:
    """Returns the error of an event in one line; ``None`` without one."""
    error = event.details.get("error")
    return " ".join(str(error).split()) if error else None


class Call:
    """One save or load: its events, except those that later lines supersede.

    Args:
        events: Events of one call, in the order of their lines; at least one.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        newest = {(event.rank, event.phase): number for number, event in enumerate(events)}
        self.events = [
            event
            for number, event in enumerate(events)
            if not event.details.get("unfinished") or newest[event.rank, event.phase] == number
        ]
        self.name = events[0].call
        self.kind = events[0].kind
        self.step = next((e.step for e in reversed(self.events) if e.step is not None), None)
        self.start = min(event.start for event in self.events)

    @cached_property
    def parts(self) -> dict[str, dict[int, Part]]:
        """Phase -> rank -> its part, in the order of :data:`PHASES`; others follow by time."""
        found: dict[str, dict[int, Part]] = {}
        for event in self.events:
            ranks = found.setdefault(event.phase, {})
            if event.rank not in ranks:
                ranks[event.rank] = Part(event.host, event.start, event.end)
            ranks[event.rank].add(event)
        known = list(PHASES)
        starts = {phase: min(p.start for p in ranks.values()) for phase, ranks in found.items()}

        def order(phase: str) -> tuple[int, float]:
            return (known.index(phase) if phase in PHASES else len(known), starts[phase])

        return {phase: dict(sorted(found[phase].items())) for phase in sorted(found, key=order)}

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Rank -> its machine, in the order of ranks."""
        return dict(sorted((event.rank, event.host) for event in self.events))

    @cached_property
    def durable_s(self) -> float | None:
        """Seconds until the end of the commit; ``None`` before, and without one."""
        if self.kind not in DURABLE or self.unfinished or self.error:
            return None
        ends = [event.end for event in self.events if event.phase in _COMMITS]
        return max(ends) - self.start if ends else None

    @cached_property
    def seconds(self) -> float:
        """Total seconds: until it was durable, or else until its last event."""
        if self.durable_s is not None:
            return self.durable_s
        ends = [event.end for event in self.events if event.phase != AFTERWARDS]
        return max(ends, default=self.start) - self.start

    @cached_property
    def blocked_s(self) -> float:
        """Seconds in which training was blocked, on the rank with the most.

        A rank is also blocked between its phases, when it waits for others.
        """
        ends: dict[int, float] = {}
        begins: dict[int, float] = {}
        for event in sorted(self.events, key=lambda event: event.start):
            if not event.details.get("background") and event.phase != "message":
                begins.setdefault(event.rank, event.start)
                ends[event.rank] = max(ends.get(event.rank, event.end), event.end)
        return max((ends[rank] - begins[rank] for rank in ends), default=0.0)

    @cached_property
    def nbytes(self) -> float:
        """Bytes that all ranks wrote or read; bytes that they copied, if the agent writes."""

        def moved(*phases: str) -> float:
            events = (event for event in self.events if event.phase in phases)
            return sum(number_of(event, "bytes") or 0 for event in events)

        return moved("write", "read", "persist") or moved("stage")

    @property
    def rate(self) -> float | None:
        """Bytes per second, of all ranks and the whole call."""
        return self.nbytes / self.seconds if self.nbytes and self.seconds else None

    @cached_property
    def failures(self) -> list[Event]:
        """The phases that ended with an error, by their ends.

        Those of a load before its last plan do not count: it passed over a damaged step.
        """
        planned = {e.rank: e.start for e in self.events if e.phase == "plan" and e.kind == "load"}
        failed = [
            event
            for event in self.events
            if error_of(event)
            and event.phase != AFTERWARDS
            and event.end > planned.get(event.rank, -math.inf)
        ]
        return sorted(failed, key=lambda event: event.end)

    @property
    def error(self) -> str | None:
        """The first error of the call, if any."""
        return error_of(self.failures[0]) if self.failures else None

    @cached_property
    def open_phases(self) -> list[str]:
        """The phases that had not ended on some rank when the record was written."""
        return [p for p, ranks in self.parts.items() if any(r.unfinished for r in ranks.values())]

    @cached_property
    def unfinished(self) -> bool:
        """Whether a phase had not ended when the record was written."""
        return any(e.details.get("unfinished") and e.phase != AFTERWARDS for e in self.events)

    @property
    def result(self) -> str:
        """``"ok"``, ``"failed"``, ``"unfinished"`` or ``"not durable"``.

        ``"not durable"`` is a save without a recorded commit: its process was killed, it is in
        progress, or it is in memory only.
        """
        if self.error or self.unfinished:
            return "failed" if self.error else "unfinished"
        return "ok" if self.kind not in DURABLE or self.durable_s is not None else "not durable"

    def of(self, phase: str) -> list[Part]:
        """Returns each rank's part in a phase, in the order of ranks."""
        return list(self.parts.get(phase, {}).values())

    def fraction(self, phase: str) -> float | None:
        """Returns the fraction of the whole time that a phase took on its slowest rank.

        Returns ``None`` if the phase began after the call had ended.
        """
        parts = self.of(phase)
        if phase == AFTERWARDS or not self.seconds:
            return None
        if min(part.start for part in parts) >= self.start + self.seconds:
            return None
        return min(max(part.seconds for part in parts) / self.seconds, 1.0)


def calls_of(events: Iterable[Event]) -> list[Call]:
    """Returns the calls of a record, in the order in which they began."""
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event.call, []).append(event)
    return sorted(map(Call, found.values()), key=lambda call: call.start)


def in_flight(events: Iterable[Event], now_s: float) -> list[Call]:
    """Returns the calls that have probably not ended at a time, in seconds since 1970.

    The record has a line every few seconds of each phase in progress. Without one for
    ``_SILENT_S``, the processes have probably died.
    """
    return [
        call
        for call in calls_of(events)
        if any(e.details.get("unfinished") for e in call.events)
        and abs(now_s - max(e.end for e in call.events)) < _SILENT_S
    ]
