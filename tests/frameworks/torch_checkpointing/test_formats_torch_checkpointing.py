"""FastReader on hand-made directories of torch_checkpointing: shardings, damage, hostile files."""

from __future__ import annotations

import collections
import copy
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_checkpointing_files import MESH, WHOLE, boxes, dtensor_sharding, write

from torch_ckpt import FastReader
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    MismatchError,
    NotFoundError,
    UnsupportedError,
)

ALIEN = "StridedShard"


def refused(path: Path, fqn: str, kind: type[CheckpointError], match: str) -> None:
    """The directory opens, and a load of the value is this error, which names it or its file."""
    with pytest.raises(dcp.CheckpointException) as caught:
        loaded_at(path, fqn)
    (error, _) = caught.value.failures[0]
    assert type(error) is kind
    assert re.search(match, str(error))
    assert fqn in str(error) or ".pt" in str(error) or ".json" in str(error)


def loaded(path: Path) -> torch.Tensor:
    state = {"model": {"w": torch.zeros(6, 4)}}
    dcp.load(state, storage_reader=FastReader(path), no_dist=True)
    return state["model"]["w"]


def test_shards_by_placements_and_by_boxes(tmp_path: Path) -> None:
    write(tmp_path / "a", dtensor_sharding())
    columns = WHOLE[:, :1], WHOLE[:, 1:]
    first = boxes([(0, 0)], [(6, 1)])
    write(tmp_path / "b", first, boxes([(0, 1)], [(6, 3)]), parts=columns)
    # Two boxes of one local tensor, and a part of it that is not in the whole tensor.
    both = torch.cat([WHOLE[4:], torch.zeros(1, 4), WHOLE[:2]])
    several = boxes([(4, 0), (0, 0)], [(2, 4), (2, 4)], [(0, 0), (3, 0)])
    write(tmp_path / "c", several, boxes([(2, 0)], [(2, 4)]), parts=(both, WHOLE[2:4]))
    for name in "abc":
        assert torch.equal(loaded(tmp_path / name), WHOLE)


def test_a_strided_shard_may_be_several_ranges(tmp_path: Path) -> None:
    pieces = WHOLE.chunk(2)  # Of which each rank has a chunk.
    parts = [torch.cat([piece.chunk(2)[rank] for piece in pieces]) for rank in range(2)]
    stated = dtensor_sharding(placements=[{"type": ALIEN, "dim": 0, "split_factor": 2}])
    write(tmp_path, stated, parts=(parts[0], parts[1]))
    assert torch.equal(loaded(tmp_path), WHOLE)
    assert box_count(tmp_path) == 4
    write(tmp_path, stated)
    refused(
        tmp_path, "model.w", CorruptionError, r"rank 0 has \[2, 4\] at \[0, 0\] and \[2, 4\] at"
    )


