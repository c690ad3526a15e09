"""The contenders: each saves a state dict into a directory and loads it into existing tensors.

A contender that goes through torch.distributed.checkpoint (DCP) is a pair of constructors for a
storage writer and a storage reader; the others write one file.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future

P = ParamSpec("P")
R = TypeVar("R")
State = dict[str, torch.Tensor]

OURS = "torch-ckpt"
OURS_UNVERIFIED = "torch-ckpt-unverified"  # The same, without checking what it reads.
OURS_OF_SAFETENSORS = "torch-ckpt-of-safetensors"  # A file that safetensors wrote.


@dataclass
class Share:
    """CPU seconds of the whole process spent inside chosen methods of a storage object."""

    cpu_s: float = 0.0

    def clock(self, storage: object, *methods: str) -> None:
        """Replaces `methods` of the instance `storage` by ones that add their CPU time here."""
        for name in methods:
            setattr(storage, name, self._clocked(getattr(storage, name)))

    def _clocked(self, method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)  # DCP probes signatures by parameter name
        def clocked(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.process_time()
            try:
                result = method(*args, **kwargs)
                if isinstance(result, Future):
                    result.wait()
                return result
            finally:
                self.cpu_s += time.process_time() - start

        return clocked


class Contender(ABC):
    """One way to save and load.

    Attributes:
        name: How it is called on the command line and in the report.
        loaders: Names of its ways to load; empty where another contender's already cover it.
        counts_share: Whether it fills a `Share`.
        reads_slices: Whether `load` takes a planner.
    """

    name: str
    loaders: tuple[str, ...]
    counts_share = False
    reads_slices = False

    @abstractmethod
    def save(self, state: State, directory: Path, *, share: Share | None = None) -> None:
        """Saves `state` into the existing, empty `directory`."""

    @abstractmethod
    def load(
        self,
        loader: str,
        state: State,
        directory: Path,
        *,
        share: Share | None = None,
        planner: LoadPlanner | None = None,
    ) -> None:
        """Loads what `save` left in `directory` into the tensors of `state`, in place."""


@dataclass
class DcpContender(Contender):
    """`dcp.save` and `dcp.load` with given storage classes, a fresh object for every call."""

    name: str
    loaders: tuple[str, ...]
    make_writer: Callable[[Path], StorageWriter]
    make_reader: Callable[[Path, str], StorageReader]  # For one of `loaders`.
    counts_share: bool = field(default=True, init=False)
    reads_slices: bool = field(default=True, init=False)

    def save(self, state: State, directory: Path, *, share: Share | None = None) -> None:
        """Saves through a new writer; `share` clocks its `write_data` and `finish`."""
        writer = self.make_writer(directory)
        if share is not None:
            share.clock(writer, "write_data", "finish")
        dcp.save(state, storage_writer=writer, no_dist=True)

    def load(
        self,
        loader: str,
        state: State,
        directory: Path,
        *,
        share: Share | None = None,
        planner: LoadPlanner | None = None,
    ) -> None:
        """Loads through a new reader; `share` clocks its `read_metadata` and `read_data`."""
        reader = self.make_reader(directory, loader)
        if share is not None:
            share.clock(reader, "read_metadata", "read_data")
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


class TorchSaveContender(Contender):
    """`torch.save` of the whole state; `torch.load`, with and without mmap, plus a copy."""

    name = "torch.save"
    loaders = ("torch.load", "torch.load-mmap")

    def save(self, state: State, directory: Path, *, share: Share | None = None) -> None:
        """Saves as one file."""
        torch.save(state, directory / "state.pt")

    def load(
        self,
        loader: str,
        state: State,
        directory: Path,
        *,
        share: Share | None = None,
        planner: LoadPlanner | None = None,
    ) -> None:
        """Loads the whole file, then copies; `loader` tells whether it is mapped or read."""
        loaded = torch.load(directory / "state.pt", mmap=loader == "torch.load-mmap")
        for name, tensor in state.items():
            tensor.copy_(loaded[name])


class SafetensorsContender(Contender):
    """`safetensors.torch.save_file`; then several loaders read its file.

    `safe_open` and `fastsafe_open` (without GPUDirect) give tensors, which are copied one at a
    time. `FastReader` loads into those of the state dict.
    """

    name = "safetensors"
    loaders: tuple[str, ...] = ("safetensors",)

    def __init__(self) -> None:
        if _is_built():
            self.loaders += (OURS_OF_SAFETENSORS,)
        if find_spec("fastsafetensors"):
            self.loaders += ("fastsafetensors",)

    def save(self, state: State, directory: Path, *, share: Share | None = None) -> None:
        """Saves as one file."""
        from safetensors.torch import save_file

        save_file(state, directory / "state.safetensors")

    def load(
        self,
        loader: str,
        state: State,
        directory: Path,
        *,
        share: Share | None = None,
        planner: LoadPlanner | None = None,
    ) -> None:
        """Loads the file as `loader` does."""
        if loader == OURS_OF_SAFETENSORS:
            _ours().load(OURS, state, directory)
            return
        with self._open(loader, directory / "state.safetensors") as file:
            for name, tensor in state.items():
                tensor.copy_(file.get_tensor(name))

    def _open(self, loader: str, path: Path) -> Any:
        if loader == "fastsafetensors":
            from fastsafetensors import SingleGroup, fastsafe_open

            return fastsafe_open(str(path), pg=SingleGroup(), device="cpu", nogds=True)
        from safetensors import safe_open

        return safe_open(path, framework="pt")


def _stock(name: str, loaders: tuple[str, ...], *, threads: int, sync: bool) -> DcpContender:
    def make_writer(path: Path) -> FileSystemWriter:
        return FileSystemWriter(path, thread_count=threads, sync_files=sync)

    return DcpContender(name, loaders, make_writer, lambda path, _: FileSystemReader(path))


def _is_built() -> bool:
    # An installed package wins; the source tree serves where the native module was built in place.
    root = str(Path(__file__).resolve().parent.parent)
    if root not in sys.path:
        sys.path.append(root)
    try:
        import torch_ckpt  # noqa: F401
    except ImportError:
        return False
    return True


def _ours() -> Contender:
    _is_built()
    try:
        from torch_ckpt import FastReader, FastWriter
    except ImportError as error:
        names = ",".join(name for name in NAMES if name != OURS)
        raise SystemExit(
            f"cannot import FastWriter and FastReader from torch_ckpt: {error}\n"
            f"Build and install the package first, or measure only the others: --contenders {names}"
        ) from error

    def make_reader(path: Path, loader: str) -> StorageReader:
        return FastReader(path, verify=loader == OURS)

    return DcpContender(OURS, (OURS, OURS_UNVERIFIED), FastWriter, make_reader)


def silence() -> None:
    """Turns off what DCP says about running without a process group, which is meant here."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


