"""ReplicaSender: sends the complete saves of this machine to the agent of its buddy."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.messages import Kind, encoded_save, raise_failure, receive, send
from torch_ckpt.agent.replica_files import slot_blocks, used_nbytes
from torch_ckpt.agent.replica_wire import (
    ALL_SENT,
    HEAD,
    OvertakenError,
    dial,
    send_block,
)
from torch_ckpt.agent.slots import SlotFile, Slots
from torch_ckpt.errors import CheckpointError

__all__ = ["Buddy", "ReplicaSender"]

_log = logging.getLogger("torch_ckpt.agent")

_POLL_S = 0.5

_RETRY_S = 1.0
"""Time between attempts to connect."""

_REFUSED_S = 10.0
"""Time between attempts to send to a buddy that has refused a save because it lacks memory."""

_MARK = re.compile(r"replicated-([0-9a-f]{32})-(\d+)")


@dataclass(frozen=True)
class Buddy:
    """The agent that stores the replicas of this machine: its node, addresses and secret token."""

    node: int
    at: Sequence[tuple[str, int]]
    token: str


@dataclass(frozen=True)
class _SentSlot:
    """A slot at the begin of its replica. It is overtaken once a rank fills the slot again."""

    file: SlotFile
    memory: _native.Slot
    header: _native.SlotHeader
    nbytes: int

    @property
    def is_overtaken(self) -> bool:
        return self.file.memory is not self.memory or self.file.header != self.header


class ReplicaSender:
    """Sends the newest complete saves of a session to a buddy, in a thread, until :meth:`close`.

    A save is *superseded* if a newer one replaces it before or while it is sent: a rank never waits
    for a replica. ``changed`` is the lock of the agent, and is notified when a replica is complete.
    ``keep`` returns the save that the buddy must retain, and ``rate`` the maximum bytes per second.
    Marks beside the slots record which replicas the buddy stores.

    The buddy stores two saves: it retains one while another arrives. So the marks of all other
    saves are removed first. No replica begins while the ranks decide (``is_deciding``), based on
    the marks, which save to retain.
    """

    def __init__(
        self,
        folder: Path,
        run: bytes,
        session: bytes,
        node: int,
        buddy: Buddy,
        slots: Slots,
        changed: threading.Condition,
        *,
        keep: Callable[[], Save | None],
        is_deciding: Callable[[], bool],
        rate: Callable[[], float | None],
    ) -> None:
        self.superseded = 0
        """Number of saves whose replica was not begun or not finished, because of a newer save."""
        self._folder = folder
        self._run, self._session, self._node, self._buddy = run, session, node, buddy
        self._slots, self._changed = slots, changed
        self._keep, self._is_deciding, self._rate = keep, is_deciding, rate
        self._is_closed = False
        self.failure = ""
        """Why the last attempt has failed; empty after a success."""
        self._retries_at = 0.0  # After the buddy has refused a save.
        self._newest = -1  # Sequence of the last save that was begun.
        self._connection: socket.socket | None = None
        self._marked = replicated(folder)
        self._thread = threading.Thread(target=self._run_all, name="torch_ckpt-send", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread soon. It no longer records anything. Requires the lock."""
        self._is_closed = True

    def is_complete(self, save: Save) -> bool:
        """Returns whether the buddy stores the replica of a save. Requires the lock."""
        return save in self._marked

    def _run_all(self) -> None:
        while not self._is_closed:
            with self._changed:
                found = None if self._is_closed else self._next()
                if found is None:
                    self._changed.wait(_POLL_S)
                    continue
            save, slots, keep = found
            try:
                is_sent = self._send(save, slots, keep)
            except (OSError, CheckpointError) as error:
                self._disconnect()
                self._log_once(f"cannot replicate save {save[1]} to {self._name}: {error}")
                if isinstance(error, CheckpointError):  # It may have more memory later.
                    self._retries_at = time.monotonic() + _REFUSED_S
                with self._changed:
                    self._changed.wait(_RETRY_S)
                continue
            with self._changed:
                if self._is_closed:
                    break
                if is_sent:
                    self._mark(save)
                    self.failure = ""
                    _log.info("save %d is replicated to %s", save[1], self._name)
                else:
                    self.superseded += 1
                    _log.info("the replica of save %d is superseded", save[1])
                self._changed.notify_all()
        self._disconnect()

    def _log_once(self, text: str) -> None:
        if text != self.failure:  # Attempts are repeated every second.
            self.failure = text
            _log.warning(text)

    @property
    def _name(self) -> str:
        return f"machine {self._buddy.node}"

    def _next(self) -> tuple[Save, list[_SentSlot], Save | None] | None:
        """Returns the newest complete save, unless it has a replica, and the save to retain."""
        if self._is_deciding():
            return None
        complete = self._slots.scan().complete
        save = max(complete, default=None)
        if save is None or save[0] != self._session or save in self._marked:
            return None
        if time.monotonic() < self._retries_at:
            return None
        slots = []
        for header, file in complete[save]:
            if file.memory is None:
                return None
            slots.append(_SentSlot(file, file.memory, header, used_nbytes(file.memory)))
        if save[1] > self._newest:
            self.superseded += save[1] - self._newest - 1 if self._newest >= 0 else 0
            self._newest = save[1]
        keep = self._keep()
        # The buddy may have a newer one whose mark was lost.
        retained = max(self._marked, default=None) if keep is None else keep
        for other in self._marked.copy():
            if other != retained:
                try:
                    _mark_of(self._folder, other).unlink(missing_ok=True)
                except OSError as error:  # A restarted agent would believe the mark.
                    self._log_once(f"cannot replicate save {save[1]} to {self._name}: {error}")
                    return None
                self._marked.remove(other)
        return save, slots, retained

    def _send(self, save: Save, slots: Sequence[_SentSlot], keep: Save | None) -> bool:
        """Sends a save; returns whether the buddy has stored it, ``False`` if overtaken."""

        def is_overtaken() -> bool:
            return self._is_closed or any(slot.is_overtaken for slot in slots)

        if self._connection is None:
            self._connection = dial(self._buddy.at, self._buddy.token, self._node)
        connection = self._connection
        send(
            connection,
            Kind.REPLICA,
            run=self._run.hex(),
            session=save[0].hex(),
            sequence=save[1],
            node=self._node,
            slots=[[slot.header.rank, slot.nbytes] for slot in slots],
            keep=encoded_save(keep),
        )
        _await_answer(connection)
        try:
            pace = _Pace(self._rate)
            for slot in slots:
                with memoryview(slot.memory) as view:
                    for begin, end in slot_blocks(slot.nbytes):
                        block = view[begin:end]
                        head = HEAD.pack(len(block), _native.xxh3(block))
                        send_block(connection, [head, block], is_overtaken)
                        pace.wait(len(block), is_overtaken)
            if is_overtaken():  # Otherwise, no block has changed before it was sent.
                raise OvertakenError
        except OvertakenError:
            self._disconnect()
            return False
        connection.sendall(ALL_SENT)
        _await_answer(connection)
        return True

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _mark(self, save: Save) -> None:
        self._marked.append(save)
        with contextlib.suppress(OSError):  # Only a restarted agent misses it.
            _mark_of(self._folder, save).touch()


