"""A plan that some rank has lost is made again by all ranks, within the same save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch_ckpt.errors import CheckpointError

__all__ = ["PlanUnknownError", "is_replanning", "replanning"]

_replanning: ContextVar[bool] = ContextVar("torch_ckpt_replanning", default=False)


class PlanUnknownError(CheckpointError):
    """Ranks refer to a plan that the coordinator does not have; all ranks must plan again."""


def is_replanning() -> bool:
    """Whether no cached plan may be used now, in this thread."""
    return _replanning.get()


@contextlib.contextmanager
def replanning() -> Iterator[None]:
    """Makes :func:`is_replanning` true within the block, in this thread."""
    token = _replanning.set(True)
    try:
        yield
    finally:
        _replanning.reset(token)
