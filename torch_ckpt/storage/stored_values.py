"""Reads the values of a checkpoint of any format, a few pieces at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torch_ckpt.errors import CorruptionError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import metadata_prefixes
from torch_ckpt.formats.expansion import allowed_nbytes
from torch_ckpt.formats.index import index_of
from torch_ckpt.options import IoOptions
from torch_ckpt.storage.reader import FastReader

__all__ = ["Box", "StoredValues", "in_batches", "pieces_of"]

T = TypeVar("T")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


class StoredValues:
    """The values of an open checkpoint of any format that :class:`FastReader` loads.

    Shows only FQNs with the prefix, and removes the prefix. If no FQN has it, ``has_prefix`` is
    false, and all FQNs are shown. ``names`` is shown name -> FQN in the checkpoint.
    ``why_oversized`` is shown name -> why a tensor must not be read: the size of the files does not
    justify its size.
    """

    def __init__(
        self,
        path: Location,
        prefix: str = "",
        *,
        io: IoOptions | None = None,
        trust_pickle: bool = False,
        rules: str | None = None,
    ) -> None:
        self._path = path
        self._reader = FastReader(
            path.checkpoint_id,
            io=io,
            verify="full",  # A record is read in several pieces.
            trust_pickle=trust_pickle,
            exchange="off",
            dequantize=False,
            rules=rules,
        )
        self.metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self.metadata, False)  # It logs nothing.
        self.index = index_of(self.metadata)
        stored = list(self.metadata.state_dict_metadata)
        chosen = [fqn for fqn in stored if fqn.startswith(prefix)]
        self.has_prefix = bool(chosen) or not prefix
        self.names: Mapping[str, str] = (
            {fqn.removeprefix(prefix): fqn for fqn in chosen}
            if chosen
            else {fqn: fqn for fqn in stored}
        )
        self._path = path
        self.why_oversized: dict[str, str] = {} if trust_pickle else self._find_oversized()

    def entry(self, name: str) -> Any:
        """Returns DCP's metadata of a value."""
        return self.metadata.state_dict_metadata[self.names[name]]

    @functools.cached_property
    def stored_nbytes(self) -> int:
        """The length of all files in bytes. Files that are missing do not count."""
        return sum(self._file_lengths())

    def _file_lengths(self) -> Iterator[int]:
        if self.index is not None and self.index.in_memory:  # Measured when they were opened.
            yield from (nbytes for _, nbytes in self.index.files)
            return
        for file in {info.relative_path for info in self.metadata.storage_data.values()}:
            with contextlib.suppress(NotFoundError):
                yield (self._path / file).nbytes()

    def _files_justify(self, nbytes: int) -> bool:
        """Returns whether the files may expand to so many bytes. Measures as few as necessary."""
        sums = itertools.accumulate(self._file_lengths(), initial=0)
        return any(nbytes <= allowed_nbytes(stored) for stored in sums)

    def _find_oversized(self) -> dict[str, str]:
        """Returns the largest tensors, if all together are larger than the files justify."""
        nbytes: dict[str, int] = {}
        for name in self.names:
            entry = self.entry(name)
            if isinstance(entry, TensorStorageMetadata):
                nbytes[name] = math.prod(entry.size) * entry.properties.dtype.itemsize
        total = sum(nbytes.values())
        oversized: dict[str, str] = {}
        if self._files_justify(total):
            return oversized
        for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
            if total <= allowed_nbytes(self.stored_nbytes):
                break
            total -= nbytes[name]
            oversized[name] = (
                f"it has {nbytes[name]} bytes, and the files of the checkpoint "
                f"{self.stored_nbytes}. If you trust their author, pass --trust-pickle"
            )
        return oversized

    def load(self, boxes: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Loads boxes of tensors, by the tensors' names."""
        targets, items = [], []
        for number, (name, (offsets, sizes)) in enumerate(boxes):
            entry = self.entry(name)
            targets.append(torch.empty(sizes, dtype=entry.properties.dtype, device="cpu"))
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for item in create_read_items_for_chunk_list(self.names[name], entry, [chunk]):
                # The planner finds the target by its number.
                index = MetadataIndex(item.dest_index.fqn, item.dest_index.offset, number)
                items.append(dataclasses.replace(item, dest_index=index))
        self._read(items, _Pieces(targets))
        return targets

    def objects(self, names: Sequence[str]) -> list[Any]:
        """Loads objects, by their names."""
        state: dict[str, Any] = dict.fromkeys(self.names[name] for name in names)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self.metadata, True)
        self._read(planner.create_local_plan().items, planner)
        return [planner.state_dict[self.names[name]] for name in names]

    def _read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except NotFoundError as error:
            if not metadata_prefixes(self._path):  # The whole checkpoint was removed meanwhile.
                raise
            raise CorruptionError(str(error)) from error


def pieces_of(sizes: Sequence[int], itemsize: int, max_nbytes: int) -> Iterator[Box]:
    """Cuts a tensor into boxes, each a range of the row-major elements, in their order.

    A box has at most ``max_nbytes``, or one element. A tensor without elements has no box.
    """
    cut = list(sizes)
    for dim in range(len(cut)):
        below = math.prod(sizes[dim + 1 :]) * itemsize
        cut[dim] = min(sizes[dim], max(1, max_nbytes // max(below, 1)))
        if below <= max_nbytes:
            break
    steps = [range(0, full, size) for full, size in zip(sizes, cut, strict=True) if full]
    if len(steps) < len(sizes):
        return
    for offsets in itertools.product(*steps):
        ends = (min(o + s, full) for o, s, full in zip(offsets, cut, sizes, strict=True))
        yield offsets, tuple(end - o for end, o in zip(ends, offsets, strict=True))


def in_batches(pieces: Iterable[tuple[T, int]], max_nbytes: int) -> Iterator[list[T]]:
    """Yields pieces, each with its bytes, in batches of at most ``max_nbytes``, or of one piece."""
    batch: list[T] = []
    batch_nbytes = 0
    for piece, nbytes in pieces:
        if batch and batch_nbytes + nbytes > max_nbytes:
            yield batch
            batch, batch_nbytes = [], 0
        batch.append(piece)
        batch_nbytes += nbytes
    if batch:
        yield batch


class _Pieces(DefaultLoadPlanner):
    """A planner whose targets are the pieces themselves."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        return narrow_tensor_by_index(
            self._targets[number], read_item.dest_offsets, read_item.lengths
        )
