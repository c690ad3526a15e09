"""Writes one data file of a save: tensors as the engine lays them out, then what torch pickles."""

from __future__ import annotations

import io as _io
from collections.abc import Sequence
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
    part: RankWork,
    planner: SavePlanner,
    *,
    pool: _native.BufferPool,
    io: IoOptions,
    sync: bool,
    niceness: int,
    transforms: _StorageWriterTransforms,
) -> tuple[list[WriteResult], WrittenFile, IoMode]:
    """Writes ``part`` to the new file ``directory / name``.

    Tensors that the engine stores are laid out first, from their dtypes and shapes alone. What has
    no source is serialised by torch, as stock DCP does, and appended.

    Returns:
        One result for each item of a plan in DCP's terms, what the index must know of the file, and
        how it was written.

    Raises:
        StorageError: The file could not be written; it is removed.
        ValueError: A tensor has another dtype or other sizes than it was planned with.
    """
    batch = _tensor_view.inspect(list(part.sources), writable=False)
    batch.defer([at for at, source in enumerate(part.sources) if isinstance(source, Unresolved)])
    planned = _native.PlannedFile(part.work, batch)
    pickled: dict[int, WriteResult] = {}
    refused: dict[str, Sequence[str]] = {}

    def pickle_at(position: int) -> memoryview:
        item = part.item(position)
        one = pickle_item(item, planner, transforms, name)
        pickled[position] = one.result
        if one.refused:
            refused[item.index.fqn] = one.refused
        return one.data

    job, appended = write_planned(
        *(directory / name, planned),
        lambda job: _write_tensors(job, planned, part, planner, retained_nbytes_limit(io)),
        pickle_at,
        pool=pool,
        direct=io.direct,
        sync=sync,
        niceness=niceness,
    )
    file = WrittenFile(name, *job.sums, refused=refused)
    if part.items is None:
        return [], replace(file, extents=planned.extents(appended)), IoMode.of(job)
    with gc_paused():
        results = []
        dtypes: dict[int, str] = {}
        for number, (offset, nbytes) in enumerate(planned.layout.extents):
            position = planned.position(number)
            place = _StorageInfo(name, offset, nbytes)
            results.append(WriteResult(part.items[position].index, nbytes, place))
            if (dtype := part.dtypes[position]) is not None:
                dtypes[offset] = dtype
        for position, offset, _ in appended:
            pickled[position].storage_data.offset = offset
            results.append(pickled[position])
        cuts = [i.piece for i in part.items if isinstance(i, CutItem) and not i.is_listed]
    return results, replace(file, dtypes=dtypes, cuts=cuts), IoMode.of(job)


def _write_tensors(
    job: _native.SaveJob,
    planned: _native.PlannedFile,
    part: RankWork,
    planner: SavePlanner,
    max_retained_nbytes: int,
) -> None:
    """Has the engine write tensors in the order of the layout.

    One call writes them all, except that copies made for it (from a device, of a temporary) are
    written and let go in batches of ``max_retained_nbytes``.
    """
    begin = retained_nbytes = 0
    for number in planned.copied:
        position = planned.position(number)
        source = part.sources[position]
        tensor = (
            _of_item(planner, part.item(position)) if isinstance(source, Unresolved) else source
        )
        assert tensor is not None
        rows = planned.rows(number)
        copy = to_plain(tensor if rows is None else tensor.detach().narrow(0, *rows))
        planned.put(number, _tensor_view.view(copy, "", writable=False))
        retained_nbytes += copy.untyped_storage().nbytes()  # Rows keep all of it.
        if retained_nbytes >= max_retained_nbytes:
            planned.write(job, begin, number + 1)
            begin, retained_nbytes = number + 1, 0
    planned.write(job, begin, len(planned))


def _of_item(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = resolve_whole(planner, item)
    return item.rows_of(tensor) if isinstance(item, CutItem) else tensor


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
    data = _of_item(planner, item) if isinstance(item, CutItem) else planner.resolve_data(item)
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
