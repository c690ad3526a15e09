"""The committed checkpoints of a directory, opened without torch wherever there is an index."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed

__all__ = ["Checkpoint", "described", "find_checkpoints", "open_checkpoint"]

_METADATA = re.compile(r"((?:__\d+)?)\.(metadata|index)")


@dataclass
class Checkpoint:
    """One set of metadata: a whole checkpoint's, or that of a rank that saved by itself."""

    path: Location
    metadata: _native.MetadataFile
    index: _native.Index | None
    files: list[tuple[str, int]]  # Name, length in bytes.
    entries: Iterable[_native.IndexEntry] | None  # None if only the pickled metadata may tell.
    save_id: str | None


def find_checkpoints(directory: Location) -> list[str]:
    """Prefixes of the metadata in a directory: none, or ``__0`` of those of rank 0 alone."""
    found = {match[1] for match in map(_METADATA.fullmatch, directory.names()) if match}
    if not found:
        raise NotFoundError(f"no checkpoint is committed in {directory}")
    return sorted(found)


def open_checkpoint(directory: Location, prefix: str) -> Checkpoint:
    """Opens the checkpoint whose metadata have this prefix."""
    path = directory / f"{prefix}.metadata"
    metadata, index = open_committed(directory, prefix)
    if index is None:
        return described(Checkpoint(path, metadata, None, [], None, None))
    entries = index if index.has_entries else None
    return Checkpoint(path, metadata, index, index.files, entries, index.save_id)


def described(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its entries: where the index has none, torch's classes tell them.

    Raises:
        UnsupportedError: A planner has described them in a way of its own.
    """
    if checkpoint.entries is not None:
        return checkpoint
    from torch_ckpt.formats.index import to_entries
    from torch_ckpt.formats.metadata import load_committed

    metadata = load_committed(checkpoint.metadata.read_pickle(), where=str(checkpoint.path))
    files = checkpoint.files
    if checkpoint.index is None:
        folder = checkpoint.path.parent
        names = {str(getattr(info, "relative_path", "")) for info in metadata.storage_data.values()}
        files = [(name, _size_of(folder / name)) for name in sorted(names)]
    entries = to_entries(metadata, [name for name, _ in files])
    if entries is None:
        raise UnsupportedError(f"{checkpoint.path} describes its tensors in a way of its own")
    save_id = checkpoint.save_id or getattr(metadata.storage_meta, "save_id", None)
    return dataclasses.replace(checkpoint, files=files, entries=entries, save_id=save_id)


def _size_of(path: Location) -> int:
    """The length of a file; 0 where it is missing, which whoever reads it will find out."""
    try:
        return path.nbytes()
    except (CheckpointError, ValueError, TypeError):
        return 0
