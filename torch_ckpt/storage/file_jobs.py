"""Runs the jobs that write a file, to their end or not at all. This imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch_ckpt._core import _native
from torch_ckpt.filesystems.location import Location

__all__ = ["finished", "write_planned"]


@contextlib.contextmanager
def finished(job: _native.FileJob) -> Iterator[None]:
    """Finishes a job at the end of the context, or gives it up where an error ends that.

    Raises:
        StorageError: It could not be finished.
    """
    try:
        yield
        job.finish()
    except BaseException:
        # Now, not when the job is collected: the traceback of the error would keep it, and with it
        # the buffers that the next job waits for.
        job.abort()
        raise


def write_planned(
    path: Location,
    planned: _native.PlannedFile,
    write_tensors: Callable[[_native.SaveJob], None],
    pickled: Callable[[int], bytes | memoryview],
    *,
    pool: _native.BufferPool,
    direct: bool,
    sync: bool,
    niceness: int = 0,
) -> tuple[_native.SaveJob, list[tuple[int, int, int]]]:
    """Writes the new file ``path`` of what was planned in columns.

    Args:
        path: Which file.
        planned: What goes into it.
        write_tensors: Has the job write those that are laid out.
        pickled: Gives the bytes of the item at a position that only torch can store.
        pool: The buffers.
        direct: Whether to write past the page cache.
        sync: Whether the file is to survive a power cut.
        niceness: Of the threads that write tensors, as nice(1).

    Returns:
        The job, which has finished, and of each item that was appended its position, offset and
        length.

    Raises:
        StorageError: The file could not be written; it is removed.
    """
    fs, layout = path.file_system, planned.layout
    job = _native.SaveJob(fs, path.path, layout, pool, direct, sync, niceness)
    with finished(job):
        write_tensors(job)
        appended = [(position, *job.append(pickled(position))) for position in planned.own]
    return job, appended
