"""One set of safetensors files, written by all ranks, whatever the layout of the tensors."""

from __future__ import annotations

import functools
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankError, Worlds, on_ranks, run_ranks
from safetensors.torch import load_file, save_file
from states import Failure, assert_same, failures_of, full_value, sharded
from support.safetensors_files import load_model
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from trained_nets import EvenNet, Net, build

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, SafetensorsWriter
from torch_ckpt.storage import safetensors_base

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

DEADLINE_S = 30  # Within which a failure of one rank must have reached the others.
PLANNERS = {"stock": DefaultSavePlanner, "fast": FastSavePlanner}
ROWS, COLUMNS, REPLICAS = (Shard(0),), (Shard(1),), (Replicate(),)
GRIDS: dict[str, tuple[Placement, ...]] = {
    "rows": ROWS,
    "columns": COLUMNS,
    "replicas": REPLICAS,
    "hsdp": (Replicate(), Shard(0)),
    "rows_of_columns": (Shard(0), Shard(1)),
}
BOXES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "uneven": ((7, 5), torch.float32),
    "fewer_than_ranks": ((2, 3), torch.bfloat16),
    "none": ((0, 5), torch.float32),
    "deep": ((5, 6, 7), torch.float16),
    "small_floats": ((6, 10), torch.float8_e4m3fn),
    "masks": ((9, 13), torch.bool),
    "large": ((1031, 1033), torch.float32),
    "long_rows": ((3, 900_001), torch.uint8),
}


def names_in(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def save_model(state: Any, path: Path, planner: str = "stock", **options: Any) -> None:
    writer = SafetensorsWriter(path, **options)
    dcp.save(state, storage_writer=writer, planner=PLANNERS[planner]())


def placed(version: str, grid: str) -> dict[str, DTensor]:
    placements, world = GRIDS[grid], dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2) if len(placements) == 2 else (world,))
    return {
        name: sharded(full_value(f"{name} {version}", *box), mesh, placements)
        for name, box in BOXES.items()
    }


def whole(version: str) -> dict[str, torch.Tensor]:
    return {name: full_value(f"{name} {version}", *box) for name, box in BOXES.items()}


def save_placed(path: Path, version: str, grid: str, planner: str, options: Any) -> None:
    save_model(placed(version, grid), path, planner, **options)


@pytest.mark.thin(1)
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    ("grid", "world"),
    [
        ("rows", 1),
        ("rows", 3),
        ("columns", 2),
        ("columns", 3),
        ("replicas", 3),
        ("hsdp", 4),
        ("rows_of_columns", 4),
    ],
)
def test_ranks_write_the_file_that_one_process_would(
    worlds: Worlds, tmp_path: Path, grid: str, world: int, planner: str
) -> None:
    worlds.run(world, save_placed, tmp_path, "new", grid, planner, {"thread_count": world % 2 + 1})

    assert names_in(tmp_path) == {"model.safetensors"}
    save_file(whole("new"), tmp_path / "library", metadata={"format": "pt"})
    ours, library = ((tmp_path / n).read_bytes() for n in ("model.safetensors", "library"))
    ours_begin, begin = (8 + int.from_bytes(file[:8], "little") for file in (ours, library))
    assert ours[8:ours_begin].rstrip() == library[8:begin].rstrip()
    assert ours[ours_begin:] == library[begin:]


def save_net(path: Path, layout: str) -> dict[str, Any]:
    net, _ = build(EvenNet if layout == "fsdp2_tp" else Net, layout, seed=3, rate=0.1)
    save_model(get_model_state_dict(net), path, max_shard_nbytes=4400)
    return get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize(
    ("layout", "world"),
    [("ddp", 2), ("fsdp1", 2), ("fsdp2", 3), ("tp", 2), ("hsdp", 4), ("fsdp2_tp", 4)],
)
def test_parallel_modules_are_stored_as_if_they_were_not(
    worlds: Worlds, tmp_path: Path, layout: str, world: int
) -> None:
    expected = worlds.run(world, save_net, tmp_path, layout)[0]
    assert len(names_in(tmp_path)) > 1
    assert_same(load_model(tmp_path), expected)


