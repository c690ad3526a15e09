"""OwnSlots: the slots of a rank. Each save fills one of them."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.agent.buddies import ReplicaReport, Replication
from torch_ckpt.agent.client import AgentClient
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.machine_share import Answer, Decision, MachineShare, decided
from torch_ckpt.agent.memory import SLOTS_PER_RANK, Save, slot_path
from torch_ckpt.agent.messages import Kind
from torch_ckpt.agent.slot_contents import SlotContents
from torch_ckpt.coordination.group import Group
from torch_ckpt.planning.replica_check import CheckReplicas
from torch_ckpt.records.record import note

__all__ = ["OwnSlots"]

_LOG = logging.getLogger("torch_ckpt")


class OwnSlots:
    """The slots of a rank, and the selection of items that it copies to a slot in each save.

    ``sequence`` is the number of the next save, the same on all ranks of ``group``.
    """

    def __init__(
        self,
        client: AgentClient,
        group: Group,
        replication: Replication,
        check_replicas: CheckReplicas,
        timeout_s: float,
    ) -> None:
        self.sequence = 0
        self._client, self._replication = client, replication
        self._decide = functools.partial(group.decide, "staging", timeout_s=timeout_s)
        self._mapped: dict[Path, tuple[int, _native.Slot]] = {}  # Inode and slot by path.
        member = client.member
        self.share = MachineShare(
            client.folder, member.run, member.rank, member.node, check_replicas
        )
        self._devices = _native.Devices()

    def reserve(self, contents: SlotContents) -> None:
        """Allocates slots large enough for these contents; see ``SnapshotAgent.reserve``."""
        self._client.request(Kind.RESERVE, nbytes=_slot_nbytes("", contents, sync=True))
        for number in range(SLOTS_PER_RANK):
            slot = self._slot(slot_path(self._client.folder, self._client.member.rank, number))
            slot.pin_for(contents.batch, self._devices)

    def fill(
        self,
        header: _native.SlotHeader,
        list_items: Callable[[], tuple[Destination, SlotContents]],
        wait_s: float,
        *,
        sync: bool,
    ) -> tuple[Path, bool] | None:
        """Fills a slot; returns its file, and whether the call waited for it.

        Returns ``None`` if no slot becomes free within ``wait_s``.
        """
        target, contents, is_shared = self._decide_shares(header, list_items)
        directory, where = target.directory, target.encode()
        self._replication.reserve(lambda: _slot_nbytes(where, contents, sync=sync))
        nbytes = _slot_nbytes(where, contents, sync=sync)
        # The agent replaces slots that are too small; unmap them here to free their memory.
        self._mapped = {p: s for p, s in self._mapped.items() if s[1].nbytes >= nbytes}
        acquired = self._client.acquire(header.sequence, nbytes, wait_s, self._replication.keep)
        if acquired is None:
            return None
        if is_shared:
            contents = self.share.select(contents)
        slot = self._slot(acquired[0])
        header.tensors_id, header.share = self.share.tensors, self.share.sharing
        slot.begin(header, contents.table(where, sync=sync), contents.nbytes)
        copying = time.monotonic()
        contents.copy_to(slot, self._devices)
        seconds = time.monotonic() - copying
        _LOG.debug("the slot of %s: copied %d bytes in %.3f s", directory, contents.nbytes, seconds)
        note(bytes=contents.nbytes)
        slot.complete()
        if not is_shared:
            self.share.set_copied_all(header.save)
        return acquired

    def _decide_shares(
        self,
        header: _native.SlotHeader,
        list_items: Callable[[], tuple[Destination, SlotContents]],
    ) -> tuple[Destination, SlotContents, bool]:
        """Returns destination and items of the save, and whether all ranks copy only their shares.

        An error on one rank is raised on all ranks. The ranks agree on the sequence number of the
        save, because they may have failed in different numbers of saves.
        """
        found: list[tuple[Destination, SlotContents]] = []
        replication = self._replication

        def list_and_answer() -> tuple[Answer, ReplicaReport, int]:
            found.append(list_items())
            answer = self.share.answer(found[0][1], header.save)
            return answer, replication.report(), header.sequence

        def decide_all(
            answers: list[tuple[Answer, ReplicaReport, int]],
        ) -> tuple[Decision, Save | None, int]:
            header.sequence = max(sequence for *_, sequence in answers)
            keep = replication.agreed(header.save, [report for _, report, _ in answers])
            return decided([answer for answer, *_ in answers]), keep, header.sequence

        def assign_and_answer() -> Answer:
            self.share.assign()
            return self.share.answer(found[0][1], header.save)

        decision: Decision
        decision, replication.keep, header.sequence = self._decide(list_and_answer, decide_all)
        self.sequence = header.sequence + 1
        replication.warn()
        if decision == "assign":  # In the save after the one that copied everything.
            decision = self._decide(assign_and_answer, decided)
        if decision != "shares":
            self.share.reset()
        return *found[0], decision == "shares"

    def discard(self, path: Path) -> None:
        """Discards the snapshot in a slot of this rank."""
        self._mapped[path][1].clear()

    def unmap(self) -> None:
        """Unmaps the slots."""
        self._mapped.clear()

    def _slot(self, path: Path) -> _native.Slot:
        """Returns a mapped slot; maps it again if the agent has replaced the file."""
        inode = path.stat().st_ino
        mapped = self._mapped.get(path)
        if mapped is None or mapped[0] != inode:
            mapped = self._mapped[path] = inode, _native.Slot.open(os.fsencode(path), True, True)
        return mapped[1]


def _slot_nbytes(where: str, contents: SlotContents, *, sync: bool) -> int:
    return _native.slot_nbytes(len(contents.table(where, sync=sync)), contents.nbytes)
