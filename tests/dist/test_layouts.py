"""Checkpoints of every parallel layout come back bit for bit, in the same layout or another.

A trained model is saved in one layout and loaded in one (of another world, perhaps) that was begun
from other values; torch's own full state dict, gathered after the load, tells what arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds, on_ranks
from states import (
    READERS,
    WRITERS,
    assert_same,
    data_files,
    full_value,
    local,
    sharded,
    zeroed,
)
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from torch_ckpt import FastReader, FastWriter

pytestmark = pytest.mark.timeout(240)

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
ROUTES = [("fast", "fast"), ("fast", "stock"), ("stock", "fast")]


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


def full_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything unsharded, as torch gathers it."""
    model, optim = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    return {"model": model, "optim": optim}


def save_trained(
    kind: type[Net], layout: str, path: Path, writer: str, planner: Any = None
) -> dict[str, Any]:
    net, optimizer = build(kind, layout, seed=0, rate=TRAINED_RATE)
    train(net, optimizer)
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim, "config": CONFIG}
    dcp.save(state, storage_writer=WRITERS[writer](path), planner=planner)
    return full_state(net, optimizer)


def load_begun(
    kind: type[Net], layout: str, path: Path, reader: str, planner: Any = DefaultLoadPlanner
) -> dict[str, Any]:
    net, optimizer = build(kind, layout, seed=1, rate=BEGUN_RATE)
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


def check_route(
    worlds: Worlds,
    path: Path,
    saved: tuple[str, int],
    loaded: tuple[str, int],
    route: tuple[str, str],
) -> None:
    """Saves as ``saved`` (layout and world size) and loads as ``loaded``."""
    kind = EvenNet if "fsdp2_tp" in (saved[0], loaded[0]) else Net
    expected = worlds.run(saved[1], save_trained, kind, saved[0], path, route[0])
    actual = worlds.run(loaded[1], load_begun, kind, loaded[0], path, route[1])
    for each in [*actual, *expected]:
        assert_same(each, expected[0])


@pytest.mark.thin(1)
@pytest.mark.parametrize("route", ROUTES, ids="-to-".join)
@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp2_tp"])
def test_a_layout_loads_as_it_was_saved(
    worlds: Worlds, tmp_path: Path, layout: str, route: tuple[str, str]
) -> None:
    check_route(worlds, tmp_path, (layout, 4), (layout, 4), route)


@pytest.mark.thin(1)
@pytest.mark.parametrize("route", [("fast", "fast"), ("stock", "fast")], ids="-to-".join)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("fsdp2", 4), ("plain", 1)),
        (("fsdp2", 4), ("fsdp2", 2)),
        (("fsdp2", 4), ("fsdp2", 3)),
        (("fsdp2", 2), ("fsdp2", 3)),
        (("fsdp2", 2), ("fsdp2", 4)),
        (("fsdp1", 4), ("fsdp1", 3)),
        (("fsdp1", 2), ("fsdp1", 4)),
        (("fsdp1", 4), ("fsdp2", 2)),
        (("fsdp2", 3), ("fsdp1", 4)),
        (("ddp", 4), ("fsdp2", 3)),
        (("fsdp2", 4), ("ddp", 2)),
        (("hsdp", 4), ("fsdp1", 3)),
        (("fsdp2", 3), ("hsdp", 4)),
        (("tp", 4), ("tp", 3)),
        (("tp", 2), ("fsdp2", 4)),
        (("fsdp2_tp", 4), ("tp", 2)),
        (("fsdp2_tp", 4), ("plain", 1)),
        (("fsdp1", 3), ("fsdp2_tp", 4)),
    ],
    ids=lambda side: f"{side[0]}_{side[1]}",
)
def test_a_layout_loads_as_another(
    worlds: Worlds,
    tmp_path: Path,
    saved: tuple[str, int],
    loaded: tuple[str, int],
    route: tuple[str, str],
) -> None:
    check_route(worlds, tmp_path, saved, loaded, route)


BOXES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((8, 12), torch.float32),
    "uneven": ((7, 5), torch.float32),
    "fewer_than_ranks": ((2, 3), torch.bfloat16),
    "one": ((1, 1), torch.int64),
    "none": ((0, 5), torch.float32),
    "deep": ((5, 6, 7), torch.float16),
    "bytes": ((9, 13), torch.bool),
    "small_floats": ((6, 10), torch.float8_e4m3fn),
    "complex": ((3, 4), torch.complex64),
    "large": ((1031, 1033), torch.float32),
}
GRIDS: dict[str, tuple[Placement, ...]] = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "replicas": (Replicate(),),
    "rows_of_columns": (Shard(0), Shard(1)),
    "rows_of_rows": (Shard(0), Shard(0)),
    "replicated_columns": (Replicate(), Shard(1)),
    "row_shards_replicated": (Shard(0), Replicate()),
}


