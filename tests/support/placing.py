"""State dicts spread over ranks: meshes, placements, replicas, and values that one rank has."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.states import State, is_in_list, mapped
from support.tensors import LAYOUTS, ONES, PACKED, laid_out, mask_of
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
        self._made: dict[tuple[Any, ...], DTensor] = {}
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
        world = dist.get_world_size()
        has_rows = value.dim() > 0 and (self.may_be_empty or len(value) >= world)
        if world > 1 and has_rows and rng.random() < 0.2:
            return rows_of(rng, value, may_be_empty=self.may_be_empty)
        # DTensor.from_local forgets on ranks off the mesh that a tensor has no dimensions.
        mesh = rng.choice(self._meshes if value.dim() else self._meshes[:1])
        placements = random_placements(rng, mesh, value.shape)
        made = as_box(value, mesh, placements, layout=rng.choice(list(LAYOUTS)))
        if self.drifts and not is_first_replica(mesh, placements):
            made._local_tensor.copy_(drifted(made._local_tensor))
        before = self._made.get(path)
        if before is None or (before.shape, before.dtype) != (made.shape, made.dtype):
            self._made[path] = made
        else:
            before._local_tensor.copy_(made._local_tensor)
        return self._made[path]


def rows_of(rng: random.Random, full: torch.Tensor, *, may_be_empty: bool) -> LocalShards:
    """Rows of this rank, in one box or two. Without rows, it has an empty one before another's."""
    world, rank, rows = dist.get_world_size(), dist.get_rank(), len(full)
    if may_be_empty:
        cuts = sorted(rng.randint(0, rows) for _ in range(world - 1))
    else:
        cuts = sorted(rng.sample(range(1, rows), world - 1))
    begin, end = [0, *cuts][rank], [*cuts, rows][rank]
    middle = random.Random(f"{rng.random()} {rank}").randint(begin, end)
    parts = [(begin, middle), (middle, end)] if begin < middle < end else [(begin, end)]
    zeros = (0,) * (full.dim() - 1)
    return LocalShards(full.shape, [((at, *zeros), full[at:last].clone()) for at, last in parts])


@functools.cache  # Each has groups, and threads, for as long as the process lives.
def meshes_of(world: int) -> list[DeviceMesh]:
    """A mesh of all ranks, meshes of two dimensions, one rank, and all the others."""
    meshes = [init_device_mesh("cpu", (world,))]
    grids = [(2, 2)] if world == 4 else [(world, 1), (1, world)]
    meshes += [init_device_mesh("cpu", grid, mesh_dim_names=("a", "b")) for grid in grids]
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
    flat = tensor.contiguous().reshape(-1)
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
            rank = mesh.get_local_rank(mesh_dim)
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


def local(state: Any) -> Any:
    """The same structure, of what this rank holds."""

    def part(_: tuple[Any, ...], value: Any) -> Any:
        if isinstance(value, LocalShards):
            return [tensor for _, tensor in value.boxes]
        return value._local_tensor if isinstance(value, DTensor) else value

    return mapped(part, state)


def boxes_like(state: Any, full: Any) -> Any:
    """What :func:`local` gives of a state that has the values of whole tensors."""

    def box(path: tuple[Any, ...], value: Any) -> Any:
        whole = functools.reduce(lambda container, key: container[key], path, full)
        if isinstance(value, LocalShards):
            return [whole[at[0] : at[0] + len(tensor)] for at, tensor in value.boxes]
        return (
            local_part(whole, value.device_mesh, value.placements)
            if isinstance(value, DTensor)
            else whole
        )

    return mapped(box, state)
