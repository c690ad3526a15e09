"""One load of one rank: the engine reads most tensors, and torch reads the other items."""

from __future__ import annotations

import copy
import io as _io
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import DTYPE_CODES, Destinations, is_temporary
from torch_ckpt.coordination.current_call import current_call
from torch_ckpt.coordination.group import Cancellable
from torch_ckpt.errors import CheckpointError, CorruptionError, MismatchError, UnsupportedError
from torch_ckpt.formats.allowed_classes import HOW_TO_ALLOW
from torch_ckpt.formats.expansion import OBJECTS_NBYTES, Expansion, allowed_nbytes
from torch_ckpt.formats.object_pickles import load_object
from torch_ckpt.formats.pickles import ForbiddenPickleError
from torch_ckpt.formats.reading import reading
from torch_ckpt.options import READ_THREADS
from torch_ckpt.planning.columns import overrides
from torch_ckpt.planning.load_planner import FastLoadPlanner, PlannedReads, commits_in_turn
from torch_ckpt.planning.loaded_objects import store_object
from torch_ckpt.planning.targets import check_targets
from torch_ckpt.storage.buffers import retained_nbytes_limit, useful_buffer_nbytes
from torch_ckpt.storage.load_source import (
    LoadSource,
    Requests,
    Slice,
    StoredTensor,
    batches_of,
    without_memory,
)
from torch_ckpt.storage.target_copies import TargetCopies

__all__ = ["Load"]

_TORCH_ONLY = _tensor_view.TensorKind.TORCH_ONLY

_CHUNK_NBYTES = 4 << 20
"""Bytes that a stream transform reverses at a time."""

# Item, slice, target tensor, and the stored dtype if the elements must be copied to the target.
_Destination = tuple[ReadItem, Slice, torch.Tensor, torch.dtype | None]


class Load:
    """The reads of one rank in one load. Runs once, and opens each file once.

    Args:
        source: The checkpoint.
        items: The items of the rank's plan.

    Raises:
        CorruptionError: The metadata does not list the stored box of an item.
        CheckpointError: An item cannot be loaded; this was detected on opening.
    """

    def __init__(self, source: LoadSource, items: Sequence[ReadItem]) -> None:
        for item in items if source.opened.unreadable else ():
            if (error := source.opened.unreadable.get(item.storage_index.fqn)) is not None:
                raise copy.copy(error)
        self.source = source
        self.items = items
        self.copies = TargetCopies(source)
        self._requests = None if isinstance(items, PlannedReads) else Requests(source, items)
        if source.files is not None and self._requests is None:
            requests = Requests(source, list(items))
            # Columns do not support tensors of these files that only torch can read.
            self._requests = requests if requests.away(source) else None
        column_nbytes = items.reads.nbytes if isinstance(items, PlannedReads) else 0
        nbytes = column_nbytes if self._requests is None else self._requests.nbytes
        io, file_system = source.io, source.opened.directory.file_system
        block_nbytes = io.block_nbytes(file_system)
        self.job = _native.LoadJob(
            file_system,
            source.opened.directory.path,
            source.opened.index,
            useful_buffer_nbytes(nbytes, io.buffer_nbytes, block_nbytes, file_system),
            block_nbytes,
            READ_THREADS,
            io.direct,
            source.verify,
            source.records,
            None if source.files is None else set(source.files),
            source.opened.native_quantized,
        )
        # Slices of files that this rank cannot read. Torch reads them from bytes of other ranks.
        self.fetched: list[Slice] | None = None

    def wanted_nbytes(self) -> int:
        """Returns the number of bytes of the tensors that the engine loads."""
        nbytes = 0
        for item in self.items:
            dtype = self.source.stored_dtype(item)
            if dtype is not None:
                nbytes += math.prod(item.lengths) * dtype.itemsize
            if dtype is not None and self.source.is_quantized(item):
                nbytes -= math.prod(item.lengths) * (dtype.itemsize - 1)
        return nbytes

    def loaded_nbytes(self) -> int:
        """Returns the number of bytes loaded so far. Any thread may call it."""
        return self.job.done_nbytes

    def wanted_bytes(self) -> bytes:
        """Returns the encoded byte ranges of the data files that the tensors need.

        Raises:
            CheckpointError: A file or a slice does not match the metadata.
        """
        _cancel_on_failure(self.job)
        if self._requests is None:
            assert isinstance(self.items, PlannedReads)
            return self.items.reads.wanted_bytes(self.job)
        slices = self.slices_to_fetch()
        return self.job.wanted_bytes(without_memory(self._requests.tensors), slices)

    def away(self) -> str | None:
        """Returns a file that this rank needs and cannot read, or ``None``.

        If several files are missing, the text also gives their number.
        """
        files = set() if self._requests is None else self._requests.away(self.source)
        more = f" and {len(files) - 1} other files" if len(files) > 1 else ""
        return f"{min(files)}{more}" if files else None

    def slices_to_fetch(self) -> list[Slice]:
        """Returns the slices that torch reads from files of other ranks, which must send them."""
        requests = self._requests
        if self.fetched is None and requests is not None and requests.away(self.source):
            away = [tensor for tensor in requests.tensors if self.source.is_away(tensor[1])]
            readable = self.job.readable(without_memory(away))
            requests.leave_to_torch([t for t, ok in zip(away, readable, strict=True) if not ok])
            streams = dict.fromkeys(stored for _, stored in requests.streams)
            self.fetched = [stored for stored in streams if self.source.is_away(stored)]
        return self.fetched or []

    def run(self, planner: LoadPlanner, exchange: _native.ExchangeStream | None = None) -> None:
        """Reads all items into their targets.

        Args:
            planner: Planner of this rank, which resolves targets.
            exchange: Stream of the exchange with other ranks, if any.
        """
        _cancel_on_failure(self.job)
        if exchange is not None:
            _cancel_on_failure(exchange)
        if (
            self._requests is None
            and isinstance(self.items, PlannedReads)
            and isinstance(planner, FastLoadPlanner)
            and planner.loads_plainly()
        ):
            remaining = self._run_columns(self.items, planner, exchange)
            if remaining:
                _LoadByItem(self, Requests(self.source, remaining), planner).run(None)
        else:
            requests = self._requests or Requests(self.source, list(self.items))
            _LoadByItem(self, requests, planner).run(exchange)
        self.copies.check()

    def _run_columns(
        self, items: PlannedReads, planner: FastLoadPlanner, exchange: _native.ExchangeStream | None
    ) -> list[ReadItem]:
        """Reads tensors directly into their targets; returns the items that torch must read."""
        items.reads.check(self.job)

        def copy_to_target(number: int, elements: _native.LoadedBytes) -> None:
            item = items[number]
            target = planner.resolve_tensor(item).detach()
            dtype = self.source.given(item, target.dtype)
            assert dtype is not None
            self.copies.put(item, target, _tensor_of(elements, dtype, item.lengths))

        batch = _tensor_view.inspect(items.sources, writable=True)
        remaining = items.reads.run(self.job, batch, copy_to_target, exchange)
        return [items[number] for number in remaining]


