"""Cuts the links of machines at random moments; what had returned must survive, and nothing hangs.

``PYTHONPATH=tests python tests/dist/cut_machines.py --lives 100 --seed 7`` prints what was cut and
killed how often, what was restored then, and the longest calls. It ends with 1 where a promise is
broken. Needs root: machines are network namespaces (:mod:`namespaces`).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cut_ranks
from cut_ranks import A_LIFE, Job, Setup
from forks import Forks
from lives import Life, Pipes
from namespaces import Network, Store, own_network
from torch.distributed.checkpoint.api import CheckpointException
from waits import until

from torch_ckpt import CheckpointError
from torch_ckpt.agent.memory import has_agent
from torch_ckpt.errors import NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import committed_id, files_in, open_committed
from torch_ckpt.ladder.step_files import committed_steps

MACHINES = 3
LIVES_OF_A_RUN = 6
START_S = 60.0  # For ranks to restore, on a machine that is busy.
BUSY_S = 15.0  # What a call may take more than its waits, on such a machine.
STORAGE_S = 30.0  # How long an agent tries again to read or write the directory of the run.
END_S = 60.0  # For agents to end after a run was closed.
LOG_LINES = 12
SHORTEST_S = 0.2  # Of the cuts.

# How a link is cut: of machine `a`, or between machines `a` and `b`.
CUTS: dict[str, Callable[[Network, int, int], object]] = {
    "machine, unplugged": lambda net, a, _: net.unplug(a, "ranks", "store"),
    "machine, silent": lambda net, a, _: (
        net.drop_from(a, "ranks", "store"),
        net.drop_to(a, "ranks", "store"),
    ),
    "machine sends nothing": lambda net, a, _: net.drop_from(a, "ranks", "store"),
    "machine receives nothing": lambda net, a, _: net.drop_to(a, "ranks", "store"),
    "store, unplugged": lambda net, a, _: net.unplug(a, "store"),
    "store, silent": lambda net, a, _: (net.drop_from(a, "store"), net.drop_to(a, "store")),
    "store receives nothing": lambda net, a, _: net.drop_from(a, "store"),
    "two machines, silent": lambda net, a, b: (net.drop_between(a, b), net.drop_between(b, a)),
    "two machines, one way": lambda net, a, b: net.drop_between(a, b),
}
KILLS = ["nothing", "nothing", "nothing", "rank", "agent", "rank and agent"]
ENDS = ["go on", "go on", "all ranks", "all ranks and agents"]


@dataclass
class _Life(Life):
    """What the ranks of one life report."""

    restored: dict[int, int] = field(default_factory=dict)  # The number of the save, or 0.
    begun: dict[int, int] = field(default_factory=dict)
    ended: dict[int, bool] = field(default_factory=dict)
    calling: dict[int, str] = field(default_factory=dict)
    calls: list[tuple[int, cut_ranks.Call]] = field(default_factory=list)
    returned: int = 0  # The newest save that is known to be committed.
    promoted: int = 0
    cut: tuple[float, float] | None = None  # From when to when.

    def take(self, rank: int, report: tuple[str, Any]) -> None:
        what, value = report
        if what == "called":
            self.calls.append((rank, value))
        elif what in ("returned", "promoted"):
            setattr(self, what, max(getattr(self, what), value))
        else:
            super().take(rank, report)


class CutCampaign:
    """Runs on machines that are cut off again and again. Owned by one thread; prints nothing.

    Args:
        folder: For directories of runs and machines.
        memory: For the memory of all machines.
        seed: Of all moments and victims.
        longest_s: Of the cuts.
        is_early: Whether ranks report saves as committed before they are: what must be noticed.
    """

    def __init__(
        self,
        folder: Path,
        memory: Path,
        seed: int,
        *,
        longest_s: float = 20.0,
        is_early: bool = False,
    ) -> None:
        self.folder, self.memory, self.seed = folder, memory, seed
        self.longest_s, self.is_early = longest_s, is_early
        self.tally: Counter[str] = Counter()
        self.longest: dict[str, float] = defaultdict(float)
        self.breaches: list[str] = []
        self._lives = 0
        with contextlib.ExitStack() as stack:
            self._network = stack.enter_context(contextlib.closing(Network(MACHINES)))
            stack.callback(self._end_agents)
            self._store = stack.enter_context(Store(folder / "store"))
            os.environ.update(self._store.environment())
            self._forks = Forks()
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Ends all that the campaign has started."""
        self._stack.close()

    def run(self, lives: int, first: int = 0) -> None:
        """Begins runs, each of a few lives, and checks after each life."""
        number = first
        while self._lives < lives:
            try:
                self._run(number, min(LIVES_OF_A_RUN, lives - self._lives))
            except (Exception, CheckpointException) as error:
                where = f"--seed {self.seed} --run {number}"
                self.breaches.append(f"{where}, {type(error).__name__}: {error}")
                self._end_agents()
            number += 1

    def report(self) -> str:
        """What was cut, what was restored, and how long the longest calls took."""
        rows = [f"{what:<40}{count:>6}" for what, count in sorted(self.tally.items())]
        rows += [f"longest {what:<32}{s:>6.1f} s" for what, s in sorted(self.longest.items())]
        rows.append(f"{self._lives} lives, seed {self.seed}, {len(self.breaches)} breaches")
        return "\n".join(rows + self.breaches)

    def _run(self, number: int, lives: int) -> None:
        """One run, from its first job to the last, which is not cut and ends well."""
        self.rng = rng = random.Random(f"{self.seed} {number}")
        self.name = f"run-{number}"
        self.setup = setup = Setup.random(rng, MACHINES)
        self.tally[f"run {setup}"] += 1
        place = {"disk": str(self.folder / self.name)}
        self.url = place.get(setup.place, f"s3://{self._store.bucket}/{self.name}")
        self._least, self._promoted, self._most = 0, 0, 0
        for life in range(lives):
            self._lives += 1
            is_last = life == lives - 1
            try:
                self._live(life + 1, is_last=is_last)
                self._check_disks()
            except (Exception, CheckpointException) as error:
                text = f"life {life + 1} of {setup}: {error!r}\n{self._logs()}"
                raise AssertionError(text) from error
        self._check_end()
        for path in (
            self.folder / self.name,
            self.memory / self.name,
            self.folder / f"local-{self.name}",
        ):
            shutil.rmtree(path, ignore_errors=True)

    # ---- One life ----

    def _live(self, number: int, *, is_last: bool) -> None:
        """Starts the ranks, cuts and kills, and checks what they report."""
        job = Job(
            number=number,
            setup=self.setup,
            url=self.url,
            local=self.folder / f"local-{self.name}",
            memory=self.memory / self.name,
            pids=self._network.pids,
            store=(self._forks.store.port, str(self._forks.next_number())),
            variables=self._store.variables(),
            steps=self.rng.randrange(3, 9),
            seed=self.rng.randrange(2**32),
            is_early=self.is_early,
        )
        job.memory.mkdir(exist_ok=True)
        stacks = self.memory / "stacks"
        life = _Life()
        ranks = [
            self._forks.start(cut_ranks.train, rank, job, stacks)
            for rank in range(self.setup.world_size)
        ]
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
        try:
            if is_last:
                self._let_end(life, pipes, ranks, stacks)
            else:
                self._disturb(life, pipes, ranks, stacks)
        finally:
            self._network.heal()
            for process, pipe in ranks:
                process.kill()
                process.join()
                with contextlib.suppress(EOFError, OSError):  # What it has reported before its end.
                    while pipe in pipes and pipe.poll():
                        life.take(pipes[pipe], pipe.recv())
                pipe.close()
        self._check_life(life, is_last=is_last)

    def _disturb(self, life: _Life, pipes: Pipes, ranks: Any, stacks: Path) -> None:
        """Cuts a link for some time, and kills meanwhile."""
        rng, setup = self.rng, self.setup
        self._await_moment(life, pipes)
        cuts = [cut for cut in CUTS if setup.place == "store" or not cut.startswith("store")]
        kind, seconds = rng.choice(cuts), self._duration()
        a, b = rng.sample(range(setup.machines), 2)
        kill, end = rng.choice(KILLS), rng.choice(ENDS)
        kill_s, end_s = rng.uniform(0, seconds), rng.uniform(0, 6)
        self.tally[f"cut: {kind}"] += 1
        self.tally[f"killed meanwhile: {kill}"] += 1
        self.what = f"{kind} of {a} and {b} for {seconds:.1f} s, kills {kill}, then {end}"
        begin = time.monotonic()
        CUTS[kind](self._network, a, b)
        self._receive(life, pipes, kill_s)
        self._kill(kill, ranks)
        self._receive(life, pipes, begin + seconds - time.monotonic())
        self._network.heal()
        life.cut = begin, time.monotonic()
        if end == "go on":
            self._let_end(life, pipes, ranks, stacks)
            return
        self._receive(life, pipes, end_s)
        self.tally[f"killed: {end}"] += 1
        for rank in rng.sample(range(len(ranks)), len(ranks)):
            ranks[rank][0].kill()
        if end == "all ranks and agents":
            self._end_agents()

    def _await_moment(self, life: _Life, pipes: Pipes) -> None:
        """Waits until the moment of the cut: early, in a save, or whenever."""
        rng = self.rng
        if rng.random() < 0.15:
            self._receive(life, pipes, rng.uniform(0, 4))
            return
        self._receive_until(
            life, pipes, START_S, lambda: len(life.restored) == self.setup.world_size
        )
        if rng.random() < 0.3:
            self._receive(life, pipes, rng.uniform(0, 4))
            return
        step = max(life.restored.values(), default=0) % A_LIFE + rng.randrange(1, 4)
        self._receive_until(
            life, pipes, BUSY_S, lambda: max(life.begun.values(), default=0) % A_LIFE >= step
        )
        self._receive(life, pipes, rng.uniform(0, rng.choice([0.1, 0.3, 1.0])))

    def _duration(self) -> float:
        """Of a cut: short ones are as likely as long ones."""
        return math.exp(self.rng.uniform(math.log(SHORTEST_S), math.log(self.longest_s)))

    def _kill(self, whom: str, ranks: Any) -> None:
        rank, machine = self.rng.randrange(len(ranks)), self.rng.randrange(self.setup.machines)
        if "rank" in whom:
            ranks[rank][0].kill()
        if "agent" in whom:
            self._end_agents(f"machine-{machine}")

    def _let_end(self, life: _Life, pipes: Pipes, ranks: Any, stacks: Path) -> None:
        """Waits until all ranks have ended by themselves."""
        self._receive(life, pipes, START_S + 2 * self._limit_s)
        if pipes:
            for pipe in pipes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ranks[pipes[pipe]][0].pid, signal.SIGUSR1)
            time.sleep(1.0)
            text = stacks.read_text() if stacks.exists() else ""
            calls = {rank: life.calling.get(rank) for rank in pipes.values()}
            raise AssertionError(f"these calls hang: {calls}\n{text}")

    def _receive_until(
        self, life: _Life, pipes: Pipes, seconds: float, is_due: Callable[[], bool]
    ) -> None:
        """Receives reports until something holds, or for some time at most."""
        end = time.monotonic() + seconds
        while not is_due() and pipes and time.monotonic() < end:
            self._receive(life, pipes, 0.02)

    @staticmethod
    def _receive(life: _Life, pipes: Pipes, seconds: float) -> None:
        """Receives reports for some time, or until all ranks have ended."""
        end = time.monotonic() + seconds
        while pipes and (left := end - time.monotonic()) > 0:
            life._receive(pipes, left)

    # ---- Checks ----

    @property
    def _limit_s(self) -> float:
        """How long a call may last when no link is cut: docs/deadlines.md."""
        return 2 * self.setup.timeout_s + STORAGE_S + BUSY_S

    def _check_life(self, life: _Life, *, is_last: bool) -> None:
        what = "no cut" if is_last else self.what
        self._most = max([self._most, *life.begun.values()])
        found = set(life.restored.values())
        assert len(found) <= 1, f"ranks have restored different saves: {life.restored}; {what}"
        if found:
            number = found.pop()
            self.tally["restored a save"] += number > 0
            self.tally["restored nothing"] += number == 0
            assert self._least <= number, (
                f"restored save {number}; {self._least} was whole, {self._most} begun; {what}"
            )
        self._least = max(self._least, life.returned, life.promoted)
        self._promoted = max(self._promoted, life.promoted)
        for rank, call in life.calls:
            waits_from = call.begin
            if life.cut is not None and life.cut[0] < call.end:
                waits_from = max(call.begin, life.cut[1])
            self.longest[call.name] = max(self.longest[call.name], call.end - waits_from)
            assert call.end - waits_from < self._limit_s, f"rank {rank}: {call} is late; {what}"
            if call.error:
                self.tally[f"{call.name} raised {call.error.partition(':')[0]}"] += 1
            assert call.is_typed, f"rank {rank}: {call} raises an error that has no type; {what}"
            assert not (is_last and call.error), f"rank {rank}: {call} although nothing is cut"
        assert not (is_last and len(life.ended) < self.setup.world_size), f"{life.failed}"
        self.tally["lives that ended well"] += len(life.ended) == self.setup.world_size

    def _check_disks(self) -> None:
        """What is committed anywhere is whole, and of one save."""
        run = Location(self.url)
        numbers = [cut_ranks.number_at(run / f"step-{step}", step) for step in committed_steps(run)]
        newest = max(numbers, default=0)
        assert self._promoted <= newest, f"save {self._promoted} was promoted; newest is {newest}"
        self._least = max(self._least, newest)
        if self.setup.has_local:
            for step in {s for local in self._locals for s in committed_steps(Location(local))}:
                self._check_halves(step)

    @property
    def _locals(self) -> list[Path]:
        return [
            self.folder / f"local-{self.name}" / f"machine-{m}" for m in range(self.setup.machines)
        ]

    def _check_halves(self, step: int) -> None:
        """Each machine has the files of what it has committed; one save on all is whole.

        A step that some machines have not committed, or of which they have different saves, does
        not count. An agent may commit meanwhile.
        """
        halves = [local / f"step-{step}" for local in self._locals]
        for _ in range(10):
            ids = _ids(halves)
            try:
                number = self._number_in(halves, ids, step)
            except (AssertionError, OSError, CheckpointError, CheckpointException) as error:
                if ids == _ids(halves):
                    names = [sorted(os.listdir(half)) for half in halves if half.exists()]
                    raise AssertionError(f"{names} of step {step}: {error}"[-2000:]) from error
                continue
            self._least = max(self._least, number)
            self.tally["steps that some machines lack"] += number == 0
            return

    def _number_in(self, halves: list[Path], ids: list[str | None], step: int) -> int:
        """Returns the number of the save that all machines have, or 0."""
        for machine, half in enumerate(halves):
            if ids[machine] is not None:
                _, index = open_committed(Location(half), "")
                assert index is not None
                ranks = range(machine * self.setup.ranks, (machine + 1) * self.setup.ranks)
                prefixes = tuple(f"__{rank}_" for rank in ranks)
                own = [(name, n) for name, n in index.files if name.startswith(prefixes)]
                lost = {name for name, _ in own} - files_in(Location(half), own)
                assert not lost, f"{half} has lost {lost}"
        if len(set(ids)) > 1:
            return 0
        metadata = {(half / ".metadata").read_bytes() for half in halves}
        assert len(metadata) == 1, f"two contents with the id {ids[0]}"
        whole = self.folder / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        for half in halves:
            shutil.copytree(half, whole, dirs_exist_ok=True)
        return cut_ranks.number_at(Location(whole), step)

    def _check_end(self) -> None:
        """After the last job, nothing is left but the steps."""
        memory = self.memory / self.name
        with contextlib.suppress(AssertionError):
            until(lambda: not list(memory.glob("*/*/*")), END_S)
        left = list(memory.glob("*/*/*"))
        assert not left, f"left in memory: {left}"
        places = [self.url, *map(str, self._locals if self.setup.has_local else [])]
        for place in map(Location, places):
            steps = {f"step-{step}" for step in committed_steps(place)}
            names = [n for n in place.names() if n.startswith(".") and n != ".agents"]
            for name in place.names():
                inner = _names(place / name)  # The store shows empty folders for a while.
                if name.startswith("step-") and name not in steps:
                    names += [f"{name}/{n}" for n in inner]
                names += [f"{name}/{n}" for n in inner if n.endswith(".tmp")]
            for save in _names(place / ".agents"):
                names += [f"{save}/{n}" for n in _names(place / ".agents" / save)]
            assert not names, f"left in {place}: {names}"

    def _logs(self) -> str:
        """The ends of the logs of all agents, for people."""
        logs = sorted((self.memory / self.name).glob("*/*/*/agent.log"))
        tails = [(log, log.read_text().splitlines()[-LOG_LINES:]) for log in logs]
        return "\n".join(f"{log}\n" + "\n".join(lines) for log, lines in tails)

    def _end_agents(self, machine: str = "machine-*") -> None:
        for lock in self.memory.glob(f"*/{machine}/*/*/agent.lock"):
            with contextlib.suppress(OSError, ValueError):
                if has_agent(lock.parent):
                    os.kill(int(lock.read_text()), signal.SIGKILL)


def _ids(halves: list[Path]) -> list[str | None]:
    return [committed_id(Location(half)) if half.exists() else None for half in halves]


def _names(directory: Location) -> list[str]:
    with contextlib.suppress(NotFoundError, StorageError):  # It is a file.
        return directory.names()
    return []


def main() -> int:
    """Runs a campaign and prints what was found; returns how the process should exit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=int, default=0, help="the first run, to repeat a failure")
    parser.add_argument("--longest", type=float, default=20.0, help="seconds of a cut")
    parser.add_argument("--early", action="store_true", help="with ranks that report too early")
    arguments = parser.parse_args()
    own_network()
    warnings.simplefilter("ignore")  # Of loads by a single process.
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="torch_ckpt-cut-"))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        began = time.monotonic()
        campaign = CutCampaign(
            *(Path(folder), memory, arguments.seed),
            longest_s=arguments.longest,
            is_early=arguments.early,
        )
        stack.callback(campaign.close)
        campaign.run(arguments.lives, arguments.run)
        print(campaign.report())
        print(f"{time.monotonic() - began:.0f} s")
    return 1 if campaign.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
