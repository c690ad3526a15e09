"""Logs long calls of disks and stores from a separate thread: blocked threads cannot log."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import TypeAlias

from torch_ckpt._core import _native
from torch_ckpt.coordination import waiting
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.process_state import PROCESS
from torch_ckpt.records.figures import nbytes_text

__all__ = ["watch_storage"]

_Call: TypeAlias = tuple[int, int, float, str, bytes, int, int]

_POLLS = 5
"""Number of polls within ``LOG_S``."""


def watch_storage() -> None:
    """Makes this process log each long call of storage from now on.

    Called before storage may be used for the first time. Each process has one logging thread, which
    sleeps while no call is in progress.
    """
    if not PROCESS.storage_watch:
        thread = threading.Thread(target=_watch, name="torch_ckpt-storage", daemon=True)
        # No lock: a child forked while another thread holds it could never acquire it.
        if PROCESS.storage_watch.setdefault("thread", thread) is not thread:
            return
        try:
            thread.start()
        except RuntimeError:  # The system has no more threads.
            PROCESS.storage_watch.clear()


class _Job:
    """The long calls of one job, or one long call.

    The lines of one call are logged at the intervals of a wait. A job on a slow disk has many long
    calls: after one call was logged, another one is logged ``LOG_S`` later at the earliest.
    """

    def __init__(self) -> None:
        self.found = self._began = -math.inf
        self._number, self._text = 0, ""

    def log(self, number: int, waited_s: float, text: str) -> None:
        self.found = now = time.monotonic()
        if number != self._number:
            if now - self._began < waiting.LOG_S:
                return
            self._number, self._began = number, now
            self._wait = LongWait(lambda: self._text, waited_s=waited_s)
        self._text = text
        self._wait.log()


def _watch() -> None:
    jobs: dict[int, _Job] = {}
    while True:
        if not jobs:
            _native.await_storage_call()
        time.sleep(waiting.LOG_S / _POLLS)
        _log(jobs, _native.long_storage_calls(waiting.LOG_S))


def _log(jobs: dict[int, _Job], calls: Iterable[_Call]) -> None:
    """Logs the present long calls. ``jobs`` are the jobs with one in the last ``LOG_S``."""
    for key, number, waited_s, doing, path, done, total in calls:
        text = _text(doing, os.fsdecode(path), done, total)
        jobs.setdefault(key, _Job()).log(number, waited_s, text)
    forgotten = time.monotonic() - waiting.LOG_S
    for key in [key for key, job in jobs.items() if job.found <= forgotten]:
        del jobs[key]


def _text(doing: str, path: str, done: int, total: int) -> str:
    """Describes a waiting call: ``storage: rank 3 is writing file, 1.0 MB of 2.0 MB done``."""
    of_total = f" of {nbytes_text(total)}" if total else ""
    nbytes = f", {nbytes_text(min(done, total or done))}{of_total} done" if total or done else ""
    return f"storage: {_who()} is {doing} {path}{nbytes}"


def _who() -> str:
    """Returns the rank of this process, or its number. Does not import torch."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return f"rank {dist.get_rank()}"
    return f"process {os.getpid()}"
