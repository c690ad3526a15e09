"""Checkpoints as the commands see them: opened without torch wherever there is an index."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from torch_ckpt import _native
from torch_ckpt.errors import CorruptionError, NotFoundError
from torch_ckpt.seal import open_committed

__all__ = [
    "DAMAGED",
    "FAILED",
    "SOUND",
    "UNKNOWN",
    "Checkpoint",
    "find_checkpoints",
    "open_checkpoint",
    "printable",
]

SOUND, DAMAGED, UNKNOWN, FAILED = 0, 1, 2, 3
"""How a command exits."""

_METADATA = re.compile(r"((?:__\d+)?)\.(metadata|index)")


@dataclass
class Checkpoint:
    """One set of metadata: a whole checkpoint's, or that of a rank that saved by itself."""

    path: Path
    index: _native.Index | None
    files: list[tuple[str, int]]  # Name, length in bytes.
    entries: list[_native.IndexEntry]
    save_id: str | None


def find_checkpoints(directory: Path) -> list[str]:
    """Prefixes of the metadata in a directory: none, or ``__0`` of those of rank 0 alone."""
    fs = _native.local_file_system()
    names = [os.fsdecode(name) for name in fs.list_directory(os.fsencode(directory))]
    found = {match[1] for match in map(_METADATA.fullmatch, names) if match}
    if not found:
        raise NotFoundError(f"no checkpoint is committed in {directory}")
    return sorted(found)


def open_checkpoint(directory: Path, prefix: str) -> Checkpoint:
    """Opens the checkpoint whose metadata have this prefix."""
    path = directory / f"{prefix}.metadata"
    pickled, index = open_committed(_native.local_file_system(), directory, prefix)
    entries = None if index is None else index.entries
    if index is not None and entries is not None:
        return Checkpoint(path, index, index.files, entries, index.save_id)
    return _open_pickled(path, pickled, index)


def _open_pickled(path: Path, pickled: bytes, index: _native.Index | None) -> Checkpoint:
    """Only metadata say what is stored: torch's classes are needed to read them."""
    from torch_ckpt.index import to_entries
    from torch_ckpt.metadata import load_committed

    metadata = load_committed(pickled, where=str(path))
    if index is not None:
        files = index.files
    else:
        names = {str(getattr(info, "relative_path", "")) for info in metadata.storage_data.values()}
        files = [(name, _size_of(path.parent / name)) for name in sorted(names)]
    entries = to_entries(metadata, [name for name, _ in files])
    if entries is None:
        raise CorruptionError(f"{path} describes its tensors in a way of its own")
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return Checkpoint(path, index, files, entries, save_id)


def _size_of(path: Path) -> int:
    """The length of a file; 0 where it is missing, which whoever reads it will find out."""
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0


def printable(name: str) -> str:
    """A name from a file, without what a terminal would act on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
