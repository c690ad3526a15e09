"""FailedSaves: failures of joint saves, which the ranks send to each other.

Agents of several machines exchange files only through the common directory. If that does not answer
on one machine, its agent cannot publish why the save has failed. But the ranks are connected to
each other: each rank that waits for the commit of a failed save sends the error to the others.
"""

from __future__ import annotations

import contextlib

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.agent.messages import Failure, failure_of
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CheckpointError, RankTimeoutError

__all__ = ["FailedSaves"]

_SEND_S = 5.0
"""Longest wait for the first rank, which passes the error on."""


class FailedSaves:
    """The failures of the saves of one session. All ranks of ``group`` construct it together.

    Any thread of a rank may call the methods; the other ranks need not call any.
    """

    def __init__(self, group: Group) -> None:
        self._group = group.series()

    def send(self, sequence: int, error: CheckpointError) -> None:
        """Sends the failure of a save to all ranks. Does nothing if a rank is lost."""

        def fail() -> None:
            raise error

        with contextlib.suppress(Exception, CheckpointException):
            call = self._group.numbered(sequence, _SEND_S)
            call.all_reduce("waiting for the agents", fail, lambda _: None)

    def received(self, sequence: int) -> Failure | None:
        """Returns the failure of a save on another rank; ``None`` if no rank has sent any."""
        try:
            self._group.numbered(sequence, _SEND_S).raise_if_failed()
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            kind, text, number = failure_of(cause)
            is_named = text.startswith("machine ")
            return kind, text if is_named else f"rank {rank}: {text}", number
        except RankTimeoutError:  # A rank is lost. Its agent may complete the save nevertheless.
            return None
        return None
