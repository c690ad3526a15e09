"""One load of one rank: the engine reads most tensors, and torch reads the other items."""

from __future__ import annotations

import copy
import dataclasses
import io as _io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import DTYPE_CODES, Destinations, is_temporary, printable
from torch_ckpt.coordination.group import Cancellable, current_call
from torch_ckpt.errors import CheckpointError, CorruptionError, MismatchError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.allowed_classes import HOW_TO_ALLOW
from torch_ckpt.formats.expansion import OBJECTS_NBYTES, Expansion, allowed_nbytes
from torch_ckpt.formats.object_pickles import load_object
from torch_ckpt.formats.opened import Contents
from torch_ckpt.formats.pickles import ForbiddenPickleError
from torch_ckpt.formats.reading import reading
from torch_ckpt.options import READ_THREADS, IoOptions
from torch_ckpt.planning.columns import overrides
from torch_ckpt.planning.load_planner import FastLoadPlanner, PlannedReads
from torch_ckpt.planning.loaded_objects import store_object
from torch_ckpt.planning.targets import check_targets
from torch_ckpt.storage.buffers import retained_nbytes_limit, useful_buffer_nbytes

__all__ = ["Load", "LoadSource"]

_TORCHS_OWN = _tensor_view.TensorKind.TORCHS_OWN

_CHUNK_NBYTES = 4 << 20
"""Bytes that a stream transform reverses at a time."""

_Slice = tuple[str, int, int, str]  # File, offset, length in bytes, FQN.
_Tensor = tuple[ReadItem, _Slice, torch.dtype]  # The last element is the stored dtype.
# Item, slice, target tensor, and the stored dtype if the elements must be copied to the target.
_Destination = tuple[ReadItem, _Slice, torch.Tensor, torch.dtype | None]


@dataclasses.dataclass(frozen=True)
class LoadSource:
    """An open checkpoint, and the options of the load."""

    metadata: Metadata
    directory: Location
    index: _native.Index | None
    contents: Contents | None
    io: IoOptions
    verify: bool
    trust_pickle: bool
    transforms: _StorageReaderTransforms
    unreadable: Mapping[str, CheckpointError]  # FQN -> why the value cannot be loaded.
    records: _native.Records | None  # Those that verification checks.

    def storage_info(self, item: ReadItem) -> _StorageInfo:
        """Returns the extent of the stored box of an item.

        Raises:
            CorruptionError: The metadata has no such box.
        """
        try:
            info: _StorageInfo = self.metadata.storage_data[item.storage_index]
        except KeyError:
            raise CorruptionError(
                f"cannot load {item.storage_index}: the metadata does not list it"
            ) from None
        return info

    def stored_dtype(self, item: ReadItem) -> torch.dtype | None:
        """Returns the dtype of a tensor that the engine can read; ``None`` for other items."""
        if item.type == LoadItemType.BYTE_IO:
            return None
        stored = self.metadata.state_dict_metadata.get(item.storage_index.fqn)
        if not isinstance(stored, TensorStorageMetadata):
            return None
        dtype = stored.properties.dtype
        return dtype if dtype in DTYPE_CODES else None


