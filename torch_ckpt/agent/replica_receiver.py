"""ReplicaReceiver: stores the replicas that the agent of another machine sends."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.agent.memory import Save, free
from torch_ckpt.agent.messages import Kind, Message, decoded_save, failure_of, receive, send
from torch_ckpt.agent.replica_files import (
    GENERATIONS,
    ReplicaFile,
    clear_replica,
    found_replicas,
    replica_path,
    slot_blocks,
    whole_replicas,
)
from torch_ckpt.agent.replica_wire import (
    ALL_SENT,
    HEAD,
    IO_TIMEOUT_S,
    POLL_S,
    receive_into,
    wait_readable,
)
from torch_ckpt.coordination.handshake import keep_alive
from torch_ckpt.coordination.listeners import Listeners
from torch_ckpt.errors import CheckpointError, CorruptionError, StorageError
from torch_ckpt.filesystems.cgroups import memory_limit

__all__ = ["ReplicaReceiver", "check_memory"]

_log = logging.getLogger("torch_ckpt.agent")

_MAX_SLOTS = 1024
"""Maximum number of ranks of one machine."""

_MIN_SLOT_NBYTES = 4096


class ReplicaReceiver:
    """Stores the replicas of one node (``source``) in a folder, until :meth:`close`.

    Two threads run: one accepts connections that send the secret token, and one serves the newest
    connection.
    """

    def __init__(
        self, folder: Path, run: bytes, session: bytes, source: int, listeners: Listeners
    ) -> None:
        self._folder = folder
        self._run, self._session, self._source = run, session, source
        self._listeners = listeners
        self._lock = threading.Lock()  # Guards the two members below, and changes of files.
        self._is_closed = False
        self._arriving: Sequence[ReplicaFile] = ()
        self._connection: socket.socket | None = None
        self._serving: threading.Thread | None = None
        self._accepting = threading.Thread(
            target=self._accept, name="torch_ckpt-replicas", daemon=True
        )
        self._accepting.start()

    def close(self) -> None:
        """Ends the threads soon. Immediately removes a replica that is being received."""
        with self._lock:
            self._is_closed = True
            for file in self._arriving:
                file.remove()

    def _accept(self) -> None:
        with contextlib.closing(self._listeners):
            while not self._is_closed:
                for connection in self._listeners.accepted([self._source], POLL_S).values():
                    self._replace(keep_alive(connection))
        self._replace(None)

    def _replace(self, connection: socket.socket | None) -> None:
        """Serves a new connection instead of the former one."""
        former, self._connection = self._connection, connection
        if former is not None and self._serving is not None:
            with contextlib.suppress(OSError):  # The sender may have closed it.
                former.shutdown(socket.SHUT_RDWR)
            self._serving.join(IO_TIMEOUT_S)
        if connection is not None:
            serving = threading.Thread(
                target=self._serve, args=(connection,), name="torch_ckpt-replica", daemon=True
            )
            try:
                serving.start()
                self._serving = serving
            except RuntimeError as error:  # Too many threads; the sender connects again.
                _log.warning("cannot receive a replica of node %d: %s", self._source, error)
                connection.close()
                self._connection = None

    def _is_wanted(self, connection: socket.socket) -> bool:
        return not self._is_closed and self._connection is connection

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while wait_readable(connection, lambda: self._is_wanted(connection)):
                    connection.settimeout(IO_TIMEOUT_S)
                    message = receive(connection)
                    if message is None:
                        return
                    self._answer(connection, message)
            except (OSError, CheckpointError) as error:
                if self._is_wanted(connection):
                    _log.warning("a replica of node %d did not arrive: %s", self._source, error)

    def _answer(self, connection: socket.socket, message: Message) -> None:
        try:
            slots, save = self._checked(message)
            keep = decoded_save(message.get("keep"))
            files = self._begin(connection, slots, save, keep)
        except ConnectionAbortedError:
            raise
        except Exception as error:
            _log.warning("cannot store a replica: %s", error)
            send(connection, Kind.ERROR, failure=failure_of(error))
            return
        send(connection, Kind.OK)
        if not self._receive(connection, files):
            return
        with self._lock:
            if self._is_closed:
                return
            self._complete(files, save)
            self._arriving = ()
        send(connection, Kind.OK)

    def _checked(self, message: Message) -> tuple[list[tuple[int, int]], Save]:
        """Returns rank and length of each slot, and the save, from a message of the network."""
        expected = Kind.REPLICA, self._run.hex(), self._session.hex(), self._source
        if tuple(message.get(k) for k in ("kind", "run", "session", "node")) != expected:
            raise CheckpointError("cannot store a replica: it is of another run or session")
        slots = [(int(rank), int(nbytes)) for rank, nbytes in message["slots"]]
        ranks = {rank for rank, _ in slots}
        is_sound = 0 < len(slots) == len(ranks) <= _MAX_SLOTS and min(ranks) >= 0
        if not is_sound or min(nbytes for _, nbytes in slots) < _MIN_SLOT_NBYTES:
            raise CheckpointError("cannot store a replica: its slots are not sound")
        return slots, (self._session, int(message["sequence"]))

    def _begin(
        self,
        connection: socket.socket,
        slots: Sequence[tuple[int, int]],
        save: Save,
        keep: Save | None,
    ) -> list[ReplicaFile]:
        """Returns incomplete files for the slots of a save.

        One earlier save remains: the one to retain, or else the newest. Raises StorageError if
        there is too little memory, and ConnectionAbortedError if the connection is no longer
        wanted.
        """
        with self._locked(connection):
            paths, files, doomed = self._choose(slots, save, keep)
        free(doomed)
        nbytes_of = {path: nbytes for path, (_, nbytes) in zip(paths, slots, strict=True)}
        absent = [path for path in paths if path not in files]
        check_memory(self._folder, sum(ReplicaFile.file_nbytes(nbytes_of[path]) for path in absent))
        try:
            for path in absent:
                files[path] = ReplicaFile.create(path, nbytes_of[path])
            with self._locked(connection):
                for path in absent:
                    files[path].move()
                self._arriving = [files[path] for path in paths]
                return self._arriving
        except BaseException:
            for path in absent:
                if path in files:
                    files[path].remove()
            raise

    @contextlib.contextmanager
    def _locked(self, connection: socket.socket) -> Iterator[None]:
        """Acquires the lock for a block. Raises ConnectionAbortedError for a replaced connection.

        Memory is allocated and freed without the lock, because :meth:`close` must not wait.
        """
        with self._lock:
            if not self._is_wanted(connection):
                raise ConnectionAbortedError("this agent receives no more replicas from there")
            yield

    def _choose(
        self, slots: Sequence[tuple[int, int]], save: Save, keep: Save | None
    ) -> tuple[list[Path], dict[Path, ReplicaFile], list[_native.Slot]]:
        """Returns the paths of the files for a save, and existing files that are large enough.

        Removes all other files, except those of the retained save, and also returns their memory.
        """
        whole = whole_replicas(self._folder, self._run)
        saves = {found for found, _ in whole}
        retained = keep if keep in saves else max(saves - {save}, default=None)
        of_retained = [each for (found, _), each in whole.items() if found == retained]
        # A save is in both if its sender lost the mark, and sends the save again.
        in_generation = [
            {path for each in of_retained for _, path in each if path.suffix == f".{number}"}
            for number in range(GENERATIONS)
        ]
        remaining = max(in_generation, key=len)
        generations = [
            [replica_path(self._folder, self._source, rank, number) for rank, _ in slots]
            for number in range(GENERATIONS)
        ]
        paths = next(each for each in generations if not remaining.intersection(each))
        lengths = {path: nbytes for path, (_, nbytes) in zip(paths, slots, strict=True)}
        files: dict[Path, ReplicaFile] = {}
        doomed = []
        for _, _, path in found_replicas(self._folder):
            if path in remaining:
                continue
            memory = clear_replica(path)
            if (
                path in lengths
                and memory
                and memory[0].nbytes >= ReplicaFile.file_nbytes(lengths[path])
            ):
                files[path] = ReplicaFile(path, lengths[path], memory[0])
            else:
                path.unlink(missing_ok=True)
                doomed += memory
        return paths, files, doomed

    def _receive(self, connection: socket.socket, files: Sequence[ReplicaFile]) -> bool:
        """Receives the blocks of all files; returns whether all of them arrived.

        Raises CorruptionError if a block does not match its checksum, and OSError.
        """
        head = bytearray(HEAD.size)
        for file in files:
            sums = []
            with memoryview(file.memory) as view:
                for begin, end in slot_blocks(file.slot_nbytes):
                    receive_into(connection, memoryview(head))
                    nbytes, expected = HEAD.unpack(head)
                    if nbytes != end - begin:
                        raise CorruptionError(f"a block at {begin} has {nbytes} bytes")
                    # The first bytes would mark the replica as complete.
                    block = memoryview(bytearray(nbytes)) if not begin else view[begin:end]
                    receive_into(connection, block)
                    if _native.xxh3(block) != expected:
                        raise CorruptionError(
                            f"the {nbytes} bytes at {begin} of {file.path.name} do not have their "
                            "checksum"
                        )
                    if not begin:
                        view[8:end] = block[8:]
                    sums.append(expected)
            file.finish(sums)
        receive_into(connection, memoryview(head))
        return bytes(head) == ALL_SENT

    def _complete(self, files: Sequence[ReplicaFile], save: Save) -> None:
        try:
            for file in files:
                file.complete()
            found = whole_replicas(self._folder, self._run)
            if (save, self._source) not in found:
                raise CorruptionError("cannot store a replica: its headers are of another save")
        except BaseException:
            for file in files:
                file.memory.clear()
            raise
        _log.info("the replica of save %d of node %d is complete", save[1], self._source)


def check_memory(folder: Path, missing: int) -> None:
    """Raises StorageError if the tmpfs or the container has less free memory than is needed."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if missing > free:
        raise StorageError(
            f"cannot reserve {missing} bytes of memory for replicas: {folder} has {free} bytes "
            "left",
            errno.ENOSPC,
        )
    limit = memory_limit()
    if limit is not None and missing > limit.allowed_nbytes:
        raise StorageError(
            f"cannot reserve {missing} bytes of memory for replicas: {limit}", errno.ENOMEM
        )
