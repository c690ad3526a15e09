"""Opens directories of meta-pytorch's ``torch_checkpointing``, without a conversion.

Each rank writes one file for each item, such as ``model`` and ``optimizer``: by default
``<item>_<rank>.pt``, a file of ``torch.save``. ``metadata.pkl`` states how the tensors of an item
are sharded, if the item was saved with a resharder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import Opened
from torch_ckpt.frameworks.rank_files.item_opening import open_items
from torch_ckpt.frameworks.rank_files.items import Item
from torch_ckpt.frameworks.torch_checkpointing.stated_items import (
    has_rank_files,
    items_by_name,
    stated_items,
)
from torch_ckpt.options import Verification

__all__ = ["open_by_names", "open_stated"]


def open_stated(
    path: Location, names: Sequence[str], *, verify: Verification, trust_pickle: bool
) -> Opened | None:
    """Opens a directory with ``metadata.pkl``; ``None`` if that file is of another format."""
    if (stated := stated_items(path, names)) is None:
        return None
    return _open(path, stated, verify=verify, trust_pickle=trust_pickle)


def open_by_names(
    path: Location, names: Sequence[str], *, verify: Verification, trust_pickle: bool
) -> Opened | None:
    """Opens a directory that has, for some item, the files of all ranks; ``None`` for others."""
    if not has_rank_files(names):
        return None
    return _open(path, {}, verify=verify, trust_pickle=trust_pickle)


def _open(
    path: Location, stated: Mapping[str, Item], *, verify: Verification, trust_pickle: bool
) -> Opened:
    items = {**stated, **items_by_name(path, path.names(), stated)}
    return open_items(path, "torch_checkpointing", items, verify=verify, trust_pickle=trust_pickle)
