"""The files of replicas: slots of another machine, with a checksum of each block.

A replica is a copy of a slot in the same format, so the same reader opens it. After the slot, the
file contains the XXH3-64 of each block, and a trailer. A replica is used only once the replicas of
all ranks of its machine are complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.agent.memory import NO_SNAPSHOT, Save, names_in, whole_saves
from torch_ckpt.errors import CheckpointError, CorruptionError

__all__ = [
    "BLOCK_NBYTES",
    "GENERATIONS",
    "PENDING_REPLICA",
    "ReplicaFile",
    "clear_replica",
    "found_replicas",
    "remove_replicas",
    "replica_path",
    "slot_blocks",
    "used_nbytes",
    "verify_replica",
    "whole_replicas",
]

BLOCK_NBYTES = 1 << 20
"""Bytes per checksum."""

PENDING_REPLICA = "pending-replica-"
"""Prefix of the file of a replica whose memory is being allocated."""

GENERATIONS = 2
"""Replicas per rank: one remains complete while the next one arrives."""

_COMPLETE = b"COMPLETE"  # The first bytes of a complete slot; see csrc/format/FORMAT.md.
_PAYLOAD_AT = 144  # Where a slot stores begin and length of its payload.
_PAYLOAD = struct.Struct("<2q")
_TRAILER = struct.Struct("<8s2qQ")  # Magic, bytes per block, bytes of the slot, XXH3 of sums.
_MAGIC = b"TCREP2\r\n"
_NAME = re.compile(r"replica-(\d+)-rank-(\d+)\.(\d+)")


def replica_path(folder: Path, node: int, rank: int, generation: int) -> Path:
    """Returns the file of a replica of a rank of another node."""
    return folder / f"replica-{node}-rank-{rank}.{generation}"


def found_replicas(folder: Path) -> list[tuple[int, int, Path]]:
    """Returns the rank, generation and file of every replica in a folder, complete or not."""
    matches = filter(None, map(_NAME.fullmatch, names_in(folder)))
    return [(int(match[2]), int(match[3]), folder / match[0]) for match in matches]


def whole_replicas(
    folder: Path, run: bytes
) -> dict[tuple[Save, int], list[tuple[_native.SlotHeader, Path]]]:
    """Returns the replicas of each save and node that are complete for all ranks of the node.

    Raises as :func:`~torch_ckpt.agent.memory.complete_slots`.
    """
    by_node: dict[int, list[tuple[_native.SlotHeader, Path]]] = {}
    for _, _, path in found_replicas(folder):
        with contextlib.suppress(*NO_SNAPSHOT):
            header = _native.Slot.open(os.fsencode(path), False).header()
            if header.run == run:
                by_node.setdefault(header.node, []).append((header, path))
    return {
        (save, node): slots
        for node, found in by_node.items()
        for save, slots in whole_saves(found).items()
    }


def clear_replica(path: Path) -> list[_native.Slot]:
    """Marks a replica as incomplete, and returns its memory; empty if the file is not a slot."""
    with contextlib.suppress(CheckpointError):
        slot = _native.Slot.open(os.fsencode(path), True)
        slot.clear()
        return [slot]
    return []


def remove_replicas(folder: Path) -> list[_native.Slot]:
    """Removes all replicas, and returns their memory, which is freed with the last reference."""
    memory = []
    for _, _, path in found_replicas(folder):
        memory += clear_replica(path)
        path.unlink(missing_ok=True)
    return memory


def used_nbytes(slot: _native.Slot) -> int:
    """Returns the length of a complete slot up to the end of its payload."""
    with memoryview(slot) as view:
        begin, nbytes = _PAYLOAD.unpack_from(view, _PAYLOAD_AT)
        return min(int(begin + nbytes), len(view))


def slot_blocks(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields begin and end of each block of a slot."""
    for begin in range(0, nbytes, BLOCK_NBYTES):
        yield begin, min(begin + BLOCK_NBYTES, nbytes)


