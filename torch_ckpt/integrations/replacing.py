"""Replaces an attribute of a module or class for a while, and knows which classes it may."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator
from typing import Any

from torch_ckpt.process_state import PROCESS

__all__ = ["first_value", "has_only", "replacing"]


def has_only(kind: type, arguments: Collection[str]) -> bool:
    """Returns whether a class of another library has no arguments but these."""
    return set(inspect.signature(kind).parameters) <= set(arguments)


def first_value(owner: Any, name: str) -> Any:
    """Returns an attribute without the replacements that apply."""
    return PROCESS.replaced.get((owner, name), [getattr(owner, name)])[0]


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
