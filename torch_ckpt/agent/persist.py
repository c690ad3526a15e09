"""Writes the snapshots of all ranks to disk, as one checkpoint that any DCP reader loads.

The trainers are not involved: each slot contains the item list of its rank, so a process with all
slots can plan and commit the save. The plan and the files are those of
:class:`torch_ckpt.FastWriter`, made by the same code.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch_ckpt._core import _native
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.memory import NOT_SHARED
from torch_ckpt.errors import AlreadyExistsError, CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import (
    INDEX_MARK,
    commit,
    committed_id,
    is_committed,
    pending_name,
    uuid_of,
)
from torch_ckpt.options import IoOptions
from torch_ckpt.planning.replica_check import CheckReplicas, Difference, warn_of
from torch_ckpt.storage.commit_probe import check_commit
from torch_ckpt.storage.file_jobs import FileJobs, in_threads, write_planned
from torch_ckpt.storage.gc import (
    Found,
    collect_garbage,
    find,
    pending_pattern,
    remove_files,
)
from torch_ckpt.storage.reuse import Reuse, take_from_base
from torch_ckpt.storage.small_files import write_small_files

__all__ = [
    "FileReport",
    "Writing",
    "created",
    "directory_of",
    "found_before",
    "persist",
    "publish",
    "snapshot_commit_files",
    "values_of",
    "write_shares",
]

FileReport: TypeAlias = "tuple[int, _native.ReportedFile, bytes]"
"""Rank; its file; encoded extents of its items."""


@dataclass(frozen=True)
class Writing:
    """How an agent writes files. All threads share the buffers of ``io``.

    ``reuses`` says to take what has not changed from ``base``, if there is one, and to add digests
    for the next save; see :mod:`torch_ckpt.storage.reuse`.
    """

    io: IoOptions
    threads: int
    reuses: bool = False
    base: Location | None = None


def persist(
    snapshots: Sequence[_native.StoredSnapshot],
    how: Writing,
    *,
    check_replicas: CheckReplicas = "sample",
    is_current: Callable[[], bool] = lambda: True,
) -> list[Difference]:
    """Writes and commits a checkpoint of one snapshot of every rank, in order of rank.

    Logs a warning of tensors whose replicas have different values, and returns their differences.
    Each such tensor is stored from one replica. ``is_current`` is called before the commit: it
    returns whether the slots still contain these snapshots. Raises StorageError if a write failed:
    the new data files are removed, and the previous checkpoint is unchanged. Raises CheckpointError
    if the snapshots do not form one save, or do not cover whole tensors.
    """
    _check_one_save(snapshots)
    first = snapshots[0]
    with created(directory_of(first), first.sync) as directory:
        return _persist(snapshots, directory, how, check_replicas, is_current)


@contextlib.contextmanager
def created(directory: Location, sync: bool) -> Iterator[Location]:
    """Creates the directory of a checkpoint; removes it if the block raises and leaves it empty.

    A directory that exists remains: somebody may have given it a quota or permissions. Raises
    StorageError if its file system refuses a call that the commit needs; see :func:`check_commit`.
    """
    is_new = directory.file_system.has_folders and directory.is_missing()
    directory.create_directories()
    try:
        check_commit(directory, directory, sync=sync)
        yield directory
    except BaseException:
        if is_new:
            directory.discard()
        raise


def _persist(
    snapshots: Sequence[_native.StoredSnapshot],
    directory: Location,
    how: Writing,
    check_replicas: CheckReplicas,
    is_current: Callable[[], bool],
) -> list[Difference]:
    """Writes and commits a checkpoint in a directory; see :func:`persist`."""
    first = snapshots[0]
    before = found_before(directory)
    # Ranks that copied only their shares have compared their replicas before.
    is_compared = len(snapshots) > 1 and first.header.share == NOT_SHARED
    plan = _native.GlobalPlan(
        [snapshot.items for snapshot in snapshots],
        len(snapshots),
        split=True,
        dedup=True,
        digests=values_of(snapshots, check_replicas) if is_compared else [],
    )
    warn_of(plan.differences)
    save_id = secrets.token_hex(8)
    pending = directory / pending_name(save_id)
    written: list[str] = []
    pending.write(b"", sync=False)
    try:
        shares = [(snapshot, plan.assignment(n)) for n, snapshot in enumerate(snapshots)]
        reports = write_shares(shares, directory, save_id, written, how)
        paths = [snapshot.paths for snapshot in snapshots]
        files = snapshot_commit_files(plan, reports, save_id, first, paths)
        if not is_current():
            raise CheckpointError(f"cannot commit {directory}: a slot was refilled meanwhile")
    except BaseException:
        remove_files(directory, [*written, pending.name])
        raise
    sizes = {name: nbytes for _, (name, nbytes, *_), _ in reports}
    publish(files, sizes, save_id, first, before)
    return plan.differences


def values_of(
    snapshots: Sequence[_native.StoredSnapshot], check_replicas: CheckReplicas
) -> list[bytes]:
    """Returns the digest of the values of each item of each snapshot; none if ``"off"``."""
    if check_replicas == "off":
        return []
    is_full = check_replicas == "full"
    batches = (snapshot.batch(range(len(snapshot.extents))) for snapshot in snapshots)
    return [batch.digests(is_full, 1) for batch in batches]


def write_shares(
    shares: Sequence[tuple[_native.StoredSnapshot, bytes]],
    directory: Location,
    save_id: str,
    written: list[str],
    how: Writing,
) -> list[FileReport]:
    """Writes the share of each rank, and syncs the directory if the save requests it.

    A share is a snapshot and an encoded assignment. ``written`` receives the name of each complete
    file; the caller removes these after an error.
    """
    threads = max(1, min(how.threads, len(shares)))
    block_nbytes = how.io.block_nbytes(directory.file_system)
    pool_nbytes = max(2 * block_nbytes, how.io.buffer_nbytes // threads)

    def write_every(first: int) -> list[FileReport]:
        pool = _native.BufferPool(pool_nbytes, block_nbytes)
        reports = []
        for number in range(first, len(shares), threads):
            share = _Share(*shares[number], directory, save_id)
            reports += share.write(pool, how, jobs, written)
        return reports

    jobs = FileJobs()
    batches = in_threads(write_every, threads, jobs)
    reports = [report for batch in batches for report in batch]
    if written and shares[0][0].sync:
        directory.sync()
    return reports


def snapshot_commit_files(
    plan: _native.GlobalPlan,
    reports: Sequence[FileReport],
    save_id: str,
    first: _native.StoredSnapshot,
    paths: Iterable[bytes | None],
) -> tuple[bytes, bytes]:
    """Returns the metadata and the index of the files that all ranks have written.

    ``first`` is any snapshot of the save; the facts about the save are equal in all of them.
    ``paths`` are those of all snapshots in the nested state dicts. Raises CheckpointError if the
    files do not cover whole tensors.
    """
    directory = str(directory_of(first))
    unique_paths = None if first.paths is None else _unique(paths)
    storage_meta = (directory, True, uuid_of(save_id), None, [INDEX_MARK])
    return _native.planned_commit_files(
        plan, save_id, reports, first.version, unique_paths, storage_meta
    )


def publish(
    files: tuple[bytes, bytes],
    written: Mapping[str, int],
    save_id: str,
    first: _native.StoredSnapshot,
    before: tuple[Found, str | None],
) -> None:
    """Commits the metadata and the index, and removes the files that they replace.

    The small files of the step are written before the commit of a new checkpoint, so that nobody
    finds the step without them, and after a commit that replaces one.

    ``written`` has name and length of each data file, ``first`` is any snapshot of the save, and
    ``before`` is what :func:`found_before` returned before it. Raises CheckpointError if another
    save was committed in the directory meanwhile, or StorageError if the small files cannot be
    written: the written files are removed. After another StorageError, it is unknown whether the
    checkpoint is committed.
    """
    directory, _, small_files = Destination.of(first)
    found, id_before = before
    try:
        # A store may ignore the condition of the commit, and its commit renames no pending file.
        is_renamed = not directory.file_system.publishes_by_condition
        marks = {} if is_renamed else {pending_name(save_id): 0}
        _check_not_superseded(directory, {**written, **marks}, id_before)
        if small_files is not None and id_before is None:
            _write_small_files(directory, small_files)
    except BaseException:
        remove_files(directory, [*written, pending_name(save_id)])
        raise
    try:
        commit(
            *(directory, *files, save_id),
            files=sorted(written),
            sync=first.sync,
            version=found.version,
        )
    except AlreadyExistsError:
        _check_not_superseded(directory, {}, id_before)  # It names the other save.
        raise
    if small_files is not None and id_before is not None:
        with contextlib.suppress(CheckpointError):  # The save is committed; old ones remain.
            write_small_files(directory, small_files)
    collect_garbage(
        directory,
        found,
        referenced=written,
        rank=None,
        is_committed=lambda: is_committed(directory, save_id),
    )


def _write_small_files(directory: Location, small_files: Mapping[str, bytes]) -> None:
    """Writes the small files of a new step, or none of them if that fails."""
    try:
        write_small_files(directory, small_files)
    except BaseException:
        remove_files(directory, small_files)
        raise


def found_before(directory: Location) -> tuple[Found, str | None]:
    """Returns what a directory has before a save, and the id of its committed checkpoint."""
    return find(directory, pending_pattern(None)), committed_id(directory)


def _check_not_superseded(
    directory: Location, written: Mapping[str, int], id_before: str | None
) -> None:
    """Raises if another save was committed meanwhile, which may have removed files of this save."""
    now = committed_id(directory)
    if now != id_before:
        raise CheckpointError(
            f"cannot commit {directory}: another save, {now}, was committed there meanwhile"
        )
    # On a store, a file is there as a whole or not at all, and a listing has it.
    is_store = directory.file_system.publishes_by_condition
    listed = frozenset(directory.names()) if is_store and written else frozenset()
    for name, nbytes in written.items():
        if name in listed:
            continue
        with contextlib.suppress(NotFoundError):
            if (directory / name).nbytes() == nbytes:
                continue
        raise CheckpointError(f"cannot commit {directory}: {name} is missing or has another length")


def _check_one_save(snapshots: Sequence[_native.StoredSnapshot]) -> None:
    """Raises unless the snapshots are of all ranks of one save, in order of rank."""
    headers = [snapshot.header for snapshot in snapshots]
    ranks = [header.rank for header in headers]
    facts = {
        (h.run, h.save, h.step, h.world_size, s.directory, s.version, s.sync)
        for h, s in zip(headers, snapshots, strict=True)
    }
    if len(facts) != 1 or ranks != list(range(headers[0].world_size)):
        raise CheckpointError(
            f"cannot persist snapshots of ranks {ranks}: they belong to different saves"
        )


class _Share:
    """The share of one rank, which goes to files in a directory."""

    def __init__(
        self,
        snapshot: _native.StoredSnapshot,
        assignment: bytes,
        directory: Location,
        save_id: str,
    ) -> None:
        self._snapshot, self._rank = snapshot, snapshot.header.rank
        self._work = _native.Work(_native.ItemTable.decode(snapshot.items), assignment)
        self._directory, self._save_id = directory, save_id

    def write(
        self, pool: _native.BufferPool, how: Writing, jobs: FileJobs, written: list[str]
    ) -> list[FileReport]:
        """Takes what has not changed from the base, and writes the rest.

        ``written`` receives the name of each complete file.
        """
        work = self._work
        groups: Sequence[Sequence[int]] = [range(len(work))] if len(work) else []
        found = None
        reports: list[FileReport] = []
        names = (f"__{self._rank}_{n}_{self._save_id}.distcp" for n in itertools.count())
        if how.reuses and len(work):
            batch = self._snapshot.batch(work.items)
            batch.cut(work)
            found = take_from_base(
                *(how.base, self._directory, work, batch.digests(False, 1)),
                lambda positions: batch.full_digests(positions, 1),
                new_name=names.__next__,
                finished=written,
                sync=self._snapshot.sync,
            )
            for file in found.files:
                extents = [(work.items[box[0]], box[2], box[3]) for box in file.boxes]
                reports.append((self._rank, file.report, _native.encode_extents(extents)))
            groups = found.groups
        for positions in groups:
            reports.append(self._write(next(names), positions, found, pool, how.io, jobs))
            written.append(reports[-1][1][0])
        return reports

    def _write(
        self,
        name: str,
        positions: Sequence[int],
        found: Reuse | None,
        pool: _native.BufferPool,
        io: IoOptions,
        jobs: FileJobs,
    ) -> FileReport:
        """Writes a file: the items at some positions."""
        work = self._work.part(positions)
        items = work.items
        planned = _native.PlannedFile(work, self._snapshot.batch(items))
        if found is not None:
            digested = set(found.digested)
            planned.add_digests(
                [found.samples[at] for at in positions],
                [here for here, at in enumerate(positions) if at in digested],
            )

        def write_tensors(job: _native.SaveJob) -> None:
            jobs.begin(job)
            planned.write(job, 0, len(planned))

        job, appended = write_planned(
            self._directory / name,
            planned,
            write_tensors,
            lambda job, position: job.append(self._snapshot.object_bytes(items[position])),
            pool=pool,
            direct=io.direct,
            sync=self._snapshot.sync,
        )
        return self._rank, (name, *job.sums, planned.digests, 0), planned.extents(appended)


def directory_of(snapshot: _native.StoredSnapshot) -> Location:
    """Returns the checkpoint directory that a snapshot is to be written to."""
    return Destination.of(snapshot).directory


def _unique(paths: Iterable[bytes | None]) -> list[bytes]:
    """Returns the distinct paths, in order."""
    return list(dict.fromkeys(path for path in paths if path is not None))
