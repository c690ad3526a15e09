"""Ranks that hold other values under one name: no tensor is a mixture, and one warning says so."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machines import on_machine
from ranks import Ranks, Worlds, on_ranks
from states import READERS, assert_same, full_value, sharded
from support.logs import logged
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from unequal_replicas import (
    SAVE_TIMEOUT_S,
    SIZES,
    WAYS,
    FindingPlanner,
    by_a_run_with_an_agent,
    by_an_agent_with,
    by_stock,
    by_this_package,
    fresh,
    with_more_on_the_first_rank,
)

import torch_ckpt
from torch_ckpt import (
    FastReader,
    FastSavePlanner,
    FastWriter,
    Run,
    SafetensorsWriter,
    SnapshotStager,
)
from torch_ckpt._core import _native
from torch_ckpt.agent import AgentOptions
from torch_ckpt.planning import save_planner
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.staging.stager import _Placed

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

OWN = "has its own"
SLOW_S = 110  # Several saves with agents; for a machine that is busy.


def state_at(step: int, what: str = "") -> dict[str, Any]:
    """Replicas; one of them, which is cut, may have another value on each rank."""
    value = float(10 * step + (dist.get_rank() if what == OWN else 0))
    small = {f"layer.{i}": full_value(f"{i} at {step}", (300, 70), torch.float32) for i in range(4)}
    return {"model": {"w": torch.full(SIZES, value), **small}, "step": step}


def stored(path: Path, step: int, readers: Any = READERS) -> float:
    """The one value that the tensor has, for every reader; all others are as they were saved."""
    values: set[float] = set()
    for reader in readers.values():
        state = state_at(-7)
        dcp.load(state, storage_reader=reader(path), no_dist=True)
        values |= extremes(state["model"].pop("w"))
        expected = state_at(step)
        del expected["model"]["w"]
        assert_same(state, expected)
    (value,) = values
    return value


def extremes(tensor: torch.Tensor) -> set[float]:
    """The least and the greatest value, in a fraction of the time of a sort."""
    return {value.item() for value in tensor.aminmax()}


def check(path: Path, step: int, what: str = "", *, world: int | None = None) -> None:
    """Checks that the tensor is that of one rank."""
    dist.barrier()
    world = world or dist.get_world_size()
    assert stored(path, step) in [10 * step + (rank if what == OWN else 0) for rank in range(world)]
    dist.barrier()


def chunks_of(path: Path, fqn: str = "model.w") -> int:
    return len(FastReader(path).read_metadata().state_dict_metadata[fqn].chunks)


def assert_warned(lines: list[str], count: int = 1, *names: str) -> None:
    """The first rank, and no other, has warned this often."""
    assert len(lines) == (0 if dist.get_rank() else count), lines
    for line in lines:
        assert all(f"'{name}'" in line for name in names or ("model.w",)), line
        assert "RankState" in line


def save_unequal(path: Path, way: str) -> None:
    fresh()
    with logged(logging.WARNING) as lines:
        for number in range(2):
            WAYS[way](state_at(3, OWN), path / str(number))
            check(path / str(number), 3, OWN)
    assert chunks_of(path / "1") == 1
    if way != "by_a_process":  # That process has warned.
        assert_warned(lines)


@pytest.mark.thin("by_stock-2", "by_this_package-3")
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_one_ranks_tensor_is_stored_and_warned_of_once(
    worlds: Worlds, tmp_path: Path, way: str, count: int
) -> None:
    worlds.run(count, save_unequal, tmp_path, way)


STEPS = ["", "", OWN, OWN, "", "", OWN]


@on_ranks(3)
def test_values_that_differ_in_a_later_save_are_found_beside_a_cached_plan(path: Path) -> None:
    fresh()
    hits = []
    with logged(logging.WARNING) as lines:
        for step, what in enumerate(STEPS):
            before = plan_cache().hits
            by_this_package(state_at(step, what), path / str(step))
            hits.append(plan_cache().hits - before)
            check(path / str(step), step, what)
            assert (chunks_of(path / str(step)) > 1) == (step < 2)
    assert_warned(lines)
    # One save plans anew, and its plan holds for values that differ and for equal ones.
    assert hits == [0, 1, 0, 1, 1, 1, 1]


@on_ranks(3)
def test_values_that_differ_after_a_staged_share_are_staged_by_all(path: Path) -> None:
    fresh()
    stager = SnapshotStager()
    group = dist.new_group(backend="gloo")
    staged: list[int] = []
    copy_all = _Placed.copy_all

    def copy_counted(placed: _Placed, *where: Any) -> None:
        staged.append(len(placed._copies))
        copy_all(placed, *where)

    with logged(logging.WARNING) as lines, mock.patch.object(_Placed, "copy_all", copy_counted):
        for step, what in enumerate(STEPS):
            state = state_at(step, what)
            future = torch_ckpt.async_save(
                state,
                storage_writer=FastWriter(path / str(step), stager=stager),
                process_group=group,
            )
            state["model"]["w"].fill_(-1)  # Training goes on.
            future.result(SAVE_TIMEOUT_S)
            check(path / str(step), step, what)
    assert_warned(lines)
    # All tensors, or a share of them.
    assert [count == 5 for count in staged] == [step in (0, 2) for step in range(len(STEPS))]


@on_ranks(2)
def test_values_that_differ_for_another_save_do_not_end_a_share(path: Path) -> None:
    """A save of the same names, whose values differ, changes the plan between two staged saves."""
    fresh()
    stager = SnapshotStager()
    group = dist.new_group(backend="gloo")
    for step in range(4):
        torch_ckpt.async_save(
            state_at(step),
            storage_writer=FastWriter(path / str(step), stager=stager),
            process_group=group,
        ).result(SAVE_TIMEOUT_S)
        check(path / str(step), step)
        if step in (1, 2):
            by_this_package(state_at(step, OWN), path / "other")
            check(path / "other", step, OWN)


@pytest.mark.slow  # Agents meet tensors that differ in two of the tests below.
@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("steps", [STEPS, [OWN, OWN, "", OWN]], ids=["later", "at once"])
@on_ranks()
def test_agents_store_one_ranks_tensor(path: Path, steps: list[str]) -> None:
    fresh()
    with (
        logged(logging.WARNING) as lines,
        Run(path, asynchronous=True, agent=True, timeout_s=60) as run,
    ):
        for step, what in enumerate(steps, 1):
            state = state_at(step, what)
            run.save(step, state)
            state["model"]["w"].fill_(-1)
            run.wait()
            check(path / f"step-{step}", step, what)
    assert_warned(lines)


def hsdp(rank_value: bool) -> dict[str, Any]:
    """Shards along one dimension of the mesh, replicas along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = torch.full(SIZES, float(mesh.get_local_rank("replicate") if rank_value else 0))
    return {"w": sharded(full, mesh, (Replicate(), Shard(0)))}


