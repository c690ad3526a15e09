"""Nothing from a file is executed: hostile ``.metadata`` and objects are refused, not run."""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import dataclasses
import functools
import importlib
import io
import marshal
import operator
import os
import pathlib
import pickle
import struct
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import blank, commit_without_index, differences, failure_of, load, save
from torch.distributed._shard.sharded_tensor import metadata as old
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.errors import CorruptionError, UnsupportedError
from torch_ckpt.formats.metadata import check_metadata, load_metadata
from torch_ckpt.formats.pickles import (
    _VOCABULARY,
    MEGATRON_CLASSES,
    ForbiddenPickleError,
    load_allowed,
)


class Call:
    """Pickles as a call, which unpickling makes."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.made = (function, args)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.made

    def __call__(self) -> None:
        """Only what can be called pickles as the function of a call."""


def touch(canary: Path) -> str:
    """Python that creates a file."""
    return f"open({str(canary)!r}, 'w').close()"


def short_text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def stack_global(module: str, name: str) -> bytes:
    return short_text(module) + short_text(name) + b"\x93"


def hub(canary: Path) -> Call:
    folder = canary.parent / "hub"
    folder.mkdir()
    (folder / "hubconf.py").write_text(touch(canary) + "\ndef model(): return 1\n")
    return Call(torch.hub._load_local, str(folder), "model")


# Each gives the object to be pickled, given the file that it is to create.
CALLS: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda canary: Call(os.system, f"touch {canary}"),
    "subprocess": lambda canary: Call(subprocess.check_output, ["touch", str(canary)]),
    "exec": lambda canary: Call(exec, touch(canary)),
    "eval": lambda canary: Call(eval, touch(canary)),
    "open": lambda canary: Call(open, str(canary), "w"),
    "getattr": lambda canary: Call(
        Call(getattr, Call(importlib.import_module, "os"), "system"), f"touch {canary}"
    ),
    "__import__": lambda canary: Call(
        Call(operator.attrgetter("system"), Call(builtins.__import__, "os")), f"touch {canary}"
    ),
    "functools.partial": lambda canary: Call(functools.partial(os.system, f"touch {canary}")),
    "operator.methodcaller": lambda canary: Call(
        operator.methodcaller("system", f"touch {canary}"), Call(importlib.import_module, "os")
    ),
    "FunctionType": lambda canary: Call(
        Call(
            Call(operator.attrgetter("FunctionType"), Call(importlib.import_module, "types")),
            Call(marshal.loads, marshal.dumps(compile(touch(canary), "", "exec"))),
            {"__builtins__": Call(vars, Call(importlib.import_module, "builtins"))},
        )
    ),
    "pickle.loads": lambda canary: Call(
        pickle.loads, pickle.dumps(Call(os.system, f"touch {canary}"))
    ),
    "torch.load": lambda canary: Call(
        functools.partial(torch.load, weights_only=False),
        io.BytesIO(saved_object(Call(os.system, f"touch {canary}"))),
    ),
    "torch.hub": hub,
    "inside a dict": lambda canary: {"x": [1, {"y": Call(os.system, f"touch {canary}")}]},
    "as a key": lambda canary: {Call(os.system, f"touch {canary}"): 1},
}

# Each gives a pickle that does the same.
PICKLES: dict[str, Callable[[Path], bytes]] = {
    "GLOBAL": lambda canary: b"cos\nsystem\n(S'touch %s'\ntR." % bytes(canary),
    "INST": lambda canary: b"(S'touch %s'\nios\nsystem\n." % bytes(canary),
    "OBJ": lambda canary: b"(cos\nsystem\nS'touch %s'\no." % bytes(canary),
    "OBJ of protocol 2": lambda canary: b"\x80\x02(cos\nsystem\nS'touch %s'\no." % bytes(canary),
    "a dotted name of an allowed module": lambda canary: (
        b"\x80\x04"
        + stack_global("torch.distributed.checkpoint.filesystem", "os.system")
        + b"X"
        + struct.pack("<I", len(f"touch {canary}"))
        + f"touch {canary}".encode()
        + b"\x85R."
    ),
    "a dotted name of an allowed class": lambda canary: (
        b"\x80\x04"
        + stack_global(
            "torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__.__class__"
        )
        + b"0"
        + pickle.dumps(Call(os.system, f"touch {canary}"), 4)[2:]
    ),
}


def saved_object(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The directory of a sound checkpoint."""
    save({"t": torch.ones(2)}, FastWriter(tmp_path / "checkpoint"))
    return tmp_path / "checkpoint"


