"""A store that stops answering: what only reads it raises before its deadline, and works later.

And it delays the end of a run once, not once for each thread that waits for it.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from waits import until

from torch_ckpt import Run
from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.filesystems.fsspec_client import FsspecClient
from torch_ckpt.filesystems.location import register
from torch_ckpt.ladder import promotion_wait
from torch_ckpt.records import event_log

TIMEOUT_S = 1.5
SOON_S = 5.0


class Stopping(MemoryFileSystem):  # type: ignore[misc]
    """Answers requests only while a test lets it."""

    protocol = "stopping"
    cachable = False
    answers = threading.Event()
    stopped: ClassVar[set[str]] = set()  # Names of threads that have waited.

    def _answer(self) -> None:
        if not self.answers.is_set():
            self.stopped.add(threading.current_thread().name)
        assert self.answers.wait(60)

    def ls(self, *arguments: Any, **options: Any) -> Any:
        self._answer()
        return super().ls(*arguments, **options)

    def info(self, *arguments: Any, **options: Any) -> Any:
        self._answer()
        return super().info(*arguments, **options)

    def cat_file(self, *arguments: Any, **options: Any) -> Any:
        self._answer()
        return super().cat_file(*arguments, **options)

    def pipe_file(self, *arguments: Any, **options: Any) -> Any:
        self._answer()
        return super().pipe_file(*arguments, **options)


@pytest.fixture
def stopping() -> Iterator[threading.Event]:
    register_implementation("stopping", Stopping, clobber=True)
    register("stopping", _native.StoreFileSystem(FsspecClient("stopping")))
    MemoryFileSystem.store.clear()
    Stopping.answers.set()
    Stopping.stopped.clear()
    yield Stopping.answers
    Stopping.answers.set()


CALLS: dict[str, Callable[[Run], Any]] = {
    "latest_step": Run.latest_step,
    "best_step": Run.best_step,
    "restore": lambda run: run.restore({"w": torch.zeros(3)}),
    "step_at": lambda run: run.step_at("9998-01-01"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", CALLS)
def test_a_read_of_a_stopped_store_ends_at_the_deadline_and_names_the_store(
    stopping: threading.Event, name: str
) -> None:
    options: dict[str, Any] = {"monitor": "loss", "record": False}
    with Run("stopping://runs/gpt", timeout_s=60, **options) as run:
        run.save(1, {"w": torch.ones(3)}, metrics={"loss": 1.0})
    with Run("stopping://runs/gpt", timeout_s=TIMEOUT_S, **options) as run:
        stopping.clear()
        begin = time.monotonic()
        with pytest.raises(StorageError, match="stopping://runs/gpt has not answered") as caught:
            CALLS[name](run)
        waited_s = time.monotonic() - begin
        assert waited_s < SOON_S
        stated = re.search(r"not answered for ([\d.]+) s", str(caught.value))
        assert stated
        assert float(stated[1]) <= waited_s + 0.05  # It is rounded.
        assert caught.value.errno == errno.ETIMEDOUT
        stopping.set()
        assert CALLS[name](run) == 1


def end_by_close(run: Run) -> None:
    with pytest.raises(CheckpointError, match="still being promoted"):
        run.close()


def end_by_error(run: Run) -> None:
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError


def end_by_signal(run: Run) -> None:
    def train() -> None:
        with run, run.saving_on_signal(lambda: state_of(2), grace_s=1):
            os.kill(os.getpid(), signal.SIGTERM)
            run.should_save(2)

    with pytest.raises(SystemExit):
        train()


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(step))}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("end", "last_wait_s"), [(end_by_close, 0.5), (end_by_error, 0.5), (end_by_signal, 60.0)]
)
def test_a_stopped_store_delays_the_end_of_a_run_once(
    stopping: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Run], None],
    last_wait_s: float,
) -> None:
    monkeypatch.setattr(promotion_wait, "END_S", last_wait_s)
    monkeypatch.setattr(event_log, "_CLOSE_S", 60.0)
    run = Run("stopping://runs/gpt", local=tmp_path, asynchronous=True, timeout_s=5)
    run.save(1, state_of(1))
    run.wait(promoted=True)
    stopping.clear()
    run.save(2, state_of(2))
    until(lambda: Stopping.stopped >= {"torch_ckpt-promote", "torch_ckpt-events"})
    begin = time.monotonic()
    end(run)
    assert time.monotonic() - begin < 25
    stopping.set()
    with Run("stopping://runs/gpt", local=tmp_path) as after:
        after.wait(promoted=True)
        assert after.latest_step() == 2
