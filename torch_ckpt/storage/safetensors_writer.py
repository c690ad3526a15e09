"""SafetensorsWriter: a model as safetensors files, written by all ranks at once.

The coordinator knows the names, dtypes and sizes of all tensors, and so where every byte will lie
(:mod:`torch_ckpt.formats.safetensors_layout`). With that each rank writes its own boxes, straight
to their places. The files have hidden names until the coordinator publishes them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt._core.tensors import gc_paused, is_temporary, to_plain
from torch_ckpt.coordination.group import claim_commit
from torch_ckpt.errors import CheckpointError, MismatchError, UnsupportedError
from torch_ckpt.formats.safetensors_layout import FilePlace, ModelLayout, TensorFacts
from torch_ckpt.options import IoMode, IoOptions
from torch_ckpt.planning.item_views import AssignedItems, PlannedPaths
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.planning.replicas import CutItem, item_nbytes, work_of
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.storage.buffers import retained_nbytes_limit
from torch_ckpt.storage.file_jobs import finished
from torch_ckpt.storage.rank_work import resolve_whole
from torch_ckpt.storage.safetensors_commit import (
    COMMITTED_NAMES,
    pending_names,
    publish,
    stale_model_files,
)
from torch_ckpt.storage.writer import FastWriter

__all__ = ["SafetensorsWriter"]

_NAMED = 3  # Of what cannot be stored, in an error.
_WAY_OUT = "save what is no tensor apart, for example with FastWriter"


@dataclass(frozen=True)
class _ModelPlan:
    """``SavePlan.storage_data`` of one rank.

    Attributes:
        layout: Of all files, encoded.
        save_id: Of the save, and so of its files: the coordinator's.
        rank: Whom this is for, of ``world_size``.
        share: What the rank writes otherwise than its plan says.
    """

    layout: bytes
    save_id: str
    rank: int
    world_size: int
    share: Any


@dataclass(frozen=True)
class _Piece:
    """What a rank writes to one file without a gap in its plan: a box, or the header.

    Attributes:
        file: Number of the file.
        offset: Where it begins there.
        nbytes: How long it is.
        item: The box; ``None`` for the header.
        place: Of the whole tensor.
    """

    file: int
    offset: int
    nbytes: int
    item: WriteItem | None = None
    place: FilePlace | None = None


class SafetensorsWriter(FastWriter):
    """Writes a model as safetensors, as Hugging Face's loaders read it.

    Pass it to :func:`torch.distributed.checkpoint.save` or ``async_save``. The state dict may hold
    tensors only. They are stored whole, in ``model.safetensors`` or in the files that
    ``model.safetensors.index.json`` names, whatever their sharding was. A model that is already in
    the directory is replaced in one step.

    Args:
        path: Directory of the model, on storage every rank can reach. Created if missing.
        max_shard_nbytes: Most bytes of one file, unless it holds a single tensor.
        sync_files: As for :class:`FastWriter`.
        thread_count: Parts of its share that a rank writes at a time.
        overwrite: Whether a model already at ``path`` may be replaced.
        io: Tuning. No field of it changes which bytes are written.
        share_replicas: As for :class:`FastWriter`.
        stager: Stages for ``async_save``; one for the whole process if ``None``.

    Raises:
        AlreadyExistsError: ``path`` holds a model and ``overwrite`` is false.
        StorageError: The disk or store failed.
        UnsupportedError: ``path`` is a URL whose scheme nobody has registered. From a save:
            safetensors has no form for an object or dtype, which the error names.
        ValueError: An argument is out of range.

    Example::

        dcp.save(model.state_dict(), storage_writer=SafetensorsWriter("model"))
    """

    _committed_names = COMMITTED_NAMES

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_nbytes: int = 5_000_000_000,
        sync_files: bool = True,
        thread_count: int = 1,
        overwrite: bool = True,
        io: IoOptions | None = None,
        share_replicas: bool = True,
        stager: SnapshotStager | None = None,
    ) -> None:
        super().__init__(
            path,
            sync_files=sync_files,
            thread_count=thread_count,
            overwrite=overwrite,
            io=io,
            share_replicas=share_replicas,
            stager=stager,
        )
        if max_shard_nbytes < 1:
            raise ValueError(f"{max_shard_nbytes=} is not positive")
        self.max_shard_nbytes = max_shard_nbytes
        self._layout: ModelLayout | None = None  # The coordinator's, between plan and commit.

    def _place(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self.use_collectives:
            raise UnsupportedError(
                f"cannot write {self.path} as safetensors without collectives: ranks write one "
                "model together"
            )
        if not all(plan.usable for plan in plans):
            raise UnsupportedError(
                "cannot write safetensors by plans that DefaultSavePlanner(enable_plan_caching="
                "True) keeps to itself; FastSavePlanner has a cache that serves"
            )
        with gc_paused():
            facts = _facts_of(plans)
            self._layout = ModelLayout.of(facts, max_shard_nbytes=self.max_shard_nbytes)
        encoded = self._layout.encode()
        return [
            dataclasses.replace(
                plan,
                storage_data=_ModelPlan(encoded, self.save_id, rank, len(plans), plan.storage_data),
            )
            for rank, plan in enumerate(plans)
        ]

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if not isinstance(plan.storage_data, _ModelPlan):
            raise UnsupportedError("the planner has kept from this rank where its tensors go")
        mine = plan.storage_data
        with gc_paused():
            layout = ModelLayout.decode(mine.layout)
            items = work_of(dataclasses.replace(plan, storage_data=mine.share))
            pieces = [_piece_of(item, layout) for item in items]
        for number in range(mine.rank, len(layout.files), mine.world_size):
            pieces.append(_Piece(number, 0, len(layout.files[number].header)))
        if not pieces:
            return []
        pieces.sort(key=lambda piece: (piece.file, piece.offset))
        parts = [part for part in _parts(pieces, self.thread_count) if part]
        pools = self._take_pools(len(parts), sum(piece.nbytes for piece in pieces))
        names = pending_names(len(layout.files), mine.save_id)

        def write_part(number: int) -> list[WriteResult]:
            writes = _PartWriter(self, planner, layout, names, pools[number])
            return [
                writes.write(file, list(of_file))
                for file, of_file in itertools.groupby(parts[number], lambda piece: piece.file)
            ]

        try:
            with ThreadPoolExecutor(len(parts), "torch_ckpt-write") as executor:
                each = executor.map if len(parts) > 1 else map
                return list(itertools.chain.from_iterable(each(write_part, range(len(parts)))))
        except BaseException:
            # The save has failed for all ranks: on a full disk its files would be in their way.
            self._remove_files({names[piece.file] for piece in pieces})
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the files, and removes what they have replaced."""
        layout, self._layout = self._layout, None
        assert layout is not None
        pending = pending_names(len(layout.files), self.save_id)
        try:
            _check_complete(layout, [result for of_rank in results for result in of_rank])
            claim_commit()
        except BaseException:
            # Whatever is wrong may be wrong with a plan that was used again.
            plan_cache().forget()
            self._remove_files(pending)
            raise
        names = publish(self.location, layout, self.save_id, sync=self.sync_files)
        self._remove_files(stale_model_files(self._found, names))
        _describe(metadata, layout, names, self)


