"""The client of the agent: a rank's connection, which starts the agent if none runs."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from torch_ckpt._core import _native
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.identity import RunId, inode_of, nearest_directory
from torch_ckpt.agent.memory import (
    Save,
    folder_of,
    has_agent,
    is_stopped,
    open_folder,
    short_path,
)
from torch_ckpt.agent.messages import (
    Kind,
    Message,
    encoded_save,
    has_arrived,
    peer_of,
    raise_failure,
    receive,
    send,
)
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError, StorageError, UnsupportedError
from torch_ckpt.filesystems.location import name_of
from torch_ckpt.process_state import PROCESS

__all__ = ["AgentClient", "Member"]

_log = logging.getLogger("torch_ckpt.agent")

_START_S = 30.0
"""Time within which a started agent must answer."""

_ANSWER_S = 30.0
"""Time without any answer after which an agent is lost, unless the client's timeout is shorter."""

_LOST_S = 1.0
"""Time within which an agent that is lost must answer to be used again."""

_POLLS = 6
"""Number of pings that a waiting client sends within that time."""

_LEAST_S = 0.1
"""Shortest timeout of a request: a busy machine may not run this process for a moment."""

_GRACE_S = 5.0
"""Time for the answer of an agent that was asked to wait."""

_LOG_POLL_S = 0.2
"""Interval at which a client that has sent a ping checks whether to log its wait."""

_START_POLL_S = 0.02
"""Interval at which a client checks whether the agent that it started answers."""

_AWAITED = {
    Kind.ACQUIRE: "for a free slot: earlier saves occupy all slots, or it does not answer",
    Kind.PERSIST: "to commit a save",
    Kind.RESERVE: "to allocate memory",
}
"""What the log names as the reason of a wait, if it is more than a missing answer."""

_MAX_LOST = 3
"""A request fails after it has lost this many agents, but not before ``_START_S`` have passed."""

_MAX_CRASHES = 2
"""The client gives up after this many agents in a row have crashed during start-up."""

_FIRST_WITHIN_S = 10.0
"""Time that a started agent waits for a first rank. Several ranks may each start an agent."""


