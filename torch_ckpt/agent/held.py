"""What a rank holds, and which share of that it copies where other ranks hold the same."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageWriterTransforms
from torch.distributed.checkpoint.stateful import Stateful

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import to_plain
from torch_ckpt.agent.memory import (
    NOT_SHARED,
    Save,
    complete_slots,
    sharing_of,
    whole_saves,
)
from torch_ckpt.errors import CheckpointError, UnsupportedError
from torch_ckpt.formats.object_pickles import warn_of_refused
from torch_ckpt.planning.plan_cache import digest_of
from torch_ckpt.planning.planned import ListedItems, to_write_item
from torch_ckpt.planning.save_planner import FastSavePlanner
from torch_ckpt.storage.data_file import pickle_item

__all__ = ["Held", "OwnShare"]

_THREADS = min(4, os.cpu_count() or 1)


class Held:
    """Some of what a rank holds of a state dict, and where it goes in a slot.

    Args:
        planner: Which has listed it.
        listed: As what; of this here may be a part.
        items: What of it is here.
        sources: The tensor of each; ``None`` for objects, and where only DCP can tell.
        pickled: What was pickled already, by item.

    Attributes:
        items: As given.
        digest: Of all that was listed.
        nbytes: That it takes in a slot.
        batch: Its tensors.
    """

    def __init__(
        self,
        planner: FastSavePlanner,
        listed: ListedItems,
        items: _native.ItemTable,
        sources: list[Any],
        pickled: Mapping[int, memoryview],
    ) -> None:
        self.items = items
        self.digest = listed.digest
        self._planner = planner
        self._listed = listed
        self._sources = sources
        self.batch = _tensor_view.look(sources, writable=False, stages=True)
        work = _native.Work(items)
        planned = _native.PlannedFile(work, self.batch)
        nbytes = work.nbytes
        self._pickled = dict(pickled)
        refused: dict[str, Sequence[str]] = {}
        for number in planned.own:
            if number not in pickled:
                item = to_write_item(work.describe(number))
                one = pickle_item(item, planner, _StorageWriterTransforms(None))
                self._pickled[number] = one.data
                if one.refused:
                    refused[item.index.fqn] = one.refused
            nbytes[number] = len(self._pickled[number])
        warn_of_refused(refused)
        self._copied = [planned.position(number) for number in planned.copied]
        self._nbytes = nbytes
        self._offsets = []
        self.nbytes = 0
        for each in nbytes:
            self._offsets.append(_native.place_in_snapshot(self.nbytes, each))
            self.nbytes = self._offsets[-1] + each

    @classmethod
    def of(cls, state_dict: dict[str, Any]) -> Held:
        """All of a state dict.

        Raises:
            UnsupportedError: It has no form in columns.
        """
        planner = FastSavePlanner(enable_plan_caching=False)
        planner.set_up_planner(_without_stateful(state_dict))
        listed: Any = planner.create_local_plan().items
        if not isinstance(listed, ListedItems) or listed.encoded is None:
            raise UnsupportedError("this state dict has no form in columns: save it without agent")
        items = _native.ItemTable.decode(listed.encoded)
        sources = planner.sources(range(len(items)))
        assert sources is not None
        return cls(planner, listed, items, sources, {})

    def part(self, copied: _Copied) -> Held:
        """What of it is copied."""
        sources = [self._sources[number] for number in copied.numbers]
        for at, (first_row, rows) in copied.rows.items():
            sources[at] = sources[at].detach().narrow(0, first_row, rows)
        pickled = {
            at: self._pickled[number]
            for at, number in enumerate(copied.numbers)
            if number in self._pickled
        }
        return Held(self._planner, self._listed, copied.items, sources, pickled)

    def table(self, directory: str, *, sync: bool) -> bytes:
        """What the slot says of it."""
        extents = [
            (number, offset, nbytes, number not in self._pickled)
            for number, (offset, nbytes) in enumerate(zip(self._offsets, self._nbytes, strict=True))
        ]
        return _native.encode_slot_table(
            os.fsencode(directory),
            CURRENT_DCP_VERSION,
            sync,
            self.items.encode(),
            self._listed.paths,
            extents,
        )

    def copy_to(self, slot: _native.Slot, devices: _native.Devices) -> None:
        """Copies everything."""
        elsewhere = {*self._copied, *self._pickled}
        here = [number for number in range(len(self._offsets)) if number not in elsewhere]
        slot.copy(self.batch, here, [self._offsets[n] for n in here], _THREADS, devices)
        for number in self._copied:
            plain = to_plain(self._sources[number])
            batch = _tensor_view.look([plain], writable=False)
            slot.copy(batch, [0], [self._offsets[number]], _THREADS, devices)
        for number, data in self._pickled.items():
            slot.put(self._offsets[number], data)


def _without_stateful(state_dict: dict[str, Any]) -> dict[str, Any]:
    """As DCP does (``_stateful_to_state_dict``), which for each tensor takes 25 microseconds."""
    return {
        key: value.state_dict()
        if not isinstance(value, torch.Tensor) and isinstance(value, Stateful)
        else value
        for key, value in state_dict.items()
    }


@dataclass(frozen=True)
class _Copied:
    """What a rank copies of what it holds.

    Attributes:
        numbers: Of the items.
        rows: Of those that are cut, by position in ``numbers``: the first, and how many.
        items: What that is.
    """

    numbers: Sequence[int]
    rows: Mapping[int, tuple[int, int]]
    items: _native.ItemTable


class OwnShare:
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
        self._copied: _Copied | None = None  # Of that; made when it is needed.
        self._copied_all: Save = b"", -1  # The save in which this rank has done so last.

    def is_known(self, held: Held, save: Save) -> bool:
        """Whether this rank can copy its share, if all others can."""
        if self._listed != held.digest:
            self._listed, self._copied = held.digest, None
            tensors = digest_of(held.items.tensors().encode())
            if tensors != self.tensors:
                self.tensors = tensors
                self.forget()
        is_next = self._copied_all == (save[0], save[1] - 1)
        return self.sharing != NOT_SHARED or is_next

    def forget(self) -> None:
        """From now on this rank does not know its share."""
        self.sharing, self._copied, self._copied_all = NOT_SHARED, None, (b"", -1)

    def all_copied(self, save: Save) -> None:
        """This rank has copied all that it holds."""
        self._copied_all = save

    def of(self, held: Held) -> Held:
        """What this rank copies, where all know their shares.

        Raises:
            CheckpointError: What ranks have copied in the save before is gone.
        """
        if self.sharing == NOT_SHARED:
            self._share_out()
        if self._copied is None:
            assignment, items = held.items.share(self._assigned)
            work = _native.Work(held.items, assignment)
            described = ((at, work.describe(at)[-1]) for at in range(len(work)))
            rows = {at: cut for at, cut in described if cut is not None}
            self._copied = _Copied(work.items, rows, items)
        return held.part(self._copied)

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
