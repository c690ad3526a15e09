"""Tensors of torch's own class that are parts of others by their attributes, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attribute_parts import (
    KINDS,
    Box,
    State,
    assert_parts,
    assert_whole,
    blank,
    by_protocol,
    parts,
    spoil,
)
from ranks import Worlds
from support.safetensors_files import load_model
from support.tensors import bits, full_value
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_ckpt
from torch_ckpt import (
    FastLoadPlanner,
    FastReader,
    FastSavePlanner,
    FastWriter,
    Run,
    SafetensorsWriter,
    SnapshotStager,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

WAIT_S = 60
HAS_PROTOCOL = hasattr(dcp, "CheckpointableTensor")
needs_protocol = pytest.mark.skipif(
    not HAS_PROTOCOL, reason=f"torch {torch.__version__} has no CheckpointableTensor"
)


# ---- Ways to save --------------------------------------------------------------------------------


def _saved(function: Callable[..., Any], **options: Any) -> Callable[[State, Path], Any]:
    def save(state: State, path: Path) -> None:
        made = {
            "storage_writer": options.get("writer", FastWriter)(path),
            "planner": options.get("planner", FastSavePlanner)(),
        }
        function(state, **made)

    return save


def _begun(function: Callable[..., Any], **options: Any) -> Callable[[State, Path], Any]:
    def save(state: State, path: Path) -> None:
        stager = options.get("stager", SnapshotStager)()
        writer = FastWriter(path, stager=stager)
        begun = function(
            state,
            storage_writer=writer,
            planner=options.get("planner", FastSavePlanner)(),
            async_checkpointer_type=options.get("by", AsyncCheckpointerType.THREAD),
        )
        if not isinstance(begun, Future):
            begun = begun.upload_completion
        stager.wait_staged()
        spoil(state)
        begun.result(WAIT_S)

    return save


def _by_run(**options: Any) -> Callable[[State, Path], Any]:
    def save(state: State, path: Path) -> None:
        with Run(path, asynchronous=True, timeout_s=WAIT_S, **options) as run:
            run.save(1, state)
            spoil(state)
            run.wait()
            target = blank()
            run.restore(target)
            assert_whole(target)

    return save


PROCESS = AsyncCheckpointerType.PROCESS
WAYS: dict[str, Callable[[State, Path], Any]] = {
    "stock": _saved(dcp.save, writer=FileSystemWriter, planner=DefaultSavePlanner),
    "stock writer": _saved(dcp.save, writer=FileSystemWriter),
    "stock planner": _saved(dcp.save, planner=DefaultSavePlanner),
    "dcp.save": _saved(dcp.save),
    "torch_ckpt.save": _saved(torch_ckpt.save),
    "torch_ckpt.save, stock planner": _saved(torch_ckpt.save, planner=DefaultSavePlanner),
    "dcp.async_save": _begun(dcp.async_save),
    "dcp.async_save, stock planner": _begun(dcp.async_save, planner=DefaultSavePlanner),
    "dcp.async_save by process": _begun(dcp.async_save, by=PROCESS),
    "torch_ckpt.async_save": _begun(torch_ckpt.async_save),
    "torch_ckpt.async_save by process": _begun(torch_ckpt.async_save, by=PROCESS),
    "staged in the background": _begun(
        torch_ckpt.async_save, stager=lambda: SnapshotStager(blocking=False)
    ),
    "run": _by_run(),
    "run, agent": _by_run(agent=True),
    "safetensors": _saved(dcp.save, writer=SafetensorsWriter),
}


def save_parts(path: Path, kind: str, way: str) -> None:
    """Saves the parts of this rank."""
    state = parts(kind, dist.get_rank(), dist.get_world_size(), filled=True)
    WAYS[way](state, path)
    dist.barrier()


def load_parts(path: Path, kind: str) -> None:
    """Loads parts of this rank by every reader and planner."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for reader in (FastReader, FileSystemReader):
        for planner in (FastLoadPlanner, DefaultLoadPlanner):
            state = parts(kind, rank, ranks, filled=False)
            dcp.load(state, storage_reader=reader(path), planner=planner())
            assert_parts(kind, state, rank, ranks)


def marks_of(kind: str, way: str) -> list[Any]:
    return [needs_protocol] * (kind == "protocol") + [pytest.mark.slow] * ("process" in way)


MODES = [
    pytest.param(kind, way, marks=marks_of(kind, way))
    for kind in KINDS
    for way in WAYS
    if not (kind == "methods" and "process" in way)  # Bound functions are not sent to a process.
]


