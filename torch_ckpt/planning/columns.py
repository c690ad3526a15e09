"""Lists the tensors and objects of a rank's state dict in a native item table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.planning.dispatch import size_of
from torch_ckpt.planning.dtensor_boxes import boxes_of, in_boxes, replica_of
from torch_ckpt.planning.local_shards import NO_REPLICA
from torch_ckpt.planning.replicas import OBJECT_NBYTES, check_dtype, list_item

__all__ = ["has_sharded_tensors", "overrides", "refuse_nested", "table_of"]


def overrides(planner: object, kind: type, names: Iterable[str]) -> bool:
    """Returns whether a planner overrides any of these methods of ``kind``."""
    cls = type(planner)
    return any(getattr(cls, n) is not getattr(kind, n) or n in vars(planner) for n in names)


def has_sharded_tensors(state_dict: dict[str, Any]) -> bool:
    """Returns whether a flat state dict has a ``ShardedTensor``, which DCP would flatten."""
    return any(issubclass(kind, ShardedTensor) for kind in set(map(type, state_dict.values())))


def table_of(
    state_dict: dict[str, Any], *, for_load: bool = False
) -> tuple[_native.ItemTable, list[Any]]:
    """Lists the items of a flat state dict, and the source tensor of each.

    A source is ``None`` for an object, and for a tensor that only DCP can resolve. With
    ``for_load``, the items are boxes that the rank loads. They differ from those that it writes for
    values with DCP's ``__create_write_items__``. Raises ValueError or TypeError if a table cannot
    represent a value, and UnsupportedError if the sizes of a local tensor differ from those implied
    by the placements of its DTensor.

    Example::

        table, sources = table_of({"w": torch.zeros(3), "step": 7})
    """
    table = _native.ItemTable()
    # Cached for this call only: a mesh may be equal to one of an earlier group of other ranks.
    known: dict[Any, int] | None = None if for_load else {}
    box_of = functools.partial(_box_of, state_dict, known)
    sources = _tensor_view.list_tensors(
        state_dict,
        table,
        _tensor_view.ShardBoxes(DTensor, Shard, Replicate, box_of),
        lambda fqn, value: _list(table, fqn, value, known),
    )
    return table, sources


def refuse_nested(state_dict: dict[str, Any]) -> None:
    """Raises UnsupportedError, with the FQN, if a tensor of a flat state dict is nested.

    Torch's own errors do not name it. Call it after an error.
    """
    for fqn, value in state_dict.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise UnsupportedError(
                f"cannot save {fqn!r}: it is a nested tensor, whose sizes are no box; save the "
                "list tensor.unbind()"
            )


def _list(
    table: _native.ItemTable, fqn: str, value: Any, known: dict[Any, int] | None
) -> list[Any]:
    """Lists a value with DCP's functions, unless the engine itself can list it.

    The engine lists tensors of torch's own class without attributes, and DTensors whose local
    tensor is one such box. ``known`` is the cache of :func:`replica_of`, ``None`` on a load.
    """
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            return []  # This rank is not in the mesh.
    elif not isinstance(value, torch.Tensor) and not hasattr(value, "__create_write_items__"):
        table.add_object(fqn, OBJECT_NBYTES)
        return [None]
    if isinstance(value, torch.Tensor):
        value = in_boxes(value, fqn)
    if known is None:
        chunks = _create_chunk_list(value)
        sources = []
        size = size_of(value)
        for number, chunk in enumerate(chunks):
            # A load uses only the sizes and the box. The other properties are placeholders.
            table.add_tensor(
                fqn,
                "uint8",
                1,
                "contiguous_format",
                False,
                False,
                size,
                True,
                chunk.offsets,
                chunk.sizes,
                True,
            )
            index = MetadataIndex(fqn, chunk.offsets, number)
            sources.append(_shard_at(value, index, chunk.sizes))
        return sources
    try:
        items = _create_write_items(fqn, value)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"cannot save {fqn!r}: DCP cannot describe a {type(value).__qualname__} ({error}); "
            "save the tensors that it consists of"
        ) from error
    for item in items:
        check_dtype(item)
    sources = [_shard_of(value, item, number) for number, item in enumerate(items)]
    for item, source in zip(items, sources, strict=True):
        list_item(table, item, is_opaque=source is None, replica=replica_of(value, known))
    return sources


def _box_of(
    state_dict: dict[str, Any], known: dict[Any, int] | None, tensor: DTensor
) -> _tensor_view.ShardBox | None:
    """Returns the box of a DTensor's local shard; ``None`` if the rank has none, or several.

    Called once for all DTensors of the same mesh, placements and sizes. ``known`` is the cache of
    :func:`replica_of`, ``None`` on a load. Raises ValueError if the DTensor is a partial sum, and
    UnsupportedError as :func:`boxes_of`.
    """
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError("a partial DTensor has no box")
    try:
        boxes = boxes_of(tensor, "")
    except UnsupportedError:  # It names the DTensor, which takes long to find.
        fqn = next(fqn for fqn, value in state_dict.items() if value is tensor)
        boxes = boxes_of(tensor, fqn)
    if len(boxes) != 1:
        return None
    replica = NO_REPLICA if known is None else replica_of(tensor, known)
    return _tensor_view.ShardBox(tensor.shape, boxes[0].offsets, boxes[0].sizes, replica)


def _shard_of(value: Any, item: WriteItem, number: int) -> torch.Tensor | None:
    """Returns the tensor of an item that a value listed; ``None`` if only DCP can resolve it.

    ``number`` is the number of the item within the value. Offsets alone may match an empty box.
    """
    data = item.tensor_data
    if data is None or data.chunk is None:
        return None
    index = item.index
    if index.index is None:
        index = dataclasses.replace(index, index=number)
    local = _shard_at(value, index, data.chunk.sizes)
    return local if local is not None and local.dtype == data.properties.dtype else None


def _shard_at(value: Any, index: MetadataIndex, sizes: torch.Size) -> torch.Tensor | None:
    """Returns one box of a value; ``None`` if it is not a plain tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    local = find_tensor_shard(value, index)
    return local if local.size() == sizes and _tensor_view.is_plannable(local) else None
