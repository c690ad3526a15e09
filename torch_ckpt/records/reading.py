"""Reads the record of a run: the events of ``events.jsonl`` and of the older file."""

from __future__ import annotations

from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.records.event import Event
from torch_ckpt.records.event_log import EVENTS, OLDER_EVENTS

__all__ = ["missing_replicas", "read_events"]

_MAX_RANK, _MAX_STEP, _MAX_S = 1 << 31, 1 << 63, 1e11
"""A line with larger numbers is not of this package, and would be no date."""


def read_events(directory: Location) -> list[Event]:
    """Returns all events in the record of a run, in the order of their lines.

    Incomplete lines are ignored: a process may have died within one, or may be writing it.

    Args:
        directory: Directory of the run.

    Raises:
        NotFoundError: The run has no record.
    """
    newest = _contents(directory / EVENTS)
    older = _contents(directory / OLDER_EVENTS)
    if newest and older and older.startswith(newest.partition(b"\n")[0]):
        newest = _contents(directory / EVENTS)  # It became the older file between the two reads.
    if newest is None and older is None:
        raise NotFoundError(
            f"no record of saves and loads in {directory}: it has no {EVENTS}. "
            "A run writes it unless it has record=False"
        )
    lines = (older or b"").split(b"\n") + (newest or b"").split(b"\n")
    return [event for event in map(_event_of, lines) if event is not None]


def missing_replicas(directory: Location) -> str:
    """Returns why the newest save of a run has no replicas in memory; empty if that is not known.

    It reads the events from the end, and only those of one save.
    """
    save = None
    for event in map(_event_of, reversed((_contents(directory / EVENTS) or b"").split(b"\n"))):
        if event is not None and (event.kind, event.phase) == ("save", "stage"):
            save = save or event.call
            if event.call != save:
                break
            if text := event.details.get("unreplicated"):
                return str(text)
    return ""


def _contents(file: Location) -> bytes | None:
    try:
        return file.read()
    except NotFoundError:
        return None


def _event_of(line: bytes) -> Event | None:
    if not line.strip():
        return None
    try:
        event = Event.of_line(line)
    except ValueError:
        return None
    is_sound = (
        isinstance(event.rank, int)
        and 0 <= event.rank < _MAX_RANK
        and (event.step is None or (isinstance(event.step, int) and abs(event.step) < _MAX_STEP))
        and all(isinstance(t, str) for t in (event.call, event.kind, event.host, event.phase))
        and all(isinstance(t, int | float) and abs(t) < _MAX_S for t in (event.start, event.end))
    )
    return event if is_sound else None
