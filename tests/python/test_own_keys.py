"""Objects are loaded under the state dict's own keys, although names have keys as text."""

from __future__ import annotations

import copy
import enum
import time
import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import differences, failure_of
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter, Run

SAVES: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "ours": lambda state, path: torch_ckpt.save(state, checkpoint_id=path),
    "staged": lambda state, path: torch_ckpt.async_save(state, checkpoint_id=path).result(),
    "stock": lambda state, path: dcp.save(state, storage_writer=FileSystemWriter(path)),
}
LOADS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "ours": lambda state, path: torch_ckpt.load(state, checkpoint_id=path),
    "unpickled freely": lambda state, path: torch_ckpt.load(
        state, checkpoint_id=path, trust_pickle=True
    ),
    "stock's planner": lambda state, path: dcp.load(state, storage_reader=FastReader(path)),
    "stock's planner, unpickled freely": lambda state, path: dcp.load(
        state, storage_reader=FastReader(path, trust_pickle=True)
    ),
    "stock's reader": lambda state, path: dcp.load(
        state, storage_reader=FileSystemReader(path), planner=FastLoadPlanner()
    ),
}


class Color(enum.Enum):
    RED = 1


def state_of(number: int) -> dict[str, Any]:
    """A state of keys of several types. All values differ between numbers."""
    return {
        "keys": {key: number for key in (7, -1, None, 2.5, (1, 2), True, Color.RED, "text", "8")},
        "nested": {0: {1: [{"a": number}, {2: number, "t": torch.full([2], number)}]}},
        "counter": Counter({30: number, 80: 2 * number}),
        "ordered": OrderedDict({3: number}),
        "alike": {0: {"a": number}, "0": {"b": 2 * number}},
    }


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("save", SAVES)
def test_objects_are_loaded_under_keys_of_any_type(save: str, load: str, tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([Color])
    SAVES[save](state_of(5), tmp_path)
    state = state_of(0)
    LOADS[load](state, tmp_path)
    assert not differences(state_of(5), state)
    assert type(state["counter"]) is Counter
    SAVES[save](state, tmp_path / "again")  # Without a duplicated key.


@pytest.mark.parametrize("load", LOADS)
def test_keys_at_the_top_may_be_integers(load: str, tmp_path: Path) -> None:
    saved: Any = {9: "a", 10: {11: "b"}}
    torch_ckpt.save(saved, checkpoint_id=tmp_path)
    state: Any = {9: "", 10: {11: ""}}
    LOADS[load](state, tmp_path)
    assert state == saved


def test_keys_at_the_top_may_be_of_several_types(tmp_path: Path) -> None:
    saved: Any = {9: "a", "b": "c", None: "d"}
    torch_ckpt.save(saved, checkpoint_id=tmp_path)
    state: Any = dict.fromkeys(saved)
    torch_ckpt.load(state, checkpoint_id=tmp_path)
    assert state == saved


def training(optimizer: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    options: dict[str, Any] = {"SGD": {"momentum": 0.9}, "LBFGS": {"max_iter": 2}}.get(
        optimizer, {}
    )
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.MultiStepLR(made, [3, 5, 12])
    return {"model": model, "optimizer": made, "schedule": schedule}


def train(state: dict[str, Any], steps: int) -> list[float]:
    """Losses of some steps."""
    losses = []
    for step in range(steps):

        def loss(step: int = step) -> torch.Tensor:
            state["optimizer"].zero_grad()
            value = (state["model"](torch.arange(3.0) + step) ** 2).sum()
            value.backward()
            return value

        losses.append(state["optimizer"].step(loss).item())
        state["schedule"].step()
    return losses


def spoil(state: dict[str, Any]) -> None:
    """Replaces what a load must restore by other values of the same structure."""
    for values in state["optimizer"].state.values():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif isinstance(value, int | float):
                values[name] = 0
    torch.nn.init.zeros_(state["model"].weight)
    state["optimizer"].param_groups[0]["lr"] = 0.0
    state["schedule"].step()


@pytest.mark.thin(1)
@pytest.mark.parametrize("by", ["a run", *LOADS])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad", "LBFGS", "Rprop", "ASGD"])
def test_training_resumes_from_the_own_state_dicts_of_an_optimizer_and_a_schedule(
    optimizer: str, by: str, tmp_path: Path
) -> None:
    first = training(optimizer)
    train(first, 4)
    run = Run(tmp_path)
    run.save(4, first)
    saved = copy.deepcopy({name: value.state_dict() for name, value in first.items()})
    expected = train(first, 4)

    second = training(optimizer)
    train(second, 4)  # Creates the states of the optimizer.
    spoil(second)
    if by == "a run":
        assert run.restore(second) == 4
    else:
        LOADS[by](second, tmp_path / "step-4")
    assert not differences(saved, {name: value.state_dict() for name, value in second.items()})
    run.save(5, second)
    assert train(second, 4) == expected


def test_a_planner_of_state_dicts_that_are_not_flattened_restores_objects(tmp_path: Path) -> None:
    saved = {"w": torch.ones(3), "step": 7, "nested": {"a": 1, "b": 3}}
    dcp.save(
        saved,
        storage_writer=FastWriter(tmp_path),
        planner=FastSavePlanner(flatten_state_dict=False),
    )
    for planner in (FastLoadPlanner, DefaultLoadPlanner):
        state = {"w": torch.zeros(3), "step": 0, "nested": {"a": 0, "b": 0}}
        dcp.load(
            state,
            storage_reader=FastReader(tmp_path),
            planner=planner(flatten_state_dict=False),
        )
        assert not differences(saved, state), planner


class Recording(FastLoadPlanner):
    """A planner with a ``load_bytes`` of its own, which calls that of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.loaded.append(read_item.dest_index.fqn)
        super().load_bytes(read_item, value)


def test_a_planner_with_its_own_load_bytes_finds_the_keys(tmp_path: Path) -> None:
    torch_ckpt.save({"a": {1: 2}}, checkpoint_id=tmp_path)
    state = {"a": {1: 0}}
    planner = Recording()
    torch_ckpt.load(state, checkpoint_id=tmp_path, planner=planner)
    assert planner.loaded == ["a.1"]
    assert state == {"a": {1: 2}}


@pytest.mark.slow
def test_many_integer_keys_are_found_quickly(tmp_path: Path) -> None:
    saved = {"state": {number: {"step": number + 1} for number in range(20_000)}}
    torch_ckpt.save(saved, checkpoint_id=tmp_path)
    state = {"state": {number: {"step": 0} for number in range(20_000)}}
    begin = time.process_time()
    torch_ckpt.load(state, checkpoint_id=tmp_path)
    assert state == saved
    assert time.process_time() - begin < 20  # A search through all keys takes minutes.


def test_a_mapping_that_cannot_be_changed_is_named(tmp_path: Path) -> None:
    torch_ckpt.save({"a": {"b": {1: 2}}}, checkpoint_id=tmp_path)
    state = {"a": {"b": types.MappingProxyType({1: 0})}}
    error = failure_of(lambda: torch_ckpt.load(state, checkpoint_id=tmp_path))
    assert type(error) is ValueError
    assert "'a.b.1'" in str(error)
    assert "mappingproxy" in str(error)
