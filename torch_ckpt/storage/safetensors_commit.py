"""Publishes the files of a model: at any time, the directory has the old model or the new one.

Hugging Face's loaders open ``model.safetensors`` if it exists, and otherwise the files that
``model.safetensors.index.json`` names. Some loaders open the index first. So the commit renames a
file to one of these two names, and then removes the other name. In between, a directory may have
both names: one leads to the complete old model, the other to the complete new model. For several
saves at once, see :mod:`torch_ckpt.storage.gc`; for a store without renames,
:mod:`torch_ckpt.storage.safetensors_streams`.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Collection, Sequence

from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.filesystems.store_client import PENDING as UNPUBLISHED
from torch_ckpt.formats.safetensors.layout import ModelLayout
from torch_ckpt.storage.gc import Found, end_saves, remove_files

__all__ = [
    "COMMITTED_NAMES",
    "COMMIT_PATTERN",
    "INDEX",
    "MODEL",
    "RELAY",
    "begin_model",
    "pending_index",
    "pending_names",
    "publish_boxes",
    "publish_model",
    "remove_stale",
    "shard_names",
]

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
COMMITTED_NAMES = frozenset({MODEL, INDEX})
"""A directory with a model has a file of one of these names."""

COMMIT_PATTERN = r"\.model\.safetensors(\.index\.json)?\.[0-9a-f]{16}\.tmp"
"""Pattern of the pending file of a save, which its commit renames; see :mod:`.gc`."""

RELAY = ".model-{}.checkpoint"
"""Name of the folder, with a save id, of a checkpoint that becomes a model on a store."""

_SHARD = r"(shard-\d{5,}-)?model-([0-9a-f]{16}-)?\d{5,}-of-\d{5,}\.safetensors"
_PENDING = (
    r"\.model(-\d{5,}-of-\d{5,}|)\.safetensors(\.index\.json)?\.[0-9a-f]{16}\.tmp"
    rf"|\.model-[0-9a-f]{{16}}\.checkpoint|{re.escape(UNPUBLISHED)}[0-9a-f]{{16}}-model[-.].*"
)


def pending_names(count: int, save_id: str) -> list[str]:
    """Returns the names of a model's files until the commit. No loader opens these names."""
    return [f".{name}.{save_id}.tmp" for name in _names(count)]


def begin_model(
    directory: Location, count: int, save_id: str, *, has_index: bool = False
) -> Location:
    """Creates a model's files, empty, and returns the pending file, which the commit renames.

    A model of several files has an index, and one of a single file only with ``has_index``.
    """
    pending = pending_names(count, save_id)
    commit_name = pending_index(save_id) if has_index or count > 1 else pending[0]
    for name in dict.fromkeys([commit_name, *pending]):
        (directory / name).write(b"", sync=False)
    return directory / commit_name


def pending_index(save_id: str) -> str:
    """Returns the name of a model's index until the commit."""
    return f".{INDEX}.{save_id}.tmp"


def _names(count: int) -> list[str]:
    return [MODEL] if count == 1 else shard_names(count)


