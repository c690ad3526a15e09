"""The shared memory of a run: its folder, its slots, and the lock of its agent.

Each run has a folder in tmpfs that only its user may enter. The folder contains two slots for each
rank of this machine and the files of the agent. The agent removes the folder when the run ends. The
next agent of the user removes the folders of abandoned runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from torch_ckpt._core import _native
from torch_ckpt.errors import CorruptionError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location, name_of
from torch_ckpt.process_state import Descriptor

__all__ = [
    "LOCK_NAME",
    "NOT_SHARED",
    "NO_SNAPSHOT",
    "SLOTS_PER_RANK",
    "Save",
    "agent_lock",
    "complete_slots",
    "discard_slots",
    "done_mark",
    "folder_of",
    "found_slots",
    "free",
    "has_agent",
    "is_stopped",
    "names_in",
    "open_folder",
    "released",
    "remove_abandoned",
    "run_of",
    "sharing_of",
    "short_path",
    "slot_path",
    "whole_saves",
]

T = TypeVar("T")

Save = tuple[bytes, int]
"""Session and sequence, which identify a save: the slots of all its ranks share them."""

SLOTS_PER_RANK = 2

NOT_SHARED = bytes(16)
"""The share id of a save in which each rank copies all of its items."""

NO_SNAPSHOT = CorruptionError, NotFoundError
"""Errors of a file without a snapshot.

