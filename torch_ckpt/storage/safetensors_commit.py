"""Publishes a model's files in a directory: what is found there is the old model or the new one.

Loaders of Hugging Face's libraries take ``model.safetensors`` if it is there, and otherwise the
files that ``model.safetensors.index.json`` names; some look for the latter first. So a model is
published by a rename onto one of these two names, and then the other one goes. Until that is done a
directory may have both: the one leads to the old model and the other to the new one, each whole.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Collection

from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.safetensors_layout import ModelLayout
from torch_ckpt.storage.gc import remove_files

__all__ = ["COMMITTED_NAMES", "pending_names", "publish", "stale_model_files"]

_MODEL = "model.safetensors"
_INDEX = "model.safetensors.index.json"
COMMITTED_NAMES = frozenset({_MODEL, _INDEX})
"""Of these, a directory that holds a model has one."""

_SHARD = re.compile(r"model-([0-9a-f]{16}-)?\d{5,}-of-\d{5,}\.safetensors")
_PENDING = re.compile(
    r"\.model(-\d{5,}-of-\d{5,}|)\.safetensors(\.index\.json)?\.[0-9a-f]{16}\.tmp"
)


def pending_names(count: int, save_id: str) -> list[str]:
    """What the files of a model are called until it is published, when nobody looks for these."""
    return [f".{name}.{save_id}.tmp" for name in _names(count)]


def _names(count: int, mark: str = "") -> list[str]:
    if count == 1:
        return [_MODEL]
    return [
        f"model-{mark}{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    ]


def publish(directory: Location, layout: ModelLayout, save_id: str, *, sync: bool) -> list[str]:
    """Publishes files that all ranks have written and synced, in place of a model that was there.

      1. Files of a model of several get names that are free: the usual ones, or where the old model
         has one of these, others with ``save_id`` in them. The index is written under a name of its
         own. All is synced, and so are the directory and those above it.
      2. The index, or the only file, is renamed to its usual name: the commit. The directory is
         synced again.
      3. If the old model had the other of the two names, that one is removed.

    Returns:
        The names of the new model's files, in order.

    Raises:
        StorageError: Up to the rename, the old model is in place and nothing of the new one is
            left. Afterwards either may be found, and nothing is removed.
    """
    pending = pending_names(len(layout.files), save_id)
    taken = set(directory.names())
    names = _names(len(pending))
    last, commit_as, other = pending[0], _MODEL, _INDEX
    if len(names) > 1:
        last, commit_as, other = f".{_INDEX}.{save_id}.tmp", _INDEX, _MODEL
        if not taken.isdisjoint(names):
            names = _names(len(pending), f"{save_id}-")
    try:
        if len(names) > 1:
            for before, after in zip(pending, names, strict=True):
                (directory / before).rename(directory / after)
            (directory / last).write(layout.index(names), sync=sync)
        if sync:
            _sync_with_folders_above(directory)
    except BaseException:
        remove_files(directory, {last, *pending, *names} - COMMITTED_NAMES)
        raise
    try:
        (directory / last).rename(directory / commit_as)
    except BaseException:
        # A file server may have renamed it and lost the answer: then the rest is needed.
        with contextlib.suppress(CheckpointError):
            (directory / last).remove()
            remove_files(directory, set(names) - COMMITTED_NAMES)
        raise
    if sync:
        directory.sync()
    if other in taken:
        (directory / other).remove()
        if sync:  # Before the files that it names are removed.
            directory.sync()
    return names


def stale_model_files(found: Collection[str], current: Collection[str]) -> list[str]:
    """Names of files of models that were replaced, or whose save has failed.

    Args:
        found: What was there before the save began.
        current: Files of the model that is published now.
    """
    return [
        name
        for name in found
        if name not in current and (_SHARD.fullmatch(name) or _PENDING.fullmatch(name))
    ]


def _sync_with_folders_above(directory: Location) -> None:
    directory.sync()
    for folder in directory.parents:
        try:
            folder.sync()
        except StorageError as error:
            # What this process may not open is somebody else's, and older.
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise
