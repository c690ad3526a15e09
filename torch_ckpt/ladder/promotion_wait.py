"""Waits of all ranks for the promotions of some of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_ckpt.coordination.group import Group
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.promotion import Promotion
from torch_ckpt.ladder.promotion_steps import Choice, Report

__all__ = ["await_promotion"]

_ROUND_S = 2.0
"""Interval at which the ranks exchange whether their promotions are in progress."""


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
        call_timeout_s: For one exchange of the ranks.
        must_end: Whether it is an error if saves or promotions take longer.

    Returns:
        Whether saves and promotions have ended.

    Raises:
        CheckpointError: A promotion or a save failed, or takes longer; on all ranks.
    """
    deadline, activity = time.monotonic() + timeout_s, "waiting for promotion"

    def limit_s() -> float:  # A process that is about to be killed has less than a call.
        return min(max(deadline - time.monotonic(), 0.0) + _ROUND_S, call_timeout_s)

    def choose(settled: list[bool]) -> Choice | None:
        if not all(settled):
            return None
        return Choice() if promotion is None else promotion.choice()

    def awaited() -> str:
        return activity if promotion is None else promotion.awaited()

    def progress() -> tuple[bool, Report] | None:
        wait_s = min(_ROUND_S, call_timeout_s / 3, max(deadline - time.monotonic(), 0.0))
        return None if promotion is None else promotion.progress(wait_s)

    def go_on(answers: list[tuple[bool, Report] | None]) -> tuple[bool, bool, Choice]:
        found = [answer for answer in answers if answer is not None]
        if promotion is not None:  # The first of the answers is that of the coordinator.
            promotion.heard_from([report for _, report in found[1:]])
        for _, report in found:
            if report.failure is not None:
                raise report.failure
        is_busy = any(busy for busy, _ in found)
        goes_on = is_busy and time.monotonic() < deadline
        if is_busy and not goes_on and must_end:
            raise CheckpointError(
                f"steps of {copied[0]} are still being promoted to {copied[1]} after a wait of "
                f"{timeout_s:g} s"
            )
        heard = Choice() if promotion is None else promotion.choice(may_choose=False)
        # Other places then remove what is committed.
        goes_on = goes_on or (bool(heard.committed) and time.monotonic() < deadline)
        return is_busy, goes_on, heard

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