def check_one_replica(path: Path, allowed: list[float], readers: Any = READERS) -> None:
    """The shards are those of one replica."""
    dist.barrier()
    for reader in readers.values():
        loaded = {"w": torch.full(SIZES, -1.0)}
        dcp.load(loaded, storage_reader=reader(path), no_dist=True)
        assert extremes(loaded["w"]) in [{value} for value in allowed]
    dist.barrier()


PAIRS = "'w' (rank 2 differs from rank 0, rank 3 from rank 1)"


def save_hsdp(path: Path, way: Callable[[dict[str, Any], Path], None], has_warned: bool) -> None:
    fresh()
    with logged(logging.WARNING) as lines:
        for number, differ in enumerate([True, False, True]):
            way(with_more_on_the_first_rank(hsdp(differ)), path / str(number))
            check_one_replica(path / str(number), [0.0, 1.0] if differ else [0.0])
    if has_warned:
        assert_warned(lines, 1, "w")
        assert all(PAIRS in line for line in lines), lines


@pytest.mark.thin("by_stock", "by_this_package")
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_in_shards_is_stored_from_one_replica(
    worlds: Worlds, tmp_path: Path, way: str
) -> None:
    worlds.run(4, save_hsdp, tmp_path, WAYS[way], way != "by_a_process")


@pytest.mark.slow  # The next test does this, and more.
@pytest.mark.usefixtures("memory")
@on_ranks(4)
def test_agents_store_a_tensor_in_shards_from_one_replica(path: Path) -> None:
    save_hsdp(path, by_a_run_with_an_agent, True)


