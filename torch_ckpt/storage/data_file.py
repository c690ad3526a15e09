"""Writes one data file of a save: first tensors in the engine's layout, then pickled items."""

from __future__ import annotations

import contextlib
import io as _io
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageInfo,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import check_memory, gc_paused, to_plain
from torch_ckpt.errors import (
    CheckpointError,
    UnsupportedError,
    add_name,
    naming,
    naming_first,
    text_of,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.allowed_classes import refused_classes
from torch_ckpt.options import IoMode, IoOptions
from torch_ckpt.planning.columns import overrides
from torch_ckpt.planning.replicas import CutItem, CutPiece
from torch_ckpt.planning.save_planner import FastSavePlanner
from torch_ckpt.staging.copied_state import full_copy
from torch_ckpt.staging.pickling import has_slack, pickle_object
from torch_ckpt.storage.appended_stream import AppendedStream
from torch_ckpt.storage.buffers import retained_nbytes_limit
from torch_ckpt.storage.file_jobs import write_planned
from torch_ckpt.storage.rank_work import RankWork, Unresolved, resolve_whole

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FileOptions", "WrittenFile", "pickle_item", "write_data_file"]

_PINNED_NBYTES = 64 << 20
"""Bytes of CUDA tensors that are copied and written together. A larger tensor is copied whole."""


@dataclass(frozen=True)
class WrittenFile:
    """The report about one data file of a save, for the coordinator.

    Attributes:
        sums: Checksums of the file's blocks, encoded by the engine.
        dtypes: Offset -> torch name of the dtype, for slices that the engine framed with the
            planned dtype and sizes. Only torch can read the other slices.
        cuts: Boxes of the file that are rows of a box in the planner's items.
        extents: Encoded extents of the items, if they were planned in columns. The file then has no
            other write results.
        refused: FQN -> classes in its value that a load will refuse.
        digests: If the save has a base: offset and digests of each slice of a tensor, 8 bytes each
            (``SliceDigest`` of the engine).
        origin: The id of the save that wrote the file, as a number; 0 for the present save.
    """

    name: str
    nbytes: int
    sums: bytes
    dtypes: Mapping[int, str] = field(default_factory=dict)
    cuts: Sequence[CutPiece] = ()
    extents: bytes | None = None
    refused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    digests: bytes = b""
    origin: int = 0

    @property
    def columns(self) -> _native.ReportedFile:
        """The columns that the engine stores in the index for this file."""
        return self.name, self.nbytes, self.sums, self.digests, self.origin


@dataclass(frozen=True)
class FileOptions:
    """How a rank writes its files in one save. The options have the same names as in the writer."""

    io: IoOptions
    transforms: _StorageWriterTransforms
    single_file: bool
    sync: bool
    thread_count: int
    copy_ahead: int
    niceness: int
    shows_progress: bool


def write_data_file(
    directory: Location,
    name: str,
    work: RankWork,
    planner: SavePlanner,
    how: FileOptions,
    *,
    pool: _native.BufferPool,
    begun: Callable[[_native.FileJob], None],
) -> tuple[list[WriteResult], WrittenFile, IoMode]:
    """Writes ``work`` to the new file ``directory / name``, which is removed if the write fails.

    The engine lays out its tensors from their dtypes and shapes. Torch pickles the items without a
    source, as in stock DCP, and the engine appends them. ``begun`` receives the job of the file,
    for its progress. Returns one result per item of DCP (none for columns), the report for the
    index, and the mode of the writes. Raises ValueError if the dtype or sizes of a tensor differ
    from the plan.
    """
    with naming_first("save", lambda: _named(work), _inspected):
        batch = _inspected(*work.sources)
    unresolved = [n for n, source in enumerate(work.sources) if isinstance(source, Unresolved)]
    batch.defer(unresolved)
    planned = _native.PlannedFile(work.work, batch)
    if work.samples:
        planned.add_digests(work.samples, [n for n, chosen in enumerate(work.digested) if chosen])
    pickled: dict[int, WriteResult] = {}
    refused: dict[str, Sequence[str]] = {}

    def append(job: _native.SaveJob, position: int) -> tuple[int, int]:
        item = work.item(position)
        result, classes = _append_item(job, item, planner, how.transforms, name)
        pickled[position] = result
        if classes:
            refused[item.index.fqn] = classes
        return result.storage_data.offset, result.size_in_bytes

    def write_tensors(job: _native.SaveJob) -> None:
        begun(job)
        _write_tensors(job, planned, work, planner, retained_nbytes_limit(how.io))

    job, appended = write_planned(
        *(directory / name, planned),
        write_tensors,
        append,
        pool=pool,
        direct=how.io.direct,
        sync=how.sync,
        niceness=how.niceness,
    )
    file = WrittenFile(name, *job.sums, refused=refused, digests=planned.digests)
    if work.items is None:
        return [], replace(file, extents=planned.extents(appended)), IoMode.of(job)
    with gc_paused():
        results = []
        dtypes: dict[int, str] = {}
        for number, (offset, nbytes) in enumerate(planned.layout.extents):
            position = planned.position(number)
            place = _StorageInfo(name, offset, nbytes)
            results.append(WriteResult(work.items[position].index, nbytes, place))
            if (dtype := work.dtypes[position]) is not None:
                dtypes[offset] = dtype
        results += pickled.values()
        cuts = [i.piece for i in work.items if isinstance(i, CutItem) and not i.is_listed]
    return results, replace(file, dtypes=dtypes, cuts=cuts), IoMode.of(job)


def _inspected(*sources: object) -> _native.TensorBatch:
    return _tensor_view.inspect(list(sources), writable=False)


def _named(work: RankWork) -> Iterator[tuple[str, Any]]:
    return ((work.item(at).index.fqn, source) for at, source in enumerate(work.sources))


def _write_tensors(
    job: _native.SaveJob,
    planned: _native.PlannedFile,
    work: RankWork,
    planner: SavePlanner,
    max_retained_nbytes: int,
) -> None:
    """Writes tensors through the engine, in the order of the layout.

    Device tensors and temporaries need a copy. Copies are written and freed in batches of
    ``max_retained_nbytes``; copies of CUDA tensors in batches of ``_PINNED_NBYTES``.
    """
    begin = retained_nbytes = 0
    pinned = _PinnedCopies()

    def write_until(end: int) -> None:
        nonlocal begin, retained_nbytes
        pinned.put_all(planned)
        planned.write(job, begin, end)
        begin, retained_nbytes = end, 0

    try:
        for number in planned.copied:
            position = planned.position(number)
            source = work.sources[position]
            tensor = (
                _resolve_tensor(planner, work.item(position))
                if isinstance(source, Unresolved)
                else source
            )
            assert tensor is not None
            rows = planned.rows(number)
            part = tensor.detach() if rows is None else tensor.detach().narrow(0, *rows)
            if _copies_by_engine(part):
                if not pinned.has_room(part):
                    write_until(number)
                pinned.add(number, part)
                continue
            with naming("save", work.item(position).index.fqn):
                copy = to_plain(part)
            planned.put(number, _tensor_view.view(copy, "", writable=False))
            # A view of rows references the whole storage.
            retained_nbytes += copy.untyped_storage().nbytes()
            if retained_nbytes >= max_retained_nbytes:
                write_until(number + 1)
        write_until(len(planned))
    finally:
        pinned.clear()  # The frames of an error may stay alive for long.


def _copies_by_engine(tensor: torch.Tensor) -> bool:
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.is_cuda and not is_lazy and _native.why_no_cuda() is None


class _PinnedCopies:
    """Copies of CUDA tensors in pinned host memory, which each batch reuses.

    Copies into new memory, as by ``Tensor.cpu``, are many times slower: a GPU copies directly only
    into pinned memory, and the system must allocate and clear new pages.
    """

    def __init__(self) -> None:
        self._devices = _native.Devices()
        self._snapshot: _native.Snapshot | None = None
        self._tensors: list[tuple[int, torch.Tensor, int]] = []  # Number, tensor, offset.
        self._end = 0

    def has_room(self, tensor: torch.Tensor) -> bool:
        """Whether the batch has room for a tensor. An empty batch has room for any tensor."""
        offset = _native.place_in_snapshot(self._end, tensor.nbytes)
        return not self._tensors or offset + tensor.nbytes <= _PINNED_NBYTES

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """Adds the tensor with this number in its file to the batch."""
        offset = _native.place_in_snapshot(self._end, tensor.nbytes)
        self._tensors.append((number, tensor, offset))
        self._end = offset + tensor.nbytes

    def put_all(self, planned: _native.PlannedFile) -> None:
        """Copies the batch, and passes the copies to its file. The next batch overwrites them."""
        tensors, self._tensors = self._tensors, []
        if not tensors:
            return
        batch = _tensor_view.inspect([one for _, one, _ in tensors], writable=False, stages=True)
        snapshot = self._memory(self._end)
        self._end = 0
        snapshot.pin_for(batch, self._devices)
        plain = batch.plain
        snapshot.copy(batch, plain, [tensors[i][2] for i in plain], 1, self._devices)
        memory = torch.frombuffer(memoryview(snapshot), dtype=torch.uint8)
        copied = set(plain)
        for position, (number, tensor, offset) in enumerate(tensors):
            elements = memory[offset : offset + tensor.nbytes].view(tensor.dtype)
            copy = elements.view(tensor.size()) if position in copied else to_plain(tensor)
            planned.put(number, _tensor_view.view(copy, "", writable=False))

    def clear(self) -> None:
        """Frees the memory, and drops the tensors."""
        self._snapshot, self._tensors = None, []

    def _memory(self, nbytes: int) -> _native.Snapshot:
        found = self._snapshot
        if found is None or found.nbytes < nbytes:
            # A small state has a single, smaller batch. With several batches, all but the last are
            # full.
            usual = 1 if found is None else _PINNED_NBYTES
            del found
            self._snapshot = None  # Free it before the allocation.
            found = self._snapshot = _native.Snapshot(max(nbytes, usual), 1)
        return found


def _resolve_tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = resolve_whole(planner, item)
    return item.rows_of(tensor) if isinstance(item, CutItem) else tensor


def pickle_item(item: WriteItem, planner: SavePlanner) -> tuple[memoryview, Sequence[str]]:
    """Serialises an object, or a tensor that only torch can store, in memory, like stock DCP.

    Returns the bytes, and the classes in the item that a load will refuse. Raises UnsupportedError
    if ``torch.save`` cannot write the tensor.
    """
    with _naming(item):
        data = _resolve(planner, item)
        if isinstance(data, torch.Tensor):
            tensor, data = data, _io.BytesIO()
            torch.save(tensor, data)
    pickled = data.getbuffer()
    return pickled, refused_classes(pickled)


def _append_item(
    job: _native.SaveJob,
    item: WriteItem,
    planner: SavePlanner,
    transforms: _StorageWriterTransforms,
    name: str,
) -> tuple[WriteResult, Sequence[str]]:
    """Serialises an item to the end of a file, like stock DCP.

    Returns stock's result for the item, and the classes in the item that a load will refuse.
    """
    stream = AppendedStream(job.append)
    with _naming(item):
        data = _resolve(planner, item)
        result = _write_item(transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE)
    result.storage_data.offset = stream.end()
    return result, refused_classes(_before_transforms(data, stream, transforms))


@contextlib.contextmanager
def _naming(item: WriteItem) -> Iterator[None]:
    """Names the item in the error of pickling it."""
    try:
        yield
    except CheckpointError:
        raise  # It already has the name, or is an error of the disk.
    except (KeyError, NotImplementedError) as error:
        if not _is_of_torch(error):
            add_name(error, "save", item.index.fqn)
            raise
        raise UnsupportedError(f"cannot save {item.index.fqn!r}: {text_of(error)}") from error
    except Exception as error:
        add_name(error, "save", item.index.fqn)
        raise


def _is_of_torch(error: Exception) -> bool:
    """Returns whether torch itself raised an error, as for some dtypes, rather than the program."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("torch.")


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor | _io.BytesIO:
    if item.type == WriteItemType.BYTE_IO:
        return _pickled(planner, item)
    data = _resolve_tensor(planner, item)
    check_memory(data)
    data = data.detach().cpu()
    # Otherwise torch.save would write the whole storage.
    if data.untyped_storage().size() != data.nbytes or has_slack(data, item.index.fqn):
        data = full_copy(data)
    return data


def _pickled(planner: SavePlanner, item: WriteItem) -> _io.BytesIO:
    """Returns the pickled bytes of an object, by the planner's own method if it has one."""
    fqn, pickling = item.index.fqn, ("resolve_data", "transform_object")
    base = FastSavePlanner if isinstance(planner, FastSavePlanner) else DefaultSavePlanner
    if isinstance(planner, base) and not overrides(planner, base, pickling):
        return pickle_object(planner.lookup_object(item.index), fqn)
    has_slack(getattr(planner, "state_dict", {}).get(fqn), fqn)  # Raises if a storage was freed.
    return cast(_io.BytesIO, planner.resolve_data(item))


def _before_transforms(
    data: torch.Tensor | _io.BytesIO, stream: AppendedStream, transforms: _StorageWriterTransforms
) -> Buffer:
    """Returns the start of the archive of ``torch.save`` without stream transforms.

    Empty for a plain tensor, if there are transforms.
    """
    if isinstance(data, _io.BytesIO):
        return data.getbuffer()
    if not transforms.extensions:
        return stream.start
    untransformed: Any = AppendedStream(lambda _: (0, 0))
    if _tensor_view.tensor_kind(data) == _tensor_view.TensorKind.TORCH_ONLY:
        torch.save(data, untransformed)
    start: Buffer = untransformed.start
    return start
