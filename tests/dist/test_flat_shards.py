"""`FlatShard`: ranges of tensors, cut at any element, through DCP's save and load."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds, on_ranks
from safetensors.torch import load_file
from states import READERS, WRITERS, assert_same, full_value
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_ckpt
from torch_ckpt import (
    FastLoadPlanner,
    FastReader,
    FastSavePlanner,
    FastWriter,
    FlatShard,
    SafetensorsWriter,
)

pytestmark = pytest.mark.timeout(240)

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
Shapes = dict[str, tuple[int, ...]]


def random_shapes(seed: int, *, max_size: int = 6) -> Shapes:
    """Shapes of 0 to 4 dimensions, some without elements."""
    choose = random.Random(seed)
    shapes = {
        f"layer.{i}": tuple(choose.randint(1, max_size) for _ in range(i % 5)) for i in range(9)
    }
    return {**shapes, "empty": (3, 0, 2)}


def wholes(shapes: Shapes) -> dict[str, torch.Tensor]:
    """The tensors of these shapes, the same in every process."""
    return {
        fqn: full_value(fqn, shape, DTYPES[at % len(DTYPES)])
        for at, (fqn, shape) in enumerate(shapes.items())
    }


def shards(
    full: dict[str, torch.Tensor], seed: int, *, blank: bool = False
) -> dict[str, FlatShard]:
    """This rank's ranges of the tensors. Each tensor is cut at random elements."""
    choose, rank, size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    state = {}
    for fqn, whole in full.items():
        cuts = sorted(choose.randint(0, whole.numel()) for _ in range(size - 1))
        begin, end = [0, *cuts][rank], [*cuts, whole.numel()][rank]
        local = whole.reshape(-1)[begin:end].clone()
        state[fqn] = FlatShard(torch.zeros_like(local) if blank else local, fqn, whole.shape, begin)
    return state


def locals_of(state: dict[str, FlatShard]) -> dict[str, torch.Tensor]:
    return {fqn: shard.local for fqn, shard in state.items()}


def save_flat(path: Path, seed: int, writer: str, planner: type[DefaultSavePlanner]) -> None:
    full = wholes(random_shapes(seed))
    dcp.save({"m": shards(full, seed)}, storage_writer=WRITERS[writer](path), planner=planner())


def load_flat(path: Path, seed: int, reader: str, planner: type[DefaultLoadPlanner]) -> None:
    full = wholes(random_shapes(seed))
    state = shards(full, seed + 1, blank=True)
    dcp.load({"m": state}, storage_reader=READERS[reader](path), planner=planner())
    assert_same(locals_of(state), locals_of(shards(full, seed + 1)))
    whole = {fqn: torch.zeros_like(tensor) for fqn, tensor in full.items()}
    dcp.load({"m": whole}, storage_reader=READERS[reader](path), planner=planner())
    assert_same(whole, full)


@pytest.mark.thin(1)
@pytest.mark.parametrize(
    ("writer", "save_planner"),
    [("fast", FastSavePlanner), ("fast", DefaultSavePlanner), ("stock", FastSavePlanner)],
)
@pytest.mark.parametrize("seed", range(3))
def test_ranges_cut_at_any_element_load_into_other_ranges_and_into_whole_tensors(
    worlds: Worlds, tmp_path: Path, seed: int, writer: str, save_planner: type[DefaultSavePlanner]
) -> None:
    worlds.run(3, save_flat, tmp_path, seed, writer, save_planner)
    for reader, planner in (("fast", FastLoadPlanner), ("fast", DefaultLoadPlanner)):
        worlds.run(2, load_flat, tmp_path, seed, reader, planner)
    worlds.run(4, load_flat, tmp_path, seed, "stock", DefaultLoadPlanner)


@on_ranks(2)
def test_a_save_sends_no_tensor_to_another_rank(path: Path) -> None:
    full = wholes(random_shapes(0, max_size=30))
    sent = 0

    def count(*_: Any, **__: Any) -> None:
        nonlocal sent
        sent += 1

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_gather_into_tensor", "send", "isend", "all_reduce"):
            patch.setattr(dist, name, count)
        torch_ckpt.save(shards(full, 0), checkpoint_id=path)
    assert not sent


