"""A save planner that reads the tensors of another checkpoint while the writer writes them."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_ckpt.conversion.pieces import Source
from torch_ckpt.formats.safetensors.layout import ORDER
from torch_ckpt.staging.pickling import pickle_object
from torch_ckpt.storage.rank_work import LatePlanner

__all__ = ["ConversionPlanner"]


class ConversionPlanner(LatePlanner):
    """Saves all values of a source, but only the first of tied tensors.

    The tensors have the same order as :class:`SafetensorsWriter` writes them to a file, because the
    source loads them in the order of the plan.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(flatten_state_dict=False)
        self._source = source
        self._numbers: dict[MetadataIndex, int] = {}

    def create_local_plan(self) -> SavePlan:
        """Plans a box for each piece, and an item for each object."""
        source = self._source

        def place(name: str) -> tuple[int, str]:
            dtype = str(source.tensors[name].dtype).removeprefix("torch.")
            return ORDER.get(dtype, len(ORDER)), name

        items: list[WriteItem] = []
        names = [name for name in source.tensors if name not in source.ties]
        for piece in source.cut(sorted(names, key=place)):
            facts = source.tensors[piece.name]
            offsets, sizes = map(torch.Size, piece.box)
            index = MetadataIndex(piece.name, offsets)
            self._numbers[index] = piece.number
            properties = TensorProperties(dtype=facts.dtype)
            chunk = ChunkStorageMetadata(offsets, sizes)
            data = TensorWriteData(chunk, properties, torch.Size(facts.sizes))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        for name in source.objects:
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        self.plan = SavePlan(items, planner_data=dict(source.paths))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        """Describes the values, with the keys of the nested state dict."""
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = all_plans[0].planner_data
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Loads a piece, or pickles an object."""
        if write_item.type != WriteItemType.BYTE_IO:
            return self._source.take(self._numbers[write_item.index])
        fqn = write_item.index.fqn
        return pickle_object(self._source.objects[fqn], fqn)
