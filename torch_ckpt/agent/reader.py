"""SnapshotReader: loads a checkpoint from the snapshots in memory."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from torch_ckpt.agent.trainer import MemoryCheckpoint
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.snapshot import ELSEWHERE, open_snapshot
from torch_ckpt.storage.reader import FastReader

__all__ = ["SnapshotReader"]


class SnapshotReader(FastReader):
    """Loads a save from memory, into any parallel layout.

    Each rank reads the slots of its machine directly; ranks exchange no data. If the ranks of the
    save were on several machines, a rank can load only shards that ranks of its own machine saved.
    If any rank needs other data, the load fails on all ranks before any tensor changes; load the
    step from disk instead.

    Args:
        checkpoint: Checkpoint to load, from :meth:`SnapshotAgent.newest`.
        **options: Options of :class:`FastReader`.

    Attributes:
        has_begun: Whether tensors may have been changed by the load.

    Raises:
        NotFoundError: A slot no longer contains a complete snapshot, or this machine does not have
            the data that this rank needs.
        MismatchError: The slots no longer belong to one save.

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
        """Checks that this machine has all data of the plan."""
        missing = self._missing()
        for item in plan.items if missing else ():
            offsets = item.storage_index.offset
            if (item.storage_index.fqn, tuple(offsets or ())) in missing:
                raise NotFoundError(
                    f"cannot load {item.storage_index.fqn!r} from memory: its box at "
                    f"{list(offsets or ())} is on another machine"
                )
        return super().prepare_local_plan(plan)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every item of the plan into the tensors of the state dict."""
        self.has_begun = True
        return super().read_data(plan, planner)

    def _missing(self) -> set[tuple[str, tuple[int, ...]]]:
        """Returns the FQNs and offsets of the boxes that only other machines have."""
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

    def _open(self, path: Location, prefix: str) -> Opened:
        if prefix:
            raise NotFoundError(
                f"cannot open {prefix!r} in memory: no rank has a checkpoint of its own there"
            )
        slots = self.checkpoint.slots
        return open_snapshot(self.checkpoint.folder, slots, trust_pickle=self.trust_pickle)
