"""Ladder: the rungs of a run's steps, such as memory and disk, combined.

The coordinator chooses the newest whole step of the lineage, and all ranks load it from the same
rung. If the step is damaged, all ranks fall back to the same older step.
"""

from __future__ import annotations

import errno
import functools
import heapq
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
    CorruptionError,
    NotFoundError,
    StorageError,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import listed_steps
from torch_ckpt.planning.load_planner import FastLoadPlanner

__all__ = ["Ladder", "Rung"]

T = TypeVar("T")
R = TypeVar("R")

_MOST_TRIES = 100
"""Most steps that a restore tries. A training may remove each while it is loaded."""


class Rung(Protocol):
    """A place of steps of a run: memory, a directory, or the directories of several machines."""

    def report(self) -> Any:
        """Returns this rank's report about its steps. Called on every rank."""
        ...

    def steps(self, reports: Sequence[Any], lineage: Term) -> Iterator[int]:
        """Returns the whole steps of the rung, the newest first.

        Called on one rank, for all, with the reports of all ranks. The bytes of steps that are not
        on the ``lineage`` need not be read.
        """
        ...

    def term_of(self, step: int, reports: Sequence[Any]) -> int:
        """Returns the term in which a whole step of the rung was saved. Called on one rank."""
        ...

    def damaged(self) -> list[int]:
        """Returns steps that were committed and are damaged. Called on one rank."""
        ...

    def reader_of(self, step: int, group: Group, timeout_s: float) -> StorageReader:
        """Returns a reader of a step. Called on all ranks; if it raises on one, it does on all."""
        ...


class _Found(NamedTuple):
    """A whole step, the number of its rung, and the term in which it was saved."""

    step: int
    rung: int
    term: int


