"""An asynchronous load reads into host memory, and changes the state only by `result()`."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections import OrderedDict, UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import failure_of
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import FastReader
from torch_ckpt.errors import CancelledError, CheckpointError, CorruptionError
from torch_ckpt.planning.load_report import LoadReport
from torch_ckpt.storage import host_load

pytestmark = pytest.mark.timeout(60)


def state_of(value: float) -> dict[str, Any]:
    base = torch.full((6,), value)
    model = {
        "a": torch.full((1000, 300), value),
        "strided": torch.full((4, 6), value).t(),
        "half": torch.full((5,), value, dtype=torch.bfloat16),
        "view": base[:3],
        "rest": base[3:],
        "scalar": torch.tensor(value),
        "empty": torch.empty(0, 3),
    }
    return {"model": model, "list": [torch.full((2,), value), value], "step": int(value)}


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_equal(*pair)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch_ckpt.save(state_of(1.0), checkpoint_id=tmp_path / "saved")
    return tmp_path / "saved"


def held_by(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Collects the targets of loads and their host memory."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    planner = host_load._HostPlanner
    held = planner._held

    def noted(self: Any, fqn: str, target: torch.Tensor) -> Any:
        made.append(held(self, fqn, target))
        return made[-1]

    monkeypatch.setattr(planner, "_held", noted)
    return made


def test_nothing_changes_before_the_result_and_then_all_values_are_those_of_stock(
    path: Path,
) -> None:
    state, by_stock = state_of(0.0), state_of(0.0)
    tensors = dict(state["model"])
    containers = state["model"], state["list"]
    future = torch_ckpt.async_load(state, checkpoint_id=path)
    while not future.done():
        assert_equal(state, state_of(0.0))
    assert_equal(state, state_of(0.0))
    state["model"]["a"].fill_(7)  # An evaluation may change elements.
    assert future.result() == LoadReport()
    dcp.load(by_stock, storage_reader=FileSystemReader(path))
    assert_equal(state, by_stock)
    assert all(state["model"][name] is tensor for name, tensor in tensors.items())
    assert state["model"] is containers[0]
    assert state["list"] is containers[1]
    assert future.result() == LoadReport()
    state["model"]["a"].fill_(3)
    future.result()  # Does not copy again.
    assert state["model"]["a"][0, 0] == 3


def test_a_model_on_the_meta_device_gets_the_host_memory_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = held_by(monkeypatch)
    with torch.device("meta"):
        state: dict[str, Any] = {"model": {"a": torch.empty(1000, 300), "half": torch.empty(5)}}
    future = torch_ckpt.async_load(state, checkpoint_id=path)
    future.result()
    assert all(host is target for target, host in made)
    assert torch.equal(state["model"]["a"], torch.ones(1000, 300))
    assert torch.equal(state["model"]["half"], torch.ones(5))


def test_objects_are_restored_by_the_result(tmp_path: Path) -> None:
    def made(value: float) -> dict[str, Any]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=value)
        model(torch.full((3,), value)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "nested": {"more": [model, 3]}}

    saved = made(1.0)
    torch_ckpt.save(saved, checkpoint_id=tmp_path)
    live = made(0.5)
    before = copy.deepcopy(live["optimizer"].state_dict())
    future = torch_ckpt.async_load(live, checkpoint_id=tmp_path)
    while not future.done():
        pass
    assert_equal(live["optimizer"].state_dict(), before)
    future.result()
    assert_equal(live["optimizer"].state_dict(), saved["optimizer"].state_dict())
    assert_equal(dict(live["model"].state_dict()), dict(saved["model"].state_dict()))


class _Facts:
    """An object whose state dict is its own, with an attribute as torch's have it."""

    def __init__(self, value: int) -> None:
        self.facts: OrderedDict[str, Any] = OrderedDict(count=value, inner={"list": [value, "x"]})
        self.facts._metadata = "version"  # type: ignore[attr-defined]
        self.loaded_attribute = ""

    def state_dict(self) -> OrderedDict[str, Any]:
        return self.facts

    def load_state_dict(self, state: Any) -> None:
        self.facts, self.loaded_attribute = state, state._metadata


