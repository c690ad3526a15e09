"""Reads and writes the pickle of DCP's ``Metadata``."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import io
import math
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torch_ckpt._core.lazy_views import LazyMapping
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.formats.pickles import MEGATRON_CLASSES, ForbiddenPickleError, load_allowed
from torch_ckpt.formats.reading import reading

__all__ = [
    "UnreadableMetadata",
    "check_metadata",
    "dump_metadata",
    "load_committed",
    "load_metadata",
]

_INT64_MAX = torch.iinfo(torch.int64).max


def dump_metadata(metadata: Metadata) -> bytes:
    """Pickles metadata, and replaces classes of this package by stock classes.

    First, equal sizes, offsets and properties in ``metadata`` are replaced by the same objects.
    Pickle then writes each once, in half the time and two thirds of the bytes. No value changes.
    """
    with gc_paused():
        with contextlib.suppress(TypeError):  # A custom planner may have sizes such as lists.
            _intern_equal_values(metadata)
        # A planner may store plans in the metadata, as Megatron's does.
        for name, value in vars(metadata).items():
            if isinstance(value, list) and any(isinstance(element, SavePlan) for element in value):
                setattr(metadata, name, [_to_stock_plan(element) for element in value])
        pickled = io.BytesIO()
        pickler = pickle.Pickler(pickled)
        pickler.dispatch_table = {**copyreg.dispatch_table, _StoragePrefix: _reduce_prefix}
        pickler.dump(metadata)
        return pickled.getvalue()


def _to_stock_plan(plan: Any) -> Any:
    """Returns the plan, with classes of this package replaced by stock classes."""
    if not isinstance(plan, SavePlan):
        return plan
    paths, prefix = plan.planner_data, plan.storage_data
    return dataclasses.replace(
        plan,
        items=[
            item if type(item) is WriteItem else WriteItem(*(getattr(item, f) for f in _ITEM))
            for item in plan.items
        ],
        planner_data=paths.copy() if isinstance(paths, LazyMapping) else paths,
        storage_data=_StoragePrefix(prefix.prefix)
        if isinstance(prefix, _StoragePrefix)
        else prefix,
    )


_ITEM = [field.name for field in dataclasses.fields(WriteItem)]


def _reduce_prefix(prefix: _StoragePrefix) -> Any:
    """Pickles a prefix without the item list attached for the coordinator."""
    return _StoragePrefix(prefix.prefix).__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def load_metadata(pickled: bytes, *, trust_pickle: bool = False) -> Metadata:
    """Unpickles metadata and checks its consistency; with ``trust_pickle``, only its type.

    Raises ValueError for inconsistent metadata, and ForbiddenPickleError if the pickle requests a
    class or function that stock DCP's metadata does not need.
    """
    with gc_paused():
        if not trust_pickle:
            return check_metadata(load_allowed(pickled))
        try:
            metadata = _TrustingUnpickler(io.BytesIO(pickled)).load()
        except Exception as error:
            raise ValueError(f"it cannot be unpickled: {error}") from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError("its value is not a DCP Metadata")
        return metadata


class _TrustingUnpickler(pickle.Unpickler):
    """Python's unpickler. It reads classes of an old Megatron-Core without that version."""

    def find_class(self, module: str, name: str) -> Any:
        return MEGATRON_CLASSES.get((module, name)) or super().find_class(module, name)


def load_committed(pickled: bytes, *, where: str, trust_pickle: bool = False) -> Metadata:
    """Calls :func:`load_metadata` and converts its errors to CorruptionError and UnsupportedError.

    ``where`` is the path of the file, for messages.
    """
    try:
        with reading(where):
            try:
                return load_metadata(pickled, trust_pickle=trust_pickle)
            except ValueError as error:
                raise ValueError(f"it is damaged, or not metadata of DCP: {error}") from error
    except ForbiddenPickleError as error:
        raise UnsupportedError(
            f"cannot read {where}: {error}. If it is not damaged and you trust its author, "
            "FastReader(trust_pickle=True) allows it"
        ) from error


