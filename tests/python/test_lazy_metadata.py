"""DCP's metadata, read from the index as far as they are asked for."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import (
    CuttingSavePlanner,
    data_files,
    random_tensor,
    save,
)
from support.commit_files import index_file
from support.flips import flipped
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torch_ckpt import FastReader, FastWriter
from torch_ckpt._core import _native
from torch_ckpt.errors import CorruptionError

FIELDS = ["state_dict_metadata", "storage_data", "planner_data"]


@pytest.fixture
def state(rng: random.Random) -> dict[str, Any]:
    return {
        "model": {
            "weight": random_tensor([30, 50], torch.float32),
            "bias": random_tensor([100], torch.bfloat16),
            "scalar": torch.tensor(2.5),
            "none": torch.zeros(0, 3),
        },
        "list": [torch.ones(2), {"x": 1}],
        "step": rng.randrange(1000),
    }


@pytest.fixture
def saved(state: dict[str, Any], rng: random.Random, tmp_path: Path) -> Path:
    save(state, FastWriter(tmp_path, thread_count=2), planner=CuttingSavePlanner(rng))
    return tmp_path


def read(path: Path) -> Metadata:
    return FastReader(path).read_metadata()


def test_what_the_index_says_equals_what_was_pickled(saved: Path) -> None:
    metadata, stock = read(saved), FileSystemReader(saved).read_metadata()

    for name in FIELDS:
        ours, theirs = getattr(metadata, name), getattr(stock, name)
        assert ours == theirs
        assert theirs == ours
        assert len(ours) == len(theirs) > 0
        assert list(ours) == list(ours.keys())
        assert set(ours.keys()) == theirs.keys()
        assert dict(ours) == {**ours} == theirs
        assert dict(ours.items()) == ours.copy() == theirs
        assert list(ours.values()) == [ours[key] for key in ours]
        assert type(ours.copy()) is dict
        for key, value in theirs.items():
            assert key in ours
            assert ours[key] == value
            assert type(ours[key]) is type(value)
    assert list(metadata.state_dict_metadata) == list(stock.state_dict_metadata)
    assert metadata.version == stock.version


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_plain_dicts(copied: Any, saved: Path) -> None:
    metadata = read(saved)

    made = copied(metadata)

    assert type(made) is Metadata
    for name in FIELDS:
        assert type(getattr(made, name)) is dict
        assert getattr(made, name) == getattr(metadata, name)
    replaced = dataclasses.replace(metadata, planner_data=None)
    assert replaced.planner_data is None
    assert replaced.state_dict_metadata is metadata.state_dict_metadata


def test_what_is_not_there_is_a_key_error(saved: Path) -> None:
    metadata = read(saved)
    places = metadata.storage_data
    known = next(key for key in places if key.fqn == "model.weight")

    for fqn in ("", "model", "model.weight ", "model.weight\0", "\ud800", 5, None):
        assert fqn not in metadata.state_dict_metadata
        assert metadata.state_dict_metadata.get(fqn) is None
        with pytest.raises(KeyError):
            metadata.state_dict_metadata[fqn]
    odd = [
        MetadataIndex("model.weigh", known.offset),
        MetadataIndex("model.weight"),
        MetadataIndex("model.weight", torch.Size([31, 0])),
        MetadataIndex("model.weight", torch.Size([0])),
        MetadataIndex("step", torch.Size([])),
        "model.weight",
    ]
    for key in odd:
        assert key not in places
        assert places.get(key, 7) == 7
        with pytest.raises(KeyError):
            places[key]


def test_boxes_are_found_with_a_right_hint_a_wrong_one_and_none(saved: Path) -> None:
    places = read(saved).storage_data
    expected = pickle.loads((saved / ".metadata").read_bytes()).storage_data
    for key, info in expected.items():
        for hint in (key.index, None, 0, 999, -1):
            assert places[MetadataIndex(key.fqn, key.offset, hint)] == info


def test_an_fqn_is_built_once_and_alone(saved: Path) -> None:
    metadata = read(saved)

    first = metadata.state_dict_metadata["model.weight"]

    assert metadata.state_dict_metadata["model.weight"] is first
    assert list(metadata.state_dict_metadata._built) == ["model.weight"]
    assert isinstance(first, TensorStorageMetadata)
    assert isinstance(metadata.state_dict_metadata["step"], BytesStorageMetadata)


@pytest.mark.parametrize("words", [("float7", "contiguous_format"), ("int8", "spiral_format")])
def test_a_word_that_torch_does_not_know_is_corruption_where_it_is_met(
    words: tuple[str, str], tmp_path: Path
) -> None:
    files = [("a.distcp", 1000, bytes(8), b"", 0)]
    entries = [
        ("odd", (*words, False, False, [3]), [([0], [3], 0, 0, 100, True, [])]),
        ("step", None, [([], [], 0, 100, 100, False, [])]),
    ]
    trailer, index = _native.make_index("0123456789abcdef", b"p", files, "1", entries, None)
    (tmp_path / ".metadata").write_bytes(b"p" + trailer)
    (tmp_path / ".index.0123456789abcdef").write_bytes(index)

    metadata = read(tmp_path)

    assert isinstance(metadata.state_dict_metadata["step"], BytesStorageMetadata)
    assert metadata.planner_data is None
    with pytest.raises(CorruptionError, match="torch lacks one of these"):
        metadata.state_dict_metadata["odd"]


# An index of many blocks


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 20,000 tensors, whose index is 60 blocks long."""
    path = tmp_path_factory.mktemp("large")
    values = torch.arange(60_000).reshape(20_000, 3)
    save({f"layers.{i}.weight": row for i, row in enumerate(values)}, FastWriter(path))
    return path


