"""Assigns replicas to ranks so that all ranks write about the same number of bytes.

A save planner lists the items of each rank, and assigns each set of replicas to one rank. The
writer sends the full lists with the plans. The engine then reassigns the replicas by size, and cuts
large tensors by rows. The planner may cache its plans, so they are not modified. The differences
are stored in ``SavePlan.storage_data``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
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
from torch.distributed.tensor import DTensor

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import CheckpointError, UnsupportedError
from torch_ckpt.planning.dtensor_boxes import lookup_box, replica_of
from torch_ckpt.planning.local_shards import NO_REPLICA
from torch_ckpt.planning.replica_check import DIGEST_NBYTES, CheckReplicas, warn_of
from torch_ckpt.planning.value_digests import has_other_ranks, value_digests

__all__ = [
    "OBJECT_NBYTES",
    "PICKLED_DTYPES",
    "CutItem",
    "CutPiece",
    "PlanChanges",
    "RankItems",
    "check_dtype",
    "check_dtype_for_dcp",
    "check_shard",
    "cut_item",
    "item_nbytes",
    "list_item",
    "list_rank_items",
    "merge_cuts",
    "ranks_per_node",
    "share_out",
    "with_rank_items",
    "work_of",
]

OBJECT_NBYTES = 2048
"""Assumed size of an unpickled object: the size of a number or short text in torch.save."""
_WORKAROUND = "FastWriter(share_replicas=False) uses the planner's own assignment"


@dataclass(frozen=True)
class CutItem(WriteItem):
    """Some rows of a replicated tensor. Other ranks write the other rows.

    ``first_row`` is the index of the first row within ``whole``, the planner's item. ``is_listed``:
    whether the metadata already lists these rows instead of ``whole``.
    """

    whole: WriteItem | None = None
    first_row: int = 0
    is_listed: bool = False

    @property
    def piece(self) -> CutPiece:
        """The boxes of this item and of ``whole``."""
        assert self.whole is not None
        return CutPiece(self.index.fqn, _chunk_of(self.whole), _chunk_of(self))

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the rows of this item in a tensor, to which the planner resolved ``whole``."""
        return tensor.detach().narrow(0, self.first_row, _chunk_of(self).sizes[0])


@dataclass(frozen=True)
class CutPiece:
    """A stored box with some rows of a tensor, and the planner's box with all rows."""

    fqn: str
    whole: ChunkStorageMetadata
    piece: ChunkStorageMetadata


@dataclass(frozen=True)
class RankItems:
    """All items of a rank, as the rank sends them to the coordinator.

    They are stored as plain values in DCP's ``SavePlan.storage_data``, because a planner may cache
    and pickle the plans. ``digests`` contains the digest of the values of each item; ``None``
    if they are not compared.
    """

    rank: int
    ranks_per_node: int
    encoded: bytes
    count: int
    digests: bytes | None = None

    def as_storage_data(self) -> _StoragePrefix:
        """Returns DCP's ``storage_data`` with these items attached."""
        prefix = _StoragePrefix(f"__{self.rank}_")
        setattr(prefix, _ITEMS_ATTRIBUTE, dataclasses.astuple(self))
        return prefix

    @staticmethod
    def beside(plan: SavePlan) -> RankItems | None:
        """Returns the items in a plan's ``storage_data``, or ``None``."""
        values = getattr(plan.storage_data, _ITEMS_ATTRIBUTE, None)
        return None if values is None else RankItems(*values)


_ITEMS_ATTRIBUTE = "torch_ckpt_items"


@dataclass
class PlanChanges(_StoragePrefix):
    """The differences between a rank's plan of ``item_count`` items and the items that it writes.

    ``dropped`` are positions of items that this rank does not write, or not completely. It writes
    the remaining items and ``added``.
    """

    item_count: int
    dropped: set[int] = field(default_factory=set)
    added: list[WriteItem] = field(default_factory=list)


def with_rank_items(
    plan: SavePlan, rank: int, planner: object, check_replicas: CheckReplicas
) -> SavePlan:
    """Returns a plan of DCP's items, with all items of its rank attached for the coordinator."""
    if not (plan.usable and plan.storage_data is None and dist.is_initialized()):
        return plan
    with gc_paused():
        mode = check_replicas if has_other_ranks() else "off"
        items = list_rank_items(plan.items, rank, planner, mode)
    if items is None:
        return plan
    return dataclasses.replace(plan, storage_data=items.as_storage_data())


