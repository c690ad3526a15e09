"""Copies of local steps to the directory of the run, which the agent makes in place of a rank.

The :class:`AgentCopy` of a rank sends one message again and again. The :class:`Copies` of the agent
begin the copy unless it is in progress, wait a moment, and reply with its progress. So a copy
continues when the rank dies, and the next rank that requests it joins it. If the agent dies, or
does not reach the directory of the run, the rank itself copies the remaining files. The agent
copies data files only, whose names are unique to their save, and never commits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from torch_ckpt.agent.client import AgentClient
from torch_ckpt.agent.identity import RunId, check_reaches, id_in_directory
from torch_ckpt.agent.messages import Failure, Kind, Message, failure_of, raise_failure
from torch_ckpt.errors import CancelledError, CheckpointError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.storage.copying import CheckpointCopy

__all__ = ["AgentCopy", "Copies"]

_POLL_S = 0.5
"""Longest wait of one request, and so the delay until a rank cancels a copy."""

_END_S = 5.0
"""Time for cancelled copies to end."""

_FIELDS = ("source", "target", "save_id", "nbytes_per_s", "base")
"""The fields of a request that specify the copy."""

_LOG = logging.getLogger("torch_ckpt")  # For ranks.
_log = logging.getLogger("torch_ckpt.agent")


class AgentCopy(CheckpointCopy):
    """A copy whose data files the agent of this machine sends, if it can.

    ``connect`` returns a client of the agent, and raises CheckpointError if no agent runs.
    ``warned`` contains the reasons, already logged, why agents could not copy.
    """

    def __init__(
        self,
        source: Location,
        target: Location,
        *,
        connect: Callable[[], AgentClient],
        warned: set[str],
        nbytes_per_s: int = 0,
        niceness: int = 0,
        base: Location | None = None,
    ) -> None:
        super().__init__(source, target, nbytes_per_s=nbytes_per_s, niceness=niceness, base=base)
        self._connect, self._warned, self._nbytes_per_s = connect, warned, nbytes_per_s
        self._read_nbytes = 0  # By the agent.
        self._is_cancelled = self._has_left = False

    @property
    def read_nbytes(self) -> int:
        return self._read_nbytes + super().read_nbytes

    def cancel(self) -> None:
        self._is_cancelled = True
        super().cancel()

    def leave(self) -> None:
        self._has_left = True
        super().cancel()

    def copy_files(self) -> None:
        try:
            with contextlib.closing(self._connect()) as client:
                failure = self._wait(client)
        except CheckpointError as error:
            if self._is_cancelled or self._has_left:
                raise CancelledError(f"the copy of {self.source} was cancelled") from error
            if str(error) not in self._warned:
                self._warned.add(str(error))
                where = self.target.parent
                _LOG.warning("this process promotes steps to %s, not the agent: %s", where, error)
            super().copy_files()
            return
        if failure is not None:
            raise_failure(failure)

    def _wait(self, client: AgentClient) -> Failure | None:
        """Waits until the agent has copied; returns why the copy has failed, if it has.

        Raises CheckpointError if the agent cannot copy, or the copy was cancelled.
        """
        is_first = True
        while not self._has_left:
            answer = client.request(
                Kind.COPY,
                source=str(self.source),
                target=str(self.target),
                base=None if self.base is None else str(self.base),
                save_id=self.save_id,
                nbytes_per_s=self._nbytes_per_s,
                wait_s=_POLL_S,
                is_first=is_first,
                is_cancelled=self._is_cancelled,
            )
            is_first, self._read_nbytes = False, answer["nbytes"]
            self._linked_nbytes = answer["linked_nbytes"]
            if answer["has_ended"]:
                failure: Failure | None = answer["failure"]
                return failure
        raise CancelledError("the agent continues")


class Copies:
    """The copies by an agent, one at a time for each local directory.

    The caller of a method holds the lock of ``changed``, which is notified when a copy has ended.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._copies: dict[str, _Copy] = {}  # The last one of each local directory.
        self._is_closed = False

    @property
    def are_running(self) -> bool:
        return any(not copy.has_ended for copy in self._copies.values())

    def advance(self, message: Message) -> Message:
        """Begins or joins the copy of a request; returns the answer after a while.

        Cancels another copy from the same local directory first. A copy that has ended begins again
        at the first request of a rank. Raises CheckpointError if this agent cannot copy.
        """
        order = tuple(message[field] for field in _FIELDS)
        wait_s, local = message["wait_s"], str(Location(message["source"]).parent)
        last = self._copies.get(local)
        is_other = last is not None and last.order != order
        if last is not None and is_other:
            last.cancel()
            if not last.wait(wait_s):
                return _answer(None, has_ended=False)
        if last is None or is_other or (message["is_first"] and last.has_ended):
            if self._is_closed or message["is_cancelled"]:
                raise CancelledError("cannot copy: the agent is ending, or has begun no such copy")
            last = self._copies[local] = _Copy(order, self._changed)
        if message["is_cancelled"]:
            last.cancel()
        last.wait(wait_s)
        return last.answer()

    def close(self) -> None:
        """Cancels all copies, and waits a moment until they have ended."""
        self._is_closed = True
        for copy in self._copies.values():
            copy.cancel()
        self._changed.wait_for(lambda: not self.are_running, _END_S)


