"""UnrequestedSaves: persists the newest saves after the trainers have died or ended."""

from __future__ import annotations

import logging
import time

from torch_ckpt._core import _native
from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.saves import Saves
from torch_ckpt.agent.slots import Slots, SlotScan

__all__ = ["UnrequestedSaves"]

_log = logging.getLogger("torch_ckpt.agent")

_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 30.0
"""First and longest pause between attempts to write the step of dead trainers. Pauses double."""


class UnrequestedSaves:
    """Requests saves that the trainers did not request. Requires: the caller holds the lock.

    A failed save is retried as long as the agent runs, because a full disk may have space again:
    after increasing pauses, and once more before the agent ends.
    """

    def __init__(self, saves: Saves, slots: Slots) -> None:
        self._saves, self._slots = saves, slots
        # When to retry, unless an attempt is in progress, and the pause after the next failure.
        self._retries: dict[Save, tuple[float | None, float]] = {}
        self._last_tries: set[Save] = set()

    def persist_newest(self, *, is_last: bool = False) -> None:
        """Requests the newest complete save. ``is_last``: whether the agent ends afterwards.

        Other machines may lack it. So if the saves are of several machines, all saves that are
        newer than the last one on disk are offered.
        """
        scan = self._slots.scan()
        found = [slots[0][0] for slots in reversed(scan.complete.values())]
        is_offer = bool(found) and found[0].node_count > 1
        for header in found if is_offer else found[:1]:
            if self._saves.is_done(header.save):
                return
            self._persist(header, scan, is_offer=is_offer, is_last=is_last)

    def _persist(
        self, header: _native.SlotHeader, scan: SlotScan, *, is_offer: bool, is_last: bool
    ) -> None:
        save = header.save
        if self._saves.is_pending(save, scan):
            return
        if self._saves.failure_of(save) is not None:
            if save in self._last_tries or not (is_last or self._is_retry_due(save)):
                return
            if is_last:
                self._last_tries.add(save)
        _log.info("persisting step %d without its trainers", header.step)
        self._saves.request(save, is_offer=is_offer)

    def _is_retry_due(self, save: Save) -> bool:
        now = time.monotonic()
        due_s, pause_s = self._retries.get(save, (now, _FIRST_RETRY_S))
        if due_s is None:  # The last attempt has just failed.
            self._retries[save] = now + pause_s, min(2 * pause_s, _MAX_RETRY_S)
            return False
        if now >= due_s:
            self._retries[save] = None, pause_s
        return now >= due_s
