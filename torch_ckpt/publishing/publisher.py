"""Publisher: publishes the weights of a training as versions, which subscribers take up."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from torch_ckpt._core import _native
from torch_ckpt.commits.delta import DeltaTransaction, data_file
from torch_ckpt.commits.terms import check_holder, check_term
from torch_ckpt.commits.transaction import Claim
from torch_ckpt.coordination.arguments import comparing
from torch_ckpt.coordination.background import BackgroundFuture, Order, in_thread
from torch_ckpt.coordination.current_call import claim_commit
from torch_ckpt.coordination.exclusive import Exclusive, exclusive
from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S, Call, group_of
from torch_ckpt.coordination.portable import first_error
from torch_ckpt.coordination.statefuls import state_dicts_of
from torch_ckpt.coordination.waiting import duration
from torch_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    SupersededError,
    UnsupportedError,
    warn_after_commit,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.step_files import whole_number
from torch_ckpt.options import IoOptions
from torch_ckpt.planning.item_views import ColumnItems, PlannedItems
from torch_ckpt.planning.replicas import ranks_per_node
from torch_ckpt.planning.save_planner import FastSavePlanner, NoColumnsError
from torch_ckpt.planning.ties import common_ties, tied_names
from torch_ckpt.publishing.directory import Directory
from torch_ckpt.publishing.retention import remove_older, remove_unfinished
from torch_ckpt.publishing.snapshot import (
    Differences,
    Snapshot,
    published_dtype,
    write_differences,
    write_digests,
)
from torch_ckpt.publishing.version_files import (
    WHOLE,
    DataFile,
    Version,
    chain_of,
    forget_latest,
    has_version,
    new_chain,
    path_of,
    write_latest,
)
from torch_ckpt.records.event_log import EventLog
from torch_ckpt.records.record import Record, Recorder, note, phase
from torch_ckpt.storage.safetensors_writer import SafetensorsWriter

__all__ = ["Publisher"]


_BUFFER_NBYTES = 48 << 20
"""Bytes of a whole version that are in flight to the disk or store."""


@dataclass(frozen=True)
class _Listed:
    """What a rank sends at the begin of a publish: its tensors, if they are not those of before."""

    digest: bytes
    encoded: bytes | None
    ties: list[list[str]]
    has_snapshot: bool


@dataclass(frozen=True)
class _Assigned:
    """What the coordinator returns to a rank.

    ``assignment`` is ``None`` if it is that of before.
    """

    assignment: bytes | None
    ties: Mapping[str, str]
    save_id: str
    is_whole: bool
    claim: Claim | None


@dataclass
class _Coordinated:
    """What the coordinator alone knows: the plan of all ranks, and the versions that are there."""

    directory: Directory
    listed: list[_Listed] = field(default_factory=list)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    transaction: DeltaTransaction | None = None


class _WholeWriter(SafetensorsWriter):
    """Writes a whole version; its ``version.json`` is there before the model appears."""

    def __init__(self, path: Location, version: Version | None, job: str) -> None:
        io = IoOptions(buffer_nbytes=_BUFFER_NBYTES)
        super().__init__(path.checkpoint_id, overwrite=False, check_replicas="off", io=io)
        self.version, self.job = version, job
        self.ties = {} if version is None else version.ties
        self.before_commit = self._describe

    def _describe(self) -> None:
        """Writes ``version.json``, but not over that of a newer publisher."""
        root, version = self.location.parent, self.version
        assert version is not None
        check_term(root, version.term)
        check_holder(root, version.term, self.job)
        try:
            (self.location / WHOLE).write(version.encode(), sync=True)
            write_latest(root, version)
        finally:  # Another publisher may have begun meanwhile, and have written these files.
            check_term(root, version.term)


class Publisher:
    """Publishes versions of a model's weights from all ranks of a training.

    The first version is *whole*: a safetensors model, which every loader reads. The next ones are
    *deltas*: what has changed since the version before, compressed, with digests of the bytes
    before and after. Each rank retains a copy of the published values of the tensors that it
    writes, in host memory. Training stops while they are compared with its tensors. The rest is
    done in the background. A version appears when all of it is there, and never changes.

    All ranks of the group call the same methods in the same order. If a publish fails on a rank, it
    fails on all ranks with the same error. The next version is then whole, as it is in a new
    process.

    Args:
        url: Directory of the versions, as a path or URL, which all ranks reach. Created if missing.
        dtype: Dtype in which tensors of floating point are published, such as ``torch.bfloat16``
            for masters of 32 bits; by default each tensor's own.
        whole_every: Every how many versions one is whole. 1 publishes whole versions only.
        keep_whole: How many whole versions remain, with all later versions. Leased versions, which
            subscribers read, remain as well.
        process_group: The ranks that publish. Defaults to all ranks.
        timeout_s: Deadline of each exchange between ranks, in seconds, and of each wait for the
            background: for the publish before, or for space for differences.
        record: Whether the phases of each publish are recorded, for ``torch-ckpt report``.

    Raises:
        TypeError: ``whole_every`` or ``keep_whole`` is not an integer.
        UnsupportedError: ``url`` is a URL of an unregistered scheme.
        ValueError: An argument is out of range, or differs between ranks.

    Example::

        with torch_ckpt.Publisher("s3://bucket/policy", dtype=torch.bfloat16) as publisher:
            for step in range(1, 1001):
                train(model)
                publisher.publish(step, model)
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        whole_every: int = 50,
        keep_whole: int = 2,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        record: bool = True,
    ) -> None:
        self._group = group_of(process_group)
        with self._group.method("open a publisher", timeout_s):
            self.timeout_s = timeout_s = duration("timeout_s", timeout_s)
            given = {"whole_every": whole_every, "keep_whole": keep_whole}
            for name, value in given.items():
                if whole_number(name, value) < 1:
                    raise ValueError(f"{name}={value} is not positive")
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{dtype=} is not a dtype of floating point")
            self._location = Location(url).resolved()
            what, equal = "opening a publisher", {**given, "dtype": dtype}
            self._group.decide(what, lambda: None, lambda _: None, timeout_s=timeout_s, equal=equal)
        self.dtype, self.whole_every, self.keep_whole = dtype, whole_every, keep_whole
        self._exclusive = Exclusive("the publisher")
        self._log = EventLog(self._location) if record and self._group.is_coordinator else None
        rank = self._group.names[self._group.rank]
        self._recorder = Recorder(rank, self._log) if record else None
        self._coordinated = _Coordinated(Directory(self._location))
        self._digest = b""  # Digest of the list of this rank's tensors.
        self._ties: list[list[str]] = []  # Names in this list that have the same memory.
        self._snapshot: Snapshot | None = None
        self._is_published = False  # Whether the snapshot is the newest version.
        self._pools: list[_native.BufferPool] = []
        self._pending: BackgroundFuture[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._location)!r})"

    @exclusive("publish")
    def publish(self, version: int, state: Mapping[str, Any] | torch.nn.Module) -> None:
        """Publishes a version. Returns as soon as training may change the tensors.

        Waits for the publish before. If that has failed, raises its error and publishes nothing.

        Args:
            version: Its number, such as the step: above that of each version that is there.
            state: A module, or a state dict with tensors only: plain ones, DTensors, and all others
                that a save accepts. A tensor with several names is stored once.

        Raises:
            AlreadyExistsError: There is this version or a newer one already.
            CheckpointError: The publish before has failed, or this one on any rank. Another class
                of error says why.
            RankTimeoutError: A rank was late, stuck or dead.
            SupersededError: A newer publisher publishes to the same directory.
            TypeError: ``version`` is not an integer.
            ValueError: ``version`` is negative or differs between ranks.
        """
        self._settle()
        if self._closed:
            raise CheckpointError("cannot publish: the publisher is closed")
        record = None if self._recorder is None else self._recorder.record("publish", None)
        with contextlib.nullcontext() if record is None else record.current():
            try:
                self._begin(version, state, record)
            except BaseException as error:
                if record is not None:
                    record.failed(error)
                    record.end()
                raise

    def wait(self) -> None:
        """Waits until the last version is there. Raises the error with which it has failed."""
        self._settle()

    def close(self) -> None:
        """Waits for the last version, and releases the memory. Raises as :meth:`wait`."""
        self._closed = True
        try:
            self._settle()
        finally:
            self._snapshot = None
            if self._log is not None:
                self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # The error of the block counts.
            self.close()

    def _settle(self) -> None:
        pending = self._pending
        if pending is None:
            return
        if not pending.has_ended(self.timeout_s):
            raise CheckpointError(
                f"a version of {self._location} was not written within {self.timeout_s:g} s"
            )
        self._pending = None
        pending.result()

    # ---- The stop ----

    def _begin(
        self, number: int, state: Mapping[str, Any] | torch.nn.Module, record: Record | None
    ) -> None:
        """Agrees on the version, compares the tensors, and lets a thread do the rest."""
        # Until this rank has the snapshot of this publish, the next one lists all tensors again.
        digest, self._digest = self._digest, b""
        is_published = self._is_published
        planner = FastSavePlanner(check_replicas="off", enable_plan_caching=False)
        columns: list[ColumnItems] = []

        def own() -> _Listed:
            if whole_number("version", number) < 0:
                raise ValueError(f"version={number} is negative")
            values: Any = state.state_dict() if isinstance(state, torch.nn.Module) else state
            planner.set_up_planner(state_dicts_of(dict(values)))
            _refuse_objects(planner.state_dict)
            try:
                listed = planner.list_items()
            except NoColumnsError as error:
                raise UnsupportedError(f"no plan can list the state dict: {error}") from error
            columns.append(listed)
            if listed.digest == digest and self._are_tied(planner.state_dict):
                return _Listed(listed.digest, None, [], is_published)
            self._ties = tied_names(planner.state_dict)
            return _Listed(listed.digest, listed.encoded, self._ties, is_published)

        activity = "publishing a version"
        compared = comparing(
            own,
            lambda listed: self._assign(int(number), listed),
            {"version": number},
            names=self._group.names,
            activity=activity,
        )
        with (
            self._group.call(self.timeout_s) as call,
            first_error(f"of the group, while {activity}"),
        ):
            with call.current(), phase("begin"):
                assigned = call.reduce_scatter(activity, *compared)
            self._is_published = False
            if record is not None:
                record.step = int(number)
            differences = Differences(self.timeout_s)
            error: BaseException | None = None
            try:
                self._pending = in_thread(
                    f"version {number} of {self._location}",
                    call,
                    self._finish,
                    *(int(number), assigned, differences, call, record),
                )
                with call.current(), phase("stage"):
                    self._compare(assigned, columns[0], planner, differences)
            except (KeyboardInterrupt, SystemExit) as interrupt:
                error = CheckpointError(f"the publish was interrupted: {interrupt!r}")
                raise
            except Exception as failure:
                if self._pending is None:  # There is no thread.
                    raise
                error = failure  # All ranks raise it, when they wait for the version.
            finally:
                try:
                    differences.end(error)
                except BaseException:  # An interrupt came first, and the thread still waits.
                    differences.end(error)
                    raise
                finally:
                    error = None

    def _are_tied(self, state: Mapping[str, Any]) -> bool:
        """Returns whether the names that were tied still are. Only one of them is published."""
        tied = {name: state[name] for names in self._ties for name in names}
        return tied_names(tied) == self._ties

    def _compare(
        self,
        assigned: _Assigned,
        columns: ColumnItems,
        planner: FastSavePlanner,
        differences: Differences,
    ) -> None:
        """Brings the snapshot up to date while training stops."""
        if assigned.assignment is not None:
            self._snapshot = None  # Free it before the allocation.
            items = PlannedItems(columns.encoded, assigned.assignment)
            own = [item for item in items if item.index.fqn not in assigned.ties]
            self._snapshot = Snapshot(own, self.dtype)
        assert self._snapshot is not None
        self._digest = columns.digest
        if assigned.is_whole:
            self._snapshot.take(planner)
        else:
            self._snapshot.compare(planner, differences)

    # ---- The coordinator ----

    def _assign(self, number: int, listed: list[_Listed]) -> list[_Assigned]:
        """Begins a version on the coordinator; returns what each rank does."""
        facts, root = self._coordinated, self._location
        directory = facts.directory
        names = directory.names()
        remove_unfinished(root, directory.is_whole, names)
        if directory.is_whole and number <= (newest := max(directory.is_whole)):
            raise AlreadyExistsError(
                f"cannot publish version {number} to {root}: it has version {newest}, and numbers "
                "must rise. After a restart from an older step, go on with greater numbers"
            )
        is_new = any(each.encoded is not None for each in listed) or not facts.listed
        if is_new:
            self._plan(listed)
        line = [] if directory.newest is None else directory.newest.line
        is_whole = is_new or not line or not all(each.has_snapshot for each in listed)
        is_whole = is_whole or len(line) >= self.whole_every
        assignments: list[bytes | None] = [None for _ in listed]
        if is_new:
            encoded = [each.encoded or b"" for each in facts.listed]
            plan = _native.GlobalPlan(encoded, ranks_per_node())
            assignments = [plan.assignment(rank) for rank in range(len(listed))]
        save_id, claim = secrets.token_hex(8), None
        if not is_whole:
            options: dict[str, Any] = {"may_replace": False}
            facts.transaction = DeltaTransaction(path_of(root, number), save_id, **options)
            facts.transaction.begin(is_empty=facts.transaction.target.name not in names)
            claim = facts.transaction.claim
        return [_Assigned(each, facts.ties, save_id, is_whole, claim) for each in assignments]

    def _plan(self, listed: list[_Listed]) -> None:
        """Remembers the tensors of all ranks. A rank whose list is known has sent none."""
        facts = self._coordinated
        facts.listed = [
            new if new.encoded is not None else facts.listed[rank]
            for rank, new in enumerate(listed)
        ]
        items = [PlannedItems(each.encoded) for each in facts.listed]
        facts.ties = common_ties([each.ties for each in facts.listed], items)
        facts.tensors = {}
        for item in (item for own in items for item in own):
            fqn, data = item.index.fqn, item.tensor_data
            if data is not None and fqn not in facts.ties:
                dtype = published_dtype(data.properties.dtype, self.dtype)
                facts.tensors[fqn] = str(dtype).removeprefix("torch."), tuple(data.size)

    # ---- The background ----

    def _finish(
        self,
        number: int,
        assigned: _Assigned,
        differences: Differences,
        call: Call,
        record: Record | None,
    ) -> None:
        """Writes and commits a version, in a thread."""
        recording = contextlib.nullcontext() if record is None else record.current()
        write = self._write_whole if assigned.is_whole else self._write_delta
        activity = f"of the group, while publishing version {number}"
        try:
            with recording, first_error(activity), call, call.current():
                write(number, assigned, differences, call)
                call.begin_last("ending the publish")
        finally:
            differences.close()
            if record is not None:
                record.end()
        self._is_published = True

    def _write_whole(
        self, number: int, assigned: _Assigned, differences: Differences, call: Call
    ) -> None:
        path, version = path_of(self._location, number), None
        digests = path / data_file(call.group.rank, assigned.save_id)

        def write() -> DataFile | None:
            for _ in differences:  # There are none. They end when the snapshot is taken.
                pass
            assert self._snapshot is not None
            path.create_directories()
            return write_digests(digests, self._snapshot)

        def describe(written: list[DataFile | None]) -> dict[str, tuple[int, ...]]:
            nonlocal version
            files = [file for file in written if file is not None]
            version = self._version(number, [(number, new_chain())], files)
            return {fqn: sizes for fqn, (_, sizes) in version.tensors.items()}

        may_commit = False
        try:
            sizes = call.all_reduce("writing digests", write, describe, "write")
            assert self._snapshot is not None
            order = Order(
                path.checkpoint_id,
                _WholeWriter(path, version, self._coordinated.directory.job),
                FastSavePlanner(check_replicas="off"),
                True,
            )
            may_commit = True
            order.carry_out(self._snapshot.state_dict(sizes), call)
        except BaseException:
            if _is_ruled_out(call, path, may_commit):
                # Not version.json, which may be that of a newer job. Alone, it is no version.
                digests.discard()
                path.discard()
            raise
        if version is not None:
            self._committed(version)

    def _write_delta(
        self, number: int, assigned: _Assigned, differences: Differences, call: Call
    ) -> None:
        path, rank = path_of(self._location, number), call.group.rank
        save_id, facts = assigned.save_id, self._coordinated
        transaction = facts.transaction if call.group.is_coordinator else None
        facts.transaction = None
        name, version, may_commit = data_file(rank, save_id), None, False

        def write() -> DataFile | None:
            nonlocal transaction, may_commit
            if transaction is None:
                transaction = DeltaTransaction(path, save_id)
                transaction.join(assigned.claim, call.group.names[rank])
            assert self._snapshot is not None
            file = write_differences(path / name, self._snapshot, differences, self._pools)
            if file is not None:
                note(bytes=file.nbytes)
                if path.file_system.has_folders:
                    path.sync()
            may_commit = True
            return file

        def commit(written: list[DataFile | None]) -> None:
            nonlocal version
            assert transaction is not None
            base = facts.directory.newest
            assert base is not None
            files = [file for file in written if file is not None]
            digests = [box.digest for file in files for box in file.boxes]
            line = [*base.line, (number, chain_of(base.chain, number, digests))]
            version = self._version(number, line, files)
            names = [file.name for file in files]
            check_term(self._location, version.term)
            check_holder(self._location, version.term, facts.directory.job)
            write_latest(self._location, version)
            transaction.check(names)
            claim_commit()
            transaction.commit(version.encode(), names)

        try:
            call.all_reduce("write", write, commit)
        except BaseException:
            if transaction is not None and _is_ruled_out(call, path, may_commit):
                transaction.abandon([name])
            raise
        if version is not None:
            self._committed(version)

    def _version(
        self, number: int, line: list[tuple[int, str]], files: Sequence[DataFile] = ()
    ) -> Version:
        facts = self._coordinated
        return Version(number, facts.directory.term, line, facts.tensors, facts.ties, files)

    def _committed(self, version: Version) -> None:
        """Removes old versions. The new one stands already."""
        directory, root = self._coordinated.directory, self._location
        directory.newest = version
        directory.is_whole[version.number] = version.is_whole
        with phase("retain"):
            try:
                try:
                    check_term(root, version.term)
                except SupersededError:
                    forget_latest(root)  # It may have named a version of the newer job.
                    raise
                for number in remove_older(root, directory.is_whole, self.keep_whole):
                    del directory.is_whole[number]
            except CheckpointError as error:
                warn_after_commit(
                    f"version {version.number} is published, but what follows has failed: {error}",
                    stacklevel=2,
                )


def _is_ruled_out(call: Call, path: Location, may_commit: bool) -> bool:
    """Returns whether a version that has failed is not committed, and never will be.

    Only the coordinator knows that of files which ``may_commit``. Else the next publish removes
    them, if they are no version.
    """
    if not call.group.is_coordinator:
        return not may_commit
    with contextlib.suppress(CheckpointError):
        return not has_version(path)
    return False


def _refuse_objects(state_dict: Mapping[str, Any]) -> None:
    for fqn, value in state_dict.items():
        kind = type(value)
        is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not is_plain and not hasattr(kind, "__create_write_items__"):
            raise UnsupportedError(
                f"cannot publish {fqn!r}: it is a {kind.__name__}, and no strided tensor; leave it "
                "out of the state dict"
            )
