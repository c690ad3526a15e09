"""Clients of stores whose exceptions are not as they should be: an error, never an abort."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint import CheckpointException

import torch_ckpt
from torch_ckpt import CheckpointError
from torch_ckpt._core import _native
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.fsspec_client import FsspecClient
from torch_ckpt.filesystems.location import register

pytestmark = pytest.mark.timeout(60)


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


class NoText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class Uncertain(StorageError):
    @property
    def errno(self) -> int:  # type: ignore[override]
        raise RuntimeError("no number")

    @errno.setter
    def errno(self, value: object) -> None:
        pass


def numbered(number: object) -> StorageError:
    error = StorageError("it has failed")
    error.errno = number  # type: ignore[assignment]
    return error


ODD: dict[str, Callable[[], BaseException]] = {
    "errno is text": lambda: numbered("ENOSPC"),
    "errno is an object": lambda: numbered(object()),
    "errno is huge": lambda: numbered(1 << 80),
    "errno raises": lambda: Uncertain("it has failed"),
    "str raises": Silent,
    "str is no text": NoText,
    "no exception of Python's": lambda: type("Other", (BaseException,), {})("it has failed"),
    "not to be decoded": lambda: OSError("\udcff"),
}
CALLS = ["find", "get", "put", "put_stream", "list", "remove", "remove_all", "copy"]


def test_the_calls_are_those_of_a_client() -> None:
    methods = inspect.getmembers(FsspecClient, inspect.isfunction)
    assert set(CALLS) == {name for name, _ in methods if not name.startswith("_")}


@pytest.mark.thin(0.25)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("call", CALLS)
def test_a_client_may_raise_anything(monkeypatch: pytest.MonkeyPatch, call: str, name: str) -> None:
    client: Any = FsspecClient("memory")
    register("odd", _native.StoreFileSystem(client))
    state = {"w": torch.ones(3 << 20), "n": [1]}
    path = f"odd://tests/{call}/{name}"
    torch_ckpt.save(state, checkpoint_id=path, no_dist=True)
    raised = []

    def fail(*_: object) -> Any:
        raised.append(call)
        raise ODD[name]()

    monkeypatch.setattr(client, call, fail)
    for attempt in (torch_ckpt.load, torch_ckpt.save):
        with contextlib.suppress(CheckpointError, CheckpointException):
            attempt(state, checkpoint_id=path, no_dist=True)
    assert raised or call in ("list", "remove_all", "copy")
    monkeypatch.undo()
    torch_ckpt.save(state, checkpoint_id=path, no_dist=True)
    MemoryFileSystem.store.clear()
