"""Checkpoints of every parallel layout come back bit for bit, in the same layout or another.

A trained model is saved in one layout and loaded in one (of another world, perhaps) that was begun
from other values; torch's own full state dict, gathered after the load, tells what arrived.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds, on_ranks
from states import READERS, WRITERS, assert_same, data_files, full_value, sharded, zeroed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from trained_nets import EvenNet, Net, load_begun, save_trained

from torch_ckpt import FastReader, FastWriter

pytestmark = pytest.mark.timeout(240)

ROUTES = [("fast", "fast"), ("fast", "stock"), ("stock", "fast")]


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


@pytest.mark.thin("hsdp-fast-to-stock", "fsdp1-stock-to-fast")
@pytest.mark.parametrize("route", ROUTES, ids="-to-".join)
@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp2_tp"])
def test_a_layout_loads_as_it_was_saved(
    worlds: Worlds, tmp_path: Path, layout: str, route: tuple[str, str]
) -> None:
    check_route(worlds, tmp_path, (layout, 4), (layout, 4), route)


@pytest.mark.thin(
    "fsdp1_2-fsdp1_4-stock-to-fast",
    "ddp_4-fsdp2_3-stock-to-fast",
    "fsdp2_tp_4-plain_1-stock-to-fast",
)
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
    assert_same(loaded, half_state(1 - half, mesh, zero=False))
    assert {name[:4] for name in data_files(path / f"{half}")} == {"__0_", "__1_"}
