"""Metadata and index that are damaged, lost, changed, stale, or of somebody else's save."""

from __future__ import annotations

import dataclasses
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import (
    blank,
    data_files,
    differences,
    failure_of,
    files,
    load,
    loads,
    random_tensor,
    save,
)
from forks import run_python
from support.commit_files import index_file
from support.flips import flip, flipped
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.errors import CorruptionError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import (
    INDEX_MARK,
    metadata_prefixes,
    open_committed,
)
from torch_ckpt.storage.verify import examine


def random_state(rng: random.Random) -> dict[str, Any]:
    return {
        "large": random_tensor([300, 500], torch.float32),
        "small": random_tensor([100], torch.bfloat16),
        "step": rng.randrange(1 << 24, 1 << 30),
    }


@pytest.fixture
def state(rng: random.Random) -> dict[str, Any]:
    return random_state(rng)


@pytest.fixture
def saved(state: dict[str, Any], tmp_path: Path) -> Path:
    """A checkpoint of ``state`` in two data files."""
    save(state, FastWriter(tmp_path / "saved", thread_count=2))
    return tmp_path / "saved"


def refusal(path: Path, state: dict[str, Any], **options: Any) -> str:
    """What the error says that keeps a load from altering any target."""
    targets = blank(state)
    error = failure_of(dcp.load, targets, storage_reader=FastReader(path), **options)
    assert isinstance(error, CorruptionError), repr(error)
    assert differences(blank(state), targets) == []
    return str(error)


# The index


@pytest.mark.parametrize("damage", ["missing", "empty", "flipped", "of another save"])
def test_without_its_index_a_checkpoint_is_refused_with_a_way_out(
    damage: str, saved: Path, state: dict[str, Any], tmp_path: Path
) -> None:
    index = index_file(saved)
    whole = index.read_bytes()
    save(state, FastWriter(tmp_path / "other"))
    other = index_file(tmp_path / "other").read_bytes()
    index.unlink()
    if damage != "missing":
        damaged = {"empty": b"", "flipped": flipped(whole, 99), "of another save": other}
        index.write_bytes(damaged[damage])

    said = refusal(saved, state, no_dist=True)

    for part in ("index", str(saved / ".metadata"), "FastReader(verify=False)"):
        assert part in said
    assert ": ;" not in said, "no reason is given"
    assert loads(saved, state, verify=False) == []
    assert loads(saved, state, FileSystemReader) == []


def test_an_index_of_any_length_is_refused_and_not_read_whole(
    saved: Path, state: dict[str, Any]
) -> None:
    for name in (index_file(saved).name, ".metadata"):
        before = (saved / name).read_bytes()
        with open(saved / name, "r+b") as file:
            file.truncate(1 << 43)  # 8 TiB, of which none is on the disk.
        targets = blank(state)
        error = failure_of(load, targets, FastReader(saved))
        assert isinstance(error, OSError | CorruptionError), repr(error)
        assert name in str(error) or "index" in str(error)
        assert differences(blank(state), targets) == []
        (saved / name).write_bytes(before)
    assert loads(saved, state) == []


# Metadata that unpickle and are not what was committed


def _edit_place(**changes: Any) -> Callable[[Metadata], None]:
    def edit(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == "large")
        info = metadata.storage_data[index]
        changed = {k: v(info) if callable(v) else v for k, v in changes.items()}
        metadata.storage_data[index] = dataclasses.replace(info, **changed)

    return edit


def _edit_size(metadata: Metadata) -> None:
    large = metadata.state_dict_metadata["large"]
    large.size = large.chunks[0].sizes = torch.Size([150, 1000])


def _swap_places(metadata: Metadata) -> None:
    one, two = (
        next(index for index in metadata.storage_data if index.fqn == fqn)
        for fqn in ("large", "small")
    )
    places = metadata.storage_data
    places[one], places[two] = places[two], places[one]


EDITS: dict[str, Callable[[Metadata], None]] = {
    "an offset": _edit_place(offset=lambda info: info.offset + 64),
    "a length": _edit_place(length=lambda info: info.length - 4),
    "a file that is not there": _edit_place(relative_path="__0_9.distcp"),
    "a file outside": _edit_place(relative_path="../saved/x.distcp"),
    "a size": _edit_size,
    "a dtype": lambda metadata: setattr(
        metadata.state_dict_metadata["large"], "properties", TensorProperties(dtype=torch.int32)
    ),
    "places swapped": _swap_places,
    "the mark of the index": lambda metadata: setattr(metadata.storage_meta, "modules", []),
    "storage_meta": lambda metadata: setattr(metadata, "storage_meta", None),
    "nothing but the pickle's bytes": lambda metadata: None,
}


@pytest.mark.parametrize("edit", EDITS)
def test_metadata_that_were_changed_and_still_unpickle_are_refused(
    edit: str, saved: Path, state: dict[str, Any]
) -> None:
    path = saved / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    EDITS[edit](metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=3))

    said = refusal(saved, state, no_dist=True)

    assert "contradict each other" in said
    assert str(path) in said


EVERY_FLIP = """
import resource, sys
from pathlib import Path
from torch_ckpt import FastReader
from torch_ckpt.errors import CorruptionError

resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
unpickled = []
sys.addaudithook(lambda event, _: event == "pickle.find_class" and unpickled.append(event))
path = Path(sys.argv[1])
whole = (path / ".metadata").read_bytes()
sound = dict(FastReader(path).read_metadata().storage_data)
refused = []
places = range(0, len(whole), int(sys.argv[2]))
for at in places:
    damaged = bytearray(whole)
    damaged[at] ^= 1 << at % 8
    (path / ".metadata").write_bytes(damaged)
    try:
        assert FastReader(path).read_metadata().storage_data == sound
    except CorruptionError:
        refused.append(at)
in_trailer = [at for at in places if at >= len(whole) - 64]
print("refused:", refused == in_trailer, "unpickled:", len(unpickled))
"""


def test_metadata_with_a_flipped_bit_are_never_unpickled(
    saved: Path, run_python: Callable[..., str], full: bool
) -> None:
    # One flip in fifty would have pickle reserve gigabytes. The index alone says what is stored; in
    # the trailer, which says whose index that is, every flip is found.
    assert run_python(EVERY_FLIP, saved, 1 if full else 3) == "refused: True unpickled: 0\n"


def test_metadata_with_a_damaged_pickle_load_by_their_index_and_fail_their_check(
    saved: Path, state: dict[str, Any], rng: random.Random
) -> None:
    path = saved / ".metadata"
    whole = path.read_bytes()
    for at in (0, rng.randrange(len(whole) - 64), len(whole) - 65):
        path.write_bytes(flipped(whole, at, rng.randrange(8)))
        assert loads(saved, state) == []
        committed, index = open_committed(Location(saved), "")
        assert index is not None
        for check in (committed.check, committed.read_pickle):
            with pytest.raises(CorruptionError, match=re.escape(str(path))):
                check()


@pytest.mark.thin(1.0)  # Another field each; the checksum alone finds some.
@pytest.mark.parametrize("at", [*range(0, 64, 8), 63])
def test_a_damaged_trailer_does_not_make_a_checkpoint_one_without_an_index(
    at: int, saved: Path, state: dict[str, Any]
) -> None:
    path = saved / ".metadata"
    flip(path, at - 64)

    assert "index" in refusal(saved, state, no_dist=True)
    index_file(saved).unlink()  # The mark in the pickle is a witness of its own.
    said = refusal(saved, state, no_dist=True)
    assert "is missing or damaged" in said
    assert loads(saved, state, FileSystemReader) == []
    assert loads(saved, state, verify=False) == []


def test_a_sound_trailer_is_a_witness_where_the_mark_in_the_pickle_is_damaged(
    saved: Path, state: dict[str, Any]
) -> None:
    path = saved / ".metadata"
    whole = path.read_bytes()
    assert whole.count(INDEX_MARK.encode()) == 1
    path.write_bytes(whole.replace(INDEX_MARK.encode(), INDEX_MARK.upper().encode()))
    index_file(saved).unlink()

    assert "is missing or damaged" in refusal(saved, state, no_dist=True)


def test_stock_dcp_and_pickle_read_metadata_with_a_trailer(
    saved: Path, state: dict[str, Any]
) -> None:
    with open(saved / ".metadata", "rb") as stream:
        metadata = pickle.load(stream)
        assert stream.read(8) == b"TCKPTEND"
    assert type(metadata) is Metadata
    read = FileSystemReader(saved).read_metadata()
    assert metadata.storage_data == read.storage_data
    assert metadata.state_dict_metadata == read.state_dict_metadata
    assert loads(saved, state, FileSystemReader) == []


