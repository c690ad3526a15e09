"""What the engine and torch say to each other about tensors."""

from __future__ import annotations

import bisect
import contextlib
import gc
import sys
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt.errors import CorruptionError

__all__ = [
    "DTYPE_CODES",
    "MEMORY_FORMATS",
    "Destinations",
    "gc_paused",
    "is_temporary",
    "printable",
    "to_plain",
    "to_properties",
]

DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code
    for code, name in enumerate(_native.DTYPE_NAMES)
    if hasattr(torch, name)
}
"""The engine's number of every dtype that it stores; all others are torch's to write and read."""


MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}
"""The engine's name of every memory format that DCP knows."""


def to_properties(
    dtype: str, memory_format: str, requires_grad: bool, pin_memory: bool
) -> TensorProperties:
    """DCP's properties of a tensor, from the engine's words for them.

    Raises:
        CorruptionError: Torch does not know the dtype or memory format.
    """
    known = getattr(torch, dtype, None)
    if not isinstance(known, torch.dtype) or memory_format not in MEMORY_FORMATS:
        raise CorruptionError(f"the index names a tensor of {dtype}, {memory_format}")
    return TensorProperties(
        dtype=known,
        requires_grad=requires_grad,
        memory_format=MEMORY_FORMATS[memory_format],
        pin_memory=pin_memory,
    )


def printable(fqn: str) -> str:
    """The name for messages of the engine: lone surrogates, which have no UTF-8, as escapes."""
    return fqn if fqn.isascii() else fqn.encode(errors="backslashreplace").decode()


def to_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same values whose memory holds them as they are."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _count_references(tensor: torch.Tensor) -> int:
    return sys.getrefcount(tensor)


def _count_references_of_fresh_tensor() -> int:
    tensor = torch.empty(0)
    return _count_references(tensor)


# How many references there are where a caller's variable is the only one; Python's versions differ.
_ALONE = _count_references_of_fresh_tensor()


def is_temporary(tensor: torch.Tensor) -> bool:
    """Whether nobody but the caller, through one variable, holds the tensor and its memory."""
    return sys.getrefcount(tensor) <= _ALONE and _tensor_view.has_own_storage(tensor)


class Destinations:
    """The memory that a batch of reads goes to, to find reads that would meet in it.

    State dicts may name the same memory twice, and a planner may hand out one scratch tensor again
    and again, expecting it to be read and committed before it is asked for the next.
    """

    def __init__(self) -> None:
        # By storage: where in it a tensor begins, where it ends, its FQN; in ascending order.
        self._extents: dict[int, list[tuple[int, int, str]]] = {}

    def meets(self, tensor: torch.Tensor, fqn: str) -> bool:
        """Whether memory of this tensor is taken: by another FQN, or by the same box of its own."""
        storage, begin, end = _tensor_view.extent(tensor)
        if begin == end:
            return False
        extents = self._extents.get(storage, [])
        at = bisect.bisect_left(extents, (begin,))
        if at > 0 and extents[at - 1][1] > begin and extents[at - 1][2] != fqn:
            return True
        for other_begin, _, other in extents[at:]:
            if other_begin >= end:
                break
            if other != fqn or other_begin == begin:
                return True
        return False

    def add(self, tensor: torch.Tensor, fqn: str) -> None:
        """Takes the memory of a tensor."""
        storage, begin, end = _tensor_view.extent(tensor)
        if begin < end:
            bisect.insort(self._extents.setdefault(storage, []), (begin, end, fqn))


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Keeps the garbage collector from scanning the objects of a plan again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
