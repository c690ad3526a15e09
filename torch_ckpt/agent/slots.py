"""The slots of one machine, and which of them is whose: who may fill one, and what is complete."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from torch_ckpt import _native
from torch_ckpt.agent.memory import SLOTS_PER_RANK, SlotHeader, found_slots, slot_path
from torch_ckpt.errors import CheckpointError

__all__ = ["HeldSlot", "Save", "SlotTable"]

Save = tuple[bytes, int]
"""Session and sequence: what the slots of all ranks of one save have in common."""


@dataclass
class HeldSlot:
    """A slot of this machine.

    Attributes:
        path: Its file.
        memory: Mapped; ``None`` before it was needed.
        header: What it holds; ``None`` if that is nothing complete.
        readers: How many are bringing it to disk.
    """

    path: Path
    memory: _native.Slot | None = None
    header: SlotHeader | None = None
    readers: int = 0

    def look(self) -> None:
        """Finds out what it holds. Damage is nothing."""
        self.header = None
        with contextlib.suppress(CheckpointError):
            if self.memory is None:
                self.memory = _native.Slot.open(os.fsencode(self.path), False)
            self.header = SlotHeader.of(self.memory)
            self.memory.read()


class SlotTable:
    """All slots of a run on this machine. For whoever holds the agent's lock.

    Args:
        folder: The run's.
        run: Its 16 bytes: slots of any other are ignored.
    """

    def __init__(self, folder: Path, run: bytes) -> None:
        self._folder = folder
        self._slots: dict[int, list[HeldSlot]] = {}
        for rank, number, path in found_slots(folder):
            slot = HeldSlot(path)
            slot.look()
            if slot.header is not None and slot.header.run != run:
                slot.header = None
            if number < SLOTS_PER_RANK:  # Also one that is being filled: a rank has it.
                self._of(rank)[number] = slot

    def _of(self, rank: int) -> list[HeldSlot]:
        return self._slots.setdefault(
            rank, [HeldSlot(slot_path(self._folder, rank, n)) for n in range(SLOTS_PER_RANK)]
        )

    def headers(self) -> list[SlotHeader]:
        """Of all that is complete."""
        return [s.header for slots in self._slots.values() for s in slots if s.header is not None]

    def of_save(self, save: Save) -> list[HeldSlot]:
        """The complete slots of a save, in order of the ranks."""
        found = [
            slot
            for slots in self._slots.values()
            for slot in slots
            if slot.header is not None and slot.header.save == save
        ]
        return sorted(found, key=lambda slot: slot.header.rank if slot.header else -1)

    def is_complete(self, save: Save) -> bool:
        """Whether all ranks of this machine have a slot of the save."""
        found = self.of_save(save)
        return bool(found) and found[0].header is not None and (
            len(found) == found[0].header.ranks_here
        )

    def newest(self) -> SlotHeader | None:
        """The newest save that is complete on this machine."""
        complete = (h for h in sorted(self.headers(), reverse=True) if self.is_complete(h.save))
        return next(complete, None)

    def look_at(self, rank: int, session: bytes, path: Path) -> None:
        """Takes note of a slot that a rank has filled.

        Raises:
            CheckpointError: It is not the rank's, or holds no complete snapshot.
        """
        slot = next((slot for slot in self._of(rank) if slot.path == path), None)
        if slot is None:
            raise CheckpointError(f"{path} is no slot of rank {rank}")
        slot.look()
        if slot.header is None or (slot.header.rank, slot.header.session) != (rank, session):
            slot.header = None
            raise CheckpointError(f"rank {rank} has left no complete snapshot in {path}")

    def reserve(self, rank: int, nbytes: int) -> None:
        """Makes both slots of a rank, so that no save will wait for memory.

        Raises:
            StorageError: There is not as much. What one of them holds stays.
        """
        for slot in self._of(rank):
            if slot.header is None and not slot.readers:
                self._make(slot, nbytes)

    def take(self, rank: int, session: bytes, nbytes: int) -> HeldSlot | None:
        """A slot of a rank that it may fill; ``None`` where none is free.

        It is never the one that belongs to the newest save that is complete, nor one that waits
        for the other ranks to complete theirs, nor one that is being brought to disk.

        Raises:
            StorageError: There is not as much memory.
        """
        newest = self.newest()
        for slot in self._of(rank):
            header = slot.header
            if slot.readers:
                continue
            if header is not None and newest is not None and header.save == newest.save:
                continue
            if header is not None and header.session == session and (
                newest is None or header.save > newest.save
            ):
                continue
            slot.header = None
            self._make(slot, nbytes)
            return slot
        return None

    def _make(self, slot: HeldSlot, nbytes: int) -> None:
        """Sees to it that a slot that is free has room."""
        if slot.memory is not None and slot.memory.nbytes >= nbytes:
            return
        slot.memory = None
        slot.path.unlink(missing_ok=True)
        try:
            slot.memory = _native.Slot.create(os.fsencode(slot.path), nbytes)
        except CheckpointError as error:
            free = os.statvfs(self._folder)
            error.args = (
                f"{error.args[0]}; {self._folder} has {free.f_bavail * free.f_frsize} bytes free, "
                f"and a rank needs {SLOTS_PER_RANK} slots",
                *error.args[1:],
            )
            raise
