"""From the second asynchronous save on, a rank stages its own part; nothing stale is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from states import assert_same, full_value, local, sharded
from test_async import EXECUTORS
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, FastWriter, RankTimeoutError, SnapshotStager
from torch_ckpt.planning.plan_cache import PLAN_CACHE
from torch_ckpt.staging.stager import _Placed

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

SAVE_TIMEOUT_S = 60
LAYERS = 12
LAYER = (256, 512)
LAYER_NBYTES = 4 * 256 * 512


def state_at(step: int, change: str = "") -> dict[str, Any]:
    """Replicas, a shard, and objects; with a change, of which only the last rank knows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: dict[str, Any] = {
        f"layer.{i}": full_value(f"{i} at {step}", LAYER, torch.float32) for i in range(LAYERS)
    }
    model["sharded"] = sharded(
        full_value(f"sharded {step}", (64, 3), torch.float32), mesh, (Shard(0),)
    )
    if change == "dtype" or (change and dist.get_rank() == dist.get_world_size() - 1):
        if change == "key":
            model["new"] = full_value(f"new {step}", (300, 700), torch.float32)
        elif change == "gone":
            del model["layer.3"]
        elif change == "dtype":
            model["layer.0"] = full_value(f"0 at {step}", (999, 512), torch.bfloat16)
    return {"model": model, "step": step, "odd": (step, torch.full((3,), step))}


def spoil(state: dict[str, Any]) -> None:
    for tensor in state["model"].values():
        local_part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local_part.fill_(-1)


class Saves:
    """Saves steps asynchronously, and knows how many bytes each has staged."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.group = dist.new_group(backend="gloo")
        self.stager = SnapshotStager(**options)
        self.staged: list[int] = []
        PLAN_CACHE.forget()

    def begin(
        self, state: dict[str, Any], planner: Any = FastSavePlanner, executor: str = "thread"
    ) -> Any:
        copy_all = _Placed.copy_all

        def copy_counted(placed: _Placed, *where: Any) -> None:
            self.staged.append(sum(live.nbytes for _, live, _ in placed._copies))
            copy_all(placed, *where)

        writer = FastWriter(self.path / str(state["step"]), stager=self.stager)
        with mock.patch.object(_Placed, "copy_all", copy_counted):
            future = torch_ckpt.async_save(
                state,
                storage_writer=writer,
                process_group=self.group,
                planner=planner(),
                async_checkpointer_type=EXECUTORS[executor],
                timeout_s=SAVE_TIMEOUT_S,
            )
        spoil(state)
        return future

    def save(self, step: int, change: str = "", planner: Any = FastSavePlanner) -> None:
        self.begin(state_at(step, change), planner).result(SAVE_TIMEOUT_S)

    def check(self, step: int, change: str = "") -> None:
        wanted = state_at(step, change)
        found = state_at(step, change)
        spoil(found)
        dcp.load(found, storage_reader=FastReader(self.path / str(step)))
        assert_same(local(found["model"]), local(wanted["model"]))


def stage_own_parts(path: Path) -> list[int]:
    saves = Saves(path)
    for step in range(4):
        saves.save(step)
        saves.check(step)
    return saves.staged


@pytest.mark.parametrize("count", [2, 4])
def test_from_the_second_save_on_each_rank_stages_its_part_of_the_replicas(
    worlds: Worlds, tmp_path: Path, count: int
) -> None:
    staged = worlds.run(count, stage_own_parts, tmp_path)
    for of_rank in staged:
        assert of_rank[0] > LAYERS * LAYER_NBYTES
        # What is cut at the edge of a part is staged whole.
        most = (LAYERS / count + 2) * LAYER_NBYTES
        assert max(of_rank[1:]) <= most
    for of_save in list(zip(*staged, strict=True))[1:]:
        assert sum(of_save) >= LAYERS * LAYER_NBYTES


def change_everywhere(path: Path) -> list[int]:
    saves = Saves(path)
    for step, change in enumerate(["", "", "dtype", "dtype", ""]):
        saves.save(step, change)
        saves.check(step, change)
    return saves.staged


def test_a_state_that_changes_on_all_ranks_is_staged_whole_and_saved(
    worlds: Worlds, tmp_path: Path
) -> None:
    for of_rank in worlds.run(2, change_everywhere, tmp_path):
        assert of_rank[2] > LAYERS * LAYER_NBYTES * 0.9
        assert of_rank[1] < of_rank[0]
        assert of_rank[3] < of_rank[2]


def change_on_one_rank(path: Path, change: str) -> list[int]:
    saves = Saves(path)
    for step, what in enumerate(["", "", change, change, change, ""]):
        saves.save(step, what)
        saves.check(step, what)
    return saves.staged


@pytest.mark.parametrize("change", ["key", "gone"])
def test_where_one_rank_has_changed_its_state_all_stage_everything(
    worlds: Worlds, tmp_path: Path, change: str
) -> None:
    for of_rank in worlds.run(3, change_on_one_rank, tmp_path, change):
        whole = [nbytes > (LAYERS - 2) * LAYER_NBYTES for nbytes in of_rank]
        assert whole == [True, False, True, False, False, True]


def lose_what_is_known(path: Path, what: str) -> list[int]:
    """The last rank loses its plans or its former part, or every rank loses its plans."""
    saves = Saves(path)
    for step in range(4):
        if step == 2 and (what == "all plans" or dist.get_rank() == dist.get_world_size() - 1):
            if what == "part":
                saves.stager = SnapshotStager()
            else:
                PLAN_CACHE.forget()
        saves.save(step)
        saves.check(step)
    return saves.staged


@pytest.mark.parametrize(
    ("what", "is_whole"), [("part", True), ("plans", False), ("all plans", False)]
)
def test_a_rank_that_has_lost_what_it_knew_fails_no_save(
    worlds: Worlds, tmp_path: Path, what: str, is_whole: bool
) -> None:
    for of_rank in worlds.run(3, lose_what_is_known, tmp_path, what):
        whole = [nbytes > (LAYERS - 2) * LAYER_NBYTES for nbytes in of_rank]
        assert whole == [True, False, is_whole, False]


def part_with_a_rank_that_leaves(path: Path) -> str:
    """What a rank raises when the last one fails before it has staged anything."""
    saves = Saves(path)
    saves.save(0)
    state = state_at(1)
    if dist.get_rank() == dist.get_world_size() - 1:
        state["model"] = Failing()
    with pytest.raises((RankTimeoutError, LookupError)) as caught:
        saves.begin(state)
    return f"{type(caught.value).__name__}: {caught.value}"


class Failing:
    """A part of a state that has no state."""

    def state_dict(self) -> dict[str, Any]:
        raise LookupError("it has none")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Never called."""

    def values(self) -> list[torch.Tensor]:
        return []


