"""Writes a data file of what was planned in columns. Importing this does not import torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torch_ckpt import _native

__all__ = ["write_planned"]


def write_planned(
    path: Path,
    planned: _native.PlannedFile,
    write_tensors: Callable[[_native.SaveJob], None],
    pickled: Callable[[int], bytes | memoryview],
    *,
    fs: _native.FileSystem,
    pool: _native.BufferPool,
    direct: bool,
    sync: bool,
) -> tuple[_native.SaveJob, bytes]:
    """Writes the new file ``path``.

    Args:
        path: Which file.
        planned: What goes into it.
        write_tensors: Has the job write those that are laid out.
        pickled: Gives the bytes of the item at a position that only torch can store.
        fs: Where it goes.
        pool: The buffers.
        direct: Whether to write past the page cache.
        sync: Whether the file is to survive a power cut.

    Returns:
        The job, which has finished, and where everything lies, encoded.

    Raises:
        StorageError: The file could not be written; it is removed.
    """
    job = _native.SaveJob(fs, os.fsencode(path), planned.layout, pool, direct, sync)
    appended: list[tuple[int, int, int]] = []
    try:
        write_tensors(job)
        for position in planned.own:
            appended.append((position, *job.append(pickled(position))))
        job.finish()
    except BaseException:
        # Now, not when the job is collected: the traceback of the error would keep it, and with it
        # the buffers that the next job waits for.
        job.abort()
        raise
    return job, planned.extents(appended)
