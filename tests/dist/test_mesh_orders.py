"""Meshes whose ranks are in any order: a tensor whose replicas differ is stored from one replica.

The ranks that have a box, in ascending order, do not number the replicas of such a mesh: of the
mesh [[0, 3], [1, 2]], ranks 0 and 1 have the first shard, and ranks 2 and 3 the second one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machines import on_machine
from ranks import Ranks, Worlds, on_ranks
from states import READERS, sharded
from support.logs import logged
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from unequal_replicas import (
    WAYS,
    FindingPlanner,
    by_a_run_with_an_agent,
    by_stock,
    by_this_package,
    fresh,
    with_more_on_the_first_rank,
)

import torch_ckpt
from torch_ckpt import FastSavePlanner, FastWriter, Run, SafetensorsWriter, SnapshotStager
from torch_ckpt.planning.plan_cache import plan_cache

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

SIZES = (1024, 600)  # 2.3 MiB of float32: divided between ranks if its replicas are equal.
OTHER_SIZES = {"uneven": (7, 5), "short": (1, 9)}  # The last one has an empty shard.
R, S0, S1 = Replicate(), Shard(0), Shard(1)

SLOW_S = 110  # Several saves with agents; for a machine that is busy.

State = dict[str, Any]
Way = Callable[[State, Path], None]


class Drifted:
    """A state whose replicas differ: all elements of a tensor have the number of its replica."""

    def __init__(self) -> None:
        self.state: State = {}
        self.numbers: dict[str, float] = {}  # Of the replica that this rank is in.

    def add(self, name: str, tensor: torch.Tensor, number: float) -> None:
        values = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        values.fill_(number)
        self.state[name], self.numbers[name] = tensor, float(number)

    def place(self, mesh: DeviceMesh, where: Sequence[Placement], **sizes: Sequence[int]) -> None:
        """Adds a tensor for each of the sizes, placed on a mesh."""
        number = 0
        for at, count, placement in zip(mesh.get_coordinate(), mesh.shape, where, strict=True):
            number = number * count + at if placement.is_replicate() else number
        for name, size in sizes.items():
            self.add(name, sharded(torch.zeros(*size), mesh, tuple(where)), number)

    def equal(self) -> State:
        """The same state, with equal values on all ranks."""
        made = Drifted()
        for name, value in self.state.items():
            if not isinstance(value, ShardedTensor):
                made.add(name, value.detach().clone(), 0)
        return made.state


def numbers_in(value: torch.Tensor) -> set[float]:
    """The smallest and the largest element: one number if all are equal."""
    return {number.item() for number in value.aminmax()} if value.numel() else set()


def assert_from_the_first_ranks_replica(path: Path, drifted: Drifted, readers: Any) -> None:
    numbers: list[Any] = [drifted.numbers]
    dist.broadcast_object_list(numbers)  # After the save of all ranks.
    for reader in readers.values():
        loaded = {name: torch.full(value.size(), -1.0) for name, value in drifted.state.items()}
        dcp.load(loaded, storage_reader=reader(path), no_dist=True)
        found = {name: numbers_in(value) for name, value in loaded.items()}
        assert found == {name: {number} for name, number in numbers[0].items()}
    dist.barrier()


def hsdp(ranks: Any) -> Drifted:
    made = Drifted()
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    made.place(mesh, (R, S0), w=SIZES, **OTHER_SIZES)
    made.place(mesh, (S1, R), columns=SIZES)
    made.add("plain", torch.zeros(SIZES), dist.get_rank())
    return made


def hsdp_and_tensor_parallel(ranks: Any) -> Drifted:
    made = Drifted()
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "fsdp", "tp"))
    made.place(mesh, (R, S0, S1), w=SIZES, **OTHER_SIZES)
    made.place(mesh, (R, S0, R), norm=SIZES)
    made.place(mesh, (R, _StridedShard(0, split_factor=2), S0), strided=SIZES)
    made.place(mesh, (R, R, S0), tp=SIZES)
    return made


def tensor_parallel_beside_replicas(ranks: Any) -> Drifted:
    """DDP over tensor parallelism: the DTensors are on a part of the mesh."""
    made = Drifted()
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("ddp", "tp"))
    for name, size in {"w": SIZES, **OTHER_SIZES}.items():
        value = sharded(torch.zeros(size), mesh["tp"], (S0,))
        made.add(name, value, mesh.get_coordinate()[0])
    return made


def a_mesh_for_each_replica(ranks: Any) -> Drifted:
    """Meshes that know nothing of each other."""
    made = Drifted()
    for number, row in enumerate(ranks):
        mesh = DeviceMesh("cpu", row)
        if dist.get_rank() in row:
            for name, size in {"w": SIZES, **OTHER_SIZES}.items():
                made.add(name, sharded(torch.zeros(size), mesh, (S0,)), number)
    return made


def sharded_tensors(ranks: Any) -> Drifted:
    """What FSDP1 makes of a model in shards that has replicas, without a mesh."""
    made = Drifted()
    for number, row in enumerate(ranks):
        group = dist.new_group(row)
        if dist.get_rank() in row:
            for name, size in {"w": SIZES, "uneven": OTHER_SIZES["uneven"]}.items():
                parts = torch.full(size, float(number)).chunk(len(row))
                at = sorted(row).index(dist.get_rank())
                begin = sum(len(part) for part in parts[:at])
                shard = LocalShard.from_tensor_and_offsets(parts[at], [begin, 0], dist.get_rank())
                tensor = init_from_local_shards([shard], *size, process_group=group)
                made.state[name], made.numbers[name] = tensor, float(number)
    return made


SQUARE = [[0, 3], [1, 2]]
FIRST_RANK_LAST = [[3, 1], [2, 0]]
LAYOUTS: dict[str, tuple[Callable[[Any], Drifted], Any]] = {
    "2x2": (hsdp, SQUARE),
    "2x2, first rank last": (hsdp, FIRST_RANK_LAST),
    "2x3": (hsdp, [[0, 4, 2], [5, 1, 3]]),
    "3x2": (hsdp, [[0, 5], [4, 1], [2, 3]]),
    "2x2x2": (hsdp_and_tensor_parallel, [[[0, 6], [3, 5]], [[7, 1], [2, 4]]]),
    "ddp and tp": (tensor_parallel_beside_replicas, SQUARE),
    "a mesh for each": (a_mesh_for_each_replica, SQUARE),
    "a mesh for some": (a_mesh_for_each_replica, [[0, 1], [5, 2], [4, 3]]),
    "fsdp1": (sharded_tensors, SQUARE),
    "in order": (hsdp, [[0, 1], [2, 3]]),
}


def save_drifted(path: Path, way: Way, layout: str) -> None:
    fresh()
    make, ranks = LAYOUTS[layout]
    drifted = make(ranks)
    for number, state in enumerate([drifted.state, drifted.equal(), drifted.state]):
        way(with_more_on_the_first_rank(state), path / str(number))
        if number != 1:
            assert_from_the_first_ranks_replica(path / str(number), drifted, READERS)


def world_of(layout: str) -> int:
    return int(torch.tensor(LAYOUTS[layout][1]).numel())


@pytest.mark.thin(
    *("by_stock-2x2", "by_stock-fsdp1", "by_this_package-2x3", "by_this_package-ddp and tp"),
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", [by_stock, by_this_package], ids=lambda way: way.__name__)
def test_a_tensor_whose_replicas_differ_is_stored_from_one_replica_of_its_mesh(
    worlds: Worlds, tmp_path: Path, way: Way, layout: str
) -> None:
    worlds.run(world_of(layout), save_drifted, tmp_path, way, layout)


def to_the_lowest_rank(state: State, path: Path) -> None:
    planner = FastSavePlanner(dedup_save_to_lowest_rank=True)
    torch_ckpt.save(state, checkpoint_id=path, planner=planner)


OTHER_WAYS = [way for name, way in WAYS.items() if name not in ("by_stock", "by_this_package")]


@pytest.mark.thin("to_the_lowest_rank")  # For that by an agent there is another test.
@pytest.mark.parametrize(
    "way", [*OTHER_WAYS, to_the_lowest_rank, by_a_run_with_an_agent], ids=lambda way: way.__name__
)
@pytest.mark.usefixtures("memory")
def test_all_ways_to_save_store_one_replica_of_the_mesh(
    worlds: Worlds, tmp_path: Path, way: Way
) -> None:
    worlds.run(4, save_drifted, tmp_path, way, "2x2, first rank last")


@pytest.mark.parametrize("planner", [None, FastSavePlanner], ids=["stock", "fast"])
@on_ranks(4)
def test_safetensors_have_one_replica_of_the_mesh(path: Path, planner: Any) -> None:
    from safetensors.torch import load_file

    fresh()
    drifted = hsdp(SQUARE)
    dcp.save(drifted.state, storage_writer=SafetensorsWriter(path), planner=planner and planner())
    dist.barrier()
    loaded = load_file(path / "model.safetensors")
    assert {name: numbers_in(value) for name, value in loaded.items()} == {
        name: {0.0} for name in drifted.state
    }


@pytest.mark.usefixtures("memory")
@on_ranks(4)
def test_agents_store_one_replica_of_the_mesh_when_ranks_copy_shares(path: Path) -> None:
    fresh()
    drifted = hsdp(SQUARE)
    with Run(path, asynchronous=True, agent=True, timeout_s=60) as run:
        for step, differ in enumerate([True, True, False, False, True, True], 1):
            run.save(
                step, with_more_on_the_first_rank(drifted.state if differ else drifted.equal())
            )
            run.wait()
            if differ:
                assert_from_the_first_ranks_replica(path / f"step-{step}", drifted, READERS)


@on_ranks(4)
def test_staged_shares_are_of_one_replica_of_the_mesh(path: Path) -> None:
    fresh()
    stager = SnapshotStager()
    group = dist.new_group(backend="gloo")
    drifted = hsdp(SQUARE)
    for step, differ in enumerate([True, True, False, False, True, True]):
        state = with_more_on_the_first_rank(drifted.state if differ else drifted.equal())
        writer = FastWriter(path / str(step), stager=stager)
        torch_ckpt.async_save(state, storage_writer=writer, process_group=group).result(60)
        if differ:
            assert_from_the_first_ranks_replica(path / str(step), drifted, READERS)


@on_ranks(4)
def test_shards_that_a_planner_finds_elsewhere_are_of_one_replica_of_the_mesh(path: Path) -> None:
    """Their values are not compared, so that any of the replicas may be the stored one."""
    fresh()
    drifted = hsdp(SQUARE)
    state = with_more_on_the_first_rank(drifted.state)
    dcp.save(state, storage_writer=FastWriter(path), planner=FindingPlanner())
    dist.barrier()
    loaded = {name: torch.full(value.size(), -1.0) for name, value in drifted.state.items()}
    dcp.load(loaded, no_dist=True, checkpoint_id=path)
    assert all(len(numbers_in(value)) == 1 for value in loaded.values())


@on_ranks(4)
def test_a_cached_plan_is_not_used_for_the_same_boxes_in_replicas_of_other_ranks(
    path: Path,
) -> None:
    fresh()
    hits = []
    orders = [SQUARE, SQUARE, [[0, 2], [1, 3]], [[0, 2], [1, 3]], SQUARE]
    for number, ranks in enumerate(orders):
        before = plan_cache().hits
        drifted = hsdp(ranks)
        by_this_package(drifted.state, path / str(number))
        hits.append(plan_cache().hits - before)
        assert_from_the_first_ranks_replica(path / str(number), drifted, READERS)
    assert hits[:4] == [0, 1, 0, 1]


@pytest.mark.parametrize("way", [by_stock, by_this_package], ids=lambda way: way.__name__)
@on_ranks(6)
def test_a_warning_names_every_pair_of_ranks_whose_boxes_differ(path: Path, way: Way) -> None:
    fresh()
    mesh = DeviceMesh("cpu", [[0, 5], [4, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    drifted = Drifted()
    drifted.place(mesh, (R, S0), w=SIZES)
    with logged(logging.WARNING) as lines:
        way(drifted.state, path)
    if dist.get_rank():
        assert lines == []
        return
    (line,) = lines
    assert "'w' (ranks 2, 4 differ from rank 0, ranks 3, 5 from rank 1). Each is stored " in line


def save_on_machines(run: Path, memory: Path) -> None:
    fresh()
    on_machine(memory)
    drifted = hsdp(SQUARE)  # Each of the machines has one shard of both replicas.
    with Run(run, asynchronous=True, agent=True, timeout_s=60) as made:
        for step, differ in enumerate([True, True, False, False, True], 1):
            made.save(step, drifted.state if differ else drifted.equal())
            made.wait()
            if differ:
                assert_from_the_first_ranks_replica(run / f"step-{step}", drifted, READERS)


@pytest.mark.slow
def test_agents_of_several_machines_store_one_replica_of_the_mesh(
    tmp_path: Path, memory: Path
) -> None:
    with Ranks(4) as world:
        world.run(save_on_machines, tmp_path / "run", memory, timeout_s=SLOW_S)
