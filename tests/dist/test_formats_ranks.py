"""Sharded states straight from files of other formats: each rank reads what it needs of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankError, Worlds
from safetensors.torch import load_file, save_file
from states import Failure, assert_same, failures_of, full_value, local_part, sharded
from support.exchanging import Exchanging
from support.flips import flip_value
from support.process_io import nbytes_read_by
from torch import nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torch_ckpt import FastLoadPlanner, FastReader

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

# Shape and placement; rows so long that reading a part of them leaves the rest unread.
TENSORS: dict[str, tuple[tuple[int, ...], Any]] = {
    "up": ((1000, 2048), Shard(0)),
    "down": ((31, 66000), Shard(1)),
    "norm": ((77,), Replicate()),
}
ROWS = 257  # 4 KiB each.
PLANNERS = {"stock": DefaultLoadPlanner, "fast": FastLoadPlanner}


def full_state() -> dict[str, torch.Tensor]:
    return {name: full_value(name, shape, torch.float32) for name, (shape, _) in TENSORS.items()}


def write(path: Path, form: str) -> Path:
    """All tensors, in a file or directory of this format."""
    state = full_state()
    if form == "safetensors":
        save_file(state, path / "model.safetensors")
        return path / "model.safetensors"
    if form == "torch.save":
        torch.save({**state, "step": 5}, path / "model.pt")
        return path / "model.pt"
    names = {fqn: f"model-{n:05}-of-00003.safetensors" for n, fqn in enumerate(state, 1)}
    for fqn, name in names.items():
        save_file({fqn: state[fqn]}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def load_parts(path: Path, planner: str, verify: Any = True) -> int:
    """Loads this rank's parts and checks them; returns how many bytes too many were read."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        name: sharded(torch.zeros(shape), mesh, (placement,))
        for name, (shape, placement) in TENSORS.items()
    }
    reader = FastReader(path, verify=verify)
    nbytes = nbytes_read_by(dcp.load, state, storage_reader=reader, planner=PLANNERS[planner]())
    full = full_state()
    for name, (_, placement) in TENSORS.items():
        assert_same(state[name].to_local(), local_part(full[name], mesh, (placement,)))
    return nbytes - sum(tensor.to_local().nbytes for tensor in state.values())


@pytest.mark.thin(1)
@pytest.mark.parametrize("form", ["safetensors", "torch.save", "hugging face"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_reads_its_parts_and_little_else(
    worlds: Worlds, tmp_path: Path, form: str, ranks: int
) -> None:
    path = write(tmp_path, form)
    for planner in PLANNERS:
        more = worlds.run(ranks, load_parts, path, planner)
        # Headers, pickles and ends of pages; all tensors are 16 MB.
        assert max(more) < 1 << 20, more


def load_parts_error(path: Path) -> dict[int, Failure]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"up": sharded(torch.zeros(TENSORS["up"][0]), mesh, (Shard(0),))}
    return failures_of(dcp.load, state, storage_reader=FastReader(path, verify="full"))


@pytest.mark.parametrize("planner", PLANNERS)
def test_ranks_that_verify_whole_records_read_each_byte_once(
    worlds: Worlds, tmp_path: Path, planner: str
) -> None:
    """Each needs a third of a record, and its checksum needs all of it: they exchange the rest."""
    path = write(tmp_path, "torch.save")
    with open(path, "rb") as stream:  # Ranks do not exchange what their page cache has.
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    whole = sum(tensor.nbytes for tensor in full_state().values())
    more = worlds.run(3, load_parts, path, planner, "full")
    assert sum(more) < 3 << 20, more  # Their own parts are all of it, once.
    assert path.stat().st_size > whole

    flip_value(path, full_state()["up"], 5)  # In the part of rank 0.
    for failures in worlds.run(3, load_parts_error, path):
        assert {error.kind for error in failures.values()} <= {"CorruptionError", "CancelledError"}
        assert any("checksum does not match" in error.message for error in failures.values())


def save_hugging_face(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = full_state()
    state = {
        name: sharded(full[name], mesh, (placement,), as_view=False)
        for name, (_, placement) in TENSORS.items()
    }
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True))


def load_error(path: Path) -> Failure:
    """The error of this rank that loads a plain tensor."""
    state = {"up": torch.zeros(TENSORS["up"][0])}
    failed = failures_of(dcp.load, state, storage_reader=FastReader(path))
    return failed[dist.get_rank()]


