"""Pickles of objects that abuse a class of plain data: nothing runs and nothing changes."""

from __future__ import annotations

import argparse
import builtins
import collections
import contextlib
import datetime
import decimal
import io
import os
import pathlib
import pickle
import random
import resource
import struct
import sys
import types
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from checkpoints import failure_of, load, loads, save
from crafted import (
    DOUBLED,
    LAYOUT,
    RECONSTRUCT,
    archive,
    array,
    call,
    dtype,
    named,
    number,
    raw,
    tensor_of,
    text,
    tuple_of,
)
from support.resumable_states import OBJECTS
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from torch_ckpt import CheckpointError, FastReader
from torch_ckpt._core import _native
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.formats.allowed_classes import refused_classes
from torch_ckpt.formats.data_classes import DATA_CLASSES, class_named
from torch_ckpt.formats.object_parts import ObjectParts
from torch_ckpt.formats.object_pickles import Refused, load_object
from torch_ckpt.formats.pickles import ForbiddenPickleError
from torch_ckpt.formats.torch_save import check_allowed

NAMES = [name for name in DATA_CLASSES if ".core." not in name and "_local" not in name]


def system(canary: Path) -> bytes:
    """What pushes the result of a call that creates a file."""
    return b"cposix\nsystem\n" + text(f"touch {canary}") + b"\x85R"


WITHOUT_FLAGS = b"(K\x03" + text("|") + b"NNN" + number(-1) + number(-1) + b"K\x00t"
"""The state of a dtype of objects, with flags that deny it."""

ABUSES: dict[str, Callable[[bytes, Path], bytes]] = {
    "called with what a call returns": lambda it, canary: it + system(canary) + b"\x85R",
    "called with a function": lambda it, _: it + b"cposix\nsystem\n\x85R",
    "made new with what a call returns": lambda it, canary: it + system(canary) + b"\x85\x81",
    "called with itself": lambda it, _: it + it + b"\x85R",
    "called with nothing and built of itself": lambda it, _: it + b")R" + it + b"b",
    "made new and built of a dict": lambda it, _: it + b")\x81}" + text("__class__") + it + b"sb",
    "built itself": lambda it, _: it + b"}" + text("poisoned") + b"K\x01sb",
    "built itself with slots": lambda it, _: it + b"N}" + text("poisoned") + b"K\x01s\x86b",
    "items set": lambda it, _: it + text("poisoned") + b"K\x01s",
    "appended to": lambda it, _: it + b"K\x01a",
    "called by torch": lambda it, _: (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(" + it + it + b")}tR"
    ),
    "called by torch with a tensor's class": lambda it, _: (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(" + it + b"ctorch\nTensor\n)}tR"
    ),
    "a persistent id": lambda it, _: (
        b"(" + text("storage") + it + text("0") + text("cpu") + b"K\x01tQ"
    ),
    "a key of itself": lambda it, _: b"}" + it + it + b"s",
    "called with very many": lambda it, _: it + b"(" + b"K\x01" * 300 + b"tR",
    "called with no tuple": lambda it, _: it + b"]R",
    "without its state, at the end": lambda it, _: it + b")R",
    "without its state, in a tuple": lambda it, _: it + b")R\x85",
    "without its state, new": lambda it, _: it + b")\x81\x85",
    "in its own state": lambda it, _: it + b")\x81q\x00(h\x00h\x00h\x00tb",
    "a state of another kind": lambda it, _: it + b")\x81" + text("state") + b"b",
    "a state of large numbers": lambda it, _: it + b")\x81(" + number(1 << 70) * 3 + b"tb",
}


@contextlib.contextmanager
def nothing_changes() -> Iterator[None]:
    """Asserts that neither the classes nor the allow-list of torch change in the block."""
    classes = [class_named(name) for name in NAMES]
    before = [dict(vars(one)) if hasattr(one, "__dict__") else None for one in classes]
    allowed = set(torch.serialization.get_safe_globals())
    yield
    after = [dict(vars(one)) if hasattr(one, "__dict__") else None for one in classes]
    assert after == before
    assert set(torch.serialization.get_safe_globals()) == allowed


