"""The two files that a commit publishes: metadata, and the index that belongs to them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import PosixPath
from types import NoneType

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import CheckpointError
from torch_ckpt.formats.index import to_entries, to_metadata, to_paths
from torch_ckpt.formats.metadata import dump_metadata
from torch_ckpt.planning.item_views import GlobalPlanEntry, PlannedMetadata, PlannedPaths
from torch_ckpt.storage.written_file import WrittenFile

__all__ = ["check_complete", "commit_files", "planned_commit_files"]

_KNOWN_FIELDS = frozenset(Metadata.__dataclass_fields__)


def check_complete(metadata: Metadata) -> None:
    """Guards the commit against metadata that describe what no rank has written.

    So a plan that somebody kept from another save, or lost on the way, is no silent loss.

    Raises:
        CheckpointError: There is no slice for a box or an object.
    """
    for fqn, stored in metadata.state_dict_metadata.items():
        missing: MetadataIndex | None = None
        if isinstance(stored, BytesStorageMetadata):
            missing = MetadataIndex(fqn)
        elif isinstance(stored, TensorStorageMetadata):
            indices = (MetadataIndex(fqn, chunk.offsets) for chunk in stored.chunks)
            missing = next((i for i in indices if i not in metadata.storage_data), None)
        if missing is not None and missing not in metadata.storage_data:
            where = "" if missing.offset is None else f" at {list(missing.offset)}"
            raise CheckpointError(
                f"cannot commit: the plan has {fqn!r}{where}, and no rank has written it"
            )


def commit_files(
    metadata: Metadata, files: Sequence[WrittenFile], *, save_id: str
) -> tuple[bytes, bytes]:
    """Makes the two files that a commit publishes, each sealed to the other.

    What a planner has put into the metadata may have no form in an index. The index then has the
    files and their checksums only, and readers learn from the metadata what is stored.

    Args:
        metadata: About to be committed.
        files: The data files of the save.
        save_id: Of the save.

    Returns:
        All bytes of ``.metadata``, and all of ``.index``.
    """
    listed = [(file.name, file.nbytes, file.sums) for file in files]
    with gc_paused():
        entries = to_entries(metadata, [f.name for f in files], [f.dtypes for f in files])
        paths = to_paths(metadata)
        if paths is None and metadata.planner_data is not None:
            entries = None
        version = metadata.version or ""
        storage_meta = _storage_meta(metadata.storage_meta)
        # A number or a name that the engine cannot hold makes it refuse.
        if entries is not None and storage_meta is not None and _is_said_by_index(metadata):
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                return _native.commit_files(save_id, listed, version, entries, paths, storage_meta)
        pickled = dump_metadata(metadata)
        if entries is not None:
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                made = _native.make_index(save_id, pickled, listed, version, entries, paths)
                return pickled + made[0], made[1]
        trailer, index = _native.make_index(save_id, pickled, listed, "", None, None)
        return pickled + trailer, index


def planned_commit_files(
    metadata: Metadata,
    plan: GlobalPlanEntry,
    files: Sequence[tuple[int, WrittenFile]],
    *,
    save_id: str,
) -> tuple[bytes, bytes]:
    """As :func:`commit_files`, of a save that was planned in columns, whose metadata it completes.

    Args:
        metadata: About to be committed, as ``FastSavePlanner`` has made them. They become views of
            the index, as a reader would have them, and are pickled as its bytes.
        plan: Of all ranks.
        files: The data files of the save, each with the rank that has written it.
        save_id: Of the save.

    Raises:
        CheckpointError: What was planned was not written, or what was not planned was.
    """
    paths = metadata.planner_data
    reported: list[tuple[int, tuple[str, int, bytes], bytes]] = []
    for rank, file in files:
        if file.extents is None:
            raise CheckpointError(
                f"cannot commit: rank {rank} has written {file.name} item by item, as its planner "
                "resolves them, and other ranks have not: all need planners of one class"
            )
        reported.append((rank, (file.name, file.nbytes, file.sums), file.extents))
    storage_meta = _storage_meta(metadata.storage_meta)
    assert storage_meta is not None
    assert metadata.storage_meta is not None
    is_plain = (
        (paths is None or isinstance(paths, PlannedPaths))
        and isinstance(metadata.state_dict_metadata, PlannedMetadata)
        and type(metadata) is Metadata
        and _KNOWN_FIELDS.issuperset(vars(metadata))
    )
    metadata_bytes, index = _native.planned_commit_files(
        plan.plan,
        save_id,
        reported,
        metadata.version or "",
        paths.encoded if isinstance(paths, PlannedPaths) else None,
        storage_meta,
    )
    where = metadata.storage_meta.checkpoint_id or ""
    made = _native.index_of(index)
    saved = to_metadata(made, checkpoint_id=where)
    if is_plain:
        metadata.state_dict_metadata = saved.state_dict_metadata
        metadata.storage_data = saved.storage_data
        metadata.planner_data = saved.planner_data
        return metadata_bytes, index
    # A planner has added something of its own.
    if isinstance(metadata.state_dict_metadata, PlannedMetadata):
        metadata.state_dict_metadata = saved.state_dict_metadata.copy()
    metadata.storage_data = saved.storage_data.copy()
    if isinstance(paths, PlannedPaths):
        metadata.planner_data = paths.copy()
    check_complete(metadata)
    dtypes: list[dict[int, str]] = [{} for _ in files]
    for _, facts, boxes in made:
        for _, _, number, offset, _, is_ours, _ in boxes:
            if facts is not None and is_ours:
                dtypes[number][offset] = facts[0]
    written = [
        dataclasses.replace(file, dtypes=of_file)
        for (_, file), of_file in zip(files, dtypes, strict=True)
    ]
    return commit_files(metadata, written, save_id=save_id)


def _is_said_by_index(metadata: Metadata) -> bool:
    """Whether metadata that have entries hold nothing that these do not say, types included.

    Their ``storage_meta`` and the hints of keys aside.
    """
    if not (
        type(metadata) is Metadata
        and vars(metadata).keys() <= Metadata.__dataclass_fields__.keys()
        and type(metadata.state_dict_metadata) is dict
        and type(metadata.storage_data) is dict
        and type(metadata.planner_data) in (dict, NoneType)
        and all(type(fqn) is str for fqn in metadata.planner_data or ())
        and (metadata.version is None or (type(metadata.version) is str and metadata.version))
    ):
        return False
    for fqn, stored in metadata.state_dict_metadata.items():
        if type(fqn) is not str:
            return False
        if type(stored) is BytesStorageMetadata:
            if vars(stored):
                return False
        elif type(stored) is not TensorStorageMetadata or not _is_plain_tensor(stored):
            return False
    return all(_is_plain_place(key, info) for key, info in metadata.storage_data.items())


def _is_plain_tensor(stored: TensorStorageMetadata) -> bool:
    properties = stored.properties
    return (
        len(vars(stored)) == 3
        and type(properties) is TensorProperties  # Torch has another class of this name.
        and type(properties.dtype) is torch.dtype
        and type(properties.requires_grad) is bool
        and type(properties.pin_memory) is bool
        and type(stored.size) is torch.Size
        and type(stored.chunks) is list
        and all(
            type(chunk) is ChunkStorageMetadata
            and type(chunk.offsets) is torch.Size
            and type(chunk.sizes) is torch.Size
            and len(vars(chunk)) == 2
            for chunk in stored.chunks
        )
    )


def _is_plain_place(key: MetadataIndex, info: _StorageInfo) -> bool:
    if not (
        type(key.fqn) is str
        and type(key.offset) in (torch.Size, NoneType)
        and len(vars(key)) <= 3
        and type(info) is _StorageInfo
        and type(info.relative_path) is str
        and type(info.offset) is int
        and type(info.length) is int
        and len(vars(info)) <= 4
    ):
        return False
    transforms = info.transform_descriptors
    return transforms is None or (
        type(transforms) is list and bool(transforms) and all(type(t) is str for t in transforms)
    )


_StorageMeta = tuple[str | None, bool, str | None, str | None, Sequence[str]]


def _storage_meta(meta: object) -> _StorageMeta | None:
    """In the engine's terms: the checkpoint's id, whether that is a path, and the other fields.

    ``None`` where those do not say all.
    """
    if not (
        type(meta) is StorageMeta
        and vars(meta).keys() <= StorageMeta.__dataclass_fields__.keys()
        and type(meta.checkpoint_id) in (str, PosixPath, NoneType)
        and type(meta.save_id) in (str, NoneType)
        and type(meta.load_id) in (str, NoneType)
        and type(meta.modules) is list
        and all(type(module) is str for module in meta.modules)
    ):
        return None
    where = meta.checkpoint_id
    text = None if where is None else os.fspath(where)
    return text, isinstance(where, PosixPath), meta.save_id, meta.load_id, meta.modules
