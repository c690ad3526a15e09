"""The source of a load: an open checkpoint, and the slices of the items of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import DTYPE_CODES, printable
from torch_ckpt.errors import CorruptionError
from torch_ckpt.formats.opened import Opened
from torch_ckpt.options import IoOptions

__all__ = ["LoadSource", "Requests", "Slice", "StoredTensor", "batches_of", "without_memory"]

Slice = tuple[str, int, int, str]
"""File, offset, length in bytes, FQN."""

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}

StoredTensor = tuple[ReadItem, Slice, torch.dtype]
"""An item that the engine reads, and its stored dtype."""


@dataclasses.dataclass(frozen=True)
class LoadSource:
    """An open checkpoint, and the options of the load."""

    metadata: Metadata
    opened: Opened
    io: IoOptions
    verify: bool
    trust_pickle: bool
    transforms: _StorageReaderTransforms
    records: _native.Records | None  # The records that verification checks.
    files: frozenset[str] | None = None  # The data files that this rank can read; None for all.

    def storage_info(self, item: ReadItem) -> _StorageInfo:
        """Returns the extent of the stored box of an item.

        Raises:
            CorruptionError: The metadata has no such box.
        """
        try:
            info: _StorageInfo = self.metadata.storage_data[item.storage_index]
        except KeyError:
            raise CorruptionError(
                f"cannot load {item.storage_index}: the metadata does not list it"
            ) from None
        return info

    def is_away(self, stored: Slice) -> bool:
        """Returns whether this rank cannot read the file of a slice."""
        return self.files is not None and stored[0] not in self.files

    def stored_dtype(self, item: ReadItem) -> torch.dtype | None:
        """Returns the dtype of a tensor that the engine can read; ``None`` for other items.

        That of a quantised tensor is one in which a load gets it.
        """
        if item.type == LoadItemType.BYTE_IO:
            return None
        if item.storage_index.fqn in self.opened.quantized:
            return self.given(item, None)
        stored = self.metadata.state_dict_metadata.get(item.storage_index.fqn)
        if not isinstance(stored, TensorStorageMetadata):
            return None
        dtype = stored.properties.dtype
        return dtype if dtype in DTYPE_CODES else None

    def given(self, item: ReadItem, target: torch.dtype | None) -> torch.dtype | None:
        """Returns the dtype in which the engine gives a tensor to a target of another dtype."""
        facts = self.opened.quantized.get(item.storage_index.fqn)
        if facts is None:
            return self.stored_dtype(item)
        usual, *others = facts[-1]
        is_other = target is not None and DTYPE_CODES.get(target) in others
        return target if is_other else _DTYPES[usual]

    def is_quantized(self, item: ReadItem) -> bool:
        """Returns whether the dtype in which the engine gives a tensor depends on the target."""
        return item.storage_index.fqn in self.opened.quantized


class Requests:
    """The slices of DCP's read items, grouped by who reads them, in DCP's order: file by file.

    If targets share memory, the last value remains.

    Attributes:
        tensors: Tensors that the engine reads.
        streams: Slices that torch reads: objects, other tensors, and slices with stream transforms.
        nbytes: Total length of all slices.
        transformed: Whether any slice has a stream transform.
    """

    def __init__(self, source: LoadSource, items: Sequence[ReadItem]) -> None:
        self.tensors: list[StoredTensor] = []
        self.streams: list[tuple[ReadItem, Slice]] = []
        files: dict[str, int] = {}
        self.nbytes = 0
        self.transformed = False
        self._away: set[str] | None = None
        for item in items:
            info = source.storage_info(item)
            stored = (
                info.relative_path,
                info.offset,
                info.length,
                printable(item.storage_index.fqn),
            )
            files.setdefault(info.relative_path, len(files))
            self.nbytes += info.length
            dtype = source.stored_dtype(item)
            descriptors = getattr(info, "transform_descriptors", None)
            self.transformed = self.transformed or bool(descriptors)
            if descriptors or dtype is None:
                self.streams.append((item, stored))
            else:
                self.tensors.append((item, stored, dtype))
        self.tensors.sort(key=lambda tensor: files[tensor[1][0]])
        self.streams.sort(key=lambda stream: files[stream[1][0]])

    def away(self, source: LoadSource) -> set[str]:
        """Returns the names of the files that this rank cannot read."""
        if self._away is None:
            slices = [t[1] for t in self.tensors] + [stored for _, stored in self.streams]
            self._away = {stored[0] for stored in slices if source.is_away(stored)}
        return self._away

    def leave_to_torch(self, tensors: Sequence[StoredTensor]) -> None:
        """Moves these tensors to ``streams``, which torch unpickles."""
        left = {id(tensor) for tensor in tensors}
        self.streams += [(item, stored) for item, stored, _ in tensors]
        self.tensors = [tensor for tensor in self.tensors if id(tensor) not in left]


def without_memory(
    tensors: Sequence[StoredTensor],
) -> list[tuple[Slice, torch.Size, _native.TensorView]]:
    """Returns the requests of tensors whose elements go to a callback."""
    return [
        (
            stored,
            item.storage_offsets,
            _native.TensorView.without_memory(DTYPE_CODES[dtype], item.lengths),
        )
        for item, stored, dtype in tensors
    ]


def batches_of(slices: Iterable[Slice], max_nbytes: int) -> Iterator[list[Slice]]:
    """Groups slices into batches of up to ``max_nbytes``; a longer slice has its own batch."""
    batch: list[Slice] = []
    total = 0
    for stored in slices:
        if batch and total + stored[2] > max_nbytes:
            yield batch
            batch, total = [], 0
        batch.append(stored)
        total += stored[2]
    if batch:
        yield batch
