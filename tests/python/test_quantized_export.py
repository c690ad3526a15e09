"""Models that are written in FP8 with scales, and what other programs load from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.quantized import quantised, scaled, write_model
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

import torch_ckpt
from torch_ckpt import FastReader, SafetensorsWriter
from torch_ckpt.cli.main import main
from torch_ckpt.formats.safetensors.layout import TensorFacts
from torch_ckpt.storage import quantizing
from torch_ckpt.storage.quantizing import QuantizedValues

STAYS = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "odd.weight")


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).bfloat16()

    up = random(384, 256)
    up[:128, :128] = 0
    return {
        "up.weight": up,
        "gate_proj.weight": random(128, 128).float(),
        "norm.weight": random(256),
        "embed_tokens.weight": random(256, 128),
        "lm_head.weight": random(256, 128),
        "mlp.gate.weight": random(128, 256),
        "odd.weight": random(130, 256),
        "up.bias": random(384),
    }


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.fixture(params=["save", "async_save", "convert", "several files"])
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"model_type": "x"}))
    if request.param == "convert":
        torch_ckpt.save(model(), checkpoint_id=tmp_path / "source")
        arguments = ["convert", str(tmp_path / "source"), str(target), "--to", "safetensors"]
        assert main([*arguments, "--quantize", "fp8-block-128"]) == 0
        return target
    most = 70_000 if request.param == "several files" else 5_000_000_000
    writer = SafetensorsWriter(target, quantize="fp8-block-128", max_shard_nbytes=most)
    if request.param == "async_save":
        torch_ckpt.async_save(model(), storage_writer=writer).result()
    else:
        torch_ckpt.save(model(), storage_writer=writer)
    return target


def test_numbers_and_scales_are_those_of_transformers_and_other_tensors_stay(
    exported: Path,
) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = json.loads((exported / "config.json").read_text())
    quantization = config["quantization_config"]
    assert config["model_type"] == "x"
    assert quantization["weight_block_size"] == [128, 128]
    stays = {name.removesuffix(".weight") for name in STAYS} - {"norm"}
    assert set(quantization["modules_to_not_convert"]) == stays

    class Config:
        scale_fmt = "float"
        weight_block_size = (128, 128)

    class Quantizer:
        quantization_config = Config()

    found = written(exported)
    for fqn, value in model().items():
        if fqn in STAYS or not fqn.endswith(".weight"):
            assert torch.equal(found.pop(fqn), value)
            continue
        wanted = fp8.Fp8Quantize(Quantizer())._quantize_one(fqn, value)
        assert torch.equal(found[fqn].view(torch.uint8), wanted[fqn].view(torch.uint8))
        assert torch.equal(found[f"{fqn}_scale_inv"], wanted[f"{fqn}_scale_inv"])
        assert (found.pop(fqn).float() != 0).any()
        del found[f"{fqn}_scale_inv"]
    assert not found


def test_every_reader_gets_the_products(exported: Path, tmp_path: Path) -> None:
    found = written(exported)
    state = {fqn: torch.zeros_like(value) for fqn, value in model().items()}
    torch_ckpt.load(state, storage_reader=FastReader(exported))
    stock = {fqn: torch.zeros_like(value) for fqn, value in model().items()}
    if (exported / "model.safetensors.index.json").exists():
        dcp.load(stock, storage_reader=QuantizedHuggingFaceStorageReader(str(exported)))
        assert all(torch.equal(stock[fqn], state[fqn]) for fqn in state)
    for fqn, value in model().items():
        wanted = value
        if fqn not in STAYS and fqn.endswith(".weight"):
            wanted = scaled(found[fqn], found[f"{fqn}_scale_inv"]).to(value.dtype)
            assert (wanted.float() - value.float()).abs().max() < 0.2
        assert torch.equal(state[fqn], wanted), fqn


def test_transformers_loads_an_exported_model_with_the_same_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=300,
    )
    saved = transformers.LlamaForCausalLM(config).bfloat16()
    saved.config.save_pretrained(tmp_path)
    writer = SafetensorsWriter(tmp_path, quantize="fp8-block-128")
    torch_ckpt.save(saved.state_dict(), storage_writer=writer)
    state = {fqn: torch.zeros_like(value) for fqn, value in saved.state_dict().items()}
    torch_ckpt.load(state, storage_reader=FastReader(tmp_path))
    quantised = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(state[quantised], saved.state_dict()[quantised])
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for fqn, value in loaded.state_dict().items():
        assert torch.equal(value, state[fqn]), fqn


def test_wrong_options_are_refused_with_what_they_may_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fp8-block-128"):
        SafetensorsWriter(tmp_path, quantize="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="base"):
        SafetensorsWriter(tmp_path, quantize="fp8-block-128", base=tmp_path)
    torch_ckpt.save(model(), checkpoint_id=tmp_path / "source")
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "x"), "--to", "dcp"]
    assert main([*arguments, "--quantize", "fp8-block-128"]) == 3
    assert not (tmp_path / "x").exists()


def test_blocks_of_tiny_weights_have_no_nan(tmp_path: Path) -> None:
    weight = torch.zeros(128, 256)
    weight[3, 5] = 1e-37  # 448 / 1e-37 is infinite.
    weight[:, 128:] = 1.0
    writer = SafetensorsWriter(tmp_path, quantize="fp8-block-128")
    torch_ckpt.save({"up.weight": weight}, storage_writer=writer)
    state = {"up.weight": torch.full_like(weight, 7)}
    torch_ckpt.load(state, storage_reader=FastReader(tmp_path))
    assert (state["up.weight"] - weight).abs().max() < 1e-3


@pytest.mark.parametrize(
    "quantised",
    [
        {"up.weight": torch.ones(128, 128), "up.weight_scale_inv": torch.ones(1, 1)},
        {"up.weight": torch.ones(128, 128).to(torch.float8_e4m3fn)},
        {"cache": torch.ones(4).to(torch.float8_e5m2)},
    ],
)
def test_a_model_that_is_quantised_already_is_refused(
    quantised: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    state = {**quantised, "down.weight": torch.ones(128, 128)}
    writer = SafetensorsWriter(tmp_path / "x", quantize="fp8-block-128")
    with pytest.raises(dcp.CheckpointException, match=f"'{next(iter(quantised))}'.*already"):
        torch_ckpt.save(state, storage_writer=writer)
    assert not list(tmp_path.glob("x/*"))
    torch_ckpt.save(state, checkpoint_id=tmp_path / "source")
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "y"), "--to", "safetensors"]
    assert main([*arguments, "--quantize", "fp8-block-128"]) == 3
    assert not (tmp_path / "y").exists()


def test_a_source_whose_config_states_a_method_is_not_quantised_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    codes = torch.ones(128, 128, dtype=torch.int8)
    tensors = {"a.weight": codes, "a.weight_scale": torch.ones(128, 1)}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    write_model(source, {**tensors, "b.weight": torch.ones(128, 128)}, config)
    arguments = ["convert", str(source), str(target), "--to", "safetensors"]
    assert main([*arguments, "--quantize", "fp8-block-128"]) == 3
    assert "'compressed-tensors'" in capsys.readouterr().err
    assert not target.exists()
    assert main(arguments) == 0


@pytest.mark.parametrize("way", ["save", "convert"])
def test_a_config_that_cannot_be_read_is_not_replaced(way: str, tmp_path: Path) -> None:
    torch_ckpt.save(model(), checkpoint_id=tmp_path / "source")
    target = tmp_path / "x"
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "x",')
    if way == "save":
        writer = SafetensorsWriter(target, quantize="fp8-block-128")
        with pytest.raises(dcp.CheckpointException, match=r"config\.json"):
            torch_ckpt.save(model(), storage_writer=writer)
    else:
        arguments = ["convert", str(tmp_path / "source"), str(target), "--to", "safetensors"]
        assert main([*arguments, "--quantize", "fp8-block-128"]) != 0
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert (target / "config.json").read_text() == '{"model_type": "x",'


def test_any_box_has_the_numbers_and_scales_of_the_whole_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantizing, "_SLAB_NBYTES", 1)  # One row of blocks at a time.
    weight = torch.randn(512, 384, generator=torch.Generator().manual_seed(2))
    facts = TensorFacts("w.weight", "float32", (512, 384))

    def load(boxes: Sequence[Any]) -> list[torch.Tensor]:
        return [weight[o[0] : o[0] + s[0], o[1] : o[1] + s[1]].clone() for _, (o, s) in boxes]

    codes, scales = quantised(weight)
    boxes = [((0, 0), (512, 384)), ((130, 250), (140, 7)), ((511, 383), (1, 1))]
    names = [("w.weight", codes, box) for box in boxes]
    names += [("w.weight_scale_inv", scales, box) for box in (((1, 2), (3, 1)), ((0, 0), (4, 3)))]
    found = QuantizedValues(load, [facts]).load([(name, box) for name, _, box in names])
    for value, (_, whole, ((row, column), (rows, columns))) in zip(found, names, strict=True):
        wanted = whole[row : row + rows, column : column + columns]
        assert torch.equal(value.float(), wanted.float())
