"""Each cell of the table of kinds: a value of each kind, by each way, on two ranks, bit for bit.

The table is in docs/compatibility.md. A way saves the values of all kinds one after another, spoils
their memory where a save is asynchronous, and loads them again.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import forked_saves
from ranks import Worlds
from support.kinds import KINDS, REFUSED, WAYS, cell, table
from support.placing import as_box
from support.tensors import Tagged, bits
from tensor_kinds import MADE, is_object, parts, spoil, whole_of
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, Run, SafetensorsWriter

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("memory"),
]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 200
GRIDS = [(2,), (2, 1), (1, 2)]


@functools.cache  # Groups live as long as the process.
def meshes() -> dict[tuple[int, ...], DeviceMesh]:
    return {grid: init_device_mesh("cpu", grid) for grid in GRIDS}


def made(kind: str) -> dict[str, Any]:
    """A state with a value of this kind."""
    return {"x": MADE[kind](meshes())}


# ---- Saves ---------------------------------------------------------------------------------------


def _async(function: Any, state: Any, path: Path, **options: Any) -> None:
    future = function(state, storage_writer=FastWriter(path), **options)
    spoil(state)
    future.result(TIMEOUT_S)


def _installed(state: Any, path: Path) -> None:
    with torch_ckpt.installed():
        dcp.save(state, storage_writer=FileSystemWriter(path / "sync"))
        future = dcp.async_save(state, storage_writer=FileSystemWriter(path))
        spoil(state)
        future.result()


BY: dict[str, Callable[[Any, Path], Any]] = {
    "torch_ckpt.save": lambda s, p: torch_ckpt.save(s, storage_writer=FastWriter(p)),
    "dcp.save": lambda s, p: dcp.save(s, storage_writer=FastWriter(p)),
    "torch_ckpt.async_save": functools.partial(_async, torch_ckpt.async_save),
    "dcp.async_save": functools.partial(_async, dcp.async_save),
    "process": functools.partial(
        _async, torch_ckpt.async_save, async_checkpointer_type=AsyncCheckpointerType.PROCESS
    ),
    "installed": _installed,
    "safetensors": lambda s, p: dcp.save(s, storage_writer=SafetensorsWriter(p)),
}
RUNS = {
    "run": {},
    "run, asynchronous": {"asynchronous": True},
    "run, agent": {"asynchronous": True, "agent": True},
    "memory": {"asynchronous": True, "agent": True},
}


@contextlib.contextmanager
def saves_by(way: str, folder: Path) -> Iterator[Callable[[str], None]]:
    """What saves a value of a kind by a way, and loads it."""
    if way in BY:

        def save(kind: str) -> None:
            BY[way](made(kind), folder / kind)
            load_same(dcp.load, FastReader(folder / kind), kind)

        yield save
        return
    with Run(folder, **RUNS[way]) as run:

        def save_step(kind: str) -> None:
            step, state = list(KINDS).index(kind), made(kind)
            run.save(step, state)
            if RUNS[way]:
                spoil(state)
            run.wait()
            if way == "memory":
                load_same(lambda target, **_: run.restore(target, step=step), None, kind)
            else:
                load_same(dcp.load, FastReader(folder / f"step-{step}"), kind)

        yield save_step


# ---- Loads ---------------------------------------------------------------------------------------


def blank(state: dict[str, Any]) -> None:
    """Makes a target of a state: other elements, and no objects."""
    if is_object(state["x"]):
        state["x"] = None
    else:
        spoil(state)


def differences(expected: Any, found: Any) -> list[str]:
    """What differs in the tensors of this rank."""
    one, other = list(parts(expected)), list(parts(found))
    if list(map(type, one)) != list(map(type, other)):
        return [f"{[*map(type, other)]} instead of {[*map(type, one)]}"]
    return [
        f"part {number} of {len(one)}"
        for number, (a, b) in enumerate(zip(one, other, strict=True))
        if bits(a) != bits(b)
    ]


def load_same(load: Any, reader: Any, kind: str) -> None:
    target = made(kind)
    blank(target)
    load(target, storage_reader=reader)
    assert not differences(made(kind), target)


def reshard(path: Path, kind: str) -> None:
    """Loads whole tensors, and then shards of columns."""
    names = made(kind)["x"].keys()
    expected = {name: tensor for name, tensor in whole_of(kind).items() if name in names}
    columns = functools.partial(as_box, mesh=meshes()[2,], placements=[Shard(1)])
    for cut in (torch.clone, columns):
        target = {name: cut(torch.zeros_like(tensor)) for name, tensor in expected.items()}
        dcp.load({"x": target}, storage_reader=FastReader(path))
        assert not differences({name: cut(expected[name]) for name in names}, target)


BY_LOAD: dict[str, Callable[[Path, str], None]] = {
    "torch_ckpt.load": lambda p, kind: load_same(torch_ckpt.load, FastReader(p), kind),
    "dcp.load": lambda p, kind: load_same(dcp.load, FastReader(p), kind),
    "stock": lambda p, kind: load_same(dcp.load, FileSystemReader(p), kind),
    "reshard": reshard,
}


# ---- Cells ---------------------------------------------------------------------------------------


def failures(way: str, folder: Path) -> dict[str, str]:
    """What fails of each kind on this rank, empty if nothing does."""
    warnings.simplefilter("ignore")
    torch.serialization.add_safe_globals([Tagged, TwoTensor])
    found = {}
    with contextlib.ExitStack() as stack:
        if way in BY_LOAD:
            check = functools.partial(saved_and_loaded, way, folder)
        else:
            if way == "process":
                stack.enter_context(forked_saves())
            check = stack.enter_context(saves_by(way, folder))
        for kind in KINDS:
            if cell(kind, way) == "-":
                continue
            found[kind] = ""
            try:
                check(kind)
            except BaseException as error:  # CheckpointException is no Exception.
                found[kind] = f"{type(error).__name__}: {error}"
            dist.barrier()
    return found


def saved_and_loaded(way: str, folder: Path, kind: str) -> None:
    torch_ckpt.save(made(kind), storage_writer=FastWriter(folder / kind))
    BY_LOAD[way](folder / kind, kind)


@pytest.mark.thin(
    *("process", "safetensors", "memory", "stock", "reshard"),
)
@pytest.mark.parametrize("way", WAYS)
def test_each_kind_is_saved_and_loaded_bit_for_bit_or_refused(
    worlds: Worlds, tmp_path: Path, way: str
) -> None:
    wrong = []
    for rank, found in enumerate(worlds.run(2, failures, way, tmp_path, timeout_s=TIMEOUT_S)):
        for kind, error in found.items():
            expected = REFUSED.get(kind, {}).get(way, "")
            if bool(error) != bool(expected) or not re.search(expected, error):
                wrong.append(f"{kind} on rank {rank}: {error or 'not refused'}")
    assert not wrong, "\n".join(wrong)


def test_the_table_names_the_kinds_and_ways_that_are_tried() -> None:
    assert list(MADE) == list(KINDS)
    assert {*BY, *RUNS, *BY_LOAD} == set(WAYS)
    page = (ROOT / "docs/compatibility.md").read_text()
    assert table() in page
    assert [way for way in WAYS.values() if way not in page.partition(table())[0]] == []
