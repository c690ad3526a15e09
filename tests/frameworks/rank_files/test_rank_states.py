"""State dicts that each rank saved with torch.save load onto any ranks, bit for bit.

The real functions of accelerate write them, and functions that write what verl's do.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from states import assert_same, loaded_whole
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from trained_nets import give_state, local

import torch_ckpt
from torch_ckpt import FastReader, RankState
from torch_ckpt.cli.main import main

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

MESHES = {"fsdp": 4, "hsdp": 4, "fsdp and tp": 4}
"""The number of ranks. Some have no elements of a bias of sizes ``[2]``."""

MODEL = {"model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias", "model.seen"}


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    net.register_buffer("seen", torch.tensor([3, 4]))
    return net


def placed(kind: str) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """A model on the mesh of a kind, or of FSDP1, and an optimizer without a state."""
    net: Any = network()
    count = dist.get_world_size()
    if kind == "fsdp1":
        net = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    elif kind == "fsdp and tp":
        mesh = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
    else:
        sizes = (2, count // 2) if kind == "hsdp" else (count,)
        names = ("replicate", "shard")[-len(sizes) :]
        fully_shard(net, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def begun(kind: str, factor: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that have a state, whose values depend on a factor."""
    net, optimizer = placed(kind)
    with torch.no_grad():
        for parameter in net.parameters():
            local(parameter).mul_(factor)
    give_state(net, optimizer)
    return net, optimizer


