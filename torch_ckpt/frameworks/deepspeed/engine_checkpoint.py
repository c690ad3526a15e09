"""DeepSpeedCheckpoint: one checkpoint of DeepSpeed that ranks write, and then commit together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence, Set
from pathlib import PurePath
from typing import Any

from torch_ckpt._core import _native
from torch_ckpt.commits.late_names import still_missing
from torch_ckpt.commits.replacement import Replacement, replace_file
from torch_ckpt.commits.temporary import TMP, remove_abandoned, temporary
from torch_ckpt.coordination.current_call import claim_commit
from torch_ckpt.coordination.group import Call, Group
from torch_ckpt.coordination.portable import first_error
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.frameworks.deepspeed.folders import WRITTEN_FILE
from torch_ckpt.options import IoOptions
from torch_ckpt.staging.staged import Staged
from torch_ckpt.storage.archive_writer import write_value

__all__ = ["DeepSpeedCheckpoint"]

_LATEST = "latest"

_Report = tuple[bool, list[tuple[str, str]]]
"""Whether a rank wrote into the folder; hidden and final names of its files elsewhere."""


class DeepSpeedCheckpoint:
    """A checkpoint that is being saved. All ranks construct it, and all call :meth:`finish`.

    The files of a tag are written to a hidden folder beside it. When all files of all ranks are
    durable, the coordinator gives the folder its name, and then replaces ``latest``. A file outside
    the folder of the tag is written under a hidden name, and renamed at the same time. If a folder
    or file is a symbolic link, the link remains, and its target is replaced.

    An error of a rank in :meth:`write` is raised by :meth:`agree` or :meth:`finish`, on all ranks.

    Args:
        group: The ranks.
        save_dir: The directory of the checkpoints.
        tag: Name of the folder.
        save_latest: Whether ``latest`` will name the tag.
        io: Memory budgets and I/O modes.
        timeout_s: Deadline of each exchange between ranks, in seconds.
        niceness: Niceness of the threads that write.

    Raises:
        RankTimeoutError: A rank was late, stuck or dead.
        StorageError: The hidden folder cannot be created.
    """

    def __init__(
        self,
        group: Group,
        save_dir: str | os.PathLike[str],
        tag: str,
        save_latest: bool,
        *,
        io: IoOptions,
        timeout_s: float,
        niceness: int = 0,
    ) -> None:
        self.directory = Location(os.path.abspath(save_dir))
        self.folder = self.directory / tag
        self._place = self.folder.resolved()  # Resolved once, because links in the path may change.
        self._tag, self._saves_latest = tag, save_latest
        self._io, self._niceness = io, niceness
        self._error: BaseException | None = None
        self._waiting: list[tuple[Location, Any, Staged]] = []
        self._has_files = False
        self._beside: list[tuple[Location, Location]] = []
        self._call = group.call(timeout_s)
        self._stack = contextlib.ExitStack()  # Closing it removes uncommitted files.
        self._new: Replacement | None = None  # The folder, on the coordinator.
        with self._call, first_error("in a save of DeepSpeed"):
            name = self._call.all_reduce("beginning", lambda: None, lambda _: self._begin())
        self._folder = self._place.with_name(name)

    def _begin(self) -> str:
        """Creates the hidden folder, on the coordinator."""
        parent = self._place.parent
        for directory in {parent, self.directory}:
            directory.create_directories()
            remove_abandoned(directory)
        new = Replacement(self._place, is_folder=True, name=self.folder)
        self._new = self._stack.enter_context(new)
        return new.unpublished.name

    @property
    def call(self) -> Call:
        """The call of all ranks in which the checkpoint is saved."""
        return self._call

    def write(self, path: str, prepare: Callable[[], tuple[Any, Staged | None]]) -> None:
        """Writes the file of a value; if the value is staged, :meth:`finish` writes it.

        ``prepare`` returns the value, and its snapshot.
        """
        if self._error is not None:
            return
        try:
            target = self._target(path)
            with self._call.current():  # A wait for staging memory uses its deadline.
                value, staged = prepare()
            if staged is None:
                self._write(target, value)
            else:
                self._waiting.append((target, value, staged))
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise  # An interrupt.

    def has(self, path: str) -> bool:
        """Returns whether a path is within the folder."""
        return PurePath(os.path.abspath(path)).is_relative_to(self.folder.path)

    def agree(self, error: Exception | None = None) -> None:
        """Raises the error of the first rank that has one, on all ranks. All ranks call it.

        If so, ends the checkpoint. ``error`` is an error of this rank outside :meth:`write`.
        """

        def own() -> None:
            if failure := self._error or error:
                raise failure

        try:
            with self._call, first_error("in a save of DeepSpeed"):
                self._call.all_reduce("preparing", own, lambda _: None)
        except BaseException:
            self._clear()
            raise

    def finish(self) -> None:
        """Writes the staged values, and commits the checkpoint.

        If a rank has failed, raises the error of the first one on all ranks, and leaves ``latest``
        unchanged.
        """
        try:
            with self._call, first_error("in a save of DeepSpeed"):
                self._call.all_reduce("write", self._write_all, self._commit)
        finally:
            self._clear()

    def abandon(self, error: BaseException) -> None:
        """Ends the checkpoint, on all ranks, with an error of this one."""
        self._call.fail(error)
        self._clear()

    def _clear(self) -> None:
        waiting, self._waiting = self._waiting, []
        for _, _, staged in waiting:
            staged.release()
        self._stack.close()
        for unpublished, _ in self._beside:
            unpublished.discard()

    def _target(self, path: str) -> Location:
        absolute = PurePath(os.path.abspath(path))
        if self.has(path):
            self._has_files = True
            return self._folder / absolute.relative_to(self.folder.path)
        target = Location(absolute).resolved()
        unpublished = temporary(target, TMP)
        self._beside.append((unpublished, target))
        return unpublished

    def _write(self, target: Location, value: Any) -> None:
        # Ranks may write the same file. The last write wins, as in DeepSpeed.
        partial = temporary(target, TMP)
        if self._new is None and PurePath(target.path).is_relative_to(self._folder.path):
            # If one never appears, the error of the write names it.
            still_missing([self._folder], "the coordinator")
        if target.parent != self._folder:
            target.parent.create_directories()
        pool = _native.BufferPool(self._io.buffer_nbytes, self._io.block_nbytes(target.file_system))
        try:
            write_value(partial, value, pool=pool, io=self._io, niceness=self._niceness)
            partial.rename(target)
        except BaseException:
            partial.discard()
            raise

    def _write_all(self) -> _Report:
        if self._error is not None:
            raise self._error
        while self._waiting:
            target, value, staged = self._waiting[0]
            self._write(target, value)
            del value, self._waiting[0]
            staged.release()
        return self._has_files, [(str(one), str(other)) for one, other in self._beside]

    def _commit(self, reports: Sequence[_Report]) -> None:
        assert self._new is not None
        hidden = self._new.unpublished
        _sync(hidden)
        claim_commit()
        if any(has_files for has_files, _ in reports):
            if self._place.is_directory():
                old = set(filter(WRITTEN_FILE.fullmatch, self._place.names()))
                _carry_over(self._place, hidden, old.union(hidden.names()))
            self._new.commit()
        beside = [pair for _, pairs in reports for pair in pairs]
        still_missing([Location(unpublished) for unpublished, _ in beside], "its rank")
        for unpublished, path in beside:
            Location(unpublished).rename(Location(path))
            Location(path).parent.sync()
        if self._saves_latest:
            replace_file((self.directory / _LATEST).resolved(), self._tag.encode())


def _sync(folder: Location) -> None:
    """Syncs a folder and those in it."""
    for name in folder.names():
        if (folder / name).is_directory():
            _sync(folder / name)
    folder.sync()


def _carry_over(old: Location, new: Location, replaced: Set[str] = frozenset()) -> None:
    """Links or copies the contents of the old folder into the new one, except replaced names.

    Programs add files to these folders, and DeepSpeed stores there the state that it offloaded to
    NVMe. The old folder stays valid and unchanged until the new one is renamed to its name.
    """
    new.create_directories()
    for name in old.names():
        if name in replaced:
            continue
        if (old / name).copy_link_to(new / name):
            continue
        if (old / name).is_directory():
            _carry_over(old / name, new / name)
            continue
        try:
            (old / name).link(new / name, sync=True)
        except CheckpointError:  # This file system has no links.
            (old / name).copy_to(new / name)
    new.sync()
