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

An agent that has begun to publish its manifest retains its data files until it reads the failure of
machine 0 or another epoch: a write that failed may have arrived, or may still arrive. The same
holds for the agent that replaces it. Committed files are therefore never removed. Before a commit,
each machine checks the files that the index names: a late manifest may name other files than its
agent has written.

If an agent cannot read or publish these files, it retries for ``SHUTDOWN_WAIT_S``. Then the save
fails on its machine, or at once if the directory is gone. The agent publishes the failure once it
can write files again. Meanwhile the ranks send the failure to the agents of the other machines.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch_ckpt._core import _native
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.joint_plan import JointPlan, joint_plan
from torch_ckpt.agent.machine_part import MachinePart
from torch_ckpt.agent.manifests import FileKind, Manifests
from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.messages import Failure, raise_failure
from torch_ckpt.agent.persist import FileReport, Writing, lengths_of, snapshot_commit_files
from torch_ckpt.commits.checkpoint import CheckpointTransaction
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

    ``may_be_committed``: whether the save may be committed nevertheless.
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


class _Deadline:
    """The deadline of this machine's wait for other machines. A shutdown shortens the wait.

    So does the loss of the save on another machine. Machine 0 times out before the others, and ends
    the save: if they timed out first, they would retain their files.
    """

    def __init__(
        self,
        timeout_s: float,
        grace_s: float,
        is_shutting_down: Callable[[], bool],
        is_orphan: Callable[[], bool],
    ) -> None:
        self._timeout_s, self._grace_s = timeout_s + min(grace_s, timeout_s / 4), grace_s
        self._is_shutting_down, self._is_orphan = is_shutting_down, is_orphan
        self.begin()

    def begin(self) -> None:
        """Restarts the wait."""
        self._began = time.monotonic()
        self.at = self._began + self._timeout_s

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    def has_passed(self) -> bool:
        now = time.monotonic()
        if self.at > now + SHUTDOWN_WAIT_S and self._is_shutting_down():
            self.at = now + SHUTDOWN_WAIT_S
        if self.at > now + self._grace_s and self._is_orphan():
            self.at = now + self._grace_s
        return now >= self.at


