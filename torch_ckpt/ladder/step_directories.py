"""StepDirectories: the steps of a run on disk: listing, verification, retention and removal.

A step is a directory ``step-<n>``. Only its name identifies the step, so no separate file can be
incomplete or name a missing step. Only its metadata determines whether it is a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch_ckpt.commits.hiding import removed_directories
from torch_ckpt.commits.late_names import wait_on_all
from torch_ckpt.commits.leases import now_s, remove_expired_leases
from torch_ckpt.commits.temporary import remove_abandoned
from torch_ckpt.commits.terms import Term, newest_term, term_of
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    is_damage,
    is_unreadable,
    warn_after_commit,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id, has_checkpoint
from torch_ckpt.ladder.removal import leased_paths, remove_directories
from torch_ckpt.ladder.step_files import (
    agreed,
    committed_steps,
    linked_steps,
    listed_steps,
    readable_metrics_of,
    renew_files,
    what_is_missing,
)
from torch_ckpt.ladder.times import time_text
from torch_ckpt.storage.reader import FastReader
from torch_ckpt.storage.verify import check_sound, check_whole
from torch_ckpt.storage.writer import FastWriter

__all__ = ["Mode", "StepDirectories", "Verify", "check_of", "is_whole_in", "step_at"]

Verify = Literal["quick", "full"]
Mode = Literal["min", "max"]

_RENEW_S = 3600.0


class StepDirectories:
    """The steps of a run on disk, as a rung.

    :meth:`reader_of` is called on all ranks, every other method on one rank, whose result the ranks
    share. ``verify`` has the same meaning as for :class:`Run`. ``check`` raises if the checkpoint
    in a directory is not whole, as ``verify`` requires, and ``check_whole`` if files are missing or
    have other lengths.

    Example::

        newest = next(StepDirectories(Location("run")).steps(), None)
    """

    def __init__(
        self, directory: Location, *, verify: Verify = "quick", reader: dict[str, Any] | None = None
    ) -> None:
        self.directory, self.place = directory, str(directory)
        self._warned: set[str] = set()  # Names of directories that could not be removed.
        self._renewed_s = -math.inf  # By the monotonic clock.
        self.unreadable: dict[int, StorageError] = {}
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
        """Returns the id of the save of a step; ``None`` unless :meth:`has_whole`.

        Raises StorageError if it cannot be read.
        """
        return committed_id(self.path(step)) if self.has_whole(step) else None

    def report(self) -> Any:
        """Returns ``None``: all ranks have the same disk."""

    def steps(self, reports: Sequence[None] = (), lineage: Term | None = None) -> Iterator[int]:
        """Yields the whole steps, the newest first; verifies each step as it is requested.

        For steps outside the ``lineage`` of a term, checks only the lengths of files. Warns of
        committed steps that are damaged, and of data files without metadata. Steps that cannot be
        read for another reason are yielded too, and are then ``unreadable``.
        """
        self.unreadable.clear()
        passed: set[int] = set()
        checked: set[int] = set()  # A full check reads all bytes, so it is done once.
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
                self.unreadable.pop(step, None)
                try:
                    check(self.path(step))
                except NotFoundError:  # Not committed, or removed meanwhile.
                    absent.append(step)
                except CheckpointError as error:
                    if is_unreadable(error):
                        self.unreadable[step] = error.with_traceback(None)
                        return step, absent
                    damaged[step] = error
                else:
                    checked.add(step)
                    return step, absent
            return None, absent

        while True:
            step, absent = agreed(scan, lambda found: found[0] is not None and not found[1])
            for other in sorted({*damaged, *absent}, reverse=True):
                if reason := damaged.get(other) or what_is_missing(self.path(other)):
                    passed_over = f"step {other} is passed over in {self.place}"
                    warnings.warn(f"{passed_over}: {reason}", stacklevel=2)
            if step is None:
                return
            passed |= {*damaged, *absent, step}
            damaged.clear()
            yield step

    def term_of(self, step: int, reports: Sequence[None] = ()) -> int:
        """Returns the term in which a step was saved; 0 if it has none."""
        return term_of(self.path(step))

    def saved_s(self, step: int) -> float | None:
        """Returns when a step was committed here, in seconds since 1970; ``None`` if unknown."""
        return (self.path(step) / ".metadata").modified_s()

    def ages(self, steps: Collection[int]) -> dict[int, float]:
        """Returns for how many seconds steps have been committed here, except unknown times.

        Warns once if the file system does not know the time of a committed step.
        """
        if not steps:
            return {}
        saved = {step: self.saved_s(step) for step in steps}
        now = now_s(self.directory) or time.time()
        for step, at in saved.items():
            if at is None and self.has_whole(step):
                self._warn_once(
                    "times",
                    f"step {step} of {self.directory} may remain although it is old: the file "
                    "system does not state when files were written",
                )
        return {step: now - at for step, at in saved.items() if at is not None}

    def check_by(self, reports: Sequence[Any]) -> Callable[[Location], object]:
        """Returns ``check``, for the reports of all ranks."""
        return self.check

    def whole_by(self, reports: Sequence[Any]) -> Callable[[Location], object]:
        """Returns :meth:`check_by`; without reports, ``check_whole``, of this machine's files."""
        return self.check_by(reports) if reports else self.check_whole

    def newest_after(self, step: int) -> int | None:
        """Returns the newest whole step after a step, by the lengths of its files.

        Also returns ``None`` if the directory cannot be read.
        """
        with contextlib.suppress(CheckpointError):
            for found in listed_steps(self.directory):
                if found <= step:
                    break
                with contextlib.suppress(CheckpointError):
                    self.check_whole(self.path(found))
                    return found
        return None

    def damaged(self, reports: Sequence[Any] = ()) -> list[int]:
        """Returns the steps that were committed and are not whole, the newest first."""
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
        # If it never appears, the load raises an error.
        wait_on_all(group, path / ".metadata", "the save of this step", timeout_s=timeout_s)
        return FastReader(path.checkpoint_id, **self._reader)

    def values(self, monitor: str) -> tuple[dict[int, float], dict[int, CheckpointError]]:
        """Returns the metric of each committed step that has one, except NaNs.

        Also returns why the metrics of others cannot be read now, or that they are damaged. Warns
        once of damaged ones.
        """
        unknown: dict[int, CheckpointError] = {}

        def scan() -> tuple[dict[int, float], list[int]]:
            found, absent = {}, []
            unknown.clear()  # The last scan counts.
            for step in listed_steps(self.directory):
                path = self.path(step)
                try:
                    value = readable_metrics_of(path).get(monitor, math.nan)
                    is_absent = not has_checkpoint(path)
                except CheckpointError as error:
                    if isinstance(error, CorruptionError):
                        self._warn_once(f"{path.name}/metrics", f"{error}; it may be the best step")
                    unknown[step] = error.with_traceback(None)  # It would refer to this frame.
                    continue
                if is_absent:
                    absent.append(step)
                elif not math.isnan(value):
                    found[step] = value
            return found, absent

        return agreed(scan, lambda found: found[0] != {} and not found[1])[0], unknown

    def remove(self, steps: Sequence[int]) -> None:
        """Removes steps, except leased steps, and those to which a remaining step is a link.

        Warns once of each step that cannot be removed.
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
        """Warns of a directory, unless it has already warned of it."""
        if name not in self._warned:
            self._warned.add(name)
            warn_after_commit(message, stacklevel=4)

    def sweep(self, term: int = 0) -> None:
        """Deletes the remains of interrupted removals and of killed processes, and expired leases.

        Also renews the times of the run's own files, at most once an hour, and of the file of this
        ``term``. Warns once of each directory that cannot be deleted.
        """
        remains = list(removed_directories(self.directory))
        if remains:  # The removal may have ended before it synced their new names.
            self.directory.sync()
        for name, path in remains:
            try:
                path.remove_all()
            except CheckpointError as error:
                self._warn_once(name, f"{name} was not removed completely: {error}")
        remove_expired_leases(self.directory)
        if self.directory.file_system.has_folders:
            remove_abandoned(self.directory)
        if time.monotonic() - self._renewed_s > _RENEW_S:
            self._renewed_s = time.monotonic()
            renew_files(self.directory, term)


def check_of(
    disks: Sequence[StepDirectories], reports: Sequence[Any]
) -> Callable[[Location], object]:
    """Returns a function that raises if a step in one of these directories is not whole there.

    ``reports`` are the reports of all ranks about the first of ``disks``.
    """
    checks = {disk.directory: disk.check_by(reports) for disk in disks}
    return lambda path: checks[path.parent](path)


def is_whole_in(disks: Iterable[StepDirectories], step: int, reports: Sequence[Any] = ()) -> bool:
    """Returns whether a step is whole in one of the directories of a run.

    ``reports`` are the reports of all ranks about the first directory of the run. Without them,
    only the lengths of this machine's files count. Raises StorageError if the step is whole in no
    directory that can be read, and one cannot be read.
    """
    unreadable = None
    for disk in disks:
        try:
            disk.whole_by(reports)(disk.path(step))
            return True
        except UnsupportedError:
            continue
        except CheckpointError as error:
            unreadable = unreadable if is_damage(error) else error
    if unreadable is not None:
        raise unreadable
    return False


def step_at(disks: Sequence[StepDirectories], time_s: float, reports: Sequence[Any] = ()) -> int:
    """Returns the newest whole step that was committed by a time, in seconds since 1970.

    ``disks`` are the directories of a run; the last contains its terms. ``reports`` are those of
    all ranks about the first. Of several commits of a step, the first counts. Steps that the run
    has left, or whose time is unknown, do not count. Raises NotFoundError without such a step, with
    the time of the oldest one, and StorageError if a step cannot be read that may be newer.
    """
    run = disks[-1].directory
    lineage = newest_term(run)

    def scan() -> tuple[int | None, dict[int, float]]:
        """Returns the step, and the times of all that count."""
        having: dict[int, list[StepDirectories]] = {}
        saved: dict[int, float] = {}
        unreadable: dict[int, CheckpointError] = {}
        for disk in disks:
            for step in committed_steps(disk.directory):
                at = disk.saved_s(step)
                try:
                    counts = lineage.has(step, disk.term_of(step))
                except CheckpointError as error:
                    counts = False
                    if is_unreadable(error) and (at is None or at <= time_s):
                        unreadable[step] = error.with_traceback(None)
                if counts:
                    having.setdefault(step, []).append(disk)
                    if at is not None:
                        saved[step] = min(at, saved.get(step, at))
        by_then = {step for step, at in saved.items() if at <= time_s}
        for step in sorted(by_then | unreadable.keys(), reverse=True):
            if step not in by_then:
                raise unreadable[step]
            if is_whole_in(having[step], step, reports):
                return step, saved
        return None, saved

    found, saved = agreed(scan, lambda found: found[0] is not None)
    if found is None:
        oldest = min(saved, default=None)
        it_has = "no step at all"
        if oldest is not None:
            it_has = f"step {oldest}, of {time_text(saved[oldest])}, is the oldest"
        raise NotFoundError(f"{run} had no whole step at {time_text(time_s)}: {it_has}")
    return found