def strided(path: Path, factor: int, *, expanded: bool, names: int = 1) -> torch.Tensor:
    """Two ranks with every second element of each tensor; returns its values.

    The tensors of the files are of one element each, if they are ``expanded``.
    """
    whole = torch.zeros(2 * factor, 1) if expanded else torch.arange(2.0 * factor)[:, None]
    placements = [{"type": ALIEN, "dim": 0, "split_factor": factor}]
    stated = dtensor_sharding(global_shape=[2 * factor, 1], stride=[1, 1], placements=placements)
    path.mkdir()
    for rank in range(2):
        part = torch.zeros(1, 1).expand(factor, 1) if expanded else whole[rank::2].clone()
        torch.save({f"{i}": part for i in range(names)}, path / f"model_{rank}.pt")
    groups = [{"sharding_metadata": stated, "ranks": (0, 1)}]
    item = {
        "nested_path_to_metadata": {f'["{i}"]': groups for i in range(names)},
        "rank_to_layout_info": {0: None, 1: None},
    }
    metadata = {"metadata": {"model": item}, "world_size": 2, "version": "2.0"}
    (path / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return whole


@pytest.mark.timeout(60)
def test_a_strided_shard_of_very_many_ranges_is_read_in_little_time(tmp_path: Path) -> None:
    whole = strided(tmp_path / "c", 10_000, expanded=False)
    state = {"model": {"0": torch.zeros_like(whole)}}
    dcp.load(state, storage_reader=FastReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(state["model"]["0"], whole)
    assert box_count(tmp_path / "c", "model.0") == 20_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("names", [1, 200])
def test_a_few_bytes_do_not_state_very_many_boxes(names: int, tmp_path: Path) -> None:
    strided(tmp_path / "c", 1 << 16, expanded=True, names=names)
    assert sum(file.stat().st_size for file in (tmp_path / "c").iterdir()) < 4000 + 250 * names
    with pytest.raises(dcp.CheckpointException) as caught:
        loaded_at(tmp_path / "c", f"model.{names - 1}")
    (error, _) = caught.value.failures[0]
    assert type(error) is CorruptionError
    assert "a split factor of 65536 makes more than " in str(error)


def test_a_box_that_several_ranks_have_is_read_once(tmp_path: Path) -> None:
    replicated = boxes([(0, 0)], [(6, 4)])
    write(tmp_path, replicated, replicated, parts=(WHOLE, WHOLE))
    assert torch.equal(loaded(tmp_path), WHOLE)
    assert box_count(tmp_path) == 1
    # Both ranks have the middle rows, at other offsets, beside what is in no box.
    first = boxes([(0, 0), (2, 0)], [(2, 4), (2, 4)], [(0, 0), (2, 0)])
    second = boxes([(2, 0), (4, 0)], [(2, 4), (2, 4)], [(1, 0), (3, 0)])
    rest = torch.full((1, 4), 9.0)
    write(tmp_path, first, second, parts=(WHOLE[:4], torch.cat([rest, WHOLE[2:]])))
    assert torch.equal(loaded(tmp_path), WHOLE)
    assert box_count(tmp_path) == 3
    write(tmp_path, first, second, parts=(WHOLE[:4], torch.cat([rest, WHOLE[2:] + 1])))
    with pytest.raises(dcp.CheckpointException, match="ranks 0 and 1 have the same shard"):
        loaded(tmp_path)


def box_count(path: Path, fqn: str = "model.w") -> int:
    return len(FastReader(path).read_metadata().state_dict_metadata[fqn].chunks)


def test_a_box_in_a_larger_local_tensor(tmp_path: Path) -> None:
    larger = torch.cat([torch.zeros(1, 4), WHOLE, torch.zeros(1, 4)])
    both = boxes([(0, 0)], [(6, 4)], [(1, 0)])
    write(tmp_path, both, both, parts=(larger, larger + 0))
    assert torch.equal(loaded(tmp_path), WHOLE)


def test_a_tensor_of_the_metadata_that_no_file_has_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, dtensor_sharding())
    for rank in range(2):
        torch.save({"other": 1}, tmp_path / f"model_{rank}.pt")
    refused(tmp_path, "model.w", CorruptionError, "the metadata has it, and no file")
    assert loaded_at(tmp_path, "model.other") == 1


def test_views_of_different_storages_may_be_equal(tmp_path: Path) -> None:
    """The library stages whole storages, so a rank may save more than its shard."""
    mesh = {**MESH, "mesh_shape": (2, 2), "mesh_data": (0, 1, 2, 3)}
    placements = [{"type": "Replicate"}, {"type": "Shard", "dim": 0}]
    write(tmp_path, dtensor_sharding(mesh_spec=mesh, placements=placements), world_size=4)
    metadata = pickle.loads((tmp_path / "metadata.pkl").read_bytes())
    item = metadata["metadata"]["model"]
    item["rank_to_layout_info"].update({2: None, 3: None})
    item["nested_path_to_metadata"]['["w"]'][0]["ranks"] = (0, 1, 2, 3)
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    torch.save({"w": WHOLE[:3]}, tmp_path / "model_2.pt")
    torch.save({"w": WHOLE.t().contiguous().t()[3:]}, tmp_path / "model_3.pt")
    assert torch.equal(loaded(tmp_path), WHOLE)


def test_a_file_with_a_tensor_that_only_torch_reads(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    write(tmp_path, dtensor_sharding())
    for rank in range(2):
        state = {"w": WHOLE[3 * rank :][:3].clone(), "q": quantized, "v": torch.zeros(2) + rank}
        torch.save(state, tmp_path / f"model_{rank}.pt")
    assert torch.equal(loaded(tmp_path), WHOLE)
    values = {f"model.v.rank_0000{rank}_of_00002" for rank in range(2)}
    assert names_in(tmp_path) == {"model.w", "model.q", *values}


def test_a_shard_that_is_not_contiguous_loads(tmp_path: Path) -> None:
    write(tmp_path, dtensor_sharding())
    torch.save({"w": WHOLE[:3].t().contiguous().t()}, tmp_path / "model_0.pt")
    assert not torch.load(tmp_path / "model_0.pt")["w"].is_contiguous()
    assert torch.equal(loaded(tmp_path), WHOLE)


UNSOUND: dict[str, tuple[tuple[dict[str, Any], ...], type[CheckpointError], str]] = {
    "hole": ((boxes([(0, 0)], [(3, 4)]), boxes([(3, 0)], [(2, 4)])), MismatchError, "20 of them"),
    "overlap": (
        (boxes([(0, 0)], [(3, 4)]), boxes([(2, 0)], [(3, 4)])),
        MismatchError,
        "elements of both",
    ),
    "beyond": (
        (boxes([(0, 0)], [(3, 4)]), boxes([(4, 0)], [(3, 4)])),
        CorruptionError,
        "by its sharding",
    ),
    "local": (
        (boxes([(0, 0)], [(3, 4)]), boxes([(0, 0)], [(6, 4)])),
        CorruptionError,
        r"rank 1 has \[6, 4\] at \[0, 0\] of \[6, 4\] of it, and model_1\.pt has \[3, 4\]",
    ),
    "negative": ((boxes([(-1, 0)], [(3, 4)]),) * 2, CorruptionError, "not sizes, offsets or ranks"),
    "dims": ((boxes([(0,)], [(3,)], [(0,)]),) * 2, CorruptionError, "by its sharding"),
    "sizes": ((dtensor_sharding(global_shape=[9, 4]),), CorruptionError, r"rank 0 has \[5, 4\] at"),
    "mesh": (
        (dtensor_sharding(mesh_spec={**MESH, "mesh_data": (5, 6)}),),
        CorruptionError,
        "invalid",
    ),
    "mesh of 0": (
        (dtensor_sharding(mesh_spec={**MESH, "mesh_shape": (0,)}),),
        CorruptionError,
        "invalid",
    ),
    "placement": (
        (dtensor_sharding(placements=[{"type": "Partial", "dim": 0}]),),
        CorruptionError,
        "invalid",
    ),
    "dim": (
        (dtensor_sharding(placements=[{"type": "Shard", "dim": 7}]),),
        CorruptionError,
        "invalid",
    ),
    "split": (
        (dtensor_sharding(placements=[{"type": ALIEN, "dim": 0, "split_factor": 2**50}]),),
        CorruptionError,
        "a split factor of",
    ),
    "facts": (({"type": "DTensorShardingMetadata", "data": [1]},), CorruptionError, "invalid"),
    "kind": (({"type": "Blocks", "data": {}},), UnsupportedError, "unknown kind 'Blocks'"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_shardings_that_are_unsound_are_refused_and_other_values_load(
    tmp_path: Path, case: str
) -> None:
    shardings, kind, match = UNSOUND[case]
    write(tmp_path, *shardings)
    for rank in range(2):
        file = tmp_path / f"model_{rank}.pt"
        torch.save({**torch.load(file), "v": torch.ones(2)}, file)
    refused(tmp_path, "model.w", kind, match)
    assert torch.equal(loaded_at(tmp_path, "model.v", torch.zeros(2)), torch.ones(2))


def test_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    write(tmp_path, dtensor_sharding())
    torch.save({"w": WHOLE[3:].double()}, tmp_path / "model_1.pt")
    refused(tmp_path, "model.w", CorruptionError, "its dtypes are .*float32.*float64")
    torch.save({"w": 5}, tmp_path / "model_1.pt")
    refused(tmp_path, "model.w", UnsupportedError, "sharded on rank 0, and not on rank 1")
    torch.save({}, tmp_path / "model_1.pt")
    refused(tmp_path, "model.w", MismatchError, "12 of them")


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_file_that_cannot_be_read_refuses_its_item_and_the_others_load(
    tmp_path: Path, damage: str
) -> None:
    write(tmp_path, dtensor_sharding())
    torch.save({"epoch": 3}, tmp_path / "client_0.pt")
    file = tmp_path / "model_1.pt"
    if damage == "missing":
        file.unlink()
        refused(tmp_path, "model.w", NotFoundError, r"model_1\.pt, the file of rank 1, is missing")
    else:
        file.write_bytes(file.read_bytes()[:-40])
        refused(tmp_path, "model.w", CorruptionError, r"model_1\.pt")
    assert loaded_at(tmp_path, "client.epoch") == 3
    for other in tmp_path.glob("*.pt"):
        other.write_bytes(b"PK\3\4")
    with pytest.raises(CheckpointError, match=r"_[01]\.pt"):  # No file is left.
        names_in(tmp_path)


def test_a_value_of_a_class_that_is_not_allowed_keeps_its_name(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"own": Hostile(tmp_path / "made"), "v": 1}, tmp_path / f"item_{rank}.pt")
    refused(tmp_path, "item.own", UnsupportedError, "mkdir")
    assert loaded_at(tmp_path, "item.v") == 1
    assert not (tmp_path / "made").exists()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:40],
    "other": lambda _: pickle.dumps([1]),
    "no items": lambda _: pickle.dumps({"world_size": 2, "version": "2.0"}),
    "version": lambda _: pickle.dumps({"metadata": {}, "world_size": 2, "version": "9.0"}),
    "no ranks": lambda _: pickle.dumps({"metadata": {}, "world_size": 0}),
    "paths": lambda data: data.replace(b'["w"]', b"[[[[["),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metadata_is_refused(tmp_path: Path, damage: str) -> None:
    write(tmp_path, dtensor_sharding())
    file = tmp_path / "metadata.pkl"
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.raises(CorruptionError, match=r"metadata\.pkl: it is not the metadata of"):
        FastReader(tmp_path).read_metadata()


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_metadata_runs_no_code(tmp_path: Path) -> None:
    write(tmp_path, dtensor_sharding())
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(Hostile(tmp_path / "made")))
    with pytest.raises(UnsupportedError, match=r"metadata\.pkl: .*mkdir"):
        FastReader(tmp_path).read_metadata()
    assert not (tmp_path / "made").exists()


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    metadata = copy.deepcopy(pickle.loads((path / "metadata.pkl").read_bytes()))
    change(metadata["metadata"]["model"]["rank_to_layout_info"])
    (path / "metadata.pkl").write_bytes(pickle.dumps(metadata))


def layout(name: str, kind: str = "TorchSerialization") -> dict[str, Any]:
    return {"file_path": name, "serialization_format": {"type": kind}}


def test_files_outside_the_directory_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    write(path, dtensor_sharding())
    (path / "model_1.pt").rename(tmp_path / "model_1.pt")
    rewrite(path, lambda layouts: layouts.update({1: layout("../model_1.pt")}))
    with pytest.raises(CorruptionError, match=r"its file '\.\./model_1\.pt' is outside"):
        FastReader(path).read_metadata()


def test_other_serializations_are_refused(tmp_path: Path) -> None:
    write(tmp_path, dtensor_sharding())
    rewrite(tmp_path, lambda layouts: layouts.update({1: layout("model_1.pt", "Zip")}))
    refused(tmp_path, "model.w", UnsupportedError, r"'model' .*model_1\.pt is serialized by Zip")
    rewrite(tmp_path, lambda layouts: layouts.update({1: layout("a.json", "JsonSerialization")}))
    (tmp_path / "a.json").write_text("{")
    refused(tmp_path, "model.w", CorruptionError, r"a\.json: invalid JSON")


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    """Files with the names of ranks and of the metadata, which are not of this format."""
    save_file({"w": WHOLE}, tmp_path / "model.safetensors")
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"mine": 1}))
    state = {"w": torch.zeros(6, 4)}
    dcp.load(state, storage_reader=FastReader(tmp_path), no_dist=True)
    assert torch.equal(state["w"], WHOLE)
    epochs = tmp_path / "epochs"
    epochs.mkdir()
    for epoch in (0, 10):
        torch.save({"w": WHOLE + epoch}, epochs / f"model_{epoch}.pt")
    with pytest.raises(NotFoundError, match="no checkpoint is committed"):
        FastReader(epochs).read_metadata()


