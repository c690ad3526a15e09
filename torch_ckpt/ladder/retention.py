"""Retention: which steps of a run remain after a save."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import get_args

from torch_ckpt.commits.terms import Term, newest_term
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    UnsupportedError,
)
from torch_ckpt.formats.committed import metadata_prefixes
from torch_ckpt.ladder.step_directories import Mode, StepDirectories
from torch_ckpt.ladder.step_files import agreed, leased_steps, listed_steps, whole_number

__all__ = ["Chosen", "Retention"]


@dataclass(frozen=True)
class Chosen:
    """Some steps of a run by what becomes of them. Damaged ones, which remain, are in no list.

    Attributes:
        newest: The newest whole steps, which remain.
        failed: What saves have left that are older than one of the newest.
        older: All steps that are older than the newest. Of these, the ``retained`` ones remain.
    """

    newest: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    older: list[int] = field(default_factory=list)
    retained: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Retention:
    """Which steps of a run remain after a save; the options are those of :class:`Run`.

    Raises TypeError if a number is no integer, and ValueError if it is not positive, the mode is
    unknown, or ``monitor`` is missing.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    monitor: str | None = None
    mode: Mode = "min"

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and whole_number(name, value) < 1:
                raise ValueError(f"{name}={value} is not positive")
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode={self.mode!r} is not one of {', '.join(get_args(Mode))}")
        if self.keep_best is not None and self.monitor is None:
            raise ValueError(f"keep_best={self.keep_best} needs the name of a metric: pass monitor")

    def best(self, disks: Sequence[StepDirectories]) -> int | None:
        """Returns the whole step with the best value of the metric; ``None`` if there is none.

        ``disks`` are the directories of a run; the last has its terms. Of equal values, that of the
        earlier step is better. Steps that the run has left do not count, nor do those without the
        metric or with a NaN.
        """
        if (monitor := self.monitor) is None:
            return None
        lineage = newest_term(disks[-1].directory)

        def scan() -> tuple[list[int], list[int]]:
            """Returns the best steps, and better ones that are not whole, or removed meanwhile."""
            values: dict[int, float] = {}
            having: dict[int, list[StepDirectories]] = {}
            for disk in disks:
                for step, value in disk.values(monitor).items():
                    if lineage.has(step, disk.term_of(step)):
                        values[step] = value
                        having.setdefault(step, []).append(disk)
            others: list[int] = []

            def is_whole(step: int) -> bool:
                for disk in having[step]:
                    with contextlib.suppress(CorruptionError, NotFoundError, UnsupportedError):
                        disk.check_whole(disk.path(step))
                        return True
                others.append(step)
                return False

            return self._best_of(values, 1, is_whole), others

        return next(iter(agreed(scan, lambda found: not found[1])[0]), None)

    def choose(
        self,
        steps: Iterable[int],
        values: Callable[[], Mapping[int, float]],
        check: Callable[[int], None],
    ) -> Chosen:
        """Returns which of some steps remain.

        ``values`` returns their metrics, without NaNs; it is called with ``keep_best`` only.
        ``check`` raises CheckpointError if a step is not whole.
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
        unreadable: set[int] = set()  # Each may be whole: it remains, and so does the next best.

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
        return chosen

    def apply(
        self,
        disk: StepDirectories,
        saved: int,
        in_use: Collection[int] = (),
        *,
        lineage: Term | None = None,
    ) -> None:
        """Removes the steps that are not to be retained after ``saved``; called on one rank.

        Only whole steps up to ``saved`` count that are on the ``lineage`` of a term, or all without
        one. ``saved`` and the steps ``in_use`` always remain. So do newer steps, which belong to a
        branch that the run has left, steps that do not count and are newer than the oldest of the
        newest ``keep_last``, such as damaged ones, leased steps, and directories
        that are neither a checkpoint nor the remains of a save. A best step that cannot be read now
        remains as well, beside ``keep_best`` whole ones. Warns once of each step that cannot
        be removed.
        """
        disk.sweep()
        if not self.removes:
            return

        def check(step: int) -> None:
            term = disk.check_whole(disk.path(step))
            if lineage is not None and not lineage.has(step, term or disk.term_of(step)):
                raise CorruptionError(f"step {step} is not on the lineage of {lineage}")

        chosen = self.choose(
            (step for step in listed_steps(disk.directory) if step <= saved),
            lambda: disk.values(self.monitor or ""),
            check,
        )
        kept = {saved, *in_use, *leased_steps(disk.directory), *chosen.newest}
        kept |= {step for step in chosen.retained - kept if metadata_prefixes(disk.path(step))}
        disk.remove([step for step in (*chosen.failed, *chosen.older) if step not in kept])

    @property
    def removes(self) -> bool:
        """Whether steps are removed at all."""
        return self.keep_last is not None or self.keep_best is not None

    def _best_of(
        self,
        values: Mapping[int, float],
        count: int,
        is_whole: Callable[[int], bool] = lambda _: True,
    ) -> list[int]:
        sign = 1 if self.mode == "min" else -1
        ranked = sorted(values, key=lambda step: (sign * values[step], step))
        return list(islice(filter(is_whole, ranked), count))