def assert_refused_as_metadata(pickled: bytes, checkpoint: Path, canary: Path) -> str:
    """Ours does not run it; stock does, and so do we when told to. Returns what our error says."""
    (checkpoint / ".metadata").write_bytes(pickled)
    with pytest.raises((UnsupportedError, CorruptionError)) as caught:
        FastReader(checkpoint).read_metadata()
    error = failure_of(load, {"t": torch.zeros(2)}, FastReader(checkpoint))
    assert str(error) == str(caught.value)
    assert type(error) is caught.type
    assert not canary.exists()

    with contextlib.suppress(Exception):  # It runs; what comes out is no metadata.
        FileSystemReader(checkpoint).read_metadata()
    assert canary.exists(), "the payload does not work"
    canary.unlink()
    with pytest.raises(CorruptionError):
        FastReader(checkpoint, trust_pickle=True).read_metadata()
    assert canary.exists()
    return str(caught.value)


class ByName(pickle.Pickler):
    """Pickles members of enums by name, as the first versions of Python 3.11 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def pickled_by_name(value: Any, protocol: int = 4) -> bytes:
    ByName(stream := io.BytesIO(), protocol).dump(value)
    return stream.getvalue()


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_metadata_that_python_3_11_0_has_pickled_load(protocol: int, tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0), "b": torch.zeros(2, 3), "step": 3}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    stored = FileSystemReader(tmp_path).read_metadata()
    (tmp_path / ".metadata").write_bytes(pickled_by_name(stored, protocol))
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    found = FastReader(tmp_path).read_metadata()
    assert found.state_dict_metadata == stored.state_dict_metadata
    assert found.storage_data == stored.storage_data
    loaded = {"a": torch.zeros(6), "b": torch.ones(2, 3), "step": 0}
    load(loaded, FastReader(tmp_path))
    assert not differences(loaded, state)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING", "mro"),
        ("torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING", "TORCH_OTHER"),
        ("torch.distributed.checkpoint.metadata Metadata", "storage_data"),
        ("torch Size", "numel"),
        ("builtins getattr", "__self__"),
    ],
)
@pytest.mark.parametrize("end", [b"\x86R.", b"\x86.", b"\x86\x94h\x00.", b"\x86}\x94R."])
def test_no_other_attribute_is_looked_up(owner: str, name: str, end: bytes, tmp_path: Path) -> None:
    module, kind = owner.split()
    called = stack_global("builtins", "getattr") + stack_global(module, kind) + short_text(name)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + called + end)
    with pytest.raises((UnsupportedError, CorruptionError)):
        FastReader(tmp_path).read_metadata()


@pytest.mark.parametrize("name", [*range(6), *CALLS, *PICKLES])
def test_hostile_metadata_are_refused(name: int | str, checkpoint: Path, canary: Path) -> None:
    if isinstance(name, int):
        pickled = pickle.dumps(Call(os.system, f"touch {canary}"), protocol=name)
    else:
        pickled = pickle.dumps(CALLS[name](canary)) if name in CALLS else PICKLES[name](canary)
    canary.unlink(missing_ok=True)

    message = assert_refused_as_metadata(pickled, checkpoint, canary)

    if isinstance(name, int):
        for part in ("posix.system", str(checkpoint / ".metadata"), "trust_pickle=True"):
            assert part in message
    assert name in PICKLES or "the global " in message


def test_a_call_hidden_in_sound_metadata_is_refused(checkpoint: Path, canary: Path) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = {"t": Call(os.system, f"touch {canary}")}
    commit_without_index(metadata, checkpoint)

    error = failure_of(load, {"t": torch.zeros(2)}, FastReader(checkpoint))
    assert isinstance(error, UnsupportedError)
    assert "posix.system" in str(error)
    assert not canary.exists()

    load({"t": torch.zeros(2)}, FastReader(checkpoint, trust_pickle=True))
    assert canary.exists()


@pytest.mark.parametrize(
    "name", [name for name in CALLS if "dict" not in name and "key" not in name]
)
def test_calls_in_objects_are_refused(name: str, tmp_path: Path, canary: Path) -> None:
    save({"object": CALLS[name](canary)}, FileSystemWriter(tmp_path / "checkpoint"))
    canary.unlink(missing_ok=True)

    target = {"object": None}
    error = failure_of(load, target, FastReader(tmp_path / "checkpoint"))
    assert isinstance(error, UnsupportedError), repr(error)
    for part in ("'object'", "0 of __0_0.distcp", "GLOBAL ", "add_safe_globals", "trust_pickle"):
        assert part in str(error)
    assert target == {"object": None}
    assert not canary.exists()

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
        dcp.load(
            {"object": None}, storage_reader=FileSystemReader(tmp_path / "checkpoint"), no_dist=True
        )
        assert canary.exists(), "the payload does not work"
        canary.unlink()
        load({"object": None}, FastReader(tmp_path / "checkpoint", trust_pickle=True))
        assert canary.exists()


@pytest.mark.parametrize("name", CALLS)
def test_calls_beside_the_requested_values_of_a_file_are_not_run(
    name: str, tmp_path: Path, canary: Path
) -> None:
    torch.save({"w": torch.ones(2), "object": CALLS[name](canary)}, tmp_path / "a.pt")
    canary.unlink(missing_ok=True)

    for fqn in FastReader(tmp_path / "a.pt").read_metadata().state_dict_metadata:
        state = {fqn: torch.zeros(2) if fqn == "w" else None}
        if fqn == "w" or fqn == "object.x.0" or name == "as a key":
            load(state, FastReader(tmp_path / "a.pt"))
            assert fqn != "w" or torch.equal(state["w"], torch.ones(2))
        else:
            error = failure_of(load, state, FastReader(tmp_path / "a.pt"))
            assert isinstance(error, UnsupportedError)
            assert "GLOBAL " in str(error)
        assert not canary.exists()

    torch.load(tmp_path / "a.pt", weights_only=False)
    assert canary.exists(), "the payload does not work"


@pytest.mark.parametrize("name", PICKLES)
def test_a_bare_pickle_in_place_of_an_object_is_refused(
    name: str, checkpoint: Path, tmp_path: Path, canary: Path
) -> None:
    class Saves(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return io.BytesIO(object)

    save({"object": PICKLES[name](canary)}, FileSystemWriter(tmp_path / "bare"), planner=Saves())

    error = failure_of(load, {"object": None}, FastReader(tmp_path / "bare"))

    assert isinstance(error, UnsupportedError | CorruptionError)
    assert "'object'" in str(error)
    assert not canary.exists()


AUDITED = """
import pickle, sys, torch
from torch_ckpt.formats.pickles import load_allowed
payloads = pickle.load(open(sys.argv[1], "rb"))
events, watching = [], False
def hook(event, args):
    if watching:
        events.append(event)
