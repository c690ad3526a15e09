"""State dicts spread over ranks: meshes, placements, replicas, and values that one rank has."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.states import State, is_in_list, mapped
from support.tensors import LAYOUTS, ONES, PACKED, copied, laid_out, mask_of, random_tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ckpt.planning.local_shards import LocalShards


class Placing:
    """Spreads states of whole tensors, which are the same on every rank, over the ranks.

    A value of one path is placed the same in every state, in the same memory if it may be.

    Args:
        seed: The same on every rank.
        owners: One in so many values is held by one rank only; none if 0.
        may_be_empty: Whether a rank may have an empty shard at the offsets of another one. Stock's
            planner takes them for the same.
        drifts: Whether all replicas of a DTensor but the first have other values.
    """

    def __init__(
        self, seed: int, *, owners: int = 0, may_be_empty: bool = True, drifts: bool = False
    ) -> None:
        self.seed = seed
        self.owners = owners
        self.may_be_empty = may_be_empty
        self.drifts = drifts
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}
        self._meshes = meshes_of(dist.get_world_size())  # No group is made beside a save.

    def place(self, state: State) -> State:
        """This rank's part of a state."""
        return mapped(self._place, state)

    def _place(self, path: tuple[Any, ...], value: Any) -> Any:
        rng = random.Random(f"{self.seed} {path}")
        owner, number = rng.randrange(dist.get_world_size()), rng.randrange(self.owners or 1)
        if self.owners and number == 0 and not is_in_list(path):
            return value if dist.get_rank() == owner else ...
        is_plain = type(value) is torch.Tensor and not value.requires_grad
        if not is_plain or value.dtype in PACKED or rng.random() < 0.4:
            return value
        if value.dim() and value.numel() and rng.random() < 0.2:
            cuts = sorted(rng.randint(0, len(value)) for _ in range(dist.get_world_size() - 1))
            rows = [0, *cuts, len(value)][dist.get_rank() :][:2]
            part = PARTS[rng.choice(list(PARTS))](value, *rows, self.may_be_empty)
            return self._in_place(path, part)
        # DTensor.from_local forgets on ranks off the mesh that a tensor has no dimensions.
        mesh = rng.choice(self._meshes if value.dim() else self._meshes[:1])
        placements = random_placements(rng, mesh, value.shape)
        made = as_box(value, mesh, placements, layout=rng.choice(list(LAYOUTS)))
        if self.drifts and not is_first_replica(mesh, placements):
            made._local_tensor.copy_(drifted(made._local_tensor))
        return self._in_place(path, made)

    def _in_place(self, path: tuple[Any, ...], made: torch.Tensor) -> torch.Tensor:
        """The tensor in the memory of the one that was made for an earlier state, if it may be."""
        before = self._made.get(path)
        if before is None or _facts(before) != _facts(made):
            self._made[path] = made
        else:
            for former, new in zip(held(before), held(made), strict=True):
                former.copy_(new)
        return self._made[path]


@functools.cache  # Each has groups, and threads, for as long as the process lives.
def meshes_of(world: int) -> list[DeviceMesh]:
    """A mesh of all ranks, meshes of two dimensions, one rank, and all the others."""
    meshes = [init_device_mesh("cpu", (world,))]
    grids = [(2, 2)] if world == 4 else [(world, 1), (1, world)]
    meshes += [init_device_mesh("cpu", grid, mesh_dim_names=("a", "b")) for grid in grids]
    if world == 4:  # Ranks in another order, as on machines that are not named in that of ranks.
        meshes.append(DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("a", "b")))
    for ranks in ([world - 1], list(range(world - 1))):
        if ranks:
            meshes.append(DeviceMesh("cpu", ranks))
    return meshes


def random_placements(
    rng: random.Random, mesh: DeviceMesh, shape: Sequence[int]
) -> list[Placement]:
    """Placements of a tensor of these sizes."""
    dims = len(shape)
    if dims == 0:
        return [Replicate()] * mesh.ndim
    dim, is_strided = rng.randrange(dims), rng.random() < 0.3
    if mesh.ndim == 2 and is_strided and shape[dim] % mesh.size() == 0:
        # FSDP over tensor parallelism. Where sizes are uneven, DCP takes it for other rows.
        return [_StridedShard(dim, split_factor=mesh.size(1)), Shard(dim)]
    return [rng.choice([Replicate(), Shard(rng.randrange(dims))]) for _ in range(mesh.ndim)]


