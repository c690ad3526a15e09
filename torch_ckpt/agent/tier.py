"""SnapshotTier: the steps of a run that are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from torch_ckpt.agent.reader import SnapshotReader
from torch_ckpt.agent.trainer import SnapshotAgent
from torch_ckpt.api import load
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
        self._reader = reader or {}

    def steps(self) -> Iterator[int]:
        """Steps that are whole there, the newest first."""
        found = {remembered.step for remembered in self._agent.remembered()}
        return iter(sorted(found, reverse=True))

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
            CheckpointException: A rank raised.
        """
        found = [one for one in self._agent.remembered() if one.step == step]
        if not found:
            raise NotFoundError(f"step {step} is in memory no more")
        load(
            state,
            storage_reader=SnapshotReader(found[0], **self._reader),
            process_group=process_group,
            no_dist=no_dist,
            timeout_s=timeout_s,
        )
