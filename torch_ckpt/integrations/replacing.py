"""Replaces an attribute of a module or class for a while, and knows which classes it may."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from types import ModuleType
from typing import Any

from torch_ckpt.process_state import PROCESS

__all__ = ["first_value", "has_only", "places_of", "replacing"]

# Threads begin and end blocks at the same time. A signal handler may do so within another block.
_LOCK = threading.RLock()
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


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
    replaced = list(PROCESS.replaced.items())  # Other threads may begin and end blocks.
    found = [(*at, values[0]) for at, values in replaced if id(values[0]) in own]
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
    at, has_begun = (owner, name), False
    try:
        with _LOCK:
            values = PROCESS.replaced.setdefault(at, [getattr(owner, name)])
            values.append(replacement)
            has_begun = True
            setattr(owner, name, replacement)
        yield
    finally:
        if has_begun:
            with _LOCK:
                is_last = getattr(owner, name) is values[-1]
                del values[_last_place(values, replacement)]
                if is_last:  # Nobody else has replaced it.
                    setattr(owner, name, values[-1])
                if len(values) == 1:
                    PROCESS.replaced.pop(at, None)


def _last_place(values: Sequence[Any], replacement: Any) -> int:
    return max(place for place, value in enumerate(values) if place and value is replacement)
