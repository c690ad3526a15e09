"""Methods of several calls. If a rank leaves one between two calls, the rest fail on all ranks.

A range of call numbers is reserved for each method. So the next call after a method has the same
number on all ranks, no matter how many calls of the method each rank has made.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from concurrent import futures
from contextvars import ContextVar

from torch_ckpt.coordination.connections import Connections
from torch_ckpt.coordination.portable import why
from torch_ckpt.coordination.waiting import GRACE_S

__all__ = ["calls_of_method", "make_no_more_calls", "method"]


class _Method:
    """A method in progress in this thread, whose calls have the numbers from ``first`` on."""

    def __init__(self, connections: Connections, first: int) -> None:
        self.connections, self.calls = connections, itertools.count(first)


_METHOD: ContextVar[_Method | None] = ContextVar("torch_ckpt_method", default=None)


def calls_of_method(connections: Connections) -> Iterator[int] | None:
    """Returns the numbers for calls of the method in progress; ``None`` outside a method."""
    current = _METHOD.get()
    return current.calls if current is not None and current.connections is connections else None


@contextlib.contextmanager
def method(
    connections: Connections, numbers: Iterator[int], activity: str, timeout_s: float
) -> Iterator[None]:
    """Makes the block a method on all ranks, whose first call has the next of ``numbers``.

    The method contains all calls over these connections, also of other groups. A nested method is
    part of the outer one. If the block raises, the remaining calls fail on all ranks. ``activity``,
    such as ``"save a step"``, is for messages.
    """
    if calls_of_method(connections) is not None:
        yield
        return
    current = _Method(connections, next(numbers))
    token = _METHOD.set(current)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # The first error counts.
            relay = connections.started(activity)
            relay.deadline.begin(timeout_s, activity)
            left = relay.submit(relay.leave, next(current.calls), activity, why(error))
            futures.wait([left], min(timeout_s, GRACE_S))
        raise
    finally:
        _METHOD.reset(token)


def make_no_more_calls(connections: Connections, activity: str) -> None:
    """Fails the calls that other ranks make in this method, after those of this rank.

    For the last method of a rank. Without a message, a rank that makes another call would wait for
    this one. Does nothing if the ranks have not connected.
    """
    calls, relay = calls_of_method(connections), connections.current
    if calls is not None and relay is not None:
        relay.submit(relay.leave, next(calls), activity, "")
