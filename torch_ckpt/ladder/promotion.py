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
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch_ckpt.agent.identity import id_in_directory
from torch_ckpt.commits.terms import Term, newest_term, superseded, term_of
from torch_ckpt.coordination.portable import why
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import (
    CancelledError,
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
    SupersededError,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import has_checkpoint
from torch_ckpt.ladder.failures import OnFailure, storage_failure
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.promotion_attempt import Attempt
from torch_ckpt.ladder.promotion_steps import Choice, Progress, PromotionSteps, Report
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import committed_steps, listed_steps, metrics_of
from torch_ckpt.records.record import Recorder, note, phase
from torch_ckpt.storage.copying import CheckpointCopy, is_of_another_save, is_whole_copy

__all__ = ["END_S", "Promotion"]

END_S = 5.0
"""Time for a promotion to end that was cancelled."""

_POLL_S = 0.5
"""Interval at which the coordinator asks whether the files of other places have arrived."""

MIN_OUTAGE_S = 1800.0
"""Failures in a row end training only if they have lasted this long: a store may be down."""

_LOG = logging.getLogger("torch_ckpt")


class Promotion:
    """Promotes the steps of a local directory, and removes them there.

    The newest step is first. A step that the retention of the run would remove is skipped. A local
    step is removed if ``keep`` newer ones are there, and the run has it whole or would not retain
    it. So the last whole copy of a retained step is never removed.

    If the ranks save at several places (``are_several``), the first rank at each has a promotion of
    the files there. The coordinator's commits when all files have arrived, and chooses the steps
    for all: the next one that is saved when no promotion is in progress, and those that have
    waited. A step of which the others have sent all, and files are missing, is passed over.

    If storage makes a promotion fail, the next one is tried after the next save. With ``"raise"``,
    or at failure number ``most`` in a row and after ``MIN_OUTAGE_S``, :meth:`check` returns why.

    Steps that the newest job of the run has not gone on from (``lineage``) are not promoted.

    ``run_id`` is the id that both directories have. A directory that another run has taken over is
    neither read nor written.

    ``count`` is the number of failures after which promotion went on. All methods are thread-safe.
    """

    def __init__(
        self,
        local: StepDirectories,
        run: StepDirectories,
        lineage: Lineage,
        retention: Retention,
        *,
        keep: int,
        nbytes_per_s: int,
        niceness: int,
        on_failure: OnFailure,
        most: int,
        commits: bool = True,
        are_several: bool = False,
        run_id: str | None = None,
    ) -> None:
        self._local, self._run, self._retention = local, run, retention
        self._here = f"machine {socket.gethostname()}, {local.directory}"
        self._lineage = lineage
        self._run_id = run_id
        self._commits, self._are_several = commits, are_several
        self._keep, self._nbytes_per_s, self._niceness = keep, nbytes_per_s, niceness
        self._on_failure, self._most = on_failure, most
        self._open_copy: Callable[..., CheckpointCopy] = CheckpointCopy
        self._recorder: Recorder | None = None
        self._changed = threading.Condition()
        self._steps = PromotionSteps(
            retention, self._local_value, self._check_local, are_several=are_several
        )
        self._is_requested = False
        self._is_ended = False
        self._thread: threading.Thread | None = None
        self._attempt: Attempt | None = None  # The one in progress.
        self._failure: CheckpointError | None = None  # Why the last promotion failed.
        self._in_a_row = 0
        self._failing_since = 0.0  # When the first failure in a row was.
        # Those of the other places since the last choice. There are none if there is one place.
        self._reports: Sequence[Report] | None = None if are_several else ()
        self._removing = threading.Lock()
        self.count = 0

    @property
    def skipped(self) -> int:
        """Number of steps that were not promoted, because newer ones had arrived."""
        return self._steps.skipped

    # ---- Called by the run ----

    def begin(
        self,
        in_run: Collection[int],
        terms: Mapping[int, int],
        passed_over: Collection[int],
        lineage: Term,
    ) -> None:
        """Begins with the committed steps ``in_run``; local ones that are ``passed_over`` remain.

        ``terms`` are those of local steps and of the run's, and ``lineage`` the newest one.
        """
        monitor = self._retention.monitor if self._commits else None
        values = {} if monitor is None else self._run.values(monitor)
        self._steps.found(in_run, values, terms)
        self._steps.pass_over(passed_over)
        self._steps.set_lineage(lineage)

    def start(
        self,
        open_copy: Callable[..., CheckpointCopy] = CheckpointCopy,
        recorder: Recorder | None = None,
    ) -> None:
        """Promotes the steps that a former process has left in the local directory.

        ``open_copy`` returns the copy of a step, with the arguments of :class:`CheckpointCopy`.
        """
        self._open_copy, self._recorder = open_copy, recorder
        if not self._are_several and committed_steps(self._local.directory):
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
            if choice.chosen and self._are_several:
                self._reports = None  # Those that arrive now precede the choice.
            return choice

    def report(self) -> Report:
        """Returns what the coordinator hears of the promotions of this place."""
        with self._changed:
            ended = self._steps.ended_here().items()
            return Report({s: text and f"{self._here}: {text}" for s, text in ended}, self._failure)

    def heard_from(self, reports: Sequence[Report]) -> None:
        """Takes the reports of all other places; called on the coordinator before it chooses."""
        with self._changed:
            if self._are_several:
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
            if isinstance(self._failure, StorageError):
                self._failure = None
            self._steps.choose(choice.chosen)
        self._request()

    def saving(self, step: int, choice: Choice) -> None:
        """Protects the directory of a step that is about to be saved, and chooses steps."""
        self.heard(choice)
        with self._changed:
            self._steps.set_lineage(self._lineage.term)
            self._steps.begin_save(step, choice.chosen)
            if choice.chosen and not self._commits:
                self._failure = None  # The coordinator knows it.

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
        """Passes over a step whose save has failed: perhaps it is committed at some places only."""
        if self._are_several:
            with self._changed:
                self._steps.pass_over([step])

    def is_awaited(self, step: int) -> bool:
        """Returns whether the newest local save of a step is still to be promoted."""
        with self._changed:
            return not self._steps.has_ended(step)

    def check(self) -> CheckpointError | None:
        """Returns why promotions have failed, once, if training must not go on; ``None`` if it may.

        Raises CheckpointError if another run has taken over the local directory, before a save goes
        there.
        """
        self._check_id(self._local.directory)
        with self._changed:
            failure = self._failure
            if failure is None or self._may_go_on():
                return None
            self._failure = None
        return failure

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
                if isinstance(self._failure, StorageError):
                    self._failure = None  # Perhaps of a step that is gone. The others are retried.
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
        self._remove_old(self._whole_in_run())
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
            attempt = self._attempt = Attempt(step, self._run.directory)
        for disk in (self._local, self._run):
            self._check_id(disk.directory)
        try:
            with self._recording(step):
                is_committed = self._copy(attempt)
            if not is_committed:
                return
        except SupersededError:
            self._lineage.check()  # Otherwise only the step is of a job that was superseded.
            with self._changed:
                self._steps.pass_over([step])
            return
        except (CorruptionError, NotFoundError) as error:
            is_gone = not has_checkpoint(self._local.path(step))
            if is_gone or isinstance(error, CorruptionError):
                with self._changed:
                    if not attempt.is_stopped:
                        self._steps.pass_over([step], why(error))
                if not self._commits or (is_gone and not self._are_several):
                    return  # The coordinator raises the problem.
            elif attempt.copy is None or not attempt.copy.is_of_source:
                return  # It was saved again. The new checkpoint is next.
            raise
        with self._changed:
            self._failure, self._in_a_row = None, 0
            if attempt.is_stopped:  # Perhaps the former checkpoint of the step was committed.
                return
            self._steps.promoted(step)
            # A newer step may have been promoted before.
            newest = self._steps.newest_in_run(step)
            wanted = self._steps.wanted(committed_steps(self._local.directory))
        if self._commits:
            self._apply_retention(newest, wanted)

    @contextlib.contextmanager
    def _recording(self, step: int) -> Iterator[None]:
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
        step = attempt.step
        copy = self._open_copy(
            *(self._local.path(step), self._run.path(step)),
            nbytes_per_s=self._nbytes_per_s,
            niceness=self._niceness,
            base=self._base_of(step),
        )
        with self._changed:
            attempt.copy = copy
        self._check_goes_on(attempt)
        if copy.is_done:
            return True
        self._check_lineage(step)
        copy.copy_files()
        note(bytes=copy.read_nbytes)
        if not self._commits:
            with self._changed:
                if not attempt.is_stopped:
                    self._steps.sent(step)
            return False
        copy.await_others(
            functools.partial(self._ended_elsewhere, step),
            functools.partial(self._check_goes_on, attempt, _POLL_S),
        )

        def check() -> None:
            self._check_lineage(step)
            copy.copy_small_files()

        copy.commit(check)
        return True

    def _base_of(self, step: int) -> Location | None:
        """Returns a step of the run from which a step may take files.

        It is none that the run has left, such as one that a restore has found damaged.
        """
        with self._changed:
            bases = self._steps.bases_in_run(step)
        newest = newest_term(self._run.directory)
        for base in bases:
            with contextlib.suppress(StorageError):
                if newest.has(base, term_of(path := self._run.path(base))):
                    return path
        return None

    def _check_lineage(self, step: int) -> None:
        """Raises SupersededError if a newer job of the run does not go on from a local step."""
        newest, term = newest_term(self._run.directory), term_of(self._local.path(step))
        if not newest.has(step, term) or term_of(self._run.path(step)) > term:
            raise superseded(self._run.directory, newest)

    def _ended_elsewhere(self, step: int) -> list[str] | None:
        """Returns why each other place sends no more files; ``None`` if one may send some."""
        with self._changed:
            if self._reports is None or not all(step in each.ended for each in self._reports):
                return None
            return [each.ended[step] for each in self._reports]

    def _check_goes_on(self, attempt: Attempt, wait_s: float = 0.0) -> None:
        """Raises CancelledError if the attempt is stopped, or is so within a while."""
        with self._changed:
            if self._changed.wait_for(lambda: attempt.is_stopped, wait_s):
                raise CancelledError(f"the promotion of step {attempt.step} was stopped")

    def _check_id(self, directory: Location) -> None:
        """Raises CheckpointError if a directory is not that of this run any more."""
        if self._run_id is None or (found := id_in_directory(directory)) == self._run_id:
            return
        now = "was removed or moved" if found is None else f"belongs to run {found} now"
        raise CheckpointError(
            f"cannot use {directory}: it {now}, and this run has the id {self._run_id}"
        )

    def _apply_retention(self, newest: int, wanted: Collection[int]) -> None:
        """Removes the steps of the run that are not to be retained.

        Some files of steps that are to be promoted may have arrived.
        """
        try:
            lineage = self._lineage.newest()
            self._retention.apply(self._run, newest, wanted, lineage=lineage)
            steps = listed_steps(self._run.directory)
        except CheckpointError as error:
            _LOG.warning("old steps were not removed from %s: %s", self._run.directory, error)
        else:
            with self._changed:
                self._steps.remain_in_run(steps)

    def _local_value(self, step: int) -> float:
        """Returns the metric of a local step; NaN if it has none."""
        return metrics_of(self._local.path(step)).get(self._retention.monitor or "", math.nan)

    def _check_local(self, step: int) -> None:
        """Raises CheckpointError if a local step is not whole."""
        self._local.check_whole(self._local.path(step))

    def _whole_in_run(self) -> set[int]:
        """Returns which promoted steps of those that need not remain the run has whole.

        The others are promoted again. Called by the thread: the storage of the run may not answer.
        """
        with self._changed:
            local = committed_steps(self._local.directory)
            promoted = self._steps.promoted_beyond(local, self._keep)
        whole = set()
        for step in promoted:
            source, target = self._local.path(step), self._run.path(step)
            try:
                for disk in (self._local, self._run):
                    self._check_id(disk.directory)
                if is_whole_copy(source, target):
                    whole.add(step)
                    continue
                is_other = is_of_another_save(source, target)
            except CheckpointError:  # It is unknown now.
                continue
            what = "is of another save now" if is_other else "has lost files, which are sent again"
            _LOG.warning("%s %s: %s remains", target, what, source)
            with self._changed:
                self._steps.lost_in_run(step, is_other=is_other)
        return whole

    def _remove_old(self, whole: Collection[int] = ()) -> None:
        """Removes local steps that need not remain, of promoted ones those ``whole`` in the run."""
        with self._removing:
            directory = self._local.directory
            try:
                self._lineage.check_here()
                with self._changed:
                    removable = self._steps.removable(
                        *(committed_steps(directory), listed_steps(directory)),
                        keep=self._keep,
                        in_use=None if self._attempt is None else self._attempt.step,
                        whole=whole,
                    )
                self._local.sweep()
                self._local.remove(removable)
            except CheckpointError as error:
                _LOG.warning("old steps were not removed from %s: %s", directory, error)

    def _may_go_on(self) -> bool:
        """Returns whether training goes on after failures. Requires: the caller holds the lock."""
        if isinstance(self._failure, SupersededError):
            return False
        is_short = time.monotonic() - self._failing_since < MIN_OUTAGE_S
        return self._on_failure == "warn" and (is_short or self._in_a_row < self._most)

    def _failed(self, error: Exception) -> None:
        """Records a failure. The next request tries again."""
        step = None if self._attempt is None else self._attempt.step
        message = f"step {step} was not promoted to {self._run.directory}: {why(error)}"
        storage = storage_failure(error)
        failure = CheckpointError(message)
        if isinstance(error, SupersededError):
            failure = SupersededError(message)
        if storage is not None:
            failure = StorageError(message, storage.errno)
        failure.__cause__ = error
        with self._changed:
            self._is_requested = False
            self._failure = failure
            if self._in_a_row == 0:
                self._failing_since = time.monotonic()
            self._in_a_row += 1
            if not self._may_go_on():
                return
            self.count += 1
            if self._in_a_row > 1:
                return
        _LOG.warning("%s; it is promoted after the next save", message)

    def bar(self) -> contextlib.AbstractContextManager[None]:
        """Shows how far the promotion in progress is, while the block waits for it."""
        attempt = self._attempt
        return contextlib.nullcontext() if attempt is None else attempt.bar()
