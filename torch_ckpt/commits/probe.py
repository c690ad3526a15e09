"""Checks, before data is written, that the file system supports the calls that a commit needs.

Mounts of stores and of other machines may refuse to rename or to sync files, or to rename
directories. Without this check, a save would fail at its commit, after writing all its data.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from torch_ckpt.commits.temporary import TMP, remove_abandoned, remove_temporary, temporary
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.process_state import PROCESS

__all__ = ["can_be_renamed_to", "check_commit", "created"]

_REFUSALS = {
    *(errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL),
    *(errno.ENOTTY, errno.EBADF),
}
"""Error codes by which file systems and sandboxes refuse a call."""


def check_commit(
    directory: Location, target: Location, *, sync: bool, directories: bool = False
) -> None:
    """Checks that files of a directory that exists can be renamed, and with ``sync`` be synced.

    With ``directories``, directories must be renamed as well. Nothing remains in the directory.
    Each process checks a file system once. Raises StorageError, which names the target and what to
    do, if a call is refused.
    """
    if not directory.file_system.writes_at_offsets:  # A store.
        return
    call = "sync" if sync else "rename"
    try:
        if not _passes(directory, call):
            _rename_file(directory, sync)
            _passed(directory, call)
        if directories:
            _rename_directory(directory)
    except StorageError as error:
        is_sync = str(error).startswith("cannot sync")
        if error.errno in _REFUSALS and (is_sync or str(error).startswith("cannot rename")):
            raise _refusal(target, error, is_sync=is_sync) from error
        raise


@contextlib.contextmanager
def created(directory: Location, sync: bool) -> Iterator[bool]:
    """Creates the directory of a checkpoint; removes it if the block raises and leaves it empty.

    Yields whether the directory is new. An existing directory is not removed: it may have been
    given a quota or permissions. Raises the errors of :func:`check_commit`.
    """
    is_new = directory.file_system.has_folders and directory.is_missing()
    try:
        directory.create_directories()
    except StorageError as error:
        # Without the permission to sync the parent, the next save needs the directory.
        if is_new and error.errno != errno.EACCES:
            directory.discard()
        raise
    try:
        check_commit(directory, directory, sync=sync)
        yield is_new
    except BaseException:
        if is_new:
            directory.discard()
        raise


def can_be_renamed_to(target: Location) -> bool:
    """Returns whether a directory can be written beside its target, and renamed once complete.

    Returns ``False`` if the target exists, even as an empty directory: it may have a quota, stripes
    or permissions, or a process may have opened it. Returns ``False`` if this process cannot list
    the parent, because it could then neither sync the parent nor find the remains of dead
    processes. Renames a temporary directory to test whether the file system supports that.
    """
    parent = target.parent
    if not parent.file_system.renames_directories(parent.path):
        return False
    try:
        parent.names()
        if not target.is_missing():
            return False
        _rename_directory(parent)
    except CheckpointError:
        return False
    return True


def _rename_file(directory: Location, sync: bool) -> None:
    remove_abandoned(directory)  # A process may have died here.
    one, other = (temporary(directory / "probe", TMP) for _ in range(2))
    try:
        one.write(b"", sync=sync)
        one.rename(other)
    finally:
        one.discard()
        other.discard()


def _rename_directory(directory: Location) -> None:
    if _passes(directory, "rename directory"):
        return
    one, other = (temporary(directory / "probe", TMP) for _ in range(2))
    try:
        one.create_directories()
        one.rename(other)
    finally:
        remove_temporary(other)
        remove_temporary(one)
    _passed(directory, "rename directory")


def _refusal(target: Location, error: StorageError, *, is_sync: bool) -> StorageError:
    way_out = ". Or save with sync_files=False, which may lose checkpoints in a power cut"
    return StorageError(
        f"cannot save to {target}: its file system refuses what a commit needs: {error}. If it is "
        "a mount of a store, save to the URL of the store, such as s3://bucket/run, and not to the "
        f"mount. Otherwise save to another file system{way_out if is_sync else ''}",
        error.errno,
    )


def _passes(directory: Location, call: str) -> bool:
    return (_device(directory), call) in PROCESS.probed


def _passed(directory: Location, call: str) -> None:
    PROCESS.probed.add((_device(directory), call))


def _device(directory: Location) -> int | str:
    identity = directory.identity()
    return str(directory) if identity is None else int(identity[0])
