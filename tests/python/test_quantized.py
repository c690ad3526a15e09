"""Loads of quantised models: dequantised in the engine, in stored bits, or refused."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.quantized import (
    FP8,
    MXFP4,
    fp8_tensors,
    mxfp4_tensors,
    of_mxfp4,
    scaled,
    write_cut,
    write_model,
)
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, SafetensorsWriter
from torch_ckpt.cli.main import main
from torch_ckpt.errors import CheckpointError, UnsupportedError

PLANNERS = {"stock": DefaultLoadPlanner, "fast": FastLoadPlanner}
WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class InTurn(DefaultLoadPlanner):
    """A planner that commits each tensor by itself."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)


def load(path: Path, state: dict[str, Any], planner: Any = None, **options: Any) -> dict[str, Any]:
    reader = FastReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=planner or DefaultLoadPlanner())
    return state


def write_fp8(path: Path, *sizes: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weight, scales = fp8_tensors(*sizes, **options)
    tensors = {"w.weight": weight, "w.weight_scale_inv": scales, "norm": torch.ones(3)}
    write_model(path, tensors, FP8, files=2)
    return weight, scales


@pytest.mark.parametrize("planner", [*PLANNERS.values(), InTurn])
@pytest.mark.parametrize("dtype", WIDE)
def test_a_wide_target_gets_products_and_a_target_of_the_stored_dtype_gets_bits(
    dtype: torch.dtype, planner: Any, tmp_path: Path
) -> None:
    weight, scales = write_fp8(tmp_path, 300, 200)
    state = {"w.weight": torch.zeros(300, 200, dtype=dtype), "norm": torch.zeros(3)}
    load(tmp_path, state, planner())
    assert torch.equal(state["w.weight"], scaled(weight, scales).to(dtype))
    assert torch.equal(state["norm"], torch.ones(3))
    stored = {"w.weight": torch.zeros_like(weight), "w.weight_scale_inv": torch.zeros(3, 2)}
    load(tmp_path, stored, planner())
    assert torch.equal(stored["w.weight"].view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(stored["w.weight_scale_inv"], scales)


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
@pytest.mark.parametrize(
    "scale", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu]
)
def test_every_dtype_of_numbers_and_scales_gives_the_products_of_torch(
    code: torch.dtype, scale: torch.dtype, tmp_path: Path
) -> None:
    weight, scales = write_fp8(tmp_path, 129, 257, dtype=code, scale_dtype=scale)
    for dtype in WIDE:
        state = load(tmp_path, {"w.weight": torch.zeros(129, 257, dtype=dtype)})
        assert torch.equal(state["w.weight"], scaled(weight, scales).to(dtype))


def test_any_box_of_a_tensor_gets_its_products(tmp_path: Path) -> None:
    weight, scales = write_fp8(tmp_path, 3, 300, 290)
    whole = scaled(weight, scales).bfloat16()
    boxes = [
        (slice(None), slice(None), slice(None)),
        (slice(1, 2), slice(127, 129), slice(None)),
        (slice(0, 3), slice(10, 11), slice(255, 257)),
        (slice(2, 3), slice(256, 300), slice(289, 290)),
        (slice(0, 2), slice(1, 299), slice(130, 140)),
    ]
    for number, box in enumerate(boxes):
        wanted = whole[box]
        for transposed in (False, True):
            target = torch.zeros(wanted.shape, dtype=torch.bfloat16)
            if transposed:
                target = torch.zeros(wanted.mT.shape, dtype=torch.bfloat16).mT
            read_box(tmp_path, "w.weight", [one.indices(400)[0] for one in box], target)
            assert torch.equal(target, wanted), (number, transposed)


@pytest.mark.parametrize("scales", [torch.tensor(2.0), torch.ones(1), torch.ones(1, 1)])
def test_a_tensor_without_elements_is_loaded(scales: torch.Tensor, tmp_path: Path) -> None:
    weight = torch.zeros(0, 128).to(torch.float8_e4m3fn)
    write_model(tmp_path, {"w.weight": weight, "w.weight_scale_inv": scales}, FP8)
    load(tmp_path, {"w.weight": torch.zeros(0, 128)})
    read_box(tmp_path, "w.weight", [0, 5], torch.zeros(0, 3))


def read_box(
    path: Path, fqn: str, offsets: list[int], target: torch.Tensor, **options: Any
) -> None:
    """Loads a box of a stored tensor, as a planner of DCP that wants only this box."""

    class OfBox(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            from torch.distributed.checkpoint.metadata import MetadataIndex
            from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

            origin = torch.Size([0] * target.ndim)
            item = ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(fqn, origin, 0),
                origin,
                MetadataIndex(fqn, origin, 0),
                torch.Size(offsets),
                target.size(),
            )
            return LoadPlan([item])

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return target

    load(path, {fqn: target}, OfBox(), **options)


def test_the_metadata_shows_dequantised_tensors_on_request(tmp_path: Path) -> None:
    weight, scales = write_fp8(tmp_path, 130, 140)
    seen = FastReader(tmp_path).read_metadata().state_dict_metadata
    assert seen["w.weight"].properties.dtype == torch.float8_e4m3fn
    assert "w.weight_scale_inv" in seen
    state: dict[str, Any] = {}
    reader = FastReader(tmp_path, dequantize=True)
    _load_state_dict(state, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert sorted(state) == ["norm", "w.weight"]
    assert torch.equal(state["w.weight"], scaled(weight, scales).bfloat16())


def test_a_load_without_dequantisation_names_the_tensor_and_what_to_pass(tmp_path: Path) -> None:
    weight, scales = write_fp8(tmp_path / "stated", 130, 140)
    tensors = {"w.weight": weight, "w.weight_scale_inv": scales}
    write_model(tmp_path / "silent", tensors, None)
    torch_ckpt.save(dict(tensors), checkpoint_id=tmp_path / "dcp")
    for name, mode in (("stated", False), ("silent", "auto"), ("silent", False), ("dcp", "auto")):
        for planner in PLANNERS.values():
            target = torch.full((130, 140), 7.0)
            with pytest.raises((UnsupportedError, dcp.CheckpointException)) as raised:
                load(tmp_path / name, {"w.weight": target}, planner(), dequantize=mode)
            assert "'w.weight'" in str(raised.value)
            assert "w.weight_scale_inv" in str(raised.value)
            assert ("dequantize=True" in str(raised.value)) == (name != "dcp")
            assert torch.equal(target, torch.full((130, 140), 7.0))
            kept = load(tmp_path / name, {"w.weight": torch.zeros_like(weight)}, planner())
            assert torch.equal(kept["w.weight"].view(torch.uint8), weight.view(torch.uint8))
    state = load(tmp_path / "silent", {"w.weight": torch.zeros(130, 140)}, dequantize=True)
    assert torch.equal(state["w.weight"], scaled(weight, scales))


def test_a_planner_that_chooses_its_targets_widens_nothing_in_silence(tmp_path: Path) -> None:
    write_fp8(tmp_path, 130, 140)
    with pytest.raises((UnsupportedError, dcp.CheckpointException), match=r"'w\.weight'"):
        read_box(tmp_path, "w.weight", [0, 0], torch.zeros(2, 2), dequantize=False)


METHODS = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
    "nothing": ({"bits": 8}, "None"),
    "packed": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        "pack-quantized",
    ),
    "of a group": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"format": "nvfp4-pack-quantized"}},
        },
        "nvfp4-pack-quantized",
    ),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    "a list": ({"quant_method": "compressed-tensors", "format": [["a"], {}]}, r"\[\['a'\], \{\}\]"),
    "objects": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"format": {"b": 1}}}},
        r"\{'b': 1\}",
    ),
    "odd blocks": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
}


