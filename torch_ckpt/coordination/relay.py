"""A rank's relay in the tree of its group: one thread that forwards messages.

In an exchange, each rank sends a contribution to the coordinator, and the coordinator sends an
answer to each rank. The thread owns the connections. It forwards contributions up and answers down
even while the rank itself is busy. So the group distinguishes three failures:

- A process ends. Its connections close, its neighbours notice at once, and every open call fails
  on all ranks. TCP keepalive detects a machine without power after about nine seconds.
- A live rank misses the deadline. The coordinator names the ranks whose contributions are missing.
- A process is frozen, so it does not answer pings. The coordinator names this rank, but not the
  ranks below it in the tree, whose contributions it did not forward.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch.distributed.distributed_c10d import Store

from torch_ckpt.coordination.call_state import Calls, CallState
from torch_ckpt.coordination.connect import Deadline, Neighbours, connect
from torch_ckpt.coordination.contributions import (
    Contribution,
    ExchangeState,
    RaisedError,
    Values,
    decoded_error,
    encoded_error,
    packed_answer,
    packed_contributions,
    unpacked_answer,
    unpacked_contributions,
)
from torch_ckpt.coordination.jobs import Cancellable, Jobs
from torch_ckpt.coordination.lateness import FORWARD_S, Lateness
from torch_ckpt.coordination.loop import Loop, settle
from torch_ckpt.coordination.peer import Kind, Message, Peer
from torch_ckpt.coordination.promises import Promises
from torch_ckpt.errors import CheckpointError, RankTimeoutError, listed_ranks
from torch_ckpt.records.record import Heard

__all__ = ["Relay"]

_PING_S = 1.0  # Interval of pings.


class Relay(Loop):
    """The communication thread of one rank.

    Other threads use the attributes, :meth:`naming_late` and :meth:`error`. They reach the other
    methods through :meth:`post` and :meth:`submit`.
    ``store`` returns the store in which the ranks exchange their addresses. ``rank`` is the rank in
    the group; 0 is the coordinator. ``names`` are global ranks. ``phase`` is the phase that a rank
    must finish before it connects, for messages. The thread ends when ``owner`` has no references
    left. Raises RuntimeError if the system has no more threads.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        rank: int,
        names: Sequence[int],
        phase: str,
        owner: object,
    ) -> None:
        super().__init__()
        self.rank, self.names = rank, names
        self.calls = Calls()
        self.connected: Future[None] = Future()
        """Completes when all neighbours are connected."""
        self.deadline = Deadline(phase)
        """The end of the wait for the other ranks to connect."""
        self._pinged = 0.0
        self._parent: Peer | None = None
        self._children: dict[int, Peer] = {}
        self.end = weakref.finalize(owner, self.stop)
        """Ends the thread, even before it is connected."""
        threading.Thread(
            target=self._connect_and_run, args=(store,), name="torch_ckpt-group", daemon=True
        ).start()

    def naming_late(self, error: TimeoutError, number: int, exchange: int) -> TimeoutError:
        """Returns the error with the ranks for which this rank has waited, if known."""
        call = self.calls.get(number)
        late = list(self.names) if call is None else call.late(exchange, self.names)
        if self._parent is not None:
            late = [self.names[rank] for rank in self._parent.silent(time.monotonic())]
        return TimeoutError(f"{error}; {listed_ranks(late)} missing") if late else error

    def error(self, number: int) -> Exception | None:
        """Returns the error of a failed call; ``None`` if it has not failed."""
        return self.calls.error(number) or self.lost

    # ---- The thread ----

    def _connect_and_run(self, store: Callable[[], Store]) -> None:
        try:
            neighbours = connect(
                store(), self.rank, self.names, self.deadline, lambda: self.stopped
            )
            self.join(neighbours)
            if neighbours.error is not None:
                self.abort_group(neighbours.error)
            self.connected.set_result(None)
        except BaseException as error:
            self.connected.set_exception(error.with_traceback(None))
            self.close()
            return
        try:
            self.run()
        except BaseException as error:
            self.lost = CheckpointError(f"the communication thread failed: {error!r}")
            for call in self.calls:
                call.end(self.lost)
            raise
        finally:
            self.close()

    def join(self, neighbours: Neighbours) -> None:
        """Starts to serve the connections."""
        self._below = neighbours.below
        self._size_below = 1 + sum(map(len, neighbours.below.values()))
        if neighbours.parent is not None:
            self._parent = Peer(*neighbours.parent)
        self._children = {r: Peer(r, c) for r, c in neighbours.children.items()}
        self._late = Lateness(self.names, neighbours, self._parent, self._children)
        self._promises = Promises(self.send, self._parent, self._children)
        for peer in (self._parent, *self._children.values()):
            if peer is not None:
                self.add(peer)

    def due(self) -> float | None:
        """Sends pings, forwards contributions, and fails calls after their deadlines."""
        now = time.monotonic()
        if not any(call.exchanges or call.claim for call in self.calls):
            for peer in self.peers:
                peer.is_pinged, peer.silent_beyond = False, {}
            return None
        if now - self._pinged >= _PING_S:
            self._pinged = now
            for peer in self.peers:
                if not peer.is_pinged:
                    peer.expect_answers()
                self.send(peer, Kind.PING)
        due = self._pinged + _PING_S
        for call in self.calls:
            for state in list(call.exchanges.values()):
                if self._parent is None and state.has_raised:
                    due = min(due, state.raised_until)
                    if now >= state.raised_until:
                        self._raise_on_all(call, state)
                elif self._parent is None:
                    self._late.log(call, state)
                    deadline = self._late.deadline(state)
                    due = min(due, deadline)
                    if now >= deadline:
                        self.fail(call, self._late.error_of_late(call, state, now))
                else:
                    if state.contributions and now - state.forwarded >= FORWARD_S:
                        self._pass_up(call, state)
                    if state.contributions:
                        due = min(due, state.forwarded + FORWARD_S)
                    if state.future is not None:
                        self._late.log(call, state)
                        if error := self._late.error_of_silent(call, state, now):
                            self.fail(call, error)
        return max(due - time.monotonic(), 0.0)

    def receive(self, peer: Peer, message: Message) -> None:
        """Processes a message."""
        kind, number, exchange, body = message
        if kind == Kind.CONTRIBUTIONS:
            self._receive_contributions(self.calls.begun(number), exchange, body)
        elif kind == Kind.ANSWER:
            self._receive_answer(self.calls.begun(number), exchange, body)
        elif kind == Kind.FAILED:
            self.fail(self.calls.begun(number), decoded_error(body), peer)
        elif kind == Kind.LEFT:
            self._end_rest(number, decoded_error(body), peer)
        elif kind == Kind.RAISED:
            self._receive_raised(self.calls.begun(number), body, peer)
        elif kind == Kind.GONE:
            self.abort_group(decoded_error(body), peer)
        elif kind == Kind.PROMISE:
            self._promises.give(self.calls.begun(number))
        elif kind == Kind.PROMISED:
            self._promises.record(self.calls.begun(number), peer.rank)
        elif kind == Kind.PING:
            now, silent = time.monotonic(), {}
            for other in self.peers:
                if other is not peer and self._parent in (other, peer):  # Beyond this rank.
                    silent.update(other.silent(now))
            self.send(peer, Kind.PONG, 0, 0, json.dumps(list(silent.items())).encode())
        else:
            peer.silent_beyond = dict(json.loads(bytes(body)))

    def disconnect(self, peer: Peer) -> None:
        """Fails every call, because a neighbour has ended."""
        name = self.names[peer.rank]
        text = f"rank {name} is gone: its process has ended, or its machine is unreachable"
        self.abort_group(RankTimeoutError(text, [name]))

    def abort_group(self, error: RankTimeoutError, source: Peer | None = None) -> None:
        """Fails all present and future calls, because a lost rank never returns to its group."""
        for call in self.calls:
            for state in list(call.exchanges.values()):
                if self._parent is None and state.has_raised:  # The first cause counts.
                    self._raise_on_all(call, state)
        if self.lost is None:
            self.lost = error
            for peer in self.peers:
                if peer is not source:
                    self.send(peer, Kind.GONE, 0, 0, encoded_error(error).encode())
            for call in self.calls:
                call.end(call.error_of_lost(error))

    # ---- Calls ----

    def enter(self, number: int, phase: str, jobs: Jobs[Cancellable]) -> None:
        """Sets the current phase of this rank, and the jobs to end when the call fails."""
        call = self.calls.begun(number)
        call.phase, call.jobs = phase, jobs
        if call.error is not None or self.lost is not None:
            call.cancel_jobs()

    def begin(
        self,
        number: int,
        exchange: int,
        phase: str,
        own: Contribution,
        future: Future[Any],
    ) -> None:
        """Begins an exchange on this rank, which ends the phase.

        The future completes with the answer; on the coordinator, with the contributions of all
        ranks.
        """
        call = self.calls.begun(number)
        call.phase = phase
        if isinstance(self.lost, RankTimeoutError) and call.error is None:
            call.error = call.error_of_lost(self.lost)
        if call.error is not None:
            settle(future, error=call.error)
        else:
            state = call.exchange(exchange)
            state.future = future
            if not self._has_phase(call, state, phase, self.rank):
                return
            state.began, state.timeout_s = own.arrived, own.timeout_s
            state.forwarded = state.forwarded or state.began
            self._add(call, state, {self.rank: own})

    def _receive_contributions(self, call: CallState, exchange: int, body: bytearray) -> None:
        now = time.monotonic()
        phase, contributions = unpacked_contributions(body, now)
        self._add_events(call, contributions)
        if call.error is not None or self.lost is not None:
            return  # The error also reaches the sender.
        state = call.exchange(exchange)
        state.forwarded = state.forwarded or now
        if self._has_phase(call, state, phase, next(iter(contributions))):
            self._add(call, state, contributions)

    def _has_phase(self, call: CallState, state: ExchangeState, phase: str, rank: int) -> bool:
        """Returns whether a contribution has the phase of the others; otherwise, fails the call."""
        state.phase = state.phase or phase
        if state.phase == phase:
            return True
        other = next(iter(state.contributions), self.rank)
        text = (
            f"ranks make different calls: rank {self.names[rank]} is {phase}, rank "
            f"{self.names[other]} is {state.phase}; all ranks must make the same calls in the same "
            "order"
        )
        self.fail(call, call.timeout_error(text, [self.names[rank]], phase=phase))
        return False

    def _add(self, call: CallState, state: ExchangeState, contributions: dict[int, Any]) -> None:
        state.add(contributions)
        is_complete = state.count >= self._size_below
        if self._parent is not None:
            if is_complete or any(own.is_error for own in contributions.values()):
                self._pass_up(call, state)
        elif is_complete and state.has_raised:
            self._raise_on_all(call, state)
        elif is_complete:
            state.complete, state.wait = time.monotonic(), None
            state.deadline = state.complete + state.shortest_s
            settle(state.future, [state.contributions[rank].data for rank in range(state.count)])

    def _add_events(self, call: CallState, contributions: dict[int, Contribution]) -> None:
        """Adds the events that ranks have recorded, on the coordinator."""
        if self._parent is None:
            call.heard += [
                Heard(self.names[rank], own.arrived, bytes(own.events))  # Not the whole message.
                for rank, own in contributions.items()
                if own.events
            ]

    def _pass_up(self, call: CallState, state: ExchangeState) -> None:
        assert self._parent is not None
        now = time.monotonic()
        body = packed_contributions(state.phase, state.contributions, now)
        state.contributions, state.forwarded = {}, now
        self.send(self._parent, Kind.CONTRIBUTIONS, call.number, state.number, *body)

    def answer(self, number: int, exchange: int, values: Values, future: Future[None]) -> None:
        """Sends the coordinator's answer to all ranks, unless the call has failed.

        An object that several ranks receive is sent once.
        """
        call = self.calls.begun(number)
        if call.exchanges.pop(exchange, None) is None:
            settle(future, error=call.error or self.lost)
            return
        ranks = [0, *(rank for child in self._below.values() for rank in child)]
        of_rank = [values] * len(ranks) if isinstance(values, bytes) else [values[r] for r in ranks]
        number_of = {key: i for i, key in enumerate(dict.fromkeys(map(id, of_rank)))}
        distinct = list({id(value): memoryview(value) for value in of_rank}.values())
        numbers = array("Q", (number_of[id(value)] for value in of_rank))
        self._send_down(number, exchange, distinct, numbers)
        settle(future, None)

    def _receive_answer(self, call: CallState, exchange: int, body: bytearray) -> None:
        values, numbers = unpacked_answer(body)
        self._send_down(call.number, exchange, values, numbers)
        state = call.exchanges.pop(exchange, None)
        if state is not None:
            settle(state.future, values[numbers[0]])

    def _send_down(
        self, number: int, exchange: int, values: Sequence[memoryview], numbers: array[int]
    ) -> None:
        begin = 1
        for child, below in self._below.items():
            end = begin + len(below)
            body = packed_answer(values, numbers[begin:end])
            self.send(self._children[child], Kind.ANSWER, number, exchange, *body)
            begin = end

    # ---- Commits ----

    def claim(self, number: int, future: Future[None]) -> None:
        """Claims the commit for the coordinator; see :meth:`Promises.claim`."""
        call = self.calls.begun(number)
        if call.error is not None or self.lost is not None:
            settle(future, error=call.error or self.lost)
        else:
            self._promises.claim(call, future)

    # ---- Failures ----

    def fail(self, call: CallState, error: RankTimeoutError, source: Peer | None = None) -> None:
        """Fails a call on all ranks; the error was received from ``source``, if any."""
        if call.error is not None:
            return
        for peer in self.peers:
            if peer is not source:
                self.send(peer, Kind.FAILED, call.number, 0, encoded_error(error).encode())
        call.end(error)

    def fail_here(self, number: int, reason: str, future: Future[RankTimeoutError]) -> None:
        """Fails a call on all ranks because of this one, unless it has failed already.

        The future completes with the error of the other ranks. The error has the phase and the
        promise at the moment at which the failure is sent.
        """
        call, name = self.calls.begun(number), self.names[self.rank]
        text = f"rank {name} failed while {call.phase}: {reason}"
        error = call.timeout_error(text, [name])
        self.fail(call, error)
        settle(future, error)

    def leave(self, first: int, activity: str, reason: str, future: Future[None]) -> None:
        """Fails the calls of a method that this rank has left for a reason, or else has ended."""
        name = self.names[self.rank]
        text = f"rank {name} failed to {activity}: {reason}"
        if not reason:
            text = f"ranks make different calls: rank {name} made its last one, to {activity}"
        self._end_rest(first, RankTimeoutError(text, [name], activity))
        settle(future, None)

    def _end_rest(self, first: int, error: RankTimeoutError, source: Peer | None = None) -> None:
        """Fails the calls of a method from ``first`` on, on all ranks."""
        if self.calls.leave(first, error):
            for peer in self.peers:
                if peer is not source:
                    self.send(peer, Kind.LEFT, first, 0, encoded_error(error).encode())

    def _raise_on_all(self, call: CallState, state: ExchangeState) -> None:
        """Sends the errors that have arrived to all ranks. Called on the coordinator."""
        body = packed_contributions(state.phase, state.raised(), time.monotonic())
        self._receive_raised(call, bytearray(b"".join(body)))

    def _receive_raised(self, call: CallState, body: bytearray, source: Peer | None = None) -> None:
        """Ends a call with the errors of the ranks that raised, also on the ranks below."""
        if call.error is not None:
            return
        for child in self._children.values():
            if child is not source:
                self.send(child, Kind.RAISED, call.number, 0, body)
        phase, raised = unpacked_contributions(body, 0.0)
        call.end(RaisedError(phase, {rank: own.data for rank, own in raised.items()}))
