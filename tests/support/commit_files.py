"""Names of the files that a commit writes."""

from __future__ import annotations

from pathlib import Path

__all__ = ["index_file"]


def index_file(path: Path, prefix: str = "") -> Path:
    """Returns the only index in the directory of a checkpoint.

    Args:
        path: The directory.
        prefix: ``__0`` for the index of rank 0 alone.
    """
    (index,) = path.glob(f"{prefix}.index*")
    return index
