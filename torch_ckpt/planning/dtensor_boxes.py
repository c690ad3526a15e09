"""The boxes of a tensor that a rank holds, where they are not those that DCP lists."""

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
    "lookup_box",
    "replica_of",
    "save_plan_in_boxes",
    "with_boxes",
]


def boxes_of(tensor: DTensor, fqn: str) -> list[ShardBox]:
    """Returns the boxes that make up the local tensor of a DTensor, none off its mesh.

    DCP lists one box: the first element and the sizes. A strided shard may be several, and under
    ``fully_shard`` over tensor parallelism of uneven sizes it may be another one. Raises
    UnsupportedError if the local tensor is not of the sizes that the placements imply.
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
    """Returns the lowest rank of the replica of a tensor that this rank has a part of.

    The ranks of a replica are those of a mesh with the same coordinates in all dimensions that
    replicate. The result is ``NO_REPLICA`` if nothing is known of them, or if the order of the
    ranks that have a box is that of the replicas, as in nearly all programs. ``known`` has the
    results of this save so far.
    """
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        lowest = known.get(id(mesh))
        if lowest is None:
            # The mesh may be a row of another one, whose other rows have the other replicas.
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
    """Returns the lowest rank; ``NO_REPLICA`` if the order of the ranks numbers the replicas.

    It does if the ranks are consecutive, and the first one is a multiple of their number. All ranks
    are then divided into blocks of this length, and each replica is in one block.
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
    parts = [(box.offsets, _part(local, box)) for box in boxes]
    shards = LocalShards(tensor.shape, parts, local)
    shards.replica = replica_of(tensor, {})
    return shards.requires_grad_(tensor.requires_grad)


def _without_empty(tensor: ShardedTensor) -> torch.Tensor:
    """Returns the shards that have elements. An empty one may have the offsets of another one."""
    shards = tensor.local_shards()
    if len(shards) < 2 or all(math.prod(shard.metadata.shard_sizes) for shard in shards):
        return tensor
    boxes = [(shard.metadata.shard_offsets, shard.tensor) for shard in shards]
    made = LocalShards(tensor.size(), boxes)
    made.replica = replica_of(tensor, {})
    return made.requires_grad_(tensor.metadata().tensor_properties.requires_grad)


def with_boxes(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a flat state dict in which DCP lists all tensors by the boxes of this rank."""
    return {**state_dict, **dict(_others_than_dcps(state_dict))}


def lookup_box(planner: Any, index: MetadataIndex) -> Any:
    """Returns an object or a box of a tensor. A planner's method in place of DCP's."""
    state_dict, value = planner.state_dict, planner.state_dict.get(index.fqn)
    if isinstance(value, DTensor | ShardedTensor):
        state_dict = {index.fqn: in_boxes(value, index.fqn)}
    return find_state_dict_object(state_dict, index)


def save_plan_in_boxes(plan: SavePlan, planner: object) -> SavePlan:
    """Returns the plan of a stock planner with the boxes of this rank in place of DCP's.

    The planner then resolves the items of this plan. Plans of other planners are not changed.
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

    ``fqns`` are those of the values that the planner has planned, ``None`` if that is unknown.
    """
    found = {
        fqn: shards
        for fqn, shards in _others_than_dcps(planner.state_dict)
        if fqns is None or fqn in fqns
    }
    if found:  # The state dict itself may be that of the program.
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


def _part(local: torch.Tensor, box: ShardBox) -> torch.Tensor:
    if not local.numel():
        return local.new_empty(box.sizes)
    for dim, (first, size) in enumerate(zip(box.local_offsets, box.sizes, strict=True)):
        local = local.narrow(dim, first, size)
    return local
