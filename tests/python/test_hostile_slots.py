"""Slots with a sound checksum and unsound numbers, or that a process cannot open."""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import torch_ckpt
from torch_ckpt._core import _native
from torch_ckpt.agent import AgentOptions
from torch_ckpt.agent.client import Member
from torch_ckpt.agent.memory import (
    complete_slots,
    discard_slots,
    folder_of,
    open_folder,
    run_of,
)
from torch_ckpt.agent.replica_files import whole_replicas
from torch_ckpt.agent.slots import Slots
from torch_ckpt.errors import StorageError, UnsupportedError

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("memory")]

NBYTES = 64 << 20  # Of a slot.

IN_MEMORY = AgentOptions(persist_on_failure=False)

SUM_AT, SUMMED = 24, slice(32, 256)  # See csrc/format/FORMAT.md.
AT = {"version": 16, "session": 48, "world_size": 88, "node_count": 104, "payload_begin": 144}


@contextlib.contextmanager
def training(run: Path) -> Iterator[torch_ckpt.Run]:
    """A run that an exception ends: what is in memory stays there."""
    with (
        contextlib.suppress(ZeroDivisionError),
        torch_ckpt.Run(run, asynchronous=True, agent=IN_MEMORY) as made,
    ):
        yield made
        raise ZeroDivisionError


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(step))}


def leave_steps(run: Path) -> Path:
    """Leaves step 1 on disk and step 2 in memory; returns the slot with step 2."""
    with training(run) as made:
        made.save(1, state_of(1))
        made.wait()
        made.save(2, state_of(2), persist=False)
    name = run_of(run)
    return next(path for header, path in complete_slots(folder_of(name), name) if header.step == 2)


def overwrite(slot: Path, at: int, data: bytes) -> None:
    """Changes bytes of a header, and corrects its checksum."""
    with slot.open("r+b") as file:
        page = bytearray(file.read(4096))
        page[at : at + len(data)] = data
        struct.pack_into("<Q", page, SUM_AT, _native.xxh3(bytes(page[SUMMED])))
        file.seek(0)
        file.write(page)


def check_restores(run: Path, step: int) -> None:
    with training(run) as made:
        state = state_of(0)
        assert made.restore(state) == step
        assert torch.equal(state["w"], state_of(step)["w"])


def check_restart(run: Path) -> None:
    """Step 2 is passed over, and the run goes on from step 1."""
    with training(run) as made:
        state = state_of(0)
        assert made.restore(state) == 1
        assert torch.equal(state["w"], state_of(1)["w"])
        made.save(3, state_of(3))
        made.wait()
        assert made.restore(state) == 3
        assert torch.equal(state["w"], state_of(3)["w"])


@pytest.mark.parametrize(
    ("field", "number"),
    [("world_size", 2), ("world_size", 1 << 31), ("world_size", (1 << 63) - 1), ("node_count", 2)],
)
def test_a_slot_of_a_job_that_cannot_be_is_passed_over(run: Path, field: str, number: int) -> None:
    overwrite(leave_steps(run), AT[field], struct.pack("<q", number))
    check_restart(run)


def test_a_slot_with_a_name_that_is_no_text_is_passed_over(run: Path) -> None:
    path = leave_steps(run)
    slot = _native.Slot.open(os.fsencode(path), True)
    found = slot.read()
    items = bytearray(found.items)
    items[items.index(b"contiguous_format")] = 0xFF
    items[-8:] = struct.pack("<Q", _native.xxh3(bytes(items[:-8])))
    begin = struct.unpack_from("<q", path.read_bytes(), AT["payload_begin"])[0]
    extents = [(n, offset - begin, *rest) for n, offset, *rest in found.extents]
    table = _native.encode_slot_table(
        found.directory, found.version, True, bytes(items), found.paths, extents
    )
    slot.begin(found.header, table, 4 * len(state_of(0)["w"]))
    slot.complete()
    check_restart(run)


def test_a_run_saves_without_an_agent_if_no_session_can_be_later(run: Path) -> None:
    overwrite(leave_steps(run), AT["session"], b"\xff" * 16)
    with pytest.warns(UserWarning, match=r"without an agent: .* remove this folder"):
        check_restart(run)


def test_a_step_of_a_later_version_remains_in_memory(run: Path) -> None:
    slot = leave_steps(run)
    overwrite(slot, AT["version"], struct.pack("<I", 3))
    with pytest.warns(UserWarning, match=r"without an agent: .* is of version 3"):
        check_restores(run, 1)
    name = run_of(run)
    with pytest.raises(UnsupportedError, match="is of version 3"):
        begin_agent(folder_of(name), name)  # It would remove the slot when it ends.
    overwrite(slot, AT["version"], struct.pack("<I", 2))
    check_restores(run, 2)


@contextlib.contextmanager
def little_address_space() -> Iterator[None]:
    """This process can map no slot."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + NBYTES // 4, limits[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def find_slots(folder: Path, run: bytes) -> object:
    return list(complete_slots(folder, run))


def begin_agent(folder: Path, run: bytes) -> object:
    return Slots(folder, run, threading.Condition(), lambda *_: False)


def discard(folder: Path, run: bytes) -> object:
    return discard_slots(folder, run, lambda _: True)


@pytest.mark.parametrize("use", [find_slots, begin_agent, discard, whole_replicas])
def test_a_slot_that_cannot_be_mapped_does_not_count_as_empty(
    run: Path, use: Callable[[Path, bytes], object]
) -> None:
    name = run_of(run)
    folder = open_folder(name)
    is_replica = use is whole_replicas
    path = folder / ("replica-0-rank-0.0" if is_replica else "rank-0.0")
    slot = _native.Slot.create(os.fsencode(path), NBYTES)
    header = Member(name, b"s" * 16, 0, 1, 0, 1, [0]).header(0, 5, persist=True)
    table = _native.encode_slot_table(b"d", "1", True, _native.ItemTable().encode(), None, [])
    slot.begin(header, table, 0)
    slot.complete()
    del slot
    with little_address_space(), pytest.raises(StorageError, match=f"cannot map .* {path}"):
        use(folder, name)
    assert use(folder, name)
