"""A few bytes of a file never stand for much memory, time or disk, whatever they state."""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import failure_of, load, save
from crafted import (
    LAYOUT,
    StoredBytes,
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
from deepspeed_checkpoints import write
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.cli.main import main
from torch_ckpt.conversion.convert import convert
from torch_ckpt.errors import CorruptionError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats import expansion
from torch_ckpt.storage.compare import compare

MANY = 1 << 25
REBUILD = "torch._utils._rebuild_"
PATH = "pathlib.PurePosixPath"


def count(n: int) -> bytes:
    """A range of numbers."""
    return call("builtins.range", number(0), number(n), number(1))


def remember(value: bytes, key: int) -> bytes:
    return value + b"q" + bytes([key])


def recall(key: int) -> bytes:
    return b"h" + bytes([key])


def each(value: bytes, calls: bytes, times: int = 1500) -> bytes:
    """A value under the key 1 of the memo, and what uses it again and again."""
    return b"(" + remember(value, 1) + calls * times + b"t"


def reduced(name: str, *arguments: bytes) -> bytes:
    """A call of the function under the key 2 of the memo."""
    return recall(2) + b"(" + b"".join(arguments) + b"tR"


def using(function: str, value: bytes, times: int = 1500) -> bytes:
    """Calls of one function with one value, again and again."""
    return (
        b"("
        + remember(named(function), 2)
        + each(value, reduced(function, recall(1)), times)
        + b"t"
    )


def several(opcode_count: int) -> bytes:
    return b"(" + b"K\x01" * opcode_count + b"t"


def expanded(storage: str, stored: int, *sizes: int) -> bytes:
    """A tensor whose elements are all the first one of its storage."""
    strides = tuple_of(*[number(0)] * len(sizes))
    return tensor_of(storage, stored, tuple_of(*map(number, sizes)), strides)


def quantized(numel: int, parameters: bytes) -> bytes:
    storage = tuple_of(
        text("storage"), named("torch.QUInt8Storage"), text("0"), text("cpu"), number(5056)
    )
    return call(
        REBUILD + "qtensor",
        *(storage + b"Q", number(0), tuple_of(number(numel)), tuple_of(number(0)), parameters),
        *(b"\x89", named("collections.OrderedDict") + b")R"),
    )


NESTED_LISTS = (
    remember(b"](" + b"K\x01" * 300 + b"e", 3)
    + remember(b"](" + recall(3) * 300 + b"e", 4)
    + remember(b"](" + recall(4) * 300 + b"e", 5)
)
"""A list of 27 million numbers. It leaves lists on the stack."""

WIDE = tuple_of(
    *(number(3), text("|"), b"N", tuple_of(text("a"))),
    b"}" + text("a") + tuple_of(dtype("O8"), number(0)) + b"s",
    *(number(1 << 30), number(1), number(16)),
)
"""The state of a dtype with an object at the start of a GiB."""

REPEATED = tuple_of(
    *(number(3), text("|"), tuple_of(dtype("O8"), tuple_of(number(1 << 27))), b"N", b"N"),
    *(number(-1), number(-1), number(63)),
)
"""The state of a dtype of many objects."""

HEAVY = b"(" + b"K\x01" * 20_000 + b"t"

OBJECTS: dict[str, bytes] = {
    "sizes of a range": call("torch.Size", count(MANY)),
    "sizes of an expanded tensor": call("torch.Size", expanded("torch.LongStorage", 632, MANY)),
    "sizes of one tuple": using("torch.Size", HEAVY),
    "dimensions of one tuple": b"("
    + remember(several(8000), 1)
    + tensor_of("torch.FloatStorage", 1264, recall(1), recall(1)) * 600
    + b"t",
    "a sparse tensor of ranges": call(
        REBUILD + "sparse_tensor", LAYOUT, tuple_of(count(MANY), count(MANY), tuple_of(number(0)))
    ),
    "a sparse tensor of nested lists": b"("
    + NESTED_LISTS
    + call(REBUILD + "sparse_tensor", LAYOUT, tuple_of(recall(5), recall(5), tuple_of(number(0))))
    + b"t",
    "a sparse tensor of repeated indices": call(
        REBUILD + "sparse_tensor",
        LAYOUT,
        tuple_of(
            expanded("torch.LongStorage", 632, 1, 1 << 31),
            expanded("torch.FloatStorage", 1264, 1 << 31),
            call("torch.Size", tuple_of(number(1 << 62))),
        ),
    ),
    "a quantized tensor of nested lists": b"("
    + NESTED_LISTS
    + quantized(300, tuple_of(named("torch.per_channel_affine"), recall(5), recall(5), number(0)))
    + b"t",
    "a quantized tensor of repeated scales": quantized(
        1 << 27,
        tuple_of(
            named("torch.per_channel_affine"),
            *(expanded("torch.FloatStorage", 1264, 1 << 27),) * 2,
            number(0),
        ),
    ),
    "a nested tensor of repeated sizes": call(
        REBUILD + "nested_tensor",
        expanded("torch.FloatStorage", 1264, 1),
        *(expanded("torch.LongStorage", 632, 1 << 27, 1),) * 2,
        expanded("torch.LongStorage", 632, 1 << 27),
    ),
    "a device's tensor of an expanded one": call(
        REBUILD + "device_tensor_from_cpu_tensor",
        expanded("torch.FloatStorage", 1264, MANY),
        *(named("torch.float64"), text("cpu"), b"\x89"),
    ),
    "tensors of one array": each(
        array("i1", tuple_of(number(20_000)), raw(b"a" * 20_000)),
        call(
            REBUILD + "device_tensor_from_numpy",
            *(recall(1), named("torch.complex128"), text("cpu"), b"\x89"),
        ),
        1000,
    ),
    "counters of one dict": using(
        "collections.Counter", b"}(" + b"".join(number(i) + b"N" for i in range(9000)) + b"u"
    ),
    "attributes of one dict": each(
        b"}(" + b"".join(text(f"a{i}") + b"N" for i in range(9000)) + b"u",
        named("collections.OrderedDict") + b")R" + recall(1) + b"b",
        1000,
    ),
    "paths of one text": using(PATH, text("a/" * 30_000), 500),
    "numbers of one text": using("decimal.Decimal", text("1" * 100_000)),
    "an array of wide objects": array("V8", tuple_of(number(1)), b"](K\x01e", WIDE),
    "an array of repeated objects": array("V8", tuple_of(number(1)), b"](K\x01e", REPEATED),
    "dicts of one heavy key, by lists": b"("
    + remember(HEAVY, 1)
    + remember(b"](" + recall(1) + b"Ne", 3)
    + (named("collections.OrderedDict") + b"](" + recall(3) + b"e\x85R") * 1500
    + b"t",
    "dicts of one huge number": b"("
    + remember(b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000, 1)
    + (b"}" + recall(1) + b"Ns") * 60_000
    + b"t",
    "dtypes of one dict": b"("
    + remember(tuple_of(*(text(f"f{i}") for i in range(3000))), 1)
    + remember(dtype("i1"), 4)
    + remember(
        b"}("
        + b"".join(text(f"f{i}") + tuple_of(recall(4), number(i)) for i in range(3000))
        + b"u",
        3,
    )
    + dtype(
        "V8",
        tuple_of(
            number(3), text("|"), b"N", recall(1), recall(3), number(3000), number(1), number(16)
        ),
    )
    * 500
    + b"t",
}

BOUNDED = """
import os, pickle, resource, sys, time
import torch
from torch_ckpt.formats.object_pickles import load_object
from torch_ckpt.formats.pickles import load_allowed
import io

def outcome(kind, payload):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = used + (400 << 20) + 64 * len(payload)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    try:
        load_object(io.BytesIO(payload)) if kind == "object" else load_allowed(payload)
    except MemoryError:
        return "filled the memory"
    except Exception as error:
        if "alloc" in str(error):
            return "filled the memory"
        return "refused" if time.process_time() - begin < 8 else "slow"
    return "loaded" if time.process_time() - begin < 8 else "slow"

for name, (kind, payload) in pickle.load(open(sys.argv[1], "rb")).items():
    sys.stdout.flush()
    if os.fork() == 0:
        begin = time.process_time()
        print(name, outcome(kind, payload), sep=": ", flush=True)
        os._exit(0)
    if os.wait()[1] != 0:
        print(name, "died", sep=": ")
"""


def test_a_call_costs_no_more_than_its_pickle_justifies(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    payloads = {
        name: ("object", archive(b"\x80\x02" + crafted + b".").getvalue())
        for name, crafted in OBJECTS.items()
    }
    (tmp_path / "payloads").write_bytes(pickle.dumps(payloads))

    found = run_python(BOUNDED, tmp_path / "payloads").splitlines()

    assert found == [f"{name}: refused" for name in OBJECTS]


def short(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def metadata_calls(module: str, name: str, arguments: bytes, times: int) -> bytes:
    """Metadata that call a function with the same arguments again and again."""
    function = short(module) + short(name) + b"\x93"
    return b"\x80\x04(" + arguments + b"\x94" + (function + b"h\x00R") * times + b"t."


METADATA = {
    "paths of one text": metadata_calls(
        "pathlib", "PurePosixPath", text("a/" * 30_000) + b"\x85", 500
    ),
    "paths of texts": metadata_calls(
        "pathlib", "PurePosixPath", b"(" + short("a") * 9000 + b"t", 500
    ),
    "sizes of one tuple": metadata_calls("torch", "Size", several(9000) + b"\x85", 2000),
}


def test_a_call_in_metadata_costs_no_more_than_its_pickle_justifies(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    payloads = {name: ("metadata", crafted) for name, crafted in METADATA.items()}
    (tmp_path / "payloads").write_bytes(pickle.dumps(payloads))

    found = run_python(BOUNDED, tmp_path / "payloads").splitlines()

    assert found == [f"{name}: refused" for name in METADATA]


def test_calls_that_copy_little_load(tmp_path: Path) -> None:
    value = {
        "sizes": [torch.Size(range(100)) for _ in range(100)],
        "counter": collections.Counter(dict.fromkeys(range(1000), 2)),
        "deque": collections.deque([[1, [2, {"a": range(10**12)}]]] * 100),
        "quantized": torch.quantize_per_channel(
            torch.ones(3, 4), torch.ones(3), torch.zeros(3), 0, torch.quint8
        ),
        "sparse": torch.eye(3).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
    }
    save({"value": (value,)}, FileSystemWriter(tmp_path))

    ((loaded,),) = load({"value": None}, FastReader(tmp_path)).values()

    assert loaded.keys() == value.keys()
    for name in ("sizes", "counter", "deque"):
        assert loaded[name] == value[name]
    for name in ("quantized", "sparse", "compressed"):
        dense = [
            one.dequantize() if one.is_quantized else one.to_dense()
            for one in (loaded[name], value[name])
        ]
        assert torch.equal(*dense)


# Archives


def compressed_archive(nbytes: int) -> bytes:
    """An archive with a tensor of zeros, compressed."""
    pickled = tensor_of(
        "torch.FloatStorage", nbytes // 4, tuple_of(number(nbytes // 4)), tuple_of(number(1))
    )
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")
        file.writestr("archive/data/0", bytes(nbytes))
    return stream.getvalue()


def hidden_archive(shown: bytes, hidden: bytes) -> bytes:
    """An archive with two directories: torch reads that of the zip64 end record, if it is there."""

    def moved(data: bytes, by: int) -> tuple[bytes, int, int]:
        """The directory, with offsets moved; its entries, and its offset."""
        entries, nbytes, offset = struct.unpack("<HII", data[-12:-2])
        directory = bytearray(data[offset : offset + nbytes])
        at = 0
        while at < nbytes:
            name, extra, comment = struct.unpack_from("<3H", directory, at + 28)
            (place,) = struct.unpack_from("<I", directory, at + 42)
            struct.pack_into("<I", directory, at + 42, place + by)
            at += 46 + name + extra + comment
        return bytes(directory), entries, offset

    ours, our_count, our_offset = moved(shown, 0)
    theirs, their_count, their_offset = moved(hidden, our_offset)
    data = shown[:our_offset] + hidden[:their_offset]
    their_begin = len(data)
    data += theirs
    our_begin = len(data)
    data += ours
    end64 = len(data)
    data += struct.pack(
        "<4sQ2H2I4Q",
        *(b"PK\6\6", 44, 45, 45, 0, 0, their_count, their_count, len(theirs), their_begin),
    )
    data += struct.pack("<4sIQI", b"PK\6\7", 0, end64, 1)
    return data + struct.pack(
        "<4s4H2IH", b"PK\5\6", 0, 0, our_count, our_count, len(ours), our_begin, 0
    )


@pytest.mark.parametrize("kind", ["compressed", "hidden"])
def test_a_compressed_record_of_an_object_is_refused(kind: str, tmp_path: Path) -> None:
    data = compressed_archive(1 << 20)
    if kind == "hidden":
        data = hidden_archive(archive(b"\x80\x02N.").getvalue(), data)
        assert torch.load(io.BytesIO(data)).numel() == 1 << 18, "torch does not find it"
    save(
        {"object": data, "tensor": torch.ones(2)}, FileSystemWriter(tmp_path), planner=StoredBytes()
    )

    error = failure_of(load, {"object": None}, FastReader(tmp_path))

    assert isinstance(error, UnsupportedError if kind == "compressed" else CorruptionError)
    for part in (
        "'object'",
        "__0_0.distcp",
        "compressed" if kind == "compressed" else "end records",
    ):
        assert part in str(error)
    assert load({"tensor": torch.zeros(2)}, FastReader(tmp_path))["tensor"].sum() == 2


def test_a_record_that_torch_finds_under_many_names_is_read_once(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as file:
        names = ["abcdefgh", "ABCDEFGH"]
        tensors = [
            tensor_of("torch.ByteStorage", 1 << 20, tuple_of(number(1)), tuple_of(number(1)), name)
            for name in names
        ]
        pickled = (
            b"\x80\x02}("
            + b"".join(map(b"".join, zip(map(text, names), tensors, strict=True)))
            + b"u."
        )
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/data/abcdefgh", bytes(1 << 20))
    assert torch.load(tmp_path / "file.pt").keys() == set(names)

    error = failure_of(load, dict.fromkeys(names), FastReader(tmp_path / "file.pt"))

    assert isinstance(error, UnsupportedError)
    assert "not a number" in str(error)


# Stream transforms


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of 4 MiB in place of 256 MiB."""
    assert expansion.allowed_nbytes(1000) == (256 << 20) + 64_000
    monkeypatch.setattr(expansion, "_MIN_NBYTES", 4 << 20)


@pytest.mark.parametrize("trust_pickle", [False, True])
def test_a_stream_expands_only_as_far_as_its_bytes_justify(
    trust_pickle: bool, tmp_path: Path, small_limit: None
) -> None:
    zeros = bytearray(5 << 20)
    writer = FastWriter(tmp_path, _extensions=[ZStandard()])
    save({"object": zeros, "tensor": torch.zeros(2 << 20)}, writer)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 16384

    # The caller has the memory of the tensor already.
    target = {"tensor": torch.ones(2 << 20)}
    assert not load(target, FastReader(tmp_path))["tensor"].any()

    reader = FastReader(tmp_path, trust_pickle=trust_pickle)
    if trust_pickle:
        assert load({"object": None}, reader)["object"] == zeros
        return
    error = failure_of(load, {"object": None}, reader)
    assert isinstance(error, UnsupportedError)
    for part in ("'object'", "stream.zstd", "trust_pickle=True"):
        assert part in str(error)


def test_many_streams_expand_together_only_as_far_as_their_bytes_justify(
    tmp_path: Path, small_limit: None
) -> None:
    state = {f"object {i}": bytearray(1 << 20) for i in range(6)}
    save(state, FastWriter(tmp_path, _extensions=[ZStandard()]))

    assert load(dict.fromkeys(list(state)[:3]), FastReader(tmp_path))
    error = failure_of(load, dict.fromkeys(state), FastReader(tmp_path))

    assert isinstance(error, UnsupportedError)


# Commands


def state_of(kind: str) -> dict[str, Any]:
    state: dict[str, Any] = {"sound": torch.arange(3.0), "step": 7}
    if kind == "expanded":
        state["large"] = torch.zeros(1).expand(1 << 33)
    elif kind == "on the meta device":
        state["large"] = torch.empty(1 << 33, device="meta")
    elif kind == "many on the meta device":
        state |= {f"large{i}": torch.empty(1 << 25, device="meta") for i in range(1000)}
    elif kind == "objects of expanded tensors":
        state["large"] = collections.deque([torch.zeros(1).expand(1 << 33)])
    return state


KINDS = ("expanded", "on the meta device", "many on the meta device", "objects of expanded tensors")


@pytest.mark.parametrize("kind", KINDS)
def test_commands_state_the_size_of_a_large_tensor_and_go_on(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.pt"
    torch.save(state_of(kind), file)
    is_tensor = not kind.startswith("objects")

    assert main(["inspect", str(file)]) == 0
    assert ("32.00 GiB" in capsys.readouterr().out) == (is_tensor and not kind.startswith("many"))
    assert main(["verify", str(file)]) == 0
    capsys.readouterr()

    assert main(["diff", str(file), str(file)]) == 2
    printed = capsys.readouterr().out
    assert "2 values are equal, 0 differ" in printed
    assert not is_tensor or f"it has {1 << (35 if 'many' not in kind else 27)} bytes" in printed

    if is_tensor:
        assert main(["convert", str(file), str(tmp_path / "out"), "--to", "dcp"]) == 3
        assert "bytes, and the files of the checkpoint" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    else:
        assert main(["convert", str(file), str(tmp_path / "out"), "--to", "dcp"]) == 0
    target = {"sound": torch.zeros(3), "step": 0}
    assert load(target, FastReader(file))["step"] == 7


def test_a_large_tensor_is_converted_if_its_author_is_trusted(
    tmp_path: Path, small_limit: None
) -> None:
    torch.save({"large": torch.ones(1).expand(2 << 20)}, tmp_path / "file.pt")
    source, target = Location(tmp_path / "file.pt"), Location(tmp_path / "out")
    with pytest.raises(UnsupportedError, match="trust-pickle"):
        convert(source, target, "dcp")

    convert(source, target, "dcp", trust_pickle=True)

    found = compare(source, target, trust_pickle=True)
    assert (found.equal, found.differences, found.unknown) == (1, {}, {})


@pytest.mark.parametrize("name", ["stock", "indexed", "file.pt", "DeepSpeed"])
def test_the_limit_follows_the_files_wherever_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expansion, "_MIN_NBYTES", 0)
    path, state = tmp_path / name, {"t": torch.ones(100)}
    if name == "file.pt":
        torch.save(state, path)
    elif name == "DeepSpeed":  # Its files are in the folder that the file `latest` names.
        write(path / "tag", 1)
        (path / "latest").write_text("tag")
    else:
        save(state, (FileSystemWriter if name == "stock" else FastWriter)(path))

    found = compare(Location(path), Location(path))

    assert found.equal > 0
    assert not found.unknown


def test_a_tensor_of_the_meta_device_is_an_error_that_names_it(tmp_path: Path) -> None:
    torch.save({"empty": torch.empty(3, device="meta"), "w": torch.ones(3)}, tmp_path / "file.pt")

    error = failure_of(load, {"empty": torch.zeros(3)}, FastReader(tmp_path / "file.pt"))

    assert isinstance(error, UnsupportedError)
    assert "'empty'" in str(error)
    assert "meta device" in str(error)
    found = compare(Location(tmp_path / "file.pt"), Location(tmp_path / "file.pt"))
    assert (found.equal, list(found.unknown)) == (1, ["empty"])


def test_metadata_that_states_a_large_tensor_is_not_converted(tmp_path: Path) -> None:
    """The pieces of a conversion alone would fill the memory."""
    save({"t": torch.ones(4)}, FileSystemWriter(tmp_path / "stock"))
    path = tmp_path / "stock" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    tensor = metadata.state_dict_metadata["t"]
    tensor.size = tensor.chunks[0].sizes = torch.Size([1 << 55])
    path.write_bytes(pickle.dumps(metadata))

    with pytest.raises(UnsupportedError, match=f"it has {1 << 57} bytes"):
        convert(Location(tmp_path / "stock"), Location(tmp_path / "out"), "dcp")


def test_no_more_files_are_measured_than_justify_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expansion, "_MIN_NBYTES", 0)
    state = {f"t{i}": torch.ones(100) for i in range(50)}
    save(state, FileSystemWriter(tmp_path / "stock", single_file_per_rank=False))
    assert len(list((tmp_path / "stock").glob("*.distcp"))) == 50
    measured: list[Location] = []
    nbytes = Location.nbytes
    monkeypatch.setattr(Location, "nbytes", lambda self: measured.append(self) or nbytes(self))

    found = compare(Location(tmp_path / "stock"), Location(tmp_path / "stock"))

    assert (found.equal, found.unknown) == (50, {})
    assert len(measured) < 10
