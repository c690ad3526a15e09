"""DCP's own functions with this package's storage, a deadline for every rank, and tree planning."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Literal
from unittest import mock

import torch.distributed as dist
from torch.distributed.checkpoint import (
    _storage_utils,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint._async_process_executor import (
    _ProcessBasedAsyncCheckpointExecutor,
)
from torch.distributed.checkpoint._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torch_ckpt.coordination.deadline import (
    DEFAULT_TIMEOUT_S,
    bounded_call,
    bounded_everywhere,
)
from torch_ckpt.coordination.roll_call import RollCalls
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
    with bounded_call(timeout_s, group=process_group, no_dist=no_dist):
        metadata: Metadata = state_dict_saver.save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer or _writer_for(checkpoint_id),
            planner=planner or FastSavePlanner(),
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    return metadata


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
    call = bounded_call(timeout_s, group=process_group, no_dist=no_dist)
    with call as roll_calls:
        if on_busy != "wait" and _is_busy(async_stager or writer, on_busy, roll_calls):
            return None
        planner = planner or FastSavePlanner()
        with contextlib.ExitStack() as stack:
            by_thread = async_checkpointer_type == AsyncCheckpointerType.THREAD
            if isinstance(writer, FastWriter) and roll_calls and use_collectives and by_thread:
                all_say = functools.partial(roll_calls.all_say, phase="staging")
                stack.enter_context(writer.sharing(planner, all_say))
            return state_dict_saver.async_save(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_writer=writer,
                planner=planner,
                process_group=process_group,
                async_checkpointer_type=async_checkpointer_type,
                async_stager=async_stager,
                no_dist=no_dist,
                use_collectives=use_collectives,
            )


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
    with bounded_call(timeout_s, group=process_group, no_dist=no_dist):
        state_dict_loader.load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader or _reader_for(checkpoint_id, trust_pickle),
            planner=planner or FastLoadPlanner(),
            process_group=process_group,
            no_dist=no_dist,
        )


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
    with contextlib.ExitStack() as stack:
        stack.enter_context(bounded_everywhere(timeout_s))
        stack.enter_context(mock.patch.object(_storage_utils, "FileSystemWriter", FastWriter))
        reader = _TrustingReader if trust_pickle else FastReader
        stack.enter_context(mock.patch.object(_storage_utils, "FileSystemReader", reader))
        stack.enter_context(
            mock.patch.object(state_dict_saver, "DefaultSavePlanner", FastSavePlanner)
        )
        stack.enter_context(
            mock.patch.object(state_dict_loader, "DefaultLoadPlanner", FastLoadPlanner)
        )
        for executor in (_ThreadBasedAsyncCheckpointExecutor, _ProcessBasedAsyncCheckpointExecutor):
            # A background save looks for a writer when it begins, in a thread or process that knows
            # nothing of this context: choose here.
            stack.enter_context(
                mock.patch.object(executor, "execute_save", _choosing_here(executor.execute_save))
            )
        yield


def _choosing_here(execute_save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute_save)
    def execute(*args: Any, **kwargs: Any) -> Any:
        group, no_dist = kwargs.get("process_group"), kwargs.get("no_dist", False)
        with bounded_call(group=group, no_dist=no_dist):
            writer = kwargs.get("storage_writer") or _writer_for(kwargs.get("checkpoint_id"))
            planner = kwargs.get("planner") or FastSavePlanner()
            return execute_save(*args, **{**kwargs, "storage_writer": writer, "planner": planner})

    return execute


def _is_busy(stages: Any, on_busy: str, roll_calls: RollCalls | None) -> bool:
    """Whether any rank would have to wait, which is an error if it is to be."""
    stager = stages.stager if isinstance(stages, FastWriter) else stages
    if on_busy not in ("skip", "error") or not isinstance(stager, SnapshotStager):
        raise ValueError(
            f'{on_busy=} is not "wait", or, for FastWriter and SnapshotStager, "skip" or "error"'
        )
    is_busy = stager.is_busy
    if roll_calls is not None:
        is_busy = roll_calls.any_says(is_busy, "beginning")
    if not is_busy:
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
