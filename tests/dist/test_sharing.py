"""What several ranks hold is shared out among them, under stock DCP's own planner."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from states import READERS, assert_same, full_value, sharded
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from torch_ckpt import FastReader, FastWriter, MismatchError
from torch_ckpt.cli import main

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

MIB = 1 << 20


def replicated() -> dict[str, Any]:
    """As DDP has it: one tensor is most of all bytes."""
    state: dict[str, Any] = {
        f"layer.{i}": full_value(f"l{i}", (100 + i, 333), torch.float32) for i in range(30)
    }
    state["embedding"] = full_value("embedding", (9001, 257), torch.bfloat16)
    return {"model": state, "step": 7}


def hsdp() -> dict[str, Any]:
    """Shards along one dimension of the mesh, replicas along the other; uneven."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shapes = {"a": (4003, 301), "b": (5, 70001), "c": (3, 3), "d": (1, 999)}
    return {
        name: sharded(full_value(name, shape, torch.float32), mesh, (Replicate(), Shard(0)))
        for name, shape in shapes.items()
    }


def experts() -> dict[str, Any]:
    """Experts on some ranks each, everything else on all."""
    rank = dist.get_rank()
    state = {
        f"expert.{i}": full_value(f"expert.{i}", (1024, 512), torch.float32)
        for i in range(4)
        if rank // 2 == i // 2
    }
    return {"experts": state, "dense": full_value("dense", (2000, 1500), torch.bfloat16)}


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "replicated": replicated,
    "hsdp": hsdp,
    "experts": experts,
}


def zeroed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeroed(one) for key, one in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0


def local(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: local(one) for key, one in value.items()}
    return value.to_local() if hasattr(value, "to_local") else value


def written_nbytes(path: Path, ranks: int) -> list[int]:
    """Bytes in the data files of each rank."""
    per_rank = [0] * ranks
    for file in path.glob("*.distcp"):
        per_rank[int(re.match(r"__(\d+)_", file.name)[1])] += file.stat().st_size
    return per_rank


def save_and_load(name: str, path: Path, options: dict[str, Any]) -> None:
    dcp.save(STATES[name](), storage_writer=FastWriter(path, **options))
    for reader in READERS.values():
        state = zeroed(STATES[name]())
        dcp.load(state, storage_reader=reader(path))
        assert_same(local(state), local(STATES[name]()))


@pytest.mark.parametrize("name", STATES)
def test_all_ranks_write_about_as_much_and_both_readers_find_it(
    worlds: Worlds, tmp_path: Path, name: str
) -> None:
    worlds.run(4, save_and_load, name, tmp_path, {})
    per_rank = written_nbytes(tmp_path, 4)
    assert max(per_rank) <= 1.02 * sum(per_rank) / 4 + MIB, per_rank
    assert main(["verify", str(tmp_path)]) == 0


def test_the_planner_decides_where_sharing_is_off(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(4, save_and_load, "replicated", tmp_path, {"share_replicas": False})
    metadata = FastReader(tmp_path).read_metadata()
    assert {
        len(entry.chunks)
        for entry in metadata.state_dict_metadata.values()
        if hasattr(entry, "chunks")
    } == {1}
    per_rank = written_nbytes(tmp_path, 4)
    assert max(per_rank) > 1.02 * sum(per_rank) / 4 + MIB


def test_files_of_one_rank_and_transforms_have_cut_tensors_too(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, save_and_load, "replicated", tmp_path / "files", {"thread_count": 2})
    assert len(list((tmp_path / "files").glob("*.distcp"))) == 4
    pytest.importorskip("pyzstd")
    worlds.run(2, save_and_load, "replicated", tmp_path / "packed", {"_extensions": [ZStandard()]})


def save_quantised(path: Path) -> None:
    torch.manual_seed(1)
    values = torch.randn(1500, 2000)
    state = {"q": torch.quantize_per_tensor(values, 0.1, 0, torch.qint8), "w": values}
    dcp.save(state, storage_writer=FastWriter(path))
    for reader in READERS.values():
        loaded = {
            "q": torch.quantize_per_tensor(torch.zeros(1500, 2000), 0.1, 0, torch.qint8),
            "w": torch.zeros(1500, 2000),
        }
        dcp.load(loaded, storage_reader=reader(path))
        assert torch.equal(loaded["q"].int_repr(), state["q"].int_repr())
        assert torch.equal(loaded["w"], values)


def test_what_only_torch_can_store_is_not_cut(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save_quantised, tmp_path)
    chunks = FastReader(tmp_path).read_metadata().state_dict_metadata
    assert (len(chunks["q"].chunks), len(chunks["w"].chunks)) == (1, 2)


def save_disagreeing(path: Path, key: str) -> str:
    rank = dist.get_rank()
    state = {
        "model": {
            "same": torch.zeros(4),
            "sizes": torch.zeros(3 + (key == "sizes" and rank == 2), 5),
            "dtype": torch.zeros(4, dtype=torch.int8 if key == "dtype" and rank else torch.uint8),
        }
    }
    try:
        dcp.save(state, storage_writer=FastWriter(path))
    except CheckpointException as error:
        (failure,) = {str(one): one for one, _ in error.failures.values()}.values()
        assert isinstance(failure, MismatchError), failure
        return str(failure)
    return "saved"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "sizes",
            "cannot plan 'model.sizes': rank 0 and rank 2 disagree on its sizes: [3, 5] and [4, 5]",
        ),
        (
            "dtype",
            "cannot plan 'model.dtype': rank 0 and rank 1 disagree on its dtype: uint8 and int8",
        ),
    ],
)
def test_ranks_that_disagree_on_a_tensor_all_learn_which(
    worlds: Worlds, tmp_path: Path, key: str, message: str
) -> None:
    for said in worlds.run(3, save_disagreeing, tmp_path, key):
        assert message in said


def save_with_cached_plans(path: Path) -> None:
    """The same plan twice, then one rank's plan changes, which moves what others write."""
    rank = dist.get_rank()
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for step in range(5):
        state = {
            name: full_value(f"{name} {step}", (700, 500), torch.float32)
            for name in ("a", "b", "c", "d", "e")
        }
        if step >= 2 and rank == 1:
            state["of one rank"] = full_value(f"one {step}", (3000, 500), torch.float32)
        if step >= 4:
            del state["a"]
        folder = path / str(step)
        dcp.save(dict(state), storage_writer=FastWriter(folder), planner=planner)
        for reader in READERS.values():
            loaded = zeroed(state)
            dcp.load(loaded, storage_reader=reader(folder))
            assert_same(loaded, state)


def test_stock_plan_caching_loses_nothing_when_one_rank_changes(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(3, save_with_cached_plans, tmp_path)
    for step in range(5):
        assert main(["verify", str(tmp_path / str(step))]) == 0
    assert written_nbytes(tmp_path / "0", 3) == written_nbytes(tmp_path / "1", 3)
