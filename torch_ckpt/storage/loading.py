"""One load of one rank: what the engine reads, and what is left to torch."""

from __future__ import annotations

import dataclasses
import io as _io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import (
    DTYPE_CODES,
    Destinations,
    is_temporary,
    printable,
)
from torch_ckpt.errors import CorruptionError, MismatchError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.object_pickles import HOW_TO_ALLOW, load_object
from torch_ckpt.formats.opened import Contents
from torch_ckpt.formats.pickles import ForbiddenPickleError
from torch_ckpt.options import READ_THREADS, IoOptions
from torch_ckpt.planning.load_planner import FastLoadPlanner, PlannedReads
from torch_ckpt.storage.buffers import retained_nbytes_limit, useful_buffer_nbytes

__all__ = ["Load", "Source"]

_TORCHS_OWN = _tensor_view.TensorKind.TORCHS_OWN

_Slice = tuple[str, int, int, str]  # File, offset, length in bytes, FQN.
_Tensor = tuple[ReadItem, _Slice, torch.dtype]  # Dtype as stored.
# With the target, and the stored dtype where the elements must be copied there.
_Destination = tuple[ReadItem, _Slice, torch.Tensor, torch.dtype | None]


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that is open, and how it is read."""

    metadata: Metadata
    directory: Location
    index: _native.Index | None
    contents: Contents | None
    io: IoOptions
    verify: bool
    trust_pickle: bool
    transforms: _StorageReaderTransforms

    def storage_info(self, item: ReadItem) -> _StorageInfo:
        """Where the stored box of an item lies.

        Raises:
            CorruptionError: The metadata do not say.
        """
        try:
            info: _StorageInfo = self.metadata.storage_data[item.storage_index]
        except KeyError:
            raise CorruptionError(
                f"metadata does not say where {item.storage_index} is stored"
            ) from None
        return info

    def stored_dtype(self, item: ReadItem) -> torch.dtype | None:
        """The dtype of a tensor that the engine can read; ``None`` for all that is torch's."""
        if item.type == LoadItemType.BYTE_IO:
            return None
        stored = self.metadata.state_dict_metadata.get(item.storage_index.fqn)
        if not isinstance(stored, TensorStorageMetadata):
            return None
        dtype = stored.properties.dtype
        return dtype if dtype in DTYPE_CODES else None


class Load:
    """What one rank reads of a checkpoint: made, run once and dropped. Each file is opened once.

    Args:
        source: The checkpoint.
        items: As the planner has made them.

    Raises:
        CorruptionError: The metadata do not say where something lies.
    """

    def __init__(self, source: Source, items: Sequence[ReadItem]) -> None:
        self.source = source
        self.items = items
        self._requests = None if isinstance(items, PlannedReads) else _Requests(source, items)
        of_columns = items.reads.nbytes if isinstance(items, PlannedReads) else 0
        nbytes = of_columns if self._requests is None else self._requests.nbytes
        io = source.io
        self.job = _native.LoadJob(
            source.directory.file_system,
            source.directory.path,
            source.index,
            useful_buffer_nbytes(nbytes, io.buffer_nbytes, io.block_nbytes),
            io.block_nbytes,
            READ_THREADS,
            io.direct,
            source.verify,
        )

    def wanted_bytes(self) -> bytes:
        """What of the data files is read for tensors, encoded.

        Raises:
            CheckpointError: A file or its slices are not what metadata say.
        """
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
        """Reads everything into place.

        Args:
            planner: Tells the places.
            exchange: With the ranks that read the same.
        """
        if (
            isinstance(self.items, PlannedReads)
            and isinstance(planner, FastLoadPlanner)
            and planner.loads_plainly()
        ):
            left = self._run_columns(self.items, planner, exchange)
            if left:
                _LoadByItem(self, _Requests(self.source, left), planner).run(None)
            return
        requests = self._requests or _Requests(self.source, list(self.items))
        _LoadByItem(self, requests, planner).run(exchange)

    def _run_columns(
        self, items: PlannedReads, planner: FastLoadPlanner, exchange: _native.ExchangeStream | None
    ) -> list[ReadItem]:
        """Reads tensors straight into place; returns what is left to torch."""
        items.reads.check(self.job)

        def take(number: int, elements: _native.LoadedBytes) -> None:
            item = items[number]
            dtype = self.source.stored_dtype(item)
            assert dtype is not None
            _copy_to(planner.resolve_tensor(item).detach(), elements, dtype, item.lengths)

        looks = _tensor_view.inspect(items.sources, writable=True)
        return [items[at] for at in items.reads.run(self.job, looks, take, exchange)]


