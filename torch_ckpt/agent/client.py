"""A rank's side of the talk with its agent, which it starts where there is none."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ckpt.agent.memory import SlotHeader, folder_of, has_agent, open_folder, short_path
from torch_ckpt.agent.messages import Kind, Message, raise_error, receive, send
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location

__all__ = ["AcquiredSlot", "AgentClient", "Place"]

_log = logging.getLogger("torch_ckpt.agent")

_START_S = 30.0
"""Within which an agent that was started answers."""

_FIRST_WITHIN_S = 10.0
"""For how long it waits for a rank: several are started where several ranks find none."""


@dataclass(frozen=True)
class Place:
    """Which rank of which run this is.

    Attributes:
        run: 16 bytes.
        session: 16 bytes that all ranks have in common; greater than those of earlier lives.
        rank: Of ``world_size``.
        world_size: How many there are.
        node: The machine, by number.
        node_count: How many the ranks are on.
        ranks_here: All ranks of this machine.
    """

    run: bytes
    session: bytes
    rank: int
    world_size: int
    node: int
    node_count: int
    ranks_here: Sequence[int]

    def header(self, sequence: int, step: int, *, persist: bool) -> SlotHeader:
        """That of a snapshot of this rank."""
        return SlotHeader(
            self.session,
            sequence,
            step,
            self.rank,
            self.world_size,
            self.node,
            self.node_count,
            len(self.ranks_here),
            int(persist),
            self.run,
        )


@dataclass(frozen=True)
class AcquiredSlot:
    """A slot that is to be filled.

    Attributes:
        path: Its file.
        has_waited: Whether there was none at first.
    """

    path: Path
    has_waited: bool


class AgentClient:
    """Asks the agent of this machine, one question at a time; a thread that waits has its own.

    Where the agent has died, another is started, which finds in the slots all that it must know.

    Args:
        run: What names the run.
        place: Of this rank.
        options: Of the agent, if this rank starts it.

    Attributes:
        folder: Where the memory of the run lies.
        is_lost: Whether there was no agent, and none could be started.

    Raises:
        CheckpointError: It is the agent of others.
        StorageError: No agent answers.
    """

    def __init__(self, run: str | os.PathLike[str], place: Place, options: AgentOptions) -> None:
        self.place = place
        self._run = os.path.realpath(run)  # Now: the process may go elsewhere.
        self._options = options
        self.folder = open_folder(place.run)
        self.is_lost = False
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._connect()

    def reserve(self, nbytes: int) -> None:
        """Has memory made for snapshots of so many bytes.

        Raises:
            StorageError: There is not as much.
        """
        self._ask(Kind.RESERVE, nbytes)

    def acquire(self, sequence: int, nbytes: int, timeout_s: float) -> AcquiredSlot | None:
        """A slot to fill; ``None`` where none is free in time.

        Args:
            sequence: Of the save.
            nbytes: Room that all would take that the rank holds.
            timeout_s: Seconds to wait.

        Raises:
            StorageError: There is not as much memory.
        """
        answer = self._ask(Kind.ACQUIRE, sequence, nbytes, int(timeout_s * 1000))
        if answer.kind == Kind.BUSY:
            return None
        return AcquiredSlot(Path(os.fsdecode(answer.data(0))), bool(answer.integer(1)))

    def filled(self, path: Path, sequence: int) -> None:
        """Says that a snapshot is complete."""
        self._ask(Kind.FILLED, os.fsencode(path), sequence)

    def abort(self, sequence: int, directory: Location) -> None:
        """Says that there will be no snapshot for this save, as far as anybody can be told."""
        if self.is_lost:
            return
        place = self.place
        with contextlib.suppress(OSError, CheckpointError):
            self._ask(
                *(Kind.ABORT, sequence, place.node, place.node_count, os.fsencode(str(directory)))
            )

    def persist(self, sequence: int) -> None:
        """Waits until a save of this session is committed, which need not be wanted on disk yet.

        Raises:
            CheckpointError: It has failed.
        """
        self._ask(Kind.PERSIST, self.place.session, sequence)

    def detach(self, *, drop: bool) -> None:
        """Ends in good order.

        Args:
            drop: Whether what is in memory, and not on disk, is of no more use.
        """
        try:
            if not self.is_lost:
                self._ask(Kind.DETACH, int(drop))
        except (OSError, CheckpointError) as error:
            _log.warning("the agent of this machine could not be told of a good end: %s", error)
        self.close()

    def close(self) -> None:
        """Hangs up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def another(self) -> AgentClient:
        """The same rank again, for another thread."""
        return AgentClient(self._run, self.place, self._options)

    def _ask(self, kind: Kind, *fields: int | bytes) -> Message:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                if self._connection is None:
                    self._connect()
                assert self._connection is not None
                return self._talk(self._connection, kind, *fields)
            except OSError as error:
                if isinstance(error, CheckpointError):
                    raise
                self.close()
                if time.monotonic() > deadline:
                    self.is_lost = True
                    raise StorageError(f"the agent of this machine is gone: {error}") from error
                _log.warning("the agent of this machine is gone (%s): starting another", error)

    def _talk(self, connection: socket.socket, kind: Kind, *fields: int | bytes) -> Message:
        send(connection, kind, *fields)
        answer = receive(connection)
        if answer is None:
            raise ConnectionResetError("it has hung up")
        raise_error(answer)
        return answer

    def _connect(self) -> None:
        """Finds the agent or starts one."""
        deadline = time.monotonic() + _START_S
        while True:
            open_folder(self.place.run)  # An agent that ends takes it along.
            with contextlib.suppress(ConnectionError, FileNotFoundError):
                self._connection = self._greet()
                self.is_lost = False
                return
            if has_agent(self.folder):  # One that ends may have much to write first.
                deadline = time.monotonic() + _START_S
            elif time.monotonic() > deadline:
                self.is_lost = True
                raise StorageError(
                    f"no agent answers in {self.folder}, and none could be started; agent.log "
                    "there may say why"
                )
            if self._child is None or self._child.poll() is not None:
                self._start()
            time.sleep(0.02)

    def _greet(self) -> socket.socket:
        place = self.place
        ranks = b"".join(struct.pack("<q", rank) for rank in place.ranks_here)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(self.folder) as folder:
                connection.connect(f"{folder}/agent.socket")
            self._talk(connection, Kind.HELLO, place.run, place.session, place.rank, ranks)
        except BaseException:
            connection.close()
            raise
        return connection

    def _start(self) -> None:
        options = self._options
        package = os.fspath(Path(__file__).resolve().parents[2])
        base = os.fspath(folder_of(self.place.run).parents[1])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._child = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "torch_ckpt.cli.main",
                    "agent",
                    os.path.realpath(self._run),
                ),
                *("--first-within", str(_FIRST_WITHIN_S)),
                *("--linger", str(options.linger_s), "--threads", str(options.threads)),
                *("--peers-timeout", str(options.peers_timeout_s)),
                *("--io", json.dumps(dataclasses.asdict(options.io))),
                *(() if options.persist_on_failure else ("--no-persist-on-failure",)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": path, "TORCH_CKPT_MEMORY": base},
        )
