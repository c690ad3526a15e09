"""The event loop that serves the connections of a rank, and runs functions of other threads."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import selectors
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from torch_ckpt.coordination.peer import Message, Peer
from torch_ckpt.errors import CheckpointError
from torch_ckpt.process_state import PROCESS

__all__ = ["FORKED", "Loop", "OwnNumbers", "settle"]

FORKED = "a forked process is not a rank of its parent's group"
"""The error of a forked child that uses a group of its parent."""


class OwnNumbers:
    """Numbers that one process counts. In a forked child, all methods raise CheckpointError."""

    def __init__(self) -> None:
        self._numbers, self._pid = itertools.count(), os.getpid()

    def __next__(self) -> int:
        with self.one_process():
            return next(self._numbers)

    @contextlib.contextmanager
    def one_process(self) -> Iterator[None]:
        """Refuses a forked child, also one that code of the program forks within the block."""
        self._check()
        yield
        self._check()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise CheckpointError(FORKED)


class Loop(ABC):
    """Reads and writes messages, and runs posted functions, in the thread that calls :meth:`run`.

    Other threads call only :meth:`post`, :meth:`submit` and :meth:`stop`. ``lost`` is the error of
    all posted functions after a connection was lost; ``None`` before.
    """

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.stopped = False
        self.lost: Exception | None = None
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._selector = PROCESS.own(selectors.DefaultSelector())
        # A pipe, because some sandboxes refuse local sockets.
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._woken = PROCESS.own(io.FileIO(woken, "r"))
        self._wake = PROCESS.own(io.FileIO(wake, "w"))
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        PROCESS.forkable.add(self)

    @abstractmethod
    def due(self) -> float | None:
        """Runs the timers that are due.

        Returns the seconds until the next timer, or ``None``.
        """

    @abstractmethod
    def receive(self, peer: Peer, message: Message) -> None:
        """Processes a message."""

    @abstractmethod
    def disconnect(self, peer: Peer) -> None:
        """Processes the loss of a connection."""

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the loop's thread.

        If the loop ends first, a future among the arguments fails.
        """
        self._posted.append((function, arguments))
        with contextlib.suppress(OSError, ValueError):  # The loop has ended.
            self._wake.write(b"\0")
        if self.stopped:
            self._fail_posted()

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[Any]:
        """Posts a function with a new future as its last argument, and returns the future."""
        future: Future[Any] = Future()
        self.post(function, *arguments, future)
        return future

    def stop(self) -> None:
        """Stops the loop."""
        self.stopped = True
        self.post(lambda: None)

    def add(self, peer: Peer) -> None:
        """Adds a connection."""
        self.peers.append(peer)
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def send(self, peer: Peer, kind: int, call: int = 0, number: int = 0, *body: Any) -> None:
        """Sends a message without blocking; the loop sends the rest later."""
        if not peer.is_open:
            return
        is_busy = peer.has_outgoing
        peer.queue(kind, call, number, body)
        if not is_busy:
            with contextlib.suppress(OSError):  # The next read reports the lost connection.
                peer.write()
            if peer.has_outgoing:
                events = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(peer.connection, events, peer)

    def run(self) -> None:
        """Serves connections and posted functions until :meth:`stop`."""
        while not self.stopped:
            for key, events in self._selector.select(self.due()):
                peer = key.data
                if peer is None:
                    self._run_posted()
                elif peer.is_open:
                    self._serve(peer, events)

    def close(self) -> None:
        """Closes all connections, and fails the functions that were posted but not called."""
        self.stopped = True
        for peer in self.peers:
            peer.connection.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()
        self._fail_posted()

    def after_fork(self) -> None:
        """Refuses the functions that a forked child posts. Its descriptors are closed already."""
        self.stopped = True
        self.lost = CheckpointError(FORKED)

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.write()
                if not peer.has_outgoing:
                    self._selector.modify(peer.connection, selectors.EVENT_READ, peer)
            if events & selectors.EVENT_READ and (message := peer.read()):
                self.receive(peer, message)
        except OSError:
            self.peers.remove(peer)
            self._selector.unregister(peer.connection)
            peer.connection.close()
            self.disconnect(peer)

    def _run_posted(self) -> None:
        self._woken.read(4096)
        while True:
            try:
                function, arguments = self._posted.popleft()
            except IndexError:  # Another thread may empty the queue meanwhile.
                return
            try:
                function(*arguments)
            except BaseException as error:
                _settle_all(arguments, error)
                raise

    def _fail_posted(self) -> None:
        """Fails the futures of functions that were posted but not called."""
        error = self.lost or CheckpointError("the connections of this group are closed")
        with contextlib.suppress(IndexError):  # Another thread may empty the queue meanwhile.
            while True:
                _settle_all(self._posted.popleft()[1], error)


def _settle_all(arguments: Sequence[Any], error: BaseException) -> None:
    """Fails the futures among the arguments of a posted function."""
    for argument in arguments:
        if isinstance(argument, Future):
            settle(argument, error=error)


def settle(future: Future[Any] | None, value: Any = None, *, error: Any = None) -> None:
    """Sets the result or error of a future, unless it has one."""
    if future is None:
        return
    with contextlib.suppress(InvalidStateError):  # The waiting thread was interrupted.
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
