"""Measures the peak memory of ways to save and load states whose tensors lie in large storages.

A program of its own, since the memory of a process depends on all that it did before.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, IoOptions, SafetensorsWriter, SnapshotStager

BASE_MIB = 64
"""Length of a storage."""

IO = IoOptions(buffer_nbytes=8 << 20)

_NUMEL = BASE_MIB << 17
_STEP = 1 << 15

State = dict[str, Any]


class Tagged(torch.Tensor):
    """A tensor subclass, which only torch can store."""


def base() -> torch.Tensor:
    """A tensor of the length of a storage."""
    return torch.arange(_NUMEL)


def sliced() -> State:
    """Small parts of a storage, in a tuple."""
    whole = base()
    return {"t": ({"a": whole[:4]}, whole[100:104], whole[::_STEP])}


def both() -> State:
    """The same beside a tensor of the whole storage."""
    whole = base()
    return {"whole": whole, "t": (whole[:4], whole[:1000])}


def sparse() -> State:
    """Tensors whose elements are far apart."""
    return {"v": base()[::_STEP], "w": base()[3::_STEP].view(4, -1).t()}


def overlapping() -> State:
    """Tensors that share most of their memory."""
    whole = base()
    return {"whole": whole, "rest": whole[7:], "even": whole[::2], "t": (whole[::3],)}


def tagged() -> State:
    """A tensor that only torch can store."""
    return {"v": base().as_subclass(Tagged)}


def whole_tuple() -> State:
    """A tensor of the whole storage, in a tuple."""
    return {"t": (base(),)}


STATES = {make.__name__: make for make in (sliced, both, sparse, overlapping, tagged, whole_tuple)}


def target_of(state: State) -> State:
    """A state dict to load into. Its tensors lie in storages of their own, short ones with gaps."""
    target: State = dict.fromkeys(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            step = _NUMEL // value.numel()
            target[name] = torch.zeros(_NUMEL, dtype=value.dtype)[::step].view(value.shape)
    return target


def save_in_background(state: State, path: str, **options: Any) -> None:
    torch_ckpt.async_save(state, storage_writer=FastWriter(path, io=IO), **options).result()


def save_in_process(state: State, path: str) -> None:
    save_in_background(state, path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)


def save_in_run(state: State, path: str, **options: Any) -> None:
    with torch_ckpt.Run(path, asynchronous=True, **options) as run:
        run.save(1, state)


WAYS = {
    "stock": lambda s, p: dcp.save(s, storage_writer=FileSystemWriter(p)),
    "stock async": lambda s, p: dcp.async_save(s, storage_writer=FileSystemWriter(p)).result(),
    "stock load": lambda s, p: dcp.load(s, storage_reader=FileSystemReader(p)),
    "save": lambda s, p: torch_ckpt.save(s, storage_writer=FastWriter(p, io=IO)),
    "dcp.save": lambda s, p: dcp.save(s, storage_writer=FastWriter(p, io=IO)),
    "async": save_in_background,
    "dcp async": lambda s, p: dcp.async_save(s, storage_writer=FastWriter(p, io=IO)).result(),
    "process": save_in_process,
    "stage": lambda s, p: SnapshotStager().stage(s),
    "run": lambda s, p: save_in_run(s, p, writer={"io": IO}),
    "agent": lambda s, p: save_in_run(s, p, agent=True),
    "safetensors": lambda s, p: torch_ckpt.save(s, storage_writer=SafetensorsWriter(p, io=IO)),
    "load": lambda s, p: torch_ckpt.load(s, storage_reader=FastReader(p, io=IO)),
    "dcp load": lambda s, p: dcp.load(s, storage_reader=FastReader(p, io=IO, trust_pickle=True)),
}
"""The ways to save or load: of torch_ckpt, and of stock DCP."""


def growth_mib(way: str, state: State, path: str) -> int:
    """Returns the peak memory of this process and its children, beyond the present memory."""
    gc.collect()
    processes = [Path("/proc/self"), *_children()]
    for process in processes:
        (process / "clear_refs").write_text("5")  # Sets the peak to the present value.
    before = [_kib(process, "VmRSS") for process in processes]
    WAYS[way](state, path)
    after = [_kib(process, "VmHWM") for process in processes]
    return (sum(after) - sum(before)) >> 10


def agent_growth_mib(path: str, state: State) -> int:
    """Returns the peak memory of an agent that writes a state, beyond that of the slots."""
    with torch_ckpt.Run(path, asynchronous=True, agent=True) as run:
        run.save(1, {"w": torch.ones(3)})
        run.wait()
        (agent,) = _children()
        (agent / "clear_refs").write_text("5")  # Sets the peak to the present value.
        before = _kib(agent, "VmRSS")
        run.save(2, state)
        run.wait()
        return (_kib(agent, "VmHWM") - _kib(agent, "RssShmem") - before) >> 10


def _children() -> list[Path]:
    """The processes that this one has started, and that have not ended."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    processes = (Path("/proc", child) for child in children)
    return [process for process in processes if _kib(process, "VmRSS")]


def _kib(process: Path, name: str) -> int:
    lines = (process / "status").read_text().splitlines()
    found = (int(line.split()[1]) for line in lines if line.startswith(name))
    return next(found, 0)


def main(way: str, path: str, *kinds: str) -> None:
    """Prints the growth in MiB for each kind of state."""
    torch.serialization.add_safe_globals([Tagged])
    if "load" not in way:
        WAYS[way]({"w": torch.ones(3)}, f"{path}/first")  # Imports, threads and processes.
    for kind in kinds:
        state = STATES[kind]()
        if "load" in way:
            dcp.save(state, storage_writer=FileSystemWriter(f"{path}/{kind}"))
            state = target_of(state)
        print(kind, growth_mib(way, state, f"{path}/{kind}"), flush=True)
    os._exit(0)  # Without waiting for a save process.


if __name__ == "__main__":
    main(*sys.argv[1:])
