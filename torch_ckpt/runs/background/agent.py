"""AgentBackend: background saves through the agent, or through a thread as a fallback."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from torch_ckpt.agent.identity import id_in_directory, write_id
from torch_ckpt.agent.member import find_member
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.rung import SnapshotRung
from torch_ckpt.agent.snapshot_memory import SnapshotMemory
from torch_ckpt.agent.trainer import SnapshotAgent
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CheckpointError, StorageError, UnsupportedError, text_of
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.places import Places
from torch_ckpt.ladder.removal import discard_from_memory
from torch_ckpt.records.record import current_record, phase
from torch_ckpt.runs.background.thread import ThreadBackend
from torch_ckpt.storage.copying import CheckpointCopy
from torch_ckpt.storage.writer import FastWriter

__all__ = ["ONLY_IN_MEMORY", "AgentBackend", "backend_for"]

_LOG = logging.getLogger("torch_ckpt")

T = TypeVar("T")

ONLY_IN_MEMORY = (
    "is in the shared memory of this machine only. It remains for a day, unless the machine "
    "restarts. A job that begins here until then, in the directory of the same run, restores it"
)
"""The fate of a last step that the agent cannot write."""


class AgentBackend(ThreadBackend):
    """Saves through the agent of this machine. All ranks call the same methods.

    If the agent of any rank has too little memory, or cannot save the rank's state, all ranks save
    without the agent from then on. The agent uses ``sync_files``, the ``base`` and the
    ``small_files`` of the step from the writer.
    """

    def __init__(
        self,
        agent: SnapshotAgent,
        group: Group,
        *,
        run: Location,
        reader: dict[str, Any] | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._agent, self._group, self._run = agent, group, run
        self._warned: set[str] = set()
        self.rungs = [SnapshotRung(agent, reader=reader)]
        self.can_stay_in_memory = True  # Until the ranks save without the agent.
        # Then the agent writes the last step, if it is in memory only and no later save succeeds.
        self._last: tuple[int, Future[Any]] | None = None

    def save(
        self, step: int, state: dict[str, Any], path: str | os.PathLike[str], *, persist: bool
    ) -> Future[Any]:
        """Begins to save a step to ``path``. Without ``persist``, the step remains in memory."""
        record = current_record()

        def begin_save() -> Future[Any]:
            with phase("stage"):
                try:
                    future = self._agent.async_save(
                        *(state, path),
                        step=step,
                        sync=self._writer.sync_files,
                        persist=persist,
                        small_files=self._writer.small_files,
                        base=self._writer.base,
                    )
                except Exception as error:
                    if _is_of_agent(error):  # The save continues without the agent.
                        error.is_recorded = False  # type: ignore[attr-defined]
                    raise
            assert future is not None  # The agent waits for a slot.
            future.add_done_callback(lambda ended: ended.exception())  # The run reports it.
            if persist and record is not None:
                begin = time.monotonic()
                future.add_done_callback(
                    lambda ended: record.add("persist", begin, ended.exception())
                )
            return future

        if self.can_stay_in_memory:
            future = self._run_or_fall_back(begin_save, self._agent.withdraw)
            if future is not None:
                return future

        def discard() -> None:
            self.forget(lambda each: each == step)
            try:  # First: the agent, which may be frozen, must not commit an older copy later.
                discard_from_memory(self._run, lambda each: each == step)
            except StorageError as error:  # The system refuses to map the memory.
                _LOG.warning("an older copy of step %d may remain in memory: %s", step, error)

        self._group.decide(
            "saving without the agent", discard, lambda _: None, timeout_s=self._agent.timeout_s
        )
        future = super().save(step, state, path, persist=True)
        future.add_done_callback(self._saved)
        return future

    def _saved(self, ended: Future[Any]) -> None:
        if ended.exception() is None:
            self._drop_last()

    def _drop_last(self) -> None:
        """Drops the last step in memory. If the agent cannot write it, nothing is reported."""
        last, self._last = self._last, None
        if last is not None:
            last[1].add_done_callback(lambda ended: ended.exception())

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocates memory for states like this."""
        if self.can_stay_in_memory:
            self._run_or_fall_back(lambda: self._agent.reserve(state), lambda: None)

    def may_commit(self, step: int) -> bool:
        return self._agent.has_in_memory(step)

    def copy(self, source: Location, target: Location, **options: Any) -> CheckpointCopy:
        """Returns a copy of a checkpoint, whose files the agent sends."""
        if self.can_stay_in_memory:
            return self._agent.copy(source, target, warned=self._warned, **options)
        return super().copy(source, target, **options)

    def has_newest(self) -> bool:
        return (self._agent.in_memory if self.can_stay_in_memory else self._last) is not None

    def write_newest(self) -> tuple[int, Future[Any]] | None:
        if self.can_stay_in_memory:
            return self._agent.write_newest()
        last, self._last = self._last, None
        return last

    def claim(self, directory: Location) -> None:
        run_id = self._agent.member.run_id
        if run_id is not None and id_in_directory(directory) is None:
            write_id(directory, run_id.id)

    def forget(self, is_discarded: Callable[[int], bool]) -> None:
        if self.can_stay_in_memory:
            self._agent.forget(is_discarded)
        elif self._last is not None and is_discarded(self._last[0]):
            self._drop_last()

    def leave(self) -> None:
        if self.can_stay_in_memory:
            self._agent.leave()

    def close(self) -> None:
        if self.can_stay_in_memory:
            self.can_stay_in_memory = False
            self._agent.close()

    def _run_or_fall_back(self, work: Callable[[], T], undo: Callable[[], None]) -> T | None:
        """Calls ``work`` on all ranks. If the agent fails on any rank, all save without it.

        In that case, each rank calls ``undo``, and the result is ``None``. If a save without the
        agent would also fail, the error of a rank is raised on all ranks.
        """
        result, failure = None, None
        try:
            result = work()
        except (KeyboardInterrupt, SystemExit):
            undo()
            raise
        except BaseException as error:  # Reported to the other ranks below.
            failure = error
        try:
            reason = self._group.decide(
                "saving with the agent",
                lambda: _fallback_reason(failure),
                lambda reasons: next(filter(None, reasons), ""),
                timeout_s=self._agent.timeout_s,
            )
        except BaseException:
            undo()
            raise
        finally:
            failure = None  # Its traceback refers to this frame, and so to the state.
        if not reason:
            return result
        undo()
        self.can_stay_in_memory = False
        close = self._agent.close
        with contextlib.suppress(CheckpointError):  # The system has no more threads.
            self._last = self._agent.write_newest()
        if self._last is None:
            close()  # The agent writes its snapshots to disk.
        else:  # Training does not wait. The thread of the future cannot close, which waits for it.
            self._last[1].add_done_callback(lambda _: threading.Thread(target=close).start())
        if self._group.is_coordinator:
            _warn_of(reason)
        return None


