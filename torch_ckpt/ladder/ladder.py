"""Ladder: the rungs of a run's steps, such as memory and disk, combined.

A restore chooses the newest step that is whole on some rung and on the lineage of the run's newest
term, from the first rung that has it. The coordinator chooses, and all ranks load the step from the
same rung. If the step is damaged, all ranks load the next older one. A step that the run has left
is loaded only by its number.

To add a rung, write a class with the methods of :class:`Rung`, and add it to ``rungs`` in
``Run.__init__``, before less preferred rungs. The last one is the directory of the run. If the rung
may have steps that no directory has, extend ``StepSaves.discard_after`` to discard them.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageReader

from torch_ckpt.api import load
from torch_ckpt.commits.terms import Term, newest_term
from torch_ckpt.coordination.answering import answered_within
from torch_ckpt.coordination.group import Group
from torch_ckpt.coordination.portable import why
from torch_ckpt.errors import (
    CancelledError,
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
    is_damage,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.step_files import listed_steps, step_number
from torch_ckpt.planning.load_planner import FastLoadPlanner
from torch_ckpt.planning.load_report import LoadReport

__all__ = ["Ladder", "Rung"]

T = TypeVar("T")
R = TypeVar("R")

_CHOOSING = "choosing a step to restore"

_MOST_TRIES = 100
"""Maximum number of steps that a restore tries: training may remove each during its load."""


class Rung(Protocol):
    """A place with steps of a run: memory, a directory, or the directories of several machines.

    ``place`` names it in warnings. A step that is passed over there may be restored from another
    place. ``unreadable`` are the steps among those of :meth:`steps` that cannot be read now, and
    may be whole, with their errors.
    """

    place: str
    unreadable: dict[int, StorageError]

    def report(self) -> Any:
        """Returns this rank's report about its steps. Called on every rank."""
        ...

    def steps(self, reports: Sequence[Any], lineage: Term) -> Iterator[int]:
        """Returns the whole steps of the rung, the newest first.

        Called on one rank for all, with the reports of all ranks. The bytes of steps outside the
        ``lineage`` need not be read.
        """
        ...

    def term_of(self, step: int, reports: Sequence[Any]) -> int:
        """Returns the term in which a whole step of the rung was saved. Called on one rank."""
        ...

    def damaged(self, reports: Sequence[Any]) -> list[int]:
        """Returns steps that were committed and are not whole. Called on one rank for all."""
        ...

    def reader_of(self, step: int, group: Group, timeout_s: float) -> StorageReader:
        """Returns a reader of a step. Called on all ranks; an error on one is raised on all."""
        ...


class _Found(NamedTuple):
    """A whole step, the number of its rung, and the term in which it was saved."""

    step: int
    rung: int
    term: int