@pytest.mark.parametrize("case", METHODS)
def test_an_unknown_method_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    config, named = METHODS[case]
    weight, scales = fp8_tensors(130, 140)
    write_model(tmp_path, {"w.weight": weight, "w.weight_scale": scales}, config)
    for mode in ("auto", True):
        with pytest.raises((CheckpointError, dcp.CheckpointException), match=named):
            load(tmp_path, {"w.weight": torch.zeros(130, 140)}, dequantize=mode)
    load(tmp_path, {"w.weight": torch.zeros_like(weight)})


UNREADABLE = {
    "torn": b'{"quantization_config": {"quant_method": "bitsandbytes"',
    "a list": b'["quantization_config"]',
    "empty": b"",
    "too long": b'{"quantization_config": {"quant_method": "x"}, "a": "'
    + b"a" * (16 << 20)
    + b'"}',
    "nested too deeply": b'{"a":' * 100_000,
    "a method in a list": b'{"quantization_config": ["bitsandbytes"]}',
    "a name": b'{"quantization_config": "bitsandbytes"}',
}


@pytest.mark.parametrize("case", UNREADABLE)
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_a_config_that_cannot_be_read_widens_nothing_in_silence(
    name: str, case: str, tmp_path: Path
) -> None:
    codes = torch.ones(4, 4, dtype=torch.int8)
    wide = torch.randn(4, 4).bfloat16()
    write_model(tmp_path, {"w.weight": codes, "w.SCB": torch.ones(4), "v.weight": wide}, None)
    text = UNREADABLE[case]
    if name != "config.json":
        text = text.replace(b"quantization_config", b"quantization")
    (tmp_path / name).write_bytes(text)
    target = torch.zeros(4, 4)
    with pytest.raises(
        (CheckpointError, dcp.CheckpointException), match=r"w\.weight.*its (q|.*json)"
    ):
        load(tmp_path, {"w.weight": target})
    assert not target.any()
    with pytest.raises((CheckpointError, dcp.CheckpointException), match=r"its (q|.*json)"):
        load(tmp_path, {"v.weight": target}, dequantize=True)
    # Other tensors are loaded all the same.
    state = {"w.weight": torch.zeros_like(codes), "v.weight": torch.zeros(4, 4)}
    assert torch.equal(load(tmp_path, state)["v.weight"], wide.float())
    assert torch.equal(state["w.weight"], codes)


