"""The identity of a run: an id in its directory, and the same id beside its slots in memory.

A path has no identity: another run may begin under the path of a directory that was moved or
removed, and a copied directory has the id of the original until a job begins there. The first rank
writes the id into the directory when its job takes a term. The agent writes it before the first
step that it writes there, unless it is there, and then marks the id in memory as written. If the
memory is marked, and the directory has no id or another one, then the memory belongs to a run that
is no longer at this path.

Containers of one machine may share the memory, and have different directories at the same path. So
a trainer and its agent compare a directory that both see. The same URL may lead to different
stores, by the settings of each process. So the ranks write the id to a store when they begin, and
each agent must find it there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.commits.probe import check_commit
from torch_ckpt.commits.terms import check_directory, job_in, newest_term, term_in
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError, UnsupportedError
from torch_ckpt.filesystems.location import PENDING, Location

__all__ = [
    "NO_ID",
    "RUN_ID",
    "RunId",
    "begin_id",
    "begun_id",
    "check_owner",
    "check_reaches",
    "check_shared",
    "claim_directory",
    "id_in_directory",
    "id_in_memory",
    "inode_of",
    "is_copy",
    "nearest_directory",
    "new_id",
    "own_id",
    "set_id",
    "write_id",
]

RUN_ID = "run-id"
"""The file with the id. It is not hidden, so ``rm run/*`` and ``cp run/*`` include it."""

NO_ID = f"has no sound {RUN_ID}, for example because it was removed or moved"
"""Says of the directory of a run that :func:`id_in_directory` finds none there."""

_ID = re.compile(r"[0-9a-f]{16}")

_WRITTEN = "written"


@dataclass(frozen=True)
class RunId:
    """The id of a run, as its shared memory has it: 16 hexadecimal digits.

    ``is_written``: whether the id was ever written to the directory of the run.
    """

    id: str
    is_written: bool


def id_in_directory(directory: Location) -> str | None:
    """Returns the id of the run that a directory belongs to; ``None`` if it has no id.

    A damaged file counts as no id: the next save writes it again.
    """
    try:
        found = (directory / RUN_ID).read().decode(errors="replace").strip()
    except NotFoundError:
        return None
    return found if _ID.fullmatch(found) else None


def check_owner(directory: Location, run_id: str, *, may_be_gone: bool = False) -> str | None:
    """Returns the id in a directory of a run, as :func:`id_in_directory`.

    Raises CheckpointError if the directory belongs to another run, or, unless it ``may_be_gone``,
    to none.
    """
    found = id_in_directory(directory)
    if found != run_id and not (found is None and may_be_gone):
        now = f"belongs to run {found} now" if found else NO_ID
        text = f"it {now}, and this run has the id {run_id}"
        raise CheckpointError(f"cannot use {directory}: {text}")
    return found


def own_id(directory: Location) -> str | None:
    """Returns the id of the run in a directory, which gets another one if it is a copy.

    The newest term names the directory in which it began. If that directory still has the same id,
    and is not this one under another name, then this one is a copy (``cp -r``), and so another run.
    If that directory is gone, it was moved here.
    """
    found = id_in_directory(directory)
    if found is not None and is_copy(directory, newest_term(directory).directory, found):
        found = new_id()
        write_id(directory, found)
    return found


def is_copy(directory: Location, name: str, run_id: str) -> bool:
    """Returns whether the named directory has the same id, but is not this directory."""
    if name in ("", str(directory)):
        return False
    mark = f"{PENDING}{secrets.token_hex(8)}"
    with contextlib.suppress(CheckpointError, ValueError):
        original = Location(name)
        if id_in_directory(original) != run_id:
            return False
        try:
            (directory / mark).write(b"", sync=False)
            return not (original / mark).exists()
        finally:
            (directory / mark).discard()
    return False


def new_id() -> str:
    """Returns a new id of a run."""
    return secrets.token_hex(8)


def write_id(directory: Location, run_id: str) -> None:
    """Writes the id of a run into its directory, durably. Creates the directory if necessary."""
    directory.create_directories()
    check_commit(directory, directory, sync=True)
    (directory / RUN_ID).replace(f"{run_id}\n".encode(), sync=True)
    directory.sync()


def begin_id(directory: Location, run_id: str) -> str:
    """Writes the id of a new run, as :func:`write_id`, and returns the id of the directory.

    That is another one if another job begins the run at the same time, and was first.
    """
    directory.create_directories()
    check_commit(directory, directory, sync=True)
    file, contents = directory / RUN_ID, f"{run_id}\n".encode()
    pending = directory / f"{PENDING}{secrets.token_hex(8)}"
    if directory.file_system.writes_at_offsets:
        try:  # It appears with its contents.
            pending.write(contents, sync=True)
            with contextlib.suppress(StorageError, UnsupportedError):  # Some disks have no links.
                pending.link(file, sync=True)
        finally:
            pending.discard()
    with contextlib.suppress(StorageError):  # It exists.
        file.write(contents, sync=True)
    found = id_in_directory(directory)
    if found is None:
        write_id(directory, run_id)
    directory.sync()
    return found or run_id


def id_in_memory(folder: Path) -> RunId | None:
    """Returns the id of the run whose slots are in a folder; ``None`` if they have no id.

    A damaged file counts as no id.
    """
    try:
        found, *marks = (folder / RUN_ID).read_text().split()
    except (OSError, ValueError):
        return None
    return RunId(found, _WRITTEN in marks) if _ID.fullmatch(found) else None


def set_id(folder: Path, run_id: RunId) -> None:
    """Stores the id of the run whose slots are in a folder."""
    pending = folder / f"{RUN_ID}.tmp"
    try:
        pending.write_text(f"{run_id.id} {_WRITTEN if run_id.is_written else ''}\n")
        pending.rename(folder / RUN_ID)
    except OSError as error:
        raise StorageError(f"cannot write {pending}: {error.strerror}", error.errno) from error


def begun_id(in_memory: Sequence[RunId | None], directory: Location) -> RunId:
    """Returns the id with which a run continues or begins. On a store, also writes it there.

    The ids in the memory of all machines must have been read before this call. An agent may write
    the id meanwhile: it marks the memory after the directory, so a mark that was read implies an id
    in the directory.
    """
    found = own_id(directory)
    if found is not None:
        return RunId(found, True)
    gone = {each.id for each in in_memory if each is not None and each.is_written}
    left = [each.id for each in in_memory if each is not None and each.id not in gone]
    chosen = left[0] if left else new_id()
    if directory.local_path is None:
        return RunId(begin_id(directory, chosen), True)
    return RunId(chosen, False)


def check_reaches(url: str, run_id: RunId) -> None:
    """Checks, in an agent, that a URL leads to the run of the ranks.

    Raises UnsupportedError if its scheme is unknown in this process, or the id of the run is not
    there, and StorageError if the store cannot be read.
    """
    here = (
        f"cannot save with the agent (process {os.getpid()}): a file system that the ranks "
        "register counts in their processes alone, and the agent has the environment of the "
        "process that started it"
    )
    try:
        found = id_in_directory(Location(url))
    except UnsupportedError as error:
        raise UnsupportedError(f"{here}: {error}") from error
    except StorageError as error:
        raise StorageError(f"{here}: {error}", error.errno) from error
    if found != run_id.id:
        what = "no run" if found is None else f"run {found}"
        raise UnsupportedError(
            f"{here}: it finds {what} at {url}, where the ranks have written {run_id.id}"
        )


def claim_directory(
    target: Location,
    folder: Path,
    small_files: Mapping[str, bytes] | None = None,
    *,
    may_be_empty: bool = False,
) -> None:
    """Checks that a step's directory belongs to the run in memory; writes the id if it has none.

    The directory that contains the step has the id of the run, or a term of the job that saved the
    step, which the ``small_files`` name, or it ``may_be_empty``. Otherwise it may have been moved
    or unmounted, and CheckpointError is raised, as for a directory of another run. A link may lead
    to a ``target`` elsewhere, which then exists. A :class:`SnapshotAgent` without a ``Run`` writes
    no terms: if its directory is gone, it is created again. The id in memory (``folder``) is gone
    if others have removed that.
    """
    own, job, directory = id_in_memory(folder), job_in(small_files), target.parent
    if own is None and not job:
        return
    found = id_in_directory(directory)
    if own is not None and found not in (None, own.id):
        raise CheckpointError(
            f"cannot write to {directory}: it belongs to another run now. Its run-id is {found}, "
            f"and that of this run is {own.id}"
        )
    if job and (found is None or (own is None and not may_be_empty)):
        may_be_empty = may_be_empty or target.is_directory()
        check_directory(directory, term_in(small_files), job, may_be_empty=may_be_empty)
    if own is None:
        return
    if found is None:
        write_id(directory, own.id)
    if not own.is_written:
        with contextlib.suppress(StorageError):  # The tmpfs is full. The next save tries again.
            set_id(folder, RunId(own.id, True))


def check_shared(directory: Location, folder: Path) -> None:
    """Checks that a directory shared by agents belongs to the run in memory.

    Raises StorageError if it does not answer, or belongs to no or another run: it may not be
    mounted.
    """
    own, found = id_in_memory(folder), id_in_directory(directory)
    if own is not None and (found is None or found != own.id):
        now = "has no run-id" if found is None else f"belongs to run {found}"
        raise StorageError(
            f"cannot save to local directories: the agents exchange files in {directory}, which "
            f"{now}, and this run is {own.id}. It may have been removed, or is not mounted",
            errno.ESTALE,
        )


def nearest_directory(path: str) -> str:
    """Returns the path or its nearest parent that exists."""
    return os.fspath(
        next(each for each in (Path(path), *Path(path).parents) if os.path.exists(each))
    )


def inode_of(path: str) -> str:
    """Returns device and inode of a directory, which identify it independently of its path."""
    try:
        with _native.StorageCall("inspecting", path):
            found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_dev} {found.st_ino}"
