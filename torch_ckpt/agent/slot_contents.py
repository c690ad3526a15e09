"""The items of a rank's state dict, and their offsets in a slot."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import check_memory, to_plain
from torch_ckpt.coordination.statefuls import state_dicts_of
from torch_ckpt.errors import UnsupportedError, naming, naming_first
from torch_ckpt.formats.allowed_classes import warn_of_refused
from torch_ckpt.planning.item_views import ColumnItems, to_write_item
from torch_ckpt.planning.save_planner import FastSavePlanner, NoColumnsError
from torch_ckpt.staging.copied_state import CopiedState, tensors_in
from torch_ckpt.storage.data_file import pickle_item

__all__ = ["Selection", "SlotContents"]

_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Selection:
    """The share of a rank's items that the rank copies.

    ``numbers`` are the numbers of the items in the rank's full list. ``rows`` contains first row
    and number of rows of each cut item, by position in ``numbers``.
    """

    numbers: Sequence[int]
    rows: Mapping[int, tuple[int, int]]
    items: _native.ItemTable


def _inspected(*sources: object) -> _native.TensorBatch:
    return _tensor_view.inspect(list(sources), writable=False, stages=True)


def _named(work: _native.Work, sources: Sequence[object]) -> Iterator[tuple[str, object]]:
    return ((to_write_item(work.describe(at)).index.fqn, one) for at, one in enumerate(sources))


class SlotContents:
    """Items of a rank's state dict, and their offsets in a slot.

    ``items`` may be a subset of the items that the planner listed; ``digest`` is the digest of the
    full list. A source is ``None`` for an object, and for a tensor that only DCP can resolve.
    ``pickled`` contains the bytes of items that are already pickled, by number. ``nbytes`` is the
    size of all items in the slot, including padding. ``batch`` contains the tensors.
    """

    def __init__(
        self,
        planner: FastSavePlanner,
        listed: ColumnItems,
        items: _native.ItemTable,
        sources: list[Any],
        pickled: Mapping[int, memoryview],
    ) -> None:
        self.items = items
        self.digest = listed.digest
        self._planner = planner
        self._listed = listed
        self._sources = sources
        work = _native.Work(items)
        with naming_first("save", lambda: _named(work, sources), _inspected):
            self.batch = _inspected(*sources)
        planned = _native.PlannedFile(work, self.batch)
        nbytes = work.nbytes
        self._pickled = dict(pickled)
        refused: dict[str, Sequence[str]] = {}
        for number in planned.own:
            if number not in pickled:
                item = to_write_item(work.describe(number))
                self._pickled[number], classes = self._pickle(item)
                if classes:
                    refused[item.index.fqn] = classes
            nbytes[number] = len(self._pickled[number])
        warn_of_refused(refused)
        self._copied = [planned.position(number) for number in planned.copied]
        for number in self._copied:
            fqn = to_write_item(work.describe(number)).index.fqn
            with naming("save", fqn):
                check_memory(self._sources[number])
        self._nbytes = nbytes
        self._offsets = []
        self.nbytes = 0
        for item_nbytes in nbytes:
            self._offsets.append(_native.place_in_snapshot(self.nbytes, item_nbytes))
            self.nbytes = self._offsets[-1] + item_nbytes

    def _pickle(self, item: WriteItem) -> tuple[memoryview, Sequence[str]]:
        """Pickles an item. Tensors in containers are pickled without the rest of their storages."""
        values, fqn = self._planner.state_dict, item.index.fqn
        if item.type != WriteItemType.BYTE_IO or not tensors_in(value := values[fqn]):
            return pickle_item(item, self._planner)
        with naming("save", fqn):
            values[fqn] = CopiedState({fqn: value}).state[fqn]
        try:
            return pickle_item(item, self._planner)
        finally:
            values[fqn] = value

    @classmethod
    def of(cls, state_dict: dict[str, Any]) -> SlotContents:
        """Returns all items of a state dict. Raises UnsupportedError if it has no columnar form."""
        planner = FastSavePlanner(enable_plan_caching=False)
        planner.set_up_planner(state_dicts_of(state_dict))
        try:
            listed = planner.list_items()
        except NoColumnsError as error:
            raise UnsupportedError(
                "cannot stage this state dict: it has no columnar form, so save it without an agent"
            ) from error
        assert listed.encoded is not None
        items = _native.ItemTable.decode(listed.encoded)
        sources = planner.sources(range(len(items)))
        assert sources is not None
        return cls(planner, listed, items, sources, {})

    def tensors(self) -> list[Any]:
        """Returns the tensors, in order; ``None`` for one that only DCP can resolve."""
        return [self._sources[number] for number in self.items.tensor_numbers]

    def select(self, selection: Selection) -> SlotContents:
        """Returns the contents of a selection."""
        sources = [self._sources[number] for number in selection.numbers]
        for at, (first_row, rows) in selection.rows.items():
            sources[at] = sources[at].detach().narrow(0, first_row, rows)
        pickled = {
            at: self._pickled[number]
            for at, number in enumerate(selection.numbers)
            if number in self._pickled
        }
        return SlotContents(self._planner, self._listed, selection.items, sources, pickled)

    def table(self, directory: str, *, sync: bool) -> bytes:
        """Returns the encoded table of the slot."""
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
        """Copies all items to the slot."""
        others = {*self._copied, *self._pickled}
        direct = [number for number in range(len(self._offsets)) if number not in others]
        slot.copy(self.batch, direct, [self._offsets[n] for n in direct], _THREADS, devices)
        for number in self._copied:
            plain = to_plain(self._sources[number])
            batch = _tensor_view.inspect([plain], writable=False)
            slot.copy(batch, [0], [self._offsets[number]], _THREADS, devices)
        for number, data in self._pickled.items():
            slot.put(self._offsets[number], data)
