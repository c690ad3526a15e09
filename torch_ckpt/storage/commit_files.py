"""Builds the two files that a commit publishes: the metadata, and the index that belongs to it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import PosixPath
from types import NoneType
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import CheckpointError
from torch_ckpt.formats.allowed_classes import warn_of_refused
from torch_ckpt.formats.index import to_entries, to_metadata, to_paths
from torch_ckpt.formats.metadata import dump_metadata
from torch_ckpt.planning.item_views import GlobalPlanEntry, PlannedMetadata, PlannedPaths
from torch_ckpt.planning.replicas import merge_cuts
from torch_ckpt.storage.data_file import WrittenFile

__all__ = [
    "check_complete",
    "commit_files",
    "commit_files_of",
    "planned_commit_files",
    "written_files",
]

_METADATA_FIELDS = frozenset(Metadata.__dataclass_fields__)


def check_complete(metadata: Metadata) -> None:
    """Checks that a rank has written every box and object of the metadata.

    Without this check, a stale or lost plan would cause silent data loss.

    Raises:
        CheckpointError: No rank has written a box or an object.
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
                f"cannot commit: no rank has written {fqn!r}{where}, which is in the plan"
            )


def written_files(
    metadata: Metadata, results: Iterable[Iterable[WriteResult]]
) -> list[tuple[int, WrittenFile]]:
    """Adds the results of all ranks to the metadata, and returns their files with the ranks.

    The update is in place, because DCP returns and broadcasts the object that it passed.
    """
    storage_data: dict[MetadataIndex, Any] = {}
    written: list[tuple[int, WrittenFile]] = []
    for rank, rank_results in enumerate(results):
        for result in rank_results:
            if isinstance(result.storage_data, WrittenFile):
                written.append((rank, result.storage_data))
            else:
                storage_data[result.index] = result.storage_data
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_data = storage_data
    return written


def commit_files_of(
    metadata: Metadata,
    plan: GlobalPlanEntry | None,
    written: Sequence[tuple[int, WrittenFile]],
    *,
    save_id: str,
) -> tuple[bytes, bytes]:
    """Builds the files that a save commits, and completes ``metadata``.

    ``plan`` is the plan of all ranks, if they planned in columns. Warns of objects that loads
    refuse.

    Returns:
        The contents of ``.metadata`` and of its index.

    Raises:
        CheckpointError: No rank has written a box or an object.
    """
    files = [file for _, file in written]
    if plan is not None and any(file.extents is not None for file in files):
        contents = planned_commit_files(metadata, plan, written, save_id=save_id)
    else:
        if isinstance(metadata.planner_data, PlannedPaths):
            metadata.planner_data = metadata.planner_data.copy()
        merge_cuts(metadata, [cut for file in files for cut in file.cuts])
        check_complete(metadata)
        contents = commit_files(metadata, files, save_id=save_id)
    warn_of_refused({f: c for file in files for f, c in file.refused.items()})
    return contents


def commit_files(
    metadata: Metadata, files: Sequence[WrittenFile], *, save_id: str
) -> tuple[bytes, bytes]:
    """Builds the metadata file and the index file that belongs to it.

    A planner may store values in the metadata that an index cannot represent. The index then
    contains only the data files and their checksums, and readers use the metadata for the rest.

    Args:
        metadata: The complete metadata of the save.
        files: The data files of the save.
        save_id: Id of the save in the names of its files.

    Returns:
        The contents of ``.metadata`` and of its index.
    """
    file_columns = [file.columns for file in files]
    with gc_paused():
        entries = to_entries(metadata, [f.name for f in files], [f.dtypes for f in files])
        paths = to_paths(metadata)
        if paths is None and metadata.planner_data is not None:
            entries = None
        version = metadata.version or ""
        storage_meta = _storage_meta(metadata.storage_meta)
        # The engine pickles what it can represent: Python's pickle would take 5 % of the CPU time
        # of a save of 10,000 tensors, and 6 % more bytes. The engine raises an error for a number
        # or a name that it cannot represent.
        if entries is not None and storage_meta is not None and _is_representable(metadata):
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                return _native.commit_files(
                    save_id, file_columns, version, entries, paths, storage_meta
                )
        pickled = dump_metadata(metadata)
        if entries is not None:
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                stored_id = getattr(metadata.storage_meta, "save_id", None)
                trailer, index = _native.make_index(
                    *(save_id, pickled, file_columns, version, entries, paths),
                    stored_save_id=stored_id or "",
                )
                return pickled + trailer, index
        trailer, index = _native.make_index(save_id, pickled, file_columns, "", None, None)
        return pickled + trailer, index


