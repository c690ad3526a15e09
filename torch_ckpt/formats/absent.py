"""Describes a path without a checkpoint, and what to load instead. This module imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location

__all__ = ["no_checkpoint"]

_METADATA = re.compile(r"(?:__\d+)?\.metadata")
_NUMBER = re.compile(r"\d+")
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_MOST_CHILDREN = 64
"""Subdirectories to search for a checkpoint. A larger directory is not searched completely."""


def no_checkpoint(path: Location) -> NotFoundError:
    """Returns the error for a path without a checkpoint. It names what the path has instead.

    Args:
        path: A path that is not a file, and that has no committed checkpoint.
    """
    return NotFoundError(f"no checkpoint is committed in {path}: {_reason(path)}")


def _reason(path: Location) -> str:
    try:
        names = path.names()
    except NotFoundError:
        return f"the directory does not exist{_similar(path)}"
    except CheckpointError as error:
        return str(error)
    if not names:
        return "the directory is empty"
    children = _checkpoints_below(path, names)
    if children:
        newest = path / children[-1]
        if all(re.fullmatch(r"step-\d+", name) for name in children):
            numbers = [name.removeprefix("step-") for name in children]
            steps = f"step {numbers[0]}"
            if len(numbers) > 1:
                steps = f"{len(numbers)} steps, {numbers[0]} to {numbers[-1]}"
            return f"it is a run with {steps}; pass {newest}, or use Run({str(path)!r}).restore"
        return f"its checkpoints are in {_listed(children)}; pass one of them, such as {newest}"
    if any(name.endswith(".distcp") for name in names):
        return "there is no .metadata, so the save of its .distcp files did not finish"
    files = [name for name in names if name.endswith(_TORCH_FILES)]
    if files:
        return f"it has files of torch.save; pass one of them, such as {path / files[0]}"
    return f"there is no .metadata; it has {_listed(names)}"


def _checkpoints_below(path: Location, names: Sequence[str]) -> list[str]:
    """Returns the subdirectories that have a committed checkpoint, ordered by their numbers."""
    found = []
    for name in [name for name in names if "." not in name][-_MOST_CHILDREN:]:
        try:
            below = (path / name).names()
        except CheckpointError:  # A file, or a directory that cannot be read.
            continue
        if any(_METADATA.fullmatch(child) for child in below):
            found.append(name)
    return sorted(found, key=lambda name: [*map(int, _NUMBER.findall(name))])


def _similar(path: Location) -> str:
    try:
        names = path.parent.names()
    except CheckpointError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
