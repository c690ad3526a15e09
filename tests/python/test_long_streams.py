"""Files on stores that become longer than their save has planned, and the limits of uploads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from support.store_proxy import Fault, Request, StoreProxy
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import FastReader, FastWriter
from torch_ckpt._core import _native
from torch_ckpt.filesystems import obstore_client, store_client
from torch_ckpt.filesystems.fsspec_client import FsspecClient
from torch_ckpt.filesystems.location import Location, register

pytestmark = pytest.mark.timeout(120, method="thread")

LIMIT = 3  # Parts of one upload. Those of a short plan have 8 MiB.

# The planned length of each is almost nothing.
STATES: dict[str, dict[str, Any]] = {
    "object": {"w": torch.arange(7), "text": b"0123456789abcdef" * (60 << 16)},
    "transformed": {"w": torch.randint(0, 256, (60 << 20,), dtype=torch.uint8)},
}


def writer_of(path: str, state: str) -> FastWriter:
    return FastWriter(path, _extensions=[ZStandard()] if state == "transformed" else None)


def is_refused(request: Request) -> bool:
    """As S3 does it from part 10,001 on."""
    return int(re.search(r"partNumber=(\d+)", request.query)[1]) > LIMIT  # type: ignore[index]


@pytest.fixture
def store(store_proxy: StoreProxy, monkeypatch: pytest.MonkeyPatch) -> StoreProxy:
    """An S3 server that refuses parts above the limit."""
    monkeypatch.setattr(obstore_client, "MOST_PARTS", LIMIT)
    store_proxy.faults += [Fault("status", requests=("part",), status=400, when=is_refused)]
    return store_proxy


@pytest.mark.thin(1)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_that_outgrows_its_plan_gets_larger_parts(
    store: StoreProxy, store_url: str, state: str, asynchronous: bool
) -> None:
    saved, writer = STATES[state], writer_of(store_url, state)
    if asynchronous:
        torch_ckpt.async_save(saved, storage_writer=writer).result()
    else:
        torch_ckpt.save(saved, storage_writer=writer)
    assert store.counts(r"\.distcp$")["complete"] == 2
    loaded = {name: torch.zeros_like(v) if name == "w" else b"" for name, v in saved.items()}
    torch_ckpt.load(loaded, storage_reader=FastReader(store_url))
    assert torch.equal(loaded.pop("w"), saved["w"])
    assert loaded == {name: value for name, value in saved.items() if name != "w"}


def test_a_stream_that_fails_after_it_has_outgrown_its_plan_leaves_no_object(
    store: StoreProxy, store_url: str
) -> None:
    store.faults += [Fault("status", requests=("part",), status=403, skip=LIMIT)]
    with pytest.raises(CheckpointException, match=r"cannot write s3://.*\.distcp"):
        torch_ckpt.save(STATES["object"], storage_writer=writer_of(store_url, "object"))
    assert store.counts(r"\.distcp$")["complete"] == 1
    assert [name for name in Location(store_url).names() if name.endswith(".distcp")] == []


class _File(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is uploaded in parts, of which its store allows few."""

    parts: list[bytes]

    def _initiate_upload(self) -> None:
        self.parts = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if len(self.parts) == 2 * LIMIT:
            raise OSError("the part number is too large")
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.pipe_file(self.path, b"".join(self.parts))
        return True


class _Store(MemoryFileSystem):  # type: ignore[misc]
    protocol = "parts"

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "block_size" not in options:
            return super().open(path, mode, **options)
        return _File(self, path, mode, block_size=options["block_size"])


@pytest.mark.parametrize("state", STATES)
def test_parts_of_an_fsspec_client_grow(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "MOST_PARTS", LIMIT)
    fsspec.register_implementation("parts", _Store, clobber=True)
    register("parts", _native.StoreFileSystem(FsspecClient("parts")))
    url = f"parts://tests/{state}"
    torch_ckpt.save(STATES[state], storage_writer=writer_of(url, state))
    loaded = {"w": torch.zeros_like(STATES[state]["w"])}
    torch_ckpt.load(loaded, storage_reader=FastReader(url))
    assert torch.equal(loaded["w"], STATES[state]["w"])


# ---- The longest object of S3, without its bytes ----

LONGEST = 5 << 40


@pytest.mark.parametrize("planned_nbytes", [8 << 20, 9_000_000, 1 << 30])
def test_a_stream_of_any_length_needs_at_most_ten_thousand_parts(planned_nbytes: int) -> None:
    sent = parts = 0
    while sent < LONGEST:
        sent += store_client.grown_part_nbytes(planned_nbytes, sent)
        parts += 1
    assert parts <= 10_000


class Sized:
    """A window that has a length and no bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


@pytest.mark.parametrize("window_nbytes", [1 << 20, 3_000_001, 4 << 20])
def test_an_upload_ends_before_it_has_too_many_parts(
    window_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.memoryview", lambda window: window)
    count = -(-LONGEST // (1 << 20) // 8)
    stream = obstore_client._Stream(iter([Sized(window_nbytes)] * count))  # type: ignore[arg-type]
    part, lengths = 8 << 20, []
    while not lengths or stream.has_more:
        pulled: Iterator[Any] = stream.until(store_client.MOST_PARTS * part)
        for _ in pulled:
            pass
        lengths.append(stream.nbytes / part)
        part *= obstore_client._GROWTH
    assert stream.nbytes == count * window_nbytes
    assert max(lengths) <= 10_000
    assert len(lengths) <= 3
