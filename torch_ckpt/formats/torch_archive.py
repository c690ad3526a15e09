"""The layout of a ``torch.save`` file whose elements are written later, piece by piece.

A file is a zip archive without compression: one pickle, and a record of elements for each tensor.
The lengths of all parts follow from the pickled value and from the dtypes and shapes of the
tensors. So the offset of each record is known before any tensor is in memory. Records begin at
multiples of 64 bytes, as in torch's own files.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

__all__ = ["ArchiveLayout", "ArchiveRecord", "PendingTensor", "lay_out"]

_ALIGNMENT = 64
_LIMIT = 0xFFFFFFFF  # Larger numbers need the fields of zip64.
_MAX_RECORDS = 0xFFFF
_VERSION, _VERSION_64 = 20, 45
_DOS_DATE = 0x21  # 1980-01-01.
_STORAGE_CLASSES = torch.storage._dtype_to_storage_type_map()


@dataclass(frozen=True)
class PendingTensor:
    """Stands in for a contiguous CPU tensor in a value.

    ``name`` identifies the tensor for the writer. Tensors with the same name share a storage.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass
class ArchiveRecord:
    """A record of the archive.

    ``content`` is bytes, a storage, or a tensor whose elements are written later. The writer sets
    the CRC-32 of a storage and of a pending tensor. Both offsets are relative to the file.
    """

    path: str
    nbytes: int
    content: bytes | UntypedStorage | PendingTensor
    header_offset: int = 0
    offset: int = 0
    crc: int = 0

    def header(self) -> bytes:
        """Returns the header, whose end is at :attr:`offset`."""
        path = self.path.encode()
        wide = self.nbytes > _LIMIT
        extra = struct.pack("<HHQQ", 1, 16, self.nbytes, self.nbytes) if wide else b""
        padding = self.offset - self.header_offset - 30 - len(path) - len(extra)
        extra += b"FB" + struct.pack("<H", padding - 4) + b"Z" * (padding - 4)
        nbytes = min(self.nbytes, _LIMIT)
        return (
            struct.pack(
                "<4s5H3I2H",
                *(b"PK\3\4", _VERSION_64 if wide else _VERSION, 0, 0, 0, _DOS_DATE),
                *(self.crc, nbytes, nbytes, len(path), len(extra)),
            )
            + path
            + extra
        )

    def place_at(self, begin: int) -> int:
        """Places the header at an offset; returns the offset of the end of the content."""
        self.header_offset = begin
        wide = 20 if self.nbytes > _LIMIT else 0
        end = begin + 30 + len(self.path.encode()) + wide + 4
        self.offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self.offset + self.nbytes

    def directory_entry(self) -> bytes:
        """Returns the record's entry in the directory of the archive."""
        path = self.path.encode()
        wide = [n for n in (self.nbytes, self.nbytes, self.header_offset) if n > _LIMIT]
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        version = _VERSION_64 if wide else _VERSION
        nbytes = min(self.nbytes, _LIMIT)
        return (
            struct.pack(
                "<4s6H3I5H2I",
                *(b"PK\1\2", version, version, 0, 0, 0, _DOS_DATE),
                *(self.crc, nbytes, nbytes, len(path), len(extra), 0, 0, 0),
                *(0, min(self.header_offset, _LIMIT)),
            )
            + path
            + extra
        )


@dataclass
class ArchiveLayout:
    """The records of a file in the order of their offsets, and its length."""

    records: list[ArchiveRecord]
    directory_offset: int = field(init=False, default=0)
    nbytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        end = 0
        for record in self.records:
            end = record.place_at(end)
        self.directory_offset = end
        self.nbytes = end + len(self.directory())

    def pending(self) -> list[tuple[ArchiveRecord, PendingTensor]]:
        """Returns the records whose elements must still be written."""
        return [
            (record, record.content)
            for record in self.records
            if isinstance(record.content, PendingTensor)
        ]

    def storages(self) -> list[tuple[ArchiveRecord, UntypedStorage]]:
        """Returns the records of storages, whose elements must still be written."""
        return [
            (record, record.content)
            for record in self.records
            if isinstance(record.content, UntypedStorage)
        ]

    def directory(self) -> bytes:
        """Returns the directory and the end of the archive."""
        entries = b"".join(record.directory_entry() for record in self.records)
        offset, count = self.directory_offset, len(self.records)
        end = b""
        if offset > _LIMIT or len(entries) > _LIMIT or count > _MAX_RECORDS:
            wide = offset + len(entries)
            end = struct.pack(
                "<4sQ2H2I4Q",
                *(b"PK\6\6", 44, _VERSION_64, _VERSION_64, 0, 0),
                *(count, count, len(entries), offset),
            ) + struct.pack("<4sIQI", b"PK\6\7", 0, wide, 1)
        few = min(count, _MAX_RECORDS)
        end += struct.pack(
            "<4s4H2IH",
            *(b"PK\5\6", 0, 0, few, few, min(len(entries), _LIMIT), min(offset, _LIMIT), 0),
        )
        return entries + end

    def encode(self) -> bytes:
        """Returns the whole file. Requires: no tensor or storage must still be written."""
        out = bytearray(self.nbytes)
        for offset, data in self.known_parts():
            out[offset : offset + len(data)] = data
        return bytes(out)

    def known_parts(self) -> list[tuple[int, bytes]]:
        """Returns offsets and bytes of all parts except the elements of tensors and storages.

        Requires: all CRCs are known.
        """
        parts: list[tuple[int, bytes]] = []
        for record in self.records:
            parts.append((record.header_offset, record.header()))
            if isinstance(record.content, bytes):
                parts.append((record.offset, record.content))
        return [*parts, (self.directory_offset, self.directory())]