def list_rank_items(
    items: Sequence[WriteItem],
    rank: int,
    planner: object = None,
    check_replicas: CheckReplicas = "off",
) -> RankItems | None:
    """Lists the items of a rank. The planner is ``None`` if unknown.

    Returns ``None`` if a table cannot represent one of the items.
    """
    table = _native.ItemTable()
    # Replicas that are not compared count as equal.
    values = {} if check_replicas == "off" else getattr(planner, "state_dict", {})
    known: dict[Any, int] = {}
    try:
        for item in items:
            replica = replica_of(values.get(item.index.fqn), known)
            list_item(table, item, replica=replica)
    except (ValueError, TypeError):
        return None
    digests = None
    if check_replicas != "off":
        sources = [_value_of(item, planner) for item in items]
        digests = value_digests(sources, check_replicas)
    return RankItems(rank, ranks_per_node(), table.encode(), len(table), digests)


def _value_of(item: WriteItem, planner: object) -> torch.Tensor | None:
    """Returns the tensor of an item in the planner's state dict; ``None`` if it is unknown.

    A planner may transform it when the item is written. Equal tensors remain equal.
    """
    data = item.tensor_data
    if data is None or data.chunk is None or not isinstance(planner, DefaultSavePlanner):
        return None
    if type(planner).lookup_object not in (DefaultSavePlanner.lookup_object, lookup_box):
        return None  # Resolving may create the tensor, which takes long.
    value = getattr(planner, "state_dict", {}).get(item.index.fqn)
    if type(value) is DTensor:
        value = value._local_tensor
    if not _tensor_view.is_plannable(value) or vars(value):  # DCP may store a part of it.
        try:
            value = planner.lookup_object(item.index)
        except Exception:  # The write will report it.
            return None
    is_tensor = isinstance(value, torch.Tensor) and value.size() == data.chunk.sizes
    return value if is_tensor else None


def ranks_per_node() -> int:
    """Returns the number of ranks on this machine according to torchrun; 1 without torchrun."""
    try:
        return max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
    except ValueError:
        return 1


def list_item(
    table: _native.ItemTable,
    item: WriteItem,
    *,
    is_opaque: bool = False,
    replica: int = NO_REPLICA,
) -> None:
    """Adds an item of a DCP planner to a table. Raises ValueError if it cannot represent the item.

    ``is_opaque``: whether only torch can serialize the tensor, so that it must not be cut.
    ``replica`` is the result of :func:`replica_of`.
    """
    data = item.tensor_data
    if data is None or data.chunk is None:
        table.add_object(item.index.fqn, OBJECT_NBYTES)
        return
    properties = data.properties
    if properties.layout != torch.strided:
        raise ValueError(
            f"cannot list {item.index.fqn!r}: a table cannot represent {properties.layout} tensors"
        )
    table.add_tensor(
        item.index.fqn,
        _name(properties.dtype),
        properties.dtype.itemsize,
        _name(properties.memory_format),
        properties.requires_grad,
        properties.pin_memory,
        data.size,
        item.type == WriteItemType.SHARD,
        data.chunk.offsets,
        data.chunk.sizes,
        is_opaque,
    )
    if replica != NO_REPLICA:
        table.set_replica(replica)


PICKLED_DTYPES = frozenset(
    {*torch.storage._dtype_to_storage_type_map(), *torch.storage._new_dtypes()}
)


def check_dtype(item: WriteItem) -> None:
    """Refuses a tensor whose dtype ``torch.save`` does not support, such as ``torch.int4``.

    DCP's files store each tensor in the format of ``torch.save``, so this is an UnsupportedError.
    """
    data = item.tensor_data
    if data is not None and data.properties.dtype not in PICKLED_DTYPES:
        raise UnsupportedError(
            f"cannot save {item.index.fqn!r}: torch.save does not support "
            f"{data.properties.dtype}; save tensor.view(torch.uint8)"
        )


def check_dtype_for_dcp(item: WriteItem) -> None:
    """Refuses a tensor that DCP's planner cannot plan: it computes no size of ``torch.bits8``."""
    check_dtype(item)
    data = item.tensor_data
    if data is None:
        return
    element_size: Any = torch._utils._element_size
    try:
        element_size(data.properties.dtype)
    except TypeError:
        raise UnsupportedError(
            f"cannot save {item.index.fqn!r}: DCP's planner does not support "
            f"{data.properties.dtype}; use FastSavePlanner, or save tensor.view(torch.uint8)"
        ) from None