@pytest.mark.usefixtures("memory")
@on_ranks(4)
def test_agents_store_a_tensor_in_shards_from_one_replica_when_they_copy_shares(path: Path) -> None:
    fresh()
    differ = [True, True, False, False, True, True]
    with (
        logged(logging.WARNING) as lines,
        Run(path, asynchronous=True, agent=True, timeout_s=60) as run,
    ):
        for step, what in enumerate(differ, 1):
            run.save(step, with_more_on_the_first_rank(hsdp(what)))
            run.wait()
            check_one_replica(path / f"step-{step}", [0.0, 1.0] if what else [0.0])
    assert_warned(lines, 1, "w")
    assert all(PAIRS in line for line in lines), lines


@on_ranks(4)
def test_staged_shares_of_a_tensor_in_shards_are_of_one_replica(path: Path) -> None:
    fresh()
    stager = SnapshotStager()
    group = dist.new_group(backend="gloo")
    for step, differ in enumerate([True, True, False, False, True, True]):
        state = with_more_on_the_first_rank(hsdp(differ))
        writer = FastWriter(path / str(step), stager=stager)
        torch_ckpt.async_save(state, storage_writer=writer, process_group=group).result(60)
        check_one_replica(path / str(step), [0.0, 1.0] if differ else [0.0])


@pytest.mark.parametrize("planner", [None, FastSavePlanner], ids=["stock", "fast"])
@on_ranks(4)
def test_safetensors_have_a_tensor_in_shards_of_one_replica(path: Path, planner: Any) -> None:
    from safetensors.torch import load_file

    fresh()
    with logged(logging.WARNING) as lines:
        for step in range(2):
            writer = SafetensorsWriter(path / str(step))
            state = with_more_on_the_first_rank(hsdp(True))
            dcp.save(state, storage_writer=writer, planner=planner and planner())
            dist.barrier()
            values = extremes(load_file(path / str(step) / "model.safetensors")["w"])
            assert values in [{0.0}, {1.0}]
    assert_warned(lines, 1, "w")


@on_ranks(4)
def test_shards_that_a_planner_finds_elsewhere_are_of_one_replica(path: Path) -> None:
    """Their values are not compared, so nobody is warned."""
    fresh()
    with logged(logging.WARNING) as lines:
        for number in range(2):
            state = with_more_on_the_first_rank(hsdp(True))
            dcp.save(state, storage_writer=FastWriter(path / str(number)), planner=FindingPlanner())
            check_one_replica(path / str(number), [0.0, 1.0])
    assert lines == []


@on_ranks(4)
def test_all_tensors_whose_replicas_differ_are_of_the_same_replica(path: Path) -> None:
    fresh()
    rank = float(dist.get_rank())
    for way in (by_stock, by_this_package):
        state = {f"layer.{i}": torch.full((512, 1024), rank) for i in range(8)}
        way(state, path / way.__name__)
        dist.barrier()
        loaded = {fqn: torch.full_like(tensor, -1) for fqn, tensor in state.items()}
        dcp.load(loaded, storage_reader=FastReader(path / way.__name__), no_dist=True)
        assert {value for tensor in loaded.values() for value in extremes(tensor)} == {0.0}
        dist.barrier()


@pytest.mark.parametrize("planner", [None, FastSavePlanner], ids=["stock", "fast"])
@on_ranks(2)
def test_safetensors_have_one_ranks_tensor(path: Path, planner: Any) -> None:
    from safetensors.torch import load_file

    fresh()
    with logged(logging.WARNING) as lines:
        for step in range(2):
            folder = path / str(step)
            state = {"w": torch.full(SIZES, float(dist.get_rank())), "bias": torch.ones(3)}
            writer = SafetensorsWriter(folder)
            dcp.save(state, storage_writer=writer, planner=planner and planner())
            dist.barrier()
            assert len(extremes(load_file(folder / "model.safetensors")["w"])) == 1
    assert_warned(lines, 1, "w")


def by_stock_with(mode: Any, state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=FastWriter(path, check_replicas=mode))


def by_columns_with(mode: Any, state: dict[str, Any], path: Path) -> None:
    planner = FastSavePlanner(check_replicas=mode)
    torch_ckpt.save(state, storage_writer=FastWriter(path), planner=planner)


def by_this_package_with(mode: Any, state: dict[str, Any], path: Path) -> None:
    torch_ckpt.save(state, storage_writer=FastWriter(path, check_replicas=mode))


