"""Checkpoints of an old megatron-core, whose optimizer states are ranges of flattened shards."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_megatron
import pytest
import torch
from checkpoints import (
    CuttingLoadPlanner,
    blank,
    data_files,
    differences,
    failure_of,
    load,
)
from command import DAMAGED, SOUND, UNKNOWN, run_command
from golden_megatron import GOLDEN
from support.flips import flip_value
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from torch_ckpt import FastLoadPlanner, FastReader
from torch_ckpt.errors import CorruptionError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.metadata import load_metadata
from torch_ckpt.formats.pickles import MEGATRON_CLASSES, ForbiddenPickleError, load_allowed
from torch_ckpt.formats.recognise import open_stored
from torch_ckpt.planning.flat_shard import FlatShard

FLAT = "optimizer.state.exp_avg."
SHAPE = "nd_reformulated_orig_global_shape"
PLANNERS = {"stock": DefaultLoadPlanner, "fast": FastLoadPlanner}

with_planners = pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)


def metadata_of(path: Path) -> Any:
    return load_metadata((path / ".metadata").read_bytes())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "copy"))


@with_planners
@pytest.mark.parametrize("trust_pickle", [False, True])
def test_every_tensor_and_object_loads_with_the_bits_that_were_saved(
    trust_pickle: bool, planner: Any
) -> None:
    full = golden_megatron.full_state()
    reader = FastReader(GOLDEN, trust_pickle=trust_pickle)
    loaded = load(blank(full), reader, planner=planner())
    assert differences(full, loaded) == []


def test_flattened_tensors_have_their_own_shape() -> None:
    stored = FastReader(GOLDEN).read_metadata().state_dict_metadata
    assert {fqn: list(one.size) for fqn, one in stored.items() if fqn.startswith(FLAT)} == {
        FLAT + name: list(shape) for name, (shape, _, _) in golden_megatron.PARAMETERS.items()
    }
    assert list(metadata_of(GOLDEN).state_dict_metadata[FLAT + "cube"].size) == [1, 2, 1, 60]


def test_any_boxes_load(rng: random.Random) -> None:
    full = golden_megatron.full_state()
    for _ in range(10):
        loaded = load(blank(full), FastReader(GOLDEN), planner=CuttingLoadPlanner(rng))
        assert differences(full, loaded) == []


@with_planners
def test_ranges_across_the_saved_ranges_load(planner: Any, full: bool) -> None:
    for fqn, whole in golden_megatron.full_state().items():
        if not fqn.startswith(FLAT):
            continue
        flat = whole.flatten()
        for begin, end in itertools.combinations(range(0, len(flat) + 1, 7 if full else 31), 2):
            part = torch.zeros(end - begin)
            state = {fqn: FlatShard(part, fqn, whole.shape, begin)}
            load(state, FastReader(GOLDEN), planner=planner())
            assert torch.equal(part, flat[begin:end]), (fqn, begin, end)


def test_metadata_of_version_0_14_loads(copy: Path) -> None:
    """Its plans have the facts, and so have DCP's own metadata."""
    metadata = metadata_of(copy)
    assert type(metadata) is Metadata
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    full = golden_megatron.full_state()
    assert differences(full, load(blank(full), FastReader(copy))) == []


def write(metadata: Any, path: Path) -> None:
    """Writes metadata in which DCP's classes have the names of Megatron's."""
    pickled = pickle.dumps(metadata, 2)  # Protocol 2 has the names as lines of text.
    for (module, name), cls in MEGATRON_CLASSES.items():
        own = f"c{cls.__module__}\n{cls.__name__}\n".encode()
        assert own in pickled
        pickled = pickled.replace(own, f"c{module}\n{name}\n".encode())
    (path / ".metadata").write_bytes(pickled)


def test_a_checkpoint_without_flattened_tensors_needs_no_headers(copy: Path) -> None:
    metadata = metadata_of(copy)
    for fqn in [fqn for fqn in metadata.mcore_data if fqn.startswith(FLAT)]:
        del metadata.mcore_data[fqn], metadata.state_dict_metadata[fqn]
    write(metadata, copy)
    reader = FastReader(copy)
    state = {k: v for k, v in golden_megatron.full_state().items() if not k.startswith(FLAT)}
    assert differences(state, load(blank(state), reader)) == []
    assert open_stored(Location(copy), verify=True, trust_pickle=False).index is None


