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

__all__ = ["Contents", "ForeignFiles", "Opened", "Quantized", "is_foreign"]

_FOREIGN = "torch_ckpt: written by another program than DCP"


Records = Mapping[str, Sequence[tuple[int, int, int]]]
"""File -> offset, length and CRC-32 of each record."""


Quantized = tuple[
    int, Sequence[int], Sequence[int], bool, tuple[str, int, int, str], int, Sequence[int]
]
"""Code of the dtype, sizes in numbers, sizes of a block, whether loads see it transposed, file,
offset, length and name of the scales, code of their dtype, codes of the dtypes that targets get."""


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
        index: The engine's index; ``None`` if the checkpoint has only metadata.
        contents: The values without a separate slice; ``None`` if every value has a slice.
        format: Name of the format; ``None`` for DCP's.
        rules: FQN -> the rule that merges the shards of model-parallel ranks into the parameter.
        unreadable: FQN -> why the value cannot be loaded, if this was detected on opening. The
            index lists such a value as an object.
        records: File -> offset, length and CRC-32 of its records, if a record has several boxes.
        quantized: FQN -> how a tensor is stored that loads read in another dtype.
        native_quantized: The same for the engine; ``None`` if there is no such tensor.
        unscaled: FQN -> why a load cannot multiply the tensor by its scales.
        unknown_quantization: Why no tensor can be dequantised, if a method is not supported.
    """

    metadata: Metadata
    directory: Location
    index: _native.Index | None
    contents: Contents | None = None
    format: str | None = None
    rules: Mapping[str, Rule] = field(default_factory=dict)
    unreadable: Mapping[str, CheckpointError] = field(default_factory=dict)
    records: Records = field(default_factory=dict)
    quantized: Mapping[str, Quantized] = field(default_factory=dict)
    native_quantized: _native.QuantizedTensors | None = None
    unscaled: Mapping[str, str] = field(default_factory=dict)
    unknown_quantization: str = ""


@dataclass
class ForeignFiles:
    """Files not written by a storage writer of DCP, and the tensors and objects in them.

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
        is_own: Whether a save by DCP determined the names of the values.
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
        """Adds a value that cannot be loaded. Only loading it is an error.

        ``extent`` is its file number, offset and length in bytes, if known.
        """
        self.entries.append((fqn, None, [((), (), *extent, False, ())]))
        self.unreadable[fqn] = error.with_traceback(None)

    def opened(
        self, contents: Contents | None, version: bytes, *, names_files: bool = True
    ) -> Opened:
        """Returns the files as an open checkpoint.

        Raises CorruptionError for an invalid name or number. ``version`` identifies the contents;
        with ``names_files``, together with the names and lengths of the files. Ranks that opened
        different contents must not load together.
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
    """Returns whether a program other than DCP determined the names in a checkpoint."""
    return _FOREIGN in (getattr(metadata.storage_meta, "modules", None) or ())


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # A lone surrogate.
        return False
    return True
