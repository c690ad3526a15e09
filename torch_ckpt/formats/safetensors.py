"""Safetensors: single files, Hugging Face's directories of shards, and those of DCP's own writer.

A file is eight bytes that say how long its header is, the header, which is JSON, and the elements
of all tensors without gaps between them. It has no checksums. Whatever a header says is checked
before anything is made of it, as the ``safetensors`` library does.

``torch.distributed.checkpoint.HuggingFaceStorageWriter(save_distributed=True)`` has each rank write
a file of its own, and says in its header where in the tensors its boxes begin.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import CorruptionError, MismatchError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import ForeignFiles, Opened
from torch_ckpt.formats.safetensors_layout import DTYPES, MAX_HEADER_NBYTES

__all__ = ["is_safetensors", "open_safetensors", "open_safetensors_directory"]

_MAX_NBYTES = 2**63 - 1
_MAX_NDIM = 64
_START_NBYTES = 64 << 10  # Read at once: all of most headers.
_SAMPLE_NBYTES = 4 << 10
_LENGTH_NBYTES = 8
_INDEX_SUFFIX = ".safetensors.index.json"

# Torch's name of each dtype, and bits an element.
_DTYPES = {
    **{word: (name, 8 * itemsize) for name, (word, itemsize) in DTYPES.items()},
    "F8_E8M0": ("float8_e8m0fnu", 8),  # Which the library does not load.
    # Of several elements in a byte, which no tensor of torch is.
    "F4": ("", 4),
    "F6_E2M3": ("", 6),
    "F6_E3M2": ("", 6),
}


class _Tensor(NamedTuple):
    """A tensor as a header has it; ``begin`` and ``end`` are bytes of the file."""

    dtype: str
    sizes: list[int]
    begin: int
    end: int


@dataclass(frozen=True)
class _Header:
    file_nbytes: int
    tensors: dict[str, _Tensor]
    box_offsets: dict[str, list[int]]  # Of those that are boxes of a larger tensor.
    digest: bytes  # Of it, and of samples of the data.


class _Unreadable:
    """Tensors of dtypes that torch has not."""

    def __init__(self, path: Location) -> None:
        self.path = path

    def value(self, fqn: str) -> object:
        raise UnsupportedError(
            f"cannot load {fqn!r} of {self.path}: its dtype packs several elements into a byte"
        )


def is_safetensors(start: bytes) -> bool:
    """Whether a file that begins so may be one."""
    return start[_LENGTH_NBYTES : _LENGTH_NBYTES + 1] == b"{"


def open_safetensors(path: Location) -> Opened:
    """Opens a single file.

    Raises:
        CorruptionError: Its header is damaged or contradicts itself. Names the file and the tensor.
        StorageError: It cannot be read.
    """
    merged = _Merged(ForeignFiles(path, path.parent))
    with gc_paused():
        merged.add(path.name, _read_header(path))
        return merged.opened()


def open_safetensors_directory(directory: Location, names: Sequence[str]) -> Opened:
    """Opens a directory of files: those that Hugging Face's index names, or else all.

    Args:
        directory: The directory.
        names: Its safetensors files and their indexes.

    Raises:
        NotFoundError: A file that the index names is missing.
        CorruptionError: A header or the index is damaged, or the files do not hold whole tensors.
        MismatchError: Files without an index hold a tensor twice.
    """
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    merged = _Merged(ForeignFiles(directory, directory))
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
                header = _read_header(directory / name)
            except NotFoundError as error:
                raise NotFoundError(
                    f"cannot load {fqns[0]!r}: {indexes[0]} says that it is in {name}, which is "
                    f"not in {directory}"
                ) from error
            merged.add(name, header, fqns)
        return merged.opened()


@dataclass
class _Merged:
    """Boxes of the same tensors in several files, brought together."""

    foreign: ForeignFiles
    boxes: dict[str, list[_native.IndexBox]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, name: str, header: _Header, fqns: Iterable[str] | None = None) -> None:
        """Adds the tensors of a file, all or only these."""
        number = len(self.foreign.files)
        self.foreign.files.append((name, header.file_nbytes))
        self.digest.update(header.digest)
        for fqn in header.tensors if fqns is None else fqns:
            tensor = header.tensors.get(fqn)
            if tensor is None:
                raise CorruptionError(
                    f"cannot load {self.foreign.path}: its index says that {fqn!r} is in {name}, "
                    "which does not have it"
                )
            dtype, sizes, begin, end = tensor
            if self.dtypes.setdefault(fqn, dtype) != dtype:
                raise CorruptionError(
                    f"cannot load {self.foreign.path}: {fqn!r} is of {dtype} in {name}, elsewhere "
                    f"of {self.dtypes[fqn]}"
                )
            offsets = header.box_offsets.get(fqn) or [0] * len(sizes)
            box = (offsets, sizes, number, begin, end - begin, True, ())
            self.boxes.setdefault(fqn, []).append(box)

    def opened(self) -> Opened:
        foreign = self.foreign
        for fqn, boxes in self.boxes.items():
            dtype = _DTYPES[self.dtypes[fqn]][0]
            sizes = boxes[0][1] if len(boxes) == 1 and not any(boxes[0][0]) else self._whole(fqn)
            if dtype:
                properties = (dtype, "contiguous_format", False, False, sizes)
                foreign.entries.append((fqn, properties, boxes))
            else:
                _, _, number, begin, nbytes, *_ = boxes[0]
                foreign.entries.append((fqn, None, [((), (), number, begin, nbytes, False, ())]))
        foreign.paths = {fqn: (fqn,) for fqn in self.boxes}
        return foreign.opened(_Unreadable(foreign.path), self.digest.digest())

    def _whole(self, fqn: str) -> list[int]:
        """The sizes of a tensor of several boxes, which must be all of it."""
        boxes = self.boxes[fqn]
        ndim = len(boxes[0][0])
        if any(len(offsets) != ndim for offsets, *_ in boxes):
            raise CorruptionError(
                f"cannot load {self.foreign.path}: boxes of {fqn!r} differ in dimensions"
            )
        sizes = [max(box[0][d] + box[1][d] for box in boxes) for d in range(ndim)]
        seen: dict[tuple[int, ...], str] = {}
        for offsets, of_box, number, *_ in boxes:
            name = self.foreign.files[number][0]
            if math.prod(of_box) and seen.setdefault(tuple(offsets), name) != name:
                raise MismatchError(
                    f"cannot load {self.foreign.path}: {fqn!r} is in {seen[tuple(offsets)]} and in "
                    f"{name}; load one of the files, or have a model{_INDEX_SUFFIX} say which"
                )
        if sum(math.prod(of_box) for _, of_box, *_ in boxes) != math.prod(sizes):
            raise CorruptionError(
                f"cannot load {self.foreign.path}: its files do not hold all of {fqn!r} of sizes "
                f"{sizes}, or parts of it twice; is one missing?"
            )
        return sizes


def _read_weight_map(path: Location) -> dict[str, str]:
    """Hugging Face's index: FQN to file.

    Raises:
        CorruptionError: It is none, or names a file outside its directory.
    """
    nbytes, data = path.read_part(0, MAX_HEADER_NBYTES)
    if nbytes > len(data):
        raise CorruptionError(f"cannot read {path}: it is {nbytes} bytes long")
    index = _parse_json(data, str(path))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise CorruptionError(f"cannot read {path}: it has no weight_map")
    for fqn, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CorruptionError(
                f"cannot read {path}: it says that {fqn!r} is in {name!r}, which is no file of its "
                "directory"
            )
    return weight_map


def _read_header(path: Location) -> _Header:
    """Reads and checks the header of a file.

    Raises:
        CorruptionError: It is damaged or contradicts itself.
    """
    file_nbytes, start = path.read_part(0, _START_NBYTES)
    if len(start) < _LENGTH_NBYTES:
        raise CorruptionError(f"cannot read {path}: {file_nbytes} bytes are no safetensors file")
    header_nbytes = int.from_bytes(start[:_LENGTH_NBYTES], "little")
    data_begin = _LENGTH_NBYTES + header_nbytes
    if header_nbytes > MAX_HEADER_NBYTES or data_begin > file_nbytes:
        raise CorruptionError(
            f"cannot read {path}: its header would be {header_nbytes} bytes long, in a file of "
            f"{file_nbytes}"
        )
    if data_begin > len(start):
        start += path.read_part(len(start), data_begin - len(start))[1]
    header = start[_LENGTH_NBYTES:data_begin]
    if len(header) < header_nbytes:
        raise CorruptionError(f"cannot read {path}: it was cut off just now")
    tensors = _parse_json(header, str(path))
    if not isinstance(tensors, dict):
        raise CorruptionError(f"cannot read {path}: its header is no JSON object")
    free_text = tensors.pop("__metadata__", {})
    if not isinstance(free_text, dict):
        raise CorruptionError(f"cannot read {path}: __metadata__ is no JSON object")
    checked = {
        fqn: _check_tensor(facts, data_begin, file_nbytes, f"{fqn!r} of {path}")
        for fqn, facts in tensors.items()
    }
    _check_extents(checked, data_begin, file_nbytes, path)
    offsets = _box_offsets(free_text, checked, path)
    digest = hashlib.sha256(header)
    # Files of two trainings have equal headers. Not by their times: honest copies differ there.
    last = max(data_begin, file_nbytes - _SAMPLE_NBYTES)
    for offset in (data_begin, (data_begin + last) // 2, last):
        sample = start[offset : offset + _SAMPLE_NBYTES]
        if len(sample) < min(_SAMPLE_NBYTES, file_nbytes - offset):
            sample = path.read_part(offset, _SAMPLE_NBYTES)[1]
        digest.update(sample)
    return _Header(file_nbytes, checked, offsets, digest.digest())


def _parse_json(data: bytes, where: str) -> object:
    """Parses JSON that may hold anything.

    Raises:
        CorruptionError: It is no JSON, is nested too deep, or has a key twice.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        out = dict(pairs)
        if len(out) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"it has {twice!r} twice")
        return out

    try:
        return json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"cannot read {where}: no JSON as it should be: {error}") from error


