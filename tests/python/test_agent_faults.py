"""Agents and clients in a bad moment: interrupts, no more descriptors, very many descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.agents import agent_pid, kill_agent
from support.freezing import freeze
from waits import SOON_S, until

from torch_ckpt import FastReader
from torch_ckpt.agent import AgentOptions, SnapshotAgent, SnapshotReader, client, messages
from torch_ckpt.agent.memory import agent_lock, open_folder, run_of
from torch_ckpt.agent.messages import Kind, Message
from torch_ckpt.agent.process import Agent
from torch_ckpt.agent.rank_process import RankProcess
from torch_ckpt.agent.replica_receiver import ReplicaReceiver
from torch_ckpt.agent.replica_wire import dial
from torch_ckpt.agent.trainer import StagedSave
from torch_ckpt.coordination import waiting
from torch_ckpt.coordination.listeners import Listeners
from torch_ckpt.coordination.waiting import OwnFuture, submitted
from torch_ckpt.errors import CorruptionError, StorageError
from torch_ckpt.filesystems.location import Location

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("memory")]


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "step": step}


def saved(agent: SnapshotAgent, run: Path, step: int) -> bool:
    """Saves a step through the agent; returns whether it is on disk, and in memory."""
    agent.persist(agent.stage(state_of(step), run / str(step), step=step))
    return all(holds(reader, step) for reader in (FastReader(run / str(step)), newest(agent)))


def newest(agent: SnapshotAgent) -> SnapshotReader:
    return SnapshotReader(agent.newest())


def holds(reader: Any, step: int) -> bool:
    out = state_of(0)
    dcp.load(out, storage_reader=reader)
    return out["step"] == step and bool((out["w"] == step).all())


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """2,000 descriptors are open, and new ones have higher numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(2000)]
    yield
    for descriptor in descriptors:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_program_with_thousands_of_descriptors_saves(run: Path) -> None:
    agent = SnapshotAgent(run)
    assert saved(agent, run, 1)
    agent.close(drop=True)


@pytest.mark.usefixtures("many_descriptors")
def test_a_replica_arrives_in_a_process_with_thousands_of_descriptors(memory: Path) -> None:
    receiver, listeners = receiver_in(memory)
    with dial(listeners.addresses, listeners.secret, 1) as connection:
        connection.sendall(b"this is no message")
        connection.settimeout(SOON_S)
        assert connection.recv(1) == b""  # It was read, and refused.
    receiver.close()


