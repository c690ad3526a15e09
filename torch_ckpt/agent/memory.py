"""Where the shared memory of a run lies, and what is found there.

Each run has a folder in tmpfs, which only its user may enter: its slots, two for each rank of this
machine, and what its agent needs. All of it goes with the agent when the run has ended; what is
left of a run that nobody goes on with is removed by whoever comes next.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, StorageError

__all__ = [
    "LOCK_NAME",
    "NOT_SHARED",
    "SLOTS_PER_RANK",
    "Save",
    "SlotHeader",
    "agent_lock",
    "complete_slots",
    "folder_of",
    "found_slots",
    "has_agent",
    "open_folder",
    "remove_abandoned",
    "run_of",
    "sharing_of",
    "short_path",
    "slot_path",
    "whole_saves",
]

T = TypeVar("T")

Save = tuple[bytes, int]
"""Session and sequence: what the slots of all ranks of one save have in common."""

SLOTS_PER_RANK = 2

NOT_SHARED = bytes(16)
"""Of ranks each of which copies all that it holds."""

LOCK_NAME = "agent.lock"
"""The file whose lock the agent of a run holds."""

_LOCK_WAIT_S = 0.2
"""Whoever looks whether there is an agent (:func:`has_agent`) holds its lock for a moment."""

_ABANDONED_S = 24 * 3600.0
"""Memory of a run without an agent is removed when nobody has touched it for so long."""

_SLOT = re.compile(r"rank-(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class SlotHeader:
    """What a slot holds. Later snapshots of a run compare as greater.

    Attributes:
        session: 16 bytes of the processes that have started together; later ones are greater.
        sequence: Which save of the session.
        step: What the user calls it.
        rank: Whose it is.
        world_size: How many ranks there are.
        node: The machine, by number.
        node_count: How many the ranks are on.
        ranks_here: How many of the ranks are on this one.
        persist: Whether it is to be brought to disk without being asked again: 0 or 1.
        run: 16 bytes.
        tensors_id: 16 bytes that identify the tensors of the rank.
        share: 16 bytes that stand for how the ranks of the machine shared these out: the slots of
            one save belong together only if they are the same. ``NOT_SHARED``: each has all.
    """

    session: bytes
    sequence: int
    step: int
    rank: int
    world_size: int
    node: int
    node_count: int
    ranks_here: int
    persist: int
    run: bytes
    tensors_id: bytes = bytes(16)
    share: bytes = NOT_SHARED

    @classmethod
    def of(cls, slot: _native.Slot) -> SlotHeader:
        """That of a slot.

        Raises:
            NotFoundError: Nothing complete is in it.
            CorruptionError: It is damaged.
            UnsupportedError: It is of another version.
        """
        run, session, sequence, step, rank, world_size, node, node_count, here, persist, *shared = (
            slot.header()
        )
        return cls(
            *(session, sequence, step, rank, world_size, node, node_count, here, persist, run),
            *shared,
        )

    @property
    def save(self) -> Save:
        """What the slots of all ranks of one save have in common."""
        return self.session, self.sequence

    def to_native(self) -> _native.SlotHeader:
        """In the engine's order."""
        return (
            *(self.run, self.session, self.sequence, self.step, self.rank, self.world_size),
            *(
                self.node,
                self.node_count,
                self.ranks_here,
                self.persist,
                self.tensors_id,
                self.share,
            ),
        )


def run_of(name: str | os.PathLike[str]) -> bytes:
    """The 16 bytes that stand for a run of this name."""
    return hashlib.sha256(os.fsencode(os.path.realpath(name))).digest()[:16]


def folder_of(run: bytes) -> Path:
    """The folder of a run.

    ``TORCH_CKPT_MEMORY`` may name a tmpfs other than ``/dev/shm``.
    """
    base = os.path.abspath(os.environ.get("TORCH_CKPT_MEMORY", "/dev/shm"))
    return Path(base) / f"torch_ckpt-{os.getuid()}" / run.hex()


def open_folder(run: bytes) -> Path:
    """The folder of a run, which is created if there is none.

    Raises:
        StorageError: It cannot be created.
        CheckpointError: Another user has one of that name.
    """
    folder = folder_of(run)
    for path in (folder.parent, folder):
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            found = path.lstat()
        except OSError as error:
            raise StorageError(f"cannot create {path}: {error.strerror}", error.errno) from error
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
            raise CheckpointError(f"{path} is not this user's alone: no memory is shared there")
    return folder


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Another name of a folder, for sockets: the names of these have at most 108 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def slot_path(folder: Path, rank: int, number: int) -> Path:
    """The file of a rank's slot."""
    return folder / f"rank-{rank}.{number}"


def found_slots(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Rank, number and file of every slot in a folder, in order."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for name in names:
        match = _SLOT.fullmatch(name)
        if match:
            yield int(match[1]), int(match[2]), folder / name


def whole_saves(
    found: Iterable[tuple[SlotHeader, T]],
) -> dict[Save, list[tuple[SlotHeader, T]]]:
    """What was found of each save that all ranks of this machine have completed, by rank.

    The newest save comes last.
    """
    saves: dict[Save, list[tuple[SlotHeader, T]]] = {}
    for header, what in found:
        saves.setdefault(header.save, []).append((header, what))
    whole = {}
    for save, of_save in sorted(saves.items(), key=lambda one: one[0]):
        of_save.sort(key=lambda one: one[0].rank)
        ranks = {header.rank for header, _ in of_save}
        alike = {(header.step, header.share) for header, _ in of_save}
        if len(ranks) == of_save[0][0].ranks_here and len(alike) == 1:
            whole[save] = of_save
    return whole


def sharing_of(headers: Sequence[SlotHeader]) -> bytes:
    """Stands for how ranks share out what they hold alike.

    Args:
        headers: Of all ranks of a machine, in their order.
    """
    digest = hashlib.blake2b(digest_size=16)
    for header in headers:
        digest.update(header.rank.to_bytes(8, "little") + header.tensors_id)
    return digest.digest()


def complete_slots(folder: Path, run: bytes) -> Iterator[tuple[SlotHeader, Path]]:
    """Every slot of a run that holds a complete snapshot."""
    for _, _, path in found_slots(folder):
        with contextlib.suppress(CheckpointError):
            slot = _native.Slot.open(os.fsencode(path), False)
            header = SlotHeader.of(slot)
            slot.read()
            if header.run == run:
                yield header, path


@contextlib.contextmanager
def agent_lock(folder: Path) -> Iterator[bool]:
    """Holds the lock of a run's agent; gives whether it could be had."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                yield False
                return
            time.sleep(_LOCK_WAIT_S / 20)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)  # For people.
        # Its folder may have been removed by the agent that has just ended.
        yield os.fstat(descriptor).st_nlink > 0
    finally:
        os.close(descriptor)


def has_agent(folder: Path) -> bool:
    """Whether a process holds the lock of a run's agent, be it that it ends."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_abandoned(own: Path) -> list[Path]:
    """Removes the memory of other runs of this user that nobody has gone on with for a day.

    Returns:
        The folders.
    """
    removed = []
    for folder in sorted(own.parent.iterdir()):
        with contextlib.suppress(OSError):
            touched = max((p.stat().st_mtime for p in folder.iterdir()), default=0.0)
            if folder == own or time.time() - touched < _ABANDONED_S:
                continue
            with agent_lock(folder) as is_ours:
                if is_ours:
                    shutil.rmtree(folder)
                    removed.append(folder)
    return removed
