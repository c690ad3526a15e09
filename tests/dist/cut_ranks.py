"""What a rank does in a life of :mod:`cut_machines`, and what its saves contain."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machines import memory_of
from namespaces import enter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from torch_ckpt import CheckpointError, FastReader, Run
from torch_ckpt.agent import AgentOptions
from torch_ckpt.filesystems.location import Location

__all__ = ["A_LIFE", "Call", "Job", "Setup", "number_at", "train"]

ROWS, COLUMNS = 48, 16 * 1024  # 3 MiB of shards; divides by all world sizes.
A_LIFE = 1000
"""The save of step 3 in life 2 has number 2003. All its tensors have this value."""
PROMOTE_BYTES_PER_S = 2 << 20
COLLECTIVE_S = 30.0


@dataclass(frozen=True)
class Setup:
    """How a run saves."""

    machines: int
    ranks: int  # Of each machine.
    place: Literal["disk", "store"]
    has_local: bool
    saves: Literal["direct", "thread", "agent", "agent with replicas"]
    on_failure: Literal["raise", "warn"]
    timeout_s: float

    @staticmethod
    def random(rng: random.Random, most: int) -> Setup:
        machines = rng.randint(2, most)
        return Setup(
            machines,
            rng.choice([1, 1, 2]) if machines == 2 else 1,
            rng.choice(["disk", "store", "store"]),
            rng.random() < 0.7,
            rng.choice(["direct", "thread", "agent", "agent", "agent", "agent with replicas"]),
            rng.choice(["raise", "warn"]),
            rng.choice([10.0, 25.0]),
        )

    @property
    def world_size(self) -> int:
        return self.machines * self.ranks

    def options(self, machine: int, local: Path) -> dict[str, Any]:
        """Arguments of the run on a machine."""
        options: dict[str, Any] = {"timeout_s": self.timeout_s, "keep_last": 3}
        options |= {"on_failure": self.on_failure, "max_failures": 100}
        if self.has_local:
            options |= {"local": local / f"machine-{machine}", "keep_local": 2}
            options["promote_bytes_per_s"] = PROMOTE_BYTES_PER_S
        if self.saves != "direct":
            options["asynchronous"] = True
        if self.saves.startswith("agent"):
            options["agent"] = AgentOptions(
                linger_s=60.0,
                peers_timeout_s=10.0,
                replicas=int("replicas" in self.saves),
                failure_domain=str(machine),
            )
        return options


@dataclass(frozen=True)
class Job:
    """One life of a run."""

    number: int
    setup: Setup
    url: str
    local: Path
    memory: Path
    pids: list[int]  # In the network of each machine.
    store: tuple[int, str]  # Port and prefix.
    variables: dict[str, str]
    steps: int
    seed: int
    is_early: bool  # Whether saves are reported as committed before they are.


@dataclass(frozen=True)
class Call:
    """A call of a rank that has ended, and its error, or an empty text."""

    name: str
    begin: float
    end: float
    error: str = ""
    is_typed: bool = True

    def __str__(self) -> str:
        return f"{self.name} took {self.end - self.begin:.1f} s: {self.error or 'returned'}"


def number_at(path: Location, step: int) -> int:
    """The number of the save in a checkpoint. AssertionError if its values are of several."""
    state = {
        "shards": torch.zeros(ROWS, COLUMNS),
        "replicas": torch.zeros(ROWS // 4, COLUMNS),
        "number": -1,
        "step": -1,
    }
    dcp.load(state, storage_reader=FastReader(str(path)), no_dist=True)
    return _check(state, step, str(path))


def _check(state: dict[str, Any], step: int, where: str) -> int:
    """Returns the number of the save that a state is of."""
    number = int(state["number"])
    assert state["step"] == step == number % A_LIFE, f"{where}: step {state['step']} of {number}"
    for name in ("shards", "replicas"):
        local = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
        assert torch.equal(local, torch.full_like(local, float(number))), (
            f"{where}: {name} is not of save {number}: {local.unique()}"
        )
    return number


def train(pipe: connection.Connection, rank: int, job: Job, stacks: Path) -> None:
    """One life of one rank."""

    def say(what: str, value: Any) -> None:
        with contextlib.suppress(OSError):
            pipe.send((what, value))

    def call(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        begin = time.monotonic()
        say("calling", name)
        try:
            result = function(*args, **options)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            is_typed = isinstance(error, CheckpointError | CheckpointException)
            say("called", Call(name, begin, time.monotonic(), text[-500:], is_typed))
            raise
        say("called", Call(name, begin, time.monotonic()))
        return result

    with stacks.open("a") as file:
        faulthandler.register(signal.SIGUSR1, file)
        machine = rank // job.setup.ranks
        enter(job.pids[machine])
        memory = memory_of(job.memory, machine)
        memory.mkdir(exist_ok=True)
        variables = {"TORCH_CKPT_MEMORY": str(memory), "GLOO_SOCKET_IFNAME": "ranks"}
        os.environ.update(job.variables, **variables)
        try:
            _connect(rank, machine, job)
            _train(job, machine, call, say)
            say("ended", True)
        except BaseException as error:
            say("failed", f"{type(error).__name__}: {error}"[-300:])


def _connect(rank: int, machine: int, job: Job) -> None:
    port, prefix = job.store
    timeout = timedelta(seconds=COLLECTIVE_S)
    store = dist.TCPStore(f"10.1.{machine}.1", port, is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(prefix, store),
        rank=rank,
        world_size=job.setup.world_size,
        timeout=timeout,
    )


def _state() -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    rows = torch.zeros(ROWS // dist.get_world_size(), COLUMNS)
    replicas = torch.zeros(ROWS // 4, COLUMNS)
    return {
        "shards": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
        "replicas": DTensor.from_local(replicas, mesh, [Replicate()], run_check=False),
        "number": 0,
        "step": 0,
    }


def _train(job: Job, machine: int, call: Any, say: Any) -> None:
    state = _state()
    run: Run = call("Run()", Run, job.url, **job.setup.options(machine, job.local))
    try:
        first = call("restore", run.restore, state) or 0
        say("restored", _check(state, first, "restored") if first else 0)
        rng = random.Random(job.seed)
        for step in range(first + 1, first + 1 + job.steps):
            _save(run, step, state, job, rng, call, say)
            time.sleep(rng.choice([0.0, 0.2, 1.0]))
    except BaseException as error:
        call("leave", run.__exit__, type(error), error, error.__traceback__)
        raise
    call("close", run.close)
    if job.setup.on_failure == "raise":
        say("promoted", state["number"])  # If there is no local directory, it was saved there.


def _save(
    run: Run, step: int, state: dict[str, Any], job: Job, rng: random.Random, call: Any, say: Any
) -> None:
    number = job.number * A_LIFE + step
    for name in ("shards", "replicas"):
        state[name].to_local().fill_(float(number))
    state |= {"number": number, "step": step}
    waits, promotes = rng.random() < 0.5, rng.random() < 0.3
    say("begun", number)
    if job.is_early:
        say("returned", number)
    is_saved = call("save", run.save, step, state)
    if job.setup.saves == "direct" and is_saved:
        say("returned", number)
    before = run.saved
    if not waits:
        return
    call("wait(promoted)" if promotes else "wait", run.wait, promoted=promotes)
    if run.saved > before:
        say("returned", number)
    if promotes and job.setup.has_local and job.setup.on_failure == "raise":
        say("promoted", number)