def test_a_rank_that_fails_before_it_stages_is_named_to_the_others(
    worlds: Worlds, tmp_path: Path
) -> None:
    *others, last = worlds.run(3, part_with_a_rank_that_leaves, tmp_path)
    assert last == "LookupError: it has none"
    for other in others:
        assert "rank 2" in other
        assert "it has none" in other


def change_the_planner(path: Path) -> list[int]:
    """Other saves, which are not staged, have plans of their own."""
    saves = Saves(path)
    for step in range(6):
        saves.save(step, planner=DefaultSavePlanner if step >= 3 else FastSavePlanner)
        saves.check(step)
        torch_ckpt.save(state_at(step), checkpoint_id=path / f"sync {step}")
    return saves.staged


def test_with_another_planner_all_stage_everything(worlds: Worlds, tmp_path: Path) -> None:
    for of_rank in worlds.run(2, change_the_planner, tmp_path):
        whole = [nbytes > (LAYERS - 2) * LAYER_NBYTES for nbytes in of_rank]
        assert whole == [True, False, False, True, True, True]


def change_the_executor(path: Path) -> None:
    saves = Saves(path)
    executors = ["thread", "thread", "process", "process", "thread", "thread", "process"]
    for step, executor in enumerate(executors):
        change = "gone" if executor == "process" else ""  # Ranks share it out anew.
        saves.begin(state_at(step, change), executor=executor).result(SAVE_TIMEOUT_S)
        saves.check(step, change)


def test_another_process_saves_all_that_a_thread_would_not(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, change_the_executor, tmp_path, timeout_s=120)


def save_by_stocks_call(path: Path) -> list[int]:
    saves = Saves(path)
    with mock.patch.object(torch_ckpt, "async_save", stocks_async_save):
        for step in range(2):
            saves.save(step)
            saves.check(step)
    return saves.staged


def stocks_async_save(state: dict[str, Any], *, timeout_s: float, **options: Any) -> Any:
    return dcp.async_save(state, **options)


def test_by_stocks_call_in_which_ranks_cannot_agree_all_stage_everything(
    worlds: Worlds, tmp_path: Path
) -> None:
    for of_rank in worlds.run(2, save_by_stocks_call, tmp_path):
        assert min(of_rank) > LAYERS * LAYER_NBYTES


def save_in_waves(path: Path) -> None:
    saves = Saves(path, max_host_nbytes=3 * LAYER_NBYTES)
    for step in range(3):
        saves.save(step)
        saves.check(step)
        assert max(saves.staged) <= 3 * LAYER_NBYTES


def test_ranks_save_in_waves_beyond_their_cap(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save_in_waves, tmp_path)


def save_while_rank_1_is_busy(path: Path) -> list[Any]:
    stager = SnapshotStager()
    held = stager.stage({"w": torch.ones(10)}) if dist.get_rank() == 1 else None
    group = dist.new_group(backend="gloo")

    def save(step: int) -> Any:
        return torch_ckpt.async_save(
            state_at(step),
            storage_writer=FastWriter(path / str(step), stager=stager),
            process_group=group,
            on_busy="skip",
        )

    first = [save(step) for step in range(3)]
    del held
    save(3).result(SAVE_TIMEOUT_S)
    return [first, stager.skips, (path / "0").exists(), (path / "3" / ".metadata").exists()]


def test_all_ranks_skip_a_save_where_one_of_them_is_busy(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, save_while_rank_1_is_busy, tmp_path) == [[[None] * 3, 3, False, True]] * 2
