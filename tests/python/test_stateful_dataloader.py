"""A ``StatefulDataLoader`` of torchdata goes on after a restore as after a load of its pickle."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import RandomSampler

import torch_ckpt
from torch_ckpt import FastReader, RankState

pytestmark = [
    pytest.mark.framework("torchdata"),
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),
]

SAMPLES = range(20)


def loader_of(workers: int, has_generator: bool) -> Any:
    from torchdata import stateful_dataloader

    generator = torch.Generator().manual_seed(3) if has_generator else None
    sampler = RandomSampler(SAMPLES, generator=generator)
    return stateful_dataloader.StatefulDataLoader(SAMPLES, 2, sampler=sampler, num_workers=workers)


def epochs(loader: Iterable[Any]) -> list[Any]:
    """The rest of this epoch, and the next one."""
    return [[batch.tolist() for batch in loader] for _ in range(2)]


@pytest.mark.parametrize("load", ["ours", "DCP's", "nested"])
@pytest.mark.parametrize("has_generator", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_of_samples_is_that_after_a_load_of_the_pickled_state(
    workers: int, has_generator: bool, load: str, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    loader = loader_of(workers, has_generator)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    key = [RankState(loader)] if load == "nested" else RankState(loader)
    torch_ckpt.save({"data": key}, checkpoint_id=tmp_path)
    pickled = pickle.dumps(loader.state_dict())

    torch.manual_seed(8)
    expected = loader_of(workers, has_generator)
    expected.load_state_dict(pickle.loads(pickled))
    orders = epochs(expected)

    torch.manual_seed(8)
    loaded = loader_of(workers, has_generator)
    state: Any = {"data": [RankState(loaded)] if load == "nested" else RankState(loaded)}
    if load == "DCP's":
        dcp.load(state, storage_reader=FastReader(tmp_path), no_dist=True)
    else:
        torch_ckpt.load(state, checkpoint_id=tmp_path)
    assert epochs(loaded) == orders
