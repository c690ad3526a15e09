"""What it takes to restore from a buddy's memory, after one of four machines was lost.

Each machine is a rank with a folder of shared memory, and an agent, of its own. The ranks save
shards, and wait until all buddies have them. Then all ranks are killed, and new ones restore: on
the same machines, or with a new one in the place of one whose agent and memory are gone. The cases
take turns; a round before the others does not count. Takes 8 minutes, and `--gib` of /dev/shm four
times:

    python benchmarks/bench_buddy.py --json result.json
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_load import Bar, conclude
from bench_tree import print_table
from contenders import silence
from machine import GIB, describe

sys.path.append(str(Path(__file__).resolve().parent.parent))
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from torch_ckpt import Run
from torch_ckpt.agent import AgentOptions
from torch_ckpt.agent.memory import run_of
from torch_ckpt.agent.replica_files import whole_replicas

MACHINES = 4
TENSORS = 32
OWN, BUDDY = "own memory", "one machine lost"
CASES = (OWN, BUDDY)
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Sample:
    """One restart. ``restore_s`` is the longest of all ranks."""

    case: str
    round: int
    restore_s: float


def state_of(step: int, gib: float) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    rows = int(gib * GIB) // TENSORS // 4 // 1024
    return {
        f"w{i}": distribute_tensor(torch.full((rows, 1024), float(step + i)), mesh, [Shard(0)])
        for i in range(TENSORS)
    }


def folder_on(memory: Path, machine: int, run: Path) -> Path:
    """Returns the folder with the slots and the replicas of a machine."""
    return memory / str(machine) / f"torch_ckpt-{os.getuid()}" / run_of(run).hex()


def life(
    rank: int, run: Path, memory: Path, machines: list[int], saves: bool, gib: float, answers: Any
) -> None:
    """Saves a step, or restores it; then waits to be killed."""
    silence()
    torch.set_num_threads(1)
    folder = memory / str(machines[rank])
    folder.mkdir(exist_ok=True)
    os.environ["TORCH_CKPT_MEMORY"] = str(folder)
    store = dist.FileStore(str(memory / f"store-{'-'.join(map(str, machines))}-{saves}"), MACHINES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MACHINES)
    agent = AgentOptions(replicas=1, failure_domain=str(machines[rank]), persist_on_failure=False)
    steps = Run(run, asynchronous=True, agent=agent, timeout_s=TIMEOUT_S)
    took_s = 0.0
    if saves:
        steps.save(1, state_of(1, gib), persist=False)
        steps.wait()
    else:
        state = state_of(0, gib)
        dist.barrier()
        began = time.perf_counter()
        found = steps.restore(state)
        took_s = time.perf_counter() - began
        assert found == 1, f"restored step {found}"
        for name, value in state_of(1, gib).items():
            assert torch.equal(state[name].to_local(), value.to_local()), name
    answers.put(took_s)
    time.sleep(TIMEOUT_S)


def live(run: Path, memory: Path, machines: list[int], saves: bool, gib: float) -> float:
    """Runs the ranks until all have answered, and kills them; returns the longest restore."""
    context = mp.get_context("spawn")
    answers = context.Queue()
    arguments = (run, memory, machines, saves, gib, answers)
    ranks = [context.Process(target=life, args=(r, *arguments)) for r in range(MACHINES)]
    for process in ranks:
        process.start()
    try:
        longest = max(answers.get(timeout=TIMEOUT_S) for _ in ranks)
        if saves:
            deadline = time.monotonic() + TIMEOUT_S
            while not all(whole_replicas(folder_on(memory, m, run), run_of(run)) for m in machines):
                assert time.monotonic() < deadline, "the step is not replicated"
                time.sleep(0.05)
            time.sleep(0.5)  # Until the senders have the answers.
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
    return longest


def restart(case: str, number: int, options: argparse.Namespace) -> Sample:
    """Saves, loses a machine or none, and restores."""
    memory = Path(tempfile.mkdtemp(prefix="bench-buddy-", dir="/dev/shm"))
    run = memory / "run"
    machines = list(range(MACHINES))
    try:
        live(run, memory, machines, True, options.gib)
        if case == BUDDY:
            lost = folder_on(memory, 1, run)
            os.kill(int((lost / "agent.lock").read_text()), signal.SIGKILL)
            shutil.rmtree(memory / "1")
            machines[1] = MACHINES
        return Sample(case, number, live(run, memory, machines, False, options.gib))
    finally:
        for machine in range(MACHINES + 1):
            for lock in folder_on(memory, machine, run).glob("agent.lock"):
                os.kill(int(lock.read_text()), signal.SIGKILL)
        shutil.rmtree(memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, value in describe(Path("/dev/shm")).items():
        print(f"{name}: {value}")
    samples = []
    for number in range(-1, options.rounds):
        for case in CASES if number % 2 else reversed(CASES):
            sample = restart(case, number, options)
            print(f"{number} {case}: {sample.restore_s:.2f} s", file=sys.stderr, flush=True)
            if number >= 0:
                samples.append(sample)
    found = {case: [s.restore_s for s in samples if s.case == case] for case in CASES}
    rows = [["restore after", "min", "median"]]
    for case, seconds in found.items():
        rows.append([case, f"{min(seconds):.2f} s", f"{statistics.median(seconds):.2f} s"])
    print_table(rows)
    ratio = statistics.median(found[BUDDY]) / statistics.median(found[OWN])
    bars = [Bar(f"{BUDDY} / {OWN}", ratio, 2.0, "x")]
    conclude(bars, [asdict(sample) for sample in samples], options)


if __name__ == "__main__":
    main()
