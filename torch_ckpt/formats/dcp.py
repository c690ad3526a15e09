"""Checkpoints of DCP's directories: those of ``FastWriter``, and of stock ``FileSystemWriter``."""

from __future__ import annotations

from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed
from torch_ckpt.formats.index import to_metadata
from torch_ckpt.formats.metadata import load_committed
from torch_ckpt.formats.opened import Opened

__all__ = ["open_dcp"]


def open_dcp(directory: Location, prefix: str, *, verify: bool, trust_pickle: bool) -> Opened:
    """Opens what was committed, from the index wherever there is one.

    Args:
        directory: The checkpoint.
        prefix: What the name of its metadata begins with: none, or ``__0`` for those that rank 0
            saved alone.
        verify: Whether damage is looked for.
        trust_pickle: Whether ``.metadata`` may ask for anything.

    Raises:
        NotFoundError: Nothing is committed there.
        CorruptionError: The metadata or their index are damaged.
        UnsupportedError: The index is of a newer version, or the metadata ask for more than they
            may have.
    """
    committed, index = open_committed(directory, prefix, verify=verify)
    if index is not None and index.has_entries:
        return Opened(to_metadata(index, checkpoint_id=directory.checkpoint_id), directory, index)
    pickled = committed.read_pickle(verify=verify)
    metadata = load_committed(
        pickled, where=str(directory / f"{prefix}.metadata"), trust_pickle=trust_pickle
    )
    return Opened(metadata, directory, index)
