"""The slots of one machine: which are complete, and which a rank may fill."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.agent.destination import directory_name
from torch_ckpt.agent.memory import (
    NO_SNAPSHOT,
    SLOTS_PER_RANK,
    Save,
    found_slots,
    free,
    released,
    slot_path,
    whole_saves,
)
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.filesystems.cgroups import memory_limit

__all__ = ["SlotFile", "SlotScan", "Slots"]


@dataclass
class SlotFile:
    """A slot of this machine.

    ``readers`` counts the saves in progress that read it, and the allocation of its memory.

    ``memory`` is the mapped file; ``None`` if it does not exist yet.
    """

    path: Path
    memory: _native.Slot | None = None
    readers: int = 0

    @property
    def header(self) -> _native.SlotHeader | None:
        """The header of the slot; ``None`` if the slot contains no complete, sound snapshot."""
        if self.memory is None:
            return None
        try:
            return self.memory.header()
        except CheckpointError:
            return None


class SlotScan:
    """The state of all complete slots at one moment; ranks may complete further slots meanwhile.

    ``complete`` has the slots of each save that all ranks of this machine have completed, in order
    of rank. The saves are in order, the newest last.
    """

    def __init__(self, found: Iterable[tuple[_native.SlotHeader, SlotFile]]) -> None:
        self._found = list(found)
        self.complete = whole_saves(self._found)

    @property
    def newest(self) -> _native.SlotHeader | None:
        """A header of the newest complete save; ``None`` if no save is complete."""
        return self.complete[max(self.complete)][0][0] if self.complete else None

    def directory_of(self, save: Save) -> str | None:
        """Returns the path or URL of a complete save; ``None`` if it was discarded meanwhile."""
        memory = self.complete[save][0][1].memory
        assert memory is not None
        with contextlib.suppress(*NO_SNAPSHOT):
            return directory_name(memory.read())
        return None

    def ranks_of(self, save: Save) -> set[int]:
        """Returns the ranks that had completed their slots of a save."""
        return {header.rank for header, _ in self._found if header.save == save}

    def ranks_beyond(self, save: Save) -> set[int]:
        """Returns the ranks that had completed their slots of a later save."""
        return {header.rank for header, _ in self._found if header.save > save}


class Slots:
    """All slots of a run on this machine. Requires: the caller holds ``changed``, the agent's lock.

    Each slot's header describes its snapshot, so a restarted agent recovers all state from files.
    Slots of other runs (16 bytes) are ignored. :meth:`reserve` and :meth:`acquire` release the lock
    while they allocate memory. Removed memory is added to ``doomed``: the caller passes that to
    :func:`~torch_ckpt.agent.memory.free` without the lock. ``is_needed`` returns whether a save is
    complete and must still be persisted, or other ranks may still complete it. Raises StorageError
    if the system refuses to map a slot, and UnsupportedError if a later version has filled it: it
    would count as empty otherwise, and be filled again.
    """

    def __init__(
        self,
        folder: Path,
        run: bytes,
        changed: threading.Condition,
        is_needed: Callable[[Save, SlotScan], bool],
    ) -> None:
        self.doomed: list[_native.Slot] = []
        self.is_allocating = False
        """Whether memory of a rank is being allocated, one rank at a time."""
        self._changed, self._is_needed = changed, is_needed
        self._folder = folder
        self._run = run
        self._slots: dict[int, list[SlotFile]] = {}
        for rank, number, path in found_slots(folder):
            if number < SLOTS_PER_RANK:
                with contextlib.suppress(*NO_SNAPSHOT):
                    memory = _native.Slot.open(os.fsencode(path), True)
                    self._slots_of(rank)[number].memory = memory
                    memory.header()

    def _slots_of(self, rank: int) -> list[SlotFile]:
        return self._slots.setdefault(
            rank, [SlotFile(slot_path(self._folder, rank, n)) for n in range(SLOTS_PER_RANK)]
        )

    def scan(self) -> SlotScan:
        """Returns the slots that are complete now."""
        return SlotScan(
            (header, slot)
            for slots in self._slots.values()
            for slot in slots
            if (header := slot.header) is not None and header.run == self._run
        )

    def check_filled(self, rank: int, session: bytes, path: Path) -> None:
        """Checks a slot that a rank has reported as filled.

        Raises CheckpointError if the slot is not one of the rank, or contains no complete snapshot.
        """
        slot = next((slot for slot in self._slots_of(rank) if slot.path == path), None)
        header = None if slot is None else slot.header
        if slot is None or slot.memory is None or header is None:
            raise CheckpointError(
                f"cannot accept slot {path} of rank {rank}: it contains no complete snapshot"
            )
        if (header.run, header.session, header.rank) != (self._run, session, rank):
            raise CheckpointError(
                f"cannot accept slot {path} of rank {rank}: its header has another rank or session"
            )
        slot.memory.read()

    def reserve(self, rank: int, nbytes: int) -> None:
        """Allocates both slots of a rank, so that no save waits for memory.

        Raises StorageError if the tmpfs or the container's memory limit has too little space.
        Complete snapshots remain.
        """
        for slot in self._slots_of(rank):
            if slot.header is None and not slot.readers:
                self._allocate(slot, nbytes)

    def release(self, ranks: Collection[int], is_done: Callable[[Save], bool]) -> bool:
        """Removes the slots of former ranks whose snapshots are all on disk (``is_done``).

        Returns whether any were removed. ``ranks`` are the present ranks.
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

    def discard_all(self) -> None:
        """Frees all slots. A save that reads them cannot commit: their headers are cleared."""
        for slots in self._slots.values():
            for slot in slots:
                if slot.memory is not None:
                    slot.memory.clear()
                    self.doomed.append(slot.memory)
        self._slots.clear()
        for _, _, path in found_slots(self._folder):
            path.unlink(missing_ok=True)

    def _remove(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            for slot in self._slots.pop(rank):
                self._remove_file(slot)

    def _remove_file(self, slot: SlotFile) -> None:
        slot.path.unlink(missing_ok=True)  # Frees nothing while the file is mapped.
        if slot.memory is not None:
            self.doomed.append(slot.memory)
            slot.memory = None

    @property
    def nbytes(self) -> int:
        """Length of all allocated slots."""
        found = [slot.memory for slots in self._slots.values() for slot in slots]
        return sum(memory.nbytes for memory in found if memory is not None)

    def retain(self, ranks: Collection[int], keep: Save | None = None) -> None:
        """Removes the slots of former ranks, except those of ``keep`` and of pending saves."""
        scan = self.scan()
        newest = max(scan.complete, default=None)
        for rank in set(self._slots).difference(ranks):
            headers = [slot.header for slot in self._slots[rank]]
            is_needed = any(slot.readers for slot in self._slots[rank]) or any(
                h.save in (newest, keep)
                or (h.save in scan.complete and self._is_needed(h.save, scan))
                for h in headers
                if h is not None
            )
            if not is_needed:
                self._remove([rank])

    def acquire(self, rank: int, nbytes: int, keep: Save | None = None) -> SlotFile | None:
        """Clears a slot of a rank and returns it, for the rank to fill; ``None`` if none is free.

        The slots of the newest complete save, and of needed saves, are never free. If ``keep`` is
        complete, it remains instead of the newest, unless the rank would have to wait. Raises
        StorageError if the tmpfs or the container's memory limit has too little space.
        """
        slot = None
        if keep is not None and keep in self.scan().complete:
            slot = self.find_free(rank, keep)
        slot = slot or self.find_free(rank)
        if slot is not None:
            self._allocate(slot, nbytes)
            if slot.memory is not None:
                slot.memory.clear()
        return slot

    def find_free(self, rank: int, keep: Save | None = None) -> SlotFile | None:
        """Returns an empty slot, or else the slot of the oldest save that is not needed."""
        scan = self.scan()
        retained = max(scan.complete, default=None) if keep is None else keep
        free: list[tuple[Save, SlotFile]] = []
        for slot in self._slots_of(rank):
            if slot.readers:
                continue
            header = slot.header
            if header is None:
                return slot
            if header.save != retained and not self._is_needed(header.save, scan):
                free.append((header.save, slot))
        return min(free, key=lambda found: found[0])[1] if free else None

    def _check_limit(self, slot: SlotFile, nbytes: int) -> None:
        """Raises if the container's memory limit leaves too little for all slots of all ranks.

        Otherwise, Linux would kill the agent or a trainer once the memory is used.
        """
        limit = memory_limit()
        if limit is None:
            return
        missing = 0
        for slots in self._slots.values():
            sizes = [0 if each.memory is None else each.memory.nbytes for each in slots]
            wanted = max(nbytes if slot in slots else 0, *sizes)
            missing += sum(wanted - size for size in sizes)
        if missing > limit.allowed_nbytes:
            raise StorageError(
                f"cannot reserve {nbytes} bytes of memory as {slot.path}: the {SLOTS_PER_RANK} "
                f"slots of each rank need {missing} more bytes in all; {limit}",
                errno.ENOMEM,
            )

    def _allocate(self, slot: SlotFile, nbytes: int) -> None:
        """Replaces the memory of a free slot if it is too small; releases the lock meanwhile."""
        if slot.memory is not None and slot.memory.nbytes >= nbytes:
            return
        slot.readers += 1
        try:
            self._changed.wait_for(lambda: not self.is_allocating)
            self.is_allocating = True
            try:
                self._check_limit(slot, nbytes)
                self._remove_file(slot)
                with released(self._changed):
                    free(self.doomed)
                    memory = self._create(slot.path, nbytes)
                slot.memory = memory
            finally:
                self.is_allocating = False
        finally:
            slot.readers -= 1
            self._changed.notify_all()

    def _create(self, path: Path, nbytes: int) -> _native.Slot:
        try:
            return _native.Slot.create(os.fsencode(path), nbytes)
        except CheckpointError as error:
            space = os.statvfs(self._folder)
            error.args = (
                f"{error.args[0]}; {self._folder} has {space.f_bavail * space.f_frsize} bytes left "
                f"and each rank needs {SLOTS_PER_RANK} slots",
                *error.args[1:],
            )
            raise
