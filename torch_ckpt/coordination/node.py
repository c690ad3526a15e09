"""A rank's node in the tree of its group: one thread that forwards messages.

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
import math
import struct
import threading
import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from torch.distributed.distributed_c10d import Store

from torch_ckpt.coordination.connect import Neighbours, connect
from torch_ckpt.coordination.loop import Loop, settle
from torch_ckpt.coordination.peer import Message, Peer
from torch_ckpt.errors import CheckpointError, RankTimeoutError, listed_ranks

__all__ = ["COMMITTING", "WRITING", "Node", "Values"]

WRITING, COMMITTING = "writing", "committing"
"""The phases in which all ranks write, and in which they wait for the coordinator's commit."""

Values = Sequence[bytes] | bytes
"""An answer: one value per rank, or one value for all ranks. Each object is sent only once."""

_CONTRIBUTION = struct.Struct("<IddQ")  # Rank, timeout, age in seconds, length of the bytes.
_ANSWER_HEAD = struct.Struct("<QQ")  # Number of ranks, number of distinct values.

_CONTRIBUTIONS, _ANSWER, _FAILED, _GONE, _PROMISE, _PROMISED, _PING, _PONG = range(8)

_PING_S = 1.0  # Interval of pings.
_FORWARD_S = 0.05  # Longest time that contributions wait for those of other ranks below.
_CALLS = 4096  # Most calls that are retained, for ranks that are late for a failed call.


@dataclass
class _Exchange:
    """This rank's state of one exchange of a call. Times are of the monotonic clock."""

    phase: str = ""
    contributions: dict[int, tuple[float, float, Any]] = field(default_factory=dict)
    """Timeout, arrival time and bytes, by rank in this subtree. Cleared when sent to the parent."""
    count: int = 0
    """Number of contributions that have arrived."""
    future: Future[Any] | None = None
    """The answer for this rank; on the coordinator, the contributions of all ranks."""
    began: float = 0.0
    """Time at which this rank began the exchange."""
    timeout_s: float = 0.0
    forwarded: float = 0.0
    """Time at which contributions were last sent to the parent."""
    complete: float = 0.0
    """Time at which the coordinator had all contributions; 0 before."""
    deadline: float = math.inf
    """Time at which the coordinator fails the call: the earliest end of a rank's timeout."""
    shortest_s: float = math.inf
    """The shortest timeout of the contributions that have arrived."""

    def add(self, contributions: dict[int, tuple[float, float, Any]]) -> None:
        """Adds contributions of this rank or of ranks below it."""
        self.contributions.update(contributions)
        self.count += len(contributions)
        for timeout_s, arrived, _ in contributions.values():
            self.deadline = min(self.deadline, arrived + timeout_s)
            self.shortest_s = min(self.shortest_s, timeout_s)


class _Call:
    """This rank's state of a call."""

    def __init__(self) -> None:
        self.exchanges: dict[int, _Exchange] = {}
        self.phase = "beginning"
        self.error: RankTimeoutError | None = None
        self.promised = False
        """Whether the coordinator may commit without another message."""
        self.claim: Future[None] | None = None
        self.awaited: set[int] = set()
        """The children that have not promised yet."""