@pytest.mark.parametrize("ends", ["result", "cancel"])
def test_the_own_state_dict_of_an_object_changes_only_by_the_result(
    ends: str, tmp_path: Path
) -> None:
    torch_ckpt.save({"a": _Facts(1), "in": [_Facts(2)]}, checkpoint_id=tmp_path)
    facts = _Facts(0), _Facts(0)
    future = torch_ckpt.async_load({"a": facts[0], "in": [facts[1]]}, checkpoint_id=tmp_path)
    while not future.done():
        pass
    for each in facts:
        assert_equal(each.facts, _Facts(0).facts)
    getattr(future, ends)()
    for each, value in zip(facts, (1, 2) if ends == "result" else (0, 0), strict=True):
        assert_equal(each.facts, _Facts(value).facts)
        assert each.loaded_attribute == ("version" if ends == "result" else "")


class _Mapped:
    """An object whose state is a mapping of its own, and no dict."""

    def __init__(self, count: int) -> None:
        self.facts: Any = UserDict(count=count, inner={"list": [count, "x"]})

    def state_dict(self) -> Any:
        return self.facts

    def load_state_dict(self, state: Any) -> None:
        self.facts = UserDict(state)


def test_the_own_mapping_of_an_object_changes_only_by_the_result(tmp_path: Path) -> None:
    torch_ckpt.save({"a": _Mapped(1)}, checkpoint_id=tmp_path)
    mapped = _Mapped(0)
    future = torch_ckpt.async_load({"a": mapped}, checkpoint_id=tmp_path)
    while not future.done():
        pass
    assert mapped.facts == _Mapped(0).facts
    future.result()
    assert mapped.facts == _Mapped(1).facts


@pytest.mark.parametrize("by", ["ours", "stock"])
def test_a_list_that_is_stored_as_one_object_replaces_another(by: str, tmp_path: Path) -> None:
    stored = {"m": {"w": torch.ones(2), "losses": [1.0, 2.0, 3.0], "none": None}}
    if by == "ours":
        torch_ckpt.save(stored, checkpoint_id=tmp_path)
    else:
        dcp.save(stored, storage_writer=FileSystemWriter(tmp_path))
    loaded: list[Any] = []
    for load in (torch_ckpt.load, lambda *a, **k: torch_ckpt.async_load(*a, **k).result()):
        state: dict[str, Any] = {"m": {"w": torch.zeros(2), "losses": [], "none": 3}}
        error = None
        try:
            load(state, checkpoint_id=tmp_path)
        except CheckpointException as caught:
            error = str(caught.failures[0][0]).partition("\n")[0]
        loaded.append((state, error))
    assert_equal(loaded[1][0], loaded[0][0])
    assert loaded[1][1] == loaded[0][1]