def trained(kind: str, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer after steps of training."""
    net, optimizer = placed(kind)
    for step in range(steps):
        net(torch.full((2, 5), 1.0 + step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def whole_states(model: Any, optimizer: Any) -> dict[str, Any]:
    """The states by name, with all elements of their tensors."""
    options = StateDictOptions(full_state_dict=True)
    model_state = get_model_state_dict(model, options=options)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    return flat({"model": model_state, "optimizer": optimizer_state})


def flat(state: Any, name: str = "") -> dict[str, Any]:
    if isinstance(state, dict | list) and state:
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {k: v for key, one in items for k, v in flat(one, f"{name}.{key}").items()}
    return {name[1:]: state.full_tensor() if isinstance(state, DTensor) else state}


def save_with_accelerate(path: Path, kind: str) -> dict[str, Any]:
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import fsdp_utils

    PartialState(cpu=True)
    model, optimizer = trained(kind, 2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1 if kind == "fsdp1" else 2, state_dict_type=StateDictType.SHARDED_STATE_DICT
    )
    # An Accelerator refuses FSDP on a CPU. The functions need only these attributes of one.
    accelerator: Any = SimpleNamespace(
        process_index=dist.get_rank(), num_processes=dist.get_world_size()
    )
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, path, use_dcp=False)
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, path, use_dcp=False)
    dist.barrier()
    return whole_states(model, optimizer)


def save_as_verl(path: Path, kind: str) -> dict[str, Any]:
    """Writes the files that verl's FSDPCheckpointManager writes, as it does."""
    model, optimizer = begun(kind, 2.0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    torch.manual_seed(rank)
    extra = {
        "lr_scheduler": scheduler.state_dict(),
        "rng": {
            "cpu": torch.get_rng_state(),
            "numpy": np.random.RandomState(rank).get_state(),
            "random": random.Random(rank).getstate(),
        },
    }
    states = {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra_state": extra}
    path.mkdir(exist_ok=True)
    for name, state in states.items():
        torch.save(state, path / f"{name}_world_size_{ranks}_rank_{rank}.pt")
    dist.barrier()
    return flat({"model": states["model"], "optim": states["optim"]})


def resumed(path: Path, kind: str) -> dict[str, Any]:
    """Loads into a model on other ranks."""
    model, optimizer = trained(kind, 1)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, storage_reader=FastReader(path))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return whole_states(model, optimizer)


def resumed_verl(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Loads into a model on other ranks, and the random states if there are as many."""
    model, optimizer = begun("fsdp", 3.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # Adds to the groups.
    rngs: list[Any] = []
    rng = RankState(lambda: None, rngs.append)
    state: dict[str, Any] = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    if f"extra_state_world_size_{dist.get_world_size()}_rank_0.pt" in os.listdir(path):
        state |= {"extra_state.rng.cpu": rng, "extra_state.rng.numpy": rng}
    torch_ckpt.load(state, storage_reader=FastReader(path))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    return flat({"model": model.state_dict(), "optim": optimizer.state_dict()}), rngs


@pytest.mark.framework("accelerate")
@pytest.mark.thin("fsdp and tp")
@pytest.mark.parametrize("kind", MESHES)
def test_states_of_accelerate_load_onto_every_other_mesh(
    worlds: Worlds, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "saved"
    wanted = worlds.run(MESHES[kind], save_with_accelerate, path, kind)[0]
    assert {file.name for file in path.iterdir()} == {
        f"{name}_0_rank{rank}.bin"
        for name in ("pytorch_model_fsdp", "optimizer")
        for rank in range(MESHES[kind])
    }
    assert_same(loaded_whole(path), wanted)
    for other in MESHES:
        ranks = 2 if other == "fsdp" else MESHES[other]
        assert_same(worlds.run(ranks, resumed, path, other)[0], wanted)


@pytest.mark.framework("accelerate")
def test_states_of_fsdp1_load(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    wanted = worlds.run(4, save_with_accelerate, path, "fsdp1")[0]
    assert b"ShardedTensor" in (path / "pytorch_model_fsdp_0_rank0.bin").read_bytes()
    found = loaded_whole(path)
    tensors = {fqn for fqn, one in wanted.items() if isinstance(one, torch.Tensor)}
    assert len(tensors) == 17
    assert_same({fqn: found[fqn] for fqn in tensors}, {fqn: wanted[fqn] for fqn in tensors})
    assert_same(worlds.run(2, resumed, path, "fsdp")[0], wanted)


def test_states_of_verl_load_on_any_ranks(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    wanted = worlds.run(4, save_as_verl, path, "hsdp")[0]
    for ranks in (2, 4):
        found = worlds.run(ranks, resumed_verl, path)
        for rank, (values, rngs) in enumerate(found):
            assert_same(values, wanted)
            assert len(rngs) == (2 if ranks == 4 else 0)
            if rngs:
                torch.manual_seed(rank)
                assert torch.equal(rngs[0], torch.get_rng_state())
                assert np.array_equal(rngs[1][1], np.random.RandomState(rank).get_state()[1])
    whole = loaded_whole(path)
    assert whole["extra_state.lr_scheduler.last_epoch"] == 0
    assert whole["extra_state.rng.random.rank_00003_of_00004"] == (random.Random(3).getstate(),)


def test_the_commands_accept_them(worlds: Worlds, tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "saved"
    worlds.run(4, save_as_verl, path, "fsdp and tp")
    assert main(["inspect", str(path)]) == 0
    out = capfd.readouterr().out
    assert "verl" in out
    assert "optim.state.0.exp_avg" in out
    assert main(["verify", str(path)]) == 0
    assert main(["convert", str(path), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    assert main(["diff", str(path), str(tmp_path / "dcp")]) == 0
    model = tmp_path / "model"
    assert main(["convert", str(path), str(model), "--to=safetensors", "--prefix=model."]) == 0
    assert set(loaded_whole(model)) == {"0.weight", "0.bias", "2.weight", "2.bias", "seen"}


WEIGHT = {"model.0.weight": None}


def refusal(path: Path) -> str:
    """Why a load of a weight fails."""
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({**WEIGHT}, storage_reader=FastReader(path), no_dist=True)
    ((error, _),) = caught.value.failures.values()
    return f"{type(error).__name__}: {error}"


def test_files_that_are_missing_or_of_another_save_are_named(
    worlds: Worlds, tmp_path: Path
) -> None:
    four, two, accelerate = (tmp_path / name for name in ("four", "two", "accelerate"))
    wanted = worlds.run(4, save_as_verl, four, "fsdp")[0]
    worlds.run(2, save_as_verl, two, "fsdp")
    name = "model_world_size_4_rank_3.pt"
    accelerate.mkdir()
    for rank in range(4):
        file = four / f"model_world_size_4_rank_{rank}.pt"
        shutil.copy(file, accelerate / f"pytorch_model_fsdp_0_rank{rank}.bin")

    shutil.copy(four / name, tmp_path / name)
    (four / name).unlink()
    assert re.match(rf"NotFoundError: .*{name}, the file of rank 3, is missing", refusal(four))
    # Other values load.
    state = {"optim": {"state": {"0": {"exp_avg": torch.zeros(6, 5)}}}}
    dcp.load(state, storage_reader=FastReader(four), no_dist=True)
    assert_same(state["optim"]["state"]["0"]["exp_avg"], wanted["optim.state.0.exp_avg"])

    shutil.copy(two / "model_world_size_2_rank_0.pt", four / name)
    match = (
        r"CorruptionError: .*mesh of \[4\] in model_.*_rank_0\.pt, and of \[2\] in .*_rank_3\.pt"
    )
    assert re.match(match, refusal(four))

    (four / name).write_bytes((tmp_path / name).read_bytes()[:-100])
    assert re.match(rf"CorruptionError: .*{name}", refusal(four))

    shutil.copy(two / "model_world_size_2_rank_0.pt", four)
    assert "files of 2 ranks, such as model_world_size_2_rank_0.pt, and of 4" in refusal(four)

    (two / "model_world_size_2_rank_1.pt").rename(two / "model_world_size_2_rank_2.pt")
    assert "model_world_size_2_rank_2.pt is of a rank beyond 1" in refusal(two)

    assert_same(loaded_whole(accelerate), {k: v for k, v in wanted.items() if k in MODEL})
    (accelerate / "pytorch_model_fsdp_0_rank3.bin").unlink()
    match = r"NotFoundError: .*by pytorch_model_fsdp_0_rank0\.bin, 4 ranks .* rank 3 is missing"
    assert re.match(match, refusal(accelerate))
    (accelerate / "random_states_3.pkl").touch()
    match = r"NotFoundError: .*pytorch_model_fsdp_0_rank3\.bin, the file of rank 3, is missing"
    assert re.match(match, refusal(accelerate))
    shutil.copy(two / "model_world_size_2_rank_0.pt", accelerate)
    assert "it has files of accelerate, such as" in refusal(accelerate)
