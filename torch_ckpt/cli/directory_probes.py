"""Facts about a directory for ``torch-ckpt doctor``. This module imports no torch.

Files are written and read by the jobs of the engine, as saves and loads do.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections.abc import Callable, Generator
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.commits.probe import check_commit
from torch_ckpt.commits.temporary import TMP, remove_temporary, temporary
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.filesystems.cgroups import memory_limit
from torch_ckpt.filesystems.location import Location
from torch_ckpt.options import READ_THREADS, IoMode, IoOptions
from torch_ckpt.storage.file_jobs import finished
from torch_ckpt.storage.progress import readable_nbytes

__all__ = ["Fact", "directory", "mount_of"]

Fact = tuple[str, str, str]
"""Name, finding, and what it means for this package."""

_TEST_S = 1.0
"""Approximate duration of the write test, and of the read test."""

_FIRST_NBYTES = 4 << 20
_MAX_NBYTES = 1 << 30
_PIECE_NBYTES = 4 << 20
_READ_NBYTES = 64 << 20
_FSYNCS = 5


def directory(path: Location) -> Generator[Fact]:
    """Yields facts about a directory, or its nearest existing parent. Leaves no files there."""
    existing = path
    while existing.is_missing() and existing.parent != existing:
        existing = existing.parent
    note = "" if existing == path else f", which does not exist: {existing} is probed"
    yield "directory", f"{path}{note}", ""
    if existing.local_path is not None:
        yield from _file_system(existing.local_path)
    folder = temporary(existing / "doctor", TMP)
    try:
        folder.create_directories()
    except CheckpointError as error:
        yield "writes", f"not probed: {error}", "no save to this directory can succeed"
        return
    try:
        for name, probe in _PROBES.items():
            try:
                yield from probe(folder)
            except (CheckpointError, OSError) as error:
                yield name, f"not probed: {error}", ""
    finally:
        remove_temporary(folder)


def _file_system(path: Path) -> Generator[Fact]:
    kind, options = mount_of(path)
    space = os.statvfs(path)
    free, size = (blocks * space.f_frsize for blocks in (space.f_bavail, space.f_blocks))
    full = "it is almost full" if free < size // 50 else ""
    yield "file system", f"{kind} ({options})", ""
    yield "space", f"{readable_nbytes(free)} free of {readable_nbytes(size)}", full
    if space.f_files and space.f_favail < 1000:
        yield "inodes", f"{space.f_favail} free of {space.f_files}", "it is almost full"


def mount_of(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Returns the type and the options of the mount of a path."""
    real, best = os.path.realpath(path), ("", "unknown", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        # Space, tab and backslash are escaped as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), before.split()[4])
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best[0]):  # A later mount covers an earlier one.
            kind, _, options = after.split()
            all_options = f"{before.split()[5]},{options}".split(",")
            best = point, kind, ",".join(dict.fromkeys(all_options))
    return best[1], best[2]


def _renames(folder: Location) -> Generator[Fact]:
    if folder.file_system.publishes_by_condition:
        yield "commit", "by one write on a condition, if the store respects it", ""
        return
    one, other = folder / "one", folder / "other"
    try:
        check_commit(folder, folder.parent, sync=True)
        yield "commit", "by renaming a file", ""
    except CheckpointError as error:
        yield "commit", "not possible", str(error)
    one.create_directories()
    try:
        one.rename(other)
    except CheckpointError as error:
        renames, why = False, str(error)
    else:
        renames, why = folder.file_system.renames_directories(folder.path), "FUSE"
        other.remove()
    yield (
        "rename directory",
        "usable" if renames else f"not used ({why})",
        ""
        if renames
        else "a new checkpoint is written under its final name, and is whole once it has .metadata",
    )
    for path in (one, other):
        path.write(b"x", sync=False)
    exchanges = one.exchange(other)
    yield (
        "RENAME_EXCHANGE",
        "usable" if exchanges else "refused by the file system",
        "" if exchanges else "a conversion replaces a directory in two steps",
    )
    if one.local_path is not None:
        link = one.local_path.with_name("link")
        with contextlib.suppress(OSError):
            os.link(one.local_path, link)
        yield "hard links", "usable" if link.exists() else "refused by the file system", ""


