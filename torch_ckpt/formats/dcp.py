"""Opens DCP checkpoint directories, written by ``FastWriter`` or stock ``FileSystemWriter``."""

from __future__ import annotations

from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed
from torch_ckpt.formats.index import to_metadata
from torch_ckpt.formats.megatron import flattened_shapes, open_flattened
from torch_ckpt.formats.metadata import load_committed
from torch_ckpt.formats.opened import Opened

__all__ = ["open_dcp"]


def open_dcp(directory: Location, prefix: str, *, verify: bool, trust_pickle: bool) -> Opened:
    """Opens a committed checkpoint, by its index if it has one and else by its metadata.

    Args:
        directory: Directory of the checkpoint.
        prefix: Prefix of the metadata's file name: empty, or ``__0`` for a checkpoint of rank 0
            alone.
        verify: Whether to check for damage.
        trust_pickle: Whether ``.metadata`` may contain any class and run any code.

    Raises:
        NotFoundError: The directory has no committed checkpoint of this prefix.
        CorruptionError: The metadata or the index is damaged.
        UnsupportedError: A newer version of this package wrote the index, or the metadata requests
            a forbidden class or function.
    """
    committed, index = open_committed(directory, prefix, verify=verify)
    if index is not None and index.has_entries:
        return Opened(to_metadata(index, checkpoint_id=directory.checkpoint_id), directory, index)
    pickled = committed.read_pickle(verify=verify)
    metadata = load_committed(
        pickled, where=str(directory / f"{prefix}.metadata"), trust_pickle=trust_pickle
    )
    if flattened_shapes(metadata):
        return open_flattened(directory, metadata, pickled)
    return Opened(metadata, directory, index)
