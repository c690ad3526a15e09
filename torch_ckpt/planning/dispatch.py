"""The classes and attributes by which DCP chooses how it saves and loads a value.

Attributes can declare a tensor of torch's own class to be a part of another tensor. This module
does not interpret them: DCP's own functions list each value with such an attribute, and its copies
retain them.
"""

from __future__ import annotations

import types
from copy import deepcopy
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "ATTRIBUTES",
    "CLASSES",
    "METHODS",
    "PROTOCOLS",
    "attributes_of",
    "copy_attributes",
    "size_of",
]

CLASSES = (DTensor, ShardedTensor, torch.Tensor)
"""The classes of values. DCP's functions list instances of subclasses."""

METHODS = frozenset({"__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"})
"""Methods by which a value, or the local tensor of a DTensor, replaces those of DCP."""

PROTOCOLS: tuple[type[Any], ...] = tuple(
    kind for kind in vars(dcp).values() if getattr(kind, "_is_protocol", False)
)
"""The protocols that the running torch exports: ``CheckpointableTensor`` since torch 2.14."""

ATTRIBUTES = METHODS.union(*(kind.__annotations__ for kind in PROTOCOLS))
"""The attributes of a tensor that DCP reads."""


def size_of(value: Any) -> torch.Size:
    """Returns the sizes of the whole tensor of which a value is a part, like DCP's planner."""
    if isinstance(value, torch.Tensor) and isinstance(value, PROTOCOLS):
        return torch.Size(value.global_shape)  # type: ignore[attr-defined]
    size: torch.Size = value.size()
    return size


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes of a tensor itself, not of its class, that DCP reads.

    If DCP calls methods of the tensor, these may read any attribute, so all of them are returned. A
    wrapper subclass copies its attributes itself.
    """
    attributes = vars(tensor)
    if not attributes:
        return {}
    methods = (getattr(tensor, name, None) for name in METHODS)
    has_methods = any(isinstance(method, types.MethodType) for method in methods)
    if has_methods and not is_traceable_wrapper_subclass(tensor):
        return dict(attributes)
    return {name: attributes[name] for name in attributes if name in ATTRIBUTES}


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies the attributes that DCP reads. Methods of ``source`` are bound to ``target``."""
    if attributes := attributes_of(source):
        vars(target).update(deepcopy(attributes, {id(source): target}))