def by_a_run_with(mode: Any, state: dict[str, Any], path: Path) -> None:
    with Run(path.parent / "run", writer={"check_replicas": mode}) as run:
        run.save(int(path.name), state)
    dist.barrier()
    if dist.get_rank() == 0:
        (path.parent / "run" / f"step-{path.name}").rename(path)
    dist.barrier()


WAYS_WITH = {
    way.__name__: way
    for way in (
        by_stock_with,
        by_columns_with,
        by_this_package_with,
        by_a_run_with,
        by_an_agent_with,
    )
}


def outside_of_the_sample(numel: int, itemsize: int) -> int:
    """An element that no sample has."""
    firsts, count = _native.sample_of(numel, itemsize)
    assert firsts[3] + count < firsts[4]
    return firsts[3] + count


@pytest.mark.thin("by_stock_with", "by_an_agent_with")
@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("way", WAYS_WITH)
@on_ranks()
def test_one_byte_outside_of_the_sample_is_found_in_the_full_tensor(path: Path, way: str) -> None:
    at = outside_of_the_sample(math.prod(SIZES), 4)
    for number, (mode, is_found) in enumerate([("sample", False), ("full", True), ("full", True)]):
        if number < 2:
            fresh()
        state = {"w": torch.full(SIZES, 5.0)}
        if dist.get_rank() == 1:
            state["w"].view(torch.uint8).view(-1)[4 * at] += 1
        with logged(logging.WARNING) as lines:
            WAYS_WITH[way](mode, state, path / str(number))
        assert chunks_of(path / str(number), "w") == (1 if is_found else 2)
        assert_warned(lines, int(is_found and number == 1), "w")


@pytest.mark.thin("by_stock_with")
@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("way", WAYS_WITH)
@on_ranks()
def test_without_a_check_a_tensor_may_be_a_mixture(path: Path, way: str) -> None:
    fresh()
    with logged(logging.WARNING) as lines:
        WAYS_WITH[way]("off", {"w": torch.full(SIZES, float(dist.get_rank()))}, path / "0")
    assert lines == []
    loaded = {"w": torch.full(SIZES, -1.0)}
    dcp.load(loaded, storage_reader=FastReader(path / "0"), no_dist=True)
    assert loaded["w"].unique().tolist() == [0.0, 1.0]


def strided(values: torch.Tensor) -> torch.Tensor:
    return values.t().contiguous().t() if dist.get_rank() else values


def nans(first_bits: int) -> torch.Tensor:
    """NaNs, of which the first one has these bits."""
    values = torch.full(SIZES, math.nan)
    values.view(torch.int32)[0, 0] = first_bits
    return values


def with_last(value: float) -> torch.Tensor:
    values = torch.ones(SIZES)
    values[-1, -1] = value
    return values


EQUAL: dict[str, Callable[[], torch.Tensor]] = {
    "strides": lambda: strided(torch.arange(math.prod(SIZES)).view(SIZES).float()),
    "a flag": lambda: torch.full(SIZES, 1.0, requires_grad=bool(dist.get_rank())),
    "nan": lambda: nans(0x7FC00000),
    "another nan": lambda: nans(0x7FC00001),
}
DIFFERENT: dict[str, Callable[[], torch.Tensor]] = {
    "bits of a nan": lambda: nans(0x7FC00000 + dist.get_rank()),
    "the sign of a zero": lambda: torch.full(SIZES, -0.0 if dist.get_rank() else 0.0),
    "the last element": lambda: with_last(float(dist.get_rank())),
}


@pytest.mark.thin(1)
@pytest.mark.parametrize("what", [*EQUAL, *DIFFERENT])
@pytest.mark.parametrize("way", ["by_stock", "by_this_package"])
@on_ranks(2)
def test_values_are_compared_bit_for_bit_whatever_their_strides(
    path: Path, way: str, what: str
) -> None:
    fresh()
    with logged(logging.WARNING) as lines:
        for number in range(2):
            value = (EQUAL | DIFFERENT)[what]()
            WAYS[way]({"w": value}, path / str(number))
            assert chunks_of(path / str(number), "w") == (2 if what in EQUAL else 1)
            loaded = {"w": torch.zeros_like(value)}
            dcp.load(loaded, storage_reader=FastReader(path / str(number)), no_dist=True)
            if what in EQUAL:
                assert_same({"w": loaded["w"]}, {"w": value})
    assert_warned(lines, int(what in DIFFERENT), "w")


