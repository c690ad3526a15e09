"""SnapshotReader: loads what ranks have left in memory."""

from __future__ import annotations

from typing import Any

from torch_ckpt.agent.trainer import Remembered
from torch_ckpt.errors import NotFoundError
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.snapshot import open_snapshot
from torch_ckpt.reader import FastReader

__all__ = ["SnapshotReader"]


class SnapshotReader(FastReader):
    """Loads a save that is still in memory, into any layout, by the plans that load files.

    What several ranks have left is read by each from where it is: nothing is exchanged.

    Args:
        remembered: As :meth:`SnapshotAgent.newest` finds it.
        **options: As for :class:`FastReader`.

    Raises:
        NotFoundError: A slot holds no complete snapshot any more.
        MismatchError: The slots are not those of one save any more.

    Example::

        found = agent.newest()
        if found is not None:
            dcp.load(state, storage_reader=SnapshotReader(found))
    """

    def __init__(self, remembered: Remembered, **options: Any) -> None:
        super().__init__(remembered.folder, **{**options, "exchange": "off"})
        self.remembered = remembered

    def _open(self, prefix: str) -> Opened:
        if prefix:
            raise NotFoundError("in memory no rank has saved alone")
        slots = self.remembered.slots
        return open_snapshot(self.path, slots, trust_pickle=self.trust_pickle)
