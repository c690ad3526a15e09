"""Gathers, scatters and broadcasts bytes along the tree of a group, rank to rank.

Every exchange follows a roll call, so all ranks enter it or none does. A rank passes on what it has
received as it is: only the root and those for whom it is meant look into it. A thread of its own
carries an exchange out, while the caller looks whether the call goes on: so no rank waits for one
that is gone, and what was begun is not left half-done if that one comes after all.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from hashlib import blake2b
from itertools import accumulate, pairwise
from pathlib import Path
from socket import gethostname
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from torch_ckpt.coordination.roll_call import LOOKS_PER_S, RollCalls
from torch_ckpt.coordination.tree import FAN_OUT, Tree
from torch_ckpt.errors import CheckpointError

__all__ = ["TreeExchange"]

T = TypeVar("T")

_FIRST_NBYTES = 16 << 10
"""What a first message is long: over loopback it takes no longer than one of 16 bytes."""

_HEAD = struct.Struct("<QQ")  # Which exchange this is of; how long its body is.
_PART = struct.Struct("<QQ")  # In a gathered body, before each part: its rank and its length.
_SCATTERED = struct.Struct("<QQ")  # How many ranks a scattered body is for, and how many values.

# Tags begin where neither training nor torch puts its own.
_FIRST_TAG, _TAGS = 1 << 30, 1 << 29

_FIRST_LOOK_S = 0.2  # An exchange is most often over before anybody looks whether it goes on.
_LONGEST_PAUSE_S = 1.0
_LEAST_PATIENCE_S = 2.0  # For ranks that enter one after another, and for what they then do.
_PATIENCE_PER_LEVEL_S = 1.0  # More than a rank needs to tell the others whom it has waited for.
_NEAREST = 0  # The level of those who wait for a rank that has nobody to wait for.


class TreeExchange:
    """The exchanges of one save or load, on one rank; owned by one thread.

    Args:
        calls: The roll calls between which they are held.
        root: The rank of the group that gathers, scatters and broadcasts.

    Every method raises :class:`~torch_ckpt.RankTimeoutError` if a rank is gone or stuck, or if
    somebody has given the call up.

    Example::

        calls.wait_for_all("planning")
        parts = TreeExchange(calls, root=0).gather(pickle.dumps(plan))
    """

    def __init__(self, calls: RollCalls, *, root: int, fan_out: int | None = None) -> None:
        self._calls, self._root, self._fan_out = calls, root, fan_out or FAN_OUT

    def gather(self, part: bytes) -> list[memoryview] | None:
        """Returns the parts of all ranks on the root, ``None`` elsewhere."""

        def run(passing: _Passing) -> list[memoryview] | None:
            body = passing.up(part)
            return passing.parts(body) if passing.is_root else None

        return self._watched(run)

    def all_gather(self, part: bytes) -> list[memoryview]:
        """Returns the parts of all ranks."""
        return self._watched(
            lambda passing: passing.parts(passing.down(passing.up(part), after_up=True))
        )

    def broadcast(self, value: bytes | None) -> memoryview:
        """Returns what the root has given."""

        def run(passing: _Passing) -> memoryview:
            return memoryview(passing.down(None if value is None else bytearray(value)))

        return self._watched(run)

    def scatter(self, parts: Sequence[bytes] | None) -> memoryview:
        """Returns this rank's of the parts that the root has given.

        One object that stands for several ranks is sent once, to where their ways part.
        """
        return self._watched(lambda passing: passing.scattered(parts))

    def _watched(self, run: Callable[[_Passing], T]) -> T:
        passing = _Passing(self._calls, self._root, self._fan_out)
        outcome: Future[T] = Future()

        def carry_out() -> None:
            try:
                passing.meet()
                outcome.set_result(run(passing))
            except BaseException as error:
                outcome.set_exception(error)
            finally:
                ended.set()

        ended = threading.Event()
        threading.Thread(target=carry_out, name="torch_ckpt-tree", daemon=True).start()
        pause = max(_FIRST_LOOK_S, len(self._calls.ranks) / LOOKS_PER_S)
        while not ended.wait(pause):
            self._calls.look()
            waited = time.monotonic() - passing.since
            if waited >= passing.patience_s:
                raise self._calls.give_up_on(*passing.late(waited), waited)
            pause = min(2 * pause, max(pause, _LONGEST_PAUSE_S))
        try:
            return outcome.result()
        except _LostPeerError as error:
            raise self._calls.give_up_on(error.ranks, str(error)) from error


class _LostPeerError(Exception):
    """A message could not be passed to or from these ranks, as ``dist.get_rank()`` counts."""

    def __init__(self, ranks: list[int], message: str) -> None:
        super().__init__(message)
        self.ranks = ranks


class _Passing:
    """One exchange: what this rank passes to its parent and its children, and whom it waits for.

    The thread that carries it out owns it; the one that watches reads ``since``,
    :attr:`patience_s` and :meth:`late`.
    """

    def __init__(self, calls: RollCalls, root: int, fan_out: int) -> None:
        self._calls, self._group, self._ranks = calls, calls.group, calls.ranks
        self._root, self._fan_out = root, fan_out
        self._rank = dist.get_rank(calls.group)
        self.is_root = self._rank == root
        self._key = zlib.crc32(calls.key.encode())
        # Where torch would put an object; by number, since another thread has its own idea of it.
        self._device = torch.empty(0, device=_get_object_coll_device(calls.group)).device
        self._awaited: tuple[int, ...] | None = None
        """``None`` as this rank does something itself; empty if nobody knows who is late."""
        self._level, self._levels = _NEAREST, _NEAREST
        self.since = time.monotonic()

    @property
    def patience_s(self) -> float:
        """How long this rank waits for a message.

        Where one rank is stuck, others wait for each other. The nearest to it is the first to say
        so; all of them before those that are done and wait at the next roll call for everybody.
        """
        before_roll_call = (self._levels - self._level) * _PATIENCE_PER_LEVEL_S
        least = _LEAST_PATIENCE_S + self._level * _PATIENCE_PER_LEVEL_S
        return max(self._calls.timeout_s - before_roll_call, least)

    def late(self, waited: float) -> tuple[list[int], str]:
        """The ranks that this one waits for, and a message that says so."""
        awaited, this = self._awaited, dist.get_rank()
        if awaited is None:
            return [this], f"rank {this} is slow or stuck: no message from it for {waited:.1f} s"
        late = [self._ranks[peer] for peer in awaited]
        return late, (
            f"{_named(late)} slow, stuck or gone: rank {this} has waited for {waited:.1f} s for a "
            f"message, in a tree of fan-out {self._fan_out}"
        )

    def meet(self) -> None:
        """Learns the tree. The first time, all ranks of the group meet for it."""
        known = _known.get(self._group)
        if known is None:
            own = torch.tensor([_node_id()], dtype=torch.int64, device=self._device)
            nodes = [torch.empty_like(own) for _ in self._ranks]
            with self._waiting_for((), _NEAREST):
                dist.all_gather(nodes, own, group=self._group)
            known = _known[self._group] = _Known(torch.cat(nodes).tolist())
        self._tree = known.tree(self._root, self._fan_out)
        self._levels = 2 * self._tree.height + 3

    def up(self, part: bytes) -> bytearray:
        """Returns this rank's part and those of all below it; passes them on to the parent."""
        tree = self._tree
        children = tree.children[self._rank]
        level = tree.height - tree.depths[self._rank]
        firsts = self._received_firsts(children, level)
        nbytes = [self._body_nbytes(first) for first in firsts]
        own = _PART.size + len(part)
        body = bytearray(own + sum(nbytes))
        _PART.pack_into(body, 0, self._rank, len(part))
        body[_PART.size : own] = part
        ends = list(accumulate(nbytes, initial=own))
        places = [memoryview(body)[begin:end] for begin, end in pairwise(ends)]
        self._receive_bodies(places, firsts, children, level)
        if not self.is_root:
            self._send([body], [tree.parents[self._rank]], tree.height + 1)
        return body

    def down(self, body: bytearray | None, *, after_up: bool = False) -> bytearray:
        """Returns what the root gives, and passes it on to the children."""
        tree = self._tree
        children = tree.children[self._rank]
        if not self.is_root:
            body = self._received_from_parent(tree.height + 1 if after_up else 0)
        assert body is not None
        self._send([body] * len(children), children, _NEAREST)
        return body

    def parts(self, body: bytearray) -> list[memoryview]:
        """The parts in a gathered body, by rank."""
        found: dict[int, memoryview] = {}
        view, at = memoryview(body), 0
        while at < len(view):
            rank, nbytes = _PART.unpack_from(view, at)
            at += _PART.size
            found[rank] = view[at : at + nbytes]
            at += nbytes
        if len(found) != len(self._ranks):
            raise CheckpointError(f"{len(found)} parts have come of {len(self._ranks)}")
        return [found[rank] for rank in range(len(self._ranks))]

    def scattered(self, parts: Sequence[bytes] | None) -> memoryview:
        """Returns this rank's part, and passes to the children those of the ranks below them."""
        tree = self._tree
        children = tree.children[self._rank]
        if not self.is_root:
            values, numbers = _unpacked(self._received_from_parent())
        else:
            assert parts is not None
            number_of = {key: number for number, key in enumerate(dict.fromkeys(map(id, parts)))}
            order = tree.subtree(self._rank)
            numbers = array("Q", (number_of[id(parts[rank])] for rank in order))
            values = list({id(part): memoryview(part) for part in parts}.values())
        bodies, begin = [], 1
        for child in children:
            end = begin + sum(1 for _ in tree.subtree(child))
            bodies.append(_packed(values, numbers[begin:end]))
            begin = end
        if begin != len(numbers):
            raise CheckpointError(f"{len(numbers)} parts were sent where {begin} belong")
        self._send(bodies, children, _NEAREST)
        return values[numbers[0]]

    @contextlib.contextmanager
    def _waiting_for(self, peers: Sequence[int], level: int) -> Iterator[None]:
        """Notes who is waited for; the level is how many others may wait for each other below."""
        self._awaited, self._level, self.since = tuple(peers), level, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            lost = [self._ranks[peer] for peer in peers]
            message = f"{_named(lost)} gone or out of reach, rank {dist.get_rank()} finds: {error}"
            raise _LostPeerError(lost, message) from error
        finally:
            self._awaited, self._level, self.since = None, _NEAREST, time.monotonic()

    def _received_firsts(self, peers: Sequence[int], level: int) -> list[bytearray]:
        firsts = [bytearray(_FIRST_NBYTES) for _ in peers]
        self._receive([memoryview(first) for first in firsts], peers, 0, level)
        return firsts

    def _received_from_parent(self, level: int = 0) -> bytearray:
        peers = [self._tree.parents[self._rank]]
        level += self._tree.depths[self._rank]
        firsts = self._received_firsts(peers, level)
        body = bytearray(self._body_nbytes(firsts[0]))
        self._receive_bodies([memoryview(body)], firsts, peers, level)
        return body

    def _body_nbytes(self, first: bytearray) -> int:
        key, nbytes = _HEAD.unpack_from(first)
        if key != self._key:
            raise CheckpointError("a message of another exchange was received")
        assert isinstance(nbytes, int)
        return nbytes

    def _receive_bodies(
        self,
        places: Sequence[memoryview],
        firsts: Sequence[bytearray],
        peers: Sequence[int],
        level: int,
    ) -> None:
        """Fills places with the bodies of which the first messages are there."""
        room = _FIRST_NBYTES - _HEAD.size
        rests: dict[int, memoryview] = {}
        for peer, first, place in zip(peers, firsts, places, strict=True):
            place[:room] = memoryview(first)[_HEAD.size :][: len(place)]
            if len(place) > room:
                rests[peer] = place[room:]
        self._receive(list(rests.values()), list(rests), 1, level)

    def _send(self, bodies: Sequence[bytearray], peers: Sequence[int], level: int) -> None:
        room = _FIRST_NBYTES - _HEAD.size
        firsts, rests = [], {}
        for peer, body in zip(peers, bodies, strict=True):
            first = bytearray(_FIRST_NBYTES)
            _HEAD.pack_into(first, 0, self._key, len(body))
            inline = memoryview(body)[:room]
            first[_HEAD.size : _HEAD.size + len(inline)] = inline
            firsts.append(torch.frombuffer(first, dtype=torch.uint8))
            if len(body) > room:
                rest = torch.frombuffer(body, dtype=torch.uint8, offset=room)
                rests[peer] = rest.to(self._device)
        sent = [first.to(self._device) for first in firsts]
        sending = self._begun(dist.isend, sent, peers, 0)
        sending += self._begun(dist.isend, list(rests.values()), list(rests), 1)
        self._finish(sending, level)

    def _receive(
        self, into: Sequence[memoryview], peers: Sequence[int], number: int, level: int
    ) -> None:
        places = [torch.frombuffer(place, dtype=torch.uint8) for place in into]
        received = [place.to(self._device) for place in places]
        self._finish(self._begun(dist.irecv, received, peers, number), level)
        for place, found in zip(places, received, strict=True):
            if found is not place:  # It is on a device.
                place.copy_(found)

    def _begun(
        self,
        operation: Callable[..., dist.Work | None],
        tensors: Sequence[torch.Tensor],
        peers: Sequence[int],
        number: int,
    ) -> list[tuple[dist.Work, Sequence[int]]]:
        """Begins one message to or from each peer; returns what to wait for, and for whom.

        All together where the backend can: NCCL makes a communicator for each pair of ranks that
        meets by itself.
        """
        # A message of an exchange that was given up must not meet one of another: gloo ends the
        # process if one is longer than who receives it expects.
        tag = _FIRST_TAG + 2 * (self._key % (_TAGS // 2)) + number
        messages = [
            (peer, dist.P2POp(operation, tensor, group=self._group, tag=tag, group_peer=peer))
            for tensor, peer in zip(tensors, peers, strict=True)
        ]
        together = self._group._get_backend(self._device).supports_coalescing
        begun: list[tuple[dist.Work, Sequence[int]]] = []
        for some in [messages] if together and messages else [[one] for one in messages]:
            whom = [peer for peer, _ in some]
            with self._waiting_for(whom, _NEAREST):
                works = dist.batch_isend_irecv([message for _, message in some])
            begun += [(work, whom) for work in works]
        return begun

    def _finish(self, begun: list[tuple[dist.Work, Sequence[int]]], level: int) -> None:
        for work, peers in begun:
            with self._waiting_for(peers, level):
                work.wait()


def _packed(values: Sequence[memoryview], numbers: Sequence[int]) -> bytearray:
    """A scattered body: which value each rank gets, and the values that any gets, once each."""
    new_number = {old: new for new, old in enumerate(dict.fromkeys(numbers))}
    used = [values[old] for old in new_number]
    body = bytearray(_SCATTERED.pack(len(numbers), len(used)))
    body += array("Q", (new_number[old] for old in numbers)).tobytes()
    body += array("Q", map(len, used)).tobytes()
    body += b"".join(used)
    return body


def _unpacked(body: bytearray) -> tuple[list[memoryview], array[int]]:
    view, at = memoryview(body), _SCATTERED.size
    ranks, count = _SCATTERED.unpack_from(view)
    numbers, sizes = array("Q"), array("Q")
    for row, length in ((numbers, ranks), (sizes, count)):
        row.frombytes(view[at : at + length * row.itemsize])
        at += length * row.itemsize
    ends = list(accumulate(sizes, initial=at))
    return [view[begin:end] for begin, end in pairwise(ends)], numbers


class _Known:
    """What the ranks of a group have told each other once: on which node each is."""

    def __init__(self, nodes: list[int]) -> None:
        self._nodes = nodes
        self._trees: dict[tuple[int, int], Tree] = {}

    def tree(self, root: int, fan_out: int) -> Tree:
        key = root, fan_out
        if key not in self._trees:
            self._trees[key] = Tree.over(self._nodes, root=root, fan_out=fan_out)
        return self._trees[key]


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, _Known] = weakref.WeakKeyDictionary()


def _node_id() -> int:
    """Tells this node from others: containers of one machine are as near as its processes.

    Asked of each rank, and not reckoned from ``LOCAL_WORLD_SIZE``: nodes may be uneven, and the
    ranks of a group scattered over them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else gethostname()
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _named(ranks: list[int]) -> str:
    if not ranks:
        return "a rank is"
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"one of ranks {ranks} is"
