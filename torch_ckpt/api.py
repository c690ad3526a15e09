"""``save``, ``load``, ``async_save`` and ``async_load``: DCP with fast storage and deadlines."""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from concurrent.futures import Future
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torch_ckpt.coordination import orchestrate
from torch_ckpt.coordination.background import Order, save_in_process, save_in_thread
from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S, Call, group_of
from torch_ckpt.coordination.statefuls import state_dicts_of
from torch_ckpt.coordination.waiting import OwnFuture
from torch_ckpt.errors import CheckpointError
from torch_ckpt.options import OnBusy
from torch_ckpt.planning.load_planner import FastLoadPlanner
from torch_ckpt.planning.load_report import LoadReport
from torch_ckpt.planning.save_planner import FastSavePlanner
from torch_ckpt.records.record import phase
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.storage.host_load import LoadFuture, begin_load
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.writer import FastWriter

__all__ = ["async_load", "async_save", "load", "save"]

_Path = str | os.PathLike[str]


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _Path | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Metadata:
    """Saves a state dict, like :func:`torch.distributed.checkpoint.save`, with a deadline.

    If a rank fails or misses the deadline, the save fails on every rank with the same error. The
    previous checkpoint remains intact, and the process group remains usable for training.

    All ranks of the group must make the same calls in the same order.

    Args:
        state_dict: The state dict to save.
        checkpoint_id: Directory of the checkpoint, as a path or URL.
        storage_writer: Writer to use. Defaults to ``FastWriter(checkpoint_id)``. If a save fails
            while a writer of another class commits, that commit is still completed.
        planner: Save planner. Defaults to a new :class:`FastSavePlanner`, with the writer's
            ``check_replicas``.
        process_group: The ranks that save. Defaults to all ranks. The first rank of the group
            coordinates the save.
        no_dist: Whether this process saves alone, without the other ranks.
        use_collectives: Whether the ranks plan and commit one checkpoint together. If ``False``,
            each rank commits its own data, which remains valid if another rank fails.
        timeout_s: Deadline of each exchange between ranks, in seconds: how long the first rank
            that arrives waits for the last one.

    Returns:
        The metadata of the checkpoint.

    Raises:
        CheckpointException: A rank raised an error. ``failures`` maps ranks to their errors. The
            class derives from ``BaseException``, not from ``Exception``.
        RankTimeoutError: A rank was late, stuck or dead.
        ValueError: ``timeout_s`` is not a positive number.

    Example::

        torch_ckpt.save(state, checkpoint_id="run/step-100", timeout_s=600)
    """
    with group_of(process_group, no_dist=no_dist).call(timeout_s) as call:
        writer = storage_writer or (FastWriter(checkpoint_id) if checkpoint_id else None)
        order = Order(checkpoint_id, writer, planner or _planner_for(writer), use_collectives)
        return order.carry_out(state_dict, call)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _Path | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_busy: OnBusy = "wait",
) -> Future[Metadata] | AsyncSaveResponse | None:
    """Saves in the background, like :func:`torch.distributed.checkpoint.async_save`.

    Copies the tensors into host memory (staging), then writes them while training continues. If
    the save fails, it fails on every rank with the same error, as in :func:`save`.

    Args:
        state_dict: The state dict to save, as it is when the function is called.
        checkpoint_id: Directory of the checkpoint, as a path or URL.
        storage_writer: Writer to use. Defaults to ``FastWriter(checkpoint_id)``.
        planner: Save planner. Defaults to a new :class:`FastSavePlanner`, with the writer's
            ``check_replicas``.
        process_group: The ranks that save. Defaults to all ranks. If your planner or writer calls
            collectives, pass a process group that training does not use.
        async_checkpointer_type: Whether a thread or a process writes the checkpoint.
        async_stager: Stager that copies the state. Defaults to the writer if it can stage, else
            to DCP's default stager.
        no_dist: Whether this process saves alone, without the other ranks.
        use_collectives: Whether the ranks plan and commit one checkpoint together.
        timeout_s: Deadline of each exchange between ranks, in seconds. Also the deadline for a
            save process to start, and for each of its heartbeats.
        on_busy: What to do if an earlier save still uses the staging memory of any rank:
            ``"wait"`` for that save, ``"skip"`` this save, or raise an ``"error"``. The stager
            counts each case.

    Returns:
        A future of the metadata, which raises the errors of :func:`save`. If the stager copies in
        the background, an ``AsyncSaveResponse`` with one future for the copy and one for the
        save. ``None`` if this save was skipped.

    Raises:
        RankTimeoutError: A rank was late, stuck or dead while the save processes started, or while
            the ranks checked whether an earlier save is in progress.
        CheckpointError: An earlier save is still in progress, and ``on_busy`` is ``"error"``.
        ValueError: ``timeout_s`` is not a positive number, ``on_busy`` is not one of the three
            values, or it is not ``"wait"`` although the stager is not a :class:`SnapshotStager`.

    Example::

        future = torch_ckpt.async_save(state, checkpoint_id="run/step-100")
        future.result()
    """
    with group_of(process_group, no_dist=no_dist).call(timeout_s) as call:
        writer = storage_writer or (FastWriter(checkpoint_id) if checkpoint_id else None)
        if on_busy != "wait" and _is_busy(async_stager or writer, on_busy, call):
            return None
        order = Order(checkpoint_id, writer, planner or _planner_for(writer), use_collectives)
        by_thread = async_checkpointer_type == AsyncCheckpointerType.THREAD
        stager, closes = async_stager, False
        if stager is None:
            closes = not isinstance(writer, AsyncStager)
            stager = _default_stager() if closes else cast(AsyncStager, writer)
        with contextlib.ExitStack() as stack:
            memory = _snapshot_stager(stager)
            if memory is not None:
                stack.enter_context(memory.starting.use("save asynchronously", timeout_s))
            if closes:
                stack.callback(stager.close)
            plans_together = use_collectives and call.group.size > 1
            if isinstance(writer, FastWriter) and plans_together and by_thread:
                decide = functools.partial(call.decide, phase="staging")
                stack.enter_context(writer.staging.sharing(order.planner, decide, call.group.names))
            staged: Any = None
            try:
                with call.current(), phase("stage"):  # The stager waits no longer than the call.
                    staged = stager.stage(state_dicts_of(state_dict))
                if isinstance(writer, FastWriter):
                    writer.begin_in_background(checkpoint_id)
                begin = save_in_thread if by_thread else save_in_process
                future = begin(order, staged, call)
            except BaseException as error:
                # References in its traceback would keep the staging memory in use.
                traceback.clear_frames(error.__traceback__)
                staged = None
                raise
            if closes:
                stack.pop_all()
                future.add_done_callback(lambda _: stager.close())
        if isinstance(staged, Future):
            return AsyncSaveResponse(_end_of(staged), cast(Future[None], future))
        if stager.should_synchronize_after_execute:
            with call.current():
                stager.synchronize_staging()
        return future


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _Path | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    trust_pickle: bool = False,
    strict: bool | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> LoadReport | None:
    """Loads a state dict in place, like :func:`torch.distributed.checkpoint.load`, with a deadline.

    If a rank fails or misses the deadline, the load fails on every rank. All ranks of the group
    must make the same calls in the same order.

    Args:
        state_dict: The state dict to load into. Its tensors are overwritten, and its other values
            are replaced.
        checkpoint_id: Directory of the checkpoint, as a path or URL.
        storage_reader: Reader to use. Defaults to ``FastReader(checkpoint_id)``.
        planner: Load planner. Defaults to a new :class:`FastLoadPlanner`.
        process_group: The ranks that load. Defaults to all ranks. The first rank of the group
            coordinates the load.
        no_dist: Whether this process loads alone, without the other ranks.
        trust_pickle: Whether to unpickle objects of any class, which can run arbitrary code. See
            :class:`FastReader`.
        strict: Which differences of names are errors. ``None``: values that the checkpoint lacks;
            of stored values that no rank requests, a warning is logged. ``True``: both. ``False``:
            neither; missing values stay unchanged, and only the result lists the names.
        timeout_s: Deadline of each exchange between ranks, in seconds: how long the first rank
            that arrives waits for the last one.

    Returns:
        The missing and unused names of all ranks, and the cast and resized tensors of this one, as
        a :class:`LoadReport`. No further exchange is made for it. ``None`` if the planner is not a
        :class:`FastLoadPlanner`, or the reader is not a :class:`FastReader`.

    Raises:
        CheckpointException: A rank raised an error. ``failures`` maps ranks to their errors. The
            class derives from ``BaseException``, not from ``Exception``.
        RankTimeoutError: A rank was late, stuck or dead. Some tensors of ``state_dict`` may
            already be overwritten.
        ValueError: ``timeout_s`` is not a positive number, ``trust_pickle`` is passed together
            with a ``storage_reader``, or ``strict`` with a ``planner``, which have their own.

    Example::

        report = torch_ckpt.load(state, checkpoint_id="run/step-100", strict=False)
        print(report.missing)
    """
    with group_of(process_group, no_dist=no_dist).call(timeout_s) as call:
        if strict is not None and planner is not None:
            raise ValueError("strict has no effect on a planner: pass it to the planner")
        _check_strict(strict)
        planner = planner or FastLoadPlanner(allow_partial_load=strict is False, strict=strict)
        reader = _reader_for(checkpoint_id, storage_reader, trust_pickle=trust_pickle)
        orchestrate.load(state_dict, reader, planner, call)
    return planner.report if isinstance(planner, FastLoadPlanner) else None


