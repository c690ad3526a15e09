"""Failures of saves and promotions: whether training goes on, and what they have left."""

from __future__ import annotations

import contextlib
import errno
import logging
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
]

OnFailure = Literal["raise", "warn"]

_LOG = logging.getLogger("torch_ckpt")

MIN_OUTAGE_S = 1800.0
"""Failed promotions in a row end training only if they last this long: a store may be down."""

_NOT_OF_STORAGE = frozenset({errno.EEXIST, errno.EINVAL, errno.ENODEV})


class Failures:
    """Counts the saves that have failed. Every rank gets each error, so all count the same.

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
        """Whether the outcome of a background save is not known yet, and is to be counted."""

    def may_go_on(self, error: BaseException, *, warns: bool) -> bool:
        """Counts a failed save. Returns whether training continues; if not, raise the error.

        It continues if storage is the reason. With ``warns``, this rank logs the first failure in a
        row.
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
                "a save has failed; training goes on, and saves again when the next step is due: "
                "%s",
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
    went on.
    """

    def __init__(self, directory: Location, on_failure: OnFailure, most: int) -> None:
        self._directory, self._on_failure, self._most = directory, on_failure, most
        self.last: CheckpointError | None = None
        self.count = 0
        self._in_a_row = 0
        self._since = 0.0  # When the first failure in a row was.

    def add(self, step: int | None, error: Exception) -> str | None:
        """Records a failure; returns what to log, if promotion goes on after the first in a row."""
        message = f"step {step} was not promoted to {self._directory}: {why(error)}"
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
        """Forgets a failure of storage: the promotion is tried again."""
        if isinstance(self.last, StorageError):
            self.last = None

    def take(self) -> CheckpointError | None:
        """Returns the last failure, once, if training must not go on; ``None`` if it may."""
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

    ``may_commit`` returns whether an agent may still commit a step. The rank that ``removes``, the
    coordinator, removes what the saves have left.
    """

    def __init__(
        self, disk: StepDirectories, may_commit: Callable[[int], bool], *, removes: bool
    ) -> None:
        self._disk, self._may_commit, self._removes = disk, may_commit, removes
        self._failed: set[int] = set()  # Steps whose directories may have remains.
        self._unknown: dict[int, Callable[[], None]] = {}  # Steps that may still be committed.
        self._former: dict[int, str] = {}  # The saves that those of the same steps replace.

    def add(self, step: int, error: BaseException, then: Callable[[], None]) -> None:
        """Removes what a failed save has left, unless it may still be committed.

        Then :meth:`settle` finds out later, and calls ``then`` if it was committed.
        """
        if may_be_committed(error):
            self._unknown[step] = then
        else:
            self.remove(step)

    def remove(self, step: int) -> None:
        """Removes what a failed save has left in the directory of its step."""
        if self._removes:
            self._failed.add(step)
            remove_unfinished(self._disk.path(step), of_agents=False)

    def former(self, step: int) -> str | None:
        """Returns the id of the save that a new one of the step would replace, if it is known."""
        with contextlib.suppress(CheckpointError):  # The new save may fail for it, or not.
            return self._disk.save_of(step)
        return None

    def replaced(self, step: int, former: str | None) -> None:
        """Forgets a save whose outcome is unknown: another one of the step replaces ``former``."""
        self._unknown.pop(step, None)
        if former is not None:
            self._former[step] = former

    def settle(self) -> None:
        """Settles the saves whose outcome was unknown, and is known now."""
        for step, then in list(self._unknown.items()):
            try:
                # With several places it is not: these may learn of the commit at different times.
                found = self._disk.save_of(step)
            except CheckpointError:  # Storage does not answer now.
                continue
            if found not in (None, self._former.get(step)):
                del self._unknown[step]
                then()
            elif not self._may_commit(step):
                del self._unknown[step]
                self.remove(step)

    def sweep(self) -> None:
        """Removes what is left. Requires: no rank and no agent uses these directories any more."""
        for step in self._failed:
            remove_unfinished(self._disk.path(step))
        self._failed.clear()


def may_be_committed(error: BaseException | None) -> bool:
    """Returns whether the outcome of a save is unknown: it may still be committed.

    The coordinator was publishing it, or the agent that was to persist it did not answer.
    """
    while error is not None:
        if getattr(error, "may_be_committed", False):
            return True
        if isinstance(error, CheckpointException):
            return any(may_be_committed(cause) for cause, _ in error.failures.values())
        error = error.__cause__
    return False


def storage_failure(error: BaseException) -> StorageError | None:
    """Returns the failure of storage that is the reason of an error; ``None`` if it is another.

    A wrong setting is another reason, and so is another job that saves the same step. Storage is
    the reason of a ``CheckpointException`` if every rank's error is such a failure, or a
    CancelledError that followed from one.
    """
    if isinstance(error, StorageError):
        return None if error.errno in _NOT_OF_STORAGE else error
    if not isinstance(error, CheckpointException):
        return None
    causes = [cause for cause, _ in error.failures.values()]
    found = [storage_failure(cause) for cause in causes if not isinstance(cause, CancelledError)]
    return found[0] if found and None not in found else None
