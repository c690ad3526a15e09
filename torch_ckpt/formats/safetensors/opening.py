"""Opens safetensors: single files, Hugging Face's sharded models, and directories of DCP's writer.

A file consists of the length of its header in eight bytes, the header in JSON, and the elements of
all tensors without gaps. It has no checksums. Like the ``safetensors`` library, this module
validates a header before it uses any value from it.

With ``torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)``, each rank
writes its own file. Its header states the offsets of its boxes in the whole tensors.

Names that share one tensor are stored once. In ``__metadata__``, ``safetensors.torch.save_model``
and this package record the other names: each of them -> the stored name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    MismatchError,
    NotFoundError,
    UnsupportedError,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import ForeignFiles, Opened
from torch_ckpt.formats.safetensors.layout import (
    DTYPES,
    FORMAT,
    MAX_HEADER_NBYTES,
    PACKED,
    SHARDING,
    VERSION,
)
from torch_ckpt.stored_json import from_json

__all__ = ["is_safetensors", "open_safetensors", "open_safetensors_directory", "read_tensors"]

_MAX_NBYTES = 2**63 - 1
_MAX_NDIM = 64
_START_NBYTES = 64 << 10  # Length of the first read, which covers most headers.
_SAMPLE_NBYTES = 4 << 10
_LENGTH_NBYTES = 8
_INDEX_SUFFIX = ".safetensors.index.json"

# Safetensors dtype -> torch dtype, and bits per number.
_DTYPES = {
    **{word: (name, 8 * nbytes // PACKED.get(name, 1)) for name, (word, nbytes) in DTYPES.items()},
    # Packed numbers, for which torch has no dtype.
    "F6_E2M3": ("", 6),
    "F6_E3M2": ("", 6),
}


BoxedTensor = tuple[torch.dtype, tuple[int, ...], "list[_native.IndexBox]"]
"""Dtype, sizes and boxes of a tensor."""


class _Tensor(NamedTuple):
    """A tensor in a header; its elements are bytes ``[begin, end)`` of the file.

    ``word`` is the dtype in the header. ``dtype`` is torch's, empty if torch has no such tensor.
    """

    word: str
    dtype: str
    sizes: list[int]
    begin: int
    end: int


@dataclass(frozen=True)
class _Header:
    file_nbytes: int
    tensors: dict[str, _Tensor]
    box_offsets: dict[str, list[int]]  # FQN -> offsets in the whole tensor, if the file has a box.
    ties: dict[str, str]  # FQN without a tensor -> FQN of the tensor that it shares.
    digest: bytes  # Hash of the header and of samples of the data.


def _without_dtype(fqn: str, word: str, path: Location) -> UnsupportedError:
    """Returns the error for a tensor whose dtype torch does not have."""
    packs = f"its dtype {word} packs several numbers into a byte, and torch has no such tensor"
    why = packs if word in _DTYPES else f"unknown dtype {word!r}"
    return UnsupportedError(f"cannot load {fqn!r} of {path}: {why}")


def is_safetensors(start: bytes) -> bool:
    """Returns whether ``start`` may be the start of a safetensors file."""
    return start[_LENGTH_NBYTES : _LENGTH_NBYTES + 1] == b"{"


def open_safetensors(path: Location) -> Opened:
    """Opens a single file. The error of a damaged header names the tensor."""
    merged = _Merged(ForeignFiles(path, path.parent, "safetensors"))
    with gc_paused():
        merged.add(path.name, _read_header(path))
        return merged.opened()


def open_safetensors_directory(directory: Location, names: Sequence[str]) -> Opened:
    """Opens a directory: the files that Hugging Face's index names, or all files without an index.

    A tensor is unreadable if the file that the index names for it is missing or damaged, if its
    boxes do not cover it, or if several files contain it and there is no index. Raises
    NotFoundError if all files that the index names are missing, and UnsupportedError if there are
    several indexes.
    """
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    merged = _Merged(ForeignFiles(directory, directory, "safetensors"))
    if len(indexes) > 1:
        raise UnsupportedError(
            f"cannot load {directory}: it has several indexes, {indexes[0]} and {indexes[1]}"
        )
    with gc_paused():
        if not indexes:
            for name in names:
                merged.add(name, _read_header(directory / name))
            return merged.opened()
        weight_map = _read_weight_map(directory / indexes[0])
        by_file: dict[str, list[str]] = {}
        for fqn, name in weight_map.items():
            by_file.setdefault(name, []).append(fqn)
        for name, fqns in sorted(by_file.items()):
            try:
                merged.add(name, _read_header(directory / name), fqns)
            except NotFoundError:
                for fqn in fqns:
                    merged.errors[fqn] = NotFoundError(
                        f"cannot load {fqn!r}: {indexes[0]} assigns it to {name}, which is missing "
                        f"in {directory}"
                    )
            except CorruptionError as error:
                merged.errors.update(dict.fromkeys(fqns, error))
        return merged.opened()


def read_tensors(
    path: Location, number: int
) -> tuple[int, bytes, dict[str, BoxedTensor | CheckpointError]]:
    """Returns the length of a file, a hash that identifies its contents, and its tensors by FQN.

    A tensor has its dtype, sizes and box, or an error if torch has no such dtype. ``number`` is
    that of the file in a foreign index.
    """
    header = _read_header(path)
    found: dict[str, BoxedTensor | CheckpointError] = {}
    for fqn, (word, name, sizes, begin, end) in header.tensors.items():
        if not name:
            found[fqn] = _without_dtype(fqn, word, path)
            continue
        box = ([0] * len(sizes), sizes, number, begin, end - begin, True, ())
        found[fqn] = getattr(torch, name), tuple(sizes), [box]
    return header.file_nbytes, header.digest, found


@dataclass
class _Merged:
    """The tensors of several files, with the boxes of each tensor collected."""

    foreign: ForeignFiles
    boxes: dict[str, list[_native.IndexBox]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)  # Safetensors', and torch's.
    errors: dict[str, CheckpointError] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, name: str, header: _Header, fqns: Iterable[str] | None = None) -> None:
        """Adds the tensors of a file: those of ``fqns``, or all."""
        number = len(self.foreign.files)
        self.foreign.files.append((name, header.file_nbytes))
        self.digest.update(header.digest)
        for fqn in header.tensors if fqns is None else fqns:
            tensor = header.tensors.get(fqn)
            if tensor is None:
                self.errors[fqn] = CorruptionError(
                    f"cannot load {self.foreign.path}: its index assigns {fqn!r} to {name}, "
                    "which does not contain it"
                )
                continue
            word, dtype, sizes, begin, end = tensor
            if self.dtypes.setdefault(fqn, (word, dtype)) != (word, dtype):
                self.errors[fqn] = CorruptionError(
                    f"cannot load {self.foreign.path}: {fqn!r} has dtype {word} in {name}, and "
                    f"{self.dtypes[fqn][0]} in another file"
                )
            offsets = header.box_offsets.get(fqn) or [0] * len(sizes)
            box = (offsets, sizes, number, begin, end - begin, True, ())
            self.boxes.setdefault(fqn, []).append(box)
        self.ties.update(header.ties)

    def opened(self) -> Opened:
        foreign = self.foreign
        for fqn, first in self.ties.items():  # A name that is stored itself is not a tie.
            if first in self.boxes and fqn not in self.boxes and fqn not in self.errors:
                self.boxes[fqn], self.dtypes[fqn] = self.boxes[first], self.dtypes[first]
        for fqn, boxes in self.boxes.items():
            if fqn in self.errors:
                continue
            word, dtype = self.dtypes[fqn]
            try:
                sizes = self._sizes(fqn)
                if not dtype:
                    raise _without_dtype(fqn, word, foreign.path)
            except (CorruptionError, MismatchError, UnsupportedError) as error:
                foreign.add_unreadable(fqn, error, boxes[0][2:5])
                continue
            properties = (dtype, "contiguous_format", False, False, sizes)
            foreign.entries.append((fqn, properties, boxes))
        for fqn, why in self.errors.items():
            foreign.add_unreadable(fqn, why)
        foreign.paths = {fqn: (fqn,) for fqn in (*self.boxes, *self.errors)}
        return foreign.opened(None, self.digest.digest())

    def _sizes(self, fqn: str) -> Sequence[int]:
        boxes = self.boxes[fqn]
        is_whole = len(boxes) == 1 and not any(boxes[0][0])
        return boxes[0][1] if is_whole else self._whole_sizes(fqn)

    def _whole_sizes(self, fqn: str) -> list[int]:
        """Returns the sizes of a tensor from its boxes.

        Raises CorruptionError if they do not cover it exactly once, and MismatchError if several
        files contain the same box.
        """
        boxes = self.boxes[fqn]
        ndim = len(boxes[0][0])
        if any(len(offsets) != ndim for offsets, *_ in boxes):
            raise CorruptionError(
                f"cannot load {self.foreign.path}: boxes of {fqn!r} differ in dimensions"
            )
        sizes = [max(box[0][d] + box[1][d] for box in boxes) for d in range(ndim)]
        seen: dict[tuple[int, ...], str] = {}
        for offsets, box_sizes, number, *_ in boxes:
            name = self.foreign.files[number][0]
            if math.prod(box_sizes) and seen.setdefault(tuple(offsets), name) != name:
                raise MismatchError(
                    f"cannot load {self.foreign.path}: {fqn!r} is in {seen[tuple(offsets)]} and in "
                    f"{name}; load one of the files, or add a model{_INDEX_SUFFIX}"
                )
        fault = _native.cover_fault(([0] * ndim, sizes), [box[:2] for box in boxes])
        if fault is not None:
            is_missing, (at, part) = fault
            raise CorruptionError(
                f"cannot load {self.foreign.path}: its files do not contain every element of "
                f"{fqn!r} of sizes {sizes} exactly once: "
                f"{'no box contains' if is_missing else 'several boxes contain'} the region at "
                f"{at} of sizes {part}; is a file missing, or from another save?"
            )
        return sizes


def _read_weight_map(path: Location) -> dict[str, str]:
    """Reads Hugging Face's index and returns FQN -> file name, each within the directory."""
    nbytes, data = path.read_range(0, MAX_HEADER_NBYTES)
    if nbytes > len(data):
        raise CorruptionError(f"cannot read {path}: its {nbytes} bytes exceed {MAX_HEADER_NBYTES}")
    index = _parse_json(data, str(path))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise CorruptionError(f"cannot read {path}: it has no weight_map")
    for fqn, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CorruptionError(
                f"cannot read {path}: it assigns {fqn!r} to {name!r}, which is not a file name"
            )
    return weight_map


