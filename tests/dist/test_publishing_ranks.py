"""Versions that several ranks publish together, whatever the layout of their tensors."""

from __future__ import annotations

import itertools
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Worlds
from states import sharded
from support.placing import Placing
from support.published import Engine, engines_of, published, weights
from support.tensors import LAYOUTS, bits, laid_out
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard

from torch_ckpt import CheckpointError, Publisher, Subscriber
from torch_ckpt.filesystems.location import Location
from torch_ckpt.publishing import publisher
from torch_ckpt.publishing.version_files import committed_versions, read_version

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

BF16 = torch.bfloat16
GRIDS: dict[str, tuple[Placement, ...]] = {
    "replicas": (Replicate(),),
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "hsdp": (Replicate(), Shard(0)),
    "rows_of_columns": (Shard(0), Shard(1)),
}


def placed(state: dict[str, torch.Tensor], grid: str) -> dict[str, Any]:
    """This rank's part of a state; plain tensors, and those without such a dimension, are whole."""
    if grid == "plain":
        return dict(state)
    placements, world = GRIDS[grid], dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2) if len(placements) == 2 else (world,))
    made: dict[str, Any] = {}
    for name, value in state.items():
        if name == "tied":
            made[name] = made["matrix"]
        elif value.dim() < 2:
            made[name] = value
        else:
            made[name] = sharded(value, mesh, placements)
    return made