class Node:
    """The communication thread of one rank. It ends when this object has no references left.

    Args:
        store: Returns the store in which the ranks exchange their addresses.
        rank: This rank, as the group numbers it. Rank 0 is the coordinator.
        names: Global rank of each rank of the group.
        phase: The phase that a rank must finish before it connects, for messages.
        timeout_s: Seconds that this rank waits for the others to connect.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        rank: int,
        names: Sequence[int],
        phase: str,
        timeout_s: float,
    ) -> None:
        self._loop = _Loop(rank, names)
        self.connected: Future[None] = Future()
        """Completes when all neighbours are connected."""
        threading.Thread(
            target=_run,
            args=(self._loop, store, phase, timeout_s, self.connected),
            name="torch_ckpt-group",
            daemon=True,
        ).start()
        weakref.finalize(self, self._loop.stop)

    def exchange(
        self, call: int, number: int, phase: str, contribution: bytes, timeout_s: float
    ) -> Future[Any]:
        """Sends this rank's contribution to the coordinator.

        Returns:
            A future of the answer; on the coordinator, of the contributions of all ranks.
        """
        future: Future[Any] = Future()
        self._loop.post(self._loop.begin, call, number, phase, contribution, timeout_s, future)
        return future

    def answer(self, call: int, number: int, values: Values) -> Future[None]:
        """Sends an answer to all ranks, unless the call has failed. Called by the coordinator."""
        future: Future[None] = Future()
        self._loop.post(self._loop.answer, call, number, values, future)
        return future

    def claim(self, call: int) -> Future[None]:
        """Requests the right to commit. Called by the coordinator.

        Returns:
            A future that completes when every rank has promised. From then on, a rank that fails
            the call reports that the checkpoint may be committed.
        """
        future: Future[None] = Future()
        self._loop.post(self._loop.claim, call, future)
        return future

    def fail(self, call: int, error: RankTimeoutError) -> None:
        """Fails a call on all ranks, unless it has failed already."""
        self._loop.post(self._loop.fail, call, error)

    def error(self, call: int) -> Exception | None:
        """Returns the error of a failed call; ``None`` if it has not failed."""
        state = self._loop.calls.get(call)
        return self._loop.lost if state is None or state.error is None else state.error

    def abort(self) -> None:
        """Ends the thread, even before it is connected."""
        self._loop.stop()

    def enter(self, call: int, phase: str) -> None:
        """Sets the current phase of this rank, for messages."""
        self._loop.post(self._loop.enter, call, phase)

    def phase(self, call: int) -> tuple[str, bool]:
        """Returns this rank's phase in a call, and whether it has promised to allow the commit."""
        state = self._loop.calls.get(call)
        return ("beginning", False) if state is None else (state.phase, state.promised)


def _run(
    loop: _Loop, store: Callable[[], Store], phase: str, timeout_s: float, connected: Future[None]
) -> None:
    """Runs the thread. A reference to the :class:`Node` would make the thread run forever."""
    try:
        neighbours = connect(store(), loop.rank, loop.names, phase, timeout_s, lambda: loop.stopped)
        loop.join(neighbours)
        connected.set_result(None)
    except BaseException as error:
        connected.set_exception(error.with_traceback(None))
        loop.close()
        return
    try:
        loop.run()
    except BaseException as error:
        loop.fail_all(CheckpointError(f"the communication thread failed: {error!r}"))
        raise
    finally:
        loop.close()