@pytest.mark.thin("AsyncCheckpointerType.THREAD")
@pytest.mark.parametrize("executor", list(AsyncCheckpointerType), ids=str)
def test_an_asynchronous_save_stages_the_ranges(
    worlds: Worlds, tmp_path: Path, executor: AsyncCheckpointerType
) -> None:
    worlds.run(2, save_asynchronously, tmp_path, executor)
    worlds.run(3, load_flat, tmp_path, 5, "stock", DefaultLoadPlanner)


def save_asynchronously(path: Path, executor: AsyncCheckpointerType) -> None:
    state = shards(wholes(random_shapes(5)), 5)
    future = dcp.async_save(
        {"m": state},
        storage_writer=FastWriter(path),
        process_group=dist.new_group(backend="gloo"),
        async_checkpointer_type=executor,
    )
    for shard in state.values():
        shard.local.zero_()  # The save has its own copy.
    future.result(60)


@on_ranks(3)
def test_ranges_load_from_whole_and_from_sharded_tensors(path: Path) -> None:
    full = wholes(random_shapes(9))
    torch_ckpt.save(full, checkpoint_id=path)
    state = shards(full, 9, blank=True)
    torch_ckpt.load(state, checkpoint_id=path)
    assert_same(locals_of(state), locals_of(shards(full, 9)))


@on_ranks(3)
def test_ranges_are_written_as_whole_tensors_to_safetensors(path: Path) -> None:
    full = {fqn: t for fqn, t in wholes(random_shapes(2)).items() if t.numel()}
    torch_ckpt.save(shards(full, 2), storage_writer=SafetensorsWriter(path))
    assert_same(load_file(path / "model.safetensors"), full)


@on_ranks(2)
def test_a_hole_between_the_ranges_is_an_error_on_every_rank(path: Path) -> None:
    rank = dist.get_rank()
    state = {"w": FlatShard(torch.zeros(10), "w", (5, 5), 10 * rank)}
    with pytest.raises(CheckpointException) as caught:
        torch_ckpt.save(state, checkpoint_id=path)
    assert "hold 20 of the 25 elements" in str(caught.value.failures[0][0])
    assert not (path / ".metadata").exists()


@on_ranks(2)
def test_equal_ranges_of_two_ranks_are_replicas(path: Path) -> None:
    whole = torch.arange(12.0)
    torch_ckpt.save({"w": FlatShard(whole, "w", (3, 4), 0)}, checkpoint_id=path)
    assert sum(file.stat().st_size for file in path.glob("*.distcp")) < 4096
    loaded = {"w": torch.zeros(3, 4)}
    dcp.load(loaded, storage_reader=FastReader(path))
    assert torch.equal(loaded["w"], whole.view(3, 4))


def test_a_range_outside_the_tensor_is_an_error() -> None:
    for start, numel in ((-1, 2), (3, 4), (7, 0)):
        with pytest.raises(ValueError, match=rf"\[{start}, {start + numel}\).*'w'.*\(2, 3\)"):
            FlatShard(torch.zeros(numel), "w", (2, 3), start)
    FlatShard(torch.zeros(0), "w", (2, 3), 6)


def test_a_range_that_is_not_contiguous_is_an_error() -> None:
    for local in (torch.zeros(2, 2), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match="FlatShard of 'w': it must be 1-D and contiguous"):
            FlatShard(local, "w", (2, 3), 0)


def test_a_function_that_needs_values_is_an_error_that_names_the_shard() -> None:
    shard = FlatShard(torch.zeros(2), "w", (2, 3), 1)
    for call in (lambda: shard + 1, lambda: shard.sum(), lambda: shard.clone()):
        with pytest.raises(NotImplementedError, match=r"\[1, 3\) of 'w'.*`local`"):
            call()
    assert "[1, 3) of 'w'" in repr(shard)
    assert math.prod(shard.size()) == 6


def test_a_load_fills_the_tensor_that_the_caller_passed(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.arange(6.0).view(2, 3)}, checkpoint_id=tmp_path)
    flat = torch.zeros(10)
    torch_ckpt.load({"w": FlatShard(flat[4:7], "w", (2, 3), 2)}, checkpoint_id=tmp_path)
    assert flat.tolist() == [0.0] * 4 + [2.0, 3.0, 4.0] + [0.0] * 3
