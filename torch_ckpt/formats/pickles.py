"""Reads the pickle of ``.metadata`` without running code that the pickle requests.

A pickle is a program: it can import any module and call any function. With Python's unpickler, a
person with write access to a checkpoint could run code in every job that loads it. So the engine's
own unpickler builds the metadata, and treats DCP's classes as plain records. ``object_pickles``
reads the objects of a checkpoint.
"""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Iterable, Mapping
from enum import Enum
from types import NoneType

import torch
from torch.distributed._shard.sharded_tensor import metadata as old
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_ckpt._core import _native
from torch_ckpt.errors import CorruptionError, UnsupportedError

__all__ = ["MEGATRON_CLASSES", "ForbiddenPickleError", "load_allowed"]


class ForbiddenPickleError(pickle.UnpicklingError):
    """A pickle requests something forbidden. The message names the class or function, if any."""


def load_allowed(pickled: bytes) -> object:
    """Unpickles plain data and the classes that stock DCP writes into ``.metadata``.

    Classes that old versions of Megatron-Core derived from DCP's are unpickled as DCP's classes.

    The function imports nothing. The only method of these classes that it runs is the hash of
    ``MetadataIndex``. Time and memory are linear in ``len(pickled)``, even if the pickle states
    larger lengths. The value has no cycle and a bounded depth, and a walk of it takes linear time.

    Raises ForbiddenPickleError if the pickle requests any other class or function, and ValueError
    if the bytes are not a pickle, or a record has a missing or wrong field.
    """
    try:
        return _native.unpickle_metadata(pickled, _VOCABULARY)
    except UnsupportedError as error:
        raise ForbiddenPickleError(str(error)) from None
    except CorruptionError as error:
        raise ValueError(str(error)) from None


# The vocabulary of ``_native.unpickle_metadata``. Its C++ header documents the entries.

_Types = tuple[type, ...]
_Entry = tuple[object, ...]

_ANY: _Types = ()
_SIZES: _Types = (torch.Size, tuple, list)  # Planners use any of these.


def _record(
    cls: type, fields: dict[str, _Types], *, required: int, hashable: bool = False
) -> tuple[type, _Entry]:
    return cls, ("record", cls, fields, required, hashable)


def _properties(cls: type) -> tuple[type, _Entry]:
    fields: dict[str, _Types] = {
        "dtype": (torch.dtype,),
        "layout": (torch.layout,),
        "requires_grad": (bool,),
        "memory_format": (torch.memory_format,),
        "pin_memory": (bool,),
    }
    # Torch 2.15 adds the strides.
    return _record(cls, {**fields, "strides": (tuple, NoneType)}, required=len(fields))


def _formats(encoding: type[Enum]) -> tuple[type, _Entry]:
    """Returns the memory format of each member, as ``TensorProperties.__setstate__`` decodes it."""
    formats = {
        "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
        "TORCH_CHANNELS_LAST": torch.channels_last,
        "TORCH_PRESERVE_FORMAT": torch.preserve_format,
    }
    return encoding, _member({encoding[name]: value for name, value in formats.items()})


def _member(values: Mapping[Enum, object]) -> _Entry:
    """Returns the entry of an enum. Pickles contain member values, or on Python 3.11.2 names."""
    by_name = {member.name: value for member, value in values.items()}
    return "choice", by_name | {member.value: value for member, value in values.items()}


def _named(entries: Iterable[tuple[type, _Entry]]) -> dict[tuple[str, str], _Entry]:
    return {(cls.__module__, cls.__qualname__): entry for cls, entry in entries}


def _torch_values(kind: type) -> dict[str, object]:
    """Returns pickled name -> value. Omits aliases in ``torch``, such as ``half``."""
    values = {value for value in vars(torch).values() if type(value) is kind}
    return {str(value).removeprefix("torch."): value for value in values}


