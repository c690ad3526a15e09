"""Replaces an attribute of a module or class for a while, and knows which classes it may."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Collection, Iterator, Sequence
from types import ModuleType
from typing import Any

from torch_ckpt.process_state import PROCESS

__all__ = ["first_value", "has_only", "places_of", "replacing"]


def has_only(kind: type, arguments: Collection[str]) -> bool:
    """Returns whether a class of another library has no arguments but these."""
    return set(inspect.signature(kind).parameters) <= set(arguments)


def first_value(owner: Any, name: str) -> Any:
    """Returns an attribute without the replacements that apply."""
    return PROCESS.replaced.get((owner, name), [getattr(owner, name)])[0]


def places_of(functions: Sequence[Any]) -> list[tuple[Any, str, Any]]:
    """Returns the modules and names of functions, and which each is, also where it is replaced.

    A program may have imported it by name, so that a replacement in its own module has no effect.
    """
    own = set(map(id, functions))
    found = [(*at, values[0]) for at, values in PROCESS.replaced.items() if id(values[0]) in own]
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, ModuleType) else {}
        found += [(module, n, value) for n, value in list(names.items()) if id(value) in own]
    return found


@contextlib.contextmanager
def replacing(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replaces an attribute of a module or class within a block, like ``mock.patch.object``.

    Blocks may overlap, as those of several threads: the last one that has begun and not ended
    applies. After the last of them, the attribute has its first value again.
    """
    values = PROCESS.replaced.setdefault((owner, name), [getattr(owner, name)])
    values.append(replacement)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        is_last = getattr(owner, name) is values[-1]
        values[:] = [value for value in values if value is not replacement]
        if is_last:  # Nobody else has replaced it.
            setattr(owner, name, values[-1])
        if len(values) == 1:
            PROCESS.replaced.pop((owner, name), None)
