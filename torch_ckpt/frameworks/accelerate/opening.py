"""Opens the state dicts of FSDP that each rank of accelerate saved with ``torch.save``.

accelerate writes them with ``use_dcp=False``, and does not load them on another number of ranks.
The DTensors in the files state the box of each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.opened import Opened
from torch_ckpt.frameworks.rank_files.item_opening import open_items
from torch_ckpt.frameworks.rank_files.items import Item, item_of_ranks
from torch_ckpt.known_frameworks import ACCELERATE_FILE
from torch_ckpt.options import Verification

__all__ = ["open_directory"]

_FILE = re.compile(ACCELERATE_FILE)
_RANDOM_STATE = re.compile(r"random_states_(0|[1-9]\d{0,4})\.pkl")
"""A file that each rank writes beside its states."""


def open_directory(
    path: Location, names: Sequence[str], *, verify: Verification, trust_pickle: bool
) -> Opened:
    """Opens a directory. The files of all ranks are required."""
    items = _items([one for one in map(_FILE.fullmatch, names) if one], names)
    return open_items(path, "accelerate", items, verify=verify, trust_pickle=trust_pickle)


def _items(found: Iterable[re.Match[str]], names: Iterable[str]) -> dict[str, Item]:
    """Returns ``model`` and ``optimizer``, as in accelerate's folders of DCP.

    Further models and optimizers have a number, such as ``model_1``. File names do not state the
    number of ranks, so the highest rank in any name determines it.
    """
    ends = [int(one[3]) for one in found]
    ends += [int(one[1]) for one in map(_RANDOM_STATE.fullmatch, names) if one]
    items = {}
    for kind, number in sorted({(one[1], one[2]) for one in found}):
        name = "model" if kind == "pytorch_model_fsdp" else kind
        name = name if number == "0" else f"{name}_{number}"
        items[name] = item_of_ranks(f"{kind}_{number}_rank{{}}.bin", max(ends) + 1)
    return items
