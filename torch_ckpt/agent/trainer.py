"""What a training process has of the agent: it fills slots, and everything else is the agent's."""

from __future__ import annotations

import atexit
import dataclasses
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.agent.client import AgentClient, Place
from torch_ckpt.agent.machine_share import MachineShare
from torch_ckpt.agent.memory import (
    SLOTS_PER_RANK,
    Save,
    SlotHeader,
    complete_slots,
    folder_of,
    open_folder,
    run_of,
    slot_path,
    whole_saves,
)
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.slot_contents import SlotContents
from torch_ckpt.coordination.connect import this_machine
from torch_ckpt.coordination.group import Group, group_of
from torch_ckpt.errors import CheckpointError, UnsupportedError
from torch_ckpt.filesystems.location import Location

__all__ = ["MemoryCheckpoint", "OnBusy", "SnapshotAgent", "StagedSave"]

OnBusy = Literal["wait", "skip", "error"]
"""What a save does while former ones keep all slots: waits, is not done, or fails."""


@dataclass(frozen=True)
class StagedSave:
    """A save that is complete in memory on this rank.

    Attributes:
        header: What the slot says of it.
        directory: What it is to become.
    """

    header: SlotHeader
    directory: Location


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A save that is in memory.

    Attributes:
        save: Session and sequence; greater than those of earlier ones.
        step: What the user has called it.
        folder: Where its slots lie.
        slots: Of all ranks that made it, or of those of this machine; that of this rank's own
            number first.
    """

    save: Save
    step: int
    folder: Path
    slots: Sequence[Path]


class SnapshotAgent:
    """The agent of this machine, as a rank sees it; it is started where there is none.

    A process of its own keeps, in shared memory, two snapshots of each rank: while one is filled,
    the other stays. It brings them to disk without the trainers, and goes on when these die. Where
    ranks are on several machines, agents publish files in the checkpoint's directory: a save
    counts if all of them have it.

    All ranks make one at the same time. It ends with the process in good order, when the agent has
    brought to disk what it was asked to; a process that an exception ends leaves its snapshots.

    Args:
        run: Names the training that goes on from restart to restart: by convention the directory
            of its checkpoints.
        process_group: Of all ranks.
        options: Of the process.
        on_busy: What a save does while former ones keep all slots.
        timeout_s: Seconds that it waits then, and for other ranks.

    Attributes:
        waited: Saves that waited for a slot.
        skipped: Saves that were not done because of ``on_busy="skip"``.
        refused: Saves that failed because of ``on_busy="error"``.

    Raises:
        CheckpointError: The agent cannot be started, or the run is another live process's.

    Example::

        agent = SnapshotAgent("run")
        future = agent.async_save(state, "run/step-100", step=100)
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
        options: AgentOptions | None = None,
        on_busy: OnBusy = "wait",
        timeout_s: float = 1800.0,
    ) -> None:
        self.on_busy: OnBusy = on_busy
        self.timeout_s = timeout_s
        self.waited = self.skipped = self.refused = 0
        self._group = group_of(process_group)
        self._stages = self._group.series()
        self._place = _find_place(run, self._group, timeout_s)
        self._client = AgentClient(run, self._place, options or AgentOptions())
        self._sequence = 0
        self._newest: Path | None = None  # What was staged last, if that has succeeded.
        self._slots: dict[Path, tuple[int, _native.Slot]] = {}  # With its inode.
        self._share = MachineShare(self._client.folder, self._place.run, self._place.rank)
        self._devices = _native.Devices()
        self._lock = threading.Lock()
        self._is_left = False
        self._pid = os.getpid()
        self._waiting = ThreadPoolExecutor(SLOTS_PER_RANK, "torch_ckpt-wait")
        atexit.register(self._at_exit)

    @property
    def is_on_several_machines(self) -> bool:
        """Whether the ranks are."""
        return self._place.node_count > 1

    def reserve(self, state_dict: dict[str, Any]) -> None:
        """Has memory made for a state like this, so that the first save is as fast as the tenth.

        Raises:
            StorageError: There is not as much.
        """
        contents = SlotContents.of(state_dict)
        self._client.reserve(
            _native.slot_nbytes(len(contents.table("", sync=True)), contents.nbytes)
        )
        for number in range(SLOTS_PER_RANK):
            slot = self._slot(slot_path(self._client.folder, self._place.rank, number))
            slot.pin_for(contents.batch, self._devices)

    def stage(
        self,
        state_dict: dict[str, Any],
        directory: str | os.PathLike[str],
        *,
        step: int,
        sync: bool = True,
        persist: bool = True,
    ) -> StagedSave | None:
        """Copies what this rank holds into a slot. Training stops for this alone.

        All ranks call it, in the same order of saves. Each copies all that it holds in the first
        save. As long as no rank holds other tensors than in the save before, each copies its share
        of those that ranks of its machine hold alike.

        Args:
            state_dict: As DCP takes it.
            directory: The checkpoint that it is to become.
            step: What the user calls it.
            sync: Whether the checkpoint is to survive a power cut.
            persist: Whether it is to be brought to disk. Otherwise it is there for ranks that start
                again, and goes to disk if they do not, or if :meth:`persist` asks for it.

        Returns:
            The save; ``None`` where it was skipped, on this rank at least.

        Raises:
            CheckpointError: All slots were in use for ``timeout_s``, or at all with
                ``on_busy="error"``.
            RankTimeoutError: A rank was late or gone.
            StorageError: There is not as much memory.
            UnsupportedError: The state of a rank has no form in columns.
        """
        location: Location | None = None

        def listed() -> tuple[Location, SlotContents]:
            nonlocal location
            location = _reached(directory)
            return location, SlotContents.of(state_dict)

        with self._lock, gc_paused():
            sequence, self._sequence = self._sequence, self._sequence + 1
            self._newest = None
            header = self._place.header(sequence, step, persist=persist)
            try:
                filled = self._fill(header, listed, sync=sync)
            except BaseException:
                if location is not None:  # Or the other ranks' slots would wait for it.
                    self._client.abort(sequence, location)
                raise
            assert location is not None
            if filled is None:
                if self._place.node_count > 1:  # Others may not have.
                    self._client.abort(sequence, location)
                return None
            self._newest, header = filled
            self._client.filled(self._newest, sequence)
            return StagedSave(header, location)

    def _fill(
        self, header: SlotHeader, listed: Callable[[], tuple[Location, SlotContents]], *, sync: bool
    ) -> tuple[Path, SlotHeader] | None:
        """Fills a slot; returns its file, and what it says of itself.

        Returns ``None`` where no slot is free and the save is to be skipped.
        """
        directory, contents, is_shared = self._agree(header.save, listed)
        table = contents.table(str(directory), sync=sync)
        nbytes = _native.slot_nbytes(len(table), contents.nbytes)
        # What is too small will be made anew, and cannot be as long as it is mapped here.
        self._slots = {p: one for p, one in self._slots.items() if one[1].nbytes >= nbytes}
        wait_s = self.timeout_s if self.on_busy == "wait" else 0.0
        acquired = self._client.acquire(header.sequence, nbytes, wait_s)
        if acquired is None:
            if self.on_busy == "skip":
                self.skipped += 1
                return None
            self.refused += self.on_busy == "error"
            raise CheckpointError(f"cannot save {directory}: former saves keep all slots")
        self.waited += acquired.has_waited
        if is_shared:
            contents = self._share.of(contents)
            table = contents.table(str(directory), sync=sync)
        slot = self._slot(acquired.path)
        header = dataclasses.replace(
            header, tensors_id=self._share.tensors, share=self._share.sharing
        )
        slot.begin(header.to_native(), table, contents.nbytes)
        contents.copy_to(slot, self._devices)
        slot.complete()
        if not is_shared:
            self._share.all_copied(header.save)
        return acquired.path, header

    def _agree(
        self, save: Save, listed: Callable[[], tuple[Location, SlotContents]]
    ) -> tuple[Location, SlotContents, bool]:
        """What is saved where, and whether all ranks copy their shares of it.

        An error of one rank is that of all.
        """
        found: list[tuple[Location, SlotContents]] = []

        def own() -> bool:
            found.append(listed())
            return self._share.is_known(found[0][1], save)

        is_shared = self._stages.decide("staging", own, all, timeout_s=self.timeout_s)
        if not is_shared:
            self._share.forget()
        return *found[0], is_shared

    def withdraw(self) -> None:
        """Takes back what was staged last."""
        if self._newest is not None:
            self._slots[self._newest][1].clear()
            self._newest = None
            self._share.forget()

    def persist(self, staged: StagedSave) -> None:
        """Waits until the agent has committed a save.

        Raises:
            CheckpointError: It has failed.
        """
        client = self._client.another()
        try:
            client.persist(staged.header.sequence)
        finally:
            client.close()

    def async_save(
        self,
        state_dict: dict[str, Any],
        directory: str | os.PathLike[str],
        *,
        step: int,
        sync: bool = True,
        persist: bool = True,
    ) -> Future[None] | None:
        """Saves a state as it is now; returns when it has been copied.

        Args:
            state_dict: As for :meth:`stage`, like all others.
            directory: The checkpoint that it is to become.
            step: What the user calls it.
            sync: Whether the checkpoint is to survive a power cut.
            persist: Whether it is to be brought to disk.

        Returns:
            A future that is done when the checkpoint is committed, or at once without ``persist``;
            ``None`` where the save was skipped.

        Raises:
            CheckpointError: As :meth:`stage`. The future: the save has failed.
        """
        staged = self.stage(state_dict, directory, step=step, sync=sync, persist=persist)
        if staged is None:
            return None
        if persist:
            return self._waiting.submit(self.persist, staged)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def newest(self) -> MemoryCheckpoint | None:
        """The newest snapshot that is complete on all ranks that made it; ``None`` if none is.

        Every rank must call it, before the first save: they agree. Of one that was made on several
        machines, each must have what its own ranks have left; a rank that wants more than that
        learns it when it loads (:class:`SnapshotReader`).
        """
        here = {(found.save, found.step): found for found in self.memory_checkpoints()}
        common = self._group.decide(
            "comparing what is in memory",
            lambda: set(here),
            lambda of_all: of_all[0].intersection(*of_all),
            timeout_s=self.timeout_s,
        )
        newest = max(common, default=None)
        return None if newest is None else here[newest]

    def memory_checkpoints(self) -> list[MemoryCheckpoint]:
        """All saves that this machine has in memory whole, the newest first.

        Of those that were made on several machines, what is of any use to this rank: its own slot
        is there, and there were as many ranks as there are now.
        """
        found = complete_slots(self._client.folder, self._place.run)
        whole = []
        for save, of_save in reversed(whole_saves(found).items()):
            of_save.sort(key=lambda one: one[0].rank != self._place.rank)  # Its own comes first.
            first = of_save[0][0]
            mine = self._place.rank, self._place.world_size
            if first.node_count == 1 or (first.rank, first.world_size) == mine:
                slots = [path for _, path in of_save]
                whole.append(MemoryCheckpoint(save, first.step, self._client.folder, slots))
        return whole

    def close(self, *, drop: bool = False) -> None:
        """Ends in good order.

        Args:
            drop: Whether what is in memory, and not on disk, is of no more use.
        """
        if self._is_left or os.getpid() != self._pid:
            return
        atexit.unregister(self._at_exit)
        self._waiting.shutdown()
        self._client.detach(drop=drop)
        self._slots.clear()

    def leave(self) -> None:
        """Leaves what is in memory to a process that starts again: this one is to end."""
        self._is_left = True
        atexit.unregister(self._at_exit)
        self._client.close()

    def _at_exit(self) -> None:
        # Of a process that an exception ends, memory is what the next one goes on from.
        if getattr(sys, "last_type", None) is None and os.getpid() == self._pid:
            self._client.detach(drop=False)

    def _slot(self, path: Path) -> _native.Slot:
        """A slot, mapped; it may have been made anew, and larger, under the same name."""
        inode = path.stat().st_ino
        known = self._slots.get(path)
        if known is None or known[0] != inode:
            known = self._slots[path] = inode, _native.Slot.open(os.fsencode(path), True, True)
        return known[1]


