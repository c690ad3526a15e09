"""StepSaves: how a run saves one step, now or in the background, and what follows the save."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist

from torch_ckpt.api import save
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import (
    CheckpointError,
    RankTimeoutError,
    StorageError,
    warn_after_commit,
)
from torch_ckpt.formats.committed import committed_id, has_checkpoint
from torch_ckpt.ladder.failures import Failures, may_be_committed
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.places import Places
from torch_ckpt.ladder.promotion import END_S, Promotion
from torch_ckpt.ladder.promotion_steps import Choice, Report
from torch_ckpt.ladder.promotion_wait import await_promotion, await_promotion_alone
from torch_ckpt.ladder.removal import (
    discard_after,
    discard_from_memory,
    remove_unfinished,
    steps_after,
)
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories, check_of
from torch_ckpt.ladder.step_files import committed_steps, metrics_file, step_number
from torch_ckpt.records.record import Record, Recorder, current_record
from torch_ckpt.runs.background.agent import ONLY_IN_MEMORY, AgentBackend
from torch_ckpt.runs.background.save import BackgroundSave
from torch_ckpt.runs.background.thread import ThreadBackend
from torch_ckpt.runs.save_interval import CostClock
from torch_ckpt.runs.step_boundary import StepBoundary
from torch_ckpt.storage.progress import progress_bar
from torch_ckpt.storage.writer import FastWriter

__all__ = ["Reuse", "StepSaves"]

Reuse = Literal["auto", "off"]

_SentTerm = tuple[int, dict[int, int]]
"""Number and lineage of a term, as the coordinator sends them."""

_LOG = logging.getLogger("torch_ckpt")


class StepSaves:
    """Saves steps, one at a time. All ranks call the same methods.

    Saves go to the first of ``disks``. If that is a local directory, ``promotion`` copies the steps
    to the directory of the run, which is the last; it is ``None`` on all ranks but the first at
    each place.
    ``process_group`` has the ranks of ``group``, for DCP; all if ``None``. ``boundary`` records
    each step that is stored, and ``clock`` the duration of each background save. ``reuses`` says
    that a save takes what has not changed from the step before. ``saved`` is the number of steps
    that were committed.
    """

    def __init__(
        self,
        *,
        disks: Sequence[StepDirectories],
        promotion: Promotion | None,
        places: Places,
        group: Group,
        process_group: dist.ProcessGroup | None,
        writer: FastWriter,
        backend: ThreadBackend | AgentBackend | None,
        retention: Retention,
        lineage: Lineage,
        boundary: StepBoundary,
        failures: Failures,
        clock: CostClock,
        timeout_s: float,
        reuses: bool,
        recorder: Recorder | None,
    ) -> None:
        self._disks, self._disk = disks, disks[0]
        self._group, self._process_group = group, process_group
        self._writer, self._backend, self._retention = writer, backend, retention
        self._boundary, self._clock, self._timeout_s = boundary, clock, timeout_s
        self._failures, self._promotion, self._recorder = failures, promotion, recorder
        self._is_at_several_places = places.are_several
        self._promotes = len(disks) > 1
        self.saved, self._reuses = 0, reuses
        self._last: int | None = None  # The step that was saved or restored last.
        self._knows_last = False
        self.lineage = lineage
        self._pending: BackgroundSave | None = None
        self._failed: set[int] = set()  # Steps whose directories may have remains.
        self._unknown: dict[int, Callable[[], None]] = {}  # Steps that may still be committed.
        self._former: dict[int, str] = {}  # The saves that those of the same steps replace.

    @property
    def is_busy(self) -> bool:
        """Whether the background save of this rank is in progress."""
        return self._pending is not None and self._pending.is_in_progress

    @property
    def pending(self) -> int | None:
        """The step whose background save is not settled; ``None`` if there is none."""
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
        self._settle_unknown()
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

    def write_newest(self) -> None:
        """Waits until the agent has written the last step, if it is in memory alone.

        Raises CheckpointError if that fails: nobody would report it once the ranks have ended.
        """
        newest = self._backend.write_newest() if isinstance(self._backend, AgentBackend) else None
        if newest is None:
            return
        then = functools.partial(self._committed, newest[0], None)
        pending = self._pending = BackgroundSave(*newest, then)
        try:
            self.settle()
        except CheckpointError as error:
            if not pending.is_committed:
                error.add_note(f"step {newest[0]} {ONLY_IN_MEMORY}")
            raise

    @contextlib.contextmanager
    def _bar(self, step: int) -> Iterator[None]:
        """Shows on the first rank how far the background save is, while the block waits for it."""
        if not self._group.is_coordinator:
            yield
            return
        written = self._writer.written_nbytes
        total, done = (lambda: written()[1]), (lambda: written()[0])
        with progress_bar("saving", self._disk.path(step), total, done):
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

        Gives the writer the small files of the step, with the metrics of the first rank. Returns a
        failed promotion, which ``is_last`` ignores: the process ends after the save. The save has
        not begun then. If ``refused`` is set on any rank, all ranks raise it.
        """
        files: dict[str, bytes] = {}

        def own() -> Report | None:
            self.settle(timeout_s)  # First: an old failure is raised once.
            if refused is not None:
                raise refused
            if self._group.is_coordinator and metrics is not None:
                files.update(metrics_file(step, metrics, self._retention.monitor))
            self._unknown.pop(step, None)  # This save replaces it.
            return None if self._promotion is None else self._promotion.report()

        def begin(
            reports: list[Report | None],
        ) -> tuple[
            dict[str, bytes], Choice, int | None, str | None, _SentTerm, CheckpointError | None
        ]:
            choice = Choice()
            if self._promotion is not None:
                self._promotion.heard_from([each for each in reports[1:] if each is not None])
                unpromoted = None if is_last else self._promotion.check()
                if unpromoted is not None:
                    return {}, choice, None, None, (0, {}), unpromoted
                choice = self._promotion.choice(step)
            for failed in self._failed:  # No rank and no agent uses its directory any more.
                remove_unfinished(self._disk.path(failed))
            self._failed.clear()
            files.update(self.lineage.saving(step))
            lineage = self.lineage.term.number, dict(self.lineage.term.lineage)
            base, former = self._base(step) if self._reuses else None, self._id_of(step)
            return files, choice, base, former, lineage, None

        files, choice, base, former, lineage, unpromoted = self._group.decide(
            *("beginning to save", own, begin),
            timeout_s=timeout_s,
            recorded="begin",
            equal={"step": step, "persist": persist},
        )
        if unpromoted is not None:
            return unpromoted
        if former is not None:
            self._former[step] = former
        if not self._group.is_coordinator:
            self.lineage.adopt(*lineage)
        if base is not None:
            self._writer.base = self._disk.path(base).checkpoint_id
        if self._promotion is not None:
            self._promotion.saving(step, choice)
        self._writer.small_files = files
        return None

    def _base(self, step: int) -> int:
        """Returns the step from which a save takes what has not changed; itself if there is none.

        It is the last one that was saved or restored. A process that has done neither looks for the
        newest one.
        """
        if not self._knows_last:
            with contextlib.suppress(CheckpointError):  # The save may fail for it, or not.
                self.set_base(next(iter(committed_steps(self._disk.directory)), None))
        return step if self._last is None else self._last

    def set_base(self, step: int | None) -> None:
        """Makes the next save take what has not changed from this step, if any."""
        self._last, self._knows_last = step, True

    def begin_after(
        self,
        step: int,
        timeout_s: float,
        metrics: Mapping[str, float] | None,
        persist: bool,
        refused: Exception | None,
    ) -> bool:
        """Begins a save, also if the previous one failed and training goes on.

        Returns ``False`` if this one fails as well, and training goes on.
        """
        warns = self._group.is_coordinator
        if self._failures.is_open:  # Then its failure is not one of this save.
            end, settle = "ending the last save", functools.partial(self.settle, timeout_s)
            try:
                self._group.decide(
                    end, settle, lambda _: None, timeout_s=timeout_s, recorded="begin"
                )
            except StorageError as error:
                if not self._failures.may_go_on(error, warns=warns):
                    raise
            else:
                self._failures.succeeded()
        try:
            unpromoted = self.begin(step, timeout_s, metrics, persist=persist, refused=refused)
        except StorageError as error:
            if not self._failures.may_go_on(error, warns=warns):
                raise
            return False
        if unpromoted is not None:  # Not a failure of this save, which the options let go on.
            raise unpromoted
        return True

    def save_now(self, step: int, state: dict[str, Any], timeout_s: float) -> BaseException | None:
        """Saves a step, and removes the steps that are not to be retained.

        Returns an error of this rank after the commit, which the other ranks do not know yet.
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

        Returns the error if it does not begin, which the other ranks do not know yet.
        """
        assert self._backend is not None
        path = self._disk.path(step).checkpoint_id
        try:
            future = self._backend.save(step, state, path, persist=persist)
        except BaseException as error:
            self._remove_failed(step)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise  # At once: the other ranks may wait in an exchange of the backend.
            return error
        self._boundary.save_began(step)
        is_stored = persist or not self._backend.can_stay_in_memory
        record = current_record()
        then = functools.partial(self._committed, step, record) if is_stored else lambda: None
        self._pending = BackgroundSave(step, future, then)
        if record is not None:
            future.add_done_callback(lambda _: record.end())
        return None

    def agreed_interval(self, interval: int, failure: BaseException | None) -> int:
        """Returns the longest interval of all ranks until the next save, after a save.

        Raises the failure of a rank on all ranks.
        """

        def own() -> int:
            if failure is not None:
                raise failure
            return interval

        what = "agreeing on the next save"
        try:
            return self._group.decide(what, own, lambda each: max(each), timeout_s=self._timeout_s)
        except BaseException:
            with contextlib.suppress(CheckpointError):  # It failed for the same reason.
                self.settle()
            raise

    def wait_for_promotion(self, timeout_s: float, *, must_end: bool = True) -> bool:
        """Waits for the background save and for the promotion of all steps. All ranks call it.

        Raises CheckpointError on all ranks if either fails, or takes longer. Without ``must_end``,
        they may take longer, and it returns whether both have ended.
        """

        def settle() -> bool:
            try:
                self.settle(min(timeout_s, self._timeout_s))
            except CheckpointError:
                if must_end or self._pending is None:
                    raise
            return self._pending is None

        return await_promotion(
            *(self._group, self._promotion, settle),
            copied=(self._disk.directory, self._disks[-1].directory),
            timeout_s=timeout_s,
            call_timeout_s=self._timeout_s,
            must_end=must_end,
        )

    def close_promotion(self, timeout_s: float = math.inf) -> None:
        """Promotes what can be promoted in this time; the next process promotes the rest.

        The wait goes on while bytes arrive. All ranks call it. Raises as
        :meth:`wait_for_promotion`, on all of them.
        """
        if not self._promotes:
            return
        deadline, promotion = time.monotonic() + timeout_s, self._promotion
        with contextlib.ExitStack() as stack:
            if promotion is not None:
                stack.callback(
                    lambda: promotion.cancel(max(min(deadline - time.monotonic(), END_S), 0.1))
                )
                if self._group.is_coordinator:
                    stack.enter_context(promotion.bar())
            try:
                with self._group.method("wait for promotion", self._timeout_s):
                    self.wait_for_promotion(timeout_s)
            except RankTimeoutError as error:
                if promotion is not None and not self._is_at_several_places:
                    promotion.retry(Choice())  # The other ranks have no part in it.
                    left_s = max(deadline - time.monotonic(), 0.0)
                    if awaited := await_promotion_alone(promotion, left_s, self._timeout_s):
                        error.add_note(f"torch_ckpt: not promoted: {awaited}")
                raise

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocates the memory of an agent for states like this."""
        if self._backend is not None:
            self._backend.reserve(state)

    def close(self, *, is_again: bool = False) -> None:
        """Waits for the last save and for promotions, and ends the background saves."""
        try:
            self.settle()
            self.write_newest()
        finally:
            backend, self._backend = self._backend, None
            try:
                if not is_again:
                    self.close_promotion()  # First, since the agent makes the copies.
            finally:
                if backend is not None and self.is_busy:
                    backend.leave()  # The agent goes on with the save, whenever that ends.
                elif backend is not None:
                    backend.close()

    def leave(self, error: BaseException) -> None:
        """Leaves the steps in memory, and the promotion, to the next process after an error.

        The other ranks raise it in their next call, which may be the one that waits for promotion.
        """
        if self._backend is not None:
            self._backend.leave()
        if not self._promotes:
            return
        self._promotes = False
        promotion, self._promotion = self._promotion, None
        if promotion is not None:
            promotion.cancel()
        with contextlib.suppress(Exception):  # The first error counts.
            self._group.call(self._timeout_s).fail(error)

    def settled(self, step: int) -> int:
        """Waits for the background save, and returns the step as an ``int``."""
        self.settle()
        return step_number(step)

    def is_coordinator_busy(self, step: int, refused: Exception | None) -> bool:
        """Returns whether the coordinator, the last to end, still saves; raises ``refused``."""

        def own() -> bool:
            if refused is not None:
                raise refused
            return self.is_busy

        what, given, limit_s = "checking the last save", {"step": step}, self._timeout_s
        return self._group.decide(what, own, lambda busy: busy[0], timeout_s=limit_s, equal=given)

    def discard_after(self, step: int) -> list[int]:
        """Removes the steps after a step from disk and memory; see :meth:`Run.discard_after`."""
        # The local directory last: otherwise its steps would be promoted again.
        directories = [disk.directory for disk in reversed(self._disks)]

        def own() -> tuple[int, Any]:
            return self.settled(step), self._disk.report()

        def check(answers: list[tuple[int, Any]]) -> int:
            self.lineage.check_since_restore()
            check_step = check_of(self._disks, [report for _, report in answers])
            steps_after(directories, answers[0][0], check_step)
            return answers[0][0]

        def discard(_: list[None]) -> list[int]:
            with contextlib.ExitStack() as stack:
                if self._promotion is not None:
                    stack.enter_context(self._promotion.discarding_after(step))
                removed = discard_after(directories, step)
            self.lineage.discarded_after(step)
            self._knows_last = False
            return removed

        def discard_elsewhere() -> None:
            """Discards what is not on the disk of the coordinator."""
            self.discard_from_memory(lambda each: each > step)
            if self._promotion is not None and not self._group.is_coordinator:
                with self._promotion.discarding_after(step):
                    discard_after([self._disk.directory], step)

        what, given, timeout_s = "discarding steps", {"step": step}, self._timeout_s
        step = self._group.decide(what, own, check, timeout_s=timeout_s, equal=given)
        # From memory first: an agent must not write a step whose directory was removed.
        self._boundary.went_back(step)
        return self._group.decide(what, discard_elsewhere, discard, timeout_s=timeout_s)

    def discard_from_memory(self, is_discarded: Callable[[int], bool]) -> None:
        """Discards steps from the memory of this machine, whichever directory names it."""
        for disk in self._disks:
            discard_from_memory(disk.directory, is_discarded)
        if self._backend is not None:
            self._backend.forget()

    def _committed(self, step: int, record: Record | None) -> None:
        """Counts a committed step; on the coordinator, removes the steps not to be retained."""
        self.saved += 1
        if self._boundary.stored in (None, step):  # Else another save has begun since.
            self.set_base(step)
        self._boundary.committed(step)
        if self._promotion is not None:
            self._promotion.saved(step)
        if self._promotion is not None or not self._group.is_coordinator:
            return
        try:
            with contextlib.nullcontext() if record is None else record.phase("retain"):
                self._retention.apply(self._disk, step, lineage=self.lineage.newest())
        except (CheckpointError, OSError) as error:
            warn_after_commit(f"old steps were not removed: {error}", stacklevel=2)

    def _has_failed(self, step: int, error: BaseException, then: Callable[[], None]) -> None:
        """Removes what a failed save has left, unless it may still be committed.

        Then :meth:`settle` finds out later, and calls ``then`` if it was committed.
        """
        if self._promotion is not None:
            self._promotion.not_saved(step)
        if may_be_committed(error):
            # Several places pass over the step: they may learn of its commit at different times.
            self._unknown[step] = (lambda: None) if self._is_at_several_places else then
        else:
            self._remove_failed(step)

    def _settle_unknown(self) -> None:
        """Settles the saves whose outcome was unknown, and is known now."""
        for step, then in list(self._unknown.items()):
            try:
                found = committed_id(self._disk.path(step))
            except CheckpointError:  # Storage does not answer now.
                continue
            if found not in (None, self._former.get(step)):
                del self._unknown[step]
                then()
            elif self._backend is None or not self._backend.may_commit(step):
                del self._unknown[step]
                self._remove_failed(step)

    def _id_of(self, step: int) -> str | None:
        """Returns the id of the save that a new save of a step would replace, if there is one."""
        with contextlib.suppress(CheckpointError):  # The save may fail for it, or not.
            path = self._disk.path(step)
            return committed_id(path) if has_checkpoint(path) else None
        return None

    def _remove_failed(self, step: int) -> None:
        """Removes what a failed save has left in the directory of its step, on the coordinator."""
        if self._group.is_coordinator:
            self._failed.add(step)
            remove_unfinished(self._disk.path(step), of_agents=False)
