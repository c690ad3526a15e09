"""Tensors to load into of which several are in the same memory, by one storage or by several."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from support.states import Leaf, State, at_path, leaves, mapped
from support.tensors import PACKED, copied

# Name -> elements of a storage of bytes, from some of them on. A new kind joins by one line.
VIEWS: dict[str, Callable[[torch.Tensor, torch.dtype, torch.Size], torch.Tensor]] = {
    "of the storage": lambda memory, dtype, sizes: memory[: _nbytes(dtype, sizes)].view(dtype),
    "dlpack": lambda memory, dtype, sizes: torch.from_dlpack(memory[: _nbytes(dtype, sizes)]).view(
        dtype
    ),
    "numpy": lambda memory, dtype, sizes: torch.from_numpy(
        memory[: _nbytes(dtype, sizes)].numpy()
    ).view(dtype),
    "every second element": lambda memory, dtype, sizes: memory[: 2 * _nbytes(dtype, sizes)].view(
        dtype
    )[::2],
    "backwards": lambda memory, dtype, sizes: (
        memory[: _nbytes(dtype, sizes)]
        .view(dtype)
        .view(sizes[::-1])
        .permute(tuple(range(len(sizes)))[::-1])
    ),
}
LARGEST = 4


def _nbytes(dtype: torch.dtype, sizes: torch.Size) -> int:
    return dtype.itemsize * sizes.numel()


@dataclass
class Aliases:
    """Tensors of a target in the same memory.

    Attributes:
        memory: The bytes.
        paths: The paths of the tensors.
    """

    memory: torch.Tensor
    paths: list[tuple[Any, ...]]

    def outcomes(self, target: State, wanted: State) -> Iterator[State]:
        """What the target may have after a load: each of the tensors is last once, and whole.

        The target gets other values.
        """
        tensors = [(at_path(target, path), at_path(wanted, path)) for path in self.paths]
        for order in itertools.permutations(tensors):
            for tensor, value in order:
                is_byte = value.dtype.itemsize == 1  # Torch copies no strided elements of some.
                dtype = torch.uint8 if is_byte else value.dtype
                tensor.view(dtype).copy_(value.detach().as_subclass(torch.Tensor).view(dtype))
            yield self.present(target, wanted)

    def present(self, target: State, wanted: State) -> State:
        """The wanted state with the present values of the tensors."""
        return mapped(
            lambda path, v: copied(at_path(target, path)) if path in self.paths else v, wanted
        )

    def spoil(self) -> None:
        """Changes every byte."""
        self.memory ^= 0x55


def share_memory(rng: random.Random, target: State) -> Aliases | None:
    """Puts two or three tensors of the target into one memory, if there are as many that may be."""
    found = [leaf for leaf in leaves(target) if _may_share(leaf)]
    if len(found) < 2:
        return None
    # Long tensors are read in several parts, perhaps by several threads.
    found.sort(key=lambda leaf: leaf.value.nbytes, reverse=True)
    chosen = rng.sample(found[:LARGEST], min(len(found), rng.choice([2, 2, 3])))
    chosen.sort(key=lambda leaf: leaf.value.nbytes, reverse=True)
    longest = chosen[0].value.nbytes
    memory = torch.zeros(4 * longest, dtype=torch.uint8)
    for number, leaf in enumerate(chosen):
        dtype, sizes = leaf.value.dtype, leaf.value.shape
        begin = rng.choice([0, rng.randrange(longest)]) if number else 0
        view = VIEWS[rng.choice(list(VIEWS))]
        leaf.put(view(memory[begin - begin % dtype.itemsize :], dtype, sizes).view(sizes))
    return Aliases(memory, [leaf.path for leaf in chosen])


def _may_share(leaf: Leaf) -> bool:
    """Whether a tensor's memory may have any bytes."""
    value = leaf.value
    return (
        type(value) is torch.Tensor
        and not (value.requires_grad or value.is_neg() or value.is_conj())
        and value.nbytes > 0
        and value.dtype not in (torch.bool, *PACKED)
        and not vars(value)
    )
