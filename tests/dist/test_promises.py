"""Failures about the time of a commit: who is named, and whether the checkpoint may exist."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from failing_ranks import (
    AMPLE_S,
    LIMIT_S,
    MARGIN_S,
    Failure,
    answers,
    failure_of,
    mortal_ranks,
)
from ranks import Worlds
from support.freezing import freeze

import torch_ckpt
from torch_ckpt import FastWriter
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.coordination.group import Call, group_of
from torch_ckpt.errors import RankTimeoutError

pytestmark = pytest.mark.timeout(120)

FREEZE_S = 4.0


def save_interrupted_before_the_promise(path: Path) -> tuple[bool | None, bool]:
    """Rank 1 is interrupted. It promises before its failure is sent."""
    group = dist.new_group(backend="gloo")
    group_of(group).call(AMPLE_S).barrier("beginning")
    is_late = dist.get_rank() == 1
    fail, finish, publish = Call.fail, FastWriter.finish, CheckpointTransaction.commit

    def fail_late(self: Call, *args: Any) -> Any:
        time.sleep(4)
        return fail(self, *args)

    def finish_late(self: FastWriter, *args: Any, **options: Any) -> None:
        time.sleep(2)
        finish(self, *args, **options)

    def publish_slowly(self: CheckpointTransaction, *args: Any) -> None:
        publish(self, *args)
        time.sleep(4)

    exchange = Call._exchange

    def interrupted(self: Call, phase: str, *args: Any, **options: Any) -> Any:
        if is_late and phase == "writing":
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 1)
        return exchange(self, phase, *args, **options)

    state = {f"w{dist.get_rank()}": torch.ones(8)}
    with (
        mock.patch.object(Call, "fail", fail_late if is_late else fail),
        mock.patch.object(FastWriter, "finish", finish_late),
        mock.patch.object(CheckpointTransaction, "commit", publish_slowly),
        mock.patch.object(Call, "_exchange", interrupted),
        pytest.raises(KeyboardInterrupt if is_late else RankTimeoutError) as caught,
    ):
        torch_ckpt.save(state, checkpoint_id=path, process_group=group, timeout_s=AMPLE_S)
    error: Any = caught.value
    return getattr(error, "may_be_committed", None), (path / ".metadata").exists()


@pytest.mark.slow
def test_a_failure_that_is_sent_after_the_promise_says_that_the_checkpoint_may_exist(
    worlds: Worlds, tmp_path: Path
) -> None:
    seen = worlds.run(2, save_interrupted_before_the_promise, tmp_path / "c", timeout_s=LIMIT_S)
    may_be_committed, is_committed = seen[0]
    assert is_committed
    assert may_be_committed


def save_beside_a_rank_that_freezes_before_its_promise(path: Path, victim: int) -> Failure:
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid{rank}", str(os.getpid()))
    state = {f"w{rank}": torch.ones(8)}
    torch_ckpt.save(state, checkpoint_id=path / "0", timeout_s=AMPLE_S)
    pid, finish = int(store.get(f"pid{victim}")), FastWriter.finish

    def freeze_and_finish(self: FastWriter, *args: Any, **options: Any) -> None:
        freeze(pid)
        finish(self, *args, **options)

    begin = time.monotonic()
    with (
        mock.patch.object(FastWriter, "finish", freeze_and_finish),
        pytest.raises(RankTimeoutError) as caught,
    ):
        torch_ckpt.save(state, checkpoint_id=path / "1", timeout_s=FREEZE_S)
    assert time.monotonic() - begin < FREEZE_S + MARGIN_S
    assert not (path / "1" / ".metadata").exists()
    relay = group_of(None).connections.current
    assert relay is not None
    errors = [call.error for call in relay.calls if call.error is not None]
    assert errors
    for error in errors:  # The frames of a traceback would keep the state dict.
        assert error.__traceback__ is None
    return failure_of(caught.value)


@pytest.mark.thin("1")
@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_freezes_before_its_promise_is_named(tmp_path: Path, victim: int) -> None:
    args = save_beside_a_rank_that_freezes_before_its_promise, tmp_path, victim
    with mortal_ranks(3, None, *args) as pipes:
        seen = answers([pipes[rank] for rank in {0, 1, 2} - {victim}])
    for failure in seen:
        assert failure.ranks == (victim,), seen
        assert f"rank {victim} is slow, stuck or gone" in failure.message
