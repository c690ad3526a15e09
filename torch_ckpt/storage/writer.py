"""FastWriter: a storage writer for stock DCP that saves through the native engine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystem,
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
from torch_ckpt.commits.transaction import Claim
from torch_ckpt.coordination.current_call import current_call
from torch_ckpt.coordination.group import claim_commit
from torch_ckpt.coordination.orchestrate import calling_planner, is_replanning
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.errors import (
    CheckpointError,
    UnsupportedError,
    portable_errors,
)
from torch_ckpt.filesystems.location import Location, can_reach, name_of
from torch_ckpt.formats.allowed_classes import warn_of_refused
from torch_ckpt.formats.committed import INDEX_MARK, uuid_of
from torch_ckpt.options import IoMode, IoOptions
from torch_ckpt.planning.dtensor_boxes import save_plan_in_boxes
from torch_ckpt.planning.item_views import (
    AssignedItems,
    ColumnItems,
    GlobalPlanEntry,
    PlannedItems,
    PlannedPaths,
)
from torch_ckpt.planning.placeholders import check_placeholders
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.planning.replica_check import CheckReplicas, as_mode
from torch_ckpt.planning.replicas import (
    RankItems,
    are_sent,
    check_dtype,
    list_rank_items,
    merge_cuts,
    share_out,
)
from torch_ckpt.planning.value_digests import THREADS, has_other_ranks
from torch_ckpt.records.record import note
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.storage.buffers import STOCK_COPY_AHEAD, buffer_pools
from torch_ckpt.storage.commit_files import check_complete, commit_files, planned_commit_files
from torch_ckpt.storage.data_file import WrittenFile, write_data_file
from torch_ckpt.storage.directory_writer import DirectoryWriter
from torch_ckpt.storage.file_jobs import FileJobs, in_threads
from torch_ckpt.storage.progress import Phases, is_first, progress_bar
from torch_ckpt.storage.rank_reuse import Taken, take_unchanged
from torch_ckpt.storage.rank_work import RankWork, refuse_objects, split, work_for
from torch_ckpt.storage.reuse import MAX_FILES

__all__ = ["FastWriter"]


class FastWriter(DirectoryWriter):
    """Saves checkpoints in files that stock DCP can read.

    Pass it to :func:`torch.distributed.checkpoint.save` or ``async_save`` in place of
    ``FileSystemWriter``. Its first arguments are those of ``FileSystemWriter``, in the same order.

    Each rank streams its shards through a bounded ring of buffers to its own ``.distcp`` files. The
    coordinator then commits the checkpoint by publishing ``.metadata``. Before the commit, readers
    find no new checkpoint at ``path``. After a crash, the previous checkpoint is still there.

    Args:
        path: Directory of the checkpoint, on storage that every rank can reach. May be a URL of a
            store, such as ``s3://bucket/run/step-100``.
            A relative path is that of the present working directory. Links in the path are resolved
            once for each save, when it begins. A missing directory appears with the commit, where
            the file system renames directories. To write other files there before the commit,
            create it first. Subclasses of ``FastWriter`` may write other files, so they create it
            when the save begins.
        single_file_per_rank: Whether a rank writes ``thread_count`` files. Otherwise it writes one
            file for each tensor and object.
        sync_files: Whether a save returns only after its bytes would survive a power cut. If false,
            the commit is still atomic and survives the end of the process. But a power cut soon
            after the save may destroy both the new checkpoint and the replaced one.
        thread_count: Number of files that a rank writes at a time, each in its own thread. One
            thread saturates most disks.
        per_thread_copy_ahead: Bytes that each thread may copy ahead of the disk. A value other than
            the default replaces ``io.buffer_nbytes / thread_count``.
        cache_staged_state_dict: No effect. ``async_save`` always reuses its staging memory.
        overwrite: Whether a save may replace a committed checkpoint at ``path``. The old checkpoint
            stays readable until the new one commits.
        _extensions: Stream transforms such as ``ZStandard``, applied to each item as in stock DCP.
        serialization_format: Must be ``SerializationFormat.TORCH_SAVE``.
        io: Memory budgets and I/O modes. They do not change which bytes are written.
        share_replicas: Whether to balance the bytes that ranks write. Each replica goes to the rank
            with the least to write, and equal replicas of tensors larger than a fair share are cut
            by rows. If false, or with DCP's plan caching, the planner's assignment is unchanged.
            This option has no effect on :class:`FastSavePlanner`, which balances and cuts unless it
            has ``dedup_save_to_lowest_rank``.
        check_replicas: How the ranks find out whether their replicas are equal: by a ``"sample"``
            of up to 8 KiB of each tensor, by the ``"full"`` tensors, or ``"off"``. A tensor whose
            values differ is stored whole from one replica, and the coordinator warns of it once.
            Values that a planner creates when they are written are not compared, and not cut. With
            ``"off"``, the stored tensor may mix the rows of the ranks. A
            :class:`FastSavePlanner` that you pass has an option of its own.
        stager: Stager for ``async_save``. By default, all writers of the process share one.
        base: Directory of an older checkpoint, whose tensors that have not changed are not written
            again: their files appear by hard link, or by a copy within the store. The base must
            have been saved with a ``base`` as well, since it has digests then. For the first save,
            pass ``path`` itself, or another directory without a checkpoint.

    Raises:
        AlreadyExistsError: ``path`` has a committed checkpoint, and ``overwrite`` is false.
        StorageError: The disk or store failed. ``error.retriable`` is true if the same save may
            succeed when it is tried again. DCP wraps the error in a ``CheckpointException`` that
            names the rank.
        UnsupportedError: ``path`` is a URL of an unregistered scheme, or ``serialization_format``
            is not supported.
        ValueError: An argument is out of range.

    Example::

        state = {"model": model.state_dict(), "step": 100}
        dcp.save(state, storage_writer=FastWriter("run/step-100"))

    Note:
        Saves to one directory should not overlap in time. If they do, the directory has a whole
        checkpoint at any time. A save that another one has replaced before its commit raises an
        error that names the other save.

        A writer runs one save at a time. Use the same writer for consecutive saves, so that they
        reuse its buffers.
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
        check_replicas: CheckReplicas = "sample",
        stager: SnapshotStager | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(path, stager)
        if thread_count < 1:
            raise ValueError(f"{thread_count=} is not positive")
        if per_thread_copy_ahead < 0:
            raise ValueError(f"{per_thread_copy_ahead=} is negative")
        if serialization_format != SerializationFormat.TORCH_SAVE:
            raise UnsupportedError(
                f"cannot write {path} as {serialization_format}: .distcp files consist of "
                "torch.save slices (stock DCP uses SAFETENSORS for its Hugging Face writer only)"
            )
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.overwrite = overwrite
        self.transforms = _StorageWriterTransforms(_extensions)
        self.serialization_format = serialization_format
        self.io = io or IoOptions()
        self.share_replicas = share_replicas
        self.check_replicas = as_mode(check_replicas)
        self.base: str | os.PathLike[str] | None = None if base is None else name_of(base)
        """Directory of the older checkpoint, if there is one."""
        self.io_mode: IoMode | None = None
        """I/O mode of the last file that this process wrote; ``None`` before the first file."""
        self.given_save_id: str | None = None
        """The ``save_id`` of the DCP writer that this one replaces; each checkpoint has it."""
        self.file_id = secrets.token_hex(8)
        self._began = False  # Whether a save has begun under this id.
        self._writing = threading.Lock()
        self._ranks = 0  # Number of ranks that save together; 0 except on the coordinator.
        self._pools: list[_native.BufferPool] = []
        self._jobs: FileJobs | None = None  # While files are written.
        self._nbytes = self._written_nbytes = 0  # Bytes to write in the last save, and written.
        self._plan: GlobalPlanEntry | None = None  # On the coordinator, if planned in columns.
        self._phases = Phases("planning")
        self._numbers: dict[str, int] = {}  # Prefix -> number of its last file.

    def __getstate__(self) -> dict[str, Any]:
        # A process that saves in the background gets a copy without native handles.
        native = dict.fromkeys(("_plan", "_writing", "_transaction", "_jobs"))
        return super().__getstate__() | native | {"_pools": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The new id gives the copy's data files names that no other writer uses.
        super().__setstate__(state)
        self._writing = threading.Lock()
        self.file_id = secrets.token_hex(8)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether this writer can write to the path or URL."""
        return can_reach(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint."""
        return self.path

    @property
    def save_id(self) -> str:
        """The UUID of the present save. It is also ``storage_meta.save_id`` of the checkpoint."""
        return self.given_save_id or uuid_of(self.file_id)

    @property
    def fs(self) -> FileSystem:
        """Stock's access to local files, for programs that use that of ``FileSystemWriter``."""
        return FileSystem()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares the writer for another checkpoint, or for a new save to the same directory."""
        self._check_idle()
        if checkpoint_id:
            self._directory.change(checkpoint_id)
            self.location = self._directory.absolute
        self.file_id = secrets.token_hex(8)
        self._began = False

    def storage_meta(self) -> StorageMeta:
        """Returns the ``storage_meta`` of ``.metadata``."""
        self._begin_staged_save()
        return StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=self.save_id, modules=[INDEX_MARK]
        )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save on this rank."""
        watch_storage()
        self._check_idle()
        if not is_replanning():  # Then the save has begun already.
            self.location = self._directory.enter()
        self.end_failed_save()  # A former save that has failed on another rank.
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._commits = is_coordinator or not self.use_collectives
        self._ranks = int(is_coordinator)
        if self._began:
            # DCP calls reset only if it also has a checkpoint id. Each save needs an id of its own,
            # since the names of data files must be unique.
            self.file_id = secrets.token_hex(8)
        self._began = True
        self._phases = Phases("planning")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds the rank's items to the plan for the coordinator.

        Raises:
            UnsupportedError: DCP's own function would pickle a ``Stateful`` below the top level.
        """
        refuse_objects(calling_planner())
        if not isinstance(plan.items, PlannedItems):
            plan = save_plan_in_boxes(plan, calling_planner())
        items: Any = plan.items
        self._set_values(items)
        if isinstance(items, ColumnItems) and items.token is not None:
            # The coordinator does not read the items, except in a subclass.
            items.by_token = type(self).prepare_global_plan is FastWriter.prepare_global_plan
            if items.by_token and isinstance(plan.planner_data, PlannedPaths):
                plan = dataclasses.replace(plan, planner_data=None)
        if not isinstance(items, PlannedItems):  # FastSavePlanner has already checked its items.
            for item in items:
                check_dtype(item)
            check_placeholders(getattr(calling_planner(), "state_dict", None) or {})
        if self.rank is not None and not self.use_collectives:
            return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        if (
            self.share_replicas
            and self.rank is not None
            and dist.is_initialized()
            and plan.usable
            and plan.storage_data is None
            and not isinstance(plan.items, PlannedItems)  # FastSavePlanner assigns these itself.
        ):
            mode = self.check_replicas if has_other_ranks() else "off"
            with gc_paused():
                rank_items = list_rank_items(plan.items, self.rank, calling_planner(), mode)
            if rank_items is not None:
                return dataclasses.replace(plan, storage_data=rank_items.as_storage_data())
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assigns replicas to ranks, and adds each rank's file name prefix to its plan.

        Raises:
            AlreadyExistsError: A checkpoint is committed and ``overwrite`` is false.
            MismatchError: Ranks disagree on the dtype or sizes of a tensor.
        """
        self._ranks = len(plans)
        with gc_paused():
            plans = share_out(plans, compare=self.check_replicas != "off")
        placed = self._place(plans)
        assert self._transaction is not None
        claim = self._transaction.claim if are_sent(plans) else None
        if claim is None:
            return placed
        return [
            dataclasses.replace(plan, storage_data=claim.beside(plan.storage_data))
            for plan in placed
        ]

    def _place(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the save, and returns the plans, each with the file name prefix of its rank."""
        columns: list[Any] = [plan.items for plan in plans]
        self._plan = next((c.plan for c in columns if isinstance(c, AssignedItems)), None)
        placed = [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))
            if plan.storage_data is None or RankItems.beside(plan) is not None
            else plan
            for rank, plan in enumerate(plans)
        ]
        self._begin(can_hide=are_sent(plans))
        return placed

    @property
    def _hides(self) -> bool:
        # A subclass may write files of its own to the directory while it saves.
        return type(self) is FastWriter

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items. Returns after the files are written (and synced)."""
        self._check_idle()
        future: Future[list[WriteResult]] = Future()
        self._phases.begin("writing")
        with self._writing, portable_errors(), self._writing_staged():
            self._enter(Claim.of(plan.storage_data))
            future.set_result(self._write(plan, planner))
        return future

    def written_nbytes(self) -> tuple[int, int]:
        """Returns the bytes that this rank has written of its last save, and those in all."""
        jobs = self._jobs
        return self._written_nbytes if jobs is None else jobs.done_nbytes(), self._nbytes

    @contextlib.contextmanager
    def _progress(self, nbytes: int) -> Iterator[FileJobs]:
        """Shows a progress bar on the first rank, unless the save is in the background.

        The value receives the job of each file.
        """
        call = current_call()
        jobs = FileJobs(None if call is None else call.cancel_on_failure)
        self._jobs, self._nbytes = jobs, nbytes
        if not is_first(self._ranks) or self._staged is not None:
            yield jobs
            return

        with progress_bar("saving", self.location, lambda: nbytes, jobs.done_nbytes):
            yield jobs

    def _end_jobs(self) -> None:
        """Adds to the record what was written, also by a save that has failed.

        Jobs refer to their call, and so to the state of a failed save: they do not stay.
        """
        jobs, self._jobs = self._jobs, None
        if jobs is not None:
            self._written_nbytes = jobs.done_nbytes()
            threads = max(min(self.thread_count, len(self._finished)), 1)
            note(**jobs.details(threads), mode=self._mode())

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Writes this rank's files."""
        finished = self._finished = []
        self._nbytes = self._written_nbytes = 0
        try:
            work = work_for(plan, planner, self.transforms)
            self._numbers.clear()
            prefix = plan.storage_data.prefix
            nbytes = sum(work.work.nbytes)
            with self._progress(nbytes) as jobs:
                taken = self._take_unchanged(work, prefix, finished)
                results = taken.results
                files = self._files_of(taken.groups, prefix)
                results += self._write_files(files, nbytes, planner, finished, jobs)
            if finished and self.sync_files:
                self._write_directory.sync()
        except BaseException as error:
            self._abandon(finished, error, may_others_begin=self._ranks > 1)
            raise
        finally:
            self._end_jobs()
        self._wrote_share(plan, planner)
        return results

    def _take_unchanged(self, work: RankWork, prefix: str, finished: list[str]) -> Taken:
        """Takes what has not changed from the base, if there is one."""
        if self.base is None or not len(work.work):
            return Taken([work])
        base = Location(self.base).resolved()
        is_itself = str(base) == str(self.location)
        is_background = self._niceness > 0
        return take_unchanged(
            *(None if is_itself else base, self._write_directory, work),
            new_name=lambda: self._next_name(prefix),
            finished=finished,
            max_files=MAX_FILES if self.single_file_per_rank else None,
            sync=self.sync_files,
            threads=1 if is_background else THREADS,
            niceness=self._niceness,
        )

    def _mode(self) -> str:
        """Returns how files are written, for the record."""
        if not self.location.file_system.writes_at_offsets:
            return "store"
        return "direct" if self.io_mode is not None and self.io_mode.direct else "buffered"

    def _next_name(self, prefix: str) -> str:
        number = self._numbers[prefix] = self._numbers.get(prefix, -1) + 1
        return f"{prefix}{number}_{self.file_id}.distcp"

    def _files_of(self, groups: Sequence[RankWork], prefix: str) -> dict[str, RankWork]:
        """Returns files to write: name -> work. Groups go to different files."""
        count = self.thread_count if self.single_file_per_rank else None
        return {self._next_name(prefix): work for group in groups for work in split(group, count)}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: publishes ``.metadata`` and its index, then removes the replaced files."""
        self._phases.begin("committing")
        storage_data: dict[MetadataIndex, Any] = {}
        written: list[tuple[int, WrittenFile]] = []  # Rank, and file of that rank.
        for rank, rank_results in enumerate(results):
            for result in rank_results:
                if isinstance(result.storage_data, WrittenFile):
                    written.append((rank, result.storage_data))
                else:
                    storage_data[result.index] = result.storage_data
        # Update in place, since DCP returns and broadcasts the object that it passed.
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = storage_data
        metadata.storage_meta = self.storage_meta()
        files = {file.name for _, file in written}
        try:
            plan, self._plan = self._plan, None
            if plan is not None and any(file.extents is not None for _, file in written):
                metadata_bytes, index = planned_commit_files(
                    metadata, plan, written, save_id=self.file_id
                )
            else:
                if isinstance(metadata.planner_data, PlannedPaths):
                    metadata.planner_data = metadata.planner_data.copy()
                merge_cuts(metadata, [cut for _, file in written for cut in file.cuts])
                check_complete(metadata)
                metadata_bytes, index = commit_files(
                    metadata, [file for _, file in written], save_id=self.file_id
                )
            warn_of_refused({f: c for _, file in written for f, c in file.refused.items()})
            claim_commit()
            # If a subclass has replaced `prepare_global_plan`, nothing is claimed yet.
            if not self._checkpoint.has_begun:
                self._begin(can_hide=False)
            self._check(files)
        except BaseException as error:
            # A cached plan may have caused the failure.
            plan_cache().forget()
            # On a full disk, the files would make the next save fail as well.
            self._abandon(files, error)
            raise
        self._publish(metadata_bytes, index, files)
        self._log_saved(sum(file.nbytes for _, file in written))

    def _check(self, files: Collection[str]) -> None:
        """Checks that all files of the save are there."""
        self._checkpoint.check(files)

    def _publish(self, metadata: bytes, index: bytes, files: Collection[str]) -> None:
        """Commits the contents of ``.metadata`` and its index."""
        self._checkpoint.commit(metadata, index, files)

    def _log_saved(self, nbytes: int) -> None:
        details = [f"{self._ranks} ranks" if self._ranks > 1 else "1 rank"]
        if self.io_mode is not None:
            details.append(str(self.io_mode))
        if self._staged is not None:
            details.append("in the background")
        self._phases.end("saved", nbytes, self.location, *details, is_first=is_first(self._ranks))

    def _write_files(
        self,
        files: dict[str, RankWork],
        nbytes: int,
        planner: SavePlanner,
        finished: list[str],
        jobs: FileJobs,
    ) -> list[WriteResult]:
        """Writes files (name -> work), ``thread_count`` at a time.

        The rank has ``nbytes`` to write in all. Adds the name of each complete file to
        ``finished``. A file that fails is removed.
        """
        workers = min(self.thread_count, len(files))
        if workers == 0:
            return []
        pools = self._prepare_pools(workers, nbytes)

        def write_files(first: int) -> list[WriteResult]:
            results: list[WriteResult] = []
            for name in list(files)[first::workers]:
                written, file, self.io_mode = write_data_file(
                    *(self._write_directory, name, files[name], planner),
                    transforms=self.transforms,
                    pool=pools[first],
                    io=self.io,
                    sync=self.sync_files,
                    niceness=self._niceness,
                    begun=jobs.begin,
                )
                finished.append(name)
                results += written
                # The report travels to the coordinator as one more result.
                results.append(WriteResult(MetadataIndex(name), 0, file))
            return results

        return list(itertools.chain.from_iterable(in_threads(write_files, workers, jobs)))

    def _check_idle(self) -> None:
        if self._writing.locked():
            raise CheckpointError(
                f"cannot use this writer: it is still writing {self.path}; wait for that save, or "
                "use another writer"
            )

    def _prepare_pools(self, count: int, nbytes: int) -> list[_native.BufferPool]:
        self._pools = buffer_pools(
            *(self._pools, count, nbytes, self.io, self.per_thread_copy_ahead),
            self.location.file_system,
        )
        return self._pools
