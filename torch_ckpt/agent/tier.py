"""SnapshotTier: the steps of a run that are in the agent's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from traceback import StackSummary
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner

from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.reader import SnapshotReader
from torch_ckpt.agent.trainer import MemoryCheckpoint, SnapshotAgent
from torch_ckpt.api import load
from torch_ckpt.coordination.portable import why
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import Opened

__all__ = ["SnapshotTier"]

_NO_SAVE: Save = b"", -1
"""The save of a step before the step is opened."""


class _StepReader(SnapshotReader):
    """Finds a step in memory when it opens the step, within the load of all ranks.

    So a rank that does not find the step fails the load on all ranks.
    """

    def __init__(self, agent: SnapshotAgent, step: int, **options: Any) -> None:
        super().__init__(MemoryCheckpoint(_NO_SAVE, step, agent.folder, ()), **options)
        self._agent, self._step = agent, step

    def _open(self, path: Location, prefix: str) -> Opened:
        found = (c for c in self._agent.memory_checkpoints() if c.step == self._step)
        newest = next(found, None)
        if newest is None:
            raise NotFoundError(f"cannot load step {self._step}: it is no longer in memory")
        self.checkpoint = newest
        return super()._open(path, prefix)


class SnapshotTier:
    """The steps of a run in the memory of its agent, as a storage tier."""

    def __init__(self, agent: SnapshotAgent, *, reader: dict[str, Any] | None = None) -> None:
        self._agent = agent
        self._has_ended = False
        self._reader = reader or {}

    def end(self) -> None:
        """Makes the tier empty: the agent ends, and first writes its steps to disk."""
        self._has_ended = True

    def report(self) -> dict[int, Save]:
        """Returns the newest save of each step in the memory of this machine."""
        if self._has_ended:
            return {}
        found = reversed(self._agent.memory_checkpoints())
        return {checkpoint.step: checkpoint.save for checkpoint in found}

    def steps(self, reports: Sequence[dict[int, Save]]) -> Iterator[int]:
        """Returns the steps of which all ranks report the same save, the newest first."""
        common = set.intersection(*(set(report.items()) for report in reports))
        return iter(sorted((step for step, _ in common), reverse=True))

    def damaged(self) -> list[int]:
        """Returns no steps: an incomplete snapshot was never a step."""
        return []

    def load(
        self,
        step: int,
        state: dict[str, Any],
        *,
        planner: LoadPlanner,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        timeout_s: float,
    ) -> None:
        """Loads a step in place.

        Raises CheckpointException if a rank raised. If the step is no longer in memory on a rank,
        its error is a :class:`NotFoundError`. If a rank needs data that only another machine has,
        every rank's error is a :class:`NotFoundError`.
        """
        reader = _StepReader(self._agent, step, **self._reader)
        try:
            load(
                state,
                storage_reader=reader,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist,
                timeout_s=timeout_s,
            )
        except CheckpointException as error:
            if reader.has_begun or not self._agent.is_on_several_machines:
                raise
            # An FQN may exist on another machine only, so the caller falls back to the disk.
            absent = NotFoundError(f"cannot load step {step} from memory: {why(error)}")
            failures: dict[int, tuple[BaseException, StackSummary]] = dict.fromkeys(
                error.failures, (absent, StackSummary())
            )
            raise CheckpointException(str(absent), failures) from error
