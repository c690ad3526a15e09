"""Writes a value as a durable file of ``torch.save``, with direct I/O and without copying it."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from torch_ckpt._core import _native
from torch_ckpt.errors import UnsupportedError, text_of
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.torch_archive import lay_out
from torch_ckpt.options import IoOptions
from torch_ckpt.storage.file_jobs import finished

__all__ = ["write_value"]

_SMALL_NBYTES = 1 << 20
"""A file of at most this length is written in one call."""

_PIECE_NBYTES = 1 << 20
"""Bytes that are copied, and then checksummed while they are in the CPU cache."""

_LONG_NBYTES = 8 << 20
"""The header of a longer record is written after its elements, otherwise before them.

A file of short records is written sequentially. The elements of a long record are read only once.
"""


def write_value(
    path: Location, value: Any, *, pool: _native.BufferPool, io: IoOptions, niceness: int = 0
) -> int:
    """Writes and syncs a new file of a value, and returns its length.

    The value must not change meanwhile, and its tensors must be on the CPU. After an error, an
    incomplete file may exist. Raises UnsupportedError if the value cannot be pickled.
    """
    try:
        layout = lay_out(value, refers=True)
    except Exception as error:
        raise UnsupportedError(f"cannot write {path}: pickling failed: {text_of(error)}") from error
    if layout.nbytes <= _SMALL_NBYTES:
        for record, storage in layout.storages():
            record.content = bytes(_bytes_of(storage))
            record.crc = zlib.crc32(record.content)
        path.write(layout.encode(), sync=True)
        return layout.nbytes
    path.write(b"", sync=False)
    job = _native.SharedFileJob(
        path.file_system, path.path, layout.nbytes, pool, io.direct, True, niceness
    )
    with finished(job):
        late = []  # Records whose header is written later.
        for record in layout.records:
            is_long = record.nbytes > _LONG_NBYTES
            if isinstance(record.content, bytes):
                data = memoryview(record.content)
            else:
                assert isinstance(record.content, torch.UntypedStorage)
                data = _bytes_of(record.content)
                if not is_long:
                    record.crc = zlib.crc32(data)
            if is_long:
                late.append(record)
            else:
                job.put(record.header_offset, record.header())
            for begin in range(0, record.nbytes, _PIECE_NBYTES):
                piece = data[begin : begin + _PIECE_NBYTES]
                job.put(record.offset + begin, piece)
                if is_long and not isinstance(record.content, bytes):
                    record.crc = zlib.crc32(piece, record.crc)
        job.put(layout.directory_offset, layout.directory())
        for record in late:
            job.put(record.header_offset, record.header())
    return layout.nbytes


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    elements: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
    array: Any = elements.set_(storage).numpy()
    return memoryview(array)
