"""The files through which the agents of several machines complete one save.

The only storage that all machines certainly share is that of the checkpoints. Each agent therefore
publishes its state as small files in the checkpoint's directory, by an atomic rename, or on a store
by one write. If the checkpoint is saved to local directories, which the machines do not share,
these files lie in the directory of the run, in a folder for each save.
:mod:`torch_ckpt.agent.joint_save` describes the protocol.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, get_args

from torch_ckpt.agent.answers import Answers
from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.messages import Failure, decode, encode, failure_of_save
from torch_ckpt.agent.persist import FileReport
from torch_ckpt.commits.garbage import remove_files
from torch_ckpt.commits.probe import check_commit
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id

__all__ = ["FileKind", "Manifests", "PendingFailures"]

FileKind = Literal["epoch", "lists", "manifest", "commit", "committed", "failed"]

_FOLDER = ".agents"
"""The folder in the directory of a run for the files of saves to local directories."""

_UNPUBLISHED = ".tmp"
_TAG_DIGITS = 16
_TAG_DIGITS_IN_ID = 10  # A save id begins with digits of the tag; the other 6 are of the epoch.

_MAX_PENDING = 16
"""Other machines are never this many saves behind."""

_POLL_S = 0.5

T = TypeVar("T")


class Manifests:
    """The files of one save, from the perspective of one machine.

    ``run`` and ``session`` have 16 bytes each, and ``sequence`` numbers the save in its session.
    ``tag`` has hexadecimal digits that identify the save in file names. ``shared`` is the directory
    of the run, if the machines do not share the directory of the ``checkpoint``.
    """

    def __init__(
        self,
        run: bytes,
        session: bytes,
        sequence: int,
        node: int,
        node_count: int,
        checkpoint: Location,
        shared: Location | None = None,
    ) -> None:
        self._is_apart = shared is not None  # Whether the files lie outside the checkpoint.
        self.committers: Sequence[int] = range(node_count if shared is not None else 1)
        """The machines that commit: all of them in local directories, or else machine 0 for all."""
        self.directory = checkpoint
        if shared is not None:
            self.directory = shared / _FOLDER / _folder_name((session, sequence))
        self._checkpoint = checkpoint
        self._answers = Answers(self.directory)
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
        """Returns the save id of the checkpoint that this epoch commits."""
        return self.tag[:_TAG_DIGITS_IN_ID] + epoch[: _TAG_DIGITS - _TAG_DIGITS_IN_ID]

    def is_committed(self) -> bool:
        """Returns whether an epoch of this save is committed on this machine."""
        found = committed_id(self._checkpoint)
        return found is not None and found[:_TAG_DIGITS_IN_ID] == self.tag[:_TAG_DIGITS_IN_ID]

    def create_directory(self) -> None:
        """Creates the directory of the files, if files can be renamed there.

        Does nothing if that is the directory of the checkpoint. After a commit on this machine, the
        directory must not be created: if it is missing, machine 0 has removed it because all
        machines have committed.
        """
        if self._is_apart and not self.is_committed():
            self._answer(self._create_directory)

    def _create_directory(self) -> None:
        folder = self.directory.parent
        self.directory.create_directories()
        try:
            check_commit(self.directory, folder.parent, sync=False)
        except BaseException:
            self.directory.discard()
            folder.discard()
            raise

    def put(self, kind: FileKind, facts: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Publishes a file of this machine; replaces an earlier file of this kind.

        Raises NotFoundError if the directory does not exist, unless it is on a store.
        """
        self._answer(lambda: self._put(self._path(self.node, kind), facts, blobs))

    def _put(self, path: Location, facts: dict[str, Any], blobs: Sequence[bytes]) -> None:
        if self.directory.file_system.publishes_by_condition:
            path.replace(encode(facts, blobs), sync=False)
            return
        temporary = path.with_name(f"{path.name}{_UNPUBLISHED}")
        temporary.discard()  # A killed agent may have left one.
        try:
            temporary.write(encode(facts, blobs), sync=False)
            temporary.rename(path)
        except CheckpointError:
            temporary.discard()
            raise

    def get(self, node: int, kind: FileKind) -> tuple[dict[str, Any], list[bytes]] | None:
        """Returns the content of a machine's file; ``None`` if it is absent or damaged.

        Raises UnsupportedError if an agent of another version wrote it.
        """
        path = self._path(node, kind)
        try:
            return decode(self._answer(path.read))
        except UnsupportedError as error:
            raise UnsupportedError(f"cannot read {path}: {error}") from error
        except (StorageError, NotFoundError, CorruptionError):
            return None

    def put_manifest(self, epoch: str, reports: Sequence[FileReport]) -> None:
        """Publishes the files that this machine has written in an epoch. Raises as :meth:`put`."""
        files = [(rank, name, nbytes, origin) for rank, (name, nbytes, _, _, origin), _ in reports]
        blobs = [
            blob
            for _, (_, _, sums, digests, _), extents in reports
            for blob in (sums, digests, extents)
        ]
        self.put("manifest", {"epoch": epoch, "files": files}, blobs)

    def manifest(self, node: int) -> tuple[str, list[FileReport]] | None:
        """Returns the epoch and the files of a machine's manifest; see :meth:`get`."""
        got = self.get(node, "manifest")
        if got is None:
            return None
        facts, blobs = got
        return facts["epoch"], [
            (rank, (name, nbytes, sums, digests, origin), extents)
            for (rank, name, nbytes, origin), sums, digests, extents in zip(
                facts["files"], blobs[::3], blobs[1::3], blobs[2::3], strict=True
            )
        ]

    def reports(self, epoch: str, nodes: Iterable[int]) -> list[FileReport] | None:
        """Returns the files of these machines in an epoch; ``None`` if a manifest is missing."""
        found: list[FileReport] = []
        for node in nodes:
            got = self.manifest(node)
            if got is None or got[0] != epoch:
                return None
            found += got[1]
        return found

    def published(self) -> dict[str, set[int]]:
        """Returns, for each kind of file, the machines that have published one.

        Raises StorageError if the directory cannot be listed.
        """
        found: dict[str, set[int]] = {kind: set() for kind in get_args(FileKind)}
        for match in self._matches():
            if not match[3] and match[2] in found:
                found[match[2]].add(int(match[1]))
        return found

    def remove(self, *kinds: FileKind) -> None:
        """Removes files of this machine; absent files are ignored."""
        self._remove(self._path(self.node, kind).name for kind in kinds)

    def clear(self) -> None:
        """Removes the published files of all machines."""
        if not self._is_apart:
            self._remove(match[0] for match in self._files() if not match[3])
            return
        # The manifests first: agents would wait for a commit of a manifest that remains.
        self._remove(match[0] for match in self._files() if match[2] == "manifest")
        if not any(match[2] == "manifest" for match in self._files()):
            with contextlib.suppress(CheckpointError):  # The next save tries again.
                self._answer(self.directory.remove_all)

    def clear_former(self, live: Iterable[Save]) -> None:
        """Removes the files of older saves to local directories, except for these saves."""
        if not self._is_apart:
            return
        folder, names_of_live = self.directory.parent, set(map(_folder_name, live))

        def clear() -> None:
            for name in folder.names():
                if name < self.directory.name and name not in names_of_live:
                    (folder / name).remove_all()

        with contextlib.suppress(CheckpointError):  # The next save tries again.
            self._answer(clear)

    def has_files(self) -> bool:
        """Returns whether any machine has files for this save."""
        return bool(self._files())

    def failure_of(self, error: BaseException) -> Failure:
        """Returns the description of this machine's error, to be published to all machines."""
        kind, text, errno = failure_of_save(error)
        return kind, f"machine {self.node} ({socket.gethostname()}): {text}", errno

    def _files(self) -> list[re.Match[str]]:
        with contextlib.suppress(StorageError):
            return self._matches()
        return []

    def _matches(self) -> list[re.Match[str]]:
        with contextlib.suppress(NotFoundError):
            names = self._answer(self.directory.names)
            return list(filter(None, map(self._names.fullmatch, names)))
        return []

    def _remove(self, names: Iterable[str]) -> None:
        with contextlib.suppress(CheckpointError):
            self._answer(lambda: remove_files(self.directory, names))

    def _answer(self, call: Callable[[], T]) -> T:
        """Returns the result of a call that uses the directory.

        The directory of a run may not answer although the local directories do.
        """
        return self._answers.get(call) if self._is_apart else call()

    def _path(self, node: int, kind: FileKind) -> Location:
        return self.directory / f".agents-{self.tag}-{node}.{kind}"


