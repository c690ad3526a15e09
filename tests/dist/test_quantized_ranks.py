"""Quantised models on several ranks: any sharding, shared reads, and exports."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from support.logs import logged
from support.quantized import FP8, MXFP4, fp8_tensors, mxfp4_tensors, of_mxfp4, scaled, write_model
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import FastReader, SafetensorsWriter


def blank(sizes: tuple[int, ...], placement: Shard | Replicate) -> DTensor:
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.zeros(sizes, dtype=torch.bfloat16), mesh, [placement])


@on_ranks(2)
@pytest.mark.parametrize("dequantize", ["auto", True])
def test_every_sharding_gets_its_products(dequantize: bool, path: Path) -> None:
    weight, scales = fp8_tensors(300, 197)
    experts, expert_scales = fp8_tensors(3, 140, 260)
    if not dist.get_rank():
        tensors = {
            "a.weight": weight,
            "a.weight_scale_inv": scales,
            "e": experts,
            "e_scale_inv": expert_scales,
        }
        write_model(path, tensors, FP8, files=3)
    dist.barrier()
    wholes = {"a.weight": scaled(weight, scales), "e": scaled(experts, expert_scales)}
    for placements in (
        (Shard(0), Shard(0)),
        (Shard(1), Shard(1)),
        (Replicate(), Shard(2)),
    ):
        state = {
            fqn: blank(tuple(whole.shape), placement)
            for (fqn, whole), placement in zip(wholes.items(), placements, strict=True)
        }
        torch_ckpt.load(state, storage_reader=FastReader(path, dequantize=dequantize))
        for fqn, whole in wholes.items():
            assert torch.equal(state[fqn].full_tensor(), whole.bfloat16()), (fqn, placements)


@on_ranks(2)
def test_shared_reads_give_each_rank_its_products(path: Path) -> None:
    weight, scales = fp8_tensors(4480, 5000)
    blocks, exponents = mxfp4_tensors(2, 64, 96)
    if not dist.get_rank():
        write_model(path / "fp8", {"a.weight": weight, "a.weight_scale_inv": scales}, FP8)
        write_model(path / "mxfp4", {"up_blocks": blocks, "up_scales": exponents}, MXFP4)
    dist.barrier()
    dtype = torch.bfloat16 if dist.get_rank() else torch.float32
    state = {"a.weight": torch.zeros(4480, 5000, dtype=dtype)}
    with logged(logging.INFO) as lines:
        torch_ckpt.load(state, storage_reader=FastReader(path / "fp8", exchange="auto"))
    assert torch.equal(state["a.weight"], scaled(weight, scales).to(dtype))
    assert any("loaded" in line for line in lines) or dist.get_rank()
    sharded = {"up": blank((2, 96, 64), Shard(1))}
    torch_ckpt.load(sharded, storage_reader=FastReader(path / "mxfp4", dequantize=True))
    wanted = of_mxfp4(blocks, exponents).mT.bfloat16()
    assert torch.equal(sharded["up"].full_tensor(), wanted)


@on_ranks(2)
def test_shards_that_cut_blocks_are_exported_as_the_whole_tensor_is(path: Path) -> None:
    whole = torch.randn(384, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    mesh = init_device_mesh("cpu", (2,))
    state = {"a.weight": distribute_tensor(whole, mesh, [Shard(0)]), "norm.weight": whole[0]}
    writer = SafetensorsWriter(path / "ranks", quantize="fp8-block-128")
    torch_ckpt.save(state, storage_writer=writer)
    if not dist.get_rank():
        alone = SafetensorsWriter(path / "alone", quantize="fp8-block-128")
        torch_ckpt.save(
            {"a.weight": whole, "norm.weight": whole[0]}, storage_writer=alone, no_dist=True
        )
        found = [(path / name / "model.safetensors").read_bytes() for name in ("ranks", "alone")]
        assert found[0] == found[1]
        assert len(list((path / "ranks").iterdir())) == 2
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_cannot_be_served_fails_the_load_of_all_ranks(path: Path) -> None:
    weight, scales = fp8_tensors(130, 140)
    if not dist.get_rank():
        write_model(path, {"a.weight": weight, "a.weight_scale_inv": scales}, None)
    dist.barrier()
    target = torch.zeros(130, 140, dtype=torch.float32 if dist.get_rank() else weight.dtype)
    with pytest.raises(CheckpointException, match="dequantize=True"):
        torch_ckpt.load({"a.weight": target}, storage_reader=FastReader(path))
    assert not target.float().any()


SHARDED = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex32, torch.bits8, torch.bits16),
)


@on_ranks(2)
@pytest.mark.parametrize("dtype", SHARDED, ids=str)
def test_shards_of_any_dtype_keep_their_bits_on_both_dimensions(
    dtype: torch.dtype, path: Path
) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(3)
    memory = torch.randint(0, 256, (6, 8 * dtype.itemsize), dtype=torch.uint8, generator=generator)

    def shard(memory: torch.Tensor, dim: int) -> DTensor:
        local = memory.chunk(2, dim)[rank].clone().view(dtype)
        return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)

    for saved, loaded in ((0, 1), (1, 0), (1, 1)):
        folder = path / f"{saved}{loaded}"
        torch_ckpt.save({"w": shard(memory, saved)}, checkpoint_id=folder)
        state = {"w": shard(torch.zeros_like(memory), loaded)}
        torch_ckpt.load(state, checkpoint_id=folder)
        found = state["w"].to_local().view(torch.uint8)
        assert torch.equal(found, memory.chunk(2, loaded)[rank])


@on_ranks(2)
def test_shards_of_packed_integers_are_refused_on_all_ranks(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.zeros(2, 4, dtype=torch.uint8).view(torch.uint4)
    state = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    with pytest.raises(CheckpointException, match=r"'w'.*uint4"):
        torch_ckpt.save(state, checkpoint_id=path / "x")
    with pytest.raises(CheckpointException, match=r"'w'.*uint4"):
        torch_ckpt.async_save(state, checkpoint_id=path / "x").result()
    assert not list(path.glob("x/*.distcp"))
