"""What the tests share: tensors of every dtype and layout, saves, loads, and comparison by bits."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torch_ckpt import FastReader, FastWriter
from torch_ckpt._core import _native

ROOT = Path(__file__).resolve().parents[2]  # Of the repository.

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]

WRITERS = {"ours": FastWriter, "stock": FileSystemWriter}
READERS = {"ours": FastReader, "stock": FileSystemReader}
PAIRS = [("ours", "stock"), ("stock", "ours"), ("ours", "ours")]  # Who writes, who reads.


def random_tensor(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of random bits, NaNs of all kinds among them."""
    shape = list(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).bool()
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, [nbytes], dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in row-major order, as raw bytes."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    flat = torch.empty(plain.shape, dtype=plain.dtype)  # Contiguous whatever `plain` is.
    flat.copy_(plain)
    return flat.reshape(-1).view(torch.uint8).numpy().tobytes()


def differences(expected: Any, actual: Any, at: str = "") -> list[str]:
    """Where two nested values differ; tensors by dtype, shape and bits."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor):
            return [f"{at}: {type(actual).__name__} instead of a tensor"]
        if expected.dtype != actual.dtype or expected.shape != actual.shape:
            return [
                f"{at}: {actual.dtype} {list(actual.shape)} instead of "
                f"{expected.dtype} {list(expected.shape)}"
            ]
        return [] if bits(expected) == bits(actual) else [f"{at}: other bits"]
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or expected.keys() != actual.keys():
            return [f"{at}: {actual!r} instead of keys {list(expected)}"]
        return [d for k in expected for d in differences(expected[k], actual[k], f"{at}[{k!r}]")]
    if isinstance(expected, list | tuple):
        if type(expected) is not type(actual) or len(expected) != len(actual):
            return [f"{at}: {actual!r} instead of {len(expected)} elements"]
        pairs = enumerate(zip(expected, actual, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{at}[{i}]")]
    return [] if expected == actual else [f"{at}: {actual!r} instead of {expected!r}"]


def blank(value: Any) -> Any:
    """The same structure to load into: contiguous tensors of other bits, ``None`` for objects."""
    if isinstance(value, torch.Tensor):
        filler = torch.full([value.numel() * value.dtype.itemsize], 1, dtype=torch.uint8)
        return filler.view(value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: blank(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(blank(element) for element in value)
    return None


def save(state: dict[str, Any], writer: Any, **options: Any) -> Metadata:
    """``dcp.save`` in this process alone."""
    return dcp.save(state, storage_writer=writer, no_dist=True, **options)


def load(state: dict[str, Any], reader: Any, **options: Any) -> dict[str, Any]:
    """``dcp.load`` in this process alone; returns ``state``."""
    dcp.load(state, storage_reader=reader, no_dist=True, **options)
    return state


def loads(
    path: Path,
    state: dict[str, Any],
    reader: type = FastReader,
    planner: Any = None,
    **options: Any,
) -> list[str]:
    """What a checkpoint holds other than ``state``, read with these options of the reader."""
    return differences(state, load(blank(state), reader(path, **options), planner=planner))


def failure_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException:
    """The exception of this rank inside the ``CheckpointException`` that a call raises."""
    with pytest.raises(CheckpointException) as caught:
        call(*args, **kwargs)
    return caught.value.failures[0][0]


def data_files(path: Path) -> list[Path]:
    """The data files in a checkpoint's directory."""
    return sorted(path.glob("*.distcp"))


def files(path: Path) -> dict[str, bytes]:
    """Every file below a directory, with its content."""
    found = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


def commit_without_index(metadata: Metadata, path: Path) -> None:
    """Puts metadata in place of a checkpoint's own, which then is one that never had an index."""
    metadata.storage_meta.modules = []
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / ".index").unlink(missing_ok=True)


