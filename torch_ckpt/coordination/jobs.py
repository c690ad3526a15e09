"""The running jobs of a call, which end when the call fails on any rank."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

__all__ = ["Cancellable", "Jobs"]


class Cancellable(Protocol):
    """A job of the engine that another thread can stop."""

    def cancel(self) -> None:
        """Makes the job fail before its next request. Any thread may call it."""


J = TypeVar("J", bound=Cancellable)


class Jobs(Generic[J]):
    """The running jobs of a call. The communication thread of the group cancels them.

    It must not refer to the group, because that thread refers to this object.
    """

    def __init__(self) -> None:
        # No lock: a signal handler may interrupt any method and wait for another thread.
        self._jobs: list[J] = []
        self._has_failed = False

    def add(self, job: J) -> None:
        """Adds a job that has begun; cancels it if the call has failed."""
        self._jobs.append(job)
        if self._has_failed:  # Read after the append: `cancel` finds the job, or this does.
            job.cancel()

    def clear(self) -> None:
        """Drops all jobs, because they have ended."""
        self._jobs.clear()

    def cancel(self) -> None:
        """Cancels all jobs, now and later."""
        self._has_failed = True
        for job in list(self._jobs):
            job.cancel()
