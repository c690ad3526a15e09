"""The connections of a rank, which its first call opens through the store of the process group."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_process_group_store,
    _world,
)

from torch_ckpt.coordination.addresses import store_address
from torch_ckpt.coordination.connect import refuse
from torch_ckpt.coordination.exclusive import Exclusive
from torch_ckpt.coordination.loop import FORKED
from torch_ckpt.coordination.relay import Relay
from torch_ckpt.coordination.waiting import GRACE_S, result_of
from torch_ckpt.errors import CheckpointError, RankTimeoutError
from torch_ckpt.process_state import PROCESS

__all__ = ["Connections", "store_of"]


class Connections:
    """The connections of a rank, opened by the first call.

    The process group is ``None`` for a single process, which never connects. ``current`` is the
    thread that serves the connections; ``None`` before the first call. Raises CheckpointError if
    this process was forked and the process group belongs to its parent.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None, rank: int, names: list[int]
    ) -> None:
        if len(names) > 1 and process_group in PROCESS.inherited:
            raise CheckpointError(FORKED)
        if process_group is not None:
            self._store, self._place = store_of(process_group), _place_of_store(process_group)
        self._rank, self._names = rank, names
        self._attempts = itertools.count()
        self._exclusive = Exclusive("the group of ranks")
        self.current: Relay | None = None

    def started(self, phase: str) -> Relay:
        """Returns the relay; begins to connect if necessary.

        Raises CheckpointError if a signal handler has interrupted this method in the same thread,
        or if this process is a forked child. Raises RankTimeoutError on all ranks if the system has
        no more threads.
        """
        if self._exclusive.is_forked:
            raise CheckpointError(FORKED)
        if self.current is not None:
            return self.current
        attempt, failure = 0, ""
        with self._exclusive.use("connect to the other ranks", GRACE_S):
            if self.current is None:
                attempt = next(self._attempts)
                try:
                    store = self._own(attempt)
                    self.current = Relay(store, self._rank, self._names, phase, owner=self)
                except RuntimeError as error:  # The system has no more threads.
                    failure = str(error)
            relay = self.current
        if relay is None:
            refuse(self._own(attempt)(), self._rank, self._names, phase, failure)
            raise CheckpointError(failure)
        return relay

    def _own(self, attempt: int) -> Callable[[], Store]:
        """Returns a function that opens the store of an attempt to connect."""
        store = self._store
        return lambda: PrefixStore(f"{attempt}", store())

    def relay(self, phase: str, timeout_s: float) -> Relay:
        """Returns the relay, after this rank has connected.

        Raises RankTimeoutError if a rank did not connect in time, or the store does not answer.
        """
        relay = self.started(phase)
        relay.deadline.begin(timeout_s, phase)
        try:
            result_of(
                relay.connected,
                lambda: "the connections to the other ranks",
                timeout_s=timeout_s + GRACE_S,
                is_named=False,
            )
        except Exception as error:
            failure = relay.connected.exception() if relay.connected.done() else None
            if error is not failure and not isinstance(error, TimeoutError):
                raise  # A signal handler has raised it.
            if self.current is relay:
                self.current = None  # The next call retries.
                relay.end()
            if isinstance(error, RankTimeoutError):
                raise
            reason = str(error)
            if isinstance(error, TimeoutError):
                reason = f"it does not answer: {error}"
            raise RankTimeoutError(
                f"rank {self._names[self._rank]} cannot find the other ranks in the store of its "
                f"process group{self._place}: {reason}",
                phase=phase,
            ) from error
        return relay


def _place_of_store(group: dist.ProcessGroup) -> str:
    """Returns the address of the group's store for messages: `` at host:port``, or empty."""
    address = store_address(_get_process_group_store(group))
    return "" if address is None else f" at {address[0]}:{address[1]}"


def store_of(group: dist.ProcessGroup) -> Callable[[], Store]:
    """Returns a function that opens a connection to the group's store.

    The existing connection may be blocked by another thread.
    """
    store: Any = _get_process_group_store(group)
    # A launcher may use one store for all of its restarts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return lambda: PrefixStore(f"torch_ckpt/{attempt}", store.clone())


def _after_fork() -> None:
    """Records the process groups of the parent, whose connections the child cannot use."""
    if dist.is_available() and dist.is_initialized():
        PROCESS.inherited.update(_world.pg_map)


os.register_at_fork(after_in_child=_after_fork)
