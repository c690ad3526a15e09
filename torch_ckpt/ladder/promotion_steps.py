"""PromotionSteps: facts about the steps of a run with a local directory, and what to promote."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_ckpt.commits.terms import Term
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.step_files import readable_metrics_of

__all__ = ["Choice", "Progress", "PromotionSteps", "Report", "StepsOfOnePlace"]


class Choice(NamedTuple):
    """The coordinator's message to all places.

    Attributes:
        chosen: The steps to promote next.
        committed: The steps committed in the directory of the run since the last message.
        passed_over: The steps that it no longer promotes, because some files exist at no place.
    """

    chosen: Sequence[int] = ()
    committed: Sequence[int] = ()
    passed_over: Sequence[int] = ()


class Report(NamedTuple):
    """The message of each other place to the coordinator.

    Attributes:
        ended: The chosen steps of which the place sends no more files, each with the reason; the
            reason is empty if it has sent all its files.
        failure: The storage failure of the last promotion there, if any.
    """

    ended: Mapping[int, str]
    failure: CheckpointError | None


class Progress(NamedTuple):
    """The progress of the promotions at a place.

    Attributes:
        awaited: The place and its promotion in progress; empty if none is.
        done: The step in progress, and its bytes so far. The promotion proceeds while this changes.
        report: The report for the coordinator.
    """

    awaited: str
    done: tuple[int, int] | None
    report: Report


class _State(enum.Enum):
    """The state of a local step."""

    WAITS = enum.auto()
    """It must be promoted."""
    UNCHOSEN = enum.auto()
    """It waits until the coordinator chooses it."""
    SENT = enum.auto()
    """The files of this place have arrived. The coordinator commits it."""
    PROMOTED = enum.auto()
    """This save of the step is in the directory of the run."""
    PASSED_OVER = enum.auto()
    """It is damaged, not whole, from another save than the one in the run, or skipped."""
    UNREADABLE = enum.auto()
    """It could not be read. It remains, and is examined again before each promotion."""


_TO_PROMOTE = frozenset({_State.WAITS, _State.SENT})
_OPEN = _TO_PROMOTE | {_State.UNCHOSEN}
_ENDED = frozenset({_State.PROMOTED, _State.PASSED_OVER})


@dataclass
class _Step:
    """The facts known about a step.

    ``is_in_run``: whether the directory of the run contains a checkpoint of it. ``value`` is its
    metric: NaN if it has none, and ``None`` until it is read. ``saved_s`` is the time of its
    commit, in seconds since 1970, by the clock of this machine; ``None`` if unknown. ``problem`` is
    the reason why this place cannot send its files, or empty. ``term`` is the term of its last
    save.
    """

    state: _State = _State.UNCHOSEN
    is_in_run: bool = False
    value: float | None = None
    saved_s: float | None = None
    problem: str = ""
    term: int = 0


class PromotionSteps:
    """The steps of a run in its two directories, and which of them are promoted or may be removed.

    The coordinator chooses the steps to promote, and all places promote them. ``retention`` decides
    which steps the run retains, and ``directory`` contains the local ones. Arguments named
    ``local`` are the committed steps there, the newest first.

    ``skipped`` is the number of steps that were not promoted, because newer ones had arrived.
    ``examine`` reads new local steps, and those that could not be read before, and may take long.
    Not thread-safe.
    """

    def __init__(self, directory: StepDirectories, retention: Retention) -> None:
        self._directory, self._retention = directory, retention
        self._steps: dict[int, _Step] = {}
        self._saved: int | None = None  # The last step that this process has saved.
        self._in_save: int | None = None  # Its small files may follow the commit.
        self._is_chosen = False  # Whether that step will be promoted.
        self._chosen: set[int] = set()  # The coordinator's last choice.
        self._here: set[int] = set()  # The local steps when they were last listed.
        self._unneeded: set[int] = set()  # Removable local steps, as long as they are listed.
        self._unreported: set[int] = set()  # Ended steps, not yet sent to other places.
        self._lineage = Term()  # Steps outside it are not retained.
        self.in_progress: int | None = None  # The step that is being promoted.
        self.examine: Callable[[], None] = lambda: None
        self.skipped = 0

    # ---- What happens ----

    def found(
        self,
        in_run: Iterable[int],
        values: Mapping[int, float],
        ages: Mapping[int, float],
        terms: Mapping[int, int],
    ) -> None:
        """Adds the steps in the directory of the run, and metrics, ages and terms of steps."""
        for step in in_run:
            self._of(step).is_in_run = True
        for step, term in terms.items():
            self._of(step).term = term
        for step, value in values.items():
            self._of(step).value = value
        self._know_ages(ages)

    def found_here(self, local: Iterable[int]) -> None:
        """Adds local steps, also those of another job. New ones must be :meth:`examined`."""
        here = set(local) - {self._in_save}
        for step in here - self._here:
            if self._of(step).state is not _State.WAITS:  # Unless the coordinator has chosen it.
                self._of(step).state = _State.UNREADABLE
        self._here |= here

    def examined(self, terms: Mapping[int, int], passed_over: Collection[int]) -> None:
        """Adds the terms of local steps that were read, unless they were saved again meanwhile."""
        for step, term in terms.items():
            each = self._of(step)
            if each.state is _State.UNREADABLE:
                each.term, each.state = term, _State.UNCHOSEN
                if step not in passed_over:  # The run may have another save of it.
                    each.value = None
                self.pass_over([step] if step in passed_over else [])

    def set_lineage(self, lineage: Term) -> None:
        """Sets the term whose steps, and the steps on which it builds, count."""
        self._lineage = lineage

    def begin_save(self, step: int, chosen: Collection[int]) -> None:
        """Begins to save a step. If steps are ``chosen``, only these are promoted next."""
        self._in_save, self._is_chosen = step, step in chosen
        if self._saved is not None:
            self._saved = min(self._saved, step - 1)
        if chosen:
            for each in self._steps.values():
                if each.state in _TO_PROMOTE:
                    each.state = _State.UNCHOSEN
            self.choose(other for other in chosen if other != step)
            self._chosen = set(chosen)

    def saved(self, step: int) -> bool:
        """Ends the save of a step in the local directory; returns whether to promote it."""
        self._saved, self._in_save = step, None
        self._unreported.discard(step)
        self._unneeded.discard(step)
        self._here.add(step)
        self._of(step).state = _State.WAITS if self._is_chosen else _State.UNCHOSEN
        self._of(step).value = self._of(step).saved_s = None
        self._of(step).term = self._lineage.number
        return self._is_chosen

    def not_saved(self, step: int) -> None:
        """Passes over a step whose save has failed: some places may have committed it."""
        self.pass_over([step])
        self._here.add(step)

    def choose(self, steps: Iterable[int]) -> None:
        self._chosen = set(steps)
        for step in self._chosen:
            self._of(step).state = _State.WAITS

    def sent(self, step: int) -> None:
        if self._of(step).state is _State.WAITS:
            self._of(step).state = _State.SENT

    def promoted(self, step: int) -> None:
        self._of(step).state, self._of(step).is_in_run = _State.PROMOTED, True
        self._unreported.add(step)

    def reported(self, choice: Choice) -> None:
        """Ends the promotion of the steps that the coordinator has committed or passed over."""
        for step in choice.committed:
            if self._of(step).state in _TO_PROMOTE:
                self.promoted(step)
        self.pass_over(s for s in choice.passed_over if self._of(s).state in _OPEN)
        self._unreported.difference_update(choice.committed, choice.passed_over)

    def pass_over(self, steps: Iterable[int], problem: str = "") -> None:
        for step in steps:
            self._of(step).state, self._of(step).problem = _State.PASSED_OVER, problem
            self._unreported.add(step)

    def lost(self, local: Collection[int]) -> dict[int, int]:
        """Passes over the steps to promote that no longer exist. Returns them with their terms.

        Chosen steps that never existed at this place, or were removed because the run has them, are
        passed over as well.
        """
        gone = self._here.difference(local)
        absent = gone.union(self._chosen.difference(local)).difference([self._in_save])
        lost = [step for step in absent if self._of(step).state in _OPEN]
        self.pass_over(lost, "the step is not there")
        self.found_here(local)
        self._here.intersection_update(local)
        gone -= self._unneeded
        self._unneeded.intersection_update(local)
        return {step: self._of(step).term for step in gone.intersection(lost)}

    def lost_in_run(self, step: int, *, is_other: bool) -> None:
        """Promotes a promoted step again, unless the run now has another save of it."""
        if self._of(step).state is _State.PROMOTED:
            self._of(step).state = _State.PASSED_OVER if is_other else _State.UNCHOSEN

    def remain_in_run(self, steps: Collection[int]) -> None:
        """Records the steps that remain after a removal in the directory of the run."""
        for step, each in self._steps.items():
            each.is_in_run = each.is_in_run and step in steps

    def forget(self, local: Collection[int], in_run: Collection[int]) -> None:
        """Drops the steps that no longer exist in either directory, after a removal in both.

        Local steps that the run does not have may have to be promoted now: newer ones, which had
        displaced them there, are gone.
        """
        self.remain_in_run(in_run)
        for step in local:
            if not self._of(step).is_in_run and self._of(step).state in _ENDED:
                self._of(step).state = _State.UNREADABLE  # Until it is examined again.
        there = {*local, *in_run}
        self._steps = {each: found for each, found in self._steps.items() if each in there}
        self._unreported.intersection_update(there)
        self._here.intersection_update(local)

    # ---- What follows ----

    def next(self, local: Sequence[int]) -> int | None:
        """Returns the step to promote next: the newest waiting step, retained or not."""
        self.found_here(local)
        waiting = (s for s in local if s != self._in_save and self._of(s).state is _State.WAITS)
        return next(waiting, None)

    def newest_waiting(self) -> int | None:
        """Returns the newest step to promote, as far as known without reading the directory."""
        for state in (_State.WAITS, _State.UNCHOSEN):
            if waiting := [step for step in self._here if self._of(step).state is state]:
                return max(waiting)
        return None

    def choice(self, local: Sequence[int], saving: int | None, *, may_choose: bool) -> Choice:
        """Returns the coordinator's choice. A step may be about to be saved."""
        news = sorted(self._unreported)
        committed = [s for s in news if self._of(s).state is _State.PROMOTED]
        passed_over = [s for s in news if self._of(s).state is _State.PASSED_OVER]
        chosen = self._to_choose(local, saving) if may_choose else ()
        return Choice(chosen, committed, passed_over)

    def _to_choose(self, local: Sequence[int], saving: int | None) -> Sequence[int]:
        """Returns the step that is about to be saved, and waiting steps."""
        own = [] if saving is None else [saving]
        retained = self._retained(local).difference(own)
        return [*own, *(s for s in local if s in retained and self._of(s).state in _OPEN)]

    def ended_here(self) -> dict[int, str]:
        """Returns the chosen steps of which this place sends no more files, and why."""
        chosen = {step: self._of(step) for step in self._chosen}
        return {
            step: each.problem if each.state is _State.PASSED_OVER else ""
            for step, each in chosen.items()
            if each.state is _State.SENT or each.state in _ENDED
        }

    def wanted(self, local: Sequence[int]) -> set[int]:
        """Returns the local steps that the run retains or will receive.

        All places promote chosen steps, even if the run no longer retains them. A damaged step
        remains as if it were whole, and so does the step that it would displace. A step that cannot
        be read remains.
        """
        self.found_here(local)
        damaged = [s for s in local if self._of(s).state is _State.PASSED_OVER]
        retained = self._retained(local) | self._retained(local, also=damaged)
        remain = _TO_PROMOTE | {_State.UNREADABLE}
        return {s for s in local if s in retained or self._of(s).state in remain}

    def removable(
        self,
        local: Sequence[int],
        listed: Sequence[int],
        *,
        keep: int,
        whole: Collection[int],
    ) -> list[int]:
        """Returns which of the ``listed`` local directories of steps need not remain.

        The ``keep`` newest steps remain, retained steps that are not ``whole`` in the run, and the
        step that is being promoted. Steps removed without promotion count as skipped.
        """
        saved = self._saved
        if saved is None:
            return []
        committed = [step for step in local if step <= saved]
        needed = {*self.wanted(committed).difference(whole), *committed[:keep], self.in_progress}
        for step in committed:
            if step not in needed:
                self._skip(step)
        removable = [step for step in listed if step <= saved and step not in needed]
        self._unneeded.update(removable)
        return removable

    def promoted_beyond(self, local: Sequence[int], keep: int) -> list[int]:
        """Returns the promoted steps that need not remain if the run has them whole."""
        committed = [step for step in local if self._saved is not None and step <= self._saved]
        wanted = self.wanted(committed).difference(committed[:keep])
        return sorted(step for step in wanted if self._of(step).state is _State.PROMOTED)

    def newest_in_run(self, promoted: int) -> int:
        """Returns the newest step of the run, after the promotion of a step."""
        in_run = (step for step, each in self._steps.items() if each.is_in_run)
        counted = (s for s in in_run if s == promoted or self._saved is None or s <= self._saved)
        return max(counted, default=promoted)

    def bases_in_run(self, step: int) -> list[int]:
        """Returns the steps of the run that most likely share files with a step, at most three.

        These are the newest older steps, and then the newest others.
        """
        others = [other for other, each in self._steps.items() if each.is_in_run and other != step]
        return sorted(others, key=lambda other: (other > step, -other))[:3]

    # ---- Facts ----

    @property
    def has_begun(self) -> bool:
        """Whether this process has begun to save a step."""
        return self._saved is not None or self._in_save is not None

    def unreadable(self) -> list[int]:
        """Returns the local steps that could not be read yet."""
        return [s for s, each in self._steps.items() if each.state is _State.UNREADABLE]

    def has_ended(self, step: int) -> bool:
        """Returns whether the local save of a step is promoted, or will not be."""
        return step in self._steps and self._of(step).state in _ENDED

    def _of(self, step: int) -> _Step:
        return self._steps.setdefault(step, _Step())

    def _skip(self, step: int) -> None:
        each = self._of(step)
        if each.state not in _ENDED:
            each.state = _State.PASSED_OVER
            self.skipped += 1

    def _know_ages(self, ages: Mapping[int, float]) -> None:
        for step, age_s in ages.items():
            self._of(step).saved_s = time.time() - age_s

    def _retained(self, local: Iterable[int], *, also: Collection[int] = ()) -> set[int]:
        """Returns the steps in either directory that the run retains.

        Steps that are passed over, and not in the run, do not count, except ``also``. A local step
        whose metrics cannot be read now remains, because it may be the best.
        """
        here = {s for s in local if s in also or self._of(s).state is not _State.PASSED_OVER}
        steps = {step for step, each in self._steps.items() if each.is_in_run} | here
        steps = {step for step in steps if self._lineage.has(step, self._of(step).term)}
        if self._saved is not None:  # Newer steps are on an abandoned branch.
            steps = {step for step in steps if step <= self._saved}

        unknown: set[int] = set()

        def values() -> dict[int, float]:
            monitor = self._retention.monitor or ""
            for each, known in ((step, self._of(step)) for step in steps):
                if known.value is None and each not in here:
                    known.value = math.nan
                elif known.value is None:
                    try:
                        metrics = readable_metrics_of(self._directory.path(each))
                        known.value = metrics.get(monitor, math.nan)
                    except CheckpointError:
                        unknown.add(each)
            found = {step: self._of(step).value for step in steps}
            return {s: v for s, v in found.items() if v is not None and not math.isnan(v)}

        def ages(older: Collection[int]) -> dict[int, float]:
            unknown = [s for s in older if s in here and self._of(s).saved_s is None]
            self._know_ages(self._directory.ages(unknown))
            known = {step: self._of(step).saved_s for step in older}
            return {step: time.time() - at for step, at in known.items() if at is not None}

        def check(step: int) -> None:
            # The run's directory may not answer. Its retention checks the steps there.
            if step in here and not self._of(step).is_in_run:
                self._directory.check_whole(self._directory.path(step))

        chosen = self._retention.choose(steps, values, ages, check)
        return steps.difference(chosen.failed, set(chosen.older) - chosen.retained - unknown)


class StepsOfOnePlace(PromotionSteps):
    """The steps of a run that saves at one place. The next one depends on no other place."""

    def saved(self, step: int) -> bool:
        super().saved(step)
        return True

    def not_saved(self, step: int) -> None:
        """Ends the save. The single place has either the step or its former save."""
        self._in_save = None
        if step in self._here:  # It is promoted, if it was not.
            self._saved = step

    def next(self, local: Sequence[int]) -> int | None:
        """Returns the newest step that the run would retain. Newer ones are skipped."""
        self.found_here(local)
        retained = self._retained(local)
        for step in local:
            if step != self._in_save and self._of(step).state in _OPEN:
                if step in retained:
                    return step
                self._skip(step)
        return None

    def _to_choose(self, local: Sequence[int], saving: int | None) -> Sequence[int]:
        return ()
