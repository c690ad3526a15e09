"""A save right after one that failed, into the same new directory: nothing of the first is in it.

A rank that removes what it has written of the failed save may be slower than the next save of the
others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Worlds
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, FastWriter, IoOptions, Run, SafetensorsWriter
from torch_ckpt.coordination.group import group_of
from torch_ckpt.frameworks.deepspeed.engine_checkpoint import DeepSpeedCheckpoint
from torch_ckpt.storage.machine_writer import MachineWriter

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

TIMES, FULL_TIMES = 40, 400
WORLD = 3
FAILING = 1
TIMEOUT_S = 60
LOST = "the tensor is lost"


class LosingPlanner(FastSavePlanner):
    """Cannot resolve one tensor on one rank, in a save that is to fail."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails and dist.get_rank() == FAILING

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self.fails and write_item.index.fqn == f"own.{FAILING}":
            raise LookupError(LOST)
        return super().resolve_data(write_item)


class PlainWriter(FastWriter):
    """Writes to the directory itself, as every subclass does."""


def state_at(number: int) -> dict[str, Any]:
    return {
        "all": torch.full((300, 1000), float(number)),
        f"own.{dist.get_rank()}": torch.full((1000,), float(number)),
    }


def by(writer: Callable[[Path], Any]) -> Callable[[dict[str, Any], Path, bool], None]:
    def save(state: dict[str, Any], path: Path, fails: bool) -> None:
        torch_ckpt.save(state, storage_writer=writer(path), planner=LosingPlanner(fails))

    return save


def by_dcp(writer: Callable[[Path], Any]) -> Callable[[dict[str, Any], Path, bool], None]:
    def save(state: dict[str, Any], path: Path, fails: bool) -> None:
        dcp.save(state, storage_writer=writer(path), planner=LosingPlanner(fails))

    return save


def installed(writer: Callable[[Path], Any]) -> Callable[[dict[str, Any], Path, bool], None]:
    def save(state: dict[str, Any], path: Path, fails: bool) -> None:
        with torch_ckpt.installed():
            by_dcp(writer)(state, path, fails)

    return save


def in_the_background(state: dict[str, Any], path: Path, fails: bool) -> None:
    writer, planner = SafetensorsWriter(path), LosingPlanner(fails)
    torch_ckpt.async_save(state, storage_writer=writer, planner=planner).result(TIMEOUT_S)


def without_collectives(state: dict[str, Any], path: Path, fails: bool) -> None:
    torch_ckpt.save(
        state,
        storage_writer=FastWriter(path),
        planner=LosingPlanner(fails),
        use_collectives=False,
        timeout_s=TIMEOUT_S,
    )


def of_machine(path: Path) -> MachineWriter:
    """The first rank has a machine, and the others have another one."""
    rank = dist.get_rank()
    return MachineWriter(path / ("b" if rank else "a"), is_first=rank in (0, 1))


class Lost:
    """An object that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise LookupError(LOST)


def in_a_run(**options: Any) -> Callable[[dict[str, Any], Path, bool], None]:
    def save(state: dict[str, Any], path: Path, fails: bool) -> None:
        lost = {"lost": Lost()} if fails and dist.get_rank() == FAILING else {}
        with Run(path, timeout_s=TIMEOUT_S, **options) as run:
            run.save(1, state | lost)

    return save


def by_deepspeed(state: dict[str, Any], path: Path, fails: bool) -> None:
    rank, io = dist.get_rank(), IoOptions()
    saving = DeepSpeedCheckpoint(group_of(None), path, "tag", True, io=io, timeout_s=TIMEOUT_S)

    def prepare() -> Any:
        if fails and rank == FAILING:
            raise LookupError(LOST)
        return state, None

    saving.write(str(path / "tag" / f"rank_{rank}.pt"), prepare)
    saving.finish()


WAYS: dict[str, Callable[[dict[str, Any], Path, bool], None]] = {
    "FastWriter": by(FastWriter),
    "FastWriter, by DCP": by_dcp(FastWriter),
    "a subclass": by(PlainWriter),
    "a subclass, by DCP": by_dcp(PlainWriter),
    "SafetensorsWriter": by(SafetensorsWriter),
    "SafetensorsWriter, by DCP": by_dcp(SafetensorsWriter),
    "SafetensorsWriter, in the background": in_the_background,
    "without collectives": without_collectives,
    "several machines": by(of_machine),
    "installed, FileSystemWriter": installed(FileSystemWriter),
    "installed, HuggingFaceStorageWriter": installed(
        lambda path: HuggingFaceStorageWriter(str(path), save_distributed=False)
    ),
    "a run": in_a_run(),
    "a run, in the background": in_a_run(asynchronous=True),
    "DeepSpeed": by_deepspeed,
}


def save_after_failures(folder: Path, way: str, times: int) -> list[str]:
    """What went wrong."""
    save, wrong = WAYS[way], []
    for number in range(times):
        path, state = folder / str(number) / "new", state_at(number)
        try:
            save(state, path, True)
            wrong.append(f"{number}: did not fail")
        except (Exception, CheckpointException) as error:
            if LOST not in str(error):
                is_elsewhere = way == "without collectives" and dist.get_rank() != FAILING
                wrong += [] if is_elsewhere else [f"{number}: {error}"]
        try:
            save(state, path, False)
        except (Exception, CheckpointException) as error:
            wrong.append(f"{number}, second: {error}")
    return wrong


@pytest.mark.thin("SafetensorsWriter", "a subclass", "without collectives")
@pytest.mark.parametrize("way", WAYS)
def test_a_save_right_after_a_failed_one_into_the_same_new_directory_succeeds(
    worlds: Worlds, tmp_path: Path, way: str, full: bool
) -> None:
    times = FULL_TIMES if full else TIMES
    wrong = worlds.run(WORLD, save_after_failures, tmp_path, way, times, timeout_s=500)
    assert wrong == [[]] * WORLD
    if way in ("FastWriter", "a subclass", "FastWriter, by DCP", "a subclass, by DCP"):
        loaded = {"all": torch.zeros(300, 1000)}
        path = tmp_path / str(times - 1) / "new"
        dcp.load(loaded, storage_reader=FastReader(path), no_dist=True)
        assert torch.equal(loaded["all"], torch.full((300, 1000), float(times - 1)))
