"""Conversions between torch's description of tensors and the engine's."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt.errors import CorruptionError
from torch_ckpt.process_state import gc_paused

__all__ = [
    "DTYPE_CODES",
    "MEMORY_FORMATS",
    "Destinations",
    "MemoryFaultError",
    "bytes_of",
    "check_memory",
    "cpu_as_default",
    "flat_values",
    "gc_paused",
    "has_own_storage",
    "is_temporary",
    "memory_fault",
    "printable",
    "to_plain",
    "to_properties",
]

DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code
    for code, name in enumerate(_native.DTYPE_NAMES)
    if hasattr(torch, name)
}
"""The engine's code of each dtype that it stores. Torch serializes tensors of other dtypes."""

MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}
"""The memory formats of DCP's metadata, by the engine's name."""


def to_properties(
    dtype: str, memory_format: str, requires_grad: bool, pin_memory: bool
) -> TensorProperties:
    """Returns DCP's properties of a tensor, given the engine's names of dtype and memory format.

    Raises CorruptionError if torch has no such dtype or memory format.
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or memory_format not in MEMORY_FORMATS:
        raise CorruptionError(
            f"cannot read the index: a tensor has dtype {dtype!r} and memory format "
            f"{memory_format!r}, and torch lacks one of these"
        )
    return TensorProperties(
        dtype=torch_dtype,
        requires_grad=requires_grad,
        memory_format=MEMORY_FORMATS[memory_format],
        pin_memory=pin_memory,
    )


def printable(fqn: str) -> str:
    """Returns an FQN for the engine's messages, with lone surrogates escaped.

    Lone surrogates have no UTF-8 encoding, which the engine requires.
    """
    return fqn if fqn.isascii() else fqn.encode(errors="backslashreplace").decode()


class MemoryFaultError(ValueError):
    """The storage of a tensor is too short for its elements, for example because FSDP freed it.

    Torch does not check this. It would read other memory, or crash.
    """


def check_memory(tensor: torch.Tensor) -> None:
    """Raises MemoryFaultError if a storage of a tensor is too short for it.

    For a sparse tensor or a wrapper subclass, checks the storages of its inner tensors.
    """
    if type(tensor) not in _WITH_STORAGE:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            for name in names:
                check_memory(getattr(tensor, name))
            return
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return  # Only its class can locate its elements.
    for name in _PARTS.get(tensor.layout, ()):
        check_memory(getattr(tensor, name)())
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return
    if tensor.dtype not in _SEVERAL_TO_A_BYTE:
        _, _, needed = _tensor_view.extent(tensor)
        found = tensor.untyped_storage().nbytes() if needed else 0
        if needed > found:
            raise memory_fault(tensor.dtype, tensor.size(), needed, found)


def memory_fault(
    dtype: torch.dtype, sizes: Sequence[int], needed: int, found: int
) -> MemoryFaultError:
    """Returns the error of a tensor whose storage has fewer bytes than it needs."""
    return MemoryFaultError(
        f"the storage of a {dtype} tensor of sizes {list(sizes)} has {found} of the "
        f"{needed} bytes that it needs; allocate it before the save"
    )


_WITH_STORAGE = (torch.Tensor, torch.nn.Parameter)
_SEVERAL_TO_A_BYTE = (torch.quint4x2, torch.quint2x4)
_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}
"""Layout -> the methods of a sparse tensor that return the tensors in it."""


def flat_values(state_dict: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Returns FQN and value of each value of a nested state dict, as DCP flattens it."""
    flat: dict[str, Any] = _tensor_view.flatten(state_dict)[0]
    return flat.items()


def to_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor of the same values, without lazy conjugation or negation.

    Raises MemoryFaultError if the storage of the tensor is too short for it.
    """
    check_memory(tensor)
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a strided tensor, in row-major order, as a 1-D tensor of bytes.

    The result shares the memory of the tensor if the elements are contiguous.
    """
    elements = tensor.detach().resolve_conj().resolve_neg()
    if elements.itemsize == 1:  # Torch cannot copy strided elements of some dtypes.
        elements = elements.view(torch.uint8)
    elements = elements.contiguous()
    # In a contiguous tensor, a dimension of one element may have any stride.
    return elements.as_strided((elements.numel(),), (1,)).view(torch.uint8)