class JointSave:
    """One save of several machines, on this machine. Owned by one thread, without the agent's lock.

    ``memories`` are the slots of this machine, in order of rank. ``timeout_s`` limits the wait for
    other machines. ``is_shutting_down`` returns whether to wait for ``SHUTDOWN_WAIT_S`` at most,
    and ``is_orphan`` whether some machine can never complete the save. ``remote_failure`` returns
    the failure of the save on another machine, if the ranks have sent it. ``publish_later``
    publishes a failure that this machine could not publish. Raises CheckpointError if a slot
    contains no snapshot, or the snapshot has no directory.
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
        self._part = MachinePart(memories, how, check_replicas)
        self.directory = self._part.directory
        """The directory of the checkpoint."""
        self._files = manifests_of(memories[0])
        self._is_coordinator = self._files.node == 0
        self._commits = self._files.node in self._files.committers
        self._deadline = _Deadline(
            timeout_s, 0.0 if self._is_coordinator else _GRACE_S, is_shutting_down, is_orphan
        )
        self._remote_failure, self._publish_later = remote_failure, publish_later
        self._epoch = ""  # The current epoch; empty until this machine reads it.
        self._failed_before: str | None = ""  # Epoch of machine 0 that failed before `begin`.
        self._has_begun = False  # Whether this machine has joined the epoch, or needs none.
        self._is_resumed = True  # Whether an earlier agent may have published a manifest.
        self._plan: JointPlan | None = None
        self._failing_since: float | None = None  # When reading or publishing began to fail.

    @property
    def has_written(self) -> bool:
        """Whether this machine has written its share, and waits for the manifests of the others."""
        return self._part.reports is not None

    @property
    def progress(self) -> tuple[bool, bool]:
        """Whether this machine has written its share, and whether its commit has begun."""
        return self.has_written, self._part.may_be_committed

    @property
    def differences(self) -> list[Difference]:
        """The replicas with different values, once all lists were read."""
        return [] if self._plan is None else self._plan.plan.differences

    def begin(self) -> None:
        """Publishes the item lists of this machine's ranks. Raises as :meth:`advance` does."""
        try:
            # Creates missing directories, unless the file systems refuse what the save needs.
            with created(self.directory, self._part.first.sync):
                self._files.create_directory()
        except Exception as error:  # Nothing is published yet: other machines may not begin.
            failure = self._files.failure_of(error)
            self._publish_later(self._files, {"epoch": None, "failure": failure})
            raise_failure(failure)
        with self._ending_on_failure():
            self._begin()

    def _begin(self) -> None:
        published, is_committed = self._read_published()
        if published is None:  # The first `advance` tries again.
            return
        self._has_begun = True
        self._failed_before = self._epoch_in("failed")
        self._files.remove("failed")
        if is_committed:
            return
        self._is_resumed = self._files.node in published["manifest"]
        if self._is_coordinator:
            self._epoch = self._epoch_in("epoch") or ""  # An earlier agent may have published it.
            transaction = self._open()
            if self._epoch not in ("", self._failed_before) and transaction.has_pending:
                transaction.resume()
            else:
                self._epoch = secrets.token_hex(8)
                self._open().begin()  # Before any machine writes.
        self._publish({kind: set() for kind in ("epoch", "lists", "manifest")})

    def _open(self) -> CheckpointTransaction:
        """Returns the transaction of the epoch, on a machine that commits. It has not begun."""
        return self._part.open(self._files.save_id(self._epoch))

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
            failure = error.failure
            own = failure if self._is_coordinator else None
            self._end_epoch(own, retain_files=error.may_be_committed)
        except Exception as error:
            failure = self._files.failure_of(error)
            self._end_epoch(failure, retain_files=self._is_bound)
        raise_failure(failure)

    @property
    def _is_bound(self) -> bool:
        """Whether machine 0 may commit the files of this machine, and alone may fail the epoch."""
        may_be_published = self.has_written or self._is_resumed
        return may_be_published and not (self._is_coordinator or self._part.may_be_committed)

    def withdraw(self) -> None:
        """Removes this machine from the save."""
        self._end_epoch(None, retain_files=not self._is_coordinator)

    def clear_former(self, live: Iterable[Save]) -> None:
        """Removes the published files of older saves, except for these saves."""
        if self._is_coordinator:
            self._files.clear_former(live)

    def _advance(self) -> bool:
        files = self._files
        if not self._has_begun:
            self._begin()
            return False
        published, is_committed = self._read_published()
        if published is None:
            return False
        if is_committed:
            if self._commits and not self._part.may_be_committed:
                self._part.finish_commit(files.save_id(self._epoch))
            return self._end_commit(published)
        # First, because no failure can undo a commit of machine 0.
        if not self._is_coordinator and 0 in published["commit"] and self._commit_too():
            return self._end_commit(published)
        self._raise_failed(published["failed"].intersection(files.others))
        self._raise_remote_failure()
        if not self._is_coordinator:
            self._adopt_epoch()
        if not self.has_written and self._epoch and len(published["lists"]) == files.node_count:
            self._write()
            self._publish(published)
            published, _ = self._read_published()
            if published is None:
                return False
        has_all_manifests = len(published["manifest"]) == files.node_count
        if self._is_coordinator and self.has_written and has_all_manifests:
            reports = files.reports(self._epoch, range(files.node_count))
            if reports is not None:
                self._commit(reports)
                return self._end_commit(published)
        awaited = "manifest" if self.has_written else "lists"
        self._raise_if_late(sorted(set(files.others) - published[awaited]) or [0])
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

    def _epoch_in(self, kind: FileKind) -> str | None:
        """Returns the epoch that machine 0 published, or published as failed; empty if none."""
        got = self._files.get(0, kind)
        epoch: str | None = "" if got is None else got[0]["epoch"]
        return epoch

    def _adopt_epoch(self) -> None:
        """Changes to the epoch that machine 0 published."""
        epoch = self._epoch_in("epoch")
        if not epoch or epoch == self._epoch:
            return
        if self._epoch:  # A new epoch ends the previous one.
            self._files.remove("manifest")
            self._part.discard()
            self._is_resumed = False
        self._epoch = epoch
        self._deadline.begin()

    def _write(self) -> None:
        """Writes the shares of this machine, unless an earlier agent has written them."""
        files, part = self._files, self._part
        self._plan = joint_plan(files, part.facts(), part.headers[0].world_size, self.directory)
        if self._plan is None:
            return
        reports = files.reports(self._epoch, [files.node])
        if part.transaction is None and self._commits:
            transaction = self._open()
            if reports is not None or transaction.has_pending:
                self._is_resumed = True
                transaction.resume()
            else:
                transaction.begin()
        if reports is None:
            files.remove("manifest")  # An earlier agent may have left one, in another epoch.
            reports = part.write(self._plan.plan)
        part.set_written(reports)  # Before the manifest is published: a failed write may arrive.
        self._deadline.begin()

    # ---- Commit ----

    def _commit(self, reports: list[FileReport]) -> None:
        """Commits the save; called on machine 0."""
        plan, save_id = self._plan, self._files.save_id(self._epoch)
        assert plan is not None
        self._part.check_slots()
        files = snapshot_commit_files(plan.plan, reports, save_id, self._part.first, plan.paths)
        # If other machines commit, they have their files.
        are_several = len(self._files.committers) > 1
        named = lengths_of(reports)
        self._part.commit(files, self._part.own(named) if are_several else named)

    def _commit_too(self) -> bool:
        """Commits the files of machine 0's commit in the directory of this machine.

        Returns whether this machine has written its files for that commit.
        """
        got, own = self._files.get(0, "commit"), self._files.manifest(self._files.node)
        if got is None or own is None:
            return False
        (facts, (metadata, index)), (epoch, reports) = got, own
        if self._files.save_id(epoch) != facts["save_id"]:
            return False
        self._epoch = epoch
        if not self.has_written:  # An earlier agent wrote the files, and may have begun to commit.
            self._open().resume()
            self._part.set_written(reports)
            self._deadline.begin()
        files = facts.get("files") or lengths_of(reports).items()  # Earlier agents send none.
        self._part.commit((metadata, index), self._part.own(dict(files)))
        return True

    def _end_commit(self, published: dict[str, set[int]]) -> bool:
        """Publishes that this machine has committed; returns whether the save has ended on it.

        The save is already committed, so failures are retried in the next call.
        """
        self._part.may_be_committed = True
        files = self._files
        with self._retrying():
            has_ended = not self._is_coordinator or self._have_all_committed(published)
            if self._is_coordinator:
                if has_ended:
                    files.clear()
            elif not self._commits:
                files.remove("lists", "manifest", "failed")
            elif any(0 in nodes for nodes in published.values()):  # Else machine 0 has ended.
                with contextlib.suppress(NotFoundError):
                    files.put("committed", {})
            self._failing_since = None
            return has_ended
        return False

    def _have_all_committed(self, published: dict[str, set[int]]) -> bool:
        """Returns whether all machines have committed. Machine 0 publishes the files to commit."""
        files = self._files
        # An earlier agent removes the published files once all have, the manifests first.
        is_open = self.has_written or bool(published["manifest"])
        awaited = set(files.committers).intersection(files.others) if is_open else set()
        missing = awaited - published["committed"]
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
            self._deadline.begin()
        self._raise_if_late(sorted(missing))
        return False

    def _end_epoch(self, failure: Failure | None, *, retain_files: bool) -> None:
        """Ends this machine's participation in the epoch, and publishes the failure, if any.

        With ``retain_files``, the data files remain, because they may be committed.
        """
        # After machine 0 has committed, no machine waits for one that may only retain its files.
        if failure is not None and (not self._is_bound or self._files.has_files()):
            epoch = self._epoch or None  # Without an epoch, all machines abort the save.
            facts = {"epoch": epoch, "failure": failure, "unsure": self._part.may_be_committed}
            try:
                self._files.put("failed", facts)
            except CheckpointError:  # The directory may return.
                self._publish_later(self._files, facts)
        self._files.remove("epoch", "lists")
        if not (retain_files or self._part.may_be_committed):
            self._files.remove("manifest")
            self._part.discard()

    # ---- Published files ----

    @contextlib.contextmanager
    def _retrying(self) -> Iterator[None]:
        """Ends the block if a file cannot be read or published: the next call retries.

        Raises StorageError if such failures persist.
        """
        try:
            yield
        except StorageError as error:
            since = self._failing_since = self._failing_since or time.monotonic()
            if time.monotonic() - since > SHUTDOWN_WAIT_S or self._deadline.has_passed():
                raise StorageError(f"cannot save {self.directory}: {error}", error.errno) from error
            self._raise_remote_failure()

    def _read_published(self) -> tuple[dict[str, set[int]] | None, bool]:
        """Returns the published files, and if the save is committed; ``None`` if unknown now."""
        with self._retrying():
            return self._files.published(), self._files.is_committed()
        return None, False

    def _publish(self, published: dict[str, set[int]]) -> None:
        """Publishes the missing files of this machine: another save may have removed them."""
        node, files, reports = self._files.node, self._files, self._part.reports
        with self._retrying():
            if node not in published["lists"]:
                files.put("lists", *self._part.lists())
            if self._is_coordinator and node not in published["epoch"]:
                files.put("epoch", {"epoch": self._epoch})
            if reports is not None and node not in published["manifest"]:
                files.put_manifest(self._epoch, reports)
            self._failing_since = None

    def _raise_if_late(self, nodes: Sequence[int]) -> None:
        """Raises CheckpointError if the deadline has passed. ``nodes`` are the missing machines."""
        if self._deadline.has_passed():
            machines = f"machine{'s' if len(nodes) > 1 else ''} {' and '.join(map(str, nodes))}"
            raise CheckpointError(
                f"cannot save {self.directory}: no response from {machines} of "
                f"{self._files.node_count} for {self._deadline.waited_s:.0f} s"
            )
