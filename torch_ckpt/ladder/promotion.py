"""Promotion: copies steps from the local directory of a run to the directory of the run.

A save of such a run commits in the local directory, such as a local disk, and training goes on.
Each step is then copied to the directory of the run, such as a store, by the agent or else by a
thread. A step counts in either directory when it is whole there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence

from torch_ckpt.coordination.portable import why
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    SupersededError,
)
from torch_ckpt.formats.committed import has_checkpoint
from torch_ckpt.ladder.failures import OnFailure, PromotionFailures
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.old_steps import OldSteps
from torch_ckpt.ladder.promotion_attempt import Attempt
from torch_ckpt.ladder.promotion_steps import Choice, Progress, PromotionSteps, Report
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import committed_steps, listed_steps
from torch_ckpt.records.record import Recorder
from torch_ckpt.storage.copying import CheckpointCopy

__all__ = ["END_S", "Promotion"]

END_S = 5.0
"""Time for a promotion to end that was cancelled."""

_LOG = logging.getLogger("torch_ckpt")


class Promotion:
    """Promotes the steps of a local directory, and removes them there.

    The newest step is first. A step that the retention of the run would remove is skipped. A local
    step is removed if ``keep`` newer ones are there, and the run has it whole or would not retain
    it. So the last whole copy of a retained step is never removed.

    The first rank at each place has a promotion of the files there. The coordinator's commits when
    those of all ``others`` have arrived, and chooses the steps for all: the next one that is saved
    when no promotion is in progress, and those that have waited. A step of which the others have
    sent all, and files are missing, is passed over. ``steps`` are those of this place.

    If storage makes a promotion fail, the next one is tried after the next save. With ``"raise"``,
    or at failure number ``most`` in a row and after ``MIN_OUTAGE_S``, :meth:`check` returns why.

    Steps that the newest job of the run has not gone on from (``lineage``) are not promoted.

    ``run_id`` is the id that both directories have. A directory that another run has taken over is
    neither read nor written. All methods are thread-safe.
    """

    def __init__(
        self,
        local: StepDirectories,
        run: StepDirectories,
        lineage: Lineage,
        retention: Retention,
        steps: PromotionSteps,
        *,
        keep: int,
        nbytes_per_s: int,
        niceness: int,
        on_failure: OnFailure,
        most: int,
        commits: bool = True,
        others: int = 0,
        run_id: str | None = None,
    ) -> None:
        self._local, self._run, self._lineage = local, run, lineage
        self._here = f"machine {socket.gethostname()}, {local.directory}"
        self._commits, self._others = commits, others
        self._rate = {"nbytes_per_s": nbytes_per_s, "niceness": niceness}
        self._open_copy: Callable[..., CheckpointCopy]
        self._recorder: Recorder | None = None
        self._changed = threading.Condition()
        self._steps = steps
        self._is_requested = False
        self._is_ended = False
        self._thread: threading.Thread | None = None
        self._attempt: Attempt | None = None  # The one in progress.
        self._failures = PromotionFailures(run.directory, on_failure, most)
        self._old = OldSteps(
            local, run, lineage, retention, steps, self._changed, keep=keep, run_id=run_id
        )
        self._reports: Sequence[Report] = ()  # Those of the other places since the last choice.

    @property
    def skipped(self) -> int:
        """Number of steps that were not promoted, because newer ones had arrived."""
        return self._steps.skipped

    @property
    def count(self) -> int:
        """Number of failures after which promotion went on."""
        return self._failures.count

    # ---- Called by the run ----

    def start(
        self,
        open_copy: Callable[..., CheckpointCopy] = CheckpointCopy,
        recorder: Recorder | None = None,
    ) -> None:
        """Promotes the steps that a former process has left in the local directory.

        ``open_copy`` returns the copy of a step, with the arguments of :class:`CheckpointCopy`.
        """
        self._open_copy, self._recorder = functools.partial(open_copy, **self._rate), recorder
        with self._changed:
            if self._steps.next(committed_steps(self._local.directory)) is not None:
                self._request()

    def choice(self, saving: int | None = None, *, may_choose: bool = True) -> Choice:
        """Returns the steps that all places are to promote next, on the coordinator.

        ``saving`` is the step that is about to be saved. None is chosen then while other steps are
        being promoted. All places hear the choice: :meth:`saving`, :meth:`retry`, :meth:`heard`.
        """
        with self._changed:
            may_choose = may_choose and not (self._is_busy and saving is not None)
            local = committed_steps(self._local.directory) if may_choose else []
            choice = self._steps.choice(local, saving, may_choose=may_choose)
            if choice.chosen:
                self._reports = ()  # Those that arrive now precede the choice.
            return choice

    def report(self) -> Report:
        """Returns what the coordinator hears of the promotions of this place."""
        with self._changed:
            ended = self._steps.ended_here().items()
            last = self._failures.last
            return Report({s: text and f"{self._here}: {text}" for s, text in ended}, last)

    def heard_from(self, reports: Sequence[Report]) -> None:
        """Takes the reports of all other places; called on the coordinator before it chooses."""
        with self._changed:
            self._reports = reports
            for report in reports:
                if report.failure is not None and self._attempt is not None:
                    self._attempt.stop(report.failure)
            self._changed.notify_all()

    def heard(self, choice: Choice) -> None:
        """Ends the promotion of the steps that it has ended for the coordinator."""
        with self._changed:
            self._steps.reported(choice)
        if choice.committed and not self._commits:
            self._request()  # Its thread removes them.

    def retry(self, choice: Choice) -> None:
        """Promotes the steps that wait, at last those that the coordinator has chosen."""
        self.heard(choice)
        with self._changed:
            self._failures.retry()
            self._steps.choose(choice.chosen)
        self._request()

    def saving(self, step: int, choice: Choice) -> None:
        """Protects the directory of a step that is about to be saved, and chooses steps."""
        self.heard(choice)
        with self._changed:
            self._steps.set_lineage(self._lineage.term)
            self._steps.begin_save(step, choice.chosen)
            if choice.chosen and not self._commits:
                self._failures.last = None  # The coordinator knows it.

    def saved(self, step: int) -> None:
        """Promotes a step that was committed locally, and removes old local steps."""
        with self._changed:
            is_chosen = self._steps.saved(step)
            if self._attempt is not None and self._attempt.step == step:
                self._attempt.stop()  # The new checkpoint of the step is next.
                self._changed.notify_all()
        self._remove_old()
        if is_chosen or not self._commits:
            self._request()

    def not_saved(self, step: int) -> None:
        """Records that the save of a step has failed at this place."""
        with self._changed:
            self._steps.not_saved(step)

    def is_awaited(self, step: int) -> bool:
        """Returns whether the newest local save of a step is still to be promoted."""
        with self._changed:
            return not self._steps.has_ended(step)

    def check(self) -> CheckpointError | None:
        """Returns why promotions have failed, once, if training must not go on; ``None`` if it may.

        Raises CheckpointError if another run has taken over the local directory, before a save goes
        there.
        """
        self._old.check_ids(self._local)
        with self._changed:
            return self._failures.take()

    def progress(self, wait_s: float) -> Progress:
        """Waits for promotions; returns what is in progress, and how it is."""
        with self._changed:
            for pause_s in LongWait(self.awaited).rounds(wait_s):
                if self._changed.wait_for(lambda: not self._is_busy, pause_s):
                    break
            attempt = self._attempt
            done = None if attempt is None else (attempt.step, attempt.done_nbytes)
            awaited = f"{self._here}: {self.awaited()}" if self._is_busy else ""
            return Progress(awaited, done, self.report())

    @property
    def is_alone(self) -> bool:
        """Whether the ranks of no other place have a part in the promotions."""
        return not self._others

    def awaited(self) -> str:
        """Returns what the promotion in progress does, for the log of those who wait for it."""
        attempt, directory = self._attempt, self._run.directory
        return f"the promotion of steps to {directory}" if attempt is None else attempt.awaited()

    def cancel(self, wait_s: float = END_S, *, leaves: bool = True) -> bool:
        """Ends the promotion in progress. Its step remains in the local directory.

        The next process of the run promotes it. An agent may go on to copy its files, unless
        ``leaves`` is false. Returns whether the promotion has ended within ``wait_s``. A store that
        does not answer may keep it.
        """
        with self._changed:
            self._is_ended = True
            self._is_requested = False
            thread = self._thread
            if self._attempt is not None:
                self._attempt.stop(leaves=leaves)
            self._changed.notify_all()
        if thread is not None:
            for pause_s in LongWait(self.awaited).rounds(wait_s):
                thread.join(pause_s)
                if not thread.is_alive():
                    break
        atexit.unregister(self._at_exit)
        return thread is None or not thread.is_alive()

    def _at_exit(self, pid: int) -> None:
        if pid == os.getpid():  # A forked child has no such thread.
            self.cancel()

    @contextlib.contextmanager
    def discarding_after(self, step: int) -> Iterator[None]:
        """Stops promotions within the block, which removes the steps after a step.

        Raises CheckpointError if one cannot be stopped.
        """
        try:
            if not self.cancel(leaves=False):
                raise CheckpointError(
                    f"cannot stop the promotion of a step to {self._run.directory}, which does not "
                    "answer; nothing was removed there. Try again"
                )
            yield
        finally:
            # A step that could not be removed remains, and so does what is known of it.
            with contextlib.suppress(CheckpointError), self._changed:
                local, in_run = (listed_steps(d.directory) for d in (self._local, self._run))
                self._steps.forget(local, in_run)
            with self._changed:
                self._is_ended = False
                self._failures.retry()  # Perhaps it was of a step that is gone.
                if self._thread is not None and not self._thread.is_alive():
                    self._thread = None
            self._request()

    # ---- The thread ----

    @property
    def _is_busy(self) -> bool:
        return not self._is_ended and (self._is_requested or self._attempt is not None)

    def _request(self) -> None:
        with self._changed:
            if self._is_ended:
                return
            self._is_requested = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="torch_ckpt-promote", daemon=True
                )
                self._thread.start()
                # The interpreter must not end while native code of the thread runs.
                atexit.register(self._at_exit, os.getpid())
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._attempt = None
                self._changed.notify_all()
                while not self._is_requested and not self._is_ended:
                    self._changed.wait()
                if self._is_ended:
                    return
            try:
                self._promote_next()
            except Exception as error:
                if self._attempt is None or not self._attempt.is_stopped:
                    self._failed(error)
                elif self._attempt.failure is not None:  # It caused `error`.
                    self._failed(self._attempt.failure)

    def _promote_next(self) -> None:
        """Promotes one step; if there is none, ends the request."""
        self._remove_old(self._old.whole_in_run())
        with self._changed:
            local = committed_steps(self._local.directory)
            if lost := self._steps.lost(local):
                _LOG.warning(
                    "steps %s are not in %s any more, and were not promoted to %s",
                    *(sorted(lost), self._local.directory, self._run.directory),
                )
            step = self._steps.next(local)
            if step is None:
                self._is_requested = False
                return
            attempt = self._attempt = Attempt(step, self._local, self._run, self._changed)
        self._old.check_ids(self._local, self._run)
        try:
            with attempt.recorded(self._recorder):
                is_committed = self._copy(attempt)
            if not is_committed:
                return
        except SupersededError:
            self._lineage.check()  # Otherwise only the step is of a job that was superseded.
            with self._changed:
                self._steps.pass_over([step])
            return
        except (CorruptionError, NotFoundError) as error:
            if not has_checkpoint(self._local.path(step)):
                return  # It is lost, and passed over next.
            if isinstance(error, CorruptionError):
                with self._changed:
                    if not attempt.is_stopped:
                        self._steps.pass_over([step], why(error))
                if not self._commits:
                    return  # The coordinator raises the problem.
            elif attempt.copy is None or not attempt.copy.is_of_source:
                return  # It was saved again. The new checkpoint is next.
            raise
        with self._changed:
            self._failures.ended()
            if attempt.is_stopped:  # Perhaps the former checkpoint of the step was committed.
                return
            self._steps.promoted(step)
            # A newer step may have been promoted before.
            newest = self._steps.newest_in_run(step)
            wanted = self._steps.wanted(committed_steps(self._local.directory))
        if self._commits:
            self._old.remove_in_run(newest, wanted)

    def _remove_old(self, whole: Collection[int] = ()) -> None:
        """Removes local steps that need not remain, of promoted ones those ``whole`` in the run."""
        self._old.remove_here(lambda: None if self._attempt is None else self._attempt.step, whole)

    def _copy(self, attempt: Attempt) -> bool:
        """Copies a step; returns whether it is committed in the directory of the run.

        The coordinator commits it, once the files of all places have arrived.
        """
        with self._changed:
            bases = self._steps.bases_in_run(attempt.step)
        if attempt.copy_files(self._open_copy, bases):
            return True
        if self._commits:
            attempt.commit(functools.partial(self._ended_elsewhere, attempt.step))
            return True
        with self._changed:
            if not attempt.is_stopped:
                self._steps.sent(attempt.step)
        return False

    def _ended_elsewhere(self, step: int) -> list[str] | None:
        """Returns why each other place sends no more files; ``None`` if one may send some."""
        with self._changed:
            has_all = len(self._reports) == self._others
            if not has_all or not all(step in each.ended for each in self._reports):
                return None
            return [each.ended[step] for each in self._reports]

    def _failed(self, error: Exception) -> None:
        """Records a failure. The next request tries again."""
        with self._changed:
            self._is_requested = False
            step = None if self._attempt is None else self._attempt.step
            message = self._failures.add(step, error)
        if message is not None:
            _LOG.warning("%s; it is promoted after the next save", message)

    def bar(self) -> contextlib.AbstractContextManager[None]:
        """Shows how far the promotion in progress is, while the block waits for it."""
        attempt = self._attempt
        return contextlib.nullcontext() if attempt is None else attempt.bar()
