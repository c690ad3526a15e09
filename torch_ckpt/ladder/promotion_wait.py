"""Waits of all ranks for the promotions of some of them.

The end of a run waits as long as bytes arrive: the last step may take hours to copy. It does not
wait for a place that stands still.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_ckpt.coordination.group import Group
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.promotion import Promotion
from torch_ckpt.ladder.promotion_steps import Choice, Progress

__all__ = ["await_promotion", "await_promotion_alone"]

_ROUND_S = 2.0
"""Interval at which the ranks exchange whether their promotions are in progress."""


class _Patience:
    """The limits of a wait: ``timeout_s`` for all, and ``idle_s`` in which nothing is done."""

    def __init__(self, timeout_s: float, idle_s: float) -> None:
        self._timeout_s, self._idle_s = timeout_s, idle_s
        self._began = self._changed = time.monotonic()
        self._done: object = None

    @property
    def left_s(self) -> float:
        return max(self._began + self._timeout_s - time.monotonic(), 0.0)

    def over(self, done: object) -> str:
        """Returns why the wait is over, given what is done now; empty if it is not."""
        now = time.monotonic()
        if done != self._done:
            self._done, self._changed = done, now
        if now - self._changed >= self._idle_s:
            return f"and nothing was copied for {self._idle_s:g} s"
        return "" if self.left_s else f"after a wait of {self._timeout_s:g} s"


def await_promotion(
    group: Group,
    promotion: Promotion | None,
    settle: Callable[[], bool],
    *,
    copied: tuple[Location, Location],
    timeout_s: float,
    call_timeout_s: float,
    must_end: bool,
) -> bool:
    """Waits until no rank promotes steps. All ranks call it, also those without a promotion.

    Args:
        group: The ranks.
        promotion: That of this rank.
        settle: Waits for the background save of this rank, and returns whether it has ended.
        copied: The directories from which and to which steps are promoted, for messages.
        timeout_s: For the whole wait.
        call_timeout_s: For one exchange of the ranks, and for a wait in which no bytes arrive.
        must_end: Whether it is an error if saves or promotions take longer.

    Returns:
        Whether saves and promotions have ended.

    Raises:
        CheckpointError: A promotion or a save failed, or takes longer; on all ranks.
    """
    patience, activity = _Patience(timeout_s, call_timeout_s), "waiting for promotion"

    def limit_s() -> float:  # A process that is about to be killed has less than a call.
        return min(patience.left_s + _ROUND_S, call_timeout_s)

    def choose(settled: list[bool]) -> Choice | None:
        if not all(settled):
            return None
        return Choice() if promotion is None else promotion.choice()

    def awaited() -> str:
        return activity if promotion is None else promotion.awaited()

    def progress() -> Progress | None:
        wait_s = min(_ROUND_S, call_timeout_s / 3, patience.left_s)
        return None if promotion is None else promotion.progress(wait_s)

    def go_on(answers: list[Progress | None]) -> tuple[bool, bool, Choice]:
        found = [answer for answer in answers if answer is not None]
        if promotion is not None:  # The first of the answers is that of the coordinator.
            promotion.heard_from([each.report for each in found[1:]])
        for each in found:
            if each.report.failure is not None:
                raise each.report.failure
        busy = [each.awaited for each in found if each.awaited]
        over = patience.over([each.done for each in found])
        if busy and over and must_end:
            raise CheckpointError(
                f"steps of {copied[0]} are still being promoted to {copied[1]} {over}: "
                f"{'; '.join(busy)}"
            )
        heard = Choice() if promotion is None else promotion.choice(may_choose=False)
        # Other places then remove what is committed.
        return bool(busy), not over and bool(busy or heard.committed), heard

    chosen = group.decide(activity, settle, choose, timeout_s=limit_s())
    if chosen is None:
        return False
    if promotion is not None:
        promotion.retry(chosen)
    is_busy = goes_on = True
    waiting = LongWait(awaited, is_named=group.is_coordinator)
    while goes_on:  # In rounds: a rank that is lost, or fails, is noticed soon.
        is_busy, goes_on, choice = group.decide(activity, progress, go_on, timeout_s=limit_s())
        if promotion is not None:
            promotion.heard(choice)
        waiting.log()
    return not is_busy


def await_promotion_alone(promotion: Promotion, timeout_s: float, idle_s: float) -> str:
    """Waits until the promotions of this process end, after another rank was lost.

    Returns what is still in progress: after ``timeout_s``, or ``idle_s`` in which no bytes arrive.
    """
    patience = _Patience(timeout_s, idle_s)
    while True:
        now = promotion.progress(min(_ROUND_S, idle_s / 3, patience.left_s))
        if not now.awaited or patience.over(now.done):
            return now.awaited
