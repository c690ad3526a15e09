"""State dicts with known values, and their comparison bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.placing import local_part
from support.tensors import full_value
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DeviceMesh, DTensor, Placement

from torch_ckpt import FastLoadPlanner, FastReader, FastWriter

WRITERS: dict[str, type[StorageWriter]] = {"fast": FastWriter, "stock": FileSystemWriter}
READERS: dict[str, type[StorageReader]] = {"fast": FastReader, "stock": FileSystemReader}
LOAD_PLANNERS = [DefaultLoadPlanner, FastLoadPlanner]


class Failure(NamedTuple):
    """Why a rank has failed."""

    kind: str
    errno: int | None
    message: str


def failures_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[int, Failure]:
    """The failures that this rank gets of all ranks; none where the call returns."""
    try:
        call(*args, **kwargs)
    except CheckpointException as error:
        return {
            rank: Failure(type(cause).__name__, getattr(cause, "errno", None), str(cause))
            for rank, (cause, _) in error.failures.items()
        }
    return {}


def tensors_of(
    shapes: Mapping[str, tuple[int, ...]], version: object, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Tensors whose values are those of a version, and of no other."""
    return {name: full_value(f"{name} {version}", shape, dtype) for name, shape in shapes.items()}


def shards_of(
    shapes: Mapping[str, tuple[int, ...]],
    version: object,
    placement: Placement,
    *,
    as_view: bool = True,
) -> dict[str, DTensor]:
    """The tensors of :func:`tensors_of` over all ranks, as :func:`sharded` makes them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: sharded(tensor, mesh, (placement,), as_view=as_view)
        for name, tensor in tensors_of(shapes, version).items()
    }


def sharded(
    full: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    *,
    as_view: bool = True,
) -> DTensor:
    """A DTensor of this rank's part: a view into a copy of ``full``, or else a tensor by itself."""
    part = local_part(full.clone(), mesh, placements)
    part = part if as_view else part.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=full.size(), stride=full.stride()
    )


def assert_same(actual: Any, expected: Any) -> None:
    """Asserts that two nested state dicts are equal: tensors, or this rank's parts, bit for bit."""
    found, wanted = _flat(actual), _flat(expected)
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        got = found[name]
        if not isinstance(want, torch.Tensor):
            assert got == want, name
            continue
        assert (got.dtype, got.size()) == (want.dtype, want.size()), name
        assert torch.equal(_bits(got), _bits(want)), f"{name}: {got} is not {want}"


def assert_stored(
    path: Path,
    state: dict[str, Any],
    *,
    planners: Iterable[type[DefaultLoadPlanner]] = (DefaultLoadPlanner,),
    no_dist: bool = False,
) -> None:
    """Asserts that our reader and stock's load this state, with each of these planners."""
    for reader in READERS.values():
        for planner in planners:
            loaded = zeroed(state)
            dcp.load(loaded, storage_reader=reader(path), planner=planner(), no_dist=no_dist)
            assert_same(loaded, state)


def zeroed(value: Any) -> Any:
    """The same structure to load into: zeros, and ``None`` for objects."""
    if isinstance(value, dict):
        return {key: zeroed(one) for key, one in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def data_files(path: Path) -> set[str]:
    """Names of everything in a checkpoint's directory but its metadata and its index."""
    names = {file.name for file in path.iterdir()} - {".metadata"}
    return {name for name in names if not name.startswith(".index.")}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """A nested state dict as one of dotted names."""
    if isinstance(state, dict):
        parts = [_flat(value, f"{prefix}{key}.") for key, value in state.items()]
    elif isinstance(state, list):
        parts = [_flat(value, f"{prefix}{number}.") for number, value in enumerate(state)]
    else:
        return {prefix.rstrip("."): state}
    return {name: value for part in parts for name, value in part.items()}


def loaded_whole(path: Path) -> dict[str, Any]:
    """All values of a checkpoint, by name, loaded by one process."""
    stored = FastReader(path).read_metadata().state_dict_metadata
    state = {
        fqn: None
        if isinstance(one, BytesStorageMetadata)
        else torch.zeros(one.size, dtype=one.properties.dtype)
        for fqn, one in stored.items()
    }
    dcp.load(state, storage_reader=FastReader(path), no_dist=True)
    return state
