"""Describes a path without a checkpoint, and what to load instead. This module imports no torch."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Sequence

from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import prefixes_among
from torch_ckpt.known_frameworks import FRAMEWORKS, first_match

__all__ = ["no_checkpoint"]

_NUMBER = re.compile(r"\d+")
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_DCP = "DCP"
_MOST_CHILDREN = 1000
"""How many names, those with the highest numbers, are searched for a checkpoint."""


def no_checkpoint(path: Location) -> NotFoundError:
    """Returns the error for a path without a checkpoint. It names what exists there instead."""
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
    below = _checkpoints_below(path, names)
    children = below.pop(_DCP, [])
    if children:
        newest = path / children[-1]
        if all(re.fullmatch(r"step-\d+", name) for name in children):
            numbers = [name.removeprefix("step-") for name in children]
            steps = f"step {numbers[0]}"
            if len(numbers) > 1:
                steps = f"{len(numbers)} steps, {numbers[0]} to {numbers[-1]}"
            restore = f"use Run({str(path)!r}).restore"
            return f"it is a run with {steps}; {restore}, or pass a step, such as {newest}"
        return f"its checkpoints are in {_listed(children)}; pass one of them, such as {newest}"
    if any(name.endswith(".distcp") for name in names):
        return (
            "there is no .metadata: the save of the .distcp files did not finish, or they were "
            "copied without the files whose names begin with a dot"
        )
    files = [name for name in names if name.endswith(_TORCH_FILES)]
    if files and not below:
        return f"it has files of torch.save; pass one of them, such as {path / files[0]}"
    found = [f"{kind} in {_listed(of)} (pass {path / of[-1]})" for kind, of in below.items()]
    if files:
        found.append(f"torch.save in {_listed(files)} (pass {path / files[0]})")
    if found:
        pointers = [
            f"; there is no file {row.pointers[0]}, which would name the {row.title} checkpoint "
            "to load"
            for row in FRAMEWORKS
            if row.title in below
        ]
        return f"it has checkpoints of {' and of '.join(found)}{''.join(pointers)}"
    return f"there is no .metadata; it has {_listed(names)}"


def _checkpoints_below(path: Location, names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the subdirectories with a checkpoint by format, ordered by their numbers."""
    ordered = sorted(names, key=lambda name: [*map(int, _NUMBER.findall(name))])
    found: dict[str, list[str]] = {}
    for name in ordered[-_MOST_CHILDREN:]:
        with contextlib.suppress(CheckpointError):  # A file, or one that cannot be read.
            if not name.startswith(".") and (kind := _format_of(path / name)) is not None:
                found.setdefault(kind, []).append(name)
    return found


def _format_of(path: Location) -> str | None:
    """Returns the format of a directory, judged by its names; ``None`` without a checkpoint."""
    names = path.names()
    if prefixes_among(names):
        return _DCP
    for row in FRAMEWORKS:
        if first_match(row.folder, names) is not None:
            return row.title
    return "safetensors" if any(name.endswith(".safetensors") for name in names) else None


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
