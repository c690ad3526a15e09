"""Opens checkpoints of Megatron-Core up to 0.15 whose optimizer states are stored flattened.

Megatron's ``torch_dist`` format is DCP's. But its optimizer used to divide each tensor into a grid
of equal cells, and each flattened cell into ranges. A tensor of sizes ``[X, Y]`` is stored with the
sizes ``[rows of cells, columns of cells, elements of a cell]``, and ``Metadata.mcore_data`` has
``[X, Y]``.

Each stored range is here divided into boxes of the tensor itself, and each box gets the extent of
its elements. Their offset depends on the header of the range's archive, which is read on opening.

Source: megatron-core 0.15.3, ``megatron/core/dist_checkpointing/strategies/resharding.py``.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    UnsupportedError,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.index import to_entries, to_paths
from torch_ckpt.formats.object_pickles import load_object
from torch_ckpt.formats.opened import ForeignFiles, Opened
from torch_ckpt.formats.torch_save import is_plain
from torch_ckpt.options import READ_THREADS

__all__ = ["open_flattened", "unflattened"]

_SHAPE = "nd_reformulated_orig_global_shape"
_MAX_NDIM = 64  # csrc/plan/item.h
_DIRECTORY_NBYTES = 4 << 10  # More than the directory of an archive with one tensor.

_Extent = tuple[int, int, int]  # File number, offset and length of an archive.


def _flattened_shapes(metadata: Metadata) -> dict[str, Any]:
    """Returns the shapes of all tensors that are stored flattened, by FQN, as the file has them."""
    stored = getattr(metadata, "mcore_data", None)
    return {
        fqn: facts[_SHAPE]
        for fqn, facts in (stored.items() if isinstance(stored, dict) else ())
        if isinstance(facts, dict) and _SHAPE in facts
    }


def unflattened(metadata: Metadata) -> tuple[Metadata, dict[str, CheckpointError]]:
    """Returns the metadata with DCP's fields only, and with the sizes and boxes of the tensors.

    The boxes of one stored range share its extent. Their elements, one box after another, are those
    of the range. The second result is FQN -> why a shape contradicts the stored sizes or boxes. The
    metadata lacks such tensors.
    """
    tensors, extents = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
    errors: dict[str, CheckpointError] = {}
    for fqn, shape in _flattened_shapes(metadata).items():
        try:
            tensors[fqn] = _unflatten(fqn, shape, tensors.get(fqn), extents)
        except CorruptionError as error:
            errors[fqn] = error
            tensors.pop(fqn, None)
    if errors:
        extents = {index: info for index, info in extents.items() if index.fqn not in errors}
    unflattened = Metadata(
        tensors, metadata.planner_data, extents, metadata.storage_meta, metadata.version
    )
    return unflattened, errors


def _unflatten(fqn: str, shape: Any, stored: object, extents: dict[Any, Any]) -> Any:
    """Returns a tensor with its own sizes and boxes, which replace the stored ones in ``extents``.

    Raises CorruptionError if its shape contradicts the stored sizes or boxes.
    """
    if not isinstance(stored, TensorStorageMetadata):
        raise _contradiction(fqn, shape, "no stored tensor")
    cell = _cell(fqn, shape, stored.size)
    chunks: list[ChunkStorageMetadata] = []
    for chunk in stored.chunks:
        *at, begin = chunk.offsets
        *lengths, length = chunk.sizes
        info = extents.pop(MetadataIndex(fqn, torch.Size(chunk.offsets)), None)
        if info is None or any(number != 1 for number in lengths):
            raise _contradiction(fqn, shape, f"a stored box of {list(chunk.sizes)}")
        boxes = _native.flat_range_to_boxes(cell, begin, begin + length) if length else []
        for offsets, sizes in boxes:
            offset = torch.Size(a * b + c for a, b, c in zip(at, cell, offsets, strict=True))
            if extents.setdefault(MetadataIndex(fqn, offset), info) is not info:
                raise _contradiction(fqn, shape, f"two stored boxes at {list(offset)}")
            chunks.append(ChunkStorageMetadata(offset, torch.Size(sizes)))
    return TensorStorageMetadata(stored.properties, torch.Size(shape), chunks)


def open_flattened(directory: Location, metadata: Metadata, pickled: bytes) -> Opened | None:
    """Opens a checkpoint in which tensors are stored flattened; ``None`` if it has no such tensor.

    The bytes of the metadata identify it. A value is unreadable if the metadata contradicts itself
    about it, or if its data file is missing or damaged.
    """
    if not (flattened := _flattened_shapes(metadata)):
        return None
    metadata, errors = unflattened(metadata)
    names = sorted({info.relative_path for info in metadata.storage_data.values()})
    foreign = ForeignFiles(directory, directory, "Megatron torch_dist, flattened")
    missing: dict[int, NotFoundError] = {}
    for number, name in enumerate(names):
        try:
            foreign.files.append((name, (directory / name).nbytes()))
        except NotFoundError as error:
            foreign.files.append((name, 0))
            missing[number] = error
    with gc_paused():
        entries = to_entries(metadata, names)
        if entries is None:
            raise UnsupportedError(f"cannot load {directory}: a planner wrote it in a custom form")
        payloads = _payloads(directory, names, entries, missing)
        for fqn, properties, boxes in entries:
            if lost := [missing[box[2]] for box in boxes if box[2] in missing]:
                errors.setdefault(fqn, CorruptionError(f"cannot load {fqn!r}: {lost[0]}"))
            placed: list[_native.IndexBox] = [*boxes]
            if properties is not None and fqn not in errors:
                dtype = getattr(torch, properties[0])
                ranges = [(payloads[at], [*group]) for at, group in groupby(boxes, _extent_of)]
                of_range = (_placed(fqn, dtype, *r, fqn in flattened) for r in ranges)
                try:
                    placed = [*chain.from_iterable(of_range)]
                except CorruptionError as error:
                    errors[fqn] = error
            if fqn not in errors:
                foreign.entries.append((fqn, properties, placed))
        for fqn, why in errors.items():
            foreign.add_unreadable(fqn, why)
        records: dict[str, list[tuple[int, int, int]]] = {}
        for (number, _, _), payload in payloads.items():
            if not isinstance(payload, str) and payload.record[2]:
                records.setdefault(names[number], []).append(payload.record)
        foreign.records.update(records)
        foreign.paths = dict(to_paths(metadata) or ())
        return foreign.opened(None, pickled)


def _cell(fqn: str, shape: Any, size: Sequence[int]) -> list[int]:
    """Returns the sizes of a cell of the grid, after a check of both arguments."""
    *grid, numel = size or [0]
    if not (
        isinstance(shape, list | tuple)
        and len(shape) == len(grid) <= _MAX_NDIM
        and all(type(length) is int and length >= 0 for length in shape)
        and all(count > 0 and n % count == 0 for n, count in zip(shape, grid, strict=True))
    ):
        raise _contradiction(fqn, shape, f"the stored sizes {list(size)}")
    cell = [length // count for length, count in zip(shape, grid, strict=True)]
    if math.prod(cell) != numel:
        raise _contradiction(fqn, shape, f"the stored sizes {list(size)}")
    return cell


def _contradiction(fqn: str, shape: object, what: str) -> CorruptionError:
    return CorruptionError(f"cannot load {fqn!r}: its shape {shape!r} contradicts {what}")


class _Payload(NamedTuple):
    """The elements of an archive that has one plain tensor."""

    dtype: torch.dtype
    sizes: torch.Size
    offset: int  # Offset of the first element in the file.
    record: tuple[int, int, int]  # Offset, length and CRC-32.


def _extent_of(box: _native.IndexBox) -> _Extent:
    return box[2], box[3], box[4]


def _placed(
    fqn: str,
    dtype: torch.dtype,
    payload: _Payload | str,
    boxes: list[_native.IndexBox],
    is_flattened: bool,
) -> list[_native.IndexBox]:
    """Returns the boxes of one archive with the extents of their elements."""
    sizes = torch.Size(boxes[0][1])
    if is_flattened:
        sizes = torch.Size([1] * len(sizes) + [sum(math.prod(box[1]) for box in boxes)])
    elif len(boxes) > 1 or isinstance(payload, str) or payload.dtype != dtype:
        return boxes  # Torch reads the archive, or reports the damage.
    if isinstance(payload, str):
        raise CorruptionError(f"cannot load {fqn!r}: {payload}")
    if payload.dtype != dtype or payload.sizes != sizes:
        raise CorruptionError(
            f"cannot load {fqn!r}: a tensor of {payload.dtype} {list(payload.sizes)} is stored in "
            f"place of one of {dtype} {list(sizes)}"
        )
    placed: list[_native.IndexBox] = []
    offset = payload.offset
    for offsets, box_sizes, file, *_ in boxes:
        nbytes = math.prod(box_sizes) * dtype.itemsize
        placed.append((offsets, box_sizes, file, offset, nbytes, True, ()))
        offset += nbytes
    return placed


def _payloads(
    directory: Location,
    names: Sequence[str],
    entries: Sequence[_native.IndexEntry],
    missing: Collection[int],
) -> dict[_Extent, _Payload | str]:
    """Reads the headers of all archives of tensors, each file in ascending order."""
    extents: defaultdict[int, set[_Extent]] = defaultdict(set)
    for _, properties, boxes in entries:
        for box in boxes if properties is not None else ():
            if box[2] not in missing:
                extents[box[2]].add(_extent_of(box))

    def read(number: int) -> list[tuple[_Extent, _Payload | str]]:
        with (directory / names[number]).open() as file:
            return [(extent, _payload(file, extent)) for extent in sorted(extents[number])]

    with ThreadPoolExecutor(READ_THREADS) as pool:
        return dict(chain.from_iterable(pool.map(read, extents)))


def _payload(file: Any, extent: _Extent) -> _Payload | str:
    """Returns the payload of an archive, or why the engine cannot read it."""
    _, begin, nbytes = extent
    try:
        archive: Any = _create_file_view(file, begin, nbytes)
        tensor: Any = load_object(archive, map_location="meta")
    except Exception as error:  # Some kinds of tensors cannot be built without their elements.
        return str(error)
    if not is_plain(tensor) or not tensor.is_contiguous():
        return "its elements are not stored as they are"
    storage = tensor.untyped_storage()
    offset = storage._checkpoint_offset
    if storage.nbytes() != tensor.nbytes or offset + tensor.nbytes > nbytes:
        return "its elements lie outside its archive"
    record = (begin + offset, tensor.nbytes, _crc(file, begin, nbytes))
    return _Payload(tensor.dtype, tensor.size(), begin + offset, record)


def _crc(file: Any, begin: int, nbytes: int) -> int:
    """Returns the CRC-32 of the only tensor in an archive; 0 if it is unknown."""
    directory = min(nbytes, _DIRECTORY_NBYTES)
    file.seek(begin + nbytes - directory)
    try:
        with zipfile.ZipFile(io.BytesIO(file.read(directory))) as archive:
            return next((info.CRC for info in archive.infolist() if "/data/" in info.filename), 0)
    except (zipfile.BadZipFile, NotImplementedError):  # Torch reads it, and maybe more kinds.
        return 0
