"""A rank's own state on one rank, without torch.distributed, and what a RankState refuses."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastSavePlanner, RankState
from torch_ckpt.errors import MismatchError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAVE_PLANNERS = [DefaultSavePlanner, FastSavePlanner]
LOAD_PLANNERS = [DefaultLoadPlanner, FastLoadPlanner]


class Samples:
    """What is left of an epoch."""

    def __init__(self, left: list[int]) -> None:
        self.left = left

    def state_dict(self) -> list[int]:
        return self.left

    def load_state_dict(self, state: list[int]) -> None:
        self.left = state


def refuse_to_set(state: Any) -> None:
    raise AssertionError(f"set to {state}")


def save_as_two_ranks(path: Path, states: dict[str, Any]) -> None:
    """Saves what two ranks would have saved."""
    names = [f"rank_0000{rank}_of_00002" for rank in (0, 1)]
    dcp.save(
        {key: {name: (state,) for name in names} for key, state in states.items()},
        storage_writer=FileSystemWriter(path),
    )


def test_docstring_example_runs(tmp_path: Path) -> None:
    example = inspect.getdoc(RankState).split("Example::")[1]
    loader = Samples([5, 1, 3])
    names = {"torch": torch, "dcp": dcp, "RankState": RankState, "loader": loader}
    exec(textwrap.dedent(example), {**names, "path": tmp_path})
    assert loader.left == [5, 1, 3]
    saved = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert set(saved) == {"rng.rank_00000_of_00001", "data.rank_00000_of_00001"}


def test_tensors_of_a_state_are_one_object(tmp_path: Path) -> None:
    state = {"lists": [torch.arange(3)], "nested": {"a": [torch.ones(2), {"b": None}]}}
    seen: list[Any] = []
    torch_ckpt.save({"own": RankState(lambda: state, seen.append)}, checkpoint_id=tmp_path)
    saved = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert list(saved) == ["own.rank_00000_of_00001"]
    torch_ckpt.load({"own": RankState(dict, seen.append)}, checkpoint_id=tmp_path)
    assert str(seen) == str([state])


def test_one_rank_merges_what_two_saved(tmp_path: Path) -> None:
    save_as_two_ranks(tmp_path, {"data": [1, 2]})
    samples = Samples([])
    merged = RankState(samples, on_resize=lambda states, rank, world_size: [states, world_size])
    dcp.load({"data": merged}, storage_reader=FileSystemReader(tmp_path), planner=FastLoadPlanner())
    assert samples.left == [[[1, 2], [1, 2]], 1]


@pytest.mark.parametrize("planner", LOAD_PLANNERS)
def test_state_that_is_not_there_is_missing_or_left_alone(planner: Any, tmp_path: Path) -> None:
    save_as_two_ranks(tmp_path, {"data": 1})
    reader = FileSystemReader(tmp_path)
    with pytest.raises(CheckpointException, match=r"Missing key.*dat\.rank_00000_of_00001"):
        dcp.load({"dat": RankState(dict, refuse_to_set)}, storage_reader=reader, planner=planner())
    partial = planner(allow_partial_load=True)
    dcp.load({"dat": RankState(dict, refuse_to_set)}, storage_reader=reader, planner=partial)


def test_all_that_was_saved_may_be_dropped(tmp_path: Path) -> None:
    save_as_two_ranks(tmp_path, {"rng": 1})
    state = {"rng": RankState(dict, refuse_to_set, on_resize="drop")}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path), planner=FastLoadPlanner())


def test_states_of_which_some_are_missing_are_not_merged(tmp_path: Path) -> None:
    names = [f"rank_0000{rank}_of_00004" for rank in (0, 2)]
    dcp.save({"data": {name: (0,) for name in names}}, storage_writer=FileSystemWriter(tmp_path))
    state = {"data": RankState(dict, refuse_to_set, on_resize=lambda states, *_: states)}
    message = r"'data': it was saved by 4 ranks, .* 2 are missing: ranks \[1, 3\]"
    with pytest.raises(CheckpointException, match=message):
        dcp.load(state, storage_reader=FileSystemReader(tmp_path), planner=FastLoadPlanner())


def test_states_of_two_numbers_of_ranks_are_nobodys(tmp_path: Path) -> None:
    names = ["rank_00000_of_00004", "rank_00001_of_00003"]
    dcp.save({"data": {name: (0,) for name in names}}, storage_writer=FileSystemWriter(tmp_path))
    state = {"data": RankState(dict, refuse_to_set, on_resize="by_rank")}
    with pytest.raises(CheckpointException, match="'data': it was saved by 3 and 4 ranks"):
        torch_ckpt.load(state, checkpoint_id=tmp_path)


@pytest.mark.parametrize("planner", SAVE_PLANNERS)
def test_saving_one_below_the_top_is_refused(planner: Any, tmp_path: Path) -> None:
    state = {"extra": {"rng": RankState(torch.get_rng_state, torch.set_rng_state)}}
    with pytest.raises(CheckpointException, match=r"'extra\.rng' is a RankState below the top"):
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path), planner=planner())


def test_saving_without_flattening_is_refused(tmp_path: Path) -> None:
    state = {"rng": RankState(torch.get_rng_state, torch.set_rng_state)}
    planner = FastSavePlanner(flatten_state_dict=False)
    with pytest.raises(CheckpointException, match="'rng' is a RankState: it needs a planner with"):
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path), planner=planner)


@pytest.mark.parametrize("planner", LOAD_PLANNERS)
def test_loading_without_flattening_is_refused(planner: Any, tmp_path: Path) -> None:
    state = {"rng": RankState(torch.get_rng_state, torch.set_rng_state)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path))
    planner = planner(flatten_state_dict=False)
    with pytest.raises(
        CheckpointException,
        match=r"'rng' is a RankState: it needs a planner with|Missing key .*rng",
    ):
        dcp.load(state, storage_reader=FileSystemReader(tmp_path), planner=planner)


def test_what_was_converted_by_dcp_is_set_by_hand(tmp_path: Path) -> None:
    save_as_two_ranks(tmp_path / "dcp", {"data": [1, 2]})
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    saved = torch.load(tmp_path / "all.pt")["data"]
    samples = Samples([])
    RankState(samples, on_resize=lambda states, *_: [*states[0], *states[1]]).load_state_dict(saved)
    assert samples.left == [1, 2, 1, 2]
    with pytest.raises(MismatchError, match="on 1 ranks: it was saved by 2 ranks"):
        RankState(samples).load_state_dict(saved)


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((dict, print), {"on_resize": "keep"}, ValueError),
        ((dict, print), {"on_resize": None}, ValueError),
        ((dict,), {}, TypeError),
        ((Samples([]), print), {}, TypeError),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        RankState(*arguments, **options)
