"""The handshake: both ends of a connection prove that they know a secret, and never send it.

Each end sends a nonce: random bytes. A proof is the HMAC-SHA256, with the secret as its key, of the
names and nonces of both ends, those of the sender first. So a proof is valid for one connection, in
one direction. Over a socket it also covers the address at which the listener was dialled: a program
that relays the handshake of an agent or a rank from another address is refused.

The handshake authenticates the ends of a connection. It does not encrypt or authenticate later
data: an attacker who can read or change packets between the ends can read or change that data.

Over a socket the end that dials sends its nonce and its rank. The listener answers with its nonce
and its proof. The end that dials verifies it and sends its own proof, which the listener confirms
with one byte. So the end that dials proves nothing to a listener that does not know the secret.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
import struct

__all__ = [
    "CONFIRMED",
    "HELLO",
    "NONCE_NBYTES",
    "PROOF_NBYTES",
    "Dialling",
    "Handshake",
    "keep_alive",
]

NONCE_NBYTES = 16
PROOF_NBYTES = 32
_ANSWER_NBYTES = NONCE_NBYTES + PROOF_NBYTES
CONFIRMED = b"\1"
HELLO = struct.Struct(f"<{NONCE_NBYTES}sI")
"""The first bytes of the end that dials: its nonce, and its rank or node."""

# The kernel detects a machine without power after about nine seconds.
_KEEPALIVE = {
    socket.SO_KEEPALIVE: (socket.SOL_SOCKET, 1),
    socket.TCP_KEEPIDLE: (socket.IPPROTO_TCP, 3),
    socket.TCP_KEEPINTVL: (socket.IPPROTO_TCP, 2),
    socket.TCP_KEEPCNT: (socket.IPPROTO_TCP, 3),
    socket.TCP_NODELAY: (socket.IPPROTO_TCP, 1),
}


def keep_alive(connection: socket.socket) -> socket.socket:
    """Returns a connection that detects the end of the other machine."""
    for option, (level, value) in _KEEPALIVE.items():
        connection.setsockopt(level, option, value)
    return connection


class Handshake:
    """One end of a handshake. ``own`` and ``other`` name the ends; ``at`` is the same on both."""

    def __init__(self, secret: bytes, own: str, other: str, at: str = "") -> None:
        self.nonce = secrets.token_bytes(NONCE_NBYTES)
        self._secret, self._own, self._other, self._at = secret, own, other, at

    def proof(self, nonce: bytes) -> bytes:
        """Returns the proof of this end for the other end, which has sent ``nonce``."""
        return self._proof(self._own, self._other, self.nonce, nonce)

    def is_proven(self, nonce: bytes, proof: bytes) -> bool:
        """Returns whether the end that has sent ``nonce`` has proved that it knows the secret."""
        return hmac.compare_digest(proof, self._proof(self._other, self._own, nonce, self.nonce))

    def _proof(self, sender: str, receiver: str, first: bytes, second: bytes) -> bytes:
        text = "\0".join(["torch_ckpt", sender, receiver, self._at]).encode()
        return hmac.digest(self._secret, first + second + text, "sha256")

    @classmethod
    def of_dialling(cls, secret: bytes, rank: int, connection: socket.socket) -> Handshake:
        """Returns the dialling end, which has ``rank``."""
        return cls(secret, f"rank {rank}", "listener", _text_of(connection.getpeername()))

    @classmethod
    def of_listener(cls, secret: bytes, rank: int, connection: socket.socket) -> Handshake:
        """Returns the listening end of a connection from ``rank``."""
        return cls(secret, "listener", f"rank {rank}", _text_of(connection.getsockname()))


def _text_of(address: tuple[str, int]) -> str:
    """Returns an address without its scope, whose name differs between machines."""
    return f"{address[0].partition('%')[0]} {address[1]}"


class Dialling:
    """A connection whose listener has not confirmed the handshake yet.

    Sends the first bytes immediately, and makes the connection non-blocking. Raises OSError.
    """

    def __init__(self, connection: socket.socket, secret: str, rank: int) -> None:
        self.connection = connection
        self._ours = Handshake.of_dialling(bytes.fromhex(secret), rank, connection)
        self._received = bytearray()
        connection.setblocking(False)
        connection.sendall(HELLO.pack(self._ours.nonce, rank))

    def advance(self) -> bool:
        """Reads and answers the bytes received so far; returns whether the listener confirmed.

        Raises PermissionError if the listener does not know the secret, ConnectionResetError if it
        closed the connection, and OSError.
        """
        received = self._received
        while len(received) <= _ANSWER_NBYTES:
            # Reads at most the answer, and then at most the confirming byte.
            missing = max(_ANSWER_NBYTES - len(received), 1)
            try:
                more = self.connection.recv(missing)
            except BlockingIOError:
                return False
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, "it closes the connection")
            received += more
            if len(received) == _ANSWER_NBYTES:
                nonce, proof = received[:NONCE_NBYTES], received[NONCE_NBYTES:]
                if not self._ours.is_proven(bytes(nonce), bytes(proof)):
                    raise _stranger()
                self.connection.sendall(self._ours.proof(bytes(nonce)))
        if received[_ANSWER_NBYTES:] != CONFIRMED:
            raise _stranger()
        return True


def _stranger() -> PermissionError:
    return PermissionError(errno.EACCES, "another program listens at this address")
