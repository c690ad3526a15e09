"""Strangers at the ends of a connection learn no secret and no weight, and are taken for nobody."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.replicating import Machine
from waits import until

from torch_ckpt.agent import replica_wire
from torch_ckpt.agent.messages import has_arrived
from torch_ckpt.agent.replica_files import found_replicas
from torch_ckpt.agent.replica_sender import replicated
from torch_ckpt.agent.replica_wire import dial
from torch_ckpt.coordination import connect, listeners
from torch_ckpt.coordination.handshake import (
    CONFIRMED,
    HELLO,
    NONCE_NBYTES,
    PROOF_NBYTES,
    Dialling,
)
from torch_ckpt.coordination.listeners import Listeners

pytestmark = pytest.mark.timeout(120)

SECRET = hashlib.sha256(b"secret").digest()[:16]
ANSWER_NBYTES = NONCE_NBYTES + PROOF_NBYTES
SOON_S = 30.0


# ---- A stranger that listens ----

Answer = Callable[[bytes, int], bytes]
"""What a stranger sends after bytes have arrived, of which it has received so many so far."""


def confirm(received: bytes, total: int) -> bytes:
    return CONFIRMED


def confirm_all(received: bytes, total: int) -> bytes:
    return bytes(ANSWER_NBYTES) + CONFIRMED


def reflect(received: bytes, total: int) -> bytes:
    return (received * ANSWER_NBYTES)[:ANSWER_NBYTES]


def stall(received: bytes, total: int) -> bytes:
    return b""


def trickle(received: bytes, total: int) -> bytes:
    raise InterruptedError


def end(received: bytes, total: int) -> bytes:
    raise ConnectionError


def replay() -> Answer:
    """What a listener with the secret has sent once to another end that knows it."""
    with contextlib.closing(Listeners([("127.0.0.1", 0)], 0, SECRET.hex())) as real:
        recorded: list[bytes] = []
        recv = socket.socket.recv

        def record(self: socket.socket, *args: Any) -> bytes:
            data = recv(self, *args)
            recorded.append(data)
            return data

        accepting = threading.Thread(target=accept_all, args=(real, [1], SOON_S))
        accepting.start()
        with mock.patch.object(replica_wire.socket.socket, "recv", record):
            dial(real.addresses, SECRET.hex(), 1).close()
        accepting.join()
    sent = b"".join(data for data in recorded if len(data) in (ANSWER_NBYTES, len(CONFIRMED)))
    assert len(sent) == ANSWER_NBYTES + len(CONFIRMED)
    return lambda received, total: sent


STRANGERS: dict[str, Callable[[], Answer]] = {
    "confirms": lambda: confirm,
    "confirms anything": lambda: confirm_all,
    "reflects": lambda: reflect,
    "stalls": lambda: stall,
    "trickles": lambda: trickle,
    "closes": lambda: end,
    "replays": replay,
}


class Stranger:
    """A program that listens at an address, and records what arrives, until the block ends."""

    def __init__(self, answer: Answer) -> None:
        self.received = bytearray()
        self.connections = 0
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while data := connection.recv(1 << 20):
                self.received += data
                try:
                    connection.sendall(self._answer(data, len(self.received)))
                except InterruptedError:
                    while True:  # As a slow loris does.
                        connection.sendall(b"\0")
                        time.sleep(0.05)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # Ends the thread that accepts.
        self._listener.close()
        for connection in self._open:
            connection.close()


def assert_learns_nothing(stranger: Stranger, secret: str) -> None:
    """Each connection has brought no more than a nonce and a rank."""
    received = bytes(stranger.received)
    assert bytes.fromhex(secret) not in received
    assert secret.encode() not in received
    assert len(received) <= stranger.connections * HELLO.size


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers that stall take less time."""
    monkeypatch.setattr(replica_wire, "DIAL_S", 0.4)
    monkeypatch.setattr(connect, "_DIAL_S", 0.4)
    monkeypatch.setattr(listeners, "_SILENT_S", 0.4)
    monkeypatch.setattr(listeners, "_PROOF_S", 1.2)


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_at_the_address_of_a_buddy_gets_no_secret_and_no_weights(
    memory: Path, quick: None, kind: str
) -> None:
    machine = Machine(memory / "a", 0)
    try:
        with Stranger(STRANGERS[kind]()) as stranger:
            machine.listen()
            machine.connect(1, {"at": [stranger.address], "token": SECRET.hex()})
            machine.fill(0)
            until(lambda: stranger.connections >= 2)  # It tries again.
            assert_learns_nothing(stranger, SECRET.hex())
            assert replicated(machine.folder) == []
            with machine.changed:
                assert machine.replicated() == []
    finally:
        machine.close()


