"""Saver: the method of a run that saves a step: what the ranks agree on, and failures."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.coordination.exclusive import exclusive
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.ladder.failures import Failures
from torch_ckpt.ladder.step_files import refusal, step_number
from torch_ckpt.options import OnBusy
from torch_ckpt.runs.ending import Ending
from torch_ckpt.runs.save_interval import SaveSchedule

__all__ = ["Saver"]


class Saver(Ending):
    """The part of :class:`~torch_ckpt.runs.run.Run` that saves steps."""

    asynchronous: bool
    on_busy: OnBusy
    skipped: int
    """Number of steps that were skipped because the previous save was in progress."""
    _schedule: SaveSchedule
    _failures: Failures
    _has_agent: bool  # Steps can remain in memory only.

    @exclusive("save a step")
    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        persist: bool = True,
    ) -> bool:
        """Saves a step, and then removes steps that need not be retained.

        Args:
            step: Number of completed steps: an integer, also of NumPy or a tensor. An earlier
                checkpoint of the same step is replaced once the new one is complete.
            state: State dict, as for :func:`torch_ckpt.save`.
            metrics: Numbers to store with the step, such as ``{"loss": 2.5}``, for ``keep_best``
                and :meth:`best_step`. The numbers of the first rank are stored.
            persist: Whether to write the step to disk. If false, the agent retains it in memory,
                and writes it if it is the newest when the ranks end or die, or continue without the
                agent.

        Returns:
            ``True`` if the step was saved, or its save began in the background; ``False`` if the
            step was skipped, or if its save failed and ``on_failure`` is ``"warn"``.

        Raises:
            CheckpointError: The previous save or a promotion failed (a StorageError if storage was
                the reason; the message names the step). Or a save is in progress (``on_busy``).
            CheckpointException: A rank raised an error. It does not derive from ``Exception``.
            RankTimeoutError: A rank was late, stuck or dead.
            SupersededError: A newer job of the run saves. Raised on all ranks, as are the next two.
            TypeError: ``step`` is not an integer; 2.0 and ``True`` are not.
            ValueError: ``step`` is negative, above 2**63 - 1 or differs between ranks, a metric is
                not a number, ``monitor`` is missing, or ``persist=False`` without an agent.
        """
        self._check_open()
        begin = time.monotonic()
        refused = refusal(step, is_kept=persist or self._has_agent)  # All ranks will raise it.
        if refused is None:
            self._boundary.step_ended(step := step_number(step))
        self._schedule.attempted(step if refused is None else None)
        with self._schedule.unless_refused():
            may_skip = self.asynchronous and self.on_busy != "wait"
            is_busy = may_skip and self._is_coordinator_busy(step, refused)
        if is_busy:
            if self.on_busy == "error":
                raise CheckpointError(f"step {step} was not saved: another save is in progress")
            self.skipped += 1
            return False
        with self._saves.recording("save", None if isinstance(refused, TypeError) else step):
            with self._schedule.unless_refused():
                if not self._begin_save(step, metrics, persist, refused):
                    return False
            # An error known only to this rank so far, and whether all ranks raise the next error.
            failure, is_common = None, self.asynchronous
            try:
                if self.asynchronous:
                    failure = self._saves.save_in_background(step, state, persist=persist)
                else:
                    failure = self._saves.save_now(step, state, self.timeout_s)
                own, is_common = self._schedule.own_interval(step, time.monotonic() - begin), True
                self._schedule.agreed(step, self._agreed_interval(own, failure))
            except (CheckpointError, CheckpointException) as error:
                is_common |= isinstance(error, CheckpointException)
                if is_common and self._may_go_on(error):
                    return False
                raise
            finally:
                failure = None  # Its traceback refers to this frame, and so to the state.
            self._failures.ended(in_background=self.asynchronous)
            return True

    def _is_coordinator_busy(self, step: int, refused: Exception | None) -> bool:
        """Returns whether the coordinator, which ends last, still saves; raises ``refused``."""

        def own() -> bool:
            if refused is not None:
                raise refused
            return self._saves.is_busy

        what, given, limit_s = "checking the last save", {"step": step}, self.timeout_s
        return self._group.decide(what, own, lambda busy: busy[0], timeout_s=limit_s, equal=given)

    def _begin_save(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        persist: bool,
        refused: Exception | None,
    ) -> bool:
        """Begins a save, also if the previous one failed and training continues.

        Returns ``False`` if this save fails as well, and training continues.
        """
        timeout_s = self.timeout_s
        if self._failures.is_open:  # Its failure must not count for this save.
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
        if unpromoted is not None:  # A failed promotion: `_failures` counts saves only.
            raise unpromoted
        return True

    def _may_go_on(self, error: BaseException) -> bool:
        return self._failures.may_go_on(error, warns=self._group.is_coordinator)

    def _agreed_interval(self, interval: int, failure: BaseException | None) -> int:
        """After a save, returns the longest interval of all ranks until the next one.

        Raises the failure of a rank on all ranks.
        """

        def own() -> int:
            if failure is not None:
                raise failure
            return interval

        what = "agreeing on the next save"
        try:
            return self._group.decide(what, own, lambda each: max(each), timeout_s=self.timeout_s)
        except BaseException:
            with contextlib.suppress(CheckpointError):  # It failed for the same reason.
                self._saves.settle()
            raise