def test_a_config_with_a_long_list_of_modules_is_read(tmp_path: Path) -> None:
    weight, scales = fp8_tensors(130, 140)
    config = FP8 | {"modules_to_not_convert": [f"layers.{n}.mlp.up" for n in range(100_000)]}
    write_model(tmp_path, {"w.weight": weight, "w.weight_scale_inv": scales}, config)
    state = load(tmp_path, {"w.weight": torch.zeros(130, 140)})
    assert torch.equal(state["w.weight"], scaled(weight, scales))


@pytest.mark.parametrize("shape", [(), (1,), (130,), (130, 1)])
@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
def test_scales_of_whole_tensors_and_of_rows_are_applied(
    method: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    config = {
        "compressed-tensors": {"quant_method": method, "format": "float-quantized"},
        "modelopt": {"quant_method": method, "quant_algo": "FP8"},
    }[method]
    weight, _ = fp8_tensors(130, 140)
    scales = torch.rand(shape) + 0.5
    write_model(tmp_path, {"w.weight": weight, "w.weight_scale": scales}, config)
    state = load(tmp_path, {"w.weight": torch.zeros(130, 140)})
    assert torch.equal(state["w.weight"], weight.float() * scales.reshape(-1, 1))


def of_groups(**weights: Any) -> dict[str, Any]:
    groups = {"a": {"weights": None}, "b": {"weights": weights}}
    method = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**method, "config_groups": groups}