@pytest.mark.parametrize("kind", STRANGERS)
def test_an_agent_reaches_its_buddy_behind_the_address_of_a_stranger(
    memory: Path, quick: None, kind: str
) -> None:
    machines = Machine(memory / "a", 0), Machine(memory / "b", 1)
    try:
        with Stranger(STRANGERS[kind]()) as stranger:
            listening = [machine.listen() for machine in machines]
            at = [stranger.address, *listening[1]["at"]]
            machines[0].connect(1, {"at": at, "token": listening[1]["token"]})
            machines[1].connect(0, listening[0])
            save = machines[0].fill(0)
            until(lambda: replicated(machines[0].folder) == [save])
            assert machines[1].stored() == [save]
            assert_learns_nothing(stranger, listening[1]["token"])
    finally:
        for machine in machines:
            machine.close()


def connected_ranks(stranger: Stranger | None, node: int | None = None) -> tuple[str, Any]:
    """Connects two ranks in threads; returns the parent's secret, and rank 1's connections.

    The stranger is at the first address that the parent publishes, as that of node ``node``.
    """
    store = dist.HashStore()
    listening, node_id = connect._listening, connect.node_id
    ends: dict[int, Any] = {}
    secrets: list[str] = []

    def with_stranger(store: Any, waiting: Any) -> Any:
        found = listening(store, waiting)
        if waiting.rank == 0:
            secrets.append(found.secret)
            if stranger is not None:
                found.addresses.insert(0, stranger.address)
        return found

    def own_node() -> int:
        is_parent = threading.current_thread() is not threading.main_thread()
        return node if node is not None and is_parent else node_id()

    def run(rank: int) -> None:
        deadline = connect.Deadline("planning")
        deadline.begin(1.0 if node is not None else SOON_S, "planning")
        ends[rank] = connect.connect(store, rank, [0, 1], deadline, lambda: False)

    with (
        mock.patch.object(connect, "_listening", with_stranger),
        mock.patch.object(connect, "node_id", own_node),
        mock.patch.object(connect, "_GRACE_S", 0.2),
    ):
        first = threading.Thread(target=run, args=(0,))
        first.start()
        run(1)
        first.join(SOON_S)
    for end in ends.values():
        for connection in [*end.children.values(), *([end.parent[1]] if end.parent else [])]:
            connection.close()
    return secrets[0], ends[1]


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_rank_reaches_its_parent_behind_the_address_of_a_stranger(quick: None, kind: str) -> None:
    with Stranger(STRANGERS[kind]()) as stranger:
        secret, ends = connected_ranks(stranger)
        assert ends.error is None
        assert stranger.connections >= 1
        assert_learns_nothing(stranger, secret)