@pytest.mark.thin(1)
@pytest.mark.parametrize(("kind", "way"), MODES)
def test_parts_by_attributes_are_stored_and_loaded_as_by_stock(
    worlds: Worlds, tmp_path: Path, kind: str, way: str
) -> None:
    worlds.run(2, save_parts, tmp_path / "saved", kind, way, timeout_s=120)
    path = tmp_path / "saved"
    if way.startswith("run"):
        (path,) = path.glob("step-*")
    if way == "safetensors":
        found = load_model(path)
        assert_whole(found)
        return
    for reader in (FileSystemReader, FastReader):
        whole = blank()
        dcp.load(whole, storage_reader=reader(path), no_dist=True)
        assert_whole(whole)
    for count in (1, 2):
        worlds.run(count, load_parts, path, kind, timeout_s=120)


# ---- Several saves, targets without memory, ties, and older versions of torch --------------------


def save_again(path: Path) -> None:
    """Saves whose values, and then whose boxes, differ from those of the save before."""
    rank, stager = dist.get_rank(), SnapshotStager()
    for number in range(4):
        whole = full_value(f"again {number}", (8, 3), torch.float32)
        same = full_value(f"same {number}", (700, 3), torch.float32)
        begin = 4 * (rank if number < 2 else 1 - rank)
        state = {
            "w": by_protocol(whole[begin : begin + 4].clone(), (8, 3), _rows(begin, 4)),
            "replicated": by_protocol(same.clone(), (700, 3), _rows(0, 700)),
        }
        writer = FastWriter(path / str(number), stager=stager)
        torch_ckpt.async_save(state, storage_writer=writer).result(WAIT_S)
        found = {"w": torch.zeros(8, 3), "replicated": torch.zeros(700, 3)}
        dcp.load(found, storage_reader=FileSystemReader(path / str(number)), no_dist=True)
        assert bits(found["w"]) == bits(whole)
        assert bits(found["replicated"]) == bits(same)


def _rows(begin: int, count: int) -> list[Box]:
    return [((begin, 0), (0, 0), (count, 3))]


@needs_protocol
def test_a_reused_plan_has_the_boxes_of_each_save(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save_again, tmp_path, timeout_s=120)


@needs_protocol
def test_a_part_on_the_meta_device_stays_a_part(tmp_path: Path) -> None:
    whole = full_value("w", (8, 3), torch.float32)
    torch_ckpt.save({"w": whole}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": by_protocol(torch.empty(4, 3, device="meta"), (8, 3), _rows(2, 4))}
    torch_ckpt.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert bits(state["w"]) == bits(whole[2:6])
    assert state["w"].global_offsets == ((2, 0),)


@needs_protocol
def test_a_part_of_another_tensor_is_refused_with_the_sizes_of_the_whole(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.zeros(9, 3)}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": by_protocol(torch.zeros(4, 3), (8, 3), _rows(2, 4))}
    with pytest.raises(dcp.CheckpointException, match=r"w \[9, 3\], not \[8, 3\]"):
        torch_ckpt.load(state, checkpoint_id=tmp_path, no_dist=True)


@needs_protocol
def test_parts_of_one_memory_are_tied_only_if_they_are_the_same_part(tmp_path: Path) -> None:
    memory = full_value("memory", (4, 3), torch.float32)
    state = {
        "upper": by_protocol(
            memory[:], (4, 3), [((0, 0), (0, 0), (2, 3)), ((2, 0), (2, 0), (2, 3))]
        ),
        "lower": by_protocol(
            memory[:], (4, 3), [((2, 0), (0, 0), (2, 3)), ((0, 0), (2, 0), (2, 3))]
        ),
    }
    dcp.save(state, storage_writer=SafetensorsWriter(tmp_path), no_dist=True)
    found = load_model(tmp_path)
    assert bits(found["upper"]) == bits(memory)
    assert bits(found["lower"]) == bits(memory.roll(2, 0))


@pytest.mark.skipif(HAS_PROTOCOL, reason=f"torch {torch.__version__} has CheckpointableTensor")
@pytest.mark.parametrize("way", ["stock", "dcp.save", "torch_ckpt.save", "safetensors"])
def test_without_the_protocol_such_a_tensor_is_plain_as_for_stock(way: str, tmp_path: Path) -> None:
    local = full_value("w", (4, 3), torch.float32)
    WAYS[way]({"w": by_protocol(local.clone(), (8, 3), _rows(2, 4))}, tmp_path)
    target = {"w": by_protocol(torch.zeros(4, 3), (8, 3), _rows(2, 4))}
    torch_ckpt.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert bits(target["w"]) == bits(local)
