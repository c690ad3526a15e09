"""A rank's place in the tree of its group: one thread that passes messages on.

The thread owns the connections, and passes parts up and answers down whatever the rank itself does
meanwhile. So a rank that is late is told apart from one that is gone:

- A process that has ended closes its connections. Its neighbours notice at once, and every open
  call fails on all ranks. A machine that is switched off is noticed by TCP's keepalive, after about
  nine seconds.
- A rank that lives and does not come in time has a deadline. The coordinator knows which parts have
  come and names those that have not.
- A process that is frozen answers no ping. Then it is named, and not those below it in the tree,
  whose parts it has not passed on.
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
"""The phases in which all ranks write, and then wait for the coordinator to commit."""

Values = Sequence[bytes] | bytes
"""An answer: one value for each rank, or one for all. The same object is sent once."""

_PART = struct.Struct("<IddQ")  # Rank; its timeout; how long ago it came; bytes that follow.
_SCATTERED = struct.Struct("<QQ")  # How many ranks an answer is for, and how many values it has.

_PARTS, _ANSWER, _FAILED, _GONE, _PROMISE, _PROMISED, _PING, _PONG = range(8)

_PING_S = 1.0  # Between pings.
_PASS_ON_S = 0.05  # After so long parts are passed on although some are missing.
_CALLS = 4096  # So many calls are remembered, for ranks that come late to one that has failed.


@dataclass
class _Exchange:
    """One exchange of a call, as far as it has come to this rank."""

    phase: str = ""
    parts: dict[int, tuple[float, float, Any]] = field(default_factory=dict)
    """Of this rank and those below: timeout, time of coming, bytes. Those not passed on yet."""
    count: int = 0
    """How many parts have come."""
    future: Future[Any] | None = None
    """What this rank waits for."""
    came: float = 0.0
    timeout_s: float = 0.0
    passed: float = 0.0
    """When parts were passed on last."""
    complete: float = 0.0
    """When all parts were there, on the coordinator."""
    deadline: float = math.inf
    """When the coordinator ends the call: somebody has waited for all of its timeout then."""
    shortest_s: float = math.inf
    """The shortest timeout of those that have come."""

    def add(self, parts: dict[int, tuple[float, float, Any]]) -> None:
        """Takes parts of other ranks, or of this one."""
        self.parts.update(parts)
        self.count += len(parts)
        for timeout_s, came, _ in parts.values():
            self.deadline = min(self.deadline, came + timeout_s)
            self.shortest_s = min(self.shortest_s, timeout_s)


class _Call:
    """What this rank knows of a call."""

    def __init__(self) -> None:
        self.exchanges: dict[int, _Exchange] = {}
        self.phase = "beginning"
        self.error: RankTimeoutError | None = None
        self.promised = False
        """Whether the coordinator may commit without asking again."""
        self.claim: Future[None] | None = None
        self.awaited: set[int] = set()
        """The children that have not promised yet."""


class Node:
    """The thread of a rank of a group. It ends when nobody else refers to this object.

    Args:
        store: Where the ranks find each other.
        rank: This one, as the group numbers it. Rank 0 is the coordinator.
        names: The ranks of the group as the whole job numbers them.
        phase: What a rank has finished when it comes to connect, for messages.
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
        """Done when all neighbours are connected."""
        threading.Thread(
            target=_run,
            args=(self._loop, store, phase, timeout_s, self.connected),
            name="torch_ckpt-group",
            daemon=True,
        ).start()
        weakref.finalize(self, self._loop.stop)

    def exchange(
        self, call: int, number: int, phase: str, part: bytes, timeout_s: float
    ) -> Future[Any]:
        """Sends this rank's part up. Returns the answer; on the coordinator the parts of all."""
        future: Future[Any] = Future()
        self._loop.post(self._loop.begin, call, number, phase, part, timeout_s, future)
        return future

    def answer(self, call: int, number: int, values: Values) -> Future[None]:
        """Called by the coordinator: sends an answer down, unless the call has failed meanwhile."""
        future: Future[None] = Future()
        self._loop.post(self._loop.pass_down, call, number, values, future)
        return future

    def claim(self, call: int) -> Future[None]:
        """Called by the coordinator: done when every rank has promised not to give up for good."""
        future: Future[None] = Future()
        self._loop.post(self._loop.claim, call, future)
        return future

    def fail(self, call: int, error: RankTimeoutError) -> None:
        """Fails a call on all ranks, unless it has failed before."""
        self._loop.post(self._loop.fail, call, error)

    def abort(self) -> None:
        """Ends it, although it may not be connected yet."""
        self._loop.stop()

    def enter(self, call: int, phase: str) -> None:
        """Says what this rank does from now on, for messages."""
        self._loop.post(self._loop.enter, call, phase)

    def phase(self, call: int) -> tuple[str, bool]:
        """What this rank does in a call, and whether it has promised that it may be committed."""
        known = self._loop.calls.get(call)
        return ("beginning", False) if known is None else (known.phase, known.promised)