def check_shard(item: WriteItem, tensor: torch.Tensor) -> None:
    """Checks that a shard fills its box in the plan, so that the metadata is correct.

    Otherwise raises UnsupportedError. Stock DCP's writer stores such a shard without an error.
    """
    planned = item.whole if isinstance(item, CutItem) and item.whole is not None else item
    data = planned.tensor_data
    if planned.type != WriteItemType.SHARD or data is None or tensor.size() == data.chunk.sizes:
        return
    if tensor.numel() or data.chunk.sizes.numel():
        raise UnsupportedError(
            f"cannot write {item.index.fqn!r} of sizes {list(data.size)}: this rank holds "
            f"{list(tensor.size())} of it, but its box in the plan has {list(data.chunk.sizes)}"
        )


@functools.cache
def _name(value: torch.dtype | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


def are_sent(plans: Sequence[SavePlan]) -> bool:
    """Returns whether each rank writes according to the plan that the coordinator returns.

    With DCP's plan caching, a rank may use a plan of an earlier save.
    """
    return all(plan.usable for plan in plans) and not SavePlanner._cached_global_plan


def share_out(plans: list[SavePlan], *, compare: bool) -> list[SavePlan]:
    """Reassigns the replicas in all plans, so that all ranks write about the same amount.

    Returns the plans with :class:`PlanChanges` as ``storage_data``. Only tensors that the ranks
    listed are reassigned. Objects, and items that the planner changed, are not reassigned. If DCP's
    plan caching is in use, no plan is changed, because a rank may then use a cached plan that the
    coordinator did not receive. With ``compare``, a tensor is not cut unless its replicas are known
    to be equal. Warns of replicas whose values differ. Raises MismatchError if ranks disagree on
    dtype or sizes.
    """
    lists = [items for plan in plans if (items := RankItems.beside(plan)) is not None]
    if (
        len(plans) < 2
        or [items.rank for items in lists] != list(range(len(plans)))
        or sum(len(plan.items) for plan in plans) == sum(items.count for items in lists)
        or not are_sent(plans)
    ):
        return plans
    try:
        balanced = _native.GlobalPlan(
            [items.encoded for items in lists],
            lists[0].ranks_per_node,
            digests=[items.digests or bytes(DIGEST_NBYTES * items.count) for items in lists]
            if compare
            else [],
        )
    except ValueError:
        return plans  # The planner accepted overlapping boxes or holes.
    warn_of(balanced.differences)
    writers: dict[_Box, list[_Writer]] = {}
    for rank, items in enumerate(lists):
        for fqn, box, rows in balanced.written(rank, items.encoded):
            if box is not None:
                key = fqn, torch.Size(box[0]), torch.Size(box[1])
                writers.setdefault(key, []).append((rank, rows))
    shares = [PlanChanges(f"__{rank}_", len(plan.items)) for rank, plan in enumerate(plans)]
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


_Writer = tuple[int, tuple[int, int] | None]  # Rank; first row and number of rows, or all rows.
_Box = tuple[str, torch.Size, torch.Size]  # FQN, offsets, sizes.


def _box(fqn: str, chunk: ChunkStorageMetadata) -> _Box:
    return fqn, chunk.offsets, chunk.sizes


def work_of(plan: SavePlan) -> list[WriteItem]:
    """Returns the items that a rank writes according to its final plan.

    Raises CheckpointError if the planner changed the plan after the replicas were reassigned.
    """
    share = plan.storage_data
    if not isinstance(share, PlanChanges):
        return plan.items
    if share.item_count != len(plan.items):
        raise CheckpointError(
            f"cannot write a plan of {len(plan.items)} items: it had {share.item_count} items when "
            f"replicas were assigned to ranks, and its planner has changed it since; {_WORKAROUND}"
        )
    unchanged = [item for at, item in enumerate(plan.items) if at not in share.dropped]
    return unchanged + share.added


def item_nbytes(item: WriteItem) -> int:
    """Returns the size of an item in bytes; 0 for an object, which is not pickled yet."""
    data = item.tensor_data
    if data is None:
        return 0
    sizes = data.size if data.chunk is None else data.chunk.sizes
    return math.prod(sizes) * data.properties.dtype.itemsize


def merge_cuts(metadata: Metadata, cuts: Sequence[CutPiece]) -> None:
    """Replaces the planner's boxes in the metadata by the stored boxes, for tensors that were cut.

    Raises CheckpointError if the stored rows of a tensor do not cover its box exactly once.
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
                f"cannot commit {fqn!r}: the rows that the ranks wrote do not cover the tensor, "
                f"because they resolved it to tensors of different kinds or sizes; {_WORKAROUND}"
            )
        chunks = [chunk for chunk in entry.chunks if chunk != whole]
        entries[fqn] = dataclasses.replace(entry, chunks=[*chunks, *stored])
    metadata.state_dict_metadata = entries


def cut_item(item: WriteItem, first_row: int, rows: int, *, is_listed: bool = False) -> CutItem:
    """Returns an item with some rows of another item."""
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
