"""A run on three machines, of which one loses the store: `cut_store.py FOLDER SECONDS ON_FAILURE`.

The machines are network namespaces. Each has a link to the ranks of the others, and one to the
store, of which that of machine 2 is down for so many seconds. Prints what each rank has found, as
JSON.

It is run in a network namespace of its own, by ``unshare --net``: nothing else is affected.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks
from support.store_server import SeaweedFS
from waits import until

from torch_ckpt import Run
from torch_ckpt.agent import AgentOptions
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import committed_steps

MACHINES = 3
CUT = 2
STORE = "10.3.0.1"
CLONE_NEWNET = 0x40000000
TIMEOUT_S = 300.0
PACE_S = 4.0


class Store(SeaweedFS):
    """A store that other network namespaces reach, too."""

    def _command(self) -> list[str]:
        return [
            part.replace("-ip.bind=127.0.0.1", "-ip.bind=0.0.0.0") for part in super()._command()
        ]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


def in_machine(pid: int, *words: str) -> None:
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", *words]
    subprocess.run(command, check=True, timeout=10)


def make_machine(number: int, stack: contextlib.ExitStack) -> int:
    """Makes a network namespace with two links. Returns a process in it."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "3600"])
    stack.callback(holder.wait)
    stack.callback(holder.kill)
    own = os.readlink("/proc/self/ns/net")
    until(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != own)
    in_machine(holder.pid, "link", "set", "lo", "up")
    for net, name in ((1, "ranks"), (2, "store")):
        outer = f"{name}{number}"
        ip("link", "add", outer, "type", "veth", "peer", "name", name, "netns", str(holder.pid))
        ip("addr", "add", f"10.{net}.{number}.1/24", "dev", outer)
        ip("link", "set", outer, "up")
        in_machine(holder.pid, "addr", "add", f"10.{net}.{number}.2/24", "dev", name)
        in_machine(holder.pid, "link", "set", name, "up")
    in_machine(holder.pid, "route", "add", "10.1.0.0/16", "via", f"10.1.{number}.1")
    in_machine(holder.pid, "route", "add", STORE, "via", f"10.2.{number}.1")
    return holder.pid


def enter(pid: int) -> None:
    """Moves this thread, and all that it starts, to the network of a machine."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns is refused")


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
        ip("link", "set", "lo", "up")
        ip("addr", "add", f"{STORE}/32", "dev", "lo")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        pids = [make_machine(number, stack) for number in range(MACHINES)]
        memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="torch_ckpt-cut-"))
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        store = stack.enter_context(Store(folder / "store"))
        variables = store.environment(f"http://{STORE}:{store.ports[0]}")
        variables["NO_PROXY"] = f"127.0.0.1,{STORE}"
        url = f"s3://{store.bucket}/run"
        with Ranks(MACHINES) as ranks:
            arguments = folder, memory, url, pids, outer, variables, seconds, on_failure
            found = ranks.run(train, *arguments, timeout_s=TIMEOUT_S + 3 * seconds)
        os.environ.update(store.environment())
        print(json.dumps({"ranks": found, "steps": committed_steps(Location(url))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
