"""Connects each rank of a group to its parent in a tree.

The store of the process group is used for nothing else. Each rank writes its address to the store.
The coordinator builds the tree, and writes each rank's place in the tree to the store.

``torch.distributed.elastic.utils.store`` has barriers that name missing ranks. They are unsuitable
here for three reasons. A rank waits in the store without handling signals. It waits for its whole
timeout even if another rank has failed. And every rank reads the values of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from torch_ckpt.coordination.tree import FAN_OUT, Tree
from torch_ckpt.errors import RankTimeoutError, listed_ranks

__all__ = ["Neighbours", "connect", "own_addresses", "this_machine"]

_GRACE_S = 2.0  # Extra time after the deadline, in which the coordinator names the late ranks.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.2
_DIAL_S = 5.0  # Connection timeout of one address of the parent.
_PLACED = "placed"
_HELLO = struct.Struct("<16sI")  # The parent's secret, the rank that connects.

# The kernel detects a machine without power after about nine seconds.
_KEEPALIVE = {
    socket.SO_KEEPALIVE: (socket.SOL_SOCKET, 1),
    socket.TCP_KEEPIDLE: (socket.IPPROTO_TCP, 3),
    socket.TCP_KEEPINTVL: (socket.IPPROTO_TCP, 2),
    socket.TCP_KEEPCNT: (socket.IPPROTO_TCP, 3),
    socket.TCP_USER_TIMEOUT: (socket.IPPROTO_TCP, 9000),
    socket.TCP_NODELAY: (socket.IPPROTO_TCP, 1),
}


@dataclass(frozen=True)
class Neighbours:
    """The connections of a rank. Ranks are numbered as in the group.

    Attributes:
        parent: The parent's rank and the connection to it; ``None`` on the coordinator.
        children: The connection to each child, by rank.
        below: All ranks of each child's subtree, by the child's rank.
        tree: The tree of the group; ``None`` except on the coordinator.
    """

    parent: tuple[int, socket.socket] | None
    children: dict[int, socket.socket]
    below: dict[int, list[int]]
    tree: Tree | None


def connect(
    store: Store,
    rank: int,
    names: Sequence[int],
    phase: str,
    timeout_s: float,
    is_aborted: Callable[[], bool],
) -> Neighbours:
    """Connects this rank to its neighbours in the tree. Every rank of the group calls it.

    Args:
        store: A store that nothing else uses.
        rank: This rank, as the group numbers it. Rank 0 is the coordinator.
        names: Global rank of each rank of the group, for messages.
        phase: The phase that a rank must finish before it connects, for messages.
        timeout_s: Seconds that this rank waits for the others.
        is_aborted: Returns whether this rank has stopped waiting because the store did not answer
            in time.

    Raises:
        RankTimeoutError: A rank did not connect in time. Raised on all ranks.
        RuntimeError: The store does not answer.
    """
    waiting = _Waiting(store, names, rank, phase, time.monotonic() + timeout_s, timeout_s)
    with contextlib.closing(_listener()) as listener:
        secret = secrets.token_bytes(16)
        address = {
            "node": _node_id(),
            "hosts": own_addresses(store),
            "port": listener.getsockname()[1],
            "secret": secret.hex(),
        }
        store.set(f"{rank}", json.dumps(address))
        if is_aborted():
            text = f"rank {names[rank]} lost the store of its process group while {phase}"
            waiting.fail(RankTimeoutError(text, phase=phase))
        store.add("count", 1)
        tree = _place_all(store, len(names), waiting) if rank == 0 else None
        place = waiting.for_place()
        below = {child[0]: child for child in place["below"]}
        parent = None
        if place["parent"] is not None:
            number = place["parent"]
            parent = number, _dial(place["address"], rank, names[number], waiting)
        try:
            children = _accept(listener, secret, set(below), waiting, names, rank)
        except BaseException:
            if parent is not None:
                parent[1].close()
            raise
    for key in (f"{rank}", f"place/{rank}"):
        with contextlib.suppress(RuntimeError):
            store.delete_key(key)
    return Neighbours(parent, children, below, tree)


class _Waiting:
    """Waits for other ranks in the store, with a deadline."""

    def __init__(
        self,
        store: Store,
        names: Sequence[int],
        rank: int,
        phase: str,
        deadline: float,
        timeout_s: float,
    ) -> None:
        self.deadline = deadline
        self.phase = phase
        self._store, self._names, self._rank, self._timeout_s = store, names, rank, timeout_s
        self._began = time.monotonic()

    def for_count(self, size: int) -> None:
        """Waits until ``size`` ranks have written their addresses."""
        for _ in self._polls_until(self.deadline):
            if self._is_decided() or self._store.add("count", 0) >= size:
                return
        late = self._missing(range(size))
        if late:
            self._fail_for(late)

    def for_place(self) -> dict[str, Any]:
        """Waits for this rank's place in the tree."""
        for _ in self._polls_until(self.deadline + _GRACE_S):
            if self._is_decided():
                break
        else:
            self._fail_for([0])
        place: dict[str, Any] = json.loads(self._store.get(f"place/{self._rank}"))
        return place

    def _is_decided(self) -> bool:
        """Returns whether every rank has its place; raises the error if a rank has failed."""
        if not self._store.check(["outcome"]):
            return False
        outcome = self._store.get("outcome").decode()
        if outcome != _PLACED:
            raise RankTimeoutError(*json.loads(outcome))
        return True

    def _polls_until(self, deadline: float) -> Iterator[None]:
        """Yields at increasing intervals until the deadline."""
        pause = _SHORTEST_PAUSE_S
        while True:
            yield
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            time.sleep(min(pause, remaining))
            pause = min(1.2 * pause, _LONGEST_PAUSE_S)

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks without an address, by bisection, because usually few are missing."""
        if not ranks or self._store.check([f"{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return [ranks[0]]
        half = len(ranks) // 2
        return self._missing(ranks[:half]) + self._missing(ranks[half:])

    def _fail_for(self, late: list[int]) -> None:
        waited = time.monotonic() - self._began
        names = [self._names[rank] for rank in late]
        text = (
            f"{listed_ranks(names)} slow, stuck or gone: {self.phase} not finished {waited:.1f} s "
            f"after rank {self._names[self._rank]}, whose timeout is {self._timeout_s:g} s"
        )
        self.fail(RankTimeoutError(text, names, self.phase, waited))

    def fail(self, error: RankTimeoutError) -> None:
        """Raises the same error on all ranks, unless every rank has its place already."""
        text = json.dumps(error.__reduce__()[1])
        outcome = self._store.compare_set("outcome", "", text).decode()
        if outcome != _PLACED:
            raise RankTimeoutError(*json.loads(outcome))


def _place_all(store: Store, size: int, waiting: _Waiting) -> Tree | None:
    """Builds the tree, and writes each rank's place in the tree to the store."""
    waiting.for_count(size)
    addresses = [json.loads(value) for value in store.multi_get([f"{r}" for r in range(size)])]
    tree = Tree.over([address["node"] for address in addresses], root=0, fan_out=FAN_OUT)
    for rank, parent in enumerate(tree.parents):
        place = {
            "parent": parent if parent >= 0 else None,
            "address": addresses[parent] if parent >= 0 else None,
            "below": [list(tree.subtree(child)) for child in tree.children[rank]],
        }
        store.set(f"place/{rank}", json.dumps(place))
    store.compare_set("outcome", "", _PLACED)
    return tree