sys.addaudithook(hook)
for payload in payloads:
    watching = True
    try:
        load_allowed(payload)
        refused = False
    except (pickle.UnpicklingError, ValueError):
        refused = True
    watching = False
    assert refused, payload
print(len(payloads), events)
"""


def test_a_refusal_imports_compiles_and_opens_nothing(
    tmp_path: Path, canary: Path, run_python: Callable[..., str]
) -> None:
    payloads = [pickle.dumps(call(canary)) for call in CALLS.values()]
    payloads += [crafted(canary) for crafted in PICKLES.values()]
    (tmp_path / "payloads").write_bytes(pickle.dumps(payloads))

    assert run_python(AUDITED, tmp_path / "payloads").split(maxsplit=1) == [
        str(len(payloads)),
        "[]\n",
    ]


METADATA_CLASS = stack_global("torch.distributed.checkpoint.metadata", "Metadata")
ATTRIBUTE = b"}" + short_text("poisoned") + short_text("yes") + b"s"
EMPTY_STATE = b"}" + short_text("state_dict_metadata") + b"}s"

REFUSED = {
    "the state of a class": METADATA_CLASS + b"N" + ATTRIBUTE + b"\x86b.",
    "the state of a function": stack_global("torch.serialization", "_get_layout")
    + ATTRIBUTE
    + b"b.",
    "slots of a record": METADATA_CLASS + b")\x81N" + ATTRIBUTE + b"\x86b.",
    "a field that a class does not have": METADATA_CLASS + b")\x81" + ATTRIBUTE + b"b.",
    "a dunder as a field": METADATA_CLASS + b")\x81}" + short_text("__class__") + b"Nsb.",
    "a second state": METADATA_CLASS
    + b")\x81\x94"
    + EMPTY_STATE
    + b"b\x85h\x00"
    + EMPTY_STATE
    + b"b\x86.",
    "a class as a value": METADATA_CLASS + b".",
    "a function in a list": b"]" + stack_global("torch.serialization", "_get_layout") + b"a.",
    "a call of a class": METADATA_CLASS + b")R.",
    "a record with arguments": METADATA_CLASS + b"}\x85\x81.",
    "a new torch.Size": stack_global("torch", "Size") + b")\x81.",
    "NEWOBJ_EX": METADATA_CLASS + b")}\x92.",
    "EXT1": b"\x82\x01.",
    "EXT4": b"\x84\x01\x00\x00\x00.",
    "PERSID": b"Pname\n.",
    "BINPERSID": b"NQ.",
    "a lookup in torch": stack_global("torch", "load") + b".",
    "a module of an allowed module": stack_global("torch.distributed.checkpoint.metadata", "os")
    + b".",
    "a dotted dtype": stack_global("torch", "float32.__class__") + b".",
    "another name of an allowed class": stack_global("torch.serialization", "torch.Size") + b".",
    "copyreg": pickle.dumps(copyreg._reconstructor)[2:],
    "a layout that is none": stack_global("torch.serialization", "_get_layout")
    + short_text("torch.load")
    + b"\x85R.",
    "sizes that are negative": stack_global("torch", "Size") + b"J\xff\xff\xff\xff\x85\x85R.",
    "sizes that are no tuple": stack_global("torch", "Size") + b"]\x85R.",
    "sizes of text": stack_global("torch", "Size") + short_text("12") + b"\x85R.",
    "sizes of booleans": stack_global("torch", "Size") + b"\x88\x85\x85R.",
    "a path of numbers": stack_global("pathlib", "PosixPath") + b"K\x01\x85R.",
    "a set": b"\x8f.",
    "a list that holds itself": b"]\x94h\x00a.",
    "a list in a tuple in it": b"]\x94h\x00\x85a.",
    "a list appended to once more": b"]\x94\x85h\x00Na\x86.",
    "a value twice in the memo": b"]\x94\x94.",
    "a memo with gaps": b"]q\x05.",
    "a tuple as a key": b"}N\x85Ns.",
    "a float as a key": b"}G" + bytes(8) + b"Ns.",
    "a record as a key": b"}" + METADATA_CLASS + b")\x81" + EMPTY_STATE + b"bNs.",
    "an unfinished index as a key": b"}"
    + stack_global("torch.distributed.checkpoint.metadata", "MetadataIndex")
    + b")\x81Ns.",
}

BROKEN = {
    "nothing": b"",
    "no end": b"N",
    "no value": b".",
    "two values": b"NN.",
    "a mark left": b"N(.",
    "a tuple across a mark": b"N(\x85.",
    "no mark": b"Nt.",
    "items of a number": b"K\x01K\x02a.",
    "an append across a mark": b"](Na.",
    "items without a value": b"}(Nu.",
    "a text that is not UTF-8": b"\x8c\x01\xff.",
    "a text beyond its end": b"\x8c\xffabc.",
    "a memo never written": b"h\x00.",
    "a record without fields": METADATA_CLASS + b")\x81.",
    "a record that lacks a field": METADATA_CLASS + b")\x81}" + short_text("version") + b"Nsb.",
    "a field of another type": METADATA_CLASS
    + b")\x81}"
    + short_text("state_dict_metadata")
    + b"]sb.",
}


@pytest.mark.parametrize("pickled", REFUSED.values(), ids=REFUSED)
def test_what_plain_data_and_records_do_not_need_is_refused(pickled: bytes) -> None:
    before = {name: id(value) for name, value in vars(Metadata).items()}
    cache = dict(vars(torch.serialization._get_layout))

    with pytest.raises((ForbiddenPickleError, ValueError)):
        load_allowed(b"\x80\x04" + pickled)

    assert {name: id(value) for name, value in vars(Metadata).items()} == before
    assert vars(torch.serialization._get_layout) == cache


@pytest.mark.parametrize("pickled", BROKEN.values(), ids=BROKEN)
def test_broken_pickles_are_errors(pickled: bytes) -> None:
    with pytest.raises(ValueError, match="at byte"):
        load_allowed(b"\x80\x04" + pickled)


def test_bytes_behind_the_end_are_ignored_as_python_ignores_them() -> None:
    """They may be a trailer that is damaged."""
    assert pickle.loads(b"\x80\x04N.TCKPT") is load_allowed(b"\x80\x04N.TCKPT") is None


def test_pythons_own_unpickler_lets_a_pickle_change_a_class() -> None:
    try:
        pickle.loads(b"\x80\x04" + REFUSED["the state of a class"])
        assert Metadata.poisoned == "yes"  # type: ignore[attr-defined]
    finally:
        del Metadata.poisoned  # type: ignore[attr-defined]


DEEP = 1_000_000
LARGE = {
    "bytes": b"\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "bytes of 2 GiB": b"B\xff\xff\xff\x7fx.",
    "bytearray": b"\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "text": b"\x8d" + struct.pack("<Q", 1 << 63) + b"x.",
    "number": b"\x8b\xff\xff\xff\x7fx.",
    "decimal number": b"I" + b"9" * DEEP + b"\n.",
    "frame": b"\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "memo": b"Nr\xff\xff\xff\x7f.",
    "decimal memo": b"Np99999999999\n.",
    "nested tuples": b")" + b"\x85" * DEEP + b".",
    "nested tuples as a key": b"})" + b"\x85" * DEEP + b"Ns.",
    "nested lists": b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "nested dicts": (b"}" + short_text("a")) * DEEP + b"N" + b"s" * DEEP + b".",
    "nested marks": b"(" * DEEP + b".",
    "tuples of the same tuple twice": b")\x94"
    + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(200))
    + b".",
    "sizes of the same sizes": b"("
    + b"K\x01" * 64
    + b"t\x94("
    + b"h\x00" * DEEP
    + b"t\x94("
    + b"h\x01" * DEEP
    + b"t.",
}

BOUNDED = """
import os, pickle, resource, sys, time
from torch_ckpt.formats.pickles import load_allowed