class Ladder:
    """Several rungs of one run. All ranks call its methods together.

    If several rungs have the same step, the first counts. ``directory`` is that of the run, which
    has its terms. ``process_group`` has the ranks of ``group``, for DCP; all if ``None``.

    Example::

        ladder = Ladder([StepDirectories(path)], group_of(None), None, 600, path)
        start = ladder.restore(state, first=lambda: None)
    """

    def __init__(
        self,
        rungs: Sequence[Rung],
        group: Group,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        directory: Location,
    ) -> None:
        self._rungs, self._group, self._process_group = rungs, group, process_group
        self._timeout_s, self._directory = timeout_s, directory
        # On the coordinator, of the last choice: the newest term, and steps that are not on it.
        self._lineage, self._left = Term(), list[int]()

    def latest(self, *, first: Callable[[], None]) -> int | None:
        """Returns the newest whole step, equal on all ranks; ``None`` if none was committed.

        ``first`` is called on each rank before. Raises CorruptionError if none is whole.
        """
        found = self._choose((), first, {})
        return None if found is None else found.step

    def restore(
        self,
        state: dict[str, Any],
        strict: bool | None = None,
        *,
        first: Callable[[], None],
        then: Callable[[int, int, int, int], None] = lambda *_: None,
    ) -> int | None:
        """Loads the newest sound step and returns it; ``None`` if no step was committed.

        ``first`` is called on each rank before. ``then`` is called on the coordinator with the
        loaded step, twice, its term, and the newest term when it was chosen. If it raises, all
        ranks do.
        """
        given: dict[str, object] = {"step": None, "strict": strict}
        tried: list[_Found] = []
        failure: CheckpointException | None = None
        try:
            while len(tried) < _MOST_TRIES and (found := self._choose(tried, first, given)):
                tried.append(found)
                step = found.step
                try:
                    seen = self._lineage.number
                    then_found = functools.partial(then, step, step, found.term, seen)
                    self._load(self._rungs[found.rung], step, state, strict, then_found)
                except CheckpointException as error:
                    if not _is_damage(error):
                        raise
                    warnings.warn(f"step {step} is passed over: {why(error)}", stacklevel=3)
                    failure = failure or error
                else:
                    return step
            if failure is not None:
                rest = "the others were not tried" if len(tried) == _MOST_TRIES else "none is whole"
                failure.add_note(
                    f"{len(tried)} steps were tried, and {rest}; the state may be partly loaded"
                )
                raise failure
            return None
        finally:
            del failure  # Its traceback refers to this frame, and so to the state.

    def restore_step(
        self,
        state: dict[str, Any],
        step: object,
        strict: bool | None = None,
        *,
        first: Callable[[], int],
        then: Callable[[int, int, int, int], None],
    ) -> int:
        """Loads a step from the first rung that has the whole step, or else from the last.

        A step of the lineage comes before others of the same number. Returns the step as an
        ``int``, as ``first`` does, which is called on each rank before. ``then`` is called on the
        coordinator with the step, the newest step of all rungs but the last, which is the disk, the
        term of the loaded step, and the newest term. The newest step is the step again if that is
        newer. If ``then`` raises, all ranks do.
        """

        def choose(answers: list[tuple[int, list[Any]]]) -> tuple[list[_Found], int]:
            step = answers[0][0]
            by_rung = [[reports[n] for _, reports in answers] for n in range(len(self._rungs))]
            *former, last = enumerate(self._rungs)
            self._lineage = newest_term(self._directory)
            memory = {n: list(rung.steps(by_rung[n], self._lineage)) for n, rung in former}
            with_step = [n for n, steps in memory.items() if step in steps] + [last[0]]
            found = [_Found(step, n, self._rungs[n].term_of(step, by_rung[n])) for n in with_step]
            found.sort(key=lambda each: not self._lineage.has(step, each.term))
            return found, max([step, *(max(steps, default=step) for steps in memory.values())])

        found, newest = self._group.decide(
            "choosing a step",
            lambda: self._own_reports(first),
            self.reading("cannot choose a step", choose),
            timeout_s=self._timeout_s,
            recorded="choose",
            equal={"step": step, "strict": strict},
        )
        for step, number, term in found:
            try:
                then_newest = functools.partial(then, step, newest, term, self._lineage.number)
                self._load(self._rungs[number], step, state, strict, then_newest)
            except CheckpointException as error:
                if number == found[-1].rung or not _is_damage(error):
                    raise
            else:
                break
        return found[0].step

    def reading(self, activity: str, choose: Callable[[T], R]) -> Callable[[T], R]:
        """Returns a function that chooses from what the directory has, within the deadline."""
        return lambda answers: answered_within(
            *(self._timeout_s, lambda: choose(answers), activity, self._directory)
        )

    def _own_reports(self, first: Callable[[], T]) -> tuple[T, list[Any]]:
        """Returns the result of ``first``, and this rank's report for each rung."""
        return first(), [rung.report() for rung in self._rungs]

    def _newest(self, tried: Sequence[_Found], reports: Sequence[list[Any]]) -> _Found | None:
        """Returns the newest whole step of the lineage that was not tried.

        Of the same step, that of the latest term is first, and then that of the first rung. Warns
        of each newer step that is not on the lineage.
        """
        rungs = [
            _in_rung(
                rung, number, [rank_reports[number] for rank_reports in reports], self._lineage
            )
            for number, rung in enumerate(self._rungs)
        ]
        for found in heapq.merge(*rungs, key=lambda found: (-found.step, -found.term)):
            if found in tried:
                continue
            if self._lineage.has(found.step, found.term):
                return found
            if found.step not in self._left:
                self._left.append(found.step)
                warnings.warn(
                    f"step {found.step} is passed over: {self._directory} has left it. Its newest "
                    f"job ({self._lineage}) has not gone on from that step. To load it, call "
                    f"restore(state, step={found.step})",
                    stacklevel=2,
                )
        return None

    def _choose(
        self,
        tried: Sequence[_Found],
        first: Callable[[], None],
        given: Mapping[str, object],
    ) -> _Found | None:
        def choose(answers: list[tuple[None, list[Any]]]) -> _Found | None:
            self._lineage, self._left = newest_term(self._directory), []
            found = self._newest(tried, [reports for _, reports in answers])
            if found is None and not tried and self._left:
                raise CorruptionError(
                    f"cannot restore from {self._directory}: no step of its newest job "
                    f"({self._lineage}), or from which that has gone on, is whole. To go on from "
                    f"step {self._left[0]}, which the run has left, call "
                    f"restore(state, step={self._left[0]})"
                )
            if found is None and not tried:
                damaged = [step for rung in self._rungs for step in rung.damaged()]
                if damaged:
                    raise CorruptionError(
                        f"cannot restore from {self._directory}: no committed step is whole "
                        f"({len(damaged)} are damaged, the newest is step {max(damaged)}); to "
                        "start over, use another directory"
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

        return self._group.decide(
            "choosing a step",
            lambda: self._own_reports(first),
            self.reading("cannot choose a step", choose),
            timeout_s=self._timeout_s,
            recorded="choose",
            equal=given,
        )

    def _load(
        self,
        rung: Rung,
        step: int,
        state: dict[str, Any],
        strict: bool | None,
        then: Callable[[], None],
    ) -> None:
        planner = FastLoadPlanner(strict=strict)
        planner.is_whole = True
        load(  # If it raises on one rank, it raises on all.
            state,
            storage_reader=rung.reader_of(step, self._group, self._timeout_s),
            planner=planner,
            process_group=self._process_group,
            no_dist=self._group.size == 1,
            timeout_s=self._timeout_s,
        )
        self._group.decide("restoring", lambda: None, lambda _: then(), timeout_s=self._timeout_s)


def _in_rung(rung: Rung, number: int, reports: Sequence[Any], lineage: Term) -> Iterator[_Found]:
    for step in rung.steps(reports, lineage):
        yield _Found(step, number, rung.term_of(step, reports))


def _is_damage(error: CheckpointException) -> bool:
    """Returns whether a load failed because of stored data, so that an older step may load."""
    causes = [cause for cause, _ in error.failures.values()]
    damage = [
        cause
        for cause in causes
        if isinstance(cause, CorruptionError | NotFoundError)
        or (isinstance(cause, StorageError) and cause.errno == errno.EIO)
    ]
    cancelled = [cause for cause in causes if isinstance(cause, CancelledError)]
    return bool(damage) and len(damage) + len(cancelled) == len(causes)
