"""Names a tensor whose storage is too short, by the FQN of its value and its path in the value."""

from __future__ import annotations

import contextlib
import copyreg
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from torch_ckpt._core.tensors import MemoryFaultError, check_memory, flat_values

__all__ = ["in_object", "in_state_dict"]


def in_object(fault: MemoryFaultError, fqn: str, value: Any) -> MemoryFaultError:
    """Returns the error of a tensor in an object, with the FQN and the path in the object."""
    path = ""
    with contextlib.suppress(Exception):  # Reading an attribute may raise.
        path = next(_paths(value, "", set()), "")
    where = f"in {path[1:] if path[:1] == '.' else f'its element {path}'}, " if path else ""
    return MemoryFaultError(f"cannot save {fqn!r}: {where}{fault}")


def in_state_dict(fault: MemoryFaultError, state_dict: dict[str, Any]) -> MemoryFaultError:
    """Returns the error of a tensor in a nested state dict, with its FQN and path."""
    with contextlib.suppress(Exception):  # The search must not replace the error.
        for fqn, value in flat_values(state_dict):
            if next(_paths(value, "", set()), None) is not None:
                return in_object(fault, fqn, value)
    return fault


def _paths(value: Any, path: str, seen: set[int]) -> Iterator[str]:
    """Yields the paths of the tensors in an object whose storage is too short."""
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        try:
            check_memory(value)
        except MemoryFaultError:
            yield path
        return
    for step, inner in _steps(value):
        yield from _paths(inner, path + step, seen)


def _steps(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values in an object. Does not iterate over classes of the program."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{number}]", inner) for number, inner in enumerate(value))
    slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    attributes = {name: getattr(value, name, None) for name in slots}
    attributes.update(getattr(value, "__dict__", {}))
    yield from ((f".{name}", inner) for name, inner in attributes.items())
