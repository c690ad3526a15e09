"""Hides a committed checkpoint from readers before its files are deleted: the reverse of a commit.

So no reader ever reads a partly deleted checkpoint as a whole one.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError, UnsupportedError
from torch_ckpt.filesystems.location import Location, remove_each
from torch_ckpt.formats.committed import committed_id, is_index, metadata_prefixes, pending_name

__all__ = ["HiddenCheckpoint", "hide", "removed_directories"]

_REMOVED = ".removed-"


@dataclass
class HiddenCheckpoint:
    """A checkpoint that readers no longer find. ``path`` is the old path of its directory.

    ``doomed`` is the renamed directory; ``None`` if it cannot be renamed. In that case, ``pending``
    lists each metadata file and the pending file to which it was renamed.
    """

    path: Location
    doomed: Location | None
    pending: list[tuple[Location, Location]]

    def restore(self) -> None:
        """Makes readers find the checkpoint again. Raises StorageError if that fails."""
        if self.doomed is not None:
            self.doomed.rename(self.path)
        for metadata, pending in self.pending:
            _unhide(metadata, pending)

    def delete(self) -> None:
        """Deletes the files. Requires: the new name of the directory is synced."""
        if self.doomed is not None:
            self.doomed.remove_all()
            return
        self.path.sync()
        names = set(self.path.names()) - {pending.name for _, pending in self.pending}
        # Indexes first: an index without metadata and pending file would count as a damaged
        # checkpoint. If a file cannot be removed, the pending files mark the remains.
        ordered = sorted(names, key=lambda name: not is_index(name))
        remove_each(self.path / name for name in ordered)
        self.path.remove_all()


def _unhide(metadata: Location, pending: Location) -> None:
    """Restores the name of metadata, unless a save has committed under this name meanwhile.

    If so, the pending file remains, so that the next save finds the files of the older checkpoint.
    """
    try:
        if metadata.file_system.publishes_by_condition:
            metadata.write(pending.read(), sync=True)
        else:
            pending.link(metadata, sync=True)
    except (NotFoundError, StorageError, UnsupportedError):
        if metadata.exists():
            return
        if metadata.file_system.publishes_by_condition:
            raise
        pending.rename(metadata)  # The file system has no links.
        return
    pending.discard()


def hide(path: Location) -> HiddenCheckpoint:
    """Renames a checkpoint, or, if that is impossible, each of its metadata files."""
    doomed = path.with_name(f"{_REMOVED}{path.name}-{secrets.token_hex(4)}")
    try:
        path.rename(doomed)
    except StorageError:
        hidden = HiddenCheckpoint(path, None, [])
    else:
        return HiddenCheckpoint(path, doomed, [])
    try:
        for prefix in metadata_prefixes(path):
            save_id = None
            with contextlib.suppress(CheckpointError):  # Damaged, or of stock DCP.
                save_id = committed_id(path, prefix)
            metadata = path / f"{prefix}.metadata"
            pending = path / f"{prefix}{pending_name(save_id or secrets.token_hex(8))}"
            with contextlib.suppress(NotFoundError):  # An index that has lost its metadata.
                metadata.rename(pending)
                hidden.pending.append((metadata, pending))
    except StorageError:
        hidden.restore()
        raise
    return hidden


def removed_directories(
    directory: Location, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Location]]:
    """Yields the former name and the directory of each interrupted removal.

    ``names`` are those in the directory, if the caller has just listed it.
    """
    with contextlib.suppress(NotFoundError):
        for name in directory.names() if names is None else names:
            if name.startswith(_REMOVED):
                yield name.removeprefix(_REMOVED).rpartition("-")[0], directory / name
