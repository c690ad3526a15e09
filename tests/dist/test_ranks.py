"""The worlds of ranks in which tests run."""

from __future__ import annotations

import faulthandler
import os
import time

import pytest
import torch.distributed as dist
from ranks import RankError, Ranks


def test_a_world_that_was_killed_starts_anew_at_the_next_call() -> None:
    with Ranks(2) as ranks:
        former = ranks.run(os.getpid)
        with pytest.raises(RankError, match="not done when they were killed"):
            ranks.run(time.sleep, 60, timeout_s=0)
        assert ranks.run(dist.get_rank) == [0, 1]
        assert not set(former) & set(ranks.pids)


def test_a_rank_that_crashes_says_where() -> None:
    with Ranks(2) as ranks, pytest.raises(RankError, match=r"(?s)exit code -11.*in _serve"):
        ranks.run(faulthandler._sigsegv)
