"""Whether two values of checkpoints are equal: objects by their contents, tensors bit for bit."""

from __future__ import annotations

import argparse
import collections
import math
import types
from typing import Any

import torch

from torch_ckpt._core.tensors import bytes_of

__all__ = ["is_equal", "same_bits"]


def is_equal(x: Any, y: Any) -> bool:
    """Returns whether two values have the same type and the same contents. NaN equals NaN.

    If a comparison fails, raises its error.
    """
    if x is y:  # None, or a class or function.
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, torch.Tensor):
        if (x.dtype, x.layout, x.is_quantized) != (y.dtype, y.layout, y.is_quantized):
            return False
        if x.layout == torch.sparse_coo:
            x, y = x.coalesce(), y.coalesce()
            same_places = x.shape == y.shape and same_bits(x.indices(), y.indices())
            return same_places and same_bits(x.values(), y.values())
        if x.layout != torch.strided or x.is_quantized or x.is_nested:
            return bool(torch.equal(x, y))
        return same_bits(x, y)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(is_equal(value, y[key]) for key, value in x.items())
    if isinstance(x, argparse.Namespace | types.SimpleNamespace):
        return is_equal(vars(x), vars(y))
    if isinstance(x, list | tuple | collections.deque):
        return len(x) == len(y) and all(map(is_equal, x, y))
    if isinstance(x, float):
        return x == y or (math.isnan(x) and math.isnan(y))
    if isinstance(x, torch.Generator):
        return torch.equal(x.get_state(), y.get_state())
    if type(x).__module__ == "numpy" and hasattr(x, "tobytes"):
        return bool(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())
    if getattr(type(x), "__eq__", None) is object.__eq__:
        raise TypeError("their class has no comparison")
    return bool(x == y)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Returns whether two strided tensors have the same dtype, sizes, and bits of elements."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    x, y = bytes_of(x), bytes_of(y)
    if x.numel() % 8 == x.storage_offset() % 8 == y.storage_offset() % 8 == 0:
        x, y = x.view(torch.int64), y.view(torch.int64)  # Torch compares them faster than bytes.
    return torch.equal(x, y)