def try_to_load(payload):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = used + (128 << 20) + 64 * len(payload)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    begin = time.process_time()
    try:
        repr(load_allowed(b"\\x80\\x04" + payload))
        outcome = "loaded"
    except (pickle.UnpicklingError, ValueError) as error:
        outcome = "refused"
    assert time.process_time() - begin < 10
    return outcome

for name, payload in pickle.load(open(sys.argv[1], "rb")).items():
    if os.fork() == 0:
        print(name, try_to_load(payload), sep=": ", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


def test_a_short_pickle_cannot_claim_much_memory_or_time(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    (tmp_path / "payloads").write_bytes(pickle.dumps(LARGE))

    found = run_python(BOUNDED, tmp_path / "payloads").splitlines()

    assert found == [f"{name}: {'loaded' if name == 'frame' else 'refused'}" for name in LARGE]


def globals_of(pickled: bytes) -> set[tuple[str, str]]:
    """The globals that Python's unpickler looks up."""
    found = set()

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add((module, name))
            return super().find_class(module, name)

    Unpickler(io.BytesIO(pickled)).load()
    return found


def metadata_of_everything() -> Metadata:
    """Holds every class that metadata may hold."""
    size = torch.Size([2])
    chunk = ChunkStorageMetadata(torch.Size([0]), size)
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    layouts = {value for value in vars(torch).values() if isinstance(value, torch.layout)}
    formats = [torch.contiguous_format, torch.channels_last, torch.preserve_format]
    properties: list[Any] = [TensorProperties(dtype=dtype) for dtype in dtypes]
    properties += [TensorProperties(layout=layout) for layout in layouts]
    properties += [TensorProperties(memory_format=form) for form in formats]
    properties += [old.TensorProperties(memory_format=form) for form in formats]
    state: dict[str, Any] = {
        f"t{i}": TensorStorageMetadata(each, size, [chunk]) for i, each in enumerate(properties)
    }
    state["bytes"] = BytesStorageMetadata()
    storage = {
        MetadataIndex("t0", torch.Size([0]), 0): _StorageInfo("a", 0, 8, ["stream.zstd"]),
        MetadataIndex("bytes"): _StorageInfo("b", 8, 1 << 40),
    }
    planner = DefaultSavePlanner()
    planner.set_up_planner({"t": torch.ones(2), "step": 1}, StorageMeta(), True)
    plan = dataclasses.replace(planner.create_local_plan(), storage_data=_StoragePrefix("__0_"))
    metadata = Metadata(state, {"a": ("a", 0)}, storage, StorageMeta(Path("/a/b")), "1.0.0")
    metadata.all_local_plans = [plan, SavePlan([], usable=False)]  # type: ignore[attr-defined]
    return metadata


def test_every_allowed_global_is_one_that_metadata_needs() -> None:
    needed = globals_of(pickle.dumps(metadata_of_everything()))
    for protocol in (2, 4):
        needed |= globals_of(pickled_by_name(metadata_of_everything(), protocol))
    for path in (pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("a")):
        needed |= globals_of(pickle.dumps(path))
    # Cannot be made here: of a job on Windows, or of Python 3.13.
    paths = {
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    }

    assert set(_VOCABULARY) - needed - paths == set(MEGATRON_CLASSES)
    assert needed - set(_VOCABULARY) == set()


@pytest.mark.parametrize("dumps", [pickle.dumps, pickled_by_name])
@pytest.mark.parametrize("protocol", range(2, 6))
def test_metadata_of_everything_loads_as_python_loads_it(
    protocol: int, dumps: Callable[[Any, int], bytes]
) -> None:
    pickled = dumps(metadata_of_everything(), protocol)

    loaded: Any = load_allowed(pickled)

    expected = pickle.loads(pickled)
    assert loaded == expected
    assert loaded.all_local_plans == expected.all_local_plans
    assert globals_of(dumps(loaded, protocol)) == globals_of(pickled)
    assert check_metadata(loaded) is loaded
    assert loaded.storage_data[MetadataIndex("t0", torch.Size([0]))].length == 8


def test_values_that_are_shared_stay_shared() -> None:
    inner: list[Any] = [1]
    empty: dict[str, Any] = {}
    info = _StorageInfo("a", 0, 1)
    value = [inner, inner, {"x": inner, "y": empty, "z": empty}, info, info, (info, (inner,))]

    loaded: Any = load_allowed(pickle.dumps(value))

    assert loaded == value
    assert loaded[0] is loaded[1] is loaded[2]["x"] is loaded[5][1][0]
    assert loaded[2]["y"] is loaded[2]["z"]
    assert loaded[3] is loaded[4] is loaded[5][0]


def test_paths_of_other_systems_and_pythons_load() -> None:
    path = pickle.dumps(pathlib.PosixPath("/a/b"), 4)
    length = bytes([len("pathlib._local")])
    elsewhere = path.replace(b"\x8c\x07pathlib", b"\x8c" + length + b"pathlib._local")
    windows = pickle.dumps(pathlib.PureWindowsPath("c:/a"), 2).replace(b"PureWindows", b"Windows")

    assert load_allowed(elsewhere) == pathlib.PosixPath("/a/b")
    assert load_allowed(windows) == pathlib.PureWindowsPath("c:/a")


def edited(edit: Callable[[Metadata], Any]) -> bytes:
    """Pickled metadata of one tensor and one object, after an edit."""
    size = torch.Size([4, 6])
    chunk = ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 6]))
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, [chunk])
    metadata = Metadata(
        {"t": tensor, "o": BytesStorageMetadata()},
        None,
        {MetadataIndex("t", [2, 0]): _StorageInfo("file", 0, 10)},
        StorageMeta(),
    )
    edit(metadata)
    return pickle.dumps(metadata)


