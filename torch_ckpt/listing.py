"""Lists what a rank's state dict holds as a table of the engine's."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torch_ckpt import _native, _tensor_view
from torch_ckpt.sharing import OBJECT_NBYTES, list_item

__all__ = ["Lister"]


class Lister:
    """Lists state dicts; remembers where the local parts of DTensors lie, from one to the next."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[Any, ...], _tensor_view.ShardBox] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Lister, ()

    def table_of(
        self, state_dict: dict[str, Any], *, for_load: bool = False
    ) -> tuple[_native.ItemTable, list[Any]]:
        """Lists a flat state dict.

        Args:
            state_dict: Names and values.
            for_load: Whether to list what a rank wants to have, and not what it would write: an
                object of DCP's contract tells these apart.

        Returns:
            The items, and for each the tensor that holds it; ``None`` for an object, and where only
            DCP can tell.

        Raises:
            ValueError: Something in it has no form in a table.
            TypeError: Likewise.
        """
        table = _native.ItemTable()
        sources = _tensor_view.list_tensors(
            state_dict, table, lambda fqn, value: self._list(table, fqn, value, for_load)
        )
        return table, sources

    def _list(self, table: _native.ItemTable, fqn: str, value: Any, for_load: bool) -> list[Any]:
        """Lists what is no plain tensor."""
        if isinstance(value, DTensor):
            local = value._local_tensor
            is_plain = type(value) is DTensor and _tensor_view.is_plannable(local)
            box = self._box(value) if is_plain else None
            if box is not None:
                needs_grad = value.requires_grad and torch.is_grad_enabled()  # As DCP sees it.
                _tensor_view.add_shard(table, fqn, local, needs_grad, box)
                return [local]
            if value.device_mesh.get_coordinate() is None:
                return []
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
        sources = [_shard_of(value, item) for item in items]
        for item, source in zip(items, sources, strict=True):
            list_item(table, item, is_opaque=source is None)
        return sources

    def _box(self, tensor: DTensor) -> _tensor_view.ShardBox | None:
        """Where the local part of a DTensor lies: the same for many. ``None`` where there is none.

        Raises:
            ValueError: It is a partial sum.
        """
        key = (tensor._spec.mesh, tensor._spec.placements, tensor.shape)
        box = self._boxes.get(key)
        if box is None:
            if any(isinstance(placement, Partial) for placement in tensor.placements):
                raise ValueError("a partial DTensor has no box")
            if tensor.device_mesh.get_coordinate() is None:
                return None
            sizes, offsets = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            box = self._boxes[key] = _tensor_view.ShardBox(tensor.shape, offsets, sizes)
        return box


def _shard_of(value: Any, item: WriteItem) -> torch.Tensor | None:
    """The tensor that holds a shard of a ShardedTensor; ``None`` where only DCP can tell."""
    data = item.tensor_data
    if not isinstance(value, ShardedTensor) or data is None or data.chunk is None:
        return None
    local = find_tensor_shard(value, item.index)
    as_listed = local.size() == data.chunk.sizes and local.dtype == data.properties.dtype
    return local if as_listed and _tensor_view.is_plannable(local) else None
