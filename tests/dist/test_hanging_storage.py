"""A disk or store that hangs is named in the log of the process that waits for it, also alone.

A seccomp listener holds system calls of a save or load, one after the other, until the process has
logged the file. On a store, the server is stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forks import Forks
from mount_ways import WAYS, state_of
from support.freezing import freeze
from support.store_server import SeaweedFS
from syscalls import (
    Listener,
    Stop,
    can_stop,
    have_answered,
    stop_before_changes,
    stop_before_lookups,
)
from waits import until

import torch_ckpt
from torch_ckpt import Run
from torch_ckpt.cli.main import main
from torch_ckpt.coordination import waiting

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("memory"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]

LINE_S = 0.2  # Instead of 5 s.
FOUND_S = 5.0
RECORDS = ("run-id", "events.jsonl")
"""Nobody waits for the record of a run."""


class Lines(logging.Handler):
    """Appends the warnings of this process to a file, which another process reads."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self.file = path.open("a", buffering=1)

    def emit(self, record: logging.LogRecord) -> None:
        self.file.write(record.getMessage() + "\n")


def logs_to(path: Path) -> None:
    """Makes waits of a fraction of a second long ones, and this process log to a file."""
    logging.disable(logging.NOTSET)
    mock.patch.object(waiting, "LOG_S", LINE_S).start()
    logging.getLogger("torch_ckpt").addHandler(Lines(path))


def hold_each(stop_before: Callable[[], int], way: str, mount: Path, scratch: Path) -> None:
    """Saves or loads, and holds each kind of call to the mount once until the log names it.

    Writes to the file ``held`` what was held, and whether it was logged.
    """
    os.environ["TORCH_CKPT_IO"] = "threads"  # The filter does not see requests of io_uring.
    log, held = scratch / "log", (scratch / "held").open("a", buffering=1)
    logs_to(log)
    seen: set[tuple[str, bool]] = set()

    def answer(listener: Listener, stop: Stop) -> None:
        path = stop.old or stop.path
        kind = stop.call, os.path.isdir(path)
        is_here = f"{mount}/" in f"{stop.path}/" and not stop.path.endswith(RECORDS)
        if is_here and kind not in seen:
            seen.add(kind)
            end = time.monotonic() + FOUND_S
            is_named = False
            while not is_named and time.monotonic() < end:
                lines = log.read_text().splitlines()
                is_named = any(
                    line.startswith("waiting for storage: process") and Path(path).name in line
                    for line in lines
                )
                time.sleep(0.01)
            held.write(f"{stop.call} {os.path.relpath(path, mount)}: {is_named}\n")
        listener.let_through(stop)

    have_answered(stop_before, answer)
    (WAYS | READS)[way](mount)


def assert_all_named(scratch: Path, least: set[str]) -> None:
    held = (scratch / "held").read_text().splitlines()
    print(*held, (scratch / "log").read_text(), sep="\n")
    assert [each for each in held if not each.endswith("True")] == []
    assert least <= {each.split()[0] for each in held}


CHANGES = {
    "new": {"mkdir", "create", "fallocate", "pwrite64", "fsync", "rename"},
    "existing": {"create", "fallocate", "pwrite64", "fsync", "rename"},
    "again": {"create", "fallocate", "pwrite64", "fsync", "rename", "unlink"},
    "run": {"mkdir", "create", "fallocate", "pwrite64", "fsync", "rename"},
    "thread": {"mkdir", "create", "fallocate", "pwrite64", "fsync", "rename"},
    "part": {"create", "fsync", "rename"},
    "promotion": {"create", "pwrite64", "fsync", "rename"},
    "model": {"create", "pwrite64", "fsync", "rename"},
    "shards": {"create", "pwrite64", "fsync", "rename"},
    "to torch": {"create", "pwrite64", "fsync", "rename"},
}
"""Kinds of calls that each way must make, so that the test holds them."""


@pytest.mark.skipif(not can_stop(), reason="needs seccomp on x86-64")
@pytest.mark.thin("new", "thread", "model")
@pytest.mark.parametrize("way", CHANGES)
def test_each_call_of_a_save_alone_that_hangs_is_logged_with_its_file(
    tmp_path: Path, way: str
) -> None:
    mount, scratch = tmp_path / "mount", tmp_path / "scratch"
    scratch.mkdir()
    for name in ("existing", "run", "model"):
        (mount / name).mkdir(parents=True)
    for name in ("source", "mount/again", "mount/base"):
        torch_ckpt.save(state_of(1), checkpoint_id=tmp_path / name, no_dist=True)
    Forks().call(hold_each, stop_before_changes, way, mount, scratch)
    assert_all_named(scratch, CHANGES[way])


def load(mount: Path) -> None:
    state = state_of(0)
    torch_ckpt.load(state, checkpoint_id=mount / "saved", no_dist=True)
    assert torch.equal(state["w"], state_of(1)["w"])


def restore(mount: Path) -> None:
    with Run(mount / "run") as run:
        assert run.restore(state_of(0)) == 1


def restore_nothing(mount: Path) -> None:
    with Run(mount / "empty") as run:
        assert run.restore(state_of(0)) is None


def verify(mount: Path) -> None:
    assert main(["verify", str(mount / "saved")]) == 0


READS: dict[str, Callable[[Path], Any]] = {
    "load": load,
    "restore": restore,
    "restore nothing": restore_nothing,
    "verify": verify,
}


@pytest.mark.skipif(not can_stop(), reason="needs seccomp on x86-64")
@pytest.mark.parametrize("way", READS)
def test_each_look_up_of_a_load_alone_that_hangs_is_logged_with_its_file(
    tmp_path: Path, way: str
) -> None:
    mount, scratch = tmp_path / "mount", tmp_path / "scratch"
    scratch.mkdir()
    torch_ckpt.save(state_of(1), checkpoint_id=mount / "saved", no_dist=True)
    with Run(mount / "run") as run:
        run.save(1, state_of(1))
    Forks().call(hold_each, stop_before_lookups, way, mount, scratch)
    assert_all_named(scratch, {"stat"} if way == "restore nothing" else {"open"})


# ---- Stores ----


def test_a_store_that_hangs_is_logged_with_the_file_and_the_bytes(
    store_server: SeaweedFS, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.arange(float(4 << 20))}
    handler, logger = Lines(tmp_path / "log"), logging.getLogger("torch_ckpt")
    monkeypatch.setattr(waiting, "LOG_S", LINE_S)
    logger.addHandler(handler)
    try:
        for call in (torch_ckpt.save, torch_ckpt.load):
            handler.file.truncate(0)
            freeze(store_server.pid)
            resumed = threading.Thread(target=resume_once_logged, args=(store_server, tmp_path))
            resumed.start()
            try:
                call(state, checkpoint_id=store_url, no_dist=True)
            finally:
                resumed.join()
            line = (tmp_path / "log").read_text().splitlines()[0]
            assert line.startswith("waiting for storage: process"), line
            assert store_url.removeprefix("s3://") in line
    finally:
        logger.removeHandler(handler)


def resume_once_logged(server: SeaweedFS, scratch: Path) -> None:
    with contextlib.suppress(AssertionError):
        until(lambda: "waiting for storage" in (scratch / "log").read_text(), FOUND_S)
    os.kill(server.pid, signal.SIGCONT)
