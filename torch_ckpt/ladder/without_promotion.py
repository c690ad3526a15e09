"""WithoutPromotion: replaces a promotion on a rank that promotes no steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch_ckpt.errors import CheckpointError, warn_after_commit
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.promotion_steps import Choice
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.records.record import phase

__all__ = ["WithoutPromotion", "remove_old"]


class WithoutPromotion:
    """Replaces the :class:`Promotion` on a rank that has none, and does nothing.

    ``retain`` is called after each save. On the coordinator of a run without a local directory, it
    removes the old steps. ``check_owner`` raises CheckpointError if another run has taken over the
    local directory.
    """

    count = skipped = 0

    def __init__(
        self,
        retain: Callable[[int], None] = lambda step: None,
        check_owner: Callable[[], object] = lambda: None,
    ) -> None:
        self.saved, self.check_owner = retain, check_owner

    def _ignore(self, *_: Any) -> None:
        """Does nothing."""

    start = report = heard_from = check = heard = retry = saving = not_saved = _ignore
    progress = cancel = _ignore

    def _nothing(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    bar = discarding_after = _nothing

    def choice(self, saving: int | None = None, *, may_choose: bool = True) -> Choice:
        return Choice()

    def is_awaited(self, step: int) -> bool:
        return False

    def awaited(self) -> str:
        return "waiting for promotion"


def remove_old(disk: StepDirectories, retention: Retention, lineage: Lineage, saved: int) -> None:
    """Removes the steps that need not remain after a save."""
    try:
        with phase("retain"):
            retention.apply(disk, saved, lineage=lineage.newest())
    except (CheckpointError, OSError) as error:
        warn_after_commit(f"old steps were not removed: {error}", stacklevel=2)
