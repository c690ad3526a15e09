"""FastReader: stock DCP's storage reader, through the native engine."""

from __future__ import annotations

import io as _io
import itertools
import os
import pickle
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    _StorageInfo,
    _StorageReaderTransforms,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torch_ckpt import _native, _tensor_view
from torch_ckpt.errors import (
    CorruptionError,
    MismatchError,
    NotFoundError,
    UnsupportedError,
    portable_errors,
)
from torch_ckpt.index import to_metadata
from torch_ckpt.metadata import load_metadata
from torch_ckpt.options import IoOptions
from torch_ckpt.seal import check_unsealed
from torch_ckpt.tensors import (
    DTYPE_CODES,
    Destinations,
    gc_paused,
    held_nbytes_limit,
    is_temporary,
    useful_buffer_nbytes,
)

__all__ = ["FastReader"]

# Stands for metadata that cannot be read, until DCP comes to a call whose error it lets through.
_NOTHING = Metadata(state_dict_metadata={})

_Slice = tuple[str, int, int, str]  # File, offset, length in bytes, FQN.
_Tensor = tuple[ReadItem, _Slice, torch.dtype]  # Dtype as stored.
_Destination = tuple[ReadItem, _Slice, torch.Tensor, torch.Tensor]  # Target, memory read into.


class FastReader(StorageReader):
    """Reads a checkpoint through the native engine: one of ours, or any that stock DCP has written.

    Pass it to :func:`torch.distributed.checkpoint.load` in place of ``FileSystemReader``. Only the
    byte ranges that this rank wants are read, many at a time, straight into the tensors where they
    are contiguous. Tensors on other devices, of other dtypes than stored, or that only torch can
    unpickle are loaded by way of a temporary, and cast as stock DCP casts.

    Args:
        path: Directory of the checkpoint.
        _extension_registry: Where stream transforms are looked up; stock's own by default.
        io: Tuning.
        verify: Whether payloads that are read whole are checked against their CRC-32.

    Raises:
        NotFoundError: ``path`` holds no committed checkpoint, or a data file is missing.
        CorruptionError: Bytes cannot be what was written: a short file, a broken frame, a wrong
            checksum. Names the file, the offset and the FQN.
        MismatchError: A tensor wants elements that the stored one does not have.
        StorageError: The disk or store failed.

    Example::

        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=FastReader("run/step-100"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: ExtensionRegistry | None = None,
        *,
        io: IoOptions | None = None,
        verify: bool = True,
    ) -> None:
        super().__init__()
        self.path = Path(path)
        self.io = io or IoOptions()
        self.verify = verify
        self.transforms = _StorageReaderTransforms(_extension_registry)
        self.load_id = str(uuid.uuid4())
        self.rank: int | None = None
        self.use_collectives = True
        self._file_system = _native.local_file_system()
        self._metadata: Metadata | None = None
        self._index: _native.Index | None = None
        self._failure: Exception | None = None  # Of reading the coordinator's metadata.

    def __getstate__(self) -> dict[str, Any]:
        # Without what it has read: a copy reads for itself.
        return {**self.__dict__, "_file_system": None, "_metadata": None, "_index": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _file_system=_native.local_file_system())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader can read there."""
        return FileSystem.validate_checkpoint_id(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turns to another checkpoint, or to a new load of the same."""
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self._metadata = self._index = self._failure = None
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads what was committed.

        Args:
            *args: Unused; stock DCP probes for it.
            **kwargs: ``rank`` asks for the metadata of a rank that saved without coordination.
        """
        rank = kwargs.get("rank")
        if rank is None:
            self._failure = None
        elif self._failure is not None and not isinstance(self._failure, NotFoundError):
            # Metadata are there and are damaged: nothing that a rank has saved by itself, perhaps
            # long ago, takes their place.
            return _NOTHING
        try:
            metadata = self._read_metadata("" if rank is None else f"__{rank}")
        except Exception as error:  # Of any kind: none may end in the metadata of a rank.
            if self._failure is None:
                self._failure = error if rank is None else None
                raise
            if not isinstance(error, NotFoundError):
                self._failure = error  # The rank's own are there.
            return _NOTHING
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._failure = None
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begins a load on this rank."""
        if metadata is _NOTHING and self._failure is not None:
            raise self._failure
        self._metadata = metadata
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def _read_metadata(self, prefix: str) -> Metadata:
        """Reads metadata whose name has this prefix, from the index wherever there is one."""
        path = self.path / f"{prefix}.metadata"
        try:
            pickled, self._index, other, why = _native.open_checkpoint(
                self._file_system, os.fsencode(self.path), path.name, f"{prefix}.index"
            )
        except NotFoundError as error:
            if self._file_system.exists(os.fsencode(self.path / f"{prefix}.index")):
                # A commit gives it that name after that of the metadata.
                raise CorruptionError(
                    f"the checkpoint in {self.path} has lost its metadata: {prefix}.index is "
                    f"there, {path.name} is not"
                ) from error
            raise NotFoundError(
                f"no checkpoint is committed in {self.path}: there is no {path.name}"
            ) from error
        if self._index is not None and self._index.has_entries:
            return to_metadata(self._index, checkpoint_id=self.path)
        if self._index is None and self.verify:
            check_unsealed(pickled, other, why=why, where=str(path))
        try:
            return load_metadata(pickled)
        except ValueError as error:
            raise CorruptionError(f"cannot read {path}: {error}") from error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keeps the plan: nothing is decided here."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keeps the plans: every rank reads what it wants."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every item of the plan into place."""
        if self._metadata is None:
            raise RuntimeError("read_data was called before set_up_storage_reader")
        with gc_paused(), portable_errors():
            _Load(self, self._metadata, self._index, planner, plan.items).run()
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _Load:
    """One call of ``read_data``."""

    def __init__(
        self,
        reader: FastReader,
        metadata: Metadata,
        index: _native.Index | None,
        planner: LoadPlanner,
        items: list[ReadItem],
    ) -> None:
        self.storage_data: dict[Any, _StorageInfo] = metadata.storage_data
        self.state_dict_metadata = metadata.state_dict_metadata
        self.planner = planner
        self.transforms = reader.transforms
        self.max_held_nbytes = held_nbytes_limit(reader.io)
        # Another planner may have stored bytes of any kind.
        self.objects_are_pickled = (
            getattr(type(planner), "load_bytes", None) is DefaultLoadPlanner.load_bytes
        )
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
        io = reader.io
        self.job = _native.LoadJob(
            reader._file_system,
            os.fsencode(reader.path),
            index,
            useful_buffer_nbytes(nbytes, io.buffer_nbytes, io.block_nbytes),
            io.block_nbytes,
            io.threads,
            io.direct,
            reader.verify,
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
            part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            target = self.planner.resolve_tensor(item).detach()
            if target.size() != part.size():
                raise _shape_mismatch(item, target, part.size())
            target.copy_(part)
            self.planner.commit_tensor(item, target)

    def _load_bytes(self, item: ReadItem, stream: _io.BytesIO, stored: _Slice) -> None:
        is_archive = bytes(stream.getbuffer()[:4]) == b"PK\3\4"
        try:
            self.planner.load_bytes(item, stream)
        except Exception as error:
            # What stock cannot open as an archive is damaged; in one whose checksums hold, it is
            # the object that fails.
            if self.objects_are_pickled and (not is_archive or "PytorchStreamReader" in str(error)):
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
