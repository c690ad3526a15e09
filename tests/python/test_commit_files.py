"""The pickle that the engine makes of metadata, against the one that Python would make."""

from __future__ import annotations

import io
import pathlib
import pickle
import pickletools
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CuttingSavePlanner, random_tensor, save
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._extension import ZStandard
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

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.formats.metadata import dump_metadata
from torch_ckpt.formats.pickles import load_allowed
from torch_ckpt.storage import commit_files as commit_files_module
from torch_ckpt.storage.commit_files import commit_files
from torch_ckpt.storage.data_file import WrittenFile

SAVE_ID = "0123456789abcdef"
TRAILER_NBYTES = 64

# What the engine's pickles are made of; Python's have no others.
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MEMOIZE", "BINGET", "LONG_BINGET", "MARK", "NONE"),
    *("BININT1", "BININT2", "BININT", "LONG1", "NEWTRUE", "NEWFALSE"),
    *("SHORT_BINUNICODE", "BINUNICODE", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
}


class Builder:
    """Metadata of random tensors and objects, and the files that they would be in."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = [f"__{n}_0_{SAVE_ID}.distcp" for n in range(rng.choice([1, 3, 300]))]
        self.ends = [0] * len(self.names)
        self.has_long_slice = rng.random() < 0.5
        self.metadata = Metadata(
            {},
            rng.choice([None, {}]),
            {},
            StorageMeta(
                rng.choice([None, "somewhere", "", Path("/a/b c/ü"), Path("relative"), Path()]),
                rng.choice([None, SAVE_ID]),
                rng.choice([None, "load"]),
                rng.choice([[], ["one"], ["torch_ckpt: a mark", "two"]]),
            ),
            rng.choice([None, "1.0.0"]),
        )

    def place(self) -> _StorageInfo:
        number = self.rng.randrange(len(self.names))
        offset = self.ends[number]
        nbytes = self.rng.choice([1, 64, 2**9, 2**17])
        if self.has_long_slice:
            nbytes, self.has_long_slice = 2**33 + 5, False
        self.ends[number] += nbytes
        transforms = self.rng.choice([None, None, ["zstd"], ["stream.zstd/1", "x"]])
        return _StorageInfo(self.names[number], offset, nbytes, transforms)

    def tensor(self, fqn: str) -> None:
        rng = self.rng
        ndim = rng.choice([0, 1, 1, 2, 2, 3, 4, 6])
        box = [rng.choice([1, 5, 300, 70_000] if d == 0 else [0, 1, 40]) for d in range(ndim)]
        count = rng.choice([0, 1, 1, 2, 5]) if ndim else 1
        if ndim and rng.random() < 0.02:
            count = 1100
        if ndim == 1 and rng.random() < 0.3:
            box = [2**33]
        chunks = []
        whole = count == 1
        for number in range(count):
            offsets = torch.Size([number * box[0], *[0] * (ndim - 1)] if ndim else [])
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(box)))
            key = MetadataIndex(fqn, offsets, None if whole else number)
            self.metadata.storage_data[key] = self.place()
        size = torch.Size([box[0] * max(count, 1), *box[1:]] if ndim else [])
        properties = TensorProperties(
            dtype=rng.choice([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool]),
            requires_grad=rng.random() < 0.5,
            memory_format=rng.choice(
                [torch.contiguous_format, torch.channels_last, torch.preserve_format]
            ),
            pin_memory=rng.random() < 0.5,
        )
        self.metadata.state_dict_metadata[fqn] = TensorStorageMetadata(properties, size, chunks)

    def path(self, fqn: str) -> None:
        numbers = [0, -1, 255, 256, 65536, -(2**31), 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)]
        words = ["w", "model", "", "层", *numbers]
        path = self.rng.choices(words, k=self.rng.choice([0, 1, 2, 3, 5]))
        self.metadata.planner_data[fqn] = tuple(path)

    def build(self) -> tuple[Metadata, list[WrittenFile]]:
        rng = self.rng
        for number in range(rng.choice([0, 1, 2, 30, 30])):
            fqn = rng.choice(["layers.{}", "{}", "слой.{}.вес", "x" * 300 + "{}", "\U0001f600{}\0"])
            fqn = fqn.format(number)
            if rng.random() < 0.3:
                self.metadata.state_dict_metadata[fqn] = BytesStorageMetadata()
                self.metadata.storage_data[MetadataIndex(fqn)] = self.place()
            else:
                self.tensor(fqn)
            if self.metadata.planner_data is not None:
                self.path(fqn)
        return self.metadata, self.files()

    def files(self) -> list[WrittenFile]:
        return [
            WrittenFile(name, end, bytes(8 * -(-end // 65536)), {})
            for name, end in zip(self.names, self.ends, strict=True)
        ]


def assert_same(ours: Any, theirs: Any, at: str = "") -> None:
    """Values of the same types, attribute by attribute; dicts in whatever order."""
    assert type(ours) is type(theirs), at
    if isinstance(ours, dict):
        assert len(ours) == len(theirs), at
        keys = {key: key for key in theirs}
        for key, value in ours.items():
            assert_same(key, keys[key], f"{at}, a key")
            assert_same(value, theirs[key], f"{at}[{key!r}]")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), at
        for n, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{at}[{n}]")
    elif type(ours).__module__.startswith("torch.distributed"):
        assert_same(vars(ours), vars(theirs), at)
    else:
        assert ours == theirs, at


def load_stock(published: bytes, path: Path) -> Metadata:
    (path / ".metadata").write_bytes(published)
    return FileSystemReader(path).read_metadata()


@pytest.fixture
def only_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where Python pickles."""

    def refuse(metadata: Metadata) -> bytes:
        raise AssertionError("pickled by Python")

    monkeypatch.setattr(commit_files_module, "dump_metadata", refuse)