def _reached(directory: str | os.PathLike[str]) -> Location:
    """A directory, as the agent is told it."""
    location = Location(directory).absolute()
    try:
        str(location).encode()
    except UnicodeEncodeError:
        raise UnsupportedError(f"cannot save to {location!r}: it is no UTF-8") from None
    return location


def _find_place(run: str | os.PathLike[str], group: Group, timeout_s: float) -> Place:
    """Which rank of which run this is; all ranks call it."""
    name, rank = run_of(run), group.rank
    if group.size == 1:
        return Place(name, _new_session(name), 0, 1, 0, 1, [0])

    def own() -> tuple[bytes, bytes, str]:
        # Containers of one machine may have memory of their own each. Not the run's folder: an
        # agent that ends removes that.
        memory = open_folder(name).parent.stat()
        return name, _new_session(name), f"{this_machine()} {memory.st_dev} {memory.st_ino}"

    of_all = group.decide("starting the agent", own, list, timeout_s=timeout_s)
    names, sessions, machines = zip(*of_all, strict=True)
    if len(set(names)) != 1:
        raise CheckpointError(f"ranks name different runs, {os.fspath(run)!r} among them")
    nodes = list(dict.fromkeys(machines))
    here = [other for other in range(group.size) if machines[other] == machines[rank]]
    node = nodes.index(machines[rank])
    return Place(name, max(sessions), rank, group.size, node, len(nodes), here)


def _new_session(run: bytes) -> bytes:
    """Later than any that is remembered, whatever clocks say."""
    known = [header.session for header, _ in complete_slots(folder_of(run), run)]
    since = int.from_bytes(max(known, default=b"")[:8], "big") + 1
    return max(time.time_ns(), since).to_bytes(8, "big") + secrets.token_bytes(8)
