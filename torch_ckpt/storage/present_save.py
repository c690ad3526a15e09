"""PresentSave: the present or last save of a writer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.commits.transaction import Claim, Transaction
from torch_ckpt.coordination.current_call import current_call
from torch_ckpt.planning.item_views import GlobalPlanEntry
from torch_ckpt.storage.progress import Phases, is_first
from torch_ckpt.storage.rank_files import RankFiles

__all__ = ["PresentSave"]


@dataclass(eq=False)
class PresentSave:
    """One save of a writer on one rank: its transaction, and facts for the log.

    Attributes:
        new_transaction: Creates the transaction, with the options of the writer. ``can_hide`` is
            known only when the save begins.
        files: The files of this rank.
        rank: This rank; ``None`` if it is the only one.
        commits: Whether this rank commits the save.
        ranks: Number of ranks that save together; 0 except on the coordinator.
        call: Weak reference to the call that saves; ``None`` within DCP's own functions.
        phases: Times of the phases, which are logged at the end.
        plan: On the coordinator, if all ranks have planned in columns.
    """

    new_transaction: Callable[..., Transaction]
    files: RankFiles
    rank: int | None
    commits: bool = False
    ranks: int = 0
    call: Callable[[], object] | None = None
    phases: Phases = field(default_factory=lambda: Phases("planning"))
    plan: GlobalPlanEntry | None = None
    _transaction: Transaction | None = None

    @property
    def transaction(self) -> Transaction:
        """The transaction that makes the files of the save appear. It may not have begun."""
        if self._transaction is None:
            self._transaction = self.new_transaction()
        return self._transaction

    @property
    def checkpoint(self) -> CheckpointTransaction:
        """The transaction of a checkpoint."""
        assert isinstance(self.transaction, CheckpointTransaction)
        return self.transaction

    def begin(self, *, can_hide: bool = False) -> None:
        """Begins a checkpoint on the rank that commits, before any rank writes.

        Called once the plans of all ranks have arrived. By then, each rank has removed the remains
        of an earlier failed save, which may include the directory.
        """
        self._transaction = self.new_transaction(can_hide=can_hide)
        self._transaction.begin()
        if not self.rank:
            self._transaction.warn_if_replacing()

    def begin_late(self) -> None:
        """Begins the save if a subclass of the writer has replaced ``prepare_global_plan``."""
        if self.commits and not self.transaction.has_begun:
            self.begin()

    def join(self, claim: Claim | None) -> None:
        """Begins to write on a rank that does not commit; see :meth:`Transaction.join`."""
        if not self.commits:
            self.transaction.join(claim, self.rank)

    def abandon(
        self, names: Iterable[str], error: BaseException, *, may_others_begin: bool = False
    ) -> None:
        """Removes the files of a save that has failed with ``error``.

        With ``may_others_begin``, retains files that other ranks may still search: without them,
        they would wait, and conclude that the directory is not shared. Raises the error of the call
        if another rank has failed and removed its files first, and StorageError if files are
        missing for an unknown reason.
        """
        transaction, names = self.transaction, list(names)
        is_ended = transaction.is_ended(names, error)
        transaction.remove(names, may_others_begin=may_others_begin and not is_ended)
        if not may_others_begin:
            self.end_failed()
        if is_ended:
            raise transaction.files_are_missing(error) from error

    def end_failed(self) -> None:
        """Ends the save if this process knows that it failed; see :meth:`Transaction.abandon`."""
        finished, self.files.finished = self.files.finished, []
        call, transaction = current_call(), self._transaction
        # A call that fails before its save begins does not concern the previous save.
        is_present = call is not None and self.call is not None and self.call() is call
        is_uncommitted = call is not None and is_present and call.is_uncommitted
        if transaction is not None and (transaction.commits or is_uncommitted):
            transaction.abandon(finished if is_uncommitted else ())
            self._transaction = None

    def log(self, nbytes: int, *, is_staged: bool) -> None:
        """Logs that the save is committed."""
        details = [f"{self.ranks} ranks" if self.ranks > 1 else "1 rank"]
        if self.files.io_mode is not None:
            details.append(str(self.files.io_mode))
        if is_staged:
            details.append("in the background")
        target, is_logged = self.transaction.target, is_first(self.ranks)
        self.phases.end("saved", nbytes, target, *details, is_first=is_logged)
