"""A small net in every parallel layout, trained and saved, and loaded into one of other values.

What is saved and loaded here makes no step of its optimizer, nor do DCP's functions, which make one
where there is no state: DTensor takes seconds to learn where the result of each operation is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import READERS, WRITERS
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

CONFIG = {"name": "net", "betas": (0.9, 0.95), "schedule": {"warmup": 3, "kind": "cosine"}}
BEGUN_RATE = 0.5  # The learning rate before a load; training uses another.
TRAINED_RATE = 0.125


class Net(nn.Module):
    """Few parameters, of sizes that hardly any world divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 6)
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.rand(1))
        self.table = nn.Embedding(11, 3, dtype=torch.bfloat16)
        self.register_buffer("seen", torch.randint(1 << 40, (2,)))


class EvenNet(Net):
    """As FSDP over TP wants it: what both shard divides by both."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8)
        self.down = nn.Linear(8, 6)


def _fsdp1(net: nn.Module) -> nn.Module:
    options: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    net.table = FullyShardedDataParallel(net.table, **options)  # Units are of one dtype each.
    return FullyShardedDataParallel(net, **options)


def _fsdp2(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (net.up, net.table):
        fully_shard(unit, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _hsdp(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(net, mesh=mesh)


def _tp(net: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _fsdp2_tp(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    return fully_shard(_tp(net, mesh["tp"]), mesh=mesh["fsdp"])


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda net: net,
    "ddp": DistributedDataParallel,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp2_tp": _fsdp2_tp,
}


def build(kind: type[Net], layout: str, *, seed: int, rate: float) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    net = LAYOUTS[layout](kind())
    # Not foreach: some layouts mix plain tensors and DTensors.
    return net, torch.optim.AdamW(net.parameters(), lr=rate, foreach=False)


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps whose gradients depend on nothing but the parameters, and so on no layout."""
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = parameter.detach().sin()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def give_state(net: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Gives the optimizer the state of a first step, of values that depend on no layout either."""
    for parameter in net.parameters():
        first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
        local(first).copy_(local(parameter).sin())
        local(second).copy_(local(parameter).cos())
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": first,
            "exp_avg_sq": second,
        }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def full_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything unsharded, as torch gathers it."""
    model, optim = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    return {"model": model, "optim": optim}


def save_trained(
    kind: type[Net], layout: str, path: Path, writer: str, planner: Any = None
) -> dict[str, Any]:
    net, optimizer = build(kind, layout, seed=0, rate=TRAINED_RATE)
    give_state(net, optimizer)
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim, "config": CONFIG}
    dcp.save(state, storage_writer=WRITERS[writer](path), planner=planner)
    return full_state(net, optimizer)


def load_begun(
    kind: type[Net], layout: str, path: Path, reader: str, planner: Any = DefaultLoadPlanner
) -> dict[str, Any]:
    net, optimizer = build(kind, layout, seed=1, rate=BEGUN_RATE)
    give_state(net, optimizer)
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim, "config": {**CONFIG, "name": "another"}}
    # Flattening drops a ShardedTensor from the keys of a rank without a shard of it, upon which the
    # stock planner takes the checkpoint for one of torch 2.3, and misses keys.
    planner = planner(flatten_sharded_tensors=layout != "fsdp1")
    dcp.load(state, storage_reader=READERS[reader](path), planner=planner)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert state["config"] == CONFIG
    assert optimizer.param_groups[0]["lr"] == TRAINED_RATE
    return full_state(net, optimizer)
