"""The entries and files of checkpoints of any format, read without torch if they have an index."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_ckpt._core import _native
from torch_ckpt.errors import CheckpointError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import metadata_prefixes, open_committed
from torch_ckpt.known_frameworks import row_of_fields

if TYPE_CHECKING:
    from torch_ckpt.formats.rules import Rule

__all__ = [
    "Checkpoint",
    "check_metadata",
    "described",
    "open_checkpoint",
    "open_checkpoints",
]


@dataclass
class Checkpoint:
    """A checkpoint of all ranks, of one rank that saved alone, or of files of other formats."""

    path: Location
    directory: Location  # The directory of the files.
    metadata: _native.MetadataFile | None  # None for a format without metadata.
    index: _native.Index | None
    files: list[tuple[str, int]]  # Name, length in bytes.
    entries: Iterable[_native.IndexEntry] | None  # None if only the pickle describes the tensors.
    save_id: str | None
    format: str | None = None  # None for DCP's.
    rules: Mapping[str, Rule] = field(default_factory=dict)  # FQN -> rule that unites its shards.
    unreadable: Mapping[str, CheckpointError] = field(default_factory=dict)  # FQN -> why.


def open_checkpoint(directory: Location, prefix: str, *, trust_pickle: bool = False) -> Checkpoint:
    """Opens the checkpoint whose metadata has this prefix, one of :func:`metadata_prefixes`."""
    path = directory / f"{prefix}.metadata"
    metadata, index = open_committed(directory, prefix)
    if index is None:
        checkpoint = Checkpoint(path, directory, metadata, None, [], None, None)
        return described(checkpoint, trust_pickle=trust_pickle)
    entries = index if index.has_entries else None
    return Checkpoint(path, directory, metadata, index, index.files, entries, index.stored_save_id)


def open_checkpoints(
    path: Location, *, trust_pickle: bool = False, rules: str | None = None
) -> list[Checkpoint]:
    """Opens all checkpoints of a directory, or a file or directory of another format.

    ``rules`` is text, as for :class:`FastReader`. Raises NotFoundError without a checkpoint.
    """
    if rules is None and (prefixes := metadata_prefixes(path)):
        return [open_checkpoint(path, prefix, trust_pickle=trust_pickle) for prefix in prefixes]
    from torch_ckpt.formats.recognise import open_stored
    from torch_ckpt.formats.rules import Rules

    parsed = None if rules is None else Rules.parse(rules)
    opened = open_stored(path, verify=True, trust_pickle=trust_pickle, rules=parsed)
    assert opened.index is not None
    index = opened.index
    facts = (opened.format, opened.rules, opened.unreadable)
    return [Checkpoint(path, opened.directory, None, index, index.files, index, None, *facts)]


def check_metadata(path: Location) -> None:
    """Checks the metadata of a checkpoint by their checksum, which readers of its index do not.

    Raises CorruptionError if they are damaged.
    """
    for prefix in metadata_prefixes(path):
        metadata, index = open_committed(path, prefix)
        if index is not None:
            metadata.check()


def described(checkpoint: Checkpoint, *, trust_pickle: bool = False) -> Checkpoint:
    """Returns the checkpoint with entries; unpickles the metadata if the index has none.

    Raises UnsupportedError if the planner wrote the metadata in a custom form.
    """
    if checkpoint.entries is not None or checkpoint.metadata is None:
        return checkpoint
    from torch_ckpt.formats.index import to_entries
    from torch_ckpt.formats.metadata import load_committed
    from torch_ckpt.formats.reading import reading

    pickled = checkpoint.metadata.read_pickle()
    with reading(checkpoint.path):
        metadata = load_committed(pickled, where=str(checkpoint.path), trust_pickle=trust_pickle)
        errors: Mapping[str, CheckpointError] = {}
        if (found := row_of_fields(metadata)) is not None:
            row, fields = found
            metadata, errors = row.function(fields.plain)(metadata)
        files = checkpoint.files
        if checkpoint.index is None:
            folder = checkpoint.path.parent
            infos = metadata.storage_data.values()
            names = {str(getattr(info, "relative_path", "")) for info in infos}
            files = [(name, _size_of(folder / name)) for name in sorted(names)]
        entries = to_entries(metadata, [name for name, _ in files])
    if entries is None:
        raise UnsupportedError(
            f"cannot list {checkpoint.path}: a planner wrote it in a custom form"
        )
    save_id = getattr(metadata.storage_meta, "save_id", None) or checkpoint.save_id
    return dataclasses.replace(
        checkpoint, files=files, entries=entries, save_id=save_id, unreadable=errors
    )


def _size_of(path: Location) -> int:
    """Returns the length of a file, or 0 if it is missing. A later read reports the error."""
    try:
        return path.nbytes()
    except (CheckpointError, ValueError, TypeError):
        return 0
