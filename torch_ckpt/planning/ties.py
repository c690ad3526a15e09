"""Tied tensors: names of one state dict that share one tensor, such as tied embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_ckpt.planning.dispatch import attributes_of
from torch_ckpt.planning.item_views import PlannedItems

__all__ = ["common_ties", "has_no_elements", "tied_names"]


_PLAIN = (torch.Tensor, torch.nn.Parameter)  # The memory of a subclass may not be its whole value.


def tied_names(state_dict: dict[str, Any]) -> list[list[str]]:
    """Returns the groups of names whose tensors have the same memory, dtype and shape.

    Each group has at least two names, in the order of the flat state dict. Tensors without elements
    on this rank are in no group.

    Example::

        assert tied_names({"a": tensor, "b": tensor, "c": tensor.clone()}) == [["a", "b"]]
    """
    groups: dict[Any, list[str]] = {}
    for fqn, value in state_dict.items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        if type(local) not in _PLAIN or local.layout != torch.strided or not local.numel():
            continue
        address = local.data_ptr()
        if address:
            facts = local.dtype, local.device, local.stride(), local.is_conj(), local.is_neg()
            part = repr(attributes_of(local))
            groups.setdefault((address, local.shape, value.shape, facts, part), []).append(fqn)
    return [names for names in groups.values() if len(names) > 1]


def has_no_elements(value: object) -> bool:
    """Returns whether a value is a DTensor without elements on this rank.

    The memory of such a DTensor does not show whether it is tied. The other ranks decide.
    """
    return isinstance(value, DTensor) and bool(value.numel()) and not value._local_tensor.numel()


def common_ties(
    groups: Sequence[Sequence[Sequence[str]]], items: Sequence[PlannedItems]
) -> dict[str, str]:
    """Returns the names that are tied on all ranks: name -> the first name of its group.

    If neither of two names has elements on a rank, that rank counts them as tied. ``groups``
    contains the result of :func:`tied_names` on each rank, and ``items`` all items of each rank.
    """
    firsts = [{name: group[0] for group in own for name in group} for own in groups]
    candidates = {name: first for own in firsts for name, first in own.items() if name != first}
    for rank, own in enumerate(firsts):
        apart = [
            name
            for name, first in candidates.items()
            if name not in own or own[name] != own.get(first)
        ]
        if not apart:
            continue
        present = {
            item.index.fqn
            for item in PlannedItems(items[rank].encoded)
            if item.tensor_data is not None and item.tensor_data.chunk.sizes.numel()
        }
        for name in apart:
            if name in present or candidates[name] in present:
                del candidates[name]
    return candidates
