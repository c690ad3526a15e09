"""Kills trainers and agents at random moments; every restart must go on from a step that was whole.

``PYTHONPATH=tests python tests/dist/agent_kills.py --kills 200 --seed 7`` prints who was killed how
often, from where the step came that was found then, and how many steps were lost. It ends with 1
where what was found is no single step, or one that is older than the newest that was complete on
all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import Forks
from lives import TIMEOUT_S, Life
from support.agents import agent_pid, kill_agent
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from torch_ckpt import CheckpointError, FastReader
from torch_ckpt._core import _native
from torch_ckpt.agent import AgentOptions, SnapshotAgent, SnapshotReader
from torch_ckpt.agent.memory import folder_of, run_of
from torch_ckpt.errors import NotFoundError

ROWS = 12 * 1024  # Divides by all world sizes; 48 MiB of shards, so that copies take a while.
COLUMNS = 1024
VICTIMS = ["all", "one", "agent", "all and agent", "one by SIGTERM", "agent by SIGTERM"]


@dataclass
class _Life(Life):
    """What the ranks of one life report."""

    restored: dict[int, tuple[int, str]] = field(default_factory=dict)  # Step, and from where.
    begun: dict[int, int] = field(default_factory=dict)  # The last step of each rank.
    staged: dict[int, int] = field(default_factory=dict)
    persisted: dict[int, int] = field(default_factory=dict)


class AgentCampaign:
    """One run that is killed again and again. Owned by one thread; prints nothing.

    Args:
        directory: For checkpoints.
        seed: Of all moments and victims.
        torn: Whether slots are marked complete before they are filled: what must be noticed.
    """

    def __init__(self, directory: Path, seed: int, *, torn: bool = False) -> None:
        self.directory = directory
        self.rng = random.Random(seed)
        self.seed = seed
        self.torn = torn
        self.kills: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.lost: Counter[int] = Counter()
        self.breaches: list[str] = []
        self._forks = Forks()
        self._least = 0  # The newest step that was complete on all ranks.
        self._most = 0  # The newest that any rank has begun.

    def run(self, kills: int) -> None:
        """Kills so often, and checks after each; then ends in good order."""
        for number in range(kills):
            victims = VICTIMS[number] if number < len(VICTIMS) else self.rng.choice(VICTIMS)
            try:
                self._live(victims)
            except AssertionError as error:
                self.breaches.append(f"kill {number} of seed {self.seed}, {victims}: {error}")
                self._least = self._most = 0
                self.directory = self.directory.with_name(f"run-{number}")
        try:
            self._live(None)
        except AssertionError as error:
            self.breaches.append(f"the end of seed {self.seed}: {error}")

    def report(self) -> str:
        """Who was killed, and what was found."""
        rows = [f"{victims:<20}{count:>6}" for victims, count in self.kills.items()]
        rows += [f"restored from {where:<12}{count:>6}" for where, count in self.found.items()]
        rows += [
            f"steps lost: {lost:<4}{count:>6} times" for lost, count in sorted(self.lost.items())
        ]
        rows.append(f"{self.kills.total()} kills, seed {self.seed}, {len(self.breaches)} breaches")
        return "\n".join(rows + self.breaches)

    def _live(self, victims: str | None) -> None:
        """Starts the ranks anew, checks what they find, and kills."""
        world_size = self.rng.choice([2, 2, 2, 1, 3])
        store = (self._forks.store.port, str(self._forks.next_number()))
        memory = os.environ.get("TORCH_CKPT_MEMORY", "/dev/shm")
        ranks = [
            self._forks.start(_train, rank, world_size, store, self.directory, self.torn, memory)
            for rank in range(world_size)
        ]
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
        life = _Life()
        try:
            life.listen(pipes, lambda: len(life.restored) == world_size)
            self._check_restored(life, world_size)
            some = self._most + self.rng.randrange(1, 4)
            life.listen(pipes, lambda: max(life.begun.values(), default=0) >= some)
            if victims is None:
                for pipe in pipes:
                    pipe.send("end")
                life.listen(pipes, lambda: not pipes)
                self._check_end()
                return
            life.pause(pipes, self.rng.uniform(0, self.rng.choice([0.02, 0.1])))
            self._kill(life, pipes, ranks, victims)
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()
            self._remember(life, world_size)

    def _check_restored(self, life: _Life, world_size: int) -> None:
        found = set(life.restored.values())
        assert len(found) == 1, f"ranks have restored different steps: {life.restored}"
        step, where = found.pop()
        assert self._least <= step <= self._most, (
            f"restored step {step} from {where}; complete was {self._least}, begun {self._most}"
        )
        self.found[where] += 1
        self.lost[self._most - step] += 1
        self._least = self._most = step

    def _kill(self, life: _Life, pipes: Any, ranks: Any, victims: str) -> None:
        self.kills[victims] += 1
        by = signal.SIGTERM if victims.endswith("SIGTERM") else signal.SIGKILL
        if "agent" in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent_pid(self.directory), by)
        if victims.startswith("agent"):
            # Trainers go on, with another agent: what comes now is saved as ever.
            step = max(life.begun.values()) + 2
            life.listen(
                pipes, lambda: min(life.persisted.get(r, 0) for r in pipes.values()) >= step
            )
            return
        order = list(range(len(ranks)))
        self.rng.shuffle(order)
        for number, rank in enumerate(order):
            if number == 1 and not victims.startswith("all"):
                life.pause(pipes, self.rng.uniform(0, 0.3))  # Until somebody notices.
                by = signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[rank][0].pid, by)

    def _remember(self, life: _Life, world_size: int) -> None:
        if len(life.staged) == world_size:
            self._least = max(self._least, min(life.staged.values()))
        self._most = max([self._most, *life.begun.values()])

    def _check_end(self) -> None:
        """After a good end nothing is left in memory, and the last step is on disk."""
        deadline = time.monotonic() + TIMEOUT_S
        folder = _folder(self.directory)
        while folder.exists():
            assert time.monotonic() < deadline, f"{list(folder.iterdir())} are left"
            time.sleep(0.05)


def _folder(directory: Path) -> Path:
    return folder_of(run_of(directory))


def end_agents(directory: Path) -> None:
    """Ends the agents of all runs in a directory that a campaign has left, and their memory."""
    for run in directory.glob("run*"):
        with contextlib.suppress(OSError, ValueError):
            kill_agent(run)
        shutil.rmtree(_folder(run), ignore_errors=True)


def _state(step: int) -> dict[str, Any]:
    """What a rank holds at a step: replicas, shards and an object."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    rows = torch.full((ROWS, COLUMNS), float(step))
    return {
        "shards": distribute_tensor(rows, mesh, [Shard(0)]),
        "replicas": distribute_tensor(rows[: ROWS // 4].clone(), mesh, [Replicate()]),
        "plain": torch.full((COLUMNS,), float(step)),
        "step": step,
    }


def _restore(agent: SnapshotAgent, directory: Path) -> tuple[dict[str, Any], str]:
    """The newest step there is, in memory or on disk."""
    state = _state(-1)
    found = agent.newest()
    on_disk = 0
    for path in directory.glob("step-*"):
        with contextlib.suppress(CheckpointError, NotFoundError):
            FastReader(path).read_metadata()
            on_disk = max(on_disk, int(path.name.removeprefix("step-")))
    if found is not None and found.step >= on_disk:
        dcp.load(state, storage_reader=SnapshotReader(found))
        assert state["step"] == found.step
        return state, "memory"
    if on_disk:
        dcp.load(state, storage_reader=FastReader(directory / f"step-{on_disk}", exchange="off"))
        return state, "disk"
    return _state(0), "nothing"


def _check(state: dict[str, Any]) -> None:
    """Raises unless all is of one step."""
    step = state["step"]
    for name in ("shards", "replicas", "plain"):
        value = state[name]
        local = value.to_local() if hasattr(value, "to_local") else value
        assert torch.equal(local, torch.full_like(local, float(step))), f"{name} is not of {step}"


def _train(
    pipe: connection.Connection,
    rank: int,
    world_size: int,
    store: tuple[int, str],
    directory: Path,
    torn: bool,
    memory: str,
) -> None:
    """One life of one rank."""
    os.environ["TORCH_CKPT_MEMORY"] = memory  # The server's may be that of another test.
    lock = threading.Lock()

    def say(what: str, value: Any) -> None:
        with lock, contextlib.suppress(OSError):
            pipe.send((what, value))

    try:
        port, prefix = store
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port)),
            rank=rank,
            world_size=world_size,
        )
        with contextlib.ExitStack() as stack:
            if torn:
                begin = _native.Slot.begin
                stack.enter_context(
                    mock.patch.object(_native.Slot, "begin", lambda *a: _begin_complete(begin, *a))
                )
            _train_until_told(pipe, directory, say)
    except BaseException as error:
        say("failed", f"{type(error).__name__}: {error}")
        raise
    dist.destroy_process_group()


