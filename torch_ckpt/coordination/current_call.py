"""The call that runs in this thread. Imports no torch, because agents use it as well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

__all__ = ["CURRENT", "RunningCall", "claim_commit", "current_call", "setting"]

T = TypeVar("T")


class RunningCall(Protocol):
    """The part of :class:`torch_ckpt.coordination.group.Call` that its functions may use."""

    group: Any
    timeout_s: float

    @property
    def is_uncommitted(self) -> bool:
        """Whether the call has failed, and the coordinator can no longer commit."""

    @property
    def cancel_on_failure(self) -> Callable[[Any], None]:
        """Registers a job, which a failure of the call cancels."""

    def raise_if_failed(self) -> None:
        """Raises the error of the call if it has failed."""

    def claim_commit(self) -> None:
        """Acquires the right to commit."""


CURRENT: ContextVar[RunningCall | None] = ContextVar("torch_ckpt_call", default=None)
"""Set by a call while its functions run."""


def current_call() -> RunningCall | None:
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
