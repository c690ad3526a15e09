"""Connects each rank of a group to its parent in a tree.

This is the only use of the process group's store. Each rank writes its address to the store. The
coordinator builds the tree, and writes each rank's place in the tree to the store.

``torch.distributed.elastic.utils.store`` has barriers that name missing ranks. They are unsuitable
for three reasons. A rank does not handle signals while it waits in the store. It waits for the
whole timeout even if another rank has failed. And every rank reads the values of all ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from torch.distributed.distributed_c10d import Store

from torch_ckpt.coordination.addresses import node_id, own_addresses, reachable, refuses
from torch_ckpt.coordination.contributions import decoded_error, encoded_error
from torch_ckpt.coordination.handshake import Dialling, keep_alive
from torch_ckpt.coordination.listeners import Listeners
from torch_ckpt.coordination.tree import FAN_OUT, Tree
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import RankTimeoutError, listed_ranks
from torch_ckpt.process_state import PROCESS

__all__ = ["Deadline", "Neighbours", "connect", "refuse"]

_GRACE_S = 2.0  # Extra time after the deadline, in which the coordinator names the late ranks.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.2
_IDLE_PAUSE_S = 2.0  # Longest pause while this rank does not wait for the connection.
_DIAL_S = 5.0  # Time for one address of the parent, before the next one is tried as well.
_MOST_ATTEMPTS = 3  # At one address of the parent, if it closes the connection or is silent.
_PROBE_S = 3.0  # Interval at which ranks that have written their addresses are probed.
_PROBE_ROUND_S = 1.0  # Time for the probes of one round. The next round continues where it ended.
_WATCHERS = 16  # Number of ranks that probe the coordinator.
_PLACED = "placed"

_UNACKNOWLEDGED_MS = 9000  # As long as `keep_alive` takes.


class Deadline:
    """The deadline of a wait.

    ``at`` is the time by the monotonic clock: infinite until a caller begins to wait. ``phase`` is
    the phase in which the caller waits, for messages.
    """

    def __init__(self, phase: str) -> None:
        self.at = self.timeout_s = math.inf
        self.began = time.monotonic()
        self.phase = phase

    @property
    def is_set(self) -> bool:
        """Whether a caller waits."""
        return self.at < math.inf

    @property
    def remaining_s(self) -> float:
        """Seconds until the end."""
        return self.at - time.monotonic()

    def begin(self, timeout_s: float, phase: str) -> None:
        """Ends the wait within ``timeout_s`` seconds from now."""
        now = time.monotonic()
        if now + timeout_s < self.at:
            self.began, self.timeout_s, self.phase = now, timeout_s, phase
            self.at = now + timeout_s


@dataclass(frozen=True)
class Neighbours:
    """The connections of a rank. Ranks are numbered as in the group.

    ``parent`` is the rank of the parent and the connection to it; ``None`` on the coordinator.
    ``tree`` is set only on the coordinator. ``below`` contains all ranks of each child's subtree.
    ``error`` is the reason why a neighbour is not connected, or ``None``.
    """

    parent: tuple[int, socket.socket] | None
    children: dict[int, socket.socket]
    below: dict[int, list[int]]
    tree: Tree | None
    error: RankTimeoutError | None = None


def connect(
    store: Store,
    rank: int,
    names: Sequence[int],
    deadline: Deadline,
    is_aborted: Callable[[], bool],
) -> Neighbours:
    """Connects this rank to its neighbours in the tree. Every rank of the group calls it.

    If a rank ends after it has written its address, the others detect that its system refuses
    connections to its port. That takes at most ten seconds, unless the group has thousands of
    ranks.

    Nothing else uses the store. ``rank`` is the rank in the group; 0 is the coordinator. ``names``
    are global ranks, for messages. ``is_aborted`` returns whether this rank has stopped waiting
    because the store did not answer in time. If a neighbour has ended or is unreachable, the result
    contains the other connections, and the error to send over them. Raises RankTimeoutError on all
    ranks if one did not arrive in time, or has ended, and RuntimeError if the store does not
    answer.
    """
    waiting = _Waiting(store, names, rank, deadline, is_aborted)
    with contextlib.closing(_listening(store, waiting)) as listeners:
        address = {
            "node": node_id(),
            "at": listeners.addresses,
            "secret": listeners.secret,
        }
        store.set(f"{rank}", json.dumps(address))
        waiting.fail_if_aborted()
        store.add("count", 1)
        tree = _place_all(store, len(names), waiting) if rank == 0 else None
        place = waiting.for_place()
        below = {child[0]: child for child in place["below"]}
        parent, error = None, None
        if place["parent"] is not None:
            number = place["parent"]
            try:
                parent = number, _dialled(place["address"], rank, names[number], waiting)
            except RankTimeoutError as caught:
                error = caught
        try:
            children, missing = _accept(listeners, set(below), waiting)
        except BaseException:
            if parent is not None:
                parent[1].close()
            raise
    for key in (f"{rank}", f"place/{rank}"):
        with contextlib.suppress(RuntimeError):
            store.delete_key(key)
    return Neighbours(parent, children, below, tree, error or missing)


def refuse(store: Store, rank: int, names: Sequence[int], phase: str, reason: str) -> None:
    """Raises a RankTimeoutError on all connecting ranks, because this rank cannot connect.

    Nothing else uses the store. ``phase`` is the phase that a rank must finish before it connects.
    Raises RuntimeError if the store does not answer.
    """
    text = f"rank {names[rank]} cannot connect to the other ranks: {reason}"
    waiting = _Waiting(store, names, rank, Deadline(phase), lambda: False)
    waiting.fail(RankTimeoutError(text, [names[rank]], phase))
    raise RankTimeoutError(text, [names[rank]], phase)


class _Waiting:
    """Waits for other ranks in the store, with a deadline."""

    def __init__(
        self,
        store: Store,
        names: Sequence[int],
        rank: int,
        deadline: Deadline,
        is_aborted: Callable[[], bool],
    ) -> None:
        self.deadline, self.is_aborted = deadline, is_aborted
        self.names, self.rank = names, rank
        self._store = store
        self._addresses: dict[int, dict[str, Any]] = {}  # Addresses of the ranks that are probed.
        self._reached: set[int] = set()  # Ranks that have accepted a probe.
        self._refused: set[int] = set()  # Ranks that have refused their last probe.
        self._probed = time.monotonic()
        self._next_probe = 0
        self._long: LongWait | None = None  # Begins when this rank begins to wait.
        self._neighbours: Sequence[int] = ()  # The ranks to which this rank is connecting.

    @property
    def phase(self) -> str:
        """The phase that a rank must finish before it connects."""
        return self.deadline.phase

    def fail_if_aborted(self) -> None:
        """Raises an error on all ranks if this one has stopped waiting."""
        if self.is_aborted():
            rank = self.names[self.rank]
            text = f"rank {rank} lost the store of its process group while {self.phase}"
            self.fail(RankTimeoutError(text, phase=self.phase))

    def for_count(self, size: int) -> None:
        """Waits until ``size`` ranks have written their addresses."""
        for _ in self._polls():
            if self._is_decided() or self._store.add("count", 0) >= size:
                return
            self._fail_if_refusing(range(1, size))
        late = self._missing(range(size))
        if late:
            self._fail_for(late)

    def for_place(self) -> dict[str, Any]:
        """Waits for this rank's place in the tree."""
        for _ in self._polls(_GRACE_S):
            if self._is_decided():
                break
            if 0 < self.rank <= _WATCHERS:
                self._fail_if_refusing([0])
        else:
            self._fail_for(self._missing(range(len(self.names))) or [0])
        place: dict[str, Any] = json.loads(self._store.get(f"place/{self.rank}"))
        return place

    def _is_decided(self) -> bool:
        """Returns whether all places are assigned; raises the error if a rank has failed."""
        if not self._store.check(["outcome"]):
            return False
        outcome = self._store.get("outcome").decode()
        if outcome != _PLACED:
            raise decoded_error(outcome)
        return True

    def _polls(self, grace_s: float = 0.0) -> Iterator[None]:
        """Yields at increasing intervals until ``grace_s`` seconds after the deadline."""
        pause = _SHORTEST_PAUSE_S
        while True:
            yield
            self.fail_if_aborted()
            remaining = self.deadline.remaining_s + grace_s
            if remaining <= 0:
                return
            self.log()
            time.sleep(min(pause, remaining))
            longest = _LONGEST_PAUSE_S if self.deadline.is_set else _IDLE_PAUSE_S
            pause = min(1.2 * pause, longest)

    def log(self) -> None:
        """Logs the ranks for which this rank has waited long, unless it merely connects in advance.

        The first rank names all missing ranks, and a few other ranks name the first rank.
        """
        if self.deadline.is_set:
            is_named = self.rank <= _WATCHERS
            self._long = self._long or LongWait(self._awaited, is_named=is_named)
            self._long.log()

    def log_for(self, neighbours: Sequence[int]) -> None:
        """From now on, logs the neighbours for which this rank has waited long, by their names."""
        self._neighbours = neighbours
        self.log()

    def _awaited(self) -> str:
        if self._neighbours:
            return f"ranks to connect: {listed_ranks(self._neighbours)} still {self.phase}"
        ranks = range(len(self.names)) if self.rank == 0 else [0]
        late = [self.names[rank] for rank in self._missing(ranks)]
        return f"ranks to connect: {listed_ranks(late)} still {self.phase}" if late else ""

    def _fail_if_refusing(self, ranks: Sequence[int]) -> None:
        """Raises an error on all ranks if one has ended after writing its address."""
        gone = self.refusing(ranks)
        if gone and not self._is_decided():
            self.fail(self._error_of(gone))

    def refusing(self, ranks: Sequence[int]) -> list[int]:
        """Returns ranks that have refused two probes in a row, because their processes have ended.

        A firewall may refuse connections between machines. So ranks on other machines count only if
        they have accepted a probe before.
        """
        began = time.monotonic()
        if began - self._probed < _PROBE_S:
            return []
        missing = set(self._missing(ranks))
        written = [rank for rank in ranks if rank not in missing]
        new = [rank for rank in written if rank not in self._addresses]
        if new:
            values = self._store.multi_get([f"{rank}" for rank in new])
            self._addresses.update(zip(new, map(json.loads, values), strict=True))
        # A round may be too short for all ranks. Those that have refused are probed first.
        start = self._next_probe % max(len(written), 1)
        order = sorted(written[start:] + written[:start], key=lambda r: r not in self._refused)
        gone = []
        for rank in order:
            self._next_probe += rank not in self._refused
            node = self._addresses[rank]["node"]
            is_here = node == node_id()
            if not refuses(reachable(self._addresses[rank]["at"], node)):
                self._refused.discard(rank)
                self._reached.add(rank)
            elif rank in self._refused:
                gone.append(rank)
            elif is_here or rank in self._reached:
                self._refused.add(rank)
            if time.monotonic() - began > _PROBE_ROUND_S:
                break
        self._probed = time.monotonic()
        return sorted(gone)

    def _error_of(self, gone: list[int]) -> RankTimeoutError:
        names = [self.names[rank] for rank in gone]
        host, port = self._addresses[gone[0]]["at"][0]
        verb = "it refuses" if len(gone) == 1 else "the first refuses"
        text = f"{listed_ranks(names)} gone: {verb} connections at {host}:{port} while {self.phase}"
        return RankTimeoutError(text, names, self.phase)

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks without an address, by bisection, because usually few are missing."""
        if not ranks or self._store.check([f"{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return [ranks[0]]
        half = len(ranks) // 2
        return self._missing(ranks[:half]) + self._missing(ranks[half:])

    def _fail_for(self, late: list[int]) -> None:
        waited = time.monotonic() - self.deadline.began
        names = [self.names[rank] for rank in late]
        text = (
            f"{listed_ranks(names)} slow, stuck or gone: {self.phase} not finished {waited:.1f} s "
            f"after rank {self.names[self.rank]}, whose timeout is {self.deadline.timeout_s:g} s"
        )
        self.fail(RankTimeoutError(text, names, self.phase, waited))

    def fail(self, error: RankTimeoutError) -> None:
        """Raises the same error on all ranks, unless all places are already assigned."""
        outcome = self._store.compare_set("outcome", "", encoded_error(error)).decode()
        if outcome != _PLACED:
            raise decoded_error(outcome)


def _place_all(store: Store, size: int, waiting: _Waiting) -> Tree:
    """Builds the tree, and writes each rank's place in the tree to the store."""
    waiting.for_count(size)
    addresses = [json.loads(value) for value in store.multi_get([f"{r}" for r in range(size)])]
    tree = Tree.over([address["node"] for address in addresses], fan_out=FAN_OUT)
    for rank, parent in enumerate(tree.parents):
        place = {
            "parent": parent if parent >= 0 else None,
            "address": addresses[parent] if parent >= 0 else None,
            "below": [list(tree.subtree(child)) for child in tree.children[rank]],
        }
        store.set(f"place/{rank}", json.dumps(place))
    store.compare_set("outcome", "", _PLACED)
    return tree


