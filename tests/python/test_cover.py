"""A load proves that stored boxes have each wanted element once, whatever stored them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import failure_of
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastWriter
from torch_ckpt._core import _native
from torch_ckpt.errors import CorruptionError, MismatchError
from torch_ckpt.formats.index import to_metadata
from torch_ckpt.formats.snapshot import SlotTable, merged_index
from torch_ckpt.formats.unions import Placed, check_cover
from torch_ckpt.planning.local_shards import LocalShards

Box = tuple[tuple[int, ...], tuple[int, ...]]  # Offsets and sizes.


# ---- Boxes ----


def tiling(rng: random.Random, offsets: Sequence[int], sizes: Sequence[int]) -> list[Box]:
    """Boxes that a box is cut into, not along a grid."""
    long = [dim for dim, size in enumerate(sizes) if size > 1]
    if not long or rng.random() < 0.25:
        return [(tuple(offsets), tuple(sizes))]
    dim = rng.choice(long)
    at = rng.randrange(1, sizes[dim])
    upper, low, high = [*offsets], [*sizes], [*sizes]
    upper[dim] += at
    low[dim], high[dim] = at, sizes[dim] - at
    return tiling(rng, offsets, low) + tiling(rng, upper, high)


def random_box(rng: random.Random, sizes: Sequence[int]) -> Box:
    ends = [sorted(rng.randint(0, size) for _ in "ab") for size in sizes]
    return tuple(low for low, _ in ends), tuple(high - low for low, high in ends)


def random_boxes(rng: random.Random) -> tuple[tuple[int, ...], list[Box]]:
    """The sizes of a tensor, and boxes of it: with holes, overlaps and empty ones."""
    sizes = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
    boxes = tiling(rng, [0] * len(sizes), sizes)
    if rng.random() < 0.3 and len(boxes) > 1:
        boxes.pop(rng.randrange(len(boxes)))
    if rng.random() < 0.3:
        boxes.append(random_box(rng, sizes))
    if rng.random() < 0.3:
        boxes.append((rng.choice(boxes)[0], (0,) * len(sizes)))
    rng.shuffle(boxes)
    return sizes, boxes


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(*box, strict=True))


def counts(sizes: Sequence[int], boxes: Sequence[Box]) -> Any:
    """The number of boxes that each element is in."""
    found = np.zeros(sizes, int)
    for box in boxes:
        found[slices(box)] += 1
    return found


def values(box: Box, whole: torch.Tensor, number: int) -> torch.Tensor:
    """The elements of a box; boxes that overlap have others."""
    return (whole[slices(box)] + (1000 * number if number else 0)).contiguous()


# ---- Formats ----


def write_metadata(
    path: Path, sizes: Sequence[int], boxes: Sequence[Box], parts: Sequence[torch.Tensor]
) -> None:
    """A checkpoint of stock's, whose metadata has another tensor in place of those stored."""
    dcp.save({f"{i}": part for i, part in enumerate(parts)}, storage_writer=FileSystemWriter(path))
    stored: Metadata = pickle.loads((path / ".metadata").read_bytes())
    chunks = [ChunkStorageMetadata(*map(torch.Size, box)) for box in boxes]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(sizes), chunks)
    extents = {
        MetadataIndex("w", chunk.offsets): stored.storage_data[
            MetadataIndex(f"{i}", (0,) * len(sizes))
        ]
        for i, chunk in enumerate(chunks)
    }
    changed = dataclasses.replace(
        stored, state_dict_metadata={"w": tensor}, planner_data={"w": ("w",)}, storage_data=extents
    )
    (path / ".metadata").write_bytes(pickle.dumps(changed))


def write_safetensors(
    path: Path, sizes: Sequence[int], boxes: Sequence[Box], parts: Sequence[torch.Tensor]
) -> None:
    path.mkdir()
    for i, (part, (at, _)) in enumerate(zip(parts, boxes, strict=True)):
        facts = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": at}})}
        save_file({"w": part}, path / f"shard-{i:05}-model.safetensors", facts)


