"""Retention: which steps of a run remain after a save."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import get_args

from torch_ckpt.commits.terms import Term
from torch_ckpt.errors import CheckpointError, CorruptionError, NotFoundError
from torch_ckpt.formats.committed import metadata_prefixes
from torch_ckpt.runs.step_directories import Mode, StepDirectories
from torch_ckpt.runs.step_files import leased_steps, listed_steps

__all__ = ["Retention"]


@dataclass(frozen=True)
class Retention:
    """Which steps of a run remain after a save; the options are those of :class:`Run`.

    Raises ValueError if a number is not positive, the mode is unknown, or ``monitor`` is missing.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    monitor: str | None = None
    mode: Mode = "min"

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not positive")
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode={self.mode!r} is not one of {', '.join(get_args(Mode))}")
        if self.keep_best is not None and self.monitor is None:
            raise ValueError(f"keep_best={self.keep_best} needs the name of a metric: pass monitor")

    def best(self, disks: Sequence[StepDirectories], count: int = 1) -> list[int]:
        """Returns the committed steps with the best values of the metric, the best one first.

        Of equal values, that of the earlier step is better. A step without the metric, or with a
        NaN, is never among the best. Empty if there is no metric.
        """
        if self.monitor is None:
            return []
        values: dict[int, float] = {}
        for disk in disks:
            values |= disk.values(self.monitor)
        return self._best_of(values, count)

    def retained(
        self,
        steps: Iterable[int],
        values: Mapping[int, float],
        is_whole: Callable[[int], bool] = lambda _: True,
    ) -> set[int]:
        """Returns which of some steps remain. ``values`` are their metrics, without NaNs.

        Of the steps with the best values, only those count for which ``is_whole`` returns true.
        """
        newest = sorted(steps, reverse=True)
        if not self._removes:
            return set(newest)
        every = self.keep_every
        return {
            *newest[: self.keep_last or 1],
            *self._best_of(
                {s: values[s] for s in newest if s in values}, self.keep_best or 0, is_whole
            ),
            *(step for step in newest if every is not None and step % every == 0),
        }

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
        if not self._removes:
            return

        def is_of_lineage(step: int) -> bool:
            return lineage is None or lineage.has(step, disk.term_of(step))

        newest: list[int] = []
        failed: list[int] = []  # What saves before the newest whole step have left.
        older: list[int] = []
        for step in (step for step in listed_steps(disk.directory) if step <= saved):
            if len(newest) == (self.keep_last or 1):
                older.append(step)
                continue
            try:
                disk.check_whole(disk.path(step))
                if is_of_lineage(step):
                    newest.append(step)
            except NotFoundError:
                if newest:
                    failed.append(step)
            except CheckpointError:
                continue
        values = disk.values(self.monitor) if self.keep_best and self.monitor else {}
        unreadable: set[int] = set()  # Each may be whole: it remains, and so does the next best.

        def is_whole(step: int) -> bool:
            if step in newest:
                return True
            try:
                disk.check_whole(disk.path(step))
                return is_of_lineage(step)
            except (CorruptionError, NotFoundError):
                return False
            except CheckpointError:
                unreadable.add(step)
                return False

        retained = self.retained([*newest, *older], values, is_whole) | unreadable
        kept = {saved, *in_use, *leased_steps(disk.directory), *newest}
        kept |= {step for step in retained - kept if metadata_prefixes(disk.path(step))}
        disk.remove([step for step in (*failed, *older) if step not in kept])

    @property
    def _removes(self) -> bool:
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
