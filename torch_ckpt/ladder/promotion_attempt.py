"""Attempt: the promotion of a step that is in progress."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch_ckpt.commits.terms import newest_term, superseded, term_of
from torch_ckpt.errors import CancelledError, CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.records.figures import nbytes_text
from torch_ckpt.records.record import Recorder, note, phase
from torch_ckpt.storage.copying import CheckpointCopy
from torch_ckpt.storage.progress import progress_bar

__all__ = ["Attempt"]

_POLL_S = 0.5
"""Interval at which the coordinator asks whether the files of other places have arrived."""


class Attempt:
    """The promotion of a step that is in progress, from a local directory to that of the run.

    It is stopped if the step was saved again, the run ends, or another place cannot send its files,
    for the reason ``failure``. The caller of :meth:`stop` holds ``changed``, and notifies it.
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
        self.failure: CheckpointError | None = None

    def stop(self, failure: CheckpointError | None = None, *, leaves: bool = False) -> None:
        """Stops it; with ``leaves``, an agent may go on to copy files for a later attempt."""
        if not self.is_stopped:
            self.is_stopped, self.failure = True, failure
        if self.copy is not None:
            (self.copy.leave if leaves else self.copy.cancel)()

    @contextlib.contextmanager
    def recorded(self, recorder: Recorder | None) -> Iterator[None]:
        """Records the block as the promotion of the step."""
        if recorder is None:
            yield
            return
        record = recorder.save_of(self.step)
        try:
            with record.current(), phase("promote"):
                yield
        finally:
            record.end()

    def copy_files(self, open_copy: Callable[..., CheckpointCopy], bases: Iterable[int]) -> bool:
        """Copies the files of this place; returns whether the step was committed before.

        It takes files from the first of the steps ``bases`` that the run has not left. Raises
        CancelledError if the attempt is stopped, and SupersededError if a newer job of the
        run does not go on from the step.
        """
        copy = open_copy(self._source, self._target, base=self._base_among(bases))
        with self._changed:
            self.copy = copy
        self._check_goes_on()
        if copy.is_done:
            return True
        self._check_lineage()
        copy.copy_files()
        note(bytes=copy.read_nbytes)
        return False

    def commit(self, ended_elsewhere: Callable[[], Sequence[str] | None]) -> None:
        """Commits the step, once the files of all places have arrived.

        ``ended_elsewhere`` returns why each other place sends no more files; ``None`` if one may
        send some. Raises as :meth:`copy_files`.
        """
        copy = self.copy
        assert copy is not None
        copy.await_others(ended_elsewhere, functools.partial(self._check_goes_on, _POLL_S))

        def check() -> None:
            self._check_lineage()
            copy.copy_small_files()

        copy.commit(check)

    def _base_among(self, steps: Iterable[int]) -> Location | None:
        """Returns the first step that the run has not left: a restore has found none damaged."""
        newest = newest_term(self._run.directory)
        for step in steps:
            with contextlib.suppress(StorageError):
                if newest.has(step, self._run.term_of(step)):
                    return self._run.path(step)
        return None

    def _check_lineage(self) -> None:
        """Raises SupersededError if a newer job of the run does not go on from the local step."""
        newest, term = newest_term(self._run.directory), term_of(self._source)
        if not newest.has(self.step, term) or term_of(self._target) > term:
            raise superseded(self._run.directory, newest)

    def _check_goes_on(self, wait_s: float = 0.0) -> None:
        """Raises CancelledError if the attempt is stopped, or is so within a while."""
        with self._changed:
            if self._changed.wait_for(lambda: self.is_stopped, wait_s):
                raise CancelledError(f"the promotion of step {self.step} was stopped")

    @property
    def done_nbytes(self) -> int:
        """Bytes that were copied or linked so far."""
        return 0 if self.copy is None else self.copy.done_nbytes

    def awaited(self) -> str:
        """Returns what is in progress, for the log of those who wait for it."""
        copied = "" if self.copy is None else f", {nbytes_text(self.done_nbytes)} copied"
        return f"the promotion of step {self.step} to {self._run.directory}{copied}"

    @contextlib.contextmanager
    def bar(self) -> Iterator[None]:
        """Shows how far the copy is, while the block waits for it."""
        copy = self.copy
        if copy is None:
            yield
            return
        with progress_bar(
            "promoting", self._run.directory, lambda: copy.nbytes, lambda: self.done_nbytes
        ):
            yield