FORMATS: dict[str, Callable[..., None]] = {
    "metadata": write_metadata,
    "safetensors": write_safetensors,
}
LOADS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "ours": lambda state, path: torch_ckpt.load(state, checkpoint_id=path),
    "stock's planner": lambda state, path: dcp.load(state, storage_reader=FastReader(path)),
    "our planner": lambda state, path: dcp.load(
        state, storage_reader=FastReader(path), planner=FastLoadPlanner()
    ),
}


def without_equal_offsets(boxes: Sequence[Box]) -> list[Box]:
    """The boxes that DCP's metadata can tell apart, first those with elements."""
    found: dict[Any, Box] = {}
    for box in sorted(boxes, key=lambda box: not math.prod(box[1])):
        found.setdefault(box[0], box)
    return list(found.values())


@pytest.mark.thin(2)
@pytest.mark.parametrize("seed", range(0, 120, 30))
@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_load_gives_each_element_the_value_of_its_only_box_or_is_an_error(
    kind: str, way: str, seed: int, tmp_path: Path
) -> None:
    outcomes = set()
    for number in range(seed, seed + 30):
        rng = random.Random(number)
        sizes, boxes = random_boxes(rng)
        boxes = without_equal_offsets(boxes)
        whole = torch.arange(float(math.prod(sizes))).view(sizes)
        exact = counts(sizes, boxes)
        parts = [
            values(box, whole, i if (exact[slices(box)] > 1).any() else 0)
            for i, box in enumerate(boxes)
        ]
        path = tmp_path / f"{number}"
        if kind == "safetensors":  # Its files do not have the sizes of the tensor.
            sizes = tuple(max(at[d] + n[d] for at, n in boxes) for d in range(len(sizes)))
            exact = counts(sizes, boxes)
        FORMATS[kind](path, sizes, boxes, parts)
        state = {"w": torch.full(sizes, -1.0)}
        if (exact == 1).all():
            LOADS[way](state, path)
            assert torch.equal(state["w"], whole[tuple(map(slice, sizes))])
            outcomes.add("loaded")
            continue
        error = failure_of(LOADS[way], state, path)
        assert "'w'" in str(error)
        assert str(path) in str(error)
        assert (state["w"] == -1).all()
        is_missing = type(error) is MismatchError
        if kind == "safetensors":
            assert type(error) is CorruptionError
            is_missing = "no box contains" in str(error)
        else:
            assert ("no stored box contains [" if is_missing else "different stored boxes") in str(
                error
            )
        assert (exact == 0).any() if is_missing else (exact > 1).any()
        outcomes.add("missing" if is_missing else "several")
    assert outcomes == {"loaded", "missing", "several"}


@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("writer", [FastWriter, FileSystemWriter])
def test_the_part_that_a_checkpoint_has_can_be_loaded_and_the_rest_is_an_error(
    writer: Any, way: str, tmp_path: Path
) -> None:
    whole = torch.arange(12.0).view(6, 2)
    stored = LocalShards((6, 2), [((0, 0), whole[:2]), ((3, 0), whole[3:])])
    dcp.save({"a": torch.ones(2), "w": stored}, storage_writer=writer(tmp_path))
    part = torch.zeros(2, 2)
    LOADS[way]({"w": LocalShards((6, 2), [((4, 0), part)])}, tmp_path)
    assert torch.equal(part, whole[4:])
    for wanted in (torch.zeros(6, 2), LocalShards((6, 2), [((1, 0), torch.zeros(2, 2))])):
        state = {"a": torch.zeros(2), "w": wanted}
        error = failure_of(LOADS[way], state, tmp_path)
        assert type(error) is MismatchError
        assert f"of 'w': no stored box contains [2:3, 0:2], in {tmp_path}" in str(error)
        assert not state["a"].any()


