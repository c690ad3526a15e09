"""A save right after one that failed, into the same new directory: nothing of the first is in it.

A rank that removes what it has written of the failed save may be slower than the next save of the
others.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machines import on_machine
from ranks import Ranks, Worlds
from support.store_server import StoreServer, reaching
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from waits import until

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, FastWriter, IoOptions, Run, SafetensorsWriter
from torch_ckpt.commits import late_names
from torch_ckpt.coordination.group import group_of
from torch_ckpt.frameworks.deepspeed.engine_checkpoint import DeepSpeedCheckpoint
from torch_ckpt.runs.background.agent import AgentBackend
from torch_ckpt.storage.machine_writer import MachineWriter

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

TIMES, FULL_TIMES = 20, 400
WORLD = 3
FAILING = 1
TIMEOUT_S = 60
LOST = "the tensor is lost"


class LosingPlanner(FastSavePlanner):
    """Cannot resolve one tensor on one rank, in a save that is to fail."""

    def __init__(self, fails: bool, failing: int = FAILING) -> None:
        super().__init__()
        self.failing = failing if fails and dist.get_rank() == failing else None

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == f"own.{self.failing}":
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


def in_the_background(
    writer: Callable[[Path], Any],
) -> Callable[[dict[str, Any], Path, bool], None]:
    def save(state: dict[str, Any], path: Path, fails: bool) -> None:
        planner = LosingPlanner(fails)
        saved = torch_ckpt.async_save(state, storage_writer=writer(path), planner=planner)
        saved.result(TIMEOUT_S)

    return save


def by_dcp_in_the_background(
    kind: AsyncCheckpointerType, writer: Callable[[Path], Any]
) -> Callable[[dict[str, Any], Path, bool], None]:
    def save(state: dict[str, Any], path: Path, fails: bool) -> None:
        saved: Any = dcp.async_save(
            state,
            storage_writer=writer(path),
            planner=LosingPlanner(fails),
            async_checkpointer_type=kind,
        )
        saved.result(TIMEOUT_S)

    return save


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


def machine() -> int:
    """The machine of this rank, of those that :func:`on_machine` makes."""
    return int(dist.get_rank() > 1)


@functools.cache
def agents_run(folder: Path, memory: Path, has_machines: bool, has_local: bool) -> Run:
    """The run of this rank, whose agent lives as long as the rank."""
    if has_machines:
        on_machine(memory)
    run = Run(
        folder / "run",
        local=folder / f"local-{machine()}" if has_local else None,
        asynchronous=True,
        agent=True,
        keep_last=2,
        max_failures=2 * FULL_TIMES,
        timeout_s=TIMEOUT_S,
    )
    assert isinstance(run._saves._backend, AgentBackend)
    return run


def by_agents(run: Run) -> Callable[[dict[str, Any], Path, bool], None]:
    """The failed save and the next one are of the same step."""

    def save(state: dict[str, Any], path: Path, fails: bool) -> None:
        lost = {"lost": Lost()} if fails and dist.get_rank() == FAILING else {}
        run.save(int(path.parent.name), state | lost)
        run.wait()
        assert isinstance(run._saves._backend, AgentBackend)

    return save


def to_machines(state: dict[str, Any], path: Path, fails: bool) -> None:
    """A run of machines with directories of their own, without agents."""
    in_a_run(local=path.parent / f"local-{machine()}")(state, path, fails)


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
    "FastWriter, in the background": in_the_background(FastWriter),
    "SafetensorsWriter, in the background": in_the_background(SafetensorsWriter),
    "FastWriter, in a thread of DCP": by_dcp_in_the_background(
        AsyncCheckpointerType.THREAD, FastWriter
    ),
    "FastWriter, in a process of DCP": by_dcp_in_the_background(
        AsyncCheckpointerType.PROCESS, FastWriter
    ),
    "without collectives": without_collectives,
    "several machines": by(of_machine),
    "installed, FileSystemWriter": installed(FileSystemWriter),
    "installed, HuggingFaceStorageWriter": installed(
        lambda path: HuggingFaceStorageWriter(str(path), save_distributed=False)
    ),
    "a run": in_a_run(),
    "a run, in the background": in_a_run(asynchronous=True),
    "a run of machines": to_machines,
    "DeepSpeed": by_deepspeed,
}


AGENTS = {
    "an agent": (False, False),
    "agents of several machines": (True, False),
    "agents of machines with local directories": (True, True),
}

ON_A_STORE = ["FastWriter", "a subclass", "SafetensorsWriter"]


def save_after_failures(
    folder: Path | str, save: Callable[[dict[str, Any], Any, bool], None], times: int
) -> list[str]:
    """What went wrong."""
    wrong = []
    for number in range(times):
        path: Any = f"{folder}/{number}/new"
        path, state = path if isinstance(folder, str) else Path(path), state_at(number)
        try:
            save(state, path, True)
            wrong.append(f"{number}: did not fail")
        except (Exception, CheckpointException) as error:
            if LOST not in str(error):  # Without collectives no rank knows the errors of others.
                is_elsewhere = save is without_collectives and dist.get_rank() != FAILING
                wrong += [] if is_elsewhere else [f"{number}: {error}"]
        try:
            save(state, path, False)
        except (Exception, CheckpointException) as error:
            wrong.append(f"{number}, second: {error}")
    return wrong


def save_in(folder: Path, way: str, times: int) -> list[str]:
    return save_after_failures(folder, WAYS[way], times)


def save_by_agents(folder: Path, memory: Path, way: str, times: int) -> list[str]:
    run = agents_run(folder, memory, *AGENTS[way])
    wrong = save_after_failures(folder, by_agents(run), times)
    run.wait(promoted=True)
    return wrong


def save_to_a_store(variables: dict[str, str], url: str, way: str, times: int) -> list[str]:
    with reaching(variables):
        return save_after_failures(url, WAYS[way], times)


def loaded(reader: Any) -> torch.Tensor:
    state = {"all": torch.zeros(300, 1000)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state["all"]


@pytest.mark.thin("SafetensorsWriter", "a subclass", "without collectives")
@pytest.mark.parametrize("way", WAYS)
def test_a_save_right_after_a_failed_one_into_the_same_new_directory_succeeds(
    worlds: Worlds, tmp_path: Path, way: str, full: bool
) -> None:
    times = FULL_TIMES if full else TIMES
    wrong = worlds.run(WORLD, save_in, tmp_path, way, times, timeout_s=500)
    assert wrong == [[]] * WORLD
    if way.startswith(("FastWriter", "a subclass")):
        last = tmp_path / str(times - 1) / "new"
        assert loaded(FastReader(last)).eq(times - 1).all()


def fail_before_others_begin(folder: Path, way: str, failing: int) -> list[str]:
    """One rank fails before the others begin to write. Returns what went wrong."""
    writer, has_failed = WRITERS_OF_DCP[way](folder / "new"), folder / "has failed"
    write_data = writer.write_data

    def write(*arguments: Any) -> Any:
        if dist.get_rank() != failing:
            until(has_failed.exists)
            return write_data(*arguments)
        try:
            return write_data(*arguments)
        finally:
            has_failed.touch()

    writer.write_data = write
    planner = LosingPlanner(dist.get_rank() == failing, failing)
    began = time.monotonic()
    try:
        dcp.save(state_at(1), storage_writer=writer, planner=planner)
    except CheckpointException as error:
        took_s = time.monotonic() - began
        failures = {rank: str(cause) for rank, (cause, _) in error.failures.items()}
        if took_s > late_names.APPEARS_S / 3:
            return [f"{took_s:.1f} s, {failures}"]
        return [] if list(failures) == [failing] else [str(failures)]
    return ["did not fail"]


WRITERS_OF_DCP: dict[str, Callable[[Path], Any]] = {
    "FastWriter": FastWriter,
    "a subclass": PlainWriter,
    "SafetensorsWriter": SafetensorsWriter,
    "SafetensorsWriter, several files": lambda path: SafetensorsWriter(
        path, max_shard_nbytes=100_000
    ),
}


@pytest.mark.thin(1)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("way", WRITERS_OF_DCP)
def test_a_rank_does_not_wait_for_files_of_a_save_that_has_failed_on_another_one(
    worlds: Worlds, tmp_path: Path, way: str, failing: int
) -> None:
    assert worlds.run(WORLD, fail_before_others_begin, tmp_path, way, failing) == [[]] * WORLD
    wrong = worlds.run(WORLD, save_with, tmp_path / "new", way)
    assert wrong == [None] * WORLD
    left = {path.name for path in tmp_path.rglob(".*")}
    assert all(name.startswith((".metadata", ".index.")) for name in left), left


def save_with(path: Path, way: str) -> None:
    gc.collect()  # Of the writer of the failed save, whose hidden directory is in use so long.
    dcp.save(state_at(2), storage_writer=WRITERS_OF_DCP[way](path))


@pytest.mark.thin("agents of machines with local directories")
@pytest.mark.parametrize("way", AGENTS)
def test_agents_save_a_step_right_after_a_failed_save_of_it(
    tmp_path: Path, memory: Path, way: str, full: bool
) -> None:
    times = FULL_TIMES if full else TIMES // 2
    with Ranks(WORLD) as world:
        wrong = world.run(save_by_agents, tmp_path, memory, way, times, timeout_s=500)
        assert wrong == [[]] * WORLD
    assert loaded(FastReader(tmp_path / f"run/step-{times - 1}")).eq(times - 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("way", ON_A_STORE)
def test_a_save_right_after_a_failed_one_to_the_same_new_place_of_a_store_succeeds(
    worlds: Worlds, store_server: StoreServer, store_url: str, way: str
) -> None:
    variables = store_server.environment()
    arguments = (variables, store_url, way, FULL_TIMES)
    wrong = worlds.run(WORLD, save_to_a_store, *arguments, timeout_s=500)
    assert wrong == [[]] * WORLD
    if way != "SafetensorsWriter":
        last = f"{store_url}/{FULL_TIMES - 1}/new"
        assert loaded(FastReader(last)).eq(FULL_TIMES - 1).all()
