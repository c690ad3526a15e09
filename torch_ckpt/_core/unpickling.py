"""Unpickles the messages of other ranks without running code that they request.

A pickle is a program: it can import any module and call any function. Anybody who can read the
store of the process group can connect as a rank and send one. So a message may name only classes
whose objects are built without running code of their own:

- builtins, and other plain classes of the standard library and of torch
- the classes of DCP's plans and metadata, and classes derived from them
- exceptions, enums, named tuples and dataclasses without a constructor of their own
- classes of this package that it allows by :func:`allow_in_messages`
- classes that the user allows by ``torch.serialization.add_safe_globals``

They must be in a module that this process has imported already. No function is allowed, except
those that rebuild tensors.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import pickle
import sys
import traceback
import types
import uuid
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner, storage
from typing_extensions import Buffer

from torch_ckpt.errors import UnsupportedError

__all__ = ["allow_in_messages", "allowed_by_user", "unpickle"]

T = TypeVar("T")


def unpickle(message: Buffer, sender: str) -> Any:
    """Returns the value that another rank has pickled.

    Args:
        message: The pickle.
        sender: Who sent it, for messages, such as ``"rank 3"``.

    Raises:
        UnsupportedError: The pickle names a class or function that is not allowed.
        Exception: Any error that ``pickle.loads`` raises on damage.
    """
    unpickler = _Unpickler(io.BytesIO(message))
    unpickler.sender = sender
    return unpickler.load()


def allow_in_messages(value: T) -> T:
    """Allows a class or function of this package in messages between ranks. A decorator.

    It must do no harm with any arguments, and objects of the class with any attributes.
    """
    _ALLOWED.add(id(value))
    _KEPT.append(value)
    return value


def allowed_by_user() -> dict[str, Any]:
    """Returns name -> value of the globals from ``torch.serialization.add_safe_globals``."""
    allowed = {}
    for entry in torch.serialization.get_safe_globals():
        value, name = (
            entry
            if isinstance(entry, tuple)
            else (entry, f"{entry.__module__}.{entry.__qualname__}")
        )
        allowed[name] = value
    return allowed


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, restricted to allowed classes. Its speed is that of ``pickle.loads``."""

    sender = ""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the class or function of a name.

        Raises:
            UnsupportedError: The name is not allowed.
        """
        full_name = f"{module}.{name}"
        value = _REPLACED.get(full_name)
        if value is not None:
            return value
        value = _found(module, name)
        if value is not None and _is_allowed(value):
            return value
        by_user = allowed_by_user()
        if full_name in by_user:
            return by_user[full_name]
        where = "" if module in sys.modules else f", and does not import {module} for it"
        raise UnsupportedError(
            f"{self.sender} sent an object of {full_name}, which this rank refuses, because "
            f"unpickling it may run code{where}; to allow it, import the class on all ranks, and "
            f"pass it to torch.serialization.add_safe_globals([...])"
        )


def _found(module: str, name: str) -> Any:
    """Returns what a name means in a module that is imported; ``None`` if it means nothing.

    It is looked up without running code: the ``__getattr__`` of a module may import others.
    """
    value: Any = sys.modules.get(module)
    if not isinstance(value, types.ModuleType):
        return None
    for part in name.split("."):
        if not isinstance(value, type | types.ModuleType):
            return None
        value = vars(value).get(part)
        if isinstance(value, types.ModuleType):
            return None
    return value


def _is_allowed(value: Any) -> bool:
    if id(value) in _ALLOWED or isinstance(value, _CONSTANTS):
        return True
    return isinstance(value, type) and _is_plain(value)


@functools.lru_cache(maxsize=4096)
def _is_plain(kind: type) -> bool:
    """Returns whether building, changing and freeing an object runs no code but generated code."""
    if hasattr(kind, "__del__"):
        return False
    if issubclass(kind, _DCP_CLASSES):
        return True
    if issubclass(kind, BaseException):
        return all(issubclass(base, BaseException) for base in kind.__mro__[:-1])
    if issubclass(kind, enum.Enum):
        return True
    is_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    if not is_tuple and not dataclasses.is_dataclass(kind):
        return False
    return not hasattr(kind, "__post_init__") and not any(
        _is_written(getattr(kind, name, None)) for name in _CALLED
    )


def _is_written(function: Any) -> bool:
    """Returns whether a person has written a method, and not Python or ``dataclasses``."""
    if not isinstance(function, types.FunctionType):
        return False
    return (
        function.__code__.co_filename != "<string>" and function.__module__ not in _STANDARD_METHODS
    )


_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_CALLED = ("__new__", "__init__", "__setstate__", "__setattr__")
_STANDARD_METHODS = ("dataclasses", "enum", "typing")

_DCP_CLASSES = tuple(
    kind
    for module in (planner, metadata, storage, filesystem)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and kind.__module__ == module.__name__
    and dataclasses.is_dataclass(kind)
)


def _storage_of(archive: bytes) -> Any:
    """Replaces the function of torch that unpickles a storage by any means."""
    try:
        return torch.load(io.BytesIO(archive), weights_only=True)
    except AttributeError as error:  # Torch fails so for dtypes such as uint16.
        raise UnsupportedError("a tensor of this dtype cannot be sent between ranks") from error


def _member_of(kind: Any, name: str) -> Any:
    """Replaces ``getattr``, by which Python 3.11 pickles the members of enums."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise UnsupportedError(f"an attribute of {kind!r}, which is no enum")
    return kind.__members__[name]


_REPLACED: dict[str, Any] = {
    "builtins.getattr": _member_of,
    "torch.storage._load_from_bytes": _storage_of,
    **{
        f"torch._utils.{value}": value  # So torch names them, although it has no such module.
        for value in vars(torch).values()
        if isinstance(value, _CONSTANTS)
    },
}
"""Name in a pickle -> value."""

_KEPT: list[Any] = [
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, object, range, set),
    *(slice, str, tuple, Ellipsis, NotImplemented),
    *(collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, io.BytesIO, uuid.UUID),
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath),
    *(traceback.FrameSummary, traceback.StackSummary),
    *(torch.Size, torch.Tensor, torch.device, torch.nn.Parameter, torch.serialization._get_layout),
    *(torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3),
    *(torch._utils._rebuild_parameter, torch._utils._rebuild_meta_tensor_no_storage),
]
_ALLOWED = {id(value) for value in _KEPT}
"""Ids of allowed classes and functions. They are not looked up by name, as they are values."""