class _LoadByItem:
    """Loads the items of a planner that resolves and commits them one by one."""

    def __init__(self, load: Load, requests: Requests, planner: LoadPlanner) -> None:
        self.source = load.source
        self.job = load.job
        self.copies = load.copies
        self.requests = requests
        self.planner = planner
        self.to_fetch = load.slices_to_fetch()
        self.fetched: dict[Slice, bytes] = {}
        self.max_retained_nbytes = retained_nbytes_limit(load.source.io)
        self.pickles = Expansion(OBJECTS_NBYTES)
        self.streams = Expansion(allowed_nbytes(0))  # The expansion of objects.
        # A planner with another load_bytes may store bytes in any format.
        self.objects_are_pickled = getattr(planner.load_bytes, "__func__", None) in (
            DefaultLoadPlanner.load_bytes,
            FastLoadPlanner.load_bytes,
        )

    def run(self, exchange: _native.ExchangeStream | None) -> None:
        """Loads tensors through the engine, then all other items through torch."""
        requests = self.requests
        # Check all extents and targets before the first write to a target.
        _check_targets(self.planner, requests)
        slices = [stored for _, stored, _ in requests.tensors]
        self.job.check(slices + [stored for _, stored in requests.streams])
        remaining = self._load_tensors(exchange)
        self._load_streams(requests.streams + remaining)

    def _load_tensors(
        self, exchange: _native.ExchangeStream | None
    ) -> list[tuple[ReadItem, Slice]]:
        """Loads tensors in as few batches as possible.

        Returns:
            Tensors of the last batch that only torch can read. Their targets are unchanged.
        """
        waiting = self.requests.tensors
        if commits_in_turn(self.planner):
            self._load_in_turn(waiting, exchange)
            return []
        remaining: list[tuple[ReadItem, Slice]] = []
        while waiting or exchange is not None:
            self._load_streams(remaining)  # A later target may share its memory.
            batch, waiting = self._next_batch(waiting, skip_conflicts=exchange is not None)
            count = 0 if exchange is None else self._end_of_away(waiting)  # In the first batch.
            late, waiting = waiting[:count], waiting[count:]
            remaining = self._load_batch(batch, late, exchange)
            exchange = None
        return remaining

    def _load_in_turn(
        self, waiting: list[StoredTensor], exchange: _native.ExchangeStream | None
    ) -> None:
        """Loads tensors in DCP's order: each is committed before the next one is resolved.

        The bytes of many tensors are read together.
        """
        while waiting or exchange is not None:
            if exchange is None and self.source.is_quantized(waiting[0][0]):
                # The target's dtype determines what is read.
                batch, _ = self._next_batch(waiting[:1], skip_conflicts=False)
                self._load_batch(batch, [], None)
                waiting = waiting[1:]
                continue
            nbytes, count = 0, 0
            while count < len(waiting) and nbytes < self.max_retained_nbytes:
                item, _, dtype = waiting[count]
                if self.source.is_quantized(item):
                    break
                nbytes += item.lengths.numel() * dtype.itemsize
                count += 1
            if exchange is not None:  # The exchange ends with the first batch.
                count = max(count, self._end_of_away(waiting))
            late, waiting = waiting[:count], waiting[count:]
            self._load_batch([], late, exchange)
            exchange = None

    def _end_of_away(self, waiting: Sequence[StoredTensor]) -> int:
        """Returns how many tensors, in DCP's order, the exchange covers: to the last away one."""
        return max((n for n, t in enumerate(waiting, 1) if self.source.is_away(t[1])), default=0)

    def _next_batch(
        self, waiting: list[StoredTensor], *, skip_conflicts: bool
    ) -> tuple[list[_Destination], list[StoredTensor]]:
        """Resolves tensors until one conflicts with the batch.

        Tensors conflict if their targets share memory.

        Args:
            waiting: Tensors in DCP's order.
            skip_conflicts: Whether to skip a conflicting tensor and continue. Otherwise the batch
                ends before that tensor.

        Returns:
            The batch, and the tensors for later batches.
        """
        batch: list[_Destination] = []
        postponed: list[StoredTensor] = []
        destinations = Destinations()
        later = Destinations()  # The destinations of postponed tensors.
        retained_nbytes = 0
        for number, tensor in enumerate(waiting):
            item, stored, dtype = tensor
            resolved = self.planner.resolve_tensor(item)
            temporary = is_temporary(resolved)
            target = resolved.detach()
            if target.size() != item.lengths:
                raise _shape_mismatch(item, target, item.lengths)
            is_loadable = _tensor_view.is_loadable(target)
            if not is_loadable and _tensor_view.tensor_kind(target) == _TORCH_ONLY:
                # A subclass may write to any memory in copy_, so its batch has no other tensor.
                if skip_conflicts:
                    postponed.append(tensor)
                    continue
                if batch:
                    return batch, waiting[number:]
                dtype = self.source.given(item, target.dtype) or dtype
                return [(item, stored, target, dtype)], waiting[number + 1 :]
            fqn = item.dest_index.fqn
            if later.overlaps(target, fqn) or destinations.overlaps(target, fqn):
                if not skip_conflicts:
                    return batch, waiting[number:]
                later.add(target, fqn)
                postponed.append(tensor)
                continue
            destinations.add(target, fqn)
            if self.source.is_quantized(item):
                dtype = self.source.given(item, target.dtype) or dtype
            is_direct = target.dtype == dtype and is_loadable
            batch.append((item, stored, target, None if is_direct else dtype))
            if temporary:
                retained_nbytes += target.nbytes
                if retained_nbytes >= self.max_retained_nbytes:
                    return batch, postponed + waiting[number + 1 :]
        return batch, postponed

    def _load_batch(
        self,
        batch: list[_Destination],
        late: list[StoredTensor],
        exchange: _native.ExchangeStream | None,
    ) -> list[tuple[ReadItem, Slice]]:
        """Loads a batch, then the late tensors in order, whose bytes are read with the batch.

        With an exchange, reads only bytes of files that are away, which bounds memory.
        """

        def comes_now(tensor: StoredTensor) -> bool:
            return exchange is None or self.source.is_away(tensor[1])

        requests = [
            (
                stored,
                item.storage_offsets,
                _tensor_view.view(target, stored[3], writable=True)
                if dtype is None
                else _native.TensorView.without_memory(DTYPE_CODES[dtype], item.lengths),
            )
            for item, stored, target, dtype in batch
        ]
        received: dict[int, _native.LoadedBytes] = {}

        def copy_to_target(number: int, elements: _native.LoadedBytes) -> None:
            if number >= len(batch):
                received[number - len(batch)] = elements
                return
            item, _, target, dtype = batch[number]
            assert dtype is not None
            self.copies.put(item, target, _tensor_of(elements, dtype, item.lengths))

        slices = [] if exchange is None else self.to_fetch
        requests += without_memory(list(filter(comes_now, late)))
        loaded, data = self.job.run(requests, slices, copy_to_target, exchange)
        data.reverse()
        for stored in slices:
            self.fetched[stored] = bytes(data.pop())
        remaining: list[tuple[ReadItem, Slice]] = []
        for done, (item, stored, target, _) in zip(loaded[: len(batch)], batch, strict=True):
            if done:
                self.planner.commit_tensor(item, target)
            else:
                remaining.append((item, stored))
        numbers = itertools.count()  # Positions of the tensors whose bytes arrived.
        for have_come, tensors in itertools.groupby(late, comes_now):
            if not have_come:
                self._load_in_turn(list(tensors), None)
                continue
            for (item, stored, dtype), number in zip(tensors, numbers, strict=False):
                if number in received:
                    box = _tensor_of(received.pop(number), dtype, item.lengths)
                elif item.lengths.numel() == 0:
                    box = torch.empty(item.lengths, dtype=dtype, device="cpu")
                else:
                    self._load_streams([(item, stored)])
                    continue
                self._put_box(item, box)
        return remaining

    def _load_streams(self, streams: list[tuple[ReadItem, Slice]]) -> None:
        """Loads objects, and tensors that torch must unpickle. Reads each slice once."""
        wanted: dict[Slice, list[ReadItem]] = {}
        for item, stored in streams:
            if self.source.opened.contents is None or stored in self.fetched:
                wanted.setdefault(stored, []).append(item)
                continue
            with reading(_where(stored)):
                value = self.source.opened.contents.value(stored[3])
            self._load_content(item, stored, value)
        refused: list[str] = []
        call = current_call()
        for batch in batches_of(wanted, self.max_retained_nbytes):
            archives = self.objects_are_pickled and not self.requests.transformed
            unread = [stored for stored in batch if stored not in self.fetched]
            _, slices = self.job.run([], unread, slices_are_archives=archives)
            slices.reverse()
            for stored in batch:
                if call is not None:
                    call.raise_if_failed()
                try:
                    # Streams share `bytes`, and copy other memory. Nothing else has the slice.
                    is_fetched = stored in self.fetched
                    self._load_stream(
                        stored,
                        wanted[stored],
                        self.fetched.pop(stored) if is_fetched else bytes(slices.pop()),
                    )
                except ForbiddenPickleError as error:
                    refused.append(f"{_where(stored)}: {error}")
        if refused:
            raise UnsupportedError(
                f"cannot load {len(refused)} values, because unpickling them may run code: "
                f"{'; '.join(refused)}. If you trust their author, {HOW_TO_ALLOW}"
            )

    def _load_stream(self, stored: Slice, items: list[ReadItem], data: bytes) -> None:
        tensor: torch.Tensor | None = None
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                self._load_bytes(item, self._open_stream(item, data, stored), stored)
                continue
            if tensor is None:
                stream = self._open_stream(item, data, stored)
                tensor = self._unpickle_tensor(stream, stored)
            self._copy_box(item, tensor)

    def _load_content(self, item: ReadItem, stored: Slice, value: object) -> None:
        if item.type == LoadItemType.BYTE_IO:
            stream = _io.BytesIO()  # A copy, so that the caller cannot change the reader's object.
            torch.save(value, stream)
            del value  # The reader must not retain it.
            stream.seek(0)
            self._load_bytes(item, stream, stored)
            return
        if not isinstance(value, torch.Tensor):
            raise CorruptionError(f"cannot load {_where(stored)}: it is not a tensor")
        self._copy_box(item, value)

    def _copy_box(self, item: ReadItem, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            raise UnsupportedError(
                f"cannot load {item.dest_index.fqn!r}: it was saved from the meta device, without "
                "elements"
            )
        self._put_box(item, narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))

    def _put_box(self, item: ReadItem, box: torch.Tensor) -> None:
        target = self.planner.resolve_tensor(item).detach()
        if target.size() != box.size():
            raise _shape_mismatch(item, target, box.size())
        self.copies.put(item, target, box)
        self.planner.commit_tensor(item, target)

    def _load_bytes(self, item: ReadItem, stream: _io.BytesIO, stored: Slice) -> None:
        if not self.objects_are_pickled:
            self.planner.load_bytes(item, stream)
            return
        # Not by `load_bytes`, which unpickles without restriction. Checking the bytes before that
        # call would be unsafe: its parsers differ from ours, and may read another object from the
        # same bytes.
        value = self._unpickle(stream, stored)
        planner: Any = self.planner
        store_object(planner, item.dest_index.fqn, value)

    def _unpickle(self, stream: _io.BytesIO, stored: Slice, **options: Any) -> object:
        """Unpickles the archive of a slice.

        Raises:
            CorruptionError: The archive is damaged.
            ForbiddenPickleError: It requests a forbidden class or function.
            UnsupportedError: Torch cannot have written it, or it expands to more than its bytes
                justify.
        """
        with reading(_where(stored)):
            try:
                options |= {"trust_pickle": self.source.trust_pickle, "expansion": self.pickles}
                return load_object(stream, **options)
            except CheckpointError as error:  # It does not name the slice.
                raise type(error)(f"cannot load {_where(stored)}: {error}") from error

    def _unpickle_tensor(self, stream: _io.BytesIO, stored: Slice) -> torch.Tensor:
        tensor = self._unpickle(stream, stored, map_location="cpu")
        if not isinstance(tensor, torch.Tensor):
            raise CorruptionError(f"cannot load {_where(stored)}: it is not a tensor")
        return tensor

    def _open_stream(self, item: ReadItem, data: bytes, stored: Slice) -> _io.BytesIO:
        """Returns the bytes of a slice after reversing its stream transforms."""
        stream = _io.BytesIO(data)
        descriptors = getattr(self.source.storage_info(item), "transform_descriptors", None)
        if not descriptors:
            return stream
        try:
            transformed = self.source.transforms.transform_load_stream(item, descriptors, stream)
        except ValueError as error:
            raise UnsupportedError(f"cannot load {_where(stored)}: {error}") from error
        limit = self._expansion_limit(item, stored)
        expanded = _io.BytesIO()
        try:
            while expanded.tell() <= limit and (chunk := transformed.read(_CHUNK_NBYTES)):
                expanded.write(chunk)
        except Exception as error:
            raise CorruptionError(
                f"cannot reverse {list(descriptors)} of {_where(stored)}: {error}"
            ) from error
        if expanded.tell() > limit:
            raise UnsupportedError(
                f"cannot load {_where(stored)}: {list(descriptors)} expands it to more than "
                f"{limit} bytes. If you trust its author, load with trust_pickle=True"
            )
        if item.type == LoadItemType.BYTE_IO:
            self.streams.charge(0 if self.source.trust_pickle else expanded.tell())
        expanded.seek(0)
        return expanded

    def _expansion_limit(self, item: ReadItem, stored: Slice) -> float:
        """Returns the bytes that the stream of an item may expand to."""
        if self.source.trust_pickle:
            return math.inf
        if item.type == LoadItemType.BYTE_IO:
            self.streams.justify(stored[2])
            return self.streams.left
        # The caller requested a tensor of this size. A subclass may store more.
        tensor: Any = self.source.metadata.state_dict_metadata[item.storage_index.fqn]
        nbytes: int = math.prod(tensor.size) * tensor.properties.dtype.itemsize
        return allowed_nbytes(stored[2]) + 2 * nbytes