class _Requests:
    """Where items lie that DCP's planners have made, and who reads them.

    Attributes:
        tensors: What the engine reads.
        streams: What torch reads: objects, and what a stream transform has changed.
        nbytes: Of all slices.
        transformed: Whether a stream transform has changed any.
    """

    def __init__(self, source: Source, items: Sequence[ReadItem]) -> None:
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
    """Loads items one by one as their planner has them."""

    def __init__(self, load: Load, requests: _Requests, planner: LoadPlanner) -> None:
        self.source = load.source
        self.job = load.job
        self.requests = requests
        self.planner = planner
        self.max_retained_nbytes = retained_nbytes_limit(load.source.io)
        # Another planner may have stored bytes of any kind.
        self.objects_are_pickled = (
            getattr(planner.load_bytes, "__func__", None) is DefaultLoadPlanner.load_bytes
        )

    def run(self, exchange: _native.ExchangeStream | None) -> None:
        """Loads tensors through the engine, then whatever is left through torch."""
        requests = self.requests
        # All extents before any target is written.
        slices = [stored for _, stored, _ in requests.tensors]
        self.job.check(slices + [stored for _, stored in requests.streams])
        left = self._load_tensors(exchange)
        self._load_streams(requests.streams + left)

    def _load_tensors(
        self, exchange: _native.ExchangeStream | None
    ) -> list[tuple[ReadItem, _Slice]]:
        """Loads tensors in one call of the engine, and then those that must wait for others.

        Returns:
            Those that only torch can read; nothing was written to their targets.
        """
        left: list[tuple[ReadItem, _Slice]] = []
        waiting = self.requests.tensors
        while waiting or exchange is not None:
            batch, waiting = self._next_batch(waiting, pass_over=exchange is not None)
            left += self._load_batch(batch, exchange)
            exchange = None  # All that ranks exchange comes with the first batch.
        return left

    def _next_batch(
        self, waiting: list[_Tensor], *, pass_over: bool
    ) -> tuple[list[_Destination], list[_Tensor]]:
        """Resolves tensors as far as they can be read together.

        Args:
            waiting: In DCP's order.
            pass_over: Whether one that cannot be read with those before it is passed over;
                otherwise the batch ends there.

        Returns:
            What to read, and the tensors that must wait for it.
        """
        batch: list[_Destination] = []
        must_wait: list[_Tensor] = []
        taken = Destinations()
        passed_over: set[int] = set()  # Storages.
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
                # A subclass may copy to any memory, so it is loaded alone.
                if pass_over:
                    must_wait.append(tensor)
                    continue
                if batch:
                    return batch, waiting[number:]
                return [(item, stored, target, dtype)], waiting[number + 1 :]
            fqn = item.dest_index.fqn
            storage = target.untyped_storage().data_ptr()
            if storage in passed_over or taken.meets(target, fqn):
                if not pass_over:
                    return batch, waiting[number:]
                passed_over.add(storage)
                must_wait.append(tensor)
                continue
            taken.add(target, fqn)
            is_direct = target.dtype == dtype and is_loadable
            batch.append((item, stored, target, None if is_direct else dtype))
            if temporary:
                retained_nbytes += target.nbytes
                if retained_nbytes >= self.max_retained_nbytes:
                    return batch, must_wait + waiting[number + 1 :]
        return batch, must_wait

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

        def take(number: int, elements: _native.LoadedBytes) -> None:
            item, _, target, dtype = batch[number]
            assert dtype is not None
            _copy_to(target, elements, dtype, item.lengths)

        loaded, _ = self.job.run(requests, [], take, exchange)
        left: list[tuple[ReadItem, _Slice]] = []
        for done, (item, stored, target, _) in zip(loaded, batch, strict=True):
            if done:
                self.planner.commit_tensor(item, target)
            else:
                left.append((item, stored))
        return left

    def _load_streams(self, streams: list[tuple[ReadItem, _Slice]]) -> None:
        """Loads objects, and tensors that torch must unpickle: each stored slice read once."""
        if self.source.contents is not None:
            for item, stored in streams:
                self._load_content(item, stored, self.source.contents.value(stored[3]))
            return
        wanted: dict[_Slice, list[ReadItem]] = {}
        for item, stored in streams:
            wanted.setdefault(stored, []).append(item)
        refused: list[str] = []
        for batch in _batches(wanted, self.max_retained_nbytes):
            archives = self.objects_are_pickled and not self.requests.transformed
            _, slices = self.job.run([], batch, slices_are_archives=archives)
            for stored, data in zip(batch, slices, strict=True):
                try:
                    self._load_stream(stored, wanted[stored], data)
                except ForbiddenPickleError as error:
                    refused.append(f"{_where(stored)}: {error}")
        if refused:
            raise UnsupportedError(
                f"cannot load {len(refused)} values, because unpickling them may run code: "
                f"{'; '.join(refused)}. If you trust who wrote them, {HOW_TO_ALLOW}"
            )

    def _load_stream(
        self, stored: _Slice, items: list[ReadItem], data: _native.LoadedBytes
    ) -> None:
        tensor: torch.Tensor | None = None
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                self._load_bytes(item, self._open_stream(item, data, stored), stored)
                continue
            if tensor is None:
                stream = self._open_stream(item, data, stored)
                tensor = _unpickle_tensor(stream, stored, self.source.trust_pickle)
            self._copy_part(item, tensor)

    def _load_content(self, item: ReadItem, stored: _Slice, value: object) -> None:
        if item.type == LoadItemType.BYTE_IO:
            stream = _io.BytesIO()  # A copy: nobody else may change what the reader keeps.
            torch.save(value, stream)
            stream.seek(0)
            self._load_bytes(item, stream, stored)
            return
        if not isinstance(value, torch.Tensor):
            raise CorruptionError(f"cannot load {_where(stored)}: it is no tensor")
        self._copy_part(item, value)

    def _copy_part(self, item: ReadItem, tensor: torch.Tensor) -> None:
        part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
        target = self.planner.resolve_tensor(item).detach()
        if target.size() != part.size():
            raise _shape_mismatch(item, target, part.size())
        target.copy_(part)
        self.planner.commit_tensor(item, target)

    def _load_bytes(self, item: ReadItem, stream: _io.BytesIO, stored: _Slice) -> None:
        if not self.objects_are_pickled:
            self.planner.load_bytes(item, stream)
            return
        is_archive = bytes(stream.getbuffer()[:4]) == b"PK\3\4"
        try:
            if self.source.trust_pickle:
                self.planner.load_bytes(item, stream)
            else:
                _store_object(self.planner, item, load_object(stream))
        except ForbiddenPickleError:
            raise
        except Exception as error:
            # What stock cannot open as an archive is damaged; in one whose checksums hold, it is
            # the object that fails.
            if not is_archive or "PytorchStreamReader" in str(error):
                raise CorruptionError(f"cannot load {_where(stored)}: {error}") from error
            raise

    def _open_stream(
        self, item: ReadItem, data: _native.LoadedBytes, stored: _Slice
    ) -> _io.BytesIO:
        """The bytes of a slice, with stream transforms undone."""
        stream = _io.BytesIO(memoryview(data))
        descriptors = getattr(self.source.storage_info(item), "transform_descriptors", None)
        if not descriptors:
            return stream
        transformed = self.source.transforms.transform_load_stream(item, descriptors, stream)
        try:
            return _io.BytesIO(transformed.read(-1))
        except Exception as error:
            raise CorruptionError(
                f"cannot undo {list(descriptors)} of {_where(stored)}: {error}"
            ) from error


