"""The call that runs in this thread. Agents ask for it as well, so this imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch_ckpt.coordination.group import Call

__all__ = ["CURRENT", "claim_commit", "current_call", "setting"]

T = TypeVar("T")

CURRENT: ContextVar[Call | None] = ContextVar("torch_ckpt_call", default=None)
"""Set by a call while its functions run."""


def current_call() -> Call | None:
    """Returns the call that runs in this thread; ``None`` within DCP's own functions."""
    return CURRENT.get()


def claim_commit() -> None:
    """Acquires the right to publish a checkpoint. A writer calls it just before it publishes.

    Raises:
        RankTimeoutError: The save has failed on the other ranks, so it must not be published.

    Example::

        claim_commit()
        temporary.rename(final)
    """
    call = current_call()
    if call is not None:
        call.claim_commit()


@contextlib.contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Sets a context variable within the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
