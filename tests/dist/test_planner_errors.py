"""What is wrong on a rank fails on all of them; what has no form in columns is saved as by DCP."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from changing_states import EXECUTORS, assert_saved, become, state_at
from ranks import on_ranks
from states import LOAD_PLANNERS, READERS, assert_same, assert_stored, full_value
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
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

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastSavePlanner, FastWriter
from torch_ckpt.errors import MismatchError
from torch_ckpt.planning.item_views import PlannedItems

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


class Boxes:
    """Some boxes of a tensor of zeros, as DCP's contract for such objects has it."""

    def __init__(self, size: list[int], *boxes: tuple[list[int], list[int]]) -> None:
        self.whole = torch.Size(size)
        self.boxes = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, box.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(box, TensorProperties(dtype=torch.uint8), self.whole),
            )
            for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        (box,) = (box for box in self.boxes if box.offsets == index.offset)
        return torch.zeros(box.sizes, dtype=torch.uint8)


class Sparse(torch.Tensor):
    """A tensor that says of itself what has no form in columns."""

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        box = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
        properties = TensorProperties(dtype=torch.float32, layout=torch.sparse_coo)
        data = TensorWriteData(box, properties, torch.Size([3]))
        index = MetadataIndex(fqn, box.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


BAD: dict[str, tuple[Callable[[int], Any], type, str]] = {
    "overlap": (
        lambda rank: Boxes([6, 2], ([3 * rank, 0], [4 - rank, 2])),
        ValueError,
        "cannot plan 'm.w': rank 0 and rank 1 would write overlapping boxes",
    ),
    "overlap of one": (
        lambda rank: Boxes([4], ([0], [3]), ([2], [2])) if rank else Boxes([4]),
        ValueError,
        "cannot plan 'm.w': rank 1 would write overlapping boxes",
    ),
    "hole": (
        lambda rank: Boxes([6, 2], ([4 * rank, 0], [2, 2])),
        ValueError,
        "cannot plan 'm.w': the boxes of all ranks hold 8 of the 12 elements of sizes [6, 2]",
    ),
    "outside": (
        lambda rank: Boxes([4, 2], ([2 * rank, 0], [2 + rank, 2])),
        ValueError,
        "cannot plan 'm.w': rank 1 would write the box",
    ),
    "twice": (
        lambda rank: Boxes([2], ([0], [2]), ([0], [2])) if rank else Boxes([2]),
        ValueError,
        "cannot plan 'm.w': rank 1 would write the box",
    ),
    "dtype": (
        lambda rank: torch.zeros(3, dtype=torch.int8 if rank else torch.uint8),
        MismatchError,
        "cannot plan 'm.w': rank 0 and rank 1 disagree on its dtype: uint8 and int8",
    ),
    "sizes": (
        lambda rank: torch.zeros(3 + rank),
        MismatchError,
        "cannot plan 'm.w': rank 0 and rank 1 disagree on its sizes: [3] and [4]",
    ),
    "kind": (
        lambda rank: torch.zeros(3) if rank else "text",
        MismatchError,
        "cannot plan 'm.w': it is an object on rank 0 and a tensor on rank 1",
    ),
}


def failures(path: Path, state: dict[str, Any], writer: Any, planner: Any) -> list[Any]:
    """Type and text of what each failing rank is said to have raised."""
    try:
        dcp.save(state, storage_writer=writer(path), planner=planner)
    except CheckpointException as error:
        return [(rank, type(e), str(e)) for rank, (e, _) in error.failures.items()]
    return []


@pytest.mark.thin(1)
@pytest.mark.parametrize("writer", [FastWriter, FileSystemWriter])
@pytest.mark.parametrize("name", BAD)
@on_ranks(2)
def test_what_ranks_do_not_agree_on_all_of_them_learn(path: Path, name: str, writer: Any) -> None:
    make, kind, message = BAD[name]
    state = {"m": {"w": make(dist.get_rank()), "fine": torch.ones(5)}}
    ((_, raised, text),) = failures(path, state, writer, FastSavePlanner())
    assert raised is kind
    assert message in text
    dist.barrier()
    assert not (path / ".metadata").exists()
    assert not list(path.glob("*.distcp"))


class Changes(FastWriter):
    """Has the last rank's tensor changed once it is planned."""

    def __init__(self, path: Path, change: str) -> None:
        super().__init__(path)
        self.change = change

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        tensor = planner.state_dict[f"w{dist.get_rank()}"]
        if dist.get_rank() == dist.get_world_size() - 1:
            if self.change == "sizes":
                tensor.data = torch.zeros(7, 2)
            elif self.change == "dtype":
                tensor.data = torch.zeros(5, 3, dtype=torch.int32)
            else:
                tensor.untyped_storage().resize_(0)
        return super().write_data(plan, planner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sizes", "cannot write 'w1': it was planned as float32 of sizes [5, 3], and is float32"),
        ("dtype", "cannot write 'w1': it was planned as float32 of sizes [5, 3], and is int32"),
        ("storage", "reaches beyond its storage of 0 bytes"),
    ],
)
@on_ranks(2)
def test_a_tensor_that_has_changed_since_it_was_planned_is_not_committed(
    path: Path, change: str, message: str
) -> None:
    state = {f"w{dist.get_rank()}": torch.zeros(5, 3), "all": torch.zeros(3)}
    failed = failures(path, state, lambda where: Changes(where, change), FastSavePlanner())
    ((rank, raised, text),) = failed
    assert (rank, raised) == (1, ValueError)
    assert message in text
    assert not (path / ".metadata").exists()


