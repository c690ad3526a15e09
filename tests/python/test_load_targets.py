"""Targets of a load: those that cannot be written are named, and the others are never wrong."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import bits, differences, failure_of
from forks import run_python
from support.tensors import Tagged
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.nn import Parameter

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastWriter, FlatShard, Run
from torch_ckpt.planning.local_shards import LocalShards

SAVED = {"a": torch.ones(5), "w": torch.arange(12.0).view(4, 3), "z": torch.ones(5)}

LOADS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "ours": lambda state, path: torch_ckpt.load(state, checkpoint_id=path / "ours"),
    "stock's planner": lambda state, path: dcp.load(
        state, storage_reader=FastReader(path / "ours")
    ),
    "ours, without an index": lambda state, path: torch_ckpt.load(
        state, checkpoint_id=path / "stock"
    ),
    "stock's planner, without an index": lambda state, path: dcp.load(
        state, storage_reader=FastReader(path / "stock")
    ),
    "a file of torch.save": lambda state, path: torch_ckpt.load(
        state, checkpoint_id=path / "file.pt"
    ),
}
OURS = [way for way in LOADS if not way.startswith("stock's planner")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("saved")
    torch_ckpt.save(SAVED, checkpoint_id=path / "ours")
    dcp.save(SAVED, storage_writer=FileSystemWriter(path / "stock"))
    torch.save(SAVED, path / "file.pt")
    return path


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 3)


def freed() -> torch.Tensor:
    tensor = torch.zeros(4, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


def read_only(dtype: Any, path: Path) -> torch.Tensor:
    """A tensor in a file that is mapped to be read: a write to it would end the process."""
    np.zeros(12, dtype=dtype).tofile(path)
    with warnings.catch_warnings(action="ignore"):  # Torch warns of it once in a process.
        return torch.from_numpy(np.memmap(path, dtype=dtype, mode="r")).view(4, 3)


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(4, 3)


# ---- Targets that cannot be written ----

UNWRITABLE: dict[str, tuple[Callable[[Path], torch.Tensor], str]] = {
    "expanded": (lambda _: torch.zeros(3).expand(4, 3), r"share memory .* pass a clone"),
    "expanded half": (lambda _: torch.zeros(4, 1).half().expand(4, 3), r"share memory"),
    "freed": (lambda _: freed(), r"storage has 0 bytes .* 48"),
    "of zeros": (lambda _: torch._efficientzerotensor((4, 3)), r"ZeroTensor.* pass a clone"),
    "a part of zeros": (
        lambda _: torch._efficientzerotensor((5, 3))[1:],
        r"ZeroTensor.* pass a clone",
    ),
    "read-only": (lambda path: read_only(np.float32, path / "r"), r"read-only.* pass a copy"),
    "read-only double": (lambda path: read_only(np.float64, path / "r"), r"read-only"),
    "of a local shard": (
        lambda _: LocalShards([4, 3], [([0, 0], torch.zeros(3).expand(4, 3))]),
        r"share memory",
    ),
    "of a flat shard": (
        lambda path: FlatShard(read_only(np.float32, path / "r").view(-1), "w", [4, 3], 0),
        r"read-only",
    ),
}


@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_target_that_cannot_be_written_is_named_before_any_other_is(
    kind: str, way: str, saved: Path, tmp_path: Path
) -> None:
    make, words = UNWRITABLE[kind]
    state = {"a": torch.zeros(5), "w": make(tmp_path), "z": torch.zeros(5)}
    error = failure_of(lambda: LOADS[way](state, saved))
    assert type(error) is ValueError
    with pytest.raises(ValueError, match=rf"cannot load 'w': .*{words}"):
        raise error
    assert not state["a"].any()
    assert not state["z"].any()


def test_all_targets_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    names = [f"w{number}" for number in range(30)]
    torch_ckpt.save(dict.fromkeys(names, torch.ones(2, 2)), checkpoint_id=tmp_path)
    state = {name: torch.zeros(2).expand(2, 2) for name in names}
    error = failure_of(lambda: torch_ckpt.load(state, checkpoint_id=tmp_path))
    assert "'w0': " in str(error)
    assert "'w19': " in str(error)
    assert "and 10 more" in str(error)


def test_a_target_that_the_checkpoint_lacks_may_be_of_any_kind(saved: Path) -> None:
    state = {"w": torch.zeros(4, 3), "more": torch.zeros(3).expand(4, 3)}
    planner = FastLoadPlanner(allow_partial_load=True)
    torch_ckpt.load(state, checkpoint_id=saved / "ours", planner=planner)
    assert torch.equal(state["w"], SAVED["w"])


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.zeros(4, 3).to_sparse(),
    "fake": fake,
}


@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("kind", OTHERS)
def test_a_target_that_torch_refuses_is_named(kind: str, way: str, saved: Path) -> None:
    state = {"a": torch.zeros(5), "w": OTHERS[kind]()}
    error = failure_of(lambda: LOADS[way](state, saved))
    assert "cannot load 'w'" in str(error)


def test_a_load_into_a_read_only_mapping_does_not_end_the_process(tmp_path: Path) -> None:
    """As a process of its own: without the check, it ends by SIGSEGV."""
    program = f"""
