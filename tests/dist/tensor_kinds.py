"""Values of each kind of the table of kinds on two ranks, with known elements.

A value is made anew on each call, with the same elements. ``WHOLE`` are the tensors of which each
rank has a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.placing import as_box
from support.tensors import Tagged, full_value
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor
from torch.distributed._shard.sharded_tensor import Shard as HeldShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import torch_ckpt
from torch_ckpt import FlatShard, RankState
from torch_ckpt.planning.local_shards import LocalShards

Meshes = dict[tuple[int, ...], DeviceMesh]

WHOLE: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "w": ((8, 6), torch.float32),
    "b": ((6, 4), torch.bfloat16),
    "f": ((4, 8), torch.float8_e4m3fn),
}


def whole() -> dict[str, torch.Tensor]:
    """The whole tensors."""
    return {name: full_value(name, *facts) for name, facts in WHOLE.items()}


def _in_dtensors(*grid: int) -> Callable[..., Callable[[Meshes], Any]]:
    def of(*placements: Placement) -> Callable[[Meshes], Any]:
        return lambda meshes: {
            name: as_box(tensor, meshes[grid], list(placements)) for name, tensor in whole().items()
        }

    return of


def _several_boxes(meshes: Meshes) -> Any:
    """A rank has a part of the rows of each half."""
    made = {}
    for name, tensor in whole().items():
        halves = tensor.view(torch.uint8).chunk(2)
        local = torch.cat([half.chunk(2)[dist.get_rank()] for half in halves]).view(tensor.dtype)
        made[name] = DTensor.from_local(
            local,
            meshes[2,],
            [_StridedShard(0, split_factor=2)],
            run_check=False,
            shape=tensor.size(),
            stride=tensor.stride(),
        )
    return made


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, tensor in whole().items():
            if tensor.dtype == torch.float32:
                setattr(self, name, nn.Parameter(tensor))


def _fsdp1(meshes: Meshes, *, has_mesh: bool) -> Any:
    model = _fsdp1_model(device_mesh=meshes[2,] if has_mesh else None)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.state_dict()


def _fsdp1_model(**options: Any) -> Any:
    return FullyShardedDataParallel(
        _Net(), use_orig_params=True, device_id=torch.device("cpu"), **options
    )


def _local_shards(_: Meshes) -> Any:
    """The first rank has both ends of the rows, and the second one the middle."""
    made = {}
    for name, tensor in whole().items():
        rows = len(tensor)
        bounds = [(0, 1), (rows - 2, rows)] if dist.get_rank() == 0 else [(1, rows - 2)]
        boxes = [((begin, 0), tensor[begin:end]) for begin, end in bounds]
        made[name] = LocalShards(tensor.size(), boxes)
    return made


def _sharded_tensors(_: Meshes) -> Any:
    """As :func:`_local_shards`, and one that the first rank has alone."""
    made = {}
    for name, tensor in whole().items():
        rows, is_first = len(tensor), dist.get_rank() == 0
        bounds = [(0, 1), (rows - 2, rows)] if is_first else [(1, rows - 2)]
        if name == "b":
            bounds = [(0, rows)] if is_first else []
        shards = [
            HeldShard.from_tensor_and_offsets(
                tensor[begin:end].clone(), [begin, 0], dist.get_rank()
            )
            for begin, end in bounds
        ]
        made[name] = init_from_local_shards(shards, *tensor.size())
    return made


def _of_torchao(_: Meshes) -> Any:
    from torchao import quantization

    layer = nn.Linear(64, 64, bias=False)
    layer.weight = nn.Parameter(full_value("q", (64, 64), torch.int16).float() / 1000)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return {"w": layer.weight.detach()}


def _two(tensor: torch.Tensor) -> TwoTensor:
    return TwoTensor(tensor, -tensor)


def _dtensor_of_wrapper(meshes: Meshes) -> Any:
    full = whole()["w"]
    local = _two(full.chunk(2)[dist.get_rank()].clone())
    return {"w": DTensor.from_local(local, meshes[2,], [Shard(0)], run_check=False)}


def _quantized(_: Meshes) -> Any:
    values = torch.arange(12.0).view(3, 4)
    return {"w": torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)}


def _rank_state(_: Meshes) -> Any:
    state = {"own": torch.full((3,), float(dist.get_rank())), "step": dist.get_rank()}
    return RankState(lambda: state, state.update)


def _lazy(_: Meshes) -> Any:
    tensor = full_value("z", (5, 3), torch.int16).to(torch.complex64)
    return {"conj": tensor.conj(), "neg": torch._neg_view(tensor.real)}


def _not_awaited(_: Meshes) -> Any:
    return {"w": all_gather_tensor(whole()["w"].chunk(2)[dist.get_rank()], 0, dist.group.WORLD)}


MADE: dict[str, Callable[[Meshes], Any]] = {
    "plain": lambda _: whole(),
    "FSDP2": _in_dtensors(2)(Shard(0)),
    "TP": _in_dtensors(2)(Shard(1)),
    "HSDP": _in_dtensors(2, 1)(Replicate(), Shard(0)),
    "2-D": _in_dtensors(2, 1)(Shard(0), Shard(1)),
    "FSDP2 over TP": _in_dtensors(1, 2)(_StridedShard(0, split_factor=2), Shard(0)),
    "strided shards of several boxes": _several_boxes,
    "FSDP1": lambda meshes: _fsdp1(meshes, has_mesh=False),
    "FSDP1 with a mesh": lambda meshes: _fsdp1(meshes, has_mesh=True),
    "flat shards": lambda _: torch_ckpt.fsdp1_state_dict(_fsdp1_model())[0],
    "LocalShards": _local_shards,
    "ShardedTensor": _sharded_tensors,
    "wrapper subclass": lambda _: {"w": _two(whole()["w"])},
    "DTensor of a wrapper": _dtensor_of_wrapper,
    "torchao": _of_torchao,
    "other subclass": lambda _: {"w": whole()["w"].as_subclass(Tagged)},
    "conj and neg": _lazy,
    "result of a collective": _not_awaited,
    "quantized": _quantized,
    "in an object": lambda _: ([whole()["w"][1:3], whole()["w"].to_sparse()], {"b": whole()["b"]}),
    "RankState": _rank_state,
    "sparse": lambda _: {"w": torch.eye(3).to_sparse()},
    "nested": lambda _: {"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
    "meta": lambda _: {"w": torch.empty(3, device="meta")},
}
"""The kinds of :data:`support.kinds.KINDS`, by their names."""


def whole_of(kind: str) -> dict[str, torch.Tensor]:
    """The whole tensors of a kind, of which a rank may load any part."""
    made = MADE[kind]
    if made is _lazy:
        return {name: tensor.resolve_conj().resolve_neg() for name, tensor in _lazy({}).items()}
    return whole()


def parts(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors with memory in a value of this rank."""
    if isinstance(value, RankState):
        value = value.state_dict()
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from parts(each)
    elif isinstance(value, ShardedTensor):
        yield from (shard.tensor for shard in value.local_shards())
    elif isinstance(value, FlatShard):
        yield value.local
    elif isinstance(value, LocalShards):
        yield from (tensor for _, tensor in value.boxes)
    elif isinstance(value, DTensor):
        yield from parts(value._local_tensor)
    elif isinstance(value, AsyncCollectiveTensor):
        yield value.wait()
    elif isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        yield from (part for name in names for part in parts(getattr(value, name)))
    elif isinstance(value, torch.Tensor):
        yield value


def spoil(value: Any) -> None:
    """Changes each element of this rank in place, as the next step of a training may."""
    for part in parts(value):
        if part.is_nested or part.is_meta:
            continue
        for plain in (part._indices(), part._values()) if part.is_sparse else (part,):
            if storage := plain.untyped_storage():
                memory = torch.tensor([], dtype=torch.uint8).set_(storage)
                memory ^= 1


def is_object(value: Any) -> bool:
    """Whether a kind is one object, which a load replaces."""
    return isinstance(value, tuple)
