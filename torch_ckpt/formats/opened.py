"""The common form of an opened checkpoint of any format: DCP's metadata and an index of extents.

Files of other formats get a *foreign index* in memory when they are opened. It maps each FQN to its
extents, so planning and loading work as they do for checkpoints of this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, CorruptionError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.index import to_metadata
from torch_ckpt.formats.rules import Rule

__all__ = ["Contents", "ForeignFiles", "Opened", "is_foreign"]

_FOREIGN = "torch_ckpt: written by another program than DCP"


Records = Mapping[str, Sequence[tuple[int, int, int]]]
"""File -> offset, length and CRC-32 of each record."""


class Contents(Protocol):
    """The values of a checkpoint other than plain tensors."""

    def value(self, fqn: str) -> object:
        """Returns an object, or a tensor that only torch can read.

        Raises UnsupportedError if torch cannot read the value either.
        """
        ...


@dataclass(frozen=True)
class Opened:
    """An open checkpoint, and the directory of the files that its metadata names.

    Attributes:
        index: The engine's index; ``None`` if there is only the metadata.
        contents: The values that have no slice of their own; ``None`` if all values have one.
        format: Name of the format; ``None`` for DCP's.
        rules: FQN -> the rule by which the shards of model-parallel ranks make the parameter.
        unreadable: FQN -> why the value cannot be loaded, where opening the checkpoint shows it.
            Its entry in the index is that of an object.
        records: File -> offset, length and CRC-32 of its records, where a record has several boxes.
    """

    metadata: Metadata
    directory: Location
    index: _native.Index | None
    contents: Contents | None = None
    format: str | None = None
    rules: Mapping[str, Rule] = field(default_factory=dict)
    unreadable: Mapping[str, CheckpointError] = field(default_factory=dict)
    records: Records = field(default_factory=dict)


@dataclass
class ForeignFiles:
    """Files that no storage writer of DCP wrote, and the tensors and objects found in them.

    Attributes:
        path: The opened file or directory, for messages and as the checkpoint id.
        directory: Directory of the files.
        format: Name of the format, for ``torch-ckpt inspect``.
        files: Name in the directory and length in bytes of each file.
        entries: Entries of the engine's index: FQNs and the extents of their boxes. The extent of a
            plain box consists of the tensor's elements.
        views: Entry number -> strides and offset in elements, and CRC-32 of the extent. Needed
            where the extent is not exactly the tensor in row-major order.
        paths: FQN -> keys from the root of the nested state dict.
        unreadable: As in :class:`Opened`.
        is_own: Whether a save of DCP has given the values their names.
        records: As in :class:`Opened`.
    """

    path: Location
    directory: Location
    format: str
    files: list[tuple[str, int]] = field(default_factory=list)
    entries: list[_native.IndexEntry] = field(default_factory=list)
    views: dict[int, tuple[Sequence[int], int, int]] = field(default_factory=dict)
    paths: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    is_own: bool = False
    unreadable: dict[str, CheckpointError] = field(default_factory=dict)
    records: dict[str, Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    def add_unreadable(
        self, fqn: str, error: CheckpointError, extent: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """Adds a value that cannot be loaded, so that only its load is an error.

        The extent is its file number, offset and length in bytes, if they are known.
        """
        self.entries.append((fqn, None, [((), (), *extent, False, ())]))
        self.unreadable[fqn] = error.with_traceback(None)

    def opened(
        self, contents: Contents | None, version: bytes, *, names_files: bool = True
    ) -> Opened:
        """Returns the files as an open checkpoint.

        Raises CorruptionError for a wrong name or number. The version identifies the contents, with
        the names and lengths of the files if ``names_files`` is set. Ranks that opened different
        contents must not load together.
        """
        if self.unreadable and not self.files:
            raise next(iter(self.unreadable.values()))
        for name, _ in self.files:
            if not _is_text(name):
                raise UnsupportedError(f"cannot load {name!r}: the file name is not valid UTF-8")
        for fqn in self.paths:
            if not _is_text(fqn):
                raise CorruptionError(f"cannot read {self.path}: {fqn!r} is not valid UTF-8")
        files = repr(sorted(self.files)).encode() if names_files else b""
        identity = hashlib.sha256(files + version).hexdigest()[:16]
        paths = [(fqn, list(keys)) for fqn, keys in self.paths.items()]
        try:
            index = _native.foreign_index(identity, self.files, self.entries, self.views, paths)
        except ValueError as error:
            raise CorruptionError(f"cannot read {self.path}: {error}") from error
        metadata = to_metadata(index, checkpoint_id=str(self.path))
        assert metadata.storage_meta is not None
        # No index file belongs to this metadata.
        metadata.storage_meta.modules = [] if self.is_own else [_FOREIGN]
        return Opened(
            metadata,
            self.directory,
            index,
            contents,
            self.format,
            unreadable=self.unreadable,
            records=self.records,
        )


def is_foreign(metadata: Metadata) -> bool:
    """Returns whether another program than DCP has given the values of a checkpoint their names."""
    return _FOREIGN in (getattr(metadata.storage_meta, "modules", None) or ())


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # A lone surrogate.
        return False
    return True
