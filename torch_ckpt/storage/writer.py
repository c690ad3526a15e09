"""FastWriter: a storage writer for stock DCP that saves through the native engine."""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    SerializationFormat,
    _StoragePrefix,
    _StorageWriterTransforms,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.transaction import Claim
from torch_ckpt.coordination.current_call import claim_commit, current_call
from torch_ckpt.coordination.orchestrate import calling_planner, is_replanning
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.errors import CheckpointError, UnsupportedError, portable_errors
from torch_ckpt.filesystems.location import Location, can_reach, name_of
from torch_ckpt.formats.committed import INDEX_MARK, uuid_of
from torch_ckpt.options import IoMode, IoOptions
from torch_ckpt.planning.dtensor_boxes import save_plan_in_boxes
from torch_ckpt.planning.item_views import (
    AssignedItems,
    ColumnItems,
    PlannedItems,
    PlannedPaths,
)
from torch_ckpt.planning.placeholders import check_placeholders
from torch_ckpt.planning.plan_cache import plan_cache
from torch_ckpt.planning.replica_check import CheckReplicas, as_mode
from torch_ckpt.planning.replicas import (
    RankItems,
    are_sent,
    check_dtype_for_dcp,
    share_out,
    with_rank_items,
)
from torch_ckpt.staging.save_directory import SaveDirectory
from torch_ckpt.staging.save_staging import SaveStaging
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.storage.buffers import STOCK_COPY_AHEAD
from torch_ckpt.storage.commit_files import commit_files_of, written_files
from torch_ckpt.storage.data_file import FileOptions
from torch_ckpt.storage.present_save import PresentSave
from torch_ckpt.storage.progress import is_first
from torch_ckpt.storage.rank_files import RankFiles
from torch_ckpt.storage.rank_work import RankWork, refuse_objects, work_for

__all__ = ["FastWriter"]