def _begin_complete(begin: Any, slot: _native.Slot, *what: Any) -> None:
    begin(slot, *what)
    slot.complete()


def _train_until_told(pipe: connection.Connection, directory: Path, say: Any) -> None:
    agent = SnapshotAgent(directory, options=AgentOptions(linger_s=TIMEOUT_S))
    state, where = _restore(agent, directory)
    _check(state)
    say("restored", (state["step"], where))
    agent.reserve(state)
    waiting: list[threading.Thread] = []

    def persist(staged: Any) -> None:
        try:
            agent.persist(staged)
            say("persisted", staged.header.step)
        except CheckpointError as error:
            # Another rank was killed: this one will be, too.
            if "a rank ended" not in str(error):
                say("failed", f"{type(error).__name__}: {error}")

    while not pipe.poll():
        dist.barrier()  # A step of training.
        state["step"] += 1
        step = state["step"]
        for name in ("shards", "replicas", "plain"):
            state[name].fill_(float(step))
        say("begun", step)
        staged = agent.stage(state, directory / f"step-{step}", step=step, sync=False)
        say("staged", step)
        for thread in waiting[:-1]:
            thread.join()
        waiting = [*waiting[-1:], threading.Thread(target=persist, args=(staged,), daemon=True)]
        waiting[-1].start()
        _forget(directory, step)
    for thread in waiting:
        thread.join()
    agent.close()


def _forget(directory: Path, step: int) -> None:
    """Removes what is so old that nobody asks for it."""
    if dist.get_rank() == 0:
        shutil.rmtree(directory / f"step-{step - 8}", ignore_errors=True)


def main() -> int:
    """Runs a campaign and prints what was found; returns how the process should exit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torn", action="store_true", help="without the protection of slots")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        campaign = AgentCampaign(Path(folder) / "run", arguments.seed, torn=arguments.torn)
        began = time.monotonic()
        campaign.run(arguments.kills)
        print(campaign.report())
        print(f"{time.monotonic() - began:.0f} s")
        end_agents(Path(folder))
    return 1 if campaign.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
