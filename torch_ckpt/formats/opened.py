"""What every format becomes when it is opened: DCP's metadata, and an index over extents.

Files that the engine has not written get an index when they are opened, in memory: it says which
FQN lies where, and all that plans and loads works by that as by one of our own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt._core import _native
from torch_ckpt.errors import CorruptionError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.index import to_metadata

__all__ = ["Contents", "ForeignFiles", "Opened"]


class Contents(Protocol):
    """What files hold besides plain tensors."""

    def value(self, fqn: str) -> object:
        """An object, or a tensor that only torch can read.

        Raises:
            UnsupportedError: Torch cannot read it either.
        """
        ...


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was opened.

    Attributes:
        metadata: What is stored, in DCP's terms.
        directory: Where the files lie that the metadata name.
        index: Where the engine finds what is stored; ``None`` if the metadata alone say it.
        contents: What is not in slices of its own; ``None`` if everything is.
    """

    metadata: Metadata
    directory: Location
    index: _native.Index | None
    contents: Contents | None = None


@dataclass
class ForeignFiles:
    """Files that were not written by a storage writer, and what was found in them.

    Attributes:
        path: What was opened, for messages and as checkpoint id.
        directory: Where the files lie.
        files: Names in the directory, and lengths in bytes.
        entries: FQNs and where their boxes lie, as the engine's index has them: a plain box is the
            elements of a tensor.
        views: By number of the entry: strides and offset in elements, and CRC-32 of the extent,
            where the elements are not all of it in row-major order.
        paths: Of each FQN the keys from the root of the nested state dict.
    """

    path: Location
    directory: Location
    files: list[tuple[str, int]] = field(default_factory=list)
    entries: list[_native.IndexEntry] = field(default_factory=list)
    views: dict[int, tuple[Sequence[int], int, int]] = field(default_factory=dict)
    paths: Mapping[str, Sequence[str | int]] = field(default_factory=dict)

    def opened(self, contents: Contents, version: bytes, *, names_files: bool = True) -> Opened:
        """The checkpoint that they are.

        Args:
            contents: What is not plain in them.
            version: Tells these files from others in their place: ranks that have opened different
                ones must not load together.
            names_files: Whether the names and lengths of the files tell so, too.

        Raises:
            CorruptionError: Names or numbers are such as no file can have.
            UnsupportedError: The name of a file is no UTF-8.
        """
        for name, _ in self.files:
            if not _is_text(name):
                raise UnsupportedError(f"cannot load {name!r}: the name of the file is no UTF-8")
        for fqn in self.paths:
            if not _is_text(fqn):
                raise CorruptionError(f"cannot read {self.path}: {fqn!r} is no text")
        files = repr(sorted(self.files)).encode() if names_files else b""
        identity = hashlib.sha256(files + version).hexdigest()[:16]
        paths = [(fqn, list(keys)) for fqn, keys in self.paths.items()]
        try:
            index = _native.foreign_index(identity, self.files, self.entries, self.views, paths)
        except ValueError as error:
            raise CorruptionError(f"cannot read {self.path}: {error}") from error
        metadata = to_metadata(index, checkpoint_id=str(self.path))
        assert metadata.storage_meta is not None
        metadata.storage_meta.modules = []  # Nothing seals them.
        return Opened(metadata, self.directory, index, contents)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # Half of a surrogate pair.
        return False
    return True
