"""What ranks pass along the tree is what torch's own collectives give them; no rank hangs in it."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from states import assert_same, full_value
from test_deadlines import (
    AMPLE_S,
    COLLECTIVE_TIMEOUT_S,
    DEADLINE_S,
    LIMIT_S,
    MARGIN_S,
    Failure,
    StickyError,
    failure_of,
    mortal_ranks,
    own_state,
    state_of_process,
    train,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

import torch_ckpt
from torch_ckpt import RankTimeoutError, deadline, tree_exchange
from torch_ckpt.deadline import BoundedExchange, bounded_call
from torch_ckpt.roll_call import RollCalls
from torch_ckpt.tree_exchange import TreeExchange, _Passing

pytestmark = pytest.mark.timeout(120)


def node_of(rank: int) -> int:
    """Uneven nodes, their ranks scattered."""
    return [7, 3, 7, 3, 3, 9, 7, 3][rank % 8]


def on_nodes() -> Any:
    """Has each rank of a group that meets for the first time say that it is on such a node."""
    return mock.patch.object(tree_exchange, "_node_id", lambda: node_of(dist.get_rank()))


def payload_of(rank: int, seed: int) -> Any:
    rng = random.Random(100 * seed + rank)
    # None, what just fits into a first message and what just does not, and what never does.
    sizes = [0, 1, 16_300, *range(16_340, 16_400, 7), 100_000, 10 << 20]
    return [None, b"", {"rank": rank}, rng.randbytes(rng.choice(sizes)), LookupError(rank)][
        rng.randrange(5)
    ]


def shown(value: Any) -> Any:
    """Comparable: exceptions are not."""
    if isinstance(value, list):
        return [shown(one) for one in value]
    return repr(value) if isinstance(value, BaseException) else value


def exchange_as_torch_does(fan_out: int, members: list[int], roots: list[int]) -> None:
    group = dist.new_group(members, backend="gloo")
    if dist.get_rank() not in members:
        return
    with on_nodes():
        for root in roots:
            for seed in range(4):
                exchange_once(group, fan_out, root, seed)


def exchange_once(group: dist.ProcessGroup, fan_out: int, root: int, seed: int) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = payload_of(rank, seed)
    values = [payload_of(rank, seed + 50) for rank in range(size)]
    values = [values[rank // 3 * 3] for rank in range(size)]  # Some for several ranks.
    given = values if rank == root else None
    torchs = _DistWrapper(group, True, root)
    with bounded_call(AMPLE_S, fan_out=fan_out, group=group):
        ours = BoundedExchange(group, True, root)
        for name, value in {
            "gather_object": own,
            "scatter_object": given,
            "broadcast_object": values[0] if rank == root else None,
            "all_gather_object": own,
        }.items():
            expected = shown(getattr(torchs, name)(value))
            assert shown(getattr(ours, name)(value)) == expected, (name, rank, root, seed)


@pytest.mark.parametrize("fan_out", [2, 3, 16])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_exchanges_along_a_tree_give_what_torchs_give(
    worlds: Worlds, size: int, fan_out: int
) -> None:
    roots = [0, size - 1]
    worlds.run(size, exchange_as_torch_does, fan_out, list(range(size)), roots)


def test_exchanges_of_a_subgroup_without_rank_0_give_what_torchs_give(worlds: Worlds) -> None:
    worlds.run(8, exchange_as_torch_does, 2, [1, 2, 4, 5, 7], [0, 3])