def publish(root: str, grid: str, versions: list[int], whole_every: int) -> None:
    """Publishes versions; each rank updates some engines, and is behind at times."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engines = engines_of(published(weights(0), BF16))[rank::world]
    workers = [(Subscriber(root), engine) for engine in engines]
    with Publisher(root, dtype=BF16, whole_every=whole_every) as training:
        for version in versions:
            training.publish(version, placed(weights(version), grid))
            training.wait()
            for number, (worker, engine) in enumerate(workers):
                if (version + number) % 3 == 0:
                    continue
                assert worker.update(engine.tensors) >= version
                assert not worker.refused
                engine.assert_has(published(weights(version), BF16))
            dist.barrier()


CASES = [
    (2, "plain"),
    (2, "rows"),
    (2, "columns"),
    (2, "hsdp"),
    (3, "rows"),
    (3, "replicas"),
    (4, "hsdp"),
    (4, "rows_of_columns"),
]


@pytest.mark.thin(0.25)
@pytest.mark.parametrize(("world", "grid"), CASES)
def test_versions_have_the_values_of_the_training_whatever_the_layout(
    worlds: Worlds, tmp_path: Path, world: int, grid: str
) -> None:
    worlds.run(world, publish, str(tmp_path), grid, [1, 2, 3, 4], 3)
    kinds = [read_version(Location(tmp_path), n).is_whole for n in (1, 2, 3, 4)]
    assert kinds == [True, False, False, True]


def test_other_ranks_and_layouts_go_on_with_the_versions(worlds: Worlds, tmp_path: Path) -> None:
    worker, engine = Subscriber(tmp_path), Engine(published(weights(0), BF16), 1, 2)
    numbers = itertools.count(1)
    for world, grid in ((2, "rows"), (3, "columns"), (1, "plain"), (2, "hsdp")):
        versions = [next(numbers) for _ in range(2)]
        worlds.run(world, publish_only, str(tmp_path), grid, versions)
        assert worker.update(engine.tensors) == versions[-1]
        engine.assert_has(published(weights(versions[-1]), BF16))


def publish_only(root: str, grid: str, versions: list[int]) -> None:
    with Publisher(root, dtype=BF16) as training:
        for version in versions:
            training.publish(version, placed(weights(version), grid))


def random_state(rng: random.Random, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of many dtypes, sizes and strides. A tensor has the same ones for each seed."""
    state = {}
    for number in range(14):
        dtype = rng.choice(TYPES)
        sizes = [rng.choice([0, 1, 2, 3, 5, 7, 16, 41]) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.3:
            sizes[0] = rng.choice([300, 7001, 70_001 // max(1, math.prod(sizes[1:]))])
        layout = rng.choice(list(LAYOUTS))
        state[f"t{number}"] = laid_out(layout, sizes, dtype, seed=rng.randrange(1 << 30) + seed)
    return state


TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float64]


def cross(root: str, seed: int, dtype: torch.dtype | None) -> None:
    """Publishes random states in random placements, which engines of random boxes take up."""
    rank, world, placing = dist.get_rank(), dist.get_world_size(), Placing(seed)
    rng = random.Random(seed * world + rank)
    facts = published(random_state(random.Random(seed), 0), dtype)
    served = {name: random_box(rng, value) for name, value in facts.items()}
    worker = Subscriber(root)
    with Publisher(root, dtype=dtype, whole_every=3) as training:
        for version in range(5):
            state = random_state(random.Random(seed), version if version % 3 else 0)
            training.publish(version, placing.place(state))
            training.wait()
            if rng.random() < 0.7:
                worker.update(served)
                assert not worker.refused
                for name, value in published(state, dtype).items():
                    whole, offsets, tensor = served[name]
                    expected = value
                    for dim, (at, size) in enumerate(zip(offsets, tensor.size(), strict=True)):
                        expected = expected.narrow(dim, at, size)
                    if value.is_floating_point():  # Torch changes NaNs that it casts or negates.
                        tensor, expected = (torch.nan_to_num(t) for t in (tensor, expected))
                    assert bits(tensor) == bits(expected), (version, name, whole, offsets)
            dist.barrier()


def random_box(rng: random.Random, value: torch.Tensor) -> tuple[Any, Any, torch.Tensor]:
    offsets, sizes = [], []
    for size in value.size():
        first = rng.randrange(size + 1)
        last = rng.randrange(first, size + 1)
        offsets.append(first if rng.random() < 0.5 else 0)
        sizes.append(last - first if offsets[-1] else size)
    layout = rng.choice(["contiguous", "transposed", "sliced", "odd address"])
    return tuple(value.size()), tuple(offsets), laid_out(layout, sizes, value.dtype)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_tensors_in_random_placements_are_served_in_random_boxes(
    worlds: Worlds, tmp_path: Path, world: int, seed: int, full: bool
) -> None:
    for number in range(20 if full else 2):
        dtype = [None, BF16][number % 2]
        worlds.run(world, cross, str(tmp_path / f"{number}"), seed * 100 + number, dtype)


def fully_sharded(root: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(70, 333), torch.nn.ReLU(), torch.nn.Linear(333, 9))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    worker = Subscriber(root)
    served = {
        name: torch.zeros(value.shape, dtype=BF16) for name, value in model.state_dict().items()
    }
    with Publisher(root, dtype=BF16) as training:
        for version in range(5):
            model(torch.randn(4, 70)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            training.publish(version, model)
            training.wait()
            assert worker.update(served) == version
            for name, value in model.state_dict().items():
                assert torch.equal(served[name], value.full_tensor().to(BF16)), name
            dist.barrier()


def test_a_fully_sharded_model_is_served_at_each_step(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, fully_sharded, str(tmp_path))
    assert not read_version(Location(tmp_path), 4).is_whole


def fail_on(root: str, failing: int, where: str) -> str:
    """A publish fails on one rank; returns the error of this rank."""
    training, rank = Publisher(root, dtype=BF16, timeout_s=30), dist.get_rank()
    training.publish(1, placed(weights(1), "rows"))
    training.wait()
    state = placed(weights(2), "rows")
    saved = publisher.write_differences
    if rank == failing and where == "list":
        state["odd"] = object()
    if rank == failing and where == "compare":
        state["deep"] = state["deep"].to(torch.float32)
        publisher.Snapshot.compare = _raise  # type: ignore[method-assign, assignment]
    if rank == failing and where == "write":
        publisher.write_differences = _raise
    try:
        training.publish(2, state)
        training.wait()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = ""
    publisher.write_differences = saved
    publisher.Snapshot.compare = COMPARE  # type: ignore[method-assign]
    training.publish(3, placed(weights(3), "rows"))
    training.close()
    dist.barrier()
    return text


COMPARE = publisher.Snapshot.compare


def _raise(*_: Any) -> Any:
    raise OSError("the disk of one rank is gone")


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["list", "compare", "write"])
def test_a_failure_on_one_rank_fails_the_publish_on_all_with_the_same_error(
    worlds: Worlds, tmp_path: Path, failing: int, where: str
) -> None:
    text = worlds.agree(2, fail_on, str(tmp_path), failing, where)
    assert ("'odd'" if where == "list" else "the disk of one rank is gone") in text
    assert committed_versions(Location(tmp_path)) == [3, 1]
    assert not (tmp_path / "version-2").exists()
    worker, engine = Subscriber(tmp_path), Engine(published(weights(3), BF16))
    assert worker.update(engine.tensors) == 3
    engine.assert_has(published(weights(3), BF16))


def give_other_arguments(root: str) -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="different arguments"):
        Publisher(root, whole_every=3 + rank)
    with Publisher(root) as training:
        with pytest.raises(ValueError, match="different"):
            training.publish(3 + rank, weights(1))
        training.publish(9, weights(1))


def test_arguments_that_differ_between_ranks_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, give_other_arguments, str(tmp_path))
    assert committed_versions(Location(tmp_path)) == [9]