def row_of(path: Path, number: int) -> list[int]:
    target = {f"layers.{number}.weight": torch.zeros(3, dtype=torch.int64)}
    dcp.load(target, storage_reader=FastReader(path), no_dist=True)
    return target[f"layers.{number}.weight"].tolist()


def test_damage_to_a_large_index_stops_only_loads_that_use_it(
    large: Path, rng: random.Random, full: bool
) -> None:
    index = index_file(large)
    whole = index.read_bytes()
    assert len(whole) > 40 * 65536
    refused = right = 0
    for _ in range(40 if full else 12):
        at = rng.randrange(65536, len(whole))
        index.write_bytes(flipped(whole, at, rng.randrange(8)))
        number = rng.randrange(20_000)
        try:
            assert row_of(large, number) == [3 * number, 3 * number + 1, 3 * number + 2]
            right += 1
        except dcp.CheckpointException as error:
            (caught,) = {f[0] for f in error.failures.values()}
            assert isinstance(caught, CorruptionError), repr(caught)
            assert ".index" in str(caught)
            refused += 1
        opened = _native.open_checkpoint(
            _native.local_file_system(), str(large).encode(), ".metadata", ".index"
        )[1]
        assert opened is not None
        ((begin, end),) = opened.damage()
        assert begin <= at < end
        with pytest.raises(CorruptionError, match="checksum"):
            opened.check()
    index.write_bytes(whole)
    print(f"{refused} refused, {right} right")
    assert right > (5 if full else 1)


def test_one_tensor_of_many_costs_a_few_blocks_of_the_index(large: Path, run_python: Any) -> None:
    # The process counts what it has asked of the kernel, importing apart.
    script = """
import sys
from torch_ckpt import FastReader

def read_nbytes():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])

reader = FastReader(sys.argv[1])
before = read_nbytes()
metadata = reader.read_metadata()
metadata.state_dict_metadata["layers.777.weight"]
print(read_nbytes() - before)
"""
    assert int(run_python(script, large)) < 14 * 65536 < index_file(large).stat().st_size // 3
    assert data_files(large)
