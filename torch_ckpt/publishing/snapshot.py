"""Snapshot: the values of the last published version, of the boxes that this rank writes.

A publish compares the tensors of training with it, and brings it up to date in the same pass. What
differs is then compressed and written while training goes on.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import to_plain
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError, MismatchError, UnsupportedError, naming
from torch_ckpt.filesystems.location import Location
from torch_ckpt.options import IoOptions
from torch_ckpt.planning.local_shards import LocalShards
from torch_ckpt.planning.replicas import CutItem
from torch_ckpt.planning.save_planner import FastSavePlanner
from torch_ckpt.planning.value_digests import THREADS
from torch_ckpt.publishing.version_files import BLOCK_NBYTES, ENTRY_NBYTES, DataFile, StoredBox
from torch_ckpt.storage.appended_stream import AppendedStream
from torch_ckpt.storage.buffers import STOCK_COPY_AHEAD, buffer_pools
from torch_ckpt.storage.file_jobs import finished
from torch_ckpt.storage.rank_work import resolve_whole

__all__ = ["Differences", "Snapshot", "published_dtype", "write_differences", "write_digests"]

_CHUNK_NBYTES = 4 << 20
"""Bytes that are compared at a time, and copied before if they are on a GPU or are cast."""

_WAITING_NBYTES = 44 << 20
"""Bytes of differences that wait for their compression until training goes on.

If there are more, training waits for the compression as well.
"""

_BATCH_NBYTES = 2 << 20
"""Bytes of differences that are passed on together."""

_BUFFER_NBYTES = 16 << 20
"""Bytes of a file that are in flight to the disk or store."""


_Numbered = tuple[int, _native.Difference]
"""A difference, and the number of its box."""


@dataclass(frozen=True)
class _Box:
    """A box that this rank writes: where it is, its published values, and 8 bytes for each block.

    ``item`` is the one that the planner resolves to the live tensor.
    """

    item: WriteItem
    fqn: str
    offsets: tuple[int, ...]
    snapshot: torch.Tensor
    digests: bytearray

    @property
    def block_count(self) -> int:
        return len(self.digests) // 8


class Snapshot:
    """The published values of the boxes of this rank, in host memory.

    Args:
        items: The items that this rank writes.
        dtype: Dtype in which tensors of floating point are published; ``None`` for their own.
    """

    def __init__(self, items: Sequence[WriteItem], dtype: torch.dtype | None) -> None:
        self.boxes = [_box_of(item, dtype) for item in items]
        self._memory = _native.DifferenceMemory()

    def take(self, planner: FastSavePlanner) -> None:
        """Copies all values. Raises an error that names the tensor that cannot be published."""
        for box in self.boxes:
            for snapshot, source, digests in _parts(box, planner):
                _native.take_snapshot(
                    _view(snapshot, box.fqn, writable=True),
                    _view(source, box.fqn),
                    digests,
                    THREADS,
                )

    def compare(self, planner: FastSavePlanner, differences: Differences) -> None:
        """Compares all values, and passes the differences on, until nobody needs them."""
        batch: list[_Numbered] = []
        nbytes = 0
        for number, difference in self._differences(planner):
            batch.append((number, difference))
            nbytes += difference.nbytes
            # The other thread would wake up for each small tensor, and take the GIL.
            if nbytes >= _BATCH_NBYTES:
                if not differences.put(batch, nbytes):
                    return
                batch, nbytes = [], 0
        differences.put(batch, nbytes)

    def _differences(self, planner: FastSavePlanner) -> Iterator[_Numbered]:
        """Yields the number of each box with its differences, in order."""
        for number, box in enumerate(self.boxes):
            for snapshot, source, digests in _parts(box, planner):
                views = _view(snapshot, box.fqn, writable=True), _view(source, box.fqn)
                count, most = len(digests) // 8, _CHUNK_NBYTES // BLOCK_NBYTES
                for first in range(0, count, most):
                    end = min(first + most, count)
                    taken = _native.take_difference(
                        *views, first, end, digests, THREADS, self._memory
                    )
                    yield number, taken
                    del taken

    def state_dict(self, sizes: Mapping[str, Sequence[int]]) -> dict[str, LocalShards]:
        """Returns a state dict of the boxes, given the sizes of all tensors."""
        boxes: dict[str, list[tuple[Sequence[int], torch.Tensor]]] = {}
        for box in self.boxes:
            boxes.setdefault(box.fqn, []).append((box.offsets, box.snapshot))
        return {fqn: LocalShards(sizes[fqn], listed) for fqn, listed in boxes.items()}


def _box_of(item: WriteItem, dtype: torch.dtype | None) -> _Box:
    fqn, data = item.index.fqn, item.tensor_data
    assert data is not None  # Objects were refused.
    published = published_dtype(data.properties.dtype, dtype)
    snapshot = torch.empty(data.chunk.sizes, dtype=published, device="cpu")
    nbytes = snapshot.numel() * snapshot.itemsize
    digests = bytearray(8 * -(-nbytes // BLOCK_NBYTES))
    return _Box(item, fqn, tuple(data.chunk.offsets), snapshot, digests)


def published_dtype(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which a tensor is published."""
    return dtype if dtype is not None and stored.is_floating_point else stored


