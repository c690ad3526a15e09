"""Retention: which steps of a run remain after a save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch_ckpt.runs.step_directories import Mode, StepDirectories

__all__ = ["Retention"]


@dataclass(frozen=True)
class Retention:
    """Which steps of a run remain after a save; the options are those of :class:`Run`.

    Raises ValueError if a number is not positive, the mode is unknown, or ``monitor`` is missing.
    """

    keep_last: int | None
    keep_every: int | None
    keep_best: int | None
    monitor: str | None
    mode: Mode

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not positive")
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode={self.mode!r} is not one of {', '.join(get_args(Mode))}")
        if self.keep_best is not None and self.monitor is None:
            raise ValueError(f"keep_best={self.keep_best} needs the name of a metric: pass monitor")

    def best(self, disk: StepDirectories, count: int = 1) -> list[int]:
        """Returns the steps with the best values of the metric; empty without a metric."""
        return [] if self.monitor is None else disk.best(self.monitor, self.mode, count)

    def apply(self, disk: StepDirectories, saved: int) -> None:
        """Removes the steps that are not to be retained after ``saved``; called on one rank."""
        disk.sweep()
        if self.keep_last is None and self.keep_best is None:
            return
        best = self.best(disk, self.keep_best) if self.keep_best is not None else []
        disk.retain(saved, last=self.keep_last or 1, every=self.keep_every, best=best)
