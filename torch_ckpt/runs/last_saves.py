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

        The last completed step is the one passed to the last call of :meth:`should_save` or
        :meth:`save`. Nothing is saved if this step is already saved, if a save or load raised the
        error, or if an optimizer of this process has begun another step, since the parameters may
        then be partly updated. State that changes before the optimizer runs (random states, data
        position, running means) is saved as it is when the block raises.

        All ranks must raise, as they do when a collective of training fails. If another rank does
        not raise within ``timeout_s``, nothing is saved. The exception of the block is always
        re-raised, with a note about the outcome. ``SystemExit``, ``GeneratorExit`` and exceptions
        in a forked child save nothing.

        Args:
            state: Function that returns the state to save.
            timeout_s: Longest time that this rank waits for the others, in seconds.

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