def _check_targets(planner: Any, requests: Requests) -> None:
    """Checks targets for a planner of DCP, unless it chooses them by functions of its own."""
    if (
        isinstance(planner, FastLoadPlanner)  # It has checked them.
        or not isinstance(planner, DefaultLoadPlanner)
        or overrides(planner, DefaultLoadPlanner, ("resolve_tensor", "lookup_tensor"))
    ):
        return
    items = [item for item, _, _ in requests.tensors]
    items += [item for item, _ in requests.streams]
    check_targets(planner.state_dict, dict.fromkeys(item.dest_index.fqn for item in items))


def _cancel_on_failure(job: Cancellable) -> None:
    """Cancels a job when the load fails on another rank."""
    call = current_call()
    if call is not None:
        call.cancel_on_failure(job)


def _tensor_of(
    elements: _native.LoadedBytes, dtype: torch.dtype, lengths: torch.Size
) -> torch.Tensor:
    """Returns a tensor over elements in the engine's memory."""
    data = torch.frombuffer(memoryview(elements), dtype=torch.uint8)
    return data.view(dtype).view(lengths)


def _shape_mismatch(item: ReadItem, target: torch.Tensor, wanted: torch.Size) -> MismatchError:
    return MismatchError(
        f"cannot load {item.dest_index.fqn!r}: the target has shape {list(target.size())}, and the "
        f"planned read has shape {list(wanted)}"
    )


def _where(stored: Slice) -> str:
    file, offset, nbytes, name = stored
    return f"{name!r} ({nbytes} bytes at {offset} of {file})"
