"""``torch-ckpt convert --to torch_checkpointing`` and models: the real library loads both."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Worlds
from safetensors.torch import save_file
from states import assert_same, full_value, loaded_whole, sharded
from support.tensors import DTYPES, random_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import torch_ckpt
from torch_ckpt import FastReader, RankState, SafetensorsWriter
from torch_ckpt.cli.main import main
from torch_ckpt.filesystems.location import Location
from torch_ckpt.frameworks.torch_checkpointing.item_files import metadata_at

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.framework("torch_checkpointing"),
]

Placements = dict[str, tuple[Placement, ...]]
SHAPES = {"up": (8, 6), "down": (5, 9), "norm": (2,)}
MESHES: dict[str, tuple[int, tuple[int, ...], Placements]] = {
    "plain": (1, (), {}),
    "one rank": (1, (1,), {"up": (Shard(0),), "down": (Shard(1),), "norm": (Replicate(),)}),
    "fsdp": (3, (3,), {"up": (Shard(0),), "down": (Shard(1),), "norm": (Shard(0),)}),
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
GROUPS = [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["up"]}]


def whole(name: str) -> torch.Tensor:
    return full_value(name, SHAPES[name], torch.float32)


def state_on(kind: str, *, zeroed: bool = False) -> dict[str, Any]:
    """The state of this rank, with the names of torchtitan and of ``get_state_dict``."""
    _, sizes, placements = MESHES[kind]
    mesh = init_device_mesh("cpu", sizes) if sizes else None

    def tensor(name: str) -> torch.Tensor:
        made = whole(name)
        if mesh is not None:
            made = sharded(made, mesh, placements[name], as_view=False)
        return torch.zeros_like(made) if zeroed else made

    step = torch.tensor(0.0 if zeroed else 3.0)
    return {
        "model": {name: tensor(name) for name in SHAPES},
        "optimizer": {
            "state": {"up": {"exp_avg": tensor("up"), "step": step}},
            "param_groups": [{**GROUPS[0], "lr": 9.0}] if zeroed else GROUPS,
        },
        "step": 0 if zeroed else 7,
    }


def save(path: Path, kind: str) -> None:
    rng = RankState(lambda: torch.arange(4) + dist.get_rank(), print)
    torch_ckpt.save({**state_on(kind), "rng": rng}, checkpoint_id=path)


def manager_of(items: dict[str, bool]) -> Any:
    """The library's manager of items, each with a resharder or without one."""
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    config.items = {
        name: ItemSpec(resharder=DefaultResharder() if reshards else None)
        for name, reshards in items.items()
    }
    return CheckpointManager(config)


def load(path: Path, kind: str) -> None:
    """Loads by the library onto these placements, and compares with what this rank must have."""
    wanted, into = state_on(kind), state_on(kind, zeroed=True)
    manager = manager_of({"model": True, "optimizer": True, "step": False, "rng": False})
    found = manager.load(str(path), into={**into, "rng": None}, strict=True)
    for item in ("model", "optimizer"):
        # The resharder loads tensors only.
        wanted[item].pop("param_groups", None)
        into[item].pop("param_groups", None)
    assert_same(into, {**wanted, "step": 0})
    assert found["step"] == 7
    rank = dist.get_rank() if dist.is_initialized() else 0
    assert found["rng"].tolist() == [rank, rank + 1, rank + 2, rank + 3]


@pytest.mark.thin(1)
@pytest.mark.parametrize("to", MESHES)
@pytest.mark.parametrize("kind", ["fsdp", "fsdp and tp"])
def test_the_library_loads_a_training_onto_any_ranks(
    worlds: Worlds, tmp_path: Path, kind: str, to: str
) -> None:
    ranks = MESHES[kind][0]
    worlds.run(ranks, save, tmp_path / "dcp", kind)
    arguments = ["convert", str(tmp_path / "dcp"), str(tmp_path / "items")]
    assert main([*arguments, "--to", "torch_checkpointing"]) == 0
    assert main(["diff", str(tmp_path / "dcp"), str(tmp_path / "items")]) == 0
    count = MESHES[to][0]
    if count > ranks:  # There is no state of the last rank.
        (tmp_path / "items" / f"rng_{ranks}.pt").write_bytes(_saved(torch.arange(4) + ranks))
        (tmp_path / "items" / f"step_{ranks}.pt").write_bytes(_saved(7))
    worlds.run(count, load, tmp_path / "items", to)


