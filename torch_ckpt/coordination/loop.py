"""The thread that serves the connections of a rank, and what other threads order of it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from torch_ckpt.coordination.peer import Message, Peer
from torch_ckpt.errors import CheckpointError
from torch_ckpt.process_state import PROCESS

__all__ = ["Loop", "settle"]


class Loop(ABC):
    """Reads and writes messages, and does what is posted. One thread calls :meth:`run`.

    Other threads call :meth:`post` and :meth:`stop` alone.

    Attributes:
        peers: Those that it is connected to.
        stopped: Whether it is to end.
        lost: Why nothing that is posted can succeed any more.
    """

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.stopped = False
        self.lost: Exception | None = None
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        PROCESS.forkable.add(self)

    @abstractmethod
    def due(self) -> float | None:
        """Does what is due; returns for how many seconds nothing is, ``None`` for ever."""

    @abstractmethod
    def take(self, peer: Peer, message: Message) -> None:
        """A message has come."""

    @abstractmethod
    def lose(self, peer: Peer) -> None:
        """A connection has ended."""

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Has the thread call a function; a future among the arguments ends in any case."""
        self._posted.append((function, arguments))
        try:
            self._wake.send(b"\0")
        except OSError:  # It is awake, or has ended.
            if self.stopped:
                self._refuse()

    def stop(self) -> None:
        """Ends the thread."""
        self.stopped = True
        self.post(lambda: None)

    def add(self, peer: Peer) -> None:
        """Serves another connection."""
        self.peers.append(peer)
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def remove(self, peer: Peer) -> None:
        """Ends a connection."""
        self.peers.remove(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()

    def send(self, peer: Peer, kind: int, call: int = 0, number: int = 0, *body: Any) -> None:
        """Sends a message as soon as there is room."""
        if not peer.is_open:
            return
        is_busy = peer.has_outgoing
        peer.queue(kind, call, number, body)
        if not is_busy:
            with contextlib.suppress(OSError):  # Whoever reads from it finds that out.
                peer.write()
            if peer.has_outgoing:
                events = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(peer.connection, events, peer)

    def run(self) -> None:
        """Goes on until it is stopped."""
        while not self.stopped:
            for key, events in self._selector.select(self.due()):
                peer = key.data
                if peer is None:
                    self._do_posted()
                elif peer.is_open:
                    self._serve(peer, events)

    def close(self) -> None:
        """Ends all connections, and what was posted since it has ended."""
        self.stopped = True
        for peer in self.peers:
            peer.connection.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()
        self._refuse()

    def after_fork(self) -> None:
        """A child's copies of the connections would hide that this process has ended."""
        self.stopped = True
        self.lost = CheckpointError("a process that was forked is no rank of its parent's group")
        for peer in self.peers:
            if peer.is_open:
                os.close(peer.connection.detach())

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.write()
                if not peer.has_outgoing:
                    self._selector.modify(peer.connection, selectors.EVENT_READ, peer)
            if events & selectors.EVENT_READ and (message := peer.read()):
                self.take(peer, message)
        except OSError:
            self.remove(peer)
            self.lose(peer)

    def _do_posted(self) -> None:
        self._woken.recv(4096)
        while self._posted:
            function, arguments = self._posted.popleft()
            function(*arguments)

    def _refuse(self) -> None:
        error = self.lost or CheckpointError("the connections of this group were closed")
        while self._posted:
            for argument in self._posted.popleft()[1]:
                if isinstance(argument, Future):
                    settle(argument, error=error)


def settle(future: Future[Any] | None, value: Any = None, *, error: Any = None) -> None:
    """Ends a future that somebody may wait for, unless it has ended."""
    if future is None:
        return
    with contextlib.suppress(InvalidStateError):  # Whoever waited was interrupted.
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
