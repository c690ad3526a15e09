"""Destination: where agents write a save, as slots and messages name it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from torch_ckpt._core import _native
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.filesystems.location import Location

__all__ = ["Destination", "directory_name"]

_SEPARATOR = "\0"  # No path has it.


def directory_name(snapshot: _native.StoredSnapshot) -> str:
    """Returns the path or URL of the directory of a snapshot, whatever this process can reach."""
    return os.fsdecode(snapshot.directory).partition(_SEPARATOR)[0]


class Destination(NamedTuple):
    """The directory of a future checkpoint, and where agents of several machines exchange files.

    Attributes:
        directory: Directory of the checkpoint, on this machine.
        shared: Directory of the run, if the machines do not share that of the checkpoint.
        small_files: Contents of the small files of the step, by name. ``None`` if the save has no
            such files, and leaves those that the directory has.
    """

    directory: Location
    shared: Location | None = None
    small_files: Mapping[str, bytes] | None = None

    @classmethod
    def resolved(
        cls,
        directory: str | os.PathLike[str],
        shared: Location | None = None,
        small_files: Mapping[str, bytes] | None = None,
    ) -> Destination:
        """Returns what the agent receives. A link in the path may move later."""
        made = cls(Location(directory).resolved(), shared, small_files)
        try:
            made.encode().encode()
        except UnicodeEncodeError:
            raise UnsupportedError(
                f"cannot save to {made.directory!r}: the name is not UTF-8"
            ) from None
        return made

    @classmethod
    def decode(cls, text: str) -> Destination:
        """Returns the destination of a text that :meth:`encode` returned."""
        directory, shared, small_files = [*text.split(_SEPARATOR), "", ""][:3]
        return cls(
            Location(directory),
            Location(shared) if shared else None,
            {name: each.encode() for name, each in json.loads(small_files).items()}
            if small_files
            else None,
        )

    @classmethod
    def of(cls, snapshot: _native.StoredSnapshot) -> Destination:
        """Returns the destination of a snapshot that has one."""
        return cls.decode(os.fsdecode(snapshot.directory))

    def encode(self) -> str:
        """Returns the destination as a text: the path of the directory, if there is no more."""
        parts = [str(self.directory), "" if self.shared is None else str(self.shared), ""]
        if self.small_files is not None:
            parts[2] = json.dumps({name: each.decode() for name, each in self.small_files.items()})
        return _SEPARATOR.join(parts).rstrip(_SEPARATOR)
