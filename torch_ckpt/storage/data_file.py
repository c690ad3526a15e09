"""Writes one data file of a save: which items the engine lays out, and which torch pickles."""

from __future__ import annotations

import io as _io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageInfo,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import (
    DTYPE_CODES,
    gc_paused,
    is_temporary,
    printable,
    to_plain,
)
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.object_pickles import refused_classes
from torch_ckpt.options import IoMode, IoOptions
from torch_ckpt.planning.planned import to_write_item
from torch_ckpt.planning.sharing import CutItem
from torch_ckpt.storage.buffers import held_nbytes_limit
from torch_ckpt.storage.file_jobs import finished, save_job, write_planned
from torch_ckpt.storage.written_file import WrittenFile

__all__ = ["PickledItem", "pickle_item", "resolve_whole", "write_data_file", "write_planned_file"]


@dataclass
class _Sorted:
    """Items of a file, by how they are written."""

    laid_out: list[WriteItem]
    shapes: list[tuple[int, torch.Size]]  # Dtype code and sizes of those, as resolved.
    resolved: list[torch.Tensor | None]  # Those whose memory somebody else holds anyway.
    as_planned: list[bool]  # Whether they are what the plan, and so the metadata, says of them.
    pickled: list[WriteItem]


def write_data_file(
    directory: Location,
    name: str,
    items: list[WriteItem],
    planner: SavePlanner,
    *,
    pool: _native.BufferPool,
    io: IoOptions,
    sync: bool,
    niceness: int,
    transforms: _StorageWriterTransforms,
) -> tuple[list[WriteResult], WrittenFile, IoMode]:
    """Writes ``items`` to the new file ``directory / name``.

    Tensors that the engine stores are laid out first, from their dtypes and shapes alone.
    Everything else (objects, quantised tensors and subclasses, whatever a stream transform changes)
    is serialised by torch, as stock DCP does, and appended.

    Returns:
        One result for each item, what the index must know of the file, and how it was written.

    Raises:
        StorageError: The file could not be written; it is removed.
    """
    with gc_paused():
        sort = _sort(items, planner, transforms)
        layout = _native.Layout(sort.shapes)
    job = save_job(directory / name, layout, pool, direct=io.direct, sync=sync, niceness=niceness)
    with finished(job):
        _write_laid_out(job, sort, planner, held_nbytes_limit(io))
        with gc_paused():
            results = [
                WriteResult(item.index, nbytes, _StorageInfo(name, offset, nbytes))
                for item, (offset, nbytes) in zip(sort.laid_out, layout.extents, strict=True)
            ]
        dtypes = {
            offset: _native.DTYPE_NAMES[dtype]
            for (dtype, _), planned, (offset, _) in zip(
                sort.shapes, sort.as_planned, layout.extents, strict=True
            )
            if planned
        }
        refused: dict[str, Sequence[str]] = {}
        for item in sort.pickled:
            pickled = pickle_item(item, planner, transforms, name)
            pickled.result.storage_data.offset, _ = job.append(pickled.data)
            results.append(pickled.result)
            if pickled.refused:
                refused[item.index.fqn] = pickled.refused
    written = (*sort.laid_out, *sort.pickled)
    cuts = [i.piece for i in written if isinstance(i, CutItem) and not i.is_listed]
    file = WrittenFile(name, *job.sums, dtypes=dtypes, cuts=cuts, refused=refused)
    return results, file, IoMode.of(job)


def write_planned_file(
    directory: Location,
    name: str,
    work: _native.Work,
    planner: SavePlanner,
    sources: list[Any],
    *,
    pool: _native.BufferPool,
    io: IoOptions,
    sync: bool,
    niceness: int,
    transforms: _StorageWriterTransforms,
) -> tuple[WrittenFile, IoMode]:
    """As :func:`write_data_file`, of items that were planned in columns.

    ``work`` are the items, ``sources`` what each of them is stored from: ``None`` where only the
    planner knows.
    """
    planned = _native.PlannedFile(work, _tensor_view.look(sources, writable=False))

    def write_tensors(job: _native.SaveJob) -> None:
        _write_planned(job, planned, sources, held_nbytes_limit(io))

    refused: dict[str, Sequence[str]] = {}

    def pickled(position: int) -> memoryview:
        item = to_write_item(work.describe(position))
        pickled = pickle_item(item, planner, transforms, name)
        if pickled.refused:
            refused[item.index.fqn] = pickled.refused
        return pickled.data

    job, extents = write_planned(
        *(directory / name, planned, write_tensors, pickled),
        pool=pool,
        direct=io.direct,
        sync=sync,
        niceness=niceness,
    )
    file = WrittenFile(name, *job.sums, dtypes={}, extents=extents, refused=refused)
    return file, IoMode.of(job)


def _write_planned(
    job: _native.SaveJob, planned: _native.PlannedFile, sources: list[Any], max_held_nbytes: int
) -> None:
    """As :func:`_write_laid_out`."""
    begin = held_nbytes = 0
    for number in planned.copied:
        tensor = sources[planned.position(number)].detach()
        rows = planned.rows(number)
        copy = to_plain(tensor if rows is None else tensor.narrow(0, *rows))
        planned.put(number, _tensor_view.view(copy, "", writable=False))
        held_nbytes += copy.untyped_storage().nbytes()
        if held_nbytes >= max_held_nbytes:
            planned.write(job, begin, number + 1)
            begin, held_nbytes = number + 1, 0
    planned.write(job, begin, len(planned))


