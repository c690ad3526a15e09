"""Writes one data file of a save: first tensors in the engine's layout, then pickled items."""

from __future__ import annotations

import io as _io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageInfo,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import gc_paused, to_plain
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.object_pickles import refused_classes
from torch_ckpt.options import IoMode, IoOptions
from torch_ckpt.planning.replicas import CutItem
from torch_ckpt.storage.buffers import retained_nbytes_limit
from torch_ckpt.storage.file_jobs import write_planned
from torch_ckpt.storage.rank_work import RankWork, Unresolved, resolve_whole
from torch_ckpt.storage.written_file import WrittenFile

__all__ = ["PickledItem", "pickle_item", "write_data_file"]


def write_data_file(
    directory: Location,
    name: str,
    work: RankWork,
    planner: SavePlanner,
    *,
    pool: _native.BufferPool,
    io: IoOptions,
    sync: bool,
    niceness: int,
    transforms: _StorageWriterTransforms,
    begun: Callable[[_native.FileJob], None],
) -> tuple[list[WriteResult], WrittenFile, IoMode]:
    """Writes ``work`` to the new file ``directory / name``.

    The engine lays out its tensors from their dtypes and shapes. Torch pickles the items without a
    source, as in stock DCP, and the engine appends them.

    Args:
        directory: Directory of the checkpoint.
        name: Name of the new file.
        work: The items to write.
        planner: Planner of this rank, which resolves items.
        pool: I/O buffers.
        io: Options for writes.
        sync: Whether to sync the file.
        niceness: Niceness of the threads that write tensors, as nice(1).
        transforms: Stream transforms for all items.
        begun: Receives the job of the file, for its progress.

    Returns:
        One result per item if the plan consists of DCP's items (else none), the report for the
        index, and the mode of the writes.

    Raises:
        StorageError: The file could not be written, and was removed.
        ValueError: The dtype or sizes of a tensor differ from the plan.
    """
    batch = _tensor_view.inspect(list(work.sources), writable=False)
    unresolved = [n for n, source in enumerate(work.sources) if isinstance(source, Unresolved)]
    batch.defer(unresolved)
    planned = _native.PlannedFile(work.work, batch)
    pickled: dict[int, WriteResult] = {}
    refused: dict[str, Sequence[str]] = {}

    def pickle_at(position: int) -> memoryview:
        item = work.item(position)
        pickled_item = pickle_item(item, planner, transforms, name)
        pickled[position] = pickled_item.result
        if pickled_item.refused:
            refused[item.index.fqn] = pickled_item.refused
        return pickled_item.data

    def write_tensors(job: _native.SaveJob) -> None:
        begun(job)
        _write_tensors(job, planned, work, planner, retained_nbytes_limit(io))

    job, appended = write_planned(
        *(directory / name, planned),
        write_tensors,
        pickle_at,
        pool=pool,
        direct=io.direct,
        sync=sync,
        niceness=niceness,
    )
    file = WrittenFile(name, *job.sums, refused=refused)
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
        for position, offset, _ in appended:
            pickled[position].storage_data.offset = offset
            results.append(pickled[position])
        cuts = [i.piece for i in work.items if isinstance(i, CutItem) and not i.is_listed]
    return results, replace(file, dtypes=dtypes, cuts=cuts), IoMode.of(job)


def _write_tensors(
    job: _native.SaveJob,
    planned: _native.PlannedFile,
    work: RankWork,
    planner: SavePlanner,
    max_retained_nbytes: int,
) -> None:
    """Writes tensors through the engine, in the order of the layout.

    Some tensors need a copy (of a device tensor, or of a temporary). Copies are written and freed
    in batches of ``max_retained_nbytes``.
    """
    begin = retained_nbytes = 0
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
        copy = to_plain(tensor if rows is None else tensor.detach().narrow(0, *rows))
        planned.put(number, _tensor_view.view(copy, "", writable=False))
        retained_nbytes += (
            copy.untyped_storage().nbytes()
        )  # A view of rows references the whole storage.
        if retained_nbytes >= max_retained_nbytes:
            planned.write(job, begin, number + 1)
            begin, retained_nbytes = number + 1, 0
    planned.write(job, begin, len(planned))


def _resolve_tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = resolve_whole(planner, item)
    return item.rows_of(tensor) if isinstance(item, CutItem) else tensor


class PickledItem(NamedTuple):
    """An item that was serialised as stock DCP serialises it.

    Attributes:
        result: Stock's result for the item, with offset 0.
        data: The serialised bytes.
        refused: Classes in the item that a load will refuse.
    """

    result: WriteResult
    data: memoryview
    refused: Sequence[str]


def pickle_item(
    item: WriteItem, planner: SavePlanner, transforms: _StorageWriterTransforms, name: str = ""
) -> PickledItem:
    """Serialises an item as stock DCP does.

    Args:
        item: An object, or a tensor that only torch can store.
        planner: Planner of this rank, which resolves the item.
        transforms: Stream transforms to apply.
        name: Name of the data file.

    Raises:
        UnsupportedError: ``torch.save`` cannot write the tensor.
    """
    stream = _io.BytesIO()
    try:
        data = _resolve(planner, item)
        result = _write_item(transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE)
    except (KeyError, NotImplementedError) as error:  # Raised by torch.save for some dtypes.
        raise UnsupportedError(f"cannot save {item.index.fqn!r}: {error}") from error
    written = stream.getbuffer()
    return PickledItem(
        result, written, refused_classes(_before_transforms(data, written, transforms))
    )


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor | _io.BytesIO:
    data: torch.Tensor | _io.BytesIO
    data = (
        _resolve_tensor(planner, item) if isinstance(item, CutItem) else planner.resolve_data(item)
    )
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu()
        if data.untyped_storage().size() != data.nbytes:
            data = data.clone()  # Otherwise torch.save would write the whole storage.
    return data


def _before_transforms(
    data: torch.Tensor | _io.BytesIO, written: memoryview, transforms: _StorageWriterTransforms
) -> memoryview:
    """Returns the archive of ``torch.save`` without stream transforms; empty for a plain tensor."""
    if isinstance(data, _io.BytesIO):
        return data.getbuffer()
    if not transforms.extensions:
        return written
    stream = _io.BytesIO()
    if _tensor_view.tensor_kind(data) == _tensor_view.TensorKind.TORCHS_OWN:
        torch.save(data, stream)
    return stream.getbuffer()