def test_layouts_of_other_ranks_or_types_are_refused(tmp_path: Path) -> None:
    for change in ({1: {"file_path": 5, "serialization_format": {"type": "x"}}}, {7: None}):
        write(tmp_path, dtensor_sharding())
        rewrite(tmp_path, lambda layouts, change=change: layouts.update(change))
        with pytest.raises(CorruptionError, match="it is not the metadata of"):
            FastReader(tmp_path).read_metadata()


def test_views_of_equal_storages_are_not_equal(tmp_path: Path) -> None:
    """Each rank has another part of a buffer that all have whole."""
    for rank in range(2):
        torch.save({"w": WHOLE[2 * rank : 2 * rank + 2]}, tmp_path / f"model_{rank}.pt")
    state = {f"model.w.rank_0000{rank}_of_00002": None for rank in range(2)}
    dcp.load(state, storage_reader=FastReader(tmp_path), no_dist=True)
    for rank, (part,) in enumerate(state.values()):
        assert torch.equal(part, WHOLE[2 * rank : 2 * rank + 2])


def names_in(path: Path) -> set[str]:
    return set(FastReader(path).read_metadata().state_dict_metadata)


def loaded_at(path: Path, fqn: str, target: Any = None) -> Any:
    state = {fqn: target}
    dcp.load(state, storage_reader=FastReader(path), no_dist=True)
    return state[fqn]


