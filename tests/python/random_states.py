"""Random nested state dicts of all that DCP takes, and their comparison."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from checkpoints import DTYPES, bits, layouts, random_tensor

KEYS = ["w", "b", "", ".", "a.b", "a", "ü", "模型", " ", "0", "1", "\n", "x" * 300]


class Tagged(torch.Tensor):
    """A tensor subclass, which only torch can store."""


@dataclass
class Plain:
    """An object of the user's own."""

    number: int
    text: str


class Cased(UserDict[Any, Any]):
    """A mapping that is no dict."""


SAFE_GLOBALS = [Tagged, Plain]


def _conj(rng: random.Random) -> torch.Tensor:
    return random_tensor([rng.randint(1, 4), 3], torch.complex64).conj()


def _neg(rng: random.Random) -> torch.Tensor:
    return random_tensor([4], torch.complex128).conj().imag


def _quantised(rng: random.Random) -> torch.Tensor:
    values = torch.randn(rng.randint(1, 5), 6)
    if rng.random() < 0.5:
        return torch.quantize_per_tensor(values, 0.1, 3, torch.quint8)
    scales = torch.rand(values.size(0)) + 0.1
    points = torch.zeros(values.size(0), dtype=torch.int64)
    return torch.quantize_per_channel(values, scales, points, 0, torch.qint8)


def _parameter(rng: random.Random) -> torch.Tensor:
    tensor = torch.randn(rng.randint(0, 4), 3)
    return torch.nn.Parameter(tensor, requires_grad=rng.random() < 0.7)


def _in_layout(rng: random.Random) -> torch.Tensor:
    found = _small_layouts(rng.choice(DTYPES))
    return found[rng.choice(list(found))]


@functools.cache
def _small_layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in layouts(dtype).items() if tensor.numel() < 1000}


def _of_rank(rng: random.Random) -> torch.Tensor:
    sizes = [rng.randint(0, 4) for _ in range(rng.randint(0, 5))]
    return random_tensor(sizes, rng.choice(DTYPES))


TENSORS: list[Callable[[random.Random], torch.Tensor]] = [
    _conj,
    _neg,
    _quantised,
    _parameter,
    _in_layout,
    _in_layout,
    _of_rank,
    _of_rank,
    lambda rng: torch.randn(3, 2).as_subclass(Tagged),
    lambda rng: torch.randn(5, requires_grad=True),
    lambda rng: torch.randn(7, requires_grad=True) * 2,
]

OBJECTS: list[Callable[[random.Random], Any]] = [
    lambda rng: None,
    lambda rng: rng.randrange(1 << 70),
    lambda rng: rng.random(),
    lambda rng: "text" * rng.randrange(2000),
    lambda rng: b"\0" * rng.randrange(9),
    lambda rng: (),
    lambda rng: (1, "two", torch.ones(2)),
    lambda rng: [],
    lambda rng: [1, [2, "three"], None],
    lambda rng: {1, 2},
    lambda rng: Plain(rng.randrange(9), "dataclass"),
    lambda rng: np.float32(rng.random()),
    lambda rng: torch.Size((1, 2)),
    lambda rng: torch.float32,
    lambda rng: range(3),
]


def random_state(
    rng: random.Random, *, depth: int = 3, odd: Callable[[random.Random], Any] | None = None
) -> dict[Any, Any]:
    """A nested state dict, in which keys may clash once they are flattened.

    Args:
        rng: Of the test.
        depth: Of the nesting.
        odd: Makes values of another kind, of which one in ten is.
    """
    tensors: list[torch.Tensor] = []

    def value(left: int) -> Any:
        kind = rng.random()
        if odd is not None and rng.random() < 0.1:
            return odd(rng)
        if kind < 0.5:
            if tensors and rng.random() < 0.2:
                return rng.choice(tensors)  # Under two names.
            tensors.append(rng.choice(TENSORS)(rng))
            return tensors[-1]
        if kind < 0.75 or left == 0:
            return rng.choice(OBJECTS)(rng)
        if kind < 0.9:
            return mapping(left - 1)
        return [value(left - 1) for _ in range(rng.randint(0, 3))]

    def mapping(left: int) -> Any:
        made = {key(): value(left) for _ in range(rng.randint(0, 6))}
        return rng.choice([dict, dict, OrderedDict, Cased])(made)

    def key() -> Any:
        return rng.randrange(3) if rng.random() < 0.1 else rng.choice(KEYS)

    return {key(): value(depth) for _ in range(rng.randint(1, 10))}


def blanked(value: Any) -> Any:
    """The same structure to load into: tensors of zeros, and ``None`` for objects."""
    if isinstance(value, torch.Tensor):
        if value.is_quantized or value.layout != torch.strided or isinstance(value, Tagged):
            return value.detach().clone() * 0 if not value.is_quantized else _zero_quantised(value)
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict | UserDict):
        return type(value)({key: blanked(one) for key, one in value.items()})
    if isinstance(value, list) and not _is_object(value):
        return [blanked(one) for one in value]
    return None


def _is_object(value: Any) -> bool:
    """Whether DCP stores it as one object."""
    if isinstance(value, list):
        return all(_is_object(one) for one in value)
    return not isinstance(value, torch.Tensor | dict | UserDict)


def _zero_quantised(value: torch.Tensor) -> torch.Tensor:
    zero = value.clone()
    zero.copy_(torch.zeros(value.shape))
    return zero


def same(a: Any, b: Any, *, any_order: bool = False) -> bool:
    """Whether two nested values are of the same types and values; tensors bit for bit.

    Args:
        a: One.
        b: The other.
        any_order: Whether keys of mappings may come in another order.
    """
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout)
            and _bits(a) == _bits(b)
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict | UserDict):
        in_order = any_order or list(a) == list(b)
        return (
            in_order
            and a.keys() == b.keys()
            and all(same(a[key], b[key], any_order=any_order) for key in a)
        )
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(same(x, y, any_order=any_order) for x, y in pairs)
    return bool(a == b)


def _bits(tensor: torch.Tensor) -> bytes:
    if tensor.is_quantized:
        return bits(tensor.int_repr())
    if tensor.layout != torch.strided:
        return bits(tensor.to_dense())
    return bits(tensor.as_subclass(torch.Tensor))
