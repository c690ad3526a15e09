"""Directories that the real torch_checkpointing has written load onto any ranks, bit for bit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from states import assert_same, full_value, loaded_whole, sharded
from support.process_io import nbytes_read_by
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import torch_ckpt
from torch_ckpt import FastReader, RankState
from torch_ckpt.cli.main import main
from torch_ckpt.errors import MismatchError, NotFoundError

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.framework("torch_checkpointing"),
]

Placements = tuple[Placement, ...]

# Ranks, sizes of the mesh, and the placements of each tensor. Some ranks have no elements.
MESHES: dict[str, tuple[int, tuple[int, ...], dict[str, Placements]]] = {
    "one rank": (1, (1,), {"up": (Shard(0),), "down": (Shard(1),), "norm": (Replicate(),)}),
    "fsdp": (3, (3,), {"up": (Shard(0),), "down": (Shard(1),), "norm": (Shard(0),)}),
    "hsdp": (
        4,
        (2, 2),
        {
            "up": (Replicate(), Shard(0)),
            "down": (Replicate(), Shard(1)),
            "norm": (Replicate(), Replicate()),
        },
    ),
    "fsdp and tp": (
        4,
        (2, 2),
        {
            "up": (_StridedShard(0, split_factor=2), Shard(0)),
            "down": (Shard(0), Shard(1)),
            "norm": (Shard(0), Replicate()),
        },
    ),
}
SHAPES = {"up": (8, 6), "down": (5, 9), "norm": (2,)}
STEP = torch.tensor(3.0)
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.95), "params": ["up"]}


def full_model() -> dict[str, torch.Tensor]:
    return {name: full_value(name, shape, torch.float32) for name, shape in SHAPES.items()}


def sharded_model(mesh: DeviceMesh, placements: dict[str, Placements]) -> dict[str, torch.Tensor]:
    return {
        name: sharded(full, mesh, placements[name], as_view=False)
        for name, full in full_model().items()
    }


def gathered(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """What ``DefaultMetadataManager`` gathers, which needs CUDA for it."""
    found = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, process_group)
    return dict(enumerate(found))


def save(path: Path, kind: str, reshards: bool, layouts: dict[str, tuple[str, str]]) -> None:
    from torch_checkpointing import checkpoint_layout
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    _, sizes, placements = MESHES[kind]
    mesh = init_device_mesh("cpu", sizes)
    model = sharded_model(mesh, placements)
    state = {
        "model": model,
        "optimizer": {
            "state": {"up": {"exp_avg": model["up"], "step": STEP}},
            "param_groups": [OPTIONS],
        },
        "step": 7,
        "rng": torch.arange(4, dtype=torch.uint8) + dist.get_rank(),
    }
    items = {}
    for name in {**state, **layouts}:
        layout = None
        if name in layouts:
            file, form = layouts[name]
            serialization = getattr(checkpoint_layout, f"{form}Serialization")()
            layout = checkpoint_layout.LayoutInfo(file, serialization)
        is_sharded = name in ("model", "optimizer")
        resharder = DefaultResharder() if reshards and is_sharded else None
        items[name] = ItemSpec(layout=layout, resharder=resharder)
        if name not in state:
            state[name] = b"\1\2" if form == "Raw" else {"a": [1, None], "b": "text"}
    config = CheckpointManager.Config.with_sync_save()
    config.items = items
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    with mock.patch.object(DefaultMetadataManager, "_all_gather_pickled_data", gathered):
        CheckpointManager(config).save(str(path), state)
    dist.barrier()


def load_sharded(path: Path, kind: str) -> None:
    """Loads onto these placements, and compares with what each rank must have."""
    _, sizes, placements = MESHES[kind]
    mesh = init_device_mesh("cpu", sizes)
    model = {name: torch.zeros_like(one) for name, one in sharded_model(mesh, placements).items()}
    exp_avg = torch.zeros_like(model["up"])
    state = {
        "model": model,
        "optimizer": {"state": {"up": {"exp_avg": exp_avg, "step": torch.zeros(())}}},
        "step": 0,
    }
    dcp.load(state, storage_reader=FastReader(path))
    wanted = sharded_model(mesh, placements)
    assert_same(model, wanted)
    assert_same(exp_avg, wanted["up"])
    assert state["optimizer"]["state"]["up"]["step"] == STEP
    assert state["step"] == 7


def loaded_unpacked(path: Path) -> dict[str, Any]:
    state = loaded_whole(path)
    # As a RankState stores it, in a tuple.
    return {fqn: one[0] if fqn.startswith("rng.rank_") else one for fqn, one in state.items()}


def whole(ranks: int) -> dict[str, Any]:
    """All values of a checkpoint, by name."""
    full = full_model()
    rngs = [torch.arange(4, dtype=torch.uint8) + rank for rank in range(ranks)]
    names = [f"rng.rank_{rank:05}_of_{ranks:05}" for rank in range(ranks)]
    return {
        **{f"model.{name}": tensor for name, tensor in full.items()},
        "optimizer.state.up.exp_avg": full["up"],
        "optimizer.state.up.step": STEP,
        **{f"optimizer.param_groups.0.{name}": value for name, value in OPTIONS.items()},
        "step": 7,
        **(dict(zip(names, rngs, strict=True)) if ranks > 1 else {"rng": rngs[0]}),
    }


@pytest.mark.thin(1)
@pytest.mark.parametrize("reshards", [True, False], ids=["resharder", "no resharder"])
@pytest.mark.parametrize("kind", MESHES)
def test_every_layout_loads_onto_every_other(
    worlds: Worlds, tmp_path: Path, kind: str, reshards: bool
) -> None:
    path, ranks = tmp_path / "saved", MESHES[kind][0]
    worlds.run(ranks, save, path, kind, reshards, {})
    assert (path / "metadata.pkl").exists() == reshards
    assert_same(loaded_unpacked(path), whole(ranks))
    for other, (count, *_) in MESHES.items():
        if other != kind:
            worlds.run(count, load_sharded, path, other)


@pytest.mark.parametrize("folder", ["", "of_rank_{rank}/"])
def test_items_in_other_files_and_formats(worlds: Worlds, tmp_path: Path, folder: str) -> None:
    path = tmp_path / "saved"
    layouts = {
        "model": (f"{folder}weights_{{rank}}.safetensors", "Safetensors"),
        "optimizer": (f"{folder}optimizer-{{rank}}.pt", "Torch"),
        "config": ("config_{rank}.json", "Json"),
    }
    worlds.run(4, save, path, "fsdp and tp", True, layouts)
    found = loaded_unpacked(path)
    assert found.pop("config") == {"a": [1, None], "b": "text"}
    assert_same(found, whole(4))
    worlds.run(3, load_sharded, path, "fsdp")


def load_rng(path: Path) -> torch.Tensor:
    found: list[torch.Tensor] = []
    state = {"rng": RankState(lambda: torch.zeros(4), found.append)}
    torch_ckpt.load(state, storage_reader=FastReader(path))
    return found[0]


@pytest.mark.small
def test_a_state_of_each_rank_is_loaded_by_its_rank(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(3, save, tmp_path / "saved", "fsdp", True, {})
    found = worlds.run(3, load_rng, tmp_path / "saved")
    for rank, rng in enumerate(found):
        assert torch.equal(rng, torch.arange(4, dtype=torch.uint8) + rank)


def test_the_commands_accept_it(worlds: Worlds, tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "saved"
    worlds.run(4, save, path, "hsdp", True, {})
    assert main(["inspect", str(path)]) == 0
    out = capfd.readouterr().out
    assert "torch_checkpointing" in out
    assert "optimizer.state.up.exp_avg" in out
    assert main(["verify", str(path)]) == 0
    assert main(["convert", str(path), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    assert main(["diff", str(path), str(tmp_path / "dcp")]) == 0
    assert (
        main(["convert", str(path), str(tmp_path / "m"), "--to=safetensors", "--prefix=model."])
        == 0
    )


def test_the_metadata_of_an_earlier_version_is_read(worlds: Worlds, tmp_path: Path) -> None:
    from torch_checkpointing.distributed_metadata import DistributedMetadata

    path = tmp_path / "saved"
    worlds.run(3, save, path, "fsdp", True, {})
    newer = pickle.loads((path / "metadata.pkl").read_bytes())
    older: dict[str, Any] = {"world_size": 3, "metadata": {}, "rank_to_layout_info_mappings": {}}
    for item, facts in newer["metadata"].items():
        for at, groups in facts["nested_path_to_metadata"].items():
            older["metadata"][json.dumps([item, *json.loads(at)])] = groups
        for rank, layout in facts["rank_to_layout_info"].items():
            older["rank_to_layout_info_mappings"].setdefault(str(rank), {})[item] = layout
    # The library itself takes it for the same.
    assert DistributedMetadata.from_dict(older) == DistributedMetadata.from_dict(newer)
    (path / "metadata.pkl").write_bytes(pickle.dumps(older))
    assert_same(loaded_unpacked(path), whole(3))


def test_the_file_of_a_rank_is_missing(worlds: Worlds, tmp_path: Path) -> None:
    for reshards in (True, False):
        path = tmp_path / f"{reshards}"
        worlds.run(3, save, path, "fsdp", reshards, {})
        (path / "model_1.pt").unlink()
        match = r"model_1\.pt, the file of rank 1" if reshards else r"'model\.up' .* 30 of them"
        kind = NotFoundError if reshards else MismatchError
        with pytest.raises(dcp.CheckpointException, match=rf"{kind.__name__}.*{match}"):
            dcp.load({"model.up": None}, storage_reader=FastReader(path), no_dist=True)


def save_odd(path: Path) -> None:
    """DTensors whose shards make no whole tensor, beside a value that all ranks have."""
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    alone = DeviceMesh("cpu", [rank])
    ones = torch.ones(2) + rank
    state = {
        "alone": DTensor.from_local(ones, alone, [Shard(0)], run_check=False),
        "tuple": (DTensor.from_local(ones, mesh, [Shard(0)], run_check=False), 1),
        "step": 7,
    }
    path.mkdir(exist_ok=True)
    torch.save(state, path / f"model_{rank}.pt")
    partial = DTensor.from_local(ones, mesh, [Partial()], run_check=False)
    (path / "partial").mkdir(exist_ok=True)
    torch.save({"p": partial}, path / "partial" / f"model_{rank}.pt")
    dist.barrier()


def test_shards_that_make_no_tensor_are_not_lost(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    worlds.run(2, save_odd, path)
    state: dict[str, Any] = {f"model.alone.rank_0000{rank}_of_00002": None for rank in range(2)}
    dcp.load(state, storage_reader=FastReader(path), no_dist=True)
    for rank, (own,) in enumerate(state.values()):
        assert own.tolist() == [1.0 + rank] * 2
    state = {"model": {"tuple": None, "step": 0}}
    with pytest.raises(dcp.CheckpointException, match="it is a tuple that contains a DTensor"):
        dcp.load(state, storage_reader=FastReader(path), no_dist=True)
    state["model"].pop("tuple")
    dcp.load(state, storage_reader=FastReader(path), no_dist=True)
    assert state["model"]["step"] == 7
    match = r"UnsupportedError.*'model\.p' .*: it has the placement P"
    with pytest.raises(dcp.CheckpointException, match=match):
        dcp.load({"model.p": None}, storage_reader=FastReader(path / "partial"), no_dist=True)


WIDE = (4096, 1024)  # 16 MiB.


def save_wide(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    path.mkdir(exist_ok=True)
    tensor = sharded(full_value("wide", WIDE, torch.float32), mesh, (Shard(0),), as_view=False)
    torch.save({"wide": tensor}, path / f"model_{dist.get_rank()}.pt")
    dist.barrier()


def read_quarter(path: Path) -> float:
    """The part of all bytes that this process reads for a quarter of the model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = full_value("wide", WIDE, torch.float32)
    state = {"model": {"wide": torch.zeros_like(sharded(full, mesh, (Shard(0),)))}}
    read = nbytes_read_by(dcp.load, state, storage_reader=FastReader(path))
    assert_same(state["model"]["wide"], sharded(full, mesh, (Shard(0),)))
    return read / full.nbytes


def test_a_rank_reads_what_it_needs(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save_wide, tmp_path / "saved")
    assert max(worlds.run(4, read_quarter, tmp_path / "saved")) < 0.27
