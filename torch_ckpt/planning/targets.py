"""The target tensors of a load: allocates missing memory, and detects unwritable tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner_helpers import _init_state_dict
from torch.distributed.tensor import DTensor

from torch_ckpt._core import _tensor_view
from torch_ckpt.planning.dispatch import copy_attributes
from torch_ckpt.planning.local_shards import LocalShards

__all__ = ["allocated", "check_targets"]

_MOST = 20
"""Maximum number of targets that a message names."""


def check_targets(state_dict: dict[str, Any], fqns: Iterable[str]) -> None:
    """Checks that the memory of the tensors in a flat state dict is writable.

    Otherwise raises a ValueError that names these tensors, and what to pass instead.
    """
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for fqn in fqns:
        for tensor in _local_tensors(state_dict.get(fqn)):
            names.append(fqn)
            tensors.append(tensor)
    faults: dict[str, str] = {}
    for number, why in _tensor_view.write_faults(tensors):
        faults.setdefault(names[number], why)
    if faults:
        listed = [f"{fqn!r}: its target cannot be written: {why}" for fqn, why in faults.items()]
        more = f"; and {len(faults) - _MOST} more" if len(faults) > _MOST else ""
        raise ValueError(f"cannot load {'; '.join(listed[:_MOST])}{more}")


def allocated(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns tensors with memory for all tensors on the meta device, like DCP.

    They are on the current device of the process group, or on the CPU without one. Their elements
    are undefined. Raises ValueError if a sharded tensor other than a ``DTensor`` is on the meta
    device.
    """
    meta = {
        fqn: value
        for fqn, value in state_dict.items()
        if isinstance(value, torch.Tensor) and _is_meta(value)
    }
    for fqn, value in meta.items():
        if isinstance(value, ShardedTensor | LocalShards):
            raise ValueError(
                f"cannot load {fqn!r}: it is a {type(value).__name__} on the meta device; pass one "
                "whose shards have memory"
            )
    if dist.is_available() and dist.is_initialized():
        _init_state_dict(meta)
        return meta
    made = {fqn: torch.empty_like(value, device="cpu") for fqn, value in meta.items()}
    for fqn, tensor in made.items():
        copy_attributes(meta[fqn], tensor)
    return made


def _is_meta(value: torch.Tensor) -> bool:
    if isinstance(value, ShardedTensor):  # It raises without a shard on this rank.
        return any(shard.tensor.is_meta for shard in value.local_shards())
    return value.is_meta


def _local_tensors(value: object) -> Sequence[torch.Tensor]:
    """Returns the tensors that contain this rank's elements of a value."""
    if isinstance(value, DTensor):
        return [value._local_tensor]
    if isinstance(value, LocalShards):
        return [tensor for _, tensor in value.boxes]
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value] if isinstance(value, torch.Tensor) else []
