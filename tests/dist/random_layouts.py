"""Random state dicts spread over ranks: meshes, placements, replicas, and what only some hold."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
import torch.distributed as dist
from states import full_value
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool]

State = dict[str, Any]


def random_layout(names: int, placed: int, *, owners: int | None = None) -> State:
    """This rank's part of a random state dict.

    Args:
        names: Seed of names, shapes, dtypes and values: all that is the same in every layout.
        placed: Seed of how it is spread over the ranks of this world.
        owners: Every so many plain tensors, one is held by one rank only.
    """
    rng, placing = random.Random(names), random.Random(placed)
    meshes = _meshes(dist.get_world_size())
    state: State = {"objects": {"step": 7, "of all": ["a", 1]}, "plain": {}, "placed": {}}
    for number in range(24):
        dims = rng.choice([0, 1, 1, 2, 2, 3])
        shape = tuple(rng.choice([0, 1, 2, 3, 7, 16, 33]) for _ in range(dims))
        dtype = rng.choice(DTYPES)
        name = f"t{number}.{shape}"
        value = full_value(f"{names} {name}", shape, dtype)
        if number % 3 == 0:
            if (
                owners
                and number % owners == 0
                and number % dist.get_world_size() != dist.get_rank()
            ):
                continue
            state["plain"][name] = value
            continue
        # DTensor.from_local forgets on ranks off the mesh that a tensor has no dimensions.
        mesh = placing.choice(meshes if dims else meshes[:1])
        placements = _placements(placing, mesh, dims)
        if mesh.get_coordinate() is not None or not owners:
            state["placed"][name] = as_box(value, mesh, placements)
    return state


def as_box(full: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """A DTensor of this rank's box, as torch says where that lies."""
    if mesh.get_coordinate() is None:
        local = full.flatten()[:0]
    else:
        sizes, offsets = compute_local_shape_and_global_offset(full.shape, mesh, placements)
        local = full
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            local = local.narrow(dim, min(offset, full.size(dim)), size)
        local = local.clone()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.size(), stride=full.stride()
    )


def blank_like(state: State) -> State:
    """The same to load into."""
    blank: State = {"objects": {"step": 0, "of all": None}}
    for group in ("plain", "placed"):
        blank[group] = {name: _zeroed(tensor) for name, tensor in state[group].items()}
    return blank


def assert_holds(loaded: State, expected: State) -> None:
    """Asserts that what this rank holds is the same, bit for bit."""
    assert loaded["objects"] == expected["objects"]
    for group in ("plain", "placed"):
        assert loaded[group].keys() == expected[group].keys()
        for name, want in expected[group].items():
            assert _bytes(loaded[group][name]) == _bytes(want), name


@functools.cache  # Each has groups, and threads, for as long as the process lives.
def _meshes(world: int) -> list[DeviceMesh]:
    meshes = [init_device_mesh("cpu", (world,))]
    if world == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    for ranks in ([world - 1], list(range(world - 1))):
        if ranks:
            meshes.append(DeviceMesh("cpu", ranks))
    return meshes


def _placements(rng: random.Random, mesh: DeviceMesh, dims: int) -> list[Placement]:
    if dims == 0:
        return [Replicate()] * mesh.ndim
    if mesh.ndim == 2 and rng.random() < 0.3:  # FSDP over tensor parallelism, of one dimension.
        dim = rng.randrange(dims)
        return [_StridedShard(dim, split_factor=mesh.size(1)), Shard(dim)]
    return [rng.choice([Replicate(), Shard(rng.randrange(dims))]) for _ in range(mesh.ndim)]


def _zeroed(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return DTensor.from_local(
        torch.zeros(tensor._local_tensor.shape, dtype=tensor.dtype),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.size(),
        stride=tensor.stride(),
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
