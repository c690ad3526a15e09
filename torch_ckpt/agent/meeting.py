"""Where the agents of several machines meet for one save: small files in its directory.

The file system of the checkpoints is all that machines are known to share. So each agent keeps a
*word* there, which says how far it is, and what the others need of it; all of them are replaced by
renames, and nobody waits for a lock. :mod:`torch_ckpt.agent.joint_save` says who says what when.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import socket
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from torch_ckpt.agent.messages import Kind, Message, error_message, raise_error
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.seal import committed_id
from torch_ckpt.storage.gc import remove_files

__all__ = ["Failure", "Meeting", "Word", "decode", "encode", "failure_of", "raise_failure"]

State = Literal["here", "begun", "written", "failed", "never"]
What = Literal["word", "lists", "part", "report"]

_UNPUBLISHED = ".tmp"
_MAGIC = b"TCMEET1\n"
_HEAD = struct.Struct("<8sII")
_TAG_DIGITS = 16
_OF_ID = 10  # Of those, that begin the id of every attempt; the other six digits are its own.

Failure = tuple[str, str, int]
"""Class of an error, its message, and errno."""


@dataclass(frozen=True)
class Word:
    """How far a machine is with a save.

    Attributes:
        state: ``"here"`` has published what its ranks hold; ``"begun"``, of the first machine
            alone, that all write now; ``"written"``; ``"failed"``; ``"never"`` will it have the
            save.
        visit: What was never said before: an agent that comes again has another.
        attempt: Id of the save that has begun, as in the names of its data files. In
            ``"failed"``, of the one that will never be committed; empty where that is not sure.
        visits: Of machines by number, whom the word of the first machine concerns.
        failure: Why.
    """

    state: State
    visit: str
    attempt: str = ""
    visits: Mapping[int, str] = field(default_factory=dict)
    failure: Failure | None = None

    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        visits = {str(node): visit for node, visit in self.visits.items()}
        return {**vars(self), "visits": visits}

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Word:
        """That which was put down.

        Raises:
            CorruptionError: It is none.
        """
        try:
            failure = facts["failure"]
            return cls(
                facts["state"],
                str(facts["visit"]),
                str(facts["attempt"]),
                {int(node): str(visit) for node, visit in facts["visits"].items()},
                None if failure is None else (str(failure[0]), str(failure[1]), int(failure[2])),
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"this is no word of an agent: {error}") from error


class Meeting:
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
        visit: Of this object: an agent that comes again for the save has another.
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
        self.visit = secrets.token_hex(8)
        name = run + session + sequence.to_bytes(8, "big")
        self.tag = hashlib.sha256(name).hexdigest()[:_TAG_DIGITS]

    @property
    def others(self) -> list[int]:
        """The numbers of all other machines."""
        return [node for node in range(self.node_count) if node != self.node]

    def new_attempt(self) -> str:
        """A new id for the save; whoever finds it committed knows of which save it is."""
        return self.tag[:_OF_ID] + secrets.token_hex(3)

    def committed(self) -> str | None:
        """The id under which this save is committed; ``None`` if it is not.

        Raises:
            StorageError: Nobody can tell.
        """
        found = committed_id(self.directory)
        return found if found is not None and found[:_OF_ID] == self.tag[:_OF_ID] else None

    def say(self, word: Word) -> None:
        """Replaces the word of this machine.

        Raises:
            StorageError: It cannot be written.
        """
        self.put(self.node, "word", word.facts())

    def word_of(self, node: int) -> Word | None:
        """What a machine says; ``None`` if that is nothing yet."""
        found = self.get(node, "word")
        if found is not None:
            with contextlib.suppress(CorruptionError):
                return Word.of(found[0])
        return None

    def put(
        self, node: int, what: What, facts: dict[str, Any], blobs: Sequence[bytes] = ()
    ) -> None:
        """Publishes something that is of a machine, or for it.

        Raises:
            NotFoundError: The directory is gone.
            StorageError: It cannot be written.
        """
        path = self._path(node, what)
        temporary = path.with_name(f"{path.name}{_UNPUBLISHED}")
        temporary.discard()  # Of an agent that was killed.
        try:
            temporary.write(encode(facts, blobs), sync=False)
            temporary.rename(path)
        except CheckpointError:
            temporary.discard()
            raise

    def get(self, node: int, what: What) -> tuple[dict[str, Any], list[bytes]] | None:
        """What was published of a machine, or for it; ``None`` if that is nothing whole."""
        with contextlib.suppress(StorageError, NotFoundError, CorruptionError):
            return decode(self._path(node, what).read())
        return None

    def has(self, what: What) -> bool:
        """Whether something of this machine is there."""
        return self._path(self.node, what).is_file()

    def remove(self, *whats: What) -> None:
        """Removes files of this machine, as far as they are there."""
        self._remove(self._path(self.node, what).name for what in whats)

    def clear(self) -> None:
        """Removes the files of all machines, but those which one is about to publish."""
        self._remove(name for name in self._files() if not name.endswith(_UNPUBLISHED))

    def is_attended(self) -> bool:
        """Whether any machine has come for this save."""
        return bool(self._files())

    def decline(self, why: str) -> None:
        """Says that this machine will never have the save.

        Raises:
            StorageError: It cannot be said.
        """
        failure = failure_of(self.node, CheckpointError(why))
        self.say(Word("never", self.visit, failure=failure))

    def _files(self) -> list[str]:
        with contextlib.suppress(StorageError, NotFoundError):
            names = self.directory.names()
            return [name for name in names if name.startswith(f".agents-{self.tag}-")]
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
        raise CorruptionError(f"this is no file of agents that meet: {error}") from error
