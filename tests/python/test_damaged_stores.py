"""Restores from storage that fails for each read of a file of the newest step."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt import Run
from torch_ckpt._core import _native
from torch_ckpt.errors import StorageError, is_damage
from torch_ckpt.filesystems.fsspec_client import FsspecClient
from torch_ckpt.filesystems.location import Location, register
from torch_ckpt.storage.verify import examine

DAMAGE = errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ


class _Store(FsspecClient):
    """A store in memory whose reads of some files fail."""

    def __init__(self) -> None:
        super().__init__("memory")
        self.fails, self.number = ("none", "none"), 0
        self.error: Callable[[], Exception] | None = None
        register("damaged", _native.StoreFileSystem(self))

    def get(self, path: str, *args: Any) -> Any:
        if all(part in path for part in self.fails):
            if self.error is not None:
                raise self.error()
            raise StorageError(f"cannot read {path}", self.number)
        return super().get(path, *args)


@pytest.fixture(scope="module")
def store() -> Iterator[_Store]:
    MemoryFileSystem.store.clear()
    store = _Store()
    with Run("damaged://run", record=False) as run:
        for step in (1, 2):
            run.save(step, {"w": torch.full((100,), float(step))})
    yield store
    MemoryFileSystem.store.clear()


@pytest.mark.filterwarnings("ignore:step 1 was restored")
@pytest.mark.parametrize("file", ["/.metadata", "/.index", ".distcp"])
@pytest.mark.parametrize("number", DAMAGE, ids=errno.errorcode.get)
def test_a_step_is_passed_over_if_the_file_system_or_the_sector_is_damaged(
    store: _Store, file: str, number: int
) -> None:
    state = {"w": torch.zeros(100)}
    store.fails, store.number, store.error = ("step-2", file), number, None
    with pytest.warns(UserWarning, match="step 2 is passed over"):
        assert Run("damaged://run", record=False).restore(state) == 1
    assert state["w"][0] == 1


def in_library(error: Callable[[], Exception]) -> Callable[[], Exception]:
    """Returns a function for the error of a client, given that of its library."""

    def raised() -> Exception:
        with pytest.raises(StorageError) as caught, FsspecClient("memory")._naming("read", "run"):
            raise error()
        return caught.value

    return raised


def numbered(number: object) -> StorageError:
    error = StorageError("it is busy")
    error.errno = number  # type: ignore[assignment]
    return error


REFUSED: dict[str, Callable[[], Exception]] = {
    "no code": in_library(lambda: RuntimeError("it is busy")),
    "an OSError without a code": in_library(lambda: OSError("it is busy")),
    "EIO, which s3fs raises for most answers": in_library(lambda: OSError(errno.EIO, "it is busy")),
    "wrong settings": in_library(lambda: OSError(errno.EINVAL, "it is busy")),
    "a client's own error without a code": lambda: StorageError("it is busy"),
    "a code that is no number": lambda: numbered("busy"),
    "an error of no client": lambda: RuntimeError("it is busy"),
}


@pytest.mark.parametrize("file", ["/.metadata", "/.index", ".distcp"])
@pytest.mark.parametrize("name", REFUSED)
def test_an_error_without_a_code_of_damage_is_not_damage(
    store: _Store, file: str, name: str
) -> None:
    state, run = {"w": torch.zeros(100)}, Run("damaged://run", record=False)
    store.fails, store.error = ("step-2", file), REFUSED[name]
    with pytest.raises((StorageError, CheckpointException), match="it is busy"):
        run.restore(state)
    assert state["w"][0] == 0
    with pytest.raises(StorageError, match="it is busy") as raised:
        examine(Location("damaged://run/step-2"))
    assert not is_damage(raised.value)


@pytest.mark.parametrize("file", ["/.metadata", "/.index"])
@pytest.mark.parametrize("name", REFUSED)
def test_retention_keeps_a_best_step_that_cannot_be_read_for_a_moment(
    store: _Store, file: str, name: str
) -> None:
    store.fails = ("none", "none")
    path = f"damaged://{name.replace(' ', '-')}{file[1:]}"
    run = Run(path, keep_last=1, keep_best=1, monitor="loss", record=False)
    for step in (1, 2, 3):
        run.save(step, {"w": torch.ones(100)}, metrics={"loss": step})
        store.fails, store.error = ("step-1", file), REFUSED[name]
    store.fails = ("none", "none")
    assert run.best_step() == 1


def test_no_refusal_of_an_object_store_is_damage() -> None:
    pytest.importorskip("obstore")
    from obstore import exceptions

    from torch_ckpt.filesystems.obstore_client import ObstoreClient

    client = ObstoreClient("s3", {})
    panic = type("PanicException", (BaseException,), {})
    answers = [f"Server returned non-2xx status code: {n} it is busy" for n in range(400, 600)]
    refused = [exceptions.GenericError(text) for text in (*answers, "builder error", "no answer")]
    odd = [exceptions.NotSupportedError("no"), exceptions.JoinError("no"), ValueError("no")]
    for error in (*refused, *odd, panic("no")):
        with pytest.raises(StorageError) as raised, client._naming("read", "bucket/key"):
            raise error
        assert not is_damage(raised.value), error
