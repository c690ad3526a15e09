"""FastReader on state dicts that each rank saved: versions of torch, damage, crafted files."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_state_files import WHOLE, as_rank, dtensor, sharded_tensor, write
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torch_ckpt import FastReader


def loaded(path: Path, fqn: str = "model.w") -> Any:
    state = {fqn: torch.zeros(6, 4) if fqn == "model.w" else None}
    dcp.load(state, storage_reader=FastReader(path), no_dist=True)
    return state[fqn]


def refusal(path: Path, fqn: str = "model.w") -> str:
    with pytest.raises(dcp.CheckpointException) as caught:
        loaded(path, fqn)
    ((error, _),) = caught.value.failures.values()
    return f"{type(error).__name__}: {error}"


def test_a_mesh_of_an_earlier_torch_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        state = {  # As torch 2.6 has it, which verl's first users had.
            "device_type": "cpu",
            "mesh": torch.tensor([0, 1], dtype=torch.int32),
            "mesh_dim_names": ("fsdp",),
            "_flatten_mesh_list": (0, 1),
            "_thread_id": None,
            "_coordinate_on_dim": [rank],
            "_dim_group_infos": [("", [0, 1], "0")],
        }
        monkeypatch.setattr(DeviceMesh, "__getstate__", lambda _, state=state: state)
        with as_rank(rank):
            write(tmp_path, rank, {"w": dtensor(rank)})
    assert torch.equal(loaded(tmp_path), WHOLE)


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_sharded_tensors_are_read_without_a_process_group(
    tmp_path: Path, is_contiguous: bool
) -> None:
    for rank in range(2):
        with as_rank(rank):
            tensor = sharded_tensor(rank)
            if not is_contiguous:
                (shard,) = tensor.local_shards()
                shard.tensor = shard.tensor.t().contiguous().t()
            write(tmp_path, rank, {"w": tensor, "n": 3})
    assert torch.equal(loaded(tmp_path), WHOLE)
    assert loaded(tmp_path, "model.n") == 3


def test_damaged_sharded_tensors_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    getstate: Any = ShardedTensor.__getstate__
    with as_rank(0):
        write(tmp_path, 0, {"w": sharded_tensor(0)})
    with as_rank(1):
        tensor = sharded_tensor(1)
        (shard,), metadata, *rest = getstate(tensor)
        write(tmp_path, 1, {"w": (tensor,)})
    assert "contains a ShardedTensor; only dicts and lists may" in refusal(tmp_path)
    local = LocalShard(shard.tensor, ShardMetadata([1, 0], [2, 4], "rank:1/cpu"))
    beyond = LocalShard(shard.tensor, ShardMetadata([5, 0], [2, 4], "rank:1/cpu"))
    flat = LocalShard(shard.tensor, ShardMetadata([4, 0], [2, 4], "rank:1/cpu"))
    flat.metadata.shard_offsets.pop()
    cases = {
        "MismatchError: .*elements of both rank 0 and rank 1": ([local], metadata, *rest),
        "CorruptionError: .*by its sharding, rank 1 has": ([beyond], metadata, *rest),
        "CorruptionError: .*_rank1.bin: its shard is not a tensor": ([flat], metadata, *rest),
        "MismatchError: .*its ranks have 16 of them": ([], metadata, *rest),
        "CorruptionError: .*_rank1.bin: its state is not that": ([shard], metadata, {}, *rest[1:]),
        "CorruptionError: .*_rank1.bin: its state is not": (3, metadata, *rest),
        "UnsupportedError: .*several shards": ([shard, local], metadata, *rest),
    }
    for match, state in cases.items():
        monkeypatch.setattr(ShardedTensor, "__getstate__", lambda _, state=state: state)
        write(tmp_path, 1, {"w": tensor})
        assert re.match(match, refusal(tmp_path))


def test_other_sizes_on_another_rank_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank):
            mesh = DeviceMesh("cpu", [0, 1])
            tensor = DTensor.from_local(torch.ones(3 + rank, 4), mesh, [Shard(0)], run_check=False)
            write(tmp_path, rank, {"w": tensor})
    match = r"CorruptionError: .* \(6, 4\) in .*_rank0\.bin, \(8, 4\) in .*_rank1\.bin"
    assert re.match(match, refusal(tmp_path))


def test_trusted_pickles_are_read_without_a_process_group(tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank):
            write(tmp_path, rank, {"w": dtensor(rank)})
    state = {"model.w": torch.zeros(6, 4)}
    dcp.load(state, storage_reader=FastReader(tmp_path, trust_pickle=True), no_dist=True)
    assert torch.equal(state["model.w"], WHOLE)
    with as_rank(0):
        for rank in range(2):
            write(tmp_path, rank, {"w": sharded_tensor(0)})
        with pytest.raises(
            dcp.CheckpointException, match="which needs a load without trust_pickle"
        ):
            dcp.load(state, storage_reader=FastReader(tmp_path, trust_pickle=True), no_dist=True)


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        Call(getattr, collections.OrderedDict, "update"),
        Call(getattr, ShardedTensor, "__init__"),
        Call(ShardedTensor, 9),
    ],
    ids=["getattr", "method", "constructor"],
)
def test_stand_ins_call_nothing(tmp_path: Path, call: Call) -> None:
    write(tmp_path, 0, {"w": WHOLE, "x": call})
    assert torch.equal(loaded(tmp_path), WHOLE)
    match = "UnsupportedError: .*(it is called for another class|it must not be called)"
    assert re.match(match, refusal(tmp_path, "model.x"))


def test_getattr_is_forbidden_in_other_files(tmp_path: Path) -> None:
    torch.save({"x": Call(getattr, torch.Tensor, "ndim")}, tmp_path / "file.pt")
    with pytest.raises(dcp.CheckpointException, match=r"GLOBAL builtins\.getattr"):
        dcp.load({"x": None}, storage_reader=FastReader(tmp_path / "file.pt"), no_dist=True)