def _check_tensor(facts: Any, data_begin: int, file_nbytes: int, where: str) -> _Tensor:
    """Checks what a header says of one tensor."""
    if not isinstance(facts, dict) or facts.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptionError(f"cannot read {where}: it lacks dtype, shape or data_offsets")
    dtype, sizes, ends = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str):
        raise CorruptionError(f"cannot read {where}: its dtype is {str(dtype)[:200]}")
    if dtype not in _DTYPES:
        raise UnsupportedError(f"cannot read {where}: no dtype {dtype!r} is known")
    if not _are_lengths(sizes) or len(sizes) > _MAX_NDIM:
        raise CorruptionError(f"cannot read {where}: its shape is {str(sizes)[:200]}")
    if not _are_lengths(ends) or len(ends) != 2:
        raise CorruptionError(f"cannot read {where}: its data_offsets are {str(ends)[:200]}")
    begin, end = ends
    if begin > end or end > file_nbytes - data_begin:
        raise CorruptionError(
            f"cannot read {where}: it would be at [{begin}, {end}) of "
            f"{file_nbytes - data_begin} bytes of data"
        )
    bits = _DTYPES[dtype][1]
    # Sizes beside a 0, too, must make sense.
    numel, extent = 1, bits
    for size in sizes:
        numel *= size
        extent *= max(size, 1)
        if extent > 8 * _MAX_NBYTES:
            raise CorruptionError(f"cannot read {where}: its shape is {sizes}")
    if 8 * (end - begin) != numel * bits:
        raise CorruptionError(
            f"cannot read {where}: {dtype} {sizes} are not the {end - begin} bytes that it has"
        )
    return _Tensor(dtype, sizes, data_begin + begin, data_begin + end)


