"""Machines that replicate to each other, in one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_ckpt._core import _native
from torch_ckpt.agent.memory import Save, slot_path
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.replica_files import whole_replicas
from torch_ckpt.agent.replicas import Replicas
from torch_ckpt.agent.slot_contents import SlotContents
from torch_ckpt.agent.slots import Slots

RUN, SESSION = b"r" * 16, b"s" * 16
NUMEL = 700_000  # 2.7 MiB: three blocks.
SLOW = 1 << 20  # Bytes per second.


def fill(folder: Path, sequence: int, ranks: Sequence[int] = (0, 1), node: int = 0) -> Save:
    """Fills a slot of each rank, as ranks of a machine do; returns the save."""
    for rank in ranks:
        contents = SlotContents.of({"w": torch.full((NUMEL,), float(sequence + rank)), "o": rank})
        table = contents.table("", sync=True)
        path = slot_path(folder, rank, sequence % 2)
        if path.exists():
            slot = _native.Slot.open(path, True)
        else:
            slot = _native.Slot.create(path, _native.slot_nbytes(len(table), contents.nbytes))
        header = _native.SlotHeader(
            run=RUN,
            session=SESSION,
            sequence=sequence,
            step=10 * sequence,
            rank=rank,
            world_size=4,
            node=node,
            node_count=2,
            ranks_here=len(ranks),
            persist=False,
        )
        slot.begin(header, table, contents.nbytes)
        contents.copy_to(slot, _native.Devices())
        slot.complete()
    return SESSION, sequence


class Machine:
    """The folder of a machine, and its replicas."""

    def __init__(self, folder: Path, node: int, rate: float | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.node = folder, node
        self.changed = threading.Condition()
        self.options = AgentOptions(replicas=1, replicate_bytes_per_s=rate)
        self.slots = self._scanned()
        self.replicas = Replicas(
            folder, RUN, self.slots, self.changed, options=lambda: self.options
        )

    def _scanned(self) -> Slots:
        return Slots(self.folder, RUN, self.changed, lambda *_: False)

    def replicated(self) -> list[Save] | None:
        """The saves that the buddy has, as the agent reports them to the ranks, which decide."""
        saves = self.replicas.report(self.slots.scan())["saves"]
        return None if saves is None else [(bytes.fromhex(of), number) for of, number in saves]

    def listen(self) -> dict[str, Any]:
        with self.changed:
            return self.replicas.listen(SESSION, self.node, ["127.0.0.1"])

    def connect(self, other: int, listening: dict[str, Any]) -> None:
        with self.changed:
            self.replicas.connect(other, listening["at"], listening["token"], other, 2)

    def fill(self, sequence: int) -> Save:
        save = fill(self.folder, sequence, node=self.node)
        with self.changed:  # As the ranks report it.
            self.slots = self.replicas._sender._slots = self._scanned()
            self.changed.notify_all()
        return save

    def stored(self) -> list[Save]:
        return sorted(save for save, _ in whole_replicas(self.folder, RUN))

    def close(self) -> None:
        receiver = self.replicas._receiver
        with self.changed:
            self.replicas.close()
        if receiver is not None:
            receiver._accepting.join(30)  # As the end of a process, it frees the port.