@pytest.mark.parametrize(("rows", "columns"), [(192, 256), (300, 130), (256, 128)])
def test_blocks_of_compressed_tensors_are_those_that_the_config_states(
    rows: int, columns: int, tmp_path: Path
) -> None:
    for block, stated in {
        (128, 128): {"strategy": "block", "block_structure": [128, 128]},
        (1, 48): {"strategy": "group", "group_size": 48},
    }.items():
        weight, scales = fp8_tensors(rows, columns, block=block)
        path = tmp_path / str(block[0])
        write_model(path, {"w.weight": weight, "w.weight_scale": scales}, of_groups(**stated))
        state = load(path, {"w.weight": torch.zeros(rows, columns)})
        assert torch.equal(state["w.weight"], scaled(weight, scales, block))


@pytest.mark.parametrize("stated", [{}, {"block_structure": "128x128"}, {"group_size": True}])
def test_blocks_of_compressed_tensors_that_are_not_stated_are_refused(
    stated: dict[str, Any], tmp_path: Path
) -> None:
    weight, scales = fp8_tensors(192, 256)  # Also 2 x 2 blocks of 96 x 128.
    write_model(tmp_path, {"w.weight": weight, "w.weight_scale": scales}, of_groups(**stated))
    with pytest.raises((CheckpointError, dcp.CheckpointException), match=r"\[192, 256\].*\[2, 2\]"):
        load(tmp_path, {"w.weight": torch.zeros(192, 256)})


@pytest.mark.parametrize("case", ["g_idx", "zero_point", "int8"])
def test_numbers_whose_products_are_not_the_weights_are_refused(case: str, tmp_path: Path) -> None:
    codes = torch.randint(-128, 128, (32, 64), dtype=torch.int8)
    tensors = {"w.weight": codes, "w.weight_scale": torch.ones(32, 1)}
    config = of_groups(strategy="group", group_size=64) | {"format": "int-quantized"}
    if case == "int8":  # Two numbers of 4 bits.
        tensors = {"w.weight": codes, "w.weight_scale_inv": torch.ones(32, 4)}
        config = FP8
    else:
        tensors[f"w.weight_{case}"] = torch.zeros(64, dtype=torch.int32)
    write_model(tmp_path, tensors, config)
    for mode in ("auto", True):
        with pytest.raises((CheckpointError, dcp.CheckpointException), match=r"'w\.weight'"):
            load(tmp_path, {"w.weight": torch.zeros(32, 64)}, dequantize=mode)
    state = load(tmp_path, {"w.weight": torch.zeros_like(codes)})
    assert torch.equal(state["w.weight"], codes)


def test_scales_that_fit_no_blocks_are_refused_with_both_sizes(tmp_path: Path) -> None:
    weight, _ = fp8_tensors(130, 140)
    tensors = {"w.weight": weight, "w.weight_scale_inv": torch.ones(3, 3)}
    write_model(tmp_path, tensors, FP8)
    for mode in ("auto", True):
        with pytest.raises((CheckpointError, dcp.CheckpointException), match=r"\[3, 3\]"):
            load(tmp_path, {"w.weight": torch.zeros(130, 140)}, dequantize=mode)


