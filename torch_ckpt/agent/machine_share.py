"""A rank's share of the replicas on its machine, from save to save."""

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
    """A rank's share of what the ranks of its machine hold alike, from save to save.

    While all ranks hold the same tensors as in the save before, each copies its share of them.
    Otherwise each copies all that it holds. So ranks agree in each save.

    Args:
        folder: Of the run's memory.
        run: Its 16 bytes.
        rank: Whose share it is.

    Attributes:
        tensors: Stands for the tensors that the rank held last: 16 bytes.
        sharing: Stands for how the ranks of the machine share them out; ``NOT_SHARED`` where each
            copies all.
    """

    def __init__(self, folder: Path, run: bytes, rank: int) -> None:
        self._folder = folder
        self._run = run
        self._rank = rank
        self.tensors = b""
        self.sharing = NOT_SHARED
        self._assigned = b""  # Of the tensors, if they are shared out.
        self._listed = b""  # What was listed last, objects and all.
        self._selection: Selection | None = None  # Of that; made when it is needed.
        self._copied_all: Save = b"", -1  # The save in which this rank has done so last.

    def is_known(self, contents: SlotContents, save: Save) -> bool:
        """Whether this rank can copy its share, if all others can."""
        if self._listed != contents.digest:
            self._listed, self._selection = contents.digest, None
            tensors = digest_of(contents.items.tensors().encode())
            if tensors != self.tensors:
                self.tensors = tensors
                self.forget()
        is_next = self._copied_all == (save[0], save[1] - 1)
        return self.sharing != NOT_SHARED or is_next

    def forget(self) -> None:
        """From now on this rank does not know its share."""
        self.sharing, self._selection, self._copied_all = NOT_SHARED, None, (b"", -1)

    def all_copied(self, save: Save) -> None:
        """This rank has copied all that it holds."""
        self._copied_all = save

    def of(self, contents: SlotContents) -> SlotContents:
        """What this rank copies, where all know their shares.

        Raises:
            CheckpointError: What ranks have copied in the save before is gone.
        """
        if self.sharing == NOT_SHARED:
            self._share_out()
        if self._selection is None:
            assignment, items = contents.items.share(self._assigned)
            work = _native.Work(contents.items, assignment)
            described = ((at, work.describe(at)[-1]) for at in range(len(work)))
            rows = {at: cut for at, cut in described if cut is not None}
            self._selection = Selection(work.items, rows, items)
        return contents.select(self._selection)

    def _share_out(self) -> None:
        """Shares out what all ranks have listed in the save in which they copied everything."""
        of_save = whole_saves(complete_slots(self._folder, self._run)).get(self._copied_all, [])
        if not of_save:
            raise CheckpointError("what the ranks of this machine have copied last is gone")
        headers = [header for header, _ in of_save]
        found = [_native.Slot.open(os.fsencode(path), False).read() for _, path in of_save]
        tables = [_native.ItemTable.decode(one.items).tensors().encode() for one in found]
        # Other machines would cut a tensor elsewhere, and pieces overlap.
        split = headers[0].node_count == 1
        plan = _native.GlobalPlan(tables, len(tables), split=split, whole=False)
        self._assigned = plan.assignment([header.rank for header in headers].index(self._rank))
        self.sharing = sharing_of(headers)
