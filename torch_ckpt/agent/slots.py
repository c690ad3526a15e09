"""The slots of one machine, and which of them is whose: who may fill one, and what is complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.agent.memory import (
    SLOTS_PER_RANK,
    Save,
    SlotHeader,
    found_slots,
    slot_path,
    whole_saves,
)
from torch_ckpt.errors import CheckpointError

__all__ = ["SlotFile", "SlotScan", "Slots"]


@dataclass
class SlotFile:
    """A slot of this machine.

    Attributes:
        path: Its file.
        memory: Mapped; ``None`` where there is none yet.
        readers: How many are bringing it to disk.
    """

    path: Path
    memory: _native.Slot | None = None
    readers: int = 0

    @property
    def header(self) -> SlotHeader | None:
        """What it holds, as it says itself; ``None`` if that is nothing complete and sound."""
        if self.memory is None:
            return None
        try:
            return SlotHeader.of(self.memory)
        except CheckpointError:
            return None


class SlotScan:
    """What slots held at one moment, as ranks go on completing them.

    Args:
        found: Those that are complete.

    Attributes:
        complete: The slots of each save that all ranks of this machine have completed, by rank. The
            newest save comes last.
    """

    def __init__(self, found: Iterable[tuple[SlotHeader, SlotFile]]) -> None:
        self._found = list(found)
        self.complete = whole_saves(self._found)

    @property
    def newest(self) -> SlotHeader | None:
        """The newest save that is complete."""
        return self.complete[max(self.complete)][0][0] if self.complete else None

    def ranks_of(self, save: Save) -> set[int]:
        """Those that had completed their part of a save."""
        return {header.rank for header, _ in self._found if header.save == save}

    def ranks_beyond(self, save: Save) -> set[int]:
        """Those that had completed their part of a later one."""
        return {header.rank for header, _ in self._found if header.save > save}


OfSave = Callable[[Save, SlotScan], bool]
"""Tells something of a save, as slots were in that scan."""


class Slots:
    """All slots of a run on this machine. For whoever holds the agent's lock.

    Slots say themselves what they hold, so there is nothing here that a new agent does not find.

    Args:
        folder: The run's.
        run: Its 16 bytes: slots of any other are ignored.
    """

    def __init__(self, folder: Path, run: bytes) -> None:
        self._folder = folder
        self._run = run
        self._slots: dict[int, list[SlotFile]] = {}
        for rank, number, path in found_slots(folder):
            if number < SLOTS_PER_RANK:
                with contextlib.suppress(CheckpointError):
                    self._of(rank)[number].memory = _native.Slot.open(os.fsencode(path), True)

    def _of(self, rank: int) -> list[SlotFile]:
        return self._slots.setdefault(
            rank, [SlotFile(slot_path(self._folder, rank, n)) for n in range(SLOTS_PER_RANK)]
        )

    def scan(self) -> SlotScan:
        """What is complete now."""
        return SlotScan(
            (header, slot)
            for slots in self._slots.values()
            for slot in slots
            if (header := slot.header) is not None and header.run == self._run
        )

    def check_filled(self, rank: int, session: bytes, path: Path) -> None:
        """Looks at a slot that a rank says it has filled.

        Raises:
            CheckpointError: It is not the rank's, or holds no complete snapshot.
        """
        slot = next((slot for slot in self._of(rank) if slot.path == path), None)
        header = None if slot is None else slot.header
        if slot is None or slot.memory is None or header is None:
            raise CheckpointError(f"rank {rank} has left no complete snapshot in {path}")
        if (header.run, header.session, header.rank) != (self._run, session, rank):
            raise CheckpointError(f"the snapshot in {path} is not of rank {rank} of this session")
        slot.memory.read()

    def reserve(self, rank: int, nbytes: int) -> None:
        """Makes both slots of a rank, so that no save will wait for memory.

        Raises:
            StorageError: There is not as much. What one of them holds stays.
        """
        for slot in self._of(rank):
            if slot.header is None and not slot.readers:
                self._make(slot, nbytes)

    def release(self, ranks: Collection[int], is_done: Callable[[Save], bool]) -> bool:
        """Removes slots of ranks that are no more and hold nothing that is not on disk.

        Returns:
            Whether there were any.
        """
        gone = []
        for rank in set(self._slots).difference(ranks):
            slots = self._slots[rank]
            headers = [slot.header for slot in slots]
            if not any(slot.readers for slot in slots) and all(
                h is None or is_done(h.save) for h in headers
            ):
                gone.append(rank)
        self._remove(gone)
        return bool(gone)

    def _remove(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            for slot in self._slots.pop(rank):
                slot.path.unlink(missing_ok=True)

    def retain(self, ranks: Collection[int], is_pending: OfSave) -> None:
        """Removes the slots of ranks that are no more, unless something of them is still needed."""
        scan = self.scan()
        newest = max(scan.complete, default=None)
        for rank in set(self._slots).difference(ranks):
            headers = [slot.header for slot in self._slots[rank]]
            needed = any(slot.readers for slot in self._slots[rank]) or any(
                h is not None and (h.save == newest or is_pending(h.save, scan)) for h in headers
            )
            if not needed:
                self._remove([rank])

    def acquire(
        self,
        rank: int,
        nbytes: int,
        is_pending: OfSave,
        is_awaited: OfSave,
    ) -> SlotFile | None:
        """A slot of a rank that it may fill, and that holds nothing from now on.

        It is never of the newest save that is complete, nor of one that waits for other ranks to
        complete theirs, nor of one that has still to come to disk.

        Args:
            rank: The rank.
            nbytes: Room that it needs.
            is_pending: Whether a save has still to come to disk.
            is_awaited: Whether other ranks may still complete a save that was not complete.

        Returns:
            The slot; ``None`` where none is free.

        Raises:
            StorageError: There is not as much memory.
        """
        slot = self._free(rank, is_pending, is_awaited)
        if slot is not None:
            self._make(slot, nbytes)
            if slot.memory is not None:
                slot.memory.clear()
        return slot

    def has_free(
        self,
        rank: int,
        is_pending: OfSave,
        is_awaited: OfSave,
    ) -> bool:
        """Whether :meth:`acquire` would find a slot."""
        return self._free(rank, is_pending, is_awaited) is not None

    def _free(
        self,
        rank: int,
        is_pending: OfSave,
        is_awaited: OfSave,
    ) -> SlotFile | None:
        scan = self.scan()
        newest = max(scan.complete, default=None)
        for slot in self._of(rank):
            if slot.readers:
                continue
            header = slot.header
            if header is None:
                return slot
            save = header.save
            is_wanted = is_pending(save, scan) if save in scan.complete else is_awaited(save, scan)
            if save != newest and not is_wanted:
                return slot
        return None

    def _make(self, slot: SlotFile, nbytes: int) -> None:
        """Sees to it that a slot that is free has room."""
        if slot.memory is not None and slot.memory.nbytes >= nbytes:
            return
        slot.memory = None
        slot.path.unlink(missing_ok=True)
        try:
            slot.memory = _native.Slot.create(os.fsencode(slot.path), nbytes)
        except CheckpointError as error:
            room = os.statvfs(self._folder)
            error.args = (
                f"{error.args[0]}; {self._folder} has {room.f_bavail * room.f_frsize} bytes left, "
                f"and each rank needs {SLOTS_PER_RANK} slots",
                *error.args[1:],
            )
            raise