class _Copy:
    """One copy, which runs in a thread. ``order`` contains the fields of its request."""

    def __init__(self, order: tuple[Any, ...], changed: threading.Condition) -> None:
        self.order, self._changed = order, changed
        self.has_ended = False
        self._copy: CheckpointCopy | None = None  # Set once the agent has checked that it can copy.
        self._error: BaseException | None = None
        self._is_cancelled = False
        threading.Thread(target=self._run, name="torch_ckpt-copy", daemon=True).start()

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._copy is not None:
            self._copy.cancel()

    def wait(self, wait_s: float) -> bool:
        """Waits for the end, and returns whether the copy has ended."""
        return self._changed.wait_for(lambda: self.has_ended, wait_s)

    def answer(self) -> Message:
        """Returns the answer to a rank. Raises the error of a cancelled or impossible copy."""
        if self._error is not None and (self._copy is None or self._is_cancelled):
            raise self._error
        return _answer(self._copy, has_ended=self.has_ended, error=self._error)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            copy = self._open(*self.order)
            with self._changed:
                self._copy = copy
                if self._is_cancelled:
                    copy.cancel()
            copy.copy_files()
        except BaseException as problem:
            error = problem
            _log.warning("the copy of %s has ended: %s", self.order[0], error)
        with self._changed:
            self._error, self.has_ended = error, True
            self._changed.notify_all()

    @staticmethod
    def _open(
        source: str, target: str, save_id: str, nbytes_per_s: int, base: str | None
    ) -> CheckpointCopy:
        """Raises CheckpointError if this process finds other directories than the rank does."""
        local, run = Location(source), Location(target)
        run_id = id_in_directory(local.parent)
        if run_id is None:
            raise UnsupportedError(f"{local.parent} has no id in the process of the agent")
        check_reaches(str(run.parent), RunId(run_id, True))
        copy = CheckpointCopy(  # The process has a low priority.
            local, run, nbytes_per_s=nbytes_per_s, base=None if base is None else Location(base)
        )
        if copy.save_id != save_id:
            raise NotFoundError(f"cannot copy {local}: another save has replaced it meanwhile")
        return copy


def _answer(
    copy: CheckpointCopy | None, *, has_ended: bool, error: BaseException | None = None
) -> Message:
    """Returns the reply to a rank, with the progress of a copy."""
    read_nbytes = 0 if copy is None else copy.read_nbytes
    return {
        "kind": Kind.COPIED,
        "has_ended": has_ended,
        "nbytes": read_nbytes,
        "linked_nbytes": 0 if copy is None else copy.done_nbytes - read_nbytes,
        "failure": None if error is None else failure_of(error),
    }
