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
from torch_ckpt.errors import CorruptionError, UnsupportedError
from torch_ckpt.formats.pickles import ForbiddenPickleError, load_allowed

__all__ = [
    "UnreadableMetadata",
    "check_metadata",
    "dump_metadata",
    "load_committed",
    "load_metadata",
]

_INT64_MAX = torch.iinfo(torch.int64).max


def dump_metadata(metadata: Metadata) -> bytes:
    """Pickles metadata, of stock classes only if it holds no others.

    Equal sizes, offsets and properties in ``metadata`` become the same objects first, which changes
    no value: pickle then writes each once, at half the time and two thirds of the bytes.
    """
    with gc_paused():
        with contextlib.suppress(TypeError):  # A planner's own idea of sizes: lists, say.
            _share_equal_parts(metadata)
        # A planner may keep the plans that it is given in the metadata, as Megatron's does.
        for name, value in vars(metadata).items():
            if isinstance(value, list) and any(isinstance(one, SavePlan) for one in value):
                setattr(metadata, name, [_in_stocks_terms(one) for one in value])
        pickled = io.BytesIO()
        pickler = pickle.Pickler(pickled)
        pickler.dispatch_table = {**copyreg.dispatch_table, _StoragePrefix: _reduce_prefix}
        pickler.dump(metadata)
        return pickled.getvalue()


def _in_stocks_terms(plan: Any) -> Any:
    """The plan with stock's classes in place of this package's."""
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
    """Reduces it without the item list that travels in it to the coordinator."""
    return _StoragePrefix(prefix.prefix).__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def load_metadata(pickled: bytes, *, trust_pickle: bool = False) -> Metadata:
    """Unpickles metadata, and checks that it is sound.

    Args:
        pickled: What was committed.
        trust_pickle: Unpickle whatever it asks for, which may run any code, and check only that a
            ``Metadata`` comes out.

    Raises:
        ValueError: The bytes are no pickle of a ``Metadata`` with ``storage_data``, or it
            contradicts itself.
        ForbiddenPickleError: It asks for more than stock DCP's metadata needs.
    """
    with gc_paused():
        if not trust_pickle:
            return check_metadata(load_allowed(pickled))
        try:
            metadata = pickle.loads(pickled)
        except Exception as error:
            raise ValueError(f"it cannot be unpickled: {error}") from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise ValueError("it does not hold DCP's Metadata")
        return metadata


def load_committed(pickled: bytes, *, where: str, trust_pickle: bool = False) -> Metadata:
    """As :func:`load_metadata`, of the file ``where``, with the errors that users see.

    Raises:
        CorruptionError: The bytes are no sound metadata.
        UnsupportedError: They ask for more than stock DCP's metadata needs.
    """
    try:
        return load_metadata(pickled, trust_pickle=trust_pickle)
    except ForbiddenPickleError as error:
        raise UnsupportedError(
            f"cannot read {where}: {error}. It may run code; if you trust who wrote it, "
            "FastReader(trust_pickle=True) lets it"
        ) from error
    except ValueError as error:
        raise CorruptionError(f"cannot read {where}: {error}") from error


def check_metadata(value: object) -> Metadata:
    """The value, if it is metadata in which every part is of its type and inside the whole.

    Whether the data files are as long as they must be is not checked.

    Raises:
        ValueError: It is not. Names the FQN.
    """
    if type(value) is not Metadata or type(value.storage_data) is not dict:
        raise ValueError("it does not hold DCP's Metadata")
    for fqn, stored in value.state_dict_metadata.items():
        if type(fqn) is not str:
            raise ValueError(f"the name {fqn!r} is no text")
        if type(stored) is TensorStorageMetadata:
            _check_tensor(fqn, stored)
        elif type(stored) is not BytesStorageMetadata:
            raise ValueError(f"{fqn!r} is a {type(stored).__name__}")
    files: set[str] = set()
    for index, info in value.storage_data.items():
        if type(index) is not MetadataIndex or type(info) is not _StorageInfo:
            raise ValueError(f"where {index!r} is stored is a {type(info).__name__}")
        if info.offset < 0 or info.length < 0 or info.offset + info.length > _INT64_MAX:
            raise ValueError(f"{index.fqn!r} is stored in {info.length} bytes at {info.offset}")
        if info.relative_path not in files:
            _check_file(index.fqn, info.relative_path)
            files.add(info.relative_path)
        if info.transform_descriptors is not None and not all(
            type(name) is str for name in info.transform_descriptors
        ):
            raise ValueError(f"the transforms of {index.fqn!r} are not named by text")
    return value


class UnreadableMetadata(Metadata):
    """Stands for metadata that cannot be read, and raises why when it is looked at."""

    # DCP drops what read_metadata raises, and raises an AssertionError of its own.

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
        raise ValueError(f"{fqn!r} has the size {list(size)}")
    rank = len(size)
    for chunk in stored.chunks:
        if type(chunk) is not ChunkStorageMetadata:
            raise ValueError(f"a chunk of {fqn!r} is a {type(chunk).__name__}")
        offsets, sizes = chunk.offsets, chunk.sizes
        if type(offsets) is not torch.Size or type(sizes) is not torch.Size:
            _check_numbers(fqn, offsets)
            _check_numbers(fqn, sizes)
        if sizes == size and not any(offsets) and len(offsets) == rank:
            continue  # The whole tensor: most are.
        if not len(offsets) == len(sizes) == rank or any(
            begin + length > limit
            for begin, length, limit in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(
                f"a chunk of {fqn!r} has offsets {list(offsets)} and sizes {list(sizes)}, "
                f"the tensor {list(size)}"
            )


def _check_numbers(fqn: str, numbers: Any) -> None:
    """For sizes that are no ``torch.Size``, of which the unpickler makes only sound ones."""
    if not all(type(number) is int and 0 <= number <= _INT64_MAX for number in numbers):
        raise ValueError(f"{fqn!r} has the sizes or offsets {numbers!r}")


def _check_file(fqn: str, path: str) -> None:
    # The engine opens no such path either; here the error comes before anything is read.
    if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ValueError(f"{fqn!r} is stored in {path!r}, which is not in the checkpoint")


def _share_equal_parts(metadata: Metadata) -> None:
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
            # The class is frozen, as a key must be; an equal offset leaves the key what it was.
            object.__setattr__(index, "offset", sizes.setdefault(index.offset, index.offset))
