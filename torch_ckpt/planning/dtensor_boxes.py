"""The boxes of a tensor on a rank, if they differ from those that DCP lists."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.planner_helpers import _create_read_items, _create_write_items
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ckpt._core.tensors import cpu_as_default
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.formats.placements import ShardBox, shard_boxes
from torch_ckpt.planning.dispatch import METHODS
from torch_ckpt.planning.local_shards import NO_REPLICA, LocalShards

__all__ = [
    "boxes_of",
    "in_boxes",
    "load_plan_in_boxes",
    "local_part",
    "lookup_box",
    "replica_of",
    "save_plan_in_boxes",
    "with_boxes",
]


def boxes_of(tensor: DTensor, fqn: str) -> list[ShardBox]:
    """Returns the boxes that form the local tensor of a DTensor; none outside its mesh.

    DCP lists one box, by the first element and the sizes. But a strided shard may consist of
    several boxes, and under ``fully_shard`` over tensor parallelism with uneven sizes, the box may
    be another one. Raises UnsupportedError if the sizes of the local tensor differ from those
    implied by the placements.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    if _is_strided(tensor):
        boxes = shard_boxes(tensor.shape, mesh.shape, coordinate, tensor.placements)
    else:
        boxes = [_dcp_box(tensor)]
    last = boxes[-1]
    implied = [at + size for at, size in zip(last.local_offsets, last.sizes, strict=True)]
    local = tensor._local_tensor.shape
    if list(local) != implied and (local.numel() or math.prod(implied)):
        raise UnsupportedError(
            f"cannot plan {fqn!r} of sizes {list(tensor.shape)} with placements "
            f"{tensor.placements} on a mesh of {list(mesh.shape)}: this rank holds {list(local)} "
            f"of it, but the placements imply {implied}"
        )
    return boxes


def replica_of(value: Any, known: dict[Any, int]) -> int:
    """Returns the lowest rank of the replica of a tensor to which this rank's part belongs.

    The ranks of a replica are the ranks of a mesh with the same coordinates in all replicated
    dimensions. Returns ``NO_REPLICA`` if they are unknown, or if the ranks with a box are in the
    order of the replicas, as in nearly all programs. ``known`` caches the results of this save.
    """
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        lowest = known.get(id(mesh))
        if lowest is None:
            # The mesh may be a row of a larger one, whose other rows have the other replicas.
            ranks = mesh._get_root_mesh().mesh.flatten().tolist()
            lowest = known[id(mesh)] = _lowest_unless_in_order(ranks)
        if lowest == NO_REPLICA:
            return NO_REPLICA
        key = id(mesh), value.placements
        if key not in known:
            known[key] = _lowest_of_replica(value)
        return known[key]
    if isinstance(value, LocalShards):
        return value.replica
    if isinstance(value, ShardedTensor):
        return _lowest_unless_in_order(dist.get_process_group_ranks(value._process_group))
    return NO_REPLICA


def _lowest_unless_in_order(ranks: list[int]) -> int:
    """Returns the lowest rank; ``NO_REPLICA`` if the ranks are in the order of the replicas.

    They are if the ranks are consecutive, and the first one is a multiple of their number: then all
    ranks are divided into blocks of this length, and each replica is in one block.
    """
    first, count = ranks[0], len(ranks)
    is_in_order = first % count == 0 and ranks == list(range(first, first + count))
    return NO_REPLICA if is_in_order else min(ranks)


