"""Opens the state dicts that each rank of verl saved with ``torch.save``.

They are the files of its ``FSDPCheckpointManager``. verl loads them on as many ranks as have saved
them. The DTensors in the files state which box a rank has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch_ckpt.errors import CorruptionError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import Opened
from torch_ckpt.frameworks.rank_files.item_opening import open_items
from torch_ckpt.frameworks.rank_files.items import Item, item_of_ranks
from torch_ckpt.known_frameworks import VERL_FILE
from torch_ckpt.options import Verification

__all__ = ["open_directory"]

_FILE = re.compile(VERL_FILE)


def open_directory(
    path: Location, names: Sequence[str], *, verify: Verification, trust_pickle: bool
) -> Opened:
    """Opens a directory. The files of all ranks are required.

    Raises CorruptionError if files of several saves are there.
    """
    found = [one for one in map(_FILE.fullmatch, names) if one]
    items = _items(path, found)
    return open_items(path, "verl", items, verify=verify, trust_pickle=trust_pickle)


def _items(path: Location, found: Sequence[re.Match[str]]) -> dict[str, Item]:
    """Returns ``model``, ``optim`` and ``extra_state``, of which a save may have only some."""
    of_sizes = {int(one[2]): one[0] for one in found}
    if len(of_sizes) > 1:
        (ranks, name), (others, other), *_ = sorted(of_sizes.items())
        raise CorruptionError(
            f"cannot load {path}: it has files of {ranks} ranks, such as {name}, and of {others}, "
            f"such as {other}; remove those of the other save"
        )
    (ranks,) = of_sizes
    if beyond := [one[0] for one in found if int(one[3]) >= ranks]:
        raise CorruptionError(f"cannot load {path}: {beyond[0]} is of a rank beyond {ranks - 1}")
    kinds = sorted({one[1] for one in found})
    return {kind: item_of_ranks(f"{kind}_world_size_{ranks}_rank_{{}}.pt", ranks) for kind in kinds}