STOCK_DEFAULT = "dcp-1t"
STOCK_SAVERS = (STOCK_DEFAULT, "dcp-2t", "dcp-1t-nosync", "dcp-2t-nosync")
STOCK_LOADERS = (STOCK_DEFAULT, "dcp-2t")
MMAP_LOADER = "torch.load-mmap"

# What stock DCP writes does not depend on sync_files, so only the synced ones are read back.
_MAKERS: dict[str, Callable[[], Contender]] = {
    OURS: _ours,
    "dcp-1t": lambda: _stock("dcp-1t", ("dcp-1t",), threads=1, sync=True),
    "dcp-2t": lambda: _stock("dcp-2t", ("dcp-2t",), threads=2, sync=True),
    "dcp-1t-nosync": lambda: _stock("dcp-1t-nosync", (), threads=1, sync=False),
    "dcp-2t-nosync": lambda: _stock("dcp-2t-nosync", (), threads=2, sync=False),
    "torch.save": TorchSaveContender,
    "safetensors": SafetensorsContender,
}
NAMES = tuple(_MAKERS)


def make_contenders(names: list[str]) -> list[Contender]:
    """Returns the contenders called `names`, in that order.

    Raises:
        SystemExit: A name is unknown, or `torch_ckpt` was asked for and cannot be imported.
    """
    unknown = [name for name in names if name not in _MAKERS]
    if unknown:
        raise SystemExit(f"unknown contenders {unknown}; choose from {', '.join(NAMES)}")
    return [_MAKERS[name]() for name in names]