def _fallback_reason(failure: BaseException | None) -> str:
    """Returns why the ranks must save without an agent; empty if they can use it.

    Raises the failure if saving without an agent would fail too.
    """
    if failure is None:
        return ""
    if _is_of_agent(failure):
        return _with_rank(failure)
    raise failure


def _is_of_agent(failure: BaseException) -> bool:
    """Returns whether a failure concerns only the agent, which is optional."""
    is_of_system = isinstance(failure, OSError) and not isinstance(failure, CheckpointError)
    return is_of_system or isinstance(failure, (StorageError, UnsupportedError))


def _with_rank(failure: BaseException) -> str:
    """Returns the text of a failure with the failed rank: this one, unless a note names it."""
    for note in getattr(failure, "__notes__", ()):
        if note.startswith("raised on rank "):
            return f"{text_of(failure)} ({note})"
    is_alone = not (dist.is_available() and dist.is_initialized())
    rank = "" if is_alone else f"rank {dist.get_rank()} ({socket.gethostname()}): "
    return f"{rank}{text_of(failure)}"


def _warn_of(reason: str) -> None:
    warnings.warn(f"saving continues without an agent: {reason}", stacklevel=6)


def backend_for(
    group: Group,
    process_group: dist.ProcessGroup | None,
    writer: FastWriter,
    *,
    asynchronous: bool,
    agent: bool | AgentOptions,
    timeout_s: float,
    reader: dict[str, Any] | None,
    run: Location,
    places: Places,
    reuses: bool = False,
) -> ThreadBackend:
    """Returns the backend of a run's background saves, if it has any.

    The run saves to the path of ``writer``, which is a local directory or that of the ``run``. If
    it has several ``places``, their agents coordinate in the directory of the ``run``, which always
    names their memory. ``reuses``: whether a save takes unchanged data from the previous one.
    ``timeout_s`` limits how long a rank waits for another rank, and a save for a slot. Raises
    ValueError if ``agent`` is given, and saves are not asynchronous.
    """
    if agent and not asynchronous:
        raise ValueError("agent=True requires asynchronous=True: an agent saves in the background")
    how: dict[str, Any] = {"process_group": process_group, "timeout_s": timeout_s, "writer": writer}
    if not agent:
        return ThreadBackend(**how)
    is_apart = places.others > 0
    options = (
        agent
        if isinstance(agent, AgentOptions)
        else AgentOptions(check_replicas=writer.check_replicas)
    )
    started, reason = _started(
        functools.partial(
            SnapshotAgent,
            run.checkpoint_id,
            process_group=process_group,
            options=replace(options, reuse=reuses),
            timeout_s=timeout_s,
            has_directory=True,
            local=writer.path,
            shares_local=not is_apart,
            group=group,
        ),
        group,
        places if is_apart else None,
        timeout_s,
    )
    if started is not None:
        return AgentBackend(started, group, run=run, reader=reader, **how)
    if group.is_coordinator:
        _warn_of(reason)
    backend = ThreadBackend(**how)
    if (memory := _readable_memory(group, run, timeout_s)) is not None:
        backend.rungs = [SnapshotRung(memory, reader=reader)]
    return backend