def _sums_at(slot_nbytes: int) -> int:
    return -(-slot_nbytes // 8) * 8


def _sums_nbytes(slot_nbytes: int) -> int:
    return 8 * -(-slot_nbytes // BLOCK_NBYTES)


@dataclass
class ReplicaFile:
    """A replica that is being received. ``slot_nbytes`` is the length without checksums."""

    path: Path
    slot_nbytes: int
    memory: _native.Slot
    pending: Path | None = None

    @staticmethod
    def file_nbytes(slot_nbytes: int) -> int:
        """Returns the length of the file of a replica."""
        end = _sums_at(slot_nbytes) + _sums_nbytes(slot_nbytes) + _TRAILER.size
        return -(-end // 8) * 8

    @classmethod
    def create(cls, path: Path, slot_nbytes: int) -> ReplicaFile:
        """Returns an incomplete replica in new memory, under a temporary name.

        :meth:`move` renames it to ``path``. Raises StorageError if the tmpfs has too little space.
        """
        pending = path.with_name(f"{PENDING_REPLICA}{secrets.token_hex(8)}")
        memory = _native.Slot.create(os.fsencode(pending), cls.file_nbytes(slot_nbytes))
        return cls(path, slot_nbytes, memory, pending)

    def move(self) -> None:
        """Moves a new file to its path."""
        if self.pending is not None:
            self.pending.rename(self.path)
            self.pending = None

    def remove(self) -> None:
        """Removes the file. Its memory is freed with the last reference."""
        (self.pending or self.path).unlink(missing_ok=True)

    def finish(self, sums: Sequence[int]) -> None:
        """Stores the checksums of all blocks."""
        encoded = struct.pack(f"<{len(sums)}Q", *sums)
        at = _sums_at(self.slot_nbytes)
        trailer = _TRAILER.pack(_MAGIC, BLOCK_NBYTES, self.slot_nbytes, _native.xxh3(encoded))
        with memoryview(self.memory) as view:
            view[at : at + len(encoded)] = encoded
            view[len(view) - len(trailer) :] = trailer

    def complete(self) -> None:
        """Marks the replica as complete."""
        with memoryview(self.memory) as view:
            view[: len(_COMPLETE)] = _COMPLETE
        self.memory.read()


def verify_replica(path: Path, part: int = 0, parts: int = 1) -> None:
    """Compares the blocks in one of several equal parts of a replica with their checksums.

    Raises CorruptionError, which names the file, if a block is damaged.
    """
    with memoryview(_native.Slot.open(os.fsencode(path), False)) as view:
        blocks = _blocks(path, view)
        first, last = len(blocks) * part // parts, len(blocks) * (part + 1) // parts
        for begin, end, expected in blocks[first:last]:
            if _native.xxh3(view[begin:end]) != expected:
                raise CorruptionError(
                    f"cannot load replica {path}: the {end - begin} bytes at {begin} do not have "
                    "their checksum"
                )


def _blocks(path: Path, view: memoryview) -> list[tuple[int, int, int]]:
    """Returns begin, end and checksum of each block."""
    magic, block_nbytes, slot_nbytes, sum_of_sums = _TRAILER.unpack_from(
        view, len(view) - _TRAILER.size
    )
    at, nbytes = _sums_at(slot_nbytes), _sums_nbytes(slot_nbytes)
    is_sound = magic == _MAGIC and block_nbytes == BLOCK_NBYTES
    if is_sound and slot_nbytes > 0 and at + nbytes <= len(view) - _TRAILER.size:
        encoded = bytes(view[at : at + nbytes])
        if _native.xxh3(encoded) == sum_of_sums:
            sums = struct.unpack(f"<{nbytes // 8}Q", encoded)
            return [
                (begin, end, expected)
                for (begin, end), expected in zip(slot_blocks(slot_nbytes), sums, strict=True)
            ]
    raise CorruptionError(f"cannot load replica {path}: its checksums are damaged")
