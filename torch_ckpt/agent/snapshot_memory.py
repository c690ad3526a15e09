"""SnapshotMemory: finds the steps of a run in shared memory, also without an agent."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from torch_ckpt.agent.client import Member
from torch_ckpt.agent.memory import folder_of, open_folder
from torch_ckpt.agent.reader import MemoryCheckpoint, find_snapshot
from torch_ckpt.agent.slot_reports import SlotReport, former_run, machine_slots
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import StorageError

__all__ = ["SnapshotMemory"]


class SnapshotMemory:
    """The shared memory of a run, which the ranks read together. It needs no agent.

    A machine whose memory cannot be used has no slots. Nor has the memory of another run that began
    at the same path.
    """

    def __init__(self, member: Member, group: Group, timeout_s: float) -> None:
        self._member, self._group, self._timeout_s = member, group, timeout_s
        self._folder: Path | None = None
        with contextlib.suppress(StorageError):
            self._folder = open_folder(member.run)

    def slot_report(self) -> SlotReport:
        """Returns the slots in memory on the first rank of this machine; nothing on others."""
        member, folder = self._member, self._folder
        if folder is None or not member.is_first_here or former_run(folder, member.run_id):
            return member.node, []
        return member.node, machine_slots(folder, member.run)

    def find(self, step: int | None) -> MemoryCheckpoint | None:
        """Returns the newest save of a step, or of any; see :meth:`SnapshotAgent.find`."""
        with self._group.method("find a snapshot", self._timeout_s):
            decide = functools.partial(self._group.decide, timeout_s=self._timeout_s)
            folder = folder_of(self._member.run)
            return find_snapshot(step, self._member, folder, self.slot_report, decide)
