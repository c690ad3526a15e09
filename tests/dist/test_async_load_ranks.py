"""Asynchronous loads of several ranks: beside a training, with failures, and cancelled."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from torch_ckpt import FastReader, RankState
from torch_ckpt.errors import CancelledError, RankTimeoutError
from torch_ckpt.planning.load_report import LoadReport

pytestmark = pytest.mark.timeout(150)


def sharded(value: float, device: str = "cpu") -> DTensor:
    local = torch.full((3, 5), value, device=device)
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(local, mesh, [Shard(0)], shape=(6, 5), stride=(5, 1))


def state_of(value: float) -> dict[str, Any]:
    large = torch.full((8 << 20,), value)  # So large that the ranks exchange reads.
    own = f"own{dist.get_rank()}"
    return {"w": sharded(value), "large": large, "m": {own: torch.full((2,), value)}, "n": value}


def assert_has(state: dict[str, Any], value: float) -> None:
    assert state["w"].to_local().eq(value).all()
    assert state["large"].eq(value).all()
    assert state["m"][f"own{dist.get_rank()}"].eq(value).all()
    assert state["n"] == value


@on_ranks(2)
def test_a_load_beside_collectives_and_a_save_has_the_values_of_stock(path: Path) -> None:
    torch_ckpt.save(state_of(1.0), checkpoint_id=path / "a")
    state, by_stock = state_of(0.0), state_of(0.0)
    future = torch_ckpt.async_load(state, checkpoint_id=path / "a")
    for _ in range(100):  # Training goes on in the process group.
        dist.all_reduce(torch.ones(1))
    torch_ckpt.save({"other": torch.ones(3)}, checkpoint_id=path / "b")
    assert_has(state, 0.0)
    assert future.result() == LoadReport()
    assert_has(state, 1.0)
    dcp.load(by_stock, storage_reader=FileSystemReader(path / "a"))
    assert_has(by_stock, 1.0)


@on_ranks(2)
def test_two_loads_at_once_and_results_in_any_order(path: Path) -> None:
    for number in (1.0, 2.0):
        torch_ckpt.save(state_of(number), checkpoint_id=path / str(number))
    states = {number: state_of(0.0) for number in (1.0, 2.0)}
    futures = {
        number: torch_ckpt.async_load(states[number], checkpoint_id=path / str(number))
        for number in states
    }
    order = sorted(futures, reverse=bool(dist.get_rank()))
    threads = [threading.Thread(target=futures[number].result) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, state in states.items():
        assert_has(state, number)


@on_ranks(2)
def test_a_sharded_model_on_the_meta_device_and_states_of_ranks_load(path: Path) -> None:
    rank = dist.get_rank()
    found: list[Any] = []
    torch_ckpt.save({"w": sharded(1.0), "r": RankState(lambda: rank, print)}, checkpoint_id=path)
    state: dict[str, Any] = {"w": sharded(0.0, "meta"), "r": RankState(lambda: -1, found.append)}
    future = torch_ckpt.async_load(state, checkpoint_id=path)
    assert not found
    future.result()
    assert found == [rank]
    assert state["w"].to_local().eq(1.0).all()


@on_ranks(2)
def test_a_load_on_another_number_of_ranks(path: Path) -> None:
    rank = dist.get_rank()
    if rank == 0:
        torch_ckpt.save({"w": torch.arange(30.0).view(6, 5)}, checkpoint_id=path, no_dist=True)
    dist.barrier()
    state = {"w": sharded(0.0)}
    torch_ckpt.async_load(state, checkpoint_id=path).result()
    expected = torch.arange(30.0).view(6, 5)[3 * rank : 3 * rank + 3]
    assert torch.equal(state["w"].to_local(), expected)


# ---- Failures ----


@on_ranks(2)
def test_a_rank_that_cannot_plan_fails_the_result_of_all(path: Path) -> None:
    rank = dist.get_rank()
    torch_ckpt.save(state_of(1.0), checkpoint_id=path)
    state = state_of(0.0) | ({"absent": 1} if rank else {})
    future = torch_ckpt.async_load(state, checkpoint_id=path, timeout_s=60)
    with pytest.raises(CheckpointException) as caught:
        future.result()
    assert set(caught.value.failures) == {1}
    assert "absent" in str(caught.value.failures[1][0])
    assert_has(state, 0.0)
    assert not future.cancel()
    torch_ckpt.async_load(state_of(0.0), checkpoint_id=path).result()


class _Refusing:
    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1 and self.at == "state_dict":
            raise ZeroDivisionError("of the program")
        return {"x": torch.zeros(1)}

    def load_state_dict(self, _: Any) -> None:
        if dist.get_rank() == 1 and self.at == "load_state_dict":
            raise ZeroDivisionError("of the program")

    def __init__(self, at: str) -> None:
        self.at = at


@pytest.mark.parametrize("at", ["state_dict", "load_state_dict"])
@on_ranks(2)
def test_a_rank_that_fails_in_its_own_code_fails_the_others(path: Path, at: str) -> None:
    rank = dist.get_rank()
    torch_ckpt.save({"o": _Refusing("")}, checkpoint_id=path)

    def load() -> None:
        torch_ckpt.async_load({"o": _Refusing(at)}, checkpoint_id=path, timeout_s=60).result()

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError if rank else RankTimeoutError, match="of the program"):
        load()
    assert time.monotonic() - began < 30
    torch_ckpt.async_load({"o": _Refusing("")}, checkpoint_id=path).result()


class _Held(FastReader):
    """Reads when it may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_read = threading.Event()

    def read_data(self, plan: Any, planner: Any) -> Any:
        assert self.may_read.wait(60)
        return super().read_data(plan, planner)


