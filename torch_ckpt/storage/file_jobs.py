"""Runs the jobs that write files: each finishes or is aborted. This module imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch_ckpt._core import _native
from torch_ckpt.coordination.jobs import Jobs
from torch_ckpt.filesystems.location import Location

__all__ = ["FileJobs", "finished", "in_threads", "write_planned"]

T = TypeVar("T")


class FileJobs(Jobs[_native.FileJob]):
    """The jobs that write the files of one rank. If one fails, all end.

    ``begun`` receives each job that has begun.
    """

    def __init__(self, begun: Callable[[_native.FileJob], None] | None = None) -> None:
        super().__init__()
        self._begun = begun

    def begin(self, job: _native.FileJob) -> None:
        """Adds a job that has begun. Any thread may call it."""
        self.add(job)
        if self._begun is not None:
            self._begun(job)

    def done_nbytes(self) -> int:
        """Returns the number of bytes that were handed to the disk so far."""
        return sum(job.done_nbytes for job in self._jobs)

    def details(self, threads: int) -> dict[str, Any]:
        """Returns details of these jobs, run by at most ``threads`` threads, for the record."""
        threads = max(min(threads, len(self._jobs)), 1)
        return {
            "bytes": self.done_nbytes(),
            "requests": sum(job.requests for job in self._jobs),
            "waited": sum(job.waited_s for job in self._jobs) / threads,
        }


def in_threads(work: Callable[[int], T], count: int, jobs: FileJobs) -> list[T]:
    """Calls ``work`` with each number below ``count``, in a thread each, and returns the results.

    On an error, cancels the jobs of the other threads, and raises the first error.
    """
    if count == 1:
        return [work(0)]
    first: list[BaseException] = []

    def attempt(number: int) -> T:
        try:
            return work(number)
        except BaseException as error:
            if not first:
                first.append(error)
            jobs.cancel()
            raise

    with ThreadPoolExecutor(count, "torch_ckpt-write") as executor:
        try:
            return list(executor.map(attempt, range(count)))
        except BaseException:
            jobs.cancel()  # Also after an interrupt.
            if first:
                raise first.pop() from None
            raise


@contextlib.contextmanager
def finished(job: _native.FileJob) -> Iterator[None]:
    """Finishes a job at the end of the block, or aborts the job if the block raises an error."""
    try:
        yield
        job.finish()
    except BaseException:
        # Abort immediately: the traceback of the error references the job, and the next job waits
        # for its buffers.
        job.abort()
        raise


def write_planned(
    path: Location,
    planned: _native.PlannedFile,
    write_tensors: Callable[[_native.SaveJob], None],
    append: Callable[[_native.SaveJob, int], tuple[int, int]],
    *,
    pool: _native.BufferPool,
    direct: bool,
    sync: bool,
    niceness: int = 0,
) -> tuple[_native.SaveJob, list[tuple[int, int, int]]]:
    """Writes a new file from its layout; removes it on failure.

    ``write_tensors`` writes the tensors of the layout through the job. ``append`` appends the item
    at a position, which only torch can store, and returns its offset and length. ``direct``
    bypasses the page cache. Returns the finished job, and the position, offset and length of each
    pickled item.
    """
    fs, layout = path.file_system, planned.layout
    job = _native.SaveJob(fs, path.path, layout, pool, direct, sync, niceness)
    with finished(job):
        write_tensors(job)
        appended = [(position, *append(job, position)) for position in planned.own]
    return job, appended