@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError])
def test_a_rank_dials_its_parent_again_after_lost_packets(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    create, left = socket.create_connection, [error(), error()]

    def lose(*arguments: Any, **options: Any) -> socket.socket:
        if left:
            raise left.pop()
        return create(*arguments, **options)

    monkeypatch.setattr(connect.socket, "create_connection", lose)
    monkeypatch.setattr(connect, "own_addresses", lambda _: ["127.0.0.1"])
    assert connected_ranks(None)[1].error is None


def test_no_rank_dials_a_loopback_address_of_another_machine(quick: None) -> None:
    with Stranger(confirm) as stranger:
        _, ends = connected_ranks(stranger, node=7)
        assert stranger.connections == 0
    assert "set GLOO_SOCKET_IFNAME" in str(ends.error)


# ---- A stranger that dials ----


def accept_all(real: Listeners, ranks: list[int], for_s: float) -> dict[int, socket.socket]:
    """Accepts until a rank has connected; returns its connection."""
    ends_at = time.monotonic() + for_s
    found: dict[int, socket.socket] = {}
    while not found and time.monotonic() < ends_at:
        found = real.accepted(ranks, 0.2)
    return found


def recorded_dialling(place: tuple[str, int]) -> bytes:
    """What an end that knows the secret sends to a listener that it accepts."""
    sent = bytearray()
    send = socket.socket.sendall

    def record(self: socket.socket, data: bytes, *args: Any) -> None:
        if self.getpeername()[:2] == place:
            sent.extend(data)
        send(self, data, *args)

    with mock.patch.object(socket.socket, "sendall", record):
        dial([place], SECRET.hex(), 1).close()
    assert len(sent) == HELLO.size + PROOF_NBYTES
    return bytes(sent)


DIALLERS: dict[str, Callable[[bytes], list[bytes]]] = {
    "replays at once": lambda record: [record],
    "replays": lambda record: [record[: HELLO.size], record[HELLO.size :]],
    "guesses": lambda record: [HELLO.pack(b"n" * NONCE_NBYTES, 1), bytes(PROOF_NBYTES)],
    "sends the former secret": lambda record: [HELLO.pack(SECRET, 1)],
    "reflects": lambda record: [HELLO.pack(b"n" * NONCE_NBYTES, 1), b"reflect"],
    "stalls": lambda record: [HELLO.pack(b"n" * NONCE_NBYTES, 1)],
    "sends nothing": lambda record: [b""],
}


@pytest.mark.parametrize("kind", DIALLERS)
def test_a_stranger_that_dials_is_not_accepted_and_soon_closed(quick: None, kind: str) -> None:
    with contextlib.closing(Listeners([("127.0.0.1", 0)], 0, SECRET.hex())) as real:
        accepting = threading.Thread(target=accept_all, args=(real, [1], SOON_S))
        accepting.start()
        record = recorded_dialling(real.addresses[0])
        accepting.join()
        found: dict[int, socket.socket] = {}
        accepting = threading.Thread(target=lambda: found.update(accept_all(real, [1], 1.7)))
        accepting.start()
        with socket.create_connection(real.addresses[0]) as stranger:
            stranger.settimeout(SOON_S)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                for message in DIALLERS[kind](record):
                    stranger.sendall(received[-PROOF_NBYTES:] if message == b"reflect" else message)
                    if len(message) == HELLO.size:
                        received += stranger.recv(ANSWER_NBYTES, socket.MSG_WAITALL)
                while more := stranger.recv(4096):  # Until the listener closes it.
                    received += more
        accepting.join()
        assert found == {}
        assert SECRET not in received
        assert received[ANSWER_NBYTES:] != CONFIRMED
        assert real._refused >= 1


@contextlib.contextmanager
def relay_to(place: tuple[str, int]) -> Iterator[tuple[tuple[str, int], bytearray]]:
    """Yields the address of a program that passes on all bytes, and the bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    passed = bytearray()

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(4096):
                passed.extend(data)
                target.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(place)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with listener:
        yield listener.getsockname()[:2], passed
        listener.shutdown(socket.SHUT_RDWR)  # Ends the thread that accepts.


def test_a_handshake_that_is_relayed_from_another_address_fails(quick: None) -> None:
    with (
        contextlib.closing(Listeners([("127.0.0.1", 0)], 0, SECRET.hex())) as real,
        relay_to(real.addresses[0]) as (place, passed),
    ):
        found: dict[int, socket.socket] = {}
        accepting = threading.Thread(target=lambda: found.update(accept_all(real, [1], 1.7)))
        accepting.start()
        with pytest.raises(OSError, match="another program"):
            dial([place], SECRET.hex(), 1)
        accepting.join()
    assert found == {}
    assert HELLO.size < len(passed) == HELLO.size + ANSWER_NBYTES  # No proof of the end that dials.
    assert SECRET not in passed


def test_a_rank_that_is_slow_to_answer_connects_at_another_attempt(quick: None) -> None:
    """As while its machine is busy, or a flood of strangers takes its place."""
    advance, slept = connect.Dialling.advance, []

    def slow(self: connect.Dialling) -> bool:
        if not slept:
            slept.append(True)
            time.sleep(listeners._PROOF_S + 0.4)
        return advance(self)

    with mock.patch.object(connect.Dialling, "advance", slow):
        _, ends = connected_ranks(None)
    assert slept
    assert ends.error is None


def test_nothing_is_stored_for_a_stranger_that_dials_an_agent(memory: Path, quick: None) -> None:
    machine = Machine(memory / "a", 0)
    try:
        listening = machine.listen()
        machine.connect(1, {"at": [], "token": SECRET.hex()})
        with pytest.raises(OSError, match="another program"):
            dial(listening["at"], SECRET.hex(), 1)
        assert found_replicas(machine.folder) == []
    finally:
        machine.close()


@pytest.mark.parametrize("late", ["hello", "proof"])
def test_a_busy_listener_reads_what_has_arrived_before_it_refuses_a_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, late: str
) -> None:
    monkeypatch.setattr(listeners, "_SILENT_S" if late == "hello" else "_PROOF_S", 0.5)
    is_read, may_go_on = threading.Event(), threading.Event()
    read = Listeners._read

    def read_and_stand(self: Listeners, *arguments: Any) -> None:
        read(self, *arguments)
        has_begun = any(pending.handshake for pending in self._pending.values())
        if not is_read.is_set() and has_begun == (late == "proof"):
            is_read.set()
            assert may_go_on.wait(SOON_S)

    monkeypatch.setattr(Listeners, "_read", read_and_stand)
    with (
        contextlib.closing(Listeners([("127.0.0.1", 0)], 0)) as real,
        socket.create_connection(real.addresses[0]) as connection,
    ):
        accepted: list[Any] = []
        accepting = threading.Thread(
            target=lambda: accepted.append(real.accepted([1], SOON_S)), daemon=True
        )
        accepting.start()
        if late == "hello":
            assert is_read.wait(SOON_S)
        dialling = Dialling(connection, real.secret, 1)
        assert is_read.wait(SOON_S)
        if late == "proof":
            assert has_arrived(connection, SOON_S)
            assert not dialling.advance()
        time.sleep(0.7)
        may_go_on.set()
        until(dialling.advance)
        accepting.join(SOON_S)
        assert [*accepted[0]] == [1]
        accepted[0][1].close()
    assert not caplog.messages
