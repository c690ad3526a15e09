"""Every dtype of torch, also those of torch to come: the same bits, or a refusal that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.tensors import bits

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, SafetensorsWriter
from torch_ckpt.conversion import convert as conversion
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.filesystems.location import Location

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bit"))
    },
    key=str,
)
# Elements of these can be made by a view only. Quantised tensors have tests of their own.
OPAQUE = [torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[1:3],
    "columns": lambda x: x[:, 1:3],
    "0-dim": lambda x: x.reshape(-1)[3],
    "empty": lambda x: x[:0],
}


def tensors(dtype: torch.dtype, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor, and a target of the same sizes."""
    memory = torch.randint(0, 2, (6, 4 * dtype.itemsize), dtype=torch.uint8)
    tensor = KINDS[kind](memory.view(dtype))
    target = torch.zeros(max(tensor.numel(), 1) * dtype.itemsize, dtype=torch.uint8).view(dtype)
    return tensor, target[: tensor.numel()].reshape(tensor.shape)


def plain_bits(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor that torch may be unable to copy."""
    as_integers = INTEGERS.get(tensor.dtype.itemsize)
    if as_integers is None:
        return bits(tensor)
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).view(as_integers)
    return bits(torch.as_strided(memory, tensor.size(), tensor.stride(), tensor.storage_offset()))


def save(state: dict[str, torch.Tensor], path: Path) -> None:
    torch_ckpt.save(state, checkpoint_id=path)


def dcp_save(state: dict[str, torch.Tensor], path: Path) -> None:
    dcp.save(state, storage_writer=FastWriter(path))


def async_save(state: dict[str, torch.Tensor], path: Path) -> None:
    torch_ckpt.async_save(state, checkpoint_id=path).result()


def save_model(state: dict[str, torch.Tensor], path: Path) -> None:
    torch_ckpt.save(state, storage_writer=SafetensorsWriter(path))


def reuse(state: dict[str, torch.Tensor], path: Path) -> None:
    torch_ckpt.save(state, checkpoint_id=path.with_name("base"))
    base = path.with_name("base")
    torch_ckpt.save(state, storage_writer=FastWriter(path, base=base))


def convert(state: dict[str, torch.Tensor], path: Path) -> None:
    torch_ckpt.save(state, checkpoint_id=path.with_name("source"))
    conversion.convert(Location(path.with_name("source")), Location(path), "dcp")


WAYS = {f.__name__: f for f in (save, dcp_save, async_save, save_model, reuse, convert)}


ENGINES = {
    getattr(torch, name)
    for name in (
        *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    )
}
"""Those that no way may refuse, but for two that safetensors does not have."""

NOT_IN_SAFETENSORS = {("save_model", torch.complex32), ("save_model", torch.complex128)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [*DTYPES, *OPAQUE], ids=str)
def test_a_dtype_keeps_its_bits_or_is_refused_with_the_tensors_name(
    dtype: torch.dtype, way: str, tmp_path: Path
) -> None:
    is_packed = dtype == torch.float4_e2m1fn_x2 and way == "save_model"
    kinds = [kind for kind in KINDS if not (is_packed and kind == "0-dim")]
    state, targets = {}, {}
    for kind in kinds:
        state[kind], targets[kind] = tensors(dtype, kind)
    saved = {kind: plain_bits(tensor) for kind, tensor in state.items()}
    try:
        WAYS[way](state, tmp_path / "x")
    except (UnsupportedError, dcp.CheckpointException) as error:
        refusal = str(error)
    else:
        dcp.load(targets, storage_reader=FastReader(tmp_path / "x"))
        assert {kind: plain_bits(tensor) for kind, tensor in targets.items()} == saved
        return
    assert any(f"'{kind}'" in refusal for kind in kinds), refusal
    assert str(dtype).removeprefix("torch.") in refusal
    assert not list(tmp_path.glob("x/*.distcp"))
    assert dtype not in ENGINES or (way, dtype) in NOT_IN_SAFETENSORS


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_quantised_tensors_of_torch_keep_numbers_and_scales(
    axis: int | None, tmp_path: Path
) -> None:
    values = torch.randn(4, 6)

    def quantised(values: torch.Tensor) -> torch.Tensor:
        if axis is None:
            return torch.quantize_per_tensor(values, 0.05, 3, torch.quint8)
        scales = torch.linspace(0.1, 0.2, values.shape[axis])
        zeros = torch.zeros(len(scales), dtype=torch.long)
        return torch.quantize_per_channel(values, scales, zeros, axis, torch.qint8)

    torch_ckpt.save({"w": quantised(values)}, checkpoint_id=tmp_path / "x")
    state = {"w": quantised(torch.zeros(4, 6))}
    torch_ckpt.load(state, checkpoint_id=tmp_path / "x")
    assert torch.equal(state["w"].int_repr(), quantised(values).int_repr())
    assert torch.equal(state["w"].dequantize(), quantised(values).dequantize())