def outcome(pickled: bytes, **options: Any) -> object:
    """What a load gives; nothing if it refuses, which must be by an error that can be handled."""
    try:
        return load_object(archive(pickled), **options)
    except (SystemError, MemoryError, RecursionError):
        raise
    except Exception:
        return None


# What may come out of a crafted pickle that is no error.
HARMLESS = (
    *(int, float, str, bytes, bytearray, tuple, list, dict, set, frozenset, range, type(None)),
    *(collections.deque, io.BytesIO, decimal.Decimal, uuid.UUID, pathlib.PurePath, torch.Generator),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(np.ndarray, np.generic, np.dtype, type, type(os.getcwd)),
    *(argparse.Namespace, types.SimpleNamespace),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_class_of_plain_data_cannot_be_abused(name: str, canary: Path) -> None:
    for abuse, crafted in ABUSES.items():
        with nothing_changes():
            pickled = b"\x80\x02" + crafted(named(name), canary) + b"."
            value, later = outcome(pickled), outcome(pickled, refuse_later=True)
        assert isinstance(value, HARMLESS), abuse
        assert isinstance(later, (*HARMLESS, Refused)), abuse
        assert not canary.exists(), abuse


@pytest.mark.parametrize("name", NAMES)
def test_a_crafted_file_of_each_class_runs_nothing(name: str, tmp_path: Path, canary: Path) -> None:
    """The class itself loads; a call beside it is refused by name, and the class is not named."""

    class Saves(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return io.BytesIO(object)

    crafted = archive(b"\x80\x02" + named(name) + system(canary) + b"\x86.").getvalue()
    save({"object": crafted}, FileSystemWriter(tmp_path / "checkpoint"), planner=Saves())

    error = failure_of(load, {"object": None}, FastReader(tmp_path / "checkpoint"))

    assert isinstance(error, CheckpointError)
    assert "GLOBAL posix.system" in str(error)
    assert name not in str(error)
    assert refused_classes(crafted) == ["posix.system"]
    assert not canary.exists()
    load({"object": None}, FastReader(tmp_path / "checkpoint", trust_pickle=True))
    assert canary.exists(), "the payload does not work"


CRAFTED = {
    "an object array of bytes": array("O8", b"(K\x01t", raw(b"\1" * 8)),
    "an object array that denies it": array("O8", b"(K\x01t", raw(b"\1" * 8), WITHOUT_FLAGS),
    "an object scalar": b"cnumpy._core.multiarray\nscalar\n"
    + dtype("O8")
    + raw(b"\1" * 8)
    + b"\x86R",
    "an array of too few bytes": array("f8", b"(K\x02t", raw(b"\0" * 8)),
    "an array of too many bytes": array("f8", b"(K\x01t", raw(b"\0" * 16)),
    "a shape that is negative": array("f8", b"(" + number(-1) + b"t", raw(b"\0" * 8)),
    "a shape of text": array("f8", b"(" + text("1") + b"t", raw(b"\0" * 8)),
    "a shape that is huge": array("f8", b"(" + number(1 << 62) + number(4) + b"t", raw(b"")),
    "elements of no bytes": array("V0", b"(" + number(1 << 40) + b"t", raw(b"")),
    "no dtype": RECONSTRUCT + b"(K\x01(K\x01t" + text("f8") + b"\x89" + raw(b"\0" * 8) + b"tb",
    "an array built twice": array("i1", b"(K\x01t", raw(b"\0"))
    + b"(K\x01(K\x01t"
    + dtype("i1")
    + b"\x89"
    + raw(b"\0")
    + b"tb",
    "an array of another class": RECONSTRUCT.replace(b"cnumpy\nndarray\n", b"c__builtin__\nset\n")
    + b"(tb",
    "a dtype of many": dtype("f8,f8"),
    "a dtype of a shape": dtype("(1000000000,)f8"),
    "an array of objects that holds itself": RECONSTRUCT
    + b"qc(K\x01(K\x01t"
    + dtype("O8")
    + b"\x89](hcetb",
    "a dtype of a class": b"cnumpy\ndtype\ncnumpy\nndarray\n\x85RNb",
    "a date that is none": b"cdatetime\ndate\n" + raw(b"\0\0\1\0") + b"\x85R",
    "a time that is none": b"cdatetime\ntime\n" + raw(b"\x80\0\0\0\0\0") + b"\x85R",
    "a zone of another class": b"cdatetime\ntime\n" + raw(b"\1\0\0\0\0\0") + text("z") + b"\x86R",
    "bytes in another code": b"c_codecs\nencode\n" + text("61") + text("hex") + b"\x86R",
    "a set of nested tuples": b"c__builtin__\nset\n](" + b")" + b"\x85" * 5000 + b"e\x85R",
    "a frozenset of tuples that stand for many": b"c__builtin__\nfrozenset\n](K\x01"
    + DOUBLED
    + b"e\x85R",
    "a key that stands for many": b"}K\x01" + DOUBLED + b"Ns",
    "a bytearray of a length": b"c__builtin__\nbytearray\n" + number(1 << 50) + b"\x85R",
    "a Counter of tuples that stand for many": b"ccollections\nCounter\n](K\x01"
    + DOUBLED
    + b"e\x85R",
    "an OrderedDict of tuples that stand for many": b"ccollections\nOrderedDict\n](K\x01"
    + DOUBLED
    + b"N\x86e\x85R",
    "a UUID beyond 128 bits": b"cuuid\nUUID\n)\x81}" + text("int") + number(1 << 128) + b"sb",
    "an object with a method of pickle": b"ctypes\nSimpleNamespace\n)R}"
    + text("__reduce_ex__")
    + b"ctorch\nSize\nsb",
    "an object with a method of its class": b"cargparse\nNamespace\n)\x81}"
    + text("_get_kwargs")
    + b"ctorch\nSize\nsb",
    "an OrderedDict with a method of its class": b"ccollections\nOrderedDict\n)R}"
    + text("items")
    + b"ctorch\nSize\nsb",
    "an object with an attribute that is no text": b"cargparse\nNamespace\n)\x81}K\x01Nsb",
    "a Generator of numbers": b"ctorch._C\nGenerator\nctorch\ndevice\n"
    + text("cpu")
    + b"\x85R\x85RK\x01NK\x02\x87b",
    "a Generator of no device": b"ctorch._C\nGenerator\n" + text("cpu") + b"\x85R",
    "a module that is blocked": b"cos\ngetcwd\n)R",
    "a memo that is not there": b"h\x05",
    "protocol 4": b"\x8c\x02os\x8c\x06getcwd\x93)R",
    "the extension registry": b"\x82\x01",
}


@pytest.mark.parametrize("name", CRAFTED)
def test_what_no_pickler_writes_is_refused(name: str) -> None:
    crafted = archive(b"\x80\x02" + CRAFTED[name] + b".")
    with nothing_changes(), pytest.raises((pickle.UnpicklingError, KeyError, RuntimeError)):
        load_object(crafted)
    crafted.seek(0)
    with nothing_changes(), pytest.raises((pickle.UnpicklingError, KeyError, RuntimeError)):
        check(load_object(crafted, refuse_later=True))


def check(value: object) -> None:
    """Raises what a load of a value with a refused one in it raises."""
    check_allowed(value, "a value")


def test_the_crafted_array_is_sound_but_for_what_is_crafted() -> None:
    value = load_object(archive(b"\x80\x02" + array("f8", b"(K\x01t", raw(b"\0" * 8)) + b"."))
    assert np.array_equal(value, np.zeros(1))


def test_torchscript_and_files_of_others_are_not_handed_to_their_readers(
    tmp_path: Path, canary: Path
) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    path, plain = tmp_path / "script.pt", tmp_path / "plain.pt"
    torch.jit.script(Module()).save(str(path))
    with zipfile.ZipFile(path) as script, zipfile.ZipFile(plain, "w") as uncompressed:
        for name in script.namelist():
            uncompressed.writestr(name, script.read(name))
    for file, why in ((path, "compressed"), (plain, "GLOBAL __torch__")):
        for mapped in (file, None):
            with (
                mock.patch.object(torch.jit, "load", side_effect=AssertionError),
                pytest.raises((ForbiddenPickleError, UnsupportedError), match=why),
            ):
                load_object(io.BytesIO(file.read_bytes()), mapped=mapped)
    with pytest.raises(pickle.UnpicklingError):
        load_object(io.BytesIO(b"\x80\x02" + system(canary) + b"."))
    assert not canary.exists()


TYPE_V2 = "torch._tensor._rebuild_from_type_v2"
DEEP = 100_000


NDARRAY = named("numpy.ndarray")
GOOD_STATE = tuple_of(b"K\x01(K\x01t", dtype("i8"), b"\x89", raw(b"A" * 8))
BAD_STATE = tuple_of(b"K\x01(K\x01t", dtype("O8"), b"\x89", raw(b"A" * 8))
BYPASSES = {
    "torch calls itself, and that NumPy": call(
        TYPE_V2,
        named(TYPE_V2),
        NDARRAY,
        tuple_of(NDARRAY, NDARRAY, tuple_of(b"(K\x01t", dtype("i8")), GOOD_STATE),
        BAD_STATE,
    ),
    "torch calls NumPy": call(
        TYPE_V2,
        named("numpy._core.multiarray.scalar"),
        NDARRAY,
        tuple_of(dtype("i8"), raw(b"A" * 8)),
        b"N",
    ),
    "arguments that are a dict": named(TYPE_V2)
    + b"}("
    + named("_codecs.encode")
    + b"N"
    + named("torch.Tensor")
    + b"N"
    + tuple_of(text("a"), text("utf-16"))
    + b"N\x89"
    + named("torch.Size")
    + b"uR",
    "torch calls what it may call itself": call(
        TYPE_V2, named("torch.Size"), named("torch.Tensor"), b"((K\x01tt", b"N"
    ),
    "torch makes no tensor": call(
        TYPE_V2, named("torch._utils._rebuild_tensor_v2"), named("torch.Size"), b")", b"N"
    ),
    "a storage of a size": call("torch.storage.UntypedStorage", number(2 << 30)),
    "a tensor of a size": call("torch.FloatTensor", number(1 << 40)),
    "a new tensor of a size": named("torch.Tensor") + number(1 << 40) + b"\x85\x81",
    "a legacy sparse tensor": named("torch.sparse.FloatTensor") + b")\x81",
    "a layout of a deep tuple": call("torch.serialization._get_layout", b")" + b"\x85" * DEEP),
    "an attribute dict of deep keys": named("collections.OrderedDict")
    + b")R]("
    + b")"
    + b"\x85" * DEEP
    + b"K\x01\x86eb",
    "a storage of a deep key": tuple_of(
        text("storage"), named("torch.FloatStorage"), b")" + b"\x85" * DEEP, text("cpu"), b"K\x01"
    )
    + b"Q",
    "a sparse tensor of shared tuples": call(
        "torch._utils._rebuild_sparse_tensor", b"K\x01" + DOUBLED, b")"
    ),
    "a sparse tensor of bad indices": call(
        "torch._utils._rebuild_sparse_tensor",
        LAYOUT,
        tuple_of(
            tensor_of("torch.LongStorage", 632, b"(K\x01K\x02t", b"(K\x02K\x01t"),
            tensor_of("torch.FloatStorage", 1264, b"(K\x02t", b"(K\x01t"),
            call("torch.Size", b"(K\x04t"),
            b"\x89",
        ),
    ),
    "deques in deques": (named("collections.deque") + b")R") * DEEP + b"a" * (DEEP - 1),
    "deques in deques, by the memo": b"".join(
        named("collections.deque") + b")Rr" + struct.pack("<I", i) for i in range(3)
    )
    + b"h\0h\1ah\1h\2a((t",
    "dtypes in dtypes": b"K\x00"
    + b"".join(
        b"q\x01cnumpy\ndtype\n"
        + text("V8")
        + b"\x89\x88\x87R(K\x03"
        + text("|")
        + b"N"
        + tuple_of(text("a"))
        + b"}"
        + text("a")
        + tuple_of(b"h\x01" if i else dtype("f8"), b"K\x00")
        + b"sK\x08K\x01K\x10tb"
        for i in range(2000)
    ),
    "object arrays in object arrays": array("O8", b"(K\x01t", b"](K\x01e")
    + b"".join(b"q\x01" + array("O8", b"(K\x01t", b"](h\x01e") for _ in range(2000)),
    "one heavy key again and again": b"("
    + b"K\x01" * 3000
    + b"tq\x01}("
    + b"".join(b"h\x01" + number(i) + b"\x86N" for i in range(8000))
    + b"u\x86",
    "one text made bytes again and again": text("a" * 100_000)
    + b"q\x01("
    + b"".join([b"c_codecs\nencode\nh\x01" + text("latin1") + b"\x86R"] * 2000)
    + b"t\x86",
    "a mesh of devices": call("torch.distributed.device_mesh.DeviceMesh", text("cpu"), b"](K\x00e"),
}


REASONS = "|".join(
    (
        *("Trying to", "without a tuple", "nested more", "too deeply", "expands to more"),
        *("Can only append", "dim 0", "expected"),
    )
)


@pytest.mark.parametrize("name", BYPASSES)
def test_what_would_crash_hang_or_fill_memory_is_refused(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for later in (False, True):
        with pytest.raises((pickle.UnpicklingError, RuntimeError), match=REASONS):
            check(load_object(archive(b"\x80\x02" + BYPASSES[name] + b"."), refuse_later=later))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB
    assert torch._utils._sparse_tensors_to_validate == []


def test_what_a_user_allows_builds_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    built = array("i1", b"(K\x01t", raw(b"\0")) + BAD_STATE + b"b"
    with (
        torch.serialization.safe_globals([np.ndarray, np.dtype, type(np.dtype("O"))]),
        pytest.raises(ForbiddenPickleError),
    ):
        load_object(archive(b"\x80\x02" + built + b"."))


@pytest.mark.parametrize("kind", [collections.defaultdict, collections.UserList])
def test_a_container_of_the_users_loads_once_it_is_allowed(kind: Any) -> None:
    value = kind(list) if kind is collections.defaultdict else kind([1, 2])
    if kind is collections.defaultdict:
        value["a"].append(1)
    stream = io.BytesIO()
    torch.save((value,), stream)
    assert refused_classes(stream.getbuffer())
    with torch.serialization.safe_globals([kind, (list, "builtins.list")]):
        assert not refused_classes(stream.getbuffer())
        stream.seek(0)
        assert load_object(stream) == (value,)


EVENTS: list[str] = []


def _note(event: str, arguments: Any) -> None:
    if event not in WATCHED:
        return
    code = arguments[0] if event == "exec" else None
    if not os.path.exists(getattr(code, "co_filename", "")):  # Else a module that NumPy imports.
        EVENTS.append(f"{event} {arguments}")


WATCHED: set[str] = set()


def test_damage_to_sound_pickles_runs_nothing_and_ends_in_a_value_or_an_error(
    rng: random.Random, full: bool
) -> None:
    sys.addaudithook(_note)
    pickles = []
    for make in OBJECTS.values():
        stream = io.BytesIO()
        torch.save(make(), stream)
        with zipfile.ZipFile(stream) as file:
            pickles.append(file.read("archive/data.pkl"))
    refused = 0
    WATCHED.update(
        {"os.system", "subprocess.Popen", "exec", "os.exec", "os.remove", "socket.connect"}
    )
    try:
        loads = 4000 if full else 400
        for _ in range(loads):
            damaged = bytearray(rng.choice(pickles))
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(2, len(damaged))
                if rng.random() < 0.5:
                    damaged[at] = rng.randrange(256)
                else:  # A piece of another.
                    other = rng.choice(pickles)
                    begin = rng.randrange(len(other))
                    damaged[at : at + rng.randrange(20)] = other[begin : begin + rng.randrange(40)]
            refused += outcome(bytes(damaged)) is None
            with contextlib.suppress(Exception):
                ObjectParts(outcome(bytes(damaged), refuse_later=True))
    finally:
        WATCHED.clear()
    assert EVENTS == []
    assert refused > loads // 4


DEEP_REFUSED = {
    "calls in calls": b"cos\nsystem\n" + b"q\0)R" + b"\x85q\1cos\nsystem\nh\1R" * 5000,
    "states in states": b"cos\nsystem\n)R"
    + b"".join(b"r%scos\nsystem\n)Rj%sb" % (2 * (struct.pack("<I", i),)) for i in range(5000)),
    "itself": b"cos\nsystem\n)Rq\0h\0b(h\0h\0e",
    "many of many": b"cos\nsystem\n)Rq\0"
    + b"".join(b"cos\nsystem\n(h%ch%ctRq%c" % (i, i, i + 1) for i in range(60)),
}


@pytest.mark.parametrize("name", DEEP_REFUSED)
def test_refused_values_are_found_at_any_depth(name: str, tmp_path: Path) -> None:
    pickled = b"\x80\x02}" + text("w") + DEEP_REFUSED[name] + b"s."
    (tmp_path / "a.pt").write_bytes(archive(pickled).getvalue())
    error = failure_of(load, {"w": None}, FastReader(tmp_path / "a.pt"))
    assert isinstance(error, CheckpointError)
    assert "GLOBAL os.system" in str(error) or "nested too deeply" in str(error)


def test_the_globals_of_a_pickle_are_those_that_python_finds() -> None:
    class Finds(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.append(f"{module}.{name}")
            return super().find_class(module, name)

        def persistent_load(self, pid: Any) -> Any:
            return torch.storage.TypedStorage(
                wrap_storage=torch.zeros(5056, dtype=torch.uint8).untyped_storage(),
                dtype=torch.uint8,
                _internal=True,
            )

    for name, make in OBJECTS.items():
        if name == "Generator" or "tensors" in name or name == "deque":
            continue
        stream = io.BytesIO()
        torch.save(make(), stream)
        with zipfile.ZipFile(stream) as file:
            pickled = file.read("archive/data.pkl")
        found: list[str] = []
        listed = [f"{module}.{name}" for module, name in _native.pickle_globals(pickled)]
        Finds(io.BytesIO(pickled)).load()
        assert listed == found, name


@pytest.mark.parametrize("builtin", ["eval", "exec", "getattr", "__import__", "open", "compile"])
def test_builtins_are_refused_by_their_name_of_today(builtin: str) -> None:
    assert hasattr(builtins, builtin)
    crafted = archive(f"\x80\x02c__builtin__\n{builtin}\n.".encode("latin1"))
    with pytest.raises(ForbiddenPickleError, match=rf"GLOBAL builtins\.{builtin}"):
        load_object(crafted)


class OnAbsentGpu:
    """Pickled as a generator of a GPU, with a state that no generator has."""

    def __reduce__(self) -> Any:
        return torch.Generator, (torch.device("cuda"),), (0, None, torch.zeros(1))


NOT_MADE = {
    "attribute": (argparse.Namespace(**{"_get_args": 1}), "differ from those that its class"),
    "device": (OnAbsentGpu(), "Generator"),
}


@pytest.mark.parametrize("name", NOT_MADE)
def test_an_object_that_cannot_be_made_keeps_no_tensor_from_loading(
    name: str, tmp_path: Path
) -> None:
    value, why = NOT_MADE[name]
    torch.save({"w": torch.ones(3), "extra": value}, tmp_path / "x.pt")
    assert not loads(tmp_path / "x.pt", {"w": torch.ones(3)})
    error = failure_of(load, {"extra": None}, FastReader(tmp_path / "x.pt"))
    assert isinstance(error, UnsupportedError)
    assert str(error).startswith("cannot load 'extra'")
    assert why in str(error)


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import torch
import torch.distributed.checkpoint as dcp
from torch_ckpt import FastReader

state = {"w": torch.zeros(3)}
dcp.load(state, storage_reader=FastReader(sys.argv[1]), no_dist=True)
assert torch.equal(state["w"], torch.ones(3))
try:
    dcp.load({"extra": None}, storage_reader=FastReader(sys.argv[1]), no_dist=True)
except BaseException as error:
    print(*(why for why, _ in error.failures.values()))
"""


def test_an_array_keeps_no_tensor_from_loading_without_numpy(
    tmp_path: Path, run_new_python: Callable[..., str]
) -> None:
    torch.save({"w": torch.ones(3), "extra": (np.float64(1),)}, tmp_path / "x.pt")
    found = run_new_python(WITHOUT_NUMPY, tmp_path / "x.pt")
    assert "cannot load 'extra'" in found
    assert "No module named 'numpy" in found