def tensor_of(metadata: Any) -> Any:
    return metadata.state_dict_metadata["t"]


def chunk_of(metadata: Any) -> Any:
    return tensor_of(metadata).chunks[0]


def info_of(metadata: Any) -> Any:
    (info,) = metadata.storage_data.values()
    return info


UNSOUND: dict[str, Callable[[Any], Any]] = {
    "no storage data": lambda m: setattr(m, "storage_data", None),
    "a list of tensors": lambda m: setattr(m, "state_dict_metadata", []),
    "a number as a name": lambda m: m.state_dict_metadata.update({5: BytesStorageMetadata()}),
    "a number as a tensor": lambda m: m.state_dict_metadata.update({"x": 5}),
    "a number as a chunk": lambda m: tensor_of(m).chunks.append(5),
    "a chunk of another rank": lambda m: setattr(chunk_of(m), "sizes", torch.Size([2])),
    "a chunk beyond the tensor": lambda m: setattr(chunk_of(m), "offsets", torch.Size([3, 0])),
    "offsets of another rank": lambda m: vars(chunk_of(m)).update(
        offsets=torch.Size([0]), sizes=torch.Size([4, 6])
    ),
    "a list of negative sizes": lambda m: setattr(chunk_of(m), "sizes", [-1, 6]),
    "sizes of text": lambda m: setattr(tensor_of(m), "size", ("4", "6")),
    "more elements than there are addresses": lambda m: setattr(
        tensor_of(m), "size", torch.Size([1 << 40, 1 << 40])
    ),
    "a number as an index": lambda m: m.storage_data.update({5: info_of(m)}),
    "a number as a place": lambda m: m.storage_data.update({MetadataIndex("o"): 5}),
    "a negative offset": lambda m: setattr(info_of(m), "offset", -1),
    "a negative length": lambda m: setattr(info_of(m), "length", -1),
    "an end beyond all files": lambda m: setattr(info_of(m), "offset", (1 << 63) - 5),
    "a boolean offset": lambda m: setattr(info_of(m), "offset", True),
    "an absolute path": lambda m: setattr(info_of(m), "relative_path", "/etc/passwd"),
    "a path to the parent": lambda m: setattr(info_of(m), "relative_path", "a/../../b"),
    "a path with a NUL": lambda m: setattr(info_of(m), "relative_path", "a\0b"),
    "an empty path": lambda m: setattr(info_of(m), "relative_path", ""),
    "transforms that are no text": lambda m: setattr(info_of(m), "transform_descriptors", [5]),
    "a version that is no text": lambda m: setattr(m, "version", 5),
}


