"""Unpickles the messages of other ranks without running code that they request.

A pickle is a program: it can import any module and call any function. Any process that can read
the store of the process group can connect as a rank and send one. So a message may name only
classes that run no code when their objects are built:

- builtins, other plain classes of the standard library and of torch, and scalars of NumPy
- the classes of DCP's plans and metadata, and classes derived from them
- exceptions, enums, named tuples and dataclasses that define no constructor
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
import re
import sys
import traceback
import types
import uuid
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner, storage
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MAIN_OF_SPAWNED", "allow_in_messages", "allowed_by_user", "main_module", "unpickle"]

T = TypeVar("T")


def unpickle(message: Buffer, sender: str) -> Any:
    """Returns the value that another rank has pickled.

    ``sender``, such as ``"rank 3"``, is for messages. Raises UnsupportedError if the pickle names a
    class or function that is not allowed. On damage, raises the errors of ``pickle.loads``.
    """
    unpickler = _Unpickler(io.BytesIO(message))
    unpickler.sender, unpickler.dtypes = sender, []
    value = unpickler.load()
    dtypes = unpickler.dtypes
    del unpickler
    if any(dtype() is not None for dtype in dtypes):
        raise UnsupportedError(f"{sender} sent an object of numpy.dtype. {_HOW_TO_ALLOW}")
    return value


def allow_in_messages(value: T) -> T:
    """Allows a class or function of this package in messages between ranks. A decorator.

    It must be harmless with any arguments, and objects of the class with any attributes.
    """
    _ALLOWED.add(id(value))
    _KEPT.append(value)
    return value


def allowed_by_user() -> dict[str, Any]:
    """Returns name -> value of the globals from ``torch.serialization.add_safe_globals``.

    Torch itself adds the placements of DTensors, but 2.11 omits strided shards.
    """
    allowed: dict[str, Any] = {}
    for entry in (_StridedShard, *torch.serialization.get_safe_globals()):
        value, name = (
            entry
            if isinstance(entry, tuple)
            else (entry, f"{entry.__module__}.{entry.__qualname__}")
        )
        module, dot, rest = name.partition(".")
        allowed[main_module(module) + dot + rest] = value
    return allowed


def main_module(module: str) -> str:
    """Returns the name of a module, which is ``__main__`` for the main script of any process.

    In processes that ``multiprocessing`` spawns, Python names the main script ``__mp_main__``, and
    both names refer to it.
    """
    return "__main__" if module == MAIN_OF_SPAWNED else module


MAIN_OF_SPAWNED = "__mp_main__"


_HOW_TO_ALLOW = (
    "Messages between ranks must not contain it, because unpickling it may run code. To allow it, "
    "import the class and pass it to torch.serialization.add_safe_globals([...]), on all ranks"
)


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, restricted to allowed classes. It is as fast as ``pickle.loads``."""

    sender: str
    dtypes: list[weakref.ref[_Dtype]]  # The stand-ins for dtypes of NumPy.

    def find_class(self, module: str, name: str) -> Any:
        """Returns the class or function of a name. Raises UnsupportedError if it is not allowed."""
        module = main_module(module)
        full_name = f"{module}.{name}"
        value = _found(module, name)
        if value is not None and full_name not in _REPLACED and _is_allowed(value):
            return value
        by_user = allowed_by_user()
        if full_name in by_user:
            return by_user[full_name]
        if full_name == "numpy.dtype":
            return functools.partial(_new_dtype, self.dtypes)
        if full_name in _REPLACED:
            return _REPLACED[full_name]
        where = "" if module in sys.modules else f" This rank has not imported {module}."
        raise UnsupportedError(
            f"{self.sender} sent an object of {full_name}.{where} {_HOW_TO_ALLOW}"
        )


def _found(module: str, name: str) -> Any:
    """Returns the value of a name in an imported module, or ``None``.

    Runs no code of the module: its ``__getattr__`` may import other modules.
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
    """Returns whether creating, changing and freeing an object runs only generated code."""
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
    """Returns whether a method is handwritten, not generated by Python or ``dataclasses``."""
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
    """Replaces torch's function that unpickles a storage from arbitrary code."""
    try:
        return torch.load(io.BytesIO(archive), weights_only=True)
    except AttributeError as error:  # Torch fails so for dtypes such as uint16.
        raise UnsupportedError("a tensor of this dtype cannot be sent between ranks") from error


def _member_of(kind: Any, name: str) -> Any:
    """Replaces ``getattr``, by which Python 3.11 pickles the members of enums."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise UnsupportedError(f"an attribute of {kind!r}, which is no enum")
    return kind.__members__[name]


class _Dtype:
    """Stands in for a dtype of NumPy, which trusts the state in a pickle."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.code = f"{'>' if state[1] == '>' else '<'}{self.code}"


def _new_dtype(dtypes: list[weakref.ref[_Dtype]], code: str, *_: object) -> _Dtype:
    if re.fullmatch(r"[biufc]\d{1,2}", code) is None:
        raise UnsupportedError(f"a scalar of NumPy's dtype {code}")
    dtype = _Dtype(code)
    dtypes.append(weakref.ref(dtype))
    return dtype


def _numpy_scalar(dtype: Any, data: bytes) -> Any:
    """Replaces the function of NumPy that makes a scalar of any dtype."""
    numpy = sys.modules["numpy"]
    dtype = numpy.dtype(dtype.code if isinstance(dtype, _Dtype) else dtype)
    if dtype.hasobject or len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for {dtype}")
    return numpy.frombuffer(data, dtype)[0]


_REPLACED: dict[str, Any] = {
    "builtins.getattr": _member_of,
    "numpy.dtype": _Dtype,
    **{f"numpy.{core}.multiarray.scalar": _numpy_scalar for core in ("_core", "core")},
    "torch.storage._load_from_bytes": _storage_of,
    **{
        f"torch._utils.{value}": value  # Torch uses these names, although it has no such module.
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
"""Ids of allowed classes and functions, because they are values rather than names."""