def planned_commit_files(
    metadata: Metadata,
    plan: GlobalPlanEntry,
    files: Sequence[tuple[int, WrittenFile]],
    *,
    save_id: str,
) -> tuple[bytes, bytes]:
    """Builds the files of :func:`commit_files` for a save that was planned in columns.

    The function also completes ``metadata``, whose mappings become views of the index.

    Args:
        metadata: The metadata of ``FastSavePlanner``.
        plan: The global plan of all ranks.
        files: The data files of the save, each with the rank that wrote it.
        save_id: Id of the save in the names of its files.

    Returns:
        The contents of ``.metadata`` and of its index.

    Raises:
        CheckpointError: The written items differ from the planned items.
    """
    paths = metadata.planner_data
    reported: list[tuple[int, _native.ReportedFile, bytes]] = []
    for rank, file in files:
        if file.extents is None:
            raise CheckpointError(
                f"cannot commit {file.name} of rank {rank}: the rank planned in DCP's items, and "
                "other ranks in columns; all ranks need planners of one class"
            )
        reported.append((rank, file.columns, file.extents))
    assert metadata.storage_meta is not None
    storage_meta = _storage_meta(metadata.storage_meta)
    is_plain = (
        storage_meta is not None
        and (paths is None or isinstance(paths, PlannedPaths))
        and isinstance(metadata.state_dict_metadata, PlannedMetadata)
        and type(metadata) is Metadata
        and _METADATA_FIELDS.issuperset(vars(metadata))
    )
    metadata_bytes, index = _native.planned_commit_files(
        plan.plan,
        save_id,
        reported,
        metadata.version or "",
        paths.encoded if isinstance(paths, PlannedPaths) else None,
        storage_meta or (None, False, None, None, ()),
    )
    where = metadata.storage_meta.checkpoint_id or ""
    opened = _native.index_of(index)
    views = to_metadata(opened, checkpoint_id=where)
    if is_plain:
        metadata.state_dict_metadata = views.state_dict_metadata
        metadata.storage_data = views.storage_data
        metadata.planner_data = views.planner_data
        return metadata_bytes, index
    # A planner has changed the metadata, or the path is not UTF-8, so the files are rebuilt.
    if isinstance(metadata.state_dict_metadata, PlannedMetadata):
        metadata.state_dict_metadata = views.state_dict_metadata.copy()
    metadata.storage_data = views.storage_data.copy()
    if isinstance(paths, PlannedPaths):
        metadata.planner_data = paths.copy()
    check_complete(metadata)
    dtypes: list[dict[int, str]] = [{} for _ in files]
    for _, facts, boxes in opened:
        for _, _, number, offset, _, is_plain_box, _ in boxes:
            if facts is not None and is_plain_box:
                dtypes[number][offset] = facts[0]
    written = [
        dataclasses.replace(file, dtypes=file_dtypes)
        for (_, file), file_dtypes in zip(files, dtypes, strict=True)
    ]
    return commit_files(metadata, written, save_id=save_id)


def _is_representable(metadata: Metadata) -> bool:
    """Returns whether an index can represent all values of the metadata, including their types.

    The function ignores ``storage_meta`` and the index hints of keys.

    Requires: :func:`to_entries` returned entries for the metadata.
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
    return all(_is_plain_location(key, info) for key, info in metadata.storage_data.items())


def _is_plain_tensor(stored: TensorStorageMetadata) -> bool:
    properties = stored.properties
    return (
        len(vars(stored)) == 3
        and type(properties) is TensorProperties  # Torch has two classes of this name.
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


def _is_plain_location(key: MetadataIndex, info: _StorageInfo) -> bool:
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
    """Converts ``storage_meta`` for the engine.

    Returns:
        The checkpoint id, whether the id is a path, and the other fields. ``None`` if these do not
        represent ``meta`` completely.
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
    try:
        (text or "").encode()
    except UnicodeEncodeError:  # A path need not be UTF-8.
        return None
    return text, isinstance(where, PosixPath), meta.save_id, meta.load_id, meta.modules
