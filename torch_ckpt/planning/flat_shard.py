"""FlatShard: a range of a tensor's elements in row-major order, for flattened shardings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from torch_ckpt._core import _native
from torch_ckpt.planning.local_shards import LocalShards

__all__ = ["FlatShard"]


class FlatShard(LocalShards):
    """The elements ``[start, start + local.numel())`` of a tensor, in row-major order.

    Frameworks that flatten and concatenate parameters before they shard them, such as FSDP1 and
    ZeRO, cut tensors at arbitrary elements. Put a ``FlatShard`` into the state dict of each rank,
    and save or load it with any DCP planner, writer and reader. This needs no communication: the
    range is divided into at most 2N - 1 boxes of the N-dimensional tensor, and each box is stored
    or loaded as a shard. The checkpoint does not depend on the division, and loads into any other
    sharding. A load fills ``local`` in place.

    A ``FlatShard`` has the shape of the whole tensor, but only the values in ``local``. Torch
    functions raise an error, except ``size``, ``dtype`` and the like.

    The method is from ByteCheckpoint (https://arxiv.org/abs/2407.20143), section 3.2.

    Args:
        local: The elements of this rank: 1-D, contiguous, on any device; may be empty. A load
            fills it.
        fqn: Name of the tensor, for messages.
        shape: Shape of the whole tensor.
        start: Position of the first element of ``local`` in the whole tensor, in row-major order.

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
    _values_in = "local"

    def __new__(cls, local: torch.Tensor, fqn: str, shape: Sequence[int], start: int) -> FlatShard:
        """Creates a tensor that allocates no memory."""
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
        local = local.detach()
        whole = cast(FlatShard, super().__new__(cls, shape, _boxes(local, shape, start), local))
        whole.local, whole.fqn, whole.start = local, fqn, start
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

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["local"], (self.fqn, self.start)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> FlatShard:
        fqn, start = context
        return FlatShard(inner["local"], fqn, outer_size, start)


def _boxes(
    local: torch.Tensor, shape: Sequence[int], start: int
) -> list[tuple[Sequence[int], torch.Tensor]]:
    """Divides a range of a tensor into boxes."""
    if not math.prod(shape):  # Every rank lists the tensor, so that the checkpoint has its name.
        return [([0] * len(shape), local.view(tuple(shape)))]
    boxes: list[tuple[Sequence[int], torch.Tensor]] = []
    begin = 0
    for offsets, sizes in _native.flat_range_to_boxes(shape, start, start + local.numel()):
        end = begin + math.prod(sizes)
        boxes.append((offsets, local[begin:end].view(sizes)))
        begin = end
    return boxes
