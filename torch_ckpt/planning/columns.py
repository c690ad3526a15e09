"""Lists what a rank's state dict holds as a table of the engine's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt.planning.replicas import OBJECT_NBYTES, check_dtype, list_item

__all__ = ["has_sharded_tensors", "overrides", "table_of"]


def overrides(planner: object, kind: type, names: Iterable[str]) -> bool:
    """Whether a planner has methods of its own in place of those that ``kind`` has."""
    mine = type(planner)
    return any(getattr(mine, n) is not getattr(kind, n) or n in vars(planner) for n in names)


def has_sharded_tensors(state_dict: dict[str, Any]) -> bool:
    """Whether a flat state dict has a value that DCP would flatten.

    Example::

        assert not has_sharded_tensors({"w": torch.zeros(3)})
    """
    return any(issubclass(kind, ShardedTensor) for kind in set(map(type, state_dict.values())))


def table_of(
    state_dict: dict[str, Any], *, for_load: bool = False
) -> tuple[_native.ItemTable, list[Any]]:
    """Lists a flat state dict.

    Args:
        state_dict: Names and values.
        for_load: Whether to list what a rank wants to have, and not what it would write: an object
            of DCP's contract tells these apart.

    Returns:
        The items, and for each the tensor that holds it; ``None`` for an object, and where only DCP
        can tell.

    Raises:
        ValueError: Something in it has no form in a table.
        TypeError: Likewise.

    Example::

        table, sources = table_of({"w": torch.zeros(3), "step": 7})
    """
    table = _native.ItemTable()
    sources = _tensor_view.list_tensors(
        state_dict,
        table,
        # For this call alone: a mesh may be equal to that of a former group, of other ranks.
        _tensor_view.ShardBoxes(DTensor, Shard, Replicate, _box_of),
        lambda fqn, value: _list(table, fqn, value, for_load),
    )
    return table, sources


def _list(table: _native.ItemTable, fqn: str, value: Any, for_load: bool) -> list[Any]:
    """Lists what is no plain tensor, and no DTensor of one."""
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            return []  # This rank holds nothing of it.
    elif not isinstance(value, torch.Tensor) and not hasattr(value, "__create_write_items__"):
        table.add_object(fqn, OBJECT_NBYTES)
        return [None]
    if for_load:
        chunks = _create_chunk_list(value)
        for chunk in chunks:
            # Of what is wanted, only the sizes and the box count.
            table.add_tensor(
                fqn,
                "uint8",
                1,
                "contiguous_format",
                False,
                False,
                value.size(),
                True,
                chunk.offsets,
                chunk.sizes,
                True,
            )
        return [None] * len(chunks)
    items = _create_write_items(fqn, value)
    for item in items:
        check_dtype(item)
    sources = [_shard_of(value, item) for item in items]
    for item, source in zip(items, sources, strict=True):
        list_item(table, item, is_opaque=source is None)
    return sources


def _box_of(tensor: DTensor) -> _tensor_view.ShardBox | None:
    """Where the local part of a DTensor lies; ``None`` where there is none.

    Raises:
        ValueError: It is a partial sum.
    """
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError("a partial DTensor has no box")
    if tensor.device_mesh.get_coordinate() is None:
        return None
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return _tensor_view.ShardBox(tensor.shape, offsets, sizes)


def _shard_of(value: Any, item: WriteItem) -> torch.Tensor | None:
    """The tensor that holds a shard of a ShardedTensor; ``None`` where only DCP can tell."""
    data = item.tensor_data
    if not isinstance(value, ShardedTensor) or data is None or data.chunk is None:
        return None
    local = find_tensor_shard(value, item.index)
    as_listed = local.size() == data.chunk.sizes and local.dtype == data.properties.dtype
    return local if as_listed and _tensor_view.is_plannable(local) else None