class Load:
    """The reads of one rank in one load. Runs once, and opens each file once.

    Args:
        source: The checkpoint.
        items: The items of the rank's plan.

    Raises:
        CorruptionError: The metadata does not list the stored box of an item.
        CheckpointError: An item cannot be loaded, as opening the checkpoint has shown.
    """

    def __init__(self, source: LoadSource, items: Sequence[ReadItem]) -> None:
        for item in items if source.unreadable else ():
            if (error := source.unreadable.get(item.storage_index.fqn)) is not None:
                raise copy.copy(error)
        self.source = source
        self.items = items
        self.copies = _Copies()
        self._requests = None if isinstance(items, PlannedReads) else _Requests(source, items)
        column_nbytes = items.reads.nbytes if isinstance(items, PlannedReads) else 0
        nbytes = column_nbytes if self._requests is None else self._requests.nbytes
        io, file_system = source.io, source.directory.file_system
        block_nbytes = io.block_nbytes(file_system)
        self.job = _native.LoadJob(
            file_system,
            source.directory.path,
            source.index,
            useful_buffer_nbytes(nbytes, io.buffer_nbytes, block_nbytes, file_system),
            block_nbytes,
            READ_THREADS,
            io.direct,
            source.verify,
            source.records,
        )

    def wanted_nbytes(self) -> int:
        """Returns the number of bytes of the tensors that the engine loads."""
        nbytes = 0
        for item in self.items:
            dtype = self.source.stored_dtype(item)
            if dtype is not None:
                nbytes += math.prod(item.lengths) * dtype.itemsize
        return nbytes

    def loaded_nbytes(self) -> int:
        """Returns the number of bytes that were loaded so far. Any thread may call it."""
        return self.job.done_nbytes

    def wanted_bytes(self) -> bytes:
        """Returns the encoded byte ranges of the data files that the tensors need.

        Raises:
            CheckpointError: A file or a slice does not match the metadata.
        """
        _cancel_on_failure(self.job)
        if isinstance(self.items, PlannedReads):
            return self.items.reads.wanted_bytes(self.job)
        assert self._requests is not None
        return self.job.wanted_bytes(
            [
                (
                    stored,
                    item.storage_offsets,
                    _native.TensorView.without_memory(DTYPE_CODES[dtype], item.lengths),
                )
                for item, stored, dtype in self._requests.tensors
            ]
        )

    def run(self, planner: LoadPlanner, exchange: _native.ExchangeStream | None = None) -> None:
        """Reads all items into their targets.

        Args:
            planner: Planner of this rank, which resolves targets.
            exchange: Stream of the exchange with other ranks, if there is one.
        """
        _cancel_on_failure(self.job)
        if exchange is not None:
            _cancel_on_failure(exchange)
        if (
            isinstance(self.items, PlannedReads)
            and isinstance(planner, FastLoadPlanner)
            and planner.loads_plainly()
        ):
            remaining = self._run_columns(self.items, planner, exchange)
            if remaining:
                _LoadByItem(self, _Requests(self.source, remaining), planner).run(None)
        else:
            requests = self._requests or _Requests(self.source, list(self.items))
            _LoadByItem(self, requests, planner).run(exchange)
        self.copies.check()

    def _run_columns(
        self, items: PlannedReads, planner: FastLoadPlanner, exchange: _native.ExchangeStream | None
    ) -> list[ReadItem]:
        """Reads tensors directly into their targets; returns the items that torch must read."""
        items.reads.check(self.job)

        def copy_to_target(number: int, elements: _native.LoadedBytes) -> None:
            item = items[number]
            dtype = self.source.stored_dtype(item)
            assert dtype is not None
            target = planner.resolve_tensor(item).detach()
            self.copies.put(item, target, _tensor_of(elements, dtype, item.lengths))

        batch = _tensor_view.inspect(items.sources, writable=True)
        remaining = items.reads.run(self.job, batch, copy_to_target, exchange)
        return [items[number] for number in remaining]