def test_files_of_dcps_safetensors_writer_load_on_fewer_ranks(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(3, save_hugging_face, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3

    for planner in PLANNERS:
        # Blocks of columns lie within rows of a file: here some are read with their neighbours.
        worlds.run(2, load_parts, tmp_path, planner)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    for error in worlds.run(2, load_error, tmp_path):
        assert error.kind == "CorruptionError"
        assert "do not contain every element of" in error.message


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 48)
        self.down = nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def trained() -> tuple[Mlp, torch.optim.Optimizer]:
    torch.manual_seed(5)
    net = Mlp()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    return net, optimizer


def check_tensor_parallel(path: Path) -> None:
    """What a model answers that was loaded onto the shards of tensor parallelism."""
    expected, _ = trained()
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    net = parallelize_module(Mlp(), mesh, plan)
    state = net.state_dict()
    assert state["up.weight"].placements == (Shard(0),)
    dcp.load(state, storage_reader=FastReader(path), planner=FastLoadPlanner())
    net.load_state_dict(state)
    x = torch.arange(48.0).view(2, 24)
    with torch.no_grad():
        torch.testing.assert_close(net(x).clone(), expected(x))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_safetensors_model_loads_onto_tensor_parallel_shards(
    worlds: Worlds, tmp_path: Path, ranks: int
) -> None:
    save_file(trained()[0].state_dict(), tmp_path / "model.safetensors")
    worlds.run(ranks, check_tensor_parallel, tmp_path / "model.safetensors")


def load_training(path: Path) -> dict[str, Any]:
    """A model and its optimizer, sharded by FSDP2, as they are after a load."""
    torch.manual_seed(dist.get_rank())
    net = fully_shard(Mlp(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters())
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim, "step": 0}
    dcp.load(state, storage_reader=FastReader(path))
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    model, optim = get_state_dict(net, optimizer)
    full = {name: tensor.full_tensor() for name, tensor in model.items()}
    moments = {
        f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, values in optim["state"].items()
        for key, value in values.items()
    }
    return {"model": full, "moments": moments, "step": state["step"]}


def test_a_model_and_optimizer_of_torch_save_load_onto_fsdp_shards(
    worlds: Worlds, tmp_path: Path
) -> None:
    net, optimizer = trained()
    model, optim = get_state_dict(net, optimizer)
    torch.save({"model": model, "optim": optim, "step": 17}, tmp_path / "all.pt")
    moments = {f"{fqn}.{k}": v for fqn, kept in optim["state"].items() for k, v in kept.items()}

    for found in worlds.run(2, load_training, tmp_path / "all.pt"):
        assert_same(found, {"model": dict(model), "moments": moments, "step": 17})


def load_of_own(paths: list[Path]) -> None:
    dcp.load({"up": torch.zeros(3)}, storage_reader=FastReader(paths[dist.get_rank()]))


def test_ranks_that_open_different_files_do_not_load_together(
    worlds: Worlds, tmp_path: Path
) -> None:
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for scale, path in enumerate(paths):
        save_file({"up": torch.full((3,), float(scale)), "x": torch.ones(scale + 1)}, path)

    with pytest.raises(RankError, match="has opened save"):
        worlds.run(2, load_of_own, paths)


def load_copies(paths: list[Path]) -> str:
    """Loads each rank's own file; returns why not."""
    state = {"up": torch.zeros(ROWS, 1024)}
    failed = failures_of(dcp.load, state, storage_reader=Exchanging(paths[dist.get_rank()]))
    if not failed:
        assert_same(state, load_file(paths[0]))
    return "; ".join(f"{rank}: {failure}" for rank, failure in failed.items())


@pytest.mark.parametrize("at", [0, ROWS // 2, ROWS - 1])
def test_ranks_whose_files_differ_only_in_values_do_not_load_together(
    worlds: Worlds, tmp_path: Path, at: int
) -> None:
    paths = [tmp_path / "a" / "model.safetensors", tmp_path / "b" / "model.safetensors"]
    for path in paths:
        path.parent.mkdir()
        save_file({"up": torch.arange(ROWS * 1024.0).view(ROWS, 1024)}, path)
    os.utime(paths[1], (0, 0))
    assert worlds.run(2, load_copies, paths) == ["", ""]

    other = load_file(paths[1])
    other["up"][at] += 1
    save_file(other, paths[1])
    for said in worlds.run(2, load_copies, paths):
        assert "has opened save" in said
