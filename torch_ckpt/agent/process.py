"""The agent: a process on each machine that outlives trainers and persists their snapshots.

The process imports no torch. A restarted agent recovers its state from the slots, from the files
beside them, and from the trainers, which register again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torch_ckpt.agent.copies import Copies
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.identity import RunId, check_reaches, id_in_memory, inode_of, set_id
from torch_ckpt.agent.manifests import Manifests, PendingFailures
from torch_ckpt.agent.memory import (
    Save,
    free,
    released,
    short_path,
)
from torch_ckpt.agent.messages import (
    Kind,
    Message,
    decoded_save,
    failure_of,
    peer_of,
    raise_failure,
    receive,
    send,
)
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.rank_process import RankProcess, RankProcesses
from torch_ckpt.agent.replicas import Replicas
from torch_ckpt.agent.saves import Saves
from torch_ckpt.agent.slots import Slots, SlotScan
from torch_ckpt.agent.unrequested import UnrequestedSaves
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.errors import CancelledError, CheckpointError, StorageError, UnsupportedError
from torch_ckpt.process_state import PROCESS

__all__ = ["Agent"]

_log = logging.getLogger("torch_ckpt.agent")

_SETTLE_S = 1.0
"""Time to wait after a trainer has died, because the other trainers usually die too."""

_POLL_S = 0.5

_MAX_ADMITTED = 64  # Retained decisions; ranks are never this many saves apart.

T = TypeVar("T")


class _Listener:
    """The socket of an agent. Each connection is served in a thread."""

    def __init__(self, folder: Path, serve: Callable[[socket.socket], None]) -> None:
        self._socket = PROCESS.own(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._path, self._serve, self._is_closed = folder / "agent.socket", serve, False
        self._path.unlink(missing_ok=True)
        with short_path(folder) as short:
            self._socket.bind(f"{short}/{self._path.name}")
        self._path.chmod(0o600)
        self._inode = inode_of(os.fspath(self._path))
        self._socket.listen(4096)  # Ranks ping an agent that is busy or frozen meanwhile.
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def is_reachable(self) -> bool:
        """Whether a rank that connects now reaches this agent: others may remove its memory."""
        return inode_of(os.fspath(self._path)) == self._inode

    def close(self) -> None:
        self._is_closed = True
        self._socket.shutdown(socket.SHUT_RDWR)  # `close` alone does not wake the accepting thread.
        self._socket.close()
        if self.is_reachable:  # Else it may be that of the next agent.
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection = PROCESS.own(self._socket.accept()[0])
            except OSError as error:
                if self._is_closed:
                    return
                _log.warning("cannot accept a trainer: %s", error)
                time.sleep(_POLL_S)  # A descriptor may become free.
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError as error:  # Too many threads; the trainer connects again.
                _log.warning("cannot serve a trainer: %s", error)
                connection.close()


def _wanted_by(message: Message) -> tuple[AgentOptions, RunId | None]:
    """Returns the options of a rank and the id of its run.

    Raises UnsupportedError if a rank of a later version wants more than this agent knows.
    """
    try:
        run_id = RunId(**message["run_id"]) if "run_id" in message else None
        return AgentOptions.decode(message["options"]), run_id
    except (TypeError, ValueError) as error:
        raise UnsupportedError(
            f"cannot save with the agent (process {os.getpid()}): it is probably of another "
            f"version, and does not know what rank {message['rank']} wants: {error}"
        ) from error


class Agent:
    """The server of one run, which 16 bytes identify, on this machine.

    The options apply until a rank registers. The agent waits ``first_within_s`` for a first
    trainer, or ``linger_s`` if that is longer and the memory contains a snapshot. ``signals`` are
    the termination signals received so far. After the first one, the agent persists the newest
    complete snapshot and ends.
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
        self.run, self.folder, self.options = run, folder, options
        self._signals = signals  # Polled: a signal handler cannot acquire the condition.
        self._changed = threading.Condition()
        self._ranks = RankProcesses()
        self._slots = Slots(folder, run, self._changed, self._is_needed)
        self._failures = PendingFailures()
        self._saves = Saves(
            *(folder, self._slots, self._changed),
            options=lambda: self.options,
            is_shutting_down=self._is_shutting_down,
            failures=self._failures,
        )
        self._unrequested = UnrequestedSaves(self._saves, self._slots)
        self._replicas = Replicas(
            *(folder, run, self._slots, self._changed), options=lambda: self.options
        )
        self._copies = Copies(self._changed)
        kept = "rank-", "replica-", "done-"
        is_first = not any(path.name.startswith(kept) for path in folder.iterdir())
        self._first_within_s = options.linger_s
        if first_within_s is not None:  # A rank has started this process, and will connect.
            self._first_within_s = max(first_within_s, 0.0 if is_first else options.linger_s)
        self._admitted: dict[Save, bool] = {}
        self._has_ended = self._is_dropped = False  # Dropped: trainers discarded their snapshots.
        self._is_useless = False  # Whether it cannot reach the store of the run.
        self._next_id: RunId | None = None  # The run whose first save frees the slots.

    def serve(self) -> bool:
        """Serves trainers until all detached, none lived for ``linger_s``, or its socket is gone.

        Returns whether the memory can be removed: its snapshots are on disk or were discarded.
        """
        watch_storage()
        listener = _Listener(self.folder, self._serve_connection)
        with self._changed, contextlib.closing(self._failures):
            self._saves.begin_next()  # An earlier agent may have left pending saves.
            while not self._can_end(listener):
                self._changed.wait(_POLL_S)
                self._check_trainers()
            self._has_ended = True
            listener.close()
            self._replicas.close()
            self._copies.close()
            if self._ranks.active():
                return False  # They start another agent.
            scan = self._slots.scan()
            if self._is_dropped or scan.newest is None:
                return True
            newest = scan.newest.save
            is_unneeded = self._ranks.all_detached and self._saves.failure_of(newest) is None
            may_go = is_unneeded or self._saves.is_done(newest)
            return may_go and self._ranks.restore_from(scan.directory_of(newest), scan.newest.step)

    def _can_end(self, listener: _Listener) -> bool:
        """Returns whether the agent can end, once it has persisted the newest snapshot."""
        is_over = not self._saves.is_running and self._ranks.have_ended(
            self.options.linger_s, self._first_within_s
        )
        if not (self._signals or self._is_useless or is_over or not listener.is_reachable):
            return False
        if not self._is_dropped and not self._is_useless:
            if self._ranks.all_detached or self.options.persist_on_failure:
                self._unrequested.persist_newest(is_last=True)
            self._saves.begin_next()
        # Copies that the ranks have left behind may still run.
        is_hurried = self._signals or self._ranks.idle_s > self.options.linger_s
        return not self._saves.is_running and not (self._copies.are_running and not is_hurried)

    def _check_trainers(self) -> None:
        """Persists the newest snapshot after a trainer has died."""
        self._saves.begin_next()  # A trainer may die before it reports a complete slot.
        if self._ranks.lost_s() >= _SETTLE_S and self.options.persist_on_failure:
            self._unrequested.persist_newest()

    def _is_shutting_down(self, save: Save) -> bool:
        """Returns whether the agent is ending, or the ranks of a save have restarted."""
        with self._changed:
            return bool(self._signals) or self._ranks.have_restarted(save)

    def _is_needed(self, save: Save, scan: SlotScan) -> bool:
        """Returns whether a save must still be persisted, or may still be completed."""
        is_whole = save in scan.complete
        return (self._saves.is_pending if is_whole else self._ranks.is_awaited)(save, scan)

    def _serve_connection(self, connection: socket.socket) -> None:
        """Answers the requests of one connection until the connection ends."""
        pid, user = peer_of(connection)
        with connection, contextlib.suppress(OSError):
            try:
                message = receive(connection)
                if message is None or message["kind"] != Kind.HELLO:
                    return
                if user != os.getuid():
                    raise StorageError(
                        f"cannot serve user {user}: this agent belongs to user {os.getuid()}",
                        errno.EPERM,
                    )
                trainer = self._register(message, pid)
                try:
                    send(connection, Kind.OK)
                    while (message := receive(connection)) is not None:
                        send(connection, **self._answer(trainer, message))
                finally:
                    with self._changed:
                        trainer.connections -= 1
                        self._changed.notify_all()
            except ConnectionAbortedError:  # The rank connects again, to another agent.
                return
            except Exception as error:
                send(connection, Kind.ERROR, failure=failure_of(error))

    def _answer(self, trainer: RankProcess, message: Message) -> Message:
        replicas, saves = self._replicas, self._saves
        answers: dict[Kind, Callable[[RankProcess, Message], Message | None]] = {
            Kind.RESERVE: self._reserve,
            Kind.ACQUIRE: self._acquire,
            Kind.FILLED: self._filled,
            Kind.PERSIST: self._persist,
            Kind.DETACH: self._detach,
            Kind.ABORT: self._abort,
            Kind.FAIL: lambda rank, m: saves.fail((rank.session, m["sequence"]), m["failure"]),
            Kind.LISTEN: lambda rank, m: replicas.listen(rank.session, m["node"], m["hosts"]),
            Kind.BUDDY: self._set_buddy,
            Kind.RESERVE_REPLICAS: lambda _, message: replicas.reserve(dict(message["slots"])),
            Kind.REPLICATED: lambda *_: replicas.report(self._slots.scan()),
            Kind.COPY: lambda _, message: self._copies.advance(message),
        }
        try:
            if message["kind"] not in answers:
                raise CheckpointError(f"cannot answer a message of kind {message['kind']}")
            with self._changed:
                return answers[message["kind"]](trainer, message) or {"kind": Kind.OK}
        except Exception as error:
            return {"kind": Kind.ERROR, "failure": failure_of(error)}
        finally:
            free(self._slots.doomed)

    def _register(self, message: Message, pid: int) -> RankProcess:
        session, rank = bytes.fromhex(message["session"]), int(message["rank"])
        if message["run"] != self.run.hex():
            raise CheckpointError(f"cannot register rank {rank}: this agent belongs to another run")
        ranks = [int(each) for each in message["ranks_here"]]
        options, run_id = _wanted_by(message)
        if run_id is not None and "url" in message:
            self._check_reaches(message, run_id)
        if "seen" in message and inode_of(message["seen"]) != message["inode"]:
            raise UnsupportedError(
                f"cannot save with the agent of {self.folder}: it has another directory at "
                f"{message['seen']}. It probably runs in another container, with which this "
                "process shares the memory"
            )
        with self._changed:
            self._changed.wait_for(lambda: not self._ranks.is_leaving(pid, session, ranks), _POLL_S)
            if self._has_ended:
                raise ConnectionAbortedError("this agent has ended")
            if run_id is not None:
                self._become(run_id, pid)
            trainer = self._ranks.register(rank, session, pid, ranks, message.get("places"))
            self.options = options
            self._replicas.begin_session(session)
            self._saves.lose(filter(None, map(decoded_save, message.get("orphans", ()))))
            self._is_dropped = False
            trainer.connections += 1
            self._changed.notify_all()
            return trainer

    def _check_reaches(self, message: Message, run_id: RunId) -> None:
        """Checks that this agent reaches the store of a rank; see :func:`check_reaches`.

        If not, and no rank uses this agent, it ends, and leaves the memory to an agent that the
        rank starts: that one has the environment of the rank, such as renewed credentials.
        """
        try:
            check_reaches(message["url"], run_id)  # Without the lock: the store may be slow.
        except CheckpointError as error:
            with self._changed:
                if self._ranks.active() or self._saves.is_running or not message["may_end"]:
                    raise
                self._is_useless = True
                self._changed.notify_all()
            _log.info("another agent begins: %s", error)
            raise ConnectionAbortedError from error

    def _become(self, run_id: RunId, pid: int) -> None:
        """Serves the run with this id from now on. The memory of another run will be freed.

        It is freed when the run first allocates memory: until then, the trainers may detect that
        the directory is merely not mounted, and end.
        """
        own = id_in_memory(self.folder)
        present = self._next_id or own
        active = self._ranks.active(pid)
        if active and present is not None and present.id != run_id.id:
            raise CheckpointError(
                f"cannot begin a new run: process {active[0].pid} of the earlier run under this "
                "path is still running; end it first"
            )
        if own is not None and own.id != run_id.id:
            self._next_id = run_id
            return
        self._next_id = None
        is_written = run_id.is_written or (own is not None and own.is_written)
        if own != RunId(run_id.id, is_written):
            set_id(self.folder, RunId(run_id.id, is_written))

    def _free_former(self) -> None:
        """Frees the memory of a run that another has replaced."""
        self._changed.wait_for(lambda: self._next_id is None or not self._slots.is_allocating)
        if self._next_id is not None:
            _log.info("the memory of the former run is freed for run %s", self._next_id.id)
            self._slots.discard_all()
            self._replicas.discard()
            set_id(self.folder, self._next_id)
            self._next_id = None

    def _reserve(self, trainer: RankProcess, message: Message) -> None:
        self._free_former()
        self._with_memory(lambda: self._slots.reserve(trainer.rank, message["nbytes"]))

    def _with_memory(self, allocate: Callable[[], T]) -> T:
        """Allocates memory; on failure frees slots of former ranks, then replicas, and retries."""
        while True:
            try:
                return allocate()
            except StorageError:
                is_released = self._slots.release(self._ranks.ranks, self._saves.is_done)
                if not is_released and not self._replicas.give_up():
                    raise
                with released(self._changed):
                    free(self._slots.doomed)

    def _acquire(self, trainer: RankProcess, message: Message) -> Message:
        sequence, nbytes, wait_s = int(message["sequence"]), message["nbytes"], message["wait_s"]
        self._replicas.decided(trainer.rank, decoded_save(message.get("keep")))
        self._free_former()
        if not wait_s and not self._is_admitted((trainer.session, sequence)):
            return {"kind": Kind.BUSY}
        deadline = time.monotonic() + wait_s
        has_waited = False
        trainer.reached = sequence
        self._changed.notify_all()
        while True:
            slot = self._with_memory(
                lambda: self._slots.acquire(trainer.rank, nbytes, self._replicas.keep)
            )
            if slot is not None:
                return {"kind": Kind.SLOT, "path": os.fspath(slot.path), "has_waited": has_waited}
            left = deadline - time.monotonic()
            if left <= 0:
                return {"kind": Kind.BUSY}
            has_waited = True
            self._changed.wait(min(left, _POLL_S))
            if not trainer.is_alive:
                raise CancelledError(f"cannot wait for rank {trainer.rank}: its process died")

    def _is_admitted(self, save: Save) -> bool:
        """Returns whether every rank has a free slot; the first request decides for all ranks."""
        if save not in self._admitted:
            self._admitted[save] = all(
                self._slots.find_free(rank) is not None for rank in self._ranks.ranks
            )
        while len(self._admitted) > _MAX_ADMITTED:
            del self._admitted[next(iter(self._admitted))]
        return self._admitted[save]

    def _filled(self, trainer: RankProcess, message: Message) -> None:
        path = Path(message["path"])
        self._slots.check_filled(trainer.rank, trainer.session, path)
        # Writes to mapped memory do not update the time that `remove_abandoned` checks.
        os.utime(path)
        trainer.reached = max(trainer.reached, message["sequence"] + 1)
        self._saves.begin_next()
        newest = self._slots.scan().newest
        if newest is not None and newest.session == trainer.session:
            self._slots.retain(self._ranks.ranks, self._replicas.keep)
            if not self._replicas.is_active:
                self._replicas.discard()  # The replicas of an earlier session.
        self._changed.notify_all()

    def _abort(self, trainer: RankProcess, message: Message) -> None:
        sequence, node_count = message["sequence"], message["node_count"]
        trainer.reached = max(trainer.reached, sequence + 1)
        self._changed.notify_all()
        if node_count > 1:
            node, target = message["node"], Destination.decode(message["destination"])
            save, where = (trainer.session, sequence), (target.directory, target.shared)
            self._failures.abort(
                Manifests(self.run, *save, node, node_count, *where),
                f"cannot save {target.directory}: rank {trainer.rank} failed or skipped before it "
                "filled a slot",
                within_s=self.options.peers_timeout_s,
            )

    def _set_buddy(self, trainer: RankProcess, message: Message) -> None:
        if "buddy" in message:
            buddy, at, token = (message[field] for field in ("buddy", "at", "token"))
            self._replicas.connect(buddy, at, token, message["source"], trainer.rank)
        else:
            self._replicas.end()

    def _persist(self, trainer: RankProcess, message: Message) -> None:
        save = trainer.session, message["sequence"]
        trainer.reached = max(trainer.reached, save[1] + message.get("has_filled", False))
        has_requested = False
        while not self._saves.is_done(save):
            failure = self._saves.failure_of(save)
            if failure is not None:
                raise_failure(failure)
            scan = self._slots.scan()
            if save not in scan.complete:
                self._raise_if_lost(save, scan)
            elif not has_requested:
                self._saves.request(save)
                has_requested = True
            if not trainer.is_alive:
                raise CancelledError(f"cannot wait for rank {trainer.rank}: its process died")
            self._changed.wait(_POLL_S)

    def _raise_if_lost(self, save: Save, scan: SlotScan) -> None:
        """Raises if an incomplete save can never complete."""
        newest = scan.newest
        if newest is not None and newest.save > save:
            raise CancelledError(
                f"cannot persist save {save[1]}: it is no longer in memory, and not on disk"
            )
        if not self._ranks.is_awaited(save, scan):
            raise CancelledError(
                f"cannot persist save {save[1]}: a slot was removed from memory, or a rank ended "
                "or failed before it filled a slot"
            )

    def _detach(self, trainer: RankProcess, message: Message) -> None:
        trainer.has_detached, self._is_dropped = True, bool(message["drop"])
        self._changed.notify_all()
