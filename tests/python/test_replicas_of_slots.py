"""Replicas between two agents: what arrives, what is refused, and what a newer save replaces."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.flips import flip
from support.replicating import RUN, SESSION, SLOW, Machine, fill
from waits import until

from torch_ckpt._core import _native
from torch_ckpt.agent import SnapshotAgent
from torch_ckpt.agent.buddies import buddies
from torch_ckpt.agent.memory import Save, open_folder, run_of, slot_path
from torch_ckpt.agent.messages import Kind, receive, send
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.replica_files import (
    BLOCK_NBYTES,
    ReplicaFile,
    found_replicas,
    replica_path,
    used_nbytes,
    verify_replica,
)
from torch_ckpt.agent.replica_sender import replicated
from torch_ckpt.agent.replica_wire import ALL_SENT, HEAD, dial
from torch_ckpt.errors import CorruptionError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def pair(memory: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines that replicate to each other. The first one sends slowly."""
    machines = Machine(memory / "a", 0, rate=SLOW), Machine(memory / "b", 1)
    listening = [machine.listen() for machine in machines]
    machines[0].connect(1, listening[1])
    machines[1].connect(0, listening[0])
    yield machines
    for machine in machines:
        machine.close()


def test_a_save_arrives_bit_for_bit_with_checksums(pair: tuple[Machine, Machine]) -> None:
    save = pair[1].fill(0)
    until(lambda: pair[0].stored() == [save])
    for rank in (0, 1):
        own, replica = slot_path(pair[1].folder, rank, 0), replica_path(pair[0].folder, 1, rank, 0)
        nbytes = used_nbytes(_native.Slot.open(own, False))
        assert nbytes > 2 * BLOCK_NBYTES
        assert own.read_bytes()[:nbytes] == replica.read_bytes()[:nbytes]
        assert replica.stat().st_mode & 0o077 == 0
        verify_replica(replica)


def verify_in_parts(path: Path) -> None:
    for part in range(3):
        verify_replica(path, part, 3)


