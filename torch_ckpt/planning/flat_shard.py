"""FlatShard: a range of a tensor's elements in row-major order, as flattened shardings have it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torch_ckpt._core import _native

__all__ = ["FlatShard"]


class FlatShard(torch.Tensor):
    """The elements ``[start, start + local.numel())`` of a tensor, in row-major order.

    Frameworks that flatten and concatenate parameters before they shard them, such as FSDP1 and
    ZeRO, cut tensors at arbitrary elements. Put a ``FlatShard`` into the state dict of each rank,
    and save or load it with any DCP planner, writer and reader. Ranks do not communicate for it: a
    range of an N-dimensional tensor is divided into at most 2N - 1 boxes, and each box is stored,
    or loaded, as a shard. The stored tensor has no trace of the division, and loads into any other
    sharding. A load fills ``local`` in place.

    A ``FlatShard`` has the shape of the whole tensor, but only the values in ``local``. Torch
    functions other than ``size``, ``dtype`` and the like raise an error.

    Source: ByteCheckpoint (https://arxiv.org/abs/2407.20143), section 3.2, irregular tensors.

    Args:
        local: The elements of this rank: 1-D, contiguous, on any device. May have no elements.
        fqn: Name of the tensor, for messages.
        shape: Shape of the whole tensor.
        start: Position of the first element of ``local`` in the whole tensor.

    Attributes:
        local: The elements of this rank.
        fqn: Name of the tensor, for messages.
        start: Position of the first element.

    Raises:
        ValueError: ``local`` is not 1-D and contiguous, or exceeds the tensor.

    Example::

        state = {"w": FlatShard(flat[rank * 50 : rank * 50 + 50], "w", (10, 10), rank * 50)}
        dcp.save(state, storage_writer=FastWriter("run/step-100"))
    """

    local: torch.Tensor
    fqn: str
    start: int

    def __new__(cls, local: torch.Tensor, fqn: str, shape: Sequence[int], start: int) -> FlatShard:
        """Creates a tensor without memory of its own."""
        if local.dim() != 1 or not local.is_contiguous():
            raise ValueError(
                f"cannot use a tensor of sizes {tuple(local.size())} and strides {local.stride()} "
                f"as a FlatShard of {fqn!r}: it must be 1-D and contiguous"
            )
        end, numel = start + local.numel(), math.prod(shape)
        if start < 0 or end > numel or any(size < 0 for size in shape):
            raise ValueError(
                f"cannot use [{start}, {end}) as a FlatShard of {fqn!r}: a tensor of sizes "
                f"{tuple(shape)} has {numel} elements"
            )
        whole: FlatShard = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=local.dtype, device=local.device
        )
        whole.local, whole.fqn, whole.start = local.detach(), fqn, start
        return whole

    @property
    def end(self) -> int:
        """Position after the last element of ``local``."""
        return self.start + self.local.numel()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"FlatShard([{self.start}, {self.end}) of {self.fqn!r}, shape={tuple(self.size())}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return FlatShard, (self.local, self.fqn, tuple(self.size()), self.start)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        memo[id(self)] = copy = FlatShard(self.local.clone(), self.fqn, self.size(), self.start)
        return copy

    # ---- Torch's interface of wrapper subclasses ----

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses all functions that need values."""
        name = next((repr(arg) for arg in args if isinstance(arg, FlatShard)), "a FlatShard")
        raise NotImplementedError(
            f"cannot call {func} on {name}: it has no values outside its range; use its "
            "attribute `local`"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["local"], (self.fqn, self.start)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> FlatShard:
        fqn, start = context
        return FlatShard(inner["local"], fqn, outer_size, start)

    # ---- DCP's interface of tensors that list their own items ----

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.numel():  # Every rank lists the tensor, so that the checkpoint has its name.
            return [ChunkStorageMetadata(torch.Size([0] * self.dim()), self.size())]
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in _native.flat_range_to_boxes(self.size(), self.start, self.end)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        begin = 0
        for chunk in self.__create_chunk_list__():
            numel = chunk.sizes.numel()
            if chunk.offsets == index.offset:
                return self.local[begin : begin + numel].view(chunk.sizes)
            begin += numel
        raise ValueError(f"{self!r} has no box at {index.offset}")
