"""The agent: one process on each machine that outlives trainers, and brings their snapshots to disk.

It imports no torch and knows no tensors. Whatever it must know to go on after its own death stands
in the slots, so it keeps nothing else: a new agent looks at them and is where the old one was.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch_ckpt.agent.memory import SlotHeader, agent_lock, open_folder, remove_abandoned
from torch_ckpt.agent.messages import Kind, Message, error_message, receive, send
from torch_ckpt.agent.persist import persist
from torch_ckpt.agent.slots import Save, SlotTable
from torch_ckpt.errors import CancelledError, CheckpointError
from torch_ckpt.options import IoOptions

__all__ = ["Agent", "AgentOptions", "run_agent"]

_log = logging.getLogger("torch_ckpt.agent")

_SETTLE_S = 1.0
"""After a trainer has died: the others of its kind mostly die as well."""

_PERSISTED = "persisted"  # Names the save that was last brought to disk, for the next agent.

_PEER = struct.Struct("3i")  # SO_PEERCRED: process, user, group.


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """How an agent behaves.

    Attributes:
        persist_on_failure: Whether the newest complete snapshot is brought to disk when trainers
            end without saying so.
        linger_s: Seconds that memory is kept for trainers to come back, once they have died.
        threads: Files that are written at a time.
        nice: How far the process steps back behind others that want the CPU.
        io: Tuning.
    """

    persist_on_failure: bool = True
    linger_s: float = 1800.0
    threads: int = 2
    nice: int = 5
    io: IoOptions = field(default_factory=IoOptions)


@dataclass
class _Trainer:
    """A rank that is connected, or was."""

    rank: int
    session: bytes
    pid: int
    connections: int = 0
    said_bye: bool = False


@dataclass
class _Persisting:
    """A save on its way to disk."""

    asked: set[int] = field(default_factory=set)
    begun: bool = False
    done: bool = False
    error: BaseException | None = None


class Agent:
    """What the process does.

    Args:
        run: 16 bytes.
        folder: The run's.
        options: How.
    """

    def __init__(self, run: bytes, folder: Path, options: AgentOptions) -> None:
        self.run = run
        self.folder = folder
        self.options = options
        self._slots = SlotTable(folder, run)
        self._changed = threading.Condition()
        self._trainers: dict[int, _Trainer] = {}
        self._ranks: list[int] = []  # Of this machine, in the session that goes on.
        self._saves: dict[Save, _Persisting] = {}
        self._last_persisted = _read_save(folder / _PERSISTED)
        self._died_at: float | None = None
        self._stop = False
        self._is_dropped = False  # Whether trainers have said that they want nothing of it.

    def serve(self) -> bool:
        """Answers until all trainers have ended in good order, or have been gone for long.

        Returns:
            Whether the memory is of no more use: what it held is on disk, or was not wanted there.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = self.folder / "agent.socket"
        path.unlink(missing_ok=True)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(256)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        began = time.monotonic()
        with self._changed:
            while not self._stop and not self._is_over(began):
                self._changed.wait(0.5)
                self._persist_after_death()
            listener.close()
            path.unlink(missing_ok=True)
            self._drain()
            if any(t.connections and not t.said_bye for t in self._trainers.values()):
                return False  # They go on, with the next agent.
            newest = self._slots.newest()
            return newest is None or newest.save == self._last_persisted or self._is_dropped

    def stop(self) -> None:
        """Has :meth:`serve` end soon, with the newest complete snapshot on disk."""
        self._stop = True  # The condition is not to be had in a signal's way; it is polled.

    def _is_over(self, began: float) -> bool:
        if any(save.begun and not save.done for save in self._saves.values()):
            return False
        if not self._trainers:
            return time.monotonic() - began > self.options.linger_s
        if all(trainer.said_bye for trainer in self._trainers.values()):
            return len(self._trainers) >= len(self._ranks)
        if any(trainer.connections for trainer in self._trainers.values()):
            return False
        return self._died_at is not None and (
            time.monotonic() - self._died_at > self.options.linger_s
        )

    def _persist_after_death(self) -> None:
        """Brings the newest snapshot to disk when a trainer has died; holds the lock."""
        if self._died_at is None or time.monotonic() - self._died_at < _SETTLE_S:
            return
        if self.options.persist_on_failure:
            self._persist_newest()

    def _persist_newest(self) -> None:
        newest = self._slots.newest()
        if newest is None or newest.save == self._last_persisted:
            return
        save = self._saves.setdefault(newest.save, _Persisting())
        if not save.begun:
            _log.info("step %d is brought to disk for its trainers, who are gone", newest.step)
            self._begin(newest.save, save)

    def _drain(self) -> None:
        """Ends what is going on, and what must be before the process ends; holds the lock."""
        if self._stop or not all(t.said_bye for t in self._trainers.values()):
            if self.options.persist_on_failure:
                self._persist_newest()
        while any(save.begun and not save.done for save in self._saves.values()):
            self._changed.wait()

    # Bringing to disk.

    def _begin(self, key: Save, save: _Persisting) -> None:
        save.begun = True
        held = self._slots.of_save(key)
        for slot in held:
            slot.readers += 1

        def work() -> None:
            error: BaseException | None = None
            try:
                snapshots = []
                for slot in held:
                    assert slot.memory is not None
                    snapshots.append(slot.memory.read())
                if not snapshots[0].directory:
                    return
                persist(
                    snapshots,
                    io=self.options.io,
                    threads=self.options.threads,
                    is_current=lambda: all(
                        SlotHeader.of(slot.memory) == slot.header for slot in held if slot.memory
                    ),
                )
            except BaseException as problem:
                error = problem
                _log.warning("a save has failed: %s", problem)
            finally:
                with self._changed:
                    for slot in held:
                        slot.readers -= 1
                    save.error, save.done = error, True
                    if error is None:
                        self._last_persisted = key
                        _write_save(self.folder / _PERSISTED, key)
                    self._changed.notify_all()

        threading.Thread(target=work, name="torch_ckpt-persist").start()

    # Talking to trainers.

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            _, user, _ = _PEER.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            )
            if user != os.getuid():
                connection.close()
                continue
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        trainer: _Trainer | None = None
        with connection, contextlib.suppress(OSError):
            try:
                message = receive(connection)
                if message is None or message.kind != Kind.HELLO:
                    return
                trainer = self._greet(message)
                send(connection, Kind.OK)
                while (message := receive(connection)) is not None:
                    answer = self._answer(trainer, message)
                    send(connection, answer.kind, *answer.fields)
            except CheckpointError as error:
                send(connection, Kind.ERROR, *error_message(error))
            finally:
                if trainer is not None:
                    self._hang_up(trainer)

    def _answer(self, trainer: _Trainer, message: Message) -> Message:
        answers: dict[Kind, Callable[[_Trainer, Message], Message]] = {
            Kind.RESERVE: self._reserve,
            Kind.TAKE: self._take,
            Kind.FILLED: self._filled,
            Kind.PERSIST: self._persist,
            Kind.NEWEST: self._newest,
            Kind.BYE: self._bye,
        }
        try:
            if message.kind not in answers:
                raise CheckpointError(f"an agent is not told {message.kind.name}")
            return answers[message.kind](trainer, message)
        except Exception as error:
            return Message(Kind.ERROR, error_message(error))

    def _greet(self, message: Message) -> _Trainer:
        run, session = message.data(0), message.data(1)
        rank, ranks, pid = message.integer(2), message.data(6), message.integer(7)
        if run != self.run:
            raise CheckpointError("this is the agent of another run")
        with self._changed:
            known = self._trainers.get(rank)
            if known is not None and known.session != session:
                if session < known.session:
                    raise CheckpointError(f"rank {rank} has started again since")
                # That one is gone, and its connections are about to be found so.
                self._changed.wait_for(lambda: not known.connections, timeout=10)
                if known.connections:
                    raise CheckpointError(
                        f"rank {rank} of this run is process {known.pid}: only one can be"
                    )
                known = None
            if known is None:
                known = self._trainers[rank] = _Trainer(rank, session, pid)
            known.connections += 1
            self._ranks = [r for (r,) in struct.iter_unpack("<q", ranks)]
            if all(t.session == session for t in self._trainers.values()):
                self._died_at = None
            self._changed.notify_all()
            return known

    def _hang_up(self, trainer: _Trainer) -> None:
        with self._changed:
            trainer.connections -= 1
            if not trainer.connections and not trainer.said_bye:
                self._died_at = time.monotonic()
                _log.info("rank %d, process %d, is gone", trainer.rank, trainer.pid)
            self._changed.notify_all()

    def _reserve(self, trainer: _Trainer, message: Message) -> Message:
        with self._changed:
            self._slots.reserve(trainer.rank, message.integer(0))
        return Message(Kind.OK)

    def _take(self, trainer: _Trainer, message: Message) -> Message:
        deadline = time.monotonic() + message.integer(2) / 1000
        with self._changed:
            while True:
                slot = self._slots.take(trainer.rank, trainer.session, message.integer(1))
                if slot is not None:
                    return Message(Kind.SLOT, (os.fsencode(slot.path),))
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return Message(Kind.BUSY)

    def _filled(self, trainer: _Trainer, message: Message) -> Message:
        path = Path(os.fsdecode(message.data(0)))
        with self._changed:
            self._slots.look_at(trainer.rank, trainer.session, path)
            self._changed.notify_all()
        return Message(Kind.OK)

    def _persist(self, trainer: _Trainer, message: Message) -> Message:
        key = message.data(0), message.integer(1)
        with self._changed:
            save = self._saves.setdefault(key, _Persisting())
            if save.done and save.error is not None and trainer.rank in save.asked:
                save = self._saves[key] = _Persisting()  # It is tried again.
            save.asked.add(trainer.rank)
            while not save.done:
                if not save.begun and save.asked.issuperset(self._ranks):
                    if not self._slots.is_complete(key):
                        raise CheckpointError("the snapshots of this save are not complete")
                    self._begin(key, save)
                if not save.begun:
                    self._raise_if_lost(key[0])
                self._changed.wait(1.0)
            if save.error is not None:
                return Message(Kind.ERROR, error_message(save.error))
        return Message(Kind.OK)

    def _raise_if_lost(self, session: bytes) -> None:
        """Raises where a rank will never ask for what others wait for; holds the lock."""
        for rank in self._ranks:
            other = self._trainers.get(rank)
            gone = other is None or other.session != session or not other.connections
            if gone and self._died_at and time.monotonic() - self._died_at > 2 * _SETTLE_S:
                raise CancelledError(f"rank {rank} has ended before it had given its part")

    def _newest(self, trainer: _Trainer, message: Message) -> Message:
        with self._changed:
            newest = self._slots.newest()
        if newest is None:
            return Message(Kind.SNAPSHOT, (b"", -1, -1, 0))
        return Message(
            Kind.SNAPSHOT, (newest.session, newest.sequence, newest.step, newest.world_size)
        )

    def _bye(self, trainer: _Trainer, message: Message) -> Message:
        with self._changed:
            trainer.said_bye = True
            self._is_dropped = bool(message.integer(0))
            if not self._is_dropped:
                self._persist_newest()
            self._changed.notify_all()
        return Message(Kind.OK)


