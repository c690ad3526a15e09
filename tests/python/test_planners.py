"""Planners and targets that do what DCP's contracts allow, beyond what the default planner does."""

from __future__ import annotations

import io
import os
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import load, loads, save
from damage import BoxesPlanner
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from torch_ckpt import CheckpointError, FastReader, FastWriter, IoOptions
from torch_ckpt._core import _native

pytestmark = pytest.mark.filterwarnings("ignore")


def numbered(count: int, numel: int = 1000) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((numel,), float(i + 1)) for i in range(count)}


class ScratchPlanner(DefaultLoadPlanner):
    """Hands out one scratch tensor for every read, and copies out of it on commit."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.scratch = torch.zeros(numel)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.scratch

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.lookup_tensor(read_item.dest_index).copy_(tensor)


@pytest.mark.parametrize("numel", [1000, 1 << 20])
def test_a_planner_may_hand_out_one_scratch_tensor_for_every_read(
    numel: int, tmp_path: Path
) -> None:
    state = numbered(8, numel)
    save(state, FastWriter(tmp_path))

    assert loads(tmp_path, state, planner=ScratchPlanner(numel)) == []


def test_one_tensor_under_two_names_gets_the_values_of_one_of_them(tmp_path: Path) -> None:
    save({"a": torch.ones(1 << 20), "b": torch.full((1 << 20,), 2.0)}, FastWriter(tmp_path))
    ours, theirs = torch.zeros(1 << 20), torch.zeros(1 << 20)

    load({"a": ours, "b": ours}, FastReader(tmp_path))
    load({"a": theirs, "b": theirs}, FileSystemReader(tmp_path))

    assert torch.equal(ours, theirs)


def test_views_of_one_buffer_load_in_one_go(tmp_path: Path):
    state = numbered(50)
    save(state, FastWriter(tmp_path))
    buffer = torch.zeros(50 * 1000)

    load({f"t{i}": buffer[i * 1000 : (i + 1) * 1000] for i in range(50)}, FastReader(tmp_path))

    assert torch.equal(buffer, torch.cat(list(state.values())))


class CastingPlanner(DefaultSavePlanner):
    """Casts in resolve_data what it planned in another dtype, into a tensor nobody else holds."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.bfloat16() if isinstance(data, torch.Tensor) else data


@pytest.mark.parametrize("reader", [FastReader, FileSystemReader])
def test_a_planner_that_casts_costs_the_bytes_of_what_it_casts_to(reader: Any, tmp_path: Path):
    state = {f"t{i}": torch.randn(1 << 18) for i in range(8)}
    io_options = IoOptions(buffer_nbytes=1 << 20)
    save({**state, "step": 7}, FastWriter(tmp_path, io=io_options), planner=CastingPlanner())

    (file,) = tmp_path.glob("*.distcp")
    assert file.stat().st_size < 1.02 * 8 * (1 << 19)
    assert file.stat().st_blocks * 512 < 1.02 * 8 * (1 << 19)
    loaded = load({fqn: torch.zeros(1 << 18) for fqn in state} | {"step": 0}, reader(tmp_path))
    assert all(torch.equal(loaded[fqn], state[fqn].bfloat16().float()) for fqn in state)
    assert loaded["step"] == 7


def archive_with_comment() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("five", b"aaaaa")  # Deflates to five bytes.
        archive.comment = b"of a planner"
    return stream.getvalue()


STORED = {"none": b"", "text": b"anything", "an archive": archive_with_comment()}


