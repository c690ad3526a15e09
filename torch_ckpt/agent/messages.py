"""Messages between trainers and the agent: fixed binary records, never pickles.

A message is a header of 16 bytes and a body. The header is little-endian: ``TCAG``, version, kind
(2 bytes each) and the length of the body (8 bytes). The body is the message's fields in a fixed
order: an integer has 8 bytes; a byte string has a length of 4 bytes before its bytes. Each kind of
message has its own list of fields.
"""

from __future__ import annotations

import enum
import socket
import struct
from dataclasses import dataclass
from typing import Any

from torch_ckpt import errors
from torch_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)

__all__ = ["Kind", "Message", "error_message", "peer_of", "raise_error", "receive", "send"]

_MAGIC = b"TCAG"
_VERSION = 5
_HEADER = struct.Struct("<4sHHQ")
_PEER = struct.Struct("3i")  # SO_PEERCRED: process, user, group.
_MAX_BODY_NBYTES = 1 << 20  # A longer body is not from this package.


class Kind(enum.IntEnum):
    """The kind of a message, which determines its fields."""

    HELLO = 1
    """Registers a rank: run, session, rank, all ranks of this machine as 8 bytes each, id of the
    run (empty if it has none), whether the directory of the run has the id, a directory that the
    agent must see too, and its inode, options of the agent as JSON."""
    OK = 2
    ERROR = 3
    """Reports an error: class, message, errno."""
    RESERVE = 4
    """Requests memory for a rank's slots: bytes per slot."""
    ACQUIRE = 5
    """Requests a slot to fill: sequence, nbytes, milliseconds to wait for a free slot."""
    SLOT = 6
    """Answers ``ACQUIRE``: file of the slot, whether the request waited."""
    BUSY = 7
    """Answers ``ACQUIRE``: all slots are in use."""
    FILLED = 8
    """Reports a complete snapshot: file of the slot, sequence."""
    PERSIST = 9
    """Waits until a save is on disk: session, sequence."""
    DETACH = 10
    """Reports the orderly end of a rank: whether to discard its snapshots."""

    ABORT = 11
    """Reports that a rank will fill no slot for a save: sequence, node, node count, directory."""


_FIELDS: dict[Kind, str] = {
    Kind.HELLO: "bbibbibbb",
    Kind.OK: "",
    Kind.ERROR: "bbi",
    Kind.RESERVE: "i",
    Kind.ACQUIRE: "iii",
    Kind.SLOT: "bi",
    Kind.BUSY: "",
    Kind.FILLED: "bi",
    Kind.PERSIST: "bi",
    Kind.DETACH: "i",
    Kind.ABORT: "iiib",
}


@dataclass(frozen=True)
class Message:
    """One message: its kind and its fields in order."""

    kind: Kind
    fields: tuple[int | bytes, ...] = ()

    def integer(self, at: int) -> int:
        """Returns the integer field at a position."""
        value = self.fields[at]
        assert isinstance(value, int)
        return value

    def data(self, at: int) -> bytes:
        """Returns the bytes field at a position."""
        value = self.fields[at]
        assert isinstance(value, bytes)
        return value

    def pack(self) -> bytes:
        """Returns the encoded message."""
        body = b""
        for field in self.fields:
            if isinstance(field, bytes):
                body += struct.pack("<I", len(field)) + field
            else:
                body += struct.pack("<q", field)
        return _HEADER.pack(_MAGIC, _VERSION, self.kind, len(body)) + body


def send(connection: socket.socket, kind: Kind, *fields: int | bytes) -> None:
    """Sends a message.

    Raises:
        OSError: The peer closed the connection.
    """
    connection.sendall(Message(kind, fields).pack())


def receive(connection: socket.socket) -> Message | None:
    """Returns the next message; ``None`` when the peer closed the connection.

    Raises:
        OSError: The connection broke.
        CheckpointError: The bytes are not a message.
        UnsupportedError: The message has another version.
    """
    header = _read(connection, _HEADER.size)
    if header is None:
        return None
    magic, version, kind, nbytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise CheckpointError("cannot read a message: it does not begin with TCAG")
    if version != _VERSION:
        raise UnsupportedError(
            f"cannot read a message of version {version}: this process uses version {_VERSION}"
        )
    if kind not in set(Kind) or nbytes > _MAX_BODY_NBYTES:
        raise CheckpointError(
            f"cannot read a message of kind {kind} with {nbytes} bytes: unknown kind or too long"
        )
    body = _read(connection, nbytes)
    return None if body is None else Message(Kind(kind), _unpack(Kind(kind), body))


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns the process id and the user id of the peer."""
    pid, user, _ = _PEER.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    )
    return pid, user


def error_message(error: BaseException) -> tuple[int | bytes, ...]:
    """Returns the fields of an ``ERROR`` message that describes an exception."""
    kind, text = type(error).__name__, str(error)
    if not isinstance(error, CheckpointError):
        kind = "StorageError" if isinstance(error, OSError) else "CheckpointError"
        text = f"{type(error).__name__}: {error}"
    return kind.encode(), text.encode(), getattr(error, "errno", None) or 0


def raise_error(message: Message) -> None:
    """Raises the exception that an ``ERROR`` message describes; ignores other kinds."""
    if message.kind != Kind.ERROR:
        return
    name, text = message.data(0).decode(), message.data(1).decode()
    found = getattr(errors, name, None)
    is_ours = isinstance(found, type) and issubclass(found, CheckpointError)
    kind: Any = found if is_ours else CheckpointError
    if kind in (AlreadyExistsError, NotFoundError, StorageError):
        raise kind(text, message.integer(2) or None)
    raise kind(text)


def _unpack(kind: Kind, body: bytes) -> tuple[int | bytes, ...]:
    fields: list[int | bytes] = []
    at = 0
    try:
        for field in _FIELDS[kind]:
            if field == "i":
                fields.append(struct.unpack_from("<q", body, at)[0])
                at += 8
                continue
            (nbytes,) = struct.unpack_from("<I", body, at)
            at += 4
            if nbytes > len(body) - at:
                raise struct.error("truncated")
            fields.append(body[at : at + nbytes])
            at += nbytes
    except struct.error as error:
        raise CheckpointError(f"cannot read a message of kind {kind.name}: truncated") from error
    if at != len(body):
        raise CheckpointError(f"cannot read a message of kind {kind.name}: trailing bytes")
    return tuple(fields)


def _read(connection: socket.socket, nbytes: int) -> bytes | None:
    """Reads exactly this many bytes; returns ``None`` if the connection closes earlier."""
    received = bytearray()
    while len(received) < nbytes:
        chunk = connection.recv(nbytes - len(received))
        if not chunk:
            return None
        received += chunk
    return bytes(received)
