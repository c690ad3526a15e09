"""Recorder: measures the phases of saves and loads, on all ranks of a run.

Each rank sends its phases with the messages that ranks exchange anyway. The first rank converts
their times to its own clock, and passes the events to the :class:`EventLog`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from torch_ckpt._core import _native
from torch_ckpt.errors import text_of
from torch_ckpt.records.event import Event
from torch_ckpt.records.event_log import EventLog

__all__ = ["Heard", "Record", "Recorder", "current_record", "note", "phase"]

T = TypeVar("T")

_SLOW_MESSAGE_S = 0.05
"""A message is an event if it took this much longer than the fastest one of its rank."""

_DRIFT = 1e-4
"""Seconds in a second by which two clocks may drift apart: those of computers do by less."""

_RECORDS = 64
"""Number of records for which later events are accepted, such as the end of a promotion."""

_ERROR_LENGTH = 500

_WAITED_S = 1e-3  # Shorter waits are recorded only for the calls of a job.

_HANGS_S = 5.0
"""A phase that lasts longer is written before it ends."""


class Heard(NamedTuple):
    """Events of another rank, and when they arrived, by this rank's monotonic clock."""

    rank: int
    arrived: float
    events: Any


class RecordedCall(Protocol):
    """A call of the ranks. Its messages also carry events."""

    @property
    def number(self) -> int:
        """The number of the call, the same on all ranks."""
        ...

    def heard(self) -> list[Heard]:
        """Returns the events that arrived since the previous call. Called on the first rank."""
        ...

    def late(self) -> tuple[str, Sequence[int], float] | None:
        """Returns the phase that other ranks have not finished, these ranks, and its begin."""
        ...


@dataclass
class _Phase:
    """A phase on this rank. Times are of the monotonic clock; ``end`` is 0 while it lasts."""

    name: str
    begin: float
    end: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    thread: int = field(default_factory=threading.get_ident)


class _Clock:
    """How much the clock of another rank is behind that of this rank: ``offset``, in seconds.

    The fastest message gives the best estimate. It counts less with time, because clocks drift.
    """

    def __init__(self) -> None:
        self.offset, self._as_of = math.inf, 0.0

    def add(self, sent: float, arrived: float) -> None:
        """Adds a message: when it was sent and when it arrived, each by the clock of its rank."""
        before = self.offset + _DRIFT * max(arrived - self._as_of, 0.0)
        self.offset, self._as_of = min(arrived - sent, before), max(arrived, self._as_of)


