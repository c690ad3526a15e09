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

    The prefix of its files is empty, or ``__0`` for a checkpoint of rank 0 alone.
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
