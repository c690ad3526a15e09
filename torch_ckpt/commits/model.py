"""ModelTransaction: the safetensors files of a model, which appear by their index.

Hugging Face's loaders open ``model.safetensors`` if it exists, and otherwise the files that
``model.safetensors.index.json`` names. Some loaders open the index first. So the commit renames a
file to one of these two names, and then removes the other name. In between, a directory may have
both names: one leads to the complete old model, the other to the complete new model.

A store cannot rename. There, file names contain the id of the save, so that the files of an earlier
model remain. The index is written last, on the condition that it has not changed since the save
began: this is the commit. If the directory has no model yet, a single file needs no index:
``model.safetensors`` appears when it is complete. This is unconditional, and is not the last call.
So a save that must not replace a model, or that writes another file before its commit, writes an
index nevertheless.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Collection, Iterable, Sequence

from torch_ckpt.commits.garbage import end_saves, remove_files
from torch_ckpt.commits.transaction import Transaction, rename, sync_with_folders_above
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.filesystems.store_client import PENDING as UNPUBLISHED
from torch_ckpt.formats.safetensors.layout import ModelLayout

__all__ = ["ModelTransaction", "pending_names", "relay_of"]

_MODEL = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_SHARD = r"(shard-\d{5,}-)?model-([0-9a-f]{16}-)?\d{5,}-of-\d{5,}\.safetensors"
_PENDING = (
    r"\.model(-\d{5,}-of-\d{5,}|)\.safetensors(\.index\.json)?\.[0-9a-f]{16}\.tmp"
    rf"|\.model-[0-9a-f]{{16}}\.checkpoint|{re.escape(UNPUBLISHED)}[0-9a-f]{{16}}-model[-.].*"
)


def pending_names(count: int, save_id: str) -> list[str]:
    """Returns the names of a model's files before the commit. No loader opens these names."""
    return [f".{name}.{save_id}.tmp" for name in ([_MODEL] if count == 1 else _shard_names(count))]


def relay_of(directory: Location, save_id: str) -> Location:
    """Returns the directory of a checkpoint that becomes a model, on a store."""
    return directory / f".model-{save_id}.checkpoint"


