"""Classes of plain data that a checkpoint's objects may hold, and how each is made from its pickle.

A pickle makes an object by a call (REDUCE, NEWOBJ), and may set its state afterwards (BUILD). The
functions here replace these calls. They check every argument, and make the object by its public
constructor, so that no crafted state bypasses the checks of the class.
"""

from __future__ import annotations

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
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["DATA_CLASSES", "NeedsState", "class_named"]


class NeedsState:
    """An object that is made once its state is known.

    Attributes:
        make: Makes it of its state.
        name: Its class, as the pickle names it.
        key: Its place in the unpickler's memo.
    """

    __slots__ = ("key", "make", "name")

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make
        self.name = ""
        self.key: int | None = None


def _need(is_sound: bool) -> None:
    if not is_sound:
        raise ValueError("its arguments or state are not what its pickles have")


def _of_type(kind: type | tuple[type, ...], *values: object) -> None:
    _need(all(isinstance(value, kind) for value in values))


# Builtins and collections.


def _latin1(text: str, encoding: str) -> bytes:
    # Protocol 2 stores bytes as text.
    _of_type(str, text)
    _need(encoding == "latin1")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""  # Protocol 2 stores other bytes as text.


def _bytearray(data: bytes = b"") -> bytearray:
    _of_type(bytes, data)
    return bytearray(data)


def _elements(elements: Any) -> list[Any]:
    _of_type((list, tuple), elements)
    return list(elements)


def _frozenset(elements: Iterable[Any] = ()) -> frozenset[Any]:
    return frozenset(_elements(elements))


def _set(elements: Iterable[Any] = ()) -> set[Any]:
    return set(_elements(elements))


def _range(start: int, stop: int, step: int) -> range:
    _of_type(int, start, stop, step)
    return range(start, stop, step)


def _ordered_dict(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    _of_type((list, tuple), items)
    return collections.OrderedDict(items)


def _counter(counts: Any = None) -> collections.Counter[Any]:
    _of_type((dict, type(None)), counts)
    return collections.Counter(counts)


def _deque(elements: Any = (), maxlen: int | None = None) -> collections.deque[Any]:
    _of_type((list, tuple), elements)
    _of_type((int, type(None)), maxlen)
    return collections.deque(elements, maxlen)


def _bytes_io() -> NeedsState:
    def make(state: Any) -> io.BytesIO:
        data, position, attributes = state
        _of_type(bytes, data)
        _of_type(int, position)
        _need(position >= 0 and not attributes)
        stream = io.BytesIO(data)
        stream.seek(position)
        return stream

    return NeedsState(make)


# Dates, numbers and names.


def _date(state: bytes) -> datetime.date:
    _of_type(bytes, state)
    high, low, month, day = state
    return datetime.date(high * 256 + low, month, day)


def _time(state: bytes, zone: datetime.tzinfo | None = None) -> datetime.time:
    _of_type(bytes, state)
    _of_type((datetime.timezone, type(None)), zone)
    hour, minute, second, *micro = state
    return datetime.time(hour, minute, second, _micro(micro), zone)


def _datetime(state: bytes, zone: datetime.tzinfo | None = None) -> datetime.datetime:
    _of_type(bytes, state)
    time = _time(state[4:], zone)
    return datetime.datetime.combine(_date(state[:4]), time)


def _micro(digits: list[int]) -> int:
    high, middle, low = digits
    return (high * 256 + middle) * 256 + low


def _timedelta(days: int, seconds: int, microseconds: int) -> datetime.timedelta:
    _of_type(int, days, seconds, microseconds)
    return datetime.timedelta(days, seconds, microseconds)


def _timezone(offset: datetime.timedelta, *name: str) -> datetime.timezone:
    _of_type(datetime.timedelta, offset)
    _of_type(str, *name)
    return datetime.timezone(offset, *name)


def _decimal(digits: str) -> decimal.Decimal:
    _of_type(str, digits)
    return decimal.Decimal(digits)


def _uuid() -> NeedsState:
    def make(state: Any) -> uuid.UUID:
        _of_type(dict, state)
        _of_type(int, state["int"])
        return uuid.UUID(int=state["int"])

    return NeedsState(make)


def _path(kind: type[pathlib.PurePath], *parts: str) -> pathlib.PurePath:
    _of_type(str, *parts)
    return kind(*parts)


# torch.Generator.


def _generator(device: torch.device) -> NeedsState:
    _of_type(torch.device, device)

    def make(state: Any) -> torch.Generator:
        _, _, tensor = state  # The seed and the offset are in the tensor, too.
        _need(type(tensor) is torch.Tensor)
        generator = torch.Generator(device)
        generator.set_state(tensor)
        return generator

    return NeedsState(make)


def _sparse_tensor(layout: torch.layout, data: Any) -> torch.Tensor:
    # Torch itself validates none of its numbers.
    if layout is torch.sparse_coo:
        indices, values, size, *is_coalesced = data
        return torch.sparse_coo_tensor(
            indices, values, size, check_invariants=True, is_coalesced=(is_coalesced or [None])[0]
        )
    compressed, plain, values, size = data
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size, layout=layout, check_invariants=True
    )


