"""FastSavePlanner and FastLoadPlanner on several ranks: who writes what, and what is read back."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds, on_ranks
from replicated_states import MIB, STATES, written_nbytes
from states import LOAD_PLANNERS, assert_same, assert_stored, full_value, sharded
from support.placing import Placing
from support.states import Evolving
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from trained_nets import EvenNet, Net, load_begun, save_trained

from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


def boxes_of(metadata: Metadata) -> dict[str, Any]:
    """What metadata say, in plain values that compare."""
    return {
        "stored": {
            fqn: None
            if isinstance(stored, BytesStorageMetadata)
            else (
                str(stored.properties),
                tuple(stored.size),
                [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks],
            )
            for fqn, stored in metadata.state_dict_metadata.items()
        },
        "paths": dict(metadata.planner_data),
        "places": metadata.storage_data
        and {
            (key.fqn, None if key.offset is None else tuple(key.offset)): (
                place.relative_path,
                place.offset,
                place.offset + place.length,
            )
            for key, place in metadata.storage_data.items()
        },
    }


def random_layout(seed: int) -> dict[str, Any]:
    """This rank's part of a random state."""
    return Placing(seed, owners=6).place(Evolving(seed, "the engine's dtypes").state)


def save_spread(path: Path, seed: int, options: Any) -> None:
    """Saves a random layout; the metadata of all ranks are the same, and list each box once."""
    state = random_layout(seed)
    for writer in (FastWriter, FileSystemWriter):
        folder = path / writer.__name__
        metadata = dcp.save(
            state, storage_writer=writer(folder), planner=FastSavePlanner(**options)
        )
        said = boxes_of(metadata)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, said)
        assert all(of_rank == said for of_rank in everyones)
        stored = boxes_of(FileSystemReader(folder).read_metadata())
        if writer is FileSystemWriter and said["places"] is None:
            said["places"] = stored["places"]  # Torch 2.11 returns none of its own writer.
        assert stored == said
        for fqn, stored in said["stored"].items():
            if stored is None:
                assert (fqn, None) in said["places"]
                continue
            _, size, boxes = stored
            assert sum(math.prod(sizes) for _, sizes in boxes) == math.prod(size), fqn
            assert len({offsets for offsets, _ in boxes}) == len(boxes), fqn
            assert all((fqn, offsets) in said["places"] for offsets, _ in boxes), fqn
            if math.prod(size):
                assert all(math.prod(sizes) for _, sizes in boxes), fqn
        count = sum(1 if one is None else len(one[2]) for one in said["stored"].values())
        assert len(said["places"]) == count
        extents = sorted(said["places"].values())
        for (file, _, end), (other, begin, _) in itertools.pairwise(extents):
            assert file != other or end <= begin


@pytest.mark.thin(1)
@pytest.mark.parametrize("options", [{}, {"dedup_save_to_lowest_rank": True}], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_metadata_of_random_layouts_list_each_box_once(
    worlds: Worlds, tmp_path: Path, seed: int, ranks: int, options: Any
) -> None:
    for number in range(2):
        worlds.run(ranks, save_spread, tmp_path / str(number), seed + number, options)


@on_ranks(4)
def test_what_ranks_list_is_what_stock_lists(seed: int) -> None:
    for names in range(seed, seed + 5):
        state = random_layout(names)
        for flatten in (True, False):
            theirs, ours = DefaultSavePlanner(flatten), FastSavePlanner(flatten)
            for planner in (theirs, ours):
                planner.set_up_planner(state, is_coordinator=dist.get_rank() == 0)
            assert list(ours.create_local_plan().items) == theirs.create_local_plan().items


def large_of_all() -> dict[str, Any]:
    """One tensor holds 60 % of all bytes."""
    state: dict[str, Any] = {
        f"{i}": full_value(f"{i}", (500, 1000), torch.float32) for i in range(8)
    }
    state["large"] = full_value("large", (6001, 1000), torch.float32)
    return state


def fsdp_over_tp() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    placements = [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate())]
    return {
        f"w{i}": sharded(
            full_value(f"w{i}", (1001 + i, 900), torch.float32), mesh, placements[i % 3]
        )
        for i in range(9)
    }


