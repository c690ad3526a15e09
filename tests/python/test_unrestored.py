"""A load that restores less than the checkpoint has, or than was requested, says what it left."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import failure_of
from deepspeed_checkpoints import write as write_deepspeed
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, RankState, Run
from torch_ckpt.errors import MismatchError, UnsupportedError

SAVES: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "ours": lambda state, path: torch_ckpt.save(state, checkpoint_id=path),
    "stock": lambda state, path: dcp.save(state, storage_writer=FileSystemWriter(path)),
}


class Log:
    """The warnings of the package."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def take(self) -> list[str]:
        """Those since the last call."""
        lines = [
            record.getMessage()
            for record in self._caplog.records
            if record.name == "torch_ckpt" and record.levelno >= logging.WARNING
        ]
        self._caplog.clear()
        return lines


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


def adamw(steps: int) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def load(state: dict[str, Any], path: Path, **options: Any) -> None:
    planner = FastLoadPlanner(**options)
    torch_ckpt.load(state, storage_reader=FastReader(path), planner=planner)


@pytest.mark.parametrize("save", SAVES)
def test_a_fresh_optimizer_whose_momenta_are_stored_is_named(
    save: str, log: Log, tmp_path: Path
) -> None:
    SAVES[save](adamw(1), tmp_path)
    fresh = adamw(0)
    # For an optimizer itself, a load creates the state: see test_new_optimizers.py.
    load({**fresh, "optimizer": fresh["optimizer"].state_dict()}, tmp_path)
    (line,) = log.take()
    # A step, exp_avg and exp_avg_sq for each of two parameters: 2 + 2 * (6 + 2) floats.
    assert f"{tmp_path}: 6 stored values (72 bytes) not requested" in line
    assert "optimizer.state.0.step, optimizer.state.0.exp_avg, " in line
    assert "no state before its first step" in line
    load(adamw(1), tmp_path)
    assert not log.take()


def test_a_list_that_shrank_is_named(log: Log, tmp_path: Path) -> None:
    saved = {"layers": [{"w": torch.ones(2)} for _ in range(30)]}
    torch_ckpt.save(saved, checkpoint_id=tmp_path)
    load({"layers": [{"w": torch.zeros(2)}]}, tmp_path)
    (line,) = log.take()
    assert "29 stored values (232 bytes) not requested" in line
    assert "layers.1.w, layers.2.w, " in line
    assert "and 9 more" in line


def test_a_lenient_load_names_what_the_checkpoint_lacks(log: Log, tmp_path: Path) -> None:
    names = [f"{number}.weight" for number in range(200)]
    value = torch.ones(1)
    torch_ckpt.save({"model": {f"layers.{n}": value for n in names}}, checkpoint_id=tmp_path)
    state = {"model": {f"layer.{name}": value.clone() for name in names}}
    load(state, tmp_path, allow_partial_load=True)
    line, other = log.take()
    assert f"{tmp_path} lacks all 200 requested values" in line
    assert "model.layer.0.weight (similar: model.layers.0.weight)" in line
    assert "and 180 more" in line
    assert "200 stored values" in other

    state["model"]["layers.7.weight"] = torch.zeros(1)
    load(state, tmp_path, allow_partial_load=True)
    assert "lacks 200 of the 201 requested values" in log.take()[0]


def test_a_list_that_grew_is_named_by_a_lenient_load(log: Log, tmp_path: Path) -> None:
    torch_ckpt.save({"layers": [torch.ones(2), torch.ones(2)]}, checkpoint_id=tmp_path)
    state = {"layers": [torch.zeros(2) for _ in range(3)]}
    load(state, tmp_path, allow_partial_load=True)
    (line,) = log.take()
    assert "lacks 1 of the 3 requested values, which stay as they are" in line
    assert "layers.2" in line
    assert [float(value.sum()) for value in state["layers"]] == [2, 2, 0]


# ---- Loads of a part on purpose ----


def test_a_key_at_the_top_that_was_not_passed_is_not_named(log: Log, tmp_path: Path) -> None:
    torch_ckpt.save({**adamw(1), "step": 7, "extra": [torch.ones(1)]}, checkpoint_id=tmp_path)
    load({"model": torch.nn.Linear(3, 2)}, tmp_path)
    load({"step": 0}, tmp_path)
    load({}, tmp_path)
    assert not log.take()