def shard_names(count: int, infix: str = "") -> list[str]:
    """Returns the names of the files of a model with an index."""
    return [
        f"model-{infix}{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    ]


def publish_model(
    directory: Location,
    layout: ModelLayout,
    save_id: str,
    found: Found,
    *,
    sync: bool,
    usual: Sequence[str] = (),
) -> list[str]:
    """Publishes the pending files of a model, replaces the old model, and returns the new names.

    Requires: all ranks have written and synced their files. ``usual`` has the names of the files of
    a model with an index, whatever their number, if they are not those of :func:`shard_names`.

      1. If the model has several files or ``usual`` names, they get unused names: the usual names,
         or names with ``save_id`` if the directory has one of the usual names. The index is written
         under a pending name. The index, the directory and its parents are synced.
      2. The index, or the only file, is renamed to its usual name. This is the commit. The
         directory is synced again.
      3. If the old model had the other of the two names, that file is removed. So are the files of
         replaced models and of failed saves.

    Raises NotFoundError if another save was committed meanwhile, and has removed files of this one,
    and StorageError if a step failed. Before the rename in step 2, the old model stays and all
    files of the new model are removed. After it, either model may be found, and no file is removed.
    """
    pending = pending_names(len(layout.files), save_id)
    existing = set(directory.names())
    names, last, commit_as, other = [MODEL], pending[0], MODEL, INDEX
    try:
        if usual or len(pending) > 1:
            last, commit_as, other = pending_index(save_id), INDEX, MODEL
            usual = usual or shard_names(len(pending))
            names = _unused_names(directory, existing, usual, save_id)
            for before, after in zip(pending, names, strict=True):
                (directory / before).rename(directory / after)
            (directory / last).write(layout.index(names), sync=sync, update=True)
        if sync:
            _sync_with_folders_above(directory)
        other_before = (directory / other).identity()
        _rename(directory / last, directory / commit_as)
    except BaseException:
        remove_files(directory, set(pending) - {last})
        # Not if the last file is gone. Either a file server has renamed it and lost the reply, and
        # the files are published. Or another save has removed all files of this one, and the names
        # may be those of a third save by now.
        with contextlib.suppress(CheckpointError):
            (directory / last).remove()
            remove_files(directory, set(names) - COMMITTED_NAMES)
        raise
    if sync:
        directory.sync()
    # If another save may have been committed meanwhile, these files may be its own.
    is_last = end_saves(directory, found.pending)
    is_older = other_before is not None and other_before == (directory / other).identity()
    if (is_last and other in existing) or is_older:
        (directory / other).remove()
        if sync:  # The name must be gone before the files of the old model are removed.
            directory.sync()
    if is_last:
        remove_stale(directory, found.names, names)
    return names


def publish_boxes(
    directory: Location, names: Sequence[str], save_id: str, found: Found, *, sync: bool
) -> list[str]:
    """Publishes the pending files of a model under these names, without an index; returns them.

    DCP's reader merges all files of a directory. So the commit is atomic only for one file that
    replaces one file of this name. Otherwise a crash can leave files of the old model beside files
    of the new one. :class:`FastReader` refuses a directory in which they overlap.

    Raises NotFoundError if another save was committed meanwhile, and has removed files of this one.
    """
    pending = pending_names(len(names), save_id)
    if sync:
        _sync_with_folders_above(directory)
    if len(names) > 1:
        (directory / pending_index(save_id)).remove()
    for before, after in zip(pending, names, strict=True):
        _rename(directory / before, directory / after)
    if sync:
        directory.sync()
    if end_saves(directory, found.pending):
        remove_files(directory, COMMITTED_NAMES & found.names)
        remove_stale(directory, found.names, names)
    return list(names)


def _rename(path: Location, to: Location) -> None:
    """Renames a file; succeeds also if a network file system has lost the reply, and asks again."""
    identity = path.identity()
    try:
        path.rename(to)
        path.discard()  # If both are links to one file, the rename has changed nothing.
    except NotFoundError:
        if identity is None or identity != to.identity():
            raise


def _unused_names(
    directory: Location, existing: Collection[str], usual: Sequence[str], save_id: str
) -> list[str]:
    """Returns names for the files of a model, which no other save uses."""
    if set(usual).isdisjoint(existing):
        try:
            (directory / usual[0]).write(b"", sync=False)
            return list(usual)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
    return [name.replace("model-", f"model-{save_id}-", 1) for name in usual]


def remove_stale(directory: Location, found: Collection[str], current: Collection[str]) -> None:
    """Removes the files of replaced models and of failed saves, pending ones first."""
    stale = filter(re.compile(f"{_SHARD}|{_PENDING}").fullmatch, set(found).difference(current))
    for name in sorted(stale):
        with contextlib.suppress(CheckpointError):
            (directory / name).remove_all()


def _sync_with_folders_above(directory: Location) -> None:
    directory.sync()
    for folder in directory.parents:
        try:
            folder.sync()
        except StorageError as error:
            # A directory that this process must not open was not created by this save.
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
