"""Ending: the last save of a training, after an error or before a signal ends the process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from torch_ckpt.coordination.group import Group
from torch_ckpt.coordination.portable import why
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.runs.preemption import Preemption
from torch_ckpt.runs.step_boundary import StepBoundary
from torch_ckpt.runs.step_saves import StepSaves

__all__ = ["Ending"]

_LOG = logging.getLogger("torch_ckpt")


class Ending:
    """How a run ends early. All ranks call the same methods.

    ``saves`` saves the step that ``boundary`` names. ``directory`` is for messages.
    """

    def __init__(
        self,
        saves: StepSaves,
        boundary: StepBoundary,
        group: Group,
        directory: Location,
        timeout_s: float,
    ) -> None:
        self._saves, self._boundary, self._group = saves, boundary, group
        self._directory, self._timeout_s = directory, timeout_s

    def save_after(
        self, error: BaseException, state: Callable[[], dict[str, Any]], timeout_s: float
    ) -> str:
        """Saves the last completed step after an error of training, if possible.

        Returns the outcome as text.
        """
        with contextlib.suppress(CheckpointError):  # Then the step is not stored, and is saved now.
            self._saves.settle(timeout_s)
        reason, step = self._boundary.reason_not_to_save(error), self._boundary.step
        if reason is not None or step is None:
            return reason or "nothing was saved after this error"
        failure = self._save(step, state, lambda: timeout_s)
        done = f"step {step} was {'not ' if failure else ''}saved after this error"
        return f"{done}: {failure}" if failure else done

    def end_if_signalled(self, preemption: Preemption, *, is_last: bool = False) -> None:
        """Saves the last step and ends the process (SystemExit), if any rank has received a signal.

        With ``is_last``, the ranks exchange in any case, as their block ends.
        """
        step, failure = self._boundary.step, None
        if not (is_last or preemption.is_due(step)):
            return

        def own() -> bool:
            with contextlib.suppress(CheckpointError):  # Then the step is not on disk.
                self._saves.settle(preemption.left_s)
            if (pending := self._saves.pending) is not None:
                raise CheckpointError(f"step {pending} is still being saved")
            return step is None or (self._boundary.stored == step and self._boundary.is_on_disk)

        try:
            with self._group.method("check for a signal", self._timeout_s):
                if not preemption.check(step, self._group, self._timeout_s):
                    return
                is_saved = self._group.decide("ending", own, all, timeout_s=preemption.left_s)
            if step is not None and not is_saved:
                failure = self._save(step, preemption.state, lambda: preemption.left_s)
        except CheckpointError as error:
            if preemption.received is None:
                raise
            failure = why(error)
        if failure or self._group.is_coordinator:
            outcome = (
                "no step had ended, so nothing was saved"
                if step is None
                else f"step {step} was saved"
            )
            if failure:
                outcome = f"step {step} was not saved: {failure}"
            _LOG.warning("%s ends the training of %s: %s", preemption, self._directory, outcome)
        try:
            self._saves.close_promotion(preemption.left_s)
        except CheckpointError as error:
            _LOG.warning("%s", error)
        preemption.end()

    def end_after_error(self, preemption: Preemption, error: BaseException) -> None:
        """Waits for the background save after an error of training, if a signal ends the process.

        The ranks have no common step to save. The error is logged: nobody may report it later.
        """
        if preemption.received is None or preemption.has_ended:
            return
        with contextlib.suppress(CheckpointError):
            self._saves.settle(preemption.left_s)
        message = "%s ends the training of %s after an error; no further step was saved"
        _LOG.warning(message, preemption, self._directory, exc_info=error)

    def _save(
        self, step: int, state: Callable[[], dict[str, Any]], left_s: Callable[[], float]
    ) -> str | None:
        """Saves the last step of this process; returns the reason if that fails."""
        try:
            all_save = self._group.method("save the last step", left_s())
            with all_save, self._saves.recording("save", step):
                # First: the state may need collectives.
                self._saves.begin(step, left_s(), is_last=True)
                if (error := self._saves.save_now(step, state(), left_s())) is not None:
                    _LOG.warning("step %d was saved, but then: %s", step, why(error))
            # Otherwise the agent writes its newest step in memory, which is this one or older.
            self._saves.discard_from_memory(lambda each: each <= step)
        except BaseException as error:  # Even an interrupt: the process ends in any case.
            return why(error)
        return None