def _facts_of(plans: Sequence[SavePlan]) -> list[TensorFacts]:
    columns: list[Any] = [plan.items for plan in plans]
    known = next((c.plan for c in columns if isinstance(c, AssignedItems)), None)
    return _facts_of_items(plans) if known is None else _facts_of_columns(known.plan)


def _facts_of_columns(plan: _native.GlobalPlan) -> list[TensorFacts]:
    facts: list[TensorFacts] = []
    objects: list[str] = []
    for fqn in plan.fqns:
        found = plan.find(fqn)
        assert found is not None
        if found[1] is None:
            objects.append(fqn)
        else:
            facts.append(TensorFacts(fqn, found[1][0], tuple(found[1][4])))
    _refuse(objects)
    return facts


def _facts_of_items(plans: Sequence[SavePlan]) -> list[TensorFacts]:
    found: dict[str, TensorFacts] = {}
    objects: list[str] = []
    for item in itertools.chain.from_iterable(map(work_of, plans)):
        fqn, data = item.index.fqn, item.tensor_data
        if data is None:
            objects.append(fqn)
            continue
        if data.properties.layout != torch.strided:
            raise UnsupportedError(
                f"cannot store {fqn!r} as safetensors: its layout is {data.properties.layout}"
            )
        facts = TensorFacts(fqn, _word(data.properties.dtype), tuple(data.size))
        if found.setdefault(fqn, facts) != facts:
            raise MismatchError(
                f"ranks disagree on {fqn!r}: {facts.dtype} of {list(facts.sizes)} here, "
                f"{found[fqn].dtype} of {list(found[fqn].sizes)} there"
            )
    _refuse(objects)
    return list(found.values())


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse(objects: Sequence[str]) -> None:
    if objects:
        named = ", ".join(map(repr, objects[:_NAMED]))
        more = f" and {len(objects) - _NAMED} more" if len(objects) > _NAMED else ""
        raise UnsupportedError(
            f"cannot store {named}{more} as safetensors: that holds tensors alone; {_WAY_OUT}"
        )


