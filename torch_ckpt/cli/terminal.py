"""What all commands share: exit statuses, and names made safe to print."""

from __future__ import annotations

__all__ = ["DAMAGED", "FAILED", "SOUND", "UNKNOWN", "printable"]

SOUND, DAMAGED, UNKNOWN, FAILED = 0, 1, 2, 3
"""How a command exits."""


def printable(name: str) -> str:
    """A name from a file, without what a terminal would act on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