class Counting(SafetensorsWriter):
    nbytes = 0

    def write_data(self, *args: Any) -> Any:
        future = super().write_data(*args)
        self.nbytes += sum(result.size_in_bytes for result in future.value())
        return future


def bytes_written(path: Path) -> int:
    """Saves what all ranks hold; returns what this one has written."""
    writer = Counting(path)
    dcp.save(placed("new", "replicas"), storage_writer=writer)
    return writer.nbytes


def test_replicas_are_shared_out_among_the_ranks(worlds: Worlds, tmp_path: Path) -> None:
    written = worlds.run(3, bytes_written, tmp_path)
    assert sum(written) == (tmp_path / "model.safetensors").stat().st_size
    assert max(written) < sum(written) / 3 + (1 << 20)


def save_on_base(
    path: Path, version: str, grid: str, base: Path, changed: str = "", by_dcp: bool = True
) -> None:
    state = placed(version, grid)
    if changed:
        local = state[changed].to_local()
        if local.numel() and dist.get_rank() == dist.get_world_size() - 1:
            local.view(torch.uint8).flatten()[-1:].bitwise_xor_(1)
    writer = SafetensorsWriter(path, max_shard_nbytes=3_000_000, base=base)
    save = dcp.save if by_dcp else torch_ckpt.save
    save(state, storage_writer=writer, planner=FastSavePlanner())


def inodes(path: Path) -> set[int]:
    return {file.stat().st_ino for file in path.glob("*.safetensors")}


@pytest.mark.parametrize("by_dcp", [True, False], ids=["dcp", "torch_ckpt"])
@pytest.mark.parametrize("grid", ["rows", "hsdp", "replicas"])
def test_ranks_take_the_files_in_which_none_has_found_a_change(
    worlds: Worlds, tmp_path: Path, grid: str, by_dcp: bool
) -> None:
    first, second, third, fourth = (tmp_path / name for name in "abcd")
    worlds.run(2, save_on_base, first, "1", "columns", first, "", by_dcp)
    worlds.run(4, save_on_base, second, "1", grid, first, "", by_dcp)  # The boxes are others.
    assert inodes(second) == inodes(first)
    changed = "large" if grid == "rows" else ""  # One bit, which no other rank has.
    worlds.run(2, save_on_base, third, "1", grid, second, changed, by_dcp)
    expected = load_model(second)
    if changed:
        assert 0 < len(inodes(third) & inodes(second)) < len(inodes(second))
        expected["large"].view(torch.uint8).flatten()[-1:].bitwise_xor_(1)
    assert_same(load_model(third), expected)
    worlds.run(2, save_on_base, fourth, "2", grid, third, "", by_dcp)
    assert not inodes(fourth) & inodes(third)
    assert_same(load_model(fourth), whole("2"))


def fail_to_compare(path: Path, kind: type[Exception]) -> None:
    """One rank fails while it compares its tensors with the base, and all ranks get the error."""
    save_on_base(path / "a", "1", "rows", path / "a")
    if dist.get_rank() == 1:

        def fail(*arguments: object) -> None:
            raise kind("no memory is left")

        safetensors_base.same_bits = fail  # The process ends with this test.
    save = functools.partial(save_on_base, path / "b", "1", "rows", path / "a")
    failures = failures_of(save)
    assert {rank: failure.kind for rank, failure in failures.items()} == {1: kind.__name__}
    assert not list((path / "b").glob("*"))
    assert load_model(path / "a")


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError, OSError])
def test_a_rank_that_fails_to_compare_fails_the_save_of_all(
    tmp_path: Path, kind: type[Exception]
) -> None:
    run_ranks(2, fail_to_compare, tmp_path, kind, timeout_s=60)


@on_ranks(2)
def test_saves_one_after_another_replace_each_other(path: Path) -> None:
    writer = SafetensorsWriter(path, max_shard_nbytes=3_000_000)
    for version in ("1", "2", "3"):
        torch_ckpt.save(placed(version, "rows"), storage_writer=writer, timeout_s=DEADLINE_S)
    assert_same(load_model(path), whole("3"))
    assert len(names_in(path)) == 4  # Three files and the index.


