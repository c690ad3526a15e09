"""Tensors to load into of which two are in the same memory, each with a storage of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from support.states import Leaf, State, differences, leaves, mapped
from support.tensors import PACKED


@dataclass
class Pair:
    """Two tensors in the same memory. The second one is in the first bytes of the first one.

    Attributes:
        first: Path of the first tensor.
        second: Path of the second tensor.
    """

    first: tuple[Any, ...]
    second: tuple[Any, ...]

    def differences(self, wanted: State, found: State) -> list[str]:
        """What is wrong in what was loaded: it is neither of the tensors whole."""
        values = {leaf.path: leaf.value for leaf in leaves(wanted)}
        outcomes = []
        for is_first_last in (True, False):
            both = {path: bytes_of(values[path]) for path in (self.first, self.second)}
            nbytes = len(both[self.second])
            if is_first_last:
                both[self.second] = both[self.first][:nbytes]
            else:
                both[self.first][:nbytes] = both[self.second]
            outcomes.append(differences(_with(wanted, both), found))
        return min(outcomes, key=len)


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's bytes."""
    return value.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def _with(state: State, values: dict[tuple[Any, ...], torch.Tensor]) -> State:
    """The state with tensors of these bytes at these paths."""

    def at(path: tuple[Any, ...], value: Any) -> Any:
        return values[path].view(value.dtype).view(value.shape) if path in values else value

    return mapped(at, state)


def share_memory(rng: random.Random, target: State) -> Pair | None:
    """Puts a tensor of the target into the memory of another one, if there are two that may be."""
    found = [leaf for leaf in leaves(target) if _may_share(leaf)]
    if len(found) < 2:
        return None
    # Long tensors are read in several parts, perhaps by several threads.
    found.sort(key=lambda leaf: leaf.value.nbytes, reverse=True)
    first, second = sorted(
        rng.sample(found[:4], 2), key=lambda leaf: leaf.value.nbytes, reverse=True
    )
    if first.value.data_ptr() % second.value.itemsize:
        return None
    memory = torch.from_dlpack(first.value.view(-1).view(torch.uint8))
    begin = memory[: second.value.nbytes]
    second.put(begin.view(second.value.dtype).view(second.value.shape))
    return Pair(first.path, second.path)


def _may_share(leaf: Leaf) -> bool:
    """Whether every byte of a tensor's memory may have any value."""
    value = leaf.value
    return (
        type(value) is torch.Tensor
        and not (value.requires_grad or value.is_neg() or value.is_conj())
        and value.is_contiguous()
        and value.view(-1).stride() == (1,)  # One element may have any stride.
        and value.nbytes > 0
        and value.dtype not in (torch.bool, *PACKED)
        and not vars(value)
    )
