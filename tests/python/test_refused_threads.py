"""Work whose thread the system refuses has failed: it does not run later."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from torch_ckpt import SnapshotStager
from torch_ckpt.coordination.waiting import OwnFuture, submitted
from torch_ckpt.errors import CheckpointError


@contextmanager
def no_threads() -> Iterator[None]:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with mock.patch.object(threading.Thread, "start", refuse):
        yield


class Argument:
    """Something large."""


def test_work_that_was_refused_does_not_run_with_the_next_and_keeps_nothing() -> None:
    ran: list[Any] = []
    argument = Argument()
    there = weakref.ref(argument)
    with ThreadPoolExecutor(2) as executor:
        with no_threads(), pytest.raises(CheckpointError, match="can't start new thread"):
            submitted(executor, ran.append, argument, future=OwnFuture())
        del argument
        gc.collect()
        assert there() is None
        submitted(executor, ran.append, "the next", future=OwnFuture()).result(10)
        submitted(executor, ran.append, "another", future=OwnFuture()).result(10)
    assert sorted(ran) == ["another", "the next"]


def test_a_copy_that_was_refused_does_not_run_and_its_memory_is_free() -> None:
    stager = SnapshotStager(blocking=False)
    copied = []
    copy = SnapshotStager._copy

    def noted(self: SnapshotStager, *args: Any) -> None:
        copied.append(args)
        copy(self, *args)

    state = {"w": torch.ones(1000)}
    with mock.patch.object(SnapshotStager, "_copy", noted):
        with no_threads(), pytest.raises(CheckpointError, match="can't start new thread"):
            stager.stage(state)
        assert not stager.is_busy
        staged: Any = stager.stage(state)
        assert staged.result(10)["w"].eq(1).all()
        stager.wait_staged()
    assert len(copied) == 1
    stager.close()
