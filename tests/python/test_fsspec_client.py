"""A client of fsspec: writes that fail or are killed in the middle, listings, error codes."""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import FastWriter
from torch_ckpt._core import _native
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.fsspec_client import FsspecClient
from torch_ckpt.filesystems.location import Location, register
from torch_ckpt.filesystems.store_client import pending_path

pytestmark = pytest.mark.timeout(30, method="thread")  # A hang would be in C++.


class _FailingFile:
    """Fails as clients do that run a loop of their own, such as s3fs.

    Their exception is in a cycle with its traceback, so all frames of the traceback live on.
    """

    def __enter__(self) -> _FailingFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, _contents: bytes) -> None:
        result = [OSError("the store is gone")]
        raise result[0]

    def discard(self) -> None:
        pass


class _FailingStore(MemoryFileSystem):  # type: ignore[misc]
    protocol = "failing"
    cachable = False

    def open(self, path: str, *args: Any, **options: Any) -> Any:
        return _FailingFile() if path.endswith(".distcp") else super().open(path, *args, **options)


@pytest.fixture
def without_gc() -> Iterator[None]:
    fsspec.register_implementation("failing", _FailingStore, clobber=True)
    register("failing", _native.StoreFileSystem(FsspecClient("failing")))
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.usefixtures("without_gc")
def test_a_failed_upload_returns_its_memory() -> None:
    state = {"w": torch.zeros(20 << 20, dtype=torch.uint8)}
    with pytest.raises(CheckpointException, match="the store is gone"):
        torch_ckpt.save(state, storage_writer=FastWriter("failing://tests/step"))


@pytest.mark.parametrize("use_collectives", [True, False])
def test_the_next_save_removes_what_a_killed_write_has_left(
    tmp_path: Path, use_collectives: bool
) -> None:
    """A rank that saves without the others leaves theirs alone."""
    step = Location(f"memory://tests/{tmp_path.name}/{use_collectives}")
    files = ["__0_0_0123456789abcdef.distcp", "__1.metadata", ".metadata"]
    names = [pending_path(file).strip("/") for file in files]
    for name in names:
        (step / name).write(b"0", sync=True)
    writer = FastWriter(str(step))
    torch_ckpt.save({"w": torch.zeros(5)}, storage_writer=writer, use_collectives=use_collectives)
    left = [] if use_collectives else names[1:]
    assert sorted(set(step.names()).intersection(names)) == sorted(left)


@pytest.mark.parametrize("url", ["memory://", "memory:///"])
def test_a_run_may_be_the_root_of_a_store(url: str) -> None:
    run = torch_ckpt.Run(url, keep_last=2)
    try:
        for step in (1, 2, 3):
            run.save(step, {"w": torch.full((3,), float(step))})
        loaded = {"w": torch.zeros(3)}
        assert torch_ckpt.Run(url).restore(loaded) == 3
        assert torch.equal(loaded["w"], torch.full((3,), 3.0))
        assert not (Location(url) / "step-1").names()
    finally:
        run.close()
        Location(url).remove_all()


class _ListingStore(MemoryFileSystem):  # type: ignore[misc]
    """Looks a file up in the listing of its folder, which it keeps, as that of ``hf://`` does."""

    protocol = "listing"
    cachable = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.listings: dict[str, list[dict[str, Any]]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("listing://", "memory://")))

    def ls(self, path: str, detail: bool = True, refresh: bool = False, **_: Any) -> Any:
        path = self._strip_protocol(path)
        if refresh or path not in self.listings:
            self.listings[path] = super().ls(path, detail=True)
        found = self.listings[path]
        return found if detail else [one["name"] for one in found]

    def info(self, path: str, refresh: bool = False, **_: Any) -> Any:
        path = self._strip_protocol(path)
        for one in self.ls(self._parent(path), refresh=refresh):
            if one["name"] == path:
                return one
        raise FileNotFoundError(path)


def test_a_client_that_keeps_listings_hides_no_file_of_another_process(tmp_path: Path) -> None:
    fsspec.register_implementation("listing", _ListingStore, clobber=True)
    register("listing", _native.StoreFileSystem(FsspecClient("listing")))
    folder = Location(f"listing://tests/{tmp_path.name}")
    theirs = Location(f"memory://tests/{tmp_path.name}")  # Another client of the same store.
    (folder / "mine").replace(b"1", sync=True)
    assert not (folder / "new").exists()
    (theirs / "new").replace(b"22", sync=True)
    (theirs / "mine").replace(b"4444", sync=True)
    assert (folder / "new").exists()
    assert (folder / "mine").read() == b"4444"
    (theirs / "new").discard()
    assert not (folder / "new").exists()


class _PlainStore(MemoryFileSystem):  # type: ignore[misc]
    """Knows no other options than that of ``sftp://`` does."""

    protocol = "plain"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("plain://", "memory://")))

    def ls(self, path: str, detail: bool = False) -> Any:
        return super().ls(path, detail=detail)

    def info(self, path: str) -> Any:
        return super().info(path)


def test_a_client_gets_no_options_that_it_does_not_know(tmp_path: Path) -> None:
    fsspec.register_implementation("plain", _PlainStore, clobber=True)
    register("plain", _native.StoreFileSystem(FsspecClient("plain")))
    run = torch_ckpt.Run(f"plain://tests/{tmp_path.name}", keep_last=1)
    for step in (1, 2):
        assert run.save(step, {"w": torch.full((3,), float(step))})
    loaded = {"w": torch.zeros(3)}
    assert run.restore(loaded) == 2
    assert torch.equal(loaded["w"], torch.full((3,), 2.0))
    run.close()
    assert not Location(f"plain://tests/{tmp_path.name}/step-1").names()


class _Slow(FsspecClient):
    """Does not reach the bucket "down" before a test lets it."""

    def __init__(self) -> None:
        super().__init__("memory")
        self.waits, self.ends = threading.Event(), threading.Event()

    def _connect(self, first: str) -> Any:
        if first == "down":
            self.waits.set()
            assert self.ends.wait(60)
        return super()._connect(first)


def test_a_bucket_without_an_answer_does_not_delay_another_one() -> None:
    client = _Slow()
    client.put("up/a", b"abc", None)
    with ThreadPoolExecutor() as executor:
        try:
            late = executor.submit(client.list, "down")
            assert client.waits.wait(60)
            assert executor.submit(client.get, "up/a", 1, 2).result(20) == b"bc"
        finally:
            client.ends.set()
        assert late.result(60) == []


def test_the_warning_about_a_slow_client_appears_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also if the client has connected again, because a request had no answer."""
    client = FsspecClient("memory")
    for _ in range(2):
        client.put("b/a", b"abc", None)
        with pytest.raises(StorageError), client._naming("read", "b/a"):
            raise TimeoutError(errno.ETIMEDOUT, "no answer")
    assert caplog.text.count("through fsspec, which is slow") == 1


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (PermissionError, errno.EACCES),
        (TimeoutError, errno.ETIMEDOUT),
        (ConnectionResetError, errno.ETIMEDOUT),
        (ValueError, None),
    ],
)
def test_an_error_without_a_code_has_that_of_its_class(
    kind: type[Exception], number: int | None
) -> None:
    client = FsspecClient("memory")
    with pytest.raises(StorageError) as raised, client._naming("read", "b/a"):
        raise kind("no code")
    assert raised.value.errno == number
