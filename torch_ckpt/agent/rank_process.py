"""The process of a rank, as the agent sees it."""

from __future__ import annotations

import os
import select

__all__ = ["RankProcess"]


class RankProcess:
    """A process that saves by way of the agent.

    Args:
        rank: Its rank.
        session: 16 bytes, of all ranks that have started together.
        pid: Its id.

    Raises:
        OSError: There is none.

    Attributes:
        has_detached: Whether it has ended in good order, or is about to.
        reached: Its next save, or the one that it is filling a slot for.
        connections: How many it has.
    """

    def __init__(self, rank: int, session: bytes, pid: int) -> None:
        self.rank = rank
        self.session = session
        self.pid = pid
        self.has_detached = False
        self.reached = 0
        self.connections = 0
        self._died = False
        self._descriptor = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    @property
    def is_alive(self) -> bool:
        """Whether the process is there. Its connections may be silent for long."""
        if not self._died and self._poll.poll(0):
            self._died = True
            os.close(self._descriptor)
        return not self._died

    @property
    def is_lost(self) -> bool:
        """Whether it has ended without saying so."""
        return not self.has_detached and not self.is_alive