@pytest.mark.usefixtures("only_engine")
def test_random_metadata_are_what_python_would_have_pickled(
    rng: random.Random, tmp_path: Path, full: bool
) -> None:
    used: set[str] = set()
    for number in range(60 if full else 30):
        if number >= 10 and used == OPCODES and not full:
            break
        metadata, files = Builder(rng).build()
        published, _ = commit_files(metadata, files, save_id=SAVE_ID)
        pickled = published[:-TRAILER_NBYTES]
        by_python = dump_metadata(metadata)
        expected = pickle.loads(by_python)

        assert len(pickled) <= len(by_python)
        for loaded in (
            pickle.loads(pickled),
            pickle._loads(pickled),  # That of Python in Python, which is strict about frames.
            pickle.load(io.BytesIO(published)),
            load_allowed(pickled),
        ):
            assert_same(loaded, expected)
        read = load_stock(published, tmp_path)
        read.storage_meta.load_id = expected.storage_meta.load_id  # Stock has set its own.
        assert_same(read, expected)
        used |= {opcode.name for opcode, _, _ in pickletools.genops(pickled)}
    assert used == OPCODES


class Metadata2(Metadata):
    pass


class StorageMeta2(StorageMeta):
    pass


class Text(str):
    __slots__ = ()


def _change(name: str, value: Callable[[Any], Any]) -> Callable[[Metadata], Metadata]:
    def change(metadata: Metadata) -> Metadata:
        *way, last = name.split(".")
        target: Any = metadata
        for step in way:
            target = target[step] if isinstance(target, dict) else getattr(target, step)
        setattr(target, last, value(getattr(target, last, None)))
        return metadata

    return change


def _with_keys(name: str, key: Callable[[Any], Any]) -> Callable[[Metadata], Metadata]:
    return _change(name, lambda old: {key(k): v for k, v in old.items()})


def _place(**changes: Any) -> Callable[[Metadata], Metadata]:
    def change(metadata: Metadata) -> Metadata:
        vars(metadata.storage_data[MetadataIndex("o")]).update(changes)
        return metadata

    return change


