"""What a rank lists of its DTensors is what stock DCP lists, whatever they have in common."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from states import full_value
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter

from torch_ckpt import FastSavePlanner
from torch_ckpt.planning import columns, dtensor_boxes
from torch_ckpt.planning.dtensor_boxes import boxes_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

SHAPES = [(7, 5), (7, 6), (3, 1), (1, 3), (0, 4)]  # None of which two or three ranks share evenly.


def check(state: dict[str, Any], planner: FastSavePlanner | None = None) -> None:
    """Checks that a planner of ours lists what stock's does, and without its help."""
    plans = []
    for one in (DefaultSavePlanner(), planner or FastSavePlanner()):
        one.set_up_planner(state, is_coordinator=dist.get_rank() == 0)
        plans.append(one.create_local_plan().items)
    expected, found = plans
    assert not isinstance(found, list)
    for one, other in zip(found, expected, strict=True):
        assert one == other, (one, other)


def box(shape: tuple[int, ...], mesh: Any, *placements: Placement) -> DTensor:
    """A DTensor of this rank's box, as torch says where that lies."""
    full = full_value(f"{shape}", shape, torch.float32)
    local = full.flatten()[:0]
    if mesh.get_coordinate() is not None:
        local = full
        sizes, offsets = compute_local_shape_and_global_offset(full.shape, mesh, placements)
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            local = local.narrow(dim, min(offset, full.size(dim)), size)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=full.size(), stride=full.stride()
    )


@on_ranks(4)
def test_uneven_shards_over_several_meshes_are_listed_as_by_stock() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (4,))
    places: list[tuple[Any, ...]] = [(line, Shard(0)), (line, Shard(1)), (line, Replicate())]
    places += [(grid[name], Shard(dim)) for name in "ab" for dim in (0, 1)]
    places += [
        (grid, *pair)
        for pair in [
            (Shard(0), Shard(1)),
            (Shard(1), Shard(0)),
            (Shard(0), Replicate()),
            (Replicate(), Shard(0)),
        ]
    ]
    check(
        {
            f"{number}.{shape}": box(shape, *place)
            for shape in SHAPES
            for number, place in enumerate(places)
        }
    )


@pytest.mark.thin("2x2")
@pytest.mark.parametrize("shape", [(2, 2), (4,)], ids=["2x2", "4"])
@on_ranks(4)
def test_boxes_of_strided_shards_have_the_rows_that_the_rank_has(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    every = [Replicate(), Shard(0), *(_StridedShard(0, split_factor=k) for k in (1, 2, 3, 4))]
    counts = set()
    for numel, places in itertools.product(
        (1, 4, 6, 7, 8, 13), itertools.product(every, repeat=mesh.ndim)
    ):
        tensor = distribute_tensor(torch.arange(numel), mesh, places, src_data_rank=None)
        boxes = boxes_of(tensor, "w")
        ranges = [range(box.offsets[0], box.offsets[0] + box.sizes[0]) for box in boxes]
        rows = list(itertools.chain.from_iterable(ranges))
        assert rows == tensor.to_local().tolist(), (numel, places)
        counts.add(len(boxes))
    assert counts >= {1, 2, 3}


@on_ranks(2)
def test_whether_gradients_are_needed_is_said_as_by_stock() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for needed in (False, True):
        state[f"plain.{needed}"] = torch.zeros(3, requires_grad=needed)
        state[f"box.{needed}"] = box((7, 5), mesh, Shard(0)).requires_grad_(needed)
        state[f"parameter.{needed}"] = Parameter(box((7, 5), mesh, Shard(0)), needed)
        local = torch.zeros(3, 2, requires_grad=needed)
        state[f"from local.{needed}"] = DTensor.from_local(local, mesh, [Shard(0)])
    state["made without"] = box((7, 5), mesh, Shard(0))
    for grad_mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with grad_mode():
            check(state)


class Rows(DTensor):
    """A DTensor with an idea of its own of what it stores."""

    @staticmethod
    def of(tensor: DTensor) -> Rows:
        rows = torch.Tensor._make_wrapper_subclass(Rows, tensor.shape, dtype=tensor.dtype)
        rows._local_tensor, rows._spec = tensor._local_tensor, tensor._spec
        return rows

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        (item,) = super().__create_write_items__(fqn, object)
        return [item, *_create_write_items(f"{fqn}.rows", torch.zeros(2))]


class Local(torch.Tensor):
    """The local part of a DTensor, which lists itself."""

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return _create_write_items(f"{fqn}.local", torch.zeros(3))


@on_ranks(2)
def test_subclasses_and_wrapped_local_parts_list_themselves() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.zeros(3, 2).as_subclass(Local)
    state = {
        "before": box((7, 5), mesh, Shard(0)),
        "rows": Rows.of(box((7, 5), mesh, Shard(0))),
        "wrapped": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
        "after": box((7, 5), mesh, Shard(0)),
    }
    assert type(state["rows"]) is Rows
    assert type(state["wrapped"]._local_tensor) is Local
    planner = FastSavePlanner()
    check(state, planner)
    listed = [item.index.fqn for item in planner.plan.items]
    assert {"rows", "rows.rows", "wrapped.local"} <= set(listed)


class FirstRows(Shard):
    """Equal to a Shard, and yet another: all ranks but the first have nothing."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shard) and self.dim == other.dim

    def __hash__(self) -> int:
        return hash(Shard(self.dim))

    def _local_shard_size_and_offset(self, curr_local_size: int, *args: Any, **kwargs: Any) -> Any:
        return (curr_local_size, 0) if dist.get_rank() == 0 else (0, curr_local_size)


@on_ranks(2)
def test_placements_of_another_class_are_not_taken_for_their_equals() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert hash(FirstRows(1)) == hash(Shard(1))
    assert FirstRows(1) == Shard(1)
    state = {f"{i}": box((7, 5), mesh, [Shard, FirstRows][i % 2](1)) for i in range(4)}
    check(state)
    check({"odd first": state["1"], "even": state["0"]})


@on_ranks(4)
def test_objects_that_take_the_place_of_dead_ones_are_not_taken_for_them() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    planner, owners = FastSavePlanner(), {}
    recurred = 0
    for number in range(60):
        mesh = grid["ab"[number % 2]]
        tensor = box((7, 5), mesh, Shard(number // 2 % 2))
        value = (number % 2, number // 2 % 2)
        for object in (tensor, tensor._spec, tensor._spec.placements, tensor._spec.placements[0]):
            recurred += owners.get(id(object), value) != value
            owners[id(object)] = value
        check({"w": tensor}, planner)
        del tensor, mesh, object
    assert recurred


@on_ranks(2)
def test_torch_is_asked_once_where_tensors_of_the_same_kind_lie() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {f"w{i}": box(SHAPES[i % 2], mesh, Shard(i % 3 // 2)) for i in range(60)}
    computed = dtensor_boxes.compute_local_shape_and_global_offset
    with mock.patch.object(
        dtensor_boxes, "compute_local_shape_and_global_offset", wraps=computed
    ) as asked:
        columns.table_of(state)
    assert asked.call_count == 4


@on_ranks(2)
def test_a_partial_sum_is_the_error_of_stock() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    partial = DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False)
    for value in (partial, Rows.of(partial)):
        for planner in (DefaultSavePlanner(), FastSavePlanner()):
            planner.set_up_planner({"w": value})
            with pytest.raises(ValueError, match="partial placement"):
                planner.create_local_plan()
