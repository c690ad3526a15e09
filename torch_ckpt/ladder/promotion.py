"""Promotion: copies steps from the local directory of a run to the directory of the run.

A save of such a run commits in the local directory, such as a local disk, and training continues.
The agent, or a thread if no agent runs, then copies each step to the directory of the run, such as
a store. A step that is whole in either directory counts.

``Promotion._promote_next`` promotes one step. Except when a run goes back, only
``OldSteps.remove_local`` removes local steps: after each save, and before each promotion.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from errno import EEXIST

from torch_ckpt.agent.identity import NO_ID, check_owner
from torch_ckpt.coordination.portable import why
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
    SupersededError,
)
from torch_ckpt.formats.committed import has_checkpoint
from torch_ckpt.ladder.failures import PromotionFailures, sweep_if_full
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.promotion_attempt import Attempt
from torch_ckpt.ladder.promotion_steps import Choice, Progress, PromotionSteps, Report
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import committed_steps, listed_steps
from torch_ckpt.records.figures import nbytes_text
from torch_ckpt.records.record import Recorder, phase
from torch_ckpt.storage.copying import CheckpointCopy, is_of_another_save, is_whole_copy
from torch_ckpt.storage.progress import progress_bar

__all__ = ["END_S", "OldSteps", "Promotion"]

END_S = 5.0  # Time for a cancelled promotion to end.

_LOG = logging.getLogger("torch_ckpt")


class OldSteps:
    """Removes local steps, and those of the run, while others are promoted. Thread-safe.

    A local step is removed if ``keep`` newer ones exist, and the run has it whole or would not
    retain it. So the last whole copy of a retained step is never removed. A job that has not saved,
    such as an evaluation, removes nothing: the retention of the training decides.

    ``run_id`` is the id of both directories. A directory that another run has taken over is neither
    read nor written; ``tie`` restores the id of the local one if it was removed. Accesses to
    ``steps`` require the lock of ``changed``.
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
        run_id: str,
        tie: Callable[[], None],
    ) -> None:
        self._local, self._run, self._lineage = local, run, lineage
        self._retention, self._steps = retention, steps
        self._keep, self._run_id, self._tie = keep, run_id, tie
        self.changed = self._changed = threading.Condition()
        self._removing = threading.Lock()
        self._promoted: int | None = None  # The last one, until old steps of the run are removed.

    def check_ids(self, *disks: StepDirectories) -> None:
        """Raises CheckpointError if another run owns a directory; ties a removed local one."""
        for disk in disks:
            is_local = disk is self._local
            found = check_owner(disk.directory, self._run_id, may_be_gone=is_local)
            if is_local:
                self._tie()
                if found is None:
                    _LOG.warning("%s %s: it is used again", disk.directory, NO_ID)

    def whole_in_run(self) -> set[int]:
        """Returns the promoted, no longer needed local steps that are whole in the run.

        Other such steps are promoted again. Called by the thread, because storage may not answer.
        """
        self._steps.examine()
        with self._changed:
            local = committed_steps(self._local.directory)
            promoted = self._steps.promoted_beyond(local, self._keep)
        whole = set()
        for step in promoted:
            source, target = self._local.path(step), self._run.path(step)
            try:
                self.check_ids(self._local, self._run)
                if is_whole_copy(source, target):
                    whole.add(step)
                    continue
                is_other = is_of_another_save(source, target)
            except CheckpointError:  # Unknown now.
                continue
            what = "is of another save now" if is_other else "has lost files, which are sent again"
            _LOG.warning("%s %s: %s remains", target, what, source)
            with self._changed:
                self._steps.lost_in_run(step, is_other=is_other)
        return whole

    def remove_local(self, whole: Collection[int] = ()) -> None:
        """Removes unneeded local steps; promoted ones only if they are ``whole`` in the run."""
        if not self._lineage.term.number:
            return
        with self._removing:
            directory = self._local.directory
            try:
                self._lineage.check_here()
                with self._changed:
                    removable = self._steps.removable(
                        *(committed_steps(directory), listed_steps(directory)),
                        keep=self._keep,
                        whole=whole,
                    )
                self._local.sweep(self._lineage.term.number)
                self._local.remove(removable)
            except CheckpointError as error:
                _LOG.warning("old steps were not removed from %s: %s", directory, error)

    def remove_in_run(self, promoted: int | None = None) -> None:
        """Removes the steps of the run that retention does not retain, after a promotion.

        Before the first save of this job, it only remembers the step, for a later call without one.
        """
        directory = self._run.directory
        with self._changed:
            promoted = self._promoted = self._promoted if promoted is None else promoted
            if promoted is None or not self._lineage.term.number:
                return
            self._promoted = None
            newest = self._steps.newest_in_run(promoted)  # It may have been promoted before.
            # Files of these steps, which will be promoted, may have arrived already.
            wanted = self._steps.wanted(committed_steps(self._local.directory))
        try:
            lineage = self._lineage.newest()
            self._retention.apply(self._run, newest, wanted, lineage=lineage)
            steps = listed_steps(directory)
        except CheckpointError as error:
            _LOG.warning("old steps were not removed from %s: %s", directory, error)
        else:
            with self._changed:
                self._steps.remain_in_run(steps)

    def warn_of_lost(self, terms: Mapping[int, int]) -> None:
        """Warns of lost local steps, with their terms, except those that the run has."""
        if not self._lineage.term.number:  # Before that, another job may remove steps.
            return
        lost = []
        for step, term in sorted(terms.items()):
            is_in_run = False
            with contextlib.suppress(CheckpointError):  # Perhaps it cannot be read now.
                is_in_run = has_checkpoint(self._run.path(step)) and self._run.term_of(step) >= term
            if not is_in_run:
                lost.append(step)
        if lost:
            _LOG.warning(
                "steps %s are not in %s any more, and were not promoted to %s",
                *(lost, self._local.directory, self._run.directory),
            )

    def continue_after(self, error: NotFoundError | StorageError, attempt: Attempt) -> None:
        """Continues with the next promotion if another save or job has caused an error.

        Raises SupersededError if that is a newer job, and the error itself if there is none.
        """
        is_absent, term = isinstance(error, NotFoundError), self._lineage.term.number
        with contextlib.suppress(NotFoundError, StorageError):
            self._lineage.check()
            if is_absent and not has_checkpoint(self._local.path(attempt.step)):
                return  # It is lost, and passed over next.
            if is_absent and (attempt.copy is None or not attempt.copy.is_of_source):
                return  # It was saved again. The new checkpoint is next.
            self.check_ids(self._run)
            if (is_absent or error.errno == EEXIST) and attempt.is_ended_by_another():
                if not term:  # Training decides which steps remain.
                    with self._changed:
                        self._steps.pass_over([attempt.step])
                return  # Otherwise it is tried again: this save is newer.
        if term:
            sweep_if_full(self._run, error, term)
        raise error


