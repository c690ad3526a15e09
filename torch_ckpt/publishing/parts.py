"""Parts: the boxes of tensors that a subscriber updates, in the memory of its own tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from torch_ckpt._core import _tensor_view
from torch_ckpt._core.tensors import check_memory
from torch_ckpt.errors import UnsupportedError, naming
from torch_ckpt.planning.dtensor_boxes import boxes_of, local_part
from torch_ckpt.planning.local_shards import LocalShards
from torch_ckpt.planning.value_digests import THREADS

__all__ = ["Part", "Slice", "digest_of", "parts_of", "view_of"]

Slice = tuple[Sequence[int], Sequence[int], torch.Tensor]
"""A box of a tensor: sizes of the tensor, offsets of the box, and the tensor with its values."""


@dataclass(frozen=True, eq=False)
class Part:
    """A box of a tensor, and the memory with its values, on any device.

    Attributes:
        fqn: Name of the tensor.
        whole: Sizes of the tensor.
        offsets: Where the box begins.
        tensor: The values of the box.
    """

    fqn: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the box."""
        return tuple(self.tensor.size())

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """What differs for another box, or for other memory."""
        tensor = self.tensor
        where = tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.device
        return (self.fqn, self.whole, self.offsets, self.sizes, *where)

    def host(self) -> torch.Tensor:
        """Returns the tensor itself, or a copy in host memory if it is on another device."""
        return self.tensor if self.tensor.device.type == "cpu" else self.tensor.cpu()

    def store(self, host: torch.Tensor) -> None:
        """Copies the values of :meth:`host` back, if they are a copy."""
        if host is not self.tensor:
            self.tensor.copy_(host)


def view_of(tensor: torch.Tensor, fqn: str, *, writable: bool = False) -> Any:
    """Returns the engine's view of a tensor in host memory."""
    return _tensor_view.view(tensor, fqn, writable=writable)


def digest_of(host: torch.Tensor) -> tuple[int, int]:
    """Returns the digest of the elements of a tensor in host memory."""
    return _tensor_view.inspect([host], writable=False).full_digests([0], THREADS)[0]


def parts_of(tensors: Mapping[str, Any] | torch.nn.Module, ties: Mapping[str, str]) -> list[Part]:
    """Returns the parts of tensors, each memory once, without those that have no elements.

    ``ties`` has names of tensors -> the name under which they are stored. Raises TypeError or
    UnsupportedError if a value is no tensor or of a kind that cannot be updated, and ValueError if
    its memory cannot be written, or is in part that of another one.
    """
    values = tensors.state_dict() if isinstance(tensors, torch.nn.Module) else tensors
    parts: dict[tuple[Any, ...], Part] = {}
    for fqn, value in values.items():
        with naming("update", fqn):
            for part in _parts_of(fqn, value):
                check_memory(part.tensor)
                kind = _tensor_view.tensor_kind(part.tensor)
                if kind == _tensor_view.TensorKind.TORCH_ONLY or part.tensor.is_meta:
                    tensor = part.tensor
                    raise UnsupportedError(
                        f"it is a {type(tensor).__name__} of {tensor.dtype} on {tensor.device}"
                    )
                if part.tensor.numel():
                    # Tied names have the same memory.
                    parts.setdefault((ties.get(fqn, fqn), *part.key[1:]), part)
    found = list(parts.values())
    for number, why in _tensor_view.write_faults([part.tensor for part in found]):
        raise ValueError(f"cannot update {found[number].fqn!r}: its memory: {why}")
    _check_apart(found)
    return found


def _parts_of(fqn: str, value: Any) -> list[Part]:
    if isinstance(value, tuple):
        whole, offsets, tensor = value
        return [_part(fqn, whole, offsets, tensor)]
    if isinstance(value, DTensor):
        local = value._local_tensor
        boxes = boxes_of(value, fqn)
        return [_part(fqn, value.shape, box.offsets, local_part(local, box)) for box in boxes]
    if isinstance(value, LocalShards):
        return [_part(fqn, value.size(), offsets, tensor) for offsets, tensor in value.boxes]
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return [_part(fqn, value.size(), s.metadata.shard_offsets, s.tensor) for s in shards]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"it is a {type(value).__name__}, and no tensor")
    return [_part(fqn, value.size(), [0] * value.dim(), value)]


def _part(fqn: str, whole: Sequence[int], offsets: Sequence[int], tensor: torch.Tensor) -> Part:
    is_inside = len(whole) == len(offsets) == tensor.dim() and all(
        at >= 0 and at + size <= all_of
        for at, size, all_of in zip(offsets, tensor.size(), whole, strict=True)
    )
    if not is_inside:
        raise ValueError(
            f"a box of {list(tensor.size())} at {list(offsets)} is not inside {list(whole)}"
        )
    own = tensor.detach() if tensor.requires_grad else tensor
    return Part(fqn, tuple(whole), tuple(offsets), own)


def _check_apart(parts: Sequence[Part]) -> None:
    """Raises ValueError if two parts share elements: both would change them."""
    by_storage: dict[int, list[Part]] = {}
    for part in parts:
        by_storage.setdefault(part.tensor.untyped_storage().data_ptr(), []).append(part)
    for sharing in by_storage.values():
        ranges = sorted(_tensor_view.extent(part.tensor)[1:] for part in sharing)
        pairs = itertools.pairwise(ranges)
        if all(end <= begin for (_, end), (begin, _) in pairs):
            continue
        # Views of columns lie between each other.
        used = torch.zeros(max(end for _, end in ranges), dtype=torch.uint8, device="cpu")
        for part in sharing:
            tensor = part.tensor
            elements = [*tensor.size(), tensor.itemsize]
            strides = [*(stride * tensor.itemsize for stride in tensor.stride()), 1]
            first = tensor.storage_offset() * tensor.itemsize
            view = used.as_strided(elements, strides, first)
            if view.any():
                raise ValueError(
                    f"cannot update {part.fqn!r}: its memory is in part that of another tensor"
                )
            view.fill_(1)
