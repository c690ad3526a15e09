"""JointSave: the protocol by which the agents of several machines persist one save.

An epoch is one attempt of all machines to complete the save. Machine 0 chooses a random id for it.

1. Each agent publishes the item lists of its ranks, with digests of their values; machine 0 also
   publishes the epoch.
2. Once all lists are published, each agent computes the same plan and writes the shares of its
   ranks. It then publishes a manifest of these files and the epoch.
3. Once all manifests are published, machine 0 commits.

An epoch ends with the commit or with a failure that machine 0 publishes. If another machine
publishes a failure, machine 0 publishes it too. A restarted agent resumes the epoch from the
published files.

An agent that has begun to publish its manifest retains its data files until it reads the failure
of machine 0 or another epoch: a write that failed may have arrived, or may still arrive. So does
the agent that takes its place. Committed files are therefore never removed. A commit checks the
files that its index names: a manifest that arrived late may name others than this agent has
written.

An agent that cannot read or publish these files tries again for ``SHUTDOWN_WAIT_S``. Then the save
fails on it. It publishes the failure once the files can be written again. Meanwhile the ranks send
it to the agents of the other machines.

If the machines do not share the directory of the checkpoint, each one writes and commits in its own
directory:

4. Once machine 0 has committed, it publishes the metadata and the index. Each other machine commits
   the same two files, whatever has failed meanwhile, and publishes that it has.
5. Once all machines have committed, machine 0 removes the published files, and the save ends.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch_ckpt._core import _native
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.joint_plan import JointPlan, joint_plan
from torch_ckpt.agent.manifests import Manifests
from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.messages import Failure, raise_failure
from torch_ckpt.agent.persist import (
    FileReport,
    Writing,
    directory_of,
    lengths_of,
    publish,
    snapshot_commit_files,
    transaction_of,
    values_of,
    write_shares,
)
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.garbage import remove_files
from torch_ckpt.commits.probe import created
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError
from torch_ckpt.formats.committed import index_name, open_committed
from torch_ckpt.planning.replica_check import CheckReplicas, Difference

__all__ = ["JointSave", "manifests_of"]

_GRACE_S = 5.0
"""Extra time that other machines wait for machine 0, whose error names the missing machine."""

SHUTDOWN_WAIT_S = 30.0
"""Longest wait for other machines while the agent ends, or once the ranks have restarted."""


class _RemoteError(Exception):
    """A failure that another machine published.

    ``may_be_committed`` says that the save may be committed nevertheless.
    """

    def __init__(self, failure: Failure, may_be_committed: bool) -> None:
        super().__init__(failure)
        self.failure = failure
        self.may_be_committed = may_be_committed


def manifests_of(memory: _native.Slot) -> Manifests:
    """Returns the files of the save of a slot, from the perspective of this machine."""
    header, target = memory.header(), Destination.of(memory.read())
    return Manifests(
        *(header.run, header.session, header.sequence, header.node, header.node_count),
        *(target.directory, target.shared),
    )


class JointSave:
    """One save of several machines, on this machine. Owned by one thread, without the agent's lock.

    ``memories`` are the slots of this machine, in order of rank. ``timeout_s`` is the wait for
    other machines. ``is_shutting_down`` returns whether to wait for ``SHUTDOWN_WAIT_S`` at most,
    and ``is_orphan`` whether another machine can never complete the save. ``remote_failure``
    returns the failure of the save on another machine, if the ranks have sent it.
    ``publish_later`` publishes a failure that this machine could not publish. Raises
    CheckpointError if a slot contains no snapshot, or the snapshot has no directory.
    """

    def __init__(
        self,
        memories: Sequence[_native.Slot],
        how: Writing,
        *,
        check_replicas: CheckReplicas = "sample",
        timeout_s: float,
        is_shutting_down: Callable[[], bool],
        is_orphan: Callable[[], bool] = lambda: False,
        remote_failure: Callable[[], Failure | None] = lambda: None,
        publish_later: Callable[[Manifests, dict[str, Any]], None] = lambda *_: None,
    ) -> None:
        self._memories = memories
        self._snapshots = [memory.read() for memory in memories]
        self._headers = [memory.header() for memory in memories]
        self._first = self._snapshots[0]
        if not self._first.directory:
            raise CheckpointError("cannot persist the save: it has no directory")
        self.directory = directory_of(self._first)
        """The directory of the checkpoint."""
        self._how = how
        self._values = values_of(self._snapshots, check_replicas)
        self._files = manifests_of(memories[0])
        self._is_coordinator = self._files.node == 0
        wait_s = timeout_s if self._is_coordinator else timeout_s + min(_GRACE_S, timeout_s / 4)
        self._timeout_s = wait_s
        self._is_shutting_down, self._is_orphan = is_shutting_down, is_orphan
        self._remote_failure, self._publish_later = remote_failure, publish_later
        self._reset_deadline()
        self._epoch = ""  # The current epoch; empty until this machine reads it.
        self._failed_before: str | None = ""  # Epoch of machine 0 that failed before `begin`.
        self._is_resumed = True  # Whether a former agent may have published a manifest.
        self._plan: JointPlan | None = None
        self._written: list[str] = []
        self._reports: list[FileReport] | None = None  # This machine's; `None` until written.
        self._transaction: CheckpointTransaction | None = None  # On a machine that commits.
        self._may_be_committed = False  # Whether the commit has begun.
        self._failing_since: float | None = None  # First of the last failures to read or publish.

    def _epoch_transaction(self) -> CheckpointTransaction:
        """Returns the transaction of the epoch, on a machine that commits. It has not begun."""
        self._transaction = transaction_of(self._first, self._files.save_id(self._epoch))
        return self._transaction

    @property
    def tag(self) -> str:
        """Identifies the save in names of files."""
        return self._files.tag

    @property
    def has_written(self) -> bool:
        """Whether this machine has written its share, and waits for the manifests of the others."""
        return self._reports is not None

    @property
    def progress(self) -> tuple[bool, bool]:
        """Whether this machine has written its share, and whether its commit has begun."""
        return self.has_written, self._may_be_committed

    @property
    def differences(self) -> list[Difference]:
        """The replicas with different values, once all lists were read."""
        return [] if self._plan is None else self._plan.plan.differences

    def begin(self) -> None:
        """Publishes the item lists of this machine's ranks. Raises as :meth:`advance` does."""
        try:
            self._create_directories()
        except Exception as error:  # Nothing is published yet: other machines may not begin.
            failure = self._files.failure_of(error)
            self._publish_later(self._files, {"epoch": None, "failure": failure})
            raise_failure(failure)
        with self._ending_on_failure():
            self._begin()

    def _create_directories(self) -> None:
        """Creates what is missing, if the file systems do not refuse what the save needs."""
        with created(self.directory, self._first.sync):
            # A machine that has committed must not create the directory of the published files: it
            # exists, or machine 0 has removed it because all machines have committed.
            if self._files.is_apart and not self._files.is_committed():
                self._files.create_directory()

    def _begin(self) -> None:
        self._failed_before = self._failed_epoch(0)
        self._files.remove("failed")
        if self._files.is_apart and self._files.is_committed():
            return
        published = self._read_published()
        self._is_resumed = published is None or self._files.node in published["manifest"]
        if self._is_coordinator:
            self._epoch = self._published_epoch()  # An earlier agent may have published it.
            is_new = self._epoch in ("", self._failed_before)
            transaction = self._epoch_transaction()
            if not is_new and not self._files.is_committed() and transaction.has_pending:
                transaction.resume()
            elif is_new or not self._files.is_committed():
                self._epoch = secrets.token_hex(8)
                self._epoch_transaction().begin()  # Before any machine writes.
        self._publish({kind: set() for kind in ("epoch", "lists", "manifest")})

    def advance(self) -> bool:
        """Advances the save without waiting for other machines. Returns whether it is committed.

        Raises CheckpointError if the save failed on some machine, or the deadline passed.
        """
        with self._ending_on_failure():
            return self._advance()

    @contextlib.contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """Ends the epoch on this machine if the block raises, and raises the failure."""
        try:
            yield
            return
        except _RemoteError as error:
            failure, may_be_committed = error.failure, error.may_be_committed
            self._end_epoch(
                failure if self._is_coordinator else None, retain_files=may_be_committed
            )
        except Exception as error:
            failure = self._files.failure_of(error)
            self._end_epoch(failure, retain_files=self._is_bound)
        raise_failure(failure)

    @property
    def _is_bound(self) -> bool:
        """Whether machine 0 may commit the files of this machine, and alone may fail the epoch."""
        may_be_published = self.has_written or self._is_resumed
        return may_be_published and not (self._is_coordinator or self._may_be_committed)

    def withdraw(self) -> None:
        """Removes this machine from the save."""
        self._end_epoch(None, retain_files=not self._is_coordinator)

    def clear_former(self, live: Iterable[Save]) -> None:
        """Removes what older saves have left for other machines, except for these saves."""
        if self._is_coordinator:
            self._files.clear_former(live)

    def _advance(self) -> bool:
        files = self._files
        published = self._read_published()
        if published is None:
            return False
        if files.is_committed():
            is_ours = self._is_coordinator or files.is_apart
            if is_ours and not self._may_be_committed:  # An earlier agent may have ended before.
                if self._first.sync:
                    self.directory.sync()
                self._epoch_transaction().replace_small_files()
            return self._end_commit(published)
        # First: what machine 0 has committed no failure can undo.
        if not self._is_coordinator and 0 in published["commit"] and self._commit_too():
            return self._end_commit(published)
        self._raise_failed(published["failed"].intersection(files.others))
        self._raise_remote_failure()
        if not self._is_coordinator:
            self._adopt_epoch()
        if not self.has_written and self._epoch and len(published["lists"]) == files.node_count:
            self._write()
            self._publish(published)
            published = self._read_published()
            if published is None:
                return False
        has_all_manifests = len(published["manifest"]) == files.node_count
        if self._is_coordinator and self.has_written and has_all_manifests:
            reports = self._all_reports()
            if reports is not None:
                self._commit(reports)
                return self._end_commit(published)
        awaited = "manifest" if self.has_written else "lists"
        if self._is_past_deadline():
            missing = sorted(set(files.others) - published[awaited]) or [0]
            raise self._timeout_error(missing)
        self._publish(published)
        return False

    # ---- Steps of an epoch ----

    def _raise_failed(self, nodes: set[int]) -> None:
        """Raises the failure of another machine that ends this epoch or the whole save."""
        for node in sorted(nodes):
            got = self._files.get(node, "failed")
            if got is None:
                continue
            failed_epoch = got[0]["epoch"]
            is_new = not self._epoch and failed_epoch != self._failed_before
            ends = (self._is_coordinator or node == 0) and (failed_epoch == self._epoch or is_new)
            if failed_epoch is None or ends:
                raise _RemoteError(tuple(got[0]["failure"]), got[0].get("unsure", False))

    def _raise_remote_failure(self) -> None:
        """Raises the failure of another machine that the ranks have sent to this agent."""
        failure = self._remote_failure()
        if failure is not None:
            raise _RemoteError(failure, self._is_bound)

    def _failed_epoch(self, node: int) -> str | None:
        """Returns the epoch that a machine published as failed; empty if none."""
        got = self._files.get(node, "failed")
        return "" if got is None else got[0]["epoch"]

    def _published_epoch(self) -> str:
        """Returns the epoch that machine 0 published; empty if none."""
        got = self._files.get(0, "epoch")
        return "" if got is None else str(got[0]["epoch"])

    def _adopt_epoch(self) -> None:
        """Changes to the epoch that machine 0 published."""
        epoch = self._published_epoch()
        if epoch in ("", self._epoch):
            return
        if self._epoch:  # A new epoch ends the previous one.
            self._files.remove("manifest")
            self._remove_written()
            self._remove_pending()
            self._is_resumed = False
        self._epoch = epoch
        self._reset_deadline()

    def _write(self) -> None:
        """Writes the shares of this machine, unless an earlier agent has written them."""
        files = self._files
        self._plan = joint_plan(
            files, self._save_facts(), self._headers[0].world_size, self.directory
        )
        if self._plan is None:
            return
        reports = self._reports_of(files.node)  # An earlier agent may have written them.
        if self._transaction is None and files.is_apart:
            transaction = self._epoch_transaction()
            if reports is not None or transaction.has_pending:
                self._is_resumed = True
                transaction.resume()
            else:
                transaction.begin()
        if reports is None:
            files.remove("manifest")  # An earlier agent may have left one, in another epoch.
            assigned = [self._plan.plan.assignment(header.rank) for header in self._headers]
            shares = list(zip(self._snapshots, assigned, strict=True))
            reports = write_shares(
                shares, self.directory, secrets.token_hex(8), self._written, self._how
            )
            self._check_slots()
        self._has_written(reports)  # Before the manifest is published: a failed write may arrive.

    def _check_slots(self) -> None:
        """Raises if the slots no longer contain the save, which was discarded or replaced."""
        if [memory.header() for memory in self._memories] != self._headers:
            raise CheckpointError(
                f"cannot commit {self.directory}: a slot was discarded or refilled meanwhile"
            )

    def _has_written(self, reports: list[FileReport]) -> None:
        self._written = [name for _, (name, *_), _ in reports]
        self._reports = reports
        self._reset_deadline()

    def _all_reports(self) -> list[FileReport] | None:
        """Returns the reports of all machines in this epoch; ``None`` if any is missing."""
        found: list[FileReport] = []
        for node in range(self._files.node_count):
            reports = self._reports_of(node)
            if reports is None:
                return None
            found += reports
        return found

    def _reports_of(self, node: int) -> list[FileReport] | None:
        """Returns the reports in a machine's manifest of this epoch; ``None`` if it has none."""
        found, reports = self._files.manifest(node) or ("", [])
        return reports if found == self._epoch else None

    # ---- Commit ----

    def _commit(self, reports: list[FileReport]) -> None:
        """Commits the save; called on machine 0."""
        assert self._plan is not None
        self._check_slots()
        save_id = self._files.save_id(self._epoch)
        files = snapshot_commit_files(
            self._plan.plan, reports, save_id, self._first, self._plan.paths
        )
        named = lengths_of(reports)
        if self._files.is_apart:  # Other machines have their files.
            named = self._own(named)
        self._commit_files(files, named)

    def _commit_too(self) -> bool:
        """Commits what machine 0 has committed, in the directory of this machine.

        Returns whether this machine has written its files for that commit.
        """
        got, own = self._files.get(0, "commit"), self._files.manifest(self._files.node)
        if got is None or own is None:
            return False
        facts, (metadata, index) = got
        epoch, reports = own
        if self._files.save_id(epoch) != facts["save_id"]:
            return False
        self._epoch = epoch
        if self._reports is None:  # A former agent wrote the files, and may have begun to commit.
            self._epoch_transaction().resume()
            self._has_written(reports)
        files = facts.get("files") or lengths_of(reports).items()  # Earlier agents send none.
        self._commit_files((metadata, index), self._own(dict(files)))
        return True

    def _own(self, files: Mapping[str, int]) -> dict[str, int]:
        """Returns those of the data files of all ranks that this machine has."""
        prefixes = tuple(f"__{header.rank}_" for header in self._headers)
        return {name: nbytes for name, nbytes in files.items() if name.startswith(prefixes)}

    def _commit_files(self, files: tuple[bytes, bytes], named: Mapping[str, int]) -> None:
        """Commits the metadata and the index in the directory of this machine.

        ``named`` are the data files that the index names here, and their lengths.
        """
        self._may_be_committed = True  # Even if `publish` fails.
        assert self._transaction is not None
        publish(self._transaction, files, named)
        remove_files(self.directory, set(self._written).difference(named))

    def _end_commit(self, published: dict[str, set[int]]) -> bool:
        """Ends the save on this machine, which has committed; returns whether it has ended.

        The save is committed. So a failure to publish that is tried again in the next call, unless
        such failures last.
        """
        self._may_be_committed = True
        try:
            has_ended = self._publish_commit(published)
        except StorageError as error:
            self._raise_if_lasting(error)
            return False
        self._failing_since = None
        return has_ended

    def _publish_commit(self, published: dict[str, set[int]]) -> bool:
        """Publishes that this machine has committed; returns whether the save has ended on it."""
        files = self._files
        if self._is_coordinator:
            if files.is_apart and not self._have_all_committed(published):
                return False
            files.clear()
        elif files.is_apart:
            if any(0 in nodes for nodes in published.values()):  # Else machine 0 has ended.
                with contextlib.suppress(NotFoundError):
                    files.put("committed", {})
        else:
            files.remove("lists", "manifest", "failed")
        return True

    def _have_all_committed(self, published: dict[str, set[int]]) -> bool:
        """Returns whether all machines have committed. Machine 0 publishes what they commit."""
        files = self._files
        # An earlier agent removes the published files once all have, the manifests first.
        is_open = self.has_written or bool(published["manifest"])
        missing = set(files.others if is_open else ()) - published["committed"]
        if not missing:
            return True
        self._raise_failed(published["failed"].intersection(files.others))
        self._raise_remote_failure()
        if 0 not in published["commit"]:
            _, committed = open_committed(self.directory, "")
            assert committed is not None
            save_id = committed.save_id
            contents = [(self.directory / n).read() for n in (".metadata", index_name(save_id))]
            files.put("commit", {"save_id": save_id, "files": committed.files}, contents)
            self._reset_deadline()
        if self._is_past_deadline():
            raise self._timeout_error(sorted(missing))
        return False

    def _end_epoch(self, failure: Failure | None, *, retain_files: bool) -> None:
        """Ends this machine's participation in the epoch, and publishes the failure, if any.

        With ``retain_files``, the data files remain, because they may be committed.
        """
        # After the commit of machine 0, nobody waits for a machine that may only retain its files.
        if failure is not None and (not self._is_bound or self._files.has_files()):
            self._publish_failure(failure)
        self._files.remove("epoch", "lists")
        if not (retain_files or self._may_be_committed):
            self._files.remove("manifest")
            self._remove_written()
            self._remove_pending()

    def _publish_failure(self, failure: Failure) -> None:
        """Publishes a failure of the epoch, later if that is impossible now."""
        epoch = self._epoch or None  # Without an epoch, all machines give the save up.
        facts = {"epoch": epoch, "failure": failure, "unsure": self._may_be_committed}
        try:
            self._files.put("failed", facts)
        except StorageError:
            self._publish_later(self._files, facts)
        except CheckpointError:  # The directory is gone. The caller raises the first failure.
            pass

    def _remove_written(self) -> None:
        """Removes the data files of this machine."""
        remove_files(self.directory, self._written)
        self._written = []
        self._reports = None

    def _remove_pending(self) -> None:
        """Removes the pending file of the epoch, if this machine has created it."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.discard_pending()

    # ---- Published files ----

    def _read_published(self) -> dict[str, set[int]] | None:
        """Returns the published files; ``None`` if they cannot be read now.

        Raises StorageError if that lasts.
        """
        try:
            return self._files.published()
        except StorageError as error:
            self._raise_if_lasting(error)
            return None

    def _raise_if_lasting(self, error: StorageError) -> None:
        """Raises a failure to read or publish files if such failures last."""
        since = self._failing_since = self._failing_since or time.monotonic()
        if time.monotonic() - since > SHUTDOWN_WAIT_S or self._is_past_deadline():
            raise StorageError(f"cannot save {self.directory}: {error}", error.errno) from error
        self._raise_remote_failure()

    def _publish(self, published: dict[str, set[int]]) -> None:
        """Publishes the missing files of this machine: another save may have removed them.

        Raises StorageError if that fails for long; until then, the next call tries again.
        """
        try:
            self._publish_missing(published)
        except StorageError as error:
            self._raise_if_lasting(error)
        else:
            self._failing_since = None

    def _publish_missing(self, published: dict[str, set[int]]) -> None:
        node = self._files.node
        if node not in published["lists"]:
            facts = {
                "save": self._save_facts(),
                "ranks": [header.rank for header in self._headers],
                "has_paths": [snapshot.paths is not None for snapshot in self._snapshots],
            }
            values = self._values or [b""] * len(self._snapshots)
            blobs = [
                blob
                for snapshot, digests in zip(self._snapshots, values, strict=True)
                for blob in (snapshot.items, snapshot.paths or b"", digests)
            ]
            self._files.put("lists", facts, blobs)
        if self._is_coordinator and node not in published["epoch"]:
            self._files.put("epoch", {"epoch": self._epoch})
        if self._reports is not None and node not in published["manifest"]:
            self._files.put_manifest(self._epoch, self._reports)

    def _save_facts(self) -> list[object]:
        """Returns the facts of the save that must be equal on all machines."""
        header = self._headers[0]
        return [header.step, header.world_size, self._first.version, self._first.sync]

    # ---- Deadline ----

    def _reset_deadline(self) -> None:
        self._waiting_since = time.monotonic()
        self._deadline = self._waiting_since + self._timeout_s

    def _is_past_deadline(self) -> bool:
        """Returns whether the deadline has passed. A shutdown shortens the wait.

        So does the loss of the save on another machine. Machine 0 then ends it, before the others
        lose patience: they would retain their files.
        """
        now = time.monotonic()
        if self._deadline > now + SHUTDOWN_WAIT_S and self._is_shutting_down():
            self._deadline = now + SHUTDOWN_WAIT_S
        left_s = 0.0 if self._is_coordinator else _GRACE_S
        if self._deadline > now + left_s and self._is_orphan():
            self._deadline = now + left_s
        return now >= self._deadline

    def _timeout_error(self, nodes: Sequence[int]) -> CheckpointError:
        machines = f"machine{'s' if len(nodes) > 1 else ''} {' and '.join(map(str, nodes))}"
        return CheckpointError(
            f"cannot save {self.directory}: no response from {machines} of "
            f"{self._files.node_count} for {time.monotonic() - self._waiting_since:.0f} s"
        )
