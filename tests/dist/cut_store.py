"""A run on three machines, of which one loses the store: `cut_store.py FOLDER SECONDS ON_FAILURE`.

The machines are network namespaces. Each has a link to the ranks of the others, and one to the
store, of which that of machine 2 is down for so many seconds. Prints what each rank has found, as
JSON.

It is run in a network namespace of its own, by ``unshare --net``: nothing else is affected.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from namespaces import Network, Store, enter, in_machine
from ranks import Ranks

from torch_ckpt import Run
from torch_ckpt.agent import AgentOptions
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import committed_steps

MACHINES = 3
CUT = 2
TIMEOUT_S = 300.0
PACE_S = 4.0


def set_link(own_pid: int, state: str) -> None:
    """Sets the link of the machine that is cut, whose other end is in the network of a process."""
    in_machine(own_pid, "link", "set", f"store{CUT}", state)


def state_of(step: int) -> dict[str, Any]:
    return {f"w{dist.get_rank()}": torch.full((1 << 18,), float(step)), "step": step}


def call(found: list[Any], name: str, function: Any, *arguments: Any) -> None:
    begin, error, result = time.monotonic(), "", None
    try:
        result = function(*arguments)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    found.append((name, round(time.monotonic() - begin, 2), result, error))


def train(
    folder: Path,
    memory: Path,
    url: str,
    pids: list[int],
    outer: int,
    variables: dict[str, str],
    seconds: float,
    on_failure: Any,
) -> list[Any]:
    """Saves before, while and after the link is down. Returns how the calls went."""
    rank = dist.get_rank()
    enter(pids[rank])
    memory = memory / str(rank)
    memory.mkdir()
    os.environ.update(variables, TORCH_CKPT_MEMORY=str(memory), GLOO_SOCKET_IFNAME="ranks")
    found: list[Any] = []
    run = Run(
        url,
        local=folder / f"machine-{rank}",
        asynchronous=True,
        agent=AgentOptions(linger_s=5.0),
        on_failure=on_failure,
        max_failures=100,
        timeout_s=TIMEOUT_S,
    )
    call(found, "save 1", run.save, 1, state_of(1))
    call(found, "wait 1", lambda: run.wait(promoted=True))
    dist.barrier()
    if rank == CUT:
        set_link(outer, "down")
        threading.Timer(seconds, set_link, (outer, "up")).start()
    dist.barrier()
    begin, step = time.monotonic(), 1
    is_over = torch.zeros(1)
    while not is_over.item():
        step += 1
        call(found, f"save {step}", run.save, step, state_of(step))
        time.sleep(PACE_S)
        is_over.fill_(float(time.monotonic() - begin > seconds))
        dist.broadcast(is_over, 0)
    for _ in range(3):
        step += 1
        call(found, f"healed: save {step}", run.save, step, state_of(step))
        call(found, f"healed: wait {step}", run.wait)
    call(found, "failures", lambda: run.failures)
    call(found, "close", run.close)
    return found


def main(folder: Path, seconds: float, on_failure: str) -> None:
    outer = os.getpid()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Network(MACHINES)))
        memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="torch_ckpt-cut-"))
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        store = stack.enter_context(Store(folder / "store"))
        url = f"s3://{store.bucket}/run"
        with Ranks(MACHINES) as ranks:
            variables = store.variables()
            arguments = folder, memory, url, network.pids, outer, variables, seconds, on_failure
            found = ranks.run(train, *arguments, timeout_s=TIMEOUT_S + 3 * seconds)
        os.environ.update(store.environment())
        print(json.dumps({"ranks": found, "steps": committed_steps(Location(url))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
