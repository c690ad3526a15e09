"""Reads the events of a run from ``events.jsonl`` and its older file."""

from __future__ import annotations

from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.records.event import Event

__all__ = ["FILES", "read_events"]

FILES = ("events.1.jsonl", "events.jsonl")
"""Files of a run's record, the older first."""


_MAX_RANK, _MAX_STEP, _MAX_S = 1 << 31, 1 << 63, 1e11
"""A line with larger numbers is not of this package, and would be no date."""


def read_events(directory: Location) -> list[Event]:
    """Returns all events in the record of a run, in the order of their lines.

    Lines that are not whole are left out: a process may have died within one, or write it now.

    Raises:
        NotFoundError: The run has no record.
    """
    events: list[Event] = []
    found = False
    for name in FILES:
        try:
            contents = (directory / name).read()
        except NotFoundError:
            continue
        found = True
        for line in contents.split(b"\n"):
            event = _event_of(line)
            if event is not None:
                events.append(event)
    if not found:
        raise NotFoundError(
            f"no record of saves and loads in {directory}: it has no {FILES[-1]}. "
            "A run writes it unless it has record=False"
        )
    return events


def _event_of(line: bytes) -> Event | None:
    if not line.strip():
        return None
    try:
        event = Event.of_line(line)
    except (ValueError, RecursionError):
        return None
    is_sound = (
        isinstance(event.rank, int)
        and 0 <= event.rank < _MAX_RANK
        and (event.step is None or (isinstance(event.step, int) and abs(event.step) < _MAX_STEP))
        and all(isinstance(t, str) for t in (event.call, event.kind, event.host, event.phase))
        and all(isinstance(t, int | float) and abs(t) < _MAX_S for t in (event.start, event.end))
    )
    return event if is_sound else None
