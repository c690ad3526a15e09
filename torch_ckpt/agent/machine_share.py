"""A rank's share of the replicas on its machine, across saves."""

from __future__ import annotations

import os
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.agent.memory import (
    NOT_SHARED,
    Save,
    complete_slots,
    sharing_of,
    whole_saves,
)
from torch_ckpt.agent.slot_contents import Selection, SlotContents
from torch_ckpt.errors import CheckpointError
from torch_ckpt.planning.plan_cache import digest_of

__all__ = ["MachineShare"]


class MachineShare:
    """A rank's share of the replicas on its machine, across saves.

    If every rank has the same tensors as in the previous save, each copies only its share of the
    replicas. Otherwise every rank copies all of its items. The ranks decide this in each save.

    Args:
        folder: Folder of the run's shared memory.
        run: 16 bytes that identify the run.
        rank: This rank.

    Attributes:
        tensors: 16 bytes that identify the tensors of the rank in its last save.
        sharing: 16 bytes that identify how the ranks of the machine divide their replicas;
            ``NOT_SHARED`` if each copies all of its items.
    """

    def __init__(self, folder: Path, run: bytes, rank: int) -> None:
        self._folder = folder
        self._run = run
        self._rank = rank
        self.tensors = b""
        self.sharing = NOT_SHARED
        self._assigned = b""  # Encoded assignment, if the replicas are shared.
        self._listed = b""  # Digest of the last item list, objects included.
        self._selection: Selection | None = None  # For that list; computed on first use.
        self._copied_all: Save = b"", -1  # Last save in which all items were copied.

    def can_share(self, contents: SlotContents, save: Save) -> bool:
        """Returns whether this rank can copy its share in a save, if all other ranks can."""
        if self._listed != contents.digest:
            self._listed, self._selection = contents.digest, None
            tensors = digest_of(contents.items.tensors().encode())
            if tensors != self.tensors:
                self.tensors = tensors
                self.reset()
        is_next = self._copied_all == (save[0], save[1] - 1)
        return self.sharing != NOT_SHARED or is_next

    def reset(self) -> None:
        """Discards the share, so that the rank copies all of its items."""
        self.sharing, self._selection, self._copied_all = NOT_SHARED, None, (b"", -1)

    def set_copied_all(self, save: Save) -> None:
        """Records a save in which this rank copied all of its items."""
        self._copied_all = save

    def select(self, contents: SlotContents) -> SlotContents:
        """Returns the contents that this rank copies when all ranks copy shares.

        Raises:
            CheckpointError: The slots of the previous save are gone.
        """
        if self.sharing == NOT_SHARED:
            self._assign_shares()
        if self._selection is None:
            assignment, items = contents.items.share(self._assigned)
            work = _native.Work(contents.items, assignment)
            described = ((at, work.describe(at)[-1]) for at in range(len(work)))
            rows = {at: cut for at, cut in described if cut is not None}
            self._selection = Selection(work.items, rows, items)
        return contents.select(self._selection)

    def _assign_shares(self) -> None:
        """Assigns shares from the item lists of the save in which all ranks copied everything."""
        slots = whole_saves(complete_slots(self._folder, self._run)).get(self._copied_all, [])
        if not slots:
            raise CheckpointError(
                "cannot assign shares on this machine: the slots of the previous save are gone"
            )
        headers = [header for header, _ in slots]
        snapshots = [_native.Slot.open(os.fsencode(path), False).read() for _, path in slots]
        tables = [_native.ItemTable.decode(s.items).tensors().encode() for s in snapshots]
        # Another machine may split a tensor at other rows, so that the boxes would overlap.
        split = headers[0].node_count == 1
        plan = _native.GlobalPlan(tables, len(tables), split=split, whole=False)
        self._assigned = plan.assignment([header.rank for header in headers].index(self._rank))
        self.sharing = sharing_of(headers)