def _read_save(path: Path) -> Save | None:
    try:
        content = path.read_bytes()
        return content[:16], int.from_bytes(content[16:24], "little")
    except OSError:
        return None


def _write_save(path: Path, save: Save) -> None:
    with contextlib.suppress(OSError):  # At worst it is brought to disk once more.
        fresh = path.with_suffix(".new")
        fresh.write_bytes(save[0] + save[1].to_bytes(8, "little"))
        fresh.replace(path)


def run_agent(run: bytes, options: AgentOptions) -> int:
    """Is the agent of a run, unless there is one.

    Returns:
        How the process should exit.
    """
    folder = open_folder(run)
    with agent_lock(folder) as is_ours:
        if not is_ours:
            return 0
        logging.basicConfig(
            filename=folder / "agent.log", level=logging.INFO, format="%(asctime)s %(message)s"
        )
        os.nice(options.nice)
        for removed in remove_abandoned(folder):
            _log.info("removed %s, which nobody has gone on with", removed)
        agent = Agent(run, folder, options)
        told: list[int] = []

        def stop(number: int, frame: object) -> None:
            told.append(number)
            agent.stop()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to everybody.
        if agent.serve():
            shutil.rmtree(folder, ignore_errors=True)
    if told:  # Ends as the signal would have ended it.
        signal.signal(told[0], signal.SIG_DFL)
        os.kill(os.getpid(), told[0])
    return 0
