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

from torch_ckpt._core import _native
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
    failure_of,
    peer_of,
    raise_failure,
    receive,
    send,
)
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.rank_process import RankProcess
from torch_ckpt.agent.replicas import Replicas
from torch_ckpt.agent.saves import Saves
from torch_ckpt.agent.slots import Slots, SlotScan
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.errors import CancelledError, CheckpointError, StorageError, UnsupportedError
from torch_ckpt.process_state import PROCESS

__all__ = ["Agent"]

_log = logging.getLogger("torch_ckpt.agent")

_SETTLE_S = 1.0
"""Time to wait after a trainer has died, because the other trainers usually die too."""

_POLL_S = 0.5

_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 30.0
"""Pauses between attempts to write the step of trainers that have died; each one doubles."""

_REGISTER_S = 10.0
"""Time within which trainers register with a restarted agent."""

_MAX_ADMITTED = 64  # Retained decisions; ranks are never this many saves apart.

T = TypeVar("T")


class Agent:
    """The server of one run, which 16 bytes identify, on this machine.

    The options apply until a rank registers. The agent waits ``first_within_s`` for a first
    trainer, or ``linger_s`` if that is longer and the memory contains a snapshot. ``signals`` are
    the termination signals received so far. Once there is one, the agent persists the newest
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
        self.run = run
        self.folder = folder
        self.options = options
        self._signals = signals  # Polled: a signal handler cannot acquire the condition.
        self._changed = threading.Condition()
        self._slots = Slots(folder, run, self._changed)
        self._failures = PendingFailures()
        self._saves = Saves(
            *(folder, self._slots, self._changed),
            options=lambda: self.options,
            is_shutting_down=self._is_shutting_down,
            is_live=self._is_live,
            failures=self._failures,
        )
        self._replicas = Replicas(
            *(folder, run, self._slots, self._changed), options=lambda: self.options
        )
        self._copies = Copies(self._changed)
        is_first = not any(
            p.name.startswith(("rank-", "replica-", "done-")) for p in folder.iterdir()
        )
        self._first_within_s = options.linger_s
        if first_within_s is not None:  # A rank has started this process, and will connect.
            self._first_within_s = max(first_within_s, 0.0 if is_first else options.linger_s)
        self._trainers: dict[int, RankProcess] = {}
        self._ranks: list[int] = []  # Ranks of this machine in the present session.
        self._idle_since = time.monotonic()  # Last time that a trainer was alive.
        self._lost_since: float | None = None
        self._admitted: dict[Save, bool] = {}
        # When to retry, unless an attempt is in progress, and the pause after the next failure.
        self._retries: dict[Save, tuple[float | None, float]] = {}
        self._last_tries: set[Save] = set()
        self._began = time.monotonic()
        self._is_dropped = False  # Whether the trainers discarded their snapshots.
        self._has_ended = False
        self._is_useless = False  # Whether it does not reach the store of the run.
        self._next_id: RunId | None = None  # The run whose first save frees the slots.

    def serve(self) -> bool:
        """Serves trainers until all have detached, or none has been alive for ``linger_s``.

        Returns whether the memory can be removed: its snapshots are on disk or were discarded.
        """
        watch_storage()
        listener = PROCESS.own(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        path = self.folder / "agent.socket"
        path.unlink(missing_ok=True)
        with short_path(self.folder) as folder:
            listener.bind(f"{folder}/{path.name}")
        path.chmod(0o600)
        listener.listen(4096)  # Ranks ping an agent that is busy or frozen meanwhile.
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        with self._changed, contextlib.closing(self._failures):
            self._saves.begin_next()  # An earlier agent may have left pending saves.
            while not self._can_end():
                self._changed.wait(_POLL_S)
                self._check_trainers()
            self._has_ended = True
            listener.shutdown(socket.SHUT_RDWR)  # A close alone wakes no thread that accepts.
            listener.close()
            path.unlink(missing_ok=True)
            self._replicas.close()
            self._copies.close()
            if any(not t.has_detached and t.is_alive for t in self._trainers.values()):
                return False  # Live trainers start another agent.
            newest = self._slots.scan().newest
            if self._is_dropped or newest is None or self._saves.is_done(newest.save):
                return True
            return self._all_detached and self._saves.failure_of(newest.save) is None

    def _can_end(self) -> bool:
        """Returns whether the agent can end, once it has persisted the newest snapshot."""
        if not self._signals and not self._is_useless and not self._is_over():
            return False
        if not self._is_dropped and not self._is_useless:
            if self._all_detached or self.options.persist_on_failure:
                self._persist_newest(is_last=True)
            self._saves.begin_next()
        return not self._saves.is_running and not self._is_awaiting_copies()

    def _is_awaiting_copies(self) -> bool:
        """Returns whether copies that the ranks have left behind are still to end."""
        is_late = time.monotonic() - self._idle_since > self.options.linger_s
        return self._copies.are_running and not (self._signals or is_late)

    def _is_over(self) -> bool:
        if self._saves.is_running:
            return False
        if self._all_detached and len(self._trainers) >= len(self._ranks):
            return True
        if any(t.is_alive and not t.has_detached for t in self._trainers.values()):
            self._idle_since = time.monotonic()
            return False
        linger_s = self.options.linger_s if self._trainers else self._first_within_s
        return time.monotonic() - self._idle_since > linger_s

    @property
    def _all_detached(self) -> bool:
        return bool(self._trainers) and all(t.has_detached for t in self._trainers.values())

    def _check_trainers(self) -> None:
        """Persists the newest snapshot after a trainer has died."""
        self._saves.begin_next()  # A trainer may die before it reports a complete slot.
        lost = [trainer for trainer in self._trainers.values() if trainer.is_lost]
        if not lost:
            self._lost_since = None
            return
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            _log.info("rank %d (process %d) died", lost[0].rank, lost[0].pid)
        if self.options.persist_on_failure and time.monotonic() - self._lost_since >= _SETTLE_S:
            self._persist_newest()

    def _is_shutting_down(self, save: Save) -> bool:
        """Returns whether the agent is ending, or the ranks of a save have restarted."""
        with self._changed:
            trainers = self._trainers.values()
            return bool(self._signals) or any(t.session > save[0] and t.is_alive for t in trainers)

    def _is_live(self, save: Save) -> bool:
        """Returns whether trainers of a save live, or have ended in good order."""
        with self._changed:
            trainers = [t for t in self._trainers.values() if t.session == save[0]]
            return any(t.has_detached or (t.connections and t.is_alive) for t in trainers)

    def _persist_newest(self, *, is_last: bool = False) -> None:
        scan = self._slots.scan()
        if scan.newest is None:
            return
        if scan.newest.node_count == 1:
            request = self._saves.request
            self._persist_unrequested(scan.newest, scan, request, is_last=is_last)
            return
        for slots in reversed(scan.complete.values()):  # Other machines may lack the newest save.
            if self._saves.is_done(slots[0][0].save):
                return
            self._persist_unrequested(slots[0][0], scan, self._saves.offer, is_last=is_last)

    def _persist_unrequested(
        self,
        header: _native.SlotHeader,
        scan: SlotScan,
        request: Callable[[Save], None],
        *,
        is_last: bool,
    ) -> None:
        """Requests a save that the trainers did not request.

        If it fails, it is retried as long as the agent lives, since a full disk may have space
        again: after longer and longer pauses, and once more before the agent ends (``is_last``).
        """
        save = header.save
        if self._saves.is_done(save) or self._saves.is_pending(save, scan):
            return
        if self._saves.failure_of(save) is not None:
            if save in self._last_tries or not (is_last or self._is_retry_due(save)):
                return
            if is_last:
                self._last_tries.add(save)
        _log.info("persisting step %d without its trainers", header.step)
        request(save)

    def _is_retry_due(self, save: Save) -> bool:
        now = time.monotonic()
        due_s, pause_s = self._retries.get(save, (now, _FIRST_RETRY_S))
        if due_s is None:  # The last attempt has just failed.
            self._retries[save] = now + pause_s, min(2 * pause_s, _MAX_RETRY_S)
            return False
        if now >= due_s:
            self._retries[save] = None, pause_s
        return now >= due_s

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection = PROCESS.own(listener.accept()[0])
            except OSError as error:
                if self._has_ended:
                    return
                _log.warning("cannot accept a trainer: %s", error)
                time.sleep(_POLL_S)  # A descriptor may become free.
                continue
            try:
                threading.Thread(
                    target=self._serve_connection, args=(connection,), daemon=True
                ).start()
            except RuntimeError as error:  # Too many threads; the trainer connects again.
                _log.warning("cannot serve a trainer: %s", error)
                connection.close()

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
        answers: dict[Kind, Callable[[RankProcess, Message], Message]] = {
            Kind.RESERVE: self._reserve,
            Kind.ACQUIRE: self._acquire,
            Kind.FILLED: self._filled,
            Kind.PERSIST: self._persist,
            Kind.DETACH: self._detach,
            Kind.ABORT: self._abort,
            Kind.FAIL: self._fail,
            Kind.LISTEN: self._listen,
            Kind.BUDDY: self._set_buddy,
            Kind.RESERVE_REPLICAS: self._reserve_replicas,
            Kind.REPLICATED: self._replicated,
            Kind.COPY: lambda _, message: self._copies.advance(message),
        }
        try:
            if message["kind"] not in answers:
                raise CheckpointError(f"cannot answer a message of kind {message['kind']}")
            with self._changed:
                return answers[message["kind"]](trainer, message)
        except Exception as error:
            return {"kind": Kind.ERROR, "failure": failure_of(error)}
        finally:
            free(self._slots.doomed)

    def _register(self, message: Message, pid: int) -> RankProcess:
        session, rank = bytes.fromhex(message["session"]), int(message["rank"])
        if message["run"] != self.run.hex():
            raise CheckpointError(f"cannot register rank {rank}: this agent belongs to another run")
        options = AgentOptions.decode(message["options"])
        ranks = [int(each) for each in message["ranks_here"]]
        run_id = RunId(**message["run_id"]) if "run_id" in message else None
        if run_id is not None and "url" in message:
            self._check_reaches(message, run_id)
        if "seen" in message and inode_of(message["seen"]) != message["inode"]:
            raise UnsupportedError(
                f"cannot save with the agent of {self.folder}: it has another directory at "
                f"{message['seen']}. It probably runs in another container, with which this "
                "process shares the memory"
            )
        with self._changed:
            self._changed.wait_for(lambda: not self._is_leaving(pid, session), _POLL_S)
            if self._has_ended:
                raise ConnectionAbortedError("this agent has ended")
            if run_id is not None:
                self._become(run_id, pid)
            trainer = self._trainers.get(rank)
            if trainer is None or trainer.pid != pid or trainer.session != session:
                if trainer is not None and trainer.is_active(pid):
                    raise CheckpointError(
                        f"cannot register rank {rank}: process {trainer.pid} already has this rank"
                    )
                trainer = self._trainers[rank] = RankProcess(rank, session, pid)
            self.options = options
            self._ranks = ranks
            self._replicas.begin_session(session)
            self._saves.lose(
                (bytes.fromhex(of), number) for of, number in message.get("orphans", ())
            )
            self._is_dropped = False
            for other in set(self._trainers).difference(self._ranks):
                if not self._trainers[other].is_alive:
                    del self._trainers[other]  # A rank of an earlier session.
            trainer.connections += 1
            self._changed.notify_all()
            return trainer

    def _check_reaches(self, message: Message, run_id: RunId) -> None:
        """Checks that this agent reaches the store of a rank; see :func:`check_reaches`.

        If not, and no rank uses this agent, it ends, and leaves the memory to one that the rank
        starts: that has the rank's environment, such as credentials that have been renewed.
        """
        try:
            check_reaches(message["url"], run_id)  # Without the lock: the store may be slow.
        except CheckpointError as error:
            with self._changed:
                is_used = any(trainer.is_active(0) for trainer in self._trainers.values())
                if is_used or self._saves.is_running or not message["may_end"]:
                    raise
                self._is_useless = True
                self._changed.notify_all()
            _log.info("another agent begins: %s", error)
            raise ConnectionAbortedError from error

    def _is_leaving(self, pid: int, session: bytes) -> bool:
        """Returns whether connections of an earlier session of a process are open."""
        former = [t for t in self._trainers.values() if t.pid == pid and t.session != session]
        return any(t.connections and not t.has_detached for t in former)

    def _become(self, run_id: RunId, pid: int) -> None:
        """Serves the run with this id from now on; the memory of another run is to be freed.

        It is freed when the run first allocates memory: until then, the trainers may find out that
        the directory is only not mounted, and end.
        """
        own = id_in_memory(self.folder)
        present = self._next_id or own
        if present is not None and present.id != run_id.id:
            active = [t.pid for t in self._trainers.values() if t.is_active(pid)]
            if active:
                raise CheckpointError(
                    f"cannot begin a new run: process {active[0]} of the earlier run under this "
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

    def _reserve(self, trainer: RankProcess, message: Message) -> Message:
        self._free_former()
        self._with_memory(lambda: self._slots.reserve(trainer.rank, message["nbytes"]))
        return {"kind": Kind.OK}

    def _with_memory(self, allocate: Callable[[], T]) -> T:
        """Allocates memory; on failure releases slots of former ranks, or replicas, and retries."""
        try:
            return allocate()
        except StorageError:
            is_released = self._slots.release(self._ranks, self._saves.is_done)
            if not is_released and not self._replicas.give_up():
                raise
            with released(self._changed):
                free(self._slots.doomed)
            return allocate()

    def _acquire(self, trainer: RankProcess, message: Message) -> Message:
        sequence, nbytes, wait_s = int(message["sequence"]), message["nbytes"], message["wait_s"]
        keep = message.get("keep")
        save = None if keep is None else (bytes.fromhex(keep[0]), int(keep[1]))
        self._replicas.decided(trainer.rank, save)
        self._free_former()
        if not wait_s and not self._is_admitted((trainer.session, sequence)):
            return {"kind": Kind.BUSY}
        deadline = time.monotonic() + wait_s
        has_waited = False
        trainer.reached = sequence
        self._changed.notify_all()
        while True:
            slot = self._with_memory(
                lambda: self._slots.acquire(
                    trainer.rank,
                    nbytes,
                    self._saves.is_pending,
                    self._is_awaited,
                    self._replicas.keep,
                )
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
                self._slots.has_free(rank, self._saves.is_pending, self._is_awaited)
                for rank in self._ranks
            )
        while len(self._admitted) > _MAX_ADMITTED:
            del self._admitted[next(iter(self._admitted))]
        return self._admitted[save]

    def _filled(self, trainer: RankProcess, message: Message) -> Message:
        path = Path(message["path"])
        self._slots.check_filled(trainer.rank, trainer.session, path)
        # Writes to mapped memory do not update the time that `remove_abandoned` checks.
        os.utime(path)
        trainer.reached = max(trainer.reached, message["sequence"] + 1)
        self._saves.begin_next()
        newest = self._slots.scan().newest
        if newest is not None and newest.session == trainer.session:
            self._slots.retain(self._ranks, self._saves.is_pending, self._replicas.keep)
            if not self._replicas.is_active:
                self._replicas.discard()  # Those of a former session.
        self._changed.notify_all()
        return {"kind": Kind.OK}

    def _abort(self, trainer: RankProcess, message: Message) -> Message:
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
        return {"kind": Kind.OK}

    def _fail(self, trainer: RankProcess, message: Message) -> Message:
        self._saves.fail((trainer.session, message["sequence"]), message["failure"])
        return {"kind": Kind.OK}

    def _listen(self, trainer: RankProcess, message: Message) -> Message:
        listening = self._replicas.listen(trainer.session, message["node"], message["hosts"])
        return {"kind": Kind.LISTENING, **listening}

    def _set_buddy(self, trainer: RankProcess, message: Message) -> Message:
        if "buddy" in message:
            buddy, at, token = (message[field] for field in ("buddy", "at", "token"))
            self._replicas.connect(buddy, at, token, message["source"], trainer.rank)
        else:
            self._replicas.end()
        return {"kind": Kind.OK}

    def _reserve_replicas(self, trainer: RankProcess, message: Message) -> Message:
        self._replicas.reserve(dict(message["slots"]))
        return {"kind": Kind.OK}

    def _replicated(self, trainer: RankProcess, message: Message) -> Message:
        saves = self._replicas.replicated(self._slots.scan())
        encoded = None if saves is None else [(session.hex(), number) for session, number in saves]
        facts = {"superseded": self._replicas.superseded, "failure": self._replicas.failure}
        return {"kind": Kind.SAVES, "saves": encoded, **facts}

    def _is_awaited(self, save: Save, scan: SlotScan) -> bool:
        """Returns whether the ranks that have not completed a save may still complete it."""
        missing = set(self._ranks).difference(scan.ranks_of(save))
        if missing & scan.ranks_beyond(save):  # A restarted agent lacks their reports.
            return False
        return bool(missing) and all(self._may_complete(rank, save) for rank in missing)

    def _may_complete(self, rank: int, save: Save) -> bool:
        trainer = self._trainers.get(rank)
        if trainer is None:
            return time.monotonic() - self._began < _REGISTER_S
        if trainer.session != save[0] or trainer.has_detached or not trainer.is_alive:
            return False
        return trainer.reached <= save[1]

    def _persist(self, trainer: RankProcess, message: Message) -> Message:
        save = trainer.session, message["sequence"]
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
        return {"kind": Kind.OK}

    def _raise_if_lost(self, save: Save, scan: SlotScan) -> None:
        """Raises if an incomplete save can no longer complete."""
        newest = scan.newest
        if newest is not None and newest.save > save:
            raise CancelledError(
                f"cannot persist save {save[1]}: it is no longer in memory, and not on disk"
            )
        if not self._is_awaited(save, scan):
            raise CancelledError(
                f"cannot persist save {save[1]}: a rank ended or failed before it filled a slot"
            )

    def _detach(self, trainer: RankProcess, message: Message) -> Message:
        trainer.has_detached = True
        self._is_dropped = bool(message["drop"])
        self._changed.notify_all()
        return {"kind": Kind.OK}
