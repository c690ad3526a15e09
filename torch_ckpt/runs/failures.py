"""Failures: what a run does after storage has made a save fail: raise, or train on."""

from __future__ import annotations

import logging
from typing import Literal

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.coordination.portable import why
from torch_ckpt.errors import CancelledError, StorageError

__all__ = ["Failures", "OnFailure", "storage_failure"]

OnFailure = Literal["raise", "warn"]

_LOG = logging.getLogger("torch_ckpt")


class Failures:
    """Counts the saves that have failed. Every rank gets each error, so all count the same.

    With ``"warn"``, ``most`` failures in a row are one too many. ``count`` has all of them after
    which training went on.
    """

    def __init__(self, on_failure: OnFailure, most: int) -> None:
        if most < 1:
            raise ValueError(f"max_failures={most} is not positive")
        self.count = 0
        self._on_failure, self._most = on_failure, most
        self._in_a_row = 0
        self._is_open = False  # Whether the outcome of a background save is not known yet.

    def add(self, error: BaseException, *, warns: bool) -> None:
        """Counts a failed save. Raises the error if training must not go on.

        It goes on if storage is the reason. ``warns`` says whether this rank logs the first failure
        in a row.
        """
        self._is_open = False
        if self._on_failure == "raise" or storage_failure(error) is None:
            raise error
        self._in_a_row += 1
        if self._in_a_row >= self._most:
            error.add_note(f"torch_ckpt: {self._in_a_row} saves in a row have failed")
            raise error
        self.count += 1
        if warns and self._in_a_row == 1:
            _LOG.warning(
                "a save has failed; training goes on, and saves again when the next step is due: "
                "%s",
                why(error),
            )

    def begun(self) -> None:
        """Ends a row of failures if a background save was open: the next one begins after it."""
        if self._is_open:
            self._in_a_row = 0

    def ended(self, *, in_background: bool) -> None:
        """Ends a row of failures after a save, unless it is open in the background."""
        self._is_open = in_background
        if not in_background:
            self._in_a_row = 0


def storage_failure(error: BaseException) -> StorageError | None:
    """Returns the failure of storage that is the reason of an error; ``None`` if it is another.

    Of a ``CheckpointException``, storage is the reason if all ranks failed by it, or since another
    rank did.
    """
    if isinstance(error, StorageError):
        return error
    if not isinstance(error, CheckpointException):
        return None
    causes = [cause for cause, _ in error.failures.values()]
    found = [storage_failure(cause) for cause in causes if not isinstance(cause, CancelledError)]
    return found[0] if found and None not in found else None
