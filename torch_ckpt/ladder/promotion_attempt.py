"""Attempt: one promotion of one step, from the local directory of a run to that of the run."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence

from torch_ckpt.commits.terms import Term, newest_term, superseded, term_of
from torch_ckpt.errors import CancelledError, CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.records.record import note
from torch_ckpt.storage.copying import CheckpointCopy

__all__ = ["Attempt"]

_POLL_S = 0.5  # Interval at which the coordinator checks for files of other places.


class Attempt:
    """The promotion of a step that is in progress, from a local directory to that of the run.

    It is stopped if the step was saved again, the run ends, or another place cannot send its files
    (``failure``). The caller of :meth:`stop` holds ``changed``, and notifies it.
    """

    def __init__(
        self,
        step: int,
        local: StepDirectories,
        run: StepDirectories,
        changed: threading.Condition,
    ) -> None:
        self.step, self._run, self._changed = step, run, changed
        self._source, self._target = local.path(step), run.path(step)
        self.copy: CheckpointCopy | None = None
        self.is_stopped = False
        self._term_before: int | None = None  # The step in the run had it when the copy began.
        self.failure: CheckpointError | None = None

    def stop(self, failure: CheckpointError | None = None, *, leaves: bool = False) -> None:
        """Stops it. With ``leaves``, an agent may continue to copy files for a later attempt."""
        if not self.is_stopped:
            self.is_stopped, self.failure = True, failure
        if self.copy is not None:
            (self.copy.leave if leaves else self.copy.cancel)()

    def copy_files(self, open_copy: Callable[..., CheckpointCopy], bases: Iterable[int]) -> bool:
        """Copies the files of this place; returns whether the step was committed before.

        It takes files from the first of the steps ``bases`` that the run has not left. Raises
        CancelledError if the attempt is stopped, and SupersededError if a newer job of the
        run has not continued from the step.
        """
        newest = newest_term(self._run.directory)
        copy = open_copy(self._source, self._target, base=self._base_among(bases, newest))
        with self._changed:
            self.copy = copy
        self._raise_if_stopped()
        if copy.is_done:
            return True
        self._check_lineage(newest)
        copy.copy_files()
        note(bytes=copy.read_nbytes)
        return False

    def commit(self, ended_elsewhere: Callable[[], Sequence[str] | None]) -> None:
        """Commits the step, once the files of all places have arrived.

        ``ended_elsewhere`` returns why each other place sends no more files; ``None`` while one may
        still send some. Raises as :meth:`copy_files`.
        """
        copy = self.copy
        assert copy is not None
        copy.await_others(ended_elsewhere, functools.partial(self._raise_if_stopped, _POLL_S))

        def check() -> None:
            self._check_lineage(newest_term(self._run.directory))
            copy.copy_small_files()

        copy.commit(check)

    def is_ended_by_another(self) -> bool:
        """Returns whether another job has committed the step or removed it in the run meanwhile."""
        if self._term_before is None:
            return False
        return self._target.is_missing() or term_of(self._target) != self._term_before

    def _base_among(self, steps: Iterable[int], newest: Term) -> Location | None:
        """Returns the first step on the lineage: no restore has found it damaged."""
        for step in steps:
            with contextlib.suppress(StorageError):
                if newest.has(step, self._run.term_of(step)):
                    return self._run.path(step)
        return None

    def _check_lineage(self, newest: Term) -> None:
        """Raises SupersededError if the newest job of the run has not continued from the step."""
        term, term_in_run = term_of(self._source), term_of(self._target)
        if self._term_before is None:
            self._term_before = term_in_run
        if not newest.has(self.step, term) or term_in_run > term:
            raise superseded(self._run.directory, newest)

    def _raise_if_stopped(self, wait_s: float = 0.0) -> None:
        """Raises CancelledError if the attempt is stopped now, or within ``wait_s``."""
        with self._changed:
            if self._changed.wait_for(lambda: self.is_stopped, wait_s):
                raise CancelledError(f"the promotion of step {self.step} was stopped")
