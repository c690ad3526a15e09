"""The bytes on disk: stock tools accept what we write, and we read all that stock writes."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import struct
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import (
    PAIRS,
    READERS,
    WRITERS,
    CuttingLoadPlanner,
    CuttingSavePlanner,
    commit_without_index,
    data_files,
    differences,
    layouts,
    loads,
    random_tensor,
    save,
    stored_slice,
)
from support.commit_files import index_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.utils.serialization import config as serialization_config

from torch_ckpt import FastReader, FastSavePlanner, FastWriter, IoOptions
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed, uuid_of

SMALL_ALIGNMENT = 64  # csrc/plan/layout.h
LARGE_ALIGNMENT = 4096
LARGE_PAYLOAD = 1 << 20

pairs = pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=lambda who: who)


@pytest.fixture
def state(rng: random.Random) -> dict[str, Any]:
    """Tensors of every layout in a few dtypes, and objects."""
    few = (torch.bfloat16, torch.float32, torch.bool, torch.float8_e4m3fn, torch.uint64)
    tensors = {f"{dtype}/{name}": t for dtype in few for name, t in layouts(dtype).items()}
    tensors["just large"] = random_tensor([LARGE_PAYLOAD], torch.uint8)
    tensors["not quite large"] = random_tensor([LARGE_PAYLOAD - 1], torch.uint8)
    return {"tensors": tensors, "step": 5, "nested": {"list": [1, {"x": "y"}]}}


@pytest.fixture
def saved(tmp_path: Path, state: dict[str, Any]) -> tuple[Path, Metadata]:
    """``state`` as we write it."""
    return tmp_path, save(state, FastWriter(tmp_path))


def _tensor_slices(saved: tuple[Path, Metadata]) -> Iterator[tuple[str, bytes, int]]:
    """Name, bytes and offset of every stored tensor."""
    path, metadata = saved
    for index, info in metadata.storage_data.items():
        if index.fqn.startswith("tensors"):
            yield index.fqn, stored_slice(path, metadata, index.fqn), info.offset


def _globals(pickled: bytes) -> set[str]:
    """Every global that a pickle names."""
    found = set()
    strings: list[str] = []
    memo: dict[int, str] = {}
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("GLOBAL", "INST"):
            found.add(argument.replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            found.add(".".join(strings[-2:]))
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = strings[-1] if strings else ""
        elif "GET" in opcode.name:
            strings.append(memo.get(int(argument), ""))
        elif isinstance(argument, str):
            strings.append(argument)
    return found


def test_dcp_to_torch_save_converts_what_we_write(
    saved: tuple[Path, Metadata], state: dict[str, Any], tmp_path: Path
) -> None:
    dcp_to_torch_save(tmp_path, tmp_path / "all.pt")

    loaded = torch.load(tmp_path / "all.pt", weights_only=True)

    assert differences(state, loaded) == []


def test_a_checkpoint_made_by_torch_save_to_dcp_loads(
    state: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "all.pt")
    torch_save_to_dcp(tmp_path / "all.pt", tmp_path / "dcp")

    assert loads(tmp_path / "dcp", state) == []


def test_torch_load_accepts_every_slice_by_itself(
    saved: tuple[Path, Metadata], state: dict[str, Any], tmp_path: Path
) -> None:
    for fqn, data, _ in _tensor_slices(saved):
        expected = state["tensors"][fqn.removeprefix("tensors.")]
        in_memory = torch.load(io.BytesIO(data), weights_only=True)
        assert differences(expected, in_memory, fqn) == []
        (tmp_path / "slice.pt").write_bytes(data)
        mapped = torch.load(tmp_path / "slice.pt", weights_only=True, mmap=True)
        assert differences(expected, mapped, fqn) == []


def test_python_finds_true_checksums_in_every_slice(saved: tuple[Path, Metadata]) -> None:
    for fqn, data, _ in _tensor_slices(saved):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None, fqn
            names = {info.filename.partition("/")[2] for info in archive.infolist()}
            assert names >= {"data.pkl", "version", "byteorder", "data/0"}, fqn
            assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
            payload = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
            assert payload.CRC != 0 or payload.file_size == 0, fqn


def test_payloads_lie_where_direct_io_wants_them(saved: tuple[Path, Metadata]) -> None:
    seen = set()
    for fqn, data, offset in _tensor_slices(saved):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            payload = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
        name, extra = struct.unpack_from("<HH", data, payload.header_offset + 26)
        begin = offset + payload.header_offset + 30 + name + extra
        large = payload.file_size >= LARGE_PAYLOAD
        seen.add(large)
        assert begin % (LARGE_ALIGNMENT if large else SMALL_ALIGNMENT) == 0, fqn
        assert offset % SMALL_ALIGNMENT == 0, fqn
    assert seen == {True, False}


def test_slices_neither_overlap_nor_reach_beyond_their_file(saved: tuple[Path, Metadata]) -> None:
    path, metadata = saved
    (file,) = data_files(path)
    end = 0
    for info in sorted(metadata.storage_data.values(), key=lambda info: info.offset):
        assert info.offset >= end
        end = info.offset + info.length
    assert end == file.stat().st_size


def test_the_same_state_gives_the_same_bytes(
    saved: tuple[Path, Metadata], state: dict[str, Any], tmp_path: Path
) -> None:
    save(state, FastWriter(tmp_path / "again"))

    (first,), (second,) = data_files(tmp_path), data_files(tmp_path / "again")
    assert first.read_bytes() == second.read_bytes()


def test_metadata_names_no_class_that_stock_metadata_does_not(
    saved: tuple[Path, Metadata], state: dict[str, Any], tmp_path: Path
) -> None:
    save(state, FileSystemWriter(tmp_path / "stock"))

    ours = _globals((tmp_path / ".metadata").read_bytes())

    assert ours <= _globals((tmp_path / "stock" / ".metadata").read_bytes())


def test_metadata_says_what_stock_metadata_says(
    saved: tuple[Path, Metadata], state: dict[str, Any], tmp_path: Path
) -> None:
    path, _ = saved
    save(state, FileSystemWriter(tmp_path / "stock"))

    ours = pickle.loads((path / ".metadata").read_bytes())
    stock = pickle.loads((tmp_path / "stock" / ".metadata").read_bytes())

    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert ours.version == stock.version
    assert ours.storage_data.keys() == stock.storage_data.keys()
    for index, info in ours.storage_data.items():
        assert type(info) is type(stock.storage_data[index])
        assert type(index.offset) is type(next(i for i in stock.storage_data if i == index).offset)


def test_save_returns_the_metadata_it_published(saved: tuple[Path, Metadata]) -> None:
    path, returned = saved
    published = pickle.loads((path / ".metadata").read_bytes())

    assert returned == published
    assert returned.storage_meta.checkpoint_id == path
    assert str(uuid.UUID(returned.storage_meta.save_id)) == returned.storage_meta.save_id


class OddWriter(FastWriter):
    """States what only Python can pickle."""

    def storage_meta(self) -> StorageMeta:
        meta = super().storage_meta()
        meta.modules = tuple(meta.modules)  # type: ignore[assignment]
        return meta


@pytest.mark.parametrize(
    ("writer", "planner"),
    [
        (FastWriter, DefaultSavePlanner),
        (FastWriter, FastSavePlanner),
        (OddWriter, DefaultSavePlanner),
    ],
)
def test_the_id_of_a_save_is_a_uuid_for_every_reader(
    writer: Any, planner: Any, state: dict[str, Any], tmp_path: Path
) -> None:
    writer = writer(tmp_path)
    returned = dcp.save(state, storage_writer=writer, planner=planner(), no_dist=True)

    found = {
        reader(tmp_path).read_metadata().storage_meta.save_id
        for reader in (FastReader, FileSystemReader)
    }
    assert found == {returned.storage_meta.save_id, writer.save_id}
    assert uuid.UUID(writer.save_id).version == 4
    _, index = open_committed(Location(tmp_path), "")
    assert index is not None
    assert index.has_entries
    assert uuid.UUID(writer.save_id).hex[:12] == index.save_id[:12]


@pytest.mark.parametrize("thread_count", [1, 3])
def test_data_files_are_named_with_rank_number_and_save_id(
    thread_count: int, state: dict[str, Any], tmp_path: Path
) -> None:
    metadata = save(state, FastWriter(tmp_path, thread_count=thread_count))

    names = {file.name for file in data_files(tmp_path)}
    save_id = index_file(tmp_path).name.removeprefix(".index.")

    assert uuid_of(save_id) == metadata.storage_meta.save_id
    assert names == {f"__0_{number}_{save_id}.distcp" for number in range(thread_count)}
    assert names == {info.relative_path for info in metadata.storage_data.values()}
    found = {path.name for path in tmp_path.iterdir()}
    assert found == names | {
        ".metadata",
        index_file(tmp_path).name,
    }


@pairs
@pytest.mark.parametrize("thread_count", [1, 3])
def test_checkpoints_compressed_with_zstandard_interchange(
    thread_count: int, writer: str, reader: str, state: dict[str, Any], tmp_path: Path
) -> None:
    state["zeros"] = torch.zeros(1 << 20)
    options = {"_extensions": [ZStandard()], "thread_count": thread_count}
    save(state, WRITERS[writer](tmp_path, **options))

    assert loads(tmp_path, state, READERS[reader]) == []
    metadata = FastReader(tmp_path).read_metadata()
    assert {i.transform_descriptors[0] for i in metadata.storage_data.values()} == {"stream.zstd/1"}
    lengths = {index.fqn: info.length for index, info in metadata.storage_data.items()}
    assert lengths["zeros"] < 4096


def test_parts_of_compressed_tensors_load(
    state: dict[str, Any], tmp_path: Path, rng: random.Random
) -> None:
    small = {n: t for n, t in state["tensors"].items() if "large" not in n}
    writer = FastWriter(tmp_path, _extensions=[ZStandard()])
    save(small, writer, planner=CuttingSavePlanner(rng))

    assert loads(tmp_path, small, planner=CuttingLoadPlanner(rng)) == []


def test_stock_checkpoints_without_checksums_load(state: dict[str, Any], tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save(state, FileSystemWriter(tmp_path))
    finally:
        torch.serialization.set_crc32_options(before)

    assert loads(tmp_path, state) == []


@pytest.mark.parametrize("alignment", [128, 4096, 65536])
def test_stock_checkpoints_of_other_alignments_load(
    alignment: int, state: dict[str, Any], tmp_path: Path, rng: random.Random
) -> None:
    with serialization_config.patch({"save.storage_alignment": alignment}):
        save(state["tensors"], FileSystemWriter(tmp_path))

    assert loads(tmp_path, state["tensors"], planner=CuttingLoadPlanner(rng)) == []


def test_stock_frames_longer_than_a_block_load(tmp_path: Path, rng: random.Random) -> None:
    state = {"large": torch.randn(300, 1000), "small": torch.randn(3), "medium": torch.randn(9000)}
    with serialization_config.patch({"save.storage_alignment": 64 << 10}):
        save(state, FileSystemWriter(tmp_path))

    io = IoOptions(buffer_nbytes=512 << 10)

    assert loads(tmp_path, state, io=io) == []


def test_settings_of_torch_save_do_not_change_what_we_write(
    saved: tuple[Path, Metadata], state: dict[str, Any], tmp_path: Path
) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with serialization_config.patch({"save.storage_alignment": 4096}):
            metadata = save(state["tensors"], FastWriter(tmp_path / "again"))
    finally:
        torch.serialization.set_crc32_options(before)

    for index in metadata.storage_data:
        again = stored_slice(tmp_path / "again", metadata, index.fqn)
        assert again == stored_slice(*saved, f"tensors.{index.fqn}")


def store_anew(path: Path, state: dict[str, Any], rewrite: Callable[[bytes], bytes]) -> None:
    """Saves, and has what torch.save makes of each tensor, rewritten, in place of our slices."""
    metadata = save(state, FastWriter(path))
    name = f"__0_1_{index_file(path).name.removeprefix('.index.')}.distcp"
    with open(path / name, "wb") as file:
        for index, info in metadata.storage_data.items():
            info.relative_path, info.offset = name, file.tell()
            stream = io.BytesIO()
            torch.save(state[index.fqn], stream)
            info.length = file.write(rewrite(stream.getvalue()))
    commit_without_index(metadata, path)


def without_byte_order(archive: bytes) -> bytes:
    """As torch wrote it before it padded records and had a record ``byteorder``."""
    rewritten = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(rewritten, "w") as new:
        for info in old.infolist():
            if not info.filename.endswith("byteorder"):
                new.writestr(info.filename, old.read(info))
    return rewritten.getvalue()


@pytest.mark.parametrize("rewrite", [bytes, without_byte_order])
def test_what_older_versions_of_dcp_and_torch_stored_loads(
    rewrite: Callable[[bytes], bytes], tmp_path: Path, rng: random.Random
) -> None:
    large = random_tensor([700, 500], torch.float32)
    state = {"large": torch.randn(100, 900), "small": torch.randn(7)}
    if rewrite is bytes:  # DCP stored of a view the whole storage, at an offset and with strides.
        state = {"small": large.flatten()[:999][7:500:3], "large": large[3:600, 9:400:2].t()}
    store_anew(tmp_path, state, rewrite)

    for reader in (FastReader, FileSystemReader):
        assert loads(tmp_path, state, reader) == []
    assert loads(tmp_path, state, planner=CuttingLoadPlanner(rng)) == []
