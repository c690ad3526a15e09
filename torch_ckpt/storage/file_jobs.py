"""Runs the jobs that write a file: each finishes or is aborted. This module imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch_ckpt._core import _native
from torch_ckpt.filesystems.location import Location

__all__ = ["finished", "write_planned"]


@contextlib.contextmanager
def finished(job: _native.FileJob) -> Iterator[None]:
    """Finishes a job at the end of the block, or aborts the job if the block raises an error.

    Raises:
        StorageError: The job could not be finished.
    """
    try:
        yield
        job.finish()
    except BaseException:
        # Abort at once. The traceback of the error references the job, and the next job waits for
        # its buffers.
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
    """Writes a new file from its layout.

    Args:
        path: Path of the new file.
        planned: Items and layout of the file.
        write_tensors: Writes the tensors of the layout through the job.
        append: Appends the item at a position, which only torch can store, and returns its offset
            and length.
        pool: I/O buffers.
        direct: Whether to bypass the page cache.
        sync: Whether to sync the file, so that it survives a power cut.
        niceness: Niceness of the threads that write tensors, as nice(1).

    Returns:
        The finished job, and the position, offset and length of each pickled item.

    Raises:
        StorageError: The file could not be written, and was removed.
    """
    fs, layout = path.file_system, planned.layout
    job = _native.SaveJob(fs, path.path, layout, pool, direct, sync, niceness)
    with finished(job):
        write_tensors(job)
        appended = [(position, *append(job, position)) for position in planned.own]
    return job, appended