WORKLOADS: dict[str, Callable[[], dict[str, Any]]] = {
    **STATES,
    "one large": large_of_all,
    "fsdp over tp": fsdp_over_tp,
}


def save_and_load(name: str, path: Path, writer: Any) -> None:
    state = WORKLOADS[name]()
    dcp.save(state, storage_writer=writer(path), planner=FastSavePlanner())
    assert_stored(path, state, planners=LOAD_PLANNERS)


@pytest.mark.thin("hsdp-FastWriter", "fsdp over tp-FileSystemWriter")
@pytest.mark.parametrize("writer", [FastWriter, FileSystemWriter])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_busiest_rank_writes_hardly_more_than_the_mean(
    worlds: Worlds, tmp_path: Path, name: str, writer: Any
) -> None:
    worlds.run(4, save_and_load, name, tmp_path, writer)
    per_rank = written_nbytes(tmp_path, 4)
    assert max(per_rank) <= 1.02 * sum(per_rank) / 4 + MIB, per_rank


@on_ranks(2)
def test_what_ranks_send_and_get_is_small(path: Path) -> None:
    rank, world, count = dist.get_rank(), dist.get_world_size(), 4000
    mesh = init_device_mesh("cpu", (world,))
    state = {
        f"layers.{i}.weight": sharded(torch.zeros(4 * world, 3 + i % 5), mesh, (Shard(0),))
        if i % 2
        else torch.zeros(8, i % 7)
        for i in range(count)
    }
    planner, writer = FastSavePlanner(), FastWriter(path)
    planner.set_up_planner(state, is_coordinator=rank == 0)
    sent = pickle.dumps(planner.create_local_plan())
    assert b"WriteItem" not in sent
    plans: list[Any] = [None] * world
    dist.all_gather_object(plans, sent)
    answers, _ = planner.create_global_plan(list(map(pickle.loads, plans)))
    answer = pickle.dumps(writer.prepare_global_plan(answers)[rank])
    assert b"WriteItem" not in answer
    assert len(sent) - sum(map(len, state)) <= 16 * count  # Besides names.
    assert len(answer) <= 8 * count


@pytest.mark.thin("ddp", "fsdp2_tp")
@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2", "hsdp", "fsdp2_tp"])
def test_a_trained_model_loads_in_another_layout(
    worlds: Worlds, tmp_path: Path, layout: str
) -> None:
    kind = EvenNet if layout == "fsdp2_tp" else Net
    saved = worlds.run(4, save_trained, kind, layout, tmp_path, "fast", FastSavePlanner())[0]
    for loader in (("stock", DefaultLoadPlanner), ("fast", FastLoadPlanner)):
        for other in ("fsdp2", "fsdp1"):
            loaded = worlds.run(2, load_begun, kind, other, tmp_path, *loader)[0]
            assert_same(loaded, saved)


@on_ranks(2)
def test_shards_of_fsdp1_are_stored_by_the_engine(path: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    local = torch.arange(15.0).reshape(3, 5) + 100 * rank
    shard = TensorShard.from_tensor_and_offsets(local, [3 * rank, 0], rank)
    state = {"st": init_from_local_shards([shard], 3 * world, 5)}
    dcp.save(state, storage_writer=FastWriter(path), planner=FastSavePlanner())
    _, index = open_committed(Location(path), "")
    assert index is not None
    _, _, boxes = index.find("st")
    assert [box[5] for box in boxes] == [True] * world  # Frames of the engine's own.
    zeros = TensorShard.from_tensor_and_offsets(torch.zeros(3, 5), [3 * rank, 0], rank)
    loaded = {"st": init_from_local_shards([zeros], 3 * world, 5)}
    dcp.load(loaded, storage_reader=FastReader(path), planner=FastLoadPlanner())
    assert torch.equal(loaded["st"].local_shards()[0].tensor, local)
