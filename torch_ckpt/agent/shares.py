"""Decides whether ranks of a machine share out what they hold alike, save by save."""

from __future__ import annotations

from torch_ckpt.agent.memory import NOT_SHARED, share_of
from torch_ckpt.agent.slots import Look, Save

__all__ = ["Shares"]

_KEPT = 64
"""Decisions: ranks are never so far apart."""


class Shares:
    """What ranks have been told; for whoever holds the agent's lock.

    A save is one in which all ranks copy everything, or all copy their parts. The first rank that
    asks decides for all: they share out once they have all copied everything, for as long as none
    holds other tensors. A rank that asks later and holds others must still copy its part; in the
    next save, all copy everything. What ranks were told stands in the slots that they have filled.
    """

    def __init__(self) -> None:
        self._held: dict[int, bytes] = {}  # As each rank has said last.
        self._decided: dict[Save, bytes] = {}

    def decide(self, save: Save, rank: int, held: bytes, look: Look) -> bytes:
        """How the ranks of this machine share out what they hold.

        Args:
            save: That is to be filled.
            rank: Who asks.
            held: What stands for the tensors that it holds.
            look: What there is, before it.
        """
        self._held[rank] = held
        if save not in self._decided:
            told = look.shares_of(save)  # By a former agent.
            self._decided[save] = min(told) if told else self._share_after(save, look)
        while len(self._decided) > _KEPT:
            del self._decided[next(iter(self._decided))]
        return self._decided[save]

    def _share_after(self, save: Save, look: Look) -> bytes:
        newest = look.newest
        if newest is None or newest.session != save[0] or newest.ranks_here == 1:
            return NOT_SHARED
        headers = [header for header, _ in look.complete[newest.save]]
        if any(self._held.get(header.rank, header.held) != header.held for header in headers):
            return NOT_SHARED
        share = share_of(headers)
        return share if newest.share in (share, NOT_SHARED) else NOT_SHARED
