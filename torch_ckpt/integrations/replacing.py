"""Replaces an attribute of a module or class for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replaces an attribute within a block, like ``mock.patch.object``.

    A replacement that began within the block and has not ended, as that of :func:`install`, remains
    after the block.

    Args:
        owner: Module or class with the attribute.
        name: The attribute.
        replacement: Its value within the block.
    """
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)
