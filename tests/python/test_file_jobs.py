"""Threads that write the files of one rank end together, with the first error."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from torch_ckpt.errors import CancelledError
from torch_ckpt.storage.file_jobs import FileJobs, in_threads

LONG_S = 30.0


class Job:
    """A job on a slow disk, which notices that it is cancelled."""

    done_nbytes = 1

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def run(self) -> None:
        if self.cancelled.wait(LONG_S):
            raise CancelledError("cancelled")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_error_is_raised_and_ends_the_jobs_of_the_other_threads(failing: int) -> None:
    jobs = FileJobs()
    seen: list[Any] = []

    def work(number: int) -> None:
        if number == failing:
            raise OSError("the disk is full")
        job: Any = Job()
        seen.append(job)
        jobs.begin(job)
        job.run()

    begin = time.monotonic()
    with pytest.raises(OSError, match="the disk is full"):
        in_threads(work, 3, jobs)
    assert time.monotonic() - begin < LONG_S / 3
    assert all(job.cancelled.is_set() for job in seen)


def test_results_are_in_order_and_a_single_thread_is_this_one() -> None:
    assert in_threads(lambda number: -number, 4, FileJobs()) == [0, -1, -2, -3]
    assert in_threads(lambda _: threading.get_ident(), 1, FileJobs()) == [threading.get_ident()]


def test_a_call_that_has_failed_receives_each_job_that_begins() -> None:
    begun: list[Any] = []
    jobs = FileJobs(begun.append)
    job: Any = Job()
    jobs.cancel()
    jobs.begin(job)
    assert begun == [job]
    assert job.cancelled.is_set()
    assert jobs.done_nbytes() == 1
