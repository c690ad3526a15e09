"""Ranks resume what is no plain tensor: subclasses in DTensors, objects, stored plans."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from states import LOAD_PLANNERS, assert_stored, full_value, sharded
from support.planner_mixins import BalancesByCount, MakesNewPlans, StoresPlans
from support.resumable_states import Colour, equal
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter, SnapshotStager

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


def fsdp_state(kind: str, seed: int) -> dict[str, Any]:
    """Model and optimizer of torchao, sharded by FSDP2."""
    import torchao.optim
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    if kind == "float8 all-gather":
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(model, config=config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    state: dict[str, Any] = {"model": model.state_dict()}
    if kind != "float8 all-gather":
        optimizer = getattr(torchao.optim, kind)(model.parameters(), lr=1e-2)
        model(torch.randn(4, 256)).square().mean().backward()
        with mock.patch.object(torch, "compile", lambda f, **_: f):  # It takes many seconds.
            optimizer.step()
        state["optimizer"] = optimizer.state_dict()
    return state


def inner(value: Any) -> Any:
    """A state with local parts in place of DTensors."""
    if isinstance(value, DTensor):
        return value.to_local().detach()
    if isinstance(value, dict):
        return {key: inner(one) for key, one in value.items()}
    return [inner(one) for one in value] if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamWFp8", "float8 all-gather"])
@on_ranks(2)
def test_subclasses_under_fsdp_are_resumed(path: Path, kind: str) -> None:
    state = fsdp_state(kind, 1)
    expected = inner(state)
    dcp.save(state, storage_writer=FastWriter(path / "sync"))
    dcp.save(state, storage_writer=FileSystemWriter(path / "stock"))
    group = dist.new_group(backend="gloo")
    # By themselves, twice: the second time each rank stages its own part.
    for name in ("async", "again"):
        options = {"checkpoint_id": path / name, "process_group": group}
        torch_ckpt.async_save(state, **options).result(60)
    for name, reader in itertools.product(
        ("sync", "stock", "async", "again"), (FileSystemReader, FastReader)
    ):
        target = fsdp_state(kind, 2)
        assert not equal(inner(target), expected)
        dcp.load(target, storage_reader=reader(path / name))
        assert equal(inner(target), expected), (name, reader)


class MakesNewPlansFast(MakesNewPlans, FastLoadPlanner):
    pass


def replicated() -> dict[str, Any]:
    return {f"w{i}": full_value(f"{i}", (300, 50 + i), torch.float32) for i in range(7)} | {"n": 3}


@pytest.mark.thin(1)
@pytest.mark.parametrize("base", [DefaultSavePlanner, FastSavePlanner])
@pytest.mark.parametrize("mixin", [StoresPlans, BalancesByCount])
@on_ranks(3)
def test_planners_that_store_or_change_plans_save_what_loads(
    path: Path, mixin: type, base: type
) -> None:
    planner = type("Planner", (mixin, base), {})
    dcp.save(replicated(), storage_writer=FastWriter(path), planner=planner())
    if mixin is StoresPlans:
        metadata = FastReader(path).read_metadata()
        assert len(metadata.all_local_plans) == dist.get_world_size()
        kinds = {type(plan.storage_data) for plan in metadata.all_local_plans}
        assert kinds == {_StoragePrefix}
        assert b"torch_ckpt.planning.replicas" not in (path / ".metadata").read_bytes()
    assert_stored(path, replicated(), planners=[*LOAD_PLANNERS, MakesNewPlansFast])


class StoresPlansFast(StoresPlans, FastSavePlanner):
    pass


class KeepsItsPlan(FastSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        if dist.get_rank() == 0:
            self.metadata.all_local_plans = [plan]
        return plan


@pytest.mark.parametrize("first", [StoresPlansFast, KeepsItsPlan])
@on_ranks(2)
def test_plans_of_other_ranks_and_finished_plans_are_stored_as_stocks(
    path: Path, first: type
) -> None:
    planner = first() if dist.get_rank() == 0 else FastSavePlanner()
    dcp.save(replicated(), storage_writer=FastWriter(path), planner=planner)
    assert_stored(path, replicated())
    assert b"torch_ckpt." not in (path / ".metadata").read_bytes()


@on_ranks(3)
def test_one_rank_warns_once_of_what_all_ranks_save(path: Path) -> None:
    state = {"odd": {f"of {dist.get_rank()}": Colour.RED, "all": Colour.RED}, "w": torch.ones(3)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.save(state, storage_writer=FastWriter(path))
    said = [str(w.message) for w in caught if "torch_ckpt saves" in str(w.message)]
    assert len(said) == (dist.get_rank() == 0)
    for part in ("4 values", "'odd.of 0'", "'odd.of 2'", "'odd.all'", "resumable_states.Colour"):
        assert all(part in message for message in said)


@on_ranks(2)
def test_the_result_of_a_collective_is_waited_for_before_it_is_staged() -> None:
    coming = all_reduce(torch.full((1 << 20,), 1.0), "sum", dist.group.WORLD)
    staged: Any = SnapshotStager().stage({"w": coming})
    assert type(staged["w"]) is torch.Tensor
    assert torch.equal(staged["w"], torch.full((1 << 20,), float(dist.get_world_size())))


@on_ranks(2)
def test_a_dtensor_of_a_wrapper_is_staged_and_resumed(path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    torch.serialization.add_safe_globals([TwoTensor])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = [
        sharded(full_value(name, (64, 3), torch.float32), mesh, (Shard(0),)).to_local()
        for name in "ab"
    ]
    live = DTensor.from_local(TwoTensor(*rows), mesh, (Shard(0),), run_check=False)
    group = dist.new_group(backend="gloo")
    writer = FastWriter(path)
    dcp.async_save({"w": live}, storage_writer=writer, process_group=group).result(60)
    empty = TwoTensor(torch.zeros_like(rows[0]), torch.zeros_like(rows[0]))
    target = {"w": DTensor.from_local(empty, mesh, (Shard(0),), run_check=False)}
    dcp.load(target, storage_reader=FastReader(path))
    assert equal(target["w"].to_local(), TwoTensor(*rows))
