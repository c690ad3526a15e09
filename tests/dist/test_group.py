"""Exchanges of a group give what torch's collectives give, and end in time on every rank."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from failing_ranks import (
    AMPLE_S,
    DEADLINE_S,
    LIMIT_S,
    MARGIN_S,
    Failure,
    StickyError,
    hold,
    mortal_ranks,
    own_state,
    release,
    train,
)
from ranks import Worlds, on_ranks
from states import assert_same, full_value
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_ckpt
from torch_ckpt.coordination import call_state, connect
from torch_ckpt.coordination.group import Group, group_of, time_limit_s
from torch_ckpt.coordination.peer import Peer
from torch_ckpt.coordination.relay import Relay
from torch_ckpt.coordination.tree import Tree
from torch_ckpt.errors import CheckpointError, RankTimeoutError

pytestmark = pytest.mark.timeout(120)


@contextlib.contextmanager
def drawn(fan_out: int, *, nodes: bool = True) -> Iterator[None]:
    """Groups that connect have trees of this fan-out, over uneven nodes with scattered ranks."""
    number = [7, 3, 7, 3, 3, 9, 7, 3][dist.get_rank() % 8] if nodes else 0
    with (
        mock.patch.object(connect, "FAN_OUT", fan_out),
        mock.patch.object(connect, "node_id", return_value=number),
        mock.patch.object(connect, "reachable", lambda addresses, _: addresses),  # By loopback.
    ):
        yield


def payload_of(rank: int, seed: int) -> Any:
    rng = random.Random(100 * seed + rank)
    sizes = [0, 1, 100_000, 10 << 20]
    return [None, b"", {"rank": rank}, rng.randbytes(rng.choice(sizes))][rng.randrange(4)]


def are_equal(answers: Sequence[bytes]) -> bool:
    return len(set(answers)) == 1


def exchange(fan_out: int, members: list[int]) -> None:
    process_group = dist.new_group(members, backend="gloo")
    if dist.get_rank() not in members:
        return
    group = group_of(process_group)
    rank, size = group.rank, group.size
    with drawn(fan_out), group.call(AMPLE_S) as call:
        for seed in range(4):
            values = [payload_of(rank, seed) for rank in range(size)]
            assert call.all_reduce("plan", lambda: values[rank], list) == values  # noqa: B023
            several = [values[rank // 3 * 3] for rank in range(size)]  # Some for several ranks.
            found = call.reduce_scatter("plan", lambda: None, lambda _: several)  # noqa: B023
            assert found == several[rank]
            call.barrier("finishing")
        assert call.any_rank(rank == size - 1, "planning")
        assert not call.any_rank(False, "planning")
        assert call.decide(b"same", are_equal, "planning")
        assert not call.decide(b"%d" % (rank // (size - 1)), are_equal, "planning")


@pytest.mark.thin("2-16", "5-3")
@pytest.mark.parametrize("fan_out", [2, 3, 16])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_what_ranks_send_arrives(worlds: Worlds, size: int, fan_out: int) -> None:
    worlds.run(size, exchange, fan_out, list(range(size)))


def test_a_subgroup_without_rank_0_exchanges(worlds: Worlds) -> None:
    worlds.run(8, exchange, 2, [1, 2, 4, 5, 7])


def exchange_in_several_threads() -> None:
    """Each thread has a call, begun in the same order; their exchanges meet in any order."""
    group = group_of(dist.new_group(backend="gloo"))
    calls = [group.call(AMPLE_S) for _ in range(4)]
    found: dict[int, list[int]] = {}

    def run(number: int) -> None:
        rng = random.Random(dist.get_rank() * 10 + number)
        found[number] = []
        for step in range(20):
            time.sleep(rng.random() / 500)
            own = 100 * number + step
            found[number].append(calls[number].all_reduce("plan", lambda: own, sum))  # noqa: B023

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, values in found.items():
        assert values == [3 * (100 * number + step) for step in range(20)]


def test_calls_of_several_threads_do_not_meet(worlds: Worlds) -> None:
    worlds.run(3, exchange_in_several_threads)


def state_of_rank(rank: int, version: str) -> dict[str, Any]:
    return {**own_state(rank, version), "shared": full_value(version, (1000,), torch.float32)}


def save_and_load(path: Path, stock: Path) -> None:
    rank = dist.get_rank()
    state = state_of_rank(rank, "saved")
    group = dist.new_group(backend="gloo")
    options: dict[str, Any] = {"process_group": group, "timeout_s": AMPLE_S}
    dcp.save(state, checkpoint_id=stock)
    with drawn(2):
        torch_ckpt.save(state, checkpoint_id=path, **options)
        for written, load in [
            (path, lambda loaded, at: torch_ckpt.load(loaded, checkpoint_id=at, **options)),
            (stock, lambda loaded, at: torch_ckpt.load(loaded, checkpoint_id=at, **options)),
            (path, lambda loaded, at: dcp.load(loaded, checkpoint_id=at)),
        ]:
            loaded = state_of_rank(rank, "of no version")
            load(loaded, written)
            assert_same(loaded, state)


def test_what_8_ranks_save_with_fan_out_2_is_loaded_bit_for_bit_by_both_and_as_stocks_is(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(8, save_and_load, tmp_path / "ours", tmp_path / "stock")


def bytes_sent_down() -> dict[int, int]:
    """How much this rank has sent to each of its children."""
    sent: dict[int, int] = {}
    queueing = Peer.queue

    def queue(self: Peer, kind: int, call: int, number: int, body: Any) -> None:
        sent[self.rank] = sent.get(self.rank, 0) + sum(map(len, body))
        queueing(self, kind, call, number, body)

    values = [bytes(1 << 20)] * 6 + [b"", b""]  # The same object for all but the last two.
    group = group_of(dist.new_group(backend="gloo"))
    with drawn(2, nodes=False), group.call(AMPLE_S) as call:
        call.barrier("beginning")
        with mock.patch.object(Peer, "queue", queue):
            call.reduce_scatter("plan", lambda: None, lambda _: values)
            call.barrier("finishing")
    return sent


def test_a_value_for_several_ranks_is_sent_once_over_each_way(worlds: Worlds) -> None:
    tree = Tree.over([0] * 8, fan_out=2)
    for rank, sent in enumerate(worlds.run(8, bytes_sent_down)):
        for child in tree.children[rank]:
            assert (sent[child] > 1 << 20) == (child < 6), (rank, child)
            assert sent[child] < (1 << 20) + (1 << 12), (rank, child)


class BrokenPlanner(dcp.DefaultSavePlanner):
    """Raises on one rank, in one phase."""

    def __init__(self, where: str, failing: int, error: Exception) -> None:
        super().__init__()
        self.failing, self.where, self.error = failing, where, error

    def fail(self, where: str) -> None:
        if (where, self.failing) == (self.where, dist.get_rank()):
            raise self.error

    def create_local_plan(self) -> Any:
        self.fail("local plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self.fail("global plan")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: Any) -> Any:
        self.fail("write")
        return super().resolve_data(write_item)


def save_with_a_rank_that_raises(path: Path, where: str, failing: int, kind: Any) -> Any:
    planner = BrokenPlanner(where, failing, kind("a tensor is lost"))
    group = dist.new_group(backend="gloo")
    with drawn(2), pytest.raises(CheckpointException) as caught:
        torch_ckpt.save(
            own_state(dist.get_rank(), "new"),
            checkpoint_id=path,
            planner=planner,
            process_group=group,
            timeout_s=AMPLE_S,
        )
    train()
    return {rank: repr(cause) for rank, (cause, _) in caught.value.failures.items()}


@pytest.mark.thin(1)
@pytest.mark.parametrize("kind", [LookupError, StickyError])
@pytest.mark.parametrize(
    ("where", "failing"), [("local plan", 7), ("global plan", 0), ("write", 2)]
)
def test_rank_that_raises_is_named_to_all_along_the_tree(
    worlds: Worlds, tmp_path: Path, where: str, failing: int, kind: type[Exception]
) -> None:
    function = save_with_a_rank_that_raises
    seen = worlds.run(8, function, tmp_path / "checkpoint", where, failing, kind)
    assert seen == [seen[0]] * 8
    assert seen[0].keys() == {failing}
    assert "a tensor is lost" in seen[0][failing]


class Interception:
    """Does something else, once, on one rank: before it sends something, or midway.

    Args:
        step: What of the thread's does it: ``_pass_up`` or ``_send_down``.
        skip: How many times it is not to happen.
    """

    def __init__(
        self, step: str, rank: int, is_midway: bool, function: Callable[[], None], skip: int = 0
    ) -> None:
        self.step, self.is_midway, self.function, self.skip = step, is_midway, function, skip
        self.is_due = dist.get_rank() == rank

    def __enter__(self) -> None:
        stepping = getattr(Relay, self.step)

        def write(peer: Peer) -> None:
            peer.connection.send(peer._outgoing[0][:10])
            self.function()

        def step(thread: Relay, *args: Any) -> Any:
            self.skip -= 1
            if not self.is_due or self.skip >= 0:
                return stepping(thread, *args)
            self.is_due = False
            if self.is_midway:
                with mock.patch.object(Peer, "write", write):
                    return stepping(thread, *args)
            self.function()
            return stepping(thread, *args)

        self._patch = mock.patch.object(Relay, self.step, step)
        self._patch.start()

    def __exit__(self, *args: object) -> None:
        self._patch.stop()


def plan_and_write(group: Group, timeout_s: float) -> None:
    """As a save does, with a commit, and an exchange in which those that are done learn of it."""
    with group.call(timeout_s) as call:
        parts = [bytes([1 + rank]) * 100_000 for rank in range(group.size)]
        call.reduce_scatter("plan", lambda: bytes(100_000), lambda _: parts)
        call.all_reduce("write", lambda: bytes(100_000), lambda _: call.claim_commit())
        call.all_reduce("end", lambda: bytes(100_000), lambda _: bytes(100_000))


def failure_of_a_call(timeout_s: float, interception: Any) -> tuple[Failure, float]:
    """What this rank sees of a call that one makes fail, and when, after one that succeeds."""
    group = group_of(dist.new_group(backend="gloo"))
    with drawn(2):
        plan_and_write(group, AMPLE_S)
        begin = time.monotonic()
        with interception, pytest.raises(RankTimeoutError) as caught:
            plan_and_write(group, timeout_s)
        seconds = time.monotonic() - begin
    error = caught.value
    return Failure(error.ranks, error.phase, error.may_be_committed, str(error)), seconds


FREEZE_S = 5.0
NOTICED_S = 10.0  # By when others know of a process that has ended.


def call_with_a_rank_that_ends(
    step: str, victim: int, is_midway: bool, skip: int, number: signal.Signals
) -> Failure:
    timeout_s = FREEZE_S if number == signal.SIGSTOP else AMPLE_S

    def take() -> None:
        os.kill(os.getpid(), number)
        time.sleep(LIMIT_S)  # Another thread may be stopped first.

    end = Interception(step, victim, is_midway, take, skip)
    failure, seconds = failure_of_a_call(timeout_s, end)
    assert seconds < (timeout_s + MARGIN_S if number == signal.SIGSTOP else NOTICED_S)
    return failure


# The tree is 0(1(3(4) 7) 5 2 6): node 7 has ranks 0, 2 and 6; node 3 has 1, 3, 4 and 7; 9 has 5.
ENDS = {
    "a_leaf_before_it_sends": (7, "_pass_up", False, 0),
    "a_leader_of_a_node_before_it_sends": (1, "_pass_up", False, 0),
    "a_leader_of_a_node_as_it_sends": (1, "_pass_up", True, 0),
    "the_coordinator_before_it_scatters": (0, "_send_down", False, 0),
    "the_coordinator_as_it_scatters": (0, "_send_down", True, 0),
    "an_inner_rank_as_it_scatters": (3, "_send_down", True, 0),
    "a_leader_of_a_node_as_it_broadcasts": (1, "_send_down", False, 1),
    "a_leaf_before_it_sends_to_all": (5, "_pass_up", False, 2),
}
FREEZES = [
    "a_leaf_before_it_sends",
    "an_inner_rank_as_it_scatters",
    "a_leaf_before_it_sends_to_all",
]


@pytest.mark.thin(
    "the_coordinator_before_it_scatters-9",
    "a_leader_of_a_node_as_it_broadcasts-9",
    "a_leaf_before_it_sends-19",
)
@pytest.mark.parametrize(
    ("end", "number"),
    [(end, signal.SIGKILL) for end in ENDS] + [(end, signal.SIGSTOP) for end in FREEZES],
)
def test_rank_that_dies_or_freezes_is_named_to_all_others_in_time(
    end: str, number: signal.Signals
) -> None:
    victim, step, is_midway, skip = ENDS[end]
    args = call_with_a_rank_that_ends, step, victim, is_midway, skip, number
    with mortal_ranks(8, None, *args) as pipes:
        seen = []
        for rank in set(range(8)) - {victim}:
            assert pipes[rank].poll(LIMIT_S), f"rank {rank} hangs"
            seen.append(pipes[rank].recv())
    for failure in seen:
        assert failure.ranks == (victim,)
        assert f"rank {victim} is" in failure.message
        # Who has promised does not know whether it was committed.
        assert failure.may_be_committed == ("may yet appear" in failure.message)
        assert not failure.may_be_committed or failure.phase in ("committing", "end")


def call_with_a_forked_child() -> Failure:
    """Rank 1 dies while a child of it lives."""

    def fork_and_die() -> None:
        if os.fork() == 0:
            time.sleep(LIMIT_S)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    interception = Interception("_pass_up", 1, False, fork_and_die)
    failure, seconds = failure_of_a_call(AMPLE_S, interception)
    assert seconds < NOTICED_S
    return failure


def test_a_process_that_ends_is_noticed_although_a_child_of_it_lives() -> None:
    with mortal_ranks(3, None, call_with_a_forked_child) as pipes:
        for rank in (0, 2):
            assert pipes[rank].poll(LIMIT_S), f"rank {rank} hangs"
            assert pipes[rank].recv().ranks == (1,)


def calls_as_one_is_stuck(path: Path, fifo: Path, victim: int) -> Failure:
    """A rank that is late for one call: the next goes on before it has come, and after that."""
    group = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    options: dict[str, Any] = {"process_group": group, "timeout_s": AMPLE_S}
    with drawn(2):
        torch_ckpt.save(own_state(rank, "first"), checkpoint_id=path / "first", **options)
        call = group_of(group).call(DEADLINE_S)
        if rank == victim:
            hold(fifo)
        with pytest.raises(RankTimeoutError) as caught:
            call.barrier("planning")
        if rank == (victim + 1) % 8:
            release(fifo)
        torch_ckpt.save(own_state(rank, "next"), checkpoint_id=path / "next", **options)
    loaded = own_state(rank, "of no version")
    torch_ckpt.load(loaded, checkpoint_id=path / "next", **options)
    assert_same(loaded, own_state(rank, "next"))
    error = caught.value
    return Failure(error.ranks, error.phase, error.may_be_committed, str(error))


@pytest.mark.thin("1")
@pytest.mark.parametrize("victim", [0, 1, 3, 7])
def test_a_late_rank_alone_is_named_and_the_next_call_succeeds(
    worlds: Worlds, tmp_path: Path, victim: int
) -> None:
    """Not those below it in the tree, whose parts its thread passes on."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    seen = worlds.run(8, calls_as_one_is_stuck, tmp_path, fifo, victim, timeout_s=LIMIT_S)
    assert seen == [seen[0]] * 8
    assert seen[0][:3] == ((victim,), "planning", False)


