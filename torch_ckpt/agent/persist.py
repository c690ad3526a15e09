"""Brings the snapshots of all ranks to disk, as one checkpoint that any reader of DCP's loads.

No rank takes part: what each of them holds stands in its slot, so whoever has all slots can plan
the save and commit it. It is the same plan that ranks would make together, by the same code, and
the files are those of :class:`torch_ckpt.FastWriter`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import INDEX_MARK, committed_id
from torch_ckpt.options import IoOptions
from torch_ckpt.storage.file_jobs import write_planned
from torch_ckpt.storage.gc import remove_files, stale_files

__all__ = ["Report", "commit_files", "directory_of", "persist", "publish", "write_parts"]

Report = tuple[int, tuple[str, int, bytes], bytes]
"""Rank, its file with the sums of that, where its items lie."""


def persist(
    snapshots: Sequence[_native.StoredSnapshot],
    *,
    io: IoOptions,
    threads: int,
    is_current: Callable[[], bool] = lambda: True,
) -> None:
    """Writes and commits a checkpoint of one snapshot of every rank.

    Args:
        snapshots: In order of the ranks, of one save.
        io: Tuning; its buffers are shared by all threads.
        threads: Files that are written at a time.
        is_current: Whether the slots still hold what they were found to hold; asked before the
            commit.

    Raises:
        StorageError: The disk failed. What was written is removed, and what was committed before
            stands.
        CheckpointError: The snapshots are not those of one save, or do not hold whole tensors.
    """
    _check_one_save(snapshots)
    first = snapshots[0]
    directory = directory_of(first)
    directory.create_directories()
    found = frozenset(directory.names())
    former = committed_id(directory)
    plan = _native.GlobalPlan(
        [snapshot.items for snapshot in snapshots], len(snapshots), split=True, dedup=True
    )
    save_id = secrets.token_hex(8)
    written: list[str] = []
    try:
        parts = [(snapshot, plan.assignment(n)) for n, snapshot in enumerate(snapshots)]
        reports = write_parts(parts, directory, save_id, written, io=io, threads=threads)
        paths = [snapshot.paths for snapshot in snapshots]
        files = commit_files(plan, reports, save_id, first, paths)
        if not is_current():
            raise CheckpointError(f"cannot commit {directory}: a slot was filled anew meanwhile")
    except BaseException:
        remove_files(directory, written)
        raise
    sizes = {name: nbytes for _, (name, nbytes, _), _ in reports}
    publish(files, sizes, save_id, first, found, former)


def write_parts(
    parts: Sequence[tuple[_native.StoredSnapshot, bytes]],
    directory: Location,
    save_id: str,
    written: list[str],
    *,
    io: IoOptions,
    threads: int,
) -> list[Report]:
    """Writes the part of each rank, and has the names of the files survive, too.

    Args:
        parts: Snapshots, and what of each is to be written.
        directory: Of the checkpoint.
        save_id: Of the save.
        written: Gets the name of each file that is whole.
        io: Tuning; its buffers are shared by all threads.
        threads: Files that are written at a time.

    Raises:
        StorageError: The disk failed. What is in ``written`` is for the caller to remove.
    """
    threads = max(1, min(threads, len(parts)))
    pool_nbytes = max(2 * io.block_nbytes, io.buffer_nbytes // threads)

    def write_every(first: int) -> list[Report]:
        pool = _native.BufferPool(pool_nbytes, io.block_nbytes)
        reports = []
        for number in range(first, len(parts), threads):
            report = _write(*parts[number], directory, save_id, pool, io)
            if report is not None:
                written.append(report[1][0])
                reports.append(report)
        return reports

    with ThreadPoolExecutor(threads, "torch_ckpt-write") as executor:
        reports = [report for some in executor.map(write_every, range(threads)) for report in some]
    if written and parts[0][0].sync:
        directory.sync()
    return reports


def commit_files(
    plan: _native.GlobalPlan,
    reports: Sequence[Report],
    save_id: str,
    first: _native.StoredSnapshot,
    paths: Iterable[bytes | None],
) -> tuple[bytes, bytes]:
    """The metadata and the index of what all ranks have written.

    Args:
        plan: Of all ranks.
        reports: Of all ranks.
        save_id: Of the save.
        first: One of the snapshots: what it says of the save is what all say.
        paths: Of all snapshots.

    Raises:
        CheckpointError: They do not make up whole tensors.
    """
    directory = str(directory_of(first))
    once = None if first.paths is None else _once(paths)
    storage_meta = (directory, True, save_id, None, [INDEX_MARK])
    return _native.planned_commit_files(plan, save_id, reports, first.version, once, storage_meta)


def publish(
    files: tuple[bytes, bytes],
    written: Mapping[str, int],
    save_id: str,
    first: _native.StoredSnapshot,
    found: Collection[str],
    former: str | None,
) -> None:
    """Commits what is written, and removes what that has replaced.

    Args:
        files: As :func:`commit_files` has made it.
        written: The names of all data files, and their lengths.
        save_id: Of the save.
        first: One of the snapshots.
        found: What was in the directory before.
        former: Which save was committed there before.

    Raises:
        CheckpointError: Somebody else has saved there meanwhile. What was written is removed.
        StorageError: It failed. Whether the checkpoint is there now is not known.
    """
    directory = directory_of(first)
    try:
        _check_alone(directory, written, former)
    except BaseException:
        remove_files(directory, written)
        raise
    directory.file_system.commit(
        *(directory.path, ".metadata", ".index", *files, save_id),
        *(sorted(written), first.sync),
    )
    remove_files(directory, stale_files(found, written, None))


def _check_alone(directory: Location, written: Mapping[str, int], former: str | None) -> None:
    """Raises where another save has been committed meanwhile: it may have taken files of this one.

    Whoever stands still between this and the commit, for as long as another save takes, is not
    found out.
    """
    now = committed_id(directory)
    if now != former:
        raise CheckpointError(
            f"cannot commit {directory}: another save, {now}, was committed there meanwhile"
        )
    for name, nbytes in written.items():
        with contextlib.suppress(NotFoundError):
            if (directory / name).nbytes() == nbytes:
                continue
        raise CheckpointError(f"cannot commit {directory}: {name} is not there as it was written")


def _check_one_save(snapshots: Sequence[_native.StoredSnapshot]) -> None:
    """Raises unless there is one of every rank of one save, in order."""
    saves = {(*s.header[:4], *s.header[5:6], s.directory, s.version, s.sync) for s in snapshots}
    ranks = [s.header[4] for s in snapshots]
    if len(saves) != 1 or ranks != list(range(snapshots[0].header[5])):
        raise CheckpointError(f"these snapshots, of ranks {ranks}, are not those of one save")


def _write(
    snapshot: _native.StoredSnapshot,
    assignment: bytes,
    directory: Location,
    save_id: str,
    pool: _native.BufferPool,
    io: IoOptions,
) -> Report | None:
    """Writes what a rank is to write; ``None`` where that is nothing."""
    rank = snapshot.header[4]
    work = _native.Work(_native.ItemTable.decode(snapshot.items), assignment)
    if not len(work):
        return None
    name = f"__{rank}_0_{save_id}.distcp"
    numbers = work.items
    planned = _native.PlannedFile(work, snapshot.batch(numbers))
    job, appended = write_planned(
        directory / name,
        planned,
        lambda job: planned.write(job, 0, len(planned)),
        lambda position: snapshot.object_bytes(numbers[position]),
        pool=pool,
        direct=io.direct,
        sync=snapshot.sync,
    )
    return rank, (name, *job.sums), planned.extents(appended)


def directory_of(snapshot: _native.StoredSnapshot) -> Location:
    """Where the checkpoint goes that a snapshot is to become."""
    return Location(os.fsdecode(snapshot.directory))


def _once(paths: Iterable[bytes | None]) -> list[bytes]:
    """Each different one, in order."""
    return list(dict.fromkeys(some for some in paths if some is not None))
