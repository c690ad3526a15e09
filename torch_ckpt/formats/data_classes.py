"""Plain data classes that objects in a checkpoint may contain, and how to build each one.

A pickle builds an object by a call (REDUCE, NEWOBJ) and may then set its state (BUILD). The
functions in this module replace these calls. They check every argument and call the public
constructor of the class, so a crafted state cannot bypass the checks of the class.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import functools
import importlib
import io
import math
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["DATA_CLASSES", "WITH_ATTRIBUTES", "NeedsState", "class_named", "set_attributes"]


class NeedsState:
    """Placeholder for an object that ``make`` builds from its state.

    ``nbytes`` returns the bytes that ``make`` allocates in addition to the state. ``key`` is the
    key of the object in the unpickler's memo.
    """

    __slots__ = ("key", "make", "name", "nbytes")

    def __init__(
        self, make: Callable[[Any], Any], nbytes: Callable[[Any], int] = lambda _: 0
    ) -> None:
        self.make = make
        self.nbytes = nbytes
        self.name = ""
        self.key: int | None = None


def _require(is_valid: bool) -> None:
    if not is_valid:
        raise ValueError("its arguments or state differ from those that its class pickles")


def _require_type(kind: type | tuple[type, ...], *values: object) -> None:
    _require(all(isinstance(value, kind) for value in values))


# Builtins and collections.


def _latin1(text: str, encoding: str) -> bytes:
    # Protocol 2 pickles bytes as text.
    _require_type(str, text)
    _require(encoding == "latin1")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""  # Protocol 2 pickles all other bytes as text.


def _bytearray(data: bytes = b"") -> bytearray:
    _require_type(bytes, data)
    return bytearray(data)


def _elements(elements: Any) -> list[Any]:
    _require_type((list, tuple), elements)
    return list(elements)


def _frozenset(elements: Iterable[Any] = ()) -> frozenset[Any]:
    return frozenset(_elements(elements))


def _set(elements: Iterable[Any] = ()) -> set[Any]:
    return set(_elements(elements))


def _range(start: int, stop: int, step: int) -> range:
    _require_type(int, start, stop, step)
    return range(start, stop, step)


def _ordered_dict(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    _require_type((list, tuple), items)
    return collections.OrderedDict(items)


def _counter(counts: Any = None) -> collections.Counter[Any]:
    _require_type((dict, type(None)), counts)
    return collections.Counter(counts)


def _size(sizes: Iterable[int] = ()) -> torch.Size:
    return torch.Size(_elements(sizes))


def _deque(elements: Any = (), maxlen: int | None = None) -> collections.deque[Any]:
    _require_type((list, tuple), elements)
    _require_type((int, type(None)), maxlen)
    return collections.deque(elements, maxlen)


def _bytes_io() -> NeedsState:
    def make(state: Any) -> io.BytesIO:
        data, position, attributes = state
        _require_type(bytes, data)
        _require_type(int, position)
        _require(position >= 0 and not attributes)
        stream = io.BytesIO(data)
        stream.seek(position)
        return stream

    return NeedsState(make)


# Dates, numbers and names.


def _date(state: bytes) -> datetime.date:
    _require_type(bytes, state)
    high, low, month, day = state
    return datetime.date(high * 256 + low, month, day)


def _time(state: bytes, zone: datetime.tzinfo | None = None) -> datetime.time:
    _require_type(bytes, state)
    _require_type((datetime.timezone, type(None)), zone)
    hour, minute, second, *micro = state
    return datetime.time(hour, minute, second, _micro(micro), zone)


def _datetime(state: bytes, zone: datetime.tzinfo | None = None) -> datetime.datetime:
    _require_type(bytes, state)
    time = _time(state[4:], zone)
    return datetime.datetime.combine(_date(state[:4]), time)


def _micro(digits: list[int]) -> int:
    high, middle, low = digits
    return (high * 256 + middle) * 256 + low


def _timedelta(days: int, seconds: int, microseconds: int) -> datetime.timedelta:
    _require_type(int, days, seconds, microseconds)
    return datetime.timedelta(days, seconds, microseconds)


def _timezone(offset: datetime.timedelta, *name: str) -> datetime.timezone:
    _require_type(datetime.timedelta, offset)
    _require_type(str, *name)
    return datetime.timezone(offset, *name)


def _decimal(digits: str) -> decimal.Decimal:
    _require_type(str, digits)
    return decimal.Decimal(digits)


def _uuid() -> NeedsState:
    def make(state: Any) -> uuid.UUID:
        _require_type(dict, state)
        _require_type(int, state["int"])
        return uuid.UUID(int=state["int"])

    return NeedsState(make)


def _path(kind: type[pathlib.PurePath], *components: str) -> pathlib.PurePath:
    _require_type(str, *components)
    return kind(*components)


# Objects with attributes of any name.

WITH_ATTRIBUTES = (argparse.Namespace, types.SimpleNamespace, collections.OrderedDict)
"""Classes whose state is a dict of attributes."""


def set_attributes(value: Any, state: Any) -> None:
    """Sets the attributes of an object of :data:`WITH_ATTRIBUTES`.

    Raises ValueError if the state is not a dict of attributes, or an attribute would replace a
    method that Python or the class calls.
    """
    _require_type(dict, state)
    _require_type(str, *state)
    _require(not any(name.startswith("__") or hasattr(type(value), name) for name in state))
    vars(value).update(state)


def _namespace(kind: type[Any]) -> Any:
    return kind()


# torch.Generator.


def _generator(device: torch.device) -> NeedsState:
    _require_type(torch.device, device)

    def make(state: Any) -> torch.Generator:
        _, _, tensor = state  # The tensor includes the seed and the offset.
        _require(type(tensor) is torch.Tensor)
        generator = torch.Generator(device)
        generator.set_state(tensor)
        return generator

    return NeedsState(make)


def _sparse_tensor(layout: torch.layout, data: Any) -> torch.Tensor:
    # The original function does not validate indices or sizes.
    _require_type(tuple, data)
    if layout is torch.sparse_coo:
        indices, values, size, *is_coalesced = data
        _require_type(torch.Tensor, values)
        return torch.sparse_coo_tensor(
            indices,
            values,
            size,
            check_invariants=True,
            is_coalesced=(is_coalesced or [None])[0],
            device=values.device,
        )
    compressed, plain, values, size = data
    _require_type(torch.Tensor, values)
    return torch.sparse_compressed_tensor(
        compressed,
        plain,
        values,
        size,
        layout=layout,
        check_invariants=True,
        device=values.device,
    )


# NumPy. The ``__setstate__`` of its arrays and dtypes does not validate the state. If the flags of
# an object dtype deny that its elements are objects, bytes of the file become pointers.


def _numpy() -> Any:
    return importlib.import_module("numpy")


def _array(kind: object, shape: object, typecode: object) -> NeedsState:
    np = _numpy()
    _require(kind is np.ndarray)

    def nbytes(state: Any) -> int:
        # The dtype of objects may have elements of any length.
        *_, dtype, _, data = state
        has_elements = isinstance(dtype, np.dtype) and isinstance(data, list)
        return len(data) * dtype.itemsize if has_elements else 0

    def make(state: Any) -> Any:
        *version, shape, dtype, is_fortran, data = state
        _require(len(version) <= 1)
        _require_type(np.dtype, dtype)
        _require_type(tuple, shape)
        _require_type(int, *shape)
        _require(all(length >= 0 for length in shape))
        order = "F" if is_fortran else "C"
        if dtype.hasobject:
            _require_type(list, data)
            _require(len(data) == math.prod(shape))
            flat = np.empty(len(data), dtype)
            for position, element in enumerate(data):
                flat[position] = element
            return flat.reshape(shape).copy(order)
        _require_type(bytes, data)
        return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order)

    return NeedsState(make, nbytes)


_DTYPE = re.compile(r"[?OSUV]\d{0,10}|[biufcmM]\d{1,2}")
_UNIT = re.compile(r"[A-Za-zμ]{1,7}")


_ALIGNED_STRUCT = 0x80  # NPY_ALIGNED_STRUCT


def _dtype(code: str, align: object = False, copy: object = True) -> NeedsState:
    _require_type(str, code)
    _require(_DTYPE.fullmatch(code) is not None)

    def make(state: Any) -> Any:
        np = _numpy()
        _, byte_order, subarray, names, fields, nbytes, _, flags, *more = state
        _require(byte_order in ("<", ">", "=", "|"))
        if subarray is not None:
            base, shape = subarray
            _require_type(np.dtype, base)
            _require_type(tuple, shape)
            _require_type(int, *shape)
            return np.dtype((base, tuple(shape)))
        if names is not None:
            _require_type(tuple, names)
            _require_type(str, *names)
            members = [fields[name] for name in names]  # Dtype, offset and optional title.
            _require_type(np.dtype, *(field[0] for field in members))
            spec = {
                "names": list(names),
                "formats": [field[0] for field in members],
                "offsets": [field[1] for field in members],
                "itemsize": nbytes,
            }
            if any(len(field) > 2 for field in members):
                spec["titles"] = [field[2] if len(field) > 2 else None for field in members]
            return np.dtype(spec, align=bool(flags & _ALIGNED_STRUCT))
        dtype = np.dtype(code)
        if more and isinstance(more[0], tuple):  # Dates and durations have a unit and a multiple.
            unit, count = more[0][1][:2]
            unit = unit.decode() if isinstance(unit, bytes) else unit
            _require_type(int, count)
            _require(_UNIT.fullmatch(unit) is not None)
            if unit != "generic":
                dtype = np.dtype(f"{code}[{count}{unit}]")
        return dtype if byte_order in "|=" else dtype.newbyteorder(byte_order)

    return NeedsState(make)


def _scalar(dtype: Any, data: bytes = b"") -> Any:
    np = _numpy()
    _require_type(np.dtype, dtype)
    _require_type(bytes, data)
    _require(not dtype.hasobject and len(data) == dtype.itemsize)
    if not data:
        return dtype.type()  # An empty string.
    return np.frombuffer(data, dtype, count=1).copy()[0]


def _no_call(*_: object) -> Any:
    raise ValueError("it must not be called")


_SCALAR_CLASSES = (
    *("bool", "bool_", "int8", "int16", "int32", "int64", "longlong"),
    *("uint8", "uint16", "uint32", "uint64", "ulonglong"),
    *("float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"),
)

_PATHS: dict[str, type[pathlib.PurePath]] = {
    "PosixPath": type(pathlib.Path()),
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}

DATA_CLASSES: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _latin1,
    "argparse.Namespace": functools.partial(_namespace, argparse.Namespace),
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _no_bytes,
    "builtins.frozenset": _frozenset,
    "builtins.set": _set,
    "builtins.range": _range,
    "collections.Counter": _counter,
    "collections.OrderedDict": _ordered_dict,
    "collections.deque": _deque,
    "_io.BytesIO": _bytes_io,
    "datetime.date": _date,
    "datetime.time": _time,
    "datetime.datetime": _datetime,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    "decimal.Decimal": _decimal,
    "types.SimpleNamespace": functools.partial(_namespace, types.SimpleNamespace),
    "uuid.UUID": _uuid,
    "torch.Size": _size,
    "torch._C.Generator": _generator,
    "torch._utils._rebuild_sparse_tensor": _sparse_tensor,
    "numpy.ndarray": _no_call,
    "numpy.dtype": _dtype,
    **{
        f"numpy.{core}.multiarray.{name}": make
        for core in ("_core", "core")  # "core" before NumPy 2.
        for name, make in (("_reconstruct", _array), ("scalar", _scalar))
    },
    **{f"numpy.{name}": _no_call for name in _SCALAR_CLASSES},
    **{
        f"{module}.{name}": functools.partial(_path, kind)
        for module in ("pathlib", "pathlib._local")  # "pathlib._local" on Python 3.13.
        for name, kind in _PATHS.items()
    },
}
"""Global name in a pickle -> the function that replaces a call of it. README lists the classes."""


@functools.cache
def class_named(name: str) -> object:
    """Returns the class or function of a key of :data:`DATA_CLASSES`, for objects that store it.

    Raises ImportError if NumPy is not installed.
    """
    module, _, attribute = name.rpartition(".")
    if module == "numpy.core.multiarray":  # NumPy 2 warns on its import.
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module("numpy._core.multiarray"), attribute)
    if module == "pathlib._local":
        module = "pathlib"
    return getattr(importlib.import_module(module), attribute)
