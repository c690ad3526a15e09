"""Exit statuses of all commands, and the escaping of names for a terminal."""

from __future__ import annotations

__all__ = ["DAMAGED", "FAILED", "SOUND", "UNKNOWN", "printable"]

SOUND, DAMAGED, UNKNOWN, FAILED = 0, 1, 2, 3
"""Exit statuses."""


def printable(name: str) -> str:
    """Returns a name with its unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
