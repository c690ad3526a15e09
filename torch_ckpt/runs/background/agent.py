"""AgentBackend: background saves through the agent, or through a thread as a fallback."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.rung import SnapshotRung
from torch_ckpt.agent.trainer import SnapshotAgent
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CheckpointError, StorageError, UnsupportedError, text_of
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.ladder import Rung
from torch_ckpt.ladder.places import Places
from torch_ckpt.records.record import current_record, phase
from torch_ckpt.runs.background.thread import ThreadBackend
from torch_ckpt.storage.copying import CheckpointCopy
from torch_ckpt.storage.writer import FastWriter

__all__ = ["ONLY_IN_MEMORY", "AgentBackend", "backend_for"]

T = TypeVar("T")

ONLY_IN_MEMORY = (
    "is in the shared memory of this machine only. It remains for a day, unless the machine "
    "restarts. A job that begins here until then, in the directory of the same run, restores it"
)
"""What becomes of a last step that the agent cannot write."""


class AgentBackend:
    """Saves through the agent of this machine. All ranks call the same methods.

    If the agent of any rank has too little memory, or cannot save the rank's state, all ranks save
    without the agent from then on. All ranks then call ``make_fallback`` at the same time. Of
    ``writer``, the agent uses ``sync_files`` and the ``small_files`` of the step.
    """

    def __init__(
        self,
        agent: SnapshotAgent,
        group: Group,
        *,
        writer: FastWriter,
        reader: dict[str, Any] | None,
        make_fallback: Callable[[], ThreadBackend],
    ) -> None:
        self._agent = agent
        self._group = group
        self._writer = writer
        self._make_fallback = make_fallback
        self._fallback: ThreadBackend | None = None
        self._warned: set[str] = set()
        self._memory = SnapshotRung(agent, reader=reader)
        self.rungs: Sequence[Rung] = [self._memory]

    @property
    def can_stay_in_memory(self) -> bool:
        """Whether the backend can retain a step in memory without writing it to disk."""
        return self._fallback is None

    def save(
        self, step: int, state: dict[str, Any], path: str | os.PathLike[str], *, persist: bool
    ) -> Future[Any]:
        """Begins to save a step to ``path``; without ``persist`` the step remains in memory."""
        record = current_record()

        def begin_save() -> Future[Any]:
            with phase("stage"):
                future = self._agent.async_save(
                    *(state, path),
                    step=step,
                    sync=self._writer.sync_files,
                    persist=persist,
                    small_files=self._writer.small_files,
                )
            assert future is not None  # The agent waits for a slot.
            future.add_done_callback(lambda ended: ended.exception())  # The run reports it.
            if persist and record is not None:
                begin = time.monotonic()
                future.add_done_callback(
                    lambda ended: record.add("persist", begin, ended.exception())
                )
            return future

        if self._fallback is None:
            future = self._run_or_fall_back(begin_save, self._agent.withdraw)
            if future is not None:
                return future
        assert self._fallback is not None
        return self._fallback.save(step, state, path, persist=True)

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocates memory for states like this."""
        if self._fallback is None:
            self._run_or_fall_back(lambda: self._agent.reserve(state), lambda: None)

    def may_commit(self, step: int) -> bool:
        """Returns whether an agent may still commit a step whose save has not succeeded."""
        return self._agent.has_in_memory(step)

    def copy(self, source: Location, target: Location, **options: Any) -> CheckpointCopy:
        """Returns a copy of a checkpoint, whose files the agent sends."""
        if self._fallback is None:
            return self._agent.copy(source, target, warned=self._warned, **options)
        return self._fallback.copy(source, target, **options)

    def write_newest(self) -> tuple[int, Future[Any]] | None:
        """Begins to write the last step, if it is in memory alone: its number, and its future."""
        return self._agent.write_newest() if self._fallback is None else None

    def forget(self) -> None:
        """Forgets the step that was saved last, after steps were discarded from memory."""
        if self._fallback is None:
            self._agent.forget()

    def leave(self) -> None:
        """Leaves the snapshots in memory for the next process."""
        if self._fallback is None:
            self._agent.leave()

    def close(self) -> None:
        """Ends the backend in good order."""
        if self._fallback is None:
            self._agent.close()
        else:
            self._fallback.close()

    def _run_or_fall_back(self, work: Callable[[], T], undo: Callable[[], None]) -> T | None:
        """Calls ``work`` on all ranks; if the agent fails on any rank, all ranks fall back.

        Each rank then calls ``undo``, and the result is ``None``. If the fallback would fail too,
        the error of a rank is raised on all ranks.
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
        self._fall_back(reason)
        return None

    def _fall_back(self, reason: str) -> None:
        self._fallback = self._make_fallback()
        self._memory.end()
        self._agent.forget()
        self._agent.close()  # The agent writes its snapshots to disk.
        if self._group.is_coordinator:
            _warn_of(reason)


def _fallback_reason(failure: BaseException | None) -> str:
    """Returns why the ranks must save without an agent; empty if they need not.

    Raises the failure if saving without an agent would fail too.
    """
    if failure is None:
        return ""
    if _is_of_agent(failure):
        return _with_rank(failure)
    raise failure


def _is_of_agent(failure: BaseException) -> bool:
    """Returns whether a failure concerns the agent alone, which is optional."""
    is_of_system = isinstance(failure, OSError) and not isinstance(failure, CheckpointError)
    return is_of_system or isinstance(failure, (StorageError, UnsupportedError))


def _with_rank(failure: BaseException) -> str:
    """Returns the text of a failure, and which rank has failed: this one, unless a note says it."""
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
    shared: Location,
    places: Places,
    reuses: bool = False,
) -> ThreadBackend | AgentBackend | None:
    """Returns the backend of a run's background saves; ``None`` if saves are synchronous.

    The path of ``writer`` is where the run saves, at these ``places``, and ``shared`` a directory
    that all machines share: the same, or else that of the run.
    ``reuses`` says that a save takes what has not changed from the last one.
    ``timeout_s`` is how long a rank waits for another rank, or a save for a slot. Raises ValueError
    if ``agent`` is given, and saves are not asynchronous.
    """
    if not asynchronous:
        if agent:
            raise ValueError(
                "agent=True requires asynchronous=True: an agent saves in the background"
            )
        return None

    def make_thread_backend() -> ThreadBackend:
        return ThreadBackend(process_group, timeout_s=timeout_s, writer=writer)

    if not agent:
        return make_thread_backend()
    started, reason = _start_agent(
        group,
        process_group,
        shared.checkpoint_id,
        None if shared == Location(writer.path) else writer.path,
        places=places,
        timeout_s=timeout_s,
        options=replace(
            agent
            if isinstance(agent, AgentOptions)
            else AgentOptions(check_replicas=writer.check_replicas),
            reuse=reuses,
        ),
    )
    if started is None:
        fallback = make_thread_backend()
        if group.is_coordinator:
            _warn_of(reason)
        return fallback
    return AgentBackend(
        started,
        group,
        writer=writer,
        reader=reader,
        make_fallback=make_thread_backend,
    )


def _start_agent(
    group: Group,
    process_group: dist.ProcessGroup | None,
    directory: str | os.PathLike[str],
    local: str | os.PathLike[str] | None,
    *,
    places: Places,
    timeout_s: float,
    options: AgentOptions,
) -> tuple[SnapshotAgent | None, str]:
    """Returns the agent of a run, or ``None`` and the reason if any rank cannot have it.

    Any other error of a rank is raised on all ranks.
    """
    agent, failure = None, None
    try:
        agent = SnapshotAgent(
            directory,
            process_group=process_group,
            options=options,
            timeout_s=timeout_s,
            has_directory=True,
            local=local,
            group=group,
        )
    except BaseException as error:  # Reported to the other ranks below.
        failure = error

    def own() -> str:
        if failure is not None and not _is_of_agent(failure):
            raise failure
        if failure is not None:
            return _with_rank(failure)
        if agent is not None and local is not None and places.here != list(agent.ranks_here):
            return (
                f"ranks {places.here} share a local directory, and ranks {list(agent.ranks_here)} "
                "a machine; the agent of each machine needs a local directory of its own"
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