def check_metadata(value: object) -> Metadata:
    """Checks that a value is consistent metadata, and returns it.

    Every field must have the right type, every chunk must lie within its tensor, and every file
    within the checkpoint. Otherwise raises a ValueError that names the FQN. Does not check the
    lengths of the data files.
    """
    if type(value) is not Metadata or type(value.storage_data) is not dict:
        raise ValueError("its value is not a DCP Metadata")
    for fqn, stored in value.state_dict_metadata.items():
        if type(fqn) is not str:
            raise ValueError(f"the FQN {fqn!r} is not a str")
        if type(stored) is TensorStorageMetadata:
            _check_tensor(fqn, stored)
        elif type(stored) is not BytesStorageMetadata:
            raise ValueError(f"the metadata of {fqn!r} is a {type(stored).__name__}")
    files: set[str] = set()
    for index, info in value.storage_data.items():
        if type(index) is not MetadataIndex or type(info) is not _StorageInfo:
            raise ValueError(f"the storage info of {index!r} is a {type(info).__name__}")
        if info.offset < 0 or info.length < 0 or info.offset + info.length > _INT64_MAX:
            raise ValueError(f"{index.fqn!r} is stored in {info.length} bytes at {info.offset}")
        if info.relative_path not in files:
            _check_file(index.fqn, info.relative_path)
            files.add(info.relative_path)
        if info.transform_descriptors is not None and not all(
            type(name) is str for name in info.transform_descriptors
        ):
            raise ValueError(f"the transforms of {index.fqn!r} are not a list of str")
    return value


class UnreadableMetadata(Metadata):
    """A placeholder for unreadable metadata: any access raises the original error.

    DCP discards errors that ``read_metadata`` raises, and raises an ``AssertionError`` instead.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        if name in Metadata.__dataclass_fields__:
            raise self.error
        return super().__getattribute__(name)


def _check_tensor(fqn: str, stored: TensorStorageMetadata) -> None:
    size = stored.size
    if type(size) is not torch.Size:
        _check_numbers(fqn, size)
    if math.prod(size) * stored.properties.dtype.itemsize > _INT64_MAX:
        raise ValueError(f"the size of {fqn!r} is {list(size)}")
    rank = len(size)
    for chunk in stored.chunks:
        if type(chunk) is not ChunkStorageMetadata:
            raise ValueError(f"a chunk of {fqn!r} is a {type(chunk).__name__}")
        offsets, sizes = chunk.offsets, chunk.sizes
        if type(offsets) is not torch.Size or type(sizes) is not torch.Size:
            _check_numbers(fqn, offsets)
            _check_numbers(fqn, sizes)
        if sizes == size and not any(offsets) and len(offsets) == rank:
            continue  # The whole tensor, which is the most frequent case.
        if not len(offsets) == len(sizes) == rank or any(
            begin + length > limit
            for begin, length, limit in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(
                f"a chunk of {fqn!r} has offsets {list(offsets)} and sizes {list(sizes)}, "
                f"the tensor {list(size)}"
            )


def _check_numbers(fqn: str, numbers: Any) -> None:
    """Checks sizes of types other than ``torch.Size``, which the unpickler has already checked."""
    if not all(type(number) is int and 0 <= number <= _INT64_MAX for number in numbers):
        raise ValueError(f"{fqn!r} has the sizes or offsets {numbers!r}")


def _check_file(fqn: str, path: str) -> None:
    # The engine refuses such paths as well. This check raises before anything is read.
    if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ValueError(f"{fqn!r} is stored in {path!r}, which is outside the checkpoint")
    path.encode()  # A lone surrogate is a ValueError.


def _intern_equal_values(metadata: Metadata) -> None:
    sizes: dict[torch.Size, torch.Size] = {}
    properties: dict[tuple[Any, ...], TensorProperties] = {}
    for stored in metadata.state_dict_metadata.values():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        stored.size = sizes.setdefault(stored.size, stored.size)
        key = tuple(vars(stored.properties).values())
        stored.properties = properties.setdefault(key, stored.properties)
        for chunk in stored.chunks:
            chunk.offsets = sizes.setdefault(chunk.offsets, chunk.offsets)
            chunk.sizes = sizes.setdefault(chunk.sizes, chunk.sizes)
    for index in metadata.storage_data:
        if index.offset is not None:
            # The class is frozen because it is a key. An equal offset does not change the key.
            object.__setattr__(index, "offset", sizes.setdefault(index.offset, index.offset))