class _Copies:
    """Copies elements to tensors whose memory the engine does not write itself."""

    def __init__(self) -> None:
        # FQN, target, and the elements that it must have: of targets whose elements may overlap.
        self._to_check: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def put(self, item: ReadItem, target: torch.Tensor, elements: torch.Tensor) -> None:
        """Copies elements to the target of an item, with a cast if necessary.

        Raises:
            MismatchError: Torch refuses.
        """
        fqn = item.dest_index.fqn
        try:
            target.copy_(elements)
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                raise
            raise MismatchError(
                f"cannot load {fqn!r} into a {type(target).__name__} of {target.dtype} and "
                f"{target.layout}: {error}"
            ) from error
        if _tensor_view.may_overlap_itself(target):
            self._to_check.append((fqn, target, elements.to(target.dtype, copy=True)))

    def check(self) -> None:
        """Checks the targets whose elements may overlap, after the last copy.

        Raises:
            ValueError: An element has the value of another one.
        """
        for fqn, target, elements in self._to_check:
            found, wanted = (t.cpu().contiguous().view(torch.uint8) for t in (target, elements))
            if not torch.equal(found, wanted):
                raise ValueError(
                    f"cannot load {fqn!r}: elements of its target share memory (strides "
                    f"{list(target.stride())}), and need different values; pass a clone of it"
                )


class _Requests:
    """The slices of DCP's read items, grouped by their reader.

    Attributes:
        tensors: Tensors that the engine reads.
        streams: Slices that torch reads: objects, other tensors, and slices with stream transforms.
        nbytes: Total length of all slices.
        transformed: Whether any slice has a stream transform.
    """

    def __init__(self, source: LoadSource, items: Sequence[ReadItem]) -> None:
        self.tensors: list[_Tensor] = []
        self.streams: list[tuple[ReadItem, _Slice]] = []
        self.nbytes = 0
        self.transformed = False
        for item in items:
            info = source.storage_info(item)
            stored = (
                info.relative_path,
                info.offset,
                info.length,
                printable(item.storage_index.fqn),
            )
            self.nbytes += info.length
            dtype = source.stored_dtype(item)
            descriptors = getattr(info, "transform_descriptors", None)
            self.transformed = self.transformed or bool(descriptors)
            if descriptors or dtype is None:
                self.streams.append((item, stored))
            else:
                self.tensors.append((item, stored, dtype))