def async_load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: _Path | None = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    trust_pickle: bool = False,
    strict: bool | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> LoadFuture:
    """Loads in the background: :func:`load` in two parts.

    A thread reads into host memory while the program builds its model, or evaluates the former
    weights. ``result()`` of the future copies the values to the state dict, in which nothing
    changes before. Values and errors are those of :func:`load`. The thread uses connections of its
    own, not the process group.

    The host memory has the size of the tensors of this rank that are loaded, beside the buffers of
    :class:`IoOptions` and loaded objects. It is freed by ``result()`` and ``cancel()``. Tensors on
    the meta device need no second copy on the CPU.

    All ranks must begin the same loads in the same order, and then call ``result()`` or
    ``cancel()``, which end the load on all ranks: a rank that fails or cancels fails the others,
    and one that calls neither is late after ``timeout_s``. Until then, the tensors of the state
    dict must retain their storages. Their elements may change.

    Args:
        state_dict: The state dict to load into. ``state_dict()`` of its objects is called at once,
            and ``load_state_dict()`` by ``result()``.
        checkpoint_id: Directory of the checkpoint, as a path or URL.
        storage_reader: Reader to use. Defaults to ``FastReader(checkpoint_id)``. It must not be
            used for another load before the end of this one.
        process_group: The ranks that load. Defaults to all ranks.
        no_dist: Whether this process loads alone, without the other ranks.
        trust_pickle: Whether to unpickle objects of any class, as in :func:`load`.
        strict: Which differences of names are errors, as in :func:`load`.
        timeout_s: Deadline of each exchange between ranks, in seconds. No exchange waits between
            the end of the reads and ``result()``.

    Returns:
        The future, with ``result(timeout=None)``, ``done()`` and ``cancel()``. The result is the
        :class:`LoadReport` of :func:`load`.

    Raises:
        CheckpointError: The system has no more threads.
        RankTimeoutError: A rank failed here.
        ValueError: An argument is out of range, as in :func:`load`.

    Example::

        future = torch_ckpt.async_load(state, checkpoint_id="run/step-100")
        evaluate(model)
        future.result()
    """
    with group_of(process_group, no_dist=no_dist).call(timeout_s) as call:
        _check_strict(strict)
        reader = _reader_for(checkpoint_id, storage_reader, trust_pickle=trust_pickle)
        what = f"the asynchronous load of {getattr(reader, 'path', checkpoint_id)}"
        return begin_load(state_dict, reader, call, what=what, strict=strict)


