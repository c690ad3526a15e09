"""A call during which the network between its ranks stalls: `stalled_network.py CALL RUN SECONDS`.

CALL is `save`, or `load` for a load in which the ranks exchange what they read.

It is run in a network namespace of its own, by ``unshare --net``: nothing else is affected.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks
from record_states import Slow, state_of

from torch_ckpt import Run
from torch_ckpt.storage import reader


def set_network(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True, timeout=10)


def save(folder: Path, seconds: float) -> None:
    """Saves a step. The network is down when rank 1 has written its part, a second after rank 0."""
    rank = dist.get_rank()

    def stall() -> None:
        time.sleep(0.6)
        set_network("down")
        time.sleep(seconds)
        set_network("up")

    with Run(folder, timeout_s=60, reuse="off") as run:
        for step in (1, 2):  # The first one has fast messages to compare with.
            state = state_of()
            if step == 2:
                state["object"] = Slow(1.0)  # Written by the first rank of those that have it.
                if rank == 0:
                    del state["object"]
                    threading.Thread(target=stall).start()
            run.save(step, state)


def load(folder: Path, seconds: float) -> None:
    """Saves a step, and loads it. The network is down when the ranks have begun to read."""
    state = {"replicated": torch.ones(16 << 20)}  # So large that the ranks exchange reads.
    with Run(folder, timeout_s=60, reuse="off") as run:
        run.save(1, state)
        dist.barrier()

        @contextlib.contextmanager
        def stalling(*arguments: Any, **options: Any) -> Iterator[Any]:
            with joined(*arguments, **options) as exchange:
                if dist.get_rank() == 0:
                    set_network("down")
                    threading.Timer(seconds, set_network, ["up"]).start()
                yield exchange

        joined, reader.joined = reader.joined, stalling
        run.restore(state)


if __name__ == "__main__":
    set_network("up")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with Ranks(2) as ranks:
        call = {"save": save, "load": load}[sys.argv[1]]
        ranks.run(call, Path(sys.argv[2]), float(sys.argv[3]))
