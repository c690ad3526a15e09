"""Opens checkpoints of a million shards: what one rank pays to learn where its share lies.

Makes directories that hold only metadata and an index (no data), and measures, each in a process of
its own: opening, and answering one FQN, with nothing of it in the page cache and with all; finding
1/256 of all boxes by what they overlap, and planning a load of them; how much memory that takes;
reading everything; and stock DCP's unpickling of the same metadata. Takes a few minutes, 3 GiB of
memory and 1 GiB of disk:

    python benchmarks/bench_index.py --dir /data
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import MIB, Meter, describe

SHAPES = [(4_000, 256), (100_000, 10)]  # FQNs, boxes of each.
SHARE = 256  # A rank wants one box of so many.
ROWS = 8  # Of a box.
COLUMNS = 1024
SLICE = 16_384 + 704
SAVE_ID = "0123456789abcdef"
INDEX = f".index.{SAVE_ID}"
LABELS = {
    "one-cold": "open, one FQN; nothing in the page cache",
    "one": "open, one FQN; all in the page cache",
    "plan-cold": f"open, plan a load of 1/{SHARE}; cold",
    "plan": f"open, plan a load of 1/{SHARE}; cached",
    "check": "check all of the index",
    "everything": "build all of DCP's metadata",
    "stock": "stock DCP unpickles .metadata",
}


def _fqn(number: int) -> str:
    return f"model.layers.{number // 40}.block.{number % 40}.attention.weight"


def _make(path: Path, fqns: int, boxes: int) -> None:
    """Writes metadata and an index: box b of every tensor is in the file of rank b."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    from torch_ckpt._core.tensors import gc_paused
    from torch_ckpt.formats.committed import INDEX_MARK
    from torch_ckpt.storage.commit_files import commit_files
    from torch_ckpt.storage.data_file import WrittenFile

    path.mkdir(parents=True)
    names = [f"__{rank}_0_{SAVE_ID}.distcp" for rank in range(boxes)]
    properties = TensorProperties(dtype=torch.bfloat16)
    offsets = [torch.Size([ROWS * box, 0]) for box in range(boxes)]
    size = torch.Size([ROWS, COLUMNS])
    with gc_paused():
        metadata = Metadata({}, {}, {}, StorageMeta(path, SAVE_ID, modules=[INDEX_MARK]), "1.0.0")
        for number in range(fqns):
            fqn = _fqn(number)
            chunks = [ChunkStorageMetadata(offset, size) for offset in offsets]
            metadata.state_dict_metadata[fqn] = TensorStorageMetadata(
                properties, torch.Size([ROWS * boxes, COLUMNS]), chunks
            )
            metadata.planner_data[fqn] = tuple(fqn.split("."))
            for box, offset in enumerate(offsets):
                metadata.storage_data[MetadataIndex(fqn, offset, box)] = _StorageInfo(
                    names[box], number * SLICE, SLICE
                )
        nbytes = fqns * SLICE
        sums = bytes(8 * -(-nbytes // 65536))
        dtypes = {number * SLICE: "bfloat16" for number in range(fqns)}
        files = [WrittenFile(name, nbytes, sums, dtypes) for name in names]
        pickled, index = commit_files(metadata, files, save_id=SAVE_ID)
    (path / ".metadata").write_bytes(pickled)
    (path / INDEX).write_bytes(index)
    os.sync()


def _drop(path: Path) -> None:
    for name in (".metadata", INDEX):
        with open(path / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _state_of_share(fqns: int, boxes: int) -> dict[str, Any]:
    """What a rank that wants 1/256 of all loads: a row of boxes, or some tensors as a whole."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if boxes < SHARE:
        return {
            _fqn(number): torch.empty(ROWS * boxes, COLUMNS, dtype=torch.bfloat16)
            for number in range(0, fqns, SHARE)
        }
    dist.init_process_group("fake", rank=SHARE // 2, world_size=SHARE, store=FakeStore())
    mesh = init_device_mesh("cpu", (SHARE,))
    return {
        _fqn(number): DTensor.from_local(
            torch.empty(ROWS * boxes // SHARE, COLUMNS, dtype=torch.bfloat16),
            mesh,
            [Shard(0)],
            run_check=False,
        )
        for number in range(fqns)
    }


def _measure(path: Path, what: str, fqns: int, boxes: int) -> dict[str, float]:
    """Runs in a process of its own."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from torch_ckpt import FastReader
    from torch_ckpt._core import _native
    from torch_ckpt.planning.load_planner import FastLoadPlanner

    rng = random.Random(1)
    fs = _native.local_file_system()

    def opened() -> Any:
        return _native.open_checkpoint(fs, os.fsencode(path), ".metadata", ".index")[1]

    def one() -> None:
        metadata = FastReader(path).read_metadata()
        fqn = _fqn(rng.randrange(fqns))
        stored = metadata.state_dict_metadata[fqn]
        offsets = stored.chunks[boxes // 2].offsets
        assert metadata.storage_data[MetadataIndex(fqn, offsets)].length == SLICE

    def plan() -> None:
        metadata = FastReader(path).read_metadata()
        planner = FastLoadPlanner()
        planner.set_up_planner(state, metadata, True)
        items = planner.create_local_plan().items
        assert len(items) == (fqns if boxes >= SHARE else len(state) * boxes)

    def everything() -> None:
        metadata = FastReader(path).read_metadata()
        for _ in metadata.state_dict_metadata.items():
            pass
        for _ in metadata.storage_data.items():
            pass

    def stock() -> None:
        from torch.distributed.checkpoint import FileSystemReader

        FileSystemReader(path).read_metadata()

    calls: dict[str, Callable[[], None]] = {
        "one": one,
        "plan": plan,
        "everything": everything,
        "check": lambda: opened().check(),
        "stock": stock,
    }
    name, _, cold = what.partition("-")
    state = _state_of_share(fqns, boxes) if name == "plan" else {}
    if cold:
        _drop(path)
    with Meter() as meter:
        calls[name]()
    usage = meter.usage
    return {"s": usage.seconds, "cpu_s": usage.cpu_s, "rss_mib": usage.rss_growth / MIB}


def main() -> None:
    """Makes the checkpoints and prints a table of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=int, default=1, help="so many times fewer FQNs")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, path, fqns, boxes = arguments.child
        if what == "make":
            _make(Path(path), int(fqns), int(boxes))
        else:
            print(json.dumps(_measure(Path(path), what, int(fqns), int(boxes))))
        return
    for key, value in describe(arguments.dir).items():
        print(f"{key}: {value}")
    for fqns, boxes in SHAPES:
        with checkpoint_of(arguments.dir, fqns // arguments.scale, boxes) as checkpoint:
            _run(checkpoint, arguments.rounds)


@contextmanager
def checkpoint_of(directory: Path, fqns: int, boxes: int) -> Iterator[Checkpoint]:
    """A checkpoint of so many boxes of each FQN, for a while."""
    folder = Path(tempfile.mkdtemp(prefix="bench-index-", dir=directory))
    try:
        checkpoint = Checkpoint(folder / "checkpoint", fqns, boxes)
        checkpoint._child("make")
        yield checkpoint
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Checkpoint:
    """One to measure."""

    path: Path
    fqns: int
    boxes: int

    def measure(self, what: str) -> dict[str, float]:
        """Seconds, CPU seconds and growth of memory of one call, named as in ``LABELS``."""
        found: dict[str, float] = json.loads(self._child(what))
        return found

    def describe(self) -> str:
        """Its numbers and sizes."""
        sizes = [(self.path / name).stat().st_size / MIB for name in (".metadata", INDEX)]
        return (
            f"{self.fqns} FQNs of {self.boxes} boxes: "
            f".metadata {sizes[0]:.1f} MiB, index {sizes[1]:.1f} MiB"
        )

    def _child(self, what: str) -> str:
        arguments = [what, self.path, str(self.fqns), str(self.boxes)]
        command = [sys.executable, __file__, "--child", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _run(checkpoint: Checkpoint, rounds: int) -> None:
    print(f"\n{checkpoint.describe()}")
    print(f"{'':40}{'min':>10}{'median':>10}{'max':>10}  s{'RSS':>10} MiB")
    for what, label in LABELS.items():
        few = what in ("check", "everything", "stock")
        found = [checkpoint.measure(what) for _ in range(1 if few else rounds)]
        times = [one["s"] for one in found]
        rss = max(one["rss_mib"] for one in found)
        cells = (min(times), statistics.median(times), max(times))
        print(f"{label:40}" + "".join(f"{cell:10.4f}" for cell in cells) + f"{rss:13.1f}")


if __name__ == "__main__":
    main()