class _LoadByItem:
    """Loads the items of a planner that resolves and commits them one by one."""

    def __init__(self, load: Load, requests: _Requests, planner: LoadPlanner) -> None:
        self.source = load.source
        self.job = load.job
        self.copies = load.copies
        self.requests = requests
        self.planner = planner
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
        self._check_targets()
        slices = [stored for _, stored, _ in requests.tensors]
        self.job.check(slices + [stored for _, stored in requests.streams])
        remaining = self._load_tensors(exchange)
        self._load_streams(requests.streams + remaining)

    def _check_targets(self) -> None:
        """Checks targets for a planner of DCP, unless it chooses them by functions of its own."""
        planner: Any = self.planner
        if (
            isinstance(planner, FastLoadPlanner)  # It has checked them.
            or not isinstance(planner, DefaultLoadPlanner)
            or overrides(planner, DefaultLoadPlanner, ("resolve_tensor", "lookup_tensor"))
        ):
            return
        items = [item for item, _, _ in self.requests.tensors]
        items += [item for item, _ in self.requests.streams]
        check_targets(planner.state_dict, dict.fromkeys(item.dest_index.fqn for item in items))

    def _load_tensors(
        self, exchange: _native.ExchangeStream | None
    ) -> list[tuple[ReadItem, _Slice]]:
        """Loads tensors in as few batches as possible.

        Returns:
            Tensors that only torch can read. Their targets are unchanged.
        """
        remaining: list[tuple[ReadItem, _Slice]] = []
        waiting = self.requests.tensors
        while waiting or exchange is not None:
            batch, waiting = self._next_batch(waiting, skip_conflicts=exchange is not None)
            remaining += self._load_batch(batch, exchange)
            exchange = None  # The exchange ends with the first batch.
        return remaining

    def _next_batch(
        self, waiting: list[_Tensor], *, skip_conflicts: bool
    ) -> tuple[list[_Destination], list[_Tensor]]:
        """Resolves tensors until one conflicts with the batch.

        Tensors conflict if their targets share memory.

        Args:
            waiting: Tensors in DCP's order.
            skip_conflicts: Whether to skip a conflicting tensor and go on. Otherwise the batch ends
                before that tensor.

        Returns:
            The batch, and the tensors for later batches.
        """
        batch: list[_Destination] = []
        postponed: list[_Tensor] = []
        destinations = Destinations()
        postponed_storages: set[int] = set()
        retained_nbytes = 0
        for number, tensor in enumerate(waiting):
            item, stored, dtype = tensor
            resolved = self.planner.resolve_tensor(item)
            temporary = is_temporary(resolved)
            target = resolved.detach()
            if target.size() != item.lengths:
                raise _shape_mismatch(item, target, item.lengths)
            is_loadable = _tensor_view.is_loadable(target)
            if not is_loadable and _tensor_view.tensor_kind(target) == _TORCHS_OWN:
                # A subclass may write to any memory in copy_, so its batch has no other tensor.
                if skip_conflicts:
                    postponed.append(tensor)
                    continue
                if batch:
                    return batch, waiting[number:]
                return [(item, stored, target, dtype)], waiting[number + 1 :]
            fqn = item.dest_index.fqn
            storage = target.untyped_storage().data_ptr()
            if storage in postponed_storages or destinations.overlaps(target, fqn):
                if not skip_conflicts:
                    return batch, waiting[number:]
                postponed_storages.add(storage)
                postponed.append(tensor)
                continue
            destinations.add(target, fqn)
            is_direct = target.dtype == dtype and is_loadable
            batch.append((item, stored, target, None if is_direct else dtype))
            if temporary:
                retained_nbytes += target.nbytes
                if retained_nbytes >= self.max_retained_nbytes:
                    return batch, postponed + waiting[number + 1 :]
        return batch, postponed

    def _load_batch(
        self, batch: list[_Destination], exchange: _native.ExchangeStream | None
    ) -> list[tuple[ReadItem, _Slice]]:
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

        def copy_to_target(number: int, elements: _native.LoadedBytes) -> None:
            item, _, target, dtype = batch[number]
            assert dtype is not None
            self.copies.put(item, target, _tensor_of(elements, dtype, item.lengths))

        loaded, _ = self.job.run(requests, [], copy_to_target, exchange)
        remaining: list[tuple[ReadItem, _Slice]] = []
        for done, (item, stored, target, _) in zip(loaded, batch, strict=True):
            if done:
                self.planner.commit_tensor(item, target)
            else:
                remaining.append((item, stored))
        return remaining

    def _load_streams(self, streams: list[tuple[ReadItem, _Slice]]) -> None:
        """Loads objects, and tensors that torch must unpickle. Reads each slice once."""
        if self.source.contents is not None:
            for item, stored in streams:
                with reading(_where(stored)):
                    value = self.source.contents.value(stored[3])
                self._load_content(item, stored, value)
            return
        wanted: dict[_Slice, list[ReadItem]] = {}
        for item, stored in streams:
            wanted.setdefault(stored, []).append(item)
        refused: list[str] = []
        call = current_call()
        for batch in _batches(wanted, self.max_retained_nbytes):
            archives = self.objects_are_pickled and not self.requests.transformed
            _, slices = self.job.run([], batch, slices_are_archives=archives)
            slices.reverse()
            for stored in batch:
                if call is not None:
                    call.raise_if_failed()
                try:
                    # Streams share bytes, and copy other memory. Nothing else refers to the slice.
                    self._load_stream(stored, wanted[stored], bytes(slices.pop()))
                except ForbiddenPickleError as error:
                    refused.append(f"{_where(stored)}: {error}")
        if refused:
            raise UnsupportedError(
                f"cannot load {len(refused)} values, because unpickling them may run code: "
                f"{'; '.join(refused)}. If you trust their author, {HOW_TO_ALLOW}"
            )

    def _load_stream(self, stored: _Slice, items: list[ReadItem], data: bytes) -> None:
        tensor: torch.Tensor | None = None
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                self._load_bytes(item, self._open_stream(item, data, stored), stored)
                continue
            if tensor is None:
                stream = self._open_stream(item, data, stored)
                tensor = self._unpickle_tensor(stream, stored)
            self._copy_box(item, tensor)

    def _load_content(self, item: ReadItem, stored: _Slice, value: object) -> None:
        if item.type == LoadItemType.BYTE_IO:
            stream = _io.BytesIO()  # A copy, so that the caller cannot change the reader's object.
            torch.save(value, stream)
            del value  # The reader may not keep it.
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
        box = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
        target = self.planner.resolve_tensor(item).detach()
        if target.size() != box.size():
            raise _shape_mismatch(item, target, box.size())
        self.copies.put(item, target, box)
        self.planner.commit_tensor(item, target)

    def _load_bytes(self, item: ReadItem, stream: _io.BytesIO, stored: _Slice) -> None:
        if not self.objects_are_pickled:
            self.planner.load_bytes(item, stream)
            return
        # Not by `load_bytes`, which unpickles without restriction. A check of the bytes before that
        # call would not be safe: its parsers differ from ours, and may read another object from the
        # same bytes.
        value = self._unpickle(stream, stored)
        planner: Any = self.planner
        store_object(planner, item.dest_index.fqn, value)

    def _unpickle(self, stream: _io.BytesIO, stored: _Slice, **options: Any) -> object:
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

    def _unpickle_tensor(self, stream: _io.BytesIO, stored: _Slice) -> torch.Tensor:
        tensor = self._unpickle(stream, stored, map_location="cpu")
        if not isinstance(tensor, torch.Tensor):
            raise CorruptionError(f"cannot load {_where(stored)}: it is not a tensor")
        return tensor

    def _open_stream(self, item: ReadItem, data: bytes, stored: _Slice) -> _io.BytesIO:
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

    def _expansion_limit(self, item: ReadItem, stored: _Slice) -> float:
        """Returns the bytes that the stream of an item may expand to."""
        if self.source.trust_pickle:
            return math.inf
        if item.type == LoadItemType.BYTE_IO:
            self.streams.justify(stored[2])
            return self.streams.left
        # The caller has asked for a tensor of this size. A subclass may store more than that.
        tensor: Any = self.source.metadata.state_dict_metadata[item.storage_index.fqn]
        nbytes: int = math.prod(tensor.size) * tensor.properties.dtype.itemsize
        return allowed_nbytes(stored[2]) + 2 * nbytes