def test_names_of_a_flat_state_dict_are_not_named(log: Log, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    torch_ckpt.save(model.state_dict(), checkpoint_id=tmp_path)
    load({"0.weight": torch.zeros(2, 2)}, tmp_path)
    assert not log.take()
    load({"0": {"weight": torch.zeros(2, 2)}}, tmp_path)
    (line,) = log.take()
    assert "1 stored value (8 bytes) not requested" in line
    assert "0.bias" in line


def test_the_names_of_other_formats_are_not_named(log: Log, tmp_path: Path) -> None:
    save_file({"model.a": torch.ones(1), "model.b": torch.ones(1)}, tmp_path / "f.safetensors")
    torch.save({"model": {"a": torch.ones(1), "b": torch.ones(1)}}, tmp_path / "f.pt")
    for name in ("f.safetensors", "f.pt"):
        load({"model": {"a": torch.zeros(1)}}, tmp_path / name)
        load({"model": {"a": torch.zeros(1)}}, tmp_path / name, strict=False)
    write_deepspeed(tmp_path / "deepspeed", 3)
    names = FastReader(tmp_path / "deepspeed").read_metadata().state_dict_metadata
    name = next(name for name in names if name.startswith("model."))
    load(
        {"model": {name.removeprefix("model."): torch.zeros(names[name].size)}},
        tmp_path / "deepspeed",
    )
    assert not log.take()
    error = failure_of(
        lambda: load({"model": {"a": torch.zeros(1)}}, tmp_path / "f.pt", strict=True)
    )
    assert "model.b" in str(error)


def test_states_of_other_ranks_are_not_named(log: Log, tmp_path: Path) -> None:
    states: dict[str, Any] = {}

    def rng(on_resize: Any = "drop") -> RankState:
        return RankState(lambda: 5, lambda value: states.update(value=value), on_resize=on_resize)

    saved = {f"rank_0000{rank}_of_00002": (rank,) for rank in range(2)}
    torch_ckpt.save({"rng": saved, "w": torch.ones(1)}, checkpoint_id=tmp_path)
    load({"rng": rng(), "w": torch.zeros(1)}, tmp_path)
    load({"rng": rng("by_rank"), "w": torch.zeros(1)}, tmp_path)
    assert states == {"value": 0}
    assert not log.take()


def test_a_tied_name_that_is_stored_under_another_is_not_named(log: Log, tmp_path: Path) -> None:
    torch_ckpt.save({"m": {"a": torch.ones(2)}}, checkpoint_id=tmp_path)
    value = torch.zeros(2)
    load({"m": {"a": value, "b": value}}, tmp_path)
    assert not log.take()


def test_a_load_is_silent_on_demand(log: Log, tmp_path: Path) -> None:
    torch_ckpt.save(adamw(1), checkpoint_id=tmp_path)
    load(adamw(0), tmp_path, strict=False)
    load({"x": 1}, tmp_path, strict=False, allow_partial_load=True)
    assert not log.take()


# ---- Strict loads ----


def test_a_strict_load_raises_before_it_loads(log: Log, tmp_path: Path) -> None:
    torch_ckpt.save({"m": {"a": torch.ones(2), "bias": torch.ones(2)}}, checkpoint_id=tmp_path)
    state: Any = {"m": {"a": torch.zeros(2), "biases": torch.zeros(2)}}
    error = failure_of(lambda: load(state, tmp_path, strict=True, allow_partial_load=True))
    assert type(error) is MismatchError
    assert f"cannot load {tmp_path} strictly" in str(error)
    assert "in the checkpoint, but not requested: m.bias" in str(error)
    assert "missing in the checkpoint: m.biases (similar: m.bias)" in str(error)
    assert not state["m"]["a"].any()
    load({"m": {"a": torch.zeros(2), "bias": torch.zeros(2)}}, tmp_path, strict=True)
    load({}, tmp_path, strict=True)  # No key at the top was passed.
    assert not log.take()


# ---- Runs ----


@pytest.mark.parametrize("agent", [False, True])
def test_a_run_names_keys_at_the_top_as_well(agent: bool, log: Log, tmp_path: Path) -> None:
    options: Any = {"agent": True, "asynchronous": True} if agent else {}
    with Run(tmp_path, **options) as run:
        run.save(5, {**adamw(1), "epoch": 3})
        run.wait()
        log.take()
        assert run.restore({"model": torch.nn.Linear(3, 2)}) == 5
        (line,) = log.take()
        assert "stored values (72 bytes) not requested, and not loaded: " in line
        assert "optimizer (" in line
        assert " values)" in line
        assert "epoch" in line

        assert run.restore({"model": torch.nn.Linear(3, 2)}, strict=False) == 5
        assert run.restore({**adamw(1), "epoch": 0}) == 5
        assert run.restore({**adamw(1), "epoch": 0}, strict=True) == 5
        assert not log.take()

        model = torch.nn.Linear(3, 2)
        before = model.weight.clone()
        for step in (None, 5):
            error = failure_of(
                lambda step=step: run.restore({"model": model}, step=step, strict=True)
            )
            assert type(error) is MismatchError
            assert "not requested: " in str(error)
            assert "epoch" in str(error)
        assert torch.equal(model.weight, before)


def test_a_run_names_the_state_of_a_rank_that_the_program_no_longer_has(
    log: Log, tmp_path: Path
) -> None:
    with Run(tmp_path) as run:
        run.save(1, {"w": torch.ones(1), "rng": RankState(lambda: 5, lambda _: None)})
        run.restore({"w": torch.zeros(1)})
    (line,) = log.take()
    assert "1 stored value (0 bytes) not requested" in line
    assert "rng.rank_00000_of_00001" in line


# ---- Other planners and readers ----


def test_stocks_reader_is_served_as_well(log: Log, tmp_path: Path) -> None:
    torch_ckpt.save(adamw(1), checkpoint_id=tmp_path)
    dcp.load(adamw(0), storage_reader=FileSystemReader(tmp_path), planner=FastLoadPlanner())
    assert len(log.take()) == 1


class OwnData(FastLoadPlanner):
    """A planner whose plans have data of their own, as those of a planner of DCP may."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        assert plan.planner_data is None
        return dataclasses.replace(plan, planner_data="mine")

    def create_global_plan(self, global_plan: list[Any]) -> list[Any]:
        plans = super().create_global_plan(global_plan)
        assert all(plan.planner_data == "mine" for plan in plans)
        return plans


def test_a_planner_with_data_of_its_own_names_what_is_left_as_well(
    log: Log, tmp_path: Path
) -> None:
    torch_ckpt.save({"model": {"a": torch.ones(1), "b": 2}}, checkpoint_id=tmp_path)
    state = {"model": {"a": torch.zeros(1), "c": 3}}
    torch_ckpt.load(state, checkpoint_id=tmp_path, planner=OwnData(allow_partial_load=True))
    missing, unrequested = log.take()
    assert "lacks 1 of the 2 requested values, which stay as they are: model.c" in missing
    assert "not requested, and not loaded: model.b" in unrequested
    assert state["model"] == {"a": torch.ones(1), "c": 3}


class PlainPlans(FastLoadPlanner):
    """Makes new plans, without the names that its rank requests."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(list(super().create_local_plan().items))


def test_a_strict_load_refuses_plans_that_do_not_name_what_they_request(tmp_path: Path) -> None:
    torch_ckpt.save({"model": {"a": torch.ones(1), "b": 2}}, checkpoint_id=tmp_path)
    state = {"model": {"a": torch.zeros(1)}}
    torch_ckpt.load(state, checkpoint_id=tmp_path, planner=PlainPlans())
    planner = PlainPlans(strict=True)
    error = failure_of(lambda: torch_ckpt.load(state, checkpoint_id=tmp_path, planner=planner))
    assert isinstance(error, UnsupportedError)
    assert "the LoadPlan of rank 0 does not have the names" in str(error)


def test_the_planner_can_be_pickled_after_a_load(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(1)}, checkpoint_id=tmp_path)
    planner = FastLoadPlanner(strict=True)
    assert pickle.loads(pickle.dumps(planner)).strict is True
