"""Methods of several calls: a rank that leaves one between two calls fails the rest on all ranks.

The calls of a method have numbers of their own. So after it, the next call has the same number on
all ranks, however many calls of the method each rank has made.
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

__all__ = ["calls_of_method", "method"]


class _Method:
    """A method in progress in this thread, whose calls have the numbers from ``first`` on."""

    def __init__(self, connections: Connections, first: int) -> None:
        self.connections, self.calls = connections, itertools.count(first)


_METHOD: ContextVar[_Method | None] = ContextVar("torch_ckpt_method", default=None)


def calls_of_method(connections: Connections) -> Iterator[int] | None:
    """Returns the numbers for calls of the method in progress; ``None`` if there is none."""
    current = _METHOD.get()
    return current.calls if current is not None and current.connections is connections else None


@contextlib.contextmanager
def method(
    connections: Connections, numbers: Iterator[int], activity: str, timeout_s: float
) -> Iterator[None]:
    """Makes a method of the block, on all ranks, with the next of ``numbers`` as its first call.

    It contains all calls of these connections, also of other groups. A method within another one
    belongs to that. If the block raises, the remaining calls fail on all ranks. The activity is for
    messages, such as ``"save a step"``.
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
