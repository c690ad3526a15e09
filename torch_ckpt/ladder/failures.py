"""Failures: what a run does after storage has made a save fail: raise, or train on."""

from __future__ import annotations

import errno
import logging
from typing import Literal

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.coordination.portable import why
from torch_ckpt.errors import CancelledError, StorageError
from torch_ckpt.ladder.step_files import whole_number

__all__ = ["Failures", "OnFailure", "may_be_committed", "storage_failure"]

OnFailure = Literal["raise", "warn"]

_LOG = logging.getLogger("torch_ckpt")

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
