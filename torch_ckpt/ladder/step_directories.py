"""StepDirectories: the steps of a run on disk: listing, verification, retention and removal.

A step is a directory ``step-<n>``. Only its name identifies the step, so no separate file can be
torn or name a missing step. Only its own metadata determines whether it is a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch_ckpt.commits.hiding import removed_directories
from torch_ckpt.commits.late_names import wait_on_all
from torch_ckpt.commits.temporary import remove_abandoned
from torch_ckpt.commits.terms import Term, term_of
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CheckpointError, NotFoundError, warn_after_commit
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id, has_checkpoint
from torch_ckpt.ladder.removal import leased_paths, remove_directories
from torch_ckpt.ladder.step_files import (
    agreed,
    linked_steps,
    listed_steps,
    metrics_of,
    remove_expired_leases,
    what_is_missing,
)
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.verify import check_sound, check_whole
from torch_ckpt.storage.writer import FastWriter

__all__ = ["Mode", "StepDirectories", "Verify", "check_of"]

Verify = Literal["quick", "full"]
Mode = Literal["min", "max"]


class StepDirectories:
    """The steps of a run on disk, as a rung.

    :meth:`reader_of` is called on all ranks, every other method on one rank, whose result the ranks
    share. ``verify`` is as for :class:`Run`. ``check`` raises if the checkpoint in a directory is
    not whole, as ``verify`` requires, and ``check_whole`` if its files lack or have other lengths.

    Example::

        newest = next(StepDirectories(Location("run")).steps(), None)
    """

    def __init__(
        self, directory: Location, *, verify: Verify = "quick", reader: dict[str, Any] | None = None
    ) -> None:
        self.directory = directory
        self._warned: set[str] = set()  # Names of what could not be removed.
        self._reader = dict(reader or {})
        trust_pickle = self._reader.get("trust_pickle", False)
        self.check_whole: Callable[[Location], int]
        self.check_whole = functools.partial(check_whole, trust_pickle=trust_pickle)
        self.check: Callable[[Location], object] = self.check_whole
        if verify == "full":
            self.check = functools.partial(check_sound, trust_pickle=trust_pickle)

    def path(self, step: int) -> Location:
        return self.directory / f"step-{step}"

    def writer(self, options: Mapping[str, Any]) -> FastWriter:
        """Returns the writer of all saves to this directory."""
        return FastWriter(self.directory.checkpoint_id, **options)

    def has_whole(self, step: int) -> bool:
        """Returns whether a step is committed here, with the files of all ranks."""
        return has_checkpoint(self.path(step))

    def save_of(self, step: int) -> str | None:
        """Returns the id of the save of a step, or ``None`` unless :meth:`has_whole`.

        Raises StorageError if that cannot be read.
        """
        return committed_id(self.path(step)) if self.has_whole(step) else None

    def report(self) -> Any:
        """Returns ``None``: all ranks have the same disk."""

    def steps(self, reports: Sequence[None] = (), lineage: Term | None = None) -> Iterator[int]:
        """Yields the whole steps, the newest first; verifies each step as it is requested.

        Of steps that are not on the ``lineage`` of a term, only the lengths of the files count.
        Warns of steps that were committed and are damaged, and of data files without metadata.
        """
        passed: set[int] = set()
        checked: set[int] = set()  # A full check reads all bytes: once.
        damaged: dict[int, CheckpointError] = {}

        def is_left(step: int) -> bool:
            if lineage is None or self.check is self.check_whole:
                return False
            return not lineage.has(step, self.term_of(step))

        def scan() -> tuple[int | None, list[int]]:
            """Returns the newest whole step, and newer directories without a checkpoint."""
            absent = []
            for step in listed_steps(self.directory):
                if step in passed or step in damaged:
                    continue
                check = self.check_whole if step in checked or is_left(step) else self.check
                try:
                    check(self.path(step))
                except NotFoundError:  # Never committed, not yet, or removed meanwhile.
                    absent.append(step)
                except CheckpointError as error:
                    damaged[step] = error
                else:
                    checked.add(step)
                    return step, absent
            return None, absent

        while True:
            step, absent = agreed(scan, lambda found: found[0] is not None and not found[1])
            for other in sorted({*damaged, *absent}, reverse=True):
                if reason := damaged.get(other) or what_is_missing(self.path(other)):
                    warnings.warn(f"step {other} is passed over: {reason}", stacklevel=2)
            if step is None:
                return
            passed |= {*damaged, *absent, step}
            damaged.clear()
            yield step

    def term_of(self, step: int, reports: Sequence[None] = ()) -> int:
        """Returns the term in which a step was saved; 0 if it has none."""
        return term_of(self.path(step))

    def check_by(self, reports: Sequence[Any]) -> Callable[[Location], object]:
        """Returns ``check``, for the reports of all ranks."""
        return self.check

    def newest_after(self, step: int) -> int | None:
        """Returns the newest whole step after a step, by the lengths of its files.

        It is ``None`` as well if the directory cannot be read.
        """
        with contextlib.suppress(CheckpointError):
            for found in listed_steps(self.directory):
                if found <= step:
                    break
                with contextlib.suppress(CheckpointError):
                    self.check_whole(self.path(found))
                    return found
        return None

    def damaged(self) -> list[int]:
        """Returns the steps that were committed and are damaged, the newest first."""
        found = []
        for step in listed_steps(self.directory):
            try:
                self.check(self.path(step))
            except NotFoundError:
                continue
            except CheckpointError:
                found.append(step)
        return found

    def reader_of(self, step: int, group: Group, timeout_s: float) -> FastReader:
        """Returns a reader of a step, once this rank finds the step. Called on all ranks."""
        path = self.path(step)
        # One that does not appear is an error of the load.
        wait_on_all(group, path / ".metadata", "the save of this step", timeout_s=timeout_s)
        return FastReader(path.checkpoint_id, **self._reader)

    def values(self, monitor: str) -> dict[int, float]:
        """Returns the metric of each committed step that has one, and not a NaN."""

        def scan() -> tuple[dict[int, float], list[int]]:
            found, absent = {}, []
            for step in listed_steps(self.directory):
                value = metrics_of(self.path(step)).get(monitor, math.nan)
                if not has_checkpoint(self.path(step)):
                    absent.append(step)
                elif not math.isnan(value):
                    found[step] = value
            return found, absent

        return agreed(scan, lambda found: found[0] != {} and not found[1])[0]

    def remove(self, steps: Sequence[int]) -> None:
        """Removes steps, unless they are leased, or a step that remains is a link to them.

        Warns once of each that cannot be removed.
        """
        known = {}
        in_use: set[int] = set()
        if steps:
            remaining = set(listed_steps(self.directory)).difference(steps)
            in_use = linked_steps(self.directory, remaining)
        for step in (step for step in steps if step not in in_use):
            path = self.path(step)
            if missing := what_is_missing(path):
                self._warn_once(path.name, f"step {step} was not removed: {missing}")
            else:
                known[path] = step
        outcome = remove_directories(list(known), leased=lambda: leased_paths(self.directory))
        for path, error in outcome.failures.items():
            self._warn_once(path.name, f"step {known[path]} was not removed: {error}")

    def _warn_once(self, name: str, message: str) -> None:
        """Warns of a directory, unless it was warned of before."""
        if name not in self._warned:
            self._warned.add(name)
            warn_after_commit(message, stacklevel=4)

    def sweep(self) -> None:
        """Deletes the remains of interrupted removals and of killed processes, and expired leases.

        Warns once of each directory that cannot be deleted.
        """
        remains = list(removed_directories(self.directory))
        if remains:  # Their removal may have ended before the sync of their new names.
            self.directory.sync()
        for name, path in remains:
            try:
                path.remove_all()
            except CheckpointError as error:
                self._warn_once(name, f"{name} was not removed completely: {error}")
        remove_expired_leases(self.directory)
        if self.directory.file_system.has_folders:
            remove_abandoned(self.directory)


def check_of(
    disks: Sequence[StepDirectories], reports: Sequence[Any]
) -> Callable[[Location], object]:
    """Returns what raises if a step in one of these directories is not whole there.

    ``reports`` are those of all ranks about the first of ``disks``.
    """
    checks = {disk.directory: disk.check_by(reports) for disk in disks}
    return lambda path: checks[path.parent](path)
