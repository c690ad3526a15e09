"""Plans are used again where the same is saved again, and nowhere else."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from states import assert_stored, full_value, sharded
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

import torch_ckpt
from torch_ckpt import FastSavePlanner, FastWriter
from torch_ckpt._core import _native
from torch_ckpt.planning.plan_cache import plan_cache

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

Counts = tuple[int, int, int]  # Hits, misses, global plans that were made here.


class Writer(FastWriter):
    """Notes what the rank sends."""

    sent = 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        plan = super().prepare_local_plan(plan)
        self.sent = len(pickle.dumps(plan))
        return plan


def state_of(change: str = "", *, placement: Placement | None = None) -> dict[str, Any]:
    """Shards, replicas of which one is large enough to be cut, and objects."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    changed = dist.get_rank() == dist.get_world_size() - 1
    state: dict[str, Any] = {
        f"layer.{i}": sharded(
            full_value(f"l{i}", (30 + i, 7), torch.float32), mesh, (placement or Shard(0),)
        )
        for i in range(20)
    }
    dtype = torch.int16 if change == "dtype" else torch.bfloat16
    rows = 3001 if change == "sizes" else 3000
    state["embedding"] = full_value("embedding", (rows, 700), dtype)
    if change == "a name" and changed:
        state["only here"] = full_value("only", (5,), torch.float32)
    return {"model": state, "step": 7}


def saved(path: Path, state: dict[str, Any]) -> tuple[Counts, int]:
    """Saves; returns how the plan was come by, and how many bytes this rank has sent for it."""
    hits, misses = plan_cache().hits, plan_cache().misses
    writer = Writer(path)
    with mock.patch.object(_native, "GlobalPlan", wraps=_native.GlobalPlan) as made:
        torch_ckpt.save(state, storage_writer=writer, planner=FastSavePlanner())
    return (
        plan_cache().hits - hits,
        plan_cache().misses - misses,
        made.call_count,
    ), writer.sent


def new_plan() -> Counts:
    return 0, 1, 1 if dist.get_rank() == 0 else 0


OLD_PLAN: Counts = (1, 0, 0)


def save_thrice(path: Path) -> tuple[int, int]:
    plan_cache().forget()
    state = state_of()
    counts, first = saved(path / "0", state)
    assert counts == new_plan()
    for number in "12":
        counts, sent = saved(path / number, state)
        assert counts == OLD_PLAN
        assert_stored(path / number, state)
    (entry,) = plan_cache()._of_rank.newest_first()
    assert len(entry.token) == 20
    return first, sent


def test_the_same_is_planned_once_and_then_known_by_36_bytes(
    worlds: Worlds, tmp_path: Path
) -> None:
    for first, again in worlds.run(3, save_thrice, tmp_path):
        assert again < 300 < first  # DCP's own plan around them.


def save_changed(path: Path, change: str) -> None:
    plan_cache().forget()
    before = state_of()
    saved(path / "0", before)
    placement = Replicate() if change == "placements" else None
    after = state_of(change, placement=placement)
    counts, _ = saved(path / "1", after)
    assert counts == new_plan()
    assert_stored(path / "1", after)
    # Neither has taken the other's place.
    for number, state in (("2", before), ("3", after)):
        saved(path / number, state)
        counts, _ = saved(path / number, state)
        assert counts == OLD_PLAN
        assert_stored(path / number, state)


@pytest.mark.thin("dtype", "a name")
@pytest.mark.parametrize("change", ["dtype", "sizes", "placements", "a name"])
def test_what_differs_on_any_rank_is_planned_anew(
    worlds: Worlds, tmp_path: Path, change: str
) -> None:
    worlds.run(3, save_changed, tmp_path, change)


def save_after_forgetting(path: Path, forgetful: int) -> None:
    plan_cache().forget()
    state = state_of()
    saved(path / "0", state)
    if dist.get_rank() == forgetful:
        plan_cache().forget()
    counts, _ = saved(path / "1", state)
    if forgetful == 0:
        assert counts == new_plan()
    else:  # Only that rank has to be told.
        assert counts == ((0, 1, 0) if dist.get_rank() == forgetful else OLD_PLAN)
    assert_stored(path / "1", state)
    counts, _ = saved(path / "2", state)
    assert counts == OLD_PLAN


@pytest.mark.parametrize("forgetful", [0, 2], ids=["coordinator", "another rank"])
def test_a_plan_that_one_rank_has_lost_is_told_or_made_anew_in_the_same_save(
    worlds: Worlds, tmp_path: Path, forgetful: int
) -> None:
    worlds.run(3, save_after_forgetting, tmp_path, forgetful)


