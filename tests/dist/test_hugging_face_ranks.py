"""DCP's Hugging Face writer and reader under `installed`, on several ranks, with stock beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from safetensors.torch import load_file, save_file
from states import assert_same, full_value, sharded
from support.safetensors_files import INDEX, load_model
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torch_ckpt

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

GRIDS: dict[str, tuple[Placement, ...]] = {
    "rows": (Shard(0),),
    "replicas": (Replicate(), Shard(0)),
    "columns": (Shard(0), Shard(1)),
}
BOXES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "uneven": ((7, 5), torch.float32),
    "fewer_than_ranks": ((2, 3), torch.bfloat16),
    "deep": ((5, 6, 7), torch.float16),
    "large": ((1031, 1033), torch.float32),
}
NUMBERS = {"uneven": 1, "fewer_than_ranks": 3, "deep": 3, "large": 2}
CONSOLIDATED = {"save_distributed": True, "enable_consolidation": True}
WAYS: dict[str, dict[str, Any]] = {
    "one file": CONSOLIDATED,
    "files": {**CONSOLIDATED, "fqn_to_index_mapping": NUMBERS},
    "distributed": {"save_distributed": True},
    "distributed files": {"save_distributed": True, "fqn_to_index_mapping": NUMBERS},
}


def whole() -> dict[str, torch.Tensor]:
    return {name: full_value(name, *box) for name, box in BOXES.items()}


def placed(grid: str, *, zero: bool = False) -> dict[str, DTensor]:
    placements, world = GRIDS[grid], dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2) if len(placements) == 2 else (world,))
    return {
        name: sharded(torch.zeros_like(full) if zero else full, mesh, placements, as_view=False)
        for name, full in whole().items()
    }


def save_both(path: Path, grid: str, options: dict[str, Any]) -> None:
    for name in ("ours", "stock"):
        folder = path / name
        folder.mkdir(exist_ok=True)
        dist.barrier()
        state = placed(grid)
        if name == "stock":
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), **options))
            continue
        with torch_ckpt.installed():
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), **options))
        dist.barrier()


def load_each(path: Path, grid: str) -> None:
    for name in ("ours", "stock"):
        for ours in (True, False):
            state = placed(grid, zero=True)
            reader = HuggingFaceStorageReader(str(path / name))
            if ours:
                with torch_ckpt.installed():
                    dcp.load(state, storage_reader=reader)
            else:
                dcp.load(state, storage_reader=reader)
            expected = placed(grid)
            for fqn, tensor in state.items():
                found, due = (
                    each.to_local().contiguous().view(torch.uint8)
                    for each in (tensor, expected[fqn])
                )
                assert torch.equal(found, due), (name, ours, fqn)


@pytest.mark.thin(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grid", GRIDS)
def test_each_reads_what_the_other_has_written(
    worlds: Worlds, tmp_path: Path, grid: str, way: str
) -> None:
    worlds.run(4, save_both, tmp_path, grid, WAYS[way])
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    if way in ("one file", "files"):
        names = [{file.name for file in p.iterdir() if file.is_file()} for p in (ours, stock)]
        assert names[0] == names[1]
        assert json.loads((ours / INDEX).read_bytes()) == json.loads((stock / INDEX).read_bytes())
        assert_same(load_model(ours), whole())
    else:
        files = sorted(file.name for file in ours.iterdir())
        assert all(name.startswith("shard-00001-model-0000") for name in files)
        assert_same({k: v for name in files for k, v in load_file(ours / name).items()}, whole())
    worlds.run(2, load_each, tmp_path, "rows")
    worlds.run(4, load_each, tmp_path, "columns")


def save_rank_0(path: Path) -> None:
    with torch_ckpt.installed():
        dcp.save(whole(), storage_writer=HuggingFaceStorageWriter(str(path)))


def test_replicas_make_one_whole_file(worlds: Worlds, tmp_path: Path) -> None:
    """With stock, each rank writes its part of them over the same file."""
    worlds.run(3, save_rank_0, tmp_path)
    assert_same(load_model(tmp_path), whole())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 64)
        self.down = nn.Linear(64, 16)
        self.norm = nn.LayerNorm(16)


def net_of(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def load_net(path: Path) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    net = fully_shard(parallelize_module(net_of(1), mesh["tp"], plan), mesh=mesh["fsdp"])
    state = get_model_state_dict(net)
    with torch_ckpt.installed():
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)))
    for fqn, tensor in net_of(0).state_dict().items():
        assert torch.equal(state[fqn].full_tensor(), tensor), fqn


def test_a_model_loads_onto_fsdp_over_tensor_parallelism(worlds: Worlds, tmp_path: Path) -> None:
    """Where a rank has several boxes of one tensor, stock loads other rows."""
    save_file(net_of(0).state_dict(), tmp_path / "model.safetensors")
    worlds.run(8, load_net, tmp_path)
