"""What ranks together leave in a load is named once, and targets of one rank stop all of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from support.logs import logged
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, RankState, Run
from torch_ckpt.errors import MismatchError

pytestmark = pytest.mark.timeout(150)


def stage(rank: int, first: int = 0, value: float = 0.0) -> dict[str, Any]:
    """The state of a pipeline stage: four layers of its own, and what all stages have."""
    numbers = range(4 * rank + first, 4 * rank + 4)
    layers = {f"{number}.weight": torch.full([3], value) for number in numbers}
    return {"model": {**layers, "norm": torch.zeros(2)}, "step": 0}


@pytest.mark.parametrize("by", ["torch_ckpt.load", "dcp.load"])
@on_ranks(2)
def test_names_that_only_another_stage_requests_are_not_named(path: Path, by: str) -> None:
    rank = dist.get_rank()
    torch_ckpt.save(stage(rank, value=1.0), checkpoint_id=path)

    def load(state: dict[str, Any], **options: Any) -> None:
        reader, planner = FastReader(path), FastLoadPlanner(**options)
        function: Any = torch_ckpt.load if by == "torch_ckpt.load" else dcp.load
        function(state, storage_reader=reader, planner=planner)

    with logged(logging.WARNING) as lines:
        state = stage(rank)
        load(state, strict=True)
        assert state["model"][f"{4 * rank}.weight"].tolist() == [1.0] * 3
        assert not lines
        load(stage(rank, first=1))  # Neither rank requests its first layer.
    if rank:
        assert not lines
    else:
        (line,) = lines
        assert "2 stored values (24 bytes) not requested, and not loaded: " in line
        assert "model.0.weight, model.4.weight" in line
    state = stage(rank, first=rank)
    with pytest.raises(CheckpointException) as caught:
        load(state, strict=True)
    assert {type(error) for error, _ in caught.value.failures.values()} == {MismatchError}
    assert "not requested: model.4.weight" in str(caught.value)
    assert not any(value.any() for value in state["model"].values())


@on_ranks(2)
def test_a_lenient_load_names_what_any_rank_lacks(path: Path) -> None:
    rank = dist.get_rank()
    torch_ckpt.save(stage(rank), checkpoint_id=path)
    state = stage(rank)
    state["model"][f"extra{rank}"] = torch.zeros(1)
    with logged(logging.WARNING) as lines:
        torch_ckpt.load(state, checkpoint_id=path, planner=FastLoadPlanner(allow_partial_load=True))
    if rank:
        assert not lines
    else:
        (line,) = lines
        assert "lacks 2 of the 12 requested values" in line
        assert "model.extra0" in line
        assert "model.extra1" in line


@on_ranks(2)
def test_ranks_that_load_alone_do_not_name_what_others_may_request(path: Path) -> None:
    rank = dist.get_rank()
    torch_ckpt.save(stage(rank, value=1.0), checkpoint_id=path)
    groups = [dist.new_group([0]), dist.new_group([1])]
    with logged(logging.WARNING) as lines:
        torch_ckpt.load(stage(rank), checkpoint_id=path, no_dist=True)
        torch_ckpt.load(stage(rank), checkpoint_id=path, process_group=groups[rank])
        assert not lines
        planner = FastLoadPlanner(allow_partial_load=True)
        state = {**stage(rank), "more": 1}
        torch_ckpt.load(state, checkpoint_id=path, no_dist=True, planner=planner)
    assert len(lines) == (0 if rank else 1)
    planner = FastLoadPlanner(strict=True)
    with pytest.raises(CheckpointException, match="not requested"):
        torch_ckpt.load(stage(rank), checkpoint_id=path, no_dist=True, planner=planner)


@pytest.mark.parametrize("agent", [False, True])
@on_ranks(2)
def test_a_run_of_stages_with_states_of_ranks_restores_all(path: Path, agent: bool) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])

    def state(value: float, first: int = 0) -> dict[str, Any]:
        found: list[int] = []
        return {
            **stage(rank, first=first, value=value),
            "sharded": DTensor.from_local(
                sharded.to_local() * value, mesh, [Shard(0)], shape=(3, 2), stride=(2, 1)
            ),
            "rng": RankState(lambda: rank, found.append),
        }

    options: Any = {"agent": True, "asynchronous": True} if agent else {}
    with Run(path, timeout_s=60, **options) as run:
        run.save(3, state(1.0))
        run.wait()
        with logged(logging.WARNING) as lines:
            assert run.restore(state(0.0), strict=True) == 3
            assert run.restore(state(0.0)) == 3
            assert not lines
            less = state(0.0, first=1)
            del less["step"]
            assert run.restore(less) == 3
        if rank:
            assert not lines
        else:
            (line,) = lines
            for name in ("model.0.weight", "model.4.weight", "step"):
                assert name in line
            assert "3 stored values (24 bytes)" in line


UNWRITABLE = {
    "expanded": lambda: torch.zeros(3).expand(4, 3),
    "sharded": lambda: DTensor.from_local(
        torch.zeros(3).expand(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)]
    ),
}


@pytest.mark.parametrize("kind", UNWRITABLE)
@on_ranks(2)
def test_a_target_of_one_rank_stops_all_before_they_load(path: Path, kind: str) -> None:
    rank = dist.get_rank()
    torch_ckpt.save({"a": torch.ones(2), "w": torch.ones(4, 3)}, checkpoint_id=path)
    target = UNWRITABLE[kind]()
    if rank == 0:
        target = torch.zeros(4, 3) if kind == "expanded" else target.clone()
    state = {"a": torch.zeros(2), "w": target}
    with pytest.raises(CheckpointException) as caught:
        torch_ckpt.load(state, checkpoint_id=path)
    error, _ = caught.value.failures[1]
    assert type(error) is ValueError
    assert "cannot load 'w': its target cannot be written: its elements share memory" in str(error)
    assert not state["a"].any()


@on_ranks(2)
def test_under_stocks_planner_a_target_of_one_rank_ends_an_exchange(path: Path) -> None:
    rank = dist.get_rank()
    large = torch.ones(8 << 20)  # So large that the ranks exchange reads.
    torch_ckpt.save({"a": large, "w": torch.ones(4, 3)}, checkpoint_id=path)
    state = {"a": torch.zeros(8 << 20), "w": torch.zeros(3).expand(4, 3)}
    if rank == 0:
        state["w"] = torch.zeros(4, 3)
    with pytest.raises(CheckpointException) as caught:
        torch_ckpt.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(), timeout_s=60)
    error, _ = caught.value.failures[1]
    assert type(error) is ValueError
    assert "cannot load 'w': its target cannot be written" in str(error)
    if rank:
        assert not state["a"].any()


@on_ranks(2)
def test_targets_on_the_meta_device_get_memory(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0).view(4, 3)
    torch_ckpt.save(
        {"m": {0: {"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": 5}}}, checkpoint_id=path
    )
    local = torch.empty(2, 3, device="meta")
    state = {"m": {0: {"w": DTensor.from_local(local, mesh, [Shard(0)]), "n": 0}}}
    torch_ckpt.load(state, checkpoint_id=path)
    assert state["m"][0]["n"] == 5
    found: Any = state["m"][0]["w"]
    assert torch.equal(found.full_tensor(), whole)


@on_ranks(2)
def test_a_quantised_tensor_that_one_rank_widens_fails_the_load_of_all(path: Path) -> None:
    rank = dist.get_rank()
    stored = {
        "x.weight": torch.ones(4).to(torch.float8_e4m3fn),
        "x.weight_scale_inv": torch.ones(1),
    }
    torch_ckpt.save(stored, checkpoint_id=path)
    target = torch.zeros(4, dtype=torch.float32 if rank else torch.float8_e4m3fn)
    with pytest.raises(CheckpointException, match=r"'x\.weight'.*'x\.weight_scale_inv'"):
        torch_ckpt.load({"x.weight": target}, checkpoint_id=path)
    assert not target.float().any()
