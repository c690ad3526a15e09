"""Conversions to a store that accepts only whole files, through a temporary local directory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

from torch_ckpt.errors import AlreadyExistsError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.known_frameworks import FRAMEWORKS

__all__ = ["write_to_store"]

_LAST = tuple(
    name for row in FRAMEWORKS for name in (*row.pointers, *(row.target.last if row.target else ()))
)
"""Names of files that point to others, or describe them."""


def write_to_store(target: Location, write: Callable[[Location], None]) -> None:
    """Writes a target to a temporary directory with ``write``, and then uploads its files.

    The directory is created by Python's ``tempfile``, which respects ``TMPDIR``. Pointer files are
    uploaded last, so a reader that begins with these finds all files or none. Raises
    AlreadyExistsError if anything exists at the target: a store cannot replace several files
    atomically.
    """
    if target.is_file() or target.names():
        raise AlreadyExistsError(
            f"cannot write {target}: it exists, and a store cannot replace several files at once; "
            "choose another target, or remove it first"
        )
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-convert-") as folder:
        local = Location(folder)
        write(local / target.name)
        files = sorted(_files(local, ""), key=lambda file: file.endswith(_LAST))
        try:
            for file in files:
                (local / file).copy_to(target.parent / file)
        except BaseException:
            for file in files:
                (target.parent / file).discard()
            raise


def _files(folder: Location, prefix: str) -> Iterator[str]:
    for name in (folder / prefix).names():
        if (folder / prefix / name).is_directory():
            yield from _files(folder, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}"
