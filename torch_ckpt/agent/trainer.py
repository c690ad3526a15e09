"""SnapshotAgent: the trainer's interface to the agent. A trainer only fills slots."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.agent.buddies import Replication
from torch_ckpt.agent.client import AgentClient
from torch_ckpt.agent.copies import AgentCopy
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.failed_saves import FailedSaves
from torch_ckpt.agent.member import connect_all, find_member
from torch_ckpt.agent.memory import (
    SLOTS_PER_RANK,
    complete_slots,
    done_mark,
)
from torch_ckpt.agent.messages import Kind
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.own_slots import OwnSlots
from torch_ckpt.agent.reader import MemoryCheckpoint
from torch_ckpt.agent.slot_contents import SlotContents
from torch_ckpt.agent.slot_reports import (
    SlotReport,
    warn_of_former,
)
from torch_ckpt.agent.snapshot_memory import SnapshotMemory
from torch_ckpt.coordination.background import BackgroundFuture
from torch_ckpt.coordination.exclusive import Exclusive
from torch_ckpt.coordination.group import Group, group_of
from torch_ckpt.coordination.waiting import duration, submitted
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location, name_of
from torch_ckpt.formats.committed import has_checkpoint, open_committed
from torch_ckpt.options import OnBusy
from torch_ckpt.planning.replica_check import warn_of
from torch_ckpt.storage.progress import Phases, is_first
from torch_ckpt.stored_json import from_json

__all__ = ["SnapshotAgent", "StagedSave"]

_LOG = logging.getLogger("torch_ckpt")


@dataclass(frozen=True)
class StagedSave:
    """A save whose ``slot`` this rank has filled, and the directory of the future checkpoint."""

    header: _native.SlotHeader
    directory: Location
    slot: Path


class SnapshotAgent:
    """A rank's interface to the agent of its machine, which it starts if none runs.

    The agent is a separate process. Each rank has two slots in shared memory: while the rank fills
    one, the snapshot in the other remains intact. The agent writes complete snapshots to disk, even
    after the trainers have died. If the ranks are on several machines, the agents coordinate
    through files in the checkpoint's directory, and a save is committed only if all machines
    complete it.

    All ranks must create a ``SnapshotAgent`` at the same time. When all trainers exit normally, the
    agent writes the requested saves and the newest snapshot to disk, and exits. If a trainer exits
    with an exception, the snapshots also remain in memory for the next process.

    Args:
        run: Name of the training run, the same after each restart; by convention the directory of
            its checkpoints.
        process_group: The ranks; all if ``None``.
        options: Options of the agent.
        on_busy: What a save does while earlier saves occupy all slots: ``"wait"`` for a slot,
            ``"skip"`` the save, or raise an ``"error"``.
        timeout_s: Longest time that a save waits for a slot, and this rank for others, in seconds.
        has_directory: Whether ``run`` is the directory of all steps, as for a ``Run``. It then has
            a file ``run-id``. If the directory was removed, moved or replaced, the snapshots in
            memory are not offered, and the first save frees them.
        local: Local directory to which the ranks save. The agents of several machines coordinate in
            the directory ``run``.
        shares_local: Whether all ranks share ``local``, so that the agents coordinate there.
        group: The group of a ``Run``, whose ranks are those of ``process_group``.

    Attributes:
        waited: Number of saves that waited for a slot.
        skipped: Number of saves skipped because of ``on_busy="skip"``.
        refused: Number of saves that raised an error because of ``on_busy="error"``.
        in_memory: The last save, unless its write was requested.

    Raises:
        CheckpointError: The agent cannot be started, another live process uses this rank of the
            run, or the ranks name different runs.
        StorageError: ``run`` is the directory of the steps, and this process or the agent cannot
            reach its store.
        UnsupportedError: The agent does not know the scheme of ``run``, or reaches another store.

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
        has_directory: bool = False,
        local: str | os.PathLike[str] | None = None,
        shares_local: bool = False,
        group: Group | None = None,
    ) -> None:
        self._group = group or group_of(process_group)
        self._stages, self._failed = self._group.series(), FailedSaves(self._group)
        self.on_busy: OnBusy = on_busy
        self._exclusive = Exclusive("the agent")
        self.waited = self.skipped = self.refused = 0
        options = options or AgentOptions()
        with self._group.method("start the agent", timeout_s), contextlib.ExitStack() as undo:
            self.timeout_s = timeout_s = duration("timeout_s", timeout_s)
            directory = Location(run).resolved() if has_directory else None
            run = name_of(run)  # Resolved once, because links in the path may change.
            self._shared = None if local is None or shares_local else Location(run)
            self.member = member = find_member(run, self._group, timeout_s, directory)
            connect = functools.partial(AgentClient, run, member, options, local=local)
            connect = functools.partial(connect, shares_local=shares_local, timeout_s=timeout_s)
            self._client = connect_all(self._group, connect, timeout_s)
            self._memory = SnapshotMemory(member, self._group, timeout_s)
            undo.callback(self._client.close)
            self._replication = Replication(self._client, self._stages, timeout_s)
            self._replication.begin(process_group, options)
            if self.member.is_first_here:
                warn_of_former(self._client.folder, member.run, member.run_id, run)
            undo.pop_all()
        self._newest: Path | None = None  # Slot of the last save, if it was staged.
        self.in_memory: StagedSave | None = None
        self._former: StagedSave | None = None  # The same before the save that was staged last.
        self._slots = OwnSlots(
            self._client, self._stages, self._replication, options.check_replicas, timeout_s
        )
        self._staging = Exclusive("the memory of this rank in the agent")
        self._has_left, self._pid = False, os.getpid()
        self._waiting = ThreadPoolExecutor(SLOTS_PER_RANK, "torch_ckpt-wait")
        atexit.register(self._at_exit)

    @property
    def folder(self) -> Path:
        """Folder of the shared memory of the run on this machine."""
        return self._client.folder

    @property
    def superseded(self) -> int:
        """On the first rank: number of this machine's saves whose replica a newer save replaced."""
        return self._replication.superseded

    def reserve(self, state_dict: dict[str, Any]) -> None:
        """Allocates shared memory in advance, so that the first save is as fast as later saves.

        Args:
            state_dict: A state dict with the same tensors as the states to save.

        Raises:
            StorageError: The tmpfs has too little space.
            UnsupportedError: The state dict has no columnar form.
        """
        self._slots.reserve(SlotContents.of(state_dict))

    def stage(
        self,
        state_dict: dict[str, Any],
        directory: str | os.PathLike[str],
        *,
        step: int,
        sync: bool = True,
        persist: bool = True,
        small_files: Mapping[str, bytes] | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> StagedSave | None:
        """Copies the state of this rank to a slot. Training stops only for this copy.

        All ranks must call this method, in the same order of saves. In the first save, each rank
        copies all of its items. If all ranks have the same tensors as in the previous save, each
        rank copies only its share of the replicas on its machine. When replicas that were equal
        differ, all ranks copy all of their items once.

        Args:
            state_dict: State dict of this rank, as for ``dcp.save``.
            directory: Directory of the future checkpoint.
            step: Step of the save.
            sync: Whether the checkpoint must survive a power cut.
            persist: Whether the agent writes the save to disk. With ``False``, the save remains in
                memory for restarted ranks. The agent then writes it to disk only if
                :meth:`persist` is called, or if it is the newest when the trainers end or die.
            small_files: Contents of the small files of a step, by name, equal on all ranks. They
                are written beside the checkpoint when it is committed. ``None``: no such files.
            base: Directory of an older checkpoint, for the option ``reuse`` of the agent.

        Returns:
            The staged save; ``None`` if this rank skipped it.

        Raises:
            CheckpointError: All slots were in use for ``timeout_s``, or at all with
                ``on_busy="error"``. Or a signal handler that interrupted this method calls it.
            RankTimeoutError: A rank was late or dead.
            StorageError: The tmpfs has too little space.
            UnsupportedError: The state dict of a rank has no columnar form, or the name of the
                directory, or a small file, is not UTF-8.
            ValueError: The name of a small file is not one that a step may have.
        """
        target: Destination | None = None

        def list_items() -> tuple[Destination, SlotContents]:
            nonlocal target
            target = Destination.resolved(directory, self._shared, small_files, base)
            return target, SlotContents.of(state_dict)

        using = self._staging.use_by_all("stage a snapshot", self._stages, self.timeout_s)
        with using, gc_paused():
            header = self.member.header(self._slots.sequence, step, persist=persist)
            self._slots.sequence += 1
            self._newest, self._former = None, self.in_memory
            try:
                wait_s = self.timeout_s if self.on_busy == "wait" else 0.0
                filled = self._slots.fill(header, list_items, wait_s, sync=sync)
                assert target is not None
                if filled is None and self.on_busy != "skip":
                    self.refused += self.on_busy == "error"
                    raise CheckpointError(
                        f"cannot save {target.directory}: earlier saves occupy all slots"
                    )
            except BaseException:
                if target is not None:  # Otherwise the slots of other ranks would remain in use.
                    self._client.abort(header.sequence, target)
                raise
            if filled is None:
                self.skipped += 1
                if self.member.node_count > 1:  # Other machines may not have skipped.
                    self._client.abort(header.sequence, target)
                return None
            newest, has_waited = filled
            self._newest = newest
            self.waited += has_waited
            path = os.fspath(newest)
            self._client.request(Kind.FILLED, path=path, sequence=header.sequence)
            return StagedSave(header, target.directory, newest)

    def withdraw(self) -> None:
        """Discards the save that was staged last. The save before it may be the last one again."""
        if self._newest is not None and os.getpid() == self._pid:  # A forked child has no slots.
            self._slots.discard(self._newest)
            self.in_memory = self._former
            self.forget(lambda _: False)

    def forget(self, is_discarded: Callable[[int], bool]) -> None:
        """Forgets the last save if it is of a step whose snapshots were discarded.

        All ranks call this method, and no rank saves again before all have.
        """
        self._newest = None
        if self.in_memory is not None and is_discarded(self.in_memory.header.step):
            self.in_memory = None
        self._slots.share.reset()

    def persist(self, staged: StagedSave) -> None:
        """Waits until the agent has committed a save; requests the save if necessary.

        Args:
            staged: A save from :meth:`stage`.

        Raises:
            CheckpointError: The save failed.
            StorageError: The agent does not answer, if ``may_be_committed`` is true. It may still
                commit the save, and so may an agent that is started later.
        """
        sequence, is_joint = staged.header.sequence, self.member.node_count > 1

        def pass_on() -> None:
            failure = self._failed.received(sequence) if is_joint else None
            if failure is not None:
                # If the agent has just died, the next one gets it later; older versions never do.
                with (
                    contextlib.suppress(CheckpointError),
                    contextlib.closing(self._client.clone()) as other,
                ):
                    other.request(Kind.FAIL, sequence=sequence, failure=failure)

        with contextlib.closing(self._client.clone()) as client:
            client.while_waiting = pass_on
            try:
                client.persist(sequence, True)
            except CheckpointError as error:
                if is_joint:  # The agent may have no other way to inform other machines.
                    self._failed.send(sequence, error)
                raise
        if self._group.is_coordinator:
            with contextlib.suppress(OSError, ValueError):  # The agent removes old marks.
                from_json(done_mark(client.folder, staged.header.save).read_text(), warn_of)

    def async_save(
        self,
        state_dict: dict[str, Any],
        directory: str | os.PathLike[str],
        *,
        step: int,
        sync: bool = True,
        persist: bool = True,
        small_files: Mapping[str, bytes] | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> Future[None] | None:
        """Saves the state in the background; returns once the state has been copied.

        Args:
            state_dict: State dict of this rank, as for ``dcp.save``.
            directory: Directory of the future checkpoint.
            step: Step of the save.
            sync: As for :meth:`stage`, and so are the others.
            persist: Whether the agent writes the save to disk.
            small_files: Contents of the small files of a step.
            base: Directory of an older checkpoint.

        Returns:
            A future of the commit; done at once if not ``persist``. ``None`` if skipped.

        Raises:
            CheckpointError: The state could not be staged; see :meth:`stage` for the other errors.
        """
        phases = Phases("staging")
        options: dict[str, Any] = {"step": step, "sync": sync, "small_files": small_files}
        self._newest = None  # Until it is staged: an interrupt must not withdraw the save before.
        with self._exclusive.use_by_all("save with the agent", self._stages, self.timeout_s):
            staged = self.stage(state_dict, directory, persist=persist, base=base, **options)
            if staged is None:
                return None
            if persist:
                return self._written(staged, phases)
            self.in_memory = staged
        (future := Future[None]()).set_result(None)
        return future

    def write_newest(self) -> tuple[int, Future[None]] | None:
        """Writes the last save, if it is in memory only; returns its step and a future, or None."""
        if (staged := self.in_memory) is None or self._has_left or os.getpid() != self._pid:
            return None
        return staged.header.step, self._written(staged, Phases("staging"))

    def _written(self, staged: StagedSave, phases: Phases) -> Future[None]:
        phases.begin("persisting")
        client, self.in_memory = self._client, None
        outcome = BackgroundFuture[None](
            f"step {staged.header.step} was not saved",
            lambda: f"{client.name} to commit {staged.directory}",
            is_named=self.member.is_first_here,
            timeout_s=self.timeout_s,
        )
        return submitted(self._waiting, self._persist, staged, phases, future=outcome)

    def _persist(self, staged: StagedSave, phases: Phases) -> None:
        """Waits until the agent has committed a save. The first rank logs it."""
        self.persist(staged)
        if self._group.is_coordinator:
            _log_saved(staged, phases, self.member.world_size)

    def copy(self, source: Location, target: Location, **options: Any) -> AgentCopy:
        """Returns a copy of a checkpoint, whose data files the agent sends."""
        connect = functools.partial(self._client.clone, may_start=False)
        return AgentCopy(source, target, connect=connect, **options)

    def newest(self) -> MemoryCheckpoint | None:
        """Returns the newest save in memory, as :meth:`find`."""
        return self.find(None)

    def find(self, step: int | None) -> MemoryCheckpoint | None:
        """Returns the newest save of a step, or of any, that is in memory; ``None`` without one.

        All ranks must call this method, before the first save; it returns the same save on all. The
        slots of every machine, or their replicas, must be in memory.

        Raises:
            CorruptionError: The ranks of the save disagree on a tensor.
            NotFoundError: A slot was freed during the call.
            RankTimeoutError: A rank was late or dead.
        """
        found = self._memory.find(step)
        if found is not None:
            self._replication.keep = found.save
        return found

    def has_in_memory(self, step: int) -> bool:
        """Returns whether this machine has a whole snapshot of a step. Ranks may call it alone."""
        return any(h.step == step for h, _ in complete_slots(self.folder, self.member.run))

    def slot_report(self) -> SlotReport:
        """Returns the slots in memory on the first rank of this machine; nothing on others.

        If the memory was removed, first waits for the agent; see :func:`_await_removed`.
        """
        _await_removed(self, self._client)
        return self._memory.slot_report()

    def close(self, *, drop: bool = False) -> None:
        """Detaches this rank from the agent, once the futures of all its saves have completed.

        If the last save is in memory only, waits until the agent has written it.

        Args:
            drop: Whether the agent discards snapshots that are not on disk.

        Raises:
            CheckpointError: The last save is in memory only, and the agent cannot write it.
        """
        if self._has_left or os.getpid() != self._pid:
            return
        newest = None if drop else self.write_newest()
        atexit.unregister(self._at_exit)
        self._waiting.shutdown()
        self._client.detach(drop=drop)
        self._slots.unmap()
        if newest is not None:
            newest[1].result()

    def leave(self) -> None:
        """Disconnects from the agent, which retains the snapshots for the next process."""
        self._has_left = True
        atexit.unregister(self._at_exit)
        self._client.close()

    def _at_exit(self) -> None:
        # After an exception, the snapshots remain for the next process.
        if getattr(sys, "last_type", None) is not None or os.getpid() != self._pid:
            return
        if (staged := self.in_memory) is not None:  # Its failure would not be reported later.
            outcome = BackgroundFuture[None](f"step {staged.header.step} was not saved")
            try:
                self.persist(staged)
            except CheckpointError as error:
                outcome.set_exception(error)
                outcome.report()
        self._client.detach(drop=False)


def _log_saved(staged: StagedSave, phases: Phases, ranks: int) -> None:
    """Logs that a save is on disk."""
    if not (is_first(ranks) and _LOG.isEnabledFor(logging.INFO)):
        return
    with contextlib.suppress(CheckpointError):  # The save succeeded, readable or not.
        _, index = open_committed(staged.directory, "")
        nbytes = 0 if index is None else sum(nbytes for _, nbytes in index.files)
        details = [f"{ranks} ranks" if ranks > 1 else "1 rank", "by the agent"]
        phases.end("saved", nbytes, staged.directory, *details, is_first=True)


def _await_removed(agent: SnapshotAgent, client: AgentClient) -> None:
    """Waits for the agent if the last slot of this rank was removed: it has the slot mapped.

    Such an agent writes the newest step and ends. Raises StorageError if the step is not on disk
    then, or the agent has not ended: an older step would hide it.
    """
    staged = agent.in_memory
    if staged is None or staged.slot.exists():
        return
    ends_soon = not (agent.folder / "agent.socket").exists()  # An agent without its socket ends.
    has_ended = client.has_ended(0.9 * agent.timeout_s if ends_soon else 0.0)
    if has_ended:
        agent.in_memory = None
    if not (has_ended and has_checkpoint(staged.directory)):
        later = "" if has_ended else "; its agent may still write it"
        what = f"step {staged.header.step} is not on disk, and its memory was removed"
        raise StorageError(f"{what}{later}")
