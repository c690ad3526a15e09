"""The trainer process of one rank, as the agent observes it."""

from __future__ import annotations

import os
import select

from torch_ckpt.coordination.owner import started_at
from torch_ckpt.process_state import Descriptor

__all__ = ["RankProcess"]


class RankProcess:
    """A trainer process that saves through the agent.

    The kernel reports the end of a process through a pidfd. Old kernels and some sandboxes refuse
    one: then ``/proc`` is polled. If that is impossible too, because the process is in another
    namespace of process ids (its ``pid`` is 0), the process counts as alive as long as it is
    connected.

    ``session`` (16 bytes) identifies the ranks that started together. ``has_detached`` says that
    the process has ended in good order, or is about to. ``reached`` is the sequence of the save
    that the rank fills a slot for, or of its next save. ``connections`` counts the open ones.
    """

    def __init__(self, rank: int, session: bytes, pid: int) -> None:
        self.rank = rank
        self.session = session
        self.pid = pid
        self.has_detached = False
        self.reached = 0
        self.connections = 0
        self._died = False
        self._poll = select.poll()
        self._pidfd = _pidfd(pid)
        if self._pidfd is not None:
            self._poll.register(self._pidfd.number, select.POLLIN)
        self._started = started_at(pid) if pid else None

    @property
    def is_alive(self) -> bool:
        """Whether the process exists; its connections may be idle for long."""
        if self._died:
            return False
        if self._pidfd is not None:
            if self._poll.poll(0):
                self._died = True
                self._pidfd.close()
        elif self._started is None:
            return self.connections > 0
        else:
            self._died = self._started == "0" or started_at(self.pid) not in (self._started, None)
        return not self._died

    @property
    def is_lost(self) -> bool:
        """Whether the process died without detaching."""
        return not self.has_detached and not self.is_alive

    def is_active(self, pid: int) -> bool:
        """Returns whether the trainer lives, so that process ``pid`` cannot have its rank."""
        if self.pid == pid and not self.connections:  # It has left, and begins a new session.
            return False
        return not self.has_detached and self.is_alive


def _pidfd(pid: int) -> Descriptor | None:
    """Returns a descriptor that becomes readable when a process ends; ``None`` if refused."""
    try:
        return Descriptor(os.pidfd_open(pid))
    except (AttributeError, OSError):  # Python may have been built on an old system.
        return None