def _listener() -> socket.socket:
    try:
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2 * FAN_OUT
        )
    except (OSError, ValueError):  # The machine has no IPv6.
        listener = socket.create_server(("", 0), backlog=2 * FAN_OUT)
    return listener


def own_addresses(store: Store | None) -> list[str]:
    """Returns the addresses of this machine, first the one with a route to the store."""
    hosts = []
    while store is not None and hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host and port:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((host, port))  # Sends nothing, but makes the kernel choose a route.
            hosts.append(s.getsockname()[0])
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        hosts += [str(entry[4][0]) for entry in found]
    return list(dict.fromkeys([*hosts, "127.0.0.1"]))


def _dial(address: dict[str, Any], rank: int, parent: int, waiting: _Waiting) -> socket.socket:
    """Connects to the parent, at the first of its addresses that confirms the secret."""
    hello = _HELLO.pack(bytes.fromhex(address["secret"]), rank)
    failures = []
    for host in address["hosts"]:
        timeout_s = max(min(_DIAL_S, waiting.deadline - time.monotonic()), _GRACE_S)
        try:
            dialled = socket.create_connection((host, address["port"]), timeout_s)
        except OSError as error:
            failures.append(f"{host}: {error}")
            continue
        try:
            dialled.sendall(hello)
            if dialled.recv(1) == b"\1":
                return _prepared(dialled)
            failures.append(f"{host}: another program listens at this address")
        except OSError as error:
            failures.append(f"{host}: {error}")
        dialled.close()
    raise RankTimeoutError(
        f"cannot connect to rank {parent}: {'; '.join(failures)}", [parent], waiting.phase
    )


def _accept(
    listener: socket.socket,
    secret: bytes,
    expected: set[int],
    waiting: _Waiting,
    names: Sequence[int],
    rank: int,
) -> dict[int, socket.socket]:
    """Accepts the connections of the children, and refuses all others."""
    children: dict[int, socket.socket] = {}
    while expected - children.keys():
        listener.settimeout(max(waiting.deadline + _GRACE_S - time.monotonic(), 0.01))
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            for connection in children.values():
                connection.close()
            late = [names[child] for child in sorted(expected - children.keys())]
            raise RankTimeoutError(
                f"{listed_ranks(late)} gone or unreachable: not connected to rank {names[rank]}",
                late,
                waiting.phase,
            ) from None
        try:
            accepted.settimeout(_GRACE_S)
            received, child = _HELLO.unpack(_exactly(accepted, _HELLO.size))
            if not hmac.compare_digest(received, secret) or child not in expected:
                raise OSError("the connecting process is not a rank of this group")
            accepted.sendall(b"\1")
            children[child] = _prepared(accepted)
        except OSError:
            accepted.close()
    return children


def _exactly(source: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = source.recv(nbytes - len(data))
        if not more:
            raise OSError("the connection is closed")
        data += more
    return data


def _prepared(connection: socket.socket) -> socket.socket:
    for option, (level, value) in _KEEPALIVE.items():
        connection.setsockopt(level, option, value)
    connection.setblocking(False)
    return connection


def _node_id() -> int:
    """Returns an identifier of this node. Containers on one machine have the same identifier.

    Each rank sends its identifier, because ``LOCAL_WORLD_SIZE`` is not enough: nodes may have
    different numbers of ranks, and a group may have ranks scattered over nodes.
    """
    name = this_machine().encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little", signed=True)


@functools.cache
def this_machine() -> str:
    """Returns a name of this machine, the same for all processes that share its memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
