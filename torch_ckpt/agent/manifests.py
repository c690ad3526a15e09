"""The files through which the agents of several machines bring one save to disk.

The file system of the checkpoints is all that machines are known to share. So each agent publishes
what the others need of it as small files in the checkpoint's directory, each by a rename.
:mod:`torch_ckpt.agent.joint_save` says who publishes what when.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn, get_args

from torch_ckpt.agent.messages import Kind, Message, error_message, raise_error
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id
from torch_ckpt.storage.gc import remove_files

__all__ = ["Failure", "Manifests", "decode", "encode", "failure_of", "raise_failure"]

What = Literal["epoch", "lists", "manifest", "failed"]

_UNPUBLISHED = ".tmp"
_MAGIC = b"TCAGENT\n"
_HEAD = struct.Struct("<8sII")
_TAG_DIGITS = 16
_OF_ID = 10  # Of those, that begin the id of the save; the other six digits are those of a try.

Failure = tuple[str, str, int]
"""Class of an error, its message, and errno."""


class Manifests:
    """The files of one save, as one of the machines sees them.

    Args:
        run: 16 bytes.
        session: 16 bytes.
        sequence: Which save of the session.
        node: This machine, by number.
        node_count: How many there are.
        directory: Of the checkpoint.

    Attributes:
        node: This machine, by number.
        node_count: How many there are.
        tag: Names the save.
    """

    def __init__(
        self,
        run: bytes,
        session: bytes,
        sequence: int,
        node: int,
        node_count: int,
        directory: Location,
    ) -> None:
        self.directory = directory
        self.node = node
        self.node_count = node_count
        name = run + session + sequence.to_bytes(8, "big")
        self.tag = hashlib.sha256(name).hexdigest()[:_TAG_DIGITS]
        self._names = re.compile(rf"\.agents-{self.tag}-(\d+)\.([a-z]+)({_UNPUBLISHED})?")

    @property
    def others(self) -> list[int]:
        """The numbers of all other machines."""
        return [node for node in range(self.node_count) if node != self.node]

    def save_id(self, epoch: str) -> str:
        """The id of the save, if this try of it is committed."""
        return self.tag[:_OF_ID] + epoch[: _TAG_DIGITS - _OF_ID]

    def committed(self) -> bool:
        """Whether this save is committed.

        Raises:
            StorageError: Nobody can tell.
        """
        found = committed_id(self.directory)
        return found is not None and found[:_OF_ID] == self.tag[:_OF_ID]

    def put(self, what: What, facts: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Publishes something of this machine, in place of what it has published before.

        Raises:
            NotFoundError: The directory is gone.
            StorageError: It cannot be written.
        """
        path = self._path(self.node, what)
        temporary = path.with_name(f"{path.name}{_UNPUBLISHED}")
        temporary.discard()  # Of an agent that was killed.
        try:
            temporary.write(encode(facts, blobs), sync=False)
            temporary.rename(path)
        except CheckpointError:
            temporary.discard()
            raise

    def get(self, node: int, what: What) -> tuple[dict[str, Any], list[bytes]] | None:
        """What a machine has published; ``None`` if that is nothing whole."""
        with contextlib.suppress(StorageError, NotFoundError, CorruptionError):
            return decode(self._path(node, what).read())
        return None

    def there(self) -> dict[str, set[int]]:
        """The machines that have published something, by what it is."""
        found: dict[str, set[int]] = {what: set() for what in get_args(What)}
        for match in self._files():
            if not match[3] and match[2] in found:
                found[match[2]].add(int(match[1]))
        return found

    def remove(self, *whats: What) -> None:
        """Removes files of this machine, as far as they are there."""
        self._remove(self._path(self.node, what).name for what in whats)

    def clear(self) -> None:
        """Removes the files of all machines, but those which one is about to publish."""
        self._remove(match[0] for match in self._files() if not match[3])

    def is_attended(self) -> bool:
        """Whether any machine has come for this save."""
        return bool(self._files())

    def abort(self, why: str) -> None:
        """Says that this machine will never have the save.

        Raises:
            StorageError: It cannot be said.
        """
        failure = failure_of(self.node, CheckpointError(why))
        self.put("failed", {"epoch": None, "failure": failure})

    def _files(self) -> list[re.Match[str]]:
        with contextlib.suppress(StorageError, NotFoundError):
            return list(filter(None, map(self._names.fullmatch, self.directory.names())))
        return []

    def _remove(self, names: Iterable[str]) -> None:
        remove_files(self.directory, names)

    def _path(self, node: int, what: What) -> Location:
        return self.directory / f".agents-{self.tag}-{node}.{what}"


def failure_of(node: int, error: BaseException) -> Failure:
    """What all machines are told of an error on one of them."""
    kind, text, errno = error_message(error)
    assert isinstance(kind, bytes)
    assert isinstance(text, bytes)
    assert isinstance(errno, int)
    return kind.decode(), f"machine {node} ({socket.gethostname()}): {text.decode()}", errno


def raise_failure(failure: Failure | None) -> NoReturn:
    """Raises what was told.

    Raises:
        CheckpointError: Always.
    """
    kind, text, errno = failure or ("CheckpointError", "another machine has failed", 0)
    raise_error(Message(Kind.ERROR, (kind.encode(), text.encode(), errno)))
    raise AssertionError("an error message raises")


def encode(facts: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """A file: magic, length of the facts, CRC-32 of all that follows; facts as JSON, and bytes.

    Example::

        assert decode(encode({"a": 1}, [b"x"])) == ({"a": 1}, [b"x"])
    """
    head = json.dumps([facts, [len(blob) for blob in blobs]]).encode()
    body = head + b"".join(blobs)
    return _HEAD.pack(_MAGIC, len(head), zlib.crc32(body)) + body


def decode(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """What :func:`encode` was given.

    Raises:
        CorruptionError: It is something else.
    """
    try:
        magic, nbytes, crc = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if magic != _MAGIC or zlib.crc32(body) != crc:
            raise ValueError("its bytes are not those that were written")
        facts, lengths = json.loads(body[:nbytes])
        blobs = []
        for length in lengths:
            blobs.append(body[nbytes : nbytes + length])
            nbytes += length
        if nbytes != len(body) or not isinstance(facts, dict):
            raise ValueError("it has another length")
        return facts, blobs
    except (struct.error, TypeError, ValueError) as error:
        raise CorruptionError(f"this is no file of an agent: {error}") from error
