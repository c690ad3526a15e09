"""Sparse patches: the elements of tensors that differ between two versions, for engines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_ckpt.commits.leases import lease_of
from torch_ckpt.errors import MismatchError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.publishing.chain import Chain, read_line
from torch_ckpt.publishing.parts import Part, Slice, parts_of
from torch_ckpt.publishing.version_files import (
    Version,
    has_version,
    newest_version,
    path_of,
    read_version,
)

__all__ = ["Patch", "patches"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INT32_COUNT = 1 << 31


@dataclass(frozen=True)
class Patch:
    """The elements of a tensor that differ between two versions.

    Its fields are those of vLLM's ``CheckpointWeightPatch``.

    Attributes:
        name: Name of the tensor.
        shape: Sizes of the whole tensor.
        dtype: Its dtype.
        values: The new values of the elements.
        indices: Their positions in the flattened whole tensor, in rising order for a whole tensor:
            int32, or int64 for a tensor of 2**31 elements or more.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor


def patches(
    url: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor | Slice] | torch.nn.Module,
    base: int,
    version: int | None = None,
) -> Iterator[Patch]:
    """Yields how tensors of a version differ from another one; does not change them.

    Before the first patch, verifies the encoded bytes, and the values before and after of each
    block that the tensors have as a whole. Tensors without a change have no patch. The caller
    applies the patches, and then has the tensors of the version, such as by
    :meth:`~torch_ckpt.Subscriber.update`, before it asks for the next ones.

    Args:
        url: Directory of the versions.
        tensors: As for an update: the values of version ``base`` in the published dtypes.
        base: The version that they have.
        version: The version that is wanted; the newest by default.

    Raises:
        CorruptionError: A file is damaged.
        MismatchError: A tensor is not published, has other sizes or another dtype, or is not of
            version ``base``.
        NotFoundError: There is no such version, or no deltas between the two versions.

    Example::

        for patch in patches("s3://bucket/policy", weights, base=7):
            weights[patch.name].view(-1)[patch.indices.long()] = patch.values
    """
    root = Location(url).resolved()
    found = newest_version(root) if version is None else read_version(root, version)
    if found is None:
        raise NotFoundError(f"no version is published in {root}")
    numbers = [number for number, _ in found.line]
    if base not in numbers:
        raise NotFoundError(
            f"no deltas lead from version {base} to version {found.number} of {root}: it is added "
            f"to the whole version {numbers[0]}. Update all tensors instead"
        )
    parts = parts_of(tensors, found.ties)
    for part in parts:
        _check(part, found)
    with lease_of(path_of(root, found.number), found.number, has_version):
        line = found.line[numbers.index(base) + 1 :]
        deltas = Chain(root, read_line(root, found, line), parts if line else [])
        if line:
            for part in parts:
                deltas.verify(part, part.host())
            for part in parts:
                patch = _patch_of(part, deltas.mask(part, None))
                if patch is not None:
                    yield patch


def _check(part: Part, version: Version) -> None:
    stored = version.tensors.get(version.ties.get(part.fqn, part.fqn))
    own = str(part.tensor.dtype).removeprefix("torch."), part.whole
    if stored != own:
        has = "no such tensor" if stored is None else f"it as {stored[0]} of {list(stored[1])}"
        raise MismatchError(
            f"cannot patch {part.fqn!r}: it is {own[0]} of {list(own[1])}, and version "
            f"{version.number} has {has}"
        )


def _patch_of(part: Part, mask: Any) -> Patch | None:
    size = part.tensor.itemsize
    bits = torch.frombuffer(mask, dtype=_BITS.get(size, torch.int64))
    changed = bits if size <= 8 else bits.view(-1, size // 8).any(1)
    own = changed.nonzero().view(-1)
    if not len(own):
        return None
    # The values as bits: an XOR of floating point numbers is undefined.
    host = part.host().reshape(-1)
    before = host[own].view(bits.dtype)
    after = before ^ (bits if size <= 8 else bits.view(-1, size // 8))[own].view(-1)
    count = torch.Size(part.whole).numel()
    indices = own if part.sizes == part.whole else _in_whole(part, own)
    return Patch(
        part.fqn,
        part.whole,
        part.tensor.dtype,
        after.view(part.tensor.dtype),
        indices.to(torch.int32 if count < _INT32_COUNT else torch.int64),
    )


def _in_whole(part: Part, own: torch.Tensor) -> torch.Tensor:
    """Returns positions in the whole tensor, from those in a part."""
    indices, stride = torch.zeros_like(own), 1
    sides = zip(part.sizes, part.offsets, part.whole, strict=True)
    for size, at, whole in reversed(list(sides)):
        indices += (own % size + at) * stride
        own, stride = own // size, stride * whole
    return indices
