"""The trainer process of one rank, as the agent observes it."""

from __future__ import annotations

import os
import select

__all__ = ["RankProcess"]


class RankProcess:
    """A trainer process that saves through the agent.

    Args:
        rank: Rank of the process.
        session: 16 bytes that identify the ranks that started together.
        pid: Process id.

    Raises:
        OSError: No process has this id.

    Attributes:
        has_detached: Whether the process has ended in good order, or is about to.
        reached: Sequence of the save that the rank fills a slot for, or of its next save.
        connections: Number of open connections.
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
        """Whether the process exists; its connections may be idle for long."""
        if not self._died and self._poll.poll(0):
            self._died = True
            os.close(self._descriptor)
        return not self._died

    @property
    def is_lost(self) -> bool:
        """Whether the process died without detaching."""
        return not self.has_detached and not self.is_alive
