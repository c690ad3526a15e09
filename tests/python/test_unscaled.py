"""Quantised tensors that a load widens are named: nothing multiplies them by their scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultLoadPlanner

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader

PLANNERS = {
    "stock": DefaultLoadPlanner,
    "fast": FastLoadPlanner,
    "strict": lambda: FastLoadPlanner(strict=True),
    "not strict": lambda: FastLoadPlanner(strict=False),
}


def stored() -> dict[str, torch.Tensor]:
    weights = torch.randn(4, 4)
    return {
        "a.weight": weights.to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.full((1, 1), 0.5),
        "b.weight": weights.to(torch.float8_e5m2),
        "b.weight_scale": torch.ones(()),
        "c.weight": weights.to(torch.int8),
        "c.weight_scales": torch.ones(4),
        "plain": weights.to(torch.float8_e4m3fn),  # Without a scale, it is what it is.
        "wide": weights.bfloat16(),
        "wide_scale": torch.ones(()),
    }


def write(kind: str, path: Path) -> None:
    if kind == "dcp":
        torch_ckpt.save(stored(), checkpoint_id=path)
        return
    path.mkdir()
    save_file(stored(), path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_a_load_that_widens_quantised_tensors_names_them_once(
    kind: str, planner: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(kind, tmp_path / "x")
    state = {name: torch.zeros(value.shape) for name, value in stored().items()}
    dcp.load(state, storage_reader=FastReader(tmp_path / "x"), planner=PLANNERS[planner]())
    (line,) = [line for line in caplog.messages if "quantised" in line]
    by = " (config.json: quantization_config of 'fp8')" if kind == "safetensors" else ""
    assert f"{tmp_path / 'x'}: 3 quantised tensors{by} loaded into a wider dtype" in line
    assert all(f"{name}.weight" in line for name in "abc")
    assert "plain" not in line
    assert "wide," not in line


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_load_into_the_stored_dtypes_warns_of_nothing(
    planner: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write("safetensors", tmp_path / "x")
    state = {name: torch.zeros_like(value) for name, value in stored().items()}
    dcp.load(state, storage_reader=FastReader(tmp_path / "x"), planner=PLANNERS[planner]())
    state = {"plain": torch.zeros(4, 4), "wide": torch.zeros(4, 4)}
    dcp.load(state, storage_reader=FastReader(tmp_path / "x"), planner=DefaultLoadPlanner())
    assert not [line for line in caplog.messages if "quantised" in line]


def test_a_few_tensors_of_many_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch_ckpt.save(
        stored() | {f"other.{number}": torch.ones(1) for number in range(99)},
        checkpoint_id=tmp_path / "x",
    )
    state = {"b.weight": torch.zeros(4, 4)}
    torch_ckpt.load(state, checkpoint_id=tmp_path / "x")
    (line,) = [line for line in caplog.messages if "quantised" in line]
    assert "1 quantised tensor loaded" in line
    assert "b.weight" in line