def _cancel_on_failure(job: Cancellable) -> None:
    """Cancels a job when the load fails on another rank."""
    call = current_call()
    if call is not None:
        call.cancel_on_failure(job)


def _tensor_of(
    elements: _native.LoadedBytes, dtype: torch.dtype, lengths: torch.Size
) -> torch.Tensor:
    """Returns a tensor of elements in the engine's memory."""
    data = torch.frombuffer(memoryview(elements), dtype=torch.uint8)
    return data.view(dtype).view(lengths)


def _shape_mismatch(item: ReadItem, target: torch.Tensor, wanted: torch.Size) -> MismatchError:
    return MismatchError(
        f"cannot load {item.dest_index.fqn!r}: the target has shape {list(target.size())}, and the "
        f"planned read has shape {list(wanted)}"
    )


def _where(stored: _Slice) -> str:
    file, offset, nbytes, name = stored
    return f"{name!r} ({nbytes} bytes at {offset} of {file})"


def _batches(slices: Iterable[_Slice], max_nbytes: int) -> Iterator[list[_Slice]]:
    """Groups slices into batches of up to ``max_nbytes``; a longer slice has its own batch."""
    batch: list[_Slice] = []
    total = 0
    for stored in slices:
        if batch and total + stored[2] > max_nbytes:
            yield batch
            batch, total = [], 0
        batch.append(stored)
        total += stored[2]
    if batch:
        yield batch