def _shard_names(count: int, infix: str = "") -> list[str]:
    """Returns the names of the files of a model with an index."""
    return [
        f"model-{infix}{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    ]


class ModelTransaction(Transaction):
    """The files of a model; see :class:`Transaction`.

    Attributes:
        files: The names under which the files are written, in order. On a store, these are their
            final names. On a file system, no loader opens them, and the commit renames them.
    """

    commit_name = _INDEX
    committed_names = frozenset({_MODEL, _INDEX})
    pending_pattern = r"\.model\.safetensors(\.index\.json)?\.[0-9a-f]{16}\.tmp"

    files: Sequence[str] = ()
    _final_names: Sequence[str] = ()
    _states_boxes = False

    def begin(
        self,
        count: int = 1,
        *,
        usual: Sequence[str] = (),
        states_boxes: bool = False,
        may_appear: bool = True,
    ) -> None:
        """Begins the save of a model of ``count`` files; creates them, empty, on a file system.

        Args:
            count: Number of files.
            may_appear: Whether a file may appear before :meth:`commit`, once it is complete.
            usual: The final names of the files, if they differ from Hugging Face's.
            states_boxes: Whether the files state boxes of tensors, for DCP's reader. They have
                ``usual`` names and no index. DCP's reader merges all files of a directory. So the
                commit is atomic only for one file that replaces one file of this name. Otherwise a
                crash can leave files of the old model beside files of the new one.
                :class:`FastReader` refuses a directory in which they overlap.

        Raises as :meth:`Transaction.begin`.
        """
        self._final_names, self._states_boxes = usual, states_boxes
        if states_boxes:
            self.committed_names = self.committed_names.union(usual)
        self.files = pending_names(count, self.save_id)
        super().begin()
        if self._is_on_store:
            is_first = count == 1 and not self.replaces and self._may_replace
            self.files = (
                [_MODEL] if is_first and may_appear else _shard_names(count, f"{self.save_id}-")
            )

    @property
    def _is_on_store(self) -> bool:
        return not self.target.file_system.writes_at_offsets

    @property
    def _pending_index(self) -> Location:
        return self.target / f".{_INDEX}.{self.save_id}.tmp"

    def _create_pending(self) -> Location:
        has_index = len(self.files) > 1 or self._is_on_store
        has_index = has_index or (bool(self._final_names) and not self._states_boxes)
        pending = self._pending_index if has_index else self.target / self.files[0]
        files = [] if self._is_on_store else [self.target / name for name in self.files]
        try:
            for path in [pending, *(path for path in files if path != pending)]:
                path.write(b"", sync=False)
        except BaseException:
            remove_files(self.target, [*self.files, pending.name])
            raise
        return pending

    def check(self, files: Collection[str]) -> None:
        """Checks that all files exist, and no model that must not be replaced."""
        if list(files) != [_MODEL]:
            super().check(files)
        elif (self.target / _INDEX).exists():  # It appeared after the model had been written.
            (self.target / _MODEL).discard()
            raise StorageError(
                f"cannot save to {self._name}: another save or program has written {_INDEX} there "
                "meanwhile"
            )

    # ---- Commit ----

    def commit(self, layout: ModelLayout) -> list[str]:
        """Makes the files appear, removes those that they replace, and returns their names.

        Requires: all files are complete, and synced if :attr:`sync`.

        Raises StorageError if another save was committed meanwhile and has removed files of this
        one, or if a call failed. After such an error, readers may find either model.
        """
        pending, self._pending = self._pending, None
        assert pending is not None
        try:
            if self._is_on_store:
                names = self._publish_streams(layout, pending)
            else:
                names = self._publish_boxes() if self._states_boxes else self._publish(layout)
        except NotFoundError as error:
            raise self.files_are_missing(error) from error
        except StorageError as error:
            if error.errno == errno.EEXIST and self._is_on_store:
                raise self.files_are_missing(error) from error
            raise
        self._is_committed = True
        return names

    def _publish(self, layout: ModelLayout) -> list[str]:
        """Publishes the files of a model on a file system.

          1. If the model has several files or ``usual`` names, they get unused names: the usual
             names, or names with the id of the save if the directory has a model or one of the
             usual names. The index is written under a pending name. The index, the directory and
             its parents are synced.
          2. The index, or the only file, is renamed to its usual name. This is the commit. The
             directory is synced again.
          3. If the old model had the other of the two names, that file is removed. So are the files
             of replaced models and of failed saves.

        If a step before the rename fails, the old model stays and all files of the new model are
        removed. If a step after the rename fails, readers may find either model, and no file is
        removed.
        """
        directory, pending = self.target, self.files
        existing = set(directory.names())
        names, last, commit_as, other = [_MODEL], pending[0], _MODEL, _INDEX
        try:
            if self._final_names or len(pending) > 1:
                last, commit_as, other = self._pending_index.name, _INDEX, _MODEL
                names = self._unused_names(
                    existing, self._final_names or _shard_names(len(pending))
                )
                for before, after in zip(pending, names, strict=True):
                    (directory / before).rename(directory / after)
                (directory / last).write(layout.index(names), sync=self.sync, update=True)
            if self.sync:
                sync_with_folders_above(directory)
            other_before = (directory / other).identity()
            rename(directory / last, directory / commit_as)
        except BaseException:
            remove_files(directory, set(pending) - {last})
            # Not if the last file is gone. Either a file server has renamed it and lost the reply,
            # and the files are published. Or another save has removed all files of this one, and a
            # third save may already use the names.
            with contextlib.suppress(CheckpointError):
                (directory / last).remove()
                remove_files(directory, set(names) - self.committed_names)
            raise
        if self.sync:
            directory.sync()
        # If another save may have committed meanwhile, these may be its files.
        is_last = end_saves(directory, self.found.pending)
        is_older = is_last and other in existing
        if other_before is not None:
            is_older = other_before == (directory / other).identity()
        if is_older:
            (directory / other).remove()
            if self.sync:  # The name must be gone before the files of the old model are removed.
                directory.sync()
        if is_last:
            self._remove_stale(names)
        return names

    def _publish_boxes(self) -> list[str]:
        """Publishes files that state boxes, under their usual names and without an index."""
        directory, names = self.target, list(self._final_names)
        try:
            if self.sync:
                sync_with_folders_above(directory)
            if len(names) > 1:
                self._pending_index.remove()
            for before, after in zip(self.files, names, strict=True):
                rename(directory / before, directory / after)
        except BaseException:
            remove_files(directory, [*self.files, self._pending_index.name])
            raise
        if self.sync:
            directory.sync()
        if end_saves(directory, self.found.pending):
            remove_files(directory, {_MODEL, _INDEX} & self.found.names)
            self._remove_stale(names)
        return names

    def _publish_streams(self, layout: ModelLayout, pending: Location) -> list[str]:
        """Publishes the files of a model on a store, where they already have their final names."""
        directory = self.target
        other, index = (_INDEX, b"")
        if self.files != [_MODEL]:
            other, index = (_MODEL, layout.index(self.files))
        try:
            other_before = (directory / other).identity()
        except CheckpointError:
            remove_files(directory, {*self.files, pending.name} - self.committed_names)
            raise
        if index:
            try:
                file_system = directory.file_system
                file_system.publish((directory / _INDEX).path, index, self.found.version)
            except StorageError as error:
                if error.errno == errno.EEXIST:  # Else it may have been published.
                    remove_files(directory, [*self.files, pending.name])
                raise
            self._check_is_only(index)
        pending.discard()
        end_saves(directory, self.found.pending)
        # If this fails, the save fails: some loaders open the other name first.
        if other in self.found.names and other_before == (directory / other).identity():
            (directory / other).remove()
        with contextlib.suppress(CheckpointError):  # The commit stands; the next save tries again.
            if not index or (directory / _INDEX).read() == index:
                self._remove_stale(self.files)
        return list(self.files)

    def _check_is_only(self, index: bytes) -> None:
        """Withdraws a model that must not replace one, if a model without an index has appeared.

        The other save checks for an index afterwards, so at most one of the two remains.
        """
        if self._may_replace or not (self.target / _MODEL).exists():
            return
        if (self.target / _INDEX).read() == index:
            (self.target / _INDEX).remove()
            remove_files(self.target, self.files)
        self._check_may_replace([_MODEL])

    def _unused_names(self, existing: Collection[str], usual: Sequence[str]) -> list[str]:
        """Returns names for the files of a model that no other save uses.

        The usual names are for the first model: a save that has replaced a model with these names,
        and has not removed its files yet, would otherwise remove those of a newer model.
        """
        if self.committed_names.union(usual).isdisjoint(existing):
            try:
                (self.target / usual[0]).write(b"", sync=False)
                return list(usual)
            except StorageError as error:
                if error.errno != errno.EEXIST:
                    raise
        return [name.replace("model-", f"model-{self.save_id}-", 1) for name in usual]

    def _remove_stale(self, current: Collection[str]) -> None:
        """Removes the files of replaced models and of failed saves, pending ones first."""
        is_stale = re.compile(f"{_SHARD}|{_PENDING}").fullmatch
        for name in sorted(filter(is_stale, self.found.names.difference(current))):
            with contextlib.suppress(CheckpointError):
                (self.target / name).remove_all()

    # ---- Failure ----

    def remove(self, files: Collection[str], *, may_others_begin: bool) -> None:
        """Removes files as :class:`Transaction`, or empties files that others may yet open."""
        if not may_others_begin:
            super().remove(files, may_others_begin=may_others_begin)
            return
        for name in files:
            try:
                (self.target / name).replace(b"", sync=False)
            except CheckpointError:  # The disk has no space for another name.
                (self.target / name).discard()

    def abandon(self, files: Iterable[str] = ()) -> None:
        """Ends the save on this process, unless it is committed: as in :class:`Transaction`."""
        if self._pending is not None:
            remove_files(self.target, set(self.files) - self.committed_names)
        # On a store, a model without an index is whole, and may be that of another save.
        super().abandon(set(files) - self.committed_names)
