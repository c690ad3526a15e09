"""Brings a save to disk whose ranks are on several machines: what each agent does.

Each agent publishes what its ranks hold; the first machine's names the try by an id of its own.
Once all lists are there, every agent makes the same plan of them, writes its part, and publishes a
manifest of what it has written in that try. When all manifests are there, the first machine
commits. An agent that was started anew goes on with the try where the files say that it is.

A try ends by the commit, or by the failure that the first machine publishes; another machine's
failure has it do so. So whoever has published a manifest keeps its files until it reads of that
failure, or of another try: what is committed is never removed.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_ckpt._core import _native
from torch_ckpt.agent.manifests import Failure, Manifests, failure_of, raise_failure
from torch_ckpt.agent.memory import SlotHeader
from torch_ckpt.agent.persist import Report, commit_files, directory_of, publish, write_parts
from torch_ckpt.errors import CheckpointError
from torch_ckpt.formats.committed import committed_id
from torch_ckpt.options import IoOptions
from torch_ckpt.storage.gc import remove_files

__all__ = ["JointSave"]

_GRACE_S = 5.0
"""By how much the others wait longer for the first machine, which knows better what is wrong."""

HURRY_S = 30.0
"""For how long an agent that has to go on waits for others."""


class _RemoteError(Exception):
    """Another machine has failed.

    Args:
        failure: Why.
        unsure: Whether the save may be committed all the same.
    """

    def __init__(self, failure: Failure, unsure: bool) -> None:
        super().__init__(failure)
        self.failure = failure
        self.unsure = unsure


@dataclass
class _Plan:
    """What all ranks hold, and who of them writes what."""

    plan: _native.GlobalPlan
    paths: list[bytes | None]


class JointSave:
    """One save, on this machine. Owned by one thread, without the agent's lock.

    Args:
        memories: The slots of this machine, by rank.
        io: Tuning.
        threads: Files that are written at a time.
        timeout_s: Seconds to wait for other machines.
        is_hurried: Whether to wait for a moment only.

    Attributes:
        has_written: Whether this machine has written its part, and waits for the others.

    Raises:
        CheckpointError: A slot holds no snapshot, or one that has no directory to come to.
    """

    def __init__(
        self,
        memories: Sequence[_native.Slot],
        *,
        io: IoOptions,
        threads: int,
        timeout_s: float,
        is_hurried: Callable[[], bool],
    ) -> None:
        self._memories = memories
        self._snapshots = [memory.read() for memory in memories]
        self._headers = [SlotHeader.of(memory) for memory in memories]
        self._first = self._snapshots[0]
        if not self._first.directory:
            raise CheckpointError("the save has no directory to come to")
        self._directory = directory_of(self._first)
        self._io = io
        self._threads = threads
        header = self._headers[0]
        self._files = Manifests(
            *(header.run, header.session, header.sequence, header.node, header.node_count),
            self._directory,
        )
        self._leads = header.node == 0
        wait_s = timeout_s if self._leads else timeout_s + min(_GRACE_S, timeout_s / 4)
        self._timeout_s = wait_s
        self._is_hurried = is_hurried
        self._wait_anew()
        self._epoch = ""  # That which goes on, as far as this machine knows.
        self._former_failure: str | None = ""  # Which try had failed when this machine came.
        self._plan: _Plan | None = None
        self._written: list[str] = []
        self._reports: list[Report] | None = None  # Of this machine, once it has written.
        self._before: tuple[list[str], str | None] = [], None  # In the directory.
        self._is_unsure = False  # Whether the commit was begun.

    @property
    def has_written(self) -> bool:
        """Whether this machine has written its part."""
        return self._reports is not None

    def come(self) -> None:
        """Publishes what the ranks of this machine hold.

        Raises:
            StorageError: It cannot be written.
        """
        self._directory.create_directories()
        self._former_failure = self._failed_epoch(0)
        self._files.remove("failed")
        if self._leads:
            self._epoch = self._first_epoch()  # Of an agent that was here before.
            if self._epoch in ("", self._former_failure):
                self._epoch = secrets.token_hex(8)
        self._publish({what: set() for what in ("epoch", "lists", "manifest")})

    def advance(self) -> bool:
        """Does all that can be done without waiting for other machines.

        Returns:
            Whether the save is on disk.

        Raises:
            CheckpointError: It failed, on this machine or another: that has said why. Or another
                has not come in time.
        """
        try:
            return self._advance()
        except _RemoteError as told:
            failure, unsure = told.failure, told.unsure
            self._leave_epoch(failure if self._leads else None, keep=unsure)
        except Exception as error:
            failure = failure_of(self._files.node, error)
            # Of what this machine has published a manifest, only the first may say that it failed.
            is_bound = self.has_written and not self._leads
            self._leave_epoch(None if is_bound else failure, keep=is_bound or self._is_unsure)
        raise_failure(failure)

    def leave(self) -> None:
        """Takes part no more."""
        self._leave_epoch(None, keep=not self._leads)

    def _advance(self) -> bool:
        files = self._files
        there = files.there()
        if files.committed():
            if self._leads:
                if self._first.sync:
                    self._directory.sync()
                files.clear()
            else:
                files.remove("lists", "manifest", "failed")
            return True
        self._raise_failed(there["failed"].intersection(files.others))
        if not self._leads:
            self._follow()
        if not self.has_written and self._epoch and len(there["lists"]) == files.node_count:
            self._write()
            there = files.there()
        if self._leads and self.has_written and len(there["manifest"]) == files.node_count:
            reports = self._all_reports()
            if reports is not None:
                self._commit(reports)
                return True
        what = "manifest" if self.has_written else "lists"
        if self._is_late():
            absent = sorted(set(files.others) - there[what]) or [0]
            raise self._timed_out(absent)
        self._publish(there)
        return False

    # ---- The steps ----

    def _raise_failed(self, nodes: set[int]) -> None:
        """Raises what another machine says that ends this try, or the save once and for all."""
        for node in sorted(nodes):
            got = self._files.get(node, "failed")
            if got is None:
                continue
            of_epoch = got[0]["epoch"]
            is_new = not self._epoch and of_epoch != self._former_failure
            ends = (self._leads or node == 0) and (of_epoch == self._epoch or is_new)
            if of_epoch is None or ends:
                raise _RemoteError(tuple(got[0]["failure"]), got[0].get("unsure", False))

    def _failed_epoch(self, node: int) -> str | None:
        """The try that a machine says has failed; empty if it says nothing."""
        got = self._files.get(node, "failed")
        return "" if got is None else got[0]["epoch"]

    def _first_epoch(self) -> str:
        """The try that goes on; empty if there is none."""
        got = self._files.get(0, "epoch")
        return "" if got is None else str(got[0]["epoch"])

    def _follow(self) -> None:
        """Finds out which try goes on."""
        goes_on = self._first_epoch()
        if goes_on in ("", self._epoch):
            return
        if self._epoch:  # That one is over, for there is another.
            self._files.remove("manifest")
            self._drop()
        self._epoch = goes_on
        self._wait_anew()

    def _write(self) -> None:
        """Writes the part of each rank of this machine, and says so; or finds that it was done."""
        files = self._files
        self._plan = self._planned()
        if self._plan is None:
            return
        self._before = self._directory.names(), committed_id(self._directory)
        reports = self._reports_of(files.node)  # Of an agent that was here before.
        if reports is None:
            assigned = [self._plan.plan.assignment(header.rank) for header in self._headers]
            reports = write_parts(
                *(list(zip(self._snapshots, assigned, strict=True)), self._directory),
                *(secrets.token_hex(8), self._written),
                io=self._io,
                threads=self._threads,
            )
            if [SlotHeader.of(memory) for memory in self._memories] != self._headers:
                raise CheckpointError(
                    f"cannot commit {self._directory}: a slot was filled anew meanwhile"
                )
            self._publish_manifest(reports)
        self._written = [name for _, (name, _, _), _ in reports]
        self._reports = reports
        self._wait_anew()

    def _planned(self) -> _Plan | None:
        """The plan of all ranks, which every machine makes alike; ``None`` if a list is gone."""
        items: dict[int, bytes] = {}
        paths: dict[int, bytes | None] = {}
        ranks_per_node = 0
        for node in range(self._files.node_count):
            got = self._files.get(node, "lists")
            if got is None:
                return None
            facts, blobs = got
            if facts["save"] != self._save_facts():
                raise CheckpointError(
                    f"cannot save {self._directory}: machine {node} has another save there, "
                    f"{facts['save']} and not {self._save_facts()}"
                )
            ranks_per_node = ranks_per_node or len(facts["ranks"])
            items.update(zip(facts["ranks"], blobs[::2], strict=True))
            for rank, has_paths, of_rank in zip(
                facts["ranks"], facts["has_paths"], blobs[1::2], strict=True
            ):
                paths[rank] = of_rank if has_paths else None
        ranks = sorted(items)
        if ranks != list(range(self._headers[0].world_size)):
            raise CheckpointError(
                f"cannot save {self._directory}: the machines have ranks {ranks} of "
                f"{self._headers[0].world_size}"
            )
        plan = _native.GlobalPlan(
            [items[rank] for rank in ranks], ranks_per_node, split=True, dedup=True
        )
        return _Plan(plan, [paths[rank] for rank in ranks])

    def _all_reports(self) -> list[Report] | None:
        """What all machines have written in this try; ``None`` where one has not."""
        found: list[Report] = []
        for node in range(self._files.node_count):
            reports = self._reports_of(node)
            if reports is None:
                return None
            found += reports
        return found

    def _reports_of(self, node: int) -> list[Report] | None:
        """What a machine has written in this try; ``None`` where it has not said so."""
        got = self._files.get(node, "manifest")
        if got is None or got[0]["epoch"] != self._epoch:
            return None
        facts, blobs = got
        return [
            (rank, (name, nbytes, sums), extents)
            for (rank, name, nbytes), sums, extents in zip(
                facts["files"], blobs[::2], blobs[1::2], strict=True
            )
        ]

    def _commit(self, reports: list[Report]) -> None:
        """Commits; on the first machine."""
        assert self._plan is not None
        save_id = self._files.save_id(self._epoch)
        files = commit_files(self._plan.plan, reports, save_id, self._first, self._plan.paths)
        written = {name: nbytes for _, (name, nbytes, _), _ in reports}
        self._is_unsure = True  # If this fails, it may be there all the same.
        publish(files, written, save_id, self._first, *self._before)
        self._files.clear()

    def _leave_epoch(self, failure: Failure | None, *, keep: bool) -> None:
        """Ends this machine's part.

        Args:
            failure: What the other machines are to know.
            keep: Whether what is written stays, for it may be committed.
        """
        if failure is not None:
            facts = {"epoch": self._epoch, "failure": failure, "unsure": self._is_unsure}
            with contextlib.suppress(CheckpointError):  # What has failed first is raised.
                self._files.put("failed", facts)
        self._files.remove("epoch", "lists")
        if not keep:
            self._files.remove("manifest")
            self._drop()

    def _drop(self) -> None:
        """Removes what this machine has written."""
        remove_files(self._directory, self._written)
        self._written = []
        self._reports = None

    # ---- What is published ----

    def _publish(self, there: dict[str, set[int]]) -> None:
        """Publishes what is not there: somebody may have taken it for left over."""
        node = self._files.node
        if node not in there["lists"]:
            facts = {
                "save": self._save_facts(),
                "ranks": [header.rank for header in self._headers],
                "has_paths": [snapshot.paths is not None for snapshot in self._snapshots],
            }
            blobs = [blob for one in self._snapshots for blob in (one.items, one.paths or b"")]
            self._files.put("lists", facts, blobs)
        if self._leads and node not in there["epoch"]:
            self._files.put("epoch", {"epoch": self._epoch})
        if self._reports is not None and node not in there["manifest"]:
            self._publish_manifest(self._reports)

    def _publish_manifest(self, reports: list[Report]) -> None:
        files = [(rank, name, nbytes) for rank, (name, nbytes, _), _ in reports]
        blobs = [blob for _, (_, _, sums), extents in reports for blob in (sums, extents)]
        self._files.put("manifest", {"epoch": self._epoch, "files": files}, blobs)

    def _save_facts(self) -> list[object]:
        """What all machines must agree on."""
        header = self._headers[0]
        return [header.step, header.world_size, self._first.version, self._first.sync]

    # ---- Waiting ----

    def _wait_anew(self) -> None:
        self._since = time.monotonic()
        self._until = self._since + self._timeout_s

    def _is_late(self) -> bool:
        """Whether it has been long enough."""
        now = time.monotonic()
        if self._until > now + HURRY_S and self._is_hurried():
            self._until = now + HURRY_S
        return now > self._until

    def _timed_out(self, nodes: Sequence[int]) -> CheckpointError:
        machines = f"machine{'s' if len(nodes) > 1 else ''} {' and '.join(map(str, nodes))}"
        return CheckpointError(
            f"cannot save {self._directory}: nothing is heard of {machines} of "
            f"{self._files.node_count} for {time.monotonic() - self._since:.0f} s"
        )
