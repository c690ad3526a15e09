"""SnapshotReader: loads a checkpoint from the snapshots in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch_ckpt._core import _native
from torch_ckpt.agent.client import Member
from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.replica_files import verify_replica
from torch_ckpt.agent.slot_reports import SlotReport, SlotSource, sources_of_whole_saves
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.snapshot import SlotTable, merged_index, open_snapshot
from torch_ckpt.storage.reader import FastReader

__all__ = ["MemoryCheckpoint", "SnapshotReader", "find_snapshot"]


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A complete save in memory, to load with :class:`SnapshotReader`.

    Attributes:
        save: Session and sequence number of the save; later saves compare as greater.
        step: Step of the save.
        folder: Folder of the slots.
        slots: Files of the save's slots on this machine, the slot with this rank's number first.
        replicas: Those slots that are replicas from another machine.
        part: Number of the part of the replicas that this rank verifies, and the number of parts.
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
                f"cannot open {prefix!r} in memory: a save in memory is one checkpoint of all ranks"
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


def find_snapshot(
    step: int | None,
    member: Member,
    folder: Path,
    report: Callable[[], SlotReport],
    decide: Callable[..., Any],
) -> MemoryCheckpoint | None:
    """Returns the newest save of a step, or of any step; ``None`` if memory contains none.

    All ranks call this function. ``decide`` is :meth:`Group.decide
    <torch_ckpt.coordination.group.Group.decide>` with a timeout, and ``report`` returns the slots
    in the memory of this machine.
    """

    def choose(reports: list[SlotReport]) -> list[SlotSource] | None:
        whole = sources_of_whole_saves(reports)
        saves = [s for s, sources in whole.items() if step in (None, sources[0][1].step)]
        return whole[max(saves)] if saves else None

    sources: list[SlotSource] | None
    sources = decide("comparing snapshots in memory", report, choose)
    if sources is None:
        return None
    here = [slots for node, slots in sources if node == member.node]
    paths = [folder / name for slots in here for name in slots.names]
    replicas = [folder / name for slots in here if slots.is_replica for name in slots.names]

    def tables() -> list[SlotTable]:
        return [SlotTable.read(path) for path in paths] if member.is_first_here else []

    def merge(found: list[list[SlotTable]]) -> _native.Index:
        return merged_index(chain.from_iterable(found))

    several = member.node_count > 1
    others = decide("sending the tables of slots", tables, merge) if several else None
    own = f"rank-{member.rank}."
    paths.sort(key=lambda path: not path.name.startswith(own))  # A stable order.
    part = member.ranks_here.index(member.rank), len(member.ranks_here)
    first = sources[0][1]
    return MemoryCheckpoint(first.save, first.step, folder, paths, replicas, part, others)
