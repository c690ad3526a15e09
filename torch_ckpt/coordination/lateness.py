"""Lateness: determines late ranks in an exchange, and when they fail the call."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch_ckpt.coordination.call_state import CallState
from torch_ckpt.coordination.connect import Neighbours
from torch_ckpt.coordination.contributions import ExchangeState
from torch_ckpt.coordination.peer import Peer
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import RankTimeoutError, listed_ranks

__all__ = ["COMMITTING", "FORWARD_S", "WRITING", "Lateness"]

WRITING, COMMITTING = "writing", "committing"
"""The phase in which all ranks write, and the one in which they wait for the commit."""

FORWARD_S = 0.05
"""Longest time that contributions wait for the contributions of other ranks below."""


class Lateness:
    """What one rank knows about late ranks: on the coordinator all, otherwise the ranks above it.

    ``names`` are global ranks. Used by the relay's thread.
    """

    def __init__(
        self,
        names: Sequence[int],
        neighbours: Neighbours,
        parent: Peer | None,
        children: dict[int, Peer],
    ) -> None:
        self._names, self._tree = names, neighbours.tree
        self._parent, self._children = parent, children

    def log(self, call: CallState, state: ExchangeState) -> None:
        """Logs for which ranks this one has waited long; on the coordinator, possibly itself."""

        def awaited() -> str:
            if self._parent is None:
                phase, names = self._missing(call, state, time.monotonic())
                return f"ranks: {listed_ranks(names)} still {phase}"
            if self._parent.rank not in self._parent.silent(time.monotonic()):
                return ""
            name = self._names[self._parent.rank]
            return f"rank {name}, which does not answer, while {call.phase}"

        state.wait = state.wait or LongWait(awaited)
        state.wait.log()

    def deadline(self, state: ExchangeState) -> float:
        """Returns when the coordinator fails the call. Messages sent in time arrive earlier."""
        assert self._tree is not None
        return state.deadline + self._tree.height * FORWARD_S

    def error_of_late(self, call: CallState, state: ExchangeState, now: float) -> RankTimeoutError:
        """Returns the error of the ranks that are late after the deadline, on the coordinator."""
        phase, names = self._missing(call, state, now)
        if state.complete:
            first = next((rank for rank in state.contributions if rank), 0)
            since, timeout_s = state.complete, state.contributions[first].timeout_s
        else:
            first = min(state.contributions, key=lambda rank: sum(state.contributions[rank][:2]))
            timeout_s, since, *_ = state.contributions[first]
        message = (
            f"{listed_ranks(names)} slow, stuck or gone: {phase} not finished {now - since:.1f} s "
            f"after rank {self._names[first]}, whose timeout is {timeout_s:g} s"
        )
        return call.timeout_error(message, names, now - since, phase)

    def error_of_silent(
        self, call: CallState, state: ExchangeState, now: float
    ) -> RankTimeoutError | None:
        """Returns the error if a rank above this one is frozen, so that no answer can arrive."""
        assert self._parent is not None
        for rank, silent_s in self._parent.silent(now).items():
            waited = min(silent_s, now - state.began)
            if waited >= state.timeout_s:
                name = self._names[rank]
                message = (
                    f"rank {name} is stuck or gone: no message from it for {waited:.1f} s while "
                    f"{call.phase}"
                )
                return call.timeout_error(message, [name], waited)
        return None

    def _missing(self, call: CallState, state: ExchangeState, now: float) -> tuple[str, list[int]]:
        """Returns the phase that ranks have not finished, and these ranks."""
        phase, late = state.phase, self._late(state, now)
        if state.complete:
            phase = COMMITTING if phase == WRITING else phase
            late = [0] if call.claim is None else self._without_promise(call, now)
        return phase, [self._names[rank] for rank in late]

    def _late(self, state: ExchangeState, now: float) -> list[int]:
        """Returns the ranks without a contribution, except those below a silent rank."""
        silent: set[int] = set()
        for child in self._children.values():
            silent.update(child.silent(now))
        assert self._tree is not None
        parents, late = self._tree.parents, []
        for rank in range(len(self._names)):
            if rank in state.contributions:
                continue
            above = parents[rank]
            while above > 0 and above not in silent:
                above = parents[above]
            if above not in silent:
                late.append(rank)
        return late or sorted(silent)

    def _without_promise(self, call: CallState, now: float) -> list[int]:
        """Returns the ranks whose promises the coordinator lacks: only silent ranks, if any."""
        silent = [rank for child in call.awaited for rank in self._children[child].silent(now)]
        return sorted(silent or call.awaited) or [0]