class _Loop(Loop):
    """The state of the communication thread, and the processing of messages."""

    def __init__(self, rank: int, names: Sequence[int]) -> None:
        super().__init__()
        self.rank, self.names = rank, names
        self.calls: OrderedDict[int, _Call] = OrderedDict()
        self._pinged = 0.0
        self._parent: Peer | None = None
        self._children: dict[int, Peer] = {}

    def join(self, neighbours: Neighbours) -> None:
        """Starts to serve the connections."""
        self._tree, self._below = neighbours.tree, neighbours.below
        self._size_below = 1 + sum(map(len, neighbours.below.values()))
        if neighbours.parent is not None:
            self._parent = Peer(*neighbours.parent)
        self._children = {r: Peer(r, c) for r, c in neighbours.children.items()}
        for peer in (self._parent, *self._children.values()):
            if peer is not None:
                self.add(peer)

    def due(self) -> float | None:
        """Sends pings, forwards contributions, and fails calls after their deadlines."""
        now = time.monotonic()
        if not any(call.exchanges or call.claim for call in self.calls.values()):
            for peer in self.peers:
                peer.is_pinged, peer.silent_beyond = False, {}
            return None
        if now - self._pinged >= _PING_S:
            self._pinged = now
            for peer in self.peers:
                if not peer.is_pinged:
                    peer.expect_answers()
                self.send(peer, _PING)
        due = self._pinged + _PING_S
        for number, call in list(self.calls.items()):
            for exchange, state in list(call.exchanges.items()):
                if self._parent is None:
                    due = min(due, self._fail_if_late(number, call, state, now))
                else:
                    if state.contributions and now - state.forwarded >= _FORWARD_S:
                        self._pass_up(number, exchange, state)
                    if state.contributions:
                        due = min(due, state.forwarded + _FORWARD_S)
                    self._fail_if_silent(number, call, state, now)
        return max(due - time.monotonic(), 0.0)

    def fail_all(self, error: Exception) -> None:
        """Fails all exchanges and claims of this rank."""
        self.lost = error
        for call in self.calls.values():
            for exchange in call.exchanges.values():
                settle(exchange.future, error=error)
            settle(call.claim, error=error)

    def receive(self, peer: Peer, message: Message) -> None:
        """Processes a message."""
        kind, call, number, body = message
        if kind == _CONTRIBUTIONS:
            self._receive_contributions(call, number, body)
        elif kind == _ANSWER:
            self._receive_answer(call, number, body)
        elif kind == _FAILED:
            self.fail(call, _error_of(body), peer)
        elif kind == _GONE:
            self._abort_group(_error_of(body), peer)
        elif kind == _PROMISE:
            self._promise(call)
        elif kind == _PROMISED:
            self._record_promise(call, peer.rank)
        elif kind == _PING:
            others = [other for other in self.peers if other is not peer]
            beyond = others if peer is self._parent else [p for p in others if p is self._parent]
            now, silent = time.monotonic(), {}
            for other in beyond:
                silent.update(other.silent(now))
            self.send(peer, _PONG, 0, 0, json.dumps(list(silent.items())).encode())
        else:
            peer.silent_beyond = dict(json.loads(bytes(body)))

    def disconnect(self, peer: Peer) -> None:
        """Fails every call, because a neighbour is gone."""
        name = self.names[peer.rank]
        text = f"rank {name} is gone: its process has ended, or its machine is unreachable"
        self._abort_group(RankTimeoutError(text, [name]))

    def _abort_group(self, error: RankTimeoutError, source: Peer | None = None) -> None:
        """Fails all present and future calls, because a lost rank never returns to its group."""
        if self.lost is None:
            self.lost = error
            for peer in self.peers:
                if peer is not source:
                    self.send(peer, _GONE, 0, 0, _text_of(error))
            for call in self.calls.values():
                self._end(call, _as_seen_in(call, error))

    # ---- Calls ----

    def _call(self, number: int) -> _Call:
        call = self.calls.get(number)
        if call is None:
            call = self.calls[number] = _Call()
            if len(self.calls) > _CALLS:
                idle = (n for n, c in self.calls.items() if not c.exchanges and c is not call)
                self.calls.pop(next(idle, number), None)
                self.calls[number] = call
        return call

    def enter(self, number: int, phase: str) -> None:
        """Sets the current phase of this rank."""
        self._call(number).phase = phase

    def begin(
        self,
        number: int,
        exchange: int,
        phase: str,
        contribution: bytes,
        timeout_s: float,
        future: Future[Any],
    ) -> None:
        """Begins an exchange on this rank."""
        call = self._call(number)
        call.phase = phase
        if self.lost is not None and call.error is None:
            lost = self.lost
            call.error = _as_seen_in(call, lost) if isinstance(lost, RankTimeoutError) else None
            settle(future, error=call.error or lost)
        elif call.error is not None:
            settle(future, error=call.error)
        else:
            state = call.exchanges.setdefault(exchange, _Exchange())
            state.future = future
            if not self._has_phase(number, state, phase, self.rank):
                return
            state.began, state.timeout_s = time.monotonic(), timeout_s
            state.forwarded = state.forwarded or state.began
            self._add(number, exchange, state, {self.rank: (timeout_s, state.began, contribution)})

    def _receive_contributions(self, number: int, exchange: int, body: bytearray) -> None:
        call = self._call(number)
        if call.error is not None or self.lost is not None:
            return  # The error also reaches the sender.
        state = call.exchanges.setdefault(exchange, _Exchange())
        view, now = memoryview(body), time.monotonic()
        length = int.from_bytes(view[:2], "little")
        state.forwarded = state.forwarded or now
        at = 2 + length
        phase, (sender, *_) = bytes(view[2:at]).decode(), _CONTRIBUTION.unpack_from(view, at)
        if not self._has_phase(number, state, phase, sender):
            return
        contributions = {}
        while at < len(view):
            rank, timeout_s, age_s, nbytes = _CONTRIBUTION.unpack_from(view, at)
            at += _CONTRIBUTION.size
            contributions[rank] = timeout_s, now - age_s, view[at : at + nbytes]
            at += nbytes
        self._add(number, exchange, state, contributions)

    def _has_phase(self, number: int, state: _Exchange, phase: str, rank: int) -> bool:
        """Returns whether a contribution has the phase of the others, and else fails the call."""
        state.phase = state.phase or phase
        if state.phase == phase:
            return True
        other = next(iter(state.contributions), self.rank)
        text = (
            f"ranks make different calls: rank {self.names[rank]} is {phase}, rank "
            f"{self.names[other]} is {state.phase}; all ranks must make the same calls in the same "
            "order"
        )
        self.fail(number, RankTimeoutError(text, [self.names[rank]], phase))
        return False

    def _add(
        self, number: int, exchange: int, state: _Exchange, contributions: dict[int, Any]
    ) -> None:
        state.add(contributions)
        if state.count < self._size_below:
            return
        if self._parent is not None:
            self._pass_up(number, exchange, state)
        else:
            state.complete = time.monotonic()
            state.deadline = state.complete + state.shortest_s
            settle(state.future, [state.contributions[rank][2] for rank in range(state.count)])

    def _pass_up(self, number: int, exchange: int, state: _Exchange) -> None:
        assert self._parent is not None
        phase, now = state.phase.encode(), time.monotonic()
        body: list[Any] = [len(phase).to_bytes(2, "little") + phase]
        for rank, (timeout_s, arrived, data) in state.contributions.items():
            body += [_CONTRIBUTION.pack(rank, timeout_s, now - arrived, len(data)), data]
        state.contributions, state.forwarded = {}, now
        self.send(self._parent, _CONTRIBUTIONS, number, exchange, *body)

    def answer(self, number: int, exchange: int, values: Values, future: Future[None]) -> None:
        """Sends the coordinator's answer. An object that is several ranks' value is sent once."""
        call = self._call(number)
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

    def _receive_answer(self, number: int, exchange: int, body: bytearray) -> None:
        values, numbers = _unpacked(body)
        self._send_down(number, exchange, values, numbers)
        state = self._call(number).exchanges.pop(exchange, None)
        if state is not None:
            settle(state.future, values[numbers[0]])

    def _send_down(
        self, number: int, exchange: int, values: Sequence[memoryview], numbers: array[int]
    ) -> None:
        begin = 1
        for child, below in self._below.items():
            end = begin + len(below)
            body = _packed(values, numbers[begin:end])
            self.send(self._children[child], _ANSWER, number, exchange, *body)
            begin = end

    # ---- Commits ----

    def claim(self, number: int, future: Future[None]) -> None:
        """Begins to collect the promises of all ranks."""
        call = self._call(number)
        if call.error is not None or self.lost is not None:
            settle(future, error=call.error or self.lost)
            return
        call.claim = future
        self._promise(number)

    def _promise(self, number: int) -> None:
        """Promises to allow the commit: a later error reports that it may have happened."""
        call = self._call(number)
        if call.error is not None:
            return  # The coordinator receives the error, and no promise.
        call.promised, call.phase = self._parent is not None, COMMITTING
        call.awaited = set(self._children)
        for child in self._children.values():
            self.send(child, _PROMISE, number)
        self._record_promise(number, self.rank)

    def _record_promise(self, number: int, child: int) -> None:
        call = self._call(number)
        call.awaited.discard(child)
        if call.awaited or call.error is not None:
            return
        if self._parent is not None:
            self.send(self._parent, _PROMISED, number)
        else:
            call.promised = True
            settle(call.claim, None)
            call.claim = None

    # ---- Failures ----

    def fail(self, number: int, error: RankTimeoutError, source: Peer | None = None) -> None:
        """Fails a call on all ranks; the error was received from ``source``, if any."""
        call = self._call(number)
        if call.error is not None:
            return
        for peer in self.peers:
            if peer is not source:
                self.send(peer, _FAILED, number, 0, _text_of(error))
        self._end(call, error)

    def _end(self, call: _Call, error: RankTimeoutError) -> None:
        if call.error is None:
            call.error = error
            for exchange in call.exchanges.values():
                settle(exchange.future, error=error)
            settle(call.claim, error=error)
            call.exchanges, call.claim = {}, None

    def _fail_if_late(self, number: int, call: _Call, state: _Exchange, now: float) -> float:
        """Fails a call after its deadline, on the coordinator.

        Returns:
            The time of the next check.
        """
        assert self._tree is not None
        # Contributions sent before the deadline arrive by then.
        deadline = state.deadline + self._tree.height * _FORWARD_S
        if now < deadline:
            return deadline
        phase, late = state.phase, self._late(state, now)
        if state.complete:
            phase, late = COMMITTING if phase == WRITING else phase, [0]
            first = next((rank for rank in state.contributions if rank), 0)
            since, timeout_s = state.complete, state.contributions[first][0]
        else:
            first = min(state.contributions, key=lambda rank: sum(state.contributions[rank][:2]))
            timeout_s, since, _ = state.contributions[first]
        names = [self.names[rank] for rank in late]
        message = (
            f"{listed_ranks(names)} slow, stuck or gone: {phase} not finished {now - since:.1f} s "
            f"after rank {self.names[first]}, whose timeout is {timeout_s:g} s"
        )
        self.fail(number, _timeout_error(message, names, phase, now - since, call.promised))
        return deadline

    def _late(self, state: _Exchange, now: float) -> list[int]:
        """Returns the ranks without a contribution, except those below a silent rank."""
        silent: set[int] = set()
        for child in self._children.values():
            silent.update(child.silent(now))
        assert self._tree is not None
        parents, late = self._tree.parents, []
        for rank in range(len(self.names)):
            if rank in state.contributions:
                continue
            above = parents[rank]
            while above > 0 and above not in silent:
                above = parents[above]
            if above not in silent:
                late.append(rank)
        return late or sorted(silent)

    def _fail_if_silent(self, number: int, call: _Call, state: _Exchange, now: float) -> None:
        """Fails a call if a rank above this one is frozen, so that no answer can arrive."""
        if state.future is None or self._parent is None:
            return
        for rank, silent_s in self._parent.silent(now).items():
            waited = min(silent_s, now - state.began)
            if waited >= state.timeout_s:
                name, phase = self.names[rank], call.phase
                message = (
                    f"rank {name} is stuck or gone: no message from it for {waited:.1f} s while "
                    f"{phase}"
                )
                self.fail(number, _timeout_error(message, [name], phase, waited, call.promised))
                return