# Metadata of ranks, which DCP falls back to


def lose(path: Path, how: str, other: Path) -> None:
    """Damages a checkpoint's metadata in one way."""
    metadata = path / ".metadata"
    whole = metadata.read_bytes()
    if how == "missing":
        metadata.unlink()
        return
    if how == "index missing":
        index_file(path).unlink()
        return
    middle = len(whole) // 2
    metadata.write_bytes(
        {
            "empty": b"",
            "cut off": whole[:middle],
            "flipped": flipped(whole, -20, 4),  # In the trailer.
            "another object": pickle.dumps({"not": "metadata"}),
            "of another save": (other / ".metadata").read_bytes(),
        }[how]
    )


@pytest.mark.parametrize(
    "how",
    [
        "missing",
        "empty",
        "cut off",
        "flipped",
        "another object",
        "of another save",
        "index missing",
    ],
)
def test_metadata_of_a_rank_never_stand_in_for_damaged_metadata(
    how: str, world_of_one: None, state: dict[str, Any], rng: random.Random, tmp_path: Path
) -> None:
    old, path = random_state(rng), tmp_path / "saved"
    dcp.save(old, storage_writer=FastWriter(path), use_collectives=False)
    save(state, FastWriter(path, thread_count=2))
    save(old, FastWriter(tmp_path / "other"))
    assert (path / "__0.metadata").exists()
    assert loads(path, state) == []
    lose(path, how, tmp_path / "other")

    said = refusal(path, state)

    assert ".metadata" in said
    assert "__0" not in said


def test_metadata_of_a_rank_never_stand_in_for_damaged_metadata_of_stock_dcp(
    world_of_one: None, state: dict[str, Any], rng: random.Random, tmp_path: Path
) -> None:
    dcp.save(random_state(rng), storage_writer=FastWriter(tmp_path), use_collectives=False)
    save(state, FileSystemWriter(tmp_path))
    whole = (tmp_path / ".metadata").read_bytes()
    odd = []
    for field, value in [("storage_meta", "x"), ("storage_data", [1]), ("state_dict_metadata", 5)]:
        metadata = pickle.loads(whole)
        setattr(metadata, field, value)
        odd.append(pickle.dumps(metadata))

    for damaged in [b"", whole[:-10], b"garbage", *odd]:
        (tmp_path / ".metadata").write_bytes(damaged)
        assert str(tmp_path / ".metadata") in refusal(tmp_path, state)


def test_metadata_of_a_rank_are_found_where_there_never_were_others(
    world_of_one: None, state: dict[str, Any], tmp_path: Path
) -> None:
    dcp.save(state, storage_writer=FastWriter(tmp_path), use_collectives=False)
    targets = blank(state)

    dcp.load(targets, storage_reader=FastReader(tmp_path))

    assert differences(state, targets) == []