def _lowest_of_replica(tensor: DTensor) -> int:
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return NO_REPLICA
    at = tuple(
        here if placement.is_replicate() else slice(None)
        for here, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return int(mesh.mesh[at].min())


def in_boxes(tensor: torch.Tensor, fqn: str) -> torch.Tensor:
    """Returns the boxes of a tensor as DCP can list them; the tensor itself if DCP lists it."""
    if type(tensor) is ShardedTensor:
        return _without_empty(tensor)
    if not isinstance(tensor, DTensor):
        return tensor
    if not _is_strided(tensor) or _lists_itself(tensor):
        return tensor
    boxes = boxes_of(tensor, fqn)
    if not boxes or boxes == [_dcp_box(tensor)]:
        return tensor
    local = tensor._local_tensor.detach()
    parts = [(box.offsets, local_part(local, box)) for box in boxes]
    shards = LocalShards(tensor.shape, parts, local)
    shards.replica = replica_of(tensor, {})
    return shards.requires_grad_(tensor.requires_grad)


def _without_empty(tensor: ShardedTensor) -> torch.Tensor:
    """Returns the non-empty shards. An empty shard may have the offsets of another one."""
    shards = tensor.local_shards()
    if len(shards) < 2 or all(math.prod(shard.metadata.shard_sizes) for shard in shards):
        return tensor
    boxes = [(shard.metadata.shard_offsets, shard.tensor) for shard in shards]
    made = LocalShards(tensor.size(), boxes)
    made.replica = replica_of(tensor, {})
    return made.requires_grad_(tensor.metadata().tensor_properties.requires_grad)


def with_boxes(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a flat state dict for which DCP lists all tensors by the boxes of this rank."""
    return {**state_dict, **dict(_others_than_dcps(state_dict))}


def lookup_box(planner: Any, index: MetadataIndex) -> Any:
    """Returns an object or a box of a tensor. Replaces a method of DCP's planner."""
    state_dict, value = planner.state_dict, planner.state_dict.get(index.fqn)
    if isinstance(value, DTensor | ShardedTensor):
        state_dict = {index.fqn: in_boxes(value, index.fqn)}
    return find_state_dict_object(state_dict, index)


def save_plan_in_boxes(plan: SavePlan, planner: object) -> SavePlan:
    """Returns the plan of a stock planner, with the boxes of this rank instead of DCP's.

    The planner will resolve the items of this plan. Plans of other planners are not changed.
    """
    if not isinstance(planner, DefaultSavePlanner):
        return plan
    found = _put_boxes(planner, {item.index.fqn for item in plan.items} if plan.usable else None)
    if not found:
        return plan
    items = [item for item in plan.items if item.index.fqn not in found]
    if plan.usable:
        for fqn, shards in found.items():
            items += _create_write_items(fqn, shards)
    return dataclasses.replace(plan, items=items)


def load_plan_in_boxes(plan: LoadPlan, planner: object) -> LoadPlan:
    """Returns the plan of a stock planner with the boxes of this rank, as on a save."""
    if not isinstance(planner, DefaultLoadPlanner) or planner.metadata is None:
        return plan
    stored = planner.metadata.state_dict_metadata
    found = _put_boxes(planner, stored)
    if not found:
        return plan
    items = [item for item in plan.items if item.dest_index.fqn not in found]
    for fqn, shards in found.items():
        items += _create_read_items(fqn, stored[fqn], shards)
    return dataclasses.replace(plan, items=items)


def _put_boxes(planner: Any, fqns: Container[str] | None) -> dict[str, LocalShards]:
    """Puts the boxes of this rank into a planner's flat state dict, and returns them.

    ``fqns`` are the FQNs of the values that the planner has planned; ``None`` if unknown.
    """
    found = {
        fqn: shards
        for fqn, shards in _others_than_dcps(planner.state_dict)
        if fqns is None or fqn in fqns
    }
    if found:  # The state dict itself may belong to the program.
        planner.state_dict = {**planner.state_dict, **found}
    return found


def _others_than_dcps(state_dict: dict[str, Any]) -> Iterator[tuple[str, LocalShards]]:
    for fqn, value in state_dict.items():
        if isinstance(value, DTensor | ShardedTensor):
            shards = in_boxes(value, fqn)
            if isinstance(shards, LocalShards):
                yield fqn, shards


def _is_strided(tensor: DTensor) -> bool:
    """Returns whether DCP's box of a DTensor may be wrong. DCP refuses partial sums."""
    placements = tensor.placements
    return any(isinstance(placement, _StridedShard) for placement in placements) and not any(
        isinstance(placement, Partial) for placement in placements
    )


def _lists_itself(tensor: DTensor) -> bool:
    return any(hasattr(tensor._local_tensor, name) for name in METHODS)


def _dcp_box(tensor: DTensor) -> ShardBox:
    with cpu_as_default():
        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return ShardBox(tuple(offsets), tuple(sizes), (0,) * len(sizes))


def local_part(local: torch.Tensor, box: ShardBox) -> torch.Tensor:
    """Returns the elements of a box within the local tensor."""
    if not local.numel():
        return local.new_empty(box.sizes)
    for dim, (first, size) in enumerate(zip(box.local_offsets, box.sizes, strict=True)):
        local = local.narrow(dim, first, size)
    return local
