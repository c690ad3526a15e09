"""Creates the missing state of an optimizer, so that a load can fill it.

An optimizer has no state before its first step. A load requests what the state dict has, and would
leave the momenta of a new optimizer out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

__all__ = ["create_state", "lacks_state"]

_Optimizer = torch.optim.Optimizer


def lacks_state(value: Any) -> bool:
    """Returns whether a value is an optimizer of torch that has not made a step.

    Classes with their own state dicts do not count: their names are unknown.
    """
    return (
        isinstance(value, _Optimizer)
        and all(isinstance(own, dict) and not own for own in value.state.values())
        and type(value).state_dict is _Optimizer.state_dict
        and type(value).load_state_dict is _Optimizer.load_state_dict
    )


def create_state(
    optimizer: _Optimizer, state_dict: dict[str, Any], fqn: str, metadata: Metadata
) -> None:
    """Adds the stored states of the parameters to the state dict of an optimizer that lacks them.

    A tensor of the parameter's shape is sharded as the parameter; others, such as ``step``, are
    plain. Adds nothing if a state is nested, is larger than its parameter, or is one of a sharded
    parameter with another shape.

    Args:
        optimizer: The optimizer.
        state_dict: Its state dict, which is changed.
        fqn: Its name in the checkpoint.
        metadata: Of the checkpoint.
    """
    numbers = [each for group in state_dict.get("param_groups", ()) for each in group["params"]]
    own = [param for group in optimizer.param_groups for param in group["params"]]
    if len(numbers) != len(own):
        return  # A hook has changed the state dict.
    params = {str(number): (number, param) for number, param in zip(numbers, own, strict=True)}
    prefix = f"{fqn}.state."
    states: dict[int, dict[str, torch.Tensor | None]] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if not name.startswith(prefix):
            continue
        text, _, key = name.removeprefix(prefix).partition(".")
        if text not in params or not key or "." in key:
            return
        number, param = params[text]
        value = _target(param, stored)
        if value is None and not isinstance(stored, BytesStorageMetadata):
            return
        states.setdefault(number, {})[key] = value
    state_dict["state"].update(sorted(states.items()))


def _target(param: torch.Tensor, stored: Any) -> torch.Tensor | None:
    """Returns a tensor for a stored state of a parameter; ``None`` if none fits, or for objects."""
    if not isinstance(stored, TensorStorageMetadata) or param.is_meta:
        return None
    dtype, shape = stored.properties.dtype, param.shape
    if stored.size == shape:
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    # A mean over rows has fewer elements. More are of another parameter: their order has changed.
    is_smaller = stored.size.numel() < param.numel() or _long(stored.size) == _long(shape)
    is_plain = type(param) in (torch.Tensor, torch.nn.Parameter)
    if not stored.size or (is_plain and is_smaller):
        return torch.empty(stored.size, dtype=dtype, device="cpu")
    return None


def _long(shape: torch.Size) -> list[int]:
    return [length for length in shape if length != 1]
