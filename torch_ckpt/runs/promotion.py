"""Promotion: copies steps from the local directory of a run to the directory of the run.

A save of such a run commits in the local directory, such as a local disk, and training goes on. A
thread then copies the step to the directory of the run, such as a store. A step counts in either
directory when it is whole there.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch_ckpt.agent.identity import id_in_directory
from torch_ckpt.coordination.portable import why
from torch_ckpt.errors import (
    CancelledError,
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id, has_checkpoint
from torch_ckpt.runs.failures import OnFailure, storage_failure
from torch_ckpt.runs.retention import Retention
from torch_ckpt.runs.step_directories import StepDirectories
from torch_ckpt.runs.step_files import (
    SMALL_FILES,
    committed_steps,
    listed_steps,
    metrics_of,
)
from torch_ckpt.storage.copying import CheckpointCopy
from torch_ckpt.storage.progress import progress_bar

__all__ = ["Promotion"]

_END_S = 5.0
"""Time for a promotion to end that was cancelled."""

_POLL_S = 0.5
"""Interval at which a place asks whether the files of others, or the commit, have arrived."""

_LOG = logging.getLogger("torch_ckpt")


class Promotion:
    """Promotes the steps of a local directory, and removes them there.

    The newest step is first. A step that the retention of the run would remove is skipped. A local
    step is removed if ``keep`` newer ones are there, and the step is promoted or not to be
    retained. So the last whole copy of a retained step is never removed.

    If the ranks save at several places, the first rank at each has a promotion of the files there.
    The coordinator's commits when all files have arrived, and chooses the steps for all: the next
    one that is saved when no promotion is in progress, and those that have waited.

    If storage makes a promotion fail, the next one is tried after the next save. With ``"raise"``,
    or at failure number ``most`` in a row, :meth:`check` raises.

    ``run_id`` is the id that both directories have. A directory that another run has taken over is
    neither read nor written.

    ``count`` is the number of failures after which promotion went on, and ``skipped`` that of steps
    that were not promoted, because newer ones had arrived. All methods are thread-safe.
    """

    def __init__(
        self,
        local: StepDirectories,
        run: StepDirectories,
        retention: Retention,
        *,
        keep: int,
        nbytes_per_s: int,
        niceness: int,
        on_failure: OnFailure,
        most: int,
        commits: bool = True,
        is_alone: bool = True,
        run_id: str | None = None,
    ) -> None:
        self._local, self._run, self._retention = local, run, retention
        self._run_id = run_id
        self._commits, self._is_alone = commits, is_alone
        self._keep, self._nbytes_per_s, self._niceness = keep, nbytes_per_s, niceness
        self._on_failure, self._most = on_failure, most
        self._changed = threading.Condition()
        self._is_requested = False
        self._is_ended = False
        self._thread: threading.Thread | None = None
        self._current: int | None = None  # The step that is being copied.
        self._copy: CheckpointCopy | None = None
        self._is_replaced = False  # Whether that step was saved again meanwhile.
        self._saved: int | None = None  # The last step that this process has saved.
        self._in_save: int | None = None  # Its small files may follow the commit.
        self._in_run: set[int] = set()  # Steps with a checkpoint in the directory of the run.
        self._promoted: set[int] = set()  # Local steps whose very save is there.
        self._passed_over: set[int] = set()  # Local steps that are damaged, or were skipped.
        self._values: dict[int, float] = {}  # Metrics of steps.
        self._failure: CheckpointError | None = None  # Why the last promotion failed.
        self._in_a_row = 0
        self._chosen: set[int] = set()  # Steps that were chosen before they were saved.
        self._sent: set[int] = set()  # Steps whose files of this place have arrived.
        self._incomplete: set[int] = set()  # Steps that not all places have.
        self._elsewhere: CheckpointError | None = None  # Why the one in progress cannot succeed.
        self._removing = threading.Lock()
        self._skipped: set[int] = set()
        self.count = 0

    @property
    def skipped(self) -> int:
        return len(self._skipped)

    # ---- Called by the run ----

    def begin(self, whole: Sequence[int] | None = None) -> None:
        """Looks up which steps there are. ``whole`` are those that all places have, if several.

        A step that another save has committed in the directory of the run stays there: which of the
        two is newer is unknown, since the run may have gone on from another local directory.
        """
        self._in_run = set(committed_steps(self._run.directory))
        if self._retention.monitor is not None and self._commits:
            self._values = self._run.values(self._retention.monitor)
        steps = committed_steps(self._local.directory)
        other = {
            step
            for step in self._in_run.intersection(steps)
            if committed_id(self._local.path(step)) != committed_id(self._run.path(step))
        }
        if other:
            _LOG.warning(
                "steps %s of %s are of other saves than those of %s, and are not promoted",
                *(sorted(other), self._local.directory, self._run.directory),
            )
        self._passed_over.update(other)
        if whole is not None:
            self._passed_over.update(steps)  # Until the coordinator chooses them.
            self._incomplete = set(steps).difference(whole) | other

    def start(self) -> None:
        """Promotes the steps that a former process has left in the local directory."""
        if self._is_alone and committed_steps(self._local.directory):
            self._request()

    def choice(self, saving: int | None = None) -> list[int]:
        """Returns the steps that all places are to promote next, on the coordinator.

        ``saving`` is the step that is about to be saved. It is not chosen while other steps are
        being promoted.
        """
        own = [] if saving is None else [saving]
        with self._changed:
            if self._is_alone:
                return own
            if self._is_busy and saving is not None:
                return []
            local = committed_steps(self._local.directory)
            done = self._promoted | self._incomplete | set(own)
            return own + [s for s in local if s in self._retained(local) and s not in done]

    def retry(self, chosen: Sequence[int]) -> None:
        """Promotes the steps that wait, at last those that the coordinator has ``chosen``."""
        with self._changed:
            if isinstance(self._failure, StorageError):
                self._failure = None
            if not self._is_alone:
                self._chosen.update(chosen)
                self._passed_over.difference_update(chosen)
        self._request()

    def saving(self, step: int, chosen: Sequence[int]) -> None:
        """Protects the directory of a step that is about to be saved, and chooses steps."""
        with self._changed:
            self._in_save = step
            if self._saved is not None:
                self._saved = min(self._saved, step - 1)
            if chosen:
                self._chosen = set(chosen)
                self._passed_over.difference_update(chosen)
                if not self._commits:
                    self._failure = None  # The coordinator knows it.
            else:
                self._chosen.discard(step)

    def saved(self, step: int) -> None:
        """Promotes a step that was committed locally, and removes old local steps."""
        with self._changed:
            self._saved, self._in_save = step, None
            for steps in (self._promoted, self._sent, self._passed_over, self._incomplete):
                steps.discard(step)
            self._values.pop(step, None)
            if step not in self._chosen:
                self._passed_over.add(step)
            replaced = None
            if self._current == step:
                self._is_replaced, replaced = True, self._copy
                self._changed.notify_all()
        if replaced is not None:
            replaced.cancel()  # The new checkpoint of the step is next.
        self._remove_old()
        if step in self._chosen:
            self._request()

    @property
    def failure(self) -> CheckpointError | None:
        """Why the last promotion failed; ``None`` if it did not."""
        with self._changed:
            return self._failure

    def failed_elsewhere(self, failure: CheckpointError) -> None:
        """Ends the promotion in progress, since another place cannot send its files."""
        with self._changed:
            copy = self._copy
            if self._current is not None and self._elsewhere is None:
                self._elsewhere = failure
                self._changed.notify_all()
        if copy is not None:
            copy.cancel()

    def check(self) -> None:
        """Raises CheckpointError if promotions have failed, and training must not go on.

        So it does if another run has taken over the local directory, before a save goes there.
        """
        self._check_id(self._local.directory)
        with self._changed:
            failure = self._failure
            if failure is None or not (self._on_failure == "raise" or self._in_a_row >= self._most):
                return
            self._failure = None  # Is raised once.
        raise CheckpointError(str(failure)) from failure  # No failure of the save that asks.

    def progress(self, wait_s: float) -> tuple[bool, CheckpointError | None]:
        """Waits a moment; returns whether promotions are in progress, and why the last failed."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while self._is_busy and self._failure is None and time.monotonic() < deadline:
                self._changed.wait(max(deadline - time.monotonic(), 0.001))
            return self._is_busy, self._failure

    def wait(self, timeout_s: float = math.inf) -> None:
        """Waits until all steps are promoted, or were skipped; tries those that have failed again.

        Raises CheckpointError if a promotion has failed, or is in progress after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        self._request()
        with self._changed:
            while self._is_busy:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise CheckpointError(
                        f"step {self._current} is still being promoted to {self._run.directory} "
                        f"after a wait of {timeout_s:g} s"
                    )
                self._changed.wait(min(left_s, 3600.0))
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, timeout_s: float = math.inf) -> None:
        """Promotes what can be promoted within ``timeout_s``, and ends.

        Shows a progress bar. Raises CheckpointError as :meth:`wait` does. The steps then remain in
        the local directory, and the next process of the run promotes them. With several places, the
        caller has waited before: the files of another place may never arrive.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if self._is_alone:
                with self._bar():
                    self.wait(timeout_s)
        finally:
            self.cancel(max(min(deadline - time.monotonic(), _END_S), 0.1))

    def cancel(self, wait_s: float = _END_S) -> bool:
        """Ends the promotion in progress. Its step remains in the local directory.

        Returns whether it has ended within ``wait_s``. A store that does not answer may keep it.
        """
        with self._changed:
            self._is_ended = True
            self._is_requested = False
            thread, copy = self._thread, self._copy
            self._changed.notify_all()
        if copy is not None:
            copy.cancel()
        if thread is not None:
            thread.join(wait_s)
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
            if not self.cancel():
                raise CheckpointError(
                    f"cannot stop the promotion of a step to {self._run.directory}, which does not "
                    "answer; nothing was removed there. Try again"
                )
            yield
        finally:
            with self._changed:
                for steps in (self._in_run, self._promoted, self._passed_over, self._sent):
                    steps.difference_update({each for each in steps if each > step})
                self._is_ended = False
                if self._thread is not None and not self._thread.is_alive():
                    self._thread = None
            self._request()

    # ---- The thread ----

    @property
    def _is_busy(self) -> bool:
        return not self._is_ended and (self._is_requested or self._current is not None)

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
                self._current = self._copy = None
                self._is_replaced = False
                self._changed.notify_all()
                while not self._is_requested and not self._is_ended:
                    self._changed.wait()
                if self._is_ended:
                    return
                self._elsewhere = None
            try:
                self._promote_next()
            except CancelledError:
                with self._changed:
                    elsewhere = self._elsewhere
                if elsewhere is not None:
                    self._failed(elsewhere)
            except Exception as error:
                self._failed(error)

    def _promote_next(self) -> None:
        """Promotes one step; if there is none, ends the request."""
        with self._changed:
            step = self._choose()
            if step is None:
                self._is_requested = False
                return
            self._current = step
        source, target = self._local.path(step), self._run.path(step)
        for disk in (self._local, self._run):
            self._check_id(disk.directory)
        copy: CheckpointCopy | None = None
        try:
            copy = CheckpointCopy(
                source, target, nbytes_per_s=self._nbytes_per_s, niceness=self._niceness
            )
            with self._changed:
                self._copy = copy
                if self._is_ended or self._is_replaced:
                    return
            if not copy.is_done:
                if self._commits:
                    copy.copy_files(SMALL_FILES)
                    self._wait_for_others(copy)
                    copy.commit()
                else:
                    self._send(step, copy)
                    return
        except (CorruptionError, NotFoundError) as error:
            is_gone = not has_checkpoint(source)
            is_of_source = copy is not None and copy.is_of_source
            if isinstance(error, NotFoundError) and not (is_gone or is_of_source):
                return  # It was saved again. The new checkpoint is next.
            if is_gone or isinstance(error, CorruptionError):
                with self._changed:
                    self._passed_over.add(step)
            if is_gone:
                return
            raise
        with self._changed:
            self._failure, self._in_a_row = None, 0
            if not self._is_replaced:
                self._promoted.add(step)
            self._in_run.add(step)
            # A newer step may have been promoted before.
            newest = max(s for s in self._in_run if s <= (self._saved or s) or s == step)
            local = committed_steps(self._local.directory)
            waiting = self._chosen.union(self._retained(local).intersection(local))
        if self._commits:
            self._apply_retention(newest, waiting)
        with self._changed:
            self._current = None
        self._remove_old()

    def _wait_for_others(self, copy: CheckpointCopy) -> None:
        """Waits, on the coordinator, until the files of all places have arrived."""
        while not self._is_alone and copy.missing_files():
            with self._changed:
                if self._is_ended or self._is_replaced:
                    raise CancelledError("the promotion was given up")
                if self._elsewhere is not None:
                    raise self._elsewhere
                self._changed.wait(_POLL_S)

    def _send(self, step: int, copy: CheckpointCopy) -> None:
        """Sends the files of this place. Later calls wait a moment for the coordinator's commit.

        The coordinator may commit another step first. So all chosen steps are sent at once.
        """
        if step not in self._sent:
            copy.copy_files()
        with self._changed:
            if step in self._sent:
                self._changed.wait(_POLL_S)
            if not self._is_replaced:
                self._sent.add(step)

    def _check_id(self, directory: Location) -> None:
        """Raises CheckpointError if a directory is not that of this run any more."""
        if self._run_id is None or (found := id_in_directory(directory)) == self._run_id:
            return
        now = "was removed or moved" if found is None else f"belongs to run {found} now"
        raise CheckpointError(
            f"cannot use {directory}: it {now}, and this run has the id {self._run_id}"
        )

    def _apply_retention(self, newest: int, waiting: Collection[int]) -> None:
        """Removes the steps of the run that are not to be retained.

        Some files of steps that wait to be promoted may have arrived.
        """
        try:
            self._retention.apply(self._run, newest, waiting)
            steps = listed_steps(self._run.directory)
        except CheckpointError as error:
            _LOG.warning("old steps were not removed from %s: %s", self._run.directory, error)
        else:
            with self._changed:
                self._in_run.intersection_update(steps)

    def _choose(self) -> int | None:
        """Returns the next step to promote: the newest that the run would retain."""
        local = committed_steps(self._local.directory)
        done = self._promoted | self._passed_over
        waiting = [step for step in local if step not in done and step != self._in_save]
        if not self._is_alone:
            chosen = [step for step in waiting if step in self._chosen]
            return next((s for s in chosen if s not in self._sent), next(iter(chosen), None))
        retained = self._retained(local)
        for step in waiting:
            if step in retained:
                return step
            self._passed_over.add(step)
            self._skipped.add(step)
        return None

    def _retained(self, local: Iterable[int]) -> set[int]:
        """Returns which steps the run retains, of those in either directory."""
        steps = self._in_run.union(local)
        if self._saved is not None:  # Newer steps are of a branch that the run has left.
            steps = {step for step in steps if step <= self._saved}
        monitor = self._retention.monitor
        if monitor is not None and self._retention.keep_best is not None:
            for step in set(local).difference(self._values):
                self._values[step] = metrics_of(self._local.path(step)).get(monitor, math.nan)
        values = {step: value for step, value in self._values.items() if not math.isnan(value)}
        return self._retention.retained(steps, values)

    def _remove_old(self) -> None:
        """Removes local steps that need not remain."""
        with self._removing:
            with self._changed:
                saved, current = self._saved, self._current
                if saved is None:
                    return
                committed = [s for s in committed_steps(self._local.directory) if s <= saved]
                retained = self._retained(committed)
                needed = {
                    *committed[: self._keep],
                    *(s for s in committed if s in retained and s not in self._promoted),
                    *(() if current is None else (current,)),
                    # Other places promote these as well.
                    *(() if self._is_alone else self._chosen - self._promoted),
                }
                self._skipped.update(set(committed) - needed - self._promoted)
            try:
                self._local.sweep()
                self._local.remove(
                    [
                        s
                        for s in listed_steps(self._local.directory)
                        if s <= saved and s not in needed
                    ]
                )
            except CheckpointError as error:
                _LOG.warning("old steps were not removed from %s: %s", self._local.directory, error)

    def _failed(self, error: Exception) -> None:
        """Records a failure. The next request tries again."""
        message = f"step {self._current} was not promoted to {self._run.directory}: {why(error)}"
        storage = storage_failure(error)
        failure = CheckpointError(message)
        if storage is not None:
            failure = StorageError(message, storage.errno)
        failure.__cause__ = error
        with self._changed:
            self._is_requested = False
            self._failure = failure
            self._in_a_row += 1
            if self._on_failure == "raise" or self._in_a_row >= self._most:
                return
            self.count += 1
            if self._in_a_row > 1:
                return
        _LOG.warning("%s; it is promoted after the next save", message)

    @contextlib.contextmanager
    def _bar(self) -> Iterator[None]:
        copy = self._copy
        if copy is None:
            yield
            return
        with progress_bar(
            "promoting", self._run.directory, lambda: copy.nbytes, lambda: copy.read_nbytes
        ):
            yield
