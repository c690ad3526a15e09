"""Tensors of torch's own class that are parts of others by their attributes, in every mode."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from support.safetensors_files import load_model
from support.tensors import bits, full_value
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
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

Sizes = tuple[int, ...]
Box = tuple[Sizes, Sizes, Sizes]  # Offsets in the whole tensor, offsets in the local one, sizes.
State = dict[str, Any]


# ---- Kinds of parts ------------------------------------------------------------------------------


def by_protocol(local: torch.Tensor, shape: Sizes, boxes: Sequence[Box]) -> Any:
    """A ``CheckpointableTensor`` of torch 2.14."""
    part: Any = local
    part.global_shape = shape
    part.global_offsets = tuple(at for at, _, _ in boxes)
    part.local_offsets = tuple(at for _, at, _ in boxes)
    part.local_sizes = tuple(sizes for _, _, sizes in boxes)
    return part


def _write_items(self: Any, fqn: str, _: object) -> list[WriteItem]:
    properties = TensorProperties(dtype=self.dtype)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, self.size()),
        )
        for chunk in self.__create_chunk_list__()
    ]


def _chunk_list(self: Any) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in self.boxes]


def _tensor_shard(self: Any, index: MetadataIndex) -> torch.Tensor:
    (found,) = (box for box in self.boxes if torch.Size(box[0]) == index.offset)
    return _narrowed(self.as_subclass(torch.Tensor), *found)


METHODS = {
    "__create_write_items__": _write_items,
    "__create_chunk_list__": _chunk_list,
    "__get_tensor_shard__": _tensor_shard,
}


class Listing(torch.Tensor):
    """A subclass whose methods read its attributes."""

    boxes: list[tuple[Sizes, Sizes]]


for _name, _method in METHODS.items():
    setattr(Listing, _name, _method)


def by_class(local: torch.Tensor, shape: Sizes, boxes: Sequence[Box]) -> Any:
    """A tensor of a class with methods that list the boxes. It has the sizes of the whole one."""
    part: Any = local.as_subclass(Listing)
    part.boxes = [(at, sizes) for at, _, sizes in boxes]
    return part


def by_methods(local: torch.Tensor, shape: Sizes, boxes: Sequence[Box]) -> Any:
    """A tensor of torch's own class with such methods."""
    part: Any = local
    part.boxes = [(at, sizes) for at, _, sizes in boxes]
    part.__create_write_items__ = functools.partial(_write_items, part)
    part.__create_chunk_list__ = functools.partial(_chunk_list, part)
    part.__get_tensor_shard__ = types.MethodType(_tensor_shard, part)
    return part


KINDS = {"protocol": by_protocol, "class": by_class, "methods": by_methods}


# ---- States of two ranks, and of one -------------------------------------------------------------

WHOLES = {
    "rows": full_value("rows", (8, 4), torch.float32),
    "interleaved": full_value("interleaved", (9, 3), torch.bfloat16),
    "columns": full_value("columns", (5, 6), torch.float64),
    "uneven": full_value("uneven", (7,), torch.int64),
    "on one rank": full_value("on one rank", (3, 2), torch.uint8),
    "replicated": full_value("replicated", (700, 3), torch.float32),
    "parameter": full_value("parameter", (6, 2), torch.float32),
    "large": full_value("large", (1031, 257), torch.float32),
}
PLAIN = full_value("plain", (3, 3), torch.float32)


def spans(name: str, rank: int, ranks: int) -> list[Box]:
    """The boxes of a rank."""
    shape = tuple(WHOLES[name].shape)
    rows = shape[0]
    rest = shape[1:]

    def of_rows(begin: int, end: int, local: int = 0) -> Box:
        zeros = (0,) * len(rest)
        return (begin, *zeros), (local, *zeros), (end - begin, *rest)

    if ranks == 1 or name == "replicated":
        return [of_rows(0, rows)]
    if name == "interleaved":  # With a row of padding before each.
        starts = range(rank, rows, ranks)
        return [of_rows(row, row + 1, 2 * number + 1) for number, row in enumerate(starts)]
    if name == "columns":
        begin, end = (0, 2) if rank == 0 else (2, 6)
        return [((0, begin), (1, 1), (rows, end - begin))]
    if name == "on one rank":
        return [of_rows(0, rows)] if rank == 1 else []
    cut = rows - 2 if name == "uneven" else rows // 2
    return [of_rows(0, cut) if rank == 0 else of_rows(cut, rows)]


def parts(kind: str, rank: int, ranks: int, *, filled: bool) -> State:
    """The parts of a rank, with the values of the whole tensors or without."""
    state: State = {}
    for name, whole in WHOLES.items():
        boxes = spans(name, rank, ranks)
        ends = [
            tuple(at + size + 1 for at, size in zip(local, sizes, strict=True))
            for _, local, sizes in boxes
        ]
        padding = 0 if name in ("uneven", "replicated") else 1
        sizes = tuple(max(each) - 1 + padding for each in zip(*ends, strict=True))
        sizes = sizes or (1,) * whole.dim()
        if kind != "protocol":  # Stock takes the sizes of a part for those of the whole tensor.
            sizes = tuple(whole.shape)
            boxes = [(at, at, box) for at, _, box in boxes]
        local = torch.full(sizes, 7, dtype=whole.dtype)
        if filled:
            for at, local_at, box in boxes:
                _narrowed(local, local_at, box).copy_(_narrowed(whole, at, box))
        if name == "parameter":
            local = torch.nn.Parameter(local)
        state[name] = KINDS[kind](local, tuple(whole.shape), boxes)
    return {**state, "plain": PLAIN.clone() if filled else torch.zeros(3, 3)}


def _narrowed(tensor: torch.Tensor, at: Sizes, sizes: Sizes) -> torch.Tensor:
    for dim, (begin, size) in enumerate(zip(at, sizes, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor


def spoil(state: State) -> None:
    """Changes all values, as training does after an asynchronous save began."""
    with torch.no_grad():
        for tensor in state.values():
            tensor.as_subclass(torch.Tensor).zero_()


def blank() -> State:
    """Whole tensors to load into."""
    return {name: torch.zeros_like(whole) for name, whole in WHOLES.items()} | {
        "plain": torch.zeros(3, 3)
    }


def assert_whole(state: State) -> None:
    """All whole tensors have their values."""
    wrong = [name for name, whole in WHOLES.items() if bits(state[name]) != bits(whole)]
    assert not wrong
    assert bits(state["plain"]) == bits(PLAIN)


def assert_parts(kind: str, state: State, rank: int, ranks: int) -> None:
    """All boxes have their values."""
    expected = parts(kind, rank, ranks, filled=True)
    assert [name for name in expected if bits(state[name]) != bits(expected[name])] == []


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


MODES = [
    pytest.param(kind, way, marks=[needs_protocol] if kind == "protocol" else [])
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
