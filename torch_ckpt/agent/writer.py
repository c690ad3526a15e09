"""AgentWriter: ``dcp.async_save`` by way of the agent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ckpt.agent.trainer import SnapshotAgent, StagedSave
from torch_ckpt.errors import CancelledError, UnsupportedError, portable_errors
from torch_ckpt.reader import FastReader
from torch_ckpt.save_planner import FastSavePlanner
from torch_ckpt.writer import FastWriter

__all__ = ["AgentWriter"]


class AgentWriter(FastWriter):
    """Has the agent save: trainers copy into shared memory, and do nothing else.

    Nothing is planned, written or committed by trainers: DCP is given an empty state dict, and its
    background thread waits. Only for ``dcp.async_save``, without its ``checkpoint_id``.

    Args:
        path: Directory of the checkpoint, on storage that every machine can reach.
        agent: That of this machine.
        step: What the save is called when it is found in memory.
        **options: As for :class:`FastWriter`; of those, ``sync_files`` counts for the agent.

    Raises:
        CancelledError: From ``async_save``: former saves keep all slots, and the agent's
            ``on_busy`` is ``"skip"``.
        UnsupportedError: From a save: its planner is one of the caller's own, which an agent cannot
            ask; or it is ``dcp.save``.

    Example::

        agent = SnapshotAgent("run")
        writer = AgentWriter("run/step-100", agent, step=100)
        future = dcp.async_save(state, storage_writer=writer)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        agent: SnapshotAgent,
        *,
        step: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        self.agent = agent
        self.step = step
        self._handed_over: StagedSave | None = None

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError("an AgentWriter saves in a thread: another process has its own")

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies everything into a slot; leaves nothing for DCP to save."""
        self._handed_over = None
        self._handed_over = self.agent.stage(
            state_dict, self.path, step=self.step, sync=self.sync_files, persist=False
        )
        if self._handed_over is None:
            raise CancelledError(f"the save of {self.path} is skipped: former saves keep all slots")
        return {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turns to another checkpoint, between saves.

        Raises:
            ValueError: One was staged already, for the path that the writer had then.
        """
        staged = self._handed_over
        super().reset(checkpoint_id)
        if staged is not None and Path(os.path.abspath(self.path)) != staged.directory:
            self._handed_over = None
            raise ValueError(
                f"the state was staged for {staged.directory}, and is to be saved as {self.path}: "
                "give the path to AgentWriter, and no checkpoint_id to DCP"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Has nothing to plan."""
        if self._handed_over is None or len(plan.items):
            raise UnsupportedError("an AgentWriter is for dcp.async_save: dcp.save has FastWriter")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Likewise."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Waits until the agent has committed."""
        staged, self._handed_over = self._handed_over, None
        with portable_errors():
            if type(planner) not in (DefaultSavePlanner, FastSavePlanner):
                raise UnsupportedError(
                    f"an agent saves what DCP's default planner lists, and not as "
                    f"{type(planner).__qualname__} would have it"
                )
            assert staged is not None
            self.agent.persist(staged)
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Has DCP return the metadata that the agent has committed."""
        vars(metadata).update(vars(FastReader(self.path).read_metadata()))
