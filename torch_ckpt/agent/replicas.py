"""Replicas: saves that an agent sends to its buddy's agent, and stores for another machine."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.messages import Kind, Message, decode, encode, encoded_save
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.replica_files import (
    GENERATIONS,
    PENDING_REPLICA,
    ReplicaFile,
    found_replicas,
    remove_replicas,
)
from torch_ckpt.agent.replica_receiver import ReplicaReceiver, check_memory
from torch_ckpt.agent.replica_sender import Buddy, ReplicaSender
from torch_ckpt.agent.slots import Slots, SlotScan
from torch_ckpt.coordination.listeners import Listeners
from torch_ckpt.errors import CheckpointError, StorageError

__all__ = ["Replicas"]

_log = logging.getLogger("torch_ckpt.agent")

_STATE_NAME = "replication"
"""The file beside the slots from which a restarted agent resumes. It contains the secret tokens."""


class Replicas:
    """The replicas of one agent. Requires: the caller holds the lock ``changed`` of the agent.

    ``keep`` is the save that the ranks retain on all machines: the newest with all its replicas. A
    restarted agent listens at the addresses of the former one, with the same token. It does not
    know which save the ranks retain, nor whether they are deciding on one, and sends nothing until
    they have sent it.
    """

    def __init__(
        self,
        folder: Path,
        run: bytes,
        slots: Slots,
        changed: threading.Condition,
        *,
        options: Callable[[], AgentOptions],
    ) -> None:
        self.keep: Save | None = None
        self._is_deciding = False  # Whether a rank has asked for marks, to decide on `keep`.
        self._folder, self._run = folder, run
        self._slots, self._changed = slots, changed
        self._options = options
        self._state: dict[str, Any] = {}
        self._listeners: Listeners | None = None  # Until its receiver has it.
        self._sender: ReplicaSender | None = None
        self._receiver: ReplicaReceiver | None = None
        for path in folder.glob(f"{PENDING_REPLICA}*"):  # An earlier agent was allocating these.
            path.unlink()
        state = folder / _STATE_NAME
        try:
            if state.exists():
                self._resume(decode(state.read_bytes())[0])
        except (CheckpointError, KeyError, OSError, TypeError, ValueError) as error:
            _log.warning("cannot replicate until the ranks restart: %s", error)

    def _resume(self, state: dict[str, Any]) -> None:
        """Continues the work of an earlier agent of the same session."""
        token = state["token"]
        self._listeners = Listeners(
            [(host, int(port)) for host, port in state["at"]], state["node"], token
        )
        self._state = state
        self._is_deciding = True  # The earlier agent may have reported marks.
        self._start()
        _log.info("replicating to machine %d", state["buddy"])

    def listen(self, session: bytes, node: int, hosts: Sequence[str]) -> Message:
        """Listens for another agent, in a new session; returns the addresses and the secret token.

        Raises StorageError if the system cannot listen.
        """
        self.end()
        token = secrets.token_hex(16)
        try:
            self._listeners = Listeners([(host, 0) for host in hosts], node, token)
        except OSError as error:
            raise StorageError(
                f"cannot listen for replicas: {error.strerror or error}", error.errno
            ) from error
        self._state = {"session": session.hex(), "node": node, "token": token}
        self._state["at"] = self._listeners.addresses
        return {"kind": Kind.LISTENING, "at": self._listeners.addresses, "token": token}

    def connect(
        self, buddy: int, at: Sequence[tuple[str, int]], token: str, source: int, rank: int
    ) -> None:
        """Begins to send to a buddy, and to receive from a source, as ``rank`` requested.

        The same rank requests a :meth:`report`.
        """
        if self._listeners is None:
            raise CheckpointError("cannot replicate: this agent does not listen for replicas")
        self._state |= {"buddy": buddy, "buddy_at": list(at), "buddy_token": token}
        self._state |= {"source": source, "rank": rank}
        pending = self._folder / f"{_STATE_NAME}.tmp"
        try:
            pending.touch(mode=0o600)
            pending.write_bytes(encode(self._state))
            pending.rename(self._folder / _STATE_NAME)
        except OSError as error:
            raise StorageError(f"cannot write {pending}: {error.strerror}", error.errno) from error
        self._start()

    def _start(self) -> None:
        state, listeners = self._state, self._listeners
        assert listeners is not None
        session, node = bytes.fromhex(state["session"]), state["node"]
        buddy = Buddy(
            state["buddy"],
            [(host, int(port)) for host, port in state["buddy_at"]],
            state["buddy_token"],
        )
        self._listeners = None
        self._receiver = ReplicaReceiver(
            self._folder, self._run, session, state["source"], listeners
        )
        self._sender = ReplicaSender(
            self._folder,
            self._run,
            session,
            node,
            buddy,
            self._slots,
            self._changed,
            keep=lambda: self.keep,
            is_deciding=lambda: self._is_deciding,
            rate=lambda: self._options().replicate_bytes_per_s,
        )

    @property
    def is_active(self) -> bool:
        """Whether this agent replicates."""
        return self._sender is not None

    def report(self, scan: SlotScan) -> Message:
        """Returns the complete saves of this machine whose replicas the buddy stores.

        The buddy retains them until the rank of :meth:`connect` has :meth:`decided`.
        """
        sender = self._sender
        if sender is None:
            failure = f"its agent does not replicate any more; see {self._folder / 'agent.log'}"
            return {"kind": Kind.SAVES, "saves": None, "superseded": 0, "failure": failure}
        self._is_deciding = True
        saves = [encoded_save(save) for save in scan.complete if sender.is_complete(save)]
        facts = {"superseded": sender.superseded, "failure": sender.failure}
        return {"kind": Kind.SAVES, "saves": saves, **facts}

    def decided(self, rank: int, keep: Save | None) -> None:
        """Sets ``keep`` to the decision of the ranks. ``rank`` is one of them."""
        self.keep = keep
        if self._is_deciding and rank == self._state.get("rank"):
            self._is_deciding = False
            self._changed.notify_all()

    def reserve(self, slots: dict[int, int]) -> None:
        """Checks that memory remains for replicas, besides the slots of this machine's ranks.

        ``slots`` has the length of all slots of one save, by node. Raises StorageError if the tmpfs
        or the container's memory limit has too little.
        """
        own = slots[self._state["node"]] * GENERATIONS
        wanted = ReplicaFile.file_nbytes(slots[self._state["source"]]) * GENERATIONS
        present = sum(path.stat().st_size for _, _, path in found_replicas(self._folder))
        check_memory(self._folder, max(own - self._slots.nbytes, 0) + max(wanted - present, 0))

    def close(self) -> None:
        """Stops sending and receiving in this process."""
        ended = self._listeners, self._sender, self._receiver
        self._listeners = self._sender = self._receiver = None
        self._is_deciding = False
        for each in ended:
            if each is not None:
                each.close()

    def end(self) -> None:
        """Stops sending and receiving. The replicas remain."""
        self.close()
        self._state = {}
        (self._folder / _STATE_NAME).unlink(missing_ok=True)

    def begin_session(self, session: bytes) -> None:
        """Ends transfers of an earlier session, so that its replicas are no longer replaced."""
        if self._state and bytes.fromhex(self._state["session"]) < session:
            self.end()

    def discard(self) -> bool:
        """Removes all replicas stored here; returns whether any existed."""
        found = found_replicas(self._folder)
        self._slots.doomed += remove_replicas(self._folder)
        return bool(found)

    def give_up(self) -> bool:
        """Frees the memory of replicas for slots of this machine's ranks; see :meth:`discard`."""
        self.end()
        is_freed = self.discard()
        if is_freed:
            _log.warning("this machine stores no more replicas: the slots of its ranks need memory")
        return is_freed
