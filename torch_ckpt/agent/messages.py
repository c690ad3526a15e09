"""Messages between trainers and agents, over a socket and in files: JSON and bytes, never pickles.

A message is a head of 18 bytes and a body. The head is little-endian: ``TCAG``, version (2 bytes),
length of the body (8 bytes), and CRC-32 of the body (4 bytes). The body is one line of JSON, a list
of an object and of the lengths of the blobs, and then the blobs.
"""

from __future__ import annotations

import enum
import json
import select
import socket
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

from torch_ckpt import errors
from torch_ckpt.agent.memory import Save
from torch_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    text_of,
)

__all__ = [
    "Failure",
    "Kind",
    "Message",
    "decode",
    "decoded_save",
    "encode",
    "encoded_save",
    "failure_of",
    "failure_of_save",
    "has_arrived",
    "peer_of",
    "raise_failure",
    "receive",
    "send",
]

_MAGIC = b"TCAG"
_VERSION = 11
_HEAD = struct.Struct("<4sHQI")
_PEER = struct.Struct("3i")  # SO_PEERCRED: process, user, group.
_MAX_BODY_NBYTES = 1 << 20  # A longer message on a socket is not from this package.

Failure = tuple[str, str, int]
"""Class of an error, its message, and errno."""


class Kind(enum.StrEnum):
    """The kind of a message on a socket, which determines its fields."""

    HELLO = "hello"
    """Registers a rank: ``run`` and ``session`` as hexadecimal digits, ``rank``, ``ranks_here``,
    ``options`` of the agent as JSON, and the ``orphans``: saves of earlier ranks (session and
    sequence) that some machine has lost. If the run has an id: ``run_id``, ``is_written`` (whether
    the directory of the run has the id), ``places`` (the directories from which the ranks restore),
    ``seen`` (a directory that the agent must see too), and its ``inode``. If the run is on a store,
    the first client sends other fields instead of ``seen``: ``url``, at which the agent must find
    the id, and ``may_end``, whether it may end if it does not."""
    OK = "ok"
    ERROR = "error"
    """Reports an error: ``failure``."""
    RESERVE = "reserve"
    """Requests memory for a rank's slots: ``nbytes`` of each."""
    ACQUIRE = "acquire"
    """Requests a slot to fill: ``sequence``, ``nbytes``, ``wait_s`` for a free slot, and perhaps
    the save to ``keep``."""
    SLOT = "slot"
    """Answers ``ACQUIRE``: ``path`` of the slot, ``has_waited``."""
    BUSY = "busy"
    """Answers ``ACQUIRE``: all slots are in use."""
    FILLED = "filled"
    """Reports a complete snapshot: ``path`` of the slot, ``sequence``."""
    PERSIST = "persist"
    """Waits until a save of the session is on disk: ``sequence``, and whether the rank
    ``has_filled`` its slot; ranks of earlier builds omit that."""
    DETACH = "detach"
    """Reports the orderly end of a rank, and whether to ``drop`` its snapshots."""
    ABORT = "abort"
    """Reports that a rank will fill no slot for a save: ``sequence``, ``node``, ``node_count``,
    ``destination``."""
    FAIL = "fail"
    """Reports that a save of the session has failed on another machine: ``sequence``,
    ``failure``."""
    LISTEN = "listen"
    """Requests that the agent listens for another agent: ``hosts``, and the ``node`` of this
    machine."""
    LISTENING = "listening"
    """Answers ``LISTEN``: the addresses ``at`` which it listens, and its secret ``token``."""
    BUDDY = "buddy"
    """Begins to replicate: ``buddy`` (the node that stores the replicas of this machine), ``at``
    and ``token`` of its agent, and ``source`` (the node whose replicas this agent stores). Without
    fields, the agent stops replicating."""
    RESERVE_REPLICAS = "reserve replicas"
    """Requests memory for replicas: ``slots``, the lengths of all slots of one save by node."""
    REPLICATED = "replicated"
    """Requests the saves whose replicas are complete."""
    SAVES = "saves"
    """Answers ``REPLICATED``: ``saves`` in memory with a complete replica (``None`` if the agent
    does not replicate), the number of ``superseded`` saves, and the last ``failure`` of a send."""
    REPLICA = "replica"
    """From agent to agent, begins the replica of a save: ``run``, ``session``, ``sequence``,
    ``node``, ``slots`` (rank and length of each), and the save to ``keep``. Blocks follow."""

    COPY = "copy"
    """Requests a copy of the data files of a step, or its progress: ``source`` and ``target`` (its
    two directories), its ``save_id``, ``nbytes_per_s``, ``wait_s`` for the end, ``is_first``
    (whether it is the first request of the rank), and ``is_cancelled``."""
    COPIED = "copied"
    """Answers ``COPY``: whether the copy ``has_ended``, the ``nbytes`` that were read so far, the
    ``linked_nbytes``, and the ``failure``, if any."""


Message = dict[str, Any]
"""A message on a socket: ``kind``, and its fields by name."""