import numpy, torch, torch_ckpt
torch_ckpt.save({{"w": torch.ones(9)}}, checkpoint_id={str(tmp_path / "c")!r})
numpy.zeros(9, dtype=numpy.float64).tofile({str(tmp_path / "r")!r})
target = torch.from_numpy(numpy.memmap({str(tmp_path / "r")!r}, numpy.float64, "r"))
try:
    torch_ckpt.load({{"w": target}}, checkpoint_id={str(tmp_path / "c")!r})
except BaseException as error:
    print(error)
"""
    ended = run_python("-c", program, folder=tmp_path)
    assert ended.returncode == 0
    assert "cannot load 'w'" in ended.stdout


# ---- Targets that can be written ----

WRITABLE: dict[str, Callable[[], torch.Tensor]] = {
    "inference": inference,
    "inference double": lambda: inference().double(),
    "leaf": lambda: Parameter(torch.zeros(4, 3)),
    "view of a leaf": lambda: Parameter(torch.zeros(8, 3))[:4],
    "double view of a leaf": lambda: Parameter(torch.zeros(8, 3).double())[:4],
    "every second element": lambda: torch.zeros(8, 6)[::2, ::2],
    "transposed": lambda: torch.zeros(3, 4).t(),
    "of interleaved strides": lambda: torch.zeros(100).as_strided((4, 3), (2, 3 * 2 + 1)),
    "frozen array": lambda: torch.frombuffer(bytearray(48), dtype=torch.float32).view(4, 3),
    "complex": lambda: torch.zeros(4, 3, dtype=torch.complex64).conj(),
    "imaginary": lambda: torch.zeros(4, 3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("kind", WRITABLE)
def test_any_other_target_gets_the_values(kind: str, way: str, saved: Path) -> None:
    target = WRITABLE[kind]()
    LOADS[way]({"w": target}, saved)
    assert torch.equal(target.detach(), SAVED["w"].to(target.dtype))


# ---- Targets whose elements overlap ----


def windows(of: torch.Tensor) -> torch.Tensor:
    return of.unfold(0, 3, 1)


@pytest.mark.parametrize("planner", [FastLoadPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overlapping_windows_are_loaded_from_a_copy_of_themselves(
    planner: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch_ckpt.save({"w": windows(torch.arange(9.0))}, checkpoint_id=tmp_path)
    target = torch.zeros(9, dtype=dtype)
    dcp.load({"w": windows(target)}, storage_reader=FastReader(tmp_path), planner=planner())
    assert target.tolist() == list(range(9))


@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overlapping_elements_that_need_two_values_are_an_error(
    way: str, dtype: torch.dtype, saved: Path
) -> None:
    target = torch.zeros(6, dtype=dtype).as_strided((4, 3), (1, 1))
    error = failure_of(lambda: LOADS[way]({"w": target}, saved))
    assert type(error) is ValueError
    assert "cannot load 'w'" in str(error)
    assert "share memory" in str(error)


def test_windows_with_nans_are_loaded(tmp_path: Path) -> None:
    torch_ckpt.save({"w": windows(torch.full([9], torch.nan))}, checkpoint_id=tmp_path)
    target = torch.zeros(9)
    torch_ckpt.load({"w": windows(target)}, checkpoint_id=tmp_path)
    assert target.isnan().all()


# ---- Targets that share memory ----

STORAGES: list[Callable[[Any, int, int], torch.Tensor]] = [
    lambda array, begin, end: torch.from_numpy(array[begin:end]),
    lambda array, begin, end: torch.from_dlpack(array[begin:end]),
    lambda array, begin, end: torch.from_numpy(array)[begin:end],
]
"""Tensors of a part of an array. Each has a storage of its own."""


def overlapping_targets(rng: random.Random, array: Any) -> dict[str, torch.Tensor]:
    """Matrices in one array, of which a longer one may contain others."""
    state = {}
    for number in range(rng.randint(2, 6)):
        rows, columns = rng.randint(1, 6), rng.choice([2, 4, 8])
        begin = rng.randrange(len(array) - rows * columns + 1)
        found = rng.choice(STORAGES)(array, begin, begin + rows * columns)
        state[f"{number}"] = found.view(rows, columns)
    return state


@pytest.mark.thin(0.25)
@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_targets_that_overlap_in_memory_get_the_values_that_stock_gives(
    seed: int, way: str, tmp_path: Path
) -> None:
    for number in range(seed, seed + 10):
        rng = random.Random(number)
        dtype = rng.choice([np.float32, np.float64])  # The other one needs a cast.
        array = np.zeros(64, dtype)
        state = overlapping_targets(rng, array)
        saved: dict[str, Any] = {}
        for key, target in rng.sample(list(state.items()), len(state)):  # Their order in the file.
            value = torch.rand(target.shape)
            half = target.shape[1] // 2  # Columns of a target are interleaved in memory.
            halves = [((0, 0), value[:, :half].clone()), ((0, half), value[:, half:].clone())]
            is_cut = way != "a file of torch.save" and rng.random() < 0.7
            saved[key] = LocalShards(target.shape, halves) if is_cut else value
        path = tmp_path / f"{number}"
        dcp.save(saved, storage_writer=FileSystemWriter(path / "stock"))
        dcp.save(saved, storage_writer=FastWriter(path / "ours"))
        if way == "a file of torch.save":
            torch.save(saved, path / "file.pt")
        dcp.load(state, storage_reader=FileSystemReader(path / "stock"))
        expected = array.copy()
        array[:] = 0
        LOADS[way](state, path)
        assert np.array_equal(array, expected), f"seed {number}"


SPREAD: dict[str, dict[str, Any]] = {
    "three files": {"thread_count": 3},
    "a file for each item": {"single_file_per_rank": False},
}


@pytest.mark.parametrize("planner", [FastLoadPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("files", SPREAD)
def test_targets_in_the_same_memory_are_loaded_in_stocks_order_from_several_files(
    files: str, planner: Any, tmp_path: Path
) -> None:
    """Some of the tensors are of a subclass, which torch reads."""
    for seed in range(20):
        rng, array = random.Random(seed), np.zeros(64, np.float32)
        shared = overlapping_targets(rng, array)
        alone = {f"alone {n}": torch.zeros(rng.randint(1, 99)) for n in range(rng.randint(0, 5))}
        state = dict(rng.sample([*shared.items(), *alone.items()], len(shared) + len(alone)))
        saved = {
            key: torch.rand(target.shape).as_subclass(rng.choice([torch.Tensor, Tagged]))
            for key, target in state.items()
        }
        path = tmp_path / f"{seed}"
        with torch.serialization.safe_globals([Tagged]):
            dcp.save(saved, storage_writer=FastWriter(path, **SPREAD[files]))
            dcp.load(state, storage_reader=FileSystemReader(path))
            expected = array.copy()
            array[:] = 0
            dcp.load(state, storage_reader=FastReader(path), planner=planner())
        assert np.array_equal(array, expected), f"seed {seed}"


# ---- Targets without memory ----


@pytest.mark.parametrize("way", OURS)
def test_a_target_on_the_meta_device_gets_memory(way: str, saved: Path) -> None:
    state = {"a": torch.zeros(5), "w": Parameter(torch.zeros(4, 3, device="meta"))}
    LOADS[way](state, saved)
    assert state["w"].device.type == "cpu"
    assert torch.equal(state["w"], SAVED["w"])


def test_nested_targets_on_the_meta_device_get_memory(tmp_path: Path) -> None:
    saved: Any = {"m": {0: [torch.ones(2), {"t": torch.ones(3), "n": 5}]}}
    torch_ckpt.save(saved, checkpoint_id=tmp_path)
    meta = torch.device("meta")
    state: Any = {"m": {0: [torch.ones(2, device=meta), {"t": torch.ones(3, device=meta), "n": 0}]}}
    torch_ckpt.load(state, checkpoint_id=tmp_path)
    assert not differences(saved, state)


def test_a_shard_on_the_meta_device_is_named(saved: Path) -> None:
    state = {"w": LocalShards([4, 3], [([0, 0], torch.zeros(4, 3, device="meta"))])}
    error = failure_of(lambda: torch_ckpt.load(state, checkpoint_id=saved / "ours"))
    assert "cannot load 'w': " in str(error)
    assert "meta device" in str(error)


# ---- Values that a lenient load does not find ----


def test_values_that_the_checkpoint_lacks_are_unchanged(saved: Path) -> None:
    values = {
        "set": {1, 2},
        "dtype": torch.float32,
        "deque": deque([1]),
        "tuple": ({3}, 4),
        "nested": {"range": range(3), "list": [{5}, torch.zeros(1)]},
    }
    state = {"w": torch.zeros(4, 3), **values}
    planner = FastLoadPlanner(allow_partial_load=True)
    torch_ckpt.load(state, checkpoint_id=saved / "ours", planner=planner)
    assert bits(state.pop("w")) == bits(SAVED["w"])
    assert not differences(values, state)


def test_a_run_restores_a_buffer_of_overlapping_windows(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1, {"w": windows(torch.arange(9.0))})
    target = torch.zeros(9)
    assert run.restore({"w": windows(target)}) == 1
    assert target.tolist() == list(range(9))
