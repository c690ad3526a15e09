"""SnapshotTier: the steps of a run that are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from traceback import StackSummary
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.reader import SnapshotReader
from torch_ckpt.agent.trainer import SnapshotAgent
from torch_ckpt.api import load
from torch_ckpt.coordination.group import why
from torch_ckpt.errors import NotFoundError

__all__ = ["SnapshotTier"]


class SnapshotTier:
    """What the agent of a run remembers, as a place where its steps are.

    Args:
        agent: That of this machine.
        reader: Arguments for each :class:`SnapshotReader`.
    """

    def __init__(self, agent: SnapshotAgent, *, reader: dict[str, Any] | None = None) -> None:
        self._agent = agent
        self._has_ended = False
        self._reader = reader or {}

    def end(self) -> None:
        """Has no steps from now on: the agent ends, and what it has comes to disk."""
        self._has_ended = True

    def here(self) -> dict[int, Save]:
        """What this rank's machine has of each step: of several saves, the newest."""
        if self._has_ended:
            return {}
        found = reversed(self._agent.memory_checkpoints())
        return {checkpoint.step: checkpoint.save for checkpoint in found}

    def steps(self, said: Sequence[dict[int, Save]]) -> Iterator[int]:
        """Steps that are whole there, the newest first: those of which all have the same save."""
        common = set.intersection(*(set(of_rank.items()) for of_rank in said))
        return iter(sorted((step for step, _ in common), reverse=True))

    def damaged(self) -> list[int]:
        """Nothing: what is not whole in memory never was a step."""
        return []

    def load(
        self,
        step: int,
        state: dict[str, Any],
        *,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        timeout_s: float,
    ) -> None:
        """Loads a step in place.

        Raises:
            NotFoundError: It is in memory no more. On this rank alone.
            CheckpointException: A rank raised. Where ranks are on several machines, and one of them
                wants what its machine does not have, these are :class:`NotFoundError`, on all.
        """
        found = [one for one in self._agent.memory_checkpoints() if one.step == step]
        if not found:
            raise NotFoundError(f"step {step} is in memory no more")
        reader = SnapshotReader(found[0], **self._reader)
        try:
            load(
                state,
                storage_reader=reader,
                process_group=process_group,
                no_dist=no_dist,
                timeout_s=timeout_s,
            )
        except CheckpointException as error:
            if reader.has_begun or not self._agent.is_on_several_machines:
                raise
            # Names, too, may be only on another machine: the disk tells what there is.
            absent = NotFoundError(f"step {step} cannot be planned from memory: {why(error)}")
            failures: dict[int, tuple[BaseException, StackSummary]] = dict.fromkeys(
                error.failures, (absent, StackSummary())
            )
            raise CheckpointException(str(absent), failures) from error
