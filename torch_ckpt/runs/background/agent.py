"""Saves through the agent of this machine, or in a thread where the agent cannot serve."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.tier import SnapshotTier
from torch_ckpt.agent.trainer import SnapshotAgent
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import StorageError, UnsupportedError
from torch_ckpt.runs.background.thread import ThreadBackend
from torch_ckpt.runs.step_tiers import Tier
from torch_ckpt.storage.writer import FastWriter

__all__ = ["AgentBackend", "backend_for"]

T = TypeVar("T")


class AgentBackend:
    """Saves by way of the agent.

    If that cannot save what some rank has, or has no memory for it, all ranks save without it from
    then on. All ranks call the same methods.

    Args:
        agent: Of this machine.
        group: The ranks.
        sync: Whether checkpoints are to survive a power cut.
        reader: Arguments for readers of what is in memory.
        without: Makes who saves without agent; all ranks call it at the same time.
    """

    def __init__(
        self,
        agent: SnapshotAgent,
        group: Group,
        *,
        sync: bool,
        reader: dict[str, Any] | None,
        without: Callable[[], ThreadBackend],
    ) -> None:
        self._agent = agent
        self._group = group
        self._sync = sync
        self._without = without
        self._instead: ThreadBackend | None = None
        self._memory = SnapshotTier(agent, reader=reader)
        self.tiers: Sequence[Tier] = [self._memory]

    @property
    def can_stay_in_memory(self) -> bool:
        """Whether it can keep a step in memory alone."""
        return self._instead is None

    def save(
        self, step: int, state: dict[str, Any], path: str | os.PathLike[str], *, persist: bool
    ) -> Future[Any]:
        """As :meth:`ThreadBackend.save`; without ``persist`` the step stays in memory."""

        def hand_over() -> Future[Any]:
            future = self._agent.async_save(
                state, path, step=step, sync=self._sync, persist=persist
            )
            assert future is not None  # It waits for a slot.
            return future

        if self._instead is None:
            future = self._try(hand_over, self._agent.withdraw)
            if future is not None:
                return future
        assert self._instead is not None
        return self._instead.save(step, state, path, persist=True)

    def reserve(self, state: dict[str, Any]) -> None:
        """Makes memory for states like this."""
        if self._instead is None:
            self._try(lambda: self._agent.reserve(state), lambda: None)

    def leave(self) -> None:
        """Leaves what is in memory to a process that starts again."""
        if self._instead is None:
            self._agent.leave()

    def close(self) -> None:
        """Ends in good order."""
        if self._instead is None:
            self._agent.close()
        else:
            self._instead.close()

    def _try(self, work: Callable[[], T], undo: Callable[[], None]) -> T | None:
        """Has the agent do something for all ranks. If it cannot for one, all go on without it.

        Returns:
            What it has done; ``None`` if ranks are to go on without it.

        Raises:
            Exception: What a rank has raised, if that is nothing to be mended; on all.
        """
        done, failure = None, None
        try:
            done = work()
        except Exception as error:  # The others do not know of it.
            failure = error
        try:
            reason = self._group.decide(
                "handing over to the agent",
                lambda: _why_without(failure),
                lambda said: next(filter(None, said), ""),
                timeout_s=self._agent.timeout_s,
            )
        except BaseException:
            undo()
            raise
        if not reason:
            return done
        undo()
        self._go_on_without(reason)
        return None

    def _go_on_without(self, reason: str) -> None:
        self._instead = self._without()
        self._memory.end()
        self._agent.close()  # It brings to disk what it has.
        if self._group.is_coordinator:
            _warn_of(reason)


def _why_without(failure: Exception | None) -> str:
    """Why ranks are to go on without an agent; empty if they need not.

    Raises:
        Exception: The failure, if it would be the same without.
    """
    if failure is None:
        return ""
    if isinstance(failure, (StorageError, UnsupportedError)):
        return _of_this_rank(failure)
    raise failure


def _of_this_rank(failure: Exception) -> str:
    is_alone = not (dist.is_available() and dist.is_initialized())
    rank = "" if is_alone else f"rank {dist.get_rank()} ({socket.gethostname()}): "
    return f"{rank}{failure}"


def _warn_of(reason: str) -> None:
    warnings.warn(f"saving goes on without an agent: {reason}", stacklevel=6)


def backend_for(
    group: Group,
    process_group: dist.ProcessGroup | None,
    writer: FastWriter,
    *,
    asynchronous: bool,
    agent: bool | AgentOptions,
    timeout_s: float,
    reader: dict[str, Any] | None,
) -> ThreadBackend | AgentBackend | None:
    """Who saves in the background; ``None`` if nobody does.

    Args:
        group: The ranks of the run.
        process_group: The same, as the user has given them.
        writer: Of all saves; its path is that of the run.
        asynchronous: Whether somebody is to.
        agent: Whether the agent is.
        timeout_s: Seconds that one rank, or a save, waits.
        reader: Arguments for readers of what is in memory.

    Raises:
        ValueError: There is to be an agent, and saves are not asynchronous.
    """
    if not asynchronous:
        if agent:
            raise ValueError("an agent saves in the background: asynchronous=True")
        return None

    def by_thread() -> ThreadBackend:
        return ThreadBackend(process_group, timeout_s=timeout_s, writer=writer)

    if not agent:
        return by_thread()
    made, reason = _agent_for(
        group,
        process_group,
        writer,
        timeout_s=timeout_s,
        options=agent if isinstance(agent, AgentOptions) else None,
    )
    if made is None:
        instead = by_thread()
        if group.is_coordinator:
            _warn_of(reason)
        return instead
    return AgentBackend(made, group, sync=writer.sync_files, reader=reader, without=by_thread)


def _agent_for(
    group: Group,
    process_group: dist.ProcessGroup | None,
    writer: FastWriter,
    *,
    timeout_s: float,
    options: AgentOptions | None,
) -> tuple[SnapshotAgent | None, str]:
    """The agent of this machine; ``None``, and why, if a rank has no memory or cannot start one.

    Raises:
        Exception: A rank cannot have one for another reason; on all ranks.
    """
    agent, failure = None, None
    try:
        agent = SnapshotAgent(
            writer.path, process_group=process_group, options=options, timeout_s=timeout_s
        )
    except Exception as error:
        failure = error

    def own() -> str:
        if failure is not None and not isinstance(failure, StorageError):
            raise failure
        return "" if failure is None else _of_this_rank(failure)

    try:
        reason = group.decide(
            "starting the agent", own, lambda said: max(said), timeout_s=timeout_s
        )
    except BaseException:
        if agent is not None:
            agent.close()
        raise
    if reason and agent is not None:
        agent.close()
    return (None, reason) if reason else (agent, reason)
