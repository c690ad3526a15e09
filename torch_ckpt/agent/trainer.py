"""SnapshotAgent: the trainer's interface to the agent. A trainer only fills slots."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.agent.buddies import ReplicaReport, Replication
from torch_ckpt.agent.client import AgentClient
from torch_ckpt.agent.copies import AgentCopy
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.failed_saves import FailedSaves
from torch_ckpt.agent.machine_share import Answer, Decision, MachineShare, decided
from torch_ckpt.agent.member import connect_all, find_member
from torch_ckpt.agent.memory import (
    SLOTS_PER_RANK,
    Save,
    complete_slots,
    done_mark,
    slot_path,
)
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.reader import MemoryCheckpoint
from torch_ckpt.agent.slot_contents import SlotContents
from torch_ckpt.agent.slot_reports import (
    SlotReport,
    SlotSource,
    former_run,
    machine_slots,
    sources_of_whole_saves,
    warn_of_former,
)
from torch_ckpt.coordination.background import SaveFuture
from torch_ckpt.coordination.exclusive import Exclusive
from torch_ckpt.coordination.group import Group, group_of
from torch_ckpt.coordination.waiting import submitted
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location, name_of
from torch_ckpt.formats.committed import open_committed
from torch_ckpt.formats.snapshot import SlotTable, merged_index
from torch_ckpt.options import OnBusy
from torch_ckpt.planning.replica_check import warn_of
from torch_ckpt.records.record import note
from torch_ckpt.storage.progress import Phases, is_first

__all__ = ["SnapshotAgent", "StagedSave"]

_LOG = logging.getLogger("torch_ckpt")


@dataclass(frozen=True)
class StagedSave:
    """A save whose slot this rank has filled, and the directory of the future checkpoint."""

    header: _native.SlotHeader
    directory: Location


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
        local: Directory on a local disk to which the ranks of this machine save, if each machine
            has one. The agents then coordinate in the directory ``run``.
        group: The group of a ``Run``, whose ranks are those of ``process_group``.

    Attributes:
        waited: Number of saves that waited for a slot.
        skipped: Number of saves skipped because of ``on_busy="skip"``.
        refused: Number of saves that raised an error because of ``on_busy="error"``.

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
        group: Group | None = None,
    ) -> None:
        self._group = group or group_of(process_group)
        self._stages = self._group.series()
        self._failed = FailedSaves(self._group)
        self.on_busy: OnBusy = on_busy
        self.timeout_s = timeout_s
        self._exclusive = Exclusive("the agent")
        self.waited = self.skipped = self.refused = 0
        options = options or AgentOptions()
        with self._group.method("start the agent", timeout_s), contextlib.ExitStack() as undo:
            directory = Location(run).resolved() if has_directory else None
            run = name_of(run)  # Once: a link in the path may move.
            self._shared = None if local is None else Location(run)
            self._member = member = find_member(run, self._group, timeout_s, directory)
            connect = functools.partial(AgentClient, timeout_s=timeout_s, local=local)
            self._client = connect_all(
                self._group, functools.partial(connect, run, member, options), timeout_s
            )
            undo.callback(self._client.close)
            self._replication = Replication(self._client, self._stages, timeout_s)
            self._replication.begin(process_group, options)
            if self._member.is_first_here:
                warn_of_former(self._client.folder, member.run, member.run_id, run)
            undo.pop_all()
        self._sequence = 0
        self._newest: Path | None = None  # Slot of the last save, if it was staged.
        self._in_memory: StagedSave | None = None  # The last save, if nobody has asked to write it.
        self._slots: dict[Path, tuple[int, _native.Slot]] = {}  # Inode and mapped slot by path.
        self._share = MachineShare(
            *(self._client.folder, self._member.run, self._member.rank, self._member.node),
            options.check_replicas,
        )
        self._devices = _native.Devices()
        self._staging = Exclusive("the memory of this rank in the agent")
        self._has_left, self._pid = False, os.getpid()
        self._waiting = ThreadPoolExecutor(SLOTS_PER_RANK, "torch_ckpt-wait")
        atexit.register(self._at_exit)

    @property
    def folder(self) -> Path:
        """Folder of the shared memory of the run on this machine."""
        return self._client.folder

    @property
    def ranks_here(self) -> Sequence[int]:
        """The ranks of this machine."""
        return self._member.ranks_here

    @property
    def superseded(self) -> int:
        """Number of saves of this machine whose replica was replaced by a newer save's.

        As of the last save; 0 on all ranks but the first of the machine.
        """
        return self._replication.superseded

    def reserve(self, state_dict: dict[str, Any]) -> None:
        """Allocates shared memory in advance, so that the first save is as fast as later saves.

        Args:
            state_dict: A state dict with the same tensors as the states to save.

        Raises:
            StorageError: The tmpfs has too little space.
            UnsupportedError: The state dict has no columnar form.
        """
        contents = SlotContents.of(state_dict)
        self._client.reserve(
            _native.slot_nbytes(len(contents.table("", sync=True)), contents.nbytes)
        )
        for number in range(SLOTS_PER_RANK):
            slot = self._slot(slot_path(self._client.folder, self._member.rank, number))
            slot.pin_for(contents.batch, self._devices)

    def stage(
        self,
        state_dict: dict[str, Any],
        directory: str | os.PathLike[str],
        *,
        step: int,
        sync: bool = True,
        persist: bool = True,
        small_files: Mapping[str, bytes] | None = None,
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
            target = Destination.resolved(directory, self._shared, small_files)
            return target, SlotContents.of(state_dict)

        using = self._staging.use_by_all("stage a snapshot", self._stages, self.timeout_s)
        with using, gc_paused():
            header = self._member.header(self._sequence, step, persist=persist)
            self._sequence += 1
            self._newest = None
            try:
                filled = self._fill(header, list_items, sync=sync)
            except BaseException:
                if target is not None:  # Otherwise the slots of other ranks would remain in use.
                    self._client.abort(header.sequence, target)
                raise
            sequence = header.sequence
            assert target is not None
            if filled is None:
                if self._member.node_count > 1:  # Other machines may not have skipped.
                    self._client.abort(sequence, target)
                return None
            self._newest = filled
            self._client.filled(self._newest, sequence)
            return StagedSave(header, target.directory)

    def _fill(
        self,
        header: _native.SlotHeader,
        list_items: Callable[[], tuple[Destination, SlotContents]],
        *,
        sync: bool,
    ) -> Path | None:
        """Fills a slot; returns its file, or ``None`` if the save is skipped."""
        target, contents, is_shared = self._decide_shares(header, list_items)
        directory, where = target.directory, target.encode()
        self._replication.reserve(lambda: _slot_nbytes(where, contents, sync=sync))
        table = contents.table(where, sync=sync)
        nbytes = _native.slot_nbytes(len(table), contents.nbytes)
        # The agent replaces slots that are too small; unmap them here to free their memory.
        self._slots = {p: s for p, s in self._slots.items() if s[1].nbytes >= nbytes}
        wait_s = self.timeout_s if self.on_busy == "wait" else 0.0
        acquired = self._client.acquire(header.sequence, nbytes, wait_s, self._replication.keep)
        if acquired is None:
            if self.on_busy == "skip":
                self.skipped += 1
                return None
            self.refused += self.on_busy == "error"
            raise CheckpointError(f"cannot save {directory}: earlier saves occupy all slots")
        self.waited += acquired.has_waited
        if is_shared:
            contents = self._share.select(contents)
            table = contents.table(where, sync=sync)
        slot = self._slot(acquired.path)
        header.tensors_id, header.share = self._share.tensors, self._share.sharing
        slot.begin(header, table, contents.nbytes)
        copying = time.monotonic()
        contents.copy_to(slot, self._devices)
        seconds = time.monotonic() - copying
        _LOG.debug("the slot of %s: copied %d bytes in %.3f s", directory, contents.nbytes, seconds)
        note(bytes=contents.nbytes)
        slot.complete()
        if not is_shared:
            self._share.set_copied_all(header.save)
        return acquired.path

    def _decide_shares(
        self,
        header: _native.SlotHeader,
        list_items: Callable[[], tuple[Destination, SlotContents]],
    ) -> tuple[Destination, SlotContents, bool]:
        """Returns destination and items of the save, and whether all ranks copy only their shares.

        An error on one rank is raised on all ranks. The ranks agree on the sequence number of the
        save, since the number of saves in which each has failed may differ.
        """
        found: list[tuple[Destination, SlotContents]] = []
        replication = self._replication

        def list_and_answer() -> tuple[Answer, ReplicaReport, int]:
            found.append(list_items())
            answer = self._share.answer(found[0][1], header.save)
            return answer, replication.report(), header.sequence

        def decide_all(
            answers: list[tuple[Answer, ReplicaReport, int]],
        ) -> tuple[Decision, Save | None, int]:
            header.sequence = max(sequence for *_, sequence in answers)
            keep = replication.agreed(header.save, [report for _, report, _ in answers])
            return decided([answer for answer, *_ in answers]), keep, header.sequence

        def assign_and_answer() -> Answer:
            self._share.assign()
            return self._share.answer(found[0][1], header.save)

        decide = functools.partial(self._stages.decide, "staging", timeout_s=self.timeout_s)
        decision: Decision
        decision, replication.keep, header.sequence = decide(list_and_answer, decide_all)
        self._sequence = header.sequence + 1
        replication.warn()
        if decision == "assign":  # In the save after one in which all copied everything.
            decision = decide(assign_and_answer, decided)
        if decision != "shares":
            self._share.reset()
        return *found[0], decision == "shares"

    def withdraw(self) -> None:
        """Discards the save that was staged last."""
        if self._newest is not None and os.getpid() == self._pid:  # A forked child has no slots.
            self._slots[self._newest][1].clear()
            self.forget()

    def forget(self) -> None:
        """Forgets the save that was staged last, after its snapshots were discarded.

        All ranks call this method, and then agree that all have, before one saves again.
        """
        self._newest = self._in_memory = None
        self._share.reset()

    def persist(self, staged: StagedSave) -> None:
        """Waits until the agent has committed a save; requests the save if necessary.

        Args:
            staged: A save from :meth:`stage`.

        Raises:
            CheckpointError: The save failed.
            StorageError: The agent does not answer, if ``may_be_committed`` is true. It may still
                commit the save, and so may an agent that is started later.
        """
        sequence, is_joint = staged.header.sequence, self._member.node_count > 1

        def pass_on() -> None:
            failure = self._failed.received(sequence) if is_joint else None
            if failure is not None:
                # An agent that has just died gets it later, one of an older version never.
                with (
                    contextlib.suppress(CheckpointError),
                    contextlib.closing(self._client.clone()) as other,
                ):
                    other.fail(sequence, failure)

        with contextlib.closing(self._client.clone()) as client:
            client.while_waiting = pass_on
            try:
                client.persist(sequence)
            except CheckpointError as error:
                if is_joint:  # The agent may have no other way to inform other machines.
                    self._failed.send(sequence, error)
                raise
        if self._group.is_coordinator:
            with contextlib.suppress(OSError, ValueError):  # The agent removes old marks.
                warn_of(json.loads(done_mark(client.folder, staged.header.save).read_text()))

    def async_save(
        self,
        state_dict: dict[str, Any],
        directory: str | os.PathLike[str],
        *,
        step: int,
        sync: bool = True,
        persist: bool = True,
        small_files: Mapping[str, bytes] | None = None,
    ) -> Future[None] | None:
        """Saves the state in the background; returns once the state has been copied.

        Args:
            state_dict: State dict of this rank, as for ``dcp.save``.
            directory: Directory of the future checkpoint.
            step: Step of the save.
            sync: Whether the checkpoint must survive a power cut.
            persist: Whether the agent writes the save to disk; see :meth:`stage`.
            small_files: Contents of the small files of a step; see :meth:`stage`.

        Returns:
            A future of the commit; done at once if not ``persist``. ``None`` if skipped.

        Raises:
            CheckpointError: The state could not be staged; see :meth:`stage` for the other errors.
        """
        phases = Phases("staging")
        options: dict[str, Any] = {"step": step, "sync": sync, "small_files": small_files}
        with self._exclusive.use_by_all("save with the agent", self._stages, self.timeout_s):
            staged = self.stage(state_dict, directory, persist=persist, **options)
            if staged is None:
                return None
            if persist:
                return self._written(staged, phases)
            self._in_memory = staged
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def write_newest(self) -> tuple[int, Future[None]] | None:
        """Writes the last save, if it is in memory only; returns its step and a future, or None."""
        if (staged := self._in_memory) is None or self._has_left or os.getpid() != self._pid:
            return None
        return staged.header.step, self._written(staged, Phases("staging"))

    def _written(self, staged: StagedSave, phases: Phases) -> Future[None]:
        phases.begin("persisting")
        awaited, named = self._client.to_commit(staged.directory), self._member.is_first_here
        self._in_memory, work = None, (self._waiting, self._persist, staged, phases)
        failure = f"step {staged.header.step} was not saved"
        return submitted(*work, future=SaveFuture(failure, awaited, is_named=named))

    def _persist(self, staged: StagedSave, phases: Phases) -> None:
        """Waits until the agent has committed a save. The first rank logs it."""
        self.persist(staged)
        ranks = self._member.world_size
        if not (self._group.is_coordinator and is_first(ranks) and _LOG.isEnabledFor(logging.INFO)):
            return
        with contextlib.suppress(CheckpointError):  # The save succeeded, readable or not.
            _, index = open_committed(staged.directory, "")
            nbytes = 0 if index is None else sum(nbytes for _, nbytes in index.files)
            details = [f"{ranks} ranks" if ranks > 1 else "1 rank", "by the agent"]
            phases.end("saved", nbytes, staged.directory, *details, is_first=True)

    def copy(self, source: Location, target: Location, **options: Any) -> AgentCopy:
        """Returns a copy of a checkpoint, whose data files the agent sends."""
        connect = functools.partial(self._client.clone, may_start=False)
        return AgentCopy(source, target, connect=connect, **options)

    def newest(self) -> MemoryCheckpoint | None:
        """Returns the newest save in memory that is complete on all ranks; ``None`` if none is.

        All ranks must call this method, before the first save; all get the same result. A save of
        several machines is complete if the slots of each machine, or their replicas, exist.

        Raises:
            RankTimeoutError: A rank was late or gone.
        """
        return self.find(None)

    def find(self, step: int | None) -> MemoryCheckpoint | None:
        """Returns the newest save of a step in memory; ``None`` if there is none.

        All ranks must call this method, before the first save; all get the same result.

        Args:
            step: The step; any step if ``None``.

        Raises:
            CorruptionError: The ranks of the save disagree on a tensor.
            NotFoundError: A slot was freed during the call.
            RankTimeoutError: A rank was late or dead.
        """

        def choose(reports: list[SlotReport]) -> list[SlotSource] | None:
            whole = sources_of_whole_saves(reports)
            saves = [s for s, sources in whole.items() if step in (None, sources[0][1].step)]
            return whole[max(saves)] if saves else None

        with self._group.method("find a snapshot", self.timeout_s):
            sources = self._group.decide(
                "comparing snapshots in memory", self.slot_report, choose, timeout_s=self.timeout_s
            )
            if sources is None:
                return None
            member, folder = self._member, self._client.folder
            here = [slots for node, slots in sources if node == member.node]
            paths = [folder / name for slots in here for name in slots.names]

            def tables() -> list[SlotTable]:
                return [SlotTable.read(path) for path in paths] if member.is_first_here else []

            others = None
            if member.node_count > 1:
                others = self._group.decide(
                    "sending the tables of slots",
                    tables,
                    lambda found: merged_index(chain.from_iterable(found)),
                    timeout_s=self.timeout_s,
                )
        own = f"rank-{member.rank}."
        paths.sort(key=lambda path: not path.name.startswith(own))  # A stable order.
        replicas = [folder / name for slots in here if slots.is_replica for name in slots.names]
        part = member.ranks_here.index(member.rank), len(member.ranks_here)
        first = sources[0][1]
        self._replication.keep = first.save
        return MemoryCheckpoint(first.save, first.step, folder, paths, replicas, part, others)

    def has_in_memory(self, step: int) -> bool:
        """Returns whether a slot of this machine has a complete snapshot of a step.

        Any rank may call this method alone.

        Args:
            step: The step.
        """
        found = complete_slots(self._client.folder, self._member.run)
        return any(header.step == step for header, _ in found)

    def slot_report(self) -> SlotReport:
        """Returns what this machine holds in memory, on its first rank; nothing on the others."""
        former = former_run(self._client.folder, self._member.run_id)
        if not self._member.is_first_here or former is not None:
            return self._member.node, []
        return self._member.node, machine_slots(self._client.folder, self._member.run)

    def close(self, *, drop: bool = False) -> None:
        """Detaches this rank from the agent, once the futures of all its saves have completed.

        If the last save was to stay in memory, the method waits until the agent has written it.

        Args:
            drop: Whether the agent discards snapshots that are not on disk.

        Raises:
            CheckpointError: The last save was to stay in memory, and the agent cannot write it.
        """
        if self._has_left or os.getpid() != self._pid:
            return
        newest = None if drop else self.write_newest()
        atexit.unregister(self._at_exit)
        self._waiting.shutdown()
        self._in_memory = None
        self._client.detach(drop=drop)
        self._slots.clear()
        if newest is not None:
            newest[1].result()

    def leave(self) -> None:
        """Disconnects from the agent, which keeps the snapshots in memory for the next process."""
        self._has_left = True
        atexit.unregister(self._at_exit)
        self._client.close()

    def _at_exit(self) -> None:
        # After an exception, the snapshots remain for the next process.
        if getattr(sys, "last_type", None) is not None or os.getpid() != self._pid:
            return
        if (staged := self._in_memory) is not None:  # Nobody would report its failure later.
            outcome: SaveFuture[None] = SaveFuture(f"step {staged.header.step} was not saved")
            try:
                self.persist(staged)
            except CheckpointError as error:
                outcome.set_exception(error)
                outcome.report()
        self._client.detach(drop=False)

    def _slot(self, path: Path) -> _native.Slot:
        """Returns a mapped slot; maps it again if the agent has replaced the file."""
        inode = path.stat().st_ino
        mapped = self._slots.get(path)
        if mapped is None or mapped[0] != inode:
            mapped = self._slots[path] = inode, _native.Slot.open(os.fsencode(path), True, True)
        return mapped[1]


def _slot_nbytes(where: str, contents: SlotContents, *, sync: bool) -> int:
    return _native.slot_nbytes(len(contents.table(where, sync=sync)), contents.nbytes)
