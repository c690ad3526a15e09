"""Event: one phase of a save or load on one rank, and its line in ``events.jsonl``.

This module imports no torch.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from torch_ckpt.stored_json import from_json

__all__ = ["PHASES", "Event"]

PHASES = {
    "begin": "waiting for the previous save, and agreeing on this one",
    "choose": "choosing the step to restore",
    "stage": "copying tensors into host memory",
    "plan": "listing tensors, and planning",
    "write": "writing data files",
    "read": "reading data files",
    "apply": "changing tensors in place",
    "commit": "committing",
    "retain": "removing steps that are not to be retained",
    "persist": "writing and committing by the agent",
    "promote": "copying a step from the local directory",
    "message": "sending a message between ranks",
    "wait": "waiting for other ranks, if that failed",
}
"""What a rank does in each phase, in the order of a save."""


class Event(NamedTuple):
    """One phase of one call on one rank.

    Attributes:
        call: Text that the events of one save or load share, unique in the run.
        kind: ``"save"``, ``"load"``, ``"publish"`` or ``"update"``.
        step: Step of the run; ``None`` until it is chosen.
        rank: Global rank.
        host: Name of its machine.
        phase: A key of :data:`PHASES`.
        start: Begin of the phase, in seconds since 1970 by the clock of the first rank.
        end: End of the phase, by the same clock.
        details: Other values, each only if known: ``bytes`` (moved to or from storage),
            ``requests`` (number of requests to storage), ``waited`` (seconds of the phase that were
            spent waiting for storage), ``waited_for_ranks`` (seconds spent waiting for other ranks,
            which read for this one in an exchange), ``mode`` (``"direct"``, ``"buffered"`` or
            ``"store"``), ``background`` (whether training continued during the phase), ``of`` (the
            phase whose end a message reports), ``unreplicated`` (why the last saves have no
            replicas in the memory of other machines), ``error`` (text), and ``unfinished`` (true if
            the phase had not ended when the line was written, at ``end``).
    """

    call: str
    kind: str
    step: int | None
    rank: int
    host: str
    phase: str
    start: float
    end: float
    details: dict[str, Any]

    @property
    def seconds(self) -> float:
        """Duration of the phase, in seconds."""
        return max(self.end - self.start, 0.0)

    def line(self) -> str:
        """Returns the event as one line of JSON."""
        # Not `json.dumps` for all: the first rank may write a line per phase for thousands of
        # ranks.
        details = _encoded(self.details)[1:-1]
        return (
            f'{{"call":{_encoded(self.call)},"kind":"{self.kind}","step":{_encoded(self.step)},'
            f'"rank":{self.rank},"host":{_encoded(self.host)},"phase":{_encoded(self.phase)},'
            f'"start":{self.start:.6f},"end":{self.end:.6f}{"," if details else ""}{details}}}\n'
        )

    @classmethod
    def of_line(cls, line: str | bytes) -> Event:
        """Returns the event in a line. Raises ValueError if the line is not an event."""
        try:
            return from_json(line, cls.of)
        except ValueError as error:
            raise ValueError(f"not the line of an event: {error}") from None

    @classmethod
    def of(cls, values: dict[str, Any]) -> Event:
        """Returns the event with the values of a line. Raises ValueError if they are invalid."""
        pop = values.pop
        call, kind, step, rank = pop("call"), pop("kind"), pop("step"), pop("rank")
        host, phase, start, end = pop("host"), pop("phase"), pop("start"), pop("end")
        # One expression, because a report reads hundreds of thousands of lines.
        is_sound = (
            isinstance(rank, int)
            and 0 <= rank < _MAX_RANK
            and (step is None or (isinstance(step, int) and abs(step) < _MAX_STEP))
            and isinstance(call, str)
            and isinstance(kind, str)
            and isinstance(host, str)
            and isinstance(phase, str)
            and isinstance(start, int | float)
            and abs(start) < _MAX_S
            and isinstance(end, int | float)
            and abs(end) < _MAX_S
        )
        if not is_sound:
            raise ValueError("a value is of another type, or too large")
        return cls(call, kind, step, rank, host, phase, start, end, values)


_encoded = json.JSONEncoder(separators=(",", ":")).encode

_MAX_RANK, _MAX_STEP, _MAX_S = 1 << 31, 1 << 63, 1e11
"""Lines with larger numbers are not from this package, and would be no valid date."""