def call_interrupted(fifo: Path) -> Failure | None:
    """Rank 1 is interrupted as it waits for rank 4, which is stuck until rank 0 knows."""
    group = group_of(dist.new_group(backend="gloo"))
    rank = dist.get_rank()
    group.call(AMPLE_S).barrier("beginning")
    interrupted = rank == 1
    if interrupted:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    expected = KeyboardInterrupt if interrupted else RankTimeoutError
    call = group.call(AMPLE_S)
    if rank == 4:
        hold(fifo)
    with pytest.raises(expected) as caught, call:
        call.barrier("planning")
    if rank == 0:
        release(fifo)
    if interrupted:
        return None
    error = caught.value
    assert isinstance(error, RankTimeoutError)
    return Failure(error.ranks, error.phase, error.may_be_committed, str(error))


def test_interrupt_of_a_rank_is_told_to_the_others_at_once(worlds: Worlds, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    seen = worlds.run(8, call_interrupted, fifo, timeout_s=LIMIT_S)
    assert seen.pop(1) is None
    assert seen == [seen[0]] * 7
    assert seen[0][:3] == ((1,), "planning", False)
    assert "KeyboardInterrupt" in seen[0].message


def test_strangers_are_not_let_into_a_group() -> None:
    store = dist.HashStore()
    ends: dict[int, connect.Neighbours] = {}

    def run(rank: int) -> None:
        deadline = connect.Deadline("planning")
        deadline.begin(LIMIT_S, "planning")
        ends[rank] = connect.connect(store, rank, [0, 1], deadline, lambda: False)

    first = threading.Thread(target=run, args=(0,))
    first.start()
    store.wait(["0"])
    address = tuple(connect.json.loads(store.get("0"))["at"][0])
    strangers = [socket.create_connection(address) for _ in range(3)]
    strangers[0].sendall(bytes(16) + (1).to_bytes(4, "little"))  # Another secret.
    strangers[1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    strangers[2].close()
    run(1)
    first.join(LIMIT_S)
    assert list(ends[0].children) == [1]
    while strangers[0].recv(4096):  # The nonce and the proof of the rank, and then the end.
        pass
    for connection in (*strangers, ends[0].children[1], ends[1].parent[1]):  # type: ignore[index]
        connection.close()


class TellingPlanner(dcp.DefaultSavePlanner):
    """Fails a save with its time limit, in the process that saves."""

    def create_local_plan(self) -> Any:
        raise LookupError(f"{time_limit_s()}")


def limits_of_a_save_in_the_background(path: Path, executor: str) -> list[str]:
    group = dist.new_group(backend="gloo")
    options: dict[str, Any] = {
        "checkpoint_id": path,
        "planner": TellingPlanner(),
        "process_group": group,
        "async_checkpointer_type": AsyncCheckpointerType(executor),
    }
    state = own_state(dist.get_rank(), "new")
    futures = [torch_ckpt.async_save(state, timeout_s=LIMIT_S, **options)]
    failures = [futures[0].exception(LIMIT_S)]
    with torch_ckpt.installed(timeout_s=LIMIT_S + 1):
        failures.append(dcp.async_save(state, **options).exception(LIMIT_S))
    return [str(failure.failures[0][0]) for failure in failures]


@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_time_limit_goes_with_a_save_to_where_it_is_carried_out(
    worlds: Worlds, tmp_path: Path, executor: str
) -> None:
    seen = worlds.run(2, limits_of_a_save_in_the_background, tmp_path, executor, timeout_s=90)
    assert seen == [[f"{float(LIMIT_S)}", f"{float(LIMIT_S + 1)}"]] * 2


def fail_before_all_are_here(fifo: Path) -> tuple[str, float]:
    """Rank 0 raises in the first call of its group; rank 1 comes only when it has."""
    group = group_of(dist.new_group(backend="gloo"))
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(LookupError), group.call(AMPLE_S):
            raise LookupError("this rank alone")
        seconds = time.monotonic() - begin
        release(fifo)
        return "", seconds
    hold(fifo)
    with pytest.raises(RankTimeoutError) as caught:
        group.call(AMPLE_S).barrier("planning")
    return str(caught.value), 0.0


def test_a_rank_that_raises_before_others_have_come_does_not_wait_for_them(
    worlds: Worlds, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (_, seconds), (message, _) = worlds.run(2, fail_before_all_are_here, fifo, timeout_s=LIMIT_S)
    assert seconds < MARGIN_S
    assert "rank 0 failed while beginning: LookupError: this rank alone" in message


def make_many_calls() -> None:
    """One call is open while very many others come and go."""
    group = group_of(dist.new_group(backend="gloo"))
    long = group.call(AMPLE_S)
    thread = threading.Thread(target=lambda: long.barrier("planning"))
    if dist.get_rank() == 0:
        thread.start()
    for _ in range(60):
        group.call(AMPLE_S).barrier("planning")
    if dist.get_rank() == 1:
        thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def make_more_calls_than_are_remembered() -> None:
    with mock.patch.object(call_state, "_CALLS", 16):
        make_many_calls()


def test_an_open_call_is_remembered_however_many_others_there_are(worlds: Worlds) -> None:
    worlds.run(2, make_more_calls_than_are_remembered)


@on_ranks(3)
def test_too_few_results_of_a_coordinator_fail_the_call_on_all_ranks(path: Path) -> None:
    group = group_of(dist.new_group(backend="gloo"))
    for results in ([], [1, 2], [1, 2, 3, 4]):
        with (
            pytest.raises(CheckpointException, match="results of plan for 3 ranks"),
            group.call(AMPLE_S) as call,
        ):
            call.reduce_scatter("plan", lambda: None, lambda _, r=results: r)
    group.call(AMPLE_S).barrier("planning")  # The group remains usable.


@on_ranks(3)
def test_ranks_that_make_different_calls_learn_which(path: Path) -> None:
    group = group_of(dist.new_group(backend="gloo"))
    phase = "reading" if dist.get_rank() == 2 else "planning"
    with pytest.raises(RankTimeoutError, match="ranks make different calls"):
        group.call(AMPLE_S).barrier(phase)


@on_ranks(2)
def test_a_save_of_one_rank_and_a_load_of_another_fail_and_name_both(path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(1)}, checkpoint_id=path / "step")
    for saver in (0, 1):
        call = torch_ckpt.save if dist.get_rank() == saver else torch_ckpt.load
        with pytest.raises(CheckpointException) as caught:
            call({"w": torch.zeros(1)}, checkpoint_id=path / "step", timeout_s=AMPLE_S)
        failed = caught.value.failures
        assert list(failed) == [0]
        assert str(failed[0][0]).startswith(
            f"ranks make different calls: rank {saver} saves, and rank {1 - saver} loads"
        )
    loaded = {"w": torch.zeros(1)}
    torch_ckpt.load(loaded, checkpoint_id=path / "step")
    assert loaded["w"] == 1


@on_ranks(2)
def test_an_error_of_another_call_fails_this_one_on_all_ranks(path: Path) -> None:
    """As from a ``Stateful`` that loads a checkpoint of its own and fails."""
    group = group_of(dist.new_group(backend="gloo"))

    def work() -> None:
        with group.call(AMPLE_S) as call:
            if dist.get_rank() == 0:
                torch_ckpt.load({"w": torch.zeros(1)}, checkpoint_id=path / "none", no_dist=True)
            call.barrier("planning")

    with pytest.raises(CheckpointException if dist.get_rank() == 0 else RankTimeoutError):
        work()


@on_ranks(2)
def test_a_process_that_is_not_in_the_process_group_is_refused(path: Path) -> None:
    group = dist.new_group([1], backend="gloo")
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="rank 0 is not in the process group"):
            group_of(group)


@on_ranks(2)
def test_a_forked_child_is_refused_at_once(path: Path) -> None:
    group = group_of(dist.new_group(backend="gloo"))
    group.call(AMPLE_S).barrier("planning")
    child = os.fork()
    if child == 0:
        try:
            group.call(AMPLE_S).barrier("planning")
        except CheckpointError as error:
            os._exit(0 if "a forked process is not a rank" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    group.call(AMPLE_S).barrier("planning")
