"""Reads the ShardedTensors of FSDP1 state dicts, without a process group.

Only the rank that saved a ShardedTensor can unpickle the class itself, and only in a group of as
many ranks. So the pickle is read with stand-ins for its classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torch_ckpt.formats.allowed_classes import StandIns
from torch_ckpt.formats.data_classes import NeedsState

__all__ = ["STAND_INS", "LocalPart", "ShardedParts"]


class LocalPart(NamedTuple):
    """The part of a ShardedTensor that a rank has, and where it begins in the whole tensor."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]


class ShardedParts(torch.Tensor):
    """A ShardedTensor in a file, with only the elements of ``parts``.

    ``ranks`` ranks saved it.
    """

    parts: list[LocalPart]
    ranks: int

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __new__(cls, *_: object) -> ShardedParts:
        """Refuses a call by a pickle, which would make a tensor of any size."""
        raise ValueError("it must not be called")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{operator} of a ShardedTensor in a file")

    def __setstate__(self, state: Any) -> None:
        """Sets the state that ``ShardedTensor.__getstate__`` returned."""
        try:
            shards, _, group, *_ = state
            self.parts = [_part(shard["tensor"], shard["metadata"]) for shard in shards]
            self.ranks = group["global_world_size"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"its state is not that of a ShardedTensor: {error}") from None
        if type(self.ranks) is not int:
            raise ValueError("its number of ranks is not an int")


def _part(tensor: Any, metadata: Any) -> LocalPart:
    offsets = metadata["shard_offsets"]
    is_part = isinstance(tensor, torch.Tensor) and len(offsets) == tensor.dim()
    if not is_part or not all(type(one) is int for one in offsets):
        raise ValueError("its shard is not a tensor with offsets")
    return LocalPart(tensor, tuple(offsets))


def _fields() -> NeedsState:
    """Builds a dict of the fields of an object, in its ``__dict__`` or its slots."""

    def make(state: Any) -> dict[str, Any]:
        parts = state if type(state) is tuple else (state,)
        fields: dict[str, Any] = {}
        for part in parts:
            fields.update(part if type(part) is dict else {})
        return fields

    return NeedsState(make)


def _number(value: int) -> int:
    if type(value) is not int:
        raise ValueError("its value is not an int")
    return value


def _attribute(owner: object, name: object) -> Any:
    """Stands for ``getattr``, by which the pickle refers to a class within ``ShardedTensor``."""
    if owner is not ShardedParts or name != "ProcessGroupState":
        raise ValueError("it is called for another class than ShardedTensor.ProcessGroupState")
    return _fields


_SHARD = "torch.distributed._shard"

STAND_INS: StandIns = {
    "builtins.getattr": _attribute,
    "torch.distributed.remote_device._remote_device": _fields,
    f"{_SHARD}.metadata.ShardMetadata": _fields,
    f"{_SHARD}.sharded_tensor.api.ShardedTensor": ShardedParts,
    f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING": _number,
    f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata": _fields,
    f"{_SHARD}.sharded_tensor.metadata.TensorProperties": _fields,
    f"{_SHARD}.sharded_tensor.shard.Shard": _fields,
    f"{_SHARD}.sharding_spec.api.EnumerableShardingSpec": _fields,
    f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec": _fields,
}
"""Name of a class -> what takes its place."""
