"""Removal of checkpoint directories, such that readers never use a partly removed checkpoint.

This module imports no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch_ckpt.agent.memory import discard_slots, folder_of, run_of
from torch_ckpt.commits.hiding import HiddenCheckpoint, hide
from torch_ckpt.commits.leases import announced_removal
from torch_ckpt.commits.terms import newest_term, term_of
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import (
    metadata_prefixes,
)
from torch_ckpt.ladder.step_files import (
    leased_steps,
    linked_steps,
    listed_steps,
    what_is_missing,
)

__all__ = [
    "Removal",
    "discard_after",
    "discard_from_memory",
    "leased_paths",
    "remove_directories",
    "remove_directory",
    "remove_unfinished",
    "steps_after",
    "steps_in_memory",
]

# A new lease waits while this many steps are renamed.
_HIDDEN_AT_A_TIME = 64

_AGAIN = (
    "Try again when it has ended. After the death of its process, a lease ends on this machine at "
    "once, and on another one 300 s after it was last renewed"
)


@dataclass
class Removal:
    """The outcome of :func:`remove_directories`.

    ``leased`` checkpoints remain, because they were leased meanwhile. ``failures`` state why a
    checkpoint remains, or is hidden from readers but not deleted.
    """

    removed: list[Location] = field(default_factory=list)
    leased: list[Location] = field(default_factory=list)
    failures: dict[Location, CheckpointError] = field(default_factory=dict)

    @contextlib.contextmanager
    def of(self, path: Location) -> Iterator[None]:
        """Records a failure, except if another process has removed the checkpoint."""
        try:
            yield
        except NotFoundError:
            pass
        except CheckpointError as error:
            self.failures[path] = error


def remove_directories(
    paths: Sequence[Location], *, leased: Callable[[], Collection[Location]] = tuple
) -> Removal:
    """Removes checkpoints, so that no reader ever finds a partly deleted one.

    First, all checkpoints are renamed. Then their parent directory is synced, once: otherwise a
    power cut could leave a checkpoint under its old name without some of its files. Finally, they
    are deleted. If the file system cannot rename a directory, such as a mount point or a lower
    layer of an overlay, the checkpoint is first turned into the remains of an uncommitted save.

    A reader that has already opened a checkpoint either finishes or raises
    :class:`~torch_ckpt.errors.NotFoundError`.

    ``leased`` returns checkpoints that must remain. Before it is called, a file announces the
    removal, and new leases wait until this file is removed. So leased checkpoints are never
    renamed. It is called again after the renaming, because older versions do not wait, and the file
    may not be writable, as on a full disk. Checkpoints leased by then are restored. The result
    omits checkpoints that another process has removed.

    Raises StorageError if the parent cannot be read or synced. In that case, the checkpoints are
    hidden from readers, unless their leases are unknown, and a later retention deletes them.
    """
    outcome = Removal()
    hidden: list[HiddenCheckpoint] = []
    for begin in range(0, len(paths), _HIDDEN_AT_A_TIME):
        batch = paths[begin : begin + _HIDDEN_AT_A_TIME]
        with contextlib.ExitStack() as announced:
            for parent in {path.parent for path in batch}:
                announced.enter_context(announced_removal(parent, [path.name for path in batch]))
            in_use = leased()
            outcome.leased += [path for path in batch if path in in_use]
            hidden += _hide_unused([path for path in batch if path not in in_use], leased, outcome)
    for parent in {each.doomed.parent for each in hidden if each.doomed is not None}:
        parent.sync()
    for each in hidden:
        with outcome.of(each.path):
            each.delete()
            outcome.removed.append(each.path)
    return outcome


def _hide_unused(
    paths: Sequence[Location], leased: Callable[[], Collection[Location]], outcome: Removal
) -> list[HiddenCheckpoint]:
    """Hides checkpoints, and restores those that were leased meanwhile."""
    hidden: list[HiddenCheckpoint] = []
    for path in paths:
        with outcome.of(path):
            hidden.append(hide(path))
    in_use: Collection[Location] = [each.path for each in hidden]
    try:
        in_use = leased()
    finally:
        for each in hidden:
            if each.path in in_use:
                with outcome.of(each.path):
                    each.restore()
                    outcome.leased.append(each.path)
    return [each for each in hidden if each.path not in in_use]


def remove_directory(path: Location) -> None:
    """Removes one checkpoint; see :func:`remove_directories`.

    Raises StorageError if the checkpoint cannot be hidden from readers; then it is unchanged. Also
    raises it if the checkpoint is hidden, but a file cannot be deleted; a later retention retries.
    """
    for error in remove_directories([path]).failures.values():
        raise error


def remove_unfinished(path: Location, *, of_agents: bool = True) -> None:
    """Removes the directory of a failed save if it is empty.

    Requires: no save still uses the directory. Ignores errors: a later retention removes the rest.
    ``of_agents`` first removes the files by which agents of several machines inform each other of
    the failure; all agents must have read them. If data files exist, nothing is removed: without
    the agents' files, retention would not recognize the remains of a save.
    """
    with contextlib.suppress(CheckpointError):
        names = path.names()
        if metadata_prefixes(path) or any(name.endswith(".distcp") for name in names):
            return
        for name in names if of_agents else ():
            if name.startswith(".agents-"):
                (path / name).discard()
        path.discard()


def steps_after(
    directories: Sequence[Location],
    step: int,
    check: Callable[[Location], object],
    *,
    alone: bool = False,
) -> tuple[int, list[int]]:
    """Returns the newest whole step up to a step, and the steps after it, the newest first.

    ``directories`` are the directories of one run: its own, and its local one, if any. ``check``
    raises if a step is not whole; see :func:`check_whole`. Among the steps up to ``step``, those
    that the run has left do not count. Raises CheckpointError if a lease protects one of the newer
    steps. Raises CorruptionError or NotFoundError if no whole step, or no step at all, would
    remain.

    ``alone``: only the step itself is removed. The result is the newest whole other step, and the
    step if it exists.
    """
    what, others = _removal_of(directories[0], step, alone=alone)
    steps = _listed(directories)
    remain = [each for each in steps if not _is_removed(each[0], step, alone=alone)]
    lineage, remaining, damage, left = newest_term(directories[0]), None, None, ""
    for found, path in remain:
        try:
            check(path)
        except NotFoundError:
            continue
        except CheckpointError as error:
            damage = damage or error
        else:
            if lineage.has(found, term_of(path)):
                remaining = found
                break
            left = left or f", except step {found}, which the run has left"
    if remaining is None and damage is not None:
        raise CorruptionError(
            f"{what}: one whole step must remain, and {others} is whole{left}: "
            f"{damage}. Nothing was removed"
        )
    if remaining is None:
        raise NotFoundError(
            f"{what}: one step must remain, and {others} is committed{left}. Nothing was removed"
        )
    doomed = (each for each in steps if _is_removed(each[0], step, alone=alone))
    newer = list(dict.fromkeys(found for found, path in doomed if not what_is_missing(path)))
    for older, path in remain:
        if linked := linked_steps(path.parent, [older]).intersection(newer):
            raise CheckpointError(
                f"{what}: step {older} is a link to step {max(linked)}. Nothing was removed"
            )
    if leased := sorted(set().union(*map(leased_steps, directories)).intersection(newer)):
        raise CheckpointError(f"{what}: {_leased(leased[0])}. Nothing was removed. {_AGAIN}")
    return remaining, newer


def discard_from_memory(directory: Location, is_discarded: Callable[[int], bool]) -> set[int]:
    """Discards steps from the memory of the run's agent on this machine, and returns them.

    Works with and without a running agent. Otherwise, the next agent would offer them to a restore,
    or write them to disk.
    """
    run = run_of(directory)
    return discard_slots(folder_of(run), run, is_discarded)


def steps_in_memory(directory: Location) -> set[int]:
    """Returns the steps in the memory of the run's agent on this machine."""
    found: set[int] = set()

    def is_discarded(step: int) -> bool:
        found.add(step)
        return False

    discard_from_memory(directory, is_discarded)
    return found


