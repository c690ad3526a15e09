"""Sound checkpoints unlike most others: what planners, names and versions may make of them."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import differences, failure_of, load, loads, save, xxh3
from support.commit_files import index_file
from support.flips import flip
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.cli.main import main
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.formats.committed import INDEX_MARK


class TwoDtypesPlanner(DefaultSavePlanner):
    """Writes two shards of one tensor, each in a dtype of its own, as ranks that disagree would."""

    def __init__(self, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes

    def create_local_plan(self) -> SavePlan:
        items = []
        for shard, dtype in enumerate(self.dtypes):
            chunk = ChunkStorageMetadata(torch.Size([4 * shard]), torch.Size([4]))
            data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size([8]))
            index = MetadataIndex("w", chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        dtype = write_item.tensor_data.properties.dtype
        return torch.full((4,), 3 if dtype == torch.uint8 else -3, dtype=dtype)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.int32),
        (torch.float16, torch.int16),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.int64),
        (torch.uint8, torch.int8),
    ],
)
def test_shards_of_different_dtypes_load_as_stock_loads_them(
    dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    save({"w": torch.zeros(8)}, FastWriter(tmp_path), planner=TwoDtypesPlanner(dtypes))
    by_stock = load({"w": torch.zeros(8, dtype=torch.float64)}, FileSystemReader(tmp_path))
    loaded = load({"w": torch.zeros(8, dtype=torch.float64)}, FastReader(tmp_path))
    assert differences(by_stock, loaded) == []
    assert loaded["w"].tolist()[4:] == [-3.0] * 4


class KeepingPlanner(DefaultSavePlanner):
    """Keeps its plans in the metadata, as Megatron's does."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        vars(metadata)["all_local_plans"] = plans
        return plans, metadata


def test_what_a_planner_adds_to_metadata_is_read_back_and_does_not_keep_verify_from_checking_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save({"w": torch.arange(9)}, FastWriter(tmp_path), planner=KeepingPlanner())
    metadata = FastReader(tmp_path).read_metadata()
    assert len(vars(metadata)["all_local_plans"]) == 1
    assert loads(tmp_path, {"w": torch.arange(9)}) == []
    assert main(["verify", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*.distcp")
    flip(file, 600)
    assert main(["verify", str(tmp_path)]) == 1
    assert f"damaged: {file.name} [0, {file.stat().st_size})" in capsys.readouterr().out


class EmptyBytesPlanner(DefaultSavePlanner):
    """Stores an object as no bytes at all."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "nothing":
            return io.BytesIO()
        return super().resolve_data(write_item)


def test_what_follows_an_empty_slice_loads(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.randn(20), 0.1, 0, torch.qint8)
    state = {"nothing": 1, "quantised": quantised, "w": torch.arange(9)}
    save(state, FastWriter(tmp_path), planner=EmptyBytesPlanner())
    target = {
        "quantised": torch.quantize_per_tensor(torch.zeros(20), 0.1, 0, torch.qint8),
        "w": torch.zeros(9, dtype=torch.int64),
    }
    loaded = load(target, FastReader(tmp_path))
    assert torch.equal(loaded["quantised"].int_repr(), quantised.int_repr())
    assert torch.equal(loaded["w"], torch.arange(9))


@pytest.mark.parametrize("writer", [FastWriter, FileSystemWriter])
def test_directory_whose_name_is_not_utf_8_can_be_saved_to_and_loaded_from(
    writer: Any, tmp_path: Path
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    save({"w": torch.arange(9)}, writer(path))
    assert loads(path, {"w": torch.arange(9)}) == []


def test_index_of_a_newer_version_is_unsupported_and_not_damage(tmp_path: Path) -> None:
    save({"w": torch.arange(9)}, FastWriter(tmp_path))
    index = index_file(tmp_path)
    newer = bytearray(index.read_bytes())
    newer[8] += 1
    newer[312:320] = xxh3(bytes(newer[:312]))
    index.write_bytes(newer)
    target = {"w": torch.zeros(9, dtype=torch.int64)}
    error = failure_of(load, target, FastReader(tmp_path))
    assert isinstance(error, UnsupportedError)
    assert "version 3" in str(error)
    assert torch.equal(load(target, FastReader(tmp_path, verify=False))["w"], torch.arange(9))


def test_name_that_is_the_word_for_sealed_metadata_is_no_mark(tmp_path: Path) -> None:
    state = {"torch_ckpt.formats.index": torch.arange(9)}
    save(state, FileSystemWriter(tmp_path))
    assert loads(tmp_path, state) == []
    assert INDEX_MARK not in state
