"""Failures of saves and promotions: whether training continues, and cleaning up after them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from typing import Literal

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.coordination.portable import why
from torch_ckpt.errors import CancelledError, CheckpointError, StorageError, SupersededError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.removal import remove_unfinished
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import whole_number

__all__ = [
    "FailedSaves",
    "Failures",
    "OnFailure",
    "PromotionFailures",
    "may_be_committed",
    "storage_failure",
    "sweep_if_full",
]

OnFailure = Literal["raise", "warn"]

_LOG = logging.getLogger("torch_ckpt")

MIN_OUTAGE_S = 1800.0
"""Failed promotions in a row end training only after this time: a store may be down."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_NOT_OF_STORAGE = frozenset({errno.EEXIST, errno.EINVAL, errno.ENODEV})


class Failures:
    """Counts failed saves. Every rank receives each error, so all counts are equal.

    Training ends at failure number ``most`` in a row. ``count`` is the number of failures after
    which training continued.
    """

    def __init__(self, on_failure: OnFailure, most: int) -> None:
        if whole_number("max_failures", most) < 1:
            raise ValueError(f"max_failures={most} is not positive")
        self.count = 0
        self._on_failure, self._most = on_failure, most
        self._in_a_row = 0
        self.is_open = False
        """Whether the outcome of a background save is still unknown, and must be counted later."""

    def may_go_on(self, error: BaseException, *, warns: bool) -> bool:
        """Counts a failed save. Returns whether training continues; if not, raise the error.

        Training continues if storage caused the failure. With ``warns``, this rank logs the first
        failure in a row.
        """
        self.is_open = False
        if self._on_failure == "raise" or storage_failure(error) is None:
            return False
        self._in_a_row += 1
        if self._in_a_row >= self._most:
            error.add_note(f"torch_ckpt: {self._in_a_row} saves in a row have failed")
            return False
        self.count += 1
        if warns and self._in_a_row == 1:
            _LOG.warning(
                "a save has failed; training continues, and saves again at the next step due: %s",
                why(error),
            )
        return True

    def succeeded(self) -> None:
        """Ends a row of failures."""
        self.is_open = False
        self._in_a_row = 0

    def ended(self, *, in_background: bool) -> None:
        """Ends a row of failures after a save, unless its outcome is not known yet."""
        if not in_background:
            self.succeeded()
        self.is_open = in_background and self._on_failure == "warn"


class PromotionFailures:
    """The failed promotions to the directory of a run, in a row. Not thread-safe.

    With ``"raise"``, or at failure number ``most`` in a row and after ``MIN_OUTAGE_S``,
    :meth:`take` returns the ``last`` one. ``count`` is the number of failures after which promotion
    continued.
    """

    def __init__(self, directory: Location, on_failure: OnFailure, most: int) -> None:
        self._directory, self._on_failure, self._most = directory, on_failure, most
        self.last: CheckpointError | None = None
        self.count = 0
        self._in_a_row = 0
        self._since = 0.0  # Time of the first failure in a row.

    def add(self, step: int | None, error: Exception) -> str | None:
        """Records a failure. Returns a message to log if it is the first in a row and not final.

        The step is ``None`` if it is unknown, because the local directory cannot be read.
        """
        what = "steps were" if step is None else f"step {step} was"
        message = f"{what} not promoted to {self._directory}: {why(error)}"
        storage = storage_failure(error)
        self.last = CheckpointError(message)
        if isinstance(error, SupersededError):
            self.last = SupersededError(message)
        if storage is not None:
            self.last = StorageError(message, storage.errno)
        self.last.__cause__ = error
        if self._in_a_row == 0:
            self._since = time.monotonic()
        self._in_a_row += 1
        if not self._may_go_on():
            return None
        self.count += 1
        return message if self._in_a_row == 1 else None

    def ended(self) -> None:
        """Ends a row of failures."""
        self.last, self._in_a_row = None, 0

    def retry(self) -> None:
        """Clears a failure of storage, because the promotion is retried."""
        if isinstance(self.last, StorageError):
            self.last = None

    def take(self) -> CheckpointError | None:
        """Returns the last failure, once, if training must stop; ``None`` if it may continue."""
        if self.last is None or self._may_go_on():
            return None
        failure, self.last = self.last, None
        return failure

    def _may_go_on(self) -> bool:
        if isinstance(self.last, SupersededError):
            return False
        is_short = time.monotonic() - self._since < MIN_OUTAGE_S
        return self._on_failure == "warn" and (is_short or self._in_a_row < self._most)