def _count_references(tensor: torch.Tensor) -> int:
    return sys.getrefcount(tensor)


def _count_owners(tensor: torch.Tensor) -> tuple[int, object]:
    """Returns the numbers of references to a tensor's Python storage object, and to its memory."""
    storage = tensor.untyped_storage()
    # If torch lacks this function, every tensor counts as shared: the counts never match.
    count = getattr(torch._C, "_storage_Use_Count", lambda _: object())
    return sys.getrefcount(storage), count(storage._cdata)


def _counts_of_fresh_tensor() -> tuple[int, tuple[int, object]]:
    tensor = torch.empty(0, device="cpu")
    return _count_references(tensor), _count_owners(tensor)


# Counts for a tensor with one variable. They differ between versions of Python and of torch.
_SINGLE_REFERENCE_COUNT, _SINGLE_OWNERS = _counts_of_fresh_tensor()


def has_own_storage(tensor: torch.Tensor) -> bool:
    """Returns whether no other tensor or variable refers to the tensor's memory."""
    return _count_owners(tensor) == _SINGLE_OWNERS


def is_temporary(tensor: torch.Tensor) -> bool:
    """Returns whether one variable of the caller is the only reference to the tensor's memory."""
    return sys.getrefcount(tensor) <= _SINGLE_REFERENCE_COUNT and has_own_storage(tensor)


def are_disjoint(tensors: Iterable[torch.Tensor]) -> bool:
    """Returns whether no two tensors overlap in memory."""
    ranges = sorted(range_ for range_ in map(_addresses, tensors) if range_[0] < range_[1])
    return all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))


class Destinations:
    """The destination memory of a batch of reads. It detects reads that would overlap there.

    A state dict may refer to the same memory twice, even by two storages. A planner may return one
    scratch tensor for several items, and rely on each item being read and committed before the next
    is resolved.
    """

    def __init__(self) -> None:
        # Disjoint ranges [begin, end) of addresses in ascending order. Each is the union of
        # destinations that overlap, with their FQN, or None if they have several.
        self._ranges: list[tuple[int, int, str | None]] = []
        self._begins: set[int] = set()  # First addresses of all destinations.

    def overlaps(self, tensor: torch.Tensor, fqn: str) -> bool:
        """Returns whether the tensor overlaps a destination that was added before.

        Destinations of the same FQN are disjoint boxes of one tensor. They overlap only if they
        begin at the same address.
        """
        begin, end = _addresses(tensor)
        if begin == end:
            return False
        first, last = self._overlapping(begin, end)
        return any(other != fqn for _, _, other in self._ranges[first:last]) or (
            first < last and begin in self._begins
        )

    def add(self, tensor: torch.Tensor, fqn: str) -> None:
        """Adds a tensor."""
        begin, end = _addresses(tensor)
        if begin == end:
            return
        self._begins.add(begin)
        first, last = self._overlapping(begin, end)
        others = self._ranges[first:last]
        for other_begin, other_end, _ in others:
            begin, end = min(begin, other_begin), max(end, other_end)
        is_one = all(other == fqn for _, _, other in others)
        self._ranges[first:last] = [(begin, end, fqn if is_one else None)]

    def _overlapping(self, begin: int, end: int) -> tuple[int, int]:
        """Returns the slice ``[first, last)`` of the ranges that overlap ``[begin, end)``."""
        first = bisect.bisect_left(self._ranges, (begin,))
        if first > 0 and self._ranges[first - 1][1] > begin:
            first -= 1
        return first, bisect.bisect_left(self._ranges, (end,), first)


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the range of addresses of a tensor; empty if it has no elements or no storage."""
    _, begin, end = _tensor_view.extent(tensor)
    base = tensor.untyped_storage().data_ptr() if begin < end else 0
    return base + begin, base + end


def cpu_as_default() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which torch makes tensors on the CPU, unless another device is passed.

    To find the box of a DTensor, torch itself creates tensors on the default device, and reads
    them.
    """
    # A torch.device as context is visible to all threads, so it is not entered without need.
    is_cpu = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if is_cpu else torch.device("cpu")