def _are_lengths(numbers: object) -> bool:
    return isinstance(numbers, list) and all(
        type(number) is int and 0 <= number <= _MAX_NBYTES for number in numbers
    )


def _check_extents(
    tensors: Mapping[str, _Tensor], data_begin: int, file_nbytes: int, path: Location
) -> None:
    """Tensors follow one another without gaps and fill the file."""
    at, before = data_begin, None
    for begin, end, fqn in sorted((t.begin, t.end, fqn) for fqn, t in tensors.items()):
        if begin != at:
            what = "overlaps" if begin < at else "leaves a gap behind"
            raise CorruptionError(f"cannot read {fqn!r} of {path}: it {what} {before or 'header'}")
        at, before = end, repr(fqn)
    if at != file_nbytes:
        raise CorruptionError(
            f"cannot read {path}: it is {file_nbytes} bytes long, and its tensors end at {at}"
        )


def _box_offsets(
    free_text: Mapping[str, object], tensors: Mapping[str, _Tensor], path: Location
) -> dict[str, list[int]]:
    """Where in the whole tensors the boxes of a file begin, where DCP's writer says so."""
    text = free_text.get("DCP_SHARDING_INFO")
    if text is None:
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
                f"cannot read {fqn!r} of {path}: DCP_SHARDING_INFO does not say where it begins"
            )
        out[fqn] = offsets
    return out