def _run(
    loop: _Loop, store: Callable[[], Store], phase: str, timeout_s: float, connected: Future[None]
) -> None:
    """The thread, which does not know the :class:`Node`: that would never end then."""
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
        loop.fail_all(CheckpointError(f"the thread of a group has failed: {error!r}"))
        raise
    finally:
        loop.close()


class _Loop(Loop):
    """What the thread does."""

    def __init__(self, rank: int, names: Sequence[int]) -> None:
        super().__init__()
        self.rank, self.names = rank, names
        self.calls: OrderedDict[int, _Call] = OrderedDict()
        self._pinged = 0.0
        self._parent: Peer | None = None
        self._children: dict[int, Peer] = {}

    def join(self, neighbours: Neighbours) -> None:
        """Takes the connections over."""
        self._tree, self._below = neighbours.tree, neighbours.below
        self._size_below = 1 + sum(map(len, neighbours.below.values()))
        if neighbours.parent is not None:
            self._parent = Peer(*neighbours.parent)
        self._children = {r: Peer(r, c) for r, c in neighbours.children.items()}
        for peer in (self._parent, *self._children.values()):
            if peer is not None:
                self.add(peer)

    def due(self) -> float | None:
        """Pings, passes on what has come, and ends what is late."""
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
            for exchange, found in list(call.exchanges.items()):
                if self._parent is None:
                    due = min(due, self._end_if_late(number, call, found, now))
                else:
                    if found.parts and now - found.passed >= _PASS_ON_S:
                        self._pass_up(number, exchange, found)
                    if found.parts:
                        due = min(due, found.passed + _PASS_ON_S)
                    self._end_if_silent(number, call, found, now)
        return max(due - time.monotonic(), 0.0)

    def fail_all(self, error: Exception) -> None:
        self.lost = error
        for call in self.calls.values():
            for exchange in call.exchanges.values():
                settle(exchange.future, error=error)
            settle(call.claim, error=error)

    def take(self, peer: Peer, message: Message) -> None:
        """A message has come."""
        kind, call, number, body = message
        if kind == _PARTS:
            self._take_parts(call, number, body)
        elif kind == _ANSWER:
            self._take_answer(call, number, body)
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

    def lose(self, peer: Peer) -> None:
        """A neighbour is gone."""
        name = self.names[peer.rank]
        text = f"rank {name} is gone: its process has ended, or its machine is out of reach"
        self._abort_group(RankTimeoutError(text, [name]))

    def _abort_group(self, error: RankTimeoutError, source: Peer | None = None) -> None:
        """Fails every call, now and later: a process group that has lost a rank stays without."""
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
        """This rank begins to do something."""
        self._call(number).phase = phase

    def begin(
        self,
        number: int,
        exchange: int,
        phase: str,
        part: bytes,
        timeout_s: float,
        future: Future[Any],
    ) -> None:
        """This rank has come to an exchange."""
        call = self._call(number)
        call.phase = phase
        if self.lost is not None and call.error is None:
            lost = self.lost
            call.error = _as_seen_in(call, lost) if isinstance(lost, RankTimeoutError) else None
            settle(future, error=call.error or lost)
        elif call.error is not None:
            settle(future, error=call.error)
        else:
            found = call.exchanges.setdefault(exchange, _Exchange())
            found.phase, found.future = phase, future
            found.came, found.timeout_s = time.monotonic(), timeout_s
            found.passed = found.passed or found.came
            self._add(number, exchange, found, {self.rank: (timeout_s, found.came, part)})

    def _take_parts(self, number: int, exchange: int, body: bytearray) -> None:
        call = self._call(number)
        if call.error is not None or self.lost is not None:
            return  # Whoever has sent it knows, or will soon.
        found = call.exchanges.setdefault(exchange, _Exchange())
        view, now = memoryview(body), time.monotonic()
        length = int.from_bytes(view[:2], "little")
        found.phase = found.phase or bytes(view[2 : 2 + length]).decode()
        found.passed = found.passed or now
        at = 2 + length
        parts = {}
        while at < len(view):
            rank, timeout_s, age_s, nbytes = _PART.unpack_from(view, at)
            at += _PART.size
            parts[rank] = timeout_s, now - age_s, view[at : at + nbytes]
            at += nbytes
        self._add(number, exchange, found, parts)

    def _add(self, number: int, exchange: int, found: _Exchange, parts: dict[int, Any]) -> None:
        found.add(parts)
        if found.count < self._size_below:
            return
        if self._parent is not None:
            self._pass_up(number, exchange, found)
        else:
            found.complete = time.monotonic()
            found.deadline = found.complete + found.shortest_s
            settle(found.future, [found.parts[rank][2] for rank in range(found.count)])

    def _pass_up(self, number: int, exchange: int, found: _Exchange) -> None:
        assert self._parent is not None
        phase, now = found.phase.encode(), time.monotonic()
        body: list[Any] = [len(phase).to_bytes(2, "little") + phase]
        for rank, (timeout_s, came, part) in found.parts.items():
            body += [_PART.pack(rank, timeout_s, now - came, len(part)), part]
        found.parts, found.passed = {}, now
        self.send(self._parent, _PARTS, number, exchange, *body)

    def pass_down(self, number: int, exchange: int, values: Values, future: Future[None]) -> None:
        """The coordinator's answer. Values that are one object travel once."""
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

    def _take_answer(self, number: int, exchange: int, body: bytearray) -> None:
        values, numbers = _unpacked(body)
        self._send_down(number, exchange, values, numbers)
        found = self._call(number).exchanges.pop(exchange, None)
        if found is not None:
            settle(found.future, values[numbers[0]])

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
        call = self._call(number)
        if call.error is not None or self.lost is not None:
            settle(future, error=call.error or self.lost)
            return
        call.claim = future
        self._promise(number)

    def _promise(self, number: int) -> None:
        """From now on, whoever gives the call up says that it may be committed."""
        call = self._call(number)
        if call.error is not None:
            return  # The coordinator learns of that, and not of a promise.
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

    # ---- What goes wrong ----

    def fail(self, number: int, error: RankTimeoutError, source: Peer | None = None) -> None:
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

    def _end_if_late(self, number: int, call: _Call, found: _Exchange, now: float) -> float:
        """Called on the coordinator, which knows who has come; returns when to look again."""
        assert self._tree is not None
        deadline = found.deadline + self._tree.height * _PASS_ON_S  # What has come is here then.
        if now < deadline:
            return deadline
        phase, late = found.phase, self._late(found, now)
        if found.complete:
            phase, late = COMMITTING if phase == WRITING else phase, [0]
            first = next((rank for rank in found.parts if rank), 0)
            since, timeout_s = found.complete, found.parts[first][0]
        else:
            first = min(found.parts, key=lambda rank: sum(found.parts[rank][:2]))
            timeout_s, since, _ = found.parts[first]
        names = [self.names[rank] for rank in late]
        message = (
            f"{listed_ranks(names)} slow, stuck or gone: not done {phase} {now - since:.1f} s "
            f"after rank {self.names[first]}, which waits for {timeout_s:g} s at most"
        )
        self.fail(number, _timeout_error(message, names, phase, now - since, call.promised))
        return deadline

    def _late(self, found: _Exchange, now: float) -> list[int]:
        """Those whose parts have not come; not those below one that is silent."""
        silent: set[int] = set()
        for child in self._children.values():
            silent.update(child.silent(now))
        assert self._tree is not None
        parents, late = self._tree.parents, []
        for rank in range(len(self.names)):
            if rank in found.parts:
                continue
            above = parents[rank]
            while above > 0 and above not in silent:
                above = parents[above]
            if above not in silent:
                late.append(rank)
        return late or sorted(silent)

    def _end_if_silent(self, number: int, call: _Call, found: _Exchange, now: float) -> None:
        """A rank gives up by itself only where those above it are frozen."""
        if found.future is None or self._parent is None:
            return
        for rank, silent_s in self._parent.silent(now).items():
            waited = min(silent_s, now - found.came)
            if waited >= found.timeout_s:
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
        message += ". It had begun to publish the checkpoint, which may yet appear"
    return RankTimeoutError(message, names, phase, waited_s, promised)