TENSOR = "state_dict_metadata.w"
ODD: dict[str, Callable[[Metadata], Metadata]] = {
    "subclass": lambda m: Metadata2(**vars(m)),
    "field": _change("all_local_plans", lambda _: []),
    "field of none": _change("all_local_plans", lambda _: None),
    "dict": _change("state_dict_metadata", OrderedDict),
    "places": _change("storage_data", OrderedDict),
    "paths": _change("planner_data", OrderedDict),
    "other planner data": _change("planner_data", lambda _: ["w"]),
    "odd path": _change("planner_data", lambda _: {"w": ("w", 1.5)}),
    "long path": _change("planner_data", lambda _: {"w": (2**70,)}),
    "boolean in path": _change("planner_data", lambda _: {"w": (True,)}),
    "text of paths": _with_keys("planner_data", Text),
    "bytes of paths": _with_keys("planner_data", lambda fqn: fqn.encode()),
    "empty version": _change("version", lambda _: ""),
    "version": _change("version", Text),
    "no storage meta": _change("storage_meta", lambda _: None),
    "storage meta": _change("storage_meta", lambda meta: StorageMeta2(**vars(meta))),
    "storage meta field": _change("storage_meta.more", lambda _: 1),
    "checkpoint id": _change("storage_meta.checkpoint_id", pathlib.PurePosixPath),
    "checkpoint id of bytes": _change("storage_meta.checkpoint_id", lambda _: b"x"),
    "checkpoint id in no UTF-8": _change("storage_meta.checkpoint_id", lambda _: "\udcff"),
    "modules": _change("storage_meta.modules", tuple),
    "surrogate": _with_keys("planner_data", lambda fqn: fqn + "\ud800"),
    "size of a tuple": _change(f"{TENSOR}.size", tuple),
    "chunks": _change(f"{TENSOR}.chunks", tuple),
    "attribute": _change(f"{TENSOR}.more", lambda _: 1),
    "object with attribute": _change("state_dict_metadata.o.more", lambda _: 1),
    "old properties": _change(f"{TENSOR}.properties", lambda p: OldProperties(**vars(p))),
    "flag": _change(f"{TENSOR}.properties.pin_memory", lambda _: 1),
    "layout": _change(f"{TENSOR}.properties.layout", lambda _: torch.sparse_coo),
    "no transforms": _place(transform_descriptors=[]),
    "tuple of transforms": _place(transform_descriptors=("x",)),
    "attribute of place": _place(more=1, transform_descriptors=None),
    "flag for offset": _place(offset=False),
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD.keys())
def test_what_the_index_cannot_say_is_pickled_by_python(
    change: Callable[[Metadata], Metadata],
) -> None:
    size = torch.Size([3])
    tensor = TensorStorageMetadata(
        TensorProperties(), size, [ChunkStorageMetadata(torch.Size([0]), size)]
    )
    metadata = Metadata(
        {"w": tensor, "o": BytesStorageMetadata()},
        {"w": ("w",), "o": ("o",)},
        {
            MetadataIndex("o"): _StorageInfo("a.distcp", 0, 64),
            MetadataIndex("w", torch.Size([0])): _StorageInfo("a.distcp", 64, 64),
        },
        StorageMeta(Path("/x"), SAVE_ID),
        "1.0.0",
    )
    files = [WrittenFile("a.distcp", 128, bytes(8), {})]
    plain = commit_files(metadata, files, save_id=SAVE_ID)[0]
    assert plain[:-TRAILER_NBYTES] != dump_metadata(metadata)

    odd = change(metadata)
    published, index = commit_files(odd, files, save_id=SAVE_ID)

    assert published[:-TRAILER_NBYTES] == dump_metadata(odd)
    assert SAVE_ID.encode() in index


@pytest.mark.usefixtures("only_engine")
def test_what_a_save_publishes_loads_in_stock_as_what_it_returns(
    rng: random.Random, tmp_path: Path
) -> None:
    state = {
        "model": {"weight": random_tensor([30, 50], torch.float32), "scalar": torch.tensor(2.5)},
        "list": [torch.ones(2), {"x": 1}],
        "step": 7,
    }
    returned = save(state, FastWriter(tmp_path), planner=CuttingSavePlanner(rng))

    stock = FileSystemReader(tmp_path).read_metadata()
    stock.storage_meta.load_id = None
    # Hints apart: a planner may give none, or wrong ones.
    assert stock == returned
    for key in stock.storage_data:
        chunks = getattr(stock.state_dict_metadata[key.fqn], "chunks", None)
        if key.index is not None:
            assert chunks[key.index].offsets == key.offset
    assert load_allowed((tmp_path / ".metadata").read_bytes()[:-TRAILER_NBYTES]) == returned


@pytest.mark.usefixtures("only_engine")
def test_transforms_and_an_empty_state_dict_are_pickled_by_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    for name, state in (("some", {"w": torch.ones(3), "o": 1}), ("none", {})):
        path = tmp_path / name
        returned = save(state, FastWriter(path, _extensions=[ZStandard()]))
        stock = FileSystemReader(path).read_metadata()
        stock.storage_meta.load_id = None
        assert stock == returned
        assert FastReader(path).read_metadata().state_dict_metadata == returned.state_dict_metadata
