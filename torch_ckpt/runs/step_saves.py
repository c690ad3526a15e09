"""StepSaves: how a run saves one step, now or in the background, and what follows the save."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch.distributed as dist

from torch_ckpt.api import save
from torch_ckpt.coordination.group import Group
from torch_ckpt.coordination.portable import why
from torch_ckpt.errors import CheckpointError
from torch_ckpt.formats.committed import has_checkpoint
from torch_ckpt.runs.background.agent import AgentBackend
from torch_ckpt.runs.background.save import BackgroundSave
from torch_ckpt.runs.background.thread import ThreadBackend
from torch_ckpt.runs.branches import Branches
from torch_ckpt.runs.preemption import Preemption
from torch_ckpt.runs.removal import remove_unfinished
from torch_ckpt.runs.retention import Retention
from torch_ckpt.runs.save_interval import CostClock
from torch_ckpt.runs.step_boundary import StepBoundary
from torch_ckpt.runs.step_directories import StepDirectories
from torch_ckpt.runs.step_files import metrics_file, write_small_files
from torch_ckpt.runs.step_tiers import common_step
from torch_ckpt.storage.writer import FastWriter

__all__ = ["StepSaves"]

_LOG = logging.getLogger("torch_ckpt")


class StepSaves:
    """Saves steps, one at a time. All ranks call the same methods.

    Args:
        disk: The steps on disk.
        group: The ranks.
        process_group: The same ranks, for DCP; all if ``None``.
        writer: Writer of all saves.
        backend: Backend of background saves, if there are any.
        retention: Which steps remain after a save.
        boundary: Told of each step that is stored.
        clock: Told of the duration of each background save.
        timeout_s: Seconds that one rank waits for another.

    Attributes:
        saved: Number of steps that were committed.
        newest: The step that was committed last.
        branches: The branch of the run on which this process saves.
    """

    def __init__(
        self,
        disk: StepDirectories,
        group: Group,
        process_group: dist.ProcessGroup | None,
        writer: FastWriter,
        backend: ThreadBackend | AgentBackend | None,
        retention: Retention,
        boundary: StepBoundary,
        clock: CostClock,
        timeout_s: float,
    ) -> None:
        self._disk, self._group, self._process_group = disk, group, process_group
        self._writer, self._backend, self._retention = writer, backend, retention
        self._boundary, self._clock, self._timeout_s = boundary, clock, timeout_s
        self.saved = 0
        self.newest: int | None = None
        self.branches = Branches(disk.directory, lambda step: step in retention.best(disk))
        self._pending: BackgroundSave | None = None
        self._failed: set[int] = set()  # Steps whose directories may have remains.

    @property
    def is_busy(self) -> bool:
        """Whether the background save of this rank is in progress."""
        return self._pending is not None and self._pending.is_in_progress

    def settle(self, timeout_s: float | None = None) -> None:
        """Waits for the background save, and reports its outcome.

        Raises:
            CheckpointError: The save failed, or is still in progress; the message names its step.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            self._clock.background_save_ended(pending.settle(timeout_s or self._timeout_s))
        except CheckpointError:
            self._boundary.stored = None
            if not pending.is_in_progress:
                self._remove_failed(pending.step)
            raise
        finally:
            if not pending.is_in_progress:
                self._pending = None

    def begin(
        self,
        step: int,
        timeout_s: float,
        metrics: Mapping[str, float] | None = None,
        *,
        persist: bool = True,
    ) -> dict[str, bytes]:
        """Checks that all ranks are at this step, and that the previous save succeeded.

        Args:
            step: The step.
            timeout_s: Seconds that one rank waits for another.
            metrics: Metrics of the step. Those of the first rank count.
            persist: Whether the step is to be on disk.

        Returns:
            The small files of the step, on the first rank.
        """
        path = self._disk.path(step)
        files: dict[str, bytes] = {}

        def own() -> int:
            if self._group.is_coordinator and metrics is not None:
                files.update(metrics_file(step, metrics, self._retention.monitor))
            self.settle(timeout_s)
            return step

        def begin(steps: list[int]) -> int:
            common = common_step(steps)
            for failed in self._failed:  # No rank and no agent uses its directory any more.
                remove_unfinished(self._disk.path(failed))
            self._failed.clear()
            files.update(self.branches.saving(step))
            # An agent may commit after all ranks have died. Else they appear with the commit.
            is_agent = isinstance(self._backend, AgentBackend)
            if is_agent and persist and not has_checkpoint(path):
                write_small_files(path, files)
            return common

        self._group.decide("beginning to save", own, begin, timeout_s=timeout_s)
        self._writer.small_files = files
        return files

    def save_now(
        self, step: int, state: dict[str, Any], files: Mapping[str, bytes], timeout_s: float
    ) -> None:
        """Saves a step, and removes the steps that are not to be retained."""
        try:
            save(
                state,
                checkpoint_id=self._disk.path(step).checkpoint_id,
                storage_writer=self._writer,
                process_group=self._process_group,
                no_dist=self._group.size == 1,
                timeout_s=timeout_s,
            )
        except BaseException:
            self._remove_failed(step)
            raise
        self._boundary.stored = step
        self._committed(step, files)

    def save_in_background(
        self, step: int, state: dict[str, Any], files: Mapping[str, bytes], *, persist: bool
    ) -> None:
        """Begins to save a step in the background; :meth:`settle` reports the outcome."""
        assert self._backend is not None
        path = self._disk.path(step).checkpoint_id
        try:
            future = self._backend.save(step, state, path, persist=persist)
        except BaseException:
            self._remove_failed(step)
            raise
        is_stored = persist or not self._backend.can_stay_in_memory
        then = functools.partial(self._committed, step, files) if is_stored else lambda: None
        self._pending = BackgroundSave(step, future, then)
        self._boundary.stored = step

    def save_after(
        self, error: BaseException, state: Callable[[], dict[str, Any]], timeout_s: float
    ) -> str:
        """Saves the last completed step after an error of training, if possible.

        Returns:
            The outcome as text.
        """
        with contextlib.suppress(CheckpointError):  # Then the step is not stored, and is saved now.
            self.settle(timeout_s)
        reason, step = self._boundary.reason_not_to_save(error), self._boundary.step
        if reason is not None or step is None:
            return reason or "nothing was saved after it"
        failure = self._save_last(step, state, timeout_s)
        done = f"step {step} was {'not ' if failure else ''}saved after it"
        return f"{done}: {failure}" if failure else done

    def end_by_signal(self, preemption: Preemption, step: int, left_s: float) -> NoReturn:
        """Saves the step that has just ended, unless it is on disk, and ends the process.

        Args:
            preemption: The signals, and the state.
            step: The step.
            left_s: Seconds until the first rank is killed.
        """
        timeout_s = max(left_s, 1.0)

        def own() -> bool:
            with contextlib.suppress(CheckpointError):  # Then the step is not on disk.
                self.settle(timeout_s)
            return self.newest == step

        is_saved = self._group.decide("ending", own, all, timeout_s=timeout_s)
        failure = None if is_saved else self._save_last(step, preemption.state, timeout_s)
        number = preemption.received or preemption.signals[0]
        outcome = f"was not saved: {failure}" if failure else "was saved"
        if failure or self._group.is_coordinator:
            run, name = self._disk.directory, signal.Signals(number).name
            _LOG.warning("%s ends the training of %s: step %d %s", name, run, step, outcome)
        raise SystemExit(128 + number)

    def _save_last(
        self, step: int, state: Callable[[], dict[str, Any]], timeout_s: float
    ) -> str | None:
        """Saves the last step of this process; returns the reason if that fails."""
        try:
            files = self.begin(step, timeout_s)  # First: the state may need collectives.
            self.save_now(step, state(), files, timeout_s)
        except BaseException as error:  # Even an interrupt: the process ends in any case.
            return why(error)
        return None

    def _committed(self, step: int, files: Mapping[str, bytes]) -> None:
        """Counts a committed step; on the coordinator, removes the steps not to be retained."""
        self.saved += 1
        self.newest = step
        if not self._group.is_coordinator:
            return
        try:
            write_small_files(self._disk.path(step), files)
            self._retention.apply(self._disk, step)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"old steps were not removed: {error}", stacklevel=2)

    def _remove_failed(self, step: int) -> None:
        """Removes what a failed save has left in the directory of its step, on the coordinator."""
        if self._group.is_coordinator:
            self._failed.add(step)
            remove_unfinished(self._disk.path(step), of_agents=False)
