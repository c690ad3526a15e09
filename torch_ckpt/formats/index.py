"""Converts DCP's ``Metadata`` to the engine's index, and back."""

from __future__ import annotations

import copyreg
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ckpt._core import _native
from torch_ckpt._core.lazy_views import LazyMapping
from torch_ckpt._core.tensors import MEMORY_FORMATS, gc_paused, to_properties
from torch_ckpt._core.unpickling import allow_in_messages
from torch_ckpt.formats.committed import INDEX_MARK

__all__ = [
    "index_of",
    "to_entries",
    "to_metadata",
    "to_paths",
]

_K = TypeVar("_K")
_V = TypeVar("_V")

_METADATA_FIELDS = frozenset(Metadata.__dataclass_fields__)

_MEMORY_FORMAT_NAMES = {value: name for name, value in MEMORY_FORMATS.items()}


def to_metadata(index: _native.Index, *, checkpoint_id: str | os.PathLike[str]) -> Metadata:
    """Returns the metadata that an index describes, as read-only views of it.

    Each access reads only the records that it needs, and raises CorruptionError on damage. Views of
    an index file pickle and copy as plain dicts.
    """
    stored: Any = _StateDictMetadata(index)
    return Metadata(
        state_dict_metadata=stored,
        planner_data=_PlannerData(index) if index.has_paths else None,
        storage_data=_StorageData(index),
        storage_meta=StorageMeta(
            checkpoint_id=checkpoint_id, save_id=index.stored_save_id, modules=[INDEX_MARK]
        ),
        version=index.version or None,
    )


def index_of(metadata: Metadata | None) -> _native.Index | None:
    """Returns the index of metadata that :func:`to_metadata` made; ``None`` for other metadata."""
    stored = None if metadata is None else metadata.state_dict_metadata
    return stored.index if isinstance(stored, _StateDictMetadata) else None


