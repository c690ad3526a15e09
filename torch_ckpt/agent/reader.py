"""SnapshotReader: loads what ranks have left in memory."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from torch_ckpt.agent.trainer import MemoryCheckpoint
from torch_ckpt.errors import NotFoundError
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.snapshot import ELSEWHERE, open_snapshot
from torch_ckpt.storage.reader import FastReader

__all__ = ["SnapshotReader"]


class SnapshotReader(FastReader):
    """Loads a save that is still in memory, into any layout, by the plans that load files.

    What several ranks have left is read by each from where it is: nothing is exchanged. So where
    ranks are on several machines, each loads what the ranks of its own machine had. If one wants
    more than that, the load fails on all ranks before any of it is loaded: the disk has it all.

    Args:
        checkpoint: As :meth:`SnapshotAgent.newest` finds it.
        **options: As for :class:`FastReader`.

    Attributes:
        has_begun: Whether something may have been loaded.

    Raises:
        NotFoundError: A slot holds no complete snapshot any more. Or this machine does not have
            what this rank wants.
        MismatchError: The slots are not those of one save any more.

    Example::

        found = agent.newest()
        if found is not None:
            dcp.load(state, storage_reader=SnapshotReader(found))
    """

    def __init__(self, checkpoint: MemoryCheckpoint, **options: Any) -> None:
        super().__init__(checkpoint.folder, **{**options, "exchange": "off"})
        self.checkpoint = checkpoint
        self.has_begun = False

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Looks whether all that is wanted is here."""
        elsewhere = self._elsewhere()
        for item in plan.items if elsewhere else ():
            offsets = item.storage_index.offset
            if (item.storage_index.fqn, tuple(offsets or ())) in elsewhere:
                raise NotFoundError(
                    f"cannot load {item.storage_index.fqn!r} from memory: what is at "
                    f"{list(offsets or ())} of it is on another machine"
                )
        return super().prepare_local_plan(plan)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every item of the plan into place."""
        self.has_begun = True
        return super().read_data(plan, planner)

    def _elsewhere(self) -> set[tuple[str, tuple[int, ...]]]:
        """FQNs and offsets of the boxes that are not here."""
        files = [] if self._index is None else [name for name, _ in self._index.files]
        if self._index is None or ELSEWHERE not in files:
            return set()
        number = files.index(ELSEWHERE)
        return {
            (fqn, tuple(box[0]))
            for fqn, _, boxes in self._index
            for box in boxes
            if box[2] == number
        }

    def _open(self, prefix: str) -> Opened:
        if prefix:
            raise NotFoundError("in memory no rank has saved alone")
        slots = self.checkpoint.slots
        return open_snapshot(self.checkpoint.folder, slots, trust_pickle=self.trust_pickle)