def lay_out(value: Any, *, refers: bool = False) -> ArchiveLayout:
    """Lays out the file of a value. Pending tensors are written later.

    With ``refers``, the layout refers to the storages of CPU tensors instead of copying them, and
    they are written later as well. If the value cannot be pickled, raises the error of ``pickle``.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, refers)
    pickler.dump(value)
    records = [_known("archive/data.pkl", stream.getvalue())]
    records.append(_known("archive/byteorder", b"little"))
    for number, content in enumerate(pickler.contents):
        path = f"archive/data/{number}"
        if isinstance(content, bytes):
            records.append(_known(path, content))
        elif isinstance(content, UntypedStorage):
            records.append(ArchiveRecord(path, content.nbytes(), content))
        else:
            records.append(ArchiveRecord(path, content.nbytes, content))
    records.append(_known("archive/version", b"3\n"))
    return ArchiveLayout(records)


def _known(path: str, content: bytes) -> ArchiveRecord:
    return ArchiveRecord(path, len(content), content, crc=zlib.crc32(content))


@dataclass(frozen=True)
class _PendingStorage:
    tensor: PendingTensor
    typed: bool


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, and collects the contents of the records by their number."""

    def __init__(self, stream: io.BytesIO, refers: bool) -> None:
        super().__init__(stream, protocol=2)
        self.contents: list[bytes | UntypedStorage | PendingTensor] = []
        self._refers = refers
        # Address, length and class of a storage -> number of its record. torch.load assigns one
        # length and class to each record: those of its first reference.
        self._numbers: dict[tuple[int, int, Any], int] = {}
        self._pending: dict[str, int] = {}  # Name of a pending tensor -> number of its record.
        self._alive: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        """Pickles a pending tensor as a tensor."""
        if not isinstance(value, PendingTensor):
            return NotImplemented
        strides = torch.empty(value.sizes, device="meta").stride()
        where: tuple[Any, ...] = (0, value.sizes, strides, False, OrderedDict())
        if value.dtype in torch.storage._new_dtypes():
            storage = _PendingStorage(value, False)
            return torch._utils._rebuild_tensor_v3, (storage, *where, value.dtype)
        return torch._utils._rebuild_tensor_v2, (_PendingStorage(value, True), *where)

    def persistent_id(self, value: Any) -> Any:
        """Gives each storage a record."""
        if isinstance(value, _PendingStorage):
            tensor = value.tensor
            numel = math.prod(tensor.sizes)
            kind, numel = (
                (_storage_class(tensor.dtype), numel)
                if value.typed
                else (UntypedStorage, tensor.nbytes)
            )
            if tensor.name in self._pending:
                return ("storage", kind, str(self._pending[tensor.name]), "cpu", numel)
            self._pending[tensor.name] = len(self.contents)
            return self._id(kind, tensor, numel)
        if isinstance(value, TypedStorage):
            untyped, kind = value._untyped_storage, _storage_class(value.dtype)
            numel = untyped.nbytes() // value.dtype.itemsize
        elif isinstance(value, UntypedStorage):
            untyped, numel, kind = value, value.nbytes(), UntypedStorage
        else:
            return None
        key = untyped.data_ptr(), untyped.nbytes(), kind
        if key[0] and key in self._numbers:
            return ("storage", kind, str(self._numbers[key]), "cpu", numel)
        self._alive.append(untyped)
        self._numbers[key] = len(self.contents)
        if self._refers and untyped.device.type == "cpu" and untyped.nbytes():
            return self._id(kind, untyped, numel)
        empty: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
        storage: Any = untyped
        elements = empty.set_(storage.cpu())
        return self._id(kind, elements.numpy().tobytes(), numel)

    def _id(self, kind: Any, content: bytes | UntypedStorage | PendingTensor, numel: int) -> Any:
        self.contents.append(content)
        return ("storage", kind, str(len(self.contents) - 1), "cpu", numel)


def _storage_class(dtype: torch.dtype) -> Any:
    return getattr(torch, _STORAGE_CLASSES[dtype])
