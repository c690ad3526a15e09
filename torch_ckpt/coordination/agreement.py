"""What the ranks of a run decide together: one answer on all of them, or one error, in time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.coordination.deadline import BoundedExchange, bounded_call

__all__ = ["Agreement", "why"]

T = TypeVar("T")
R = TypeVar("R")


class Agreement:
    """Ranks that decide together, and the group of their own that they do it in.

    The group is gloo's, so that it neither waits for the collectives of training nor is lost with
    them. A process that is alone decides alone.

    Args:
        process_group: The ranks; all if ``None``. They make it at the same time.
        timeout_s: Seconds that one rank waits for another.

    Raises:
        ValueError: This process is not one of the ranks.

    Example::

        agreement = Agreement(None, 600)
        slowest = agreement.reach("measuring", lambda: seconds, max)
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.group: dist.ProcessGroup | None = None
        """``None`` for a process that is alone."""
        self.is_coordinator = True
        self._closed = False
        if not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_rank(process_group) < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group of its run")
        if dist.get_world_size(process_group) > 1:
            self.group = own_group(process_group, timeout_s)
            self.is_coordinator = dist.get_rank(self.group) == 0

    def reach(
        self,
        what: str,
        own: Callable[[], T],
        decide: Callable[[list[T]], R],
        *,
        timeout_s: float | None = None,
    ) -> R:
        """Returns on every rank what the coordinator has decided.

        Args:
            what: What the ranks do here, for messages.
            own: Called on every rank.
            decide: Called on the coordinator, with what all ranks have returned.
            timeout_s: Seconds that this rank waits for others; as for all if ``None``.

        Raises:
            RankTimeoutError: A rank did not come.
            RuntimeError: It is closed.
            BaseException: What ``own`` or ``decide`` has raised, on every rank.
        """
        if self._closed:
            raise RuntimeError("this run is closed")
        if self.group is None:
            return decide([own()])
        with bounded_call(timeout_s or self.timeout_s, group=self.group):
            exchange = BoundedExchange(self.group, True, 0)
            try:
                return exchange.all_reduce(what, own, decide)
            except CheckpointException as error:
                rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
                cause.add_note(f"raised on rank {rank} of the run, when {what}")
                raise cause from None

    def close(self) -> None:
        """Gives the group up; nothing can be decided any more."""
        self._closed = True
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


def own_group(process_group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
    """A new gloo group of the same ranks; all of them call this at the same time.

    Args:
        process_group: The ranks; all if ``None``.
        timeout_s: Seconds after which ranks give each other up; the group's collectives later.

    Example::

        group = own_group(None, 600)
    """
    ranks = dist.get_process_group_ranks(process_group)
    group = dist.new_group(
        ranks,
        timeout=timedelta(seconds=2 * timeout_s + 60),
        backend="gloo",
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def why(error: BaseException) -> str:
    """An error in one line, with those of all ranks if it is DCP's.

    Example::

        assert why(ValueError("no")) == "ValueError: no"
    """
    if isinstance(error, CheckpointException):
        return "; ".join(
            f"rank {rank}: {why(cause)}" for rank, (cause, _) in sorted(error.failures.items())
        )
    return f"{type(error).__qualname__}: {error}"
