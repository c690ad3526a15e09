"""FSDP1 state dicts of flat shards: the same checkpoints as FSDP1's own, without all-gather."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds, on_ranks
from states import READERS, WRITERS, assert_same
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp
from trained_nets import BEGUN_RATE, CONFIG, TRAINED_RATE, Net, full_state, load_begun, train

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastSavePlanner, FlatShard
from torch_ckpt.errors import MismatchError, UnsupportedError

pytestmark = pytest.mark.timeout(240)


class TiedNet(Net):
    """With tied weights, extra state, a parameter that does not train, and one without a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 7, bias=False)
        self.tail = nn.Linear(6, 7, bias=False)
        self.tail.weight = self.head.weight
        self.extra = Extra()


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.note = "begun"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


KINDS: dict[str, dict[str, Any]] = {
    "orig": {"use_orig_params": True},
    "flat": {"use_orig_params": False},
    "grad_op": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
    "no_shard_flat": {"use_orig_params": False, "sharding_strategy": ShardingStrategy.NO_SHARD},
}


def build(kind: str, *, seed: int, rate: float) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    net = TiedNet()
    options = {**KINDS.get(kind, KINDS["orig"]), "device_id": torch.device("cpu")}
    if kind == "hybrid":
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    net.table = FullyShardedDataParallel(net.table, **options)
    wrapped = FullyShardedDataParallel(net, **options)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=rate, foreach=False)


def save_flat(kind: str, path: Path, writer: str, planner: type[DefaultSavePlanner]) -> Any:
    net, optimizer = build(kind, seed=0, rate=TRAINED_RATE)
    train(net, optimizer)
    net.module.extra.note = "trained"
    model, optim = torch_ckpt.fsdp1_state_dict(net, optimizer)
    state = {"model": model, "optim": optim, "config": CONFIG}
    dcp.save(state, storage_writer=WRITERS[writer](path), planner=planner())
    return full_state(net, optimizer)


def load_flat(kind: str, path: Path, reader: str, planner: type[DefaultLoadPlanner]) -> Any:
    net, optimizer = build(kind, seed=1, rate=BEGUN_RATE)
    model, optim = torch_ckpt.fsdp1_state_dict(net, optimizer)
    dcp.load(
        {"model": model, "optim": optim},
        storage_reader=READERS[reader](path),
        planner=planner(),
    )
    torch_ckpt.load_fsdp1_state_dict(net, optimizer, model, optim)
    assert optimizer.param_groups[0]["lr"] == TRAINED_RATE
    assert net.module.extra.note == "trained"
    return full_state(net, optimizer)


def save_own(kind: str, path: Path) -> Any:
    """Saves FSDP1's own sharded state dicts."""
    net, optimizer = build(kind, seed=0, rate=TRAINED_RATE)
    train(net, optimizer)
    net.module.extra.note = "trained"
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim}, storage_writer=WRITERS["stock"](path))
    return full_state(net, optimizer)


def in_order(full: dict[str, Any]) -> dict[str, Any]:
    """A full state whose groups list their parameters by name; the layouts have other orders."""
    for group in full["optim"]["param_groups"]:
        group["params"].sort()
    return full


@pytest.mark.thin("hybrid", "flat", "orig")
@pytest.mark.parametrize("kind", [*KINDS, "hybrid"])
def test_flat_shards_save_and_load_what_fsdp1_gathers(
    worlds: Worlds, tmp_path: Path, kind: str
) -> None:
    expected = worlds.run(4, save_flat, kind, tmp_path / "flat", "fast", FastSavePlanner)
    own = worlds.run(4, save_own, kind, tmp_path / "own")
    loaded = worlds.run(4, load_flat, kind, tmp_path / "flat", "fast", FastLoadPlanner)
    from_own = worlds.run(4, load_flat, kind, tmp_path / "own", "fast", FastLoadPlanner)
    for each in [*own, *expected, *loaded, *from_own]:
        assert_same(each, expected[0])
    names = [
        dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata
        for name in ("flat", "own")
    ]
    assert {n for n in names[0] if not n.startswith("config")} == set(names[1])


@pytest.mark.thin(1)
@pytest.mark.parametrize("kind", ["orig", "flat"])
@pytest.mark.parametrize("sizes", [(3, 2), (2, 4)])
def test_flat_shards_load_on_another_number_of_ranks(
    worlds: Worlds, tmp_path: Path, kind: str, sizes: tuple[int, int]
) -> None:
    other = "flat" if kind == "orig" else "orig"
    expected = worlds.run(sizes[0], save_flat, kind, tmp_path, "stock", DefaultSavePlanner)
    loaded = worlds.run(sizes[1], load_flat, other, tmp_path, "stock", DefaultLoadPlanner)
    for each in [*expected, *loaded]:
        assert_same(in_order(each), in_order(expected[0]))


