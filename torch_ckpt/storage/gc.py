"""Which files in a checkpoint's directory a commit has replaced, or a failed save has left."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from torch_ckpt.filesystems.location import Location

__all__ = ["remove_files", "stale_files"]

_RANK_METADATA = re.compile(r"__\d+\.metadata")


def stale_files(found: Collection[str], referenced: Collection[str], rank: int | None) -> list[str]:
    """Names of files that nothing refers to any more.

    Args:
        found: What was there before the save began: one that goes on at the same time is not robbed
            of its own.
        referenced: Data files of what is committed now.
        rank: That which has committed by itself; ``None`` if all ranks have together.
    """
    if rank is None:
        pattern = (
            r"__\d+_\d+(_[0-9a-f]{16})?\.distcp"
            r"|\.metadata\.[0-9a-f]{16}\.tmp|\.index\.[0-9a-f]{16}"
            r"|\.agents-[0-9a-f]{16}-\d+\.(epoch|lists|manifest|failed)(\.tmp)?"
        )
        if any(_RANK_METADATA.fullmatch(name) for name in found):
            return []  # Committed without coordination as well: those refer to files of their own.
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
    """Best effort: a file that stays is not referred to by any metadata."""
    for name in names:
        (directory / name).discard()
