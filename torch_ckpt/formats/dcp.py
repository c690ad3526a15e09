"""Opens DCP checkpoint directories, written by ``FastWriter`` or stock ``FileSystemWriter``."""

from __future__ import annotations

import itertools

from torch_ckpt.errors import CorruptionError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed
from torch_ckpt.formats.index import to_metadata
from torch_ckpt.formats.metadata import load_committed
from torch_ckpt.formats.opened import Opened
from torch_ckpt.known_frameworks import row_of_fields

__all__ = ["open_dcp"]


_ATTEMPTS = 4
"""Maximum number of retries while other processes commit to the same directory."""


def open_dcp(directory: Location, prefix: str, *, verify: bool, trust_pickle: bool) -> Opened:
    """Opens a committed checkpoint by its index, or without an index by its metadata.

    The prefix of its files is empty, or ``__0`` for a checkpoint of rank 0 alone.
    """
    path, version = directory / f"{prefix}.metadata", None
    for attempt in itertools.count(1):
        try:
            return _open_once(directory, prefix, verify=verify, trust_pickle=trust_pickle)
        except CorruptionError:
            # Stores have no open files: long metadata arrives in several requests, and another save
            # may commit in between.
            if not directory.file_system.publishes_by_condition or attempt == _ATTEMPTS:
                raise
            before, version = version, path.identity()
            if version == before:
                raise
    raise AssertionError


def _open_once(directory: Location, prefix: str, *, verify: bool, trust_pickle: bool) -> Opened:
    committed, index = open_committed(directory, prefix, verify=verify)
    if index is not None and index.has_entries:
        return Opened(to_metadata(index, checkpoint_id=directory.checkpoint_id), directory, index)
    pickled = committed.read_pickle(verify=verify)
    metadata = load_committed(
        pickled, where=str(directory / f"{prefix}.metadata"), trust_pickle=trust_pickle
    )
    if (found := row_of_fields(metadata)) is not None:
        row, fields = found
        opened: Opened | None = row.function(fields.open)(directory, metadata, pickled)
        if opened is not None:
            return opened
    return Opened(metadata, directory, index)
