"""Promotions: waits of all ranks for the promotions of some of them, and their end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence

from torch_ckpt.coordination.group import Group
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError, RankTimeoutError
from torch_ckpt.ladder.promotion import END_S, Promotion
from torch_ckpt.ladder.promotion_steps import Choice, Report
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.without_promotion import WithoutPromotion

__all__ = ["Promotions"]

_ROUND_S = 2.0
"""Interval at which the ranks exchange whether their promotions are in progress."""

_ACTIVITY = "waiting for promotion"


class Promotions:
    """The promotions of all ranks of a run. All ranks call the same methods.

    ``own`` is that of this rank. ``disks`` are the directories of the run, that to which it saves
    first. If there is one, nothing is promoted. A rank waits ``timeout_s`` for the others.
    """

    def __init__(
        self,
        own: Promotion | WithoutPromotion,
        group: Group,
        disks: Sequence[StepDirectories],
        timeout_s: float,
    ) -> None:
        self._own, self._group, self._timeout_s = own, group, timeout_s
        self._local, self._run = disks[0].directory, disks[-1].directory
        self._have_ended = len(disks) == 1

    def await_all(self, settle: Callable[[], bool], timeout_s: float, *, must_end: bool) -> bool:
        """Waits until no rank promotes steps; returns whether saves and promotions have ended.

        ``settle`` waits for the background save of this rank, and returns whether it has ended.
        ``must_end`` says that it is an error if saves or promotions take longer than ``timeout_s``.
        Raises CheckpointError on all ranks if so, or if a promotion or a save failed.
        """
        own, group, deadline = self._own, self._group, time.monotonic() + timeout_s

        def limit_s() -> float:  # A process that is about to be killed has less than a call.
            return min(max(deadline - time.monotonic(), 0.0) + _ROUND_S, self._timeout_s)

        def choose(settled: list[bool]) -> Choice | None:
            return own.choice() if all(settled) else None

        def progress() -> tuple[bool, Report] | None:
            left_s = max(deadline - time.monotonic(), 0.0)
            return own.progress(min(_ROUND_S, self._timeout_s / 3, left_s))

        def go_on(answers: list[tuple[bool, Report] | None]) -> tuple[bool, bool, Choice]:
            found = [answer for answer in answers if answer is not None]
            # The first of the answers is that of the coordinator.
            own.heard_from([report for _, report in found[1:]])
            for _, report in found:
                if report.failure is not None:
                    raise report.failure
            is_busy = any(busy for busy, _ in found)
            goes_on = is_busy and time.monotonic() < deadline
            if is_busy and not goes_on and must_end:
                raise CheckpointError(
                    f"steps of {self._local} are still being promoted to {self._run} after a wait "
                    f"of {timeout_s:g} s"
                )
            heard = own.choice(may_choose=False)
            # Other places then remove what is committed.
            goes_on = goes_on or (bool(heard.committed) and time.monotonic() < deadline)
            return is_busy, goes_on, heard

        chosen = group.decide(_ACTIVITY, settle, choose, timeout_s=limit_s())
        if chosen is None:
            return False
        own.retry(chosen)
        is_busy = goes_on = True
        waiting = LongWait(own.awaited, is_named=group.is_coordinator)
        while goes_on:  # In rounds: a rank that is lost, or fails, is noticed soon.
            is_busy, goes_on, choice = group.decide(_ACTIVITY, progress, go_on, timeout_s=limit_s())
            own.heard(choice)
            waiting.log()
        return not is_busy

    def close(self, promote: Callable[[float], object], timeout_s: float = math.inf) -> None:
        """Promotes what can be promoted in this time; the next process promotes the rest.

        ``promote`` waits for the background save and for promotions. Raises as that does.
        """
        if self._have_ended:
            return
        deadline, own = time.monotonic() + timeout_s, self._own
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: own.cancel(max(min(deadline - time.monotonic(), END_S), 0.1)))
            if self._group.is_coordinator:
                stack.enter_context(own.bar())
            try:
                with self._group.method("wait for promotion", self._timeout_s):
                    promote(timeout_s)
            except RankTimeoutError:
                own.end_alone(max(deadline - time.monotonic(), 0.0))
                raise

    def leave(self, error: BaseException) -> None:
        """Leaves the steps to the next process after an error. Called on one rank.

        The other ranks raise it in their next call, which may be the one that waits for promotion.
        """
        if self._have_ended:
            return
        self._have_ended = True
        self._own.cancel()
        with contextlib.suppress(Exception):  # The first error counts.
            self._group.call(self._timeout_s).fail(error)
