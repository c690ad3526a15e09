"""The agent: a process on each machine that outlives trainers, and saves what they have staged.

It imports no torch and knows no tensors. Whatever it must know to go on after its own death stands
in the slots and beside them, or is what trainers say anew: a new agent is where the old one was.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torch_ckpt.agent.aborts import PendingAborts
from torch_ckpt.agent.manifests import Manifests
from torch_ckpt.agent.memory import (
    LOCK_NAME,
    Save,
    SlotHeader,
    agent_lock,
    open_folder,
    remove_abandoned,
    short_path,
)
from torch_ckpt.agent.messages import Kind, Message, error_message, peer_of, receive, send
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.rank_process import RankProcess
from torch_ckpt.agent.saves import Saves
from torch_ckpt.agent.slots import Slots, SlotScan
from torch_ckpt.errors import CancelledError, CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location

__all__ = ["Agent", "run_agent"]

_log = logging.getLogger("torch_ckpt.agent")

_SETTLE_S = 1.0
"""After a trainer has died: the others of its kind mostly die as well."""

_POLL_S = 0.5

_GREET_S = 10.0
"""Within which trainers come to a new agent, once there is one."""

_ADMITTED = 64  # Decisions that are kept: ranks are never so far apart.

T = TypeVar("T")


class Agent:
    """What the process does.

    Args:
        run: 16 bytes.
        folder: The run's.
        options: How.
        first_within_s: Seconds for which the first trainer may come, if there is nothing in memory.
        signals: Those that have told the process to end: it then does so soon, with the newest
            complete snapshot on disk.
    """

    def __init__(
        self,
        run: bytes,
        folder: Path,
        options: AgentOptions,
        *,
        first_within_s: float | None = None,
        signals: Sequence[int] = (),
    ) -> None:
        self.run = run
        self.folder = folder
        self.options = options
        self._signals = signals  # Looked at again and again: a handler cannot take the condition.
        self._changed = threading.Condition()
        self._slots = Slots(folder, run)
        self._saves = Saves(
            *(folder, self._slots, self._changed),
            io=options.io,
            threads=options.threads,
            peers_timeout_s=options.peers_timeout_s,
            is_hurried=self._is_hurried,
        )
        self._first_within_s = options.linger_s
        is_first = not any(p.name.startswith(("rank-", "done-")) for p in folder.iterdir())
        if first_within_s is not None and is_first:
            self._first_within_s = min(first_within_s, options.linger_s)
        self._aborts = PendingAborts(options.peers_timeout_s)
        self._trainers: dict[int, RankProcess] = {}
        self._ranks: list[int] = []  # Of this machine, in the session that goes on.
        self._idle_since = time.monotonic()  # Since when there has been nobody.
        self._lost_since: float | None = None
        self._admitted: dict[Save, bool] = {}
        self._retried: set[Save] = set()
        self._began = time.monotonic()
        self._is_dropped = False  # Whether trainers have said that they want nothing of it.

    def serve(self) -> bool:
        """Answers until all trainers have ended in good order, or have been gone for long.

        Returns:
            Whether the memory is of no more use: what it held is on disk, or was not wanted there.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = self.folder / "agent.socket"
        path.unlink(missing_ok=True)
        with short_path(self.folder) as folder:
            listener.bind(f"{folder}/{path.name}")
        path.chmod(0o600)
        listener.listen(256)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        with self._changed, contextlib.closing(self._aborts):
            self._saves.begin_next()  # What a former agent has left.
            while not self._has_ended():
                self._changed.wait(_POLL_S)
                self._look_after_trainers()
            listener.close()
            path.unlink(missing_ok=True)
            if any(not t.has_detached and t.is_alive for t in self._trainers.values()):
                return False  # They go on, with the next agent.
            newest = self._slots.scan().newest
            if self._is_dropped or newest is None or self._saves.is_done(newest.save):
                return True
            return self._all_detached and self._saves.error_of(newest.save) is None

    def _has_ended(self) -> bool:
        """Whether nothing is left to do. Until then, trainers may come that start again."""
        if not self._signals and not self._is_over():
            return False
        if not self._is_dropped:
            if self._all_detached or self.options.persist_on_failure:
                self._persist_newest()
            self._saves.begin_next()
        return not self._saves.is_running

    def _is_over(self) -> bool:
        if self._saves.is_running:
            return False
        if self._all_detached and len(self._trainers) >= len(self._ranks):
            return True
        if any(t.is_alive and not t.has_detached for t in self._trainers.values()):
            self._idle_since = time.monotonic()
        linger_s = self.options.linger_s if self._trainers else self._first_within_s
        return time.monotonic() - self._idle_since > linger_s

    @property
    def _all_detached(self) -> bool:
        return bool(self._trainers) and all(t.has_detached for t in self._trainers.values())

    def _look_after_trainers(self) -> None:
        """Brings the newest snapshot to disk when a trainer has died."""
        self._saves.begin_next()  # It may have died before it could say that a slot is filled.
        lost = [trainer for trainer in self._trainers.values() if trainer.is_lost]
        if not lost:
            self._lost_since = None
            return
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            _log.info("rank %d, process %d, is gone", lost[0].rank, lost[0].pid)
        if self.options.persist_on_failure and time.monotonic() - self._lost_since >= _SETTLE_S:
            self._persist_newest()

    def _is_hurried(self, save: Save) -> bool:
        """Whether a save must not wait for other machines as long as it may."""
        with self._changed:
            trainers = self._trainers.values()
            return bool(self._signals) or any(t.session > save[0] and t.is_alive for t in trainers)

    def _persist_newest(self) -> None:
        scan = self._slots.scan()
        if scan.newest is None:
            return
        if scan.newest.node_count == 1:
            self._persist_anyhow(scan.newest, scan, self._saves.ask)
            return
        for of_save in reversed(scan.complete.values()):  # What is newest others may not have.
            if self._saves.is_done(of_save[0][0].save):
                return
            self._persist_anyhow(of_save[0][0], scan, self._saves.offer)

    def _persist_anyhow(
        self, header: SlotHeader, scan: SlotScan, want: Callable[[Save], None]
    ) -> None:
        """Has a save come to disk, though trainers have not said that it should."""
        save = header.save
        if self._saves.is_done(save) or self._saves.is_pending(save, scan):
            return
        has_failed = self._saves.error_of(save) is not None
        if not has_failed or save not in self._retried:
            if has_failed:
                self._retried.add(save)
            _log.info("step %d is to come to disk, as its trainers are gone", header.step)
            want(save)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()
            except RuntimeError as error:  # There are too many threads. Whoever called tries again.
                _log.warning("a trainer is not answered: %s", error)
                connection.close()

    def _talk(self, connection: socket.socket) -> None:
        """Answers one connection, until it ends."""
        pid, user = peer_of(connection)
        with connection, contextlib.suppress(OSError):
            try:
                message = receive(connection)
                if user != os.getuid() or message is None or message.kind != Kind.HELLO:
                    return
                trainer = self._greet(message, pid)
                try:
                    send(connection, Kind.OK)
                    while (message := receive(connection)) is not None:
                        answer = self._answer(trainer, message)
                        send(connection, answer.kind, *answer.fields)
                finally:
                    with self._changed:
                        trainer.connections -= 1
            except CheckpointError as error:
                send(connection, Kind.ERROR, *error_message(error))

    def _answer(self, trainer: RankProcess, message: Message) -> Message:
        answers: dict[Kind, Callable[[RankProcess, Message], Message]] = {
            Kind.RESERVE: self._reserve,
            Kind.ACQUIRE: self._take,
            Kind.FILLED: self._filled,
            Kind.PERSIST: self._persist,
            Kind.DETACH: self._bye,
            Kind.ABORT: self._abort,
        }
        try:
            if message.kind not in answers:
                raise CheckpointError(f"an agent is not told {message.kind.name}")
            with self._changed:
                return answers[message.kind](trainer, message)
        except Exception as error:
            return Message(Kind.ERROR, error_message(error))

    def _greet(self, message: Message, pid: int) -> RankProcess:
        run, session, rank = message.data(0), message.data(1), message.integer(2)
        if run != self.run:
            raise CheckpointError("this is the agent of another run")
        with self._changed:
            known = self._trainers.get(rank)
            if known is None or known.pid != pid or known.session != session:
                is_taken = known is not None and not known.has_detached
                if known is not None and known.pid == pid:  # As one that has left.
                    is_taken = is_taken and known.connections > 0
                if known is not None and is_taken and known.is_alive:
                    raise CheckpointError(
                        f"rank {rank} of this run is process {known.pid} already: only one can be"
                    )
                try:
                    known = self._trainers[rank] = RankProcess(rank, session, pid)
                except OSError as error:
                    raise CheckpointError(
                        f"the agent does not see process {pid}: {error.strerror}"
                    ) from error
            self._ranks = [r for (r,) in struct.iter_unpack("<q", message.data(3))]
            self._is_dropped = False
            for other in set(self._trainers).difference(self._ranks):
                if not self._trainers[other].is_alive:
                    del self._trainers[other]  # Of a life with other ranks.
            known.connections += 1
            self._changed.notify_all()
            return known

    def _reserve(self, trainer: RankProcess, message: Message) -> Message:
        self._with_room(lambda: self._slots.reserve(trainer.rank, message.integer(0)))
        return Message(Kind.OK)

    def _with_room(self, make: Callable[[], T]) -> T:
        """What makes memory; once more where former ranks had some that is on disk."""
        try:
            return make()
        except StorageError:
            if not self._slots.release(self._ranks, self._saves.is_done):
                raise
            return make()

    def _take(self, trainer: RankProcess, message: Message) -> Message:
        sequence, nbytes, wait_ms = (message.integer(at) for at in range(3))
        if not wait_ms and not self._is_admitted((trainer.session, sequence)):
            return Message(Kind.BUSY)
        deadline = time.monotonic() + wait_ms / 1000
        has_waited = False
        trainer.reached = sequence
        self._changed.notify_all()
        while True:
            slot = self._with_room(
                lambda: self._slots.acquire(
                    trainer.rank, nbytes, self._saves.is_pending, self._is_awaited
                )
            )
            if slot is not None:
                return Message(Kind.SLOT, (os.fsencode(slot.path), int(has_waited)))
            left = deadline - time.monotonic()
            if left <= 0:
                return Message(Kind.BUSY)
            has_waited = True
            self._changed.wait(min(left, _POLL_S))
            if not trainer.is_alive:
                raise CancelledError("the trainer is gone")

    def _is_admitted(self, save: Save) -> bool:
        """Whether no rank would have to wait for a slot; the first that asks decides for all."""
        if save not in self._admitted:
            self._admitted[save] = all(
                self._slots.has_free(rank, self._saves.is_pending, self._is_awaited)
                for rank in self._ranks
            )
        while len(self._admitted) > _ADMITTED:
            del self._admitted[next(iter(self._admitted))]
        return self._admitted[save]

    def _filled(self, trainer: RankProcess, message: Message) -> Message:
        path = Path(os.fsdecode(message.data(0)))
        self._slots.check_filled(trainer.rank, trainer.session, path)
        os.utime(path)  # Which writing to mapped memory does not: the run is not abandoned.
        trainer.reached = max(trainer.reached, message.integer(1) + 1)
        self._saves.begin_next()
        newest = self._slots.scan().newest
        if newest is not None and newest.session == trainer.session:
            self._slots.retain(self._ranks, self._saves.is_pending)
        self._changed.notify_all()
        return Message(Kind.OK)

    def _abort(self, trainer: RankProcess, message: Message) -> Message:
        sequence, node, node_count = (message.integer(at) for at in range(3))
        trainer.reached = max(trainer.reached, sequence + 1)
        self._changed.notify_all()
        if node_count > 1:
            directory = Location(os.fsdecode(message.data(3)))
            self._aborts.add(
                Manifests(self.run, trainer.session, sequence, node, node_count, directory),
                f"rank {trainer.rank} has failed, or skipped, before its part of {directory}",
            )
        return Message(Kind.OK)

    def _is_awaited(self, save: Save, scan: SlotScan) -> bool:
        """Whether ranks that had not completed a save may still do so."""
        missing = set(self._ranks).difference(scan.ranks_of(save))
        if missing & scan.ranks_beyond(save):  # Of which they need not have told this agent.
            return False
        return bool(missing) and all(self._may_complete(rank, save) for rank in missing)

    def _may_complete(self, rank: int, save: Save) -> bool:
        trainer = self._trainers.get(rank)
        if trainer is None:
            return time.monotonic() - self._began < _GREET_S
        if trainer.session != save[0] or trainer.has_detached or not trainer.is_alive:
            return False
        return trainer.reached <= save[1]

    def _persist(self, trainer: RankProcess, message: Message) -> Message:
        save = message.data(0), message.integer(1)
        asked = False
        while not self._saves.is_done(save):
            error = self._saves.error_of(save)
            if error is not None:
                raise CheckpointError(error)
            scan = self._slots.scan()
            if save not in scan.complete:
                self._raise_if_lost(save, scan)
            elif not asked:
                self._saves.ask(save)
                asked = True
            if not trainer.is_alive:
                raise CancelledError("the trainer is gone")
            self._changed.wait(_POLL_S)
        return Message(Kind.OK)

    def _raise_if_lost(self, save: Save, scan: SlotScan) -> None:
        """Raises where a save that was not complete never will be."""
        newest = scan.newest
        if newest is not None and newest.save > save:
            raise CancelledError(f"save {save[1]} is in memory no more, and did not come to disk")
        if not self._is_awaited(save, scan):
            raise CancelledError(f"a rank has ended, or failed, before its part of save {save[1]}")

    def _bye(self, trainer: RankProcess, message: Message) -> Message:
        trainer.has_detached = True
        self._is_dropped = bool(message.integer(0))
        self._changed.notify_all()
        return Message(Kind.OK)


def run_agent(run: bytes, options: AgentOptions, *, first_within_s: float | None = None) -> int:
    """Is the agent of a run, unless there is one.

    Args:
        run: 16 bytes.
        options: How.
        first_within_s: Seconds for which the first trainer may come, if there is nothing in memory;
            ``None`` for as long as memory is kept.

    Returns:
        How the process should exit.
    """
    signals: list[int] = []
    # Before there is a folder, which it takes along.
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to everybody.
    folder = open_folder(run)
    with agent_lock(folder) as is_ours:
        if not is_ours:
            return 0
        logging.basicConfig(
            filename=folder / "agent.log", level=logging.INFO, format="%(asctime)s %(message)s"
        )
        os.nice(options.io.background_nice)
        for removed in remove_abandoned(folder):
            _log.info("removed %s, which nobody has gone on with", removed)
        if Agent(run, folder, options, first_within_s=first_within_s, signals=signals).serve():
            for path in folder.iterdir():  # The lock last: the next agent finds all or nothing.
                if path.name != LOCK_NAME:
                    path.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    if signals:  # Ends as the signal would have ended it.
        signal.signal(signals[0], signal.SIG_DFL)
        os.kill(os.getpid(), signals[0])
    return 0
