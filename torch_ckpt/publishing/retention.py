"""Which versions remain after a publish, and what failed publishes have left. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from torch_ckpt.commits.hiding import removed_directories
from torch_ckpt.commits.leases import remove_expired_leases
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.removal import remove_directories
from torch_ckpt.ladder.step_files import leased_steps
from torch_ckpt.publishing.version_files import (
    WHOLE,
    kind_of,
    listed_versions,
    numbers_among,
    path_of,
)

__all__ = ["protected_versions", "remove_older", "remove_unfinished"]


def remove_unfinished(root: Location, is_whole: dict[int, bool], names: Collection[str]) -> None:
    """Removes what publishes have left that were not committed.

    ``is_whole`` are the committed versions that are known. Others that are found are added.
    ``names`` are those in the directory.
    Requires: the publisher has the newest term, so that no other one commits what it finds here.
    Raises StorageError if the directory cannot be read.
    """
    has_unknown = not is_whole.keys() >= set(numbers_among(names))
    for number in listed_versions(root) if has_unknown else ():
        path = path_of(root, number)
        if number in is_whole:
            continue
        if kind := kind_of(path):
            is_whole[number] = kind == WHOLE
        else:
            with contextlib.suppress(CheckpointError):  # A publisher that was superseded may write.
                path.remove_all()
    for _, path in removed_directories(root, names):
        with contextlib.suppress(CheckpointError):  # The next publish tries again.
            path.remove_all()


def protected_versions(root: Location, is_whole: Mapping[int, bool]) -> set[int]:
    """Returns the versions that a lease protects, with those that they are added to."""
    protected: set[int] = set()
    for leased in leased_steps(root):
        for number in sorted((each for each in is_whole if each <= leased), reverse=True):
            protected.add(number)
            if is_whole[number]:
                break
    return protected


def remove_older(root: Location, is_whole: Mapping[int, bool], keep_whole: int) -> list[int]:
    """Removes the versions before the newest whole ones, and returns those that it has removed.

    ``is_whole`` has all versions. Leased ones remain, with those that they are added to. Raises
    StorageError if a version cannot be removed.
    """
    whole = sorted((number for number in is_whole if is_whole[number]), reverse=True)
    if len(whole) <= keep_whole:
        return []
    doomed = {path_of(root, each): each for each in is_whole if each < whole[keep_whole - 1]}
    remove_expired_leases(root)
    outcome = remove_directories(
        sorted(doomed, key=lambda path: -doomed[path]),
        leased=lambda: {path_of(root, each) for each in protected_versions(root, is_whole)},
    )
    for error in outcome.failures.values():
        raise error
    return [doomed[path] for path in doomed if path not in outcome.leased]