def _read_header(path: Location) -> _Header:
    """Reads and validates the header of a file."""
    file_nbytes, start = path.read_range(0, _START_NBYTES)
    if len(start) < _LENGTH_NBYTES:
        raise CorruptionError(
            f"cannot read {path}: it has {file_nbytes} bytes, too few for a header"
        )
    header_nbytes = int.from_bytes(start[:_LENGTH_NBYTES], "little")
    data_begin = _LENGTH_NBYTES + header_nbytes
    if header_nbytes > MAX_HEADER_NBYTES or data_begin > file_nbytes:
        raise CorruptionError(
            f"cannot read {path}: it states a header of {header_nbytes} bytes, and the file has "
            f"{file_nbytes}"
        )
    if data_begin > len(start):
        start += path.read_range(len(start), data_begin - len(start))[1]
    header = start[_LENGTH_NBYTES:data_begin]
    if len(header) < header_nbytes:
        raise CorruptionError(f"cannot read {path}: it was truncated during the read")
    tensors = _parse_json(header, str(path))
    if not isinstance(tensors, dict):
        raise CorruptionError(f"cannot read {path}: its header is not a JSON object")
    free_text = tensors.pop("__metadata__", {})
    if not isinstance(free_text, dict):
        raise CorruptionError(f"cannot read {path}: __metadata__ is not a JSON object")
    checked = {
        fqn: _check_tensor(facts, data_begin, file_nbytes, f"{fqn!r} of {path}")
        for fqn, facts in tensors.items()
    }
    _check_extents(checked, data_begin, file_nbytes, path)
    offsets = _box_offsets(free_text, checked, path)
    digest = hashlib.sha256(header)
    # Two models of one architecture have equal headers, so the hash includes samples of the data.
    # It includes no modification times, since those of copies differ.
    last = max(data_begin, file_nbytes - _SAMPLE_NBYTES)
    for offset in (data_begin, (data_begin + last) // 2, last):
        sample = start[offset : offset + _SAMPLE_NBYTES]
        if len(sample) < min(_SAMPLE_NBYTES, file_nbytes - offset):
            sample = path.read_range(offset, _SAMPLE_NBYTES)[1]
        digest.update(sample)
    ties = {
        fqn: first
        for fqn, first in free_text.items()
        if isinstance(first, str)
        and first in checked
        and fqn not in checked
        # These are no ties, even if a tensor is named "pt" or "1.0".
        and fqn not in FORMAT
        and VERSION.get(fqn) != first
    }
    return _Header(file_nbytes, checked, offsets, ties, digest.digest())


def _parse_json(data: bytes, where: str) -> object:
    """Parses JSON from an untrusted file.

    Raises CorruptionError if it is nested too deeply, or repeats a key.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        out = dict(pairs)
        if len(out) != len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {repeated!r} is repeated")
        return out

    try:
        return from_json(data.decode(), lambda value: value, object_pairs_hook=unique)
    except ValueError as error:
        raise CorruptionError(f"cannot read {where}: invalid JSON: {error}") from error


def _check_tensor(facts: Any, data_begin: int, file_nbytes: int, where: str) -> _Tensor:
    """Validates the entry of one tensor in a header."""
    if not isinstance(facts, dict) or facts.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptionError(f"cannot read {where}: it lacks dtype, shape or data_offsets")
    dtype, sizes, ends = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str):
        raise CorruptionError(f"cannot read {where}: its dtype is {str(dtype)[:200]}")
    if not _are_lengths(sizes) or len(sizes) > _MAX_NDIM:
        raise CorruptionError(f"cannot read {where}: its shape is {str(sizes)[:200]}")
    if not _are_lengths(ends) or len(ends) != 2:
        raise CorruptionError(f"cannot read {where}: its data_offsets are {str(ends)[:200]}")
    begin, end = ends
    if begin > end or end > file_nbytes - data_begin:
        raise CorruptionError(
            f"cannot read {where}: its data_offsets [{begin}, {end}) are not within "
            f"{file_nbytes - data_begin} bytes of data"
        )
    if dtype not in _DTYPES:
        return _Tensor(dtype, "", sizes, data_begin + begin, data_begin + end)
    name, bits = _DTYPES[dtype]
    # Even if one size is 0, the others must not overflow.
    numel, extent = 1, bits
    for size in sizes:
        numel *= size
        extent *= max(size, 1)
        if extent > 8 * _MAX_NBYTES:
            raise CorruptionError(f"cannot read {where}: its shape is {sizes}")
    if 8 * (end - begin) != numel * bits:
        raise CorruptionError(
            f"cannot read {where}: {dtype} of shape {sizes} does not have {end - begin} bytes"
        )
    if name in PACKED:
        count, rest = divmod(sizes[-1], PACKED[name])
        name, sizes = ("", sizes) if rest else (name, [*sizes[:-1], count])
    return _Tensor(dtype, name, sizes, data_begin + begin, data_begin + end)


def _are_lengths(numbers: object) -> bool:
    return isinstance(numbers, list) and all(
        type(number) is int and 0 <= number <= _MAX_NBYTES for number in numbers
    )


def _check_extents(
    tensors: Mapping[str, _Tensor], data_begin: int, file_nbytes: int, path: Location
) -> None:
    """Checks that the tensors fill the file without gaps or overlaps."""
    position, before = data_begin, "the header"
    for begin, end, fqn in sorted((t.begin, t.end, fqn) for fqn, t in tensors.items()):
        if begin != position:
            what = "overlaps" if begin < position else "leaves a gap after"
            raise CorruptionError(f"cannot read {fqn!r} of {path}: it {what} {before}")
        position, before = end, repr(fqn)
    if position != file_nbytes:
        raise CorruptionError(
            f"cannot read {path}: it has {file_nbytes} bytes, and its tensors end at {position}"
        )


def _box_offsets(
    free_text: Mapping[str, object], tensors: Mapping[str, _Tensor], path: Location
) -> dict[str, list[int]]:
    """Returns FQN -> offsets of its box in the whole tensor, from the metadata of DCP's writer."""
    text = free_text.get(SHARDING)
    if text is None or text in tensors:  # Versions before 0.3.0 recorded ties of any name.
        return {}
    facts = _parse_json(text.encode(), str(path)) if isinstance(text, str) else None
    out: dict[str, list[int]] = {}
    for fqn, tensor in tensors.items():
        info = facts.get(fqn) if isinstance(facts, dict) else None
        offsets = info.get("saved_offsets") if isinstance(info, dict) else None
        if (
            not isinstance(offsets, list)
            or not _are_lengths(offsets)
            or len(offsets) != len(tensor.sizes)
            or any(o + s > _MAX_NBYTES for o, s in zip(offsets, tensor.sizes, strict=True))
        ):
            raise CorruptionError(
                f"cannot read {fqn!r} of {path}: {SHARDING} has no valid offsets for it"
            )
        out[fqn] = offsets
    return out
