"""The checkpoint that a path of the command line means."""

from __future__ import annotations

from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.runs.step_files import committed_steps

__all__ = ["checkpoint_at"]


def checkpoint_at(path: Location) -> Location:
    """Returns the path itself, or of a run the directory of the newest committed step."""
    if path.is_file() or _has_metadata(path):
        return path
    steps = committed_steps(path)
    return path / f"step-{steps[0]}" if steps else path


def _has_metadata(path: Location) -> bool:
    try:
        return any(name.endswith(".metadata") for name in path.names())
    except NotFoundError:
        return False
