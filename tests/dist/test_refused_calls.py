"""System calls that a container or an old kernel refuses: training goes on, with one warning.

A seccomp filter refuses them in two ranks, and in the agent that these start.
"""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from syscalls import can_stop, refuse
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt import FastWriter, IoOptions, Run, SafetensorsWriter

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("memory"),
    pytest.mark.skipif(not can_stop(), reason="needs seccomp on x86-64"),
]

CALLS = {
    "pidfd_open": [434],
    "process_vm_readv": [310],
    "io_uring_setup": [425],
    "io_uring_register": [427],
    "nice": [141, 140],
    "flock": [73],
    "fallocate": [285],
    "statx": [332],
    "cachestat": [451],
    "fadvise64": [221],
    "renameat2": [316],
    "mlock": [149, 325],
    "sched_getaffinity": [203, 204],
    "prctl": [157],
    "memfd_create": [319],
    "unix sockets": [],
}
NEEDED = {"flock", "fallocate", "unix sockets"}
"""Without these there is no agent."""
SOON_S = 30.0


def train(run: Path, error: int, name: str) -> tuple[list[str], float]:
    """Saves and restores with an agent. Returns the warnings and the seconds."""
    refuse(error, *CALLS[name], unix_sockets=name == "unix sockets")
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in (1, 2):
            with Run(run, asynchronous=True, agent=True, timeout_s=SOON_S) as made:
                state = {"w": torch.zeros(1 << 19), "rank": dist.get_rank()}
                assert made.restore(state) == (step - 1 or None)
                assert state["w"].eq(step - 1).all()
                state["w"].fill_(step)
                made.save(step, state)
        torch_ckpt.load(state, checkpoint_id=run / "step-1")  # Ranks exchange what both load.
        assert state["w"].eq(1).all()
    messages = [str(w.message) for w in warned if issubclass(w.category, UserWarning)]
    return [m for m in messages if "without" in m], time.monotonic() - began


CASES = [(name, error) for name in CALLS for error in ("EPERM", "ENOSYS", "EINVAL", "EINTR")]
CASES.remove(("flock", "EINTR"))  # Python repeats this call until it is not interrupted.


@pytest.mark.thin("pidfd_open-EPERM", "unix sockets-EPERM", "fallocate-EINTR")
@pytest.mark.parametrize(("name", "error"), CASES)
def test_training_goes_on_where_a_call_is_refused(run: Path, name: str, error: str) -> None:
    with Ranks(2, over_tcp=True) as world:  # The store in a file needs locks.
        (told, seconds), (nothing, _) = world.run(train, run, getattr(errno, error), name)
    print(f"{name} {error}: {seconds:.1f} s {told}")
    assert len(told) == (2 if name in NEEDED else 0), told  # One for each run of the first rank.
    assert nothing == []
    assert seconds < 50  # Not as long as agents are waited for.


REFUSALS = ["EINVAL", "EOPNOTSUPP", "ENOSYS", "EPERM", "EACCES", "ENODEV", "ESPIPE", "EINTR"]
"""What file systems and sandboxes answer that do not reserve space."""


def save_in_each_way(folder: Path) -> None:
    """Saves and loads under each refusal; the disk's own errors fail the save."""
    state = {"w": torch.arange(float(1 << 20))}
    writers: dict[str, Callable[[Path], Any]] = {
        "direct": FastWriter,
        "threads": FastWriter,
        "buffered": lambda path: FastWriter(path, io=IoOptions(direct=False)),
        "safetensors": SafetensorsWriter,
    }
    for error in (*REFUSALS, "ENOSPC", "EDQUOT", "EIO"):
        refuse(getattr(errno, error), *CALLS["fallocate"])  # The newest filter decides.
        for way, writer in writers.items():
            path = folder / f"{error} {way}"
            os.environ["TORCH_CKPT_IO"] = "threads" if way == "threads" else ""
            if error not in REFUSALS:
                with pytest.raises(CheckpointException) as caught:
                    torch_ckpt.save(state, storage_writer=writer(path))
                assert error in str(caught.value), (error, way)
                continue
            torch_ckpt.save(state, storage_writer=writer(path))
            loaded = {"w": torch.zeros(1 << 20)}
            torch_ckpt.load(loaded, checkpoint_id=path)
            assert loaded["w"].equal(state["w"]), (error, way)


def test_saves_do_not_need_space_to_be_reserved_and_report_a_disk_without_space(
    tmp_path: Path,
) -> None:
    with Ranks(1, over_tcp=True) as world:
        world.run(save_in_each_way, tmp_path)
