"""One load of one rank: what the engine reads, and what is left to torch."""

from __future__ import annotations

import io as _io
import itertools
import os
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torch_ckpt import _native, _tensor_view
from torch_ckpt.errors import CorruptionError, MismatchError, UnsupportedError
from torch_ckpt.formats.opened import Contents
from torch_ckpt.load_planner import FastLoadPlanner, PlannedReads
from torch_ckpt.options import IoOptions
from torch_ckpt.pickles import ForbiddenPickleError, load_object
from torch_ckpt.tensors import (
    DTYPE_CODES,
    Destinations,
    held_nbytes_limit,
    is_temporary,
    useful_buffer_nbytes,
)

__all__ = ["Load", "load_planned"]

_Slice = tuple[str, int, int, str]  # File, offset, length in bytes, FQN.
_Tensor = tuple[ReadItem, _Slice, torch.dtype]  # Dtype as stored.
_Destination = tuple[ReadItem, _Slice, torch.Tensor, torch.Tensor]  # Target, memory read into.


def load_planned(
    metadata: Metadata,
    planner: FastLoadPlanner,
    items: PlannedReads,
    *,
    fs: _native.FileSystem,
    path: str | os.PathLike[str],
    index: _native.Index | None,
    contents: Contents | None,
    io: IoOptions,
    verify: bool,
    trust_pickle: bool,
    transforms: _StorageReaderTransforms,
) -> None:
    """Loads what was planned in columns: tensors straight into place, and the rest as ``Load``."""
    reads = items.reads
    job = _native.LoadJob(
        fs,
        os.fsencode(path),
        index,
        useful_buffer_nbytes(reads.nbytes, io.buffer_nbytes, io.block_nbytes),
        io.block_nbytes,
        io.threads,
        io.direct,
        verify,
        False,  # No object is read here.
    )
    reads.check(job)
    left = reads.run(job, _tensor_view.look(items.sources, writable=True))
    if left:
        Load(
            metadata,
            planner,
            [items[at] for at in left],
            fs=fs,
            path=path,
            index=index,
            contents=contents,
            io=io,
            verify=verify,
            trust_pickle=trust_pickle,
            transforms=transforms,
        ).run()