def save_values(path: Path, *values: Any) -> None:
    """The value of an item on each rank."""
    path.mkdir(exist_ok=True)
    for rank, value in enumerate(values):
        torch.save({"v": value}, path / f"item_{rank}.pt")


@pytest.mark.parametrize(
    "values",
    [
        [np.arange(5000), np.concatenate([np.arange(4999), [7]])],
        [(torch.tensor(1), 1), (torch.tensor(2), 1)],
        [collections.deque([torch.tensor(1)]), collections.deque([torch.tensor(2)])],
        [1.0, 1.0 + 1e-12],
        [1, True],
    ],
    ids=["numpy", "tuple", "deque", "float", "bool"],
)
def test_objects_that_differ_are_those_of_each_rank(tmp_path: Path, values: list[Any]) -> None:
    save_values(tmp_path / "same", values[0], copy.deepcopy(values[0]))
    assert names_in(tmp_path / "same") == {"item.v"}
    save_values(tmp_path / "other", *values)
    names = [f"item.v.rank_0000{rank}_of_00002" for rank in range(2)]
    assert names_in(tmp_path / "other") == set(names)
    for name, value in zip(names, values, strict=True):
        (found,) = loaded_at(tmp_path / "other", name)
        assert repr(found) == repr(value)


def test_tensors_without_checksums_are_compared(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save_values(tmp_path, WHOLE, WHOLE + 1)
    finally:
        torch.serialization.set_crc32_options(True)
    assert names_in(tmp_path) == {f"item.v.rank_0000{rank}_of_00002" for rank in range(2)}


def test_tensors_that_only_torch_reads_are_compared(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    save_values(tmp_path / "same", sparse, sparse.clone())
    assert names_in(tmp_path / "same") == {"item.v"}
    save_values(tmp_path / "other", sparse, 2 * sparse)
    assert len(names_in(tmp_path / "other")) == 2


def test_replicas_of_a_shard_that_differ_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    mesh = {**MESH, "mesh_shape": (2, 2), "mesh_data": (0, 1, 2, 3)}
    placements = [{"type": "Replicate"}, {"type": "Shard", "dim": 0}]
    write(tmp_path, dtensor_sharding(mesh_spec=mesh, placements=placements), world_size=4)

    def change(metadata: dict[str, Any]) -> None:
        metadata["rank_to_layout_info"].update({2: None, 3: None})
        metadata["nested_path_to_metadata"]['["w"]'][0]["ranks"] = (0, 1, 2, 3)

    metadata = pickle.loads((tmp_path / "metadata.pkl").read_bytes())
    change(metadata["metadata"]["model"])
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    torch.save({"w": WHOLE[:3].clone(), "n": 5}, tmp_path / "model_2.pt")
    torch.save({"w": WHOLE[3:].clone(), "n": 5}, tmp_path / "model_3.pt")
    assert torch.equal(loaded(tmp_path), WHOLE)
    torch.save({"w": WHOLE[3:] + 1, "n": 5}, tmp_path / "model_3.pt")
    assert loaded_at(tmp_path, "model.n") == 5
    with pytest.raises(dcp.CheckpointException, match="ranks 1 and 3 have the same shard"):
        loaded(tmp_path)


def test_an_item_may_be_on_some_ranks_only(tmp_path: Path) -> None:
    write(tmp_path, dtensor_sharding())
    torch.save({"epoch": 3}, tmp_path / "client_1.pt")
    torch.save({"w": 1}, tmp_path / "step_1700000000.pt")  # Not a rank.
    assert torch.equal(loaded(tmp_path), WHOLE)
    assert loaded_at(tmp_path, "client.epoch") == 3
    torch.save({"epoch": 3}, tmp_path / "client_01.pt")
    assert names_in(tmp_path) == {"model.w", "client.epoch"}
    (tmp_path / "client_1.json").write_text("{}")
    with pytest.raises(CorruptionError, match=r"both client_1\.json and client_1\.pt are of rank"):
        names_in(tmp_path)


def test_the_metadata_and_a_file_that_disagree_are_refused(tmp_path: Path) -> None:
    write(tmp_path, dtensor_sharding(global_shape=[4, 2], stride=[2, 1]))
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(1)], run_check=False)
        torch.save({"w": tensor}, tmp_path / "model_0.pt")
    finally:
        dist.destroy_process_group()
    refused(tmp_path, "model.w", CorruptionError, "by the metadata, and .* by its file")