# NumPy. Its own ``__setstate__`` of arrays and dtypes believes what it is given: with a dtype whose
# flags deny that it holds objects, bytes of the file become pointers.


def _numpy() -> Any:
    return importlib.import_module("numpy")


def _array(kind: object, shape: object, typecode: object) -> NeedsState:
    np = _numpy()
    _need(kind is np.ndarray)

    def make(state: Any) -> Any:
        *version, shape, dtype, is_fortran, data = state
        _need(len(version) <= 1)
        _of_type(np.dtype, dtype)
        _of_type(tuple, shape)
        _of_type(int, *shape)
        _need(all(length >= 0 for length in shape))
        order = "F" if is_fortran else "C"
        if dtype.hasobject:
            _of_type(list, data)
            _need(len(data) == math.prod(shape))
            flat = np.empty(len(data), dtype)
            for at, element in enumerate(data):
                flat[at] = element
            return flat.reshape(shape).copy(order)
        _of_type(bytes, data)
        return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order)

    return NeedsState(make)


_DTYPE = re.compile(r"[?OSUV]\d{0,10}|[biufcmM]\d{1,2}")
_UNIT = re.compile(r"[A-Za-zμ]{1,7}")


_ALIGNED_STRUCT = 0x80  # NPY_ALIGNED_STRUCT


def _dtype(code: str, align: object = False, copy: object = True) -> NeedsState:
    _of_type(str, code)
    _need(_DTYPE.fullmatch(code) is not None)

    def make(state: Any) -> Any:
        np = _numpy()
        _, byte_order, subarray, names, fields, nbytes, _, flags, *more = state
        _need(byte_order in ("<", ">", "=", "|"))
        if subarray is not None:
            base, shape = subarray
            _of_type(np.dtype, base)
            _of_type(int, *shape)
            return np.dtype((base, tuple(shape)))
        if names is not None:
            _of_type(str, *names)
            placed = [fields[name] for name in names]  # Dtype and offset, and maybe a title.
            _of_type(np.dtype, *(field[0] for field in placed))
            spec = {
                "names": list(names),
                "formats": [field[0] for field in placed],
                "offsets": [field[1] for field in placed],
                "itemsize": nbytes,
            }
            if any(len(field) > 2 for field in placed):
                spec["titles"] = [field[2] if len(field) > 2 else None for field in placed]
            return np.dtype(spec, align=bool(flags & _ALIGNED_STRUCT))
        dtype = np.dtype(code)
        if more and isinstance(more[0], tuple):  # Dates have a unit, and a count of it.
            unit, count = more[0][1][:2]
            unit = unit.decode() if isinstance(unit, bytes) else unit
            _of_type(int, count)
            _need(_UNIT.fullmatch(unit) is not None)
            if unit != "generic":
                dtype = np.dtype(f"{code}[{count}{unit}]")
        return dtype if byte_order in "|=" else dtype.newbyteorder(byte_order)

    return NeedsState(make)


def _scalar(dtype: Any, data: bytes = b"") -> Any:
    np = _numpy()
    _of_type(np.dtype, dtype)
    _of_type(bytes, data)
    _need(not dtype.hasobject and len(data) == dtype.itemsize)
    if not data:
        return dtype.type()  # An empty text.
    return np.frombuffer(data, dtype, count=1).copy()[0]


def _no_call(*_: object) -> Any:
    raise ValueError("it is a value, and may not be called")


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
    "uuid.UUID": _uuid,
    "torch._C.Generator": _generator,
    "torch._utils._rebuild_sparse_tensor": _sparse_tensor,
    "numpy.ndarray": _no_call,
    "numpy.dtype": _dtype,
    **{
        f"numpy.{core}.multiarray.{name}": make
        for core in ("_core", "core")  # The latter before NumPy 2.
        for name, make in (("_reconstruct", _array), ("scalar", _scalar))
    },
    **{f"numpy.{name}": _no_call for name in _SCALAR_CLASSES},
    **{
        f"{module}.{name}": functools.partial(_path, kind)
        for module in ("pathlib", "pathlib._local")  # The latter on Python 3.13.
        for name, kind in _PATHS.items()
    },
}
"""By the names that pickles have: what replaces a call. README lists the classes."""


@functools.cache
def class_named(name: str) -> object:
    """The class or function itself, which an object may hold as a value.

    Args:
        name: One of :data:`DATA_CLASSES`.

    Raises:
        ImportError: NumPy is not installed.
    """
    module, _, attribute = name.rpartition(".")
    if module == "numpy.core.multiarray":  # Importing it warns where NumPy has moved it.
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module("numpy._core.multiarray"), attribute)
    if module == "pathlib._local":
        module = "pathlib"
    return getattr(importlib.import_module(module), attribute)
