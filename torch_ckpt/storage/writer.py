"""FastWriter: stock DCP's storage writer, through the native engine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    SerializationFormat,
    _StoragePrefix,
    _StorageWriterTransforms,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.coordination.group import claim_commit
from torch_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    StorageError,
    UnsupportedError,
    portable_errors,
)
from torch_ckpt.filesystems.location import Location, can_reach
from torch_ckpt.formats.committed import INDEX_MARK
from torch_ckpt.formats.object_pickles import warn_of_refused
from torch_ckpt.options import IoMode, IoOptions
from torch_ckpt.planning.item_views import (
    AssignedItems,
    ColumnItems,
    GlobalPlanEntry,
    PlannedItems,
    PlannedPaths,
)
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.planning.replicas import (
    RankItems,
    check_dtype,
    list_rank_items,
    merge_cuts,
    share_out,
)
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.staging.staging_writer import StagingWriter
from torch_ckpt.storage.buffers import STOCK_COPY_AHEAD, buffer_pools
from torch_ckpt.storage.commit_files import check_complete, commit_files, planned_commit_files
from torch_ckpt.storage.data_file import write_data_file
from torch_ckpt.storage.gc import remove_files, stale_files
from torch_ckpt.storage.rank_work import RankWork, split, work_for
from torch_ckpt.storage.written_file import WrittenFile

__all__ = ["FastWriter"]

_METADATA = ".metadata"
_INDEX = ".index"


class FastWriter(StagingWriter):
    """Writes a checkpoint through the native engine, as files stock DCP can read.

    Pass it to :func:`torch.distributed.checkpoint.save` or ``async_save`` in place of
    ``FileSystemWriter``, whose arguments it takes in the same order. Each rank packs its shards
    into a bounded ring of buffers and streams them to its own ``.distcp`` files; the coordinator
    then commits by publishing ``.metadata``. Until that moment ``path`` holds no new checkpoint,
    and a crash leaves whatever was committed there before.

    Args:
        path: Directory of the checkpoint, on storage every rank can reach. Created if missing. A
            URL, if its scheme is :func:`registered <torch_ckpt.filesystems.location.register>`.
        single_file_per_rank: Whether a rank writes ``thread_count`` files, or else one for each
            tensor and object.
        sync_files: Whether :func:`save` returns only when the bytes would survive a power cut.
            Otherwise they survive the end of this process and the commit is as atomic, but a power
            cut soon after may cost the new checkpoint and the one that it replaced.
        thread_count: Files that a rank writes at a time, each from a thread of its own. One fills
            most disks.
        per_thread_copy_ahead: Bytes that may be copied ahead of the disk by each thread. Other than
            the default it takes the place of ``io.buffer_nbytes / thread_count``.
        cache_staged_state_dict: Without effect: memory that ``async_save`` stages in is kept.
        overwrite: Whether a checkpoint already committed at ``path`` may be replaced. The old one
            stays readable until the new one commits.
        _extensions: Stream transforms such as ``ZStandard``, applied to each item as stock does.
        serialization_format: Only ``SerializationFormat.TORCH_SAVE``.
        io: Tuning. No field of it changes which bytes are written.
        share_replicas: Whether what several ranks hold is shared out so that all write about as
            much: each to the rank with the least to write, and tensors beyond a rank's fair share
            cut by rows. Values that differ from rank to rank, though one FQN and box promise the
            same, may then be stored of several. Otherwise, and with DCP's plan caching, the
            planner's choice of ranks stands.
        stager: Stages for ``async_save``; one for the whole process if ``None``.

    Raises:
        AlreadyExistsError: ``path`` is committed and ``overwrite`` is false.
        StorageError: The disk or store failed. ``error.retriable`` tells whether the same save may
            be tried again. DCP gathers it into a ``CheckpointException`` naming the rank.
        UnsupportedError: ``path`` is a URL whose scheme nobody has registered, or
            ``serialization_format`` is another one.

    Example::

        state = {"model": model.state_dict(), "step": 100}
        dcp.save(state, storage_writer=FastWriter("run/step-100"))

    Note:
        Saves into one directory must not overlap: the later one to end takes the files of the other
        for leftovers. The other then raises, but what it replaced is gone.

        One writer serves one save at a time. Saves one after another should share a writer: its
        buffers are kept and reused.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = STOCK_COPY_AHEAD,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        io: IoOptions | None = None,
        share_replicas: bool = True,
        stager: SnapshotStager | None = None,
    ) -> None:
        super().__init__(stager)
        if thread_count < 1:
            raise ValueError(f"{thread_count=} is not positive")
        if per_thread_copy_ahead < 0:
            raise ValueError(f"{per_thread_copy_ahead=} is negative")
        if serialization_format != SerializationFormat.TORCH_SAVE:
            raise UnsupportedError(
                f"cannot write {path} as {serialization_format}: a .distcp file holds torch.save "
                "slices (stock DCP uses SAFETENSORS for its Hugging Face writer only)"
            )
        self.location = Location(path)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.overwrite = overwrite
        self.transforms = _StorageWriterTransforms(_extensions)
        self.serialization_format = serialization_format
        self.io = io or IoOptions()
        self.share_replicas = share_replicas
        self.io_mode: IoMode | None = None
        """How this process last wrote, fallbacks included; ``None`` before that."""
        self.save_id = _new_save_id()
        self._began = False  # Whether a save has begun under this id.
        self._writing = threading.Lock()
        self.rank: int | None = None
        self.use_collectives = True
        self._pools: list[_native.BufferPool] = []
        self._found: frozenset[str] = frozenset()  # Names in the directory before this save.
        self._plan: GlobalPlanEntry | None = None  # The coordinator's, of columns.

    def __getstate__(self) -> dict[str, Any]:
        # Travels to the process that saves in the background: without native handles.
        native = dict.fromkeys(("_plan", "_writing"))
        return super().__getstate__() | native | {"_pools": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy's data files must not meet those of the original, or of other copies.
        super().__setstate__(state)
        self._writing = threading.Lock()
        self.save_id = _new_save_id()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this writer can write there."""
        return can_reach(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint."""
        return self.path

    @property
    def path(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint: a path of this machine, or else a URL."""
        return self.location.checkpoint_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turns to another checkpoint, or to a new save of the same."""
        self._check_idle()
        if checkpoint_id:
            self.location = Location(checkpoint_id)
        self.save_id = _new_save_id()
        self._began = False

    def storage_meta(self) -> StorageMeta:
        """What ``.metadata`` says of the storage."""
        self._begin_staged_save()
        return StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=self.save_id, modules=[INDEX_MARK]
        )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save on this rank."""
        self._check_idle()
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        if self._began:
            # DCP resets a writer only when it is given a checkpoint id with it, and names of data
            # files must never recur.
            self.save_id = _new_save_id()
        self._began = True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Creates the directory; refuses one that is committed unless ``overwrite``."""
        self.location.create_directories()
        self._found = frozenset(self.location.names())
        if not self.overwrite and not self._committed_names.isdisjoint(self._found):
            raise AlreadyExistsError(
                f"a checkpoint is already committed in {self.path}, and overwrite is false"
            )
        items: Any = plan.items
        if isinstance(items, ColumnItems) and items.token is not None:
            # Nobody looks at items on the coordinator, unless a subclass does.
            items.by_token = type(self).prepare_global_plan is FastWriter.prepare_global_plan
            if items.by_token and isinstance(plan.planner_data, PlannedPaths):
                plan = dataclasses.replace(plan, planner_data=None)
        if not isinstance(items, PlannedItems):  # Their planner has.
            for item in items:
                check_dtype(item)
        if self.rank is not None and not self.use_collectives:
            return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        if (
            self.share_replicas
            and self.rank is not None
            and dist.is_initialized()
            and plan.usable
            and plan.storage_data is None
            and not isinstance(plan.items, PlannedItems)  # Their planner shares them out.
        ):
            with gc_paused():
                held = list_rank_items(plan.items, self.rank)
            if held is not None:
                return dataclasses.replace(plan, storage_data=held.as_storage_data())
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Shares out replicas, and gives every rank the prefix of its data files.

        Raises:
            MismatchError: Ranks disagree on the dtype or sizes of a tensor.
        """
        with gc_paused():
            plans = share_out(plans)
        return self._place(plans)

    def _place(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, each with where its rank is to write."""
        columns: list[Any] = [plan.items for plan in plans]
        self._plan = next((c.plan for c in columns if isinstance(c, AssignedItems)), None)
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))
            if plan.storage_data is None or RankItems.beside(plan) is not None
            else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items; returns when they are in the files (and synced)."""
        self._check_idle()
        future: Future[list[WriteResult]] = Future()
        with self._writing, portable_errors(), self._writing_staged():
            future.set_result(self._write(plan, planner))
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Writes this rank's files; those of tensors that were not staged come first."""
        work = work_for(plan, planner, self.transforms, can_wait=self._can_wait)
        nbytes = sum(work.work.nbytes)
        number, prefix = itertools.count(), plan.storage_data.prefix
        first, others = (
            {f"{prefix}{next(number)}_{self.save_id}.distcp": part for part in parts}
            for parts in split(work, self.thread_count if self.single_file_per_rank else None)
        )
        finished: list[str] = []
        try:
            results = self._write_files(first, nbytes, planner, finished)
            self._first_are_written()
            results += self._write_files(others, nbytes, planner, finished)
            if finished and self.sync_files:
                self.location.sync()
        except BaseException:
            self._remove_files(finished)
            raise
        self._wrote_share(plan, planner)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: publishes ``.metadata`` and its index, then removes what they have replaced."""
        storage_data: dict[MetadataIndex, Any] = {}
        written: list[tuple[int, WrittenFile]] = []  # With the rank.
        for rank, of_rank in enumerate(results):
            for result in of_rank:
                if isinstance(result.storage_data, WrittenFile):
                    written.append((rank, result.storage_data))
                else:
                    storage_data[result.index] = result.storage_data
        # In place: DCP returns and broadcasts the object that it passed.
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = storage_data
        metadata.storage_meta = self.storage_meta()
        files = {file.name for _, file in written}
        try:
            plan, self._plan = self._plan, None
            if plan is not None and any(file.extents is not None for _, file in written):
                metadata_bytes, index = planned_commit_files(
                    metadata, plan, written, save_id=self.save_id
                )
            else:
                if isinstance(metadata.planner_data, PlannedPaths):
                    metadata.planner_data = metadata.planner_data.copy()
                merge_cuts(metadata, [cut for _, file in written for cut in file.cuts])
                check_complete(metadata)
                metadata_bytes, index = commit_files(
                    metadata, [file for _, file in written], save_id=self.save_id
                )
            warn_of_refused({f: c for _, file in written for f, c in file.refused.items()})
            claim_commit()
            self._raise_if_missing(self._missing_files(files))
        except BaseException:
            # Whatever is wrong may be wrong with a plan that was used again.
            plan_cache().forget()
            # On a disk that is full they would be in the way of every save to come.
            self._remove_files(files)
            raise
        self.location.file_system.commit(
            self.location.path,
            self._own_name(_METADATA),
            self._own_name(_INDEX),
            metadata_bytes,
            index,
            self.save_id,
            sorted(files),
            self.sync_files,
        )
        # Another save may have begun while this one was going on, and have removed its files.
        missing: list[str] = []
        with contextlib.suppress(CheckpointError):  # Nobody can tell: what is committed stands.
            missing = self._missing_files(files)
        self._raise_if_missing(missing)
        alone = None if self.use_collectives else self.rank
        self._remove_files(stale_files(self._found, files, alone))

    def _write_files(
        self, files: dict[str, RankWork], nbytes: int, planner: SavePlanner, finished: list[str]
    ) -> list[WriteResult]:
        """Writes files of the given names and parts, ``thread_count`` at a time.

        Adds to ``finished`` the name of each that is whole; one that fails removes itself.
        """
        workers = min(self.thread_count, len(files))
        if workers == 0:
            return []
        pools = self._take_pools(workers, nbytes)

        def write_every(first: int) -> list[WriteResult]:
            results: list[WriteResult] = []
            for name in list(files)[first::workers]:
                written, file, self.io_mode = write_data_file(
                    *(self.location, name, files[name], planner),
                    transforms=self.transforms,
                    pool=pools[first],
                    io=self.io,
                    sync=self.sync_files,
                    niceness=self._niceness,
                )
                finished.append(name)
                results += written
                # Travels to the coordinator with the rest.
                results.append(WriteResult(MetadataIndex(name), 0, file))
            return results

        if workers == 1:
            return write_every(0)
        with ThreadPoolExecutor(workers, "torch_ckpt-write") as executor:
            return list(itertools.chain.from_iterable(executor.map(write_every, range(workers))))

    def _check_idle(self) -> None:
        if self._writing.locked():
            raise CheckpointError(
                f"this writer is still writing {self.path}: wait for that save, or use another "
                "writer"
            )

    @property
    def _committed_names(self) -> frozenset[str]:
        """Of these, a directory that holds a checkpoint has one."""
        return frozenset({self._own_name(_METADATA)})

    def _own_name(self, name: str) -> str:
        """``.metadata`` or ``.index``, which every rank has of its own if none coordinates."""
        return name if self.use_collectives or self.rank is None else f"__{self.rank}{name}"

    def _take_pools(self, count: int, nbytes: int) -> list[_native.BufferPool]:
        self._pools = buffer_pools(self._pools, count, nbytes, self.io, self.per_thread_copy_ahead)
        return self._pools

    def _missing_files(self, files: Iterable[str]) -> list[str]:
        """Data files of this save that another one has removed meanwhile."""
        unlisted = set(files).difference(self.location.names())
        # Asked for one by one as well: a network file system may list an old state of a folder.
        return sorted(name for name in unlisted if not (self.location / name).exists())

    def _raise_if_missing(self, missing: list[str]) -> None:
        if missing:
            raise StorageError(
                f"cannot commit {self.path}: {len(missing)} data files written by this save are "
                f"gone, {missing[0]} among them; is another save writing to the same directory?"
            )

    def _remove_files(self, names: Iterable[str]) -> None:
        remove_files(self.location, names)


def _new_save_id() -> str:
    return secrets.token_hex(8)
