"""FastWriter: a storage writer for stock DCP that saves through the native engine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from torch_ckpt.commits.transaction import Claim, Transaction
from torch_ckpt.coordination.current_call import current_call
from torch_ckpt.coordination.group import claim_commit
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
    check_dtype,
    share_out,
    with_rank_items,
)
from torch_ckpt.planning.value_digests import THREADS
from torch_ckpt.staging.save_directory import SaveDirectory
from torch_ckpt.staging.save_staging import SaveStaging
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.storage.buffers import STOCK_COPY_AHEAD
from torch_ckpt.storage.commit_files import commit_files_of, written_files
from torch_ckpt.storage.present_save import PresentSave
from torch_ckpt.storage.progress import is_first
from torch_ckpt.storage.rank_files import FileOptions, RankFiles
from torch_ckpt.storage.rank_reuse import Taken, take_unchanged
from torch_ckpt.storage.rank_work import RankWork, refuse_objects, split, work_for
from torch_ckpt.storage.reuse import MAX_FILES

__all__ = ["FastWriter"]


class FastWriter(StorageWriter):
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
        self._directory = SaveDirectory(path)
        self._staging = SaveStaging(stager)
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
        self.given_save_id: str | None = None
        """The ``save_id`` of the DCP writer that this one replaces; each checkpoint has it."""
        self.file_id = secrets.token_hex(8)
        self._began = False  # Whether a save has begun under this id.
        self._writing = threading.Lock()
        self._files = RankFiles()
        self._save = PresentSave()
        self.location = self._directory.absolute
        """Directory of the present save. Links in its path are resolved when a save begins."""
        self.small_files: Mapping[str, bytes] | None = None
        """The small files of a step, by name; see :class:`CheckpointTransaction`."""
        self.rank: int | None = None
        self.use_collectives = True

    def __getstate__(self) -> dict[str, Any]:
        # A process that saves in the background gets a copy.
        return {**self.__dict__, "_writing": None, "_save": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The new id gives the copy's data files names that no other writer uses.
        self.__dict__.update(
            state, _writing=threading.Lock(), _save=PresentSave(), file_id=secrets.token_hex(8)
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether this writer can write to the path or URL."""
        return can_reach(checkpoint_id)

    @property
    def path(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint: a path of this machine, or a URL."""
        return self._directory.given.checkpoint_id

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint."""
        return self.path

    @property
    def stager(self) -> SnapshotStager:
        """The stager of ``async_save``."""
        return self._staging.stager

    @property
    def io_mode(self) -> IoMode | None:
        """I/O mode of the last file that this process wrote; ``None`` before the first file."""
        return self._files.io_mode

    @property
    def save_id(self) -> str:
        """The UUID of the present save. It is also ``storage_meta.save_id`` of the checkpoint."""
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

    def sharing(
        self,
        planner: SavePlanner | None,
        decide: Callable[[bytes, Callable[[Sequence[bytes]], bool]], bool],
        ranks: Sequence[int],
    ) -> contextlib.AbstractContextManager[None]:
        """Makes :meth:`stage` copy only this rank's share; see :meth:`SaveStaging.sharing`."""
        return self._staging.sharing(planner, decide, ranks)

    def begin_in_background(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Resolves links in the path of a save that another thread or process will carry out.

        The save then writes to this directory alone, wherever the links lead meanwhile. It is
        ``checkpoint_id`` if the save resets the writer to it.
        """
        self._directory.begin(checkpoint_id)

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Copies this rank's state dict, or within :meth:`sharing` its share."""
        state = self._staging.stage(state_dict, self.path)
        self.begin_in_background()
        return state

    def synchronize_staging(self) -> None:
        """Waits until training may change the tensors: they are copied, or written if unstaged."""
        self._staging.synchronize()

    def close(self) -> None:
        """Does nothing, because the stager owns the memory."""

    # ---- DCP's StorageWriter, on every rank ----

    def _be_part_of(self, other: FastWriter, file_id: str) -> None:
        """Writes a part of the save of another writer, with its tensors and buffers."""
        self.file_id, self.rank = file_id, other.rank
        self.use_collectives = other.use_collectives
        self._staging, self._files = other._staging, other._files
        self._save = PresentSave(commits=other._save.commits, ranks=other._save.ranks)

    def _log_nothing(self) -> None:
        """Makes the present save end without a line in the log."""
        self._save.ranks = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares the writer for another checkpoint, or for a new save to the same directory."""
        self._check_idle()
        self.end_failed_save()
        self._save.transaction = None
        if checkpoint_id:
            self._directory.change(checkpoint_id)
            self.location = self._directory.absolute
        self.file_id, self._began = secrets.token_hex(8), False

    def storage_meta(self) -> StorageMeta:
        """Returns the ``storage_meta`` of ``.metadata``."""
        self._staging.begin_save()
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
        if self._began:
            # DCP calls reset only if it also has a checkpoint id. Each save needs an id of its own,
            # since the names of data files must be unique.
            self.file_id = secrets.token_hex(8)
        self._began = True
        commits = is_coordinator or not self.use_collectives
        self._save = PresentSave(commits=commits, ranks=int(is_coordinator))
        if (call := current_call()) is not None:
            self._save.call = weakref.ref(call)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds the rank's items to the plan for the coordinator.

        Raises:
            UnsupportedError: DCP's own function would pickle a ``Stateful`` below the top level.
        """
        refuse_objects(calling_planner())
        if not isinstance(plan.items, PlannedItems):
            plan = save_plan_in_boxes(plan, calling_planner())
        items: Any = plan.items
        self._staging.set_values(items)
        if isinstance(items, ColumnItems) and items.token is not None:
            # The coordinator does not read the items, except in a subclass.
            items.by_token = type(self).prepare_global_plan is FastWriter.prepare_global_plan
            if items.by_token and isinstance(plan.planner_data, PlannedPaths):
                plan = dataclasses.replace(plan, planner_data=None)
        is_columns = isinstance(items, PlannedItems)
        if not is_columns:  # FastSavePlanner has already checked its items, and shares them out.
            for item in items:
                check_dtype(item)
            check_placeholders(getattr(calling_planner(), "state_dict", None) or {})
        if self.rank is not None and not self.use_collectives:
            return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        if self.share_replicas and self.rank is not None and not is_columns:
            return with_rank_items(plan, self.rank, calling_planner(), self.check_replicas)
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
        transaction = self._save.transaction
        claim = transaction.claim if transaction is not None and are_sent(plans) else None
        if claim is None:
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
        self._begin(can_hide=are_sent(plans))
        return placed

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items. Returns after the files are written (and synced)."""
        self._check_idle()
        future: Future[list[WriteResult]] = Future()
        self._save.phases.begin("writing")
        with self._writing, portable_errors(), self._staging.writing():
            self._enter(Claim.of(plan.storage_data))
            future.set_result(self._write(plan, planner))
        return future

    def written_nbytes(self) -> tuple[int, int]:
        """Returns the bytes that this rank has written of its last save, and those in all."""
        return self._files.written_nbytes()

    @property
    def _options(self) -> FileOptions:
        is_background = not self._staging.blocks_training
        return FileOptions(
            io=self.io,
            sync=self.sync_files,
            thread_count=self.thread_count,
            copy_ahead=self.per_thread_copy_ahead,
            niceness=self.io.background_nice if is_background else 0,
            shows_progress=is_first(self._save.ranks) and not self._staging.is_staged,
        )

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Writes this rank's files."""
        files, how, directory = self._files, self._options, self._checkpoint.directory
        files.finished = []
        try:
            work = work_for(plan, planner, self.transforms)
            prefix = plan.storage_data.prefix
            with files.writing(directory, sum(work.work.nbytes), how) as jobs:
                taken = self._take_unchanged(work, prefix, how)
                count = self.thread_count if self.single_file_per_rank else None
                named = {
                    files.new_name(each, self.file_id): part
                    for each, group in self._groups(taken.groups, prefix)
                    for part in split(group, count)
                }
                results = taken.results + files.write(
                    directory, named, planner, jobs, how, self.transforms
                )
                if files.finished and self.sync_files:
                    directory.sync()
        except BaseException as error:
            self._abandon(files.finished, error, may_others_begin=self._save.ranks > 1)
            raise
        self._staging.wrote(plan, planner)
        return results

    def _groups(self, groups: Sequence[RankWork], prefix: str) -> list[tuple[str, RankWork]]:
        """Returns the work of different files, each with the prefix of their names."""
        return [(prefix, group) for group in groups]

    def _take_unchanged(self, work: RankWork, prefix: str, how: FileOptions) -> Taken:
        """Takes what has not changed from the base, if there is one."""
        if self.base is None or not len(work.work):
            return Taken([work])
        base = Location(self.base).resolved()
        is_itself = str(base) == str(self.location)
        return take_unchanged(
            *(None if is_itself else base, self._checkpoint.directory, work),
            new_name=lambda: self._files.new_name(prefix, self.file_id),
            finished=self._files.finished,
            max_files=MAX_FILES if self.single_file_per_rank else None,
            sync=self.sync_files,
            threads=1 if how.niceness else THREADS,
            niceness=how.niceness,
        )

    # ---- The commit ----

    @property
    def _transaction(self) -> Transaction:
        """The transaction of the present save, which may not have begun."""
        if self._save.transaction is None:
            self._save.transaction = self._new_transaction()
        return self._save.transaction

    def _new_transaction(self) -> Transaction:
        return CheckpointTransaction(
            *(self.location, self.file_id),
            rank=None if self.use_collectives else self.rank,
            sync=self.sync_files,
            may_replace=self.overwrite,
            small_files=self.small_files,
            name=self.path,
        )

    @property
    def _checkpoint(self) -> CheckpointTransaction:
        assert isinstance(self._transaction, CheckpointTransaction)
        return self._transaction

    @property
    def _hides(self) -> bool:
        # A subclass may write files of its own to the directory while it saves.
        return type(self) is FastWriter

    def _begin(self, *, can_hide: bool) -> None:
        """Begins the save on the rank that commits, before any rank writes.

        Called once the plans of all ranks have arrived. By then, each rank has removed the remains
        of an earlier failed save, which may include the directory.
        """
        self._checkpoint.begin(can_hide=can_hide and self._hides)
        self._warn_if_replacing(self._checkpoint)

    def _warn_if_replacing(self, transaction: Transaction) -> None:
        if transaction.replaces and not self.rank:
            warnings.warn(
                f"Detected an existing checkpoint in {self.path}, overwriting since "
                f"{self.overwrite=}.",
                stacklevel=2,
            )

    def _enter(self, claim: Claim | None) -> None:
        """Begins to write on any rank; see :meth:`Transaction.join`."""
        if not self._save.commits:
            self._transaction.join(claim, self.rank)
        elif not self._checkpoint.has_begun:  # A subclass replaced `prepare_global_plan`.
            self._begin(can_hide=False)

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
        self._publish(*contents, files)
        self._log_saved(sum(file.nbytes for _, file in written))

    def _check(self, files: Collection[str]) -> None:
        """Checks that all files of the save are there."""
        self._checkpoint.check(files)

    def _publish(self, metadata: bytes, index: bytes, files: Collection[str]) -> None:
        """Commits the contents of ``.metadata`` and its index."""
        self._checkpoint.commit(metadata, index, files)

    def _log_saved(self, nbytes: int) -> None:
        ranks = self._save.ranks
        details = [f"{ranks} ranks" if ranks > 1 else "1 rank"]
        if self.io_mode is not None:
            details.append(str(self.io_mode))
        if self._staging.is_staged:
            details.append("in the background")
        self._save.phases.end("saved", nbytes, self.location, *details, is_first=is_first(ranks))

    # ---- Failure ----

    def end_failed_save(self) -> None:
        """Removes what a save that has failed has written; see :meth:`Transaction.abandon`.

        A save of this package calls it when any rank has failed. DCP's own functions do not
        report failures of other ranks to a writer. Then the next save removes the files.
        """
        save, call = self._save, current_call()
        transaction = save.transaction
        finished, self._files.finished = self._files.finished, []
        # A call that fails before it begins its save says nothing of the save before it.
        is_present = call is not None and save.call is not None and save.call() is call
        is_uncommitted = call is not None and is_present and call.is_uncommitted
        if transaction is not None and (transaction.commits or is_uncommitted):
            transaction.abandon(finished if is_uncommitted else ())
            save.transaction = None

    def _abandon(
        self, names: Iterable[str], error: BaseException, *, may_others_begin: bool = False
    ) -> None:
        """Removes the files of a save that has failed with ``error``.

        What other ranks may yet search stays (``may_others_begin``): without it, they would wait
        for it, and take the directory for one that is not shared. Raises the error of the call if
        another rank has failed and removed its files first, and StorageError if files are missing
        for an unknown reason.
        """
        transaction = self._transaction
        names = list(names)
        is_ended = transaction.is_ended(names, error)
        transaction.remove(names, may_others_begin=may_others_begin and not is_ended)
        if not may_others_begin:
            self.end_failed_save()
        if is_ended:
            raise transaction.files_are_missing(error) from error

    def _check_idle(self) -> None:
        if self._writing.locked():
            raise CheckpointError(
                f"cannot use this writer: it is still writing {self.path}; wait for that save, or "
                "use another writer"
            )