def test_damaged_metadata_beside_safetensors_is_refused(tmp_path: Path) -> None:
    save_file({"w": WHOLE}, tmp_path / "model_0.safetensors")
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"metadata": 1})[:9])
    with pytest.raises(CorruptionError, match=r"metadata\.pkl: it is not the metadata of"):
        names_in(tmp_path)


def test_safetensors_of_ranks_without_a_sharding(tmp_path: Path) -> None:
    write(tmp_path, dtensor_sharding())
    for rank in range(2):
        name = f"weights_{rank}.safetensors"
        part = {"w": WHOLE[3 * rank : 3 * rank + 3].clone(), "s": torch.ones(2) + rank}
        save_file(part, tmp_path / name)
        rewrite(
            tmp_path,
            lambda layouts, rank=rank, name=name: layouts.update(
                {rank: layout(name, "SafetensorsSerialization")}
            ),
        )
    assert torch.equal(loaded(tmp_path), WHOLE)
    (found,) = loaded_at(tmp_path, "model.s.rank_00001_of_00002")
    assert found.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({0, 8}, {8, 0}),
        (({"a": 1, "b": 2},), ({"b": 2, "a": 1},)),
        ((torch.ones(4)[:2], 1), (torch.ones(2), 1)),
        (float("nan"), float("nan")),
        ((np.arange(3), "s" * 5), (np.arange(3), "".join(["s"] * 5))),
    ],
    ids=["set", "dict", "view", "nan", "text"],
)
def test_objects_that_are_equal_are_shown_once(tmp_path: Path, one: Any, other: Any) -> None:
    save_values(tmp_path, one, other)
    assert names_in(tmp_path) == {"item.v"}


def test_json_that_is_nested_without_end_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, dtensor_sharding())
    (tmp_path / "deep_0.json").write_text("[" * 100_000 + "]" * 100_000)
    refused(tmp_path, "deep", CorruptionError, r"deep_0\.json: invalid JSON")
    assert torch.equal(loaded(tmp_path), WHOLE)