def die_within(root: str, where: str) -> None:
    """Rank 1 dies within a publish; rank 0 writes which error it gets."""
    training = Publisher(root, dtype=BF16, timeout_s=20)
    training.publish(1, placed(weights(1), "rows"))
    training.wait()
    if dist.get_rank():
        setattr(publisher, where, lambda *_: os._exit(9))
    try:
        training.publish(2, placed(weights(2), "rows"))
        training.wait()
    except CheckpointError as error:
        Path(root, "error").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize("where", ["write_differences", "Differences"])
def test_a_rank_that_dies_fails_the_publish_and_the_next_publisher_removes_the_rest(
    worlds: Worlds, tmp_path: Path, where: str
) -> None:
    with pytest.raises(RankError, match="rank 1 ended"):
        worlds.run(2, die_within, str(tmp_path), where)
    assert "RankTimeoutError: rank 1" in (tmp_path / "error").read_text()
    assert committed_versions(Location(tmp_path)) == [1]
    worker, engine = Subscriber(tmp_path), Engine(published(weights(1), BF16))
    assert worker.update(engine.tensors) == 1
    worlds.run(2, publish_only, str(tmp_path), "rows", [2, 3])
    assert worker.update(engine.tensors) == 3
    engine.assert_has(published(weights(3), BF16))


def serve_dtensors(root: str, grid: str) -> None:
    """An engine of DTensors takes up what ranks with rows publish."""
    served = placed(published(weights(0), BF16), grid)
    worker = Subscriber(root)
    with Publisher(root, dtype=BF16) as training:
        for version in (1, 2, 3):
            training.publish(version, placed(weights(version), "rows"))
            training.wait()
            assert worker.update(served) == version
            assert not worker.refused
            expected = placed(published(weights(version), BF16), grid)
            for name, value in served.items():
                own, other = (getattr(t, "_local_tensor", t) for t in (value, expected[name]))
                assert bits(own) == bits(other), name
            dist.barrier()


@pytest.mark.thin("rows_of_columns", "hsdp")
@pytest.mark.parametrize("grid", ["columns", "rows_of_columns", "hsdp"])
def test_an_engine_of_dtensors_is_updated_in_place(
    worlds: Worlds, tmp_path: Path, grid: str
) -> None:
    worlds.run(4, serve_dtensors, str(tmp_path), grid)


def fail_after_the_commit(root: str, number: int) -> None:
    """The coordinator fails once version ``number`` is committed, and so do the others."""
    where, name = (
        (publisher.DeltaTransaction, "commit") if number == 2 else (WHOLE_WRITER, "finish")
    )
    commit = getattr(where, name)

    def fail(*args: Any, **options: Any) -> None:
        commit(*args, **options)
        raise OSError("the network of one rank is gone")

    with Publisher(root, dtype=BF16, timeout_s=30) as training:
        for version in range(1, number):
            training.publish(version, placed(weights(version), "rows"))
        training.wait()
        setattr(where, name, fail)
        try:
            training.publish(number, placed(weights(number), "rows"))
            with pytest.raises(OSError, match="the network of one rank is gone"):
                training.wait()
        finally:
            setattr(where, name, commit)
        dist.barrier()
        worker, engine = Subscriber(root), Engine(published(weights(number), BF16))
        assert worker.update(engine.tensors, number) == number
        engine.assert_has(published(weights(number), BF16))
        dist.barrier()
        training.publish(3, placed(weights(3), "rows"))


WHOLE_WRITER = publisher._WholeWriter


@pytest.mark.parametrize("number", [1, 2])
def test_no_rank_removes_files_of_a_version_that_was_committed_before_it_failed(
    worlds: Worlds, tmp_path: Path, number: int
) -> None:
    worlds.run(2, fail_after_the_commit, str(tmp_path), number)
    assert committed_versions(Location(tmp_path)) == [3, *range(number, 0, -1)]
