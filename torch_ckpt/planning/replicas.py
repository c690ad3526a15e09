"""Shares out what several ranks hold, so that all ranks write about as much.

The planner, stock's or anybody's, lists what each rank holds and gives each replica to one rank.
From the full lists, which travel beside the plans, the engine then decides anew which rank writes
what, by bytes, and cuts large tensors by rows. The plans stay as the planner has made them, for it
may keep them: what is to be done otherwise stands beside them, in ``SavePlan.storage_data``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.filesystem import _StoragePrefix
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

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, UnsupportedError

__all__ = [
    "OBJECT_NBYTES",
    "PICKLED_DTYPES",
    "CutItem",
    "CutPiece",
    "RankItems",
    "Share",
    "check_dtype",
    "cut_item",
    "item_nbytes",
    "list_item",
    "list_rank_items",
    "merge_cuts",
    "ranks_per_node",
    "share_out",
    "work_of",
]

OBJECT_NBYTES = 2048
"""Bytes of an object until it is pickled: what torch.save makes of a number or a short text."""
_WAY_OUT = "FastWriter(share_replicas=False) leaves it to the planner who writes what"


@dataclass(frozen=True)
class CutItem(WriteItem):
    """Some rows of a tensor that several ranks hold, each of which writes others.

    Attributes:
        whole: The item that the planner knows.
        first_row: Where the rows of this one begin in it, along its first dimension.
        is_listed: Whether the metadata list these rows already, and not the whole.
    """

    whole: WriteItem | None = None
    first_row: int = 0
    is_listed: bool = False

    @property
    def piece(self) -> CutPiece:
        """Which box of which this is."""
        assert self.whole is not None
        return CutPiece(self.index.fqn, _chunk_of(self.whole), _chunk_of(self))

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This item's rows of what the planner has resolved ``whole`` to."""
        return tensor.detach().narrow(0, self.first_row, _chunk_of(self).sizes[0])


@dataclass(frozen=True)
class CutPiece:
    """A box that was stored, of a tensor that was cut, and the box that the planner knows."""

    fqn: str
    whole: ChunkStorageMetadata
    piece: ChunkStorageMetadata


@dataclass(frozen=True)
class RankItems:
    """All that a rank holds, on its way to the coordinator.

    It travels as plain values within stock's ``SavePlan.storage_data``: a planner may keep, and
    pickle, the plans that it is given.

    Attributes:
        rank: Which one.
        ranks_per_node: How many ranks share a machine, as the rank knows.
        encoded: As :meth:`_native.ItemTable.encode` gives it.
        count: How many items that is.
    """

    rank: int
    ranks_per_node: int
    encoded: bytes
    count: int

    def as_storage_data(self) -> _StoragePrefix:
        """Stock's ``storage_data``, with these items."""
        prefix = _StoragePrefix(f"__{self.rank}_")
        setattr(prefix, _ITEMS_ATTRIBUTE, dataclasses.astuple(self))
        return prefix

    @staticmethod
    def beside(plan: SavePlan) -> RankItems | None:
        """The items that a plan came with."""
        values = getattr(plan.storage_data, _ITEMS_ATTRIBUTE, None)
        return None if values is None else RankItems(*values)


_ITEMS_ATTRIBUTE = "torch_ckpt_items"


@dataclass
class Share(_StoragePrefix):
    """What a rank is to write otherwise than its plan says.

    Attributes:
        item_count: How many items the plan has.
        dropped: Positions of those that others write, or that are written in part.
        added: What is written in their place.
    """

    item_count: int
    dropped: set[int] = field(default_factory=set)
    added: list[WriteItem] = field(default_factory=list)


def list_rank_items(items: Sequence[WriteItem], rank: int) -> RankItems | None:
    """Lists what a rank holds; nothing where an item describes no tensor that could be."""
    table = _native.ItemTable()
    try:
        for item in items:
            list_item(table, item)
    except (ValueError, TypeError):
        return None
    return RankItems(rank, ranks_per_node(), table.encode(), len(table))


def ranks_per_node() -> int:
    """How many ranks share this machine, as far as torchrun has said."""
    try:
        return max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
    except ValueError:
        return 1


def list_item(table: _native.ItemTable, item: WriteItem, *, is_opaque: bool = False) -> None:
    """Adds an item to a table.

    Args:
        table: Of what a rank holds.
        item: As a planner of DCP has made it.
        is_opaque: Whether only torch can store the tensor, so that it must not be cut.

    Raises:
        ValueError: It cannot be in a table.
    """
    data = item.tensor_data
    if data is None or data.chunk is None:
        table.add_object(item.index.fqn, OBJECT_NBYTES)
        return
    properties = data.properties
    if properties.layout != torch.strided:
        raise ValueError(f"{properties.layout} has no form in a table")
    table.add_tensor(
        item.index.fqn,
        _word(properties.dtype),
        properties.dtype.itemsize,
        _word(properties.memory_format),
        properties.requires_grad,
        properties.pin_memory,
        data.size,
        item.type == WriteItemType.SHARD,
        data.chunk.offsets,
        data.chunk.sizes,
        is_opaque,
    )


PICKLED_DTYPES = frozenset(
    {*torch.storage._dtype_to_storage_type_map(), *torch.storage._new_dtypes()}
)


def check_dtype(item: WriteItem) -> None:
    """Raises UnsupportedError for a tensor that ``torch.save`` has no form for, as ``torch.int4``.

    Stock DCP's files hold every tensor as ``torch.save`` writes it.
    """
    data = item.tensor_data
    if data is not None and data.properties.dtype not in PICKLED_DTYPES:
        raise UnsupportedError(
            f"cannot save {item.index.fqn!r}: torch.save has no form for {data.properties.dtype}; "
            "save tensor.view(torch.uint8)"
        )


