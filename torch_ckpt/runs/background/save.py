"""A save that goes on in the background, and how this process learns what became of it."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from torch_ckpt.coordination.group import why
from torch_ckpt.errors import CheckpointError
from torch_ckpt.process_state import PROCESS

__all__ = ["BackgroundSave"]


class BackgroundSave:
    """A save in the background, with what is done after it.

    It is settled when somebody has learnt how it ended. If nobody has when the process exits, which
    waits for it, its failure is reported on stderr.

    Args:
        step: What is saved.
        future: Of the save.
        then: Called in the background when it has succeeded.

    Example::

        save = BackgroundSave(100, torch_ckpt.async_save(state, checkpoint_id="run/step-100"), tidy)
        save.settle(600)
    """

    def __init__(self, step: int, future: Future[Any], then: Callable[[], None]) -> None:
        self.step = step
        self._ended: Future[float] = Future()
        PROCESS.unsettled.add(self)
        began = time.monotonic()

        def end(done: Future[Any]) -> None:
            try:
                done.result()
                seconds = time.monotonic() - began
                then()
            except BaseException as error:
                self._ended.set_exception(error)
            else:
                self._ended.set_result(seconds)

        future.add_done_callback(end)

    @property
    def is_going_on(self) -> bool:
        """Whether it is not over yet."""
        return not self._ended.done()

    def settle(self, timeout_s: float) -> float:
        """Waits for its end.

        Args:
            timeout_s: For so long, in seconds.

        Returns:
            How long it took, in seconds.

        Raises:
            CheckpointError: It has failed, or still goes on.
        """
        if not wait([self._ended], timeout_s).done:
            raise CheckpointError(
                f"step {self.step} is still being saved in the background, after {timeout_s:g} s "
                "of waiting for it"
            )
        PROCESS.unsettled.discard(self)
        error = self._ended.exception()
        if error is not None:
            raise CheckpointError(f"step {self.step} was not saved: {why(error)}") from error
        return self._ended.result()


def _report() -> None:
    """At exit, when the threads of all saves have ended."""
    for save in sorted(PROCESS.unsettled, key=lambda save: save.step):
        try:
            save.settle(0)
        except CheckpointError as error:
            print(f"torch_ckpt: {error}", file=sys.stderr)


atexit.register(_report)