class FailedSaves:
    """The failed saves to a directory of steps, on one rank.

    ``may_commit`` returns whether an agent may still commit a step. ``removes`` is true on the
    coordinator, which removes the remains of the saves.
    """

    def __init__(
        self, disk: StepDirectories, may_commit: Callable[[int], bool], *, removes: bool
    ) -> None:
        self._disk, self._may_commit, self._removes = disk, may_commit, removes
        self._pid = os.getpid()
        self._failed: set[int] = set()  # Steps whose directories may have remains.
        self._unknown: dict[int, Callable[[], None]] = {}  # Steps that may still be committed.
        self._former: dict[int, str] = {}  # Step -> the save of it that a new one replaces.

    def add(self, step: int, error: BaseException, then: Callable[[], None]) -> None:
        """Removes the remains of a failed save, unless it may still be committed.

        In that case, :meth:`settle` checks later, and calls ``then`` if the save was committed.
        """
        if may_be_committed(error):
            self._unknown[step] = then
            return
        self.remove(step)
        if self._removes and os.getpid() == self._pid:
            sweep_if_full(self._disk, error)

    def remove(self, step: int) -> None:
        """Removes the remains of a failed save from the directory of its step.

        Does nothing in a forked child, whose parent may still save the step.
        """
        if self._removes and os.getpid() == self._pid:
            self._failed.add(step)
            remove_unfinished(self._disk.path(step), of_agents=False)

    def former(self, step: int) -> str | None:
        """Returns the id of the save that a new save of the step would replace, if known."""
        with contextlib.suppress(CheckpointError):  # The new save will fail if this matters.
            return self._disk.save_of(step)
        return None

    def replaced(self, step: int, former: str | None) -> None:
        """Drops a save of unknown outcome, because another save of the step replaces ``former``."""
        self._unknown.pop(step, None)
        if former is not None:
            self._former[step] = former

    def settle(self) -> None:
        """Settles the saves whose outcome has become known."""
        for step, then in list(self._unknown.items()):
            try:
                # With several places, it never is: they may detect the commit at different times.
                found = self._disk.save_of(step)
                is_committed = found not in (None, self._former.get(step))
                is_open = not is_committed and self._may_commit(step)
            except CheckpointError:  # Storage does not answer now, or memory cannot be mapped.
                continue
            if is_open:
                continue
            del self._unknown[step]
            if is_committed:
                then()
            else:
                self.remove(step)

    def sweep(self) -> None:
        """Removes all remains. Requires: no rank or agent still uses these directories."""
        for step in self._failed:
            remove_unfinished(self._disk.path(step))
        self._failed.clear()


def may_be_committed(error: BaseException | None) -> bool:
    """Returns whether the outcome of a save is unknown: it may still be committed.

    This is so if the coordinator was publishing it, or its agent did not answer.
    """
    while error is not None:
        if getattr(error, "may_be_committed", False):
            return True
        if isinstance(error, CheckpointException):
            return any(may_be_committed(cause) for cause, _ in error.failures.values())
        error = error.__cause__
    return False


def storage_failure(error: BaseException) -> StorageError | None:
    """Returns the storage failure that caused an error; ``None`` if it has another cause.

    Wrong settings do not count, nor another job that saves the same step. Storage caused a
    ``CheckpointException`` if every rank's error is a storage failure, or a CancelledError as its
    consequence.
    """
    if isinstance(error, StorageError):
        return None if error.errno in _NOT_OF_STORAGE else error
    if not isinstance(error, CheckpointException):
        return None
    causes = [cause for cause, _ in error.failures.values()]
    found = [storage_failure(cause) for cause in causes if not isinstance(cause, CancelledError)]
    return found[0] if found and None not in found else None


def sweep_if_full(disk: StepDirectories, error: BaseException, term: int = 0) -> None:
    """Deletes the remains of interrupted removals from a disk whose lack of space caused an error.

    Otherwise, only the retention after a successful save or promotion would.
    """
    failure = storage_failure(error)
    if failure is not None and failure.errno in _FULL:
        with contextlib.suppress(CheckpointError):
            disk.sweep(term)
