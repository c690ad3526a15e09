"""Non-blocking messages over one connection of a rank."""

from __future__ import annotations

import enum
import socket
import struct
import time
from collections import deque
from typing import Any

__all__ = ["Kind", "Message", "Peer"]


class Kind(enum.IntEnum):
    """The kind of a message, which the relay and its parts send and receive."""

    CONTRIBUTIONS, ANSWER, FAILED, GONE, PROMISE, PROMISED, PING, PONG, RAISED, LEFT = range(10)


Message = tuple[int, int, int, bytearray]
"""Kind, number of the call, number of the exchange within the call, body."""

_HEAD = struct.Struct("<BQIQ")  # Kind, call, exchange, length of the body in bytes.
_MAX_VIEWS = 64  # Buffers per system call.
_SILENT_S = 3.0  # A neighbour that is silent for this long is frozen, or cannot acquire the GIL.


class Peer:
    """The connection to a neighbour in the tree. Only one thread uses it.

    The socket is non-blocking.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.is_pinged = False
        """Whether this rank pings the neighbour, so that its silence counts."""
        self.silent_beyond: dict[int, float] = {}
        """Seconds of silence of ranks beyond this neighbour, as reported by it."""
        self._outgoing: deque[memoryview] = deque()
        self._head = bytearray(_HEAD.size)
        self._body: bytearray | None = None
        self._filled = 0
        self._last_received = time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return self.connection.fileno() >= 0

    @property
    def has_outgoing(self) -> bool:
        """Whether unsent bytes remain."""
        return bool(self._outgoing)

    def expect_answers(self) -> None:
        """Starts to measure the neighbour's silence."""
        self.is_pinged, self._last_received = True, time.monotonic()

    def silent(self, now: float) -> dict[int, float]:
        """Returns the silent ranks on this side of the tree, with their seconds of silence.

        If this neighbour is silent, returns only the neighbour, otherwise silent ranks beyond it.
        """
        waited = now - self._last_received
        if self.is_pinged and waited > _SILENT_S:
            return {self.rank: waited}
        return self.silent_beyond

    def queue(self, kind: int, call: int, number: int, body: tuple[Any, ...]) -> None:
        """Appends a message to the unsent bytes."""
        views = [memoryview(buffer).cast("B") for buffer in body if len(buffer)]
        head = _HEAD.pack(kind, call, number, sum(map(len, views)))
        self._outgoing += [memoryview(head), *views]

    def write(self) -> None:
        """Sends as many bytes as the socket accepts without blocking.

        Raises OSError if the connection is lost.
        """
        while self._outgoing:
            views = [self._outgoing[i] for i in range(min(_MAX_VIEWS, len(self._outgoing)))]
            try:
                sent = self.connection.sendmsg(views)
            except BlockingIOError:
                return
            while sent:
                first = self._outgoing.popleft()
                if len(first) > sent:
                    self._outgoing.appendleft(first[sent:])
                    break
                sent -= len(first)

    def read(self) -> Message | None:
        """Reads the bytes that have arrived.

        Returns the next message if it is complete, else ``None``. Raises OSError if the connection
        is lost.
        """
        while True:
            into = self._head if self._body is None else self._body
            if self._filled < len(into):
                try:
                    received = self.connection.recv_into(memoryview(into)[self._filled :])
                except BlockingIOError:
                    return None
                if not received:
                    raise ConnectionResetError
                self._filled += received
                self._last_received = time.monotonic()
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