class FailingWriter(FastWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")
        return super().write_data(plan, planner)


def save_after_failures(path: Path) -> None:
    plan_cache().forget()
    state = state_of()
    with pytest.raises(CheckpointException, match="the disk is gone"):
        torch_ckpt.save(state, storage_writer=FailingWriter(path / "0"), planner=FastSavePlanner())
    bad = state_of()
    if dist.get_rank() == 1:
        bad["model"]["embedding"] = torch.zeros(3)
    with pytest.raises(CheckpointException, match="disagree on its"):
        torch_ckpt.save(bad, storage_writer=FastWriter(path / "0"), planner=FastSavePlanner())
    with pytest.raises(CheckpointException, match="disagree on its"):
        torch_ckpt.save(bad, storage_writer=FastWriter(path / "0"), planner=FastSavePlanner())
    saved(path / "1", state)
    assert_stored(path / "1", state)


def test_failed_saves_leave_no_plan_that_harms(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(3, save_after_failures, tmp_path)


def save_in_groups(path: Path) -> None:
    plan_cache().forget()
    group = dist.new_group([1, 2])
    state = {"w": full_value("w", (3000, 700), torch.bfloat16), "step": 3}
    for number in range(4):
        if dist.get_rank() > 0:
            writer = FastWriter(path / f"group-{number}")
            torch_ckpt.save(state, storage_writer=writer, process_group=group)
        saved(path / f"all-{number}", state)
    dist.barrier()
    for name in ("group-3", "all-3"):
        assert_stored(path / name, state)


def test_a_rank_has_its_place_in_each_group(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(3, save_in_groups, tmp_path)


def save_alone(path: Path, planner_options: Callable[[], dict[str, Any]] = dict) -> list[int]:
    plan_cache().forget()
    state = {"w": torch.arange(5.0), "step": 3}
    hits = []
    for number in range(3):
        before = plan_cache().hits
        planner = FastSavePlanner(**planner_options())
        torch_ckpt.save(state, storage_writer=FastWriter(path / f"{number}"), planner=planner)
        hits.append(plan_cache().hits - before)
        assert_stored(path / f"{number}", state)
    return hits


def save_in_other_groups(path: Path) -> None:
    """DCP's own functions do not tell a planner who coordinates: it lists all to whoever does."""
    plan_cache().forget()
    state = {"w": full_value("w", (3000, 700), torch.bfloat16), "step": 3}
    for number, ranks in enumerate([[0, 2], [1, 2], [2, 1]]):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            for again in "ab":
                writer = Writer(path / f"{number}{again}")
                options: dict[str, Any] = {"planner": FastSavePlanner(), "process_group": group}
                dcp.save(state, storage_writer=writer, **options)
                assert writer.sent > 300
        dist.barrier()
        assert_stored(path / f"{number}b", state)


def test_under_dcps_own_functions_any_group_saves_the_same(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(3, save_in_other_groups, tmp_path)


def test_one_process_knows_its_plans(tmp_path: Path) -> None:
    assert save_alone(tmp_path) == [0, 1, 1]


def test_nothing_is_kept_where_caching_is_off(tmp_path: Path) -> None:
    assert save_alone(tmp_path, lambda: {"enable_plan_caching": False}) == [0, 0, 0]
    assert plan_cache()._of_rank.newest_first() == plan_cache()._global.newest_first() == []


class LookingWriter(FastWriter):
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.seen = [[item.index.fqn for item in plan.items] for plan in plans]
        return super().prepare_global_plan(plans)


class LookingPlanner(FastSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Any]:
        self.seen = [[item.index.fqn for item in plan.items] for plan in all_plans]
        return super().create_global_plan(all_plans)


def save_and_look(path: Path) -> None:
    plan_cache().forget()
    state = state_of()
    for number in range(3):
        writer = LookingWriter(path / f"writer-{number}")
        torch_ckpt.save(state, storage_writer=writer, planner=FastSavePlanner())
        planner = LookingPlanner()
        torch_ckpt.save(state, storage_writer=FastWriter(path / f"{number}"), planner=planner)
        if dist.get_rank() == 0:
            assert sum(map(len, planner.seen)) == 3 * 22
            seen_by_writer = {fqn for fqns in writer.seen for fqn in fqns}
            assert {"model.embedding", "step"} <= seen_by_writer
    assert_stored(path / "writer-2", state)
    assert_stored(path / "2", state)


def test_whoever_looks_at_plans_sees_them_whole_each_time(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(3, save_and_look, tmp_path)


def save_with_one_caching(path: Path) -> None:
    plan_cache().forget()
    state = state_of()
    for number in range(3):
        planner = FastSavePlanner(enable_plan_caching=dist.get_rank() == 1)
        torch_ckpt.save(state, storage_writer=FastWriter(path / f"{number}"), planner=planner)
        assert_stored(path / f"{number}", state)


def test_ranks_may_differ_on_whether_plans_are_kept(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save_with_one_caching, tmp_path)


class AddingPlanner(FastSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if dist.get_rank() > 0:
            return plan
        return dataclasses.replace(plan, planner_data={**plan.planner_data, "extra": ("extra",)})


def save_with_more_paths(path: Path) -> None:
    plan_cache().forget()
    state = state_of("a name")
    for number in range(3):
        metadata = torch_ckpt.save(
            state, storage_writer=FastWriter(path / f"{number}"), planner=AddingPlanner()
        )
        assert {"extra", "model.only here", "step"} <= metadata.planner_data.keys()


def test_paths_of_all_ranks_are_kept_beside_what_one_adds(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save_with_more_paths, tmp_path)


def test_a_planner_that_was_used_can_be_pickled(tmp_path: Path) -> None:
    planner = FastSavePlanner()
    state = {"w": torch.arange(5.0)}
    for number in range(2):
        torch_ckpt.save(state, storage_writer=FastWriter(tmp_path / f"{number}"), planner=planner)
    copy = pickle.loads(pickle.dumps(planner))
    torch_ckpt.save(state, storage_writer=FastWriter(tmp_path / "copy"), planner=copy)
    assert_stored(tmp_path / "copy", state)
