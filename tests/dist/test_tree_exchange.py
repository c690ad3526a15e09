"""What ranks pass along the tree is what torch's own collectives give them; no rank hangs in it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from states import assert_same, full_value
from test_deadlines import (
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.utils import _DistWrapper

import torch_ckpt
from torch_ckpt import RankTimeoutError
from torch_ckpt.coordination import tree_exchange
from torch_ckpt.coordination.deadline import (
    BoundedExchange,
    bounded_call,
    bounded_everywhere,
    time_limit_s,
)
from torch_ckpt.coordination.tree import Tree
from torch_ckpt.coordination.tree_exchange import _Passing

pytestmark = pytest.mark.timeout(120)


def node_of(rank: int) -> int:
    """Uneven nodes, their ranks scattered."""
    return [7, 3, 7, 3, 3, 9, 7, 3][rank % 8]


def on_nodes() -> Any:
    """Has each rank of a group that meets for the first time say that it is on such a node."""
    node = node_of(dist.get_rank())
    return mock.patch.object(tree_exchange, "_node_id", return_value=node)


def fan_out_of(number: int) -> Any:
    """Has exchanges go along trees of this fan-out, so that 8 ranks make several levels."""
    return mock.patch.object(tree_exchange, "FAN_OUT", number)


def payload_of(rank: int, seed: int) -> Any:
    rng = random.Random(100 * seed + rank)
    # What fits into a first message, what just does or does not, and what never does.
    sizes = [0, 1, 16_300, *range(16_340, 16_400, 7), 100_000]
    return [None, b"", {"rank": rank}, rng.randbytes(rng.choice(sizes)), LookupError(rank)][
        rng.randrange(5)
    ]


def shown(value: Any) -> Any:
    """Comparable: exceptions are not."""
    if isinstance(value, list):
        return [shown(one) for one in value]
    return repr(value) if isinstance(value, BaseException) else value


def large_payload(rank: int) -> Any:
    return bytes([rank]) * (10 << 20) if rank in (0, 3) else b""


def exchange_as_torch_does(fan_out: int, members: list[int], roots: list[int]) -> None:
    group = dist.new_group(members, backend="gloo")
    if dist.get_rank() not in members:
        return
    with on_nodes():
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        for root in roots:
            for seed in range(4):
                values = [payload_of(rank, seed + 50) for rank in range(size)]
                values = [values[rank // 3 * 3] for rank in range(size)]  # Some for several ranks.
                exchange_once(group, fan_out, root, payload_of(rank, seed), values)


def exchange_large_payloads_as_torch_does() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo")
    with on_nodes():
        exchange_once(group, 2, 0, large_payload(rank), [*map(large_payload, range(size))])


def exchange_once(
    group: dist.ProcessGroup, fan_out: int, root: int, own: Any, values: list[Any]
) -> None:
    rank = dist.get_rank(group)
    given = values if rank == root else None
    torchs = _DistWrapper(group, True, root)
    with fan_out_of(fan_out), bounded_call(AMPLE_S, group=group):
        ours = BoundedExchange(group, True, root)
        for name, value in {
            "gather_object": own,
            "scatter_object": given,
            "broadcast_object": values[0] if rank == root else None,
            "all_gather_object": own,
        }.items():
            expected = shown(getattr(torchs, name)(value))
            assert shown(getattr(ours, name)(value)) == expected, (name, rank, root)


@pytest.mark.thin(1)
@pytest.mark.parametrize("fan_out", [2, 3, 16])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_exchanges_along_a_tree_give_what_torchs_give(
    worlds: Worlds, size: int, fan_out: int
) -> None:
    roots = [0, size - 1]
    worlds.run(size, exchange_as_torch_does, fan_out, list(range(size)), roots)


def test_exchanges_of_10_mb_along_a_tree_give_what_torchs_give(worlds: Worlds) -> None:
    worlds.run(5, exchange_large_payloads_as_torch_does)


def test_exchanges_of_a_subgroup_without_rank_0_give_what_torchs_give(worlds: Worlds) -> None:
    worlds.run(8, exchange_as_torch_does, 2, [1, 2, 4, 5, 7], [0, 3])


def state_of_rank(rank: int, version: str) -> dict[str, Any]:
    return {**own_state(rank, version), "shared": full_value(version, (1000,), torch.float32)}


def save_and_load(path: Path, stock: Path, fan_out: int) -> None:
    rank = dist.get_rank()
    state = state_of_rank(rank, "saved")
    group = dist.new_group(backend="gloo")
    options: dict[str, Any] = {"process_group": group, "timeout_s": AMPLE_S}
    dcp.save(state, checkpoint_id=stock)
    with fan_out_of(fan_out), on_nodes():
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
    worlds.run(8, save_and_load, tmp_path / "ours", tmp_path / "stock", 2)


Messages = list[tuple[str, int, int]]  # What was done, the other rank, how many bytes.


def messages_of(call: Callable[[], Any]) -> Messages:
    """The messages of this rank in a call."""
    found: Messages = []
    begun = _Passing._begun

    def noted(self: Any, operation: Any, tensors: Any, peers: Any, number: int) -> Any:
        for tensor, peer in zip(tensors, peers, strict=True):
            found.append((operation.__name__, peer, tensor.nbytes))
        return begun(self, operation, tensors, peers, number)

    with mock.patch.object(_Passing, "_begun", noted):
        call()
    return found


def messages_of_a_save_and_of_a_scatter(path: Path) -> tuple[Messages, Messages]:
    group = dist.new_group(backend="gloo")
    state = own_state(dist.get_rank(), "saved")
    options: dict[str, Any] = {"process_group": group, "timeout_s": AMPLE_S}
    with fan_out_of(2):
        saving = messages_of(lambda: torch_ckpt.save(state, checkpoint_id=path, **options))
    # The same object for all but the last two.
    values = [bytes(1 << 20)] * 6 + [b"", b""] if dist.get_rank() == 0 else None
    with fan_out_of(2), bounded_call(AMPLE_S, group=group):
        exchange = BoundedExchange(group, True, 0)
        scattering = messages_of(lambda: exchange.scatter_object(values))
    return saving, scattering


def test_rank_exchanges_messages_with_its_parent_and_children_alone(
    worlds: Worlds, tmp_path: Path
) -> None:
    tree = Tree.over([0] * 8, fan_out=2)
    for rank, (saving, _) in enumerate(
        worlds.run(8, messages_of_a_save_and_of_a_scatter, tmp_path)
    ):
        near = {*tree.children[rank], tree.parents[rank]} - {-1}
        assert len(near) <= 3
        assert {peer for _, peer, _ in saving} == near


def test_value_for_several_ranks_is_sent_once_over_each_way(worlds: Worlds, tmp_path: Path) -> None:
    """Six of eight ranks are given the same MiB. The tree is 0(1(2(3) 4) 5(6 7))."""
    found = worlds.run(8, messages_of_a_save_and_of_a_scatter, tmp_path)
    for rank, (_, messages) in enumerate(found):
        sent = {peer: 0 for kind, peer, _ in messages if kind == "isend"}
        for kind, peer, nbytes in messages:
            if kind == "isend":
                sent[peer] += nbytes
        for peer, nbytes in sent.items():
            assert (nbytes > 1 << 20) == (peer < 6), (rank, peer)
            assert nbytes < (1 << 20) + (1 << 15), (rank, peer)


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
    with fan_out_of(2), pytest.raises(CheckpointException) as caught:
        torch_ckpt.save(
            own_state(dist.get_rank(), "new"),
            checkpoint_id=path,
            planner=planner,
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
    """Does something else, once, on one rank: before it sends, or before the rest of what it sends.

    Args:
        step: The method of an exchange within which it is to happen: up, down or scattered.
        skip: How many times it is not to happen there.
    """

    def __init__(
        self, step: str, rank: int, is_rest: bool, function: Callable[[], None], skip: int = 0
    ) -> None:
        self.step, self.is_rest, self.function, self.skip = step, is_rest, function, skip
        self.is_due = dist.get_rank() == rank
        self.within = False

    def __enter__(self) -> None:
        stepping, begun = getattr(_Passing, self.step), _Passing._begun

        def step(passing: Any, *args: Any, **kwargs: Any) -> Any:
            self.skip -= 1
            self.within = self.skip < 0
            try:
                return stepping(passing, *args, **kwargs)
            finally:
                self.within = False

        def begin(passing: Any, operation: Any, tensors: Any, peers: Any, number: int) -> Any:
            if self.is_due and self.within and operation is dist.isend and number == self.is_rest:
                self.is_due = False
                self.function()
            return begun(passing, operation, tensors, peers, number)

        self._patches = [
            mock.patch.object(_Passing, self.step, step),
            mock.patch.object(_Passing, "_begun", begin),
        ]
        for patch in self._patches:
            patch.start()

    def __exit__(self, *args: object) -> None:
        for patch in self._patches:
            patch.stop()


def plan_and_write(exchange: BoundedExchange) -> None:
    """As a save does, with as much to send as takes more than a first message."""
    size = exchange.get_world_size()
    exchange.reduce_scatter("plan", lambda: bytes(100_000), lambda _: [bytes(100_000)] * size)
    exchange.all_reduce("write", lambda: bytes(100_000), lambda _: bytes(100_000))
    exchange.all_gather("end", lambda: bytes(100_000))  # Where those done with the last one learn.


def error_of_exchanges(
    group: dist.ProcessGroup, timeout_s: float, interception: Any, expected: type[BaseException]
) -> BaseException:
    """Of one call that succeeds, and one that a rank makes fail."""
    for failing in (False, True):
        with fan_out_of(2), bounded_everywhere(timeout_s), on_nodes():
            exchange = BoundedExchange(group, True, 0)
            if not failing:
                plan_and_write(exchange)
            else:
                with interception, pytest.raises(expected) as caught:
                    plan_and_write(exchange)
    return caught.value


def exchanges(group: dist.ProcessGroup, timeout_s: float, interception: Any) -> Failure:
    """What all ranks see of the call that one of them makes fail."""
    error = error_of_exchanges(group, timeout_s, interception, RankTimeoutError)
    assert isinstance(error, RankTimeoutError)
    return Failure(error.ranks, error.phase, error.may_be_committed, str(error))


FREEZE_S = 12.0  # Of which an exchange takes the less, the higher the tree is.


def exchange_with_a_rank_that_ends(
    step: str, victim: int, is_rest: bool, skip: int, number: signal.Signals
) -> Failure:
    timeout_s = FREEZE_S if number == signal.SIGSTOP else AMPLE_S
    group = dist.new_group(backend="gloo")
    end = Interception(step, victim, is_rest, lambda: os.kill(os.getpid(), number), skip)
    begin = time.monotonic()
    failure = exchanges(group, timeout_s, end)
    assert time.monotonic() - begin < (timeout_s if number == signal.SIGSTOP else 0) + MARGIN_S
    return failure


# The tree is 0(1(3(4) 7) 5 2 6): node 7 has ranks 0, 2 and 6; node 3 has 1, 3, 4 and 7; 9 has 5.
ENDS = {
    "a_leaf_before_it_sends": (7, "up", False, 0, ("planning", False)),
    "a_leader_of_a_node_before_it_sends": (1, "up", False, 0, ("planning", False)),
    "a_leader_of_a_node_as_it_sends": (1, "up", True, 0, ("planning", False)),
    "the_coordinator_before_it_scatters": (0, "scattered", False, 0, ("planning", False)),
    "the_coordinator_as_it_scatters": (0, "scattered", True, 0, ("planning", False)),
    "an_inner_rank_as_it_scatters": (3, "scattered", True, 0, ("planning", False)),
    "a_leader_of_a_node_as_it_broadcasts": (1, "down", False, 0, ("committing", True)),
    "a_leaf_before_it_sends_to_all": (5, "up", False, 2, ("end", False)),
}
FREEZES = [
    "a_leaf_before_it_sends",
    "an_inner_rank_as_it_scatters",
    "a_leaf_before_it_sends_to_all",
]


@pytest.mark.thin(
    "the_coordinator_before_it_scatters-9",
    "an_inner_rank_as_it_scatters-9",
    "a_leader_of_a_node_as_it_broadcasts-9",
    "a_leaf_before_it_sends-19",
)
@pytest.mark.parametrize(
    ("end", "number"),
    [(end, signal.SIGKILL) for end in ENDS] + [(end, signal.SIGSTOP) for end in FREEZES],
)
def test_rank_that_dies_or_freezes_in_an_exchange_is_named_to_all_others_in_time(
    end: str, number: signal.Signals
) -> None:
    victim, step, is_rest, skip, expected = ENDS[end]
    args = exchange_with_a_rank_that_ends, step, victim, is_rest, skip, number
    with mortal_ranks(8, None, *args) as pipes:
        survivors = set(range(8)) - {victim}
        seen = []
        for rank in survivors:
            assert pipes[rank].poll(LIMIT_S), f"rank {rank} hangs"
            seen.append(pipes[rank].recv())
    assert seen == [seen[0]] * 7
    phase, may_be_committed = expected
    # Several ranks wait for one that is frozen; on a slow machine, one of a later phase may give up
    # first.
    phases = {phase, "writing"} if number == signal.SIGSTOP and phase == "planning" else {phase}
    assert (seen[0].ranks, seen[0].may_be_committed) == ((victim,), may_be_committed)
    assert seen[0].phase in phases
    assert f"rank {victim} " in seen[0].message


def exchange_as_one_is_stuck(path: Path, fifo: Path, step: str, victim: int) -> Failure:
    """The next save goes on while the exchange that was given up is stuck, and as it goes on."""
    group = dist.new_group(backend="gloo")
    options: dict[str, Any] = {"process_group": group, "timeout_s": AMPLE_S}
    rank = dist.get_rank()
    threads = set(threading.enumerate())
    failure = exchanges(group, FREEZE_S, Interception(step, victim, True, lambda: hold(fifo)))
    with fan_out_of(2):
        for version in ("stuck", "going on"):
            state = own_state(rank, version)
            torch_ckpt.save(state, checkpoint_id=path / version, **options)
            if version == "stuck" and rank == 0:
                release(fifo)
    for version in ("stuck", "going on"):
        loaded = own_state(rank, "of no version")
        torch_ckpt.load(loaded, checkpoint_id=path / version, **options)
        assert_same(loaded, own_state(rank, version))
    for thread in set(threading.enumerate()) - threads:
        if thread.name == "torch_ckpt-tree":
            thread.join(MARGIN_S)
            assert not thread.is_alive()  # All that was sent has been received.
    ones = torch.ones(1000)
    dist.all_reduce(ones, group=group)
    assert ones.eq(8).all()
    return failure


@pytest.mark.thin("scattered-1")
@pytest.mark.parametrize(("step", "victim"), [("up", 3), ("scattered", 0), ("scattered", 1)])
def test_exchange_that_was_given_up_disturbs_none_after_it(
    worlds: Worlds, tmp_path: Path, step: str, victim: int
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    seen = worlds.run(8, exchange_as_one_is_stuck, tmp_path, fifo, step, victim, timeout_s=LIMIT_S)
    assert seen == [seen[0]] * 8
    assert seen[0].ranks == (victim,)  # It finds that out itself.


def exchange_in_which_a_rank_raises(step: str, failing: int) -> Failure:
    def lack_memory() -> None:
        raise MemoryError("no memory for a message")

    group = dist.new_group(backend="gloo")
    return exchanges(group, AMPLE_S, Interception(step, failing, False, lack_memory))


@pytest.mark.thin("up-3", "scattered-0")
@pytest.mark.parametrize(("step", "failing"), [("up", 3), ("scattered", 0), ("scattered", 1)])
def test_rank_that_raises_in_an_exchange_is_named_to_all_at_once(
    worlds: Worlds, step: str, failing: int
) -> None:
    seen = worlds.run(8, exchange_in_which_a_rank_raises, step, failing, timeout_s=LIMIT_S)
    assert seen == [seen[0]] * 8
    assert seen[0][:2] == ((failing,), "planning")
    assert "MemoryError: no memory for a message" in seen[0].message


def exchange_interrupted(fifo: Path) -> Failure | None:
    """Rank 1 is interrupted as it waits for a message of rank 3, which waits for rank 4."""
    group = dist.new_group(backend="gloo")
    holding = Interception("up", 4, False, lambda: hold(fifo))
    if dist.get_rank() != 1:
        return exchanges(group, AMPLE_S, holding)
    signal.signal(signal.SIGALRM, signal.default_int_handler)

    @contextlib.contextmanager
    def alarm() -> Iterator[None]:
        signal.setitimer(signal.ITIMER_REAL, 2 * DEADLINE_S)
        yield

    error_of_exchanges(group, AMPLE_S, alarm(), KeyboardInterrupt)
    release(fifo)
    return None


def test_interrupt_of_a_rank_in_an_exchange_is_told_to_the_others_at_once(
    worlds: Worlds, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    seen = worlds.run(8, exchange_interrupted, fifo, timeout_s=LIMIT_S)
    assert seen.pop(1) is None
    assert seen == [seen[0]] * 7
    assert seen[0][:3] == ((1,), "planning", False)
    assert "KeyboardInterrupt" in seen[0].message


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


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_time_limit_goes_with_a_save_to_where_it_is_carried_out(
    worlds: Worlds, tmp_path: Path, executor: str
) -> None:
    seen = worlds.run(2, limits_of_a_save_in_the_background, tmp_path, executor, timeout_s=90)
    assert seen == [[f"{float(LIMIT_S)}", f"{float(LIMIT_S + 1)}"]] * 2