def _saved(value: Any) -> bytes:
    import io

    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.small
def test_the_library_loads_every_dtype_of_one_rank_without_a_resharder(tmp_path: Path) -> None:
    model = {str(dtype): random_tensor((3, 4), dtype) for dtype in DTYPES}
    model |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(3.5)}
    torch_ckpt.save({"model": model, "step": 7}, checkpoint_id=tmp_path / "dcp")
    arguments = ["convert", str(tmp_path / "dcp"), str(tmp_path / "items")]
    assert main([*arguments, "--to", "torch_checkpointing"]) == 0
    found = manager_of({"model": False, "step": False}).load(str(tmp_path / "items"))
    assert_same(found, {"model": model, "step": 7})


def load_replicated(path: Path, dtypes: list[str]) -> None:
    into = {name: torch.zeros(3, 4, dtype=getattr(torch, name)) for name in dtypes}
    into |= {"empty": torch.empty(0, 4), "scalar": torch.zeros(())}
    manager = manager_of({"model": True, "step": False})
    found = manager.load(str(path), into={"model": into, "step": 0}, strict=True)
    assert found["step"] == 7
    assert_same(into, {key: value for key, value in torch.load(path / "model_0.pt").items()})


def test_the_library_loads_every_dtype_onto_several_ranks(worlds: Worlds, tmp_path: Path) -> None:
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    model = {name: random_tensor((3, 4), getattr(torch, name)) for name in names}
    model |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(3.5)}
    torch_ckpt.save({"model": model, "step": 7}, checkpoint_id=tmp_path / "dcp")
    arguments = ["convert", str(tmp_path / "dcp"), str(tmp_path / "items")]
    assert main([*arguments, "--to", "torch_checkpointing", "--ranks", "2"]) == 0
    worlds.run(2, load_replicated, tmp_path / "items", names)
    assert_same(torch.load(tmp_path / "items" / "model_0.pt"), model)


def test_the_metadata_is_what_the_library_writes(tmp_path: Path) -> None:
    from torch_checkpointing.distributed_metadata import DistributedMetadata

    state = {"model": {"w": torch.ones(3, 4), "s": torch.tensor(1)}}
    manager = manager_of({"model": True})
    manager.save(str(tmp_path / "theirs"), state)
    torch_ckpt.save(state, checkpoint_id=tmp_path / "dcp")
    arguments = ["convert", str(tmp_path / "dcp"), str(tmp_path / "ours")]
    assert main([*arguments, "--to", "torch_checkpointing"]) == 0
    theirs, ours = (
        DistributedMetadata.from_dict(pickle.loads((tmp_path / n / "metadata.pkl").read_bytes()))
        for n in ("theirs", "ours")
    )
    assert ours == theirs
    names = [sorted(path.name for path in (tmp_path / n).iterdir()) for n in ("theirs", "ours")]
    assert set(names[1]) <= set(names[0])


# ---- Models, which the library loads without a conversion ----


def model_on(kind: str, *, scale: float) -> dict[str, torch.Tensor]:
    """A model of DTensors on the placements of a kind; each value times ``scale``."""
    _, sizes, placements = MESHES[kind]
    mesh = init_device_mesh("cpu", sizes)
    return {
        name: sharded(whole(name) * scale, mesh, placements[name], as_view=False) for name in SHAPES
    }


def save_model(path: Path, kind: str, max_shard_nbytes: int, in_background: bool) -> None:
    for scale in (3.0, 1.0):  # The second model replaces the first one.
        model = model_on(kind, scale=scale)
        writer = SafetensorsWriter(path, max_shard_nbytes=max_shard_nbytes)
        if in_background:
            future = torch_ckpt.async_save(model, storage_writer=writer)
            for tensor in model.values():
                tensor.mul_(7)
            future.result()
        else:
            torch_ckpt.save(model, storage_writer=writer)


def load_model(path: Path, kind: str) -> None:
    from torch_checkpointing.hf.metadata import HuggingFaceSafetensorsDistributedMetadataFormat

    model = model_on(kind, scale=0.0)
    manager_of({"model": True}).load(
        str(path),
        into={"model": model},
        strict=True,
        metadata_format=HuggingFaceSafetensorsDistributedMetadataFormat,
    )
    assert_same(model, model_on(kind, scale=1.0))