def _readable_memory(group: Group, run: Location, timeout_s: float) -> SnapshotMemory | None:
    """Returns the memory of a run whose agent cannot be used, for restores; ``None`` if unreadable.

    If the directory of the run has no id, only the agent knows whether the memory is of this run,
    and not of one in another container.
    """
    try:
        member = find_member(run.checkpoint_id, group, timeout_s, run, only_reads=True)
    except Exception as error:  # On all ranks.
        if not _is_of_agent(error):
            raise
        return None
    return None if member.run_id is None else SnapshotMemory(member, group, timeout_s)


def _started(
    start: Callable[[], SnapshotAgent], group: Group, places: Places | None, timeout_s: float
) -> tuple[SnapshotAgent | None, str]:
    """Returns the agent of a run, or ``None`` and the reason if any rank cannot have it.

    ``places`` is given if each machine has a local directory with the files of its ranks only. If a
    rank fails for another reason, its error is raised on all ranks.
    """
    agent, failure = None, None
    try:
        agent = start()
    except BaseException as error:  # Reported to the other ranks below.
        failure = error

    def own() -> str:
        if failure is not None and not _is_of_agent(failure):
            raise failure
        if failure is not None:
            return _with_rank(failure)
        of_machine = [] if agent is None else list(agent.member.ranks_here)
        if agent is not None and places is not None and places.here != of_machine:
            return (
                f"ranks {places.here} share a local directory, and ranks {of_machine} a machine; "
                "the agent requires one local directory per machine"
            )
        return ""

    try:
        reason = group.decide(
            "starting the agent", own, lambda reasons: max(reasons), timeout_s=timeout_s
        )
    except BaseException:
        if agent is not None:
            agent.close()
        raise
    finally:
        failure = None  # Its traceback refers to this frame.
    if reason and agent is not None:
        agent.close()
    return (None, reason) if reason else (agent, reason)