@on_ranks(2)
def test_an_object_of_one_rank_is_refused_on_all(path: Path) -> None:
    state: dict[str, Any] = dict(placed("new", "rows"))
    if dist.get_rank() == 1:
        state["step"] = 7
    ((kind, _, message),) = failures_of(save_model, state, path).values()
    assert kind == "UnsupportedError"
    assert "'step'" in message
    dist.barrier()
    assert names_in(path) == set()


@on_ranks(2)
def test_ranks_do_not_write_models_of_their_own(path: Path) -> None:
    with pytest.raises(torch_ckpt.errors.UnsupportedError, match="collectives"):
        dcp.save(
            {"t": torch.zeros(2)}, storage_writer=SafetensorsWriter(path), use_collectives=False
        )


class FailingPlanner(DefaultSavePlanner):
    """Cannot hand out one tensor, or ends the process in the middle of its writes."""

    def __init__(self, dies: bool) -> None:
        super().__init__()
        self.dies = dies

    def resolve_data(self, write_item: WriteItem) -> Any:
        if dist.get_rank() == 1 and write_item.index.fqn == "large":
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError("large is lost")
        return super().resolve_data(write_item)


def save_badly(path: Path, fault: str) -> dict[int, Failure]:
    planner = FailingPlanner(dies=False) if fault == "lost" else DefaultSavePlanner()
    writer = SafetensorsWriter(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fault == "full" and dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        state = placed("new", "rows")
        return failures_of(dcp.save, state, storage_writer=writer, planner=planner)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(("fault", "said"), [("full", "File too large"), ("lost", "large is lost")])
def test_failure_of_one_rank_keeps_the_old_model(
    worlds: Worlds, tmp_path: Path, fault: str, said: str
) -> None:
    worlds.run(2, save_placed, tmp_path, "old", "columns", "stock", {})

    seen = worlds.agree(2, save_badly, tmp_path, fault, timeout_s=DEADLINE_S)
    assert 1 in seen  # Rank 0 may find that rank 1 has removed the files.
    assert said.lower() in seen[1].message.lower()
    assert_same(load_model(tmp_path), whole("old"))
    worlds.run(2, save_placed, tmp_path, "newer", "columns", "stock", {})
    assert names_in(tmp_path) == {"model.safetensors"}
    assert_same(load_model(tmp_path), whole("newer"))


def save_and_die(path: Path) -> None:
    writer = SafetensorsWriter(path)
    dcp.save(placed("new", "rows"), storage_writer=writer, planner=FailingPlanner(dies=True))


def test_a_rank_that_is_killed_while_it_writes_leaves_the_old_model(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, save_placed, tmp_path, "old", "rows", "stock", {"max_shard_nbytes": 10**6})
    with pytest.raises(RankError):
        run_ranks(2, save_and_die, tmp_path)
    assert_same(load_model(tmp_path), whole("old"))
    assert any(name.endswith(".tmp") for name in names_in(tmp_path)), "it was not in the middle"
    worlds.run(2, save_placed, tmp_path, "newer", "rows", "stock", {})
    assert names_in(tmp_path) == {"model.safetensors"}
    assert_same(load_model(tmp_path), whole("newer"))


def save_tied(path: Path) -> None:
    """Three ranks: a sharded tensor of two rows with two names, and names tied on one rank only."""
    torch.manual_seed(0)
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    embedding = distribute_tensor(torch.arange(10.0).reshape(2, 5), mesh, [Shard(0)])
    own = torch.full([4], 7.0)
    state = {
        "embedding": embedding,
        "head": embedding,
        "replica": own,
        # As under pipeline parallelism: the same values, in two tensors on some rank.
        "other replica": own if rank == 0 else own.clone(),
    }
    torch_ckpt.save(state, storage_writer=SafetensorsWriter(path))
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    loaded["head"] = loaded["embedding"]
    torch_ckpt.load(loaded, storage_reader=FastReader(path))
    assert torch.equal(loaded["embedding"].full_tensor(), embedding.full_tensor())
    assert torch.equal(loaded["other replica"], own)


def test_names_that_are_tied_on_all_ranks_are_stored_once(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(3, save_tied, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert sorted(stored) == ["embedding", "other replica", "replica"]
