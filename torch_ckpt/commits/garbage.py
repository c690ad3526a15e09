"""Garbage collection: finds files of replaced checkpoints and of failed saves, and removes them.

Several jobs may save to one directory. Each save has a pending file, which it creates before its
first data file, and which its commit renames. Before a save removes files of another one, it
removes the pending file of that save, which then cannot commit. If the pending file is gone, the
other save may have committed, and its files stay. So no committed checkpoint loses a file, without
any lock.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch_ckpt.commits.leases import is_leased
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.filesystems.store_client import METADATA
from torch_ckpt.filesystems.store_client import PENDING as UNPUBLISHED
from torch_ckpt.formats.committed import INDEX, PENDING

__all__ = [
    "Found",
    "collect_garbage",
    "end_saves",
    "find",
    "pending_pattern",
    "remove_files",
    "stale_files",
]

_RANK_METADATA = re.compile(r"__\d+\.metadata")
# The name of a file until it is complete.
_UNPUBLISHED = rf"{re.escape(UNPUBLISHED)}[0-9a-f]{{16}}"


@dataclass(frozen=True)
class Found:
    """The names in a directory, and the pending files of saves, when a save begins.

    ``names`` are the files that existed before pending files were listed, and also metadata that
    appeared during the listing. So the data files of a concurrent save are safe if it began later,
    or committed in between. ``version`` is the version of the metadata, on a file system that
    publishes by condition.
    """

    names: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()
    version: str = ""


def pending_pattern(rank: int | None) -> str:
    """Returns the pattern of the pending files of saves whose data files a save may remove.

    ``rank`` is a rank that commits without coordination; ``None`` if all ranks commit together.
    """
    return rf"(__\d+)?{PENDING}" if rank is None else rf"(__{rank})?{PENDING}"


def find(directory: Location, pending: str, metadata: str = ".metadata") -> Found:
    """Lists a directory. Raises NotFoundError if it does not exist.

    ``metadata`` is the name of the metadata of the save.
    """
    version = ""
    if directory.file_system.publishes_by_condition:
        version = directory.file_system.version((directory / metadata).path)
    names = frozenset(directory.names())
    # A save creates its pending file first. So for every file in the first listing, the second one
    # contains the pending file of its save, unless that save has ended.
    later = directory.names()
    return Found(
        names.union(filter(METADATA.fullmatch, later)),
        frozenset(filter(re.compile(pending).fullmatch, later)),
        version,
    )


def end_saves(directory: Location, pending: Iterable[str]) -> bool:
    """Removes the pending files of other saves, which cannot commit from then on.

    Returns whether all of them existed. If not, another save may have committed meanwhile. On a
    store this is unknown, because a removal does not report whether the file existed.
    """
    all_existed = not directory.file_system.publishes_by_condition
    for name in pending:
        try:
            (directory / name).remove()
        except CheckpointError:
            all_existed = False
    return all_existed


def collect_garbage(
    directory: Location,
    found: Found,
    *,
    referenced: Collection[str],
    rank: int | None,
    is_committed: Callable[[], bool],
) -> None:
    """Removes the files that no committed checkpoint refers to; called after a commit.

    If a reader holds a lease, all files remain until a later save.

    ``found`` is the listing before the save. ``is_committed`` returns whether the caller's
    checkpoint is still the committed one.
    """
    stale = stale_files(found.names, referenced, rank)
    pending = found.pending.intersection(stale)
    with contextlib.suppress(CheckpointError):  # The commit stands, and the next save tries again.
        # A newer checkpoint may refer to these files. Its save or the next one removes the others.
        if not stale or is_leased(directory):
            return
        if end_saves(directory, pending) or is_committed():
            remove_files(directory, stale)


def stale_files(found: Collection[str], referenced: Collection[str], rank: int | None) -> list[str]:
    """Returns the files from before the save to which no committed checkpoint refers.

    ``rank`` is a rank that committed without coordination; ``None`` if all committed together.
    """
    if rank is None:
        own, prefixes = "", r"(__\d+)?"
        data = (
            r"__\d+_\d+\.distcp|.*__\d+_\d+_[0-9a-f]{16}\.distcp"
            r"|\.agents-[0-9a-f]{16}-\d+\.(epoch|lists|manifest|commit|committed|failed)(\.tmp)?"
            rf"|{_UNPUBLISHED}(-.*)?"
        )
        is_mixed = any(_RANK_METADATA.fullmatch(name) for name in found)
    else:
        own, prefixes = f"__{rank}", rf"(__{rank})?"
        data = rf"__{rank}_\d+(_[0-9a-f]{{16}})?\.distcp|{_UNPUBLISHED}-__{rank}[_.].*"
        is_mixed = ".metadata" in found
    pattern = rf"{data}|{prefixes}({PENDING}|{INDEX})"
    if is_mixed:  # The other checkpoint may refer to any data file, but has another index.
        pattern = rf"{own}({PENDING}|{INDEX})"
    return [
        name for name in found if name not in referenced and re.fullmatch(pattern, name) is not None
    ]


def remove_files(directory: Location, names: Iterable[str]) -> None:
    """Removes files, and ignores errors: no metadata refers to these files any more."""
    for name in names:
        (directory / name).discard()