With another error, the newest step may be there: of a later version, or the system refuses to map
it, for lack of address space.
"""

LOCK_NAME = "agent.lock"
"""The file that the agent of a run locks."""

_LOCK_WAIT_S = 0.2
"""Time to wait for the lock, because :func:`has_agent` acquires it briefly."""

_MAX_SOCKET_FOLDER_NBYTES = 90

_ABANDONED_S = 24 * 3600.0
"""Age after which the memory of a run without an agent is removed."""

_SLOT = re.compile(r"rank-(\d+)\.(\d+)")


def run_of(name: str | os.PathLike[str] | Location) -> bytes:
    """Returns the 16 bytes that identify a run, by its name or its resolved location.

    A location is not resolved again: its storage may hang.
    """
    text = str(name) if isinstance(name, Location) else name_of(name)
    return hashlib.sha256(os.fsencode(text)).digest()[:16]


def folder_of(run: bytes) -> Path:
    """Returns the folder of a run.

    ``TORCH_CKPT_MEMORY`` may name a tmpfs other than ``/dev/shm``, by an absolute path.
    """
    base = os.environ.get("TORCH_CKPT_MEMORY") or "/dev/shm"
    return Path(base) / f"torch_ckpt-{os.getuid()}" / run.hex()


def open_folder(run: bytes) -> Path:
    """Returns the folder of a run; creates it if it does not exist.

    Raises StorageError if it belongs to another user, other users can access it, its path is
    relative, or it is not in memory only. Slots have no checksums: after a power cut, the header of
    a slot on disk might state that it is complete although its tensors are zeros.
    """
    folder = folder_of(run)
    if not folder.is_absolute():
        raise StorageError(
            f"cannot share memory in {folder.parent.parent}: this path is relative, so it names "
            "another directory wherever a process works; set TORCH_CKPT_MEMORY to an absolute path",
            errno.EINVAL,
        )
    for path in (folder.parent, folder):
        try:
            found = _made(path)
        except OSError as error:
            raise StorageError(f"cannot create {path}: {error.strerror}", error.errno) from error
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
            raise StorageError(
                f"cannot share memory in {path}: it is not a private directory of this user",
                errno.EPERM,
            )
    if not _native.is_in_memory(folder.parent):  # An ending agent may remove the folder.
        raise StorageError(
            f"cannot share memory in {folder}: it is on a disk, whose files may be damaged by a "
            "power cut; set TORCH_CKPT_MEMORY to a directory of a tmpfs, such as /dev/shm",
            errno.EINVAL,
        )
    return folder


def _made(path: Path) -> os.stat_result:
    """Returns the status of a directory, which is created if it does not exist."""
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            return path.lstat()
        except FileNotFoundError:  # An ending agent has removed it in between.
            continue


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Yields a short name of a folder, because the name of a socket has at most 108 bytes."""
    if len(os.fsencode(folder)) <= _MAX_SOCKET_FOLDER_NBYTES:
        yield os.fspath(folder)  # Without `/proc`, which may not be mounted.
        return
    descriptor = Descriptor(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    with contextlib.closing(descriptor):
        yield f"/proc/self/fd/{descriptor.number}"


def slot_path(folder: Path, rank: int, number: int) -> Path:
    """Returns the file of a rank's slot."""
    return folder / f"rank-{rank}.{number}"


def done_mark(folder: Path, save: Save) -> Path:
    """Returns the file that marks a save as on disk: the differences of its replicas, as JSON."""
    return folder / f"done-{save[0].hex()}-{save[1]}"


def names_in(folder: Path) -> list[str]:
    """Returns the names in the folder of a run, sorted; none if an agent has removed it."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def found_slots(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yields the rank, number and file of every slot in a folder, in order."""
    for name in names_in(folder):
        match = _SLOT.fullmatch(name)
        if match:
            yield int(match[1]), int(match[2]), folder / name


def whole_saves(
    found: Iterable[tuple[_native.SlotHeader, T]],
) -> dict[Save, list[tuple[_native.SlotHeader, T]]]:
    """Returns the slots of each save that all ranks of this machine have completed.

    The saves are in order, the newest last; the slots of a save are in order of rank.
    """
    saves: dict[Save, list[tuple[_native.SlotHeader, T]]] = {}
    for header, slot in found:
        saves.setdefault(header.save, []).append((header, slot))
    whole = {}
    for save, slots in sorted(saves.items(), key=lambda item: item[0]):
        slots.sort(key=lambda item: item[0].rank)
        ranks = {header.rank for header, _ in slots}
        variants = {(header.step, header.share) for header, _ in slots}
        if len(ranks) == slots[0][0].ranks_here and len(variants) == 1:
            whole[save] = slots
    return whole


def sharing_of(headers: Sequence[_native.SlotHeader]) -> bytes:
    """Returns 16 bytes that identify how the ranks of a machine divide their replicas.

    The slot headers are of all ranks of the machine, in order of rank.
    """
    digest = hashlib.blake2b(digest_size=16)
    for header in headers:
        digest.update(header.rank.to_bytes(8, "little") + header.tensors_id)
    return digest.digest()


def complete_slots(folder: Path, run: bytes) -> Iterator[tuple[_native.SlotHeader, Path]]:
    """Yields the header and file of every slot of a run with a complete snapshot.

    Raises StorageError if the system refuses to map a slot, and UnsupportedError if a later version
    has filled it.
    """
    for _, _, path in found_slots(folder):
        with contextlib.suppress(*NO_SNAPSHOT):
            slot = _native.Slot.open(os.fsencode(path), False)
            header = slot.header()
            slot.read()
            if header.run == run:
                yield header, path


def discard_slots(folder: Path, run: bytes, is_discarded: Callable[[int], bool]) -> set[int]:
    """Discards the snapshots of steps that ``is_discarded`` names, and returns these steps.

    An agent that writes one of them does not commit it. Raises as :func:`complete_slots`.
    """
    discarded = set()
    for name in names_in(folder):
        if not (_SLOT.fullmatch(name) or name.startswith("replica-")):
            continue
        with contextlib.suppress(*NO_SNAPSHOT):
            slot = _native.Slot.open(os.fsencode(folder / name), True)
            header = slot.header()
            if header.run == run and is_discarded(header.step):
                slot.clear()
                discarded.add(header.step)
    return discarded


@contextlib.contextmanager
def released(lock: threading.Condition) -> Iterator[None]:
    """Releases the lock of an agent for a block of slow work. Other threads may change its state.

    An agent that answers no request within 30 s counts as lost, and allocating or freeing memory
    takes a second for a few GB. Requires: the caller holds the lock, once.
    """
    lock.release()
    try:
        yield
    finally:
        lock.acquire()


def free(doomed: list[_native.Slot]) -> None:
    """Empties a list of slots whose files were removed. The last reference frees the memory.

    Several threads may call it at the same time. It is slow: the caller must hold no lock.
    """
    with contextlib.suppress(IndexError):
        while True:
            doomed.pop()


@contextlib.contextmanager
def agent_lock(folder: Path) -> Iterator[bool]:
    """Acquires the lock of a run's agent for a block; yields whether that succeeded."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with contextlib.closing(Descriptor(os.open(folder / LOCK_NAME, flags, 0o600))) as opened:
        descriptor = opened.number
        deadline = time.monotonic() + _LOCK_WAIT_S
        while not _try_lock(descriptor, fcntl.LOCK_EX, folder):
            if time.monotonic() > deadline:
                yield False
                return
            time.sleep(_LOCK_WAIT_S / 20)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)  # For users to read.
        # The agent that released the lock may have removed the folder.
        yield os.fstat(descriptor).st_nlink > 0


def has_agent(folder: Path) -> bool:
    """Returns whether a process holds the lock of a run's agent; the process may be ending."""
    try:
        opened = Descriptor(os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    with contextlib.closing(opened):
        try:
            is_free = _try_lock(opened.number, fcntl.LOCK_SH, folder)
            fcntl.flock(opened.number, fcntl.LOCK_UN)  # A child forked meanwhile shares the lock.
        except OSError:  # A sandbox refuses locks: then no agent can run.
            return False
        return not is_free


def is_stopped(folder: Path) -> bool:
    """Returns whether the process that holds the lock of a run's agent is stopped by a signal."""
    try:
        pid = int((folder / LOCK_NAME).read_text())
        status = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):  # It has ended, or belongs to another namespace.
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


def _try_lock(descriptor: int, kind: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        reason = f"cannot lock {folder / LOCK_NAME}: {error.strerror}"
        raise StorageError(reason, error.errno) from error
    return True


def remove_abandoned(own: Path) -> list[Path]:
    """Removes the memory of this user's other runs that no process has used for a day.

    Returns the removed folders.
    """
    removed = []
    for folder in sorted(own.parent.iterdir()):
        with contextlib.suppress(OSError):
            # The folder of a starting run may still be empty.
            last_use = max(p.stat().st_mtime for p in (folder, *folder.iterdir()))
            if folder == own or time.time() - last_use < _ABANDONED_S:
                continue
            with agent_lock(folder) as is_ours:
                if is_ours:
                    shutil.rmtree(folder)
                    removed.append(folder)
    return removed
