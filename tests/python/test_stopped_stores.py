"""A store that stops answering: what only reads it raises before its deadline, and works later."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from torch_ckpt import Run
from torch_ckpt._core import _native
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.fsspec_client import FsspecClient
from torch_ckpt.filesystems.location import register

TIMEOUT_S = 0.5
SOON_S = 5.0


class Stopping(MemoryFileSystem):  # type: ignore[misc]
    """Answers requests to read only while a test lets it."""

    protocol = "stopping"
    cachable = False
    answers = threading.Event()

    def _answer(self) -> None:
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


@pytest.fixture
def stopping() -> Iterator[threading.Event]:
    register_implementation("stopping", Stopping, clobber=True)
    register("stopping", _native.StoreFileSystem(FsspecClient("stopping")))
    MemoryFileSystem.store.clear()
    Stopping.answers.set()
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
        assert time.monotonic() - begin < SOON_S
        assert caught.value.errno == errno.ETIMEDOUT
        stopping.set()
        assert CALLS[name](run) == 1