@functools.cache
def _word(value: torch.dtype | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


def share_out(plans: list[SavePlan]) -> list[SavePlan]:
    """Decides which rank writes what of these plans, which the planner has made.

    Where DCP's plan caching is in use, ranks may write by plans that they have kept, of which
    nobody here knows: then the planner's choice stands.

    Returns:
        The plans, with a :class:`Share` for each rank that is to write otherwise. Objects, what the
        planner has made of items that were not listed so, and what it has left out stay as they
        are.

    Raises:
        MismatchError: Ranks disagree on the dtype or sizes of a tensor.
    """
    held = [items for plan in plans if (items := RankItems.beside(plan)) is not None]
    if (
        len(plans) < 2
        or [one.rank for one in held] != list(range(len(plans)))
        or sum(len(plan.items) for plan in plans) == sum(one.count for one in held)
        or not all(plan.usable for plan in plans)
        or SavePlanner._cached_global_plan
    ):
        return plans
    try:
        shared = _native.GlobalPlan([one.encoded for one in held], held[0].ranks_per_node)
    except ValueError:
        return plans  # Boxes that overlap, or holes: the planner has let them pass.
    writers: dict[_Box, list[_Writer]] = {}
    for rank, one in enumerate(held):
        for fqn, box, rows in shared.written(rank, one.encoded):
            if box is not None:
                key = fqn, torch.Size(box[0]), torch.Size(box[1])
                writers.setdefault(key, []).append((rank, rows))
    shares = [Share(f"__{rank}_", len(plan.items)) for rank, plan in enumerate(plans)]
    for planner_rank, plan in enumerate(plans):
        for position, item in enumerate(plan.items):
            if item.tensor_data is None or item.tensor_data.chunk is None:
                continue
            chosen = writers.get(_box(item.index.fqn, item.tensor_data.chunk))
            if chosen is None or chosen == [(planner_rank, None)]:
                continue
            shares[planner_rank].dropped.add(position)
            for rank, rows in chosen:
                shares[rank].added.append(item if rows is None else cut_item(item, *rows))
    return [
        dataclasses.replace(plan, storage_data=share)
        for plan, share in zip(plans, shares, strict=True)
    ]


_Writer = tuple[int, tuple[int, int] | None]  # Rank; first row and count of rows, or all.
_Box = tuple[str, torch.Size, torch.Size]  # FQN, offsets, sizes.


def _box(fqn: str, chunk: ChunkStorageMetadata) -> _Box:
    return fqn, chunk.offsets, chunk.sizes


def work_of(plan: SavePlan) -> list[WriteItem]:
    """What a rank is to write by its final plan.

    Raises:
        CheckpointError: The planner has changed the plan after it was shared out.
    """
    share = plan.storage_data
    if not isinstance(share, Share):
        return plan.items
    if share.item_count != len(plan.items):
        raise CheckpointError(
            f"cannot write a plan of {len(plan.items)} items that had {share.item_count} when "
            f"replicas were shared out: its planner has changed it since; {_WAY_OUT}"
        )
    kept = [item for at, item in enumerate(plan.items) if at not in share.dropped]
    return kept + share.added


def item_nbytes(item: WriteItem) -> int:
    """Bytes of the item on this rank; 0 for an object, whose size only pickling tells."""
    data = item.tensor_data
    if data is None:
        return 0
    sizes = data.size if data.chunk is None else data.chunk.sizes
    return math.prod(sizes) * data.properties.dtype.itemsize


def merge_cuts(metadata: Metadata, cuts: Sequence[CutPiece]) -> None:
    """Has metadata list the boxes that were stored in place of those that the planner knows.

    Raises:
        CheckpointError: What was stored of a box that was cut does not make it up.
    """
    pieces: dict[_Box, list[ChunkStorageMetadata]] = {}
    for cut in cuts:
        pieces.setdefault(_box(cut.fqn, cut.whole), []).append(cut.piece)
    entries = dict(metadata.state_dict_metadata)
    for (fqn, offsets, sizes), stored in pieces.items():
        stored.sort(key=lambda piece: piece.offsets[0])
        entry = entries.get(fqn)
        whole = ChunkStorageMetadata(offsets, sizes)
        begins = [piece.offsets[0] for piece in stored]
        ends = [piece.offsets[0] + piece.sizes[0] for piece in stored]
        complete = [*begins, offsets[0] + sizes[0]] == [offsets[0], *ends]
        if not complete or not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"cannot commit {fqn!r}: ranks have resolved it to tensors of different kinds or "
                f"sizes, so that the rows that each has written do not make it up; {_WAY_OUT}"
            )
        chunks = [chunk for chunk in entry.chunks if chunk != whole]
        entries[fqn] = dataclasses.replace(entry, chunks=[*chunks, *stored])
    metadata.state_dict_metadata = entries


def cut_item(item: WriteItem, first_row: int, rows: int, *, is_listed: bool = False) -> CutItem:
    """Some rows of an item."""
    data = item.tensor_data
    assert data is not None
    whole = _chunk_of(item)
    chunk = ChunkStorageMetadata(
        offsets=torch.Size((whole.offsets[0] + first_row, *whole.offsets[1:])),
        sizes=torch.Size((rows, *whole.sizes[1:])),
    )
    return CutItem(
        index=MetadataIndex(item.index.fqn, chunk.offsets),
        type=item.type,
        tensor_data=TensorWriteData(chunk=chunk, properties=data.properties, size=data.size),
        whole=item,
        first_row=first_row,
        is_listed=is_listed,
    )


def _chunk_of(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk
