"""Finds the state dicts that each rank saved with ``torch.save``, as accelerate and verl save FSDP.

accelerate writes them with ``use_dcp=False``, and verl's ``FSDPCheckpointManager`` always. Neither
loads them on another number of ranks. The DTensors in the files state which box a rank has, so they
are read as the items of ``torch_checkpointing`` are that were saved without a resharder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch_ckpt.errors import CorruptionError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.torch_checkpointing.items import TORCH, Item, ItemFile

__all__ = ["rank_state_items"]

_NUMBER = r"(0|[1-9]\d{0,4})"
_ACCELERATE = re.compile(rf"(pytorch_model_fsdp|optimizer)_{_NUMBER}_rank{_NUMBER}\.bin")
_VERL = re.compile(rf"(model|optim|extra_state)_world_size_{_NUMBER}_rank_{_NUMBER}\.pt")
_RANDOM_STATE = re.compile(rf"random_states_{_NUMBER}\.pkl")
"""A file that each rank of accelerate writes beside its states."""


def rank_state_items(path: Location, names: Sequence[str]) -> tuple[str, dict[str, Item]] | None:
    """Returns the program that wrote a directory, and its items; ``None`` if no files are of one.

    The files of all ranks are required. Raises CorruptionError if files of several saves are there.
    """
    accelerate = [found for found in map(_ACCELERATE.fullmatch, names) if found]
    verl = [found for found in map(_VERL.fullmatch, names) if found]
    if accelerate and verl:
        raise CorruptionError(
            f"cannot load {path}: it has files of accelerate, such as {accelerate[0][0]}, and of "
            f"verl, such as {verl[0][0]}"
        )
    if accelerate:
        return "accelerate", _accelerate_items(accelerate, names)
    return ("verl", _verl_items(path, verl)) if verl else None


def _accelerate_items(found: Iterable[re.Match[str]], names: Iterable[str]) -> dict[str, Item]:
    """Returns ``model`` and ``optimizer``, as in accelerate's folders of DCP.

    Those of further models and optimizers have a number, such as ``model_1``. No name states the
    number of ranks, so the highest rank in any name does.
    """
    ends = [int(one[3]) for one in found]
    ends += [int(one[1]) for one in map(_RANDOM_STATE.fullmatch, names) if one]
    items = {}
    for kind, number in sorted({(one[1], one[2]) for one in found}):
        name = "model" if kind == "pytorch_model_fsdp" else kind
        name = name if number == "0" else f"{name}_{number}"
        items[name] = _item(f"{kind}_{number}_rank{{}}.bin", max(ends) + 1)
    return items


def _verl_items(path: Location, found: Sequence[re.Match[str]]) -> dict[str, Item]:
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
    return {kind: _item(f"{kind}_world_size_{ranks}_rank_{{}}.pt", ranks) for kind in kinds}


def _item(name: str, ranks: int) -> Item:
    files = {rank: ItemFile(name.format(rank), TORCH, is_required=True) for rank in range(ranks)}
    return Item(files, ranks)
