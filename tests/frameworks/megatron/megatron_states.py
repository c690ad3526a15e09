"""Sharded state dicts of Megatron-Core, with known values. Megatron runs on CPU with patches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from states import full_value

KEYS = ("rows", "columns", "replica", "layers", "embedding", "split.a", "split.b", "twice", "pair")


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron synchronizes and asks for the current device without a look at what there is."""
    with (
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.current_device", return_value="cpu"),
        mock.patch("torch.cuda.set_device"),
        mock.patch("torch.cuda.device_count", return_value=1),
    ):
        yield


def whole(key: str) -> torch.Tensor:
    """The whole tensor of a key."""
    shapes: dict[str, tuple[int, ...]] = {"layers": (12, 3), "embedding": (12, 6)}
    dtype = torch.bfloat16 if key == "replica" else torch.float32
    return full_value(key, shapes.get(key, (12, 24)), dtype)


def shard(key: str, axis: int, *, blank: bool = False, **options: Any) -> ShardedTensor:
    """This rank's part of a tensor along an axis."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data = whole(key).chunk(size, axis)[rank].contiguous()
    data = torch.zeros_like(data) if blank else data
    return ShardedTensor.from_rank_offsets(key, data, (axis, rank, size), **options)


def layers(*, blank: bool = False) -> list[ShardedTensor]:
    """This rank's layers, as rows of one stacked tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = 12 // size
    rows = whole("layers")[rank * count : (rank + 1) * count]
    return [
        ShardedTensor.from_rank_offsets(
            "layers",
            torch.zeros_like(row) if blank else row.clone(),
            (0, rank * count + number, 12),
            prepend_axis_num=1,
        )
        for number, row in enumerate(rows)
    ]


def split(tensor: torch.Tensor) -> ShardedTensorFactory:
    """A tensor that is stored in two."""

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        axis = 0, dist.get_rank(), dist.get_world_size()
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{name}", half, axis, replica_id=replica_id)
            for name, half in zip("ab", data.chunk(2, 1), strict=True)
        ]

    return ShardedTensorFactory("split", tensor, build, lambda halves: torch.cat(halves, 1))


def entities(
    axis: int, *, blank: bool = False, rows: int = 12, twice: bool = True
) -> dict[str, Any]:
    """A state dict with one of each kind of value.

    Args:
        axis: Axis along which tensors are cut.
        blank: Whether values are to be loaded.
        rows: Rows of the embedding, some of which may be padding.
        twice: Whether this rank has two replicas of one tensor.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [whole(f"split.{name}").chunk(size, 0)[rank] for name in "ab"]
    halved = torch.cat(halves, 1)
    embedding = torch.nn.functional.pad(whole("embedding"), (0, 0, 0, rows - 12))
    part = embedding.chunk(size, 0)[rank].contiguous()
    replica = whole("replica")
    pair = whole("pair").chunk(2 * size, axis)
    return {
        "model": {
            "rows": shard("rows", axis, blank=blank),
            "columns": [shard("columns", 1 - axis, blank=blank)],
            "replica": ShardedTensor.from_rank_offsets(
                "replica",
                torch.zeros_like(replica) if blank else replica,
                replica_id=(0, 0, rank),
            ),
            "layers": layers(blank=blank),
            "embedding": ShardedTensor.from_rank_offsets(
                "embedding",
                torch.ones_like(part) if blank else part,
                (0, rank, size),
                allow_shape_mismatch=True,
            ),
            "split": split(torch.zeros_like(halved) if blank else halved),
            "one": shard("twice", axis, blank=blank),
            **({"again": shard("twice", axis, blank=blank, replica_id=1)} if twice else {}),
            "pair": [
                ShardedTensor.from_rank_offsets(
                    "pair",
                    torch.zeros_like(pair[at]) if blank else pair[at].contiguous(),
                    (axis, at, 2 * size),
                )
                for at in (2 * rank, 2 * rank + 1)
            ],
        },
        "extra": ShardedObject(
            "extra", None if blank else {"rank": rank, "text": "x" * rank}, (size,), (rank,)
        ),
        "same": ShardedObject("same", None if blank else [1, 2], (1,), (0,), replica_id=rank),
        "here": LocalNonpersistentObject(f"of rank {rank}"),
        "step": 0 if blank else 7,
        3: {"keys": "may be numbers"},
    }


def expected(axis: int, *, rows: int = 12) -> dict[str, Any]:
    """What a load of :func:`entities` with these arguments returns."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

    def value(entity: Any) -> Any:
        if isinstance(entity, ShardedTensorFactory | ShardedTensor | ShardedObject):
            return entity.data
        return entity.unwrap() if isinstance(entity, LocalNonpersistentObject) else entity

    return dict_list_map_inplace(value, entities(axis, rows=rows))