@pytest.mark.parametrize("when", ["at once", "during the reads", "after the reads"])
@on_ranks(2)
def test_a_rank_that_cancels_ends_the_load_of_all(path: Path, when: str) -> None:
    rank = dist.get_rank()
    torch_ckpt.save(state_of(1.0), checkpoint_id=path)
    state, reader = state_of(0.0), _Held(path)
    if when == "after the reads":
        reader.may_read.set()
    future = torch_ckpt.async_load(state, storage_reader=reader, timeout_s=100)
    if when == "after the reads":
        while not future.done():
            time.sleep(0.01)
    if when != "at once":
        dist.barrier()
    began = time.monotonic()
    if rank:
        assert future.cancel()
        with pytest.raises(CancelledError, match=r"the asynchronous load of .* was cancelled"):
            future.result()
        reader.may_read.set()
    else:
        reader.may_read.set()
        with pytest.raises(RankTimeoutError, match=r"rank 1 failed .* was cancelled"):
            future.result()
        assert not future.cancel()
    assert time.monotonic() - began < 30
    if rank or when != "after the reads":
        assert_has(state, 0.0)
    later = state_of(0.0)
    torch_ckpt.load(later, checkpoint_id=path)  # Later calls work.
    assert_has(later, 1.0)


@on_ranks(2)
def test_all_ranks_may_cancel(path: Path) -> None:
    torch_ckpt.save(state_of(1.0), checkpoint_id=path)
    state = state_of(0.0)
    future = torch_ckpt.async_load(state, checkpoint_id=path, timeout_s=60)
    dist.barrier()
    future.cancel()
    with pytest.raises((CancelledError, RankTimeoutError)):
        future.result()
    torch_ckpt.load(state, checkpoint_id=path)
    assert_has(state, 1.0)


@on_ranks(2)
def test_a_rank_that_never_takes_its_result_is_late_on_the_other(path: Path) -> None:
    rank = dist.get_rank()
    torch_ckpt.save(state_of(1.0), checkpoint_id=path)
    future = torch_ckpt.async_load(state_of(0.0), checkpoint_id=path, timeout_s=2)
    while not future.done():
        time.sleep(0.01)
    if rank:
        with pytest.raises(RankTimeoutError, match="rank 0"):
            future.result()
    dist.barrier()
    if rank == 0:
        with pytest.raises(RankTimeoutError):
            future.result()
    torch_ckpt.load(state_of(0.0), checkpoint_id=path)
