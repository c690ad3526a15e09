"""Writes one data file of a save: which items the engine lays out, and which torch pickles."""

from __future__ import annotations

import io as _io
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageInfo,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt import _native
from torch_ckpt.options import IoMode, IoOptions
from torch_ckpt.tensors import DTYPE_CODES, is_temporary, to_plain

__all__ = ["write_data_file"]

_Planned = tuple[WriteItem, torch.dtype, torch.Size]


def write_data_file(
    directory: Path,
    name: str,
    items: list[WriteItem],
    planner: SavePlanner,
    *,
    pool: _native.BufferPool,
    io: IoOptions,
    sync: bool,
    transforms: _StorageWriterTransforms,
) -> tuple[list[WriteResult], IoMode]:
    """Writes ``items`` to the new file ``directory / name``.

    Tensors that the engine stores are laid out first, from their planned dtypes and shapes alone.
    Everything else (objects, quantised tensors and subclasses, whatever a stream transform changes)
    is serialised by torch, as stock DCP does, and appended.

    Returns:
        One result for each item, and how the file was written.

    Raises:
        StorageError: The file could not be written; it is removed.
    """
    laid_out: list[_Planned] = []
    pickled: list[WriteItem] = []
    for item in items:
        data = item.tensor_data
        if data is None or data.properties.dtype not in DTYPE_CODES or transforms.extensions:
            pickled.append(item)
        else:
            laid_out.append((item, data.properties.dtype, data.chunk.sizes))

    layout = _native.Layout([(DTYPE_CODES[dtype], sizes) for _, dtype, sizes in laid_out])
    job = _native.SaveJob(str(directory / name), layout, pool, io.direct, sync)
    try:
        return _fill(job, name, layout, laid_out, pickled, planner, io, transforms)
    except BaseException:
        # Now, not when the job is collected: the traceback of the error would keep it, and with it
        # the buffers that the next job waits for.
        job.abort()
        raise


def _fill(
    job: _native.SaveJob,
    name: str,
    layout: _native.Layout,
    laid_out: list[_Planned],
    pickled: list[WriteItem],
    planner: SavePlanner,
    io: IoOptions,
    transforms: _StorageWriterTransforms,
) -> tuple[list[WriteResult], IoMode]:
    misfits = _write_laid_out(job, laid_out, planner, io.buffer_nbytes)
    results = [
        WriteResult(item.index, nbytes, _StorageInfo(name, offset, nbytes))
        for number, ((item, _, _), (offset, nbytes)) in enumerate(
            zip(laid_out, layout.extents, strict=True)
        )
        if number not in misfits
    ]
    pickled += [laid_out[number][0] for number in misfits]
    for item in pickled:
        results.append(_append_pickled(job, name, item, planner, transforms))
    job.finish()
    queue, direct, registered, reasons = job.mode
    return results, IoMode(queue, direct, registered, tuple(reasons))


def _write_laid_out(
    job: _native.SaveJob, planned: list[_Planned], planner: SavePlanner, max_held_nbytes: int
) -> dict[int, None]:
    """Has the engine write tensors in the order of the layout.

    One call writes them all, unless resolving makes tensors that nobody else holds (copies from a
    device, casts by the planner): these are written and let go in batches of ``max_held_nbytes``.

    Returns:
        The numbers of the items that turned out to be not what was planned, in order.
    """
    misfits: dict[int, None] = {}
    batch: list[tuple[int, torch.Tensor, str]] = []
    held_nbytes = 0
    for number, (item, dtype, sizes) in enumerate(planned):
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"the planner resolved {item.index.fqn!r} to a {type(tensor)}")
        kind = _native.tensor_kind(tensor)
        temporary = is_temporary(tensor)
        if kind == _native.TensorKind.NEEDS_COPY:
            tensor = to_plain(tensor)
            temporary = True
        if kind == _native.TensorKind.TORCHS_OWN or tensor.dtype != dtype or tensor.size() != sizes:
            misfits[number] = None
            continue
        batch.append((number, tensor, item.index.fqn))
        if temporary:
            held_nbytes += tensor.nbytes
            if held_nbytes >= max_held_nbytes:
                job.write(batch)
                batch = []
                held_nbytes = 0
    job.write(batch)
    return misfits


def _append_pickled(
    job: _native.SaveJob,
    name: str,
    item: WriteItem,
    planner: SavePlanner,
    transforms: _StorageWriterTransforms,
) -> WriteResult:
    """Appends an item as stock DCP serialises it."""
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu()
        if data.untyped_storage().size() != data.nbytes:
            data = data.clone()  # torch.save would write the whole storage.
    stream = _io.BytesIO()
    result = _write_item(transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE)
    result.storage_data.offset, _ = job.append(stream.getbuffer())
    return result