@pytest.mark.parametrize("edit", UNSOUND.values(), ids=UNSOUND)
def test_metadata_that_contradicts_itself_is_an_error(edit: Callable[[Any], Any]) -> None:
    assert load_metadata(edited(lambda metadata: None)).version is None
    with pytest.raises(ValueError, match=r".+"):
        load_metadata(edited(edit))


def test_an_unreadable_checkpoint_is_one_error_whoever_asks(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(print))
    reader = FastReader(checkpoint)

    error = failure_of(load, {"t": torch.zeros(2)}, reader)
    assert isinstance(error, UnsupportedError)
    assert "builtins.print" in str(error)

    reader.reset(checkpoint.parent / "nowhere")
    assert not isinstance(failure_of(load, {"t": torch.zeros(2)}, reader), UnsupportedError)


@dataclasses.dataclass
class Own:
    value: int


def test_objects_of_ones_own_load_when_torch_is_told_that_they_are_safe(tmp_path: Path) -> None:
    save({"own": Own(5)}, FastWriter(tmp_path))

    error = failure_of(load, {"own": None}, FastReader(tmp_path))
    assert isinstance(error, UnsupportedError)
    assert f"{__name__}.Own" in str(error)
    with torch.serialization.safe_globals([Own]):
        assert load({"own": None}, FastReader(tmp_path)) == {"own": Own(5)}
    assert load({"own": None}, FastReader(tmp_path, trust_pickle=True)) == {"own": Own(5)}


