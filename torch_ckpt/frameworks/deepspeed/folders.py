"""Finds checkpoints of DeepSpeed by the names of their files. This module imports no torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from torch_ckpt.errors import CheckpointError, NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.known_frameworks import (
    DEEPSPEED_MODEL_FILE,
    DEEPSPEED_POINTERS,
    DEEPSPEED_RANK_FILE,
)

__all__ = [
    "MODEL_FILE",
    "RANK_FILE",
    "WRITTEN_FILE",
    "deepspeed_folder",
    "deepspeed_state",
    "has_deepspeed_files",
]

RANK_FILE = re.compile(DEEPSPEED_RANK_FILE)
MODEL_FILE = re.compile(DEEPSPEED_MODEL_FILE)
WRITTEN_FILE = re.compile(
    r"(?:(?:[a-z0-9]+_)?zero_pp_rank|mp_rank|expp_rank|expert|layer)_\d+.*(?:model|optim)_states\.pt"
)
"""The names of all files that DeepSpeed's engines write into the folder of a tag."""
_TAG = re.compile(r"global_step(\d+)")
"""The tags that DeepSpeed chooses."""


def has_deepspeed_files(names: Iterable[str]) -> bool:
    """Returns whether a directory with these names contains files of DeepSpeed's ranks."""
    return any(RANK_FILE.fullmatch(name) or MODEL_FILE.fullmatch(name) for name in names)


def deepspeed_folder(path: Location) -> Location | None:
    """Returns the folder of a DeepSpeed checkpoint: the path, or the tag to which it points.

    Raises NotFoundError if the folder of the tag is missing.
    """
    try:
        names = path.names()
    except NotFoundError:
        return None
    if has_deepspeed_files(names):
        return path
    for pointer in DEEPSPEED_POINTERS:
        if pointer not in names:
            continue
        tag = (path / pointer).read_range(0, 4096)[1].decode(errors="replace").strip()
        if not tag or any(part in ("", ".", "..") for part in tag.split("/")):
            continue
        try:
            (path / tag).names()
        except NotFoundError:
            raise NotFoundError(
                f"cannot load {path}: its file {pointer} names {tag!r}, which is missing"
            ) from None
        return path / tag
    return None


def deepspeed_state(path: Location, names: Iterable[str]) -> Location | None:
    """Returns a folder below a directory with the training state of DeepSpeed, or ``None``."""
    tags = sorted(filter(None, map(_TAG.fullmatch, names)), key=lambda tag: int(tag[1]))
    folder = path / tags[-1][0] if tags else None
    with contextlib.suppress(NotFoundError):  # The files are of a model, and their tag is not here.
        folder = deepspeed_folder(path) or folder
    with contextlib.suppress(CheckpointError):
        if folder not in (None, path) and has_deepspeed_files(folder.names()):
            return folder
    return None
