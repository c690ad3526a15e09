"""Quantised models of safetensors, as other programs write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BLOCK = 128
WIDE = (torch.float32, torch.bfloat16, torch.float16)
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4"}


def write_model(
    path: Path,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any] | None,
    *,
    files: int = 1,
    dtype: str = "bfloat16",
) -> None:
    """Writes a model with an index. A tensor and its scales may be in different files."""
    path.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {fqn: tensors[fqn] for fqn in names[number::files]}
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        stated = {"torch_dtype": dtype, "quantization_config": config}
        (path / "config.json").write_text(json.dumps(stated))


def write_cut(
    path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], cut: str
) -> None:
    """Writes a model as DCP's writer does on two ranks, one of whose tensors is in both files."""
    path.mkdir()
    first, second = tensors[cut].chunk(2)
    parts = [{**tensors, cut: first.contiguous()}, {cut: second.contiguous()}]
    for number, part in enumerate(parts):
        boxes = {
            fqn: {"saved_offsets": [number * len(first) if fqn == cut else 0, *[0] * (v.ndim - 1)]}
            for fqn, v in part.items()
        }
        name = f"shard-{number:05d}-model-00001-of-00001.safetensors"
        facts = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(boxes)}
        save_file(part, path / name, metadata=facts)
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))


def fp8_tensors(
    *sizes: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = (BLOCK, BLOCK),
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns every code of a dtype except NaN, and scales of blocks."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, sizes, generator=generator, dtype=torch.uint8)
    weight = codes.view(dtype)
    codes[~weight.float().isfinite()] = 0x11
    grid = [
        *sizes[:-2],
        *(-(-size // step) for size, step in zip(sizes[-2:], block, strict=True)),
    ]
    scales = torch.rand(grid, generator=generator) * 0.01 + 1e-4
    return codes.view(dtype), scales.to(scale_dtype)


def scaled(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = (BLOCK, BLOCK)
) -> torch.Tensor:
    """Returns the products of numbers and the scales of their blocks, in float32."""
    rows, columns = weight.shape[-2:]
    grid = scales.float().repeat_interleave(block[0], -2)[..., :rows, :]
    return weight.float() * grid.repeat_interleave(block[1], -1)[..., :columns]


def mxfp4_tensors(*sizes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns blocks and scales, for a tensor whose last size is a multiple of 32."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*sizes[:-1], sizes[-1] // 32, 16)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 131, shape[:-1], generator=generator, dtype=torch.uint8)
    return blocks, scales


def of_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the products of packed numbers and the scales of their groups, in float32."""
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat([values, -values])[halves.long()]
    products = numbers * torch.exp2(scales.float() - 127).unsqueeze(-1)
    return products.flatten(-2)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns numbers in FP8 and the scales of blocks, by the arithmetic of transformers."""
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).transpose(1, 2)
    largest = blocks.abs().amax((-1, -2))
    factors = torch.where(largest > 0, 448 / largest, 1.0)
    factors = torch.where(factors.isinf(), 1.0, factors)  # Where that stores NaN.
    codes = (blocks * factors[..., None, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    whole = codes.view(torch.uint8).transpose(1, 2).reshape(rows, columns)
    return whole.view(torch.float8_e4m3fn), 1 / factors


def exported(state: dict[str, Any], *, is_stored: bool) -> dict[str, Any]:
    """Returns what an export in FP8 stores of a flat state, or what a load of it gives."""
    out: dict[str, Any] = {}
    for fqn, value in state.items():
        is_whole = value.ndim == 2 and all(size and size % BLOCK == 0 for size in value.shape)
        out[fqn] = value
        if is_whole and fqn.endswith(".weight") and value.dtype in WIDE:
            codes, scales = quantised(value)
            out[fqn] = codes if is_stored else scaled(codes, scales).to(value.dtype)
            if is_stored:
                out[f"{fqn}_scale_inv"] = scales
    return out