class Recorder:
    """Records the saves and loads of one run. ``log`` is ``None`` except on the first rank.

    Example::

        recorder = Recorder(rank, log)
        record = recorder.record("save", step)
        with record.current(), phase("write"):
            note(bytes=write())
        record.end()
    """

    def __init__(self, rank: int, log: EventLog | None) -> None:
        self._rank, self._log, self._host = rank, log, socket.gethostname()
        self._session, self._ordinals = secrets.token_hex(4), itertools.count(1)
        self._unsent: deque[tuple[Record, _Phase]] = deque()  # Other threads add and take.
        self._records: deque[Record] = deque(maxlen=_RECORDS)
        self._hosts: dict[int, str] = {}
        self._clocks: dict[int, _Clock] = {}  # By rank.
        self._to_wall = time.time() - time.monotonic()
        self.listeners: list[Callable[[Event], None]] = []
        """Called with each event, on the first rank."""

    def record(self, kind: str, step: int | None) -> Record:
        """Begins the record of a save or load on this rank."""
        record = Record(self, kind, step, f"{self._session}-{next(self._ordinals)}")
        self._records.append(record)
        if self._log is not None:
            self._log.watch(record.hanging)
        return record

    def take(self) -> bytes:
        """Returns the phases that have ended since the previous call, to be sent now."""
        unsent = _drained(self._unsent)
        phases = [(r.key, p.name, p.begin, p.end, p.details) for r, p in unsent]
        return json.dumps([self._host, time.monotonic(), phases], separators=(",", ":")).encode()

    @property
    def writes(self) -> bool:
        """Whether this rank writes the record."""
        return self._log is not None

    def ended(self, record: Record, phase: _Phase) -> None:
        """Adds a phase that has ended on this rank."""
        if self._log is None:
            self._unsent.append((record, phase))
        else:
            record.own.append(phase)

    def save_of(self, step: int) -> Record:
        """Returns the record of the last save of a step, or a new one if that was long ago."""
        records = list(self._records)  # Other threads add some.
        saves = (each for each in reversed(records) if each.kind == "save")
        found = next((each for each in saves if each.step == step), None)
        return found or self.record("save", step)

    def flush(self, record: Record) -> None:
        """Writes the events of a record and received events. Does not wait for storage."""
        if self._log is not None:
            self._log.put(lambda: self.lines(record))

    def lines(self, record: Record) -> str:
        """Returns the new lines of a record since the previous call. Called by one thread."""
        events = [self._own(record, phase) for phase in record.take_own()]
        events += self._received(record)
        events += self._late(record, 0.0)
        record.calls.clear()
        if self._log is not None:
            for event in events:
                for listener in self.listeners:
                    self._log.call_later(functools.partial(listener, event))
        return "".join(event.line() for event in events)

    def unfinished(self, record: Record, seconds: float) -> str:
        """Returns the lines of phases that have lasted this long already; empty if none have."""
        now = time.monotonic()
        events = [
            self._own(record, _Phase(each.name, each.begin, now, {**each.details, **_UNFINISHED}))
            for each in record.open
            if now - each.begin >= seconds
        ]
        return "".join(event.line() for event in [*events, *self._late(record, seconds)])

    def _late(self, record: Record, seconds: float) -> list[Event]:
        """Returns the phases that other ranks have not finished within this time."""
        now, head = time.monotonic(), (record.call, record.kind, record.step)
        return [
            Event(
                *(*head, rank, self._hosts.get(rank, ""), name),
                *(begin + self._to_wall, now + self._to_wall, _UNFINISHED),
            )
            for name, ranks, begin in filter(None, (call.late() for call in record.calls))
            for rank in ranks
            if rank != self._rank and now - begin >= seconds
        ]

    def _own(self, record: Record, phase: _Phase) -> Event:
        times = phase.begin + self._to_wall, phase.end + self._to_wall
        head = record.call, record.kind, record.step, self._rank, self._host
        return Event(*head, phase.name, *times, phase.details)

    def _received(self, record: Record) -> list[Event]:
        received = [
            (rank, arrived, *json.loads(bytes(events)))
            for call in record.calls
            for rank, arrived, events in call.heard()
        ]
        for rank, arrived, host, sent, _ in received:
            self._hosts[rank] = host
            self._clocks.setdefault(rank, _Clock()).add(sent, arrived)
        events = []
        by_key = {each.key: each for each in list(self._records)}  # Other threads add some.
        for rank, arrived, host, sent, phases in received:
            offset = self._clocks[rank].offset
            if (slow := arrived - sent - offset) > _SLOW_MESSAGE_S:
                last = phases[-1][1] if phases else ""
                phases.append((record.key, "message", sent, sent + slow, {"of": last}))
            for key, name, begin, end, details in phases:
                of = by_key.get(key)
                if of is not None:
                    shift = offset + self._to_wall
                    head = of.call, of.kind, of.step, rank, host
                    events.append(Event(*head, name, begin + shift, end + shift, details))
        return events