@pytest.mark.parametrize("dequantize", ["auto", True])
@pytest.mark.parametrize("cut", ["w.weight", "w.weight_scale_inv", "up_blocks"])
def test_a_tensor_that_is_cut_into_files_is_refused_with_what_makes_it_whole(
    cut: str, dequantize: Any, tmp_path: Path
) -> None:
    weight, scales = fp8_tensors(256, 256)
    blocks, exponents = mxfp4_tensors(2, 4, 64)
    tensors, config = {"w.weight": weight, "w.weight_scale_inv": scales}, FP8
    if cut == "up_blocks":
        tensors, config, dequantize = {"up_blocks": blocks, "up_scales": exponents}, MXFP4, True
    fqn = "up" if cut == "up_blocks" else "w.weight"
    sizes = (2, 64, 4) if fqn == "up" else (256, 256)
    write_cut(tmp_path / "cut", tensors, config, cut)
    target = torch.zeros(sizes)
    with pytest.raises(
        (CheckpointError, dcp.CheckpointException), match=rf"'{cut}' is cut into 2.*convert"
    ):
        load(tmp_path / "cut", {fqn: target}, dequantize=dequantize)
    assert not target.any()
    stored = {name: torch.zeros_like(value) for name, value in tensors.items()}
    load(tmp_path / "cut", stored)
    for name, value in tensors.items():
        assert torch.equal(stored[name].view(torch.uint8), value.view(torch.uint8))
    arguments = [str(tmp_path / "cut"), str(tmp_path / "whole"), "--to", "safetensors"]
    assert main(["convert", *arguments]) == 0
    shutil.copy(tmp_path / "cut" / "config.json", tmp_path / "whole")
    load(tmp_path / "whole", {fqn: target}, dequantize=dequantize)
    wanted = of_mxfp4(blocks, exponents).mT if fqn == "up" else scaled(weight, scales)
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("dequantize", ["auto", True])
def test_a_tied_name_gets_the_products_too(dequantize: Any, tmp_path: Path) -> None:
    weight = torch.randn(128, 256).bfloat16()
    writer = SafetensorsWriter(tmp_path, quantize="fp8-block-128")
    torch_ckpt.save({"a.weight": weight, "b.weight": weight}, storage_writer=writer)
    whole = FastReader(tmp_path, dequantize=dequantize)
    one, other = torch.zeros_like(weight), torch.zeros_like(weight)
    torch_ckpt.load({"a.weight": one}, storage_reader=whole)
    torch_ckpt.load({"b.weight": other}, storage_reader=whole)
    assert torch.equal(one, other)
    assert (one - weight).abs().max() < 0.3


@pytest.mark.parametrize("config", [FP8, MXFP4, {"quant_method": "compressed-tensors"}])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_numbers_without_scales_are_refused_if_the_config_states_a_method(
    dtype: torch.dtype, config: dict[str, Any], tmp_path: Path
) -> None:
    weight = torch.ones(130, 140).to(dtype)
    ids = torch.ones(130, 140, dtype=torch.int8)
    write_model(tmp_path, {"w.weight": weight, "a": torch.ones(3), "ids": ids}, config)
    state = {"a": torch.zeros(3), "w.weight": torch.zeros(130, 140)}
    with pytest.raises((CheckpointError, dcp.CheckpointException), match="has no scales"):
        load(tmp_path, state)
    assert not state["a"].any()  # No target is written before.
    load(tmp_path, {"ids": torch.zeros(130, 140)})  # No weight, so probably no such numbers.
    load(tmp_path, {"w.weight": torch.zeros_like(weight)})


@pytest.mark.parametrize("dequantize", ["auto", True])
def test_scales_in_a_missing_file_fail_only_the_load_of_their_tensor(
    dequantize: Any, tmp_path: Path
) -> None:
    write_fp8(tmp_path, 130, 140)  # The scales are in the first file, with the norm.
    (scales,) = [p for p in tmp_path.glob("*.safetensors") if p.stat().st_size < 10_000]
    scales.unlink()
    target = torch.zeros(130, 140)
    with pytest.raises((CheckpointError, dcp.CheckpointException), match="which is missing"):
        load(tmp_path, {"w.weight": target}, dequantize=dequantize)
    assert not target.any()
    load(tmp_path, {"w.weight": torch.zeros(130, 140, dtype=torch.float8_e4m3fn)})


