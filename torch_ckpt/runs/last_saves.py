"""LastSaves: the methods of a run that save the last step when training ends early."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_ckpt.coordination.exclusive import Exclusive
from torch_ckpt.coordination.group import Group
from torch_ckpt.runs.ending import Ending
from torch_ckpt.runs.preemption import Preemption
from torch_ckpt.runs.step_boundary import StepBoundary

__all__ = ["LastSaves"]


class LastSaves:
    """The part of :class:`~torch_ckpt.runs.run.Run` that saves after an error or a signal."""

    timeout_s: float
    _group: Group
    _exclusive: Exclusive
    _boundary: StepBoundary
    _ending: Ending
    _closed: bool
    _preemption: Preemption | None  # Within a block of saving_on_signal.

    @contextlib.contextmanager
    def saving_on_exception(
        self, state: Callable[[], dict[str, Any]], *, timeout_s: float = 30.0
    ) -> Iterator[None]:
        """Saves the last completed step if the block raises.

        The last completed step is that of the last call of :meth:`should_save` or :meth:`save`.
        Nothing is saved if that step is already saved, if the error is from a save or load, or if
        an optimizer of this process has begun another step: the parameters may then be partly
        updated. State that changes before the optimizer does (random states, data position, running
        means) is saved as it is when the block raises.

        All ranks must raise, as they do when a collective of training fails. If another rank does
        not raise within ``timeout_s``, nothing is saved. The exception of the block is always
        raised, with a note about the outcome. ``SystemExit`` and ``GeneratorExit`` save nothing,
        nor does an exception in a forked child.

        Args:
            state: Returns the state to save.
            timeout_s: Seconds that this rank waits for the others.

        Example::

            with run.saving_on_exception(lambda: training.state_dict()):
                train()
        """
        self._check_open()
        try:
            with self._boundary.watching_optimizers():
                yield
        except (SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            if not self._exclusive.is_forked:
                error.add_note(f"torch_ckpt: {self._ending.save_after(error, state, timeout_s)}")
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

        Schedulers send a signal before they kill a job: SIGTERM by default in Slurm, Kubernetes and
        ``torchrun``. The signal may arrive at one rank only. Within the block,
        :meth:`should_save` lets the ranks agree on the step: after each step, or after at most 16
        steps if these take less than a second. So does the end of the block. The step is then saved
        to disk, on all ranks, and ``SystemExit`` is raised with the status of a process that the
        signal ended, such as 143. If the step cannot be saved in time, the reason is logged.

        All ranks enter the block at the same step, in their main threads, call :meth:`should_save`
        after every step, and leave the block at the same step. If the block raises something else
        after a signal, the background save is waited for, and the signal is sent again. Child
        processes that are forked within the block get the signal as before.

        Args:
            state: Returns the state to save.
            grace_s: Seconds from the signal until the scheduler kills the process; 30 by default in
                Slurm (``KillWait``), Kubernetes and ``torchrun``.
            signals: The signals, such as ``signal.SIGUSR1`` for ``sbatch --signal=USR1@60``.

        Raises:
            RuntimeError: This run, or another one of this process, is within such a block.
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
                        self._ending.end_if_signalled(preemption, is_last=True)
            except BaseException as error:
                if not self._exclusive.is_forked:
                    self._ending.end_after_error(preemption, error)
                raise
            finally:
                self._preemption = None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this run is closed")