class Record:
    """The phases of one save or load on this rank. Any thread may add phases.

    ``call`` is the common text of its events. ``step`` may be set later.
    """

    def __init__(self, recorder: Recorder, kind: str, step: int | None, call: str) -> None:
        self.kind, self.step, self.call = kind, step, call
        self.key = 0
        """The number of its first call, the same on all ranks; 0 before, or with a single rank."""
        self.calls: list[RecordedCall] = []
        self.own: deque[_Phase] = deque()
        self.open: list[_Phase] = []
        self.recorder = recorder
        self._thread = threading.get_ident()
        self._is_done, self._hangs_s = False, _HANGS_S
        self._has_error, self._ended = False, time.monotonic()  # When the last phase ended.

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes :func:`phase` and :func:`note` add to this record within the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def joined(self, call: RecordedCall) -> None:
        """Adds a call of the ranks for this save or load."""
        if not self.key:
            self.key = call.number
        if self.recorder.writes:  # A call may keep the state of a failed save alive.
            self.calls.append(call)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records the block as a phase. Phases nested in a phase of its thread do not count."""
        if self._own_open():
            yield
            return
        phase = _Phase(name, time.monotonic())
        if name == "plan":
            self._has_error = False  # A load that plans again has passed over a damaged step.
        if threading.get_ident() != self._thread:
            phase.details["background"] = True
        self.open.append(phase)
        waited_s = _native.waited_at_storage_s()
        try:
            yield
        except BaseException as error:
            if getattr(error, "is_recorded", True):
                phase.details["error"] = _text_of(error)
                self._has_error = True
            raise
        finally:
            phase.end = self._ended = time.monotonic()
            if (waited_s := _native.waited_at_storage_s() - waited_s) > _WAITED_S:
                self.note(waited=waited_s)
            self.open.remove(phase)
            self.recorder.ended(self, phase)

    def add(self, name: str, begin: float, error: BaseException | None) -> None:
        """Adds a background phase that ends now. ``begin`` is a time of the monotonic clock."""
        phase = _Phase(name, begin, time.monotonic(), {"background": True})
        if error is not None:
            phase.details["error"] = _text_of(error)
        self.recorder.ended(self, phase)

    def failed(self, error: BaseException) -> None:
        """Adds an error that was raised outside the phases of this rank, while it waited."""
        if not self._has_error:
            phase = _Phase("wait", self._ended, time.monotonic(), {"error": _text_of(error)})
            self.recorder.ended(self, phase)

    def note(self, **details: Any) -> None:
        """Adds details to the phase in progress in this thread, or in others; numbers add up."""
        for phase in self._own_open() or self.open:
            for name, value in details.items():
                if isinstance(value, int | float):
                    value = phase.details.get(name, 0) + value
                phase.details[name] = value

    def _own_open(self) -> list[_Phase]:
        thread = threading.get_ident()
        return [phase for phase in list(self.open) if phase.thread == thread]

    def end(self) -> None:
        """Writes the record, on the first rank. Later phases may follow, and another ``end``."""
        self._is_done = True
        self.recorder.flush(self)

    def take_own(self) -> list[_Phase]:
        """Returns the phases that ended on this rank since the previous call."""
        return _drained(self.own)

    def hanging(self) -> str | None:
        """Returns the lines of long phases; ``None`` once the record has ended.

        Lines are returned again whenever a phase lasts twice as long.
        """
        if self._is_done:
            return None
        lines = self.recorder.unfinished(self, self._hangs_s)
        if lines:
            self._hangs_s *= 2
        return lines


def _drained(queue: deque[T]) -> list[T]:
    """Removes all elements; other threads may do so at the same time."""
    drained: list[T] = []
    with contextlib.suppress(IndexError):
        for _ in range(len(queue)):
            drained.append(queue.popleft())
    return drained


def _text_of(error: BaseException) -> str:
    name = type(error).__qualname__
    # The last line, because DCP's exception lists tracebacks of ranks, and their errors last.
    text = (text_of(error).strip().splitlines() or [""])[-1].strip()
    return f"{name}: {text}"[:_ERROR_LENGTH]


_UNFINISHED = {"unfinished": True}

_current: ContextVar[Record | None] = ContextVar("torch_ckpt_record", default=None)


def current_record() -> Record | None:
    """Returns the record to which this thread adds; ``None`` outside a recorded block."""
    return _current.get()


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Records the block as a phase of the current record, if there is one."""
    record = _current.get()
    return contextlib.nullcontext() if record is None or not name else record.phase(name)


def note(**details: Any) -> None:
    """Adds details to the phase in progress of the current record, if there is one."""
    record = _current.get()
    if record is not None:
        record.note(**details)
