"""DCP's own functions with this package's storage, a deadline for every rank, and tree planning."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Literal, cast
from unittest import mock

import torch.distributed as dist
from torch.distributed.checkpoint import (
    _storage_utils,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torch_ckpt.coordination import orchestrate
from torch_ckpt.coordination.background import Order, save_in_process, save_in_thread
from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S, Call, group_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.planning.load_planner import FastLoadPlanner
from torch_ckpt.planning.save_planner import FastSavePlanner
from torch_ckpt.staging.stager import SnapshotStager
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.writer import FastWriter

__all__ = ["async_save", "installed", "load", "save"]

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
    """As :func:`torch.distributed.checkpoint.save`, but no rank waits for another for ever.

    A save that fails on any rank, or in which one is late, fails on every rank with the same error.
    The former checkpoint stays, and the process group remains fit for training.

    Args:
        state_dict: What to save.
        checkpoint_id: Directory of the checkpoint.
        storage_writer: Takes the place of ``FastWriter(checkpoint_id)``. Another kind of writer
            that has begun to commit is not held back when the other ranks give up.
        planner: A :class:`FastSavePlanner` if ``None``.
        process_group: The ranks that save; all if ``None``. Its first rank coordinates.
        no_dist: Whether this process saves by itself.
        use_collectives: Whether ranks coordinate what they write. Otherwise each commits its own
            part, whatever becomes of the others.
        timeout_s: Seconds that the first rank to come to an exchange waits there for the last.
            Every rank must make the same calls in the same order.

    Returns:
        The metadata of the checkpoint.

    Raises:
        CheckpointException: A rank raised; maps ranks to their errors. No ``Exception``.
        RankTimeoutError: A rank was late, stuck or gone.
        ValueError: ``timeout_s`` is no positive number of seconds.

    Example::

        torch_ckpt.save(state, checkpoint_id="run/step-100", timeout_s=600)
    """
    with group_of(process_group, no_dist=no_dist).call(timeout_s) as call:
        order = Order(
            checkpoint_id,
            storage_writer or _writer_for(checkpoint_id),
            planner or FastSavePlanner(),
            use_collectives,
        )
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
    on_busy: Literal["wait", "skip", "error"] = "wait",
) -> Future[Metadata] | AsyncSaveResponse | None:
    """As :func:`torch.distributed.checkpoint.async_save`, with the promises of :func:`save`.

    Args:
        state_dict: What to save, as it is now.
        checkpoint_id: Directory of the checkpoint.
        storage_writer: Takes the place of ``FastWriter(checkpoint_id)``.
        planner: A :class:`FastSavePlanner` if ``None``.
        process_group: The ranks that save; all if ``None``. For a thread, a group of its own.
        async_checkpointer_type: Whether a thread or a process saves.
        async_stager: Copies the state; the writer does if ``None``.
        no_dist: Whether this process saves by itself.
        use_collectives: Whether ranks coordinate what they write.
        timeout_s: Seconds that the first rank to come to an exchange waits there for the last. That
            the first save in processes starts them is bounded by DCP: 30 minutes.
        on_busy: What to do while a former save, on any rank, still needs the memory that this one
            would be staged in: wait for its end, skip this save, or raise. The stager counts it.

    Returns:
        A future of the metadata; or, if the stager works in the background, futures of its end and
        of that of the save. They raise what :func:`save` does. ``None`` if the save was skipped.

    Raises:
        RankTimeoutError: A rank was late, stuck or gone when processes were to be started, or when
            ranks were to agree on whether one is busy.
        CheckpointError: A former save still goes on, and ``on_busy`` is ``"error"``.
        ValueError: ``timeout_s`` is no positive number of seconds; or
            ``on_busy`` is no such word, or not ``"wait"`` with a stager of another kind.

    Example::

        future = torch_ckpt.async_save(state, checkpoint_id="run/step-100", process_group=group)
        future.result()
    """
    writer = storage_writer or _writer_for(checkpoint_id)
    with group_of(process_group, no_dist=no_dist).call(timeout_s) as call:
        if on_busy != "wait" and _is_busy(async_stager or writer, on_busy, call):
            return None
        order = Order(checkpoint_id, writer, planner or FastSavePlanner(), use_collectives)
        by_thread = async_checkpointer_type == AsyncCheckpointerType.THREAD
        stager, closes = async_stager, False
        if stager is None:
            closes = not isinstance(writer, AsyncStager)
            stager = _default_stager() if closes else cast(AsyncStager, writer)
        with contextlib.ExitStack() as stack:
            if closes:
                stack.callback(stager.close)
            if isinstance(writer, FastWriter) and use_collectives and by_thread:
                all_equal = functools.partial(call.all_equal, phase="staging")
                stack.enter_context(writer.sharing(order.planner, all_equal))
            staged = stager.stage(orchestrate.state_dicts_of(state_dict))
            begin = save_in_thread if by_thread else save_in_process
            future = begin(order, staged, call)
            if closes:
                stack.pop_all()
                future.add_done_callback(lambda _: stager.close())
        if isinstance(staged, Future):
            return AsyncSaveResponse(_end_of(staged), cast(Future[None], future))
        if stager.should_synchronize_after_execute:
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
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> None:
    """As :func:`torch.distributed.checkpoint.load`, but no rank waits for another for ever.

    Args:
        state_dict: What to load, in place.
        checkpoint_id: Directory of the checkpoint.
        storage_reader: Takes the place of ``FastReader(checkpoint_id)``.
        planner: A :class:`FastLoadPlanner` if ``None``.
        process_group: The ranks that load; all if ``None``. Its first rank coordinates.
        no_dist: Whether this process loads by itself.
        trust_pickle: As for :class:`FastReader`: whether to unpickle whatever the checkpoint asks
            for, which can run any code.
        timeout_s: Seconds that the first rank to come to an exchange waits there for the last.
            Every rank must make the same calls in the same order.

    Raises:
        CheckpointException: A rank raised; maps ranks to their errors. No ``Exception``.
        RankTimeoutError: A rank was late, stuck or gone. ``state_dict`` may be loaded in part.
        ValueError: ``timeout_s`` is no positive number of seconds; or
            ``trust_pickle`` comes with a ``storage_reader``, which has its own.

    Example::

        torch_ckpt.load(state, checkpoint_id="run/step-100", timeout_s=600)
    """
    if trust_pickle and storage_reader is not None:
        raise ValueError("trust_pickle comes with a storage_reader: give it to the reader")
    planner = planner or FastLoadPlanner()
    with group_of(process_group, no_dist=no_dist).call(timeout_s) as call:
        reader: Any = storage_reader or _reader_for(checkpoint_id, trust_pickle)
        reader = _storage_setup(reader, checkpoint_id, reader=True)
        loaded = orchestrate.state_dicts_of({key: state_dict[key] for key in sorted(state_dict)})
        orchestrate.load(loaded, reader, planner, call)
        for key, value in loaded.items():
            if isinstance(state_dict[key], Stateful):
                state_dict[key].load_state_dict(value)
            else:
                state_dict[key] = value


@contextlib.contextmanager
def installed(
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    trust_pickle: bool = False,
) -> Iterator[None]:
    """Has DCP's own functions do what those of this module do.

    Within the context, ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` choose :class:`FastWriter`
    and :class:`FastReader` where they are given a ``checkpoint_id`` and no storage argument,
    :class:`FastSavePlanner` and :class:`FastLoadPlanner` where they are given no planner, and bound
    how long a rank waits for another. It holds for the whole process, and may be nested.

    Args:
        timeout_s: Seconds that the first rank to come to an exchange waits there for the last.
        trust_pickle: As for :class:`FastReader`, of the readers that are chosen.

    Raises:
        ValueError: ``timeout_s`` is no positive number of seconds.

    Example::

        with torch_ckpt.installed():
            dcp.save(state, checkpoint_id="run/step-100")
    """
    group_of(None, no_dist=True).call(timeout_s)  # Refuses what is no number of seconds.
    by_thread = functools.partial(_Executor, timeout_s, save_in_thread)
    by_process = functools.partial(_Executor, timeout_s, save_in_process)
    reader = _TrustingReader if trust_pickle else FastReader
    with contextlib.ExitStack() as stack:
        for module, name, ours in (
            (_storage_utils, "FileSystemWriter", FastWriter),
            (_storage_utils, "FileSystemReader", reader),
            (state_dict_saver, "_save_state_dict", _saving(timeout_s)),
            (state_dict_loader, "_load_state_dict", _loading(timeout_s)),
            (
                state_dict_saver,
                "_ThreadBasedAsyncCheckpointExecutor",
                by_thread,
            ),
            (
                state_dict_saver,
                "_ProcessBasedAsyncCheckpointExecutor",
                by_process,
            ),
        ):
            stack.enter_context(mock.patch.object(module, name, ours))
        yield


def _saving(timeout_s: float) -> Callable[..., Metadata]:
    """Takes the place of DCP's own function."""
    stock = state_dict_saver._save_state_dict

    def save(
        state_dict: dict[str, Any],
        storage_writer: StorageWriter,
        process_group: dist.ProcessGroup | None = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        planner: SavePlanner | None = None,
        use_collectives: bool = True,
    ) -> Metadata:
        planner = planner or FastSavePlanner()
        if coordinator_rank:
            return stock(
                state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner
            )
        with group_of(process_group, no_dist=no_dist).call(timeout_s) as call:
            return orchestrate.save(
                state_dict, storage_writer, planner, call, use_collectives=use_collectives
            )

    return save


def _loading(timeout_s: float) -> Callable[..., None]:
    """Takes the place of DCP's own function."""
    stock = state_dict_loader._load_state_dict

    def load(
        state_dict: dict[str, Any],
        storage_reader: StorageReader,
        process_group: dist.ProcessGroup | None = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        planner: LoadPlanner | None = None,
    ) -> None:
        planner = planner or FastLoadPlanner()
        if coordinator_rank:
            stock(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)
            return
        with group_of(process_group, no_dist=no_dist).call(timeout_s) as call:
            orchestrate.load(state_dict, storage_reader, planner, call)

    return load


class _Executor:
    """Takes the place of DCP's own executors.

    A writer is chosen here: the save begins in a thread or process that knows nothing of
    :func:`installed`.
    """

    def __init__(self, timeout_s: float, begin: Callable[..., Future[Metadata]]) -> None:
        self._timeout_s, self._begin = timeout_s, begin

    def execute_save(
        self,
        staging_future_or_state_dict: Any,
        *,
        checkpoint_id: _Path | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> Future[Metadata]:
        """As DCP's."""
        writer = storage_writer or _writer_for(checkpoint_id)
        order = Order(checkpoint_id, writer, planner or FastSavePlanner(), use_collectives)
        with group_of(process_group, no_dist=no_dist).call(self._timeout_s) as call:
            return self._begin(order, staging_future_or_state_dict, call)


def _default_stager() -> AsyncStager:
    """As DCP chooses it for writers that do not stage."""
    return DefaultStager(StagingOptions(False, False, False, False))


def _end_of(staging: Future[Any]) -> Future[None]:
    """A future that ends as this one, without its result."""
    ended: Future[None] = Future()

    def end(staged: Future[Any]) -> None:
        error = staged.exception()
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    staging.add_done_callback(end)
    return ended


def _is_busy(stages: Any, on_busy: str, call: Call) -> bool:
    """Whether any rank would have to wait, which is an error if it is to be."""
    stager = stages.stager if isinstance(stages, FastWriter) else stages
    if on_busy not in ("skip", "error") or not isinstance(stager, SnapshotStager):
        raise ValueError(
            f'{on_busy=} is not "wait", or, for FastWriter and SnapshotStager, "skip" or "error"'
        )
    if not call.any_rank(stager.is_busy, "beginning"):
        return False
    if on_busy == "skip":
        stager.skips += 1
        return True
    stager.refusals += 1
    raise CheckpointError("a former asynchronous save still goes on, on this rank or another")


def _writer_for(path: _Path | None) -> FastWriter | None:
    """A writer to that directory; ``None`` if it is none: DCP knows other kinds of writers."""
    return FastWriter(path) if path and FastWriter.validate_checkpoint_id(path) else None


def _reader_for(path: _Path | None, trust_pickle: bool) -> FastReader | None:
    if not path or not FastReader.validate_checkpoint_id(path):
        return None
    return FastReader(path, trust_pickle=trust_pickle)


class _TrustingReader(FastReader):
    """What DCP makes of a path where pickles are trusted."""

    def __init__(self, path: _Path) -> None:
        super().__init__(path, trust_pickle=True)