def _folder_name(save: Save) -> str:
    """Returns the name of the folder of a save. Names of older saves sort before newer ones."""
    return f"{save[0].hex()}-{save[1]:020}"


class PendingFailures:
    """Publishes failures of saves that this machine could not publish at once. Thread-safe.

    A failure is published only once another machine has files for the save, so a save that all
    machines skip leaves no files. If the directory does not answer, it is published later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: dict[str, tuple[Manifests, dict[str, Any], float]] = {}  # By tag.
        self._is_watched = False  # Whether the thread runs.

    def add(self, manifests: Manifests, facts: dict[str, Any], *, within_s: float) -> None:
        """Publishes the ``facts`` of a failure if other machines begin the save ``within_s``."""
        with self._lock:
            deadline = time.monotonic() + within_s
            self._saves.setdefault(manifests.tag, (manifests, facts, deadline))
            while len(self._saves) > _MAX_PENDING:
                del self._saves[next(iter(self._saves))]
            if not self._is_watched:
                # If no thread can be started, the next failure retries.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._watch, daemon=True).start()
                    self._is_watched = True

    def abort(self, manifests: Manifests, why: str, *, within_s: float) -> None:
        """Publishes, if other machines begin a save, that this machine will never complete it."""
        facts = {"epoch": None, "failure": manifests.failure_of(CheckpointError(why))}
        self.add(manifests, facts, within_s=within_s)

    def discard(self, tag: str) -> None:
        """Drops the failure of a save that this machine begins again."""
        with self._lock:
            self._saves.pop(tag, None)

    def close(self) -> None:
        """Waits up to a second until failures that other machines wait for are published."""
        end = time.monotonic() + 2 * _POLL_S
        while self._saves and time.monotonic() < end:
            time.sleep(_POLL_S / 10)

    def _watch(self) -> None:
        while True:
            with self._lock:
                saves = list(self._saves.items())
            for tag, (manifests, facts, deadline) in saves:
                if not _is_published(manifests, facts) and time.monotonic() < deadline:
                    continue
                with self._lock:
                    self._saves.pop(tag, None)
            with self._lock:
                if not self._saves:
                    self._is_watched = False
                    return
            time.sleep(_POLL_S)


def _is_published(manifests: Manifests, facts: dict[str, Any]) -> bool:
    """Publishes a failure if other machines have files for the save; returns whether it did."""
    # The next poll retries, also if no thread could be started.
    with contextlib.suppress(CheckpointError, RuntimeError):
        if manifests.has_files():
            manifests.put("failed", facts)
            return True
    return False
