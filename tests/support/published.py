"""Weights of a training that changes a part of them at each step, and subscribers of slices."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from support.tensors import bits, full_value

FLOATS: dict[str, tuple[int, ...]] = {
    "matrix": (257, 523),
    "long": (200_003,),
    "deep": (6, 5, 700),
    "scalar": (),
    "none": (0, 7),
    "one": (1, 1),
}
OTHERS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "numbers": ((31, 9), torch.int64),
    "mask": ((70_001,), torch.bool),
    "small": ((300, 301), torch.float8_e4m3fn),
    "bytes": ((5, 11), torch.uint8),
    "pairs": ((33, 65), torch.complex64),
}
TIES = {"tied": "matrix"}


def weights(version: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """The whole tensors of a version: float32 masters, and tensors of other dtypes.

    From one version to the next, few elements of some tensors change, all of some, and none of one.
    """
    state: dict[str, torch.Tensor] = {}
    for name, shape in FLOATS.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
        value = torch.randn(shape, generator=generator)
        for _ in range(version):
            change = torch.randn(shape, generator=generator) * 1e-2
            share = {"long": 1.0, "one": 0.0}.get(name, 0.05)
            value += change * (torch.rand(shape, generator=generator) < share)
        state[name] = value
    for name, (shape, dtype) in OTHERS.items():
        state[name] = full_value(f"{name} {version // 2} {seed}", shape, dtype)
    for name, other in TIES.items():
        state[name] = state[other]
    return state


def published(state: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, Any]:
    """The values that a version of this state has."""
    return {
        name: value.to(dtype) if dtype is not None and value.is_floating_point() else value
        for name, value in state.items()
    }


def like(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same dtypes and sizes, with other values; ties have the same memory."""
    made = {name: full_value(f"{name} other", v.shape, v.dtype) for name, v in state.items()}
    return {name: made[TIES.get(name, name)] for name in made}


class Engine:
    """A worker of an inference engine with a slice of each tensor, and a guard around it.

    Args:
        state: Tensors of the published dtypes and sizes.
        number: The worker.
        count: How many there are.
        dim: The dimension that is cut.
    """

    def __init__(
        self, state: Mapping[str, torch.Tensor], number: int = 0, count: int = 1, dim: int = 0
    ) -> None:
        self.tensors: dict[str, Any] = {}
        self._rows: dict[str, tuple[int, int, int]] = {}
        self._guards: list[tuple[torch.Tensor, bytes]] = []
        for name, value in state.items():
            if name in TIES:
                self.tensors[name], self._rows[name] = self._of(TIES[name])
                continue
            cut = min(dim, value.dim() - 1) if value.dim() else 0
            size = value.size(cut) if value.dim() else 1
            first, end = size * number // count, size * (number + 1) // count
            if count == 1 or not value.dim():
                self.tensors[name], self._rows[name] = like({name: value})[name], (cut, 0, size)
                continue
            part = value.narrow(cut, first, end - first)
            packed = full_value(f"{name} packed", (3, *part.shape), value.dtype)
            offsets = [0] * value.dim()
            offsets[cut] = first
            self.tensors[name] = (tuple(value.shape), tuple(offsets), packed[1])
            self._rows[name] = cut, first, end - first
            self._guards += [(packed[at], bits(packed[at])) for at in (0, 2)]

    def _of(self, name: str) -> tuple[Any, tuple[int, int, int]]:
        return self.tensors[name], self._rows[name]

    def values(self) -> dict[str, bytes]:
        """The bits of its tensors."""
        return {
            name: bits(value[2] if isinstance(value, tuple) else value)
            for name, value in self.tensors.items()
        }

    def assert_has(self, state: Mapping[str, torch.Tensor]) -> None:
        """Its tensors are its slices of a state, bit for bit, and nothing else has changed."""
        for name, found in self.values().items():
            whole = state[name]
            if whole.dim():
                whole = whole.narrow(*self._rows[name])
            assert found == bits(whole), name
        for guard, before in self._guards:
            assert bits(guard) == before


def engines_of(state: Mapping[str, torch.Tensor]) -> list[Engine]:
    """Workers with 1, 2 and 4 slices, by rows and by columns."""
    shapes: Sequence[tuple[int, int]] = ((1, 0), (2, 0), (2, 1), (4, 0))
    return [Engine(state, n, count, dim) for count, dim in shapes for n in range(count)]