def to_entries(
    metadata: Metadata, files: Sequence[str], dtypes: Sequence[Mapping[int, str]] | None = None
) -> list[_native.IndexEntry] | None:
    """Converts metadata to one entry per FQN; ``None`` if an index cannot represent a value.

    Entries refer to ``files`` by number. ``dtypes`` maps, for each file, the offset of each slice
    that the engine framed to its dtype. Without it, no box is marked as plain.
    """
    numbers = {name: number for number, name in enumerate(files)}
    entries: list[_native.IndexEntry] = []
    box_count = 0

    def box(
        info: _StorageInfo, dtype: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> _native.IndexBox:
        number = numbers[info.relative_path]
        # Ranks may have written boxes of one tensor with different dtypes.
        plain = dtypes is not None and dtypes[number].get(info.offset) == dtype
        transforms = list(getattr(info, "transform_descriptors", None) or ())
        return (offsets, sizes, number, info.offset, info.length, plain, transforms)

    if not _METADATA_FIELDS.issuperset(k for k, v in vars(metadata).items() if v is not None):
        return None  # An index cannot store additional fields, such as Megatron's plans.
    try:
        for fqn, stored in metadata.state_dict_metadata.items():
            if type(stored) is BytesStorageMetadata:
                boxes = [box(metadata.storage_data[MetadataIndex(fqn)], "", (), ())]
                entries.append((fqn, None, boxes))
            elif type(stored) is TensorStorageMetadata:
                properties = _properties(stored)
                boxes = [
                    box(
                        metadata.storage_data[MetadataIndex(fqn, chunk.offsets)],
                        properties[0],
                        chunk.offsets,
                        chunk.sizes,
                    )
                    for chunk in stored.chunks
                ]
                entries.append((fqn, properties, boxes))
            else:
                return None
            box_count += len(boxes)
    except (KeyError, AttributeError, TypeError):
        return None  # A planner's custom metadata.
    # An index cannot store entries of storage_data without a chunk.
    return entries if box_count == len(metadata.storage_data) else None


def to_paths(metadata: Metadata) -> list[tuple[str, list[str | int]]] | None:
    """Returns ``planner_data`` as paths of an index; ``None`` if it is not a dict of paths."""
    if not isinstance(metadata.planner_data, dict):
        return None
    paths: list[tuple[str, list[str | int]]] = []
    for fqn, path in metadata.planner_data.items():
        if type(path) is not tuple or any(type(key) not in (str, int) for key in path):
            return None
        paths.append((fqn, list(path)))
    return paths


def _properties(stored: TensorStorageMetadata) -> tuple[str, str, bool, bool, Sequence[int]]:
    properties = stored.properties
    if properties.layout != torch.strided:
        raise TypeError(f"an index cannot represent {properties.layout}")
    return (
        str(properties.dtype).removeprefix("torch."),
        _MEMORY_FORMAT_NAMES[properties.memory_format],
        properties.requires_grad,
        properties.pin_memory,
        stored.size,
    )


@allow_in_messages
def _index_in_memory(encoded: bytes) -> _native.Index:
    return _native.index_of(encoded)


def _reduce_index(index: _native.Index) -> tuple[Any, ...]:
    arguments: tuple[bytes] = index.__reduce__()[1]  # type: ignore[assignment]
    return _index_in_memory, arguments  # Pickles of native functions contain code.


copyreg.pickle(_native.Index, _reduce_index)


class _IndexView(LazyMapping[_K, _V]):
    """A view of an index. It pickles as a dict, or with its index if that is in memory.

    A dict is readable without this package. Views of an index in memory are sent between the ranks
    of a save, and a dict of a million objects would be slow to pickle.
    """

    def __init__(self, index: _native.Index) -> None:
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        if self.index.in_memory:
            return type(self), (self.index,)
        return super().__reduce__()


@allow_in_messages
class _StateDictMetadata(_IndexView[str, TensorStorageMetadata | BytesStorageMetadata]):
    """``Metadata.state_dict_metadata``, which caches the values that it builds."""

    def __init__(self, index: _native.Index) -> None:
        super().__init__(index)
        self._built: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._properties: dict[tuple[str, str, bool, bool], TensorProperties] = {}
        self._fqns: list[str] | None = None

    def __getitem__(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        built = self._built.get(fqn)
        if built is None:
            with gc_paused():
                found = self.index.find(fqn) if isinstance(fqn, str) else None
                if found is None:
                    raise KeyError(fqn)
                built = self._built[fqn] = self._build(found)
        return built

    def __contains__(self, fqn: object) -> bool:
        return isinstance(fqn, str) and fqn in self.index

    def __iter__(self) -> Iterator[str]:
        if self._fqns is None:
            self._fqns = self.index.fqns()
        return iter(self._fqns)

    def __len__(self) -> int:
        return len(self.index)

    def _build(self, entry: _native.IndexEntry) -> TensorStorageMetadata | BytesStorageMetadata:
        _, tensor, boxes = entry
        if tensor is None:
            return BytesStorageMetadata()
        properties, size = tensor[:4], tensor[4]
        if properties not in self._properties:
            self._properties[properties] = to_properties(*properties)
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes, *_ in boxes
        ]
        return TensorStorageMetadata(self._properties[properties], torch.Size(size), chunks)


@allow_in_messages
class _StorageData(_IndexView[MetadataIndex, _StorageInfo]):
    """``Metadata.storage_data``."""

    def __init__(self, index: _native.Index) -> None:
        super().__init__(index)
        self._names: dict[int, str] = {}  # File number -> file name.

    def __getitem__(self, key: MetadataIndex) -> _StorageInfo:
        found = self._find(key)
        if found is None:
            raise KeyError(key)
        return self._info(found[1])

    def __contains__(self, key: object) -> bool:
        return self._find(key) is not None

    def __iter__(self) -> Iterator[MetadataIndex]:
        return (key for key, _ in self._boxes())

    def __len__(self) -> int:
        return self.index.box_count

    def pairs(self) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
        return ((key, self._info(box)) for key, box in self._boxes())

    def _find(self, key: object) -> tuple[int, _native.IndexBox] | None:
        if type(key) is not MetadataIndex or not isinstance(key.fqn, str):
            return None
        try:
            return self.index.find_box(key.fqn, key.offset, key.index)
        except TypeError:  # No index contains an offset of this type.
            return None

    def _boxes(self) -> Iterator[tuple[MetadataIndex, _native.IndexBox]]:
        for fqn, tensor, boxes in self.index:
            if tensor is None:
                yield MetadataIndex(fqn), boxes[0]
                continue
            for number, box in enumerate(boxes):
                yield MetadataIndex(fqn, torch.Size(box[0]), number), box

    def _info(self, box: _native.IndexBox) -> _StorageInfo:
        _, _, file, offset, nbytes, _, transforms = box
        name = self._names.get(file)
        if name is None:
            name = self._names[file] = self.index.file_name(file)
        info = _StorageInfo(name, offset, nbytes)
        return dataclasses.replace(info, transform_descriptors=transforms) if transforms else info


@allow_in_messages
class _PlannerData(_IndexView[str, tuple[str | int, ...]]):
    """``Metadata.planner_data``, which the first access reads completely."""

    def __init__(self, index: _native.Index) -> None:
        super().__init__(index)
        self._read: dict[str, tuple[str | int, ...]] | None = None

    def _all(self) -> dict[str, tuple[str | int, ...]]:
        if self._read is None:
            with gc_paused():
                self._read = {fqn: tuple(keys) for fqn, keys in self.index.paths or ()}
        return self._read

    def __getitem__(self, fqn: str) -> tuple[str | int, ...]:
        return self._all()[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
