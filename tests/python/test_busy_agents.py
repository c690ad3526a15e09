"""An agent answers while it does slow work: it allocates and frees memory without its lock."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waits import SOON_S, until

from torch_ckpt._core import _native
from torch_ckpt.agent import AgentOptions, process, slots
from torch_ckpt.agent.client import AgentClient, Member
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.identity import RunId
from torch_ckpt.agent.memory import agent_lock, free, open_folder, run_of, slot_path
from torch_ckpt.agent.messages import Kind, send
from torch_ckpt.agent.process import Agent
from torch_ckpt.agent.replica_wire import dial
from torch_ckpt.coordination.storage_watch import watch_storage
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]

ANSWER_S = 5.0  # Of a busy machine.
NBYTES = 1 << 16
LATER = b"t" * 16


class Slow:
    """A function whose first call that has work waits until it may end."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.failures = 0
        self.waits = False
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise StorageError("no space left")
        if self.waits and arguments != ([],) and not self.has_begun.is_set():
            self.has_begun.set()
            assert self.may_end.wait(SOON_S)
        return self.function(*arguments)


class Served:
    """An agent in this process, whose memory was that of rank 5, and its slow calls."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.folder = run, open_folder(run_of(run))
        _native.Slot.create(os.fsencode(slot_path(self.folder, 5, 0)), NBYTES)
        self.create, self.free = Slow(_native.Slot.create), Slow(free)
        monkeypatch.setattr(_native.Slot, "create", staticmethod(self.create))
        for module in (process, slots):
            monkeypatch.setattr(module, "free", self.free)
        self.agent = Agent(run_of(run), self.folder, AgentOptions(linger_s=SOON_S))

    def client(self, rank: int, session: bytes = b"s" * 16) -> AgentClient:
        member = Member(run_of(self.run), session, rank, 2, 0, 1, [0, 1])
        return AgentClient(self.run, member, AgentOptions(), timeout_s=ANSWER_S)

    def fill(self, rank: AgentClient, sequence: int) -> None:
        acquired = rank.acquire(sequence, NBYTES, 0.0)
        assert acquired is not None
        path, _ = acquired
        slot = _native.Slot.open(os.fsencode(path), True)
        table = _native.encode_slot_table(b"d", "1", True, _native.ItemTable().encode(), None, [])
        slot.begin(rank.member.header(sequence, sequence, persist=False), table, 0)
        slot.complete()
        rank.request(Kind.FILLED, path=os.fspath(path), sequence=sequence)


@pytest.fixture
def served(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    watch_storage()  # Its thread is one of the process, and remains.
    made, before = Served(run, monkeypatch), set(threading.enumerate())
    with agent_lock(made.folder) as is_ours:
        assert is_ours
        thread = threading.Thread(target=made.agent.serve)
        thread.start()
        until((made.folder / "agent.socket").exists)
        yield made
        for slow in (made.create, made.free):
            slow.may_end.set()
        for rank in [made.client(number, LATER) for number in (0, 1)]:
            rank.detach(drop=True)
        thread.join(SOON_S)
        assert not thread.is_alive()
    until(lambda: set(threading.enumerate()) <= before)  # Each would reserve a descriptor.


def reserve(served: Served, rank: AgentClient) -> Slow:
    rank.request(Kind.RESERVE, nbytes=NBYTES)
    return served.create


def acquire(served: Served, rank: AgentClient) -> Slow:
    assert rank.acquire(7, NBYTES, 0.0) is not None
    return served.create


def replace_memory(served: Served, rank: AgentClient) -> Slow:
    assert rank.acquire(0, NBYTES, 0.0) is not None
    rank.request(Kind.RESERVE, nbytes=4 * NBYTES)
    return served.free


def make_room(served: Served, rank: AgentClient) -> Slow:
    served.create.failures = 1
    rank.request(Kind.RESERVE, nbytes=NBYTES)
    return served.free


def remove_former_ranks(served: Served, rank: AgentClient) -> Slow:
    for each in (rank, served.client(1)):
        served.fill(each, 0)
    return served.free


def free_former_run(served: Served, rank: AgentClient) -> Slow:
    with served.agent._changed:
        served.agent._next_id = RunId("0" * 32, False)
    rank.request(Kind.RESERVE, nbytes=NBYTES)
    return served.free


def receive_replica(served: Served, rank: AgentClient) -> Slow:
    at, token = rank.listen(["127.0.0.1"])
    rank.request(Kind.BUDDY, buddy=1, at=at, token=token, source=1)
    with dial(at, token, 1) as connection:
        fields = {"run": run_of(served.run).hex(), "session": rank.member.session.hex(), "node": 1}
        send(connection, Kind.REPLICA, sequence=0, slots=[[0, NBYTES]], keep=None, **fields)
        assert served.create.has_begun.wait(SOON_S)
    return served.create


WORK: list[Callable[[Served, AgentClient], Slow]] = [
    *(reserve, acquire, replace_memory, make_room, remove_former_ranks, free_former_run),
    receive_replica,
]


@pytest.mark.parametrize("work", WORK)
def test_an_agent_that_does_slow_work_answers_other_requests(
    served: Served, work: Callable[[Served, AgentClient], Slow]
) -> None:
    rank, other = served.client(0), served.client(1)
    served.create.waits = work in (reserve, acquire, receive_replica)
    served.free.waits = not served.create.waits
    thread = threading.Thread(target=work, args=(served, rank))
    thread.start()
    slow = served.create if served.create.waits else served.free
    assert slow.has_begun.wait(SOON_S)
    began = time.monotonic()
    other._register(ANSWER_S, is_ping=True).close()
    other.request(Kind.REPLICATED)
    other.abort(8, Destination(Location("/nowhere"), None))
    with contextlib.suppress(StorageError):
        other.listen(["127.0.0.1"])
    other.detach(drop=False)
    if work is receive_replica:
        rank.close()
        served.client(0, LATER).close()  # Ends what the former session has begun.
    assert time.monotonic() - began < ANSWER_S
    assert thread.is_alive() or work is receive_replica
    slow.may_end.set()
    thread.join(SOON_S)
    assert not thread.is_alive()
    rank.close()


def test_the_memory_of_a_slot_is_freed_without_the_lock_of_the_interpreter(run: Path) -> None:
    path = os.fsencode(slot_path(open_folder(run_of(run)), 0, 0))
    slot = _native.Slot.create(path, 256 << 20)
    os.unlink(path)
    counted, has_ended = [0], threading.Event()

    def count() -> None:
        while not has_ended.wait(0.001):
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    until(lambda: counted[0] > 0)
    began, before = time.monotonic(), counted[0]
    del slot
    seconds, after = time.monotonic() - began, counted[0]
    has_ended.set()
    thread.join()
    assert after > before + 2 or seconds < 0.02
