"""The recipes of the page on the state of ranks: each sample is used once per epoch over a resume.

The recipes are read from the page.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Worlds
from support.recipes import recipe
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader

from torch_ckpt import RankState, Run

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

COUNT, BATCH, EPOCHS = 24, 2, 2
STEPS = COUNT // BATCH // 2  # In an epoch on two ranks.


# ---- A position of all ranks ----


def train_by_position(path: Path, workers: int, last: int) -> list[tuple[int, int]]:
    """Trains to a step, saves each step, and returns the epoch and number of each sample."""
    rank, size = dist.get_rank(), dist.get_world_size()
    epoch = recipe("Epoch")(COUNT, BATCH, rank, size)
    loader = DataLoader(range(COUNT), batch_sampler=epoch, num_workers=workers)
    used: list[tuple[int, int]] = []
    state = {"w": torch.ones(3), "data": epoch}
    with Run(path) as run:
        step = run.restore(state) or 0
        while epoch.number < EPOCHS:
            for batch in loader:
                if step == last:
                    return used
                used += [(epoch.number, int(sample)) for sample in batch]
                epoch.use()
                step += 1
                run.save(step, state)
            epoch.end()
    return used


@pytest.mark.thin(1)
@pytest.mark.parametrize("stop", [0, 1, 5, 6, 7, 12])
@pytest.mark.parametrize("to", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_each_sample_is_used_once_over_a_resume_on_any_ranks(
    worlds: Worlds, tmp_path: Path, workers: int, to: int, stop: int
) -> None:
    """On two ranks, an epoch has 6 steps; on three, what is left of it may be no whole batch."""
    parts = worlds.run(2, train_by_position, tmp_path, workers, stop)
    parts += worlds.run(to, train_by_position, tmp_path, workers, -1)
    used = sorted(sample for part in parts for sample in part)
    assert len(used) == len(set(used))
    for epoch in range(EPOCHS):
        left_out = COUNT - sum(number == epoch for number, _ in used)
        assert left_out < BATCH * to
        assert left_out == 0 or (to == 3 and epoch == stop // STEPS)


def test_the_order_is_that_of_a_training_without_a_resume(worlds: Worlds, tmp_path: Path) -> None:
    whole = worlds.run(2, train_by_position, tmp_path / "whole", 0, -1)
    for stop in (4, 6):
        path = tmp_path / f"{stop}"
        first = worlds.run(2, train_by_position, path, 0, stop)
        rest = worlds.run(2, train_by_position, path, 0, -1)
        assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    orders = [[sample for number, sample in whole[0] if number == epoch] for epoch in (0, 1)]
    assert orders[0] != orders[1]


# ---- torchdata ----


def stateful_loader(workers: int, **kinds: Any) -> tuple[Any, Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(range(COUNT), shuffle=True, **kinds)
    return StatefulDataLoader(range(COUNT), BATCH, sampler=sampler, num_workers=workers), sampler


def accelerated_loader(workers: int) -> tuple[Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size})  # As of torchrun.
    configuration = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=5
    )
    torch.manual_seed(5)  # As ``accelerate.utils.set_seed`` does.
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    loader = DataLoader(range(COUNT), BATCH, shuffle=True, num_workers=workers)
    prepared = accelerator.prepare(loader)
    return prepared, prepared


LOADERS = {"torchdata": stateful_loader, "accelerate": accelerated_loader}


def train_by_loader(
    path: Path, kind: str, workers: int, last: int, at_end: str
) -> list[tuple[int, int]]:
    """As ``train_by_position``, by a stateful loader.

    The last step of an epoch is saved within the loop over it, or after the loop.
    """
    epochs = recipe("Epochs")(*LOADERS[kind](workers))
    used: list[tuple[int, int]] = []
    state = {"w": torch.ones(3), "data": RankState(epochs)}
    with Run(path) as run:
        step = run.restore(state) or 0
        while epochs.number < EPOCHS:
            number = epochs.number
            for batch in epochs:
                used += [(number, int(sample)) for sample in batch]
                step += 1
                if step % STEPS or at_end == "within":
                    run.save(step, state)
                    if step == last:
                        return used
            if at_end == "after":
                run.save(step, state)
                if step == last:
                    return used
    return used


@pytest.mark.framework("torchdata")
@pytest.mark.thin(1)
@pytest.mark.parametrize("stop", [1, 5, 6, 7, 12])
@pytest.mark.parametrize("at_end", ["within", "after"])
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("torchdata", 0),
        pytest.param("torchdata", 2, marks=pytest.mark.slow),
        pytest.param("accelerate", 0, marks=pytest.mark.framework("accelerate")),
    ],
)
def test_a_stateful_loader_continues_in_an_epoch_and_between_two(
    worlds: Worlds, tmp_path: Path, kind: str, workers: int, at_end: str, stop: int
) -> None:
    how = kind, workers
    whole = worlds.run(2, train_by_loader, tmp_path / "whole", *how, -1, at_end)
    first = worlds.run(2, train_by_loader, tmp_path / "cut", *how, stop, at_end)
    rest = worlds.run(2, train_by_loader, tmp_path / "cut", *how, -1, at_end)
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    used = sorted(sample for part in whole for sample in part)
    assert used == [(epoch, number) for epoch in range(EPOCHS) for number in range(COUNT)]


def refusal_of(path: Path) -> str:
    with pytest.raises(CheckpointException) as caught:
        train_by_loader(path, "torchdata", 0, -1, "after")
    return str(caught.value)


@pytest.mark.framework("torchdata")
def test_a_stateful_loader_is_refused_on_another_number_of_ranks(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, train_by_loader, tmp_path, "torchdata", 0, 5, "after")
    for refusal in worlds.run(3, refusal_of, tmp_path):
        assert "MismatchError" in refusal
        assert "'data'" in refusal


@pytest.mark.framework("torchdata")
def test_the_state_of_a_stateful_loader_alone_is_not_enough() -> None:
    """What the page says of torchdata. If this fails, a later version may need less."""

    def samples(loader: Any) -> list[int]:
        return [int(sample) for batch in loader for sample in batch]

    loader, sampler = stateful_loader(0, num_replicas=2, rank=0)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(samples(loader))
    exhausted = loader.state_dict()
    sampler.set_epoch(1)
    batches = iter(loader)
    next(batches)
    within = loader.state_dict()

    loader, sampler = stateful_loader(0, num_replicas=2, rank=0)
    loader.load_state_dict(exhausted)
    sampler.set_epoch(2)
    assert samples(loader) == []  # A whole epoch is skipped.

    loader, _ = stateful_loader(0, num_replicas=2, rank=0)
    loader.load_state_dict(within)
    assert samples(loader) == orders[0][BATCH:]  # The position is right, and the order is not.