@dataclass(frozen=True)
class Member:
    """A rank of a run: the number of its machine, and the ranks that started together.

    Attributes:
        run: 16 bytes that identify the run.
        session: 16 bytes that identify the ranks that started together; later sessions are greater.
        node: Number of this machine.
        ranks_here: All ranks of this machine.
        run_id: The id of the run, if ``run`` is the directory of its steps.
        orphans: Saves of earlier ranks that are in the memory of some of their machines only.
    """

    run: bytes
    session: bytes
    rank: int
    world_size: int
    node: int
    node_count: int
    ranks_here: Sequence[int]
    run_id: RunId | None = None
    orphans: Sequence[Save] = ()

    @property
    def is_first_here(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.rank == self.ranks_here[0]

    def header(self, sequence: int, step: int, *, persist: bool) -> _native.SlotHeader:
        """Returns the slot header of a snapshot of this rank."""
        return _native.SlotHeader(
            run=self.run,
            session=self.session,
            sequence=sequence,
            step=step,
            rank=self.rank,
            world_size=self.world_size,
            node=self.node,
            node_count=self.node_count,
            ranks_here=len(self.ranks_here),
            persist=persist,
        )


@dataclass
class _Contact:
    """Whether the agent missed a deadline and has not answered since, for all clients of a rank."""

    is_lost: bool = False


class AgentClient:
    """Sends requests to the agent of this machine, one at a time. Owned by one thread.

    If the agent has died, the client starts another, which recovers its state from the slots. An
    agent counts as lost in three cases: it has answered nothing for 30 s (or for ``timeout_s`` if
    that is shorter), it did not answer a request within ``timeout_s``, or it has died and no other
    could be started. Until it answers again, each request waits only briefly, also one of a
    :meth:`clone`. With ``may_start=False``, the client starts no agent. ``is_first`` makes the
    agent check that it reaches the directory to which it writes, if that is a URL. ``local`` and
    ``shares_local`` are those of ``SnapshotAgent``. Raises CheckpointError if the agent rejected
    this rank, and StorageError if no agent answers.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        member: Member,
        options: AgentOptions,
        *,
        timeout_s: float,
        is_first: bool = True,
        may_start: bool = True,
        local: str | os.PathLike[str] | None = None,
        shares_local: bool = False,
        contact: _Contact | None = None,
    ) -> None:
        self._contact = contact or _Contact()
        self.member, self._pid = member, os.getpid()
        self._local, self._shares_local = local, shares_local
        self._options, self._timeout_s = options, timeout_s
        self._run = os.fspath(run)  # Resolved by the caller, once: its storage may hang later.
        self._is_first, self._may_start = is_first, may_start
        self.folder = (open_folder if may_start else folder_of)(member.run)
        self._crashes, self._is_unanswered = 0, False  # Whether the last request had no answer.
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None  # Where the child writes the error that ends it.
        self.name = "the agent of this machine"
        """Name of the agent in messages, with its process once that is known."""
        self._connection: socket.socket | None = None
        self.while_waiting: Callable[[], None] = lambda: None
        self._connect()
        self._is_first = False

    def listen(self, hosts: Sequence[str]) -> tuple[list[tuple[str, int]], str]:
        """Has the agent listen for the agent of another machine at these addresses of this one.

        Returns where it listens, and the secret token that the other must send. Raises StorageError
        if it cannot listen.
        """
        answer = self.request(Kind.LISTEN, hosts=list(hosts), node=self.member.node)
        return [(host, port) for host, port in answer["at"]], answer["token"]

    def acquire(
        self, sequence: int, nbytes: int, timeout_s: float, keep: Save | None = None
    ) -> tuple[Path, bool] | None:
        """Returns a slot for the rank to fill, and whether the call waited for it.

        Returns ``None`` if no slot becomes free in time. ``keep`` is a save to retain even if newer
        ones are complete. Raises StorageError if the tmpfs has too little space.
        """
        answer = self.request(
            Kind.ACQUIRE,
            max(self._timeout_s, timeout_s + _GRACE_S),
            **{"sequence": sequence, "nbytes": nbytes, "wait_s": timeout_s},
            keep=encoded_save(keep),
        )
        if answer["kind"] == Kind.BUSY:
            return None
        return Path(answer["path"]), answer["has_waited"]

    def abort(self, sequence: int, destination: Destination) -> None:
        """Reports that this rank will fill no slot for a save; ignores a lost agent."""
        if self._is_unanswered:
            return
        member = self.member
        with contextlib.suppress(OSError, CheckpointError):
            self.request(
                Kind.ABORT,
                **{"sequence": sequence, "node": member.node, "node_count": member.node_count},
                destination=destination._replace(small_files=None).encode(),
            )

    def persist(self, sequence: int, has_filled: bool = False) -> None:
        """Requests that a save of this session is persisted, and waits for its commit.

        Calls ``while_waiting`` repeatedly. If this rank ``has_filled`` its slot, it does not wait
        for a slot that others have removed from memory. Raises CheckpointError if the save failed,
        and StorageError if the agent does not answer.
        """
        self.request(Kind.PERSIST, math.inf, sequence=sequence, has_filled=has_filled)

    def has_ended(self, timeout_s: float) -> bool:
        """Waits until the agent of this connection ends; returns whether it has in time."""
        waiting = self._waiting(lambda: f"{self.name} to write what it has mapped")
        connection, pauses = self._connection, waiting.rounds(timeout_s, ends_on_signal=True)
        return connection is None or any(has_arrived(connection, each) for each in pauses)

    def detach(self, *, drop: bool) -> None:
        """Reports the orderly end of this rank, and closes the connection.

        With ``drop``, the agent discards snapshots that are not on disk.
        """
        try:
            if not self._is_unanswered:
                self.request(Kind.DETACH, drop=drop)
        except (OSError, CheckpointError) as error:
            _log.warning("cannot detach from the agent of this machine: %s", error)
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def clone(self, *, may_start: bool = True) -> AgentClient:
        """Returns another client of this rank, for another thread."""
        return AgentClient(
            *(self._run, self.member, self._options),
            timeout_s=self._timeout_s,
            is_first=False,
            may_start=may_start,
            local=self._local,
            shares_local=self._shares_local,
            contact=self._contact,
        )

    def request(self, kind: Kind, within_s: float | None = None, **fields: Any) -> Message:
        """Returns the answer to a request, with the fields that its :class:`Kind` states.

        Waits as long as the agent answers other requests, but at most for ``within_s``, by default
        the timeout of the client. Raises the error with which the agent answers, StorageError if it
        does not answer, and CheckpointError in a forked child.
        """
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"cannot use the agent: it serves process {self._pid}, of which this process is a "
                "forked child"
            )
        within_s = self._timeout_s if within_s is None else within_s
        deadline = time.monotonic() + _START_S
        lost = 0
        while True:
            try:
                if self._connection is None:
                    self._connect()
                elif self._contact.is_lost:
                    self._register(self._answer_s, is_ping=True).close()
                assert self._connection is not None
                return self._answer_to(self._connection, kind, within_s, **fields)
            except OSError as error:
                if isinstance(error, CheckpointError):
                    raise
                self.close()
                lost += 1
                # A request may wait for hours, and its agent may be killed then.
                if lost >= _MAX_LOST and time.monotonic() > deadline:
                    raise self._unanswered(
                        f"cannot reach the agent of this machine: {error}"
                    ) from error
                _log.warning("cannot reach the agent of this machine (%s): starting another", error)

    @property
    def _answer_s(self) -> float:
        return min(self._timeout_s, _ANSWER_S, _LOST_S if self._contact.is_lost else math.inf)

    def _answer_to(
        self, connection: socket.socket, kind: Kind, within_s: float, **fields: Any
    ) -> Message:
        connection.settimeout(self._answer_s)
        answer = None
        try:
            send(connection, kind, **fields)
            self._await(connection, within_s, _AWAITED.get(kind, "to answer"))
            answer = receive(connection)
        except TimeoutError:
            raise self._lost(self._answer_s) from None
        finally:
            # If a signal handler raised, the next request would receive this request's answer.
            if answer is None and connection is self._connection:
                self.close()
        return self._check(answer)

    @staticmethod
    def _check(answer: Message | None) -> Message:
        if answer is None:
            raise ConnectionResetError("the agent closed the connection")
        if answer["kind"] == Kind.ERROR:
            raise_failure(answer["failure"])
        return answer

    def _await(self, connection: socket.socket, within_s: float, awaited: str) -> None:
        """Waits until an answer arrives.

        Raises StorageError if the agent answers neither this nor any other request.
        """
        answered, answer_s = time.monotonic(), self._answer_s
        waiting = self._waiting(lambda: f"{self.name} {awaited}")
        for pause_s in waiting.rounds(within_s, answer_s / _POLLS, ends_on_signal=True):
            if has_arrived(connection, pause_s):
                return
            waiting.log()  # The ping may wait as well.
            left_s = answered + answer_s - time.monotonic()
            self._register(left_s, is_ping=True, waiting=waiting).close()
            answered = time.monotonic()
            self.while_waiting()
        raise self._lost(min(within_s, round(waiting.waited_s, 1)))

    def _lost(self, seconds: float) -> StorageError:
        text = f"the agent of this machine did not answer within {seconds:g} s"
        return self._unanswered(text, errno.ETIMEDOUT)

    def _unanswered(self, text: str, number: int | None = None) -> StorageError:
        """Returns the error of a request whose outcome is unknown. The agent is lost."""
        self._is_unanswered = self._contact.is_lost = True
        error = StorageError(text, number)
        error.may_be_committed = True
        return error

    def _connect(self) -> None:
        """Connects to the agent; starts an agent if none runs."""
        begin = time.monotonic()
        deadline = begin + _START_S
        waiting = self._waiting(lambda: f"an agent to start; see {self.folder / 'agent.log'}")
        for pause_s in waiting.rounds(poll_s=_START_POLL_S, ends_on_signal=True):
            if self._may_start:
                open_folder(self.member.run)  # An ending agent removes the folder.
            try:
                self._connection = self._register(self._answer_s)
                self._is_unanswered, self._crashes = False, 0
                self._read_errors()
                return
            except (ConnectionError, FileNotFoundError) as error:
                if not self._may_start:
                    raise StorageError(f"no agent of {self.folder} runs") from error
                # None runs yet, or one is ending.
            except OSError as error:
                if isinstance(error, CheckpointError):
                    raise
                reason = f"cannot connect to its socket: {error.strerror or error}"
                raise self._cannot_start(reason, error.errno) from error
            is_busy = has_agent(self.folder) and not is_stopped(self.folder)
            if is_busy and time.monotonic() < begin + self._timeout_s:
                deadline = time.monotonic() + self._answer_s  # It may free memory for long.
            elif time.monotonic() > deadline:
                raise self._cannot_start(f"no agent answered; see {self.folder / 'agent.log'}")
            if self._child is None or self._child.poll() is not None:
                self._raise_if_crashing()
                try:
                    self._start()
                except OSError as error:
                    raise self._cannot_start(error, error.errno) from error
            time.sleep(pause_s)
        raise self._cannot_start("a signal ends this process")

    def _waiting(self, awaited: Callable[[], str]) -> LongWait:
        """Returns the log of a wait. Of the ranks of a machine, the first one warns."""
        return LongWait(awaited, is_named=self.member.is_first_here)

    def _cannot_start(self, reason: object, number: int | None = None) -> StorageError:
        return self._unanswered(f"cannot start an agent for {self.folder}: {reason}", number)

    def _read_errors(self) -> str:
        """Returns the error output of the agent that this client has started, and closes it."""
        errors, self._errors = self._errors, None
        if errors is None:
            return ""
        with errors:
            errors.seek(0)
            return errors.read().decode(errors="replace")

    def _raise_if_crashing(self) -> None:
        """Raises if several agents in a row that this client started have exited with an error."""
        if self._child is None or self._child.returncode <= 0:
            return
        self._crashes += 1
        if self._crashes >= _MAX_CRASHES:
            lines = self._read_errors().splitlines()
            last = next(filter(None, reversed(lines)), "unknown")
            raise self._cannot_start(f"it exited with status {self._child.returncode}: {last}")

    def _register(
        self, within_s: float, *, is_ping: bool = False, waiting: LongWait | None = None
    ) -> socket.socket:
        """Returns a new connection, on which the agent has answered.

        A ping only checks that the agent answers. It accesses no directory, which could be slow.
        ``waiting`` is the log of the wait that sends the ping.
        """
        member, answer_s = self.member, self._answer_s
        log = waiting or self._waiting(lambda: f"{self.name} to answer")
        connection = PROCESS.own(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            connection.settimeout(max(within_s, _LEAST_S))
            with short_path(self.folder) as folder:
                connection.connect(f"{folder}/agent.socket")
            self.name = f"the agent of this machine, process {peer_of(connection)[0]},"
            send(
                connection,
                Kind.HELLO,
                **{"run": member.run.hex(), "session": member.session.hex(), "rank": member.rank},
                **{"ranks_here": list(member.ranks_here), "options": self._options.encode()},
                **({} if is_ping else self._identity()),
            )
            rounds = log.rounds(max(within_s, _LEAST_S), _LOG_POLL_S, ends_on_signal=True)
            if not any(has_arrived(connection, pause_s) for pause_s in rounds):
                raise TimeoutError
            try:
                answer = receive(connection)
            except UnsupportedError as error:
                text = f"cannot use {self.name} which is of another version: {error}"
                raise UnsupportedError(text) from error
            self._check(answer)
        except TimeoutError:
            connection.close()
            raise self._lost(min(answer_s, round(log.waited_s, 1))) from None
        except BaseException:
            connection.close()
            raise
        self._contact.is_lost = False
        return connection

    def _identity(self) -> dict[str, Any]:
        """Returns the fields of ``HELLO`` on the run's orphans, and on its id if it has one."""
        run_id = self.member.run_id
        orphans = list(map(encoded_save, self.member.orphans))
        if run_id is None:
            return {"orphans": orphans}
        places = [self._run, self._run if self._local is None else name_of(self._local)]
        fields: dict[str, Any] = {"orphans": orphans, "run_id": asdict(run_id), "places": places}
        checked = self._run
        # In the directory of the run, agents exchange files at most, and it may not answer later.
        if self._local is not None and (self._shares_local or not self._is_first):
            checked = name_of(self._local)
        if os.path.isabs(checked):
            seen = nearest_directory(checked)
            fields |= {"seen": seen, "inode": inode_of(seen)}
        elif self._is_first:  # If the run is removed later, its id is gone.
            fields |= {"url": checked, "may_end": self._child is None}
        return fields

    def _start(self) -> None:
        package = os.fspath(Path(__file__).resolve().parents[2])
        base = os.fspath(folder_of(self.member.run).parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._read_errors()
        with contextlib.suppress(OSError):
            self._errors = PROCESS.own(tempfile.TemporaryFile())  # noqa: SIM115
        self._contact.is_lost = False  # Another begins, which may take longer.
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch_ckpt.cli.main", "agent", self._run),
                *("--first-within", str(_FIRST_WITHIN_S), "--options", self._options.encode()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if self._errors is None else self._errors,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": path, "TORCH_CKPT_MEMORY": base},
        )