def _syncs(folder: Location) -> Generator[Fact]:
    times: list[float] = []
    end = time.monotonic() + _TEST_S / 2
    for number in range(_FSYNCS):
        begin = time.monotonic()
        if times and begin > end:
            break
        (folder / f"sync{number}").write(b"x" * 4096, sync=True)
        times.append(time.monotonic() - begin)
    begin = time.monotonic()
    folder.sync()
    directory_s = time.monotonic() - begin
    slow = "slow: each commit waits for several of these" if statistics.median(times) > 0.1 else ""
    yield (
        "fsync" if folder.file_system.writes_at_offsets else "a write",
        f"{1e3 * statistics.median(times):.1f} ms for a new file of 4 KiB, "
        f"{1e3 * directory_s:.1f} ms for a directory",
        slow,
    )


def _transfers(folder: Location) -> Generator[Fact]:
    """Yields the rates of writes and reads by the engine."""
    io = IoOptions()
    block = os.urandom(_PIECE_NBYTES)  # Some file systems compress.
    limit = _MAX_NBYTES
    if folder.local_path is not None:
        space = os.statvfs(folder.local_path)
        limit = min(limit, space.f_bavail * space.f_frsize // 4)
    if (memory := memory_limit()) is not None:  # Files in tmpfs count as memory of the container.
        limit = min(limit, memory.allowed_nbytes // 4)
    if limit < _FIRST_NBYTES:
        raise StorageError(
            f"a quarter of the free space and memory, {limit} bytes, is too little for the test"
        )
    block_nbytes = io.block_nbytes(folder.file_system)
    pool = _native.BufferPool(io.buffer_nbytes, block_nbytes)
    nbytes, seconds, path = _FIRST_NBYTES, 0.0, folder / "data"
    while True:  # Doubles the bytes until the transfer takes long enough.
        begin = time.monotonic()
        mode = _write(path, nbytes, block, pool, io)
        seconds = max(time.monotonic() - begin, 1e-9)
        if seconds > _TEST_S / 2 or 2 * nbytes > limit:
            break
        path.remove()
        nbytes *= 2
    means = "" if mode.direct else "saves compete with other programs for memory and CPU"
    why = "; ".join(mode.reasons)
    yield "O_DIRECT", "usable" if mode.direct else f"not used ({why or 'unknown'})", means
    yield "write and sync", _rate(nbytes, seconds, str(mode)), ""
    job = _native.LoadJob(
        *(folder.file_system, folder.path, None, io.buffer_nbytes, block_nbytes),
        *(READ_THREADS, io.direct, False),
    )
    begin, done = time.monotonic(), 0
    while done < nbytes and time.monotonic() - begin < _TEST_S:
        length = min(_READ_NBYTES, nbytes - done)
        job.run([], [(path.name, done, length, "data")])
        done += length
    seconds = max(time.monotonic() - begin, 1e-9)
    cached = "" if mode.direct else "from the page cache, since the file was just written"
    yield "read", _rate(done, seconds, cached), ""


def _write(
    path: Location, nbytes: int, block: bytes, pool: _native.BufferPool, io: IoOptions
) -> IoMode:
    path.write(b"", sync=False)
    job = _native.SharedFileJob(path.file_system, path.path, nbytes, pool, io.direct, True)
    with finished(job):
        for offset in range(0, nbytes, len(block)):
            job.put(offset, block)
    return IoMode.of(job)


def _rate(nbytes: int, seconds: float, note: str) -> str:
    text = f"{nbytes / seconds / 1e9:.2f} GB/s: {readable_nbytes(nbytes)} in {seconds:.2f} s"
    return f"{text} ({note})" if note else text


_PROBES: dict[str, Callable[[Location], Generator[Fact]]] = {
    "renames": _renames,
    "fsync": _syncs,
    "write and read": _transfers,
}