def test_a_flipped_bit_anywhere_in_a_replica_is_found(pair: tuple[Machine, Machine]) -> None:
    save = pair[1].fill(0)
    until(lambda: pair[0].stored() == [save])
    path = replica_path(pair[0].folder, 1, 1, 0)
    nbytes = used_nbytes(_native.Slot.open(path, False))
    sums, trailer = -(-nbytes // 8) * 8, path.stat().st_size - 32
    blocks = (0, 40, 5000, BLOCK_NBYTES - 1, BLOCK_NBYTES, 2 * BLOCK_NBYTES + 7, nbytes - 1)
    for at in (*blocks, sums, sums + 11, trailer, trailer + 9, trailer + 17, trailer + 25):
        flip(path, at)
        with pytest.raises(CorruptionError, match=r"replica-1-rank-1\.0"):
            verify_in_parts(path)
        flip(path, at)
    verify_replica(path)


def test_the_save_to_keep_remains_while_newer_ones_arrive(pair: tuple[Machine, Machine]) -> None:
    first = pair[1].fill(0)
    until(lambda: pair[0].stored() == [first])
    pair[1].replicas.keep = first
    for sequence in (1, 2, 3):
        save = pair[1].fill(sequence)
        until(lambda save=save: pair[0].stored() == [first, save])
    assert len(found_replicas(pair[0].folder)) == 4  # Two of each rank.
    pair[1].replicas.keep = save
    later = pair[1].fill(4)
    until(lambda: pair[0].stored() == [save, later])


def test_reported_replicas_stay_until_the_ranks_have_decided(
    pair: tuple[Machine, Machine],
) -> None:
    sender, receiver = pair[1], pair[0]

    def reported() -> list[Save] | None:
        with sender.changed:
            return sender.replicated()

    def decide(rank: int, keep: Save) -> None:
        with sender.changed:
            sender.replicas.decided(rank, keep)

    former = b"r" * 16, 7  # Of a former session: what the ranks have restored.
    sender.replicas.keep = former
    first = sender.fill(0)
    until(lambda: replicated(sender.folder) == [first])
    assert reported() == [first]
    second = sender.fill(1)
    decide(3, former)  # Another rank, of the decision before.
    time.sleep(0.7)
    assert receiver.stored() == [first]
    decide(2, first)
    until(lambda: replicated(sender.folder) == [first, second])
    assert reported() == receiver.stored() == [first, second]
    decide(2, first)  # Other machines lack the second one.
    third = sender.fill(3)
    until(lambda: replicated(sender.folder) == [first, third])
    assert receiver.stored() == [first, third]


def test_a_send_whose_slots_are_needed_is_abandoned_and_counts(
    pair: tuple[Machine, Machine],
) -> None:
    sender, receiver = pair
    sender.fill(0)
    until(lambda: len(found_replicas(receiver.folder)) == 2)  # It has begun.
    save = sender.fill(2)  # In the same slots.
    assert receiver.stored() == []
    until(lambda: receiver.stored() == [save])
    until(lambda: sender.replicas._sender.superseded == 2)  # It, and save 1, which was never sent.
    for _, _, path in found_replicas(receiver.folder):
        verify_replica(path)


def test_sends_are_no_faster_than_the_cap(pair: tuple[Machine, Machine]) -> None:
    began = time.monotonic()
    save = pair[0].fill(0)
    until(lambda: pair[1].stored() == [save])
    nbytes = sum(path.stat().st_size for path in pair[0].folder.glob("rank-*"))
    assert 0.8 * nbytes / SLOW < time.monotonic() - began


def test_a_restarted_agent_goes_on_where_the_former_was(pair: tuple[Machine, Machine]) -> None:
    sender, receiver = pair[1], pair[0]
    first = sender.fill(0)
    until(lambda: receiver.stored() == [first])
    receiver.close()
    again = Machine(receiver.folder, 0)
    save = sender.fill(1)
    until(lambda: save in replicated(sender.folder))
    sender.close()
    successor = Machine(sender.folder, 1)
    with successor.changed:
        assert successor.replicated() == [first, save]
        successor.replicas.decided(2, first)
    later = successor.fill(2)
    until(lambda: later in again.stored())
    for machine in (again, successor):
        machine.close()


def test_a_restarted_agent_replaces_no_replica_until_it_knows_which_one_to_retain(
    pair: tuple[Machine, Machine],
) -> None:
    sender, receiver = pair[1], pair[0]
    first = sender.fill(0)
    until(lambda: replicated(sender.folder) == [first])
    sender.replicas.keep = first  # Other machines lack the second one.
    second = sender.fill(1)
    until(lambda: replicated(sender.folder) == [first, second])
    sender.close()
    third = fill(sender.folder, 3, node=1)
    successor = Machine(sender.folder, 1)
    time.sleep(0.7)
    assert receiver.stored() == replicated(sender.folder) == [first, second]
    with successor.changed:
        successor.replicas.decided(3, first)  # Perhaps of the decision before.
    time.sleep(0.7)
    assert receiver.stored() == [first, second]
    with successor.changed:
        successor.replicas.decided(2, first)
    until(lambda: replicated(sender.folder) == [first, third])
    assert receiver.stored() == [first, third]
    successor.close()


def test_the_buddy_retains_what_has_a_mark(pair: tuple[Machine, Machine]) -> None:
    sender, receiver = pair[1], pair[0]
    first = sender.fill(0)
    until(lambda: replicated(sender.folder) == [first])
    second = sender.fill(1)
    until(lambda: replicated(sender.folder) == [first, second])
    sender.close()
    (sender.folder / f"replicated-{second[0].hex()}-{second[1]}").unlink()  # As its answer was.
    third = fill(sender.folder, 3, node=1)
    successor = Machine(sender.folder, 1)
    with successor.changed:
        successor.replicas.decided(2, None)
    until(lambda: replicated(sender.folder) == [first, third])
    assert receiver.stored() == [first, third]
    successor.close()


@pytest.mark.parametrize("former_ranks", [(), (7,)])
def test_replicas_are_freed_if_slots_need_their_memory(
    run: Path,
    mount_tmpfs: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    former_ranks: Sequence[int],
) -> None:
    monkeypatch.setenv("TORCH_CKPT_MEMORY", str(mount_tmpfs("size=40m")))
    folder = open_folder(run_of(run))
    for rank in former_ranks:
        _native.Slot.create(os.fsencode(slot_path(folder, rank, 0)), 4 << 20)
    ReplicaFile.create(replica_path(folder, 1, 1, 0), 20 << 20).move()
    agent = SnapshotAgent(run)
    state = {"w": torch.zeros(14 << 20, dtype=torch.uint8)}
    agent.reserve(state)
    assert found_replicas(folder) == []
    agent.async_save(state, run / "step-1", step=1).result()
    agent.close()


def test_replication_continues_after_a_save_was_sent_twice(pair: tuple[Machine, Machine]) -> None:
    sender, receiver = pair[1], pair[0]
    first = sender.fill(0)
    until(lambda: replicated(sender.folder) == [first])
    sender.close()
    (sender.folder / f"replicated-{first[0].hex()}-{first[1]}").unlink()  # As on a full tmpfs.
    successor = Machine(sender.folder, 1)
    with successor.changed:
        successor.replicas.decided(2, first)
    until(lambda: replicated(sender.folder) == [first])
    second = successor.fill(1)
    until(lambda: replicated(sender.folder) == [first, second])
    assert receiver.stored() == [first, second]
    successor.close()


def connected(machine: Machine, token: str | None = None) -> socket.socket:
    state = machine.replicas._state
    return dial(state["at"], token or state["token"], 1)


def begin(**changes: Any) -> dict[str, Any]:
    fields = {"run": RUN.hex(), "session": SESSION.hex(), "sequence": 0, "node": 1}
    return {**fields, "slots": [[0, 8192]], "keep": None, **changes}


def test_a_stranger_without_the_token_is_refused(pair: tuple[Machine, Machine]) -> None:
    with pytest.raises(OSError, match="another program"):
        connected(pair[0], "00" * 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "00" * 16},
        {"session": "00" * 16},
        {"node": 0},
        {"slots": []},
        {"slots": [[0, 8192], [0, 8192]]},
        {"slots": [[-1, 8192]]},
        {"slots": [[0, 1]]},
        {"slots": [[0, 1 << 60]]},
        {"slots": [[rank, 8192] for rank in range(5000)]},
        {"slots": [["../x", 8192]]},
        {"slots": None},
        {"sequence": "x"},
    ],
)
def test_a_message_that_is_not_sound_allocates_nothing(
    pair: tuple[Machine, Machine], changes: dict[str, Any]
) -> None:
    with connected(pair[0]) as connection:
        send(connection, Kind.REPLICA, **begin(**changes))
        answer = receive(connection)
        assert answer is not None
        assert answer["kind"] == Kind.ERROR
    assert found_replicas(pair[0].folder) == []


