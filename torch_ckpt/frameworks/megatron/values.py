"""Megatron's sharded state dicts as state dicts that DCP's planners accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import torch as torch_dist

from torch_ckpt.planning.local_shards import LocalShards

__all__ = ["ShardedValues", "values_to_save"]

_ByKey = dict[str, list[Any]]  # Sharded tensors, or sharded objects, of each key.


def values_to_save(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that this rank may write, by key.

    Raises ValueError if a tensor has no data.
    """
    by_key, _, _ = _grouped(sharded_state_dict)
    state: dict[str, Any] = {}
    for key, shards in by_key.items():
        written = [shard for shard in shards if _may_write(shard)]
        if not written:
            continue
        if isinstance(written[0], ShardedTensor):
            for shard in written:
                if shard.data is None:
                    raise ValueError(f"cannot save {shard.key!r}: {shard} has no data")
            state[key] = _local_shards(written)
        else:
            # FastWriter pickles the list as Megatron does.
            state[key] = [shard.data for shard in written]
    return state


class ShardedValues:
    """The values of a sharded state dict, whose tensors DCP loads in place.

    Tensors without data are allocated on the CPU. ``state`` has the values by key; for objects, a
    sequence that a load replaces. ``resized`` are shards that may have another shape when stored.
    """

    def __init__(self, sharded_state_dict: dict[str, Any]) -> None:
        self._given = sharded_state_dict
        self._by_key, self._paths, self._names = _grouped(sharded_state_dict)
        self.state: dict[str, Any] = {}
        self.resized: dict[str, list[ShardedTensor]] = {}
        for key, shards in self._by_key.items():
            if not isinstance(shards[0], ShardedTensor):
                # A planner that flattens stores a tuple as one object.
                self.state[key] = tuple(shard.data for shard in shards)
                continue
            for shard in shards:
                if shard.data is None:
                    shard.init_data(torch.device("cpu"), torch.empty)
            if resized := [shard for shard in shards if shard.allow_shape_mismatch]:
                self.resized[key] = resized
            self.state[key] = _local_shards(shards)

    def loaded(self) -> dict[str, Any]:
        """Returns the state dict, with tensors and objects in place of the sharded ones."""
        loaded = {key: _loaded(shards, self.state[key]) for key, shards in self._by_key.items()}
        nested = torch_dist._replace_sharded_keys_with_state_dict_keys(
            loaded, self._paths, self._names
        )
        torch_dist._restore_dict_types(nested, self._given)
        return cast(dict[str, Any], nested)


def _grouped(sharded_state_dict: dict[str, Any]) -> tuple[_ByKey, Any, Any]:
    """Returns the sharded values by key, and what restores the nested dict from them."""
    return cast(
        tuple[_ByKey, Any, Any],
        torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict),
    )


def _may_write(shard: ShardedTensor | ShardedObject) -> bool:
    """Returns whether this rank lists a shard. The planner assigns tensors that several list."""
    if is_main_replica(shard.replica_id):
        return True
    is_assigned = isinstance(shard.replica_id, int) or isinstance(shard, ShardedObject)
    return not is_assigned and shard.data is not None


def _local_shards(shards: Sequence[ShardedTensor]) -> LocalShards:
    """Returns the boxes of one key. Shards with the same box are listed once."""
    boxes: dict[tuple[int, ...], torch.Tensor] = {}
    for shard in sorted(shards, key=lambda shard: not shard.data.numel()):  # Empty ones last.
        axes = (None,) * shard.prepend_axis_num
        boxes.setdefault(tuple(shard.global_offset), shard.data.detach()[axes])
    return LocalShards(shards[0].global_shape, list(boxes.items()))


def _loaded(shards: Sequence[Any], value: Any) -> Any:
    """Returns the loaded values of one key, in the order of its sharded values."""
    if not isinstance(shards[0], ShardedTensor):
        return list(value)
    first: dict[tuple[Any, ...], torch.Tensor] = {}
    for shard in shards:
        data = first.setdefault((*shard.global_offset, shard.data.shape), shard.data)
        if data is not shard.data:
            shard.data.detach().copy_(data)
    return [shard.data for shard in shards]