_METADATA: dict[str, _Types] = {
    "state_dict_metadata": (dict,),
    "planner_data": _ANY,
    "storage_data": _ANY,
    "storage_meta": (StorageMeta, NoneType),
    "version": (str, NoneType),
    # Megatron stores its plans there and reuses them after a restart.
    "all_local_plans": (list, NoneType),
    "mcore_data": (dict, NoneType),  # See frameworks/megatron/flattened.py.
}
_SAVE_PLAN: dict[str, _Types] = {
    "items": (list,),
    "storage_data": _ANY,
    "planner_data": _ANY,
    "usable": (bool,),
    "mcore_data": (dict, NoneType),
}

_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
MEGATRON_CLASSES: dict[tuple[str, str], type] = {
    (_MEGATRON, "MCoreMetadata"): Metadata,
    (_MEGATRON, "MCoreSavePlan"): SavePlan,
}
"""Classes of Megatron-Core until 0.15, and the class of DCP that each extends by a field."""

_PATHS: dict[str, type[pathlib.PurePath]] = {
    "PosixPath": pathlib.PosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,  # From a job on Windows.
    "PureWindowsPath": pathlib.PureWindowsPath,
}

_VOCABULARY: dict[tuple[str, str], _Entry] = {
    **_named(
        [
            _record(Metadata, _METADATA, required=1),
            _record(
                MetadataIndex,
                {"fqn": (str,), "offset": (torch.Size, NoneType), "index": (int, NoneType)},
                required=1,
                hashable=True,
            ),
            _record(
                TensorStorageMetadata,
                {
                    "properties": (TensorProperties, old.TensorProperties),
                    "size": _SIZES,
                    "chunks": (list,),
                },
                required=3,
            ),
            _record(ChunkStorageMetadata, {"offsets": _SIZES, "sizes": _SIZES}, required=2),
            _record(BytesStorageMetadata, {}, required=0),
            _properties(TensorProperties),
            _formats(_MEM_FORMAT_ENCODING),
            # The module of both classes before torch 2.3.
            _properties(old.TensorProperties),
            _formats(old.MEM_FORMAT_ENCODING),
            _record(
                StorageMeta,
                {
                    "checkpoint_id": (str, *_PATHS.values(), NoneType),
                    "save_id": (str, NoneType),
                    "load_id": (str, NoneType),
                    "modules": (list,),
                },
                required=0,
            ),
            _record(
                _StorageInfo,
                {
                    "relative_path": (str,),
                    "offset": (int,),
                    "length": (int,),
                    "transform_descriptors": (list, tuple, NoneType),
                },
                required=3,
            ),
            # The classes of plans.
            _record(SavePlan, _SAVE_PLAN, required=1),
            _record(
                WriteItem,
                {
                    "index": (MetadataIndex,),
                    "type": (WriteItemType,),
                    "bytes_io_data": (NoneType,),
                    "tensor_data": (TensorWriteData, NoneType),
                },
                required=2,
            ),
            _record(
                TensorWriteData,
                {
                    "chunk": (ChunkStorageMetadata,),
                    "properties": (TensorProperties, old.TensorProperties),
                    "size": _SIZES,
                },
                required=3,
            ),
            _record(_StoragePrefix, {"prefix": (str,)}, required=1),
            (WriteItemType, _member({member: member for member in WriteItemType})),
        ]
    ),
    (_MEGATRON, "MCoreMetadata"): _record(Metadata, _METADATA, required=1)[1],
    (_MEGATRON, "MCoreSavePlan"): _record(SavePlan, _SAVE_PLAN, required=1)[1],
    **{(module, "getattr"): ("member", getattr) for module in ("builtins", "__builtin__")},
    ("torch", "Size"): ("sizes", torch.Size),
    ("torch.serialization", "_get_layout"): (
        "choice",
        {f"torch.{name}": layout for name, layout in _torch_values(torch.layout).items()},
    ),
    **{("torch", name): ("value", dtype) for name, dtype in _torch_values(torch.dtype).items()},
    **{
        (module, name): ("text", cls)
        for module in ("pathlib", "pathlib._local")  # "pathlib._local" on Python 3.13.
        for name, cls in _PATHS.items()
    },
}
