"""Opens the committed metadata of a checkpoint, and the index that belongs to it.

Metadata that was committed with an index has two marks: a trailer after the pickle, and a string in
the pickle. If the trailer is missing, the string distinguishes damaged metadata from metadata of
stock DCP, which has neither.

This module does not import torch, and it unpickles nothing: a damaged pickle can request any amount
of memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import uuid
from collections.abc import Iterable

from torch_ckpt._core import _native
from torch_ckpt.errors import (
    CorruptionError,
    NotFoundError,
    StorageError,
    UnsupportedError,
)
from torch_ckpt.filesystems.location import Location

__all__ = [
    "INDEX",
    "INDEX_MARK",
    "PENDING",
    "committed_id",
    "files_in",
    "has_checkpoint",
    "index_name",
    "is_index",
    "metadata_prefixes",
    "open_committed",
    "pending_name",
    "prefixes_among",
    "uuid_of",
]

INDEX_MARK = "torch_ckpt: sealed by an index"
"""An entry of ``storage_meta.modules`` in metadata that was committed with an index."""

PENDING = r"\.metadata\.[0-9a-f]{16}\.tmp"
"""Pattern of pending files, without a prefix."""

INDEX = r"\.index(?:\.([0-9a-f]{16}))?"
"""Pattern of indexes, without a prefix. Before version 0.3.0 their names had no save id."""

_COMMIT_FILE = re.compile(rf"((?:__\d+)?)(?:\.metadata|{INDEX})")

# The mark as a whole pickled string: an opcode, a length of one byte or four, and the text.
_PICKLED_MARK = re.compile(
    rb"(\x8c%c|X%c\0\0\0)%s" % (len(INDEX_MARK), len(INDEX_MARK), re.escape(INDEX_MARK.encode()))
)


def uuid_of(save_id: str) -> str:
    """Returns the UUID of a save for ``storage_meta``. Its first 12 digits are those of the id.

    DCP's own ids are UUIDs, and programs parse them. File names and the index contain the id
    itself.
    """
    others = hashlib.sha256(save_id.encode()).hexdigest()[: 32 - len(save_id)]
    return str(uuid.UUID(hex=save_id + others, version=4))


def pending_name(save_id: str) -> str:
    """Returns the name of the pending file of a save: its metadata, empty until the commit."""
    return f".metadata.{save_id}.tmp"


def index_name(save_id: str) -> str:
    return f".index.{save_id}"


def is_index(name: str) -> bool:
    """Returns whether a file has the name of an index of all ranks."""
    return re.fullmatch(INDEX, name) is not None


def has_checkpoint(directory: Location) -> bool:
    """Returns whether a checkpoint of all ranks is committed in a directory, whole or damaged."""
    return (directory / ".metadata").is_file()


def metadata_prefixes(directory: Location) -> list[str]:
    """Returns the prefixes of all commit files in a directory, sorted.

    An index without metadata counts as well, because its metadata was lost, unless its save has a
    pending file. So a pending file must not be removed before the index of its save.

    A prefix is empty, or ``__0`` for the checkpoint of rank 0 alone. The list is empty for a file,
    and for a directory that does not exist. Raises StorageError if the directory cannot be read.
    """
    try:
        return prefixes_among(directory.names())
    except NotFoundError:
        return []
    except StorageError as error:
        if error.errno != errno.ENOTDIR:
            raise
        return []


def prefixes_among(listed: Iterable[str]) -> list[str]:
    """Returns the prefixes of all commit files among the names in a directory, sorted."""
    names = set(listed)
    matches = filter(None, map(_COMMIT_FILE.fullmatch, names))
    return sorted({m[1] for m in matches if f"{m[1]}{pending_name(m[2])}" not in names})


def open_committed(
    directory: Location, prefix: str, *, verify: bool = True
) -> tuple[_native.MetadataFile, _native.Index | None]:
    """Opens the metadata file, without reading its pickle, and its index (or ``None``).

    The prefix is empty, or ``__0`` for a checkpoint of rank 0 alone. ``verify`` refuses metadata
    whose index is missing or damaged. Raises NotFoundError if no checkpoint of this prefix is
    committed, CorruptionError on damage, and UnsupportedError if the index is of a newer version.
    """
    path = directory / f"{prefix}.metadata"

    def open_both() -> tuple[_native.MetadataFile, _native.Index | None, list[bytes], bool, str]:
        return _native.open_checkpoint(
            directory.file_system, directory.path, path.name, f"{prefix}.index"
        )

    try:
        opened = open_both()
    except NotFoundError as error:
        if prefix not in metadata_prefixes(directory):
            raise NotFoundError(
                f"no checkpoint is committed in {directory}: there is no {path.name}"
            ) from error
        # A save may have committed since the first try.
        try:
            opened = open_both()
        except NotFoundError:
            raise CorruptionError(
                f"cannot open the checkpoint in {directory}: it has an index, but {path.name} is "
                "missing"
            ) from error
    metadata, index, indexed_files, newer, why = opened
    if index is None and verify:
        _check_never_indexed(metadata, indexed_files, newer=newer, why=why, where=str(path))
    return metadata, index


def files_in(directory: Location, files: Iterable[tuple[str, int]]) -> frozenset[str]:
    """Returns which data files of an index exist in a directory with the expected lengths."""
    names = frozenset(directory.names())
    return frozenset(
        name for name, nbytes in files if name in names and (directory / name).nbytes() == nbytes
    )


def committed_id(directory: Location, prefix: str = "") -> str | None:
    """Returns the save id of the committed checkpoint.

    Returns ``None`` without a checkpoint, or without an index that this package can read. Raises
    StorageError if the files cannot be read.
    """
    with contextlib.suppress(CorruptionError, NotFoundError, UnsupportedError):
        _, index = open_committed(directory, prefix, verify=False)
        return None if index is None else index.save_id
    return None


def _check_never_indexed(
    metadata: _native.MetadataFile,
    indexed_files: Iterable[bytes],
    *,
    newer: bool,
    why: str,
    where: str,
) -> None:
    """Raises an error if metadata without a usable index was committed with one.

    ``indexed_files`` contains a few data file names from each readable index in the directory.
    ``newer``: whether the index has a version that this build does not read.
    """
    way_out = "FastReader(verify=False) loads from the metadata alone, without verification"
    if metadata.has_trailer:
        marked = True
    else:
        pickled = metadata.read_pickle()
        marked = _PICKLED_MARK.search(pickled) is not None
        newer = newer and marked
        # Each save uses new names for its data files. So if metadata contains a name from an index,
        # both belong to the same save, and one of them is damaged.
        if any(name in pickled for name in indexed_files):
            raise CorruptionError(
                f"{where} and its index contradict each other: {metadata.trailer_problem}; "
                f"{way_out}"
            )
        why = why or metadata.trailer_problem
    if marked:
        if newer:
            raise UnsupportedError(f"cannot use the index of {where}: {why}; {way_out}")
        raise CorruptionError(f"the index of {where} is missing or damaged: {why}; {way_out}")
