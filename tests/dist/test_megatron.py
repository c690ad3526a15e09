"""Megatron-Core's dist_checkpointing with our strategies, and with its own as the oracle."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Worlds, on_ranks
from states import assert_same, failures_of

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing as mcore
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron_states import KEYS, entities, expected, on_cpu, shard, whole

from torch_ckpt import FastReader, FastWriter
from torch_ckpt.integrations.megatron import FastLoadStrategy, FastSaveStrategy

pytestmark = pytest.mark.timeout(240)

SAVES: dict[str, Any] = {
    "fast": FastSaveStrategy,
    "stock": lambda **given: torch_dist.TorchDistSaveShardedStrategy("torch_dist", 1, **given),
}
LOADS: dict[str, Any] = {
    "fast": FastLoadStrategy,
    "stock": torch_dist.TorchDistLoadShardedStrategy,
}


def save(path: Path, by: str, axis: int = 0, wrapped: bool = False, **options: Any) -> None:
    path.mkdir(exist_ok=True)
    dist.barrier()
    strategy = SAVES[by](**options)
    if wrapped:
        strategy = fully_parallel.FullyParallelSaveStrategyWrapper(strategy)
    with on_cpu():
        mcore.save(entities(axis), str(path), strategy, content_metadata={"kind": "test"})


def load(path: Path, by: str, axis: int = 0, wrapped: bool = False, rows: int = 12) -> None:
    """Loads, and compares with what was saved."""
    strategy = LOADS[by]()
    if wrapped:
        strategy = fully_parallel.FullyParallelLoadStrategyWrapper(strategy)
    blank, wanted = entities(axis, blank=True, rows=rows), expected(axis, rows=rows)
    patches = [mock.patch.object(fully_parallel, "exchange_by_distribution", exchange_on_cpu)]
    with on_cpu(), contextlib.ExitStack() as stack:
        for patch in patches if wrapped else []:
            stack.enter_context(patch)
        loaded = mcore.load(blank, str(path), strategy)
        assert mcore.load_content_metadata(str(path)) == {"kind": "test"}
    loaded.pop("content_metadata")
    assert_same(loaded, wanted)


def exchange_on_cpu(loaded: Any, unloaded: Any, distribution: Any, group: Any, _: Any) -> Any:
    """Megatron's other algorithms make buffers on CUDA devices."""
    from megatron.core.dist_checkpointing.exchange_utils import exchange_loaded_tensors_gather_object

    return exchange_loaded_tensors_gather_object(loaded, unloaded, distribution, group)


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints of both strategies, of two ranks: `fast` and `stock`."""
    path = tmp_path_factory.mktemp("megatron")
    for by in SAVES:
        worlds.run(2, save, path / by, by, timeout_s=120)
    return path


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("by", "other"), [("fast", "fast"), ("fast", "stock"), ("stock", "fast")])
@pytest.mark.parametrize("axis", [0, 1])
def test_all_entities_load_along_any_axis(
    worlds: Worlds, saved: Path, by: str, other: str, axis: int, wrapped: bool
) -> None:
    worlds.run(2, load, saved / by, other, axis, wrapped)
