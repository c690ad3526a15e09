"""What the engine and torch say to each other about tensors."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

import torch

from torch_ckpt import _native

__all__ = ["DTYPE_CODES", "gc_paused", "is_temporary", "to_plain"]

DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code
    for code, name in enumerate(_native.DTYPE_NAMES)
    if hasattr(torch, name)
}
"""The engine's number of every dtype that it stores; all others are torch's to write and read."""


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
    return sys.getrefcount(tensor) <= _ALONE and _native.has_own_storage(tensor)


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
