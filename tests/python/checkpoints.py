"""What the tests of one process share: saves, loads, and the files of checkpoints."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commit_files import index_file
from support.cutting import CuttingLoadPlanner, CuttingSavePlanner, cut, narrow  # noqa: F401
from support.states import differences
from support.tensors import DTYPES, bits, layouts, random_tensor  # noqa: F401
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import FastReader, FastWriter
from torch_ckpt._core import _native

ROOT = Path(__file__).resolve().parents[2]  # The repository.

WRITERS = {"ours": FastWriter, "stock": FileSystemWriter}
READERS = {"ours": FastReader, "stock": FileSystemReader}
PAIRS = [("ours", "stock"), ("stock", "ours"), ("ours", "ours")]  # Who writes, who reads.


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
    index_file(path).unlink(missing_ok=True)


def stored_slice(path: Path, metadata: Metadata, fqn: str) -> bytes:
    """The bytes of a stored item that has one chunk."""
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == fqn)
    with open(path / info.relative_path, "rb") as file:
        file.seek(info.offset)
        return file.read(info.length)


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


def outcome(call: Any, *args: Any, **kwargs: Any) -> Any:
    """What a call returns, or type and text of what it raises; of a rank's, what that raised."""
    try:
        return call(*args, **kwargs)
    except CheckpointException as error:
        cause = error.failures[0][0]
        return type(cause), str(cause)
    except Exception as error:
        return type(error), str(error)


def flattened_metadata(metadata: Metadata) -> dict[str, Any]:
    """Everything that metadata say but for places; sizes and offsets as what they are.

    Stock keeps some paths of what it does not store, such as an empty dict in a mapping.
    """
    paths = metadata.planner_data
    if paths is not None:
        paths = {fqn: path for fqn, path in paths.items() if fqn in metadata.state_dict_metadata}
    return {
        "stored": list(dict(metadata.state_dict_metadata).items()),
        "paths": None if paths is None else dict(paths),
        "keys": None if metadata.storage_data is None else set(metadata.storage_data),
    }