@pytest.mark.thin("plain", "fsdp2")
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_flat_shards_load_into_other_layouts(worlds: Worlds, tmp_path: Path, layout: str) -> None:
    expected = worlds.run(3, save_flat, "flat", tmp_path, "fast", FastSavePlanner)
    size = 1 if layout == "plain" else 2
    loaded = worlds.run(size, load_begun, TiedNet, layout, tmp_path, "stock")
    for each in loaded:
        assert_same(in_order(each), in_order(expected[0]))


COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "broadcast",
)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["orig", "flat"])
def test_the_state_dicts_need_no_communication(kind: str) -> None:
    net, optimizer = build(kind, seed=0, rate=TRAINED_RATE)
    train(net, optimizer)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("communicates")

    with pytest.MonkeyPatch.context() as patch:
        for name in (*COLLECTIVES, "broadcast_object_list", "all_gather_single"):
            patch.setattr(dist, name, refuse, raising=False)
        torch_ckpt.fsdp1_state_dict(net, optimizer)
        with pytest.raises(AssertionError, match="communicates"):
            get_state_dict(net, optimizer)


@on_ranks(2)
def test_training_continues_after_a_flat_state_dict() -> None:
    nets = [build("orig", seed=0, rate=TRAINED_RATE) for _ in range(2)]
    for number, (net, optimizer) in enumerate(nets):
        train(net, optimizer)
        if number:
            torch_ckpt.fsdp1_state_dict(net, optimizer)
        train(net, optimizer)
    assert_same(full_state(*nets[0]), full_state(*nets[1]))
    assert fsdp._optim_state_dict.__module__.startswith("torch.")


@on_ranks(2)
def test_errors_name_the_parameter() -> None:
    with pytest.raises(ValueError, match="no FullyShardedDataParallel module"):
        torch_ckpt.fsdp1_state_dict(Net())
    net, optimizer = build("orig", seed=0, rate=TRAINED_RATE)
    model, optim = torch_ckpt.fsdp1_state_dict(net, optimizer)
    lacking = {name: value for name, value in model.items() if name != "up.weight"}
    with pytest.raises(MismatchError, match=r"'.*up\.weight'.*the state dict has None"):
        torch_ckpt.load_fsdp1_state_dict(net, optimizer, lacking, optim)
    with pytest.raises(MismatchError, match="no group lists it"):
        torch_ckpt.load_fsdp1_state_dict(net, optimizer, model, {**optim, "param_groups": []})
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    wrapped = FullyShardedDataParallel(conv, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"'weight'.*not contiguous"):
        torch_ckpt.fsdp1_state_dict(wrapped)


@on_ranks(2)
def test_shards_refer_to_the_memory_of_training() -> None:
    net, optimizer = build("flat", seed=0, rate=TRAINED_RATE)
    before, _ = torch_ckpt.fsdp1_state_dict(net, optimizer)
    assert all(isinstance(before[name], FlatShard) for name in ("up.weight", "table.weight"))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(3)
    assert all((v.local == 3).all() for v in before.values() if isinstance(v, FlatShard))


@on_ranks(2)
def test_step_counters_are_those_of_ranks_that_train_the_parameter(path: Path) -> None:
    def load(net: nn.Module, optimizer: Any) -> None:
        model, optim = torch_ckpt.fsdp1_state_dict(net, optimizer)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=path / "1")
        torch_ckpt.load_fsdp1_state_dict(net, optimizer, model, optim)

    net, optimizer = build("orig", seed=0, rate=TRAINED_RATE)
    optimizer.add_param_group({"params": []})
    train(net, optimizer)
    model, optim = torch_ckpt.fsdp1_state_dict(net, optimizer)
    with torch_ckpt.installed():
        dcp.save({"model": model, "optim": optim}, checkpoint_id=path / "1")
        net, optimizer = build("orig", seed=1, rate=BEGUN_RATE)
        optimizer.add_param_group({"params": []})
        load(net, optimizer)
        train(net, optimizer)
        model, optim = torch_ckpt.fsdp1_state_dict(net, optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=path / "2")
        for values in optim["state"].values():
            if not values["exp_avg"].local.numel() and values["exp_avg"].numel():
                assert "step" not in values
        _, own = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank():
            return
        steps = {f"optim.state.{fqn}.step": each["step"] for fqn, each in own["state"].items()}
        stored = {fqn: torch.tensor(-1.0) for fqn in steps}
        torch_ckpt.load(stored, checkpoint_id=path / "2", no_dist=True)
    assert len(set(map(float, steps.values()))) == 1
    assert stored == steps