def _piece_of(item: WriteItem, layout: ModelLayout) -> _Piece:
    data = item.tensor_data
    place = layout.places.get(item.index.fqn)
    if data is None or place is None:
        raise CheckpointError(f"{item.index.fqn!r} was not there when the files were laid out")
    facts = TensorFacts(item.index.fqn, _word(data.properties.dtype), tuple(data.size))
    if facts != place.facts:
        raise MismatchError(f"{facts} is to be written where {place.facts} was planned")
    offset, stride = place.offset, data.properties.dtype.itemsize
    for size, begin in zip(reversed(data.size), reversed(data.chunk.offsets), strict=True):
        offset += begin * stride
        stride *= size
    return _Piece(place.file, offset, item_nbytes(item), item, place)


def _parts(pieces: Sequence[_Piece], count: int) -> list[list[_Piece]]:
    """Cuts pieces, in their order, into parts of about as many bytes, one for each thread."""
    total = sum(piece.nbytes for piece in pieces)
    parts: list[list[_Piece]] = [[] for _ in range(count)]
    done = 0
    for piece in pieces:
        middle = done + piece.nbytes // 2
        parts[min(middle * count // max(total, 1), count - 1)].append(piece)
        done += piece.nbytes
    return parts


@dataclass(frozen=True)
class _PartWriter:
    """Writes pieces, from one thread."""

    writer: SafetensorsWriter
    planner: SavePlanner
    layout: ModelLayout
    names: Sequence[str]
    pool: _native.BufferPool

    def write(self, file: int, pieces: Sequence[_Piece]) -> WriteResult:
        """Writes all of these to one file."""
        writer, laid_out = self.writer, self.layout.files[file]
        path = writer.location / self.names[file]
        job = _native.SharedFileJob(
            path.file_system,
            path.path,
            laid_out.nbytes,
            self.pool,
            writer.io.direct,
            writer.sync_files,
            writer._niceness,
        )
        with finished(job):
            for batch in self._batches(pieces, job, laid_out.header):
                job.write(batch)
        writer.io_mode = IoMode.of(job)
        nbytes = sum(piece.nbytes for piece in pieces)
        return WriteResult(MetadataIndex(self.names[file]), nbytes, file)

    def _batches(
        self, pieces: Sequence[_Piece], job: _native.SharedFileJob, header: bytes
    ) -> Iterator[list[tuple[_native.TensorView, int, Sequence[int], Sequence[int]]]]:
        """Tensors to be written by one call; copies made for it are let go after it."""
        batch: list[tuple[_native.TensorView, int, Sequence[int], Sequence[int]]] = []
        retained_nbytes, most = 0, retained_nbytes_limit(self.writer.io)
        for piece in pieces:
            if piece.item is None or piece.place is None or piece.item.tensor_data is None:
                job.put(0, header)  # Nothing lies before it.
                continue
            tensor, is_live = self._tensor_of(piece.item)
            view = _tensor_view.view(tensor, piece.item.index.fqn, writable=False)
            chunk = piece.item.tensor_data.chunk
            batch.append((view, piece.place.offset, piece.place.facts.sizes, chunk.offsets))
            if is_live:
                continue
            retained_nbytes += tensor.untyped_storage().nbytes()  # Rows keep all of it.
            del tensor, view
            if retained_nbytes >= most:
                yield batch
                batch, retained_nbytes = [], 0
        yield batch

    def _tensor_of(self, item: WriteItem) -> tuple[torch.Tensor, bool]:
        """An item's values as a plain tensor, and whether somebody else holds its memory anyway."""
        tensor = resolve_whole(self.planner, item)
        fqn, data = item.index.fqn, item.tensor_data
        assert data is not None
        kind = _tensor_view.tensor_kind(tensor)
        if kind == _tensor_view.TensorKind.TORCHS_OWN:
            raise UnsupportedError(
                f"cannot store {fqn!r} as safetensors: only torch knows how to store "
                f"{type(tensor).__name__} of {tensor.dtype}"
            )
        whole = item.whole if isinstance(item, CutItem) and item.whole is not None else item
        assert whole.tensor_data is not None
        sizes = whole.tensor_data.chunk.sizes
        if tensor.dtype != data.properties.dtype or tensor.size() != sizes:
            raise MismatchError(
                f"the planner resolved {fqn!r} to {tensor.dtype} of {list(tensor.size())}, and had "
                f"planned {data.properties.dtype} of {list(sizes)}"
            )
        is_live = not is_temporary(tensor) and kind == _tensor_view.TensorKind.PLAIN
        if isinstance(item, CutItem):
            tensor = item.rows_of(tensor)
        return (tensor if kind == _tensor_view.TensorKind.PLAIN else to_plain(tensor)), is_live


def _check_complete(layout: ModelLayout, results: Sequence[WriteResult]) -> None:
    """Raises unless all bytes of all files were written, each by somebody."""
    missing = [file.nbytes for file in layout.files]
    for result in results:
        missing[result.storage_data] -= result.size_in_bytes
    for number, nbytes in enumerate(missing):
        if nbytes:
            raise CheckpointError(
                f"cannot publish file {number + 1} of {len(missing)}: {nbytes} of its "
                f"{layout.files[number].nbytes} bytes were not written, among tensors "
                f"{', '.join(map(repr, layout.files[number].fqns[:_NAMED]))}"
            )


def _describe(
    metadata: Metadata, layout: ModelLayout, names: Sequence[str], writer: SafetensorsWriter
) -> None:
    """Has metadata say what is stored: each tensor whole, in one file.

    In place: DCP returns and broadcasts the object that it passed.
    """
    stored: dict[str, Any] = {}
    storage_data: dict[MetadataIndex, Any] = {}
    for fqn, place in layout.places.items():
        size = torch.Size(place.facts.sizes)
        origin = torch.Size([0] * len(size))
        stored[fqn] = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, place.facts.dtype)),
            size,
            [ChunkStorageMetadata(origin, size)],
        )
        storage_data[MetadataIndex(fqn, origin)] = _StorageInfo(
            names[place.file], place.offset, place.facts.nbytes
        )
    metadata.state_dict_metadata = stored
    metadata.storage_data = storage_data
    metadata.storage_meta = dataclasses.replace(writer.storage_meta(), modules=[])
    if isinstance(metadata.planner_data, PlannedPaths):
        metadata.planner_data = metadata.planner_data.copy()
