"""Leases: files by which a reader protects a checkpoint from removal while it reads.

A lease of a step, or of a published version, is in the directory of the run, and a removal of steps
respects it. A lease of another checkpoint is in the directory of the checkpoint. A save that
replaces a leased checkpoint leaves the replaced files to a later save.

This module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from torch_ckpt.commits.small_files import STEP_NAME
from torch_ckpt.commits.temporary import now_at
from torch_ckpt.coordination.exclusive import has_ended
from torch_ckpt.coordination.owner import is_dead, this_process
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import PENDING, Location
from torch_ckpt.formats.committed import has_checkpoint
from torch_ckpt.process_state import PROCESS
from torch_ckpt.stored_json import from_json

__all__ = [
    "LEASE_S",
    "announced_removal",
    "is_leased",
    "lease",
    "lease_of",
    "leases_of",
    "now_s",
    "reading",
    "remove_expired_leases",
]

LEASE_S = 300.0
"""Seconds for which a renewed lease protects a step."""

_RENEW_S = 60.0

_REMOVAL = f"{PENDING}removal-"
"""Prefix of the files that announce removals. Retention deletes old pending files."""

_REMOVAL_S = 30.0
"""Longest wait of a lease for announced removals, whose steps are renamed within moments."""

_POLL_S = 0.02

_OF_NUMBER = re.compile(r"\.lease-(?P<number>0|[1-9][0-9]*)-[0-9a-f]+")
_OF_DIRECTORY = re.compile(r"\.lease-[0-9a-f]{16}")


def reading(
    path: str | os.PathLike[str],
) -> contextlib.AbstractContextManager[str | os.PathLike[str]]:
    """Protects a checkpoint from removal within the block. Needs no :class:`Run`.

    For programs that read a checkpoint while a training saves, on this or another machine. If the
    checkpoint is a step of a run, retention, ``torch-ckpt rm`` and ``gc`` leave it, and
    ``torch-ckpt ls`` counts its leases; see :meth:`Run.lease`. If a save replaces the checkpoint,
    the replaced data files remain until a save after the block: a load that has already opened the
    checkpoint completes. If the process dies, the lease ends: on its machine at once, elsewhere
    300 s after its last renewal. If a step of a run is a symbolic link, the lease protects the
    link, but not the checkpoint to which it refers.

    Args:
        path: Directory of the checkpoint, as a path or URL. Symbolic links are resolved once.

    Yields:
        The directory of the checkpoint, also if a link in ``path`` moves within the block.

    Raises:
        CheckpointError: The system has no more threads.
        NotFoundError: ``path`` is not a committed checkpoint, or is being removed.
        StorageError: The lease cannot be written. It is a file in the directory of the run, or of
            a checkpoint that is not a step.

    Example::

        with torch_ckpt.reading("runs/gpt/step-100") as path:
            torch_ckpt.load(state, checkpoint_id=path)
    """
    return _reading(Location(path).absolute())


@contextlib.contextmanager
def _reading(given: Location) -> Iterator[str | os.PathLike[str]]:
    if STEP_NAME.fullmatch(given.name):  # A link of a run to an archived step is a step.
        found = given.parent.resolved() / given.name
    else:
        found = given.resolved()
    match = STEP_NAME.fullmatch(found.name)
    file = found / f".lease-{secrets.token_hex(8)}"
    leased = (
        _held(_committed(found), file, has_checkpoint)
        if match is None
        else lease(found.parent, int(match[1]))
    )
    with leased as directory:
        yield directory.checkpoint_id


@contextlib.contextmanager
def lease(directory: Location, step: int) -> Iterator[Location]:
    """Protects a step of a run from removal within the block. Yields its directory.

    The lease is a file in the directory of the run, which a thread renews. If the process dies, the
    lease ends on its machine at once, and elsewhere after another 300 s at most. A forked child
    that leaves the block does not end the lease. Raises NotFoundError if the step is not committed,
    or is being removed.
    """
    path = _committed(directory / f"step-{step}")
    with lease_of(path, step, has_checkpoint):
        yield path


@contextlib.contextmanager
def lease_of(
    path: Location, number: int, is_there: Callable[[Location], bool]
) -> Iterator[Location]:
    """Protects a numbered directory as :func:`lease`. ``is_there`` finds out if it is committed.

    Requires: it was committed a moment ago. It may have been removed since.
    """
    file = path.parent / f".lease-{number}-{secrets.token_hex(8)}"
    with _held(path, file, is_there) as leased:
        yield leased


@contextlib.contextmanager
def _held(
    path: Location, file: Location, is_there: Callable[[Location], bool]
) -> Iterator[Location]:
    """Holds the lease of a directory, which is this file, within the block."""
    owner = os.getpid()
    _renew(file)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(_RENEW_S):
            with contextlib.suppress(CheckpointError):  # The next renewal may succeed.
                _renew(file)

    thread = threading.Thread(target=renew, name="torch_ckpt-lease", daemon=True)
    try:
        # Removals announced later detect the lease.
        _wait_for_removals(file.parent, path.name, file)
        if not is_there(path):
            raise _nothing_to_lease(path)
        try:
            thread.start()
        except RuntimeError as error:  # The system has no more threads.
            raise CheckpointError(f"cannot lease {path}: {error}") from None
        yield path
    finally:
        if os.getpid() == owner:
            ended.set()
            if thread.is_alive():
                thread.join()
            file.discard()


def announced_removal(
    directory: Location, names: Sequence[str]
) -> contextlib.AbstractContextManager[None]:
    """Makes new leases of some steps wait until the block ends, if its file can be written.

    If the process dies, leases on its machine do not wait, and leases on other machines wait for at
    most ``_REMOVAL_S``. A later retention deletes the file. If an interrupt leaves the file, the
    next removal by this process deletes it. The block must not ``yield``.
    """
    return _announced(directory, names, sys._getframe(1))


@contextlib.contextmanager
def _announced(directory: Location, names: Sequence[str], by: FrameType) -> Iterator[None]:
    for left in [each for each in list(PROCESS.removals) if has_ended(each[1])]:
        left[0].discard()
        with contextlib.suppress(ValueError):  # Another thread has removed it.
            PROCESS.removals.remove(left)
    file = directory / f"{_REMOVAL}{secrets.token_hex(8)}.{this_process()}"
    removal = file, by
    try:
        PROCESS.removals.append(removal)
        with contextlib.suppress(CheckpointError):  # Atomic: an empty file blocks all leases.
            file.replace(json.dumps(list(names)).encode(), sync=False)
        yield
    finally:
        file.discard()
        with contextlib.suppress(ValueError):  # Not announced yet.
            PROCESS.removals.remove(removal)


def _wait_for_removals(directory: Location, name: str, lease: Location) -> None:
    """Waits until no removal of a step is announced, or the removing process has probably died."""
    now_s: float | None = None
    waiting = LongWait(lambda: f"the removal of {directory / name} to end")
    for pause_s in waiting.rounds(_REMOVAL_S, _POLL_S):
        files = [directory / each for each in directory.names() if each.startswith(_REMOVAL)]
        if files and now_s is None:
            now_s = lease.modified_s()  # By the clock of the file system; it was just written.
        if not any(_announces(file, name) and not _has_died(file, now_s) for file in files):
            return
        time.sleep(pause_s)


def _announces(file: Location, name: str) -> bool:
    try:
        return from_json(file.read(), lambda names: name in names)
    except NotFoundError:
        return False
    except ValueError:  # It is being written.
        return True


def _has_died(removal: Location, now_s: float | None) -> bool:
    """Returns whether the process of an announced removal has died, as far as known.

    For other machines, and for files of earlier versions, the age of the file decides.
    """
    if any(file == removal and has_ended(by) for file, by in list(PROCESS.removals)):
        return True
    if (found := is_dead(_owner_of(removal))) is not None:
        return found
    written_s = removal.modified_s()
    return now_s is not None and written_s is not None and now_s - written_s > _REMOVAL_S


def _owner_of(pending: Location) -> str:
    """Returns the process of a pending file; empty if the file name states none."""
    return pending.name.removeprefix(PENDING).partition(".")[2]


def leases_of(directory: Location) -> dict[int, int]:
    """Returns how many leases protect each step or version that is leased."""
    leases = _leases(directory, _OF_NUMBER)
    return dict(Counter(int(name["number"]) for name, _, is_valid in leases if is_valid))


def is_leased(checkpoint: Location) -> bool:
    """Returns whether a lease protects the files of a checkpoint. Deletes its expired leases."""
    leased = False
    for _, file, is_valid in _leases(checkpoint, _OF_DIRECTORY):
        leased = leased or is_valid
        if not is_valid:
            file.discard()
    step = STEP_NAME.fullmatch(checkpoint.name)
    return leased or (step is not None and int(step[1]) in leases_of(checkpoint.parent))


def remove_expired_leases(directory: Location) -> None:
    """Deletes the leases and unfinished files of processes that have died."""
    for _, file, is_valid in _leases(directory, _OF_NUMBER):
        if not is_valid:
            file.discard()
    others = []  # The process may be on another machine, or alive.
    for file in (directory / name for name in directory.names() if name.startswith(PENDING)):
        if is_dead(_owner_of(file)):
            file.discard()
        else:
            others.append(file)
    now = now_s(directory) if others else None
    for file in others:
        written = file.modified_s()
        if now is not None and written is not None and now - written > LEASE_S:
            file.discard()


def _leases(
    directory: Location, pattern: re.Pattern[str]
) -> Iterator[tuple[re.Match[str], Location, bool]]:
    """Yields the name and the file of each lease in a directory, and whether it protects now."""
    try:
        leases = list(filter(None, map(pattern.fullmatch, directory.names())))
    except NotFoundError:
        return
    now = now_s(directory) if leases else None
    for match in leases:
        file = directory / match[0]
        by, written = now, file.modified_s()
        if written is None:  # The file system has no file times.
            by, written = time.time(), _renewed_s(file)
        is_recent = by is None or written is None or abs(by - written) < LEASE_S
        # While it lives, a clock may have been set, or the disk may have been full at a renewal.
        has_died = _has_owner_died(file)
        yield match, file, is_recent if has_died is None else not has_died


def now_s(directory: Location) -> float | None:
    """Returns the time by the clock of a directory's file system, as :func:`now_at`."""
    return now_at(directory / f"{PENDING}{secrets.token_hex(8)}.{this_process()}")


