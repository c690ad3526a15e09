"""From the second asynchronous save on, a rank stages its own part; nothing stale is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds, on_ranks
from staged_saves import LAYER_NBYTES, LAYERS, SAVE_TIMEOUT_S, Saves, state_at
from states import assert_same
from support.tight import TightStager
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torch_ckpt
from torch_ckpt import FastSavePlanner, FastWriter, SnapshotStager
from torch_ckpt.errors import RankTimeoutError
from torch_ckpt.planning.plan_cache import plan_cache

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


def stage(
    path: Path, changes: list[str], stager: type[SnapshotStager] = SnapshotStager
) -> list[int]:
    """Saves a step for each change; returns how many bytes each has staged."""
    saves = Saves(path, stager)
    for step, change in enumerate(changes):
        saves.save(step, change)
    return saves.staged


def are_whole(staged: list[int]) -> list[bool]:
    """For each save, whether this rank has staged all replicas."""
    return [nbytes > (LAYERS - 2) * LAYER_NBYTES for nbytes in staged]


@pytest.mark.parametrize("count", [2, 4])
def test_from_the_second_save_on_each_rank_stages_its_part_of_the_replicas(
    worlds: Worlds, tmp_path: Path, count: int
) -> None:
    staged = worlds.run(count, stage, tmp_path, [""] * 4)
    for of_rank in staged:
        assert of_rank[0] > LAYERS * LAYER_NBYTES
        # What is cut at the edge of a part is staged whole.
        most = (LAYERS / count + 2) * LAYER_NBYTES
        assert max(of_rank[1:]) <= most
    for of_save in list(zip(*staged, strict=True))[1:]:
        assert sum(of_save) >= LAYERS * LAYER_NBYTES


@on_ranks(2)
def test_a_state_that_changes_on_all_ranks_is_staged_whole_and_saved(path: Path) -> None:
    staged = stage(path, ["", "", "dtype", "dtype", ""])
    assert staged[2] > LAYERS * LAYER_NBYTES * 0.9
    assert staged[1] < staged[0]
    assert staged[3] < staged[2]


@pytest.mark.parametrize("change", ["key", "gone"])
@on_ranks(3)
def test_where_one_rank_has_changed_its_state_all_stage_everything(path: Path, change: str) -> None:
    staged = stage(path, ["", "", change, change, change, ""])
    assert are_whole(staged) == [True, False, True, False, False, True]


@pytest.mark.parametrize(
    ("what", "is_whole"), [("part", True), ("plans", False), ("all plans", False)]
)
@on_ranks(3)
def test_a_rank_that_has_lost_what_it_knew_fails_no_save(
    path: Path, what: str, is_whole: bool
) -> None:
    # The last rank loses its plans or its former part, or every rank loses its plans.
    saves = Saves(path)
    for step in range(4):
        if step == 2 and (what == "all plans" or dist.get_rank() == 2):
            if what == "part":
                saves.stager = SnapshotStager()
            else:
                plan_cache().forget()
        saves.save(step)
    assert are_whole(saves.staged) == [True, False, is_whole, False]


class Failing:
    """A part of a state that has no state."""

    def state_dict(self) -> dict[str, Any]:
        raise LookupError("it has none")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Never called."""

    def values(self) -> list[torch.Tensor]:
        return []


@on_ranks(3)
def test_a_rank_that_fails_before_it_stages_is_named_to_the_others(path: Path) -> None:
    saves = Saves(path)
    saves.save(0)
    state = state_at(1)
    if dist.get_rank() == 2:
        state["model"] = Failing()
        with pytest.raises(LookupError, match="it has none"):
            saves.begin(state)
        return
    with pytest.raises(RankTimeoutError) as caught:
        saves.begin(state)
    assert "rank 2" in str(caught.value)
    assert "it has none" in str(caught.value)


@on_ranks(2)
def test_with_another_planner_all_stage_everything(path: Path) -> None:
    saves = Saves(path)
    for step in range(6):
        saves.save(step, planner=DefaultSavePlanner if step >= 3 else FastSavePlanner)
        # Other saves, which are not staged, have plans of their own.
        torch_ckpt.save(state_at(step), checkpoint_id=path / f"sync {step}")
    assert are_whole(saves.staged) == [True, False, False, True, True, True]


@on_ranks(2)
def test_by_stocks_call_in_which_ranks_cannot_agree_all_stage_everything(path: Path) -> None:
    def stocks(state: dict[str, Any], *, timeout_s: float, **options: Any) -> Any:
        return dcp.async_save(state, **options)

    with mock.patch.object(torch_ckpt, "async_save", stocks):
        assert min(stage(path, ["", ""])) > LAYERS * LAYER_NBYTES


@on_ranks(2)
def test_ranks_without_memory_for_copies_write_their_tensors_before_training_goes_on(
    path: Path,
) -> None:
    assert stage(path, [""] * 3, stager=TightStager) == [0, 0, 0]


@on_ranks(2)
def test_all_ranks_skip_a_save_where_one_of_them_is_busy(path: Path) -> None:
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

    assert [save(step) for step in range(3)] == [None] * 3
    del held
    save(3).result(SAVE_TIMEOUT_S)
    assert stager.skipped == 3
    assert not (path / "0").exists()
    assert (path / "3" / ".metadata").exists()


@on_ranks(3)
def test_other_ranks_than_those_of_the_save_before_stage_everything(path: Path) -> None:
    saves = Saves(path)
    saves.save(0)
    saves.save(1)
    options: dict[str, Any] = {"timeout_s": SAVE_TIMEOUT_S}
    some, state = dist.new_group([0, 1], backend="gloo"), {"model": state_at(2)["model"]}
    del state["model"]["sharded"]
    writer = FastWriter(path / f"alone-{dist.get_rank()}", stager=saves.stager)
    torch_ckpt.async_save(state, storage_writer=writer, no_dist=True, **options).result()
    saves.save(3)
    saves.save(4)
    if dist.get_rank() < 2:
        writer = FastWriter(path / "some", stager=saves.stager)
        torch_ckpt.async_save(state, storage_writer=writer, process_group=some, **options).result()
        for saved in (path / "some", path / f"alone-{dist.get_rank()}"):
            found = {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}}
            torch_ckpt.load(found, checkpoint_id=saved, no_dist=True)
            assert_same(found, state)
    assert are_whole(saves.staged) == [True, False, True, False]
