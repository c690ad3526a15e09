"""Ranks that connect: slow ones are waited for, dead ones are named, and handlers do not hang."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from failing_ranks import AMPLE_S, LIMIT_S, answers, mortal_ranks
from ranks import Worlds

from torch_ckpt.coordination import connect
from torch_ckpt.coordination.group import Group, group_of
from torch_ckpt.errors import CheckpointError, RankTimeoutError

pytestmark = pytest.mark.timeout(180)

BUSY_S = 14.0  # Longer than a rank waits before it has tried all addresses.
NOTICED_S = 10.0


@contextmanager
def in_a_chain() -> Iterator[None]:
    """The tree of three ranks is 0(1(2))."""
    node = int(dist.get_rank() > 0)
    with (
        mock.patch.object(connect, "node_id", return_value=node),
        mock.patch.object(connect, "reachable", lambda addresses, _: addresses),  # By loopback.
    ):
        yield


def connect_beside_a_busy_parent(how: str) -> float:
    """Rank 1 does not run Python when rank 2 connects to it."""
    group = group_of(dist.new_group(backend="gloo"))
    rank = dist.get_rank()
    with in_a_chain():
        if rank:
            group.connect()
            time.sleep(1)  # Its address is in the store.
        dist.barrier()
        begin = time.monotonic()
        if rank == 0:
            time.sleep(0.5)
            group.connect()
        elif rank == 1 and how == "gil":
            ctypes.PyDLL(None).usleep(round(BUSY_S * 1e6))
        elif rank == 1:
            if os.fork() == 0:
                time.sleep(BUSY_S)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        group.call(AMPLE_S).barrier("planning")
    return time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("how", ["gil", "stop"])
def test_a_parent_that_is_busy_for_long_while_the_ranks_connect_is_waited_for(
    worlds: Worlds, how: str
) -> None:
    seen = worlds.run(3, connect_beside_a_busy_parent, how, timeout_s=LIMIT_S)
    assert all(seconds > BUSY_S - 1 for seconds in seen)


def test_an_address_of_a_silent_program_does_not_delay_the_others_for_long() -> None:
    """As a private address that two machines have."""
    store = dist.HashStore()
    silent = socket.create_server(("127.0.0.1", 0))
    listening = connect._listening
    ends: dict[int, Any] = {}

    def with_stranger(*args: Any) -> Any:
        listeners = listening(*args)
        listeners.addresses.insert(0, silent.getsockname()[:2])
        return listeners

    def run(rank: int) -> None:
        deadline = connect.Deadline("planning")
        deadline.begin(LIMIT_S, "planning")
        ends[rank] = connect.connect(store, rank, [0, 1], deadline, lambda: False)

    begin = time.monotonic()
    with (
        mock.patch.object(connect, "_listening", with_stranger),
        mock.patch.object(connect, "_DIAL_S", 1.0),
    ):
        first = threading.Thread(target=run, args=(0,))
        first.start()
        run(1)
        first.join(LIMIT_S)
    assert time.monotonic() - begin < NOTICED_S
    assert list(ends[0].children) == [1]
    for connection in (silent, ends[0].children[1], ends[1].parent[1]):
        connection.close()


def connect_beside_a_death(absent: int) -> RankTimeoutError | None:
    """Rank 1 forks a child, as a ``DataLoader`` does, and dies before all have connected."""
    group = group_of(None)
    if dist.get_rank() == absent:
        return None
    group.connect()
    if dist.get_rank() == 1:
        time.sleep(1)
        if os.fork() == 0:
            time.sleep(LIMIT_S)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        group.call(AMPLE_S).barrier("planning")
    assert time.monotonic() - begin < NOTICED_S + 1
    return caught.value


@pytest.mark.slow
def test_death_of_a_rank_that_has_forked_is_noticed_before_all_have_connected() -> None:
    with mortal_ranks(3, None, connect_beside_a_death, 2) as pipes:
        (error,) = answers([pipes[0]])
    assert error.ranks == (1,)
    assert "refuses connections at 127.0.0.1:" in str(error)


def first_call_with_a_handler() -> str:
    """A signal handler makes a call while the same thread opens the connections."""
    group = group_of(dist.new_group(backend="gloo"))
    refused: list[str] = []

    def handle(*_: object) -> None:
        try:
            group.call(AMPLE_S).barrier("planning")
        except CheckpointError as error:
            refused.append(str(error))

    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("torch_ckpt-group") and not refused:
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with mock.patch.object(threading.Thread, "start", interrupted):
            group.call(AMPLE_S).barrier("planning")
    finally:
        signal.signal(signal.SIGUSR1, before)
    group.call(AMPLE_S).barrier("planning")
    return refused[0]


def test_a_handler_that_interrupts_the_start_of_the_connections_is_refused(
    worlds: Worlds,
) -> None:
    for message in worlds.run(2, first_call_with_a_handler, timeout_s=30):
        assert "a signal handler has interrupted" in message


def test_only_a_rank_that_was_reachable_before_counts_as_gone_on_another_machine() -> None:
    """A firewall may refuse connections to a rank that lives, and that nobody needs to dial."""
    store = dist.HashStore()
    closed = socket.create_server(("0.0.0.0", 0))
    address = closed.getsockname()[:2]
    here = connect.node_id()
    for rank, node in ((0, here), (1, here + 1)):
        store.set(f"{rank}", connect.json.dumps({"node": node, "at": [("0.0.0.0", 1)]}))
    other = connect.json.dumps({"node": here + 1, "at": [address]})
    waiting = connect._Waiting(store, [0, 1], 0, connect.Deadline("planning"), lambda: False)
    with mock.patch.object(connect, "_PROBE_S", 0.0):
        assert [waiting.refusing([1]) for _ in range(4)] == [[]] * 4
        assert [waiting.refusing([0]) for _ in range(2)] == [[], [0]]
        store.set("1", other)
        reached = connect._Waiting(store, [0, 1], 0, connect.Deadline("planning"), lambda: False)
        assert reached.refusing([1]) == []
        closed.close()
        assert [reached.refusing([1]) for _ in range(2)] == [[], [1]]


def call_and_drop_the_group() -> None:
    before = set(threading.enumerate())
    group = Group(dist.new_group(backend="gloo"))
    series = group.series()
    del group
    series.call(AMPLE_S).barrier("planning")
    (thread,) = set(threading.enumerate()) - before
    dist.barrier()
    del series
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_the_thread_of_a_group_ends_with_its_last_series(worlds: Worlds) -> None:
    worlds.run(2, call_and_drop_the_group, timeout_s=2 * LIMIT_S)