@pytest.mark.thin(2)
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("max_shard_nbytes", [100, 5_000_000_000])
@pytest.mark.parametrize("to", ["one rank", "fsdp", "fsdp and tp"])
@pytest.mark.parametrize("kind", ["fsdp", "fsdp and tp"])
def test_the_library_loads_what_safetensors_writer_saves_onto_any_ranks(
    worlds: Worlds, tmp_path: Path, kind: str, to: str, max_shard_nbytes: int, in_background: bool
) -> None:
    worlds.run(MESHES[kind][0], save_model, tmp_path, kind, max_shard_nbytes, in_background)
    worlds.run(MESHES[to][0], load_model, tmp_path, to)


# ---- Other sources, and errors ----


def test_a_model_of_safetensors_is_the_item_model(tmp_path: Path) -> None:
    model = {"up.weight": torch.rand(3, 4), "up.bias": torch.rand(3).bfloat16()}
    save_file(model, tmp_path / "model.safetensors")
    arguments = ["convert", str(tmp_path / "model.safetensors"), str(tmp_path / "items")]
    assert main([*arguments, "--to", "torch_checkpointing"]) == 0
    assert_same(torch.load(tmp_path / "items" / "model_0.pt"), model)
    assert_same(loaded_whole(tmp_path / "items"), {f"model.{n}": t for n, t in model.items()})


def test_a_directory_of_the_library_is_written_for_other_ranks(tmp_path: Path) -> None:
    state = {"model": {"w": torch.rand(3, 4)}, "step": 7, "list": [1, {"a": torch.rand(2)}]}
    manager_of({"model": True}).save(str(tmp_path / "theirs"), state)
    arguments = ["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]
    assert main([*arguments, "--to", "torch_checkpointing", "--ranks", "3"]) == 0
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    steps = [f"step_{rank}.pt" for rank in range(3)]
    assert names == sorted(["list_0.pt", "metadata.pkl", "model_0.pt", *steps])
    assert main(["diff", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert main(["verify", str(tmp_path / "ours")]) == 0


def test_states_of_ranks_need_their_number(
    worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds.run(3, save, tmp_path / "dcp", "fsdp")
    arguments = ["convert", str(tmp_path / "dcp"), str(tmp_path / "items")]
    assert main([*arguments, "--to", "torch_checkpointing", "--ranks", "2"]) == 3
    assert "for 2 ranks: 'rng' is the state of each of 3 ranks" in capsys.readouterr().err
    assert not (tmp_path / "items").exists()
    assert main([*arguments, "--to", "dcp", "--ranks", "3"]) == 3
    assert "cannot write dcp for 3 ranks: any ranks load it" in capsys.readouterr().err


def test_a_name_that_is_no_name_of_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_ckpt.save({"a/b": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp")
    arguments = ["convert", str(tmp_path / "dcp"), str(tmp_path / "items")]
    assert main([*arguments, "--to", "torch_checkpointing"]) == 3
    assert "'a/b' cannot be the name of a file" in capsys.readouterr().err
    assert not (tmp_path / "items").exists()


def test_only_such_a_directory_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch_ckpt.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp")
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    arguments = ["--to", "torch_checkpointing", "--overwrite"]
    assert main(["convert", str(tmp_path / "dcp"), str(other), *arguments]) == 3
    assert "it has no metadata.pkl" in capsys.readouterr().err
    assert (other / "notes.txt").read_text() == "mine"
    items = tmp_path / "items"
    for _ in range(2):
        assert main(["convert", str(tmp_path / "dcp"), str(items), *arguments]) == 0
    assert main(["convert", str(items), str(items), *arguments]) == 3
    assert "the source is in it" in capsys.readouterr().err
    assert main(["convert", str(items), str(items), "--to", "dcp"]) == 3
    assert "it has a checkpoint of another format, torch_checkpointing" in capsys.readouterr().err
    assert metadata_at(Location(items)) == Location(items) / "metadata.pkl"


def test_a_store_gets_the_metadata_last(store_url: str, tmp_path: Path) -> None:
    state = {"model": {"w": torch.rand(3, 4)}, "step": 7}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "dcp")
    target = f"{store_url}/items"
    arguments = ["convert", str(tmp_path / "dcp"), target, "--to", "torch_checkpointing"]
    assert main(arguments) == 0
    into = {"model": {"w": torch.zeros(3, 4)}, "step": 0}
    torch_ckpt.load(into, storage_reader=FastReader(target))
    assert_same(into, state)
