"""Reads the record of a run: the events of ``events.jsonl`` and of the older file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.process_state import gc_paused
from torch_ckpt.records.event import Event
from torch_ckpt.records.event_log import EVENTS, OLDER_EVENTS
from torch_ckpt.stored_json import from_json

__all__ = ["missing_replicas", "newest_first", "read_events", "recent_events"]

_CHUNK = 1000
"""Number of lines decoded together, which halves the time."""

_RECENT_NBYTES = 1 << 20


def read_events(directory: Location) -> list[Event]:
    """Returns all events in the record of a run, in the order of their lines.

    Ignores incomplete lines: a process may have died while writing one, or may still write it.

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
    lines = list(filter(None, lines))
    chunks = (lines[at : at + _CHUNK] for at in range(0, len(lines), _CHUNK))
    with gc_paused():
        return [event for chunk in chunks for event in _events_of(chunk)]


def recent_events(directory: Location) -> list[Event]:
    """Returns the events in the last MiB of a record; none without a record."""
    file = directory / EVENTS
    try:
        nbytes = file.nbytes()
        begin = max(nbytes - _RECENT_NBYTES, 0)
        _, text = file.read_range(begin, _RECENT_NBYTES)
    except NotFoundError:
        return []
    lines = text.split(b"\n")[1 if begin else 0 :]  # The first may be incomplete.
    return _events_of(list(filter(None, lines)))


def newest_first(directory: Location) -> Iterator[Event]:
    """Yields the events in the newest file of a record, each decoded when it is needed."""
    lines = reversed((_contents(directory / EVENTS) or b"").split(b"\n"))
    return (event for event in map(_event_of, lines) if event is not None)


def missing_replicas(newest_first: Iterable[Event]) -> str:
    """Returns why the newest save of a run has no replicas in memory; empty if unknown."""
    save = None
    for event in newest_first:
        if (event.kind, event.phase) == ("save", "stage"):
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


def _events_of(lines: list[bytes]) -> list[Event]:
    try:
        text = b"[" + b",".join(lines) + b"]"
        return from_json(text, lambda values: list(map(Event.of, values)))
    except ValueError:
        return [event for event in map(_event_of, lines) if event is not None]


def _event_of(line: bytes) -> Event | None:
    with contextlib.suppress(ValueError):
        return Event.of_line(line)
    return None