@on_ranks(3)
def test_a_warning_names_a_few_tensors_and_ranks_and_comes_once_for_them(path: Path) -> None:
    fresh()
    rank = dist.get_rank()
    state: dict[str, Any] = {f"t{i}": torch.full((3,), float(rank)) for i in range(6)}
    state["t0"] = torch.full((3,), float(rank == 1))
    state |= {"same": torch.ones(3), "object": f"of rank {rank}"}
    with logged(logging.WARNING) as lines:
        for number in range(3):
            by_this_package(state, path / str(number))
            by_stock(state, path / str(number))
        state["t6"] = torch.full((3,), float(rank))
        by_this_package(state, path / "3")
    if rank:
        assert lines == []
        return
    first, second = lines
    assert first.startswith(
        "6 tensors have different values on ranks that have the same box of them: 't0' (rank 1 "
        "differs from rank 0), 't1' (ranks 1, 2 differ from rank 0), 't2' (ranks 1, 2 differ from "
        "rank 0), 't3' (ranks 1, 2 differ from rank 0), and 2 more. "
    )
    assert "object" not in first
    assert second.startswith("7 tensors have ")


class MakingPlanner(dcp.DefaultSavePlanner):
    """Makes another tensor of each when it is written."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        return made.bfloat16().float() if isinstance(made, torch.Tensor) else made


@pytest.mark.parametrize(
    ("planner", "is_cut", "is_warned_of"),
    [(MakingPlanner, True, True), (FindingPlanner, False, False)],
)
@on_ranks(2)
def test_tensors_that_a_planner_finds_elsewhere_are_not_cut(
    path: Path, planner: Any, is_cut: bool, is_warned_of: bool
) -> None:
    fresh()
    with logged(logging.WARNING) as lines:
        for number, what in enumerate(["", OWN]):
            writer = FastWriter(path / str(number))
            dcp.save(state_at(3, what), storage_writer=writer, planner=planner())
            assert chunks_of(path / str(number)) == (2 if is_cut and not what else 1)
    state = {"model": {"w": torch.zeros(SIZES)}}
    dcp.load(state, storage_reader=FastReader(path / "1"), no_dist=True)
    assert len(extremes(state["model"]["w"])) == 1
    assert_warned(lines, int(is_warned_of))


@on_ranks(2)
def test_shards_without_replicas_are_not_read_beside_a_cached_plan(path: Path) -> None:
    fresh()
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": sharded(torch.ones(SIZES), mesh, (Shard(0),)), "step": 3}
    digests = save_planner.value_digests
    with mock.patch.object(save_planner, "value_digests", wraps=digests) as made:
        for number in range(3):
            by_this_package(state, path / str(number))
    assert [call.args[2] for call in made.call_args_list] == [None, [], []]


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(FastWriter, "x"),
        functools.partial(SafetensorsWriter, "x"),
        FastSavePlanner,
        AgentOptions,
    ],
    ids=["FastWriter", "SafetensorsWriter", "FastSavePlanner", "AgentOptions"],
)
def test_another_way_to_check_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="check_replicas='fast' is not one of sample, full, off"):
        make(check_replicas="fast")


def save_on_machines(run: Path, memory: Path, steps: list[str]) -> None:
    fresh()
    on_machine(memory)
    with (
        logged(logging.WARNING) as lines,
        Run(run, asynchronous=True, agent=True, timeout_s=60) as made,
    ):
        for step, what in enumerate(steps, 1):
            state = state_at(step)
            if what == "machines":
                state["model"]["w"] += float(dist.get_rank() // 2)
            elif what == OWN:
                state["model"]["w"] += float(dist.get_rank())
            made.save(step, state)
            made.wait()
            check(run / f"step-{step}", step, OWN if what else "")
    assert_warned(lines)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["machines", OWN])
def test_agents_of_several_machines_store_one_ranks_tensor(
    tmp_path: Path, memory: Path, what: str
) -> None:
    for name, steps in (("later", ["", "", what, what, "", what]), ("at once", [what, what])):
        with Ranks(4) as world:
            world.run(save_on_machines, tmp_path / name, memory, steps, timeout_s=SLOW_S)