def _copy_to(
    target: torch.Tensor, elements: _native.LoadedBytes, dtype: torch.dtype, lengths: torch.Size
) -> None:
    """Copies elements, as the engine hands them over, to a tensor of another device or dtype."""
    data = torch.frombuffer(memoryview(elements), dtype=torch.uint8)
    target.copy_(data.view(dtype).view(lengths))


def _store_object(planner: Any, item: ReadItem, value: object) -> None:
    """What ``DefaultLoadPlanner.load_bytes`` does with the object that it has unpickled.

    Its own unpickling is without restriction, and to have checked the bytes before would not do: it
    has other parsers for archives and pickles, and may see another object in the same bytes.
    """
    fqn = item.dest_index.fqn
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[fqn], value)
    else:
        planner.state_dict[fqn] = value


def _shape_mismatch(item: ReadItem, target: torch.Tensor, wanted: torch.Size) -> MismatchError:
    return MismatchError(
        f"cannot load {item.dest_index.fqn!r}: the target has shape {list(target.size())}, "
        f"what the plan reads {list(wanted)}"
    )


def _where(stored: _Slice) -> str:
    file, offset, nbytes, name = stored
    return f"{name!r} ({nbytes} bytes at {offset} of {file})"


def _unpickle_tensor(stream: _io.BytesIO, stored: _Slice, trust_pickle: bool) -> torch.Tensor:
    try:
        tensor = load_object(stream, trust_pickle=trust_pickle, map_location="cpu")
    except ForbiddenPickleError:
        raise
    except pickle.UnpicklingError as error:
        raise UnsupportedError(f"cannot unpickle {_where(stored)}: {error}") from error
    except Exception as error:
        raise CorruptionError(f"cannot unpickle {_where(stored)}: {error}") from error
    if not isinstance(tensor, torch.Tensor):
        raise CorruptionError(f"cannot load {_where(stored)}: it is no tensor")
    return tensor


def _batches(slices: Iterable[_Slice], max_nbytes: int) -> Iterator[list[_Slice]]:
    """Groups slices up to ``max_nbytes`` in all; a longer one goes alone."""
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
