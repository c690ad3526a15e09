"""Loads values of a whole version, and of the deltas that are added to it, into host memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_ckpt._core import _native
from torch_ckpt.api import load
from torch_ckpt.coordination.portable import first_error
from torch_ckpt.errors import CorruptionError, MismatchError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.planning.local_shards import LocalShards
from torch_ckpt.planning.value_digests import THREADS
from torch_ckpt.publishing.chain import Chain, pieces_of
from torch_ckpt.publishing.parts import Part, view_of
from torch_ckpt.publishing.version_files import BLOCK_NBYTES, StoredBox, Version, path_of
from torch_ckpt.storage.reader import FastReader

__all__ = ["load_values"]


def load_values(
    root: Location, versions: Sequence[Version], parts: Sequence[Part]
) -> dict[tuple[Any, ...], torch.Tensor]:
    """Returns the values of parts, by their keys, in the published dtype and in host memory.

    ``versions`` are a whole one and the deltas that are added to it. Loads whole blocks, and
    verifies each of them. Raises CorruptionError if a file is damaged.
    """
    regions = _regions_of(root, versions[0], parts)
    of_name: dict[str, list[Part]] = {}
    for region in regions.values():
        of_name.setdefault(region.fqn, []).append(region)
    state = {
        fqn: LocalShards(listed[0].whole, [(part.offsets, part.tensor) for part in listed])
        for fqn, listed in of_name.items()
    }
    if state:
        reader = FastReader(path_of(root, versions[0].number).checkpoint_id)
        with first_error("of the load"):
            load(state, storage_reader=reader, no_dist=True)
    chain = Chain(root, versions, list(regions.values()))
    for region in regions.values():
        try:
            mask = chain.mask(region, region.tensor)
        except MismatchError as error:
            raise CorruptionError(f"the values of a whole version are damaged: {error}") from error
        view = view_of(region.tensor, region.fqn, writable=True)
        _native.apply_mask(view, mask, THREADS)
    return {part.key: _values_of(root, versions[0], part, regions) for part in parts}


def _regions_of(
    root: Location, whole: Version, parts: Sequence[Part]
) -> Mapping[tuple[str, StoredBox], Part]:
    """Returns, for each stored box, the rows that have all blocks that any part touches."""
    rows: dict[tuple[str, StoredBox], tuple[int, int, Part]] = {}
    for part in parts:
        for piece in pieces_of(root, whole, part):
            box, key = piece.box, (part.fqn, piece.box)
            row_nbytes = math.prod(box.sizes[1:]) * whole.itemsize(box.fqn)
            first = piece.first * BLOCK_NBYTES // row_nbytes
            end = min(-(-piece.end * BLOCK_NBYTES // row_nbytes), (box.sizes or (1,))[0])
            if key in rows:
                first, end = min(first, rows[key][0]), max(end, rows[key][1])
            rows[key] = first, end, part
    regions = {}
    for (fqn, box), (first, end, part) in rows.items():
        offsets, sizes = list(box.offsets), list(box.sizes)
        if sizes:
            offsets[0], sizes[0] = offsets[0] + first, end - first
        dtype = getattr(torch, whole.dtype_name(box.fqn))
        memory = torch.empty(sizes, dtype=dtype, device="cpu")
        regions[fqn, box] = Part(fqn, part.whole, tuple(offsets), memory)
    return regions


def _values_of(
    root: Location,
    whole: Version,
    part: Part,
    regions: Mapping[tuple[str, StoredBox], Part],
) -> torch.Tensor:
    """Returns the values of a part: a region itself, or a copy from several."""
    pieces = pieces_of(root, whole, part)
    own = [regions[part.fqn, piece.box] for piece in pieces]
    if len(own) == 1 and (own[0].offsets, own[0].sizes) == (part.offsets, part.sizes):
        return own[0].tensor
    values = torch.empty(part.sizes, dtype=own[0].tensor.dtype, device="cpu")
    for region in own:
        to, of = values, region.tensor
        sides = zip(part.offsets, part.sizes, region.offsets, region.sizes, strict=True)
        for dim, (at, length, other, other_length) in enumerate(sides):
            begin, end = max(at, other), min(at + length, other + other_length)
            to = to.narrow(dim, begin - at, end - begin)
            of = of.narrow(dim, begin - other, end - begin)
        to.copy_(of)
    return values
