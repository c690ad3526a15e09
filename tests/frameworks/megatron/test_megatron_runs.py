"""Sharded state dicts of Megatron-Core in a run, with and without the agent."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Worlds, run_ranks
from states import assert_same

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing import ShardedTensor
from megatron_states import KEYS, entities, expected, on_cpu, shard

from torch_ckpt import Run
from torch_ckpt.frameworks.megatron.sharded_state import ShardedState

pytestmark = [pytest.mark.framework("megatron"), pytest.mark.timeout(180)]

AGENT = {"asynchronous": True, "agent": True}


def save(path: Path, options: dict[str, Any]) -> None:
    with on_cpu(), Run(path, **options) as run:
        for step in (1, 2):
            run.save(step, {"model": ShardedState(entities(0)), "step": step})


def save_and_die(path: Path) -> None:
    """Leaves a step in the memory of the agent alone."""
    with on_cpu():
        run = Run(path, **AGENT)
        run.save(2, {"model": ShardedState(entities(0)), "step": 2}, persist=False)
        run.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def restore(path: Path, options: dict[str, Any]) -> None:
    """Restores all entities on as many ranks."""
    with on_cpu(), Run(path, **options) as run:
        state = {"model": ShardedState(entities(0, blank=True)), "step": 0}
        assert run.restore(state) == 2
        assert state["step"] == 2
        assert_same(state["model"].loaded, expected(0))


def restore_keys(path: Path, options: dict[str, Any]) -> None:
    """Restores the tensors along another axis, on any number of ranks."""
    with on_cpu(), Run(path, **options) as run:
        sharded = {key: shard(key, 1, blank=True) for key in KEYS}
        state = {"model": ShardedState(sharded)}
        assert run.restore(state) == 2
        for key in KEYS:
            assert_same(state["model"].loaded[key], shard(key, 1).data)


@pytest.mark.small
def test_a_run_saves_and_restores_sharded_state_dicts(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save, tmp_path, {})
    worlds.run(2, restore, tmp_path, {})
    worlds.run(3, restore_keys, tmp_path, {})


@pytest.mark.usefixtures("memory")
@pytest.mark.thin("1")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_restore_from_memory_what_other_ranks_saved(ranks: int, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(2, save_and_die, tmp_path)
    shutil.rmtree(tmp_path / "step-2", ignore_errors=True)  # Persisted after the death.
    run_ranks(ranks, restore if ranks == 2 else restore_keys, tmp_path, AGENT)


def test_a_tensor_without_data_is_an_error(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(1, save_nothing, tmp_path)


def save_nothing(path: Path) -> None:
    empty = ShardedTensor.from_rank_offsets("w", torch.ones(3))
    empty.data = None
    with pytest.raises(ValueError, match="cannot save or load 'w'"):
        Run(path).save(1, {"model": ShardedState({"w": empty})})
