"""Promotions: waits of all ranks for the promotions of some of them, and their end.

The end of a run waits as long as bytes arrive: copying the last step may take hours. It does not
wait for a place that makes no progress.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence

from torch_ckpt.coordination.group import Group
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError, RankTimeoutError
from torch_ckpt.ladder.promotion import END_S, Promotion
from torch_ckpt.ladder.promotion_steps import Choice, Progress
from torch_ckpt.ladder.step_directories import StepDirectories
from torch_ckpt.ladder.without_promotion import WithoutPromotion

__all__ = ["Promotions"]

_ROUND_S = 2.0
"""Interval at which the ranks exchange the state of their promotions."""

_ACTIVITY = "waiting for promotion"
_CLOSING = "waiting for promotion, to close the run"


class _Patience:
    """The limits of a wait: ``timeout_s`` in total, and ``idle_s`` without progress."""

    def __init__(self, timeout_s: float, idle_s: float) -> None:
        self._timeout_s, self._idle_s = timeout_s, idle_s
        self._began = self._changed = time.monotonic()
        self._done: object = None

    @property
    def left_s(self) -> float:
        return max(self._began + self._timeout_s - time.monotonic(), 0.0)

    def over(self, done: object) -> str:
        """Returns why the wait is over, given the present progress; empty if it is not over."""
        now = time.monotonic()
        if done != self._done:
            self._done, self._changed = done, now
        if now - self._changed >= self._idle_s:
            return f"and nothing was copied for {self._idle_s:g} s"
        return "" if self.left_s else f"after a wait of {self._timeout_s:g} s"


class Promotions:
    """The promotions of all ranks of a run. All ranks call the same methods.

    ``own`` is the promotion of this rank. ``disks`` are the directories of the run; saves go to the
    first. With a single directory, nothing is promoted. A rank waits ``timeout_s`` for the others,
    and for more bytes of a promotion. ``are_stuck``: whether the last promotion of this rank did
    not end in time, because the directory of the run does not answer.
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
        self.are_stuck = False

    def await_all(
        self, settle: Callable[[], bool], timeout_s: float, *, must_end: bool, closes: bool
    ) -> bool:
        """Waits until no rank promotes steps; returns whether saves and promotions have ended.

        ``settle`` waits for the background save of this rank, and returns whether it has ended.
        Raises CheckpointError on all ranks if a promotion or a save failed. With ``must_end``, also
        if saves or promotions take longer than ``timeout_s``, or if no bytes arrive. ``closes``:
        whether the run is closed, which must be the same on all ranks.
        """
        own, group = self._own, self._group
        # Ranks that wait and ranks that close make different calls: some would wait for nobody.
        activity = _CLOSING if closes else _ACTIVITY
        patience = _Patience(timeout_s, self._timeout_s)

        def limit_s() -> float:  # A process that will be killed may have less time than a call.
            return min(patience.left_s + _ROUND_S, self._timeout_s)

        def choose(settled: list[bool]) -> Choice | None:
            return own.choice() if all(settled) else None

        def progress() -> Progress | None:
            return own.progress(min(_ROUND_S, self._timeout_s / 3, patience.left_s))

        def decide(answers: list[Progress | None]) -> tuple[bool, bool, Choice]:
            found = [answer for answer in answers if answer is not None]
            # The first answer is the coordinator's.
            own.heard_from([each.report for each in found[1:]])
            for each in found:
                if each.report.failure is not None:
                    raise each.report.failure
            busy = [each.awaited for each in found if each.awaited]
            over = patience.over([each.done for each in found])
            if busy and over and must_end:
                raise CheckpointError(
                    f"steps of {self._local} are still being promoted to {self._run} {over}: "
                    f"{'; '.join(busy)}"
                )
            ended = own.choice(may_choose=False)
            # Another round, in which other places remove what is committed.
            return bool(busy), not over and bool(busy or ended.committed), ended

        chosen = group.decide(activity, settle, choose, timeout_s=limit_s())
        if chosen is None:
            return False
        own.retry(chosen)
        is_busy = continues = True
        waiting = LongWait(own.awaited, is_named=group.is_coordinator)
        while continues:  # In rounds, to notice soon that a rank is lost or has failed.
            is_busy, continues, choice = group.decide(
                activity, progress, decide, timeout_s=limit_s()
            )
            own.heard(choice)
            waiting.log()
        return not is_busy

    def close(self, promote: Callable[[float], object], timeout_s: float = math.inf) -> None:
        """Promotes steps as long as bytes arrive; the next process promotes the rest.

        ``promote`` waits for the background save and for promotions. Raises its errors.
        """
        if self._have_ended:
            return
        deadline, own = time.monotonic() + timeout_s, self._own
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self._end(max(min(deadline - time.monotonic(), END_S), 0.1)))
            if self._group.is_coordinator:
                stack.enter_context(own.bar())
            try:
                with self._group.method("wait for promotion", self._timeout_s):
                    promote(timeout_s)
            except RankTimeoutError as error:
                if awaited := self._await_own(max(deadline - time.monotonic(), 0.0)):
                    error.add_note(f"torch_ckpt: not promoted: {awaited}")
                raise

    def _await_own(self, timeout_s: float) -> str:
        """Waits for the promotions of this rank, after a rank without promotions was lost.

        Returns what is still in progress after ``timeout_s``, or once no bytes arrive.
        """
        if not isinstance(self._own, Promotion) or not self._own.is_alone:
            return ""
        self._own.retry(Choice())
        patience = _Patience(timeout_s, self._timeout_s)
        while True:
            now = self._own.progress(min(_ROUND_S, self._timeout_s / 3, patience.left_s))
            if not now.awaited or patience.over(now.done):
                return now.awaited

    def _end(self, wait_s: float) -> None:
        self._have_ended = True
        self.are_stuck = self._own.cancel(wait_s) is False

    def leave(self, error: BaseException) -> None:
        """Leaves the steps to the next process after an error. Called on one rank.

        The other ranks raise the error in their next call, for example the wait for promotion.
        """
        if self._have_ended:
            return
        self._end(END_S)
        with contextlib.suppress(Exception):  # The first error counts.
            self._group.call(self._timeout_s).fail(error)