def encode(facts: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Returns the bytes of a message.

    Example::

        assert decode(encode({"a": 1}, [b"x"])) == ({"a": 1}, [b"x"])
    """
    line = json.dumps([facts, [len(blob) for blob in blobs]]).encode() + b"\n"
    body = b"".join([line, *blobs])
    return _HEAD.pack(_MAGIC, _VERSION, len(body), zlib.crc32(body)) + body


def decode(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Returns the facts and blobs of a message that :func:`encode` made.

    Raises CorruptionError if the bytes are not a message, and UnsupportedError if it has another
    version.
    """
    return _decode_body(*_decode_head(data[: _HEAD.size]), data[_HEAD.size :])


def _decode_head(head: bytes) -> tuple[int, int]:
    """Returns the length and the CRC-32 of the body."""
    if not head.startswith(_MAGIC) or len(head) < _HEAD.size:
        raise CorruptionError("cannot read a message: it does not begin with TCAG")
    _, version, nbytes, crc = _HEAD.unpack(head)
    if version != _VERSION:
        raise UnsupportedError(
            f"cannot read a message of version {version}: this process uses version {_VERSION}"
        )
    return nbytes, crc


def _decode_body(nbytes: int, crc: int, body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    try:
        if len(body) != nbytes or zlib.crc32(body) != crc:
            raise ValueError("its length or CRC-32 does not match")
        line, _, rest = body.partition(b"\n")
        facts, lengths = json.loads(line)
        blobs = []
        at = 0
        for length in lengths:
            if length < 0:
                raise ValueError("a part has a negative length")
            blobs.append(rest[at : at + length])
            at += length
        if at != len(rest) or not isinstance(facts, dict):
            raise ValueError("its parts do not match")
        return facts, blobs
    except (RecursionError, TypeError, ValueError) as error:
        raise CorruptionError(f"cannot read a message: {error}") from error


def encoded_save(save: Save | None) -> tuple[str, int] | None:
    """Returns session and sequence of a save, as values of JSON."""
    return None if save is None else (save[0].hex(), save[1])


def decoded_save(value: object) -> Save | None:
    """Returns the save whose session and sequence are in a message."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    return bytes.fromhex(str(value[0])), int(value[1])


def send(connection: socket.socket, kind: Kind, **fields: Any) -> None:
    """Sends a message. Raises OSError if the peer closed the connection."""
    connection.sendall(encode({"kind": kind, **fields}))


def receive(connection: socket.socket) -> Message | None:
    """Returns the next message; ``None`` when the peer closed the connection.

    Raises OSError if the connection broke, CorruptionError if the bytes are not a message, and
    UnsupportedError if it has another version.
    """
    head = _read(connection, _HEAD.size)
    if head is None:
        return None
    nbytes, crc = _decode_head(head)
    if nbytes > _MAX_BODY_NBYTES:
        raise CorruptionError(f"cannot read a message of {nbytes} bytes: it is too long")
    body = _read(connection, nbytes)
    if body is None:
        return None
    message, _ = _decode_body(nbytes, crc, body)
    if message.get("kind") not in list(Kind):
        raise CorruptionError(f"cannot read a message of kind {message.get('kind')}: unknown kind")
    return message


def has_arrived(connection: socket.socket, within_s: float) -> bool:
    """Returns whether bytes, or the end of the connection, arrive within ``within_s``.

    Unlike ``select.select``, it works with any number of open descriptors.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(within_s * 1e3))


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns the process id and the user id of the peer."""
    pid, user, _ = _PEER.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    )
    return pid, user


def failure_of(error: BaseException) -> Failure:
    """Returns the description of an exception, for another process to raise."""
    kind, text = type(error).__name__, text_of(error)
    if not isinstance(error, CheckpointError):
        kind = "StorageError" if isinstance(error, OSError) else "CheckpointError"
        text = f"{type(error).__name__}: {text}"
    return kind, text, getattr(error, "errno", None) or 0


def failure_of_save(error: BaseException) -> Failure:
    """As :func:`failure_of`, for a save: if its directory or a file is gone, storage has failed."""
    kind, text, number = failure_of(error)
    return "StorageError" if kind == "NotFoundError" else kind, text, number


def raise_failure(failure: Failure) -> NoReturn:
    """Raises the error that another process has described: a CheckpointError."""
    name, text, errno = failure
    found = getattr(errors, name, None)
    is_ours = isinstance(found, type) and issubclass(found, CheckpointError)
    kind: Any = found if is_ours else CheckpointError
    if kind in (AlreadyExistsError, NotFoundError, StorageError):
        raise kind(text, errno or None)
    raise kind(text)


def _read(connection: socket.socket, nbytes: int) -> bytes | None:
    """Reads exactly this many bytes; returns ``None`` if the connection closes earlier."""
    received = bytearray()
    while len(received) < nbytes:
        chunk = connection.recv(nbytes - len(received))
        if not chunk:
            return None
        received += chunk
    return bytes(received)
