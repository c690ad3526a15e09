"""The trainer processes of the ranks of a machine, as its agent observes them."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Sequence

from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.slots import SlotScan
from torch_ckpt.coordination.owner import started_at
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import name_of
from torch_ckpt.process_state import Descriptor

__all__ = ["RankProcess", "RankProcesses"]

_log = logging.getLogger("torch_ckpt.agent")

_REGISTER_S = 10.0
"""Time within which trainers register with a restarted agent."""


class RankProcess:
    """A trainer process that saves through the agent.

    The kernel reports the end of a process through a pidfd. Old kernels and some sandboxes have no
    pidfds: then ``/proc`` is polled. If that is impossible too, because the process is in another
    pid namespace (its ``pid`` is 0), the process counts as alive as long as it is connected.

    ``session`` (16 bytes) identifies the ranks that started together. ``has_detached``: whether
    the process has ended in good order, or is about to. ``reached`` is the sequence number of the
    save whose slot the rank is filling, or of its next save. ``connections`` is the number of open
    connections.
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

    def is_active(self, pid: int) -> bool:
        """Returns whether the trainer is alive, so that process ``pid`` cannot take its rank."""
        if self.pid == pid and not self.connections:  # It has left, and begins a new session.
            return False
        return not self.has_detached and self.is_alive


class RankProcesses:
    """The trainers of a machine. Requires: the caller holds the lock of the agent.

    ``ranks`` are the ranks of this machine in the present session. Processes of earlier sessions
    may remain.
    """

    def __init__(self) -> None:
        self.ranks: Sequence[int] = ()
        self._places: Sequence[str] = ()
        self._processes: dict[int, RankProcess] = {}
        self._began = self._idle_since = time.monotonic()
        self._lost_since: float | None = None

    def register(
        self,
        rank: int,
        session: bytes,
        pid: int,
        ranks: Sequence[int],
        places: Sequence[str] | None = None,
    ) -> RankProcess:
        """Returns the trainer of a rank, one of ``ranks``.

        ``places`` are the directories from which the ranks restore; ``None`` if unchanged. Raises
        CheckpointError if another process has the rank, or if another session still saves with one
        of ``ranks``: two sessions would wait for each other's ranks.
        """
        for each in self._of_other_sessions(session, ranks):
            if each.rank != rank and each.is_active(pid):
                raise CheckpointError(
                    f"cannot register rank {rank}: process {each.pid} of another job already has "
                    f"rank {each.rank} of this run; close its Run, or end it"
                )
        found = self._processes.get(rank)
        if found is None or found.pid != pid or found.session != session:
            if found is not None and found.is_active(pid):
                raise CheckpointError(
                    f"cannot register rank {rank}: process {found.pid} already has this rank of "
                    "this run; close its Run, or end it"
                )
            found = self._processes[rank] = RankProcess(rank, session, pid)
        self.ranks = ranks
        self._places = self._places if places is None else places
        for other in set(self._processes).difference(ranks):
            if not self._processes[other].is_alive:
                del self._processes[other]  # A rank of an earlier session.
        return found

    def restore_from(self, directory: str | None, step: int) -> bool:
        """Returns whether the last trainers restore a step from its directory, if it has one.

        They do not restore from a local directory of earlier trainers if they have another one. A
        step may be a link to another disk.
        """
        return (
            not self._places
            or directory is None
            or os.path.dirname(directory) in self._places
            or directory in (name_of(f"{place}/step-{step}") for place in self._places)
        )

    def active(self, pid: int = 0) -> list[RankProcess]:
        """Returns the trainers that are alive, so that process ``pid`` cannot take their ranks."""
        return [each for each in self._processes.values() if each.is_active(pid)]

    def is_leaving(self, pid: int, session: bytes, ranks: Sequence[int]) -> bool:
        """Returns whether connections of an earlier session of a process, or of ranks, are open."""
        former = [p for p in self._processes.values() if p.pid == pid and p.session != session]
        former += self._of_other_sessions(session, ranks)
        return any(each.connections and not each.has_detached for each in former)

    def _of_other_sessions(self, session: bytes, ranks: Sequence[int]) -> list[RankProcess]:
        """Returns the connected trainers that have one of these ranks in another session."""
        found = filter(None, map(self._processes.get, ranks))
        return [each for each in found if each.session != session and each.connections]

    @property
    def all_detached(self) -> bool:
        """Whether all trainers have ended in good order."""
        return bool(self._processes) and all(p.has_detached for p in self._processes.values())

    @property
    def idle_s(self) -> float:
        """Seconds since :meth:`have_ended` last found a live trainer."""
        return time.monotonic() - self._idle_since

    def have_ended(self, linger_s: float, first_within_s: float) -> bool:
        """Returns whether all trainers have detached, or none has been alive for ``linger_s``.

        ``first_within_s`` is the wait for a first trainer.
        """
        if self.all_detached and len(self._processes) >= len(self.ranks):
            return True
        if self.active():
            self._idle_since = time.monotonic()
            return False
        return self.idle_s > (linger_s if self._processes else first_within_s)

    def lost_s(self) -> float:
        """Returns the seconds since the first trainer died without detaching."""
        lost = [p for p in self._processes.values() if not (p.has_detached or p.is_alive)]
        if not lost:
            self._lost_since = None
            return 0.0
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            _log.info("rank %d (process %d) died", lost[0].rank, lost[0].pid)
        return time.monotonic() - self._lost_since

    def have_restarted(self, save: Save) -> bool:
        """Returns whether ranks of a later session than that of the save are alive."""
        return any(p.session > save[0] and p.is_alive for p in self._processes.values())

    def is_awaited(self, save: Save, scan: SlotScan) -> bool:
        """Returns whether the missing ranks may still complete a save."""
        missing = set(self.ranks).difference(scan.ranks_of(save))
        if missing & scan.ranks_beyond(save):  # A restarted agent lacks their reports.
            return False
        return bool(missing) and all(self._may_complete(rank, save) for rank in missing)

    def _may_complete(self, rank: int, save: Save) -> bool:
        found = self._processes.get(rank)
        if found is None:
            return time.monotonic() - self._began < _REGISTER_S
        if found.session != save[0] or found.has_detached or not found.is_alive:
            return False
        return found.reached <= save[1]


def _pidfd(pid: int) -> Descriptor | None:
    """Returns a descriptor that becomes readable when a process ends; ``None`` if refused."""
    try:
        return Descriptor(os.pidfd_open(pid))
    except (AttributeError, OSError):  # Python may have been built on an old system.
        return None
