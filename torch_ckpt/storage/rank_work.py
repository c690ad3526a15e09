"""What a rank writes: its items in columns, what each is stored from, and how they fill files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import DTYPE_CODES, gc_paused, is_temporary, printable
from torch_ckpt.planning.item_views import PlannedItems, to_write_item
from torch_ckpt.planning.replicas import CutItem, work_of
from torch_ckpt.planning.save_planner import FastSavePlanner

__all__ = ["RankWork", "Unresolved", "resolve_whole", "split", "work_for"]


class Unresolved:
    """The source of a tensor that its planner makes anew whenever it resolves the item.

    It is resolved again when it is written: no two such tensors need be in memory at a time.
    """


@dataclass(frozen=True)
class RankWork:
    """Items that a rank writes.

    Attributes:
        work: The items, in columns.
        sources: By position the tensor that is stored; ``None`` for what torch pickles: objects,
            tensors of its own, whatever a stream transform changes.
        waits: Whether an item need not be written before all others.
        items: By position the items of a planner that plans in DCP's terms; ``None`` where the
            columns are those of the plan.
        dtypes: Beside ``items``: the dtype of each tensor that is what the plan, and so the
            metadata, says of it; ``None`` for the others.
    """

    work: _native.Work
    sources: Sequence[torch.Tensor | Unresolved | None]
    waits: Sequence[bool]
    items: Sequence[WriteItem] | None = None
    dtypes: Sequence[str | None] = ()

    def item(self, position: int) -> WriteItem:
        """An item in DCP's terms."""
        if self.items is None:
            return to_write_item(self.work.describe(position))
        return self.items[position]

    def part(self, positions: Sequence[int]) -> RankWork:
        """The items at these positions."""
        if len(positions) == len(self.work):
            return self

        def of(column: Sequence[Any]) -> list[Any]:
            return [column[at] for at in positions]

        return dataclasses.replace(
            self,
            work=self.work.part(positions),
            sources=of(self.sources),
            waits=of(self.waits),
            items=None if self.items is None else of(self.items),
            dtypes=of(self.dtypes) if self.dtypes else (),
        )


def work_for(
    plan: SavePlan,
    planner: SavePlanner,
    transforms: _StorageWriterTransforms,
    *,
    can_wait: Callable[[torch.Tensor | None], bool] | None = None,
) -> RankWork:
    """What a rank is to write by its final plan.

    Args:
        plan: That of the rank.
        planner: Its own.
        transforms: What is done to the bytes of each item.
        can_wait: Tells what need not be written first, of an object by ``None``; ``None`` if all
            can wait.
    """
    columns: Any = plan.items
    if (
        isinstance(columns, PlannedItems)
        and isinstance(planner, FastSavePlanner)
        and not transforms.extensions
    ):
        work = columns.work
        sources = planner.sources(work.items)
        if sources is not None:
            waits = [can_wait is None or can_wait(source) for source in sources]
            return RankWork(work, sources, waits)
    with gc_paused():
        return _in_columns(work_of(plan), planner, transforms, can_wait or (lambda _: True))


def split(work: RankWork, count: int | None) -> tuple[list[RankWork], list[RankWork]]:
    """Splits work over files of about the same size.

    Args:
        work: That of a rank.
        count: How many files; one for each item if ``None``.

    Returns:
        What goes into each file that is to be written before all others, and into each other.
    """
    nbytes = work.work.nbytes

    def files_of(waits: bool) -> list[RankWork]:
        chosen = [at for at, wait in enumerate(work.waits) if wait == waits]
        if count is None:
            return [work.part([at]) for at in chosen]
        files: list[list[int]] = [[] for _ in range(count)]
        numbers = _native.balance_files([nbytes[at] for at in chosen], count)
        for at, number in zip(chosen, numbers, strict=True):
            files[number].append(at)
        return [work.part(positions) for positions in files if positions]

    return files_of(False), files_of(True)


def _in_columns(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    transforms: _StorageWriterTransforms,
    can_wait: Callable[[torch.Tensor | None], bool],
) -> RankWork:
    """Resolves every tensor to see what it really is; a plan may say otherwise."""
    table = _native.ItemTable()
    sources: list[torch.Tensor | Unresolved | None] = []
    waits: list[bool] = []
    written: list[WriteItem] = []
    dtypes: list[str | None] = []

    def add(item: WriteItem, source: torch.Tensor | Unresolved | None, dtype: str | None) -> None:
        written.append(item)
        sources.append(source)
        dtypes.append(dtype)

    for listed in items:
        item = _as_it_is(listed, planner) if isinstance(listed, CutItem) else listed
        if item is None:
            continue
        if item.type == WriteItemType.BYTE_IO:
            waits.append(can_wait(None))
            table.add_object(_name(item), 0)
            add(item, None, None)
            continue
        tensor = resolve_whole(planner, item)
        waits.append(can_wait(tensor))
        kind = _tensor_view.tensor_kind(tensor)
        if transforms.extensions or kind == _tensor_view.TensorKind.TORCHS_OWN:
            table.add_object(_name(item), 0)
            add(item, None, None)
            continue
        is_live = not is_temporary(tensor)
        if isinstance(item, CutItem):
            tensor = item.rows_of(tensor)
        dtype, sizes = tensor.dtype, tensor.size()
        name = _native.DTYPE_NAMES[DTYPE_CODES[dtype]]
        table.add_tensor(
            *(_name(item), name, dtype.itemsize, "contiguous_format", False, False, sizes),
            *(False, [0] * len(sizes), sizes),
        )
        as_planned = _is_as_planned(item, tensor)
        add(item, tensor if is_live else Unresolved(), name if as_planned else None)
    return RankWork(_native.Work(table), sources, waits, written, dtypes)


def _name(item: WriteItem) -> str:
    """Tells the boxes of one tensor apart: in the table, each stands for a tensor of its own."""
    offset = item.index.offset
    name = printable(item.index.fqn)
    return f"{name} at {list(offset)}" if offset is not None and any(offset) else name


def _as_it_is(item: CutItem, planner: SavePlanner) -> WriteItem | None:
    """The item, unless it cannot be cut: one of another form than planned, or that torch pickles.

    Then the rank with its first rows writes it whole, and the others, to whom it looks the same,
    write nothing of it.
    """
    tensor = resolve_whole(planner, item)
    is_torchs_own = _tensor_view.tensor_kind(tensor) == _tensor_view.TensorKind.TORCHS_OWN
    if not is_torchs_own and tensor.size() == item.piece.whole.sizes:
        return item
    return item.whole if item.first_row == 0 else None


def resolve_whole(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """The tensor of an item, or of the one that it is cut from."""
    whole = item.whole if isinstance(item, CutItem) and item.whole is not None else item
    tensor = planner.resolve_data(whole)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"the planner resolved {item.index.fqn!r} to a {type(tensor)}")
    return tensor


def _is_as_planned(item: WriteItem, tensor: torch.Tensor) -> bool:
    planned = item.tensor_data
    return (
        planned is not None
        and planned.chunk is not None
        and planned.chunk.sizes == tensor.size()
        and planned.properties.dtype == tensor.dtype
    )
