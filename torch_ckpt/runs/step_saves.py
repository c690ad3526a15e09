"""StepSaves: how a run saves one step, now or in the background, and what follows the save."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist

from torch_ckpt.api import save
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ladder.failures import FailedSaves
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.promotion import Promotion
from torch_ckpt.ladder.promotion_steps import Choice, Report
from torch_ckpt.ladder.promotion_wait import Promotions
from torch_ckpt.ladder.removal import discard_after, discard_from_memory, steps_after
from torch_ckpt.ladder.step_directories import StepDirectories, check_of
from torch_ckpt.ladder.step_files import committed_steps, metrics_file, step_number
from torch_ckpt.ladder.without_promotion import WithoutPromotion
from torch_ckpt.records.record import Record, Recorder, current_record
from torch_ckpt.runs.background.agent import ONLY_IN_MEMORY
from torch_ckpt.runs.background.save import BackgroundSave
from torch_ckpt.runs.background.thread import ThreadBackend
from torch_ckpt.runs.save_interval import CostClock
from torch_ckpt.runs.step_boundary import StepBoundary
from torch_ckpt.storage.progress import progress_bar
from torch_ckpt.storage.writer import FastWriter

__all__ = ["Reuse", "StepSaves"]

Reuse = Literal["auto", "off"]

_Begun = tuple[dict[str, bytes], Choice, int | None, str | None, tuple[int, dict[int, int]]]
"""Small files of a step, steps to promote, the base, the replaced save, and the term."""


class StepSaves:
    """Saves steps, one at a time. All ranks call the same methods.

    Saves go to the first of ``disks``. If that is a local directory, ``promotion`` copies the steps
    to the directory of the run, which is the last. ``process_group`` contains the ranks of
    ``group``, for DCP; all if ``None``. ``boundary`` records each step that is stored, and
    ``clock`` the duration of each background save. ``monitor`` is a metric that each step must
    have. ``reuses``: whether a save takes unchanged data from the previous step. ``saved`` is the
    number of committed steps.
    """

    def __init__(
        self,
        disks: Sequence[StepDirectories],
        promotion: Promotion | WithoutPromotion,
        group: Group,
        process_group: dist.ProcessGroup | None,
        writer: FastWriter,
        backend: ThreadBackend,
        *,
        monitor: str | None,
        lineage: Lineage,
        boundary: StepBoundary,
        clock: CostClock,
        timeout_s: float,
        reuses: bool,
        recorder: Recorder | None,
    ) -> None:
        self._disks, self._disk = disks, disks[0]
        self._group, self._process_group = group, process_group
        self._writer, self._backend, self._monitor = writer, backend, monitor
        self._boundary, self._clock, self._timeout_s = boundary, clock, timeout_s
        self._promotion, self._recorder, self.lineage = promotion, recorder, lineage
        self.promotions = Promotions(promotion, group, disks, timeout_s)
        self.saved, self._reuses = 0, reuses
        self._last: int | None = None  # The step that was saved or restored last.
        self._knows_last = False
        self.damaged: set[int] = set()  # In the directory of the saves, as restores found.
        self._pending: BackgroundSave | None = None
        self._failed = FailedSaves(disks[0], backend.may_commit, removes=group.is_coordinator)

    @property
    def is_busy(self) -> bool:
        """Whether the background save of this rank is in progress."""
        return self._pending is not None and self._pending.is_in_progress

    @property
    def pending(self) -> int | None:
        """The step whose background save is not settled, or ``None``."""
        return None if self._pending is None else self._pending.step

    @contextlib.contextmanager
    def recording(self, kind: str, step: int | None) -> Iterator[Record | None]:
        """Records the block, and the save that begins there, as a save or load of a step."""
        if self._recorder is None:
            yield None
            return
        record = self._recorder.record(kind, step)
        before = self._pending
        with record.current():
            try:
                yield record
            except BaseException as error:
                record.failed(error)
                raise
            finally:
                if self._pending is None or self._pending is before:
                    record.end()

    def settle(self, timeout_s: float | None = None) -> None:
        """Waits for the background save, and reports its outcome.

        Raises a CheckpointError that names its step if it failed, or is still in progress. Saves
        whose outcome was unknown are settled first.
        """
        self._failed.settle()
        pending = self._pending
        if pending is None:
            return
        try:
            with self._bar(pending.step):
                seconds = pending.settle(timeout_s or self._timeout_s)
            self._clock.background_save_ended(seconds)
        except CheckpointError as error:
            if pending.is_committed:
                raise
            self._boundary.stored = None
            if not pending.is_in_progress:
                self._has_failed(pending.step, error, pending.then)
            raise
        finally:
            if not pending.is_in_progress:
                self._pending = None

    def ready(self, timeout_s: float | None = None) -> None:
        """Settles the background save, before an access to the steps.

        Raises CheckpointError if another run has taken over the local directory of this rank.
        """
        self.settle(timeout_s)
        self.check_owner()

    def check_owner(self) -> None:
        """Raises CheckpointError if another run has taken over the local directory."""
        self._promotion.check_owner()

    def write_newest(self) -> None:
        """Waits until the agent has written the last step, if it is in memory only.

        Raises CheckpointError if that fails: it would not be reported after the ranks have ended.
        """
        if self._backend.has_newest():
            self.check_owner()  # Which writes the id into a local directory that was emptied.
        if (newest := self._backend.write_newest()) is None:
            return
        pending = BackgroundSave(*newest, functools.partial(self._committed, newest[0], None))
        self._pending = pending
        try:
            self.settle()
        except CheckpointError as error:
            with contextlib.suppress(CheckpointError):  # Then nothing is known of the memory.
                if not pending.is_committed and self._backend.may_commit(newest[0]):
                    error.add_note(f"step {newest[0]} {ONLY_IN_MEMORY}")
            raise

    @contextlib.contextmanager
    def _bar(self, step: int) -> Iterator[None]:
        """Shows the progress of the background save on the first rank, during a wait for it."""
        written = self._writer.written_nbytes
        total, done = (lambda: written()[1]), (lambda: written()[0])
        bar = progress_bar("saving", self._disk.path(step), total, done)
        with bar if self._group.is_coordinator else contextlib.nullcontext():
            yield

    def begin(
        self,
        step: int,
        timeout_s: float,
        metrics: Mapping[str, float] | None = None,
        *,
        persist: bool = True,
        is_last: bool = False,
        refused: Exception | None = None,
    ) -> CheckpointError | None:
        """Checks that all ranks save this step, and that the previous save succeeded.

        Passes the small files of the step, with the metrics of the first rank, to the writer. If a
        promotion failed, returns its error without beginning the save, except with ``is_last``:
        then the process ends after the save. If ``refused`` is set on any rank, all ranks raise it.
        """
        files: dict[str, bytes] = {}

        def own() -> Report | None:
            self.ready(timeout_s)  # First, so that an old failure is raised once.
            if refused is not None:
                raise refused
            if self._group.is_coordinator and metrics is not None:
                files.update(metrics_file(step, metrics, self._monitor))
            return self._promotion.report()

        def begin(reports: list[Report | None]) -> _Begun | CheckpointError:
            self._promotion.heard_from([each for each in reports[1:] if each is not None])
            may_stop = not is_last and self.lineage.term.number  # The first save removes old steps.
            if may_stop and (unpromoted := self._promotion.check()) is not None:
                return unpromoted
            choice = self._promotion.choice(step)
            former_term = self.lineage.term.number
            files.update(self.lineage.saving(step))  # Only the newest job may remove remains.
            if self.lineage.term.number != former_term:
                self._backend.claim(self._disks[-1].directory)
            self._failed.sweep()
            lineage = self.lineage.term.number, dict(self.lineage.term.lineage)
            base, former = self._base(step) if self._reuses else None, self._failed.former(step)
            return files, choice, base, former, lineage

        begun = self._group.decide(
            *("beginning to save", own, begin),
            timeout_s=timeout_s,
            recorded="begin",
            equal={"step": step, "persist": persist},
        )
        if isinstance(begun, CheckpointError):
            return begun
        files, choice, base, former, lineage = begun
        self._failed.replaced(step, former)
        if not self._group.is_coordinator:
            self.lineage.adopt(*lineage)
        if base is not None:
            self._writer.base = self._disk.path(base).checkpoint_id
        self._promotion.saving(step, choice)
        self._writer.small_files = files
        return None

    def _base(self, step: int) -> int:
        """Returns the step from which a save takes unchanged data; ``step`` itself without one.

        That is the last step that was saved or restored. A process that has done neither uses the
        newest committed step. A damaged step is not used.
        """
        if not self._knows_last:
            with contextlib.suppress(CheckpointError):  # The save may fail for it, or not.
                self.set_base(next(iter(committed_steps(self._disk.directory)), None))
        return step if self._last is None or self._last in self.damaged else self._last

    def set_base(self, step: int | None) -> None:
        """Makes the next save take unchanged data from this step, if any."""
        self._last, self._knows_last = step, True

    def save_now(self, step: int, state: dict[str, Any], timeout_s: float) -> BaseException | None:
        """Saves a step, and removes the steps that need not be retained.

        Returns an error of this rank after the commit, still unknown to the other ranks.
        """
        try:
            save(
                state,
                checkpoint_id=self._disk.path(step).checkpoint_id,
                storage_writer=self._writer,
                process_group=self._process_group,
                no_dist=self._group.size == 1,
                timeout_s=timeout_s,
            )
        except BaseException as error:
            then = functools.partial(self._committed, step, current_record())
            self._has_failed(step, error, then)
            raise
        self._boundary.save_began(step)
        try:
            self._committed(step, current_record())
        except BaseException as error:  # Such as a warning that is an error.
            return error
        return None

    def save_in_background(
        self, step: int, state: dict[str, Any], *, persist: bool
    ) -> BaseException | None:
        """Begins to save a step in the background; :meth:`settle` reports the outcome.

        If it does not begin, returns the error, still unknown to the other ranks.
        """
        path = self._disk.path(step).checkpoint_id
        try:
            future = self._backend.save(step, state, path, persist=persist)
        except BaseException as error:
            self._failed.remove(step)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise  # Immediately, because other ranks may wait in an exchange of the backend.
            return error
        self._boundary.save_began(step)
        is_stored = persist or not self._backend.can_stay_in_memory
        record = current_record()
        then = functools.partial(self._committed, step, record) if is_stored else lambda: None
        self._pending = BackgroundSave(step, future, then)
        if record is not None:
            future.add_done_callback(lambda _: record.end())
        return None

    def wait_for_promotion(
        self, timeout_s: float, *, must_end: bool = True, closes: bool = False
    ) -> bool:
        """Waits for the background save and for the promotion of all steps. All ranks call it.

        Raises CheckpointError on all ranks if either fails or takes longer than ``timeout_s``.
        Without ``must_end``, they may take longer. Returns whether both have ended.
        """

        def settle() -> bool:
            try:
                self.settle(min(timeout_s, self._timeout_s))
            except CheckpointError:
                if must_end or self._pending is None:
                    raise
            return self._pending is None

        return self.promotions.await_all(settle, timeout_s, must_end=must_end, closes=closes)

    def close_promotion(self, timeout_s: float = math.inf) -> None:
        """Promotes as many steps as this time allows; the next process promotes the rest.

        The wait continues while bytes arrive. All ranks call it. Raises the errors of
        :meth:`wait_for_promotion` on all ranks.
        """
        promote = functools.partial(self.wait_for_promotion, closes=True)
        self.promotions.close(promote, timeout_s)

    def close(self) -> None:
        """Waits for the last save and for promotions, and ends the background saves."""
        try:
            self.settle()
            self.write_newest()
        finally:
            try:
                self.close_promotion()  # First, since the agent makes the copies.
            finally:
                if self.is_busy:
                    self._backend.leave()  # The agent continues the save.
                else:
                    self._backend.close()

    def leave(self, error: BaseException) -> None:
        """Leaves the steps in memory, and the promotion, to the next process after an error."""
        self._backend.leave()
        self.promotions.leave(error)

    def discard_after(self, step: int) -> list[int]:
        """Removes the steps after a step from disk and memory; see :meth:`Run.discard_after`."""
        # The local directory last: otherwise its steps would be promoted again.
        directories = [disk.directory for disk in reversed(self._disks)]

        def own() -> tuple[int, Any]:
            self.ready()
            _ = [rung.report() for rung in self._backend.rungs]  # Waits for agents that end.
            return step_number(step), self._disk.report()

        def check(answers: list[tuple[int, Any]]) -> int:
            self.lineage.check_removal()
            check_step = check_of(self._disks, [report for _, report in answers])
            steps_after(directories, answers[0][0], check_step)
            return answers[0][0]

        def discard(_: list[None]) -> list[int]:
            try:
                with self._promotion.discarding_after(step):
                    return discard_after(directories, step)
            finally:  # If it fails, some were removed.
                self.lineage.discarded_after(step)
                self._knows_last = False

        def discard_elsewhere() -> None:
            """Discards steps that are not on the coordinator's disk."""
            self.discard_from_memory(lambda each: each > step)
            if isinstance(self._promotion, Promotion) and not self._group.is_coordinator:
                with self._promotion.discarding_after(step):
                    discard_after([self._disk.directory], step)

        what, given, timeout_s = "discarding steps", {"step": step}, self._timeout_s
        step = self._group.decide(what, own, check, timeout_s=timeout_s, equal=given)
        # From memory first: an agent must not write a step whose directory was removed.
        self._boundary.went_back(step)
        return self._group.decide(what, discard_elsewhere, discard, timeout_s=timeout_s)

    def discard_from_memory(self, is_discarded: Callable[[int], bool]) -> None:
        """Discards steps from the memory of this machine."""
        discard_from_memory(self._disks[-1].directory, is_discarded)
        self._backend.forget(is_discarded)

    def _committed(self, step: int, record: Record | None) -> None:
        """Counts a committed step, then promotes it or removes old steps."""
        self.saved += 1
        if self._boundary.stored in (None, step):  # Else another save has begun since.
            self.set_base(step)
        self._boundary.committed(step)
        self.lineage.committed(step)
        with contextlib.nullcontext() if record is None else record.current():
            self._promotion.saved(step)

    def _has_failed(self, step: int, error: BaseException, then: Callable[[], None]) -> None:
        self._promotion.not_saved(step)
        self._failed.add(step, error, then)
