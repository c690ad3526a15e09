"""Writes the snapshots of all ranks to disk, as one checkpoint that any DCP reader loads.

The trainers are not involved: each slot contains the item list of its rank, so a process with all
slots can plan and commit the save. The plan and the files are those of
:class:`torch_ckpt.FastWriter`, made by the same code.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch_ckpt._core import _native
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.memory import NOT_SHARED
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import INDEX_MARK, uuid_of
from torch_ckpt.options import IoOptions
from torch_ckpt.planning.replica_check import CheckReplicas, Difference, warn_of
from torch_ckpt.storage.file_jobs import FileJobs, in_threads, write_planned
from torch_ckpt.storage.reuse import Reuse, take_from_base

__all__ = [
    "FileReport",
    "Writing",
    "directory_of",
    "lengths_of",
    "persist",
    "publish",
    "snapshot_commit_files",
    "transaction_of",
    "values_of",
    "write_shares",
]

FileReport: TypeAlias = "tuple[int, _native.ReportedFile, bytes]"
"""Rank; its file; encoded extents of its items."""

_THREADS = 2
"""Number of files that an agent writes at a time."""


@dataclass(frozen=True)
class Writing:
    """The settings with which an agent writes files. All threads share the buffers of ``io``.

    With ``reuses``, unchanged data is taken from ``base``, if that is set, and digests are stored
    for the next save; see :mod:`torch_ckpt.storage.reuse`.
    """

    io: IoOptions
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
    transaction = transaction_of(first, secrets.token_hex(8))
    transaction.begin()
    written: list[str] = []
    try:
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
        shares = [(snapshot, plan.assignment(n)) for n, snapshot in enumerate(snapshots)]
        save_id, paths = transaction.save_id, [snapshot.paths for snapshot in snapshots]
        reports = write_shares(shares, transaction.directory, save_id, written, how)
        files = snapshot_commit_files(plan, reports, save_id, first, paths)
        if not is_current():
            raise CheckpointError(
                f"cannot commit {transaction.target}: a slot was refilled meanwhile"
            )
    except BaseException:
        transaction.abandon(written)
        raise
    publish(transaction, files, lengths_of(reports))
    return plan.differences


def transaction_of(snapshot: _native.StoredSnapshot, save_id: str) -> CheckpointTransaction:
    """Returns the transaction of the checkpoint that a snapshot belongs to.

    A snapshot may be old when it is persisted, so it must not supersede a save committed meanwhile.
    """
    target, sync = Destination.of(snapshot), snapshot.sync
    return CheckpointTransaction(
        target.directory, save_id, sync=sync, supersedes=False, small_files=target.small_files
    )


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
    threads = max(1, min(_THREADS, len(shares)))
    block_nbytes = how.io.block_nbytes(directory.file_system)
    pool_nbytes = max(2 * block_nbytes, how.io.buffer_nbytes // threads)

    def write_every(first: int) -> list[FileReport]:
        pool = _native.BufferPool(pool_nbytes, block_nbytes)
        reports = []
        for number in range(first, len(shares), threads):
            snapshot, assignment = shares[number]
            work = _native.Work(_native.ItemTable.decode(snapshot.items), assignment)
            share = _Share(snapshot, work, directory, save_id)
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
    ``paths`` are the paths in the nested state dicts, of all snapshots. Raises CheckpointError if
    the files do not cover whole tensors.
    """
    directory = str(directory_of(first))
    unique_paths = None if first.paths is None else _unique(paths)
    storage_meta = (directory, True, uuid_of(save_id), None, [INDEX_MARK])
    return _native.planned_commit_files(
        plan, save_id, reports, first.version, unique_paths, storage_meta
    )


def lengths_of(reports: Iterable[FileReport]) -> dict[str, int]:
    """Returns the length of each file, by name."""
    return {name: nbytes for _, (name, nbytes, *_), _ in reports}


def publish(
    transaction: CheckpointTransaction, files: tuple[bytes, bytes], written: Mapping[str, int]
) -> None:
    """Commits the metadata and the index, and removes the files that they replace.

    ``written`` contains name and length of each data file. Raises CheckpointError, or StorageError
    with EEXIST, if another save was committed in the directory meanwhile, and CheckpointError if a
    data file is missing: in both cases, removes the written files. After another StorageError, it
    is unknown whether the checkpoint is committed.
    """
    try:
        transaction.check(())
        _check_lengths(transaction.target, written)
    except BaseException:
        transaction.abandon(written)
        raise
    transaction.commit(*files, written)


def _check_lengths(directory: Location, written: Mapping[str, int]) -> None:
    # On a store, files are never incomplete, and listings are current.
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


@dataclass(frozen=True)
class _Share:
    """The share of one rank, which is written to files in a directory."""

    snapshot: _native.StoredSnapshot
    work: _native.Work
    directory: Location
    save_id: str

    def write(
        self, pool: _native.BufferPool, how: Writing, jobs: FileJobs, written: list[str]
    ) -> list[FileReport]:
        """Takes unchanged data from the base, and writes the rest.

        ``written`` receives the name of each complete file.
        """
        work, rank = self.work, self.snapshot.header.rank
        groups: Sequence[Sequence[int]] = [range(len(work))] if len(work) else []
        found = None
        reports: list[FileReport] = []
        names = (f"__{rank}_{n}_{self.save_id}.distcp" for n in itertools.count())
        if how.reuses and len(work):
            batch = self.snapshot.batch(work.items)
            batch.cut(work)
            found = take_from_base(
                *(how.base, self.directory, work, batch.digests(False, 1)),
                lambda positions: batch.full_digests(positions, 1),
                new_name=names.__next__,
                finished=written,
                sync=self.snapshot.sync,
            )
            for file in found.files:
                extents = [(work.items[box[0]], box[2], box[3]) for box in file.boxes]
                reports.append((rank, file.report, _native.encode_extents(extents)))
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
        work = self.work.part(positions)
        items = work.items
        planned = _native.PlannedFile(work, self.snapshot.batch(items))
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
            self.directory / name,
            planned,
            write_tensors,
            lambda job, position: job.append(self.snapshot.object_bytes(items[position])),
            pool=pool,
            direct=io.direct,
            sync=self.snapshot.sync,
        )
        file = name, *job.sums, planned.digests, 0
        return self.snapshot.header.rank, file, planned.extents(appended)


def directory_of(snapshot: _native.StoredSnapshot) -> Location:
    """Returns the checkpoint directory to which a snapshot must be written."""
    return Destination.of(snapshot).directory


def _unique(paths: Iterable[bytes | None]) -> list[bytes]:
    """Returns the distinct paths, in order."""
    return list(dict.fromkeys(path for path in paths if path is not None))