def _listening(store: Store, waiting: _Waiting) -> Listeners:
    """Returns the sockets at which this rank listens; raises an error on all ranks on failure."""
    name = waiting.names[waiting.rank]
    try:
        return Listeners([(host, 0) for host in own_addresses(store)], name)
    except OSError as error:
        text = f"rank {name} cannot listen for the other ranks: {error}"
        waiting.fail(RankTimeoutError(text, [name], waiting.phase))
        raise


def _dialled(address: dict[str, Any], rank: int, parent: int, waiting: _Waiting) -> socket.socket:
    """Connects to the parent, at its first address that confirms the handshake.

    The kernel accepts a connection even if the parent is not running for a while. And another
    program may listen at an address. So a silent connection remains open until the deadline while
    other addresses are tried. The parent confirms only one of the connections. If the parent closes
    a connection, its address is tried again: the parent did not receive the proof of this rank in
    time, or had too many connections. An address that does not answer is tried again, too: the
    network may have lost packets.
    """
    untried = [(host, port) for host, port in reachable(address["at"], address["node"])]
    attempts = Counter(untried)
    silent: dict[socket.socket, tuple[Dialling, tuple[str, int]]] = {}
    failures: list[str] = []
    dialled_at = -math.inf

    def failed(place: tuple[str, int], error: OSError) -> None:
        attempts[place] += 1
        may_succeed = isinstance(error, (ConnectionResetError, TimeoutError))
        if may_succeed and attempts[place] <= _MOST_ATTEMPTS:
            untried.append(place)
        else:
            failures.append(f"{place[0]}: {error.strerror or error}")

    try:
        while untried or silent:
            waiting.log_for([parent])
            remaining_s = waiting.deadline.remaining_s + _GRACE_S
            if remaining_s <= 0 or waiting.is_aborted():
                failures += [f"{host}: it does not answer" for _, (host, _) in silent.values()]
                break
            if untried and (not silent or time.monotonic() - dialled_at > _DIAL_S):
                place = untried.pop(0)
                dialled_at = time.monotonic()
                try:
                    dialling = _dial(place, min(_DIAL_S, remaining_s), address["secret"], rank)
                    silent[dialling.connection] = dialling, place
                except OSError as error:
                    failed(place, error)
                continue
            for connection in wait([*silent], min(remaining_s, _LONGEST_PAUSE_S)):
                assert isinstance(connection, socket.socket)
                dialling, place = silent.pop(connection)
                try:
                    if dialling.advance():
                        return connection
                    silent[connection] = dialling, place
                    continue
                except OSError as error:
                    failed(place, error)
                connection.close()
    finally:
        for connection in silent:
            connection.close()
    reason = "; ".join(failures) or (
        f"this machine cannot reach its addresses {[host for host, _ in address['at']]}; set "
        "GLOO_SOCKET_IFNAME to a network that all ranks share"
    )
    raise RankTimeoutError(f"cannot connect to rank {parent}: {reason}", [parent], waiting.phase)