def test_a_planner_of_the_users_own_may_want_a_part(tmp_path: Path) -> None:
    class Halves(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            return dataclasses.replace(plan, items=plan.items[:1])

    whole = torch.arange(6.0)
    stored = LocalShards((6,), [((0,), whole[:3]), ((3,), whole[3:])])
    dcp.save({"w": stored}, storage_writer=FastWriter(tmp_path))
    state = {"w": torch.zeros(6)}
    dcp.load(state, storage_reader=FastReader(tmp_path), planner=Halves())
    assert state["w"].tolist() == [0, 1, 2, 0, 0, 0]


# ---- Memory ----


def slot_of(rank: int, sizes: Sequence[int], boxes: Sequence[Box]) -> SlotTable:
    table = _native.ItemTable()
    extents = []
    for item, (at, box_sizes) in enumerate(boxes):
        facts = ("float32", 4, "contiguous_format", False, False)
        table.add_tensor("w", *facts, sizes, True, at, box_sizes)
        extents.append((item, 4096 * (1 + item), 4 * math.prod(box_sizes), True))
    return SlotTable(f"slot-{rank}", 4096 * 99, table.encode(), extents, None)


def test_slots_have_every_box_by_its_offsets_and_sizes() -> None:
    loaded = 0
    for seed in range(300):
        rng = random.Random(seed)
        sizes, boxes = random_boxes(rng)
        exact = counts(sizes, list(dict.fromkeys(boxes)))
        boxes += rng.sample(boxes, rng.randint(0, len(boxes)))  # Replicas.
        rng.shuffle(boxes)
        cut = rng.randint(0, len(boxes))
        tables = [slot_of(rank, sizes, of) for rank, of in enumerate((boxes[:cut], boxes[cut:]))]
        index = merged_index(tables)
        stored = [box[:2] for _, _, of_entry in index for box in of_entry]
        assert all(math.prod(n) for _, n in stored)  # An empty box may hide another one.
        planner = FastLoadPlanner()
        planner.set_up_planner({"w": torch.zeros(sizes)}, to_metadata(index, checkpoint_id="m"))
        if (exact == 1).all():
            regions = [
                (tuple(item.dest_offsets), tuple(item.lengths))
                for item in planner.create_local_plan().items
            ]
            assert (counts(sizes, regions) == 1).all()
            loaded += 1
            continue
        with pytest.raises((MismatchError, CorruptionError), match=r"cannot load .* of 'w'"):
            planner.create_local_plan()
    assert loaded > 30


def test_an_empty_tensor_is_in_memory_once() -> None:
    table = slot_of(0, (0, 3), [((0, 0), (0, 3))])
    (entry,) = merged_index([table, slot_of(1, (0, 3), [((0, 1), (0, 2)), ((0, 0), (0, 3))])])
    assert [box[:2] for box in entry[2]] == [([0, 0], [0, 3])]


# ---- Shards of ranks ----


def test_shards_that_ranks_have_are_united_if_they_have_each_element_once() -> None:
    outcomes = set()
    for seed in range(300):
        sizes, boxes = random_boxes(random.Random(seed))
        placed = [
            Placed(rank, (0,) * len(sizes), box_sizes, at)
            for rank, (at, box_sizes) in enumerate(boxes)
        ]
        exact = counts(sizes, boxes)
        try:
            check_cover("w", sizes, placed)
        except MismatchError as error:
            is_missing = "no rank has the box at" in str(error)
            assert (exact == 0).any() if is_missing else (exact > 1).any()
            outcomes.add(is_missing)
        else:
            assert (exact == 1).all()
            outcomes.add(None)
    assert outcomes == {True, False, None}


def test_a_grid_of_many_boxes_is_checked_in_little_time() -> None:
    placed = [Placed(0, (0, 0), (1, 1), at) for at in itertools.product(range(256), range(256))]
    check_cover("w", (256, 256), placed)
    with pytest.raises(MismatchError, match=r"has 65792 elements, .* no rank has the box at"):
        check_cover("w", (256, 257), placed)
