"""Checkpoints of an old megatron-core, loaded by several ranks and by a later megatron-core."""

from __future__ import annotations

from typing import Any
from unittest import mock

import golden_megatron
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from states import assert_same, local_part, sharded
from support.exchanging import Exchanging
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from torch_ckpt import FastLoadPlanner, FastReader

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

PLANNERS = {"stock": DefaultLoadPlanner, "fast": FastLoadPlanner}
FLAT = "optimizer.state.exp_avg."


def load_shards(planner: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = golden_megatron.full_state()
    for dim in (0, 1, None):
        placements = {
            name: (Replicate() if dim is None or len(shape) <= dim else Shard(dim),)
            for name, (shape, _, _) in golden_megatron.PARAMETERS.items()
        }
        state: dict[str, Any] = {}
        for fqn, value in full.items():
            if isinstance(value, torch.Tensor):
                placement = placements[fqn.removeprefix(FLAT)]
                state[fqn] = sharded(torch.zeros_like(value), mesh, placement)
            else:
                state[fqn] = None
        dcp.load(
            state, storage_reader=Exchanging(golden_megatron.GOLDEN), planner=PLANNERS[planner]()
        )
        for fqn, value in full.items():
            if isinstance(value, torch.Tensor):
                placement = placements[fqn.removeprefix(FLAT)]
                assert_same(state[fqn].to_local(), local_part(value, mesh, placement))
            else:
                assert state[fqn] == value


@pytest.mark.parametrize("planner", PLANNERS)
def test_two_ranks_load_any_shards_of_what_four_have_saved(worlds: Worlds, planner: str) -> None:
    worlds.run(2, load_shards, planner)


def load_with_megatron(tp: int) -> None:
    """Loads with megatron-core as it loads an optimizer that is ``fully_reshardable``."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    rank, full = dist.get_rank(), golden_megatron.full_state()
    state: dict[str, Any] = {}
    expected: dict[str, Any] = {"iteration": 7}
    for saved in range(4):
        state[f"rng.{saved}"] = ShardedObject("rng_state", None, (4,), (saved,), replica_id=rank)
        expected[f"rng.{saved}"] = full[f"rng_state/shard_{saved}_4"][0]
    for name, (shape, axis, cuts) in golden_megatron.PARAMETERS.items():
        for fqn in (name, FLAT + name):
            part = full[fqn] if axis is None else full[fqn].chunk(tp, axis)[rank]
            places = [] if axis is None else [(axis, rank, tp)]
            layers = range(len(cuts)) if len(cuts) > 1 else [None]
            for layer in layers:
                target = part if layer is None else part[layer]
                at = places if layer is None else [(0, layer, shape[0]), *places]
                state[f"{fqn}.{layer}"] = ShardedTensor.from_rank_offsets(
                    fqn,
                    torch.zeros_like(target, memory_format=torch.contiguous_format),
                    *at,
                    prepend_axis_num=int(layer is not None),
                    replica_id=rank if axis is None else 0,
                )
                expected[f"{fqn}.{layer}"] = target
    with mock.patch.object(
        strategies, "_get_filesystem_reader", lambda path, *_, **__: FastReader(path)
    ):
        loaded = dist_checkpointing.load(state, str(golden_megatron.GOLDEN))
    loaded.pop("content_metadata", None)
    assert_same(loaded, expected)


@pytest.mark.framework("megatron")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_later_megatron_loads_flattened_states_at_another_layout(worlds: Worlds, tp: int) -> None:
    worlds.run(tp, load_with_megatron, tp)
