"""LocalShards: the boxes of a tensor on a rank, as a value of a state dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["NO_REPLICA", "LocalShards"]

NO_REPLICA = -1
"""Stands for a replica without a number; see :func:`~torch_ckpt.planning.replica_of`."""


class LocalShards(torch.Tensor):
    """The boxes of a tensor on this rank.

    For frameworks with custom shardings. Put it into the state dict of each rank, and save or load
    it with any DCP planner, writer and reader. It has the shape of the whole tensor, but contains
    only the values of its boxes. ``boxes`` lists the offsets and the tensor of each box; all
    tensors have one dtype, are detached, and share the memory of the caller's tensors. Torch
    functions other than ``size``, ``dtype`` and the like raise an error. Without boxes, ``like``
    gives the dtype and device of the whole tensor. Empty boxes are not passed to DCP, because it
    identifies a box by its offsets alone.
    """

    boxes: list[tuple[torch.Size, torch.Tensor]]
    replica = NO_REPLICA
    _values_in = "boxes"  # Name of the attribute with the values.

    def __new__(
        cls,
        shape: Sequence[int],
        boxes: Sequence[tuple[Sequence[int], torch.Tensor]],
        like: torch.Tensor | None = None,
    ) -> LocalShards:
        """Creates a tensor that allocates no memory."""
        first = boxes[0][1] if like is None else like
        whole: LocalShards = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=first.dtype, device=first.device
        )
        whole.boxes = [(torch.Size(offsets), tensor.detach()) for offsets, tensor in boxes]
        for number, (_, tensor) in enumerate(whole.boxes):
            setattr(whole, f"box_{number}", tensor)  # Torch reads inner tensors by their names.
        return whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        boxes = ", ".join(f"{list(tensor.size())} at {list(at)}" for at, tensor in self.boxes)
        return (
            f"{type(self).__name__}({boxes}, shape={tuple(self.size())}, dtype={self.dtype}, "
            f"device={self.device})"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return LocalShards, (tuple(self.size()), self.boxes, self._like())

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShards:
        boxes = [(at, tensor.clone()) for at, tensor in self.boxes]
        memo[id(self)] = copy = LocalShards(self.size(), boxes, self._like())
        return copy

    def _like(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    # ---- Torch's interface of wrapper subclasses ----

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses all functions that need values."""
        name = next((repr(arg) for arg in args if isinstance(arg, cls)), f"a {cls.__name__}")
        raise NotImplementedError(
            f"cannot call {func} on {name}: it has no values outside this rank's shards; use its "
            f"attribute `{cls._values_in}`"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [f"box_{number}" for number in range(len(self.boxes))]
        return names, ([at for at, _ in self.boxes], self._like())

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> LocalShards:
        offsets, like = context
        boxes = list(zip(offsets, inner.values(), strict=True))
        return LocalShards(outer_size, boxes, boxes[0][1] if boxes else like)

    # ---- DCP's interface of tensors that list their own items ----

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype, requires_grad=self.requires_grad)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(at, tensor.size()) for at, tensor in self._listed()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for at, tensor in self._listed():
            if at == index.offset:
                return tensor
        raise ValueError(f"{self!r} has no box at {index.offset}")

    def _listed(self) -> list[tuple[torch.Size, torch.Tensor]]:
        """Returns the non-empty boxes, or one box of a tensor without elements.

        Omits other empty boxes: DCP's planner identifies a box by its offsets alone.
        """
        found = [box for box in self.boxes if box[1].numel()]
        return found or ([] if self.numel() else self.boxes[:1])