class Load:
    """One call of ``read_data``: made, run once and dropped."""

    def __init__(
        self,
        metadata: Metadata,
        planner: LoadPlanner,
        items: list[ReadItem],
        *,
        fs: _native.FileSystem,
        path: str | os.PathLike[str],
        index: _native.Index | None,
        contents: Contents | None,
        io: IoOptions,
        verify: bool,
        trust_pickle: bool,
        transforms: _StorageReaderTransforms,
    ) -> None:
        self.storage_data: dict[Any, _StorageInfo] = metadata.storage_data
        self.state_dict_metadata = metadata.state_dict_metadata
        self.planner = planner
        self.contents = contents
        self.transforms = transforms
        self.max_held_nbytes = held_nbytes_limit(io)
        # Another planner may have stored bytes of any kind.
        self.objects_are_pickled = (
            getattr(planner.load_bytes, "__func__", None) is DefaultLoadPlanner.load_bytes
        )
        self.trust_pickle = trust_pickle
        self.tensors: list[_Tensor] = []
        self.streams: list[tuple[ReadItem, _Slice]] = []
        nbytes = 0
        transformed = False
        for item in items:
            info = self._storage_info(item)
            stored = (info.relative_path, info.offset, info.length, item.storage_index.fqn)
            nbytes += info.length
            dtype = self._stored_dtype(item)
            descriptors = getattr(info, "transform_descriptors", None)
            transformed = transformed or bool(descriptors)
            if descriptors or dtype is None:
                self.streams.append((item, stored))
            else:
                self.tensors.append((item, stored, dtype))
        self.job = _native.LoadJob(
            fs,
            os.fsencode(path),
            index,
            useful_buffer_nbytes(nbytes, io.buffer_nbytes, io.block_nbytes),
            io.block_nbytes,
            io.threads,
            io.direct,
            verify,
            self.objects_are_pickled and not transformed,
        )

    def run(self) -> None:
        """Loads tensors through the engine, then whatever is left through torch."""
        # All extents before any target is written.
        slices = [stored for _, stored, _ in self.tensors]
        self.job.check(slices + [stored for _, stored in self.streams])
        left = self._load_tensors()
        self._load_streams(self.streams + left)

    def _storage_info(self, item: ReadItem) -> _StorageInfo:
        try:
            return self.storage_data[item.storage_index]
        except KeyError:
            raise CorruptionError(
                f"metadata does not say where {item.storage_index} is stored"
            ) from None

    def _stored_dtype(self, item: ReadItem) -> torch.dtype | None:
        """The dtype of a tensor that the engine can read; ``None`` for all that is torch's."""
        if item.type == LoadItemType.BYTE_IO:
            return None
        stored = self.state_dict_metadata.get(item.storage_index.fqn)
        if not isinstance(stored, TensorStorageMetadata):
            return None
        dtype = stored.properties.dtype
        return dtype if dtype in DTYPE_CODES else None

    def _load_tensors(self) -> list[tuple[ReadItem, _Slice]]:
        """Loads tensors in one call of the engine, or in batches where they need temporaries.

        Returns:
            Those that only torch can read; nothing was written to their targets.
        """
        left: list[tuple[ReadItem, _Slice]] = []
        waiting = iter(self.tensors)
        pending: _Tensor | None = next(waiting, None)
        while pending is not None:
            batch, pending = self._next_batch(pending, waiting)
            left += self._load_batch(batch)
        return left

    def _next_batch(
        self, first: _Tensor, waiting: Iterator[_Tensor]
    ) -> tuple[list[_Destination], _Tensor | None]:
        """Resolves tensors as long as they can be read together.

        Returns:
            What to read, and the tensor that must wait for it, if there is one.
        """
        batch: list[_Destination] = []
        taken = Destinations()
        held_nbytes = 0
        for tensor in itertools.chain([first], waiting):
            item, stored, dtype = tensor
            resolved = self.planner.resolve_tensor(item)
            temporary = is_temporary(resolved)
            target = resolved.detach()
            if target.size() != item.lengths:
                raise _shape_mismatch(item, target, item.lengths)
            if not taken.add(target, item.dest_index.fqn):
                return batch, tensor
            memory = target
            if target.dtype != dtype or not _tensor_view.is_loadable(target):
                memory = torch.empty(item.lengths, dtype=dtype, device="cpu")
                temporary = True
            batch.append((item, stored, target, memory))
            if temporary:
                held_nbytes += memory.nbytes
                if held_nbytes >= self.max_held_nbytes:
                    return batch, next(waiting, None)
        return batch, None

    def _load_batch(self, batch: list[_Destination]) -> list[tuple[ReadItem, _Slice]]:
        requests = [
            (stored, item.storage_offsets, _tensor_view.view(memory, stored[3], writable=True))
            for item, stored, _, memory in batch
        ]
        loaded, _ = self.job.run(requests, [])
        left: list[tuple[ReadItem, _Slice]] = []
        for done, (item, stored, target, memory) in zip(loaded, batch, strict=True):
            if not done:
                left.append((item, stored))
                continue
            if memory is not target:
                target.copy_(memory)
            self.planner.commit_tensor(item, target)
        return left

    def _load_streams(self, streams: list[tuple[ReadItem, _Slice]]) -> None:
        """Loads objects, and tensors that torch must unpickle: each stored slice read once."""
        if self.contents is not None:
            for item, stored in streams:
                self._load_content(item, stored, self.contents.value(stored[3]))
            return
        wanted: dict[_Slice, list[ReadItem]] = {}
        for item, stored in streams:
            wanted.setdefault(stored, []).append(item)
        for batch in _batches(wanted, self.max_held_nbytes):
            _, slices = self.job.run([], batch)
            for stored, data in zip(batch, slices, strict=True):
                self._load_stream(stored, wanted[stored], data)

    def _load_stream(
        self, stored: _Slice, items: list[ReadItem], data: _native.LoadedBytes
    ) -> None:
        tensor: torch.Tensor | None = None
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                self._load_bytes(item, self._open_stream(item, data, stored), stored)
                continue
            if tensor is None:
                tensor = _unpickle_tensor(self._open_stream(item, data, stored), stored)
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
            if self.trust_pickle:
                self.planner.load_bytes(item, stream)
            else:
                _store_object(self.planner, item, load_object(stream))
        except ForbiddenPickleError as error:
            raise UnsupportedError(
                f"cannot load {_where(stored)}: {error} is refused. It may run code; if you trust "
                "who wrote it, torch.serialization.add_safe_globals([...]) allows it, and "
                "FastReader(trust_pickle=True) anything"
            ) from error
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
        descriptors = getattr(self._storage_info(item), "transform_descriptors", None)
        if not descriptors:
            return stream
        transformed = self.transforms.transform_load_stream(item, descriptors, stream)
        try:
            return _io.BytesIO(transformed.read(-1))
        except Exception as error:
            raise CorruptionError(
                f"cannot undo {list(descriptors)} of {_where(stored)}: {error}"
            ) from error


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


def _unpickle_tensor(stream: _io.BytesIO, stored: _Slice) -> torch.Tensor:
    try:
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
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
