"""Writes files of ``torch.save`` and loads their tensors piece by piece."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import DTYPE_CODES, bytes_of
from torch_ckpt.commits.replacement import Replacement
from torch_ckpt.conversion.pieces import IO, Piece, Source
from torch_ckpt.errors import AlreadyExistsError, NotFoundError, UnsupportedError, text_of
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.torch_archive import ArchiveLayout, PendingTensor, lay_out
from torch_ckpt.storage.file_jobs import finished
from torch_ckpt.storage.progress import progress_bar

__all__ = ["check_target", "lay_out_value", "write_files", "write_torch_file"]

_SMALL_NBYTES = 1 << 20
"""A file of at most this length is written in one call."""


def write_torch_file(source: Source, target: Location, overwrite: bool) -> None:
    """Writes a source as one file of ``torch.save``. Tied tensors share a storage.

    Raises AlreadyExistsError if the file exists and ``overwrite`` is false, or it is a directory,
    and UnsupportedError if an object cannot be pickled.
    """
    if target.is_directory():
        raise AlreadyExistsError(f"cannot write {target}: it is a directory")
    check_target(target, overwrite)
    target = target.resolved()  # A link stays, as with ``torch.save``.
    state: dict[str, Any] = {}
    for name, value in {**source.objects, **source.tensors}.items():
        if name in source.ties:
            value = dataclasses.replace(value, name=source.ties[name])
        set_element(state, source.paths[name], value)
    layout = lay_out_value(state, target)
    with Replacement(target) as new:
        write_files(source, [(new.unpublished, layout)], target)
        new.commit()


def check_target(target: Location, overwrite: bool) -> None:
    """Raises AlreadyExistsError if a file or directory exists that must not be overwritten."""
    try:
        names = target.parent.names()
    except NotFoundError:
        return
    if target.name in names and not overwrite:
        raise AlreadyExistsError(f"cannot write {target}: it exists")


def lay_out_value(value: Any, path: Location) -> ArchiveLayout:
    """Lays out the file of a value. Raises UnsupportedError if it cannot be pickled."""
    try:
        return lay_out(value)
    except Exception as error:
        raise UnsupportedError(f"cannot write {path}: pickling failed: {text_of(error)}") from error


def write_files(
    source: Source, files: Sequence[tuple[Location, ArchiveLayout]], target: Location
) -> None:
    """Writes and syncs new files with pending tensors of a source, one after the other.

    ``target`` is the target of the conversion, for the progress bar. After an error, an incomplete
    file may exist.
    """
    pieces = source.cut([tensor.name for _, layout in files for _, tensor in layout.pending()])
    pieces_of: dict[int, list[Piece]] = {}  # By the number of the tensor in this order.
    for piece in pieces:
        pieces_of.setdefault(piece.tensor, []).append(piece)
    pool = _native.BufferPool(IO.buffer_nbytes, IO.block_nbytes(target.file_system))
    number = 0

    def written(tensor: PendingTensor) -> list[Piece]:
        nonlocal number
        number += 1
        return pieces_of[number - 1]

    with progress_bar("writing", target, lambda: source.nbytes, lambda: source.loaded_nbytes):
        for path, layout in files:
            if layout.nbytes <= _SMALL_NBYTES:
                for record, tensor in layout.pending():
                    loaded = [_elements(source, piece, tensor) for piece in written(tensor)]
                    record.content = b"".join(bytes(_bytes_of(one)) for one in loaded)
                    record.crc = zlib.crc32(record.content)
                path.write(layout.encode(), sync=True)
                continue
            path.write(b"", sync=False)
            job = _native.SharedFileJob(
                path.file_system, path.path, layout.nbytes, pool, IO.direct, True
            )
            with finished(job):
                for record, tensor in layout.pending():
                    for piece in written(tensor):
                        elements = _elements(source, piece, tensor)
                        record.crc = zlib.crc32(_bytes_of(elements), record.crc)
                        if elements.dtype not in DTYPE_CODES:  # The engine writes it as bytes.
                            elements = elements.view(torch.uint8)
                        view = _tensor_view.view(elements, tensor.name, writable=False)
                        job.write([(view, record.offset, tensor.sizes, piece.box[0])])
                        del elements, view  # Frees the memory before the next piece is taken.
                for offset, data in layout.known_parts():
                    job.put(offset, data)


def _elements(source: Source, piece: Piece, tensor: PendingTensor) -> torch.Tensor:
    return source.take(piece.number).to(tensor.dtype)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    elements: Any = bytes_of(tensor).numpy()
    return memoryview(elements)
