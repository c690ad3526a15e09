"""SnapshotRung: the steps of a run in shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from traceback import StackSummary
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.agent.reader import SnapshotReader
from torch_ckpt.agent.slot_reports import SlotReport, sources_of_whole_saves
from torch_ckpt.agent.snapshot_memory import SnapshotMemory
from torch_ckpt.agent.trainer import SnapshotAgent
from torch_ckpt.commits.terms import Term
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CorruptionError, NotFoundError, StorageError

__all__ = ["SnapshotRung"]


class SnapshotRung:
    """The steps of a run in shared memory, as a rung. ``memory`` finds them."""

    place = "shared memory"

    def __init__(
        self, memory: SnapshotAgent | SnapshotMemory, *, reader: dict[str, Any] | None = None
    ) -> None:
        self._memory = memory
        self.unreadable: dict[int, StorageError] = {}  # Memory is read as a whole, or not at all.
        self._reader = reader or {}

    def report(self) -> SlotReport:
        """Returns the slots in the memory of this machine, on its first rank."""
        return self._memory.slot_report()

    def steps(self, reports: Sequence[SlotReport], lineage: Term | None = None) -> Iterator[int]:
        """Returns the steps whose slots are all in memory on some machine, the newest first."""
        whole = sources_of_whole_saves(reports).values()
        return iter(sorted({sources[0][1].step for sources in whole}, reverse=True))

    def term_of(self, step: int, reports: Sequence[SlotReport]) -> int:
        """Returns the term of the save that :meth:`reader_of` reads; 0 if it has none."""
        whole = sources_of_whole_saves(reports)
        return whole[max(save for save in whole if whole[save][0][1].step == step)][0][1].term

    def damaged(self, reports: Sequence[Any]) -> list[int]:
        """Returns no steps: an incomplete snapshot was never a step."""
        return []

    def reader_of(self, step: int, group: Group, timeout_s: float) -> SnapshotReader:
        """Returns a reader of a step. Called on all ranks.

        Raises CheckpointException if a rank raised. If the step is no longer in memory, the error
        of each rank is a :class:`NotFoundError`.
        """
        try:
            found = self._memory.find(step)
            if found is None:
                raise NotFoundError(f"cannot load step {step}: it is no longer in memory")
        except (CorruptionError, NotFoundError) as error:  # On all ranks.
            failures: dict[int, tuple[BaseException, StackSummary]] = {0: (error, StackSummary())}
            raise CheckpointException(str(error), failures) from error
        return SnapshotReader(found, **self._reader)
