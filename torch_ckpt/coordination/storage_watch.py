"""Logs calls of disks and stores that last long: a thread that is blocked in one logs nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

from torch_ckpt._core import _native
from torch_ckpt.coordination import waiting
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.process_state import PROCESS
from torch_ckpt.records.figures import nbytes_text

__all__ = ["watch_storage"]

_LOOKS = 5
"""How often the thread looks while a call may become long."""

_FORGET_S = 120.0
"""Seconds after which a new long call of the same job is logged as the first one was."""


def watch_storage() -> None:
    """Makes this process log each call of storage that lasts long, from now on.

    For the beginning of a save or load. A thread does it, which sleeps while no call is in
    progress. There is one for each process.
    """
    if PROCESS.storage_watch is None:
        thread = threading.Thread(target=_watch, name="torch_ckpt-storage", daemon=True)
        with contextlib.suppress(RuntimeError):  # The system has no more threads.
            thread.start()
            PROCESS.storage_watch = thread


class _Job:
    """The long calls of one job, or one long call. The lines have the intervals of one wait."""

    def __init__(self) -> None:
        self.text, self.found = "", 0.0
        self._wait = LongWait(lambda: self.text, waited_s=waiting.LOG_S)

    def log(self, text: str) -> None:
        self.text, self.found = text, time.monotonic()
        self._wait.log()


def _watch() -> None:
    jobs: dict[int, _Job] = {}
    while True:
        if not jobs:
            _native.await_storage_call()
        time.sleep(waiting.LOG_S / _LOOKS)
        for key, doing, path, done, total in _native.long_storage_calls(waiting.LOG_S):
            jobs.setdefault(key, _Job()).log(_text(doing, os.fsdecode(path), done, total))
        forgotten = time.monotonic() - _FORGET_S
        jobs = {key: job for key, job in jobs.items() if job.found > forgotten}


def _text(doing: str, path: str, done: int, total: int) -> str:
    """Returns what a call waits for: ``storage: rank 3 is writing file, 1.0 MB of 2.0 MB done``."""
    of_total = f" of {nbytes_text(total)}" if total else ""
    nbytes = f", {nbytes_text(min(done, total or done))}{of_total} done" if total or done else ""
    return f"storage: {_who()} is {doing} {path}{nbytes}"


def _who() -> str:
    """Returns the rank of this process, or its number. Does not import torch."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return f"rank {dist.get_rank()}"
    return f"process {os.getpid()}"