@pytest.mark.parametrize("flatten", [True, False])
def test_what_weights_only_allows_loads_as_stock_loads_it(flatten: bool, tmp_path: Path) -> None:
    state = {
        "none": None,
        "numbers": {"large": -(2**70), "float": 0.5, "complex": 1j, "bool": True},
        "text": "ü",
        "bytes": b"x",
        "bytearray": bytearray(b"y"),
        "set": {1, 2},
        "ordered": OrderedDict(a=1),
        "torch": {"dtype": torch.bfloat16, "device": torch.device("cpu")},
    }
    if not flatten:
        state["size"] = torch.Size([1, 2])
        state["nested"] = {"tensors": [torch.arange(3.0), (torch.nn.Parameter(torch.ones(2)), 5)]}
    save(state, FileSystemWriter(tmp_path), planner=DefaultSavePlanner(flatten_state_dict=flatten))

    loaded = {
        reader: load(
            {key: blank(value) if flatten else None for key, value in state.items()},
            reader(tmp_path),
            planner=DefaultLoadPlanner(flatten_state_dict=flatten, flatten_sharded_tensors=False),
        )
        for reader in (FastReader, FileSystemReader)
    }

    assert differences(loaded[FileSystemReader], loaded[FastReader]) == []
    assert differences(state, loaded[FastReader]) == []
    assert [type(value) for value in loaded[FastReader].values()] == [
        type(value) for value in loaded[FileSystemReader].values()
    ]


def test_a_planner_with_its_own_load_bytes_decides_by_itself(tmp_path: Path, canary: Path) -> None:
    class Loads(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            found.append(value.read())

    found: list[bytes] = []
    hostile = Call(os.system, f"touch {canary}")
    save({"object": hostile}, FileSystemWriter(tmp_path / "checkpoint"))
    load({"object": None}, FastReader(tmp_path / "checkpoint"), planner=Loads())

    with open(tmp_path / "checkpoint/__0_0.distcp", "rb") as file:
        assert found == [file.read()]
    assert not canary.exists()


def test_objects_behind_a_stream_transform_are_refused_too(tmp_path: Path, canary: Path) -> None:
    writer = FileSystemWriter(tmp_path / "checkpoint", _extensions=[ZStandard()])
    save({"object": Call(os.system, f"touch {canary}")}, writer)

    error = failure_of(load, {"object": None}, FastReader(tmp_path / "checkpoint"))

    assert isinstance(error, UnsupportedError)
    assert not canary.exists()
