"""The call that runs in this thread. Agents ask for it as well, so this imports no torch."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_ckpt.coordination.group import Call

__all__ = ["CURRENT", "current_call"]

CURRENT: ContextVar[Call | None] = ContextVar("torch_ckpt_call", default=None)
"""Set by a call while its functions run."""


def current_call() -> Call | None:
    """Returns the call that runs in this thread; ``None`` within DCP's own functions."""
    return CURRENT.get()
