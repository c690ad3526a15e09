"""Boxes of a tensor with the same offsets, of which all but one are empty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.tensors import bits, full_value
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter, Run
from torch_ckpt.filesystems.location import Location
from torch_ckpt.planning.local_shards import LocalShards
from torch_ckpt.storage.verify import examine

WHOLE = full_value("w", (6, 2), torch.float32)


def with_empty_boxes(values: torch.Tensor) -> LocalShards:
    """Boxes of [0, 2) and [2, 6), with empty ones before, between and after."""
    rows = [(0, 0), (0, 2), (2, 2), (2, 6), (6, 6)]
    boxes = [((begin, 0), values[begin:end].clone()) for begin, end in rows]
    return LocalShards(values.shape, boxes)


def values_of(shards: LocalShards) -> torch.Tensor:
    return torch.cat([tensor for _, tensor in shards.boxes])


def by_writer(writer: type[Any], planner: type[Any]) -> Callable[[dict[str, Any], Path], None]:
    def save(state: dict[str, Any], path: Path) -> None:
        dcp.save(state, storage_writer=writer(path), planner=planner(), no_dist=True)

    return save


def asynchronously(state: dict[str, Any], path: Path) -> None:
    torch_ckpt.async_save(state, checkpoint_id=path, no_dist=True).result(60)


def by_agent(state: dict[str, Any], path: Path) -> None:
    with Run(path, asynchronous=True, agent=True) as run:
        run.save(1, state)
        run.wait()
        target = {"w": with_empty_boxes(torch.zeros(6, 2))}
        run.restore(target)
        assert bits(values_of(target["w"])) == bits(WHOLE)


@pytest.mark.parametrize(
    "save",
    [
        by_writer(FastWriter, FastSavePlanner),
        by_writer(FastWriter, DefaultSavePlanner),
        by_writer(FileSystemWriter, FastSavePlanner),
        by_writer(FileSystemWriter, DefaultSavePlanner),
        asynchronously,
        by_agent,
    ],
    ids=["fast", "stock planner", "stock writer", "stock", "asynchronous", "agent"],
)
def test_empty_boxes_hide_no_others_with_the_same_offsets(
    save: Callable[[dict[str, Any], Path], None], tmp_path: Path
) -> None:
    save({"w": with_empty_boxes(WHOLE)}, tmp_path)
    (path,) = [file.parent for file in tmp_path.glob("**/.metadata")]
    assert not examine(Location(path)).damage
    for reader in (FastReader, FileSystemReader):
        for planner in (FastLoadPlanner, DefaultLoadPlanner):
            whole = {"w": torch.zeros(6, 2)}
            shards = {"w": with_empty_boxes(torch.zeros(6, 2))}
            for target in (whole, shards):
                dcp.load(target, storage_reader=reader(path), planner=planner(), no_dist=True)
            assert bits(whole["w"]) == bits(WHOLE)
            assert bits(values_of(shards["w"])) == bits(WHOLE)


# ---- Values of other classes ---------------------------------------------------------------------


class Listing(torch.Tensor):
    """Lists an empty box before another one with the same offsets, as a ShardedTensor may.

    It finds a box by DCP's hint, and by its offsets without a hint.
    """

    boxes: list[tuple[int, int]]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size((begin, 0)), torch.Size((end - begin, 2)))
            for begin, end in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        boxes, at = self.boxes, index.index
        if at is None or at >= len(boxes) or torch.Size((boxes[at][0], 0)) != index.offset:
            at = next(n for n, box in enumerate(boxes) if torch.Size((box[0], 0)) == index.offset)
        begin, end = boxes[at]
        return self.as_subclass(torch.Tensor)[begin:end]


def listing(values: torch.Tensor) -> Listing:
    made = values.clone().as_subclass(Listing)
    made.boxes = [(0, 2), (2, 2), (2, 6)]
    return made


@pytest.mark.parametrize("reader", [FastReader, FileSystemReader])
@pytest.mark.parametrize("planner", [FastLoadPlanner, DefaultLoadPlanner])
def test_a_load_passes_the_hint_that_tells_an_empty_box_from_another(
    reader: type[Any], planner: type[Any], tmp_path: Path
) -> None:
    torch_ckpt.save({"w": WHOLE}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": listing(torch.zeros(6, 2))}
    dcp.load(state, storage_reader=reader(tmp_path), planner=planner(), no_dist=True)
    assert bits(state["w"].as_subclass(torch.Tensor)) == bits(WHOLE)


def test_a_save_in_columns_tells_an_empty_box_from_another(tmp_path: Path) -> None:
    torch_ckpt.save({"w": listing(WHOLE)}, checkpoint_id=tmp_path, no_dist=True)
    found = {"w": torch.zeros(6, 2)}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert bits(found["w"]) == bits(WHOLE)


@pytest.mark.parametrize("writer", [FastWriter, FileSystemWriter])
def test_a_shard_that_does_not_fill_its_box_is_refused_whoever_writes_it(
    writer: type[Any], tmp_path: Path
) -> None:
    class Short(Listing):
        """Has fewer rows than it lists, and only torch can store them."""

        def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
            return super().__get_tensor_shard__(index)[:1].to_sparse()

    state = {"w": listing(WHOLE).as_subclass(Short)}
    state["w"].boxes = [(0, 2), (2, 6)]
    with pytest.raises(CheckpointException, match=r"'w'.*holds \[1, 2\] of it, but its box"):
        dcp.save(state, storage_writer=writer(tmp_path), planner=FastSavePlanner(), no_dist=True)
    assert not (tmp_path / ".metadata").exists()


def test_the_planner_makes_the_read_items_of_stock(tmp_path: Path) -> None:
    torch_ckpt.save({"w": WHOLE, "x": WHOLE, "n": 3}, checkpoint_id=tmp_path, no_dist=True)
    metadata = FastReader(tmp_path).read_metadata()
    plans = []
    for planner in (FastLoadPlanner(), DefaultLoadPlanner()):
        state = {"w": with_empty_boxes(torch.zeros(6, 2)), "x": torch.zeros(6, 2), "n": 0}
        planner.set_up_planner(state, metadata, True)
        plans.append(planner.create_local_plan())
    ours, stock = plans
    assert list(ours.items) == stock.items
    hints = [[item.dest_index.index for item in plan.items] for plan in plans]
    assert hints[0] == hints[1]
    assert ours.planner_data is stock.planner_data is None
    assert not dist.is_initialized()
