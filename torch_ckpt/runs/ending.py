"""Ending: the methods of a run that save the last step when training ends early.

This happens after an error of training, or before a signal ends the process.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_ckpt.coordination.exclusive import Exclusive
from torch_ckpt.coordination.group import Group
from torch_ckpt.coordination.portable import why
from torch_ckpt.coordination.waiting import duration
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.runs.preemption import Preemption
from torch_ckpt.runs.step_boundary import StepBoundary
from torch_ckpt.runs.step_saves import StepSaves

__all__ = ["Ending"]

_LOG = logging.getLogger("torch_ckpt")


class Ending:
    """The part of :class:`~torch_ckpt.runs.run.Run` that saves after an error or a signal."""

    timeout_s: float
    _group: Group
    _exclusive: Exclusive
    _disks: Sequence[StepDirectories]
    _boundary: StepBoundary
    _saves: StepSaves
    _closed: bool
    _preemption: Preemption | None  # Within a block of saving_on_signal.

    @contextlib.contextmanager
    def saving_on_exception(
        self, state: Callable[[], dict[str, Any]], *, timeout_s: float = 30.0
    ) -> Iterator[None]:
        """Saves the last completed step if the block raises.

        The last completed step is the one passed to the last call of :meth:`should_save` or
        :meth:`save`. Nothing is saved if this step is already saved, if a save or load raised the
        error, or if an optimizer of torch in this process has begun another step, since the
        parameters may then be partly updated. Other changes are not noticed: tensors that the
        program changes without an optimizer, random states, the data position and running means
        are saved as they are when the block raises.

        All ranks must raise, as they do when a collective of training fails. If another rank does
        not raise within ``timeout_s``, nothing is saved. The exception of the block is always
        re-raised, with a note about the outcome. ``SystemExit``, ``GeneratorExit`` and exceptions
        in a forked child save nothing.

        Args:
            state: Function that returns the state to save.
            timeout_s: Longest time that this rank waits for the others, in seconds.

        Raises:
            ValueError: ``timeout_s`` is not a positive number.

        Example::

            with run.saving_on_exception(lambda: training.state_dict()):
                train()
        """
        self._check_open()
        timeout_s = duration("timeout_s", timeout_s)
        try:
            with self._boundary.watching_optimizers():
                yield
        except (SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            if not self._exclusive.is_forked:
                error.add_note(f"torch_ckpt: {self._save_after(error, state, timeout_s)}")
            raise

    @contextlib.contextmanager
    def saving_on_signal(
        self,
        state: Callable[[], dict[str, Any]],
        *,
        grace_s: float = 30.0,
        signals: Sequence[int] = (signal.SIGTERM,),
    ) -> Iterator[None]:
        """Saves the step that ends next when a signal arrives, and then ends the process.

        Schedulers send a signal before they kill a job: by default SIGTERM in Slurm, Kubernetes and
        ``torchrun``. It is enough if one rank receives it. Within the block, :meth:`should_save`
        lets the ranks agree on the step to save: after each step, or at least every 16 steps if
        these take less than a second. They also agree at the end of the block. All ranks then save
        the step to disk and raise ``SystemExit`` with the status of a process that the signal
        ended, such as 143. If the step cannot be saved in time, the reason is logged.

        All ranks must enter the block at the same step, in their main threads, call
        :meth:`should_save` after every step, and leave the block at the same step. If the block
        raises another exception after a signal, the run waits for the background save and sends
        the signal again. Child processes that are forked within the block handle the signal as
        before.

        Args:
            state: Function that returns the state to save.
            grace_s: Time from the signal until the scheduler kills the process, in seconds; 30 by
                default in Slurm (``KillWait``), Kubernetes and ``torchrun``.
            signals: The signals, such as ``signal.SIGUSR1`` for ``sbatch --signal=USR1@60``.

        Raises:
            RuntimeError: A run of this process is already within such a block.
            SystemExit: A signal has arrived.
            ValueError: This is not the main thread, ``grace_s`` is not positive, or a signal cannot
                be handled.

        Example::

            with run.saving_on_signal(lambda: state, grace_s=60):
                for step in range(start + 1, steps + 1):
                    train_step()
                    if run.should_save(step) or step == steps:
                        run.save(step, state)
        """
        self._check_open()
        preemption = Preemption(signals, grace_s, state, is_alone=self._group.size == 1)
        with preemption.catching():
            self._preemption = preemption
            try:
                yield
                if not (self._closed or self._exclusive.is_forked):
                    with self._exclusive.use("check for a signal", self.timeout_s):
                        self._end_if_signalled(preemption, is_last=True)
            except BaseException as error:
                if not self._exclusive.is_forked:
                    self._end_after_error(preemption, error)
                raise
            finally:
                self._preemption = None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this run is closed")

    def _save_after(
        self, error: BaseException, state: Callable[[], dict[str, Any]], timeout_s: float
    ) -> str:
        """Saves the last completed step after an error of training, if possible.

        Returns the outcome as text.
        """
        with contextlib.suppress(CheckpointError):  # The step is not stored, so it is saved now.
            self._saves.settle(timeout_s)
        reason, step = self._boundary.reason_not_to_save(error), self._boundary.step
        if reason is not None or step is None:
            return reason or "nothing was saved after this error"
        failure = self._save_last(step, state, lambda: timeout_s)
        done = f"step {step} was {'not ' if failure else ''}saved after this error"
        return f"{done}: {failure}" if failure else done

    def _end_if_signalled(self, preemption: Preemption, *, is_last: bool = False) -> None:
        """If any rank has received a signal, saves the last step and ends the process (SystemExit).

        With ``is_last``, the ranks always exchange this, because their block ends.
        """
        step, failure = self._boundary.step, None
        if not (is_last or preemption.is_due(step)):
            return

        def own() -> bool:
            with contextlib.suppress(CheckpointError):  # The step is not on disk.
                self._saves.settle(preemption.left_s)
            if (pending := self._saves.pending) is not None:
                raise CheckpointError(f"step {pending} is still being saved")
            return step is None or (self._boundary.stored == step and self._boundary.is_on_disk)

        try:
            with self._group.method("check for a signal", self.timeout_s):
                if not preemption.check(step, self._group, self.timeout_s):
                    return
                is_saved = self._group.decide("ending", own, all, timeout_s=preemption.left_s)
            if step is not None and not is_saved:
                failure = self._save_last(step, preemption.state, lambda: preemption.left_s)
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
            _LOG.warning(
                "%s ends the training of %s: %s", preemption, self._disks[0].directory, outcome
            )
        try:
            self._saves.close_promotion(preemption.left_s)
        except CheckpointError as error:
            _LOG.warning("%s", error)
        preemption.end()

    def _end_after_error(self, preemption: Preemption, error: BaseException) -> None:
        """Waits for the background save after an error of training, if a signal ends the process.

        The ranks have no common step to save. Logs the error, since it may not be reported later.
        """
        if preemption.received is None or preemption.has_ended:
            return
        with contextlib.suppress(CheckpointError):
            self._saves.settle(preemption.left_s)
        message = "%s ends the training of %s after an error; no further step was saved"
        _LOG.warning(message, preemption, self._disks[0].directory, exc_info=error)

    def _save_last(
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
            # Otherwise the agent writes its newest step in memory: this one, or an older one.
            self._saves.discard_from_memory(lambda each: each <= step)
        except BaseException as error:  # Even an interrupt: the process ends in any case.
            return why(error)
        return None