class FastWriter(StorageWriter):
    """Saves checkpoints in files that stock DCP can read.

    Pass it to :func:`torch.distributed.checkpoint.save` or ``async_save`` in place of
    ``FileSystemWriter``. Its first arguments are the arguments of ``FileSystemWriter``, in the same
    order.

    Each rank streams its shards through a bounded ring of buffers to its own ``.distcp`` files. The
    coordinator then commits the checkpoint by publishing ``.metadata``. Until the commit, and
    after a crash before it, readers see the previous checkpoint at ``path``, if any.

    Args:
        path: Directory of the checkpoint, on storage that every rank can reach; may be a URL of a
            store, such as ``s3://bucket/run/step-100``. A relative path is resolved against the
            working directory, and symbolic links once per save, when the save begins. If the
            directory does not exist, it appears with the commit on file systems that can rename
            directories. Create it first if you write other files to it. Subclasses of
            ``FastWriter``, which may do so, create it when the save begins.
        single_file_per_rank: Whether a rank writes ``thread_count`` files. If false, it writes one
            file for each tensor and object.
        sync_files: Whether a save returns only once its bytes would survive a power cut. If false,
            the commit is still atomic and survives the end of the process, but a power cut soon
            after the save may destroy both the new checkpoint and the one that it replaced.
        thread_count: Number of files that a rank writes at the same time, each in a thread. One
            thread saturates most disks.
        per_thread_copy_ahead: Bytes that each thread may copy ahead of the disk. Unless it is the
            default, it replaces ``io.buffer_nbytes / thread_count``.
        cache_staged_state_dict: No effect. ``async_save`` always reuses its staging memory.
        overwrite: Whether a save may replace a committed checkpoint at ``path``. The old checkpoint
            remains readable until the new one commits.
        _extensions: Stream transforms such as ``ZStandard``, applied to each item as in stock DCP.
        serialization_format: Must be ``SerializationFormat.TORCH_SAVE``.
        io: Memory budgets and I/O modes. They do not affect the written bytes.
        share_replicas: Whether to balance the bytes that the ranks write: each replicated tensor is
            written by the rank with the least to write, and one that exceeds a fair share is split
            by rows if its replicas are equal. If false, or with DCP's plan caching, the planner's
            assignment is unchanged. No effect on :class:`FastSavePlanner`, which always balances
            unless it has ``dedup_save_to_lowest_rank``.
        check_replicas: How to check that replicas are equal: by a ``"sample"`` of up to 8 KiB of
            each tensor, by the ``"full"`` tensors, or not at all (``"off"``). If the values of a
            tensor differ, one replica is stored whole, and the coordinator warns once. With
            ``"off"``, the stored tensor may mix rows of several ranks. Values that a planner
            creates while they are written are neither compared nor split. A
            :class:`FastSavePlanner` that you pass has its own ``check_replicas``.
        stager: Stager for ``async_save``. By default, all writers of the process share one.
        base: Directory of an older checkpoint. Tensors that have not changed since are not written
            again: their files are hard links, or copies within the store. The base must have been
            saved with a ``base`` too, because only such a checkpoint has digests. For the first
            save, pass ``path`` itself, or another directory without a checkpoint.

    Raises:
        AlreadyExistsError: ``path`` has a committed checkpoint, and ``overwrite`` is false.
        StorageError: The disk or store failed. If ``error.retriable`` is true, the same save may
            succeed on a second attempt. DCP wraps the error in a ``CheckpointException`` that
            names the rank.
        UnsupportedError: ``path`` is a URL of an unregistered scheme, or ``serialization_format``
            is not supported.
        ValueError: An argument is out of range.

    Example::

        state = {"model": model.state_dict(), "step": 100}
        dcp.save(state, storage_writer=FastWriter("run/step-100"))

    Note:
        Saves to the same directory should not overlap in time. If they do, the directory always
        contains one whole checkpoint, and a save that another one overtook before its commit
        raises an error that names the other save.

        A writer runs one save at a time. Consecutive saves with the same writer reuse its buffers.
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
        self._directory = SaveDirectory(path)
        self.staging = SaveStaging(stager)
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
        """Directory of the older checkpoint, if any."""
        self.given_save_id: str | None = None
        """The ``save_id`` of the DCP writer that this one replaces; each checkpoint has it."""
        self.file_id = secrets.token_hex(8)
        self._new_checkpoint: Callable[..., CheckpointTransaction] = CheckpointTransaction
        self._began = False  # Whether a save has begun under this id.
        self._writing = threading.Lock()
        self._files = RankFiles()
        self.location = self._directory.absolute
        """Directory of the present save. Links in its path are resolved when a save begins."""
        self.small_files: Mapping[str, bytes] | None = None
        """The small files of a step, by name; see :class:`CheckpointTransaction`."""
        self.rank: int | None = None
        self.use_collectives = True
        self._save = self._new_save()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writing": None, "_save": None}  # For a save process.

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The new id gives the copy's data files names that no other writer uses.
        self.__dict__.update(state, _writing=threading.Lock(), file_id=secrets.token_hex(8))
        self._save = self._new_save()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether this writer can write to the path or URL."""
        return can_reach(checkpoint_id)

    @property
    def path(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint: a path on this machine, or a URL."""
        return self._directory.given.checkpoint_id

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint."""
        return self.path

    @property
    def stager(self) -> SnapshotStager:
        """The stager of ``async_save``."""
        return self.staging.stager

    @property
    def io_mode(self) -> IoMode | None:
        """I/O mode of the last file that this process wrote; ``None`` before the first file."""
        return self._files.io_mode

    @property
    def save_id(self) -> str:
        """UUID of the current save; the checkpoint stores it as ``storage_meta.save_id``."""
        return self.given_save_id or uuid_of(self.file_id)

    @property
    def fs(self) -> FileSystem:
        """Stock's access to local files, for programs that use that of ``FileSystemWriter``."""
        return FileSystem()

    # ---- DCP's AsyncStager ----

    _synchronize_after_execute = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether DCP must call :meth:`synchronize_staging` after it has started the save."""
        return self._synchronize_after_execute

    def begin_in_background(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Resolves links in the path of a save that another thread or process will carry out.

        The save then writes only to this directory, even if links change. It is ``checkpoint_id``
        if the save resets the writer to it.
        """
        self._directory.begin(checkpoint_id)

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copies this rank's state dict, or its share within :meth:`SaveStaging.sharing`."""
        state = self.staging.stage(state_dict, self.path)
        self.begin_in_background()
        return state

    def synchronize_staging(self) -> None:
        """Waits until training may change the tensors: they are copied, or written if unstaged."""
        self.staging.synchronize()

    def close(self) -> None:
        """Does nothing, because the stager owns the memory."""

    # ---- DCP's StorageWriter, on every rank ----

    def _be_part_of(self, other: FastWriter, file_id: str) -> None:
        """Writes a part of the save of another writer, with its tensors and buffers."""
        self.file_id, self.rank = file_id, other.rank
        self.use_collectives = other.use_collectives
        self.staging, self._files = other.staging, other._files
        self._save = self._new_save(commits=other._save.commits, ranks=other._save.ranks)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares the writer for another checkpoint, or for a new save to the same directory."""
        self._check_idle()
        self.end_failed_save()
        if checkpoint_id:
            self._directory.change(checkpoint_id)
            self.location = self._directory.absolute
        self.file_id, self._began = secrets.token_hex(8), False
        self._save = self._new_save()

    def storage_meta(self) -> StorageMeta:
        """Returns the ``storage_meta`` of ``.metadata``."""
        self.staging.begin_save()
        return StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=self.save_id, modules=[INDEX_MARK]
        )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save on this rank."""
        watch_storage()
        self._check_idle()
        if not is_replanning():  # Otherwise, the save has already begun.
            self.location = self._directory.enter()
        self.end_failed_save()  # An earlier save may have failed on another rank.
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        if self._began:
            # DCP calls reset only if it also has a checkpoint id. Each save needs a new file id,
            # since the names of data files must be unique.
            self.file_id = secrets.token_hex(8)
        self._began = True
        call = current_call()
        self._save = self._new_save(
            commits=is_coordinator or not self.use_collectives,
            ranks=int(is_coordinator),
            call=None if call is None else weakref.ref(call),
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds the rank's items to the plan for the coordinator.

        Raises:
            UnsupportedError: DCP's own function would pickle a ``Stateful`` below the top level.
        """
        planner = calling_planner()
        refuse_objects(planner)
        if not isinstance(plan.items, PlannedItems):
            plan = save_plan_in_boxes(plan, planner)
        items: Any = plan.items
        self.staging.set_values(items)
        if isinstance(items, ColumnItems) and items.token is not None:
            # The coordinator does not read the items, except in a subclass.
            items.by_token = type(self).prepare_global_plan is FastWriter.prepare_global_plan
            if items.by_token and isinstance(plan.planner_data, PlannedPaths):
                plan = dataclasses.replace(plan, planner_data=None)
        is_columns = isinstance(items, PlannedItems)
        if not is_columns:  # FastSavePlanner has already checked and assigned its items.
            for item in items:
                check_dtype_for_dcp(item)
            check_placeholders(getattr(planner, "state_dict", None) or {})
        if self.rank is not None and not self.use_collectives:
            return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        if self.share_replicas and self.rank is not None and not is_columns:
            return with_rank_items(plan, self.rank, planner, self.check_replicas)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assigns replicas to ranks, and adds each rank's file name prefix to its plan.

        Raises:
            AlreadyExistsError: A checkpoint is committed and ``overwrite`` is false.
            MismatchError: Ranks disagree on the dtype or sizes of a tensor.
        """
        self._save.ranks = len(plans)
        with gc_paused():
            plans = share_out(plans, compare=self.check_replicas != "off")
        placed = self._place(plans)
        claim = self._save.transaction.claim
        if claim is None or not are_sent(plans):
            return placed
        return [
            dataclasses.replace(plan, storage_data=claim.attach_to(plan.storage_data))
            for plan in placed
        ]

    def _place(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the save, and returns the plans, each with the file name prefix of its rank."""
        columns: list[Any] = [plan.items for plan in plans]
        self._save.plan = next((c.plan for c in columns if isinstance(c, AssignedItems)), None)
        placed = [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))
            if plan.storage_data is None or RankItems.beside(plan) is not None
            else plan
            for rank, plan in enumerate(plans)
        ]
        self._save.begin(can_hide=self._hides and are_sent(plans))
        return placed

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items. Returns after the files are written (and synced)."""
        self._check_idle()
        future: Future[list[WriteResult]] = Future()
        self._save.phases.begin("writing")
        with self._writing, portable_errors(), self.staging.writing():
            self._save.join(Claim.of(plan.storage_data))
            future.set_result(self._write(plan, planner))
        return future

    def written_nbytes(self) -> tuple[int, int]:
        """Returns the written and the total bytes of this rank's last save."""
        return self._files.written_nbytes()

    @property
    def _options(self) -> FileOptions:
        return FileOptions(
            io=self.io,
            transforms=self.transforms,
            single_file=self.single_file_per_rank,
            sync=self.sync_files,
            thread_count=self.thread_count,
            copy_ahead=self.per_thread_copy_ahead,
            niceness=0 if self.staging.blocks_training else self.io.background_nice,
            shows_progress=is_first(self._save.ranks) and not self.staging.is_staged,
        )

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Writes this rank's files."""
        files = self._files
        self._save.begin_late()
        files.finished = []
        try:
            results = files.write(
                self._save.checkpoint,
                plan.storage_data.prefix,
                work_for(plan, planner, self.transforms),
                planner,
                self._options,
                base=None if self.base is None else Location(self.base).resolved(),
                groups=self._groups,
            )
        except BaseException as error:
            self._save.abandon(files.finished, error, may_others_begin=self._save.ranks > 1)
            raise
        self.staging.wrote(plan, planner)
        return results

    def _groups(self, groups: Sequence[RankWork], prefix: str) -> list[tuple[str, RankWork]]:
        """Returns the work for different files, each with the prefix of their names."""
        return [(prefix, group) for group in groups]

    # ---- The commit ----

    @property
    def _hides(self) -> bool:
        # A subclass may write further files to the directory while it saves.
        return type(self) is FastWriter

    def _new_save(self, **facts: Any) -> PresentSave:
        new_transaction = functools.partial(
            self._new_checkpoint,
            *(self.location, self.file_id),
            rank=None if self.use_collectives else self.rank,
            small_files=self.small_files,
            sync=self.sync_files,
            may_replace=self.overwrite,
            name=self.path,
        )
        return PresentSave(new_transaction, self._files, self.rank, **facts)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits: publishes ``.metadata`` and its index, then removes the replaced files."""
        self._save.phases.begin("committing")
        written = written_files(metadata, results)
        metadata.storage_meta = self.storage_meta()
        files = {file.name for _, file in written}
        try:
            plan, self._save.plan = self._save.plan, None
            contents = commit_files_of(metadata, plan, written, save_id=self.file_id)
            claim_commit()
            self._save.begin_late()
            self._save.transaction.check(files)
        except BaseException as error:
            # A cached plan may have caused the failure.
            plan_cache().forget()
            # On a full disk, the files would make the next save fail as well.
            self._save.abandon(files, error)
            raise
        self._save.checkpoint.commit(*contents, files)
        nbytes = sum(file.nbytes for _, file in written)
        self._save.log(nbytes, is_staged=self.staging.is_staged)

    # ---- Failure ----

    def end_failed_save(self) -> None:
        """Removes the files of a failed save; see :meth:`Transaction.abandon`.

        Saves of this package call it when any rank has failed. DCP's own functions do not report
        failures of other ranks to a writer; then the next save removes the files.
        """
        self._save.end_failed()

    def _check_idle(self) -> None:
        if self._writing.locked():
            raise CheckpointError(
                f"cannot use this writer: it is still writing {self.path}; wait for that save, or "
                "use another writer"
            )
