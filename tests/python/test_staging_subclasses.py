"""What SnapshotStager makes of wrapper subclasses, of objects, of long waits and of forks."""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import load
from support.resumable_states import equal
from support.tight import TightStager
from torch.testing._internal.two_tensor import TwoTensor
from waits import until

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, SnapshotStager
from torch_ckpt._core import _native
from torch_ckpt.coordination import waiting

pytestmark = pytest.mark.timeout(120)


def wrapper(value: float) -> TwoTensor:
    return TwoTensor(torch.full((300, 700), value), torch.full((300, 700), -value))


def in_snapshot(tensor: torch.Tensor, snapshot: _native.Snapshot) -> bool:
    begin = torch.frombuffer(snapshot, dtype=torch.uint8).data_ptr()
    return begin <= tensor.data_ptr() < begin + snapshot.nbytes


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_inner_tensors_of_a_wrapper_are_staged_in_the_snapshot(requires_grad: bool) -> None:
    live = wrapper(3.0).requires_grad_(requires_grad)
    snapshots = []
    allocate = _native.Snapshot

    def allocate_recorded(*arguments: int) -> _native.Snapshot:
        snapshots.append(allocate(*arguments))
        return snapshots[-1]

    with mock.patch.object(_native, "Snapshot", allocate_recorded):
        state: Any = SnapshotStager().stage(
            {"w": live, "deep": TwoTensor(wrapper(1.0), wrapper(2.0))}
        )
    (snapshot,) = snapshots
    with torch.no_grad():
        live.a.zero_()
        live.b.zero_()
    assert equal(state["w"].detach(), wrapper(3.0))
    assert state["w"].requires_grad is requires_grad
    assert in_snapshot(state["w"].a, snapshot)
    assert in_snapshot(state["w"].b, snapshot)
    assert in_snapshot(state["deep"].b.a, snapshot)


def test_an_inner_tensor_is_staged_though_the_rank_does_not_write_it_by_itself() -> None:
    stager = SnapshotStager()
    live = wrapper(3.0)
    state, _ = stager.begin({"w": live, "inner": live.a}, left_out={id(live.a)})
    assert equal(state["w"], wrapper(3.0))
    assert not state["inner"].untyped_storage().nbytes()


class CopiesInner(TwoTensor):
    """A wrapper that does not keep what it is given."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> torch.Tensor:
        return CopiesInner(inner["a"].clone(), inner["b"].clone())


def test_a_wrapper_that_keeps_other_tensors_is_copied_by_itself() -> None:
    stager = SnapshotStager()
    live = CopiesInner(torch.ones(4), torch.zeros(4))
    with mock.patch.object(CopiesInner, "__torch_dispatch__", TwoTensor.__torch_dispatch__):
        state: Any = stager.stage({"w": live})
    live.a.zero_()
    assert torch.equal(state["w"].a, torch.ones(4))


class Looks:
    """An object that looks at its tensor as it is put together."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.total = float(tensor.sum())

    def __getstate__(self) -> torch.Tensor:
        return self.tensor

    def __setstate__(self, tensor: torch.Tensor) -> None:
        self.__init__(tensor)


def test_an_object_that_looks_at_its_tensors_finds_their_values() -> None:
    tensor = torch.arange(5.0)
    state: Any = SnapshotStager().stage({"object": Looks(tensor), "t": tensor})
    assert state["object"].total == 10.0
    tensor.zero_()
    assert float(state["object"].tensor.sum()) == 10.0
    assert float(state["t"].sum()) == 10.0


class Sums:
    """An object with a copy of its own, which looks at the tensor's copy."""

    def __init__(self, tensor: torch.Tensor, total: float = 0.0) -> None:
        self.tensor = tensor
        self.total = total

    def __deepcopy__(self, memo: dict[int, Any]) -> Sums:
        tensor = copy.deepcopy(self.tensor, memo)
        return Sums(tensor, float(tensor.sum()))


