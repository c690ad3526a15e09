"""DeltaTransaction: the files of a published delta, committed by its ``delta.json``.

The data files have the id of their save in their names. So a save that was believed dead never
writes to a file of another one. A directory has one committed delta, or none.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Collection

from torch_ckpt.commits.garbage import end_saves, remove_files
from torch_ckpt.commits.probe import created
from torch_ckpt.commits.transaction import Transaction, rename, sync_with_folders_above
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.filesystems.store_client import PENDING as UNPUBLISHED

__all__ = ["DELTA", "DeltaTransaction", "data_file"]

DELTA = "delta.json"
"""The file whose appearance is the commit."""

_PENDING = r"\.delta\.json\.[0-9a-f]{16}\.tmp"
_STALE = re.compile(
    rf"rank-\d+-[0-9a-f]{{16}}\.delta|{_PENDING}"
    rf"|{re.escape(UNPUBLISHED)}[0-9a-f]{{16}}(-(rank-|\.?delta\.).*)?"
)


def data_file(rank: int, save_id: str) -> str:
    """Returns the name of the data file of a rank."""
    return f"rank-{rank}-{save_id}.delta"


class DeltaTransaction(Transaction):
    """The files of a delta; see :class:`Transaction`."""

    commit_name = DELTA
    committed_names = frozenset({DELTA})
    pending_pattern = _PENDING

    def begin(self, *, is_empty: bool = False) -> None:
        """Begins the delta as :meth:`Transaction.begin`.

        With ``is_empty``, the caller knows that the target has no files, and it is not listed.
        """
        if not is_empty:
            super().begin()
            return
        self.commits = True
        with created(self.target, self.sync) as is_new:
            self._pending = self._create_pending()
        self._has_created = is_new

    def _create_pending(self) -> Location:
        pending = self.target / f".{DELTA}.{self.save_id}.tmp"
        pending.write(b"", sync=False)
        return pending

    def commit(self, contents: bytes, files: Collection[str]) -> None:
        """Makes the delta appear, and removes what it replaces and what failed saves have left.

        ``contents`` are those of ``delta.json``, and ``files`` the names of the data files, which
        are complete, and synced if :attr:`sync`. Raises StorageError if another save was committed
        meanwhile and has removed files of this one, or if a call failed. Then it is unknown
        whether the delta is committed.
        """
        pending, self._pending = self._pending, None
        assert pending is not None
        is_conditional = self.target.file_system.publishes_by_condition
        try:
            if is_conditional:
                path = (self.target / DELTA).path
                self.target.file_system.publish(path, contents, self.found.version)
            else:
                self._rename(pending, contents, files)
        except NotFoundError as error:
            raise self.files_are_missing(error) from error
        except StorageError as error:
            if error.errno == errno.EEXIST and is_conditional:
                remove_files(self.target, [*files, pending.name])
                raise self.files_are_missing(error) from error
            raise
        self._is_committed = True
        if is_conditional:
            pending.discard()
        stale = sorted(filter(_STALE.fullmatch, self.found.names.difference(files)))
        with contextlib.suppress(CheckpointError):  # The commit stands; the next save tries again.
            if stale and (end_saves(self.target, self.found.pending) or self._is(contents)):
                remove_files(self.target, stale)

    def _rename(self, pending: Location, contents: bytes, files: Collection[str]) -> None:
        try:
            pending.write(contents, sync=self.sync, update=True)
            if self.sync:
                sync_with_folders_above(self.target)
            rename(pending, self.target / DELTA)
        except BaseException:
            # If the pending file is gone, a server may have renamed it and lost the reply.
            with contextlib.suppress(CheckpointError):
                pending.remove()
                remove_files(self.target, files)
            raise
        if self.sync:
            self.target.sync()

    def _is(self, contents: bytes) -> bool:
        return (self.target / DELTA).read() == contents
