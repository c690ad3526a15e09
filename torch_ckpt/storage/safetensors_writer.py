"""SafetensorsWriter: saves a model as safetensors files, which all ranks write at the same time.

From the names, dtypes and sizes of all tensors, the coordinator computes the offset of every tensor
(:mod:`torch_ckpt.formats.safetensors.layout`). Each rank then writes its boxes at their final
offsets. The files have hidden names until the coordinator publishes them.

A store accepts a file only as one stream of one rank, in order. If several ranks have parts of the
files, they save a checkpoint in a hidden folder, from which the coordinator writes the files.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from torch_ckpt.commits.late_names import still_missing
from torch_ckpt.commits.model import ModelTransaction, pending_names, relay_of
from torch_ckpt.commits.temporary import remove_temporary
from torch_ckpt.coordination.current_call import claim_commit, current_call
from torch_ckpt.errors import (
    CheckpointError,
    MismatchError,
    UnsupportedError,
    naming,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.safetensors.layout import ModelLayout, TensorFacts
from torch_ckpt.options import IoMode, IoOptions
from torch_ckpt.planning.item_views import ColumnItems, PlannedPaths
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.planning.replica_check import CheckReplicas
from torch_ckpt.planning.replicas import CutItem
from torch_ckpt.planning.ties import tied_names
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.storage.buffers import retained_nbytes_limit
from torch_ckpt.storage.file_jobs import FileJobs, finished, in_threads
from torch_ckpt.storage.present_save import PresentSave
from torch_ckpt.storage.quantizing import (
    Quantize,
    QuantizedValues,
    check_config,
    check_not_stated,
    check_quantize,
    quantized_facts,
    write_config,
)
from torch_ckpt.storage.rank_work import resolve_whole
from torch_ckpt.storage.safetensors_base import (
    BaseFile,
    compare_with_base,
    group_by_base,
    take_files,
)
from torch_ckpt.storage.safetensors_facts import RankFacts, facts_of, ties_of
from torch_ckpt.storage.safetensors_pieces import (
    Piece,
    group_pieces,
    is_sequence,
    pieces_of,
)
from torch_ckpt.storage.safetensors_streams import copy_file_of
from torch_ckpt.storage.stored_values import StoredValues
from torch_ckpt.storage.writer import FastWriter

__all__ = ["Arrangement", "SafetensorsWriter"]

_MAX_NAMED = 3  # Names in an error message.


@dataclass  # Not frozen: a claim is attached.
class _ModelPlan:
    """``SavePlan.storage_data`` of one rank.

    ``layout`` is the encoded layout of all files. The first ``taken`` files are not written. File
    names contain the coordinator's ``file_id``. ``share`` is the ``storage_data`` that reassigns
    replicas to ranks.
    """

    layout: bytes
    taken: int
    file_id: str
    rank: int
    world_size: int
    share: Any


@dataclass(frozen=True)
class Arrangement:
    """The tensors of all ranks in files.

    Attributes:
        layout: Layout of all files.
        taken: The first files, which are taken from the base.
        names: Names of the files, if they differ from Hugging Face's.
        states_boxes: Whether the files state boxes; see :meth:`ModelTransaction.begin`.
    """

    layout: ModelLayout
    taken: Sequence[BaseFile] = ()
    names: Sequence[str] = ()
    states_boxes: bool = False


class _Relay(FastWriter):
    """A writer to a hidden folder. A subclass hides no folder of its own beside it."""


class _ModelSave(PresentSave):
    """One save of a model.

    Attributes:
        layout: On the coordinator, from the plan to the commit.
        taken: Number of files, the first ones, that the coordinator takes from the base.
        relay: Writer of the checkpoint that becomes the model.
        wide: The tensors before they are quantised.
    """

    layout: ModelLayout | None = None
    taken = 0
    relay: FastWriter | None = None
    wide: Sequence[TensorFacts] = ()

    @property
    def model(self) -> ModelTransaction:
        """The transaction of the model."""
        assert isinstance(self.transaction, ModelTransaction)
        return self.transaction

    def end_failed(self) -> None:
        """Ends the relay as well."""
        relay, self.relay = self.relay, None
        if relay is not None:
            relay.end_failed_save()
            if self.commits:
                remove_temporary(relay.location)
        super().end_failed()


class SafetensorsWriter(FastWriter):
    """Saves a model as safetensors files for Hugging Face's loaders.

    Pass it to :func:`torch.distributed.checkpoint.save` or ``async_save``. The state dict may
    contain tensors only. Each tensor is stored whole, however it is sharded. A tensor with several
    names is stored once, under its first name, as Hugging Face does. The header records the other
    names, so :class:`FastReader` can load the tensor by any of them; this needs a
    :class:`FastSavePlanner`, which :func:`torch_ckpt.save` uses by default. The model is one file
    ``model.safetensors``, or several that ``model.safetensors.index.json`` lists. An existing model
    in the directory is replaced atomically.

    On a store, the files have other names, listed by the index, if the model replaces another one
    or ``overwrite`` is false. If several ranks save to a store, the coordinator writes all files,
    from a hidden checkpoint.

    Args:
        path: Directory of the model, on storage that every rank can reach. Created if missing.
        max_shard_nbytes: Maximum size of a file, in bytes. A larger tensor gets its own file.
        sync_files: As for :class:`FastWriter`.
        thread_count: Number of threads that write on each rank.
        overwrite: Whether a save may replace an existing model at ``path``.
        io: Memory budgets and I/O modes. They do not affect the written bytes.
        share_replicas: As for :class:`FastWriter`.
        check_replicas: As for :class:`FastWriter`.
        stager: Stager for ``async_save``. By default, all writers of the process share one.
        base: Directory of an older model that a ``SafetensorsWriter`` wrote; may be ``path``. Files
            whose tensors have not changed since are hard links, and are not written again. Each
            rank reads its tensors of the base to compare them. This needs a
            :class:`FastSavePlanner`. On a store, everything is written.

        quantize: ``"fp8-block-128"``: matrices become float8_e4m3fn with a float32 scale for each
            block of 128 rows and columns, ``x.weight_scale_inv``, and ``config.json`` gets a
            ``quantization_config``. Norms, embeddings, heads, routers, and matrices that are not of
            whole blocks, stay as they are. The ranks save a checkpoint in a hidden folder, from
            which the coordinator writes the files.

    Raises:
        AlreadyExistsError: ``path`` has a model, and ``overwrite`` is false.
        StorageError: The disk or store failed.
        UnsupportedError: ``path`` is a URL of an unregistered scheme, or the state dict contains an
            object or a dtype that safetensors does not support. The message names the FQN. Or
            ``config.json`` describes, or would describe, other tensors than those of the folder.
        ValueError: An argument is out of range.

    Example::

        torch_ckpt.save(model.state_dict(), storage_writer=SafetensorsWriter("model"))
    """

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
        check_replicas: CheckReplicas = "sample",
        stager: SnapshotStager | None = None,
        base: str | os.PathLike[str] | None = None,
        quantize: Quantize | None = None,
    ) -> None:
        check_quantize(quantize)
        if quantize is not None and base is not None:
            raise ValueError("a quantised model has no base: all of it is computed anew")
        super().__init__(
            path,
            sync_files=sync_files,
            thread_count=thread_count,
            overwrite=overwrite,
            io=io,
            share_replicas=share_replicas,
            check_replicas=check_replicas,
            stager=stager,
            base=base,
        )
        if max_shard_nbytes < 1:
            raise ValueError(f"{max_shard_nbytes=} is not positive")
        self.max_shard_nbytes = max_shard_nbytes
        self.quantize: Quantize | None = quantize
        self.arrange: Callable[[object, list[SavePlan]], Arrangement] | None = None
        """Arranges the tensors of all ranks in files, given the path; by size if ``None``."""
        self.before_commit: Callable[[], None] | None = None
        """Called by the coordinator when all files are written."""
        self.ties: Mapping[str, str] = {}
        """Name that the planner does not list -> the listed name to which it is tied."""

    _save: _ModelSave

    def _new_save(self, **facts: Any) -> _ModelSave:
        new_transaction = functools.partial(
            ModelTransaction,
            *(self.location, self.file_id),
            sync=self.sync_files,
            may_replace=self.overwrite,
            name=self.path,
        )
        return _ModelSave(new_transaction, self._files, self.rank, **facts)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds the names of tied tensors to the plan, if :class:`FastSavePlanner` made it."""
        plan = super().prepare_local_plan(plan)
        items: Any = plan.items
        if not isinstance(items, ColumnItems) or items.planner is None:
            return plan
        planner: Any = items.planner()
        report = None
        if self.base is not None and not self._writes_streams:
            report = compare_with_base(Location(self.base).resolved(), items, planner, self.io)
        facts = RankFacts(tied_names(planner.state_dict), report)
        return dataclasses.replace(plan, storage_data=facts)

    def _place(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self.use_collectives:
            raise UnsupportedError(
                f"cannot write {self.path} as safetensors without collectives: all ranks write the "
                "same files"
            )
        if not all(plan.usable for plan in plans):
            raise UnsupportedError(
                f"cannot write {self.path} as safetensors with DefaultSavePlanner("
                "enable_plan_caching=True): it does not send its plans; use the plan cache of "
                "FastSavePlanner"
            )
        with gc_paused():
            arranged = self.arrange(self.path, plans) if self.arrange else self._by_size(plans)
        shares: list[Any] = [plan.storage_data for plan in plans]
        shares = [None if isinstance(share, RankFacts) else share for share in shares]
        save, model, layout = self._save, self._save.model, arranged.layout
        save.layout = layout
        model.begin(
            len(layout.files),
            usual=arranged.names,
            states_boxes=arranged.states_boxes,
            may_appear=not self.quantize and self.before_commit is None,
        )
        if not self.rank:
            model.warn_if_replacing()
        save.taken = take_files(arranged.taken, self.location, model.files, sync=self.sync_files)
        encoded = layout.encode()
        if self._writes_streams or self.quantize:
            plans = [
                dataclasses.replace(plan, storage_data=share)
                for plan, share in zip(plans, shares, strict=True)
            ]
            if self.quantize or len(plans) > 1 or not is_sequence(pieces_of(plans[0], layout)):
                shares = [
                    plan.storage_data for plan in self._begin_relay(self.file_id)._place(plans)
                ]
                encoded = b""
        return [
            dataclasses.replace(
                plan,
                storage_data=_ModelPlan(encoded, save.taken, self.file_id, rank, len(plans), share),
            )
            for rank, (plan, share) in enumerate(zip(plans, shares, strict=True))
        ]

    def _by_size(self, plans: list[SavePlan]) -> Arrangement:
        """Fills files up to ``max_shard_nbytes``, and takes unchanged files of the base."""
        ties = {**self.ties, **ties_of(plans)}
        facts = [facts for facts in facts_of(plans) if facts.fqn not in ties]
        # These fail before any tensor is written.
        if self.quantize:
            check_config(self.location, facts)
            self._save.wide, facts = facts, quantized_facts(facts)
        elif self.before_commit is None:
            check_not_stated(self.location, facts)
        options: Any = {"max_shard_nbytes": self.max_shard_nbytes, "omitted": ties}
        reports = [getattr(plan.storage_data, "base", None) for plan in plans]
        groups = group_by_base(facts, reports, **options)
        layout = ModelLayout.of(groups.facts, groups=groups.lengths, **options)
        return Arrangement(layout, groups.taken)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if not isinstance(plan.storage_data, _ModelPlan):
            raise UnsupportedError(
                f"cannot write {self.path} as safetensors: the planner has dropped the file layout "
                "from this rank's plan"
            )
        model_plan = plan.storage_data
        plan = dataclasses.replace(plan, storage_data=model_plan.share)
        if not model_plan.layout:
            return self._begin_relay(model_plan.file_id)._write(plan, planner)
        with gc_paused():
            layout = ModelLayout.decode(model_plan.layout)
            pieces = pieces_of(plan, layout)
        for number in range(model_plan.rank, len(layout.files), model_plan.world_size):
            pieces.append(Piece(number, 0, len(layout.files[number].header)))
        pieces = [piece for piece in pieces if piece.file >= model_plan.taken]
        if not pieces:
            return []
        pieces.sort(key=lambda piece: (piece.file, piece.offset))
        groups = group_pieces(pieces, self.thread_count, whole_files=self._writes_streams)
        nbytes = sum(piece.nbytes for piece in pieces)
        how, target = self._options, self.location
        pools = self._files.pools(len(groups), nbytes, how, target)
        names = self._save.model.files or pending_names(len(layout.files), model_plan.file_id)

        def write_group(number: int) -> list[WriteResult]:
            writer = _PieceWriter(self, planner, layout, names, pools[number], jobs)
            return [
                writer.write(file, list(file_pieces))
                for file, file_pieces in itertools.groupby(groups[number], lambda piece: piece.file)
            ]

        if not (self._save.commits or self._writes_streams):
            used = sorted({names[piece.file] for piece in pieces})
            # If one never appears, the error of the job that opens it names it.
            still_missing([self.location / name for name in used], "the coordinator")
        try:
            with self._files.writing(target, nbytes, how) as jobs:
                results = in_threads(write_group, len(groups), jobs)
            return list(itertools.chain.from_iterable(results))
        except BaseException as error:
            # On a full disk, the files would make the next save fail. With DCP, no rank knows when
            # all have ended, so ranks that still write these files may fail because of the removal.
            if current_call() is None:
                others = model_plan.world_size > 1
                self._save.abandon(names, error, may_others_begin=others)
            elif self._save.model.is_ended(names, error):
                raise self._save.model.files_are_missing(error) from error
            raise

    @property
    def _writes_streams(self) -> bool:
        return not self.location.file_system.writes_at_offsets

    def _begin_relay(self, file_id: str) -> FastWriter:
        """Returns the writer of the checkpoint that several ranks save, and that becomes the model.

        It has the options of this writer, the staged tensors, and a hidden folder.
        """
        relay = self._save.relay
        if relay is None:
            relay = self._save.relay = _Relay(
                relay_of(self.location, file_id).checkpoint_id,
                sync_files=self.sync_files,
                thread_count=self.thread_count,
                io=self.io,
                check_replicas=self.check_replicas,
            )
            relay._be_part_of(self, file_id)
        return relay

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the files, then removes the files of the replaced model."""
        self._save.phases.begin("committing")
        save, model, layout = self._save, self._save.model, self._save.layout
        assert layout is not None
        try:
            if save.relay is not None:
                self._finish_relay(save.relay, layout, metadata, results)
            else:
                _check_complete(layout, save.taken, itertools.chain.from_iterable(results))
                claim_commit()
            model.check(model.files)
        except BaseException as error:
            # A cached plan may have caused the failure.
            plan_cache().forget()
            save.abandon((), error)
            raise
        if self.quantize:
            write_config(self.location, save.wide, {})
        if self.before_commit is not None:
            self.before_commit()
        names = model.commit(layout)
        save.layout = None
        _describe(metadata, layout, names, self)
        nbytes = sum(file.nbytes for file in layout.files)
        self._save.log(nbytes, is_staged=self.staging.is_staged)

    def _finish_relay(
        self,
        relay: FastWriter,
        layout: ModelLayout,
        metadata: Metadata,
        results: list[list[WriteResult]],
    ) -> None:
        """Commits the checkpoint, writes the files of the model from it, and removes it."""
        relay._save.ranks = 0  # Only the model is logged.
        relay.finish(metadata, results)
        load = StoredValues(relay.location, io=self.io).load
        if self.quantize:
            load = QuantizedValues(load, self._save.wide).load
        nbytes = sum(file.nbytes for file in layout.files)
        (pool,) = self._files.pools(1, nbytes, self._options, self.location)
        for name, file in zip(self._save.model.files, layout.files, strict=True):
            job = self._job(name, file.nbytes, pool)
            with finished(job):
                copy_file_of(load, file, layout, job)
            self._files.io_mode = IoMode.of(job)
        remove_temporary(relay.location)
        self._save.relay = None

    def _job(self, name: str, nbytes: int, pool: _native.BufferPool) -> _native.SharedFileJob:
        """Begins to write this rank's part of a file."""
        path = self.location / name
        return _native.SharedFileJob(
            *(path.file_system, path.path, nbytes, pool),
            *(self.io.direct, self.sync_files, self._options.niceness),
        )


@dataclass(frozen=True)
class _PieceWriter:
    """Writes pieces in one thread."""

    writer: SafetensorsWriter
    planner: SavePlanner
    layout: ModelLayout
    names: Sequence[str]
    pool: _native.BufferPool
    jobs: FileJobs

    def write(self, file: int, pieces: Sequence[Piece]) -> WriteResult:
        writer, model_file = self.writer, self.layout.files[file]
        job = writer._job(self.names[file], model_file.nbytes, self.pool)
        self.jobs.begin(job)
        with finished(job):
            for batch in self._batches(pieces, job, model_file.header):
                job.write(batch)
        writer._files.io_mode = IoMode.of(job)
        nbytes = sum(piece.nbytes for piece in pieces)
        return WriteResult(MetadataIndex(self.names[file]), nbytes, file)

    def _batches(
        self, pieces: Sequence[Piece], job: _native.SharedFileJob, header: bytes
    ) -> Iterator[list[tuple[_native.TensorView, int, Sequence[int], Sequence[int]]]]:
        """Yields batches of boxes. Bounds the temporary copies of tensors in each batch."""
        batch: list[tuple[_native.TensorView, int, Sequence[int], Sequence[int]]] = []
        retained_nbytes, max_retained_nbytes = 0, retained_nbytes_limit(self.writer.io)
        for piece in pieces:
            if piece.item is None or piece.place is None or piece.item.tensor_data is None:
                job.put(0, header)
                continue
            tensor, is_live = self._tensor_of(piece.item)
            view = _tensor_view.view(tensor, piece.item.index.fqn, writable=False)
            chunk = piece.item.tensor_data.chunk
            batch.append((view, piece.place.offset, piece.place.facts.sizes, chunk.offsets))
            if is_live:
                continue
            # A view of rows references the whole storage.
            retained_nbytes += tensor.untyped_storage().nbytes()
            del tensor, view
            if retained_nbytes >= max_retained_nbytes:
                yield batch
                batch, retained_nbytes = [], 0
        yield batch

    def _tensor_of(self, item: WriteItem) -> tuple[torch.Tensor, bool]:
        """Returns an item as a plain tensor, and whether the tensor's memory is permanent."""
        tensor = resolve_whole(self.planner, item)
        fqn, data = item.index.fqn, item.tensor_data
        assert data is not None
        kind = _tensor_view.tensor_kind(tensor)
        if kind == _tensor_view.TensorKind.TORCH_ONLY:
            raise UnsupportedError(
                f"cannot store {fqn!r} as safetensors: only torch can store "
                f"{type(tensor).__name__} of {tensor.dtype}"
            )
        whole = item.whole if isinstance(item, CutItem) and item.whole is not None else item
        assert whole.tensor_data is not None
        sizes = whole.tensor_data.chunk.sizes
        # A shard without elements may have any sizes.
        has_sizes = tensor.size() == sizes or not (tensor.numel() or sizes.numel())
        if tensor.dtype != data.properties.dtype or not has_sizes:
            raise MismatchError(
                f"cannot store {fqn!r}: the planner resolved it to {tensor.dtype} of "
                f"{list(tensor.size())}, and planned {data.properties.dtype} of {list(sizes)}"
            )
        is_live = not is_temporary(tensor) and kind == _tensor_view.TensorKind.PLAIN
        if isinstance(item, CutItem):
            tensor = item.rows_of(tensor)
        if kind == _tensor_view.TensorKind.PLAIN:
            return tensor, is_live
        with naming("store", fqn):
            return to_plain(tensor), is_live


def _check_complete(layout: ModelLayout, taken: int, results: Iterable[WriteResult]) -> None:
    """Checks that the ranks have written all bytes of all files except the taken ones."""
    missing = [0 if n < taken else file.nbytes for n, file in enumerate(layout.files)]
    for result in results:
        missing[result.storage_data] -= result.size_in_bytes
    for number, nbytes in enumerate(missing):
        if nbytes:
            raise CheckpointError(
                f"cannot publish file {number + 1} of {len(missing)}: {nbytes} of its "
                f"{layout.files[number].nbytes} bytes were not written, among tensors "
                f"{', '.join(map(repr, layout.files[number].fqns[:_MAX_NAMED]))}"
            )


def _describe(
    metadata: Metadata, layout: ModelLayout, names: Sequence[str], writer: SafetensorsWriter
) -> None:
    """Updates metadata to the stored form: each tensor is whole and in one file.

    The update is in place, because DCP returns and broadcasts the object that it passed.
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
