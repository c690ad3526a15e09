"""Several ranks hold a step that they read, while another process saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import on_ranks
from support.run_steps import save_steps, state_of, steps_in
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import Run
from torch_ckpt.commits.leases import leases_of
from torch_ckpt.filesystems.location import Location

pytestmark = pytest.mark.timeout(150)


@on_ranks(2)
def test_a_step_remains_until_the_last_rank_has_read_it(path: Path) -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    if rank == 0:
        save_steps(path, 1, process_group=groups[0])
    dist.barrier()
    with torch_ckpt.reading(path / "step-1") as step:
        dist.barrier()
        assert leases_of(Location(path)) == {1: 2}
        torch_ckpt.load(state_of(-1), checkpoint_id=step)
    dist.barrier()
    with torch_ckpt.reading(path / "step-1") if rank else Run(path, process_group=groups[0]):
        dist.barrier()
        if rank == 0:
            save_steps(path, 2, keep_last=1, process_group=groups[0])
            assert steps_in(path) == [1, 2]
        dist.barrier()
    dist.barrier()
    if rank == 0:
        save_steps(path, 3, keep_last=1, process_group=groups[0])
        assert steps_in(path) == [3]


@on_ranks(2)
def test_a_rank_whose_load_fails_under_a_lease_ends_it_on_all(path: Path) -> None:
    rank = dist.get_rank()
    torch_ckpt.save(state_of(1), checkpoint_id=path)
    state = state_of(-1) | ({"more": 1} if rank else {})
    with pytest.raises(CheckpointException), torch_ckpt.reading(path):
        torch_ckpt.load(state, checkpoint_id=path, timeout_s=60)
    dist.barrier()
    assert not list(path.glob(".lease-*"))
