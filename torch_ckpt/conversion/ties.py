"""Finds tied tensors in a checkpoint: names whose tensors a conversion stores once.

Most formats record them: two names refer to the same bytes of the same file. A checkpoint of DCP
does not. It has the elements once for each name, so tensors with equal elements are taken for tied.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_ckpt._core import _native
from torch_ckpt.formats.opened import is_foreign
from torch_ckpt.storage.stored_values import Box, StoredValues, pieces_of

__all__ = ["find_ties"]

_MIN_NBYTES = 1 << 10
"""Smaller tensors may be equal by chance, or buffers that each layer has."""

_MIN_DISTINCT = 16
"""Constants, masks and identity matrices have fewer distinct elements, and are equal by nature."""

_SAMPLE_NBYTES = 4 << 10
_SAMPLED_TENSORS = 256  # Loaded together.
_PIECE_NBYTES = 8 << 20


def find_ties(values: StoredValues) -> dict[str, str]:
    """Returns name -> the first of the names that share its tensor.

    In a checkpoint of DCP, tensors are tied if they have the same dtype, sizes and bits, and are
    floating-point tensors of at least 1 KiB with at least 16 distinct values in a sample.
    """
    names = values.names
    if values.index is not None and is_foreign(values.metadata):
        shown = {fqn: name for name, fqn in names.items()}
        groups = _groups(
            (extents, shown[fqn]) for fqn, extents in _extents_of(values.index) if fqn in shown
        )
    else:
        groups = _equal_tensors(values)
    return {name: group[0] for group in groups for name in group[1:]}


def _extents_of(index: _native.Index) -> Iterator[tuple[str, Hashable]]:
    """Yields each tensor with elements, and all that determines its elements in the files."""
    for number, (fqn, properties, boxes) in enumerate(index):
        if properties is None or 0 in properties[4] or not all(box[5] for box in boxes):
            continue  # An object, or one that only torch can read.
        strides, offset, _ = index.view(number) or ((), 0, 0)
        extents = tuple((tuple(box[0]), tuple(box[1]), *box[2:5]) for box in boxes)
        yield fqn, (properties[0], tuple(properties[4]), extents, tuple(strides), offset)


def _equal_tensors(values: StoredValues) -> list[list[str]]:
    """Returns the groups of names with equal tensors. Reads only equal samples' tensors whole."""
    alike: list[tuple[Hashable, str]] = []
    for name in values.names:
        entry = values.entry(name)
        if isinstance(entry, TensorStorageMetadata) and _may_be_tied(entry):
            alike.append(((entry.properties.dtype, entry.size), name))
    names = [name for group in _groups(alike) for name in group]
    samples: list[tuple[Hashable, str]] = []
    for begin in range(0, len(names), _SAMPLED_TENSORS):
        boxes = [
            (name, box)
            for name in names[begin : begin + _SAMPLED_TENSORS]
            for box in _sample_of(values.entry(name))
        ]
        sampled: dict[str, list[torch.Tensor]] = {}
        for (name, _), tensor in zip(boxes, values.load(boxes), strict=True):
            sampled.setdefault(name, []).append(tensor.reshape(-1))
        for name, tensors in sampled.items():
            sample = torch.cat(tensors)
            if _is_varied(sample):
                sizes = tuple(values.entry(name).size)
                samples.append(((sample.dtype, sizes, _digest([sample])), name))
    equal = _groups(samples)
    return _groups((_digest(_pieces(values, name)), name) for group in equal for name in group)


def _may_be_tied(entry: TensorStorageMetadata) -> bool:
    dtype = entry.properties.dtype
    nbytes = math.prod(entry.size) * dtype.itemsize
    return (dtype.is_floating_point or dtype.is_complex) and nbytes >= _MIN_NBYTES


def _sample_of(entry: TensorStorageMetadata) -> list[Box]:
    """Returns a few boxes of a tensor: at its begin, its middle and its end."""
    first, *inner = entry.size
    itemsize = entry.properties.dtype.itemsize
    row_nbytes = math.prod(inner) * itemsize
    length = min(first, max(1, _SAMPLE_NBYTES // row_nbytes))
    offsets, sizes = next(pieces_of(inner, itemsize, _SAMPLE_NBYTES))
    begins = dict.fromkeys((0, (first - length) // 2, first - length))
    return [((begin, *offsets), (length, *sizes)) for begin in begins]


def _is_varied(sample: torch.Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    elements = sample.view(integers.get(sample.dtype.itemsize, torch.int64))
    return len(torch.unique(elements)) >= _MIN_DISTINCT


def _pieces(values: StoredValues, name: str) -> Iterator[torch.Tensor]:
    entry = values.entry(name)
    for box in pieces_of(entry.size, entry.properties.dtype.itemsize, _PIECE_NBYTES):
        yield from values.load([(name, box)])


def _digest(tensors: Iterable[torch.Tensor]) -> bytes:
    digest = hashlib.blake2b()
    for tensor in tensors:
        elements: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        digest.update(elements)
    return digest.digest()


def _groups(pairs: Iterable[tuple[Hashable, str]]) -> list[list[str]]:
    """Returns the names with equal keys, if there are at least two, in their order."""
    groups: dict[Hashable, list[str]] = {}
    for key, name in pairs:
        groups.setdefault(key, []).append(name)
    return [names for names in groups.values() if len(names) > 1]