def test_a_dict_that_refuses_changes_is_filled_as_by_a_load(tmp_path: Path) -> None:
    class Frozen(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            raise TypeError("it does not change")

    torch_ckpt.save({"m": {"a": {"w": torch.ones(3)}}}, checkpoint_id=tmp_path)
    for load in (torch_ckpt.load, lambda *s, **o: torch_ckpt.async_load(*s, **o).result()):
        target = {"m": Frozen(a={"w": torch.zeros(3)})}
        load(target, checkpoint_id=tmp_path)
        assert target["m"]["a"]["w"].all()


def test_a_lenient_load_leaves_missing_values_and_reports_them(path: Path) -> None:
    state = {"model": {"a": torch.zeros(1000, 300), "new": torch.full((2,), 5.0)}}
    state["model"]["half"] = torch.zeros(5)
    report = torch_ckpt.async_load(state, checkpoint_id=path, strict=False).result()
    assert report is not None
    assert report.missing == ("model.new",)
    assert report.cast == ("model.half",)
    assert "step" in (report.unused or ())
    assert state["model"]["new"].tolist() == [5.0, 5.0]
    assert torch.equal(state["model"]["a"], torch.ones(1000, 300))


@pytest.mark.parametrize("order", [1, -1])
def test_targets_that_share_memory_get_the_values_in_the_order_of_a_load(
    order: int, tmp_path: Path
) -> None:
    names = ["a", "b", "c"][::order]
    torch_ckpt.save({n: torch.full((3,), float(ord(n))) for n in names}, checkpoint_id=tmp_path)
    found = []
    for is_async in (False, True):
        base = torch.zeros(5)
        state = {"a": base[:3], "b": base[1:4], "c": base[2:]}
        if is_async:
            torch_ckpt.async_load(state, checkpoint_id=tmp_path).result()
        else:
            torch_ckpt.load(state, checkpoint_id=tmp_path)
        found.append(base.tolist())
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_another_reader_loads_into_host_memory_too(path: Path) -> None:
    state = state_of(0.0)
    future = torch_ckpt.async_load(state, storage_reader=FileSystemReader(path))
    assert future.result() is None
    assert_equal(state, state_of(1.0))


# ---- Errors ----


def test_the_errors_are_those_of_a_load(path: Path) -> None:
    for state in ({"absent": torch.zeros(1)}, {"model": {"a": torch.zeros(3)}}):
        expected = failure_of(torch_ckpt.load, copy.deepcopy(state), checkpoint_id=path)
        future = torch_ckpt.async_load(state, checkpoint_id=path)
        found = failure_of(future.result)
        assert type(found) is type(expected)
        assert str(found) == str(expected)
        assert failure_of(future.result) is found
        assert future.done()
        assert not future.cancel()
    expected = failure_of(lambda: torch_ckpt.load({}, checkpoint_id=path / "absent"))
    found = failure_of(torch_ckpt.async_load({}, checkpoint_id=path / "absent").result)
    assert str(found) == str(expected)


@pytest.mark.parametrize("is_shared", [False, True])
def test_damage_is_found_by_the_reads_and_leaves_the_state_and_no_memory(
    is_shared: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [file] = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    state, made = state_of(0.0), held_by(monkeypatch)
    if is_shared:
        state["model"]["rest"] = state["model"]["view"]
    future = torch_ckpt.async_load(state, checkpoint_id=path)
    assert isinstance(failure_of(future.result), CorruptionError)
    assert_equal(state, state_of(0.0))
    left = [weakref.ref(host) for _, host in made]
    assert left
    made.clear()
    assert not any(ref() is not None for ref in left)


def test_elements_that_share_memory_are_checked_after_the_copies(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.arange(6.0).view(3, 2)}, checkpoint_id=tmp_path)
    state = {"w": torch.zeros(4).unfold(0, 2, 1)}
    future = torch_ckpt.async_load(state, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="cannot load 'w': elements of its target share memory"):
        future.result()


class _Refusing:
    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.zeros(2)}

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("refused")


@pytest.mark.parametrize("fails", ["the reads", "the copies", "an object"])
def test_the_targets_of_a_failed_load_live_no_longer_than_its_error(
    fails: str, tmp_path: Path
) -> None:
    stored = {"w": torch.arange(6.0).view(3, 2), "object": {"w": torch.ones(2)}}
    torch_ckpt.save(stored, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"w": torch.zeros(3, 2)}
    if fails == "the reads":
        state["absent"] = torch.zeros(1)
    elif fails == "the copies":
        state["w"] = torch.zeros(4).unfold(0, 2, 1)
    else:
        state["object"] = _Refusing()
    future = torch_ckpt.async_load(state, checkpoint_id=tmp_path)
    left = weakref.ref(future), *map(weakref.ref, state.values())
    gc.disable()
    try:
        with pytest.raises((ValueError, CheckpointException)) as raised:
            future.result()
        del future, state, raised
        assert [ref() for ref in left] == [None] * len(left)
    finally:
        gc.enable()