def test_a_save_after_an_interrupt_within_any_request_is_right(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C, and signal handlers that raise, interrupt the wait for an answer."""
    agent = SnapshotAgent(run)
    assert saved(agent, run, 0)
    receive, interrupted = client.receive, []
    for number in range(100):
        left = [number]

        def interrupt(
            connection: socket.socket, left: list[int] = left, number: int = number
        ) -> Any:
            left[0] -= 1
            if left[0] == -1:
                interrupted.append(number)
                raise KeyboardInterrupt
            return receive(connection)

        with monkeypatch.context() as patch:
            patch.setattr(client, "receive", interrupt)
            try:
                assert saved(agent, run, 2 * number + 1)
                break  # It has fewer requests.
            except KeyboardInterrupt:
                pass
        assert saved(agent, run, 2 * number + 2)
    assert len(interrupted) >= 3  # For a slot, when it is filled, and for the commit.
    agent.close(drop=True)


ACCEPT_ERRORS = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED]


def failing_accept(monkeypatch: pytest.MonkeyPatch, number: int, count: int = 1) -> list[int]:
    """Makes the next calls of ``accept`` fail in this process; returns a list of what is left."""
    left, accept = [count], socket.socket.accept

    def fail(self: socket.socket) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fail)
    return left


def test_an_agent_that_is_killed_after_a_long_wait_for_it_is_started_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = SnapshotAgent(run)
    errors: list[BaseException | None] = []

    def persist() -> None:
        with contextlib.closing(agent._client.clone()) as other:
            monkeypatch.setattr(client, "_START_S", 0.5)  # The wait is longer.
            try:
                other.persist(0)  # Waits for a slot of this rank.
                errors.append(None)
            except StorageError as error:
                errors.append(error)

    thread = threading.Thread(target=persist)
    thread.start()
    time.sleep(1.5)
    monkeypatch.setattr(client, "_START_S", 30.0)
    kill_agent(run)
    assert saved(agent, run, 1)
    thread.join(SOON_S)
    assert errors == [None]
    agent.close()


def test_a_rank_waits_for_a_frozen_agent_although_hundreds_of_connections_are_queued(
    run: Path,
) -> None:
    agent, pid = SnapshotAgent(run), agent_pid(run)
    with contextlib.ExitStack() as stack:
        freeze(pid)
        threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
        for _ in range(300):
            queued = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            queued.settimeout(SOON_S)
            queued.connect(f"{agent.folder}/agent.socket")
        agent._client.clone().close()
    assert saved(agent, run, 1)
    agent.close()


def test_a_wait_for_a_commit_is_logged_once_also_if_the_agent_freezes_within_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = SnapshotAgent(run)
    staged = agent.stage(state_of(1), run / "1", step=1, persist=False)
    assert staged is not None
    pid, sent = agent_pid(run), client.send

    def freeze_after(connection: socket.socket, kind: Kind, **fields: Any) -> None:
        if kind == Kind.PERSIST:
            freeze(pid)
            threading.Timer(2.5, os.kill, (pid, signal.SIGCONT)).start()
        sent(connection, kind, **fields)

    monkeypatch.setattr(client, "send", freeze_after)
    monkeypatch.setattr(waiting, "LOG_S", 1.0)
    agent.persist(staged)
    agent.close()
    lines = [text for text in caplog.messages if text.startswith("waiting for")]
    assert len(lines) == 1
    assert f"process {pid}, to commit a save (1" in lines[0]


def test_an_agent_that_does_not_know_failures_of_other_machines_completes_a_save(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = SnapshotAgent(run)
    has_failed = threading.Event()

    request = client.AgentClient.request

    def refuse(self: client.AgentClient, kind: Kind, *args: Any, **fields: Any) -> Message:
        if kind != Kind.FAIL:
            fields.pop("has_filled", None)  # It is filled below.
            return request(self, kind, *args, **fields)
        has_failed.set()
        raise CorruptionError("cannot read a message of kind fail: unknown kind")

    monkeypatch.setattr(client, "_ANSWER_S", 3.0)  # So it pings often.
    monkeypatch.setattr(client.AgentClient, "request", refuse)
    monkeypatch.setattr(agent._failed, "received", lambda _: ("StorageError", "machine 1", 5))
    alone = agent.member
    agent.member = replace(alone, node_count=2)
    staged = StagedSave(alone.header(0, 1, persist=True), Location(run / "1"), run / "no slot")
    waiting_rank = submitted(ThreadPoolExecutor(1), agent.persist, staged, future=OwnFuture())
    assert has_failed.wait(SOON_S)
    agent.member = alone
    assert saved(agent, run, 1)
    waiting_rank.result(SOON_S)
    agent.close()


@pytest.mark.parametrize("number", ACCEPT_ERRORS, ids=errno.errorcode.get)
def test_an_agent_that_once_cannot_accept_serves_the_next_rank(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    left = failing_accept(monkeypatch, number)
    folder = open_folder(run_of(run))
    served = Agent(run_of(run), folder, AgentOptions(linger_s=SOON_S))

    def serve() -> None:
        with agent_lock(folder) as is_ours:
            assert is_ours
            served.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    until((folder / "agent.socket").exists)
    for step in (1, 2):  # The second one as after a restart of the program.
        agent = SnapshotAgent(run, timeout_s=SOON_S)
        assert saved(agent, run, step)
        assert left == [0]
        agent.close(drop=step == 2)
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_an_agent_that_ends_does_not_register_a_rank_that_has_just_connected(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(run_of(run))
    served = Agent(run_of(run), folder, AgentOptions(linger_s=0.0))
    can_end, rank = Agent._can_end, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def connect_at_the_end(self: Agent, *args: Any) -> bool:
        if not can_end(self, *args):
            return False
        rank.connect(f"{folder}/agent.socket")
        fields = {"run": run_of(run).hex(), "session": bytes(16).hex(), "rank": 0}
        options = AgentOptions().encode()
        messages.send(rank, messages.Kind.HELLO, ranks_here=[0], options=options, **fields)
        time.sleep(0.3)  # The thread of this connection waits for the lock, which this one has.
        return True

    monkeypatch.setattr(Agent, "_can_end", connect_at_the_end)
    with rank:
        served.serve()
        rank.settimeout(SOON_S)
        assert messages.receive(rank) is None
    shutil.rmtree(folder)


def receiver_in(folder: Path) -> tuple[ReplicaReceiver, Listeners]:
    listeners = Listeners([("127.0.0.1", 0)], 0)
    return ReplicaReceiver(folder, b"r" * 16, b"s" * 16, 1, listeners), listeners


@pytest.mark.parametrize("number", ACCEPT_ERRORS, ids=errno.errorcode.get)
def test_an_agent_that_once_cannot_accept_receives_replicas_afterwards(
    memory: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    left = failing_accept(monkeypatch, number)
    receiver, listeners = receiver_in(memory)
    dial(listeners.addresses, listeners.secret, 1).close()
    assert left == [0]
    receiver.close()
    receiver._accepting.join(SOON_S)
    assert not receiver._accepting.is_alive()


@pytest.mark.parametrize("number", ACCEPT_ERRORS, ids=errno.errorcode.get)
def test_a_rank_that_once_cannot_accept_is_reached_afterwards(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with contextlib.closing(Listeners([("127.0.0.1", 0)], 0)) as listeners:
        left = failing_accept(monkeypatch, number)
        dialled = submitted(
            ThreadPoolExecutor(1),
            dial,
            listeners.addresses,
            listeners.secret,
            1,
            future=OwnFuture(),
        )
        accepted = listeners.accepted([1], SOON_S)
        assert left == [0]
        assert [*accepted] == [1]
        for connection in (accepted[1], dialled.result(SOON_S)):
            connection.close()


def pidfds() -> int:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum("pidfd" in os.readlink(link) for link in links if os.path.lexists(link))


def test_a_rank_that_an_agent_forgets_leaves_no_descriptor() -> None:
    before = pidfds()
    ranks = [RankProcess(0, b"", os.getpid()) for _ in range(9)]
    assert pidfds() == before + 9
    assert all(rank.is_alive for rank in ranks)
    ranks.clear()
    assert pidfds() == before


def test_an_agent_that_does_not_linger_waits_for_its_ranks_and_serves_them_until_they_end(
    tmp_path: Path,
) -> None:
    options = AgentOptions(linger_s=0)
    for number in range(3):
        begin = time.monotonic()
        agent = SnapshotAgent(tmp_path / f"run-{number}", options=options)
        process = agent._client.name
        if number:
            for step in range(1, number + 1):
                saved = agent.async_save(
                    {"w": torch.ones(3)}, tmp_path / f"{number}-{step}", step=step
                )
                assert saved is not None
                saved.result()
        agent.close()
        assert agent._client.name == process
        assert time.monotonic() - begin < SOON_S
