"""Quantised tensors that a load would widen without their scales are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.tensors import bits
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


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_a_target_that_widens_a_quantised_tensor_is_refused_before_any_is_written(
    kind: str, planner: str, tmp_path: Path
) -> None:
    write(kind, tmp_path / "x")
    for wide in "abc":
        state = {name: torch.zeros_like(value) for name, value in stored().items()}
        state[f"{wide}.weight"] = torch.zeros(4, 4)
        with pytest.raises(dcp.CheckpointException, match=rf"'{wide}\.weight'.*scales in"):
            dcp.load(state, storage_reader=FastReader(tmp_path / "x"), planner=PLANNERS[planner]())
        assert not any(value.float().any() for value in state.values())


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_a_complex_or_an_integer_target_gets_no_numbers_without_scales(
    kind: str, tmp_path: Path
) -> None:
    write(kind, tmp_path / "x")
    for name, dtype in (("a", torch.complex64), ("a", torch.int32), ("c", torch.complex64)):
        target = torch.zeros(4, 4, dtype=dtype)
        with pytest.raises(dcp.CheckpointException, match=rf"'{name}\.weight'.*scales in"):
            dcp.load({f"{name}.weight": target}, storage_reader=FastReader(tmp_path / "x"))
        assert not target.any()
    codes = torch.zeros(4, 4, dtype=torch.int32)
    dcp.load({"c.weight": codes}, storage_reader=FastReader(tmp_path / "x"))
    assert codes.any()


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_load_into_the_stored_dtypes_is_not_refused(planner: str, tmp_path: Path) -> None:
    write("safetensors", tmp_path / "x")
    state = {name: torch.zeros_like(value) for name, value in stored().items()}
    dcp.load(state, storage_reader=FastReader(tmp_path / "x"), planner=PLANNERS[planner]())
    state = {"plain": torch.zeros(4, 4), "wide": torch.zeros(4, 4)}
    dcp.load(state, storage_reader=FastReader(tmp_path / "x"), planner=DefaultLoadPlanner())
    assert state["plain"].any()


def of_bitsandbytes() -> dict[str, torch.Tensor]:
    packed = torch.randint(0, 256, (8, 1), dtype=torch.uint8)
    return {
        "a.weight": torch.randint(-128, 128, (4, 4), dtype=torch.int8),
        "a.SCB": torch.ones(4),
        "a.weight_format": torch.zeros((), dtype=torch.uint8),
        "b.weight": packed,
        "b.weight.absmax": torch.randint(0, 256, (1,), dtype=torch.uint8),
        "b.weight.quant_map": torch.ones(16),
        "b.weight.nested_absmax": torch.ones(1),
        "b.weight.nested_quant_map": torch.ones(256),
        "b.weight.quant_state.bitsandbytes__nf4": torch.zeros(90, dtype=torch.uint8),
        "c.weight": packed.clone().flatten().view(torch.bfloat16),  # bnb_4bit_quant_storage
        "c.weight.absmax": torch.ones(1),
        "state.d.state1": packed.clone(),
        "state.d.absmax1": torch.ones(1),
        "wide.weight": torch.ones(4, 4, dtype=torch.bfloat16),
    }


BITSANDBYTES = {
    "a.weight": "a.SCB",
    "b.weight": "b.weight.absmax",
    "b.weight.absmax": "b.weight.nested_absmax",
    "c.weight": "c.weight.absmax",
    "state.d.state1": "state.d.absmax1",
}


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_numbers_of_bitsandbytes_are_not_widened_without_their_scales(
    kind: str, tmp_path: Path
) -> None:
    path, stored = tmp_path / "x", of_bitsandbytes()
    if kind == "dcp":
        torch_ckpt.save(dict(stored), checkpoint_id=path)
    else:
        path.mkdir()
        save_file(stored, path / "model.safetensors")
    for name, scales in BITSANDBYTES.items():
        for count, mode in ((1, "auto"), (len(stored), "auto"), (1, True), (1, False)):
            state = {n: torch.zeros_like(v) for n, v in stored.items() if count > 1}
            state[name] = torch.zeros(stored[name].shape)
            reader = FastReader(path, dequantize=mode)
            with pytest.raises(dcp.CheckpointException, match=f"'{name}'.*'{scales}'.*bitsandbyt"):
                dcp.load(state, storage_reader=reader)
            assert not any(value.float().any() for value in state.values())
    state = {name: torch.zeros_like(value) for name, value in stored.items()}
    dcp.load(state, storage_reader=FastReader(path))
    assert all(bits(state[name]) == bits(value) for name, value in stored.items())
    wide = {"wide.weight": torch.zeros(4, 4), "b.weight": torch.zeros(8, 1, dtype=torch.int32)}
    dcp.load(wide, storage_reader=FastReader(path))
    assert wide["wide.weight"].all()


def test_a_few_tensors_of_many_are_refused(tmp_path: Path) -> None:
    torch_ckpt.save(
        stored() | {f"other.{number}": torch.ones(1) for number in range(99)},
        checkpoint_id=tmp_path / "x",
    )
    state = {"b.weight": torch.zeros(4, 4)}
    with pytest.raises(dcp.CheckpointException, match=r"b\.weight"):
        torch_ckpt.load(state, checkpoint_id=tmp_path / "x")
