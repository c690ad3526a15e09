"""SnapshotReader: loads a checkpoint from the snapshots in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_ckpt._core import _native
from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.replica_files import verify_replica
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.snapshot import open_snapshot
from torch_ckpt.storage.reader import FastReader

__all__ = ["MemoryCheckpoint", "SnapshotReader"]


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A complete save in memory, to load with :class:`SnapshotReader`.

    Attributes:
        save: Session and sequence number of the save; later saves compare as greater.
        step: Step of the save.
        folder: Folder of the slots.
        slots: Files of the save's slots on this machine, the slot with this rank's number first.
        replicas: Those slots that are replicas from another machine.
        part: The part of the replicas that this rank verifies: its number, and the number of parts.
        others: Index of the slots on all machines; ``None`` if all are on this one.
    """

    save: Save
    step: int
    folder: Path
    slots: Sequence[Path]
    replicas: Sequence[Path] = ()
    part: tuple[int, int] = (0, 1)
    others: _native.Index | None = None


class SnapshotReader(FastReader):
    """Loads a save from memory, into any parallel layout.

    Each rank reads the slots of its machine directly. If the ranks of the save were on several
    machines, the ranks exchange data that only one machine has in memory. Replicas from other
    machines are verified first; each rank of this machine verifies a part of them.

    Args:
        checkpoint: Checkpoint to load, from :meth:`SnapshotAgent.newest`.
        **options: Options of :class:`FastReader`.

    Raises:
        NotFoundError: A slot no longer contains a complete snapshot.
        CorruptionError: A replica does not match its checksums.
        MismatchError: The slots no longer belong to one save.

    Example::

        found = agent.newest()
        if found is not None:
            dcp.load(state, storage_reader=SnapshotReader(found))
    """

    def __init__(self, checkpoint: MemoryCheckpoint, **options: Any) -> None:
        exchange = "off" if checkpoint.others is None else "auto"
        super().__init__(checkpoint.folder, **{**options, "exchange": exchange})
        self.checkpoint = checkpoint

    def _reachable_files(self) -> frozenset[str] | None:
        return frozenset(path.name for path in self.checkpoint.slots)

    def _open(self, path: Location, prefix: str) -> Opened:
        checkpoint = self.checkpoint
        if prefix:
            raise NotFoundError(
                f"cannot open {prefix!r} in memory: no rank has a checkpoint of its own there"
            )
        for replica in checkpoint.replicas:
            verify_replica(replica, *checkpoint.part)
        return open_snapshot(
            checkpoint.save,
            checkpoint.folder,
            checkpoint.slots,
            trust_pickle=self.trust_pickle,
            others=checkpoint.others,
        )