def _as_seen_in(call: _Call, error: RankTimeoutError) -> RankTimeoutError:
    """The error of a rank that is gone, in this call."""
    message = f"{error.args[0]}. It was not done {call.phase}"
    return _timeout_error(message, list(error.ranks), call.phase, error.seconds, call.promised)


def _text_of(error: RankTimeoutError) -> bytes:
    return json.dumps(error.__reduce__()[1]).encode()


def _error_of(text: bytearray) -> RankTimeoutError:
    return RankTimeoutError(*json.loads(bytes(text)))


def _packed(values: Sequence[memoryview], numbers: array[int]) -> list[Any]:
    """An answer: which value each rank gets, and the values that any gets, once each."""
    new_number = {old: new for new, old in enumerate(dict.fromkeys(numbers))}
    used = [values[old] for old in new_number]
    return [
        _SCATTERED.pack(len(numbers), len(used)),
        array("Q", (new_number[old] for old in numbers)).tobytes(),
        array("Q", map(len, used)).tobytes(),
        *used,
    ]


def _unpacked(body: bytearray) -> tuple[list[memoryview], array[int]]:
    view, at = memoryview(body), _SCATTERED.size
    ranks, count = _SCATTERED.unpack_from(view)
    numbers, sizes = array("Q"), array("Q")
    for row, length in ((numbers, ranks), (sizes, count)):
        row.frombytes(view[at : at + length * row.itemsize])
        at += length * row.itemsize
    ends = list(accumulate(sizes, initial=at))
    return [view[begin:end] for begin, end in pairwise(ends)], numbers
