"""Opens the committed metadata of a checkpoint, and the index that is sealed to them.

Two witnesses say that metadata have an index: the trailer that follows the pickle, and a mark
inside it, which is looked for where there is no trailer, so that damage to that is not taken for
metadata of stock DCP.

Importing this module does not import torch, and nothing here unpickles: a damaged pickle may ask
for any amount of memory.
"""

from __future__ import annotations

import contextlib
import os
import re

from torch_ckpt._core import _native
from torch_ckpt.errors import CorruptionError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location

__all__ = ["INDEX_MARK", "committed_id", "open_committed"]

INDEX_MARK = "torch_ckpt: sealed by an index"
"""Stands in ``storage_meta.modules`` of metadata that were committed with an index."""

_NAMES_TRIED = 8  # Against damage to the name itself.

# As pickle writes it, whole: with its length, in one byte or four.
_PICKLED_MARK = re.compile(
    rb"(\x8c%c|X%c\0\0\0)%s" % (len(INDEX_MARK), len(INDEX_MARK), re.escape(INDEX_MARK.encode()))
)


def open_committed(
    directory: Location, prefix: str, *, verify: bool = True
) -> tuple[_native.MetadataFile, _native.Index | None]:
    """Opens the metadata of this prefix: none, or ``__0`` for those that rank 0 saved alone.

    Args:
        directory: The checkpoint.
        prefix: What the names of the metadata and of their index begin with.
        verify: Whether metadata that have lost their index are refused.

    Returns:
        The metadata, of which little has been read, and the index that is sealed to them, if there
        is one.

    Raises:
        NotFoundError: Nothing is committed there.
        CorruptionError: The metadata or their index are damaged, or one of them is gone.
        UnsupportedError: Their index is of a newer version of this package.
    """
    path = directory / f"{prefix}.metadata"

    def open_them() -> tuple[
        _native.MetadataFile, _native.Index | None, _native.Index | None, bool, str
    ]:
        return _native.open_checkpoint(
            directory.file_system, directory.path, path.name, f"{prefix}.index"
        )

    try:
        opened = open_them()
    except NotFoundError as error:
        if not (directory / f"{prefix}.index").exists():
            raise NotFoundError(
                f"no checkpoint is committed in {directory}: there is no {path.name}"
            ) from error
        # A commit gives it that name after that of the metadata, perhaps only just now.
        try:
            opened = open_them()
        except NotFoundError:
            raise CorruptionError(
                f"the checkpoint in {directory} has lost its metadata: {prefix}.index is there, "
                f"{path.name} is not"
            ) from error
    metadata, index, other, newer, why = opened
    if index is None and verify:
        _check_unsealed(metadata, other, newer=newer, why=why, where=str(path))
    return metadata, index


def committed_id(directory: Location) -> str | None:
    """The save id of what is committed; ``None`` where that is nothing of this package's.

    Raises:
        StorageError: It cannot be read.
    """
    with contextlib.suppress(CorruptionError, NotFoundError, UnsupportedError):
        _, index = open_committed(directory, "", verify=False)
        return None if index is None else index.save_id
    return None


def _check_unsealed(
    metadata: _native.MetadataFile,
    other: _native.Index | None,
    *,
    newer: bool,
    why: str,
    where: str,
) -> None:
    """Tells metadata that never had an index from those whose index is damaged or gone.

    Args:
        metadata: Those which no index is sealed to.
        other: An index found in its place, sealed to other metadata.
        newer: Whether the index there is of a version that this build does not read.
        why: Why no index can be read, for the message.
        where: The metadata's path, for the message.

    Raises:
        CorruptionError: They had one, so that bytes could not be checked as they should be.
        UnsupportedError: They have one that a newer version of this package has written.
    """
    way_out = "FastReader(verify=False) loads what metadata alone can tell, unchecked"
    if metadata.has_trailer:
        pickled = None
        marked = True
    else:
        pickled = metadata.read_pickle()
        marked = _PICKLED_MARK.search(pickled) is not None
        newer = newer and marked
    if other is not None:
        # A data file's name never recurs: the metadata of a newer save have none of an older one's,
        # and those of the same save have all.
        names = (other.file_name(n) for n in range(min(len(other.files), _NAMES_TRIED)))
        if pickled is not None and any(os.fsencode(name) in pickled for name in names):
            raise CorruptionError(
                f"{where} and its index contradict each other: {metadata.trailer_problem}; "
                f"{way_out}"
            )
        why = f"the one in its place is of another save, {other.save_id}"
    if marked and not metadata.has_trailer:
        why = why or metadata.trailer_problem
    if marked:
        if newer:
            raise UnsupportedError(f"cannot use the index of {where}: {why}; {way_out}")
        raise CorruptionError(f"the index of {where} is missing or damaged: {why}; {way_out}")