class Ladder:
    """Several rungs of one run. All ranks call its methods together.

    If several rungs have the same step, the first is used. ``directory`` is the directory of the
    run, which contains its terms. ``lineage`` records the restored step. ``ready`` is called first
    on each rank: it waits for the background save, and checks the local directory.
    ``process_group`` contains the ranks of ``group``, for DCP; all ranks if ``None``.

    Example::

        ladder = Ladder([disk], group, None, 600, path, Lineage([disk], Retention()), saves.ready)
        start = ladder.restore(state)
    """

    def __init__(
        self,
        rungs: Sequence[Rung],
        group: Group,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        directory: Location,
        lineage: Lineage,
        ready: Callable[[], None],
    ) -> None:
        self._rungs, self._group, self._process_group = rungs, group, process_group
        self._timeout_s, self._directory = timeout_s, directory
        self._lineage, self._ready = lineage, ready
        # On the coordinator, from the last choice: the newest term, and steps outside its lineage.
        self._term, self._left = Term(), list[int]()
        self._damaged = set[_Found]()  # Passed over by all restores.
        self.loaded: LoadReport | None = None
        """What the last restore did; ``None`` if it loaded nothing."""

    def latest(self) -> int | None:
        """Returns the newest whole step, equal on all ranks; ``None`` if none was committed.

        Raises CorruptionError if steps were committed, but none is whole.
        """
        found = self._choose((), {}, "looking for the latest step")
        return None if found is None else found.step

    def restore(self, state: dict[str, Any], strict: bool | None = None) -> int | None:
        """Loads the newest sound step and returns it; ``None`` if no step was committed."""
        self.loaded = None
        given: dict[str, object] = {"step": None, "strict": strict}
        tried: list[_Found] = []
        failure: CheckpointException | None = None
        try:
            while len(tried) < _MOST_TRIES and (found := self._choose(tried, given)):
                tried.append(found)
                try:
                    self._load(found, state, strict, newest=found.step, is_given=False)
                except CheckpointException as error:
                    if not _is_damage(error):
                        raise
                    self._damaged.add(found)
                    passed_over = (
                        f"step {found.step} is passed over in {self._rungs[found.rung].place}"
                    )
                    warnings.warn(f"{passed_over}: {why(error)}", stacklevel=3)
                    failure = failure or error
                else:
                    return found.step
            if failure is not None:
                rest = "the others were not tried" if len(tried) == _MOST_TRIES else "none is whole"
                failure.add_note(
                    f"{len(tried)} steps were tried, and {rest}; the state may be partly loaded"
                )
                raise failure
            return None
        finally:
            del failure  # Its traceback refers to this frame, and so to the state.

    def restore_step(self, state: dict[str, Any], step: object, strict: bool | None = None) -> int:
        """Loads a step from the first rung with the whole step, or else from the last rung.

        Of several saves of the step, prefers those of the lineage, and then the latest term.
        Returns the step as an ``int``. Raises TypeError if it is not an integer.
        """

        def choose(answers: list[tuple[int, list[Any]]]) -> tuple[list[_Found], int]:
            """Returns the step, and the newest one on all rungs except the last, the disk."""
            step = answers[0][0]
            by_rung = [[reports[n] for _, reports in answers] for n in range(len(self._rungs))]
            *former, last = enumerate(self._rungs)
            self._term = newest_term(self._directory)
            memory = {n: set(rung.steps(by_rung[n], self._term)) for n, rung in former}
            memory = {n: steps.difference(self._rungs[n].unreadable) for n, steps in memory.items()}
            with_step = [n for n, steps in memory.items() if step in steps]
            found = [_Found(step, n, self._rungs[n].term_of(step, by_rung[n])) for n in with_step]
            with contextlib.suppress(*([CheckpointError] if found else [])):
                found.append(_Found(step, last[0], last[1].term_of(step, by_rung[last[0]])))
            found.sort(key=lambda each: (not self._term.has(step, each.term), -each.term))
            return found, max([step, *(max(steps, default=step) for steps in memory.values())])

        self.loaded = None
        given = {"step": step, "strict": strict}
        found, newest = self._decide(lambda: step_number(step), choose, given)
        for each in found:
            try:
                self._load(each, state, strict, newest=newest, is_given=True)
            except CheckpointException as error:
                if each is found[-1] or not _is_damage(error):
                    raise
                self._damaged.add(each)
            else:
                break
        return found[0].step

    def damaged_on(self, rung: Rung) -> set[int]:
        """Returns the steps that restores have passed over on a rung because of damage."""
        return {each.step for each in self._damaged if self._rungs[each.rung] is rung}

    def reading(self, choose: Callable[[T], R]) -> Callable[[T], R]:
        """Returns a function that reads the directory and chooses, within the deadline."""

        def read(answers: T) -> R:
            self._lineage.check_place()
            return choose(answers)

        what, directory = "cannot choose a step", self._directory
        return lambda answers: answered_within(
            self._timeout_s, lambda: read(answers), what, directory
        )

    def _decide(
        self,
        own: Callable[[], T],
        choose: Callable[[list[tuple[T, list[Any]]]], R],
        given: Mapping[str, object],
        activity: str = _CHOOSING,
    ) -> R:
        """Returns the coordinator's choice, based on the values of ``own`` and all reports."""

        def report() -> tuple[T, list[Any]]:
            self._ready()
            return own(), [rung.report() for rung in self._rungs]

        return self._group.decide(
            activity,
            report,
            self.reading(choose),
            timeout_s=self._timeout_s,
            recorded="choose",
            equal=given,
        )

    def _newest(self, tried: Sequence[_Found], reports: Sequence[list[Any]]) -> _Found | None:
        """Returns the newest whole step of the lineage that was not tried.

        If a step exists several times, prefers the latest term, and then the first rung. Warns of
        each newer step outside the lineage. Raises StorageError if the step cannot be read: an
        older one in its place would lose work.
        """

        def whole(rung: Rung, number: int) -> Iterator[_Found]:
            of_rung = [rank_reports[number] for rank_reports in reports]
            for step in rung.steps(of_rung, self._term):
                is_readable = step not in rung.unreadable  # Else the last of its number.
                yield _Found(step, number, rung.term_of(step, of_rung) if is_readable else -1)

        rungs = map(whole, self._rungs, itertools.count())
        for found in heapq.merge(*rungs, key=lambda found: (-found.step, -found.term)):
            if found in tried:
                continue
            if found.term < 0:
                raise self._rungs[found.rung].unreadable[found.step]
            if self._term.has(found.step, found.term):
                return found
            if found.step not in self._left:
                self._left.append(found.step)
                warnings.warn(
                    f"step {found.step} is passed over: {self._directory} has left it. Its newest "
                    f"job ({self._term}) has not continued from that step. To load it, call "
                    f"restore(state, step={found.step})",
                    stacklevel=2,
                )
        return None

    def _choose(
        self, tried: Sequence[_Found], given: Mapping[str, object], activity: str = _CHOOSING
    ) -> _Found | None:
        def choose(answers: list[tuple[None, list[Any]]]) -> _Found | None:
            self._term, self._left = newest_term(self._directory), []
            reports = [of_rank for _, of_rank in answers]
            found = self._newest(tried, reports)
            if found is None and not tried and self._left:
                raise CorruptionError(
                    f"cannot restore from {self._directory}: its newest job ({self._term}) "
                    "has saved no whole step, nor continued from one. To continue from "
                    f"step {self._left[0]}, which the run has left, call "
                    f"restore(state, step={self._left[0]})"
                )
            if found is None and not tried:
                by_rung = zip(self._rungs, zip(*reports, strict=True), strict=True)
                damaged = {step for rung, of_rung in by_rung for step in rung.damaged(of_rung)}
                if damaged:
                    raise CorruptionError(
                        f"cannot restore from {self._directory}: no committed step is whole "
                        f"({len(damaged)} are damaged or lack files, the newest is step "
                        f"{max(damaged)}); to start over, use another directory"
                    )
                if (self._directory / ".metadata").is_file():
                    path = self._directory
                    advice = f"call torch_ckpt.load(state, checkpoint_id={str(path)!r})"
                    if path.name in map("step-{}".format, listed_steps(path.parent)):
                        advice = f"pass the directory of its run, {path.parent}"
                    raise NotFoundError(
                        f"cannot restore from {path}: it is a checkpoint, not a run; {advice}"
                    )
            return found

        return self._decide(lambda: None, choose, given, activity)

    def _load(
        self,
        found: _Found,
        state: dict[str, Any],
        strict: bool | None,
        *,
        newest: int,
        is_given: bool,
    ) -> None:
        """Loads a step, and records on the coordinator that this process continues from it."""
        rung, (step, _, term), timeout_s = self._rungs[found.rung], found, self._timeout_s
        planner = FastLoadPlanner(strict=strict)
        planner.is_whole = True
        loaded = load(  # If it raises on one rank, it raises on all.
            state,
            storage_reader=rung.reader_of(step, self._group, timeout_s),
            planner=planner,
            process_group=self._process_group,
            no_dist=self._group.size == 1,
            timeout_s=timeout_s,
        )

        def record(_: object) -> None:
            self._lineage.restored(step, newest, term, self._term, is_given=is_given)

        self._group.decide("restoring", lambda: None, record, timeout_s=timeout_s)
        self.loaded = loaded


def _is_damage(error: CheckpointException) -> bool:
    """Returns whether a load failed because of stored data, so that an older step may load."""
    causes = [cause for cause, _ in error.failures.values()]
    damage = [cause for cause in causes if is_damage(cause)]
    cancelled = [cause for cause in causes if isinstance(cause, CancelledError)]
    return bool(damage) and len(damage) + len(cancelled) == len(causes)