def _is_removed(found: int, step: int, *, alone: bool) -> bool:
    return found == step if alone else found > step


def _removal_of(run: Location, step: int, *, alone: bool) -> tuple[str, str]:
    """Returns the texts for errors: the removal, and the steps that remain."""
    if alone:
        return f"cannot remove step {step} of {run}", "no other step"
    return f"cannot remove the steps of {run} after step {step}", f"no step up to {step}"


def discard_after(directories: Sequence[Location], step: int, *, alone: bool = False) -> list[int]:
    """Removes all newer steps from the directories of a run, and returns them.

    ``alone``: removes only the step itself. The newest step is removed first. Requires:
    :func:`steps_after` has checked that a step remains. Directories that are neither a checkpoint
    nor the remains of a save remain. Raises CheckpointError if a lease protects a step, or a step
    cannot be removed; all others were removed.
    """
    steps = {
        path: found for found, path in _listed(directories) if _is_removed(found, step, alone=alone)
    }
    outcome = remove_directories(
        [path for path in steps if not what_is_missing(path)],
        leased=lambda: set().union(*map(leased_paths, directories)),
    )
    failures = [f"{_leased(steps[path])}. {_AGAIN}" for path in outcome.leased]
    failures += map(str, outcome.failures.values())
    removed = list(dict.fromkeys(steps[path] for path in outcome.removed))
    if failures:
        raise CheckpointError(
            f"{_removal_of(directories[0], step, alone=alone)[0]}: {len(failures)} remain, "
            f"{len(removed)} were removed. The first that remains: {failures[0]}"
        )
    return removed


def _listed(directories: Iterable[Location]) -> list[tuple[int, Location]]:
    """Returns the steps of a run and their directories, the newest first."""
    return sorted(
        (
            (step, directory / f"step-{step}")
            for directory in directories
            for step in listed_steps(directory)
        ),
        key=lambda each: -each[0],
    )


def leased_paths(directory: Location) -> set[Location]:
    """Returns the directories of the steps that a lease protects."""
    return {directory / f"step-{step}" for step in leased_steps(directory)}


def _leased(step: int) -> str:
    return f"another process reads step {step} under a lease"