class Promotion:
    """Promotes the steps of a local directory, newest first, and removes them there.

    The first rank at each place runs a promotion of the files there. The coordinator commits a step
    once the files of all ``others`` have arrived. It also chooses the steps for all places: the
    next step saved while no promotion is in progress, and steps that wait, unless retention would
    remove them. A step is passed over if files are missing after all other places have sent theirs.
    ``steps`` are those at this place.

    If a promotion fails because of storage, the next attempt follows the next save. ``failures``
    decides when training must stop: :meth:`check` then returns the reason.

    Promotes only steps on the ``lineage`` of the newest job of the run. Thread-safe.
    """

    def __init__(
        self,
        local: StepDirectories,
        run: StepDirectories,
        lineage: Lineage,
        steps: PromotionSteps,
        old: OldSteps,
        failures: PromotionFailures,
        *,
        commits: bool = True,
        others: int = 0,
    ) -> None:
        self._local, self._run, self._lineage = local, run, lineage
        self._steps, self._old, self._failures = steps, old, failures
        self.check_owner = functools.partial(old.check_ids, local)
        self._commits, self._others = commits, others
        self.is_alone = not others  # Whether no other place takes part in the promotions.
        self._here = f"machine {socket.gethostname()}, {local.directory}"
        self._open_copy: Callable[..., CheckpointCopy]
        self._recorder: Recorder | None = None
        self._changed = old.changed
        self._is_requested = self._is_ended = False
        self._thread: threading.Thread | None = None
        self._attempt: Attempt | None = None  # The one in progress.
        self._reports: Sequence[Report] = ()  # From the other places, since the last choice.

    @property
    def skipped(self) -> int:
        """Number of steps that were not promoted, because newer ones had arrived."""
        return self._steps.skipped

    @property
    def count(self) -> int:
        """Number of failures after which promotion continued."""
        return self._failures.count

    # ---- Called by the run ----

    def start(self, open_copy: Callable[..., CheckpointCopy], recorder: Recorder | None) -> None:
        """Promotes the steps that a former process has left in the local directory.

        ``open_copy`` returns the copy of a step: of its directory to another one, from a ``base``.
        """
        self._open_copy, self._recorder = open_copy, recorder
        with self._changed:
            if self._steps.next(committed_steps(self._local.directory)) is not None:
                self._request()

    def choice(self, saving: int | None = None, *, may_choose: bool = True) -> Choice:
        """Returns the steps that all places must promote next. Called on the coordinator.

        ``saving`` is the step that is about to be saved: no step is chosen for it while others are
        being promoted. Every place receives the choice, by :meth:`saving`, :meth:`retry` or
        :meth:`heard`.
        """
        with self._changed:
            may_choose = may_choose and not (self._is_busy and saving is not None)
            local = committed_steps(self._local.directory) if may_choose else []
            choice = self._steps.choice(local, saving, may_choose=may_choose)
            if choice.chosen:
                self._reports = ()  # Reports that arrive now precede the choice.
            return choice

    def report(self) -> Report:
        """Returns the report on the promotions of this place for the coordinator."""
        with self._changed:
            ended = self._steps.ended_here().items()
            last = self._failures.last
            return Report({s: text and f"{self._here}: {text}" for s, text in ended}, last)

    def heard_from(self, reports: Sequence[Report]) -> None:
        """Receives the reports of all other places. Called on the coordinator before it chooses."""
        with self._changed:
            self._reports = reports
            for report in reports:
                if report.failure is not None and self._attempt is not None:
                    self._attempt.stop(report.failure)
            self._changed.notify_all()

    def heard(self, choice: Choice) -> None:
        """Ends the promotion of the steps that the coordinator has committed or passed over."""
        with self._changed:
            self._steps.reported(choice)
        if choice.committed and not self._commits:
            self._request()  # Its thread removes them.

    def retry(self, choice: Choice) -> None:
        """Promotes the waiting steps, including those that the coordinator has chosen."""
        self.heard(choice)
        with self._changed:
            self._failures.retry()
            self._steps.choose(choice.chosen)
        self._request()

    def saving(self, step: int, choice: Choice) -> None:
        """Protects the directory of a step that is about to be saved, and chooses steps."""
        self.heard(choice)
        if not self._steps.has_begun:  # The first save needs the space of interrupted removals.
            self._old.remove_local()
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
        self._old.remove_local()
        if is_chosen or not self._commits:
            self._request()

    def not_saved(self, step: int) -> None:
        """Records that the save of a step has failed at this place: perhaps its disk is full."""
        with self._changed:
            self._steps.not_saved(step)
        self._request()

    def is_awaited(self, step: int) -> bool:
        """Returns whether the promotion of the newest local save of a step is pending."""
        with self._changed:
            return not self._steps.has_ended(step)

    def check(self) -> CheckpointError | None:
        """Returns why promotions have failed, once, if training must stop; otherwise ``None``."""
        with self._changed:
            return self._failures.take()

    def progress(self, wait_s: float) -> Progress:
        """Waits for promotions; returns their progress."""
        with self._changed:
            for pause_s in LongWait(self.awaited).rounds(wait_s):
                if self._changed.wait_for(lambda: not self._is_busy, pause_s):
                    break
            copy = None if (attempt := self._attempt) is None else attempt.copy
            done = None if attempt is None else (attempt.step, copy.done_nbytes if copy else 0)
            awaited = f"{self._here}: {self.awaited()}" if self._is_busy else ""
            return Progress(awaited, done, self.report())

    def awaited(self) -> str:
        """Describes the promotion in progress or next, for the log of a wait for it."""
        with self._changed:
            copy = None if self._attempt is None else self._attempt.copy
            step = self._steps.newest_waiting() if self._attempt is None else self._attempt.step
        copied = "" if copy is None else f", {nbytes_text(copy.done_nbytes)} copied"
        what = "steps" if step is None else f"step {step}"
        return f"the promotion of {what} to {self._run.directory}{copied}"

    def bar(self) -> contextlib.AbstractContextManager[None]:
        """Shows the progress of the promotion while the block waits for it."""
        copy = None if self._attempt is None else self._attempt.copy
        if copy is None:
            return contextlib.nullcontext()
        nbytes, done = (lambda: copy.nbytes), (lambda: copy.done_nbytes)
        return progress_bar("promoting", self._run.directory, nbytes, done)

    def cancel(self, wait_s: float = END_S, *, leaves: bool = True) -> bool:
        """Ends the promotion in progress. Its step remains in the local directory.

        The next process of the run promotes the step. Unless ``leaves`` is false, an agent may
        continue to copy its files. Returns whether the promotion has ended within ``wait_s``; it
        may not end while a store does not answer.
        """
        with self._changed:
            self._is_ended, self._is_requested = True, False
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
            # Facts about a step remain if it could not be removed.
            with contextlib.suppress(CheckpointError), self._changed:
                local, in_run = (listed_steps(d.directory) for d in (self._local, self._run))
                self._steps.forget(local, in_run)
            with self._changed:
                self._is_ended = False
                self._failures.retry()  # It may be about a removed step.
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
                thread = threading.Thread(target=self._work, name="torch_ckpt-promote", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # The system has no more threads.
                    self._failed(StorageError(str(error)))
                    return
                self._thread = thread
                # The interpreter must not end while native code of the thread runs.
                atexit.register(self._at_exit, os.getpid())
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._attempt = self._steps.in_progress = None
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

    def _failed(self, error: Exception) -> None:
        """Records a failure. The next request tries again."""
        with self._changed:
            self._is_requested = False
            step = self._steps.newest_waiting() if self._attempt is None else self._attempt.step
            message = self._failures.add(step, error)
        if message is not None:
            _LOG.warning("%s; the promotion is retried after the next save", message)

    # ---- One step ----

    def _promote_next(self) -> None:
        """Promotes one step; ends the request if no step waits."""
        self._old.remove_local(self._old.whole_in_run())
        if self._commits:
            self._old.remove_in_run()
        with self._changed:
            local = committed_steps(self._local.directory)
            lost = self._steps.lost(local)
        self._old.warn_of_lost(lost)
        with self._changed:
            step = None if self._is_ended else self._steps.next(local)
            if step is None:
                self._is_requested = False
                return
            attempt = self._attempt = Attempt(step, self._local, self._run, self._changed)
            self._steps.in_progress = step
        self._old.check_ids(self._local, self._run)
        try:
            with self._recorded(step):
                if not self._copy(attempt):
                    return
        except SupersededError:
            self._lineage.check()  # If this passes, only the step's job was superseded.
            with self._changed:
                self._steps.pass_over([step])
            return
        except CorruptionError as error:
            if not has_checkpoint(self._local.path(step)):
                return  # It is lost, and passed over next.
            with self._changed:
                self._steps.pass_over([] if attempt.is_stopped else [step], why(error))
            if not self._commits:
                return  # The coordinator raises the problem.
            with contextlib.suppress(NotFoundError, StorageError):
                self._lineage.check()  # A newer job may have removed its files.
            raise
        except (NotFoundError, StorageError) as error:
            self._old.continue_after(error, attempt)
            return
        with self._changed:
            self._failures.ended()
            if attempt.is_stopped:  # The former checkpoint of the step may have been committed.
                return
            self._steps.promoted(step)
        if self._commits:
            self._old.remove_in_run(step)

    @contextlib.contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        """Records the block as the promotion of a step."""
        if self._recorder is None:
            yield
            return
        record = self._recorder.save_of(step)
        try:
            with record.current(), phase("promote"):
                yield
        finally:
            record.end()

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
        """Returns why each other place sends no more files; ``None`` while one may."""
        with self._changed:
            has_all = len(self._reports) == self._others
            if not has_all or not all(step in each.ended for each in self._reports):
                return None
            return [each.ended[step] for each in self._reports]