def _timeout_error(
    message: str, names: list[int], phase: str, waited_s: float, promised: bool
) -> RankTimeoutError:
    if promised:
        message += ". The coordinator had begun to publish the checkpoint, which may yet appear"
    return RankTimeoutError(message, names, phase, waited_s, promised)


def _as_seen_in(call: _Call, error: RankTimeoutError) -> RankTimeoutError:
    """Returns the error of a call, given the error of a lost rank."""
    message = f"{error.args[0]}. It had not finished {call.phase}"
    return _timeout_error(message, list(error.ranks), call.phase, error.seconds, call.promised)


def _text_of(error: RankTimeoutError) -> bytes:
    return json.dumps(error.__reduce__()[1]).encode()


def _error_of(text: bytearray) -> RankTimeoutError:
    return RankTimeoutError(*json.loads(bytes(text)))


def _packed(values: Sequence[memoryview], numbers: array[int]) -> list[Any]:
    """Encodes an answer: the number of each rank's value, and each distinct value once."""
    new_number = {old: new for new, old in enumerate(dict.fromkeys(numbers))}
    used = [values[old] for old in new_number]
    return [
        _ANSWER_HEAD.pack(len(numbers), len(used)),
        array("Q", (new_number[old] for old in numbers)).tobytes(),
        array("Q", map(len, used)).tobytes(),
        *used,
    ]


def _unpacked(body: bytearray) -> tuple[list[memoryview], array[int]]:
    """Decodes an answer: the distinct values, and the number of each rank's value."""
    view, at = memoryview(body), _ANSWER_HEAD.size
    ranks, count = _ANSWER_HEAD.unpack_from(view)
    numbers, sizes = array("Q"), array("Q")
    for row, length in ((numbers, ranks), (sizes, count)):
        row.frombytes(view[at : at + length * row.itemsize])
        at += length * row.itemsize
    ends = list(accumulate(sizes, initial=at))
    return [view[begin:end] for begin, end in pairwise(ends)], numbers
