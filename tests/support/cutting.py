"""Planners that save and load tensors in random boxes, as the ranks of a sharded job would."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)


def cut(sizes: Iterable[int], rng: random.Random) -> list[tuple[list[int], list[int]]]:
    """Random boxes (offsets, sizes) that tile a tensor."""
    boxes: list[tuple[list[int], list[int]]] = [([], [])]
    for size in sizes:
        marks = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 2)))})
        spans = [(a, b - a) for a, b in itertools.pairwise(marks)] or [(0, 0)]
        boxes = [([*o, begin], [*s, n]) for o, s in boxes for begin, n in spans]
    rng.shuffle(boxes)
    return boxes


def narrow(tensor: torch.Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
    """The box of a tensor, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


class CuttingSavePlanner(DefaultSavePlanner):
    """Stores every tensor as random boxes, as the ranks of a sharded job would."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            data = item.tensor_data
            if data is None or 0 in data.size:
                items.append(item)
                continue
            for offsets, sizes in cut(data.size, self.rng):
                index = MetadataIndex(item.index.fqn, torch.Size(offsets))
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                properties = TensorProperties(dtype=data.properties.dtype)
                piece = TensorWriteData(chunk=chunk, properties=properties, size=data.size)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=piece))
        self.rng.shuffle(items)
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, item: WriteItem) -> Any:
        if item.type != WriteItemType.SHARD:
            return super().resolve_data(item)
        whole = self.state_dict[item.index.fqn]
        return narrow(whole, item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)


class CuttingLoadPlanner(DefaultLoadPlanner):
    """Reads what it wants in random boxes and in random order."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items: list[ReadItem] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                items.append(item)
                continue
            for offsets, sizes in cut(item.lengths, self.rng):
                move = [
                    torch.Size(a + b for a, b in zip(of, offsets, strict=True))
                    for of in (item.dest_offsets, item.storage_offsets)
                ]
                items.append(
                    dataclasses.replace(
                        item,
                        dest_offsets=move[0],
                        storage_offsets=move[1],
                        lengths=torch.Size(sizes),
                    )
                )
        self.rng.shuffle(items)
        return dataclasses.replace(plan, items=items)