def test_an_object_with_a_copy_of_its_own_finds_values_of_tensors_beside_it() -> None:
    tensor, live = torch.arange(5.0), wrapper(2.0)
    state: Any = SnapshotStager().stage(
        {"t": tensor, "w": live, "o": Sums(tensor), "p": Sums(live)}
    )
    assert state["o"].total == 10.0
    assert equal(state["p"].tensor, wrapper(2.0))


def test_views_parameters_and_attributes_within_an_object_stay_what_they_are() -> None:
    whole = torch.arange(6.0)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = "mine"  # type: ignore[attr-defined]
    state: Any = SnapshotStager().stage({"o": (whole, whole[2:4], parameter)})
    first, view, copied = state["o"]
    first[2] = 9.0
    assert view[0] == 9.0
    assert whole[2] == 2.0
    assert type(copied) is torch.nn.Parameter
    assert copied.tag == "mine"


def test_a_generator_is_saved_asynchronously_as_it_was(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    before = generator.get_state()
    future = torch_ckpt.async_save({"g": generator}, checkpoint_id=tmp_path, no_dist=True)
    torch.rand(5, generator=generator)
    future.result()
    loaded = load({"g": None}, FastReader(tmp_path))["g"]
    assert torch.equal(loaded.get_state(), before)


def test_a_wrapper_that_does_not_fit_in_memory_is_written_before_training_goes_on(
    tmp_path: Path,
) -> None:
    live = {"plain": torch.ones(200_000), "w": wrapper(5.0)}
    writer = FastWriter(tmp_path, stager=TightStager())
    future = dcp.async_save(live, storage_writer=writer, no_dist=True)
    live["w"].a.zero_()
    live["plain"].zero_()
    future.result()
    target = {"plain": torch.zeros(200_000), "w": wrapper(0.0)}
    with torch.serialization.safe_globals([TwoTensor]):
        load(target, FastReader(tmp_path))
    assert equal(target, {"plain": torch.ones(200_000), "w": wrapper(5.0)})


def test_a_long_wait_is_logged_and_says_what_for(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    stager = SnapshotStager()
    writer = FastWriter(tmp_path / "step-1", stager=stager)
    kept = writer.stage({"w": torch.ones(3)})
    done: list[Any] = []
    with (
        mock.patch.object(waiting, "LOG_S", 0.05),
        caplog.at_level(logging.WARNING, "torch_ckpt"),
    ):
        thread = threading.Thread(target=lambda: done.append(stager.stage({"w": torch.ones(3)})))
        thread.start()
        until(lambda: caplog.records)
        assert thread.is_alive()
        del kept
        gc.collect()
        thread.join(30)
    assert len(done) == 1
    record = caplog.records[0]
    for part in (
        "at most 1800 s",
        str(tmp_path / "step-1"),
        "refers to what stage() returned",
    ):
        assert part in record.getMessage()


def test_no_wait_is_logged_where_it_is_short(caplog: pytest.LogCaptureFixture) -> None:
    stager = SnapshotStager()
    kept: Any = stager.stage({"w": torch.ones(3)})
    timer = threading.Timer(0.2, lambda: kept.clear())
    timer.start()
    stager.stage({"w": torch.ones(3)})
    timer.join()
    assert not caplog.records


@pytest.mark.filterwarnings("ignore:This process.*use of fork:DeprecationWarning")
def test_a_forked_child_stages_at_once_what_its_parent_has_in_use() -> None:
    stager = SnapshotStager()
    kept: Any = stager.stage({"w": torch.ones(3)})
    with stager._lock:  # As another thread of the parent may have it.
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert not stager.is_busy
                staged: Any = stager.stage({"w": torch.full((3,), 2.0)})
                assert torch.equal(staged["w"], torch.full((3,), 2.0))
                assert torch.equal(kept["w"], torch.ones(3))
                kept.clear()
                gc.collect()
                assert stager.is_busy  # By what the child itself has staged.
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(kept["w"], torch.ones(3))
    assert stager.is_busy