def test_inspect_lists_the_shapes_and_counts_each_range_once() -> None:
    status, printed = run_command("inspect", "--json", GOLDEN)
    assert status == SOUND
    summary = json.loads(printed)
    shapes = {tensor["fqn"]: tensor["shape"] for tensor in summary["tensors"]}
    assert shapes == {
        fqn: list(value.shape)
        for fqn, value in golden_megatron.full_state().items()
        if isinstance(value, torch.Tensor)
    }
    files = {file["rank"]: file["nbytes"] for file in summary["files"]}
    assert {rank["rank"]: rank["nbytes"] for rank in summary["ranks"]} == files


def test_verify_reads_every_byte_and_names_the_damaged_tensor(copy: Path) -> None:
    status, printed = run_command("verify", copy)
    assert status == UNKNOWN, printed  # It has no checksums besides those of zip records.
    nbytes = sum(path.stat().st_size for path in data_files(copy))
    assert f"no damage found ({nbytes} bytes" in printed

    begin = golden_megatron.full_state()[FLAT + "norm"][:3]
    payload = begin.numpy().tobytes()
    (file,) = (file for file in data_files(copy) if payload in file.read_bytes())
    flip_value(file, begin)
    status, printed = run_command("verify", copy)
    assert status == DAMAGED
    assert FLAT + "norm" in printed


CUBE = FLAT + "cube"  # Shape [3, 8, 5], stored as [1, 2, 1, 60].


def tell(shape: Any) -> Callable[[Any], None]:
    return lambda metadata: metadata.mcore_data[CUBE].update({SHAPE: shape})