@pytest.mark.parametrize("name", ["index", "metadata", "data"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut off", "flipped"])
def test_checkpoints_of_single_ranks_have_an_index_of_their_own(
    damage: str, name: str, world_of_one: None, state: dict[str, Any], tmp_path: Path
) -> None:
    dcp.save(state, storage_writer=FastWriter(tmp_path), use_collectives=False)
    file = {
        "data": data_files(tmp_path)[0],
        "index": index_file(tmp_path, "__0"),
        "metadata": tmp_path / "__0.metadata",
    }[name]
    whole = file.read_bytes()
    # In the trailer of metadata: a load does not read the rest.
    middle = len(whole) - 20 if name == "metadata" else len(whole) // 2
    file.unlink()
    if damage != "missing":
        damaged = {"empty": b"", "cut off": whole[:-1], "flipped": flipped(whole, middle)}
        file.write_bytes(damaged[damage])

    # DCP wraps no error of a rank that loads by itself: they arrive as they are.
    targets = blank(state)
    with pytest.raises((CorruptionError, NotFoundError, dcp.CheckpointException)) as caught:
        dcp.load(targets, storage_reader=FastReader(tmp_path))

    assert file.name.removeprefix("__0.") in str(caught.value)
    if name != "data":
        assert differences(blank(state), targets) == []


# Two writers, one directory


def test_a_checkpoint_that_stock_dcp_saves_over_ours_loads_without_our_stale_data(
    saved: Path, rng: random.Random
) -> None:
    new = random_state(rng)
    index, stale = index_file(saved).read_bytes(), data_files(saved)
    save(new, FileSystemWriter(saved))

    assert index_file(saved).read_bytes() == index
    for _ in range(2):
        assert loads(saved, new) == []
        assert loads(saved, new, FileSystemReader) == []
        for file in stale:
            file.write_bytes(b"garbage")


def test_a_checkpoint_that_we_save_over_stock_dcps_loads(
    state: dict[str, Any], rng: random.Random, tmp_path: Path
) -> None:
    for new in (random_state(rng), state):
        save(random_state(rng), FileSystemWriter(tmp_path))
        save(new, FastWriter(tmp_path))
        assert loads(tmp_path, new) == []
        assert loads(tmp_path, new, FileSystemReader) == []
    assert len(files(tmp_path)) == 3


# What stock DCP wrote: its archives have checksums of what they hold


@pytest.mark.parametrize("fqn", ["large", "small", "step"])
def test_a_flipped_bit_of_a_stock_payload_that_is_read_whole_is_corruption(
    fqn: str, state: dict[str, Any], rng: random.Random, tmp_path: Path
) -> None:
    save(state, FileSystemWriter(tmp_path))
    metadata = FileSystemReader(tmp_path).read_metadata()
    (file,) = data_files(tmp_path)
    whole = file.read_bytes()
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == fqn)
    if isinstance(state[fqn], torch.Tensor):
        raw = state[fqn].view(torch.uint8).numpy().tobytes()
        begin, nbytes = whole.index(raw, info.offset), len(raw)
    else:  # Anywhere in the record of the pickle, after its header and name.
        begin, nbytes = info.offset + 64, 8
    for at in [begin, begin + nbytes - 1, *(begin + rng.randrange(nbytes) for _ in range(10))]:
        file.write_bytes(flipped(whole, at, rng.randrange(8)))
        error = failure_of(load, blank({fqn: state[fqn]}), FastReader(tmp_path))
        assert isinstance(error, CorruptionError), f"byte {at - info.offset} of {fqn}"
        assert file.name in str(error)
        assert repr(fqn) in str(error)
    file.write_bytes(whole)
    assert loads(tmp_path, state) == []


SAVE_KILLED_IN_ITS_COMMIT = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch_ckpt import FastWriter
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.formats.committed import index_name

path, alone = Path(sys.argv[1]), sys.argv[2] == "alone"

def commit(self, metadata, index, files):
    prefix = self.commit_name.removesuffix(".metadata")
    (path / f"{prefix}{index_name(self.save_id)}").write_bytes(index)
    os._exit(9)

CheckpointTransaction.commit = commit
store = dist.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
state = {"large": torch.randn(300, 700), "step": 7}
dcp.save(state, storage_writer=FastWriter(path), no_dist=not alone, use_collectives=not alone)
"""


def save_killed_in_its_commit(path: Path, *, alone: bool) -> None:
    """Saves in another process, which ends just before it renames its metadata.

    It is no fork of this one, in which a test may have used CUDA: no fork can save then.
    """
    arguments = "-c", SAVE_KILLED_IN_ITS_COMMIT, path, "alone" if alone else "together"
    done = run_python(*arguments, folder=path)
    assert done.returncode == 9, done.stdout


@pytest.mark.parametrize("alone", [True, False])
def test_a_save_removes_the_index_of_a_killed_save_of_the_other_kind(
    alone: bool, world_of_one: None, state: dict[str, Any], tmp_path: Path
) -> None:
    """Otherwise the directory would look as if metadata of that kind had been lost."""
    save_killed_in_its_commit(tmp_path, alone=alone)
    assert metadata_prefixes(Location(tmp_path)) == []

    dcp.save(state, storage_writer=FastWriter(tmp_path), use_collectives=alone)

    assert metadata_prefixes(Location(tmp_path)) == ["" if alone else "__0"]
    targets = blank(state)
    dcp.load(targets, storage_reader=FastReader(tmp_path))
    assert differences(state, targets) == []
    assert examine(Location(tmp_path)).damage == []
