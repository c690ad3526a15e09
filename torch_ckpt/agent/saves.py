"""Which saves an agent brings to disk, one after another, and how that went."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from pathlib import Path

from torch_ckpt.agent.memory import SlotHeader
from torch_ckpt.agent.persist import persist
from torch_ckpt.agent.slots import HeldSlot, Save, Slots
from torch_ckpt.errors import CheckpointError
from torch_ckpt.options import IoOptions

__all__ = ["Saves"]

_log = logging.getLogger("torch_ckpt.agent")

_KEPT = 16
"""Marks of saves that are on disk: nobody asks for those before."""

_DONE = re.compile(r"done-([0-9a-f]{32})-(\d+)")


class Saves:
    """Brings complete saves to disk in their order, in a thread, and tells how each went.

    What it must know after its own end stands in the slots and in two kinds of small files beside
    them. For whoever holds the lock of ``changed``, unless a method says otherwise.

    Args:
        folder: The run's.
        slots: What there is.
        changed: Notified whenever a save has ended.
        io: Tuning.
        threads: Files that are written at a time.
    """

    def __init__(
        self,
        folder: Path,
        slots: Slots,
        changed: threading.Condition,
        *,
        io: IoOptions,
        threads: int,
    ) -> None:
        self._folder = folder
        self._slots = slots
        self._changed = changed
        self._io = io
        self._threads = threads
        self._asked: set[Save] = set()
        self._running: Save | None = None
        matches = filter(None, map(_DONE.fullmatch, os.listdir(folder)))
        self._done = {(bytes.fromhex(match[1]), int(match[2])) for match in matches}

    @property
    def is_running(self) -> bool:
        """Whether one is on its way."""
        return self._running is not None

    def is_pending(self, save: Save) -> bool:
        """Whether a save that is complete is to come to disk, and has not, nor has failed."""
        of_save = self._slots.complete_saves().get(save)
        if of_save is None or save in self._done or self.error_of(save) is not None:
            return False
        # What is older than what is on disk is wanted there only if somebody says so.
        is_newer = save > max(self._done, default=(b"", -1))
        return save in self._asked or (bool(of_save[0][0].persist) and is_newer)

    def is_done(self, save: Save) -> bool:
        """Whether a save is on disk."""
        return save in self._done

    def error_of(self, save: Save) -> str | None:
        """Why a save could not be brought to disk; ``None`` if that is not so."""
        try:
            return self._failure(save).read_text()
        except OSError:
            return None

    def ask(self, save: Save) -> None:
        """Wants a save on disk, again if that has failed."""
        self._asked.add(save)
        self._failure(save).unlink(missing_ok=True)
        self.begin_next()

    def begin_next(self) -> None:
        """Begins with the oldest save that is to come to disk, unless one is on its way."""
        if self._running is not None:
            return
        for save, of_save in self._slots.complete_saves().items():
            if self.is_pending(save):
                self._running = save
                held = [slot for _, slot in of_save]
                for slot in held:
                    slot.readers += 1
                threading.Thread(
                    target=self._work, args=(save, held), name="torch_ckpt-persist"
                ).start()
                return

    def _work(self, save: Save, held: list[HeldSlot]) -> None:
        """In a thread of its own, without the lock."""
        error: BaseException | None = None
        try:
            self._bring_to_disk(held)
        except BaseException as problem:
            error = problem
            _log.warning("save %d has failed: %s", save[1], problem)
        with self._changed:
            for slot in held:
                slot.readers -= 1
            self._running = None
            self._asked.discard(save)
            with contextlib.suppress(OSError):
                if error is None:
                    self._mark_done(save)
                else:
                    self._failure(save).write_text(f"{type(error).__name__}: {error}")
            self.begin_next()
            self._changed.notify_all()

    def _bring_to_disk(self, held: list[HeldSlot]) -> None:
        memories = [slot.memory for slot in held if slot.memory is not None]
        snapshots = [memory.read() for memory in memories]
        headers = [SlotHeader.of(memory) for memory in memories]
        if not snapshots[0].directory:
            raise CheckpointError("the save has no directory to come to")
        persist(
            snapshots,
            io=self._io,
            threads=self._threads,
            is_current=lambda: [SlotHeader.of(memory) for memory in memories] == headers,
        )
        _log.info("step %d is on disk", headers[0].step)

    def _failure(self, save: Save) -> Path:
        return self._folder / f"failed-{save[0].hex()}-{save[1]}"

    def _mark_done(self, save: Save) -> None:
        self._done.add(save)
        self._mark(save).touch()
        for old in sorted(self._done)[:-_KEPT]:
            self._done.discard(old)
            self._mark(old).unlink(missing_ok=True)

    def _mark(self, save: Save) -> Path:
        return self._folder / f"done-{save[0].hex()}-{save[1]}"
