"""The items that a rank writes: columns, source tensors, and the split into files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import DTYPE_CODES, gc_paused, is_temporary, printable
from torch_ckpt.coordination.current_call import current_call
from torch_ckpt.coordination.statefuls import refuse_statefuls
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.planning.columns import overrides
from torch_ckpt.planning.item_views import PlannedItems, to_write_item
from torch_ckpt.planning.replicas import CutItem, check_shard, work_of
from torch_ckpt.planning.save_planner import FastSavePlanner

__all__ = [
    "LatePlanner",
    "RankWork",
    "Unresolved",
    "refuse_objects",
    "resolve_whole",
    "split",
    "work_for",
]

_CHOOSES_OBJECTS = ("resolve_data", "lookup_object", "transform_object")


def refuse_objects(planner: object) -> None:
    """Raises UnsupportedError if a planner would pickle a ``Stateful``, like DCP's planners.

    Saves of this package have already replaced such objects by their state dicts.
    """
    kind = FastSavePlanner if isinstance(planner, FastSavePlanner) else DefaultSavePlanner
    is_ours = current_call() is not None
    if isinstance(planner, kind) and not is_ours and not overrides(planner, kind, _CHOOSES_OBJECTS):
        refuse_statefuls(planner.state_dict)


class LatePlanner(DefaultSavePlanner):
    """A planner that creates a tensor when it is written, with the dtype and sizes of the plan."""


class Unresolved:
    """The source of an item whose tensor the planner creates on each resolve.

    The writer resolves the item again when it writes it, so only one such tensor is in memory at a
    time.
    """


@dataclass(frozen=True)
class RankWork:
    """The items that a rank writes. All sequences are indexed by the position of the item.

    Attributes:
        work: The items, in columns.
        sources: Tensor to store for each item. ``None`` for items that torch pickles: objects,
            tensors that only torch can store, and all items if there is a stream transform.
        items: DCP's items of the plan; ``None`` if the plan itself is in columns.
        dtypes: With ``items``: the dtype of each tensor that matches the plan, and so the metadata;
            ``None`` for other items.
        samples: If the save has a base: the digest of a sample of each tensor, 0 if unknown.
        digested: With ``samples``: whether each tensor gets a digest of all elements as well.
    """

    work: _native.Work
    sources: Sequence[torch.Tensor | Unresolved | None]
    items: Sequence[WriteItem] | None = None
    dtypes: Sequence[str | None] = ()
    samples: Sequence[int] = ()
    digested: Sequence[bool] = ()

    def item(self, position: int) -> WriteItem:
        """Returns the item at a position, as a DCP item."""
        if self.items is None:
            return to_write_item(self.work.describe(position))
        return self.items[position]

    def part(self, positions: Sequence[int]) -> RankWork:
        """Returns the work with only the items at these positions."""
        if len(positions) == len(self.work):
            return self

        def select(column: Sequence[Any]) -> list[Any]:
            return [column[position] for position in positions]

        return dataclasses.replace(
            self,
            work=self.work.part(positions),
            sources=select(self.sources),
            items=None if self.items is None else select(self.items),
            dtypes=select(self.dtypes) if self.dtypes else (),
            samples=select(self.samples) if self.samples else (),
            digested=select(self.digested) if self.digested else (),
        )


def work_for(
    plan: SavePlan, planner: SavePlanner, transforms: _StorageWriterTransforms
) -> RankWork:
    """Returns the work of a rank according to its final plan."""
    columns: Any = plan.items
    if (
        isinstance(columns, PlannedItems)
        and isinstance(planner, FastSavePlanner)
        and not transforms.extensions
    ):
        work = columns.work
        sources = planner.sources(work.items)
        if sources is not None:
            return RankWork(work, sources)
    with gc_paused():
        return _in_columns(work_of(plan), planner, transforms)


def split(work: RankWork, count: int | None) -> list[RankWork]:
    """Splits work into ``count`` files of about the same size, or into one for each item."""
    if count is None:
        return [work.part([position]) for position in range(len(work.work))]
    files: list[list[int]] = [[] for _ in range(count)]
    for position, number in enumerate(_native.balance_files(work.work.nbytes, count)):
        files[number].append(position)
    return [work.part(positions) for positions in files if positions]


def _in_columns(
    items: Sequence[WriteItem], planner: SavePlanner, transforms: _StorageWriterTransforms
) -> RankWork:
    """Converts DCP's items to columns. Resolves every tensor: its dtype and sizes may differ.

    Raises UnsupportedError if a shard under a stock planner differs in sizes from its planned box.
    """
    may_resize = overrides(
        planner, DefaultSavePlanner, ("resolve_data", "lookup_object", "transform_object")
    )
    table = _native.ItemTable()
    sources: list[torch.Tensor | Unresolved | None] = []
    written: list[WriteItem] = []
    dtypes: list[str | None] = []

    def add(item: WriteItem, source: torch.Tensor | Unresolved | None, dtype: str | None) -> None:
        written.append(item)
        sources.append(source)
        dtypes.append(dtype)

    def add_box(item: WriteItem, dtype: torch.dtype, sizes: torch.Size) -> str:
        name = _native.DTYPE_NAMES[DTYPE_CODES[dtype]]
        table.add_tensor(
            *(_name(item), name, dtype.itemsize, "contiguous_format", False, False, sizes),
            *(False, [0] * len(sizes), sizes),
        )
        return name

    for planned in items:
        item = _check_cut(planned, planner) if isinstance(planned, CutItem) else planned
        if item is None:
            continue
        if item.type == WriteItemType.BYTE_IO:
            table.add_object(_name(item), 0)
            add(item, None, None)
            continue
        if isinstance(planner, LatePlanner):
            data = item.tensor_data
            assert data is not None
            if data.properties.dtype in DTYPE_CODES:
                name = add_box(item, data.properties.dtype, data.chunk.sizes)
                add(item, Unresolved(), name)
            else:
                table.add_object(_name(item), 0)
                add(item, None, None)
            continue
        tensor = resolve_whole(planner, item)
        if not may_resize:
            check_shard(item, tensor)
        kind = _tensor_view.tensor_kind(tensor)
        if transforms.extensions or kind == _tensor_view.TensorKind.TORCH_ONLY:
            table.add_object(_name(item), 0)
            add(item, None, None)
            continue
        is_live = not is_temporary(tensor)
        if isinstance(item, CutItem):
            tensor = item.rows_of(tensor)
        name = add_box(item, tensor.dtype, tensor.size())
        as_planned = _is_as_planned(item, tensor)
        add(item, tensor if is_live else Unresolved(), name if as_planned else None)
    return RankWork(_native.Work(table), sources, written, dtypes)


def _name(item: WriteItem) -> str:
    """Returns a unique name for a box: the table lists each box as a separate tensor."""
    offset = item.index.offset
    name = printable(item.index.fqn)
    return f"{name} at {list(offset)}" if offset is not None and any(offset) else name


def _check_cut(item: CutItem, planner: SavePlanner) -> WriteItem | None:
    """Returns the item that this rank writes for a cut item; ``None`` if it writes nothing.

    A tensor cannot be cut if its sizes differ from the plan, or if only torch can store it. Then
    the rank of the first rows writes the whole tensor, and the other ranks write nothing.
    """
    tensor = _resolved(planner, item)  # A meta tensor, with values only on other ranks, is not cut.
    is_torch_only = _tensor_view.tensor_kind(tensor) == _tensor_view.TensorKind.TORCH_ONLY
    if not is_torch_only and tensor.size() == item.piece.whole.sizes:
        return item
    return item.whole if item.first_row == 0 else None


def resolve_whole(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """Returns the tensor of an item; for a cut item, the whole tensor.

    Raises UnsupportedError for a meta tensor, because torch's errors would not name it.
    """
    tensor = _resolved(planner, item)
    if tensor.is_meta:
        raise UnsupportedError(
            f"cannot save {item.index.fqn!r}: it is a meta tensor, which has no data"
        )
    return tensor


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    whole = item.whole if isinstance(item, CutItem) and item.whole is not None else item
    tensor = planner.resolve_data(whole)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"the planner resolved {item.index.fqn!r} to a {type(tensor)}")
    # A load refuses the class of a functional collective's result.
    return tensor.wait() if type(tensor) is AsyncCollectiveTensor else tensor


def _is_as_planned(item: WriteItem, tensor: torch.Tensor) -> bool:
    planned = item.tensor_data
    return (
        planned is not None
        and planned.chunk is not None
        and planned.chunk.sizes == tensor.size()
        and planned.properties.dtype == tensor.dtype
    )