def _renew(file: Location) -> None:
    """Writes the lease again, with its owner; ``host`` and ``pid`` are for users.

    The time of the write counts, or the time in the file if the file system has no file times.
    """
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "process": this_process()}
    file.replace(json.dumps(owner | {"renewed_s": time.time()}).encode(), sync=False)


def _has_owner_died(lease: Location) -> bool | None:
    """Returns whether the process of a lease has died; ``None`` if unknown, as elsewhere."""
    with contextlib.suppress(CheckpointError, ValueError):
        return from_json(lease.read(), lambda owner: is_dead(owner["process"]))
    return None


def _renewed_s(file: Location) -> float | None:
    """Returns when a lease was written, by the clock of its process; ``None`` if unknown."""
    with contextlib.suppress(CheckpointError, ValueError):
        return from_json(file.read(), lambda owner: float(owner["renewed_s"]))
    return None


def _committed(path: Location) -> Location:
    """Returns a directory, if it is a checkpoint."""
    if not has_checkpoint(path):
        raise _nothing_to_lease(path)
    return path


def _nothing_to_lease(path: Location) -> NotFoundError:
    what, dash, number = path.name.partition("-")
    if what in ("step", "version") and dash and number.isdecimal():
        name, what = f"{what} {number} of {path.parent}", f"committed {what}"
    else:
        name, what = str(path), "committed checkpoint"
    return NotFoundError(f"cannot lease {name}: it is not a {what}")