@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
def test_a_planner_may_store_bytes_of_any_kind(stored: bytes, tmp_path: Path):
    class Saves(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return io.BytesIO(object)

    class Loads(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            found[read_item.dest_index.fqn] = value.read()

    found: dict[str, bytes] = {}
    save({"object": stored}, FastWriter(tmp_path), planner=Saves())
    load({"object": None}, FastReader(tmp_path), planner=Loads())
    assert found == {"object": stored}


def test_an_error_of_the_planner_stays_what_it_is(tmp_path: Path):
    class Fails(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            raise KeyError("planner")

    save({"object": 1}, FastWriter(tmp_path))
    with pytest.raises(dcp.CheckpointException) as caught:
        load({"object": 0}, FastReader(tmp_path), planner=Fails())
    assert isinstance(caught.value.failures[0][0], KeyError)


def test_autograd_sees_that_a_loaded_tensor_has_changed(tmp_path: Path):
    save({"w": torch.ones(4)}, FastWriter(tmp_path))
    weight = torch.full((4,), 3.0)
    x = torch.ones(4, requires_grad=True)
    y = (x * weight).sum()
    load({"w": weight}, FastReader(tmp_path))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_the_default_device_does_not_matter(tmp_path: Path):
    save({"w": torch.arange(10.0)}, FastWriter(tmp_path))
    target = torch.zeros(10, dtype=torch.float64)
    with torch.device("meta"):
        load({"w": target}, FastReader(tmp_path))
    assert torch.equal(target, torch.arange(10.0, dtype=torch.float64))


def test_a_tensor_whose_storage_was_freed_is_an_error_not_a_crash(tmp_path: Path):
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(dcp.CheckpointException, match="beyond its storage"):
        save({"w": freed}, FastWriter(tmp_path))
    assert not list(tmp_path.glob("*.distcp"))


def test_many_threads_share_the_buffer_budget(tmp_path: Path) -> None:
    state = numbered(64, 1 << 16)
    writer = FastWriter(tmp_path, thread_count=32)
    with mock.patch.object(_native, "BufferPool", wraps=_native.BufferPool) as made:
        save(state, writer)
    assert made.call_count == 32
    assert sum(call.args[0] for call in made.call_args_list) <= writer.io.buffer_nbytes
    assert loads(tmp_path, state) == []


def test_a_writer_refuses_a_second_save_while_it_is_writing(tmp_path: Path):
    class Nested(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            with pytest.raises(CheckpointError, match="still writing"):
                writer.reset(tmp_path / "second")
            return super().resolve_data(write_item)

    writer = FastWriter(tmp_path / "first")
    save({"w": torch.ones(3)}, writer, planner=Nested())
    assert loads(tmp_path / "first", {"w": torch.ones(3)}) == []


def test_copies_of_a_writer_never_share_the_names_of_data_files(tmp_path: Path) -> None:
    # As the process executor makes them, one for each save.
    writer = FastWriter(tmp_path)
    names: set[str] = set()
    for value in range(3):
        state = {"w": torch.full((3,), float(value))}
        save(state, pickle.loads(pickle.dumps(writer)))
        (file,) = tmp_path.glob("*.distcp")
        names.add(file.name)
        assert loads(tmp_path, state) == []
    assert len(names) == 3


@pytest.mark.parametrize("columns", [1024, 256, 16])
@pytest.mark.parametrize(
    # What each row may cost besides its own bytes: two blocks of the disk, or of the index.
    ("writer", "verify", "edge"),
    [(FastWriter, True, 2 * 65536), (FastWriter, False, 8192), (FileSystemWriter, True, 8192)],
)
def test_a_column_slice_reads_little_more_than_it_wants(
    writer: Any, verify: bool, edge: int, columns: int, tmp_path: Path
) -> None:
    rows, width = 32, 256 << 10
    full = torch.randn(rows, width)
    save({"w": full}, writer(tmp_path))
    for file in tmp_path.glob("*.distcp"):
        # What is not dirty leaves the page cache, so that reading it shows in the counter.
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    target = torch.zeros(rows, columns)
    planner = BoxesPlanner({"w": [0, 4096]}, {"w": target})

    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    load(
        {"w": torch.zeros(1)},
        FastReader(tmp_path, verify=verify),
        planner=planner,
    )
    read_nbytes = (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before) * 512

    assert torch.equal(target, full[:, 4096 : 4096 + columns])
    assert read_nbytes <= max(2 * target.nbytes, rows * edge) + (256 << 10)
    assert read_nbytes < full.nbytes / 4


def test_ranks_that_have_opened_different_checkpoints_do_not_mix_them(tmp_path: Path) -> None:
    state = {"t": torch.zeros(3)}
    plans: list[LoadPlan] = []
    readers = [FastReader(tmp_path), FastReader(tmp_path)]
    for reader in readers:
        save(state, FastWriter(tmp_path))  # Between what the two ranks do.
        reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    shared = readers[0].prepare_global_plan([plans[0], plans[0]])
    assert [plan.storage_data for plan in shared] == [None, None]
    with pytest.raises(CheckpointError, match=r"rank 1 has opened save [0-9a-f]+, and rank 0 save"):
        readers[0].prepare_global_plan(plans)
