"""BackgroundSave: a save in the background, and the report of its outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch_ckpt.coordination.background import BackgroundFuture
from torch_ckpt.coordination.portable import why
from torch_ckpt.coordination.waiting import OwnFuture
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.ladder.failures import storage_failure

__all__ = ["BackgroundSave"]

_GRACE_S = 2.0
"""Extra seconds of a wait as long as those of the save, whose own error names the late ranks."""


class BackgroundSave:
    """A background save, and a callback that runs in the background after the save has succeeded.

    ``is_committed``: whether the save has succeeded, even if the callback has failed.
    :meth:`settle` reports the outcome of the save. The process waits for the save before it exits.
    If a failed save was not settled, its failure is reported as by :class:`BackgroundFuture`.

    Example::

        save = BackgroundSave(100, torch_ckpt.async_save(state, checkpoint_id="run/step-100"), tidy)
        save.settle(600)
    """

    def __init__(self, step: int, future: Future[Any], then: Callable[[], None]) -> None:
        self.step, self.then = step, then
        self.is_committed = False
        is_named, awaited = True, lambda: f"the background save of step {step}"
        if isinstance(future, OwnFuture):
            is_named, awaited = future.is_named, future.awaited
        self._limit_s = future.timeout_s if isinstance(future, BackgroundFuture) else math.inf
        failure = f"step {step} was not saved"
        self._ended: BackgroundFuture[float] = BackgroundFuture(failure, awaited, is_named=is_named)
        began = time.monotonic()

        def end(done: Future[Any]) -> None:
            try:
                done.result()
                self.is_committed, seconds = True, time.monotonic() - began
                self._ended.failure = f"step {step} was saved, but then"
                then()
            except BaseException as error:
                self._ended.set_exception(error)
            else:
                self._ended.set_result(seconds)

        future.add_done_callback(end)

    @property
    def is_in_progress(self) -> bool:
        """Whether the save is still in progress."""
        return not self._ended.done()

    def settle(self, timeout_s: float) -> float:
        """Waits for the end of the save, and returns its duration in seconds.

        Raises CheckpointError if the save or the callback failed, or is still in progress after
        ``timeout_s``. It is a StorageError if storage made the save fail.
        """
        began = time.monotonic()
        if timeout_s >= self._limit_s:
            timeout_s += _GRACE_S
        if not self._ended.has_ended(timeout_s):
            waited_s = min(timeout_s, round(time.monotonic() - began, 1))
            raise CheckpointError(
                f"step {self.step} is still being saved in the background after a wait of "
                f"{waited_s:g} s"
            )
        error = self._ended.exception()
        if error is not None:
            message = f"{self._ended.failure}: {why(error)}"
            storage = None if self.is_committed else storage_failure(error)
            if storage is not None:
                raise StorageError(message, storage.errno) from error
            raise CheckpointError(message) from error
        return self._ended.result()