def stored_slice(path: Path, metadata: Metadata, fqn: str) -> bytes:
    """The bytes of a stored item that has one chunk."""
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == fqn)
    with open(path / info.relative_path, "rb") as file:
        file.seek(info.offset)
        return file.read(info.length)


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tensors of a dtype in every memory layout that training meets."""

    def make(*shape: int) -> torch.Tensor:
        return random_tensor(shape, dtype)

    # A little over 1 MiB and over 128 KiB, in odd rows: the bytes are no multiple of 4096.
    large = (1031, (1 << 20) // dtype.itemsize // 1031 + 3)
    medium = (131, (128 << 10) // dtype.itemsize // 131 + 3)
    return {
        "contiguous": make(5, 7),
        "transposed": make(7, 5).t(),
        "sliced view": make(10, 9)[2:7, 3:8],
        "expanded": make(1, 6).expand(4, 6),
        "channels_last": make(2, 4, 5, 3).permute(0, 3, 1, 2),
        "0-dim": make(1)[0],
        "0-dim view": make(9)[5],
        "zero-size": make(0, 3),
        "zero-size inside": make(3, 0, 2),
        "strided step": make(40)[3::3],
        "six dimensions": make(2, 1, 3, 2, 1, 3).permute(5, 1, 0, 4, 3, 2),
        "medium": make(*medium),
        "medium transposed": make(*reversed(medium)).t(),
        "medium strided step": make(medium[0], 2 * medium[1])[:, ::2],
        "large": make(*large),
        "large transposed": make(*reversed(large)).t(),
        "large sliced view": make(large[0] + 5, large[1] + 9)[3:-2, 4:-5],
        "large channels_last": make(2, 33, large[1], 17).permute(0, 3, 1, 2),
        "large expanded": make(1, large[1]).expand(large[0], -1),
    }


def cut(sizes: Iterable[int], rng: random.Random) -> list[tuple[list[int], list[int]]]:
    """Random boxes (offsets, sizes) that tile a tensor."""
    boxes: list[tuple[list[int], list[int]]] = [([], [])]
    for size in sizes:
        marks = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 2)))})
        spans = [(a, b - a) for a, b in itertools.pairwise(marks)] or [(0, 0)]
        boxes = [([*o, begin], [*s, n]) for o, s in boxes for begin, n in spans]
    rng.shuffle(boxes)
    return boxes


def narrow(tensor: torch.Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
    """The box of a tensor, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


class CuttingSavePlanner(DefaultSavePlanner):
    """Stores every tensor as random boxes, as the ranks of a sharded job would."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            data = item.tensor_data
            if data is None or 0 in data.size:
                items.append(item)
                continue
            for offsets, sizes in cut(data.size, self.rng):
                index = MetadataIndex(item.index.fqn, torch.Size(offsets))
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                properties = TensorProperties(dtype=data.properties.dtype)
                piece = TensorWriteData(chunk=chunk, properties=properties, size=data.size)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=piece))
        self.rng.shuffle(items)
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, item: WriteItem) -> Any:
        if item.type != WriteItemType.SHARD:
            return super().resolve_data(item)
        whole = self.state_dict[item.index.fqn]
        return narrow(whole, item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)


class CuttingLoadPlanner(DefaultLoadPlanner):
    """Reads what it wants in random boxes and in random order."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items: list[ReadItem] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                items.append(item)
                continue
            for offsets, sizes in cut(item.lengths, self.rng):
                move = [
                    torch.Size(a + b for a, b in zip(of, offsets, strict=True))
                    for of in (item.dest_offsets, item.storage_offsets)
                ]
                items.append(
                    dataclasses.replace(
                        item,
                        dest_offsets=move[0],
                        storage_offsets=move[1],
                        lengths=torch.Size(sizes),
                    )
                )
        self.rng.shuffle(items)
        return dataclasses.replace(plan, items=items)


_MEMORY = """
import {module}, sys
from torch_ckpt.cli.main import main

def peak_kib():  # That of getrusage includes the process before exec.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = peak_kib()
assert main(sys.argv[1:]) == 0
print(peak_kib() - before)
"""


def memory_growth_kib(module: str, *arguments: object) -> int:
    """The peak memory of `torch-ckpt` in a new process, beyond that of importing a module."""
    command = [sys.executable, "-c", _MEMORY.format(module=module), *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return int(done.stdout.splitlines()[-1])


def xxh3(data: bytes) -> bytes:
    """The XXH3 of bytes, as an index states it of the metadata that it belongs to."""
    return _native.make_index("0" * 16, data, [], "", None, None)[1][40:48]