def store(**fields: Any) -> Callable[[Any], None]:
    """Changes fields of the first stored box."""

    def edit(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata[CUBE].chunks[0]
        for name, value in fields.items():
            setattr(chunk, name, torch.Size(value))

    return edit


def twice(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata[CUBE].chunks
    chunks.append(chunks[0])


LIES: dict[str, Callable[[Any], None]] = {
    "a text": tell("shape"),
    "nothing": tell(None),
    "texts": tell(("3", "8", "5")),
    "a boolean": tell((True, 24, 5)),
    "negative": tell((3, -8, -5)),
    "too few axes": tell((24, 5)),
    "too many axes": tell((3, 8, 5, 1)),
    "an axis that the cells do not divide": tell((3, 9, 5)),
    "more elements": tell((3, 8, 10)),
    "fewer elements": tell((3, 8, 0)),
    "more than there are addresses": tell((3, 1 << 62, 5)),
    "a tensor that is not stored": lambda m: m.state_dict_metadata.pop(CUBE),
    "an object": lambda m: m.state_dict_metadata.update({CUBE: BytesStorageMetadata()}),
    "a box over two cells": store(offsets=[0, 0, 0, 0], sizes=[1, 2, 1, 27]),
    "a box that is stored nowhere": store(offsets=[0, 0, 0, 1]),
    "one box twice": twice,
    "a longer range": store(sizes=[1, 1, 1, 28]),
    "a shorter range": store(sizes=[1, 1, 1, 26]),
    "another dtype": lambda m: setattr(
        m.state_dict_metadata[CUBE].properties, "dtype", torch.int32
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_shape_that_contradicts_what_is_stored_is_an_error_of_its_tensor_alone(
    lie: Callable[[Any], None], copy: Path
) -> None:
    metadata = metadata_of(copy)
    lie(metadata)
    write(metadata, copy)
    assert_only_one_fails(copy, CUBE)


def test_verify_and_inspect_name_a_tensor_whose_shape_contradicts_what_is_stored(
    copy: Path,
) -> None:
    metadata = metadata_of(copy)
    LIES["more elements"](metadata)
    write(metadata, copy)
    status, printed = run_command("verify", copy)
    assert status == DAMAGED
    assert "1 FQN is damaged\n" in printed
    assert CUBE in printed
    status, printed = run_command("inspect", copy)
    assert status == SOUND
    assert "contradicts" in printed


@pytest.mark.parametrize("size", [[], [0, 2, 1, 60]])
def test_boxes_beyond_their_tensor_are_an_error_of_the_metadata(
    size: list[int], copy: Path
) -> None:
    metadata = metadata_of(copy)
    metadata.state_dict_metadata[CUBE].size = torch.Size(size)
    write(metadata, copy)
    with pytest.raises(CorruptionError, match=CUBE):
        FastReader(copy).read_metadata()


def assert_only_one_fails(path: Path, fqn: str) -> None:
    full = golden_megatron.full_state()
    error = failure_of(load, {fqn: blank(full[fqn])}, FastReader(path))
    assert type(error) is CorruptionError
    assert fqn in str(error)
    del full[fqn]
    assert differences(full, load(blank(full), FastReader(path))) == []


def test_other_facts_are_ignored(copy: Path) -> None:
    metadata = metadata_of(copy)
    metadata.mcore_data[CUBE]["later"] = {"x": [1, None]}
    metadata.mcore_data["nobody"] = {"x": 1}
    metadata.mcore_data["no dict"] = 5
    write(metadata, copy)
    full = golden_megatron.full_state()
    assert differences(full, load(blank(full), FastReader(copy))) == []


class Touch:
    """Pickles as a call that creates a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("at", ["the facts", "a plan", "an attribute"])
def test_nothing_in_the_metadata_is_executed(at: str, copy: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    metadata = metadata_of(copy)
    if at == "the facts":
        metadata.mcore_data[CUBE][SHAPE] = Touch(canary)
    elif at == "a plan":
        metadata.all_local_plans[0].mcore_data["x"] = Touch(canary)
    else:
        metadata.another = Touch(canary)
    write(metadata, copy)

    error = failure_of(load, {CUBE: torch.zeros(3, 8, 5)}, FastReader(copy))

    assert isinstance(error, UnsupportedError)
    assert ".system" in str(error)
    assert not canary.exists()


@pytest.mark.parametrize("name", [name for _, name in MEGATRON_CLASSES])
def test_megatrons_classes_are_only_records(name: str) -> None:
    module = "megatron.core.dist_checkpointing.strategies.torch"
    cls = f"c{module}\n{name}\n".encode()
    for refused in (cls + b".", cls + b")R.", cls + b"}X\1\0\0\0aNsb."):
        with pytest.raises((ForbiddenPickleError, ValueError)):
            load_allowed(b"\x80\2" + refused)
    for other in (b"MCoreSavePlanner", b"os", b"torch"):
        with pytest.raises(ForbiddenPickleError):
            load_allowed(b"\x80\2c" + module.encode() + b"\n" + other + b"\n)\x81}b.")


def test_a_missing_file_is_an_error_that_names_it(copy: Path) -> None:
    lost = {
        index.fqn
        for index, info in metadata_of(copy).storage_data.items()
        if info.relative_path == "__2_0.distcp"
    }
    (copy / "__2_0.distcp").unlink()
    full = golden_megatron.full_state()
    assert CUBE in lost
    assert lost < set(full)
    for fqn in lost:
        error = failure_of(load, {fqn: blank(full.pop(fqn))}, FastReader(copy))
        assert isinstance(error, CorruptionError)
        assert "__2_0.distcp" in str(error)
    assert differences(full, load(blank(full), FastReader(copy))) == []


def test_a_damaged_header_is_an_error_that_names_the_tensor(copy: Path) -> None:
    metadata = metadata_of(copy)
    for fqn in (CUBE, "rows"):
        info = next(info for at, info in metadata.storage_data.items() if at.fqn == fqn)
        file = copy / info.relative_path
        sound = file.read_bytes()
        file.write_bytes(sound[: info.offset] + b"XX" + sound[info.offset + 2 :])
        assert_only_one_fails(copy, fqn)
        file.write_bytes(sound)


def test_a_tensor_that_only_torch_can_read_loads_beside_flattened_ones(copy: Path) -> None:
    """Here a transposed one, whose elements are in another order."""
    metadata = metadata_of(copy)
    whole = torch.arange(40.0).reshape(5, 8).t().bfloat16()
    with open(copy / "other", "wb") as file:
        torch.save(whole, file)
    ((index, info),) = [item for item in metadata.storage_data.items() if item[0].fqn == "rows"][:1]
    stored = metadata.state_dict_metadata["rows"]
    stored.chunks = [type(stored.chunks[0])(torch.Size([0, 0]), torch.Size([8, 5]))]
    for at in [at for at in metadata.storage_data if at.fqn == "rows"]:
        del metadata.storage_data[at]
    info.relative_path, info.offset, info.length = "other", 0, (copy / "other").stat().st_size
    metadata.storage_data[type(index)("rows", torch.Size([0, 0]))] = info
    write(metadata, copy)

    state = {"rows": torch.zeros(8, 5).bfloat16(), CUBE: torch.zeros(3, 8, 5)}
    load(state, FastReader(copy))

    assert torch.equal(state["rows"], whole)
    assert torch.equal(state[CUBE], golden_megatron.full_state()[CUBE])
