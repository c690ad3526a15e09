"""MachinePart: the files that one machine writes and commits in a save of several machines."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from torch_ckpt._core import _native
from torch_ckpt.agent.persist import (
    FileReport,
    Writing,
    directory_of,
    publish,
    transaction_of,
    values_of,
    write_shares,
)
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.garbage import remove_files
from torch_ckpt.errors import CheckpointError
from torch_ckpt.planning.replica_check import CheckReplicas

__all__ = ["MachinePart"]


class MachinePart:
    """The slots of this machine, in order of rank, and the files that it writes from them.

    Raises CheckpointError if a slot contains no snapshot, or the snapshot has no directory.
    """

    def __init__(
        self, memories: Sequence[_native.Slot], how: Writing, check_replicas: CheckReplicas
    ) -> None:
        self._memories, self._how = memories, how
        self._snapshots = [memory.read() for memory in memories]
        self.headers = [memory.header() for memory in memories]
        self.first = self._snapshots[0]
        """Any snapshot of the save."""
        if not self.first.directory:
            raise CheckpointError("cannot persist the save: it has no directory")
        self.directory = directory_of(self.first)
        """The directory of the checkpoint."""
        self._values = values_of(self._snapshots, check_replicas)
        self.reports: list[FileReport] | None = None
        """The files of this machine; ``None`` until they are written."""
        self._written: list[str] = []
        self.transaction: CheckpointTransaction | None = None
        """The transaction of the epoch, on a machine that commits."""
        self.may_be_committed = False
        """Whether the commit has begun."""

    def facts(self) -> list[object]:
        """Returns the facts of the save that must be equal on all machines."""
        header = self.headers[0]
        return [header.step, header.world_size, self.first.version, self.first.sync]

    def lists(self) -> tuple[dict[str, object], list[bytes]]:
        """Returns the item lists of the ranks, with digests of their values, to be published."""
        facts: dict[str, object] = {
            "save": self.facts(),
            "ranks": [header.rank for header in self.headers],
            "has_paths": [snapshot.paths is not None for snapshot in self._snapshots],
        }
        values = self._values or [b""] * len(self._snapshots)
        blobs = [
            blob
            for snapshot, digests in zip(self._snapshots, values, strict=True)
            for blob in (snapshot.items, snapshot.paths or b"", digests)
        ]
        return facts, blobs

    def open(self, save_id: str) -> CheckpointTransaction:
        """Returns the transaction of an epoch, which has not begun."""
        self.transaction = transaction_of(self.first, save_id)
        return self.transaction

    def write(self, plan: _native.GlobalPlan) -> list[FileReport]:
        """Writes the shares of this machine's ranks."""
        assigned = [plan.assignment(header.rank) for header in self.headers]
        shares = list(zip(self._snapshots, assigned, strict=True))
        reports = write_shares(
            shares, self.directory, secrets.token_hex(8), self._written, self._how
        )
        self.check_slots()
        return reports

    def check_slots(self) -> None:
        """Raises if the slots no longer contain the save, which was discarded or replaced."""
        if [memory.header() for memory in self._memories] != self.headers:
            raise CheckpointError(
                f"cannot commit {self.directory}: a slot was discarded or refilled meanwhile"
            )

    def set_written(self, reports: list[FileReport]) -> None:
        """Sets the files of this machine, which an earlier agent may have written."""
        self._written = [name for _, (name, *_), _ in reports]
        self.reports = reports

    def own(self, files: Mapping[str, int]) -> dict[str, int]:
        """Returns which of the data files of all ranks exist on this machine."""
        prefixes = tuple(f"__{header.rank}_" for header in self.headers)
        return {name: nbytes for name, nbytes in files.items() if name.startswith(prefixes)}

    def commit(self, files: tuple[bytes, bytes], named: Mapping[str, int]) -> None:
        """Commits the metadata and the index in the directory of this machine.

        ``named`` are the data files that the index names here, and their lengths.
        """
        self.may_be_committed = True  # Even if `publish` fails.
        assert self.transaction is not None
        publish(self.transaction, files, named)
        remove_files(self.directory, set(self._written).difference(named))

    def finish_commit(self, save_id: str) -> None:
        """Completes the commit of an earlier agent, which may have ended before the last step."""
        if self.first.sync:
            self.directory.sync()
        self.open(save_id).replace_small_files()

    def discard(self) -> None:
        """Removes the data files and the pending file of this machine."""
        remove_files(self.directory, self._written)
        self._written, self.reports = [], None
        transaction, self.transaction = self.transaction, None
        if transaction is not None:
            transaction.discard_pending()
