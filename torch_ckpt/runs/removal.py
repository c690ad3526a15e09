"""Removal of a checkpoint's directory, so that no reader ever takes a half-removed one for whole.

This module imports no torch.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator

from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id, has_checkpoint, metadata_prefixes
from torch_ckpt.runs.step_files import SMALL_FILES, leased_steps, listed_steps, what_is_missing
from torch_ckpt.storage.gc import is_index, pending_name

__all__ = [
    "discard_after",
    "remove_directory",
    "remove_unfinished",
    "removed_directories",
    "steps_after",
]

_REMOVED = ".removed-"


def remove_directory(path: Location, *, unless: Callable[[], bool] = lambda: False) -> None:
    """Removes a checkpoint, so that no reader ever finds a partly deleted one under its name.

    The directory is renamed, and then deleted. If the file system refuses the new name, as for a
    directory of a lower layer of an overlay or a mount point, the checkpoint first becomes the
    remains of a save that never committed.

    A reader that has already opened the checkpoint either finishes or raises
    :class:`~torch_ckpt.errors.NotFoundError`.

    Args:
        path: Directory of the checkpoint.
        unless: Called once no reader finds the checkpoint. If it returns ``True``, the checkpoint
            is restored, and remains.

    Raises:
        NotFoundError: The checkpoint does not exist.
        StorageError: The checkpoint cannot be hidden from readers, and is unchanged. Or it is
            hidden, and a file cannot be deleted; a later retention retries that.

    Example::

        remove_directory(Location("run/step-100"))
    """
    doomed = path.with_name(f"{_REMOVED}{path.name}-{secrets.token_hex(4)}")
    try:
        path.rename(doomed)
    except StorageError:
        _remove_in_place(path, unless)
        return
    if unless():
        doomed.rename(path)
        return
    path.parent.sync()
    doomed.remove_all()


def _remove_in_place(path: Location, unless: Callable[[], bool]) -> None:
    """Removes a directory that cannot be renamed.

    Its metadata gets the name of the pending file of its save, in one step.
    """
    save_id = None
    with contextlib.suppress(CheckpointError):  # Damaged, or of stock DCP.
        save_id = committed_id(path)
    metadata, pending = path / ".metadata", path / pending_name(save_id or secrets.token_hex(8))
    with contextlib.suppress(NotFoundError):  # A save that never committed.
        metadata.rename(pending)
        if unless():
            pending.rename(metadata)
            return
        path.sync()
    failure: StorageError | None = None
    names = [name for name in path.names() if name != pending.name]
    # An index without metadata and pending file would count as a damaged checkpoint.
    for name in sorted(names, key=lambda name: not is_index(name)):
        try:
            (path / name).remove_all()
        except StorageError as error:
            failure = failure or error
    if failure is not None:
        raise failure  # The pending file marks the remains.
    path.remove_all()


def removed_directories(directory: Location) -> Iterator[tuple[str, Location]]:
    """Yields the former name and the directory of each interrupted removal.

    Raises:
        StorageError: The directory of the run cannot be read.
    """
    with contextlib.suppress(NotFoundError):
        for name in directory.names():
            if name.startswith(_REMOVED):
                yield name.removeprefix(_REMOVED).rpartition("-")[0], directory / name


def remove_unfinished(path: Location, *, of_agents: bool = True) -> None:
    """Removes the small files of a failed save, and its directory if that is empty then.

    Ignores errors: a later retention removes the rest.

    Args:
        path: Directory of the step, which no save uses any more.
        of_agents: Whether to remove the files by which agents of several machines tell each other
            of the failure. All of them must have read these.
    """
    with contextlib.suppress(CheckpointError):
        if metadata_prefixes(path):
            return
        for name in path.names():
            if name in SMALL_FILES or (of_agents and name.startswith(".agents-")):
                (path / name).discard()
        path.discard()


def steps_after(directory: Location, step: int) -> list[int]:
    """Returns the steps of a run that are newer than a step, the newest first.

    Raises:
        CheckpointError: A lease protects one of them.
        NotFoundError: No other step would remain.
        StorageError: The directory of the run cannot be read.
    """
    steps = listed_steps(directory)
    newer = [found for found in steps if found > step]
    if not any(has_checkpoint(directory / f"step-{found}") for found in steps if found <= step):
        raise NotFoundError(
            f"cannot remove the steps of {directory} after step {step}: no step up to {step} is "
            "committed, so none would remain. Nothing was removed"
        )
    if leased := sorted(leased_steps(directory).intersection(newer)):
        raise CheckpointError(
            f"cannot remove the steps of {directory} after step {step}: another process reads step "
            f"{leased[0]} under a lease. Nothing was removed. Try again when it has ended; a lease "
            "ends 300 s after the death of its process"
        )
    return newer


def discard_after(directory: Location, step: int) -> list[int]:
    """Removes all steps of a run that are newer than a step, the newest first.

    Directories that are neither a checkpoint nor the remains of a save stay.

    Args:
        directory: Directory of the run.
        step: The newest step to retain.

    Returns:
        The removed steps.

    Raises:
        CheckpointError: As :func:`steps_after`. Nothing was removed.
        StorageError: A step cannot be removed. All others were.
    """
    removed: list[int] = []
    failures: list[StorageError] = []
    for found in steps_after(directory, step):
        path = directory / f"step-{found}"
        if what_is_missing(path):
            continue
        try:
            remove_directory(path)
            removed.append(found)
        except NotFoundError:
            continue  # Another process has removed it.
        except StorageError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return removed
