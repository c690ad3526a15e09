"""Messages between ranks carry what plans and errors are made of, and name no other class."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import sys
import types
import typing
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
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
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt.coordination.portable import pickled, unpickled, unpickled_error
from torch_ckpt.errors import CheckpointError, RankTimeoutError, StorageError, UnsupportedError


class Color(enum.Enum):
    RED = "red"


class Flags(enum.Flag):
    A = 1
    B = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass(frozen=True)
class Plain:
    a: int
    b: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: int


@dataclasses.dataclass(frozen=True)
class OwnPlan(SavePlan):
    """A plan of a custom planner, which may have a constructor."""

    extra: str = ""

    def __post_init__(self) -> None:
        assert isinstance(self.extra, str)


class Pair(typing.NamedTuple):
    a: int
    b: int


Point = collections.namedtuple("Point", "x y")


class Outer:
    class Loss(Exception):
        pass

    @dataclasses.dataclass
    class Inner:
        a: int


class OwnError(ValueError):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclasses.dataclass
class WithConstructor:
    a: int

    def __post_init__(self) -> None:
        raise AssertionError("a constructor ran")


@dataclasses.dataclass
class WithEnd:
    a: int

    def __del__(self) -> None:
        """Runs when a receiver drops the object."""


@dataclasses.dataclass
class WithState:
    a: int

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a method ran")


class Ordinary:
    pass


class WithNew(Pair):
    def __new__(cls, *_: Any) -> WithNew:
        raise AssertionError("a constructor ran")


class Mixed(ValueError, Ordinary):
    """Inherits methods that no exception has."""


def item() -> WriteItem:
    size = torch.Size([2, 3])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.bfloat16), size)
    return WriteItem(MetadataIndex("w", torch.Size([0, 0]), 0), WriteItemType.SHARD, data)


def read() -> ReadItem:
    at = torch.Size([0])
    index = MetadataIndex("w")
    return ReadItem(LoadItemType.TENSOR, index, at, index, at, torch.Size([4]))


VALUES = [
    *(None, True, 1, 2**100, 1.5, 1j, "text", b"bytes", bytearray(b"1"), [1], (1,), {"a": [{}]}),
    *({1}, frozenset({2}), range(3), slice(1, 2), ..., NotImplemented),
    *(collections.OrderedDict(a=1), collections.Counter("aab"), collections.deque([1], 3)),
    collections.defaultdict(list, a=[1]),
    *(datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(1)),
    *(decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=7), pathlib.Path("/a/b")),
    *(Color.RED, Flags.A, Flags.A | Flags.B, Level.LOW, Plain(1, Plain(2)), Slotted(3)),
    *(Pair(1, 2), Point(1, 2), Outer.Inner(4), Plain, Color),
    *(torch.float32, torch.strided, torch.sparse_coo, torch.preserve_format, torch.device("cpu")),
    *(torch.Size([1, 2]), torch.per_tensor_affine, torch.int8, torch.channels_last),
    *(
        np.float64(1.5),
        np.int64(3),
        np.bool_(True),
        np.float16(2),
        np.complex64(1j),
        [np.int8(1)] * 2,
    ),
    *(SavePlan([item()]), LoadPlan([read()]), OwnPlan([item()], extra="x")),
    WriteResult(MetadataIndex("w"), 12, _StorageInfo("file", 0, 12, ["zstd"])),
    Metadata(
        {
            "w": TensorStorageMetadata(TensorProperties(), torch.Size([1]), []),
            "o": BytesStorageMetadata(),
        },
        {"w": ("w",)},
        {MetadataIndex("w"): _StorageInfo("file", 0, 1)},
        StorageMeta("path", "id", []),
    ),
]


@pytest.fixture(autouse=True)
def no_safe_globals() -> Iterator[None]:
    """Programs such as ``transformers`` add classes of their own when they are imported."""
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(added)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_arrive(value: Any) -> None:
    arrived = unpickled(pickled(value), 1)
    assert type(arrived) is type(value)
    assert arrived == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3)[:, 1:],
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(3, dtype=torch.bfloat16),
        torch.empty(2, device="meta"),
        torch.ones(2, 2).T,
    ],
)
def test_tensors_arrive(tensor: torch.Tensor) -> None:
    arrived = unpickled(pickled({"t": tensor}), 1)["t"]
    assert type(arrived) is type(tensor)
    assert arrived.stride() == tensor.stride()
    if tensor.device.type != "meta":
        assert arrived.equal(tensor)


ERRORS = [
    *(KeyError("a"), OSError(5, "why"), OwnError(3), Outer.Loss("a"), KeyboardInterrupt()),
    *(StorageError("full", 28), RankTimeoutError("late", [1], "planning"), CheckpointError("x")),
    *(
        pickle.UnpicklingError("x"),
        torch.OutOfMemoryError("x"),
        UnicodeDecodeError("a", b"", 0, 1, ""),
    ),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_errors_arrive(error: BaseException) -> None:
    arrived, trace = unpickled_error(pickled(_wrap_exception(error)), 1)
    assert type(arrived) is type(error)
    assert repr(arrived) == repr(error)
    assert list(trace) == []
    failed = unpickled(pickled(CheckpointException("plan", {3: _wrap_exception(error)})), 0)
    assert type(failed.failures[3][0]) is type(error)


@pytest.fixture
def library() -> Iterator[types.ModuleType]:
    """A module that only the sender has imported."""
    library = types.ModuleType("a_library_of_one_rank")
    exec("class Throttled(OSError):\n    pass\nclass Value:\n    pass", vars(library))
    sys.modules[library.__name__] = library
    yield library
    sys.modules.pop(library.__name__, None)


def test_the_text_of_an_error_arrives_where_its_class_is_unknown(library: Any) -> None:
    error = library.Throttled("slow down")
    error.add_note("in bucket 3")
    sent = pickled(_wrap_exception(error))
    del sys.modules[library.__name__]
    arrived, _ = unpickled_error(sent, 1)
    assert type(arrived) is CheckpointError
    assert str(arrived) == "Throttled: slow down\nin bucket 3"


REFUSED = [
    *(
        np.ones(2),
        np.dtype("f8"),
        [np.float64(1), np.dtype("f8")],
        np.str_("a"),
        np.datetime64(1, "s"),
    ),
    *(Ordinary(), WithConstructor.__new__(WithConstructor), WithState(1), WithEnd(1)),
    *(Ordinary, print, sys.exit, tuple.__new__(WithNew, (1, 2)), [Mixed("x")], io.StringIO("x")),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_values_of_other_classes_are_refused(value: Any) -> None:
    error, _ = unpickled(pickled(value), 7)  # type: ignore[misc]
    assert isinstance(error, UnsupportedError)
    if not str(error).startswith("a scalar of NumPy's dtype"):
        assert "rank 7 sent an object of " in str(error)
        assert "torch.serialization.add_safe_globals" in str(error)


def test_a_class_that_the_user_allows_arrives() -> None:
    with torch.serialization.safe_globals([Ordinary]):
        assert type(unpickled(pickled(Ordinary()), 1)) is Ordinary


def test_arrays_that_the_user_allows_arrive() -> None:
    scalar, reconstruct = np.float64(1).__reduce__()[0], np.ones(1).__reduce__()[0]
    classes: list[Any] = [scalar, reconstruct, np.ndarray, np.dtype]
    with torch.serialization.safe_globals(classes):
        arrived = unpickled(pickled([np.arange(3), np.float64(2), np.dtype("i4")]), 1)
    assert arrived[0].tolist() == [0, 1, 2]
    assert arrived[1:] == [2.0, np.dtype("i4")]


def test_a_class_of_a_module_that_is_not_imported_is_refused_and_not_imported(library: Any) -> None:
    sent = pickled([library.Throttled("x")])
    del sys.modules[library.__name__]
    error, _ = unpickled(sent, 1)
    assert "has not imported a_library_of_one_rank" in str(error)
    assert library.__name__ not in sys.modules


def test_attributes_of_other_things_than_enums_are_refused() -> None:
    class Attribute:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (pathlib.Path, "touch")

    error, _ = unpickled(pickled(Attribute()), 1)
    assert isinstance(error, UnsupportedError)


@pytest.mark.parametrize("data", [b"", b"junk", b"\x80\x04", b"\x80\x04N", pickle.dumps([1])[:-2]])
def test_damaged_messages_are_errors_that_name_the_rank(data: bytes) -> None:
    error, _ = unpickled(data, 5)
    assert type(error) is CheckpointError
    assert "cannot unpickle what rank 5 sent" in str(error)


def test_an_extension_code_names_no_other_class() -> None:
    copyreg.add_extension(Ordinary.__module__, "Ordinary", 77)
    try:
        error, _ = unpickled(pickle.dumps(Ordinary()), 1)
        assert isinstance(error, UnsupportedError)
    finally:
        copyreg.remove_extension(Ordinary.__module__, "Ordinary", 77)
