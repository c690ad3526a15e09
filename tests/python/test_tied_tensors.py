"""Tied tensors: stored once in safetensors, and loaded by any of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import failure_of
from support.safetensors_files import names_in
from torch import nn
from torch.distributed.checkpoint.planner import LoadPlan

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, SafetensorsWriter
from torch_ckpt.planning.ties import tied_names


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=2, num_decoder_layers=1
    )
    return T5ForConditionalGeneration(config)


@pytest.mark.framework("transformers")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_model_with_tied_embeddings_is_stored_as_hugging_face_stores_it(
    asynchronous: bool, tmp_path: Path
) -> None:
    from transformers import T5ForConditionalGeneration

    model = t5()
    model.save_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")  # For its config.json.
    (tmp_path / "ours" / "model.safetensors").unlink()
    writer = SafetensorsWriter(tmp_path / "ours")
    if asynchronous:
        torch_ckpt.async_save(model.state_dict(), storage_writer=writer).result()
    else:
        torch_ckpt.save(model.state_dict(), storage_writer=writer)
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    assert len(names_in(tmp_path / "ours")) == len(model.state_dict()) - 3

    loaded, info = T5ForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()), info
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.framework("transformers")
@pytest.mark.parametrize("stored_by", ["theirs", "ours"])
def test_a_missing_name_is_loaded_through_the_name_that_shares_its_tensor(
    stored_by: str, tmp_path: Path
) -> None:
    model = t5()
    if stored_by == "theirs":
        model.save_pretrained(tmp_path)
    else:
        torch_ckpt.save(model.state_dict(), storage_writer=SafetensorsWriter(tmp_path))
    other = t5()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    torch_ckpt.load(other.state_dict(), storage_reader=FastReader(tmp_path))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


class CountingPlanner(FastLoadPlanner):
    calls = 0

    def create_local_plan(self) -> LoadPlan:
        self.calls += 1
        return super().create_local_plan()


def test_an_overridden_planner_is_called_once_for_tied_names(tmp_path: Path) -> None:
    torch_ckpt.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    value = torch.zeros(3)
    planner = CountingPlanner()
    torch_ckpt.load({"a": value, "b": value}, checkpoint_id=tmp_path, planner=planner)
    assert planner.calls == 1
    assert value.tolist() == [1.0] * 3


def test_a_missing_name_with_a_tensor_of_its_own_is_an_error(tmp_path: Path) -> None:
    torch_ckpt.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    error = failure_of(lambda: torch_ckpt.load(state, checkpoint_id=tmp_path))
    assert "Missing key in checkpoint state_dict: b" in str(error)
    state["b"] = state["a"]
    torch_ckpt.load(state, checkpoint_id=tmp_path)
    assert state["b"].tolist() == [1.0] * 3


def test_views_and_equal_tensors_are_not_tied() -> None:
    w = torch.arange(12.0)
    state = {
        "w": w,
        "equal": w.clone(),
        "view": w.view(3, 4),
        "part": w[:6],
        "transposed": w.view(3, 4).t(),
        "again": w.detach(),
        "complex": torch.view_as_complex(w.view(6, 2)),
        "conjugate": torch.view_as_complex(w.view(6, 2)).conj(),
        "empty": torch.zeros(0),
        "empty too": torch.zeros(0),
        "meta": torch.zeros(3, device="meta"),
        "meta too": torch.zeros(3, device="meta"),
        "number": 3,
    }
    assert tied_names(state) == [["w", "again"]]


@pytest.mark.framework("transformers")
def test_without_the_fast_planner_every_name_is_stored(tmp_path: Path) -> None:
    model = t5()
    dcp.save(model.state_dict(), storage_writer=SafetensorsWriter(tmp_path))
    assert len(names_in(tmp_path)) == len(model.state_dict())
