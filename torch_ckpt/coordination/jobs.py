"""The running jobs of a call, which end when the call fails on any rank."""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["Cancellable", "Jobs"]


class Cancellable(Protocol):
    """A job of the engine that another thread can stop."""

    def cancel(self) -> None:
        """Makes the job fail before its next request. Any thread may call it."""


class Jobs:
    """The running jobs of a call. The communication thread of the group cancels them.

    It has no reference to the group, because that thread has a reference to it.
    """

    def __init__(self) -> None:
        self._jobs: list[Cancellable] = []
        self._has_failed = False
        self._lock = threading.Lock()

    def add(self, job: Cancellable) -> None:
        """Adds a job that has begun; cancels it if the call has failed."""
        with self._lock:
            self._jobs.append(job)
            has_failed = self._has_failed
        if has_failed:
            job.cancel()

    def clear(self) -> None:
        """Forgets all jobs, because they have ended."""
        with self._lock:
            self._jobs.clear()

    def cancel(self) -> None:
        """Cancels all jobs, now and later."""
        with self._lock:
            self._has_failed = True
            jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