def _await_answer(connection: socket.socket) -> None:
    """Waits until the buddy is ready, or has stored the replica. Raises its error."""
    answer = receive(connection)
    if answer is None:
        raise ConnectionResetError("the agent closed the connection")
    if answer["kind"] == Kind.ERROR:
        raise_failure(answer["failure"])


class _Pace:
    """Limits the rate of one replica."""

    def __init__(self, rate: Callable[[], float | None]) -> None:
        self._rate = rate
        self._next = time.monotonic()

    def wait(self, nbytes: int, is_overtaken: Callable[[], bool]) -> None:
        """Waits after bytes were sent. Raises OvertakenError."""
        rate = self._rate()
        if rate is None:
            return
        self._next = max(self._next, time.monotonic() - _POLL_S) + nbytes / rate
        while (left := self._next - time.monotonic()) > 0:
            if is_overtaken():
                raise OvertakenError
            time.sleep(min(left, _POLL_S))


def replicated(folder: Path) -> list[Save]:
    """Returns the saves that a buddy stores according to the marks, in order."""
    matches = filter(None, map(_MARK.fullmatch, os.listdir(folder)))
    return sorted((bytes.fromhex(match[1]), int(match[2])) for match in matches)


def _mark_of(folder: Path, save: Save) -> Path:
    return folder / f"replicated-{save[0].hex()}-{save[1]}"
