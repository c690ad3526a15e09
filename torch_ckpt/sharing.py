"""Shares out what several ranks hold, so that all ranks write about as much.

The planner, stock's or anybody's, lists what each rank holds and gives each replica to one rank.
From the full lists, which travel beside the plans, the engine then decides anew which rank writes
what, by bytes, and cuts large tensors by rows.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_ckpt import _native

__all__ = ["CutItem", "CutPiece", "HeldItems", "list_held", "merge_cuts", "share_out"]

_OBJECT_NBYTES = 2048  # What torch.save makes of a number or a short text.


@dataclass(frozen=True)
class CutItem(WriteItem):
    """Some rows of a tensor that several ranks hold, each of which writes others.

    Attributes:
        whole: The item that the planner knows.
        first_row: Where the rows of this one begin in it, along its first dimension.
    """

    whole: WriteItem | None = None
    first_row: int = 0

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This item's rows of what the planner has resolved ``whole`` to."""
        assert self.tensor_data is not None
        assert self.tensor_data.chunk is not None
        return tensor.detach().narrow(0, self.first_row, self.tensor_data.chunk.sizes[0])


@dataclass(frozen=True)
class CutPiece:
    """A box that was stored, of a tensor that was cut, and the box that the planner knows."""

    fqn: str
    whole: ChunkStorageMetadata
    piece: ChunkStorageMetadata


@dataclass(frozen=True)
class HeldItems:
    """All that a rank holds, in ``SavePlan.storage_data`` on its way to the coordinator.

    Attributes:
        encoded: As :meth:`_native.ItemTable.encode` gives it.
        count: How many items that is.
        ranks_per_node: How many ranks share a machine, as the rank knows.
    """

    encoded: bytes
    count: int
    ranks_per_node: int


def list_held(items: Sequence[WriteItem]) -> HeldItems:
    """Lists what a rank holds.

    Raises:
        ValueError: An item describes no tensor that could be.
    """
    table = _native.ItemTable()
    words: dict[Any, str] = {}  # Of dtypes and memory formats; naming one takes longer than this.
    for item in items:
        data = item.tensor_data
        if data is None or data.chunk is None:
            table.add_object(item.index.fqn, _OBJECT_NBYTES)
            continue
        properties = data.properties
        dtype, memory_format = properties.dtype, properties.memory_format
        for value in (dtype, memory_format):
            if value not in words:
                words[value] = str(value).removeprefix("torch.")
        table.add_tensor(
            item.index.fqn,
            words[dtype],
            dtype.itemsize,
            words[memory_format],
            properties.requires_grad,
            properties.pin_memory,
            data.size,
            item.type == WriteItemType.SHARD,
            data.chunk.offsets,
            data.chunk.sizes,
        )
    return HeldItems(table.encode(), len(table), int(os.environ.get("LOCAL_WORLD_SIZE", 0)))


def share_out(plans: list[SavePlan]) -> list[SavePlan]:
    """Decides which rank writes what of these plans, which the planner has made.

    Returns:
        The plans, with items moved to other ranks that hold them, or cut. What the planner has left
        out is left out, and what the lists do not know stays where it is.

    Raises:
        MismatchError: Ranks disagree on the dtype or sizes of a tensor.
    """
    plans = _whole_plans(plans)
    held = [plan.storage_data for plan in plans]
    if len(plans) < 2 or not all(isinstance(one, HeldItems) for one in held):
        return plans
    planned = sum(len(plan.items) for plan in plans)
    if planned == sum(one.count for one in held):
        return plans  # Nothing is held twice.
    try:
        shared = _native.GlobalPlan([one.encoded for one in held], held[0].ranks_per_node or 1)
    except ValueError:
        return plans  # Boxes that overlap, or holes: the planner has let them pass.
    writers: dict[MetadataIndex, list[tuple[int, tuple[int, int] | None]]] = {}
    for rank, one in enumerate(held):
        for fqn, offsets, rows in shared.written(rank, one.encoded):
            index = MetadataIndex(fqn, None if offsets is None else torch.Size(offsets))
            writers.setdefault(index, []).append((rank, rows))
    items: list[list[WriteItem]] = [[] for _ in plans]
    for planner_rank, plan in enumerate(plans):
        for item in plan.items:
            for rank, rows in writers.get(item.index, [(planner_rank, None)]):
                items[rank].append(item if rows is None else _cut(item, *rows))
    return [dataclasses.replace(plan, items=own) for plan, own in zip(plans, items, strict=True)]


def _whole_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks, where stock's planner sends only those that differ from last time.

    What one rank writes depends on all others: where any has a new plan, all need theirs.
    """
    new = [rank for rank, plan in enumerate(plans) if plan.usable]
    if not new or len(new) == len(plans):
        return plans
    for cached in SavePlanner._cached_global_plan.values():
        if len(cached) == len(plans) and all(cached[rank] is plans[rank] for rank in new):
            return list(cached)
    return plans


def _cut(item: WriteItem, first_row: int, rows: int) -> CutItem:
    data = item.tensor_data
    assert data is not None
    chunk = _rows_of_chunk(data.chunk, first_row, rows)
    return CutItem(
        index=MetadataIndex(item.index.fqn, chunk.offsets),
        type=item.type,
        tensor_data=TensorWriteData(chunk=chunk, properties=data.properties, size=data.size),
        whole=item,
        first_row=first_row,
    )


def _rows_of_chunk(chunk: ChunkStorageMetadata, first_row: int, rows: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size((chunk.offsets[0] + first_row, *chunk.offsets[1:])),
        sizes=torch.Size((rows, *chunk.sizes[1:])),
    )


def merge_cuts(metadata: Metadata, cuts: Sequence[CutPiece]) -> None:
    """Has metadata list the boxes that were stored in place of those that the planner knows.

    Metadata that have them already, because stock's planner keeps them from save to save, stay as
    they are.
    """
    by_fqn: dict[str, list[CutPiece]] = {}
    for cut in cuts:
        by_fqn.setdefault(cut.fqn, []).append(cut)
    entries = dict(metadata.state_dict_metadata)
    for fqn, pieces in by_fqn.items():
        stored = entries[fqn]
        assert isinstance(stored, TensorStorageMetadata)
        wholes = {(cut.whole.offsets, cut.whole.sizes) for cut in pieces}
        new = {cut.piece.offsets: cut.piece for cut in pieces}
        kept = [
            chunk
            for chunk in stored.chunks
            if (chunk.offsets, chunk.sizes) not in wholes and chunk.offsets not in new
        ]
        chunks = sorted([*kept, *new.values()], key=lambda chunk: chunk.offsets)
        entries[fqn] = dataclasses.replace(stored, chunks=chunks)
    metadata.state_dict_metadata = entries