@pytest.mark.parametrize("block", ["wrong checksum", "too long", "no slot", "none"])
def test_a_block_that_is_not_sound_makes_no_replica(
    pair: tuple[Machine, Machine], block: str
) -> None:
    data = os.urandom(8192)
    head = HEAD.pack(8192, _native.xxh3(data) ^ (block == "wrong checksum"))
    if block == "too long":
        head = HEAD.pack(1 << 31, 0)
    with connected(pair[0]) as connection:
        send(connection, Kind.REPLICA, **begin())
        assert receive(connection) == {"kind": Kind.OK}
        connection.settimeout(30)
        with contextlib.suppress(OSError):  # The other side may close the connection at once.
            if block != "none":
                connection.sendall(head + data)
            connection.sendall(ALL_SENT)
            connection.shutdown(socket.SHUT_WR)
            assert not connection.recv(1)
    assert pair[0].stored() == []


@pytest.mark.parametrize(
    ("domains", "expected"),
    [
        (["a", "b"], [1, 0]),
        (["a", "b", "c"], [1, 2, 0]),
        (["a", "a", "b", "b"], [2, 3, 0, 1]),
        (["b", "a", "b", "c", "a", "c"], None),
        (["a", "b", "c", "a"], None),
    ],
)
def test_each_machine_has_one_buddy_of_another_domain(
    domains: list[str], expected: list[int] | None
) -> None:
    found = buddies(domains)
    assert expected in (None, found)
    assert sorted(found) == list(range(len(domains)))
    assert all(domains[machine] != domains[found[machine]] for machine in range(len(domains)))


@pytest.mark.parametrize("domains", [["a", "a"], ["a", "a", "b"], ["x"]])
def test_machines_of_which_too_many_share_a_domain_are_refused(domains: list[str]) -> None:
    with pytest.raises(ValueError, match=f"share the failure domain '{domains[0]}'"):
        buddies(domains)


@pytest.mark.parametrize(
    "options", [{"replicas": 2}, {"replicas": -1}, {"replicate_bytes_per_s": 1000.0}]
)
def test_options_that_are_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="replica"):
        AgentOptions(**options)
