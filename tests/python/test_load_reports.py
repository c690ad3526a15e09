"""A load returns what it has not simply copied: missing, unused, cast and resized names."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import failure_of
from safetensors.torch import save_file
from support.logs import logged
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, Run
from torch_ckpt.errors import MismatchError
from torch_ckpt.planning.load_report import LoadReport

SAVES: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "ours": lambda state, path: torch_ckpt.save(state, checkpoint_id=path),
    "stock": lambda state, path: dcp.save(state, storage_writer=FileSystemWriter(path)),
}


def stored() -> dict[str, Any]:
    model = {"a": torch.ones(2), "b": torch.ones(3, dtype=torch.bfloat16), "old": torch.ones(1)}
    return {"model": model, "step": 7, "extra": {"lr": 0.1}}


def requested() -> dict[str, Any]:
    model = {"new": torch.full((4,), 5.0), "b": torch.zeros(3), "a": torch.zeros(2)}
    return {"model": model, "step": 0, "fresh": "unchanged"}


@pytest.mark.parametrize("save", SAVES)
def test_a_lenient_load_lists_every_name_and_loads_what_stock_does(
    save: str, tmp_path: Path
) -> None:
    SAVES[save](stored(), tmp_path)
    state, by_stock = requested(), requested()
    with logged(logging.WARNING) as lines:
        report = torch_ckpt.load(state, checkpoint_id=tmp_path, strict=False)
    assert report is not None
    assert report.missing == ("fresh", "model.new")  # Keys of the top are sorted, as in DCP.
    assert report.unused is not None
    assert set(report.unused) == {"model.old", "extra.lr"}
    assert report.cast == ("model.b",)
    assert report.resized == ()
    assert not lines
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(by_stock, storage_reader=FileSystemReader(tmp_path), planner=planner)
    for name in ("new", "a", "b"):
        assert torch.equal(state["model"][name], by_stock["model"][name])
    assert state["step"] == by_stock["step"] == 7
    assert state["fresh"] == "unchanged"
    assert state["model"]["new"].tolist() == [5.0] * 4


def test_the_names_are_those_that_torch_reports_for_a_module(tmp_path: Path) -> None:
    old = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)})
    new = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), "adapter": torch.nn.Linear(2, 1)})
    torch_ckpt.save(old.state_dict(), checkpoint_id=tmp_path)
    report = torch_ckpt.load(new.state_dict(), checkpoint_id=tmp_path, strict=False)
    theirs = new.load_state_dict(old.state_dict(), strict=False)
    assert report is not None
    assert sorted(report.missing) == sorted(theirs.missing_keys)
    assert sorted(report.unused or ()) == sorted(theirs.unexpected_keys)


def test_a_load_that_matches_reports_nothing(tmp_path: Path) -> None:
    torch_ckpt.save(stored(), checkpoint_id=tmp_path)
    assert torch_ckpt.load(stored(), checkpoint_id=tmp_path) == LoadReport()
    assert torch_ckpt.load(stored(), checkpoint_id=tmp_path, strict=True) == LoadReport()


def test_a_report_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LoadReport().missing = ("a",)  # type: ignore[misc]


def test_strictness_decides_which_differences_are_errors(tmp_path: Path) -> None:
    torch_ckpt.save(stored(), checkpoint_id=tmp_path)
    less, more = stored(), stored()
    del less["step"], less["model"]["old"]
    more["model"]["new"] = torch.zeros(1)
    report = torch_ckpt.load(less, checkpoint_id=tmp_path)
    assert report == LoadReport(unused=("model.old", "step"))
    error = failure_of(lambda: torch_ckpt.load(less, checkpoint_id=tmp_path, strict=True))
    assert isinstance(error, MismatchError)
    error = failure_of(lambda: torch_ckpt.load(more, checkpoint_id=tmp_path))
    assert "model.new" in str(error)
    report = torch_ckpt.load(more, checkpoint_id=tmp_path, strict=False)
    assert report == LoadReport(missing=("model.new",))


def test_a_tensor_of_another_shape_is_an_error_in_a_lenient_load_too(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    state = {"w": torch.zeros(4)}
    error = failure_of(lambda: torch_ckpt.load(state, checkpoint_id=tmp_path, strict=False))
    assert isinstance(error, ValueError)
    assert not state["w"].any()


def test_a_strictness_that_has_no_effect_is_refused(tmp_path: Path) -> None:
    torch_ckpt.save(stored(), checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="strict has no effect on a planner"):
        torch_ckpt.load(stored(), checkpoint_id=tmp_path, strict=True, planner=FastLoadPlanner())
    odd: Any = "log_all"
    with pytest.raises(ValueError, match="strict='log_all' is not True, False or None"):
        torch_ckpt.load(stored(), checkpoint_id=tmp_path, strict=odd)


def test_a_tied_name_that_is_loaded_under_another_is_not_missing(tmp_path: Path) -> None:
    save_file({"embed": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    weight = torch.zeros(2, 2)
    state = {"embed": weight, "head": weight, "norm": torch.zeros(2)}
    report = torch_ckpt.load(state, checkpoint_id=tmp_path / "model.safetensors", strict=False)
    assert report == LoadReport(missing=("norm",), unused=("bias",))
    assert torch.equal(state["head"], torch.ones(2, 2))


def test_a_load_of_dcp_leaves_its_report_on_the_planner(tmp_path: Path) -> None:
    torch_ckpt.save(stored(), checkpoint_id=tmp_path)
    planner = FastLoadPlanner(allow_partial_load=True)
    assert planner.report is None
    dcp.load(requested(), storage_reader=FastReader(tmp_path), planner=planner)
    assert planner.report is not None
    assert planner.report.missing == ("fresh", "model.new")
    assert planner.report.cast == ("model.b",)
    planner.allow_partial_load = False
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(requested(), storage_reader=FastReader(tmp_path), planner=planner)
    assert planner.report is None


class _Resolving(FastLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item)


class _OwnPlan(FastLoadPlanner):
    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=list(plan.items))


@pytest.mark.parametrize("kind", [_Resolving, _OwnPlan])
def test_a_subclass_of_the_planner_reports_too(kind: Any, tmp_path: Path) -> None:
    torch_ckpt.save(stored(), checkpoint_id=tmp_path)
    planner = kind(allow_partial_load=True, strict=False)
    report = torch_ckpt.load(requested(), checkpoint_id=tmp_path, planner=planner)
    assert report is not None
    assert report.cast == ("model.b",)
    assert report.missing == ("fresh", "model.new")


def test_other_planners_and_readers_report_nothing(tmp_path: Path) -> None:
    torch_ckpt.save(stored(), checkpoint_id=tmp_path)
    planner = DefaultLoadPlanner()
    assert torch_ckpt.load(stored(), checkpoint_id=tmp_path, planner=planner) is None
    reader = FileSystemReader(tmp_path)
    assert torch_ckpt.load(stored(), storage_reader=reader) is None


def test_a_run_keeps_the_report_of_its_restore(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        assert run.restore(stored()) is None
        assert run.loaded is None
        run.save(1, stored())
        less = stored()
        less["model"] = {"a": torch.zeros(2, dtype=torch.float64), "old": torch.zeros(1)}
        assert run.restore(less, strict=False) == 1
        assert run.loaded == LoadReport(unused=("model.b",), cast=("model.a",))
        with pytest.raises(dcp.api.CheckpointException):
            run.restore(less, strict=True)
        assert run.loaded is None
        assert run.restore(stored(), step=1) == 1
        assert run.loaded == LoadReport()


def test_a_restore_from_memory_reports_too(tmp_path: Path) -> None:
    with Run(tmp_path, asynchronous=True, agent=True) as run:
        run.save(1, stored(), persist=False)
        run.wait()
        less = stored()
        del less["step"]
        assert run.restore(less) == 1
        assert run.loaded == LoadReport(unused=("step",))