def _dial(place: tuple[str, int], timeout_s: float, secret: str, rank: int) -> Dialling:
    connection = PROCESS.own(_prepared(socket.create_connection(place, timeout_s)))
    try:
        return Dialling(connection, secret, rank)
    except OSError:
        connection.close()
        raise


def _accept(
    listeners: Listeners, expected: set[int], waiting: _Waiting
) -> tuple[dict[int, socket.socket], RankTimeoutError | None]:
    """Accepts the connections of the children.

    Returns them, and an error if a child has ended or does not arrive in time.
    """
    children: dict[int, socket.socket] = {}
    while missing := sorted(expected - children.keys()):
        waiting.log_for([waiting.names[child] for child in missing])
        remaining_s = waiting.deadline.remaining_s + _GRACE_S
        accepted = listeners.accepted(missing, max(min(remaining_s, _PROBE_S), 0.01))
        for child, connection in accepted.items():
            children[child] = _prepared(connection)
        if accepted:
            continue
        if waiting.is_aborted():
            remaining_s = 0.0
        gone = missing if remaining_s <= _PROBE_S else waiting.refusing(missing)
        if gone:
            late = [waiting.names[child] for child in gone]
            reason = f"not connected to rank {waiting.names[waiting.rank]}"
            text = f"{listed_ranks(late)} gone or unreachable: {reason}"
            return children, RankTimeoutError(text, late, waiting.phase)
    return children, None


def _prepared(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    connection.setblocking(False)
    return keep_alive(connection)
