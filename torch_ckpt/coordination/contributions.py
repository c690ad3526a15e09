"""The contributions of ranks to an exchange, and the encoding of messages between ranks."""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import RankTimeoutError

__all__ = [
    "Contribution",
    "ExchangeState",
    "RaisedError",
    "Values",
    "decoded_error",
    "encoded_error",
    "packed_answer",
    "packed_contributions",
    "unpacked_answer",
    "unpacked_contributions",
]

_CONTRIBUTION = struct.Struct("<Idd?QI")  # Rank, timeout, age, is error, length of data, events.
_ANSWER_HEAD = struct.Struct("<QQ")  # Number of ranks, number of distinct values.
_COLLECT_S = 0.25  # Time in which the coordinator collects the errors of further ranks.


Values = Sequence[bytes] | bytes
"""An answer: one value per rank, or one value for all ranks. Each object is sent only once."""


class Contribution(NamedTuple):
    """The data that one rank sends to the coordinator in an exchange. Times are monotonic."""

    timeout_s: float
    arrived: float
    data: Any
    is_error: bool
    """Whether ``data`` is an error, which fails the call on all ranks."""
    events: Any = b""
    """The events that the rank has recorded since its last contribution, for the coordinator."""


class RaisedError(Exception):
    """Ranks have raised errors in a phase, so their call fails on all ranks.

    ``failures`` contains the encoded error of each rank that raised.
    """

    def __init__(self, phase: str, failures: Mapping[int, Any]) -> None:
        super().__init__(phase)
        self.phase, self.failures = phase, failures


@dataclass
class ExchangeState:
    """A rank's state of one exchange of a call. Times are of the monotonic clock."""

    number: int
    """Number of the exchange within the call."""
    phase: str = ""
    contributions: dict[int, Contribution] = field(default_factory=dict)
    """Contributions by rank in this subtree. Cleared when sent to the parent."""
    count: int = 0
    """Number of contributions that have arrived."""
    future: Future[Any] | None = None
    """The answer for this rank; on the coordinator, the contributions of all ranks."""
    began: float = 0.0
    """Time at which this rank began the exchange."""
    timeout_s: float = 0.0
    forwarded: float = 0.0
    """Time at which contributions were last sent to the parent."""
    complete: float = 0.0
    """Time at which the coordinator had all contributions; 0 before."""
    deadline: float = math.inf
    """Time at which the coordinator fails the call: when the first rank's timeout ends."""
    shortest_s: float = math.inf
    """The shortest timeout of the contributions that have arrived."""
    wait: LongWait | None = None
    """The wait of this rank, or on the coordinator of other ranks, for its log lines."""
    raised_until: float = math.inf
    """Time at which the coordinator sends the errors that have arrived to all ranks."""

    def add(self, contributions: dict[int, Contribution]) -> None:
        """Adds contributions of this rank or of ranks below it."""
        self.contributions.update(contributions)
        self.count += len(contributions)
        for timeout_s, arrived, _, is_error, _ in contributions.values():
            self.deadline = min(self.deadline, arrived + timeout_s)
            self.shortest_s = min(self.shortest_s, timeout_s)
            if is_error:
                self.raised_until = min(self.raised_until, arrived + _COLLECT_S)

    @property
    def has_raised(self) -> bool:
        """Whether a rank has raised an error."""
        return self.raised_until < math.inf

    def raised(self) -> dict[int, Contribution]:
        """Returns the contributions that are errors."""
        return {rank: own for rank, own in self.contributions.items() if own.is_error}


def packed_contributions(
    phase: str, contributions: Mapping[int, Contribution], now: float
) -> list[Any]:
    """Encodes contributions. Ages are sent, because clocks differ between machines."""
    name = phase.encode()
    body: list[Any] = [len(name).to_bytes(2, "little") + name]
    for rank, (timeout_s, arrived, data, is_error, events) in contributions.items():
        lengths = len(data), len(events)
        head = _CONTRIBUTION.pack(rank, timeout_s, now - arrived, is_error, *lengths)
        body += [head, data, events]
    return body


def unpacked_contributions(body: bytearray, now: float) -> tuple[str, dict[int, Contribution]]:
    """Decodes contributions: their phase, and each rank's contribution, first the sender's."""
    view = memoryview(body)
    at = 2 + int.from_bytes(view[:2], "little")
    phase, contributions = bytes(view[2:at]).decode(), {}
    while at < len(view):
        rank, timeout_s, age_s, is_error, *lengths = _CONTRIBUTION.unpack_from(view, at)
        at += _CONTRIBUTION.size
        ends = accumulate(lengths, initial=at)
        data, events = (view[begin:end] for begin, end in pairwise(ends))
        contributions[rank] = Contribution(timeout_s, now - age_s, data, is_error, events)
        at += sum(lengths)
    return phase, contributions


def packed_answer(values: Sequence[memoryview], numbers: array[int]) -> list[Any]:
    """Encodes an answer: the number of each rank's value, and each distinct value once."""
    new_number = {old: new for new, old in enumerate(dict.fromkeys(numbers))}
    used = [values[old] for old in new_number]
    return [
        _ANSWER_HEAD.pack(len(numbers), len(used)),
        array("Q", (new_number[old] for old in numbers)).tobytes(),
        array("Q", map(len, used)).tobytes(),
        *used,
    ]


def unpacked_answer(body: bytearray) -> tuple[list[memoryview], array[int]]:
    """Decodes an answer: the distinct values, and the number of each rank's value."""
    view, at = memoryview(body), _ANSWER_HEAD.size
    ranks, count = _ANSWER_HEAD.unpack_from(view)
    numbers, sizes = array("Q"), array("Q")
    for row, length in ((numbers, ranks), (sizes, count)):
        row.frombytes(view[at : at + length * row.itemsize])
        at += length * row.itemsize
    ends = list(accumulate(sizes, initial=at))
    return [view[begin:end] for begin, end in pairwise(ends)], numbers


def encoded_error(error: RankTimeoutError) -> str:
    """Encodes an error that every rank raises."""
    return json.dumps(error.__reduce__()[1])


def decoded_error(text: str | bytearray) -> RankTimeoutError:
    """Decodes an error that every rank raises."""
    return RankTimeoutError(*json.loads(text))