def is_first_replica(mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Whether this rank is the lowest of those that hold its box."""
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    return not any(
        at for at, place in zip(coordinate, placements, strict=True) if place == Replicate()
    )


def drifted(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which every byte has another lowest bit."""
    flat = copied(tensor).reshape(-1)  # One element may have any stride.
    return flat.view(torch.uint8).bitwise_xor(1).view(tensor.dtype).reshape(tensor.shape)


def local_part(
    full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """The view of ``full`` that this rank holds, empty off the mesh; reckoned here, not by DTensor.

    A strided shard is a chunk of what the other mesh dimensions have cut, as FSDP over TP has it.
    """
    if mesh.get_coordinate() is None:
        return full.flatten()[:0]
    part = full
    strided = [isinstance(placement, _StridedShard) for placement in placements]
    for mesh_dim in sorted(range(len(placements)), key=strided.__getitem__):
        placement = placements[mesh_dim]
        if isinstance(placement, (Shard, _StridedShard)):
            chunks = part.chunk(mesh.size(mesh_dim), placement.dim)
            rank = (mesh.get_coordinate() or [])[mesh_dim]  # Groups are ordered by rank.
            empty = part.narrow(placement.dim, 0, 0)
            part = chunks[rank] if rank < len(chunks) else empty
    return part


def as_box(
    full: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], *, layout: str = "contiguous"
) -> DTensor:
    """A DTensor of this rank's box, in memory of its own."""
    box = local_part(full, mesh, placements)
    local = laid_out(layout, box.shape, box.dtype, ONES)
    if mask_of(local):  # Not all bits could be copied into it.
        local = laid_out("contiguous", box.shape, box.dtype, ONES)
    local.copy_(box)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.size(), stride=full.stride()
    )


# ---- Parts that are no DTensors ------------------------------------------------------------------


def as_shards(full: torch.Tensor, begin: int, end: int, _: bool) -> LocalShards:
    """Some rows as a LocalShards of two boxes, with an empty box at the offsets of the first."""
    middle, zeros = (begin + end) // 2, (0,) * (full.dim() - 1)
    parts = [(begin, begin), (begin, middle), (middle, end)]
    return LocalShards(full.shape, [((at, *zeros), copied(full[at:last])) for at, last in parts])


def as_part(full: torch.Tensor, begin: int, end: int, _: bool) -> torch.Tensor:
    """Some rows as a tensor with the attributes of torch's protocol, and a row of padding."""
    rest = full.shape[1:]
    part: Any = random_tensor((end - begin + 1, *rest), full.dtype, ONES)
    part[1:].copy_(full[begin:end])
    zeros = (0,) * len(rest)
    boxes = [((begin, *zeros), (1, *zeros), (end - begin, *rest))] if end > begin else []
    part.rows, part.held = (begin, end), (1, end - begin + 1)
    part.global_shape = tuple(full.shape)
    part.global_offsets, part.local_offsets, part.local_sizes = (
        tuple(box[number] for box in boxes) for number in range(3)
    )
    return part  # type: ignore[no-any-return]


def as_listing(full: torch.Tensor, begin: int, end: int, may_be_empty: bool) -> torch.Tensor:
    """Some rows as a tensor of all sizes, with methods among its attributes that list them.

    A rank without rows lists an empty box at the offsets of another rank, if it may.
    """
    part: Any = random_tensor(full.shape, full.dtype, ONES)
    part[begin:end].copy_(full[begin:end])
    part.rows = part.held = (begin, end)
    part.has_box = end > begin or may_be_empty
    for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"):
        setattr(part, name, types.MethodType(_LISTING[name], part))
    return part  # type: ignore[no-any-return]


def _write_items(part: Any, fqn: str, _: object) -> list[WriteItem]:
    properties = TensorProperties(dtype=part.dtype)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, part.size()),
        )
        for chunk in _chunk_list(part)
    ]


def _chunk_list(part: Any) -> list[ChunkStorageMetadata]:
    begin, end = part.rows
    rest = part.shape[1:]
    chunk = ChunkStorageMetadata(
        torch.Size((begin, *[0] * len(rest))), torch.Size((end - begin, *rest))
    )
    return [chunk] if part.has_box else []


def _shard_of(part: Any, _: MetadataIndex) -> torch.Tensor:
    return part[slice(*part.rows)]  # type: ignore[no-any-return]


_LISTING: dict[str, Any] = {
    "__create_write_items__": _write_items,
    "__create_chunk_list__": _chunk_list,
    "__get_tensor_shard__": _shard_of,
}

# Name -> the rows from one to another of a tensor. A new kind of part joins by one line.
PARTS: dict[str, Any] = {"local shards": as_shards, "listing": as_listing}
if hasattr(dcp, "CheckpointableTensor"):
    PARTS["protocol"] = as_part


def _facts(value: Any) -> tuple[Any, ...]:
    return type(value), value.shape, value.dtype, [each.shape for each in held(value)]


def held(value: Any) -> list[Any]:
    """The elements of a value that this rank holds, box by box."""
    if isinstance(value, DTensor):
        return [value._local_tensor]
    if isinstance(value, LocalShards):
        return [tensor for _, tensor in value.boxes]
    return [value[slice(*value.held)] if hasattr(value, "held") else value]


def _alone_or_list(value: Any, parts: list[Any]) -> Any:
    return parts if isinstance(value, LocalShards) else parts[0]


def local(state: Any) -> Any:
    """The same structure, of what this rank holds."""
    return mapped(lambda _, value: _alone_or_list(value, held(value)), state)


def boxes_like(state: Any, full: Any) -> Any:
    """What :func:`local` gives of a state that has the values of whole tensors."""

    def box(path: tuple[Any, ...], value: Any) -> Any:
        whole = functools.reduce(lambda container, key: container[key], path, full)
        if isinstance(value, DTensor):
            return local_part(whole, value.device_mesh, value.placements)
        if isinstance(value, LocalShards):
            return [whole[at[0] : at[0] + len(tensor)] for at, tensor in value.boxes]
        return whole[slice(*value.rows)] if hasattr(value, "rows") else whole

    return mapped(box, state)