def _parts(
    box: _Box, planner: FastSavePlanner
) -> Iterator[tuple[torch.Tensor, torch.Tensor, memoryview]]:
    """Yields parts of a box: of its snapshot, of the live tensor, and of the digests.

    There is one, unless the live tensor must be copied to host memory or cast. Such parts are flat,
    and begin and end between blocks.
    """
    with naming("publish", box.fqn):
        live, digests = _live(box, planner), memoryview(box.digests)
        published = box.snapshot
        if not box.block_count:
            return
        is_plain = _tensor_view.tensor_kind(live) == _tensor_view.TensorKind.PLAIN
        if is_plain and live.dtype == published.dtype:
            yield published, live, digests
            return
        published = published.view(-1)
        count, blocks = _CHUNK_NBYTES // published.itemsize, _CHUNK_NBYTES // BLOCK_NBYTES
        for number, begin in enumerate(range(0, live.numel(), count)):
            flat = _flat(live, begin, min(begin + count, live.numel()))
            part = to_plain(flat).to(published.dtype)
            own = digests[8 * blocks * number : 8 * blocks * (number + 1)]
            yield published[begin : begin + count], part, own


def _flat(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Returns the elements ``[begin, end)`` in row-major order. Copies no others."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)[begin:end]
    length = tensor.numel() // len(tensor)  # Elements of a row.
    first, last = begin // length, (end - 1) // length
    if first == last:
        return _flat(tensor[first], begin - first * length, end - first * length)
    values = torch.empty(end - begin, dtype=tensor.dtype, device=tensor.device)
    head, tail = (first + 1) * length - begin, last * length - begin
    values[:head].copy_(_flat(tensor[first], length - head, length))
    values[head:tail].view(-1, *tensor.shape[1:]).copy_(tensor[first + 1 : last])
    values[tail:].copy_(_flat(tensor[last], 0, len(values) - tail))
    return values


def _live(box: _Box, planner: FastSavePlanner) -> torch.Tensor:
    item = box.item
    tensor = resolve_whole(planner, item)
    if _tensor_view.tensor_kind(tensor) == _tensor_view.TensorKind.TORCH_ONLY:
        raise UnsupportedError(f"only torch can store {type(tensor).__name__} of {tensor.dtype}")
    if isinstance(item, CutItem):
        tensor = item.rows_of(tensor)
    if tensor.size() != box.snapshot.size() and (tensor.numel() or box.snapshot.numel()):
        raise MismatchError(
            f"its sizes are {list(tensor.size())}, and were {list(box.snapshot.size())} before"
        )
    return tensor.detach() if tensor.requires_grad else tensor


def _view(tensor: torch.Tensor, fqn: str, *, writable: bool = False) -> Any:
    return _tensor_view.view(tensor, fqn, writable=writable)


class Differences:
    """Differences that one thread takes and another one writes. Bounds those that wait.

    ``timeout_s`` is how long the first thread waits for the other one, in seconds. It may be
    interrupted at any instruction: the queues are those of C, which have no lock that it could
    leave locked.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._given: SimpleQueue[Sequence[_Numbered]] = SimpleQueue()  # The last batch is empty.
        self._taken: SimpleQueue[int] = SimpleQueue()
        self._nbytes = 0  # Given and, as far as the first thread knows, not taken.
        self._is_closed = False
        self._error: BaseException | None = None

    def put(self, batch: Sequence[_Numbered], nbytes: int) -> bool:
        """Adds differences of ``nbytes`` in memory, once there is space.

        Returns whether the other thread still needs them. Raises CheckpointError if there was no
        space in time.
        """
        waiting = LongWait(lambda: "the compression of differences")
        for pause_s in waiting.rounds(self._timeout_s):
            while not self._taken.empty():
                self._nbytes -= self._taken.get()
            if self._is_closed or self._nbytes < _WAITING_NBYTES:
                break
            with contextlib.suppress(Empty):
                self._nbytes -= self._taken.get(timeout=pause_s)
        else:
            raise CheckpointError(
                f"differences were not compressed and written within {self._timeout_s:g} s"
            )
        if batch and not self._is_closed:
            self._nbytes += nbytes
            self._given.put(batch)
        return not self._is_closed

    def end(self, error: BaseException | None = None) -> None:
        """Ends the differences. If there is an error, the other thread raises it."""
        self._error = error
        self._given.put(())

    def close(self) -> None:
        """Ends the first thread's wait: nobody takes differences any more."""
        self._is_closed = True
        self._taken.put(0)

    def __iter__(self) -> Iterator[_Numbered]:
        waiting = LongWait(lambda: "the comparison of tensors")
        received: deque[_Numbered] = deque()
        nbytes, is_whole = 0, False
        while True:
            # Until training goes on, the comparison needs the cores.
            while not is_whole and nbytes < _WAITING_NBYTES:
                for pause_s in waiting.rounds():
                    with contextlib.suppress(Empty):
                        batch = self._given.get(timeout=pause_s)
                        break
                received.extend(batch)
                nbytes += sum(difference.nbytes for _, difference in batch)
                is_whole = not batch
                del batch
            if self._error is not None:
                raise self._error
            if not received:
                return
            number, difference = received.popleft()
            nbytes -= difference.nbytes
            self._taken.put(difference.nbytes)
            yield number, difference
            del difference


def write_digests(path: Location, snapshot: Snapshot) -> DataFile | None:
    """Writes the data file of a rank for a whole version, which has block tables only.

    Each block is as unchanged: its values are in the model, and the table has their digest.
    """
    contents, boxes = bytearray(), []
    for box in snapshot.boxes:
        if box.block_count:
            rows = torch.zeros(box.block_count, 3, dtype=torch.int64, device="cpu")
            rows[:, :2] = torch.frombuffer(box.digests, dtype=torch.int64)[:, None]
            table = rows.numpy().tobytes()
            where = 0, len(contents), _native.xxh3(table)
            boxes.append(StoredBox(box.fqn, box.offsets, tuple(box.snapshot.size()), *where))
            contents += table
    if not boxes:
        return None
    path.write(bytes(contents), sync=True)
    return DataFile(path.name, len(contents), boxes)


def write_differences(
    path: Location, snapshot: Snapshot, differences: Differences, pools: list[_native.BufferPool]
) -> DataFile | None:
    """Writes the data file of a rank, and returns what it has; ``None`` if the rank has no boxes.

    The encoded blocks come first, box after box, and then the block tables. ``pools`` are the
    buffers of the last file. Raises the error with which the differences have ended.
    """
    try:
        if not any(box.block_count for box in snapshot.boxes):
            for _ in differences:
                pass
            return None
        io = IoOptions(buffer_nbytes=_BUFFER_NBYTES)
        budget = _BUFFER_NBYTES, io, STOCK_COPY_AHEAD
        pools[:] = buffer_pools(pools, 1, *budget, path.file_system)
        no_items = _native.PlannedFile(
            _native.Work(_native.ItemTable()), _tensor_view.inspect([], writable=False)
        )
        job = _native.SaveJob(
            *(path.file_system, path.path, no_items.layout, pools[0]),
            *(io.direct, True, io.background_nice),
        )
        with finished(job):
            stream = AppendedStream(job.append)
            begins: dict[int, int] = {}
            tables = [bytearray() for _ in snapshot.boxes]
            for number, difference in differences:
                begins.setdefault(number, stream.tell())
                payload, table = difference.encode()
                del difference
                stream.write(payload)
                tables[number] += table
            boxes = []
            for number, begin in begins.items():
                box, table = snapshot.boxes[number], bytes(tables[number])
                assert len(table) == ENTRY_NBYTES * box.block_count
                where = begin, stream.tell(), _native.xxh3(table)
                boxes.append(StoredBox(box.fqn, box.offsets, tuple(box.snapshot.size()), *where))
                stream.write(table)
            stream.end()
        return DataFile(path.name, stream.tell(), boxes)
    finally:
        differences.close()
