"""States that stock DCP saves and resumes, and that a plain tensor or number does not stand for."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import math
import pathlib
import random
import types
import uuid
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Tagged(torch.Tensor):
    """A subclass that wraps nothing."""


class Packed4(torch.nn.Parameter):
    """Like bitsandbytes' ``Params4bit``: bytes of packed numbers, and an attribute beside them."""

    quant_state: Any

    def __new__(cls, data: torch.Tensor, quant_state: Any = None) -> Packed4:
        made: Packed4 = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = quant_state
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "quant_state": self.quant_state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data, self.quant_state = state["data"], state["quant_state"]


class Scaled8(torch.Tensor):
    """Like Transformer Engine's ``Float8Tensor``: bfloat16 to others, bytes and a scale inside."""

    data8: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data8: torch.Tensor, scale: torch.Tensor) -> Scaled8:
        made: Scaled8 = torch.Tensor._make_wrapper_subclass(
            cls, data8.shape, dtype=torch.bfloat16, device=data8.device
        )
        made.data8, made.scale = data8, scale
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return "Scaled8"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return scaled8, (self.data8, self.scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Scaled8:
        return cls(inner["data8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.detach.default:
            return cls(args[0].data8, args[0].scale)
        if func is aten.clone.default:
            return cls(args[0].data8.clone(), args[0].scale.clone())
        if func is aten.copy_.default and all(isinstance(x, Scaled8) for x in args[:2]):
            args[0].data8.copy_(args[1].data8)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        wide = [x.data8.float() * x.scale if isinstance(x, Scaled8) else x for x in args]
        return func(*wide, **(kwargs or {}))


def scaled8(data8: torch.Tensor, scale: torch.Tensor) -> Scaled8:
    return Scaled8(data8, scale)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    rate: float
    steps: list[int]


def equal(a: Any, b: Any) -> bool:
    """Whether two values are of one class and hold the same, tensors and arrays to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if is_traceable_wrapper_subclass(a):
            names, context = a.__tensor_flatten__()
            others, other_context = b.__tensor_flatten__()
            return (
                names == others
                and repr(context) == repr(other_context)
                and all(equal(getattr(a, name), getattr(b, name)) for name in names)
            )
        if a.dtype != b.dtype or a.size() != b.size():
            return False
        one, other = (t.as_subclass(torch.Tensor).contiguous().view(-1) for t in (a, b))
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if isinstance(a, np.ndarray):
        native = a.dtype.newbyteorder("=")  # To which NumPy's own pickles go over.
        alike = native == b.dtype.newbyteorder("=") and a.shape == b.shape
        alike = alike and a.flags.f_contiguous == b.flags.f_contiguous and b.flags.writeable
        if a.dtype.hasobject:
            return alike and a.tolist() == b.tolist()
        return alike and a.astype(native).tobytes() == b.astype(native).tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Generator):
        return a.device == b.device and torch.equal(a.get_state(), b.get_state())
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue() and a.tell() == b.tell()
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(v, b[key]) for key, v in a.items())
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def of_optimizer(name: str) -> Callable[[], dict[str, Any]]:
    """The state of one of torchao's optimizers, after a step."""

    def state() -> dict[str, Any]:
        pytest.importorskip("torchao")
        import torchao.optim

        model = torch.nn.Linear(128, 256)
        optimizer = getattr(torchao.optim, name)(model.parameters(), lr=1e-3)
        model(drawn(4, 128)).square().mean().backward()
        with mock.patch.object(torch, "compile", lambda f, **_: f):  # It takes many seconds.
            optimizer.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    return state


def of_weights(config: str) -> Callable[[], dict[str, Any]]:
    """Weights as torchao quantises them."""

    def state() -> dict[str, Any]:
        pytest.importorskip("torchao")
        from torchao import quantization

        model = torch.nn.Sequential(torch.nn.Linear(128, 256, dtype=torch.bfloat16))
        quantization.quantize_(model, getattr(quantization, config)())
        return {"model": model.state_dict()}

    return state


def of_blocks(name: str, *options: Any) -> Callable[[], dict[str, Any]]:
    """A tensor of torchao that has blocks with scales."""

    def state() -> dict[str, Any]:
        pytest.importorskip("torchao")
        from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor

        make: Any = mx_tensor.MXTensor.to_mx
        if name == "nvfp4":
            make = nvfp4_tensor.NVFP4Tensor.to_nvfp4
        return {"w": make(drawn(32, 64, dtype=torch.bfloat16), *options)}

    return state


def packed(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 256, (6, 4), dtype=torch.uint8).view(dtype)


# Each gives another value at each call; a state of one kind is loaded into another of that kind.
TENSORS: dict[str, Callable[[], dict[str, Any]]] = {
    "a wrapper": lambda: {"w": TwoTensor(drawn(3, 5), drawn(3, 5))},
    "a wrapper of wrappers": lambda: {
        "w": TwoTensor(TwoTensor(drawn(3), drawn(3)), TwoTensor(drawn(3), drawn(3)))
    },
    "a parameter that wraps": lambda: {
        "w": torch.nn.Parameter(TwoTensor(drawn(300, 700), drawn(300, 700)))
    },
    "wrappers beside plain tensors": lambda: {
        "a": drawn(300, 700),
        "w": TwoTensor(drawn(2, 2), drawn(2, 2)),
        "b": drawn(7),
        "v": TwoTensor(drawn(0, 2), drawn(0, 2)),
        "step": random.randrange(100),
    },
    "a subclass that wraps nothing": lambda: {"t": drawn(5).as_subclass(Tagged)},
    "AdamW8bit": of_optimizer("AdamW8bit"),
    "AdamW4bit": of_optimizer("AdamW4bit"),
    "AdamWFp8": of_optimizer("AdamWFp8"),
    "Int8 weights": of_weights("Int8WeightOnlyConfig"),
    "Float8 weights": of_weights("Float8WeightOnlyConfig"),
    "Int8 weights, dynamic": of_weights("Int8DynamicActivationInt8WeightConfig"),
    "MXFP8 weights": of_blocks("mx", torch.float8_e4m3fn, 32),
    "MXFP4 weights": of_blocks("mx", torch.float4_e2m1fn_x2, 32),
    "NVFP4 weights": of_blocks("nvfp4"),
    "bitsandbytes' kind": lambda: {"w": Packed4(packed(torch.uint8), drawn(3))},
    "Transformer Engine's kind": lambda: {"w": Scaled8(packed(torch.float8_e4m3fn), drawn(1)[0])},
    "float4": lambda: {"p": packed(torch.float4_e2m1fn_x2)},
}

ARRAYS: dict[str, Callable[[], Any]] = {
    "array": lambda: np.random.rand(3, 4),
    "Fortran array": lambda: np.asfortranarray(np.random.rand(3, 4)),
    "array without dimensions": lambda: np.array(random.random()),
    "array without elements": lambda: np.zeros((0, 3)),
    "big-endian array": lambda: np.arange(5, dtype=">i4"),
    "array of bool": lambda: np.array([True, False]),
    "array of complex": lambda: np.array([1 + 2j]),
    "array of text": lambda: np.array(["a", "bcd\u20ac"]),
    "array of bytes": lambda: np.array([b"a", b"bc"]),
    "array of dates": lambda: np.array(["2020-01-02", "NaT"], dtype="datetime64[D]"),
    "array of durations": lambda: np.array([3, 4], dtype="timedelta64[25us]"),
    "array of objects": lambda: np.array([1, "a", None, (2.5,)], dtype=object),
    "array of records": lambda: np.array([(1.5, (2, 3))], dtype=[("a", "<f4"), ("b", ">i8", (2,))]),
    "array of aligned records": lambda: np.zeros(
        2, np.dtype([("a", "i1"), ("b", "f8")], align=True)
    ),
    "array of records with objects": lambda: np.array(
        [("x", 1.5), ({"y": 1}, 2.5)], dtype=[("a", "O"), ("b", "f4")]
    ),
    "array of titled records": lambda: np.zeros(
        3, np.dtype({"names": ["a", "b"], "formats": ["f4", "i4"], "titles": ["A", None]})
    ),
    "array of objects in two dimensions": lambda: np.array([[1, "a"], [None, 2.5]], dtype=object).T,
    "random state": lambda: np.random.get_state(),
    "state of a bit generator": lambda: (np.random.default_rng(7).bit_generator.state,),
    "state of MT19937": lambda: (np.random.MT19937(7).state,),
    "scalar": lambda: np.float32(random.random()),
    "scalar bool": lambda: np.bool_(True),
    "scalar text": lambda: np.str_("abc"),
    "empty scalar text": lambda: np.str_(""),
    "scalar date": lambda: np.datetime64("2021-02-03T04:05"),
    "scalar record": lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0],
    "dtype": lambda: np.dtype("<i8"),
    "dtype of records": lambda: np.dtype([("a", "f4"), ("b", "S3")]),
    "class of scalars": lambda: np.float32,
}

OBJECTS: dict[str, Callable[[], Any]] = {
    **ARRAYS,
    "BytesIO": lambda: io.BytesIO(random.randbytes(9)),
    "BytesIO that was read": lambda: _read(io.BytesIO(b"abcdef"), 4),
    "empty bytes": lambda: b"",
    "bytearray": lambda: bytearray(random.randbytes(300)),
    "empty bytearray": lambda: bytearray(),
    "bytes": lambda: random.randbytes(300),
    "datetime": lambda: datetime.datetime(2020, 1, 2, 3, 4, 5, 678901),
    "datetime of a zone": lambda: datetime.datetime.now(datetime.UTC),
    "datetime of a named zone": lambda: datetime.datetime(
        2020, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, minutes=30), "here")
    ),
    "date": lambda: datetime.date(1969, 7, 20),
    "time": lambda: datetime.time(23, 59, 58, 7),
    "timedelta": lambda: datetime.timedelta(days=-3, microseconds=5),
    "path": lambda: pathlib.Path("/data/run/1"),
    "pure path": lambda: pathlib.PurePosixPath("a/b"),
    "Windows path": lambda: pathlib.PureWindowsPath("c:/a"),
    "frozenset": lambda: frozenset({1, "a", (2, frozenset({3}))}),
    "set": lambda: {1, (2, 3)},
    "Counter": lambda: (collections.Counter("aab"),),
    "OrderedDict": lambda: (collections.OrderedDict([("b", 1), ("a", (2, 3))]),),
    "deque": lambda: collections.deque([1, "b", drawn(2)]),
    "bounded deque": lambda: collections.deque([1, 2], maxlen=5),
    "range": lambda: range(3, 90, 4),
    "Decimal": lambda: decimal.Decimal("-1.50E+7"),
    "UUID": lambda: uuid.uuid4(),
    "Namespace": lambda: argparse.Namespace(lr=0.1, layers=[1], model=argparse.Namespace()),
    "SimpleNamespace": lambda: types.SimpleNamespace(a=types.SimpleNamespace(), b=(1,)),
    "Generator": lambda: torch.Generator().manual_seed(random.randrange(1000)),
    "random state of Python": lambda: random.getstate(),
    "large number": lambda: -(1 << 5000),
    "class": lambda: datetime.datetime,
    "arrays and tensors together": lambda: (
        {"a": np.arange(3), "t": drawn(2, 2)},
        [np.float64(math.pi), {frozenset({1}): {range(2)}}],
    ),
    "one array twice": lambda: (lambda array: (array, [array]))(np.random.rand(2)),
}

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "Enum": (lambda: Colour.RED, "resumable_states.Colour"),
    "dataclass": (lambda: Settings(0.5, [1, 2]), "resumable_states.Settings"),
    "within a tuple": (lambda: (1, {"s": Settings(0.5, [])}), "resumable_states.Settings"),
    "fraction": (lambda: fractions.Fraction(1, 3), "fractions.Fraction"),
    "defaultdict": (lambda: (collections.defaultdict(list),), "collections.defaultdict"),
    "NumPy's Generator": (lambda: np.random.default_rng(1), "numpy.random._pcg64.PCG64"),
    "masked array": (lambda: np.ma.array([1.0]), "numpy.ma.core._mareconstruct"),
    "recursive tuple": (lambda: _recursive(), "contains itself"),
    "function": (lambda: math.floor, "math.floor"),
}


def _recursive() -> tuple[list[Any]]:
    value: tuple[list[Any]] = ([],)
    value[0].append(value)
    return value


def _read(stream: io.BytesIO, nbytes: int) -> io.BytesIO:
    stream.read(nbytes)
    return stream
