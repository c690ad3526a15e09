"""Loses machines at random moments; every restart must go on from a step that all had replicated.

``PYTHONPATH=tests python tests/dist/machine_kills.py --kills 100 --seed 7`` prints what was lost
how often, and what was restored then. It ends with 1 where ranks have restored different steps,
values that are of no single step, or a step that is older than the newest that survives the loss of
a machine.
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
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import Forks
from lives import TIMEOUT_S, Life
from machines import RANKS_PER_MACHINE, memory_of
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from torch_ckpt.agent import AgentOptions, SnapshotAgent, SnapshotReader
from torch_ckpt.agent.buddies import MAX_LAG
from torch_ckpt.agent.memory import run_of

ROWS = 512
COLUMNS = 1024  # 2 MiB of shards in all, and 512 KiB of replicas.


@dataclass
class _Life(Life):
    """What the ranks of one life report."""

    restored: dict[int, int | None] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    # The step that all machines retain, if there is one.
    survives: dict[int, int | None] = field(default_factory=dict)


class MachineCampaign:
    """One run that loses machines again and again. Owned by one thread; prints nothing.

    Args:
        directory: Name of the run; nothing is written there.
        memory: For the memory of all machines.
        seed: Of all moments and victims.
    """

    def __init__(self, directory: Path, memory: Path, seed: int) -> None:
        self.directory, self.memory, self.seed = directory, memory, seed
        self.rng = random.Random(seed)
        self.tally: Counter[str] = Counter()
        self.breaches: list[str] = []
        self._forks = Forks()
        self._names = 3  # Machines so far; a replacement has a new name.
        self._machines = [0, 1, 2]
        self._least: int | None = None  # The newest step that must be restored.
        self._most = 0

    def run(self, kills: int) -> None:
        """Loses machines or trainers so often, and checks after each."""
        for number in range(kills + 1):
            try:
                self._live(is_last=number == kills)
            except AssertionError as error:
                self.breaches.append(f"life {number} of seed {self.seed}: {error}")
                self.directory = self.directory.with_name(f"run-{number}")
                self._least, self._most = None, 0

    def report(self) -> str:
        """What was lost, and what was restored."""
        rows = [f"{what:<50}{count:>6}" for what, count in sorted(self.tally.items())]
        rows.append(f"seed {self.seed}, {len(self.breaches)} breaches")
        return "\n".join(rows + self.breaches)

    def end(self) -> None:
        """Ends all agents."""
        for machine in range(self._names):
            for lock in memory_of(self.memory, machine).glob("*/*/agent.lock"):
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(lock.read_text()), signal.SIGKILL)

    def _live(self, *, is_last: bool) -> None:
        """Starts the ranks anew, checks what they find, and kills."""
        machines = self._machines
        store = (self._forks.store.port, str(self._forks.next_number()))
        size = RANKS_PER_MACHINE * len(machines)
        ranks = []
        for rank in range(size):
            folder = memory_of(self.memory, machines[rank // RANKS_PER_MACHINE])
            folder.mkdir(exist_ok=True)
            arguments = (rank, size, store, self.directory, str(folder))
            ranks.append(self._forks.start(_train, *arguments))
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
        life = _Life()
        try:
            life.listen(pipes, lambda: len(life.restored) == size)
            self._check_restored(life)
            loses = self.rng.random() < 0.8
            if loses or is_last:  # Before that, the loss of a machine may lose all.
                life.listen(pipes, lambda: None not in _all(life.survives, size))
            if is_last:
                for pipe in pipes:
                    pipe.send("end")
                life.listen(pipes, lambda: not pipes)
                self._check_end()
                return
            life.pause(pipes, self.rng.uniform(0, 0.5))
            lost = self.rng.choice(machines) if loses else None
            self._kill(life, pipes, ranks, lost)
            self._replace(lost)
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                while True:  # What it has reported before its end.
                    try:
                        if not pipe.poll():
                            break
                        life.take(pipes.get(pipe, 0), pipe.recv())
                    except (EOFError, OSError):
                        break
                pipe.close()
            self._most = max([self._most, *life.begun.values()])
            if None not in (survives := _all(life.survives, size)):
                self._least = max(survives)
            elif life.survives:  # Nothing must be restored.
                self._least = None

    def _check_restored(self, life: _Life) -> None:
        found = set(life.restored.values())
        assert len(found) == 1, f"ranks have restored different steps: {life.restored}"
        step = found.pop()
        assert self._least is None or step is not None, f"lost step {self._least}"
        assert self._least is None or self._least <= (step or 0) <= self._most, (
            f"restored step {step}; {self._least} survives, and {self._most} was begun"
        )
        self.tally[f"restored on {len(self._machines)} machines"] += step is not None
        self._least = step

    def _kill(self, life: _Life, pipes: Any, ranks: Any, lost: int | None) -> None:
        """Kills the ranks; those of a lost machine first, with its agent and its memory."""
        order = list(range(len(ranks)))
        self.rng.shuffle(order)
        if lost is not None:
            here = [r for r in order if self._machines[r // RANKS_PER_MACHINE] == lost]
            for rank in here:
                ranks[rank][0].kill()
            folder = memory_of(self.memory, lost)
            for lock in folder.glob("*/*/agent.lock"):
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(lock.read_text()), signal.SIGKILL)
            shutil.rmtree(folder)
            life.pause(pipes, self.rng.uniform(0, 0.3))  # Until somebody notices.
            order = [r for r in order if r not in here]
        for rank in order:
            ranks[rank][0].kill()
        self.tally["lost " + ("no machine" if lost is None else "one machine")] += 1

    def _replace(self, lost: int | None) -> None:
        """Chooses the machines of the next life, in another order."""
        left = [machine for machine in self._machines if machine != lost]
        while len(left) < (self.rng.choice([2, 3, 3]) if lost is not None else 3):
            left.append(self._names)
            self._names += 1
        self.rng.shuffle(left)
        self._machines = left

    def _check_end(self) -> None:
        """After a good end, nothing is left in memory."""
        deadline = time.monotonic() + TIMEOUT_S
        while left := list(self.memory.glob(f"machine-*/*/{run_of(self.directory).hex()}")):
            assert time.monotonic() < deadline, f"{left} are left"
            time.sleep(0.05)


def _all(reports: dict[int, int | None], size: int) -> list[Any]:
    """The last report of each rank."""
    return [reports.get(rank) for rank in range(size)]


def _state(step: int) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    rows = torch.full((ROWS, COLUMNS), float(step))
    return {
        "shards": distribute_tensor(rows, mesh, [Shard(0)]),
        "replicas": distribute_tensor(rows[: ROWS // 4].clone(), mesh, [Replicate()]),
        "step": step,
    }


def _check(state: dict[str, Any]) -> None:
    """Raises unless all is of one step."""
    step = state["step"]
    for name in ("shards", "replicas"):
        local = state[name].to_local()
        assert torch.equal(local, torch.full_like(local, float(step))), f"{name} is not of {step}"


def _train(
    pipe: connection.Connection,
    rank: int,
    world_size: int,
    store: tuple[int, str],
    directory: Path,
    memory: str,
) -> None:
    """One life of one rank."""
    os.environ["TORCH_CKPT_MEMORY"] = memory

    def say(what: str, value: Any) -> None:
        with contextlib.suppress(OSError):
            pipe.send((what, value))

    try:
        port, prefix = store
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port)),
            rank=rank,
            world_size=world_size,
        )
        _train_until_told(pipe, directory, memory, say)
    except BaseException as error:
        say("failed", f"{type(error).__name__}: {error}"[-300:])
        raise
    dist.destroy_process_group()


def _train_until_told(pipe: connection.Connection, directory: Path, memory: str, say: Any) -> None:
    options = AgentOptions(
        replicas=1, failure_domain=memory, persist_on_failure=False, linger_s=TIMEOUT_S
    )
    agent = SnapshotAgent(directory, options=options)
    found = agent.newest()
    state = _state(0)
    if found is not None:
        dcp.load(state, storage_reader=SnapshotReader(found))
        _check(state)
        assert state["step"] == found.step
    say("restored", None if found is None else found.step)
    random_pauses = random.Random(state["step"])
    first = None
    ends = False
    while not ends:
        is_told = torch.tensor([int(pipe.poll())])
        dist.all_reduce(is_told)  # A step of training.
        ends = bool(is_told.item())
        state["step"] += 1
        step = state["step"]
        first = first or step
        for name in ("shards", "replicas"):
            state[name].fill_(float(step))
        say("begun", step)
        staged = agent.stage(state, directory / f"step-{step}", step=step, persist=False)
        assert staged is not None
        session, sequence = staged.header.save
        keep = agent._replication.keep
        # A step that has become too old may be given up by the next save.
        is_safe = keep is not None and keep[0] == session and sequence - keep[1] < MAX_LAG
        say("survives", first + keep[1] if is_safe and keep is not None else None)
        time.sleep(random_pauses.choice([0.0, 0.02, 0.1]))
    agent.close(drop=True)


def main() -> int:
    """Runs a campaign and prints what was found; returns how the process should exit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="torch_ckpt-test-"))
    campaign = MachineCampaign(memory / "run", memory, arguments.seed)
    try:
        began = time.monotonic()
        campaign.run(arguments.kills)
        print(campaign.report())
        print(f"{time.monotonic() - began:.0f} s")
    finally:
        campaign.end()
        shutil.rmtree(memory, ignore_errors=True)
    return 1 if campaign.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
