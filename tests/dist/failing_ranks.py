"""Ranks that are late, raise or die at one point of a save or load, and the errors they get."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from forks import fork_context, rank_environment
from ranks import PR_SET_PDEATHSIG
from states import full_value
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.futures import Future

import torch_ckpt
from torch_ckpt import FastWriter
from torch_ckpt.errors import RankTimeoutError

DEADLINE_S = 1.0
MARGIN_S = 10.0  # For a machine that is busy.
AMPLE_S = 100.0  # Longer than LIMIT_S: a rank that waits so long was not notified of a failure.
LIMIT_S = 40.0  # For one call of a test.
COLLECTIVE_TIMEOUT_S = 300
SHAPES = {"first": (7, 5), "second": (61, 33)}
RECORDER = Path(__file__).resolve().parents[2] / "build/cpp"  # A module of C++ for tests.


class Failure(NamedTuple):
    """The error of a rank whose call was aborted."""

    ranks: tuple[int, ...]
    phase: str
    may_be_committed: bool
    message: str


def failure_of(error: BaseException | None) -> Failure:
    assert type(error) is RankTimeoutError, repr(error)
    assert error.seconds <= DEADLINE_S + MARGIN_S
    return Failure(error.ranks, error.phase, error.may_be_committed, str(error))


def train() -> None:
    """A collective of training, with the group that the call has used."""
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    assert ones.eq(dist.get_world_size()).all()


def hold(fifo: Path) -> None:
    """Blocks until another process calls :func:`release`."""
    fifo.open().close()


def release(fifo: Path) -> None:
    fifo.open("w").close()


class Detour:
    """Calls a function at one point of a save or load, on one rank; what it returns is sent."""

    def __init__(self, where: str, rank: int, function: Callable[..., Any], *args: Any) -> None:
        self.where, self.rank, self.function, self.args = where, rank, function, args

    def __call__(self, where: str) -> Any:
        if (where, dist.get_rank()) == (self.where, self.rank):
            return self.function(*self.args)
        return None

    def plan(self, where: str, plan: Any) -> Any:
        sent = self(where)
        return dataclasses.replace(plan, planner_data=sent) if sent else plan


class SavePlanner(DefaultSavePlanner):
    def __init__(self, detour: Detour) -> None:
        super().__init__()
        self.detour = detour
        self.resolved = 0

    def create_local_plan(self) -> SavePlan:
        return self.detour.plan("local plan", super().create_local_plan())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return [*plans[:-1], self.detour.plan("global plan", plans[-1])], metadata

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.resolved += 1
        if self.resolved == len(SHAPES):
            self.detour("write")
        return super().resolve_data(write_item)


class LoadPlanner(DefaultLoadPlanner):
    def __init__(self, detour: Detour) -> None:
        super().__init__()
        self.detour = detour

    def create_local_plan(self) -> LoadPlan:
        return self.detour.plan("local plan", super().create_local_plan())

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        plans = super().create_global_plan(global_plan)
        return [*plans[:-1], self.detour.plan("global plan", plans[-1])]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.detour("read")
        return super().finish_plan(new_plan)


class Publishing:
    """A file system that makes a detour before it commits."""

    def __init__(self, inner: Any, detour: Detour) -> None:
        self.inner, self.detour = inner, detour

    def __getattr__(self, name: str) -> Any:
        if name == "commit":
            self.detour("publish")
        return getattr(self.inner, name)


class Writer(FastWriter):
    def __init__(self, path: Path, detour: Detour) -> None:
        super().__init__(path)
        self.detour = detour

    def write_data(self, *args: Any, **kwargs: Any) -> Future[Any]:
        written = super().write_data(*args, **kwargs)
        sent = self.detour("results")
        return written.then(lambda done: [*done.value(), sent]) if sent else written

    def finish(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        self.detour("finish")
        publishing: Any = Publishing(self.location.file_system, self.detour)
        with mock.patch.object(self.location, "file_system", publishing):
            super().finish(metadata, *args, **kwargs)
        vars(metadata).update(self.detour("committed") or {})


def save(state: dict[str, Any], path: Path, detour: Detour, timeout_s: float = DEADLINE_S) -> None:
    torch_ckpt.save(
        state,
        storage_writer=Writer(path, detour),
        planner=SavePlanner(detour),
        timeout_s=timeout_s,
    )


def load(state: dict[str, Any], path: Path, detour: Detour, timeout_s: float = DEADLINE_S) -> None:
    torch_ckpt.load(state, checkpoint_id=path, planner=LoadPlanner(detour), timeout_s=timeout_s)


class StickyError(Exception):
    """Cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def save_and_wait(state: dict[str, Any], **options: Any) -> None:
    torch_ckpt.async_save(state, **options).result(LIMIT_S)


def own_state(rank: int, version: str) -> dict[str, Any]:
    """As many tensors on each rank, under names of its own."""
    return {
        f"{name} of {rank}": full_value(f"{name} {rank} {version}", shape, torch.float32)
        for name, shape in SHAPES.items()
    }


def answers(pipes: list[connection.Connection]) -> list[Any]:
    """What each rank has returned, none of which hangs."""
    assert all(pipe.poll(LIMIT_S) for pipe in pipes), "a rank hangs"
    return [pipe.recv() for pipe in pipes]


def be_rank(
    rank: int, size: int, port: int, serves: bool, replies: connection.Connection, *args: Any
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=serves, wait_for_workers=False)
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    function, *rest = args
    replies.send(function(*rest))
    replies.recv()  # Serves the store until all are done.


@contextlib.contextmanager
def mortal_ranks(size: int, store_on: int | None, *args: Any) -> Iterator[list[Any]]:
    """Processes that call a function each, and may die; yields their pipes.

    The store is served by this process, as a launcher does, or by one of them.
    """
    context = fork_context()
    port = get_free_port()
    if store_on is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=be_rank, args=(rank, size, port, rank == store_on, theirs, *args)
            )
            with mock.patch.dict(os.environ, rank_environment()):  # The server's, if it starts now.
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()
        if store_on is None:
            del store
