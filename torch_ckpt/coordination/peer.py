"""Messages over one connection of a rank, sent and received without waiting."""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from typing import Any

__all__ = ["Message", "Peer"]

Message = tuple[int, int, int, bytearray]
"""Its kind, the call and the exchange that it is of, and its body."""

_HEAD = struct.Struct("<BQIQ")  # Kind; call; exchange; bytes that follow.
_MOST_VIEWS = 64  # In one system call.
_SILENT_S = 3.0  # A neighbour that has not answered for so long is frozen, or holds Python's lock.


class Peer:
    """A neighbour in the tree, and the connection to it. One thread uses it.

    Args:
        rank: The neighbour.
        connection: To it; does not block.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.is_pinged = False
        """Whether it is to answer from now on."""
        self.silent_beyond: dict[int, float] = {}
        """Ranks beyond this neighbour that are silent, as it says, and for how many seconds."""
        self._outgoing: deque[memoryview] = deque()
        self._head = bytearray(_HEAD.size)
        self._body: bytearray | None = None
        self._filled = 0
        self._heard = time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self.connection.fileno() >= 0

    @property
    def has_outgoing(self) -> bool:
        """Whether something is left to be written."""
        return bool(self._outgoing)

    def expect_answers(self) -> None:
        """Begins to count for how long it is silent."""
        self.is_pinged, self._heard = True, time.monotonic()

    def silent(self, now: float) -> dict[int, float]:
        """Who is silent on this side, and for how many seconds: this neighbour, or some beyond."""
        waited = now - self._heard
        if self.is_pinged and waited > _SILENT_S:
            return {self.rank: waited}
        return self.silent_beyond

    def queue(self, kind: int, call: int, number: int, body: tuple[Any, ...]) -> None:
        """Has a message written when there is room."""
        views = [memoryview(part).cast("B") for part in body if len(part)]
        head = _HEAD.pack(kind, call, number, sum(map(len, views)))
        self._outgoing += [memoryview(head), *views]

    def write(self) -> None:
        """Writes what there is room for.

        Raises:
            OSError: The connection has ended.
        """
        while self._outgoing:
            some = [self._outgoing[i] for i in range(min(_MOST_VIEWS, len(self._outgoing)))]
            try:
                sent = self.connection.sendmsg(some)
            except BlockingIOError:
                return
            while sent:
                first = self._outgoing.popleft()
                if len(first) > sent:
                    self._outgoing.appendleft(first[sent:])
                    break
                sent -= len(first)

    def read(self) -> Message | None:
        """Reads what is there; returns a message if it is there whole.

        Raises:
            OSError: The connection has ended.
        """
        while True:
            into = self._head if self._body is None else self._body
            if self._filled < len(into):
                try:
                    got = self.connection.recv_into(memoryview(into)[self._filled :])
                except BlockingIOError:
                    return None
                if not got:
                    raise ConnectionResetError
                self._filled += got
                self._heard = time.monotonic()
            if self._filled < len(into):
                continue
            self._filled = 0
            if self._body is None:
                self._body = bytearray(_HEAD.unpack(self._head)[3])
                if self._body:
                    continue
            kind, call, number, _ = _HEAD.unpack(self._head)
            body, self._body = self._body, None
            return kind, call, number, body