def test_wrong_arguments_are_refused_at_once(path: Path) -> None:
    odd: Any = "yes"
    with pytest.raises(ValueError, match="strict='yes' is not True, False or None"):
        torch_ckpt.async_load({}, checkpoint_id=path, strict=odd)
    with pytest.raises(ValueError, match="timeout_s"):
        torch_ckpt.async_load({}, checkpoint_id=path, timeout_s=-1)
    with pytest.raises(ValueError, match="trust_pickle has no effect"):
        torch_ckpt.async_load({}, storage_reader=FastReader(path), trust_pickle=True)


class _Held(FastReader):
    """Reads when it may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.begun, self.may_read = threading.Event(), threading.Event()

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.begun.set()
        assert self.may_read.wait(30)
        return super().read_data(plan, planner)


def test_a_result_that_is_late_can_be_asked_for_again(path: Path) -> None:
    reader, state = _Held(path), state_of(0.0)
    future = torch_ckpt.async_load(state, storage_reader=reader)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    assert not future.done()
    reader.may_read.set()
    assert future.result(timeout=30) == LoadReport()
    assert_equal(state, state_of(1.0))


@pytest.mark.parametrize("when", ["before the reads", "after the reads"])
def test_a_cancelled_load_changes_nothing(when: str, path: Path) -> None:
    reader, state = _Held(path), state_of(0.0)
    if when == "after the reads":
        reader.may_read.set()
    future = torch_ckpt.async_load(state, storage_reader=reader)
    if when == "after the reads":
        while not future.done():
            pass
    else:
        assert reader.begun.wait(30)
    assert future.cancel()
    assert future.done()
    with pytest.raises(CancelledError, match=r"the asynchronous load of .* was cancelled"):
        future.result()
    assert not future.cancel()
    reader.may_read.set()
    assert_equal(state, state_of(0.0))
    torch_ckpt.load(state, checkpoint_id=path)  # Later calls work.
    assert_equal(state, state_of(1.0))


def test_calls_of_a_signal_handler_within_the_copies_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, copy_one, refused = state_of(0.0), host_load.Copies.copy, []

    def copying(self: Any, *arguments: Any) -> None:
        for call in (future.cancel, future.result):  # As in a handler.
            with pytest.raises(CheckpointError, match="which a signal handler has interrupted"):
                call()
            refused.append(call)
        copy_one(self, *arguments)

    monkeypatch.setattr(host_load.Copies, "copy", copying)
    future = torch_ckpt.async_load(state, checkpoint_id=path)
    future.result()
    assert refused
    assert_equal(state, state_of(1.0))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_neither_takes_the_result_nor_cancels(path: Path) -> None:
    state = state_of(0.0)
    future = torch_ckpt.async_load(state, checkpoint_id=path)
    while not future.done():
        pass
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (future.cancel, future.result):
            try:
                call()
            except CheckpointError as error:
                refused += "forked child" in str(error)
        os._exit(2 - refused)
    assert os.waitpid(child, 0)[1] == 0
    future.result()
    assert_equal(state, state_of(1.0))


def test_a_load_that_has_succeeded_is_not_cancelled(path: Path) -> None:
    state = state_of(0.0)
    future = torch_ckpt.async_load(state, checkpoint_id=path)
    future.result()
    assert not future.cancel()
    assert future.result() == LoadReport()


def test_host_memory_is_as_large_as_what_is_loaded_and_freed_by_the_result(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = held_by(monkeypatch)
    state = state_of(0.0)
    future = torch_ckpt.async_load(state, checkpoint_id=path)
    future.result()
    tensors = [*state["model"].values(), state["list"][0]]
    assert sum(host.nbytes for _, host in made) == sum(t.nbytes for t in tensors)
    left = [weakref.ref(host) for _, host in made]
    made.clear()
    assert not any(ref() is not None for ref in left)