class WithoutColumns(FastSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(
            plan, items=list(plan.items), planner_data=dict(plan.planner_data)
        )


@pytest.mark.parametrize("writer", [FastWriter, FileSystemWriter])
@pytest.mark.parametrize("mix", ["layout", "subclass"])
@on_ranks(3)
def test_where_one_rank_has_no_columns_all_plan_as_stock_does(
    path: Path, mix: str, writer: Any
) -> None:
    rank = dist.get_rank()
    state: dict[str, Any] = {
        "all": full_value("all", (700, 1500), torch.float32),
        "m": {f"of {rank}": full_value(f"{rank}", (5, 3), torch.bfloat16), "step": 7},
    }
    planner = FastSavePlanner()
    if mix == "layout" and rank == 1:
        state["odd"] = torch.ones(3).as_subclass(Sparse)
    if mix == "subclass" and rank == 1:
        planner = WithoutColumns()
    metadata = dcp.save(state, storage_writer=writer(path), planner=planner)
    assert "m.of 0" in metadata.state_dict_metadata
    if rank == 0:
        assert not any(isinstance(plan.items, PlannedItems) for plan in planner.global_plan)
    if mix == "layout" and rank == 1:
        state["odd"] = torch.ones(3)
    assert_stored(path, state, planners=LOAD_PLANNERS)


@on_ranks(2)
def test_ranks_that_write_their_columns_in_different_ways_do_not_commit_half(path: Path) -> None:
    state = {"all": torch.ones(700, 1500), f"{dist.get_rank()}": torch.ones(4)}
    planner = FastSavePlanner()
    if dist.get_rank() == 1:
        planner.transform_object = lambda item, value: value * 2
    ((_, _, said),) = failures(path, state, FastWriter, planner)
    assert "cannot commit __1_0_" in said
    assert not (path / ".metadata").exists()


@pytest.mark.parametrize("call", [dcp.async_save, torch_ckpt.async_save])
@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.slow)])
@on_ranks(2, timeout_s=120)
def test_async_saves_with_our_planner_hold_the_values(path: Path, executor: str, call: Any) -> None:
    """Saves three steps with one planner, each while the next overwrites the tensors."""
    group = dist.new_group(backend="gloo")
    planner, state = FastSavePlanner(), state_at(0)
    for step in range(3):
        future = call(
            state,
            storage_writer=FastWriter(path / f"{step}"),
            planner=planner,
            process_group=group,
            async_checkpointer_type=EXECUTORS[executor],
        )
        become(state, step + 1)
        assert isinstance(future.result(60), Metadata)
    for step in range(3):
        assert_saved(path / f"{step}", step)


@on_ranks(2)
def test_saves_with_a_deadline_or_without_coordination_take_our_planner(path: Path) -> None:
    state = state_at(3)
    torch_ckpt.save(state, checkpoint_id=path / "all", planner=FastSavePlanner())
    assert_saved(path / "all", 3)
    for reader, planner in itertools.product(READERS.values(), LOAD_PLANNERS):
        loaded = state_at(-1)
        torch_ckpt.load(loaded, storage_reader=reader(path / "all"), planner=planner())
        assert_same(loaded["step"], 3)
    alone = {"w": torch.full((4,), float(dist.get_rank())), "rank": dist.get_rank()}
    torch_ckpt.save(
        alone,
        checkpoint_id=path / "each",
        planner=FastSavePlanner(),
        use_collectives=False,
    )
    dist.barrier()
    loaded = {"w": torch.zeros(4), "rank": -1}
    torch_ckpt.load(loaded, checkpoint_id=path / "each", planner=FastLoadPlanner())
    assert_same(loaded, alone)
