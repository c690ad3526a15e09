"""What trainers and the agent say to each other: fixed messages in binary, never pickles.

A message is a header of 16 bytes, little-endian (``TCAG``, version, kind, two bytes of zero, length
of the body), and its fields one after another: an integer takes 8 bytes, and bytes take 4 for
their length before them. Every kind has its own fields, in one order.
"""

from __future__ import annotations

import enum
import socket
import struct
from dataclasses import dataclass

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
_VERSION = 4
_HEADER = struct.Struct("<4sHHQ")
_PEER = struct.Struct("3i")  # SO_PEERCRED: process, user, group.
_MOST_NBYTES = 1 << 20  # Of a body: whoever claims more is not one of ours.


class Kind(enum.IntEnum):
    """What a message says, and what follows."""

    HELLO = 1
    """A rank begins: run, session, rank, all ranks of this machine as 8 bytes each."""
    OK = 2
    ERROR = 3
    """Class of the error, message, errno."""
    RESERVE = 4
    """Asks for slots: nbytes of each."""
    ACQUIRE = 5
    """Asks for a slot to fill: sequence, nbytes, milliseconds to wait for one."""
    SLOT = 6
    """Answers: file of the slot, whether that had to wait."""
    BUSY = 7
    """Answers: all slots are in use."""
    FILLED = 8
    """A snapshot is complete: file of the slot, sequence."""
    PERSIST = 9
    """Waits until a save is on disk: session, sequence."""
    DETACH = 10
    """A rank ends in good order: whether its snapshots are of no more use."""

    ABORT = 11
    """A rank will not fill a slot for a save: sequence, node, node count, directory."""


_FIELDS: dict[Kind, str] = {
    Kind.HELLO: "bbib",
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
    """One message: its kind, and its fields in order."""

    kind: Kind
    fields: tuple[int | bytes, ...] = ()

    def integer(self, at: int) -> int:
        """A field that is an integer."""
        value = self.fields[at]
        assert isinstance(value, int)
        return value

    def data(self, at: int) -> bytes:
        """A field that is bytes."""
        value = self.fields[at]
        assert isinstance(value, bytes)
        return value

    def pack(self) -> bytes:
        """All its bytes."""
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
        OSError: The other side is gone.
    """
    connection.sendall(Message(kind, fields).pack())


def receive(connection: socket.socket) -> Message | None:
    """The next message; ``None`` when the other side has ended.

    Raises:
        OSError: The other side is gone.
        CheckpointError: It sends something else.
        UnsupportedError: It is of another version.
    """
    header = _read(connection, _HEADER.size)
    if header is None:
        return None
    magic, version, kind, nbytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise CheckpointError("this is no message of an agent or its trainers")
    if version != _VERSION:
        raise UnsupportedError(
            f"the other side speaks version {version}, and this is version {_VERSION}"
        )
    if kind not in set(Kind) or nbytes > _MOST_NBYTES:
        raise CheckpointError(f"there is no message of kind {kind} with {nbytes} bytes")
    body = _read(connection, nbytes)
    return None if body is None else Message(Kind(kind), _unpack(Kind(kind), body))


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    pid, user, _ = _PEER.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    )
    return pid, user


def error_message(error: BaseException) -> tuple[int | bytes, ...]:
    """The fields of an ``ERROR`` for it."""
    kind = type(error).__name__ if isinstance(error, CheckpointError) else "CheckpointError"
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return kind.encode(), text.encode(), getattr(error, "errno", None) or 0


def raise_error(message: Message) -> None:
    """Raises what an ``ERROR`` says, and nothing for other messages."""
    if message.kind != Kind.ERROR:
        return
    name, text = message.data(0).decode(), message.data(1).decode()
    kind = getattr(errors, name) if name in errors.__all__ else CheckpointError
    if kind in (AlreadyExistsError, NotFoundError, StorageError):
        raise kind(text, message.integer(2) or None)
    raise kind(text) if issubclass(kind, CheckpointError) else CheckpointError(text)


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
                raise struct.error("cut off")
            fields.append(body[at : at + nbytes])
            at += nbytes
    except struct.error as error:
        raise CheckpointError(f"a message of kind {kind.name} is cut off") from error
    if at != len(body):
        raise CheckpointError(f"a message of kind {kind.name} is too long")
    return tuple(fields)


def _read(connection: socket.socket, nbytes: int) -> bytes | None:
    """Exactly so many bytes; ``None`` where the other side has ended before."""
    parts = bytearray()
    while len(parts) < nbytes:
        part = connection.recv(nbytes - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