def _check_strict(strict: object) -> None:
    if strict not in (None, True, False):
        raise ValueError(f"{strict=} is not True, False or None")


def _reader_for(
    checkpoint_id: _Path | None, storage_reader: StorageReader | None, *, trust_pickle: bool
) -> StorageReader:
    """Returns the reader of a load, for its checkpoint."""
    if trust_pickle and storage_reader is not None:
        text = "trust_pickle has no effect on a storage_reader: pass it to the reader"
        raise ValueError(text)
    reader: Any = storage_reader
    if reader is None and checkpoint_id:
        reader = FastReader(checkpoint_id, trust_pickle=trust_pickle)
    return cast(StorageReader, _storage_setup(reader, checkpoint_id, reader=True))


def _planner_for(writer: StorageWriter | None) -> FastSavePlanner:
    """Returns a planner with the ``check_replicas`` option of a writer."""
    if isinstance(writer, FastWriter):
        return FastSavePlanner(check_replicas=writer.check_replicas)
    return FastSavePlanner()


def _default_stager() -> AsyncStager:
    """Returns the stager that DCP uses for writers that do not stage."""
    return DefaultStager(StagingOptions(False, False, False, False))


def _end_of(staging: Future[Any]) -> Future[None]:
    """Returns a future that completes with ``staging``, with its error but without its result."""
    ended: Future[None] = OwnFuture(lambda: "the copy of a state dict into host memory")

    def end(staged: Future[Any]) -> None:
        error = staged.exception()
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    staging.add_done_callback(end)
    return ended


def _snapshot_stager(stages: Any) -> SnapshotStager | None:
    """Returns the stager of a writer, or the stager itself, if it is a :class:`SnapshotStager`."""
    stager = stages.stager if isinstance(stages, FastWriter) else stages
    return stager if isinstance(stager, SnapshotStager) else None


def _is_busy(stages: Any, on_busy: OnBusy, call: Call) -> bool:
    """Returns whether any rank would have to wait for an earlier save.

    Raises CheckpointError if so and ``on_busy`` is ``"error"``, and ValueError if it is unknown, or
    the stager is not a :class:`SnapshotStager`.
    """
    stager = _snapshot_stager(stages)
    if on_busy not in ("skip", "error") or stager is None:
        raise ValueError(
            f'{on_busy=} is not "wait", or, for FastWriter and SnapshotStager, "skip" or "error"'
        )
    if not call.any_rank(stager.is_busy, "beginning"):
        return False
    if on_busy == "skip":
        stager.skipped += 1
        return True
    stager.refused += 1
    raise CheckpointError(
        "cannot stage: an earlier asynchronous save is still in progress on this or another rank"
    )