def _sort(
    items: list[WriteItem], planner: SavePlanner, transforms: _StorageWriterTransforms
) -> _Sorted:
    """Resolves every tensor to see what it really is; a plan may say otherwise.

    One that nobody else holds (a planner's cast, say) is let go again, and resolved anew when it is
    its turn to be written: ``resolve_data`` is idempotent.
    """
    sort = _Sorted([], [], [], [], [])
    for listed in items:
        item = _as_it_is(listed, planner) if isinstance(listed, CutItem) else listed
        if item is None:
            continue
        if item.type == WriteItemType.BYTE_IO or transforms.extensions:
            sort.pickled.append(item)
            continue
        tensor = resolve_whole(planner, item)
        if _tensor_view.tensor_kind(tensor) == _tensor_view.TensorKind.TORCHS_OWN:
            sort.pickled.append(item)
            continue
        is_held = not is_temporary(tensor)
        if isinstance(item, CutItem):
            tensor = item.rows_of(tensor)
        sort.laid_out.append(item)
        sort.shapes.append((DTYPE_CODES[tensor.dtype], tensor.size()))
        sort.resolved.append(tensor if is_held else None)
        sort.as_planned.append(_is_as_planned(item, tensor))
    return sort


def _as_it_is(item: CutItem, planner: SavePlanner) -> WriteItem | None:
    """The item, unless it cannot be cut: one of another form than planned, or that torch pickles.

    Then the rank with its first rows writes it whole, and the others, to whom it looks the same,
    write nothing of it.
    """
    tensor = resolve_whole(planner, item)
    is_torchs_own = _tensor_view.tensor_kind(tensor) == _tensor_view.TensorKind.TORCHS_OWN
    if not is_torchs_own and tensor.size() == item.piece.whole.sizes:
        return item
    return item.whole if item.first_row == 0 else None


def resolve_whole(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """The tensor of an item, or of the one that it is cut from."""
    whole = item.whole if isinstance(item, CutItem) and item.whole is not None else item
    tensor = planner.resolve_data(whole)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"the planner resolved {item.index.fqn!r} to a {type(tensor)}")
    return tensor


def _is_as_planned(item: WriteItem, tensor: torch.Tensor) -> bool:
    planned = item.tensor_data
    return (
        planned is not None
        and planned.chunk is not None
        and planned.chunk.sizes == tensor.size()
        and planned.properties.dtype == tensor.dtype
    )


def _write_laid_out(
    job: _native.SaveJob, sort: _Sorted, planner: SavePlanner, max_held_nbytes: int
) -> None:
    """Has the engine write tensors in the order of the layout.

    One call writes them all, except that copies made for it (from a device, of a temporary) are
    written and let go in batches of ``max_held_nbytes``.
    """
    batch: list[tuple[int, _native.TensorView]] = []
    held_nbytes = 0
    for number, (item, resolved) in enumerate(zip(sort.laid_out, sort.resolved, strict=True)):
        tensor = resolved
        if tensor is None:
            tensor = resolve_whole(planner, item)
            if isinstance(item, CutItem):
                tensor = item.rows_of(tensor)
        is_plain = _tensor_view.tensor_kind(tensor) == _tensor_view.TensorKind.PLAIN
        if not is_plain:
            tensor = to_plain(tensor)
        batch.append((number, _tensor_view.view(tensor, printable(item.index.fqn), writable=False)))
        if is_plain and resolved is not None:
            continue
        held_nbytes += tensor.untyped_storage().nbytes()  # Rows keep all of it.
        if held_nbytes >= max_held_nbytes:
            job.write(batch)
            batch = []
            held_nbytes = 0
    job.write(batch)


class PickledItem(NamedTuple):
    """An item as stock DCP serialises it.

    Attributes:
        result: What stock reports of it, at offset 0.
        data: Its bytes.
        refused: Classes for which a load would refuse it.
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
        planner: Resolves it.
        transforms: What is done to the bytes.
        name: Of the file that it goes to.

    Raises:
        UnsupportedError: ``torch.save`` cannot write such a tensor.
    """
    stream = _io.BytesIO()
    try:
        data = _resolve(planner, item)
        result = _write_item(transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE)
    except (KeyError, NotImplementedError) as error:  # As torch.save raises for dtypes.
        raise UnsupportedError(f"cannot save {item.index.fqn!r}: {error}") from error
    written = stream.getbuffer()
    return PickledItem(
        result, written, refused_classes(_before_transforms(data, written, transforms))
    )


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor | _io.BytesIO:
    data: torch.Tensor | _io.BytesIO
    if isinstance(item, CutItem):
        data = item.rows_of(resolve_whole(planner, item))
    else:
        data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu()
        if data.untyped_storage().size() != data.nbytes:
            data = data.clone()  # torch.save would write the whole storage.
    return data


def _before_transforms(
    data: torch.Tensor | _io.BytesIO, written: memoryview, transforms: _StorageWriterTransforms
) -> memoryview:
    """The archive of ``torch.save``, before stream transforms; empty for a plain tensor."""
    if isinstance(data, _io.BytesIO):
        return data.getbuffer()
    if not transforms.extensions:
        return written
    stream = _io.BytesIO()
    if _tensor_view.tensor_kind(data) == _tensor_view.TensorKind.TORCHS_OWN:
        torch.save(data, stream)
    return stream.getbuffer()
