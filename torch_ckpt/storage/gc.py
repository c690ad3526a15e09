"""Garbage collection: finds files of replaced checkpoints and of failed saves, and removes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from torch_ckpt.filesystems.location import Location

__all__ = ["remove_files", "stale_files"]

_RANK_METADATA = re.compile(r"__\d+\.metadata")


def stale_files(found: Collection[str], referenced: Collection[str], rank: int | None) -> list[str]:
    """Returns the names of files that no committed checkpoint refers to.

    Args:
        found: File names in the directory before the save began. So the files of a concurrent save
            that began later are safe.
        referenced: Data files of the committed checkpoint.
        rank: The rank, if it committed without coordination; ``None`` if all ranks committed
            together.
    """
    if rank is None:
        pattern = (
            r"__\d+_\d+\.distcp|.*__\d+_\d+_[0-9a-f]{16}\.distcp"
            r"|\.metadata\.[0-9a-f]{16}\.tmp|\.index\.[0-9a-f]{16}"
            r"|\.agents-[0-9a-f]{16}-\d+\.(epoch|lists|manifest|failed)(\.tmp)?"
        )
        if any(_RANK_METADATA.fullmatch(name) for name in found):
            return []  # Ranks that committed without coordination refer to some of these files.
    else:
        pattern = (
            rf"__{rank}_\d+(_[0-9a-f]{{16}})?\.distcp"
            rf"|__{rank}\.(metadata\.[0-9a-f]{{16}}\.tmp|index\.[0-9a-f]{{16}})"
        )
        if ".metadata" in found:
            return []
    return [
        name for name in found if name not in referenced and re.fullmatch(pattern, name) is not None
    ]


def remove_files(directory: Location, names: Iterable[str]) -> None:
    """Removes files, and ignores errors: no metadata refers to these files."""
    for name in names:
        (directory / name).discard()