def test_mxfp4_blocks_are_loaded_as_the_tensor_of_transformers(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = mxfp4_tensors(3, 48, 96)
    tensors = {"up_blocks": blocks, "up_scales": scales, "up_bias": torch.ones(2)}
    write_model(tmp_path, tensors, MXFP4, files=2)
    for dtype in WIDE[:3]:
        wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        for planner in (*PLANNERS.values(), InTurn):
            target = torch.zeros(wanted.shape, dtype=dtype)
            load(tmp_path, {"up": target}, planner(), dequantize=True)
            assert torch.equal(target, wanted)
        for offsets, sizes in (
            ((1, 0, 0), (1, 96, 48)),
            ((0, 31, 7), (3, 2, 9)),
            ((2, 33, 0), (1, 1, 48)),
            ((0, 1, 47), (2, 94, 1)),
        ):
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            target = torch.zeros(sizes, dtype=dtype)
            read_box(tmp_path, "up", list(offsets), target, dequantize=True)
            assert torch.equal(target, wanted[box])
    kept = load(tmp_path, {"up_blocks": torch.zeros_like(blocks)})
    assert torch.equal(kept["up_blocks"], blocks)
    for planner in PLANNERS.values():
        with pytest.raises((CheckpointError, dcp.CheckpointException), match="dequantize=True"):
            load(tmp_path, {"up": torch.zeros(3, 96, 48)}, planner())


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_values_are_those_of_stocks_quantized_reader(target: torch.dtype, tmp_path: Path) -> None:
    weight, scales = fp8_tensors(300, 200)
    blocks, exponents = mxfp4_tensors(2, 6, 64)
    tensors = {
        "w.weight": weight,
        "w.weight_scale_inv": scales,
        "up_blocks": blocks,
        "up_scales": exponents,
        "norm": torch.arange(5.0),
    }
    write_model(tmp_path, tensors, FP8, files=2)
    for dtype, block in itertools.product((torch.float32, torch.bfloat16), (128,)):
        found = []
        for is_ours in (False, True):
            state = {
                "w.weight": torch.zeros(300, 200, dtype=dtype),
                "up_blocks": torch.zeros(2, 6, 64, dtype=dtype),
                "norm": torch.zeros(5, dtype=dtype),
                "up_scales": torch.zeros_like(exponents),
            }
            reader = QuantizedHuggingFaceStorageReader(
                str(tmp_path), thread_count=2, target_dtype=target, block_size=block
            )
            if is_ours:
                with torch_ckpt.installed():
                    dcp.load(state, storage_reader=reader)
            else:
                dcp.load(state, storage_reader=reader)
            found.append(state)
        stock, ours = found
        loaded, groups = ours.pop("up_blocks"), blocks.shape[-2]
        # DCP's reader does not adapt the stored box to its sizes: it loads so many columns only.
        assert torch.equal(stock.pop("up_blocks")[..., :groups], loaded[..., :groups])
        assert torch.equal(loaded, of_mxfp4(blocks, exponents).to(target).to(dtype))
        for fqn, value in stock.items():
            assert torch.equal(value, ours[fqn]), fqn


def test_values_are_those_of_transformers(tmp_path: Path) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scales = write_fp8(tmp_path, 256, 384)
    for dtype in WIDE[:3]:
        wanted = fp8.Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=dtype)
        state = load(tmp_path, {"w.weight": torch.zeros(256, 384, dtype=dtype)})
        assert torch.equal(state["w.weight"], wanted)


def _memory_kib(name: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [one for one in status if one.startswith(f"{name}:")]
    return int(line.split()[1])


@pytest.mark.slow
def test_scales_that_are_long_are_in_memory_in_parts(tmp_path: Path) -> None:
    sizes = (2, 2048, 4096)  # 16 MiB of numbers, 64 MiB of scales.
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 120, sizes, dtype=torch.uint8, generator=generator)
    tensors = {"w": codes.view(torch.float8_e4m3fn), "w_scale_inv": torch.rand(sizes)}
    wanted = (tensors["w"].float() * tensors["w_scale_inv"]).bfloat16()
    write_model(tmp_path, tensors, {"quant_method": "fp8"})
    for target in (torch.zeros_like(wanted), torch.zeros_like(wanted.mT.contiguous()).mT):
        reader = FastReader(tmp_path)
        Path("/proc/self/clear_refs").write_text("5")  # The peak restarts at what is resident.
        before = _memory_kib("VmRSS")
        dcp.load({"w": target}, storage_reader=reader)
        assert (_memory_kib("VmHWM") - before) >> 10 < 50  # 16 of scales, 16 of buffers.
        assert torch.equal(target, wanted)
