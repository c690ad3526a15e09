"""One rank of bench_store.py: saves to a store and loads from it, by each contender.

The raw contender is the ceiling: it knows no checkpoints, and moves the same bytes by the same
client. Each rank puts the bytes of its tensors into one object in parts of 8 MiB, 8 in flight, and
gets them back by ranges of 8 MiB, 16 in flight, into its tensors. A file of HDFS is one stream, and
is synced.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from load_rank import Answer, Rank, serve
from machine import MIB
from rank_loads import State, empty, fill, local_rows
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

OURS = "torch-ckpt"
RAW = "raw"  # By obstore or hdfs-native.
PLANNED = "torch_ckpt.save, load"  # With its own planners; the others use stock DCP's.
FSSPEC, CONNECTOR = "FsspecWriter, s3fs", "s3torchconnector"
SMALL, LARGE = "small", "large"
PART = 8 * MIB
UPLOADS, DOWNLOADS = 8, 16
REGION = "us-east-1"


def make_writer(contender: str, url: str) -> StorageWriter:
    """A contender's writer, with its defaults."""
    if contender == OURS:
        from torch_ckpt import FastWriter

        return FastWriter(url)
    if contender == FSSPEC:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(url)
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter

    config = S3ClientConfig(force_path_style=True)
    return S3StorageWriter(region=REGION, path=url, s3client_config=config)


def make_reader(contender: str, url: str) -> StorageReader:
    """A contender's reader, with its defaults."""
    if contender == OURS:
        from torch_ckpt import FastReader

        return FastReader(url)
    if contender == FSSPEC:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(url)
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader

    config = S3ClientConfig(force_path_style=True)
    return S3StorageReader(region=REGION, path=url, s3client_config=config)


# The ceiling -----------------------------------------------------------------------------------


def flat_bytes(state: State) -> list[torch.Tensor]:
    """What this rank has of each tensor, as bytes."""
    return [local_rows(tensor)[0].view(-1).view(torch.uint8) for tensor in state.values()]


def pieces_of(state: State) -> Iterator[memoryview]:
    """The bytes of all tensors, one after another."""
    for flat in flat_bytes(state):
        whole = memoryview(flat.numpy())
        yield from (whole[begin : begin + PART] for begin in range(0, len(whole), PART))


@functools.cache
def hdfs_client(host: str) -> Any:
    """A client of HDFS, which keeps its connections."""
    import hdfs_native

    return hdfs_native.Client(f"hdfs://{host}/")


def raw_save(state: State, url: str) -> None:
    """Puts the bytes of all tensors into one object of this rank."""
    parts, rank = urlsplit(url), dist.get_rank()
    if parts.scheme == "hdfs":
        from hdfs_native import WriteOptions

        options = WriteOptions(overwrite=True, create_parent=True)
        writer = hdfs_client(parts.netloc).create(f"{parts.path}/{rank}", options)
        for piece in pieces_of(state):
            writer.write(bytes(piece))
        writer.hsync()
        writer.close()
        return
    from obstore.store import S3Store

    key = f"{parts.path.strip('/')}/{rank}"
    S3Store(parts.netloc).put(key, pieces_of(state), chunk_size=PART, max_concurrency=UPLOADS)


def raw_reads(url: str) -> Callable[[int, int], Any]:
    """Returns a function that reads a range, from its begin to its end, of this rank's object."""
    parts, rank = urlsplit(url), dist.get_rank()
    if parts.scheme == "hdfs":
        reader = hdfs_client(parts.netloc).read(f"{parts.path}/{rank}")
        return lambda begin, end: reader.read_range(begin, end - begin)
    from obstore.store import S3Store

    store, key = S3Store(parts.netloc), f"{parts.path.strip('/')}/{rank}"
    return lambda begin, end: store.get_range(key, start=begin, end=end)


def raw_load(state: State, url: str) -> None:
    """Gets them back, and copies each range to the tensors that it lies in."""
    read = raw_reads(url)
    tensors = flat_bytes(state)
    ends = list(itertools.accumulate(tensor.numel() for tensor in tensors))

    def get(begin: int) -> None:
        end = min(begin + PART, ends[-1])
        found = torch.frombuffer(read(begin, end), dtype=torch.uint8)
        number, at = bisect.bisect_right(ends, begin), begin
        while at < end:
            until = min(ends[number], end)
            first = ends[number] - tensors[number].numel()
            part = found[at - begin : until - begin]
            tensors[number][at - first : until - first].copy_(part)
            number, at = number + 1, until

    with ThreadPoolExecutor(DOWNLOADS) as threads:
        list(threads.map(get, range(0, ends[-1], PART)))


def save(contender: str, state: State, url: str) -> None:
    """Saves by a contender, together with the other ranks."""
    if contender == RAW:
        raw_save(state, url)
    elif contender == PLANNED:
        import torch_ckpt

        torch_ckpt.save(state, checkpoint_id=url)
    else:
        dcp.save(state, storage_writer=make_writer(contender, url))


def load(contender: str, state: State, url: str, *, alone: bool) -> None:
    """Loads by a contender, together with the other ranks or alone."""
    if contender == RAW:
        raw_load(state, url)
    elif contender == PLANNED:
        import torch_ckpt

        torch_ckpt.load(state, checkpoint_id=url, no_dist=alone)
    else:
        dcp.load(state, storage_reader=make_reader(contender, url), no_dist=alone)


# The rank --------------------------------------------------------------------------------------


class StoreRank(Rank):
    """What one process keeps between calls: the tensors that it saves and loads into."""

    @functools.lru_cache(1)  # noqa: B019  # One rank lives as long as its process.
    def _state(self, kind: str, gib: float, tensors: int) -> State:
        """Filled tensors: of load_contenders.py, or this rank's own, many small or one large."""
        if kind in (SMALL, LARGE):
            each = int(gib * 2**30) // self.options["count"] // tensors // 16 * 16
            count, nbytes = (tensors, each) if kind == SMALL else (1, each * tensors)
            names = (f"rank{self.options['rank']}.{number}" for number in range(count))
            state = {name: torch.zeros(nbytes, dtype=torch.uint8) for name in names}
        else:
            state = empty(kind, gib)
        fill(state)
        return state

    def save_to(self, contender: str, url: str, kind: str, gib: float, tensors: int = 1) -> Answer:
        """Saves with the others; the store has acknowledged it when it is done."""
        state = self._state(kind, gib, tensors)
        return self._measure(lambda: save(contender, state, url))

    def load_from(
        self,
        contender: str,
        url: str,
        kind: str,
        gib: float,
        tensors: int = 1,
        alone: bool = False,
    ) -> Answer:
        """Loads with the others, or the first rank alone; requires the bits to be as saved."""
        state = self._state(kind, gib, tensors)
        if alone and self.options["rank"]:
            return self._measure(lambda: None)
        for tensor in state.values():
            tensor.zero_()
        return self._measure(lambda: load(contender, state, url, alone=alone), state)


if __name__ == "__main__":
    serve(StoreRank)
