"""Saver: what the ranks agree on in ``Run.save``, and which failures end training."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.ladder.failures import Failures
from torch_ckpt.ladder.step_files import refusal, step_number
from torch_ckpt.options import OnBusy
from torch_ckpt.runs.save_interval import SaveSchedule
from torch_ckpt.runs.step_boundary import StepBoundary
from torch_ckpt.runs.step_saves import StepSaves

__all__ = ["Saver"]


class Saver:
    """Saves steps by ``saves``, now or in the background. All ranks call the same methods.

    ``schedule`` and ``boundary`` record each attempt, and ``failures`` decide whether training goes
    on. With ``has_agent``, memory alone can retain a step. ``skipped`` is the number of steps
    that were skipped because the previous save was in progress.
    """

    def __init__(
        self,
        saves: StepSaves,
        schedule: SaveSchedule,
        boundary: StepBoundary,
        failures: Failures,
        group: Group,
        timeout_s: float,
        *,
        asynchronous: bool,
        has_agent: bool,
    ) -> None:
        self._saves, self._schedule, self._boundary = saves, schedule, boundary
        self._failures, self._group, self._timeout_s = failures, group, timeout_s
        self._asynchronous, self._has_agent = asynchronous, has_agent
        self.skipped = 0

    def save(
        self,
        step: int,
        state: dict[str, Any],
        metrics: Mapping[str, float] | None,
        *,
        persist: bool,
        on_busy: OnBusy,
    ) -> bool:
        """Saves a step; see :meth:`Run.save`."""
        begin = time.monotonic()
        refused = refusal(step, is_kept=persist or self._has_agent)  # All ranks will raise it.
        if refused is None:
            self._boundary.step_ended(step := step_number(step))
        self._schedule.attempted(step if refused is None else None)
        with self._schedule.unless_refused():
            may_skip = self._asynchronous and on_busy != "wait"
            is_busy = may_skip and self._is_coordinator_busy(step, refused)
        if is_busy:
            if on_busy == "error":
                raise CheckpointError(f"step {step} was not saved: another save is in progress")
            self.skipped += 1
            return False
        with self._saves.recording("save", None if isinstance(refused, TypeError) else step):
            with self._schedule.unless_refused():
                if not self._begin(step, metrics, persist, refused):
                    return False
            # An error that only this rank knows so far, and whether all ranks raise the next error.
            failure, is_common = None, self._asynchronous
            try:
                if self._asynchronous:
                    failure = self._saves.save_in_background(step, state, persist=persist)
                else:
                    failure = self._saves.save_now(step, state, self._timeout_s)
                own, is_common = self._schedule.own_interval(step, time.monotonic() - begin), True
                self._schedule.agreed(step, self._agreed_interval(own, failure))
            except (CheckpointError, CheckpointException) as error:
                is_common |= isinstance(error, CheckpointException)
                if is_common and self._may_go_on(error):
                    return False
                raise
            finally:
                failure = None  # Its traceback refers to this frame, and so to the state.
            self._failures.ended(in_background=self._asynchronous)
            return True

    def _is_coordinator_busy(self, step: int, refused: Exception | None) -> bool:
        """Returns whether the coordinator, the last to end, still saves; raises ``refused``."""

        def own() -> bool:
            if refused is not None:
                raise refused
            return self._saves.is_busy

        what, given, limit_s = "checking the last save", {"step": step}, self._timeout_s
        return self._group.decide(what, own, lambda busy: busy[0], timeout_s=limit_s, equal=given)

    def _begin(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        persist: bool,
        refused: Exception | None,
    ) -> bool:
        """Begins a save, also if the previous one failed and training goes on.

        Returns ``False`` if this one fails as well, and training goes on.
        """
        timeout_s = self._timeout_s
        if self._failures.is_open:  # Then its failure is not one of this save.
            end, settle = "ending the last save", functools.partial(self._saves.settle, timeout_s)
            try:
                self._group.decide(
                    end, settle, lambda _: None, timeout_s=timeout_s, recorded="begin"
                )
            except StorageError as error:
                if not self._may_go_on(error):
                    raise
            else:
                self._failures.succeeded()
        try:
            unpromoted = self._saves.begin(
                step, timeout_s, metrics, persist=persist, refused=refused
            )
        except StorageError as error:
            if not self._may_go_on(error):
                raise
            return False
        if unpromoted is not None:  # Not a failure of this save, which the options let go on.
            raise unpromoted
        return True

    def _may_go_on(self, error: BaseException) -> bool:
        return self._failures.may_go_on(error, warns=self._group.is_coordinator)

    def _agreed_interval(self, interval: int, failure: BaseException | None) -> int:
        """Returns the longest interval of all ranks until the next save, after a save.

        Raises the failure of a rank on all ranks.
        """

        def own() -> int:
            if failure is not None:
                raise failure
            return interval

        what = "agreeing on the next save"
        try:
            return self._group.decide(what, own, lambda each: max(each), timeout_s=self._timeout_s)
        except BaseException:
            with contextlib.suppress(CheckpointError):  # It failed for the same reason.
                self._saves.settle()
            raise