def grid_mesh(grid: str) -> DeviceMesh:
    world = dist.get_world_size()
    return init_device_mesh("cpu", (2, world // 2) if len(GRIDS[grid]) == 2 else (world,))


def placed_boxes(grid: str) -> dict[str, DTensor]:
    mesh = grid_mesh(grid)
    return {name: sharded(full_value(name, *box), mesh, GRIDS[grid]) for name, box in BOXES.items()}


def save_boxes(grid: str, path: Path, writer: str) -> None:
    dcp.save(placed_boxes(grid), storage_writer=WRITERS[writer](path))


def load_whole(path: Path, reader: str) -> None:
    """Loads plain tensors, each rank for itself."""
    state = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in BOXES.items()}
    dcp.load(state, storage_reader=READERS[reader](path), no_dist=True)
    assert_same(state, {name: full_value(name, *box) for name, box in BOXES.items()})


@pytest.mark.parametrize("route", ROUTES, ids="-to-".join)
def test_a_sharded_checkpoint_loads_whole_without_a_process_group(
    worlds: Worlds, tmp_path: Path, route: tuple[str, str]
) -> None:
    worlds.run(4, save_boxes, "rows_of_columns", tmp_path, route[0])
    load_whole(tmp_path, route[1])


def test_ranks_of_a_group_load_whole_each_for_itself(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(4, save_boxes, "columns", tmp_path, "fast")
    worlds.run(2, load_whole, tmp_path, "fast")


def own_state(rank: int) -> dict[str, Any]:
    """A key of this rank only, a nested object of this rank only, and one that all share."""
    own = {"tensor": full_value(f"own {rank}", (3 + rank,), torch.float32), "note": f"of {rank}"}
    return {"shared": full_value("shared", (5,), torch.int32), f"rank_{rank}": own}


def save_own(path: Path, writer: str) -> None:
    dcp.save(own_state(dist.get_rank()), storage_writer=WRITERS[writer](path))


def load_own(path: Path, reader: str, offset: int) -> None:
    """Loads what the rank ``offset`` further on has saved."""
    expected = own_state((dist.get_rank() + offset) % dist.get_world_size())
    state = zeroed(expected)
    dcp.load(state, storage_reader=READERS[reader](path))
    assert_same(state, expected)


@pytest.mark.parametrize("route", ROUTES, ids="-to-".join)
def test_keys_of_single_ranks_load_on_those_ranks_and_on_others(
    worlds: Worlds, tmp_path: Path, route: tuple[str, str]
) -> None:
    worlds.run(4, save_own, tmp_path, route[0])
    worlds.run(4, load_own, tmp_path, route[1], 0)
    worlds.run(4, load_own, tmp_path, route[1], 1)


def save_one_tensor(path: Path) -> None:
    state = {"only": full_value("only", (3,), torch.float32)}
    dcp.save(state, storage_writer=FastWriter(path))


def load_one_tensor(path: Path) -> None:
    state = {"only": torch.zeros(3)}
    dcp.load(state, storage_reader=FastReader(path))
    assert_same(state, {"only": full_value("only", (3,), torch.float32)})


def test_ranks_with_nothing_to_write_do_no_harm(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(4, save_one_tensor, tmp_path)
    for world_size in (4, 2):
        worlds.run(world_size, load_one_tensor, tmp_path)


def half_state(half: int, mesh: DeviceMesh, *, zero: bool) -> dict[str, Any]:
    full = full_value(f"half {half}", (7, 5), torch.float32)
    tensor = torch.zeros_like(full) if zero else full
    return {"weight": sharded(tensor, mesh, (Shard(0),)), "half": None if zero else half}


@on_ranks(4)
def test_groups_save_and_load_apart(path: Path) -> None:
    """Two groups of two save at once, each for itself; then each loads what the other saved."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = dist.get_rank() % 2
    mesh = DeviceMesh.from_group(groups[half], "cpu")

    saved = half_state(half, mesh, zero=False)
    dcp.save(saved, storage_writer=FastWriter(path / f"{half}"), process_group=groups[half])
    dist.barrier()  # The other half's commit.

    loaded = half_state(1 - half, mesh, zero=True)
    reader = FastReader(path / f"{1 - half}")
    dcp.load(loaded, storage_reader=reader, process_group=groups[half])
    assert_same(local(loaded), local(half_state(1 - half, mesh, zero=False)))
    assert {name[:4] for name in data_files(path / f"{half}")} == {"__0_", "__1_"}
