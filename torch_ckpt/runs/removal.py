"""Removal of a checkpoint's directory, so that no reader ever takes a half-removed one for whole.

This module imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator

from torch_ckpt.agent.memory import discard_slots, folder_of, run_of
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import (
    committed_id,
    is_index,
    metadata_prefixes,
    pending_name,
)
from torch_ckpt.runs.step_files import SMALL_FILES, leased_steps, listed_steps, what_is_missing

__all__ = [
    "discard_after",
    "discard_from_memory",
    "is_leased",
    "remove_directory",
    "remove_unfinished",
    "removed_directories",
    "steps_after",
]

_REMOVED = ".removed-"

_AGAIN = "Try again when it has ended; a lease ends 300 s after the death of its process"


def remove_directory(path: Location, *, unless: Callable[[], bool] = lambda: False) -> bool:
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

    Returns:
        Whether the checkpoint was removed.

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
        return _remove_in_place(path, unless)
    if unless():
        doomed.rename(path)
        return False
    path.parent.sync()
    doomed.remove_all()
    return True


def _remove_in_place(path: Location, unless: Callable[[], bool]) -> bool:
    """Removes a directory that cannot be renamed; returns whether it did.

    All metadata gets the name of the pending file of its save, in one step for each file.
    """
    hidden = list(_hide(path))
    if unless():
        for metadata, pending in hidden:
            pending.rename(metadata)
        return False
    path.sync()
    failure: StorageError | None = None
    names = set(path.names()) - {pending.name for _, pending in hidden}
    # An index without metadata and pending file would count as a damaged checkpoint.
    for name in sorted(names, key=lambda name: not is_index(name)):
        try:
            (path / name).remove_all()
        except StorageError as error:
            failure = failure or error
    if failure is not None:
        raise failure  # The pending files mark the remains.
    path.remove_all()
    return True


def _hide(path: Location) -> Iterator[tuple[Location, Location]]:
    """Hides the checkpoints of a directory; yields the metadata and the pending file of each."""
    for prefix in metadata_prefixes(path):
        save_id = None
        with contextlib.suppress(CheckpointError):  # Damaged, or of stock DCP.
            save_id = committed_id(path, prefix)
        metadata = path / f"{prefix}.metadata"
        pending = path / f"{prefix}{pending_name(save_id or secrets.token_hex(8))}"
        with contextlib.suppress(NotFoundError):  # An index that has lost its metadata.
            metadata.rename(pending)
            yield metadata, pending


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
        of_agents: Whether to remove the files by which agents of several machines inform each
            other of the failure. All of them must have read these.
    """
    with contextlib.suppress(CheckpointError):
        if metadata_prefixes(path):
            return
        for name in path.names():
            if name in SMALL_FILES or (of_agents and name.startswith(".agents-")):
                (path / name).discard()
        path.discard()


def steps_after(
    directory: Location, step: int, check: Callable[[Location], None]
) -> tuple[int, list[int]]:
    """Returns the newest whole step up to a step, and the steps after it, the newest first.

    Args:
        directory: Directory of the run.
        step: The newest step to retain.
        check: Raises if a step is not whole; see :func:`check_whole`.

    Raises:
        CheckpointError: A lease protects one of the newer steps.
        CorruptionError: No other step would remain that is whole.
        NotFoundError: No other step would remain.
        StorageError: The directory of the run cannot be read.
    """
    what = f"cannot remove the steps of {directory} after step {step}"
    steps = listed_steps(directory)
    remaining, damage = None, None
    for found in (found for found in steps if found <= step):
        try:
            check(directory / f"step-{found}")
        except NotFoundError:
            continue
        except CheckpointError as error:
            damage = damage or error
        else:
            remaining = found
            break
    if remaining is None and damage is not None:
        raise CorruptionError(
            f"{what}: one whole step must remain, and no step up to {step} is whole: {damage}. "
            "Nothing was removed"
        )
    if remaining is None:
        raise NotFoundError(
            f"{what}: one step must remain, and no step up to {step} is committed. Nothing was "
            "removed"
        )
    newer = [found for found in steps if found > step]
    if leased := sorted(leased_steps(directory).intersection(newer)):
        raise CheckpointError(f"{what}: {_leased(leased[0])}. Nothing was removed. {_AGAIN}")
    return remaining, newer


def discard_from_memory(directory: Location, is_discarded: Callable[[int], bool]) -> set[int]:
    """Discards steps from the memory of the run's agent on this machine, whether one runs or not.

    Otherwise the agent of the next training would restore them, or write them to disk.

    Args:
        directory: Directory of the run.
        is_discarded: Whether to discard a step.

    Returns:
        The discarded steps.
    """
    if directory.local_path is None:
        return set()
    run = run_of(directory.local_path)
    return discard_slots(folder_of(run), run, is_discarded)


def discard_after(directory: Location, step: int) -> list[int]:
    """Removes from disk all steps of a run that are newer than a step, the newest first.

    Directories that are neither a checkpoint nor the remains of a save stay.

    Args:
        directory: Directory of the run.
        step: The newest step to retain. :func:`steps_after` has found that one remains.

    Returns:
        The removed steps.

    Raises:
        CheckpointError: A lease protects a step, or a step cannot be removed. All others were.
    """
    removed: list[int] = []
    failures: list[str] = []
    for found in (found for found in listed_steps(directory) if found > step):
        path = directory / f"step-{found}"
        if what_is_missing(path):
            continue
        try:
            if remove_directory(path, unless=functools.partial(is_leased, directory, found)):
                removed.append(found)
            else:
                failures.append(f"{_leased(found)}. {_AGAIN}")
        except NotFoundError:
            continue  # Another process has removed it.
        except CheckpointError as error:
            failures.append(str(error))
    if failures:
        raise CheckpointError(
            f"cannot remove all steps of {directory} after step {step}: {len(failures)} remain, "
            f"{len(removed)} were removed. The first that remains: {failures[0]}"
        )
    return removed


def is_leased(directory: Location, step: int) -> bool:
    """Returns whether a lease protects a step of a run."""
    return step in leased_steps(directory)


def _leased(step: int) -> str:
    return f"another process reads step {step} under a lease"
