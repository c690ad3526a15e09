"""Retention: which steps of a run remain after a save."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple, get_args

from torch_ckpt.commits.terms import Term, newest_term
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    StorageError,
)
from torch_ckpt.formats.committed import metadata_prefixes
from torch_ckpt.ladder.step_directories import Mode, StepDirectories, is_whole_in
from torch_ckpt.ladder.step_files import (
    agreed,
    committed_steps,
    leased_steps,
    listed_steps,
    whole_number,
)
from torch_ckpt.ladder.times import age_s

__all__ = ["Chosen", "Retention"]


@dataclass(frozen=True)
class Chosen:
    """The fate of steps of a run. Damaged steps, which remain, are in no list.

    Attributes:
        newest: The newest whole steps, which remain.
        failed: Remains of saves that are older than one of the newest.
        older: All steps that are older than the newest. Of these, the ``retained`` ones remain.
    """

    newest: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    older: list[int] = field(default_factory=list)
    retained: set[int] = field(default_factory=set)


class _Copy(NamedTuple):
    """A copy of a step in one directory, its metric, and why that could not be read."""

    term: int
    value: float
    error: CheckpointError | None
    disk: StepDirectories


@dataclass(frozen=True)
class Retention:
    """Decides which steps of a run remain after a save. Options are as in :class:`Run`.

    Raises TypeError if a number is not an integer, or ``keep_for`` not an age. Raises ValueError if
    one of them is not positive, the mode is unknown, or ``monitor`` is missing.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    monitor: str | None = None
    mode: Mode = "min"
    keep_for: str | timedelta | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and whole_number(name, value) < 1:
                raise ValueError(f"{name}={value} is not positive")
        if self.keep_for is not None:
            age_s("keep_for", self.keep_for)
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode={self.mode!r} is not one of {', '.join(get_args(Mode))}")
        if self.keep_best is not None and self.monitor is None:
            raise ValueError(f"keep_best={self.keep_best} needs the name of a metric: pass monitor")

    def best(self, disks: Sequence[StepDirectories], reports: Sequence[Any] = ()) -> int | None:
        """Returns the whole step with the best value of the metric; ``None`` without such a step.

        ``disks`` are the directories of a run; the last contains its terms. ``reports`` are those
        of all ranks about the first. If values are equal, the earlier step is better. Steps that
        the run has left, that lack the metric, or whose metric is NaN or damaged do not count.
        Raises StorageError if the step cannot be read, or its metrics.
        """
        if (monitor := self.monitor) is None:
            return None
        lineage = newest_term(disks[-1].directory)

        def counted_term(disk: StepDirectories, step: int) -> int | None:
            """Returns the term of a step that counts; -1 if it is unknown."""
            try:
                term = disk.term_of(step)
            except CheckpointError:  # It counts if it is whole.
                return -1
            return term if lineage.has(step, term) else None

        def lacks_files(disk: StepDirectories, step: int) -> bool:
            with contextlib.suppress(StorageError):
                return not is_whole_in([disk], step, reports)
            return False

        def scan() -> tuple[list[int], list[int]]:
            """Returns the best steps, and better ones that are not whole or no longer exist."""
            copies: dict[int, list[_Copy]] = {}
            for disk in disks:
                found, unknown = disk.values(monitor)
                # The directories may have different saves of a step, with the metric or without.
                counted = {*found, *unknown} if len(disks) == 1 else committed_steps(disk.directory)
                for step in counted:
                    error, term = unknown.get(step), counted_term(disk, step)
                    if term is not None and not isinstance(error, CorruptionError):
                        copy = _Copy(term, found.get(step, math.nan), error, disk)
                        copies.setdefault(step, []).append(copy)
            values: dict[int, float] = {}
            having: dict[int, list[StepDirectories]] = {}
            for step, of_step in copies.items():  # The latest term counts, as in a restore.
                of_step.sort(key=lambda copy: (-copy.term, copy.error is not None))
                has_others = any(copy.value != of_step[0].value for copy in of_step[1:])
                if has_others and lacks_files(of_step[0].disk, step):
                    of_step.pop(0)
                if of_step[0].error is not None:
                    raise of_step[0].error
                values[step] = of_step[0].value
                having[step] = [copy.disk for copy in of_step]
            values = {step: value for step, value in values.items() if not math.isnan(value)}
            others: list[int] = []

            def is_whole(step: int) -> bool:
                is_one = is_whole_in(having[step], step, reports)
                if not is_one:
                    others.append(step)
                return is_one

            return self._best_of(values, 1, is_whole), others

        return next(iter(agreed(scan, lambda found: not found[1])[0]), None)

    def choose(
        self,
        steps: Iterable[int],
        values: Callable[[], Mapping[int, float]],
        ages: Callable[[Collection[int]], Mapping[int, float]],
        check: Callable[[int], None],
    ) -> Chosen:
        """Decides which of the steps remain.

        ``values`` returns their metrics, without NaNs; it is called only with ``keep_best``.
        ``ages`` returns the ages of some steps, in seconds; it is called only with ``keep_for``. A
        step of unknown age counts as young. ``check`` raises CheckpointError if a step is not
        whole.
        """
        chosen = Chosen()
        ordered = sorted(steps, reverse=True)
        if not self.removes:
            return Chosen(newest=ordered)
        for step in ordered:
            if len(chosen.newest) == (self.keep_last or 1):
                chosen.older.append(step)
                continue
            try:
                check(step)
                chosen.newest.append(step)
            except NotFoundError:
                if chosen.newest:
                    chosen.failed.append(step)
            except CheckpointError:
                continue
        best = values() if self.keep_best else {}
        unreadable: set[int] = set()  # They may be whole: they remain, and so do the next best.

        def is_whole(step: int) -> bool:
            if step in chosen.newest:
                return True
            try:
                check(step)
            except (CorruptionError, NotFoundError):
                return False
            except CheckpointError:
                unreadable.add(step)
                return False
            return True

        counted, every = [*chosen.newest, *chosen.older], self.keep_every
        best = {step: best[step] for step in counted if step in best}
        chosen.retained.update(self._best_of(best, self.keep_best or 0, is_whole))
        chosen.retained.update(unreadable)
        chosen.retained.update(step for step in counted if every is not None and step % every == 0)
        if self.keep_for is not None:
            limit, older = age_s("keep_for", self.keep_for), ages(chosen.older)
            chosen.retained.update(s for s in chosen.older if older.get(s, 0.0) < limit)
        return chosen

    def apply(
        self,
        disk: StepDirectories,
        saved: int,
        in_use: Collection[int] = (),
        *,
        lineage: Term | None = None,
    ) -> None:
        """Removes the steps that need not remain after the save of ``saved``. Called on one rank.

        Only whole steps up to ``saved`` count; with a ``lineage``, only steps on it. ``saved`` and
        the steps ``in_use`` always remain. So do leased steps, newer steps (on a branch that the
        run has left), directories that are neither a checkpoint nor the remains of a save, and
        steps that do not count, such as damaged ones, if they are newer than the oldest of the
        newest ``keep_last``. A best step that cannot be read now also remains, in addition to
        ``keep_best`` whole ones, and so does a step whose metrics cannot be read now. Warns once of
        each step that cannot be removed.
        """
        disk.sweep(0 if lineage is None else lineage.number)
        if not self.removes:
            return

        def check(step: int) -> None:
            term = disk.check_whole(disk.path(step))
            if lineage is not None and not lineage.has(step, term or disk.term_of(step)):
                raise CorruptionError(f"step {step} is not on the lineage of {lineage}")

        unknown: set[int] = set()  # Any of these may be the best.

        def values() -> dict[int, float]:
            found, errors = disk.values(self.monitor or "")
            unknown.update(errors)
            return found

        steps = (step for step in listed_steps(disk.directory) if step <= saved)
        chosen = self.choose(steps, values, disk.ages, check)
        chosen.retained.update(unknown)
        retained = {saved, *in_use, *leased_steps(disk.directory), *chosen.newest}
        for step in chosen.retained - retained:
            try:
                is_checkpoint = bool(metadata_prefixes(disk.path(step)))
            except StorageError:  # It may be one.
                is_checkpoint = True
            retained |= {step} if is_checkpoint else set()
        disk.remove([step for step in (*chosen.failed, *chosen.older) if step not in retained])

    @property
    def removes(self) -> bool:
        """Whether steps are removed at all."""
        options = self.keep_last, self.keep_best, self.keep_for
        return any(option is not None for option in options)

    def _best_of(
        self,
        values: Mapping[int, float],
        count: int,
        is_whole: Callable[[int], bool] = lambda _: True,
    ) -> list[int]:
        sign = 1 if self.mode == "min" else -1
        ranked = sorted(values, key=lambda step: (sign * values[step], step))
        return list(islice(filter(is_whole, ranked), count))
