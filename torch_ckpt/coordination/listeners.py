"""The listening sockets of a rank, which accept the ranks that connect and refuse all others.

A rank listens only while it connects, at the addresses that it publishes in the store. Other
programs may connect to them: port scanners, health checks, or strangers on a shared machine. So
connections are read without blocking. A connection that does not begin the handshake within two
seconds, or does not complete it in time, is closed, and their number is bounded.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import time
from collections.abc import Iterable

from torch_ckpt.coordination.handshake import CONFIRMED, HELLO, PROOF_NBYTES, Handshake
from torch_ckpt.process_state import PROCESS

__all__ = ["Listeners"]

_LOG = logging.getLogger("torch_ckpt")

_BACKLOG = 1024  # Probes remain in the queue of a listener until it accepts its children.
_SILENT_S = 2.0  # Time in which a connection must begin the handshake.
_PROOF_S = 15.0  # Time in which it must then complete it. A busy rank takes longer to answer.
_PAUSE_S = 0.2  # Time to wait for a free descriptor.
_MOST_PENDING = 64  # Connections that have not completed the handshake.


class _Pending:
    """A connection that has not completed the handshake.

    ``handshake`` is this end of the handshake, set once the other end, ``rank``, has sent its
    nonce.
    """

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.received = bytearray()
        self.handshake: Handshake | None = None
        self.rank, self.nonce = -1, b""

    @property
    def awaited_nbytes(self) -> int:
        """Length of the message that must arrive next."""
        return HELLO.size if self.handshake is None else PROOF_NBYTES

    @property
    def ends_at(self) -> float:
        """Time at which this connection is closed if it is still pending."""
        return self.since + (_SILENT_S if self.handshake is None else _PROOF_S)


class Listeners:
    """Sockets that listen at addresses of this machine, until :meth:`close`.

    Each host has a port, or 0 for any. Addresses of other machines are skipped. Raises OSError if
    the system cannot listen at any address. ``rank`` is this rank's name, for messages. ``secret``,
    in hexadecimal digits, is the secret that a connecting rank must know: by default, a new one.
    """

    def __init__(
        self, hosts: Iterable[tuple[str, int]], rank: int, secret: str | None = None
    ) -> None:
        self.addresses: list[tuple[str, int]] = []
        self._is_named = secret is not None
        self._secret = secrets.token_bytes(16) if secret is None else bytes.fromhex(secret)
        self.secret = self._secret.hex()
        self._rank = rank
        self._sockets: list[socket.socket] = []
        self._selector = PROCESS.own(selectors.DefaultSelector())
        self._pending: dict[socket.socket, _Pending] = {}
        self._refused = 0
        self._failure = ""  # Why it could not accept a connection.
        failure: OSError | None = None
        for host, port in hosts:
            try:
                self._listen(host, port)
            except OSError as error:  # The name of this machine may resolve to foreign addresses.
                failure = error
        if not self.addresses:
            self._selector.close()
            raise failure or OSError("this machine has no address")

    def _listen(self, host: str, port: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        listener = PROCESS.own(socket.socket(family, socket.SOCK_STREAM))
        try:
            if self._is_named:  # The next process that listens there finds lingering connections.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        except OSError:
            listener.close()
            raise
        self._sockets.append(listener)
        self.addresses.append((host, listener.getsockname()[1]))

    def accepted(self, ranks: Iterable[int], timeout_s: float) -> dict[int, socket.socket]:
        """Waits, at most ``timeout_s``, for connections of the expected ranks.

        Returns the connections of ranks that completed the handshake, as soon as one has; empty
        after ``timeout_s``. If the system has no more descriptors, waits for one, and logs that.
        """
        expected, end = set(ranks), time.monotonic() + timeout_s
        found: dict[int, socket.socket] = {}
        while not found and (remaining_s := end - time.monotonic()) > 0:
            first = min((pending.ends_at for pending in self._pending.values()), default=end)
            now = time.monotonic()  # Earlier bytes are read even if this rank was busy.
            remaining_s = min(remaining_s, max(first - now, 0.0))
            for key, _ in self._selector.select(remaining_s):
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if ready in self._sockets:
                    try:
                        self._accept(ready, expected, found)
                    except OSError as error:
                        self._log_failure(error)
                        time.sleep(min(_PAUSE_S, max(end - time.monotonic(), 0.0)))
                elif ready in self._pending:  # It may have been dropped meanwhile.
                    self._read(ready, expected, found)
            for connection, pending in list(self._pending.items()):
                if now >= pending.ends_at:
                    self._refuse(connection)
        return found

    def _log_failure(self, error: OSError) -> None:
        if str(error) != self._failure:  # Attempts are repeated.
            self._failure = str(error)
            _LOG.warning("rank %d cannot accept connections: %s", self._rank, error)

    def _accept(
        self, listener: socket.socket, expected: set[int], found: dict[int, socket.socket]
    ) -> None:
        """Accepts the waiting connections, and reads the bytes that have arrived on them."""
        for _ in range(_MOST_PENDING):
            try:
                connection = PROCESS.own(listener.accept()[0])
            except (BlockingIOError, ConnectionAbortedError):
                return
            if len(self._pending) >= _MOST_PENDING:
                # The oldest of the connections that have sent least: the others may be about to
                # answer.
                self._refuse(
                    min(self._pending, key=lambda c: self._pending[c].handshake is not None)
                )
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._pending[connection] = _Pending()
            self._read(connection, expected, found)

    def _read(
        self, connection: socket.socket, expected: set[int], found: dict[int, socket.socket]
    ) -> None:
        """Reads from a connection, and determines whether it belongs to a rank."""
        pending = self._pending[connection]
        received = pending.received
        try:
            # Reads one more byte, to detect a rank that has closed this connection for another.
            while more := connection.recv(pending.awaited_nbytes + 1 - len(received)):
                received += more
                if len(received) > pending.awaited_nbytes:
                    return self._refuse(connection)
            # A rank that only probes this one sends nothing.
            is_stranger = 0 < len(received) < pending.awaited_nbytes
            return self._refuse(connection, is_stranger=is_stranger)
        except BlockingIOError:
            if len(received) < pending.awaited_nbytes:
                return None
        except OSError:
            return self._refuse(connection, is_stranger=bool(received))
        if pending.handshake is None:
            return self._challenge(connection, pending)
        rank = pending.rank
        if not pending.handshake.is_proven(pending.nonce, bytes(received)):
            return self._refuse(connection)
        if rank not in expected or rank in found:  # A rank may connect to several addresses.
            return self._refuse(connection, is_stranger=False)
        try:
            connection.sendall(CONFIRMED)
        except OSError:
            return self._refuse(connection, is_stranger=False)
        self._forget(connection)
        found[rank] = connection
        return None

    def _challenge(self, connection: socket.socket, pending: _Pending) -> None:
        """Answers the first bytes of a connection with the nonce and the proof of this end."""
        pending.nonce, pending.rank = HELLO.unpack(pending.received)
        pending.received.clear()
        try:
            handshake = Handshake.of_listener(self._secret, pending.rank, connection)
            connection.sendall(handshake.nonce + handshake.proof(pending.nonce))
        except OSError:
            return self._refuse(connection, is_stranger=False)
        pending.handshake, pending.since = handshake, time.monotonic()
        return None

    def _forget(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)

    def _refuse(self, connection: socket.socket, *, is_stranger: bool = True) -> None:
        self._forget(connection)
        connection.close()
        self._refused += is_stranger

    def close(self) -> None:
        """Closes all sockets, except those of ranks; logs the number of refused strangers."""
        for connection in list(self._pending):
            self._refuse(connection)
        for listener in self._sockets:
            listener.close()
        self._selector.close()
        if self._refused:
            ports = ", ".join(f"{host}:{port}" for host, port in self.addresses)
            _LOG.warning(
                "rank %d refused %d connections of other programs while the ranks connected (at "
                "%s)",
                *(self._rank, self._refused, ports),
            )
