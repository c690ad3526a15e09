"""Opens the committed checkpoints of a directory, without torch if they have an index."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.absent import no_checkpoint
from torch_ckpt.formats.committed import open_committed

__all__ = [
    "Checkpoint",
    "described",
    "find_checkpoints",
    "is_committed",
    "open_checkpoint",
    "open_checkpoints",
]

_METADATA = re.compile(r"((?:__\d+)?)\.(metadata|index)")


@dataclass
class Checkpoint:
    """A checkpoint of all ranks, of one rank that saved without coordination, or of other files."""

    path: Location
    metadata: _native.MetadataFile | None  # None for a format without metadata.
    index: _native.Index | None
    files: list[tuple[str, int]]  # Name, length in bytes.
    entries: Iterable[_native.IndexEntry] | None  # None if only the pickle describes the tensors.
    save_id: str | None
    format: str | None = None  # None for DCP's.


def find_checkpoints(directory: Location) -> list[str]:
    """Returns the prefixes of all metadata files: empty, or ``__0`` for that of rank 0 alone.

    Raises:
        NotFoundError: No checkpoint is committed in the directory.
    """
    try:
        names = directory.names()
    except NotFoundError:
        names = []
    found = {match[1] for match in map(_METADATA.fullmatch, names) if match}
    if not found:
        raise no_checkpoint(directory)
    return sorted(found)


def open_checkpoint(directory: Location, prefix: str) -> Checkpoint:
    """Opens the checkpoint whose metadata has this prefix."""
    path = directory / f"{prefix}.metadata"
    metadata, index = open_committed(directory, prefix)
    if index is None:
        return described(Checkpoint(path, metadata, None, [], None, None))
    entries = index if index.has_entries else None
    return Checkpoint(path, metadata, index, index.files, entries, index.save_id)


def open_checkpoints(path: Location) -> list[Checkpoint]:
    """Opens all checkpoints of a directory, or a file or directory of another format.

    Raises:
        NotFoundError: There is no checkpoint.
        CorruptionError: A checkpoint is damaged.
        UnsupportedError: The format is not supported.
    """
    if is_committed(path):
        return [open_checkpoint(path, prefix) for prefix in find_checkpoints(path)]
    from torch_ckpt.formats.recognise import open_stored

    opened = open_stored(path, verify=True, trust_pickle=False)
    assert opened.index is not None
    index = opened.index
    return [Checkpoint(path, None, index, index.files, index, None, opened.format)]


def is_committed(path: Location) -> bool:
    """Returns whether a path is a directory of DCP with a commit file."""
    try:
        return not path.is_file() and any(map(_METADATA.fullmatch, path.names()))
    except NotFoundError:
        return False


def described(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint with entries; unpickles the metadata if the index has none.

    Raises:
        UnsupportedError: The metadata is in a custom form of its planner.
    """
    if checkpoint.entries is not None or checkpoint.metadata is None:
        return checkpoint
    from torch_ckpt.formats.index import to_entries
    from torch_ckpt.formats.megatron import unflattened
    from torch_ckpt.formats.metadata import load_committed

    metadata = unflattened(
        load_committed(checkpoint.metadata.read_pickle(), where=str(checkpoint.path))
    )
    files = checkpoint.files
    if checkpoint.index is None:
        folder = checkpoint.path.parent
        names = {str(getattr(info, "relative_path", "")) for info in metadata.storage_data.values()}
        files = [(name, _size_of(folder / name)) for name in sorted(names)]
    entries = to_entries(metadata, [name for name, _ in files])
    if entries is None:
        raise UnsupportedError(
            f"cannot list {checkpoint.path}: a planner wrote it in a custom form"
        )
    save_id = checkpoint.save_id or getattr(metadata.storage_meta, "save_id", None)
    return dataclasses.replace(checkpoint, files=files, entries=entries, save_id=save_id)


def _size_of(path: Location) -> int:
    """Returns the length of a file, or 0 if it is missing. A later read reports the error."""
    try:
        return path.nbytes()
    except (CheckpointError, ValueError, TypeError):
        return 0
