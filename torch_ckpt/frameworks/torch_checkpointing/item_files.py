"""Writes directories of meta-pytorch's ``torch_checkpointing``, which its manager loads.

All tensors are whole, in the files of rank 0, and ``metadata.pkl`` states that. So a
``DefaultResharder`` loads them onto any ranks. It loads no other values: each rank reads those from
a file of its own. torch_checkpointing need not be installed.
"""

from __future__ import annotations

import itertools
import json
import operator
import pickle
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint._traverse import set_element

from torch_ckpt.commits.replacement import Replacement
from torch_ckpt.commits.temporary import remove_abandoned
from torch_ckpt.conversion.pieces import Source
from torch_ckpt.conversion.torch_file import check_target, lay_out_value, write_files
from torch_ckpt.errors import AlreadyExistsError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.torch_archive import PendingTensor
from torch_ckpt.known_frameworks import TORCH_CHECKPOINTING_METADATA

__all__ = ["metadata_at", "write_items"]

_RANK_STATE = re.compile(r"rank_(\d{5,})_of_(\d{5,})")
"""The last key of a value that a ``RankState`` has saved, in a tuple."""

_MODEL = "model"
"""The item of a source that has the names of one model only, such as a file of safetensors."""

_VERSION = "2.0"

Keys = tuple[str | int, ...]


def metadata_at(path: Location) -> Location | None:
    """Returns the metadata that a directory contains; ``None`` without it."""
    try:
        has_one = TORCH_CHECKPOINTING_METADATA in path.names()
    except NotFoundError:
        return None
    return path / TORCH_CHECKPOINTING_METADATA if has_one else None


def write_items(source: Source, target: Location, overwrite: bool) -> None:
    """Writes a source as a directory of items: the first keys of its nested state dict.

    ``source.ranks`` ranks will load it. Each has a file of each item without tensors, and the
    states that a ``RankState`` has saved for it.

    Raises AlreadyExistsError if the directory exists and ``overwrite`` is false, or if it has no
    metadata of torch_checkpointing. Raises UnsupportedError if another number of ranks has saved
    states of its ranks, or an item's name cannot be the name of a file.
    """
    place = target.resolved()
    remove_abandoned(place.parent, place.name)  # It may restore the name of a replaced directory.
    check_target(target, overwrite)
    _check_replaced(source, target)
    values = _values(source)
    ranks = _ranks(source, values)
    files = _files(values, ranks)
    with Replacement(place, is_folder=True, name=target) as new:
        layouts = [
            (new.unpublished / name, lay_out_value(value, target / name))
            for name, value in files.items()
        ]
        write_files(source, layouts, target)
        metadata = pickle.dumps(_metadata(values, ranks))
        (new.unpublished / TORCH_CHECKPOINTING_METADATA).write(metadata, sync=True)
        new.unpublished.sync()
        new.commit()


def _check_replaced(source: Source, target: Location) -> None:
    """Checks that the directory to replace has such items, and does not contain the source."""
    if target.is_file():
        raise AlreadyExistsError(f"cannot write {target}: it is a file")
    if not target.is_directory():
        return
    if target.names() and metadata_at(target) is None:
        raise AlreadyExistsError(
            f"cannot replace {target}: it has no {TORCH_CHECKPOINTING_METADATA}"
        )
    resolved = target.resolved()
    if resolved in (source.path.resolved(), *source.path.resolved().parents):
        raise AlreadyExistsError(f"cannot replace {target}: the source is in it")


def _values(source: Source) -> dict[Keys, Any]:
    """Returns all values by their keys, of which the first is the name of the item."""
    values = {source.paths[name]: source.objects[name] for name in source.objects}
    values |= {source.paths[name]: source.tensors[name] for name in source.tensors}
    if not source.objects and all(len(keys) == 1 for keys in values):
        values = {(_MODEL, *keys): value for keys, value in values.items()}
    for item in {str(keys[0]) for keys in values}:
        if item in ("", ".", "..") or "/" in item or "\0" in item:
            raise UnsupportedError(
                f"cannot write {source.path} as items: {item!r} cannot be the name of a file"
            )
    return values


def _rank_of(keys: Keys) -> tuple[int, int] | None:
    """Returns the rank whose state a value is, and the number of ranks; ``None`` for others."""
    found = _RANK_STATE.fullmatch(str(keys[-1])) if len(keys) > 1 else None
    return None if found is None else (int(found[1]), int(found[2]))


def _ranks(source: Source, values: Iterable[Keys]) -> int:
    """Returns the number of ranks that will load the directory."""
    saved = {found[1]: keys for keys in values if (found := _rank_of(keys)) is not None}
    ranks = source.ranks or next(iter(saved), 1)
    for other, keys in saved.items():
        if other != ranks:
            name = ".".join(map(str, keys[:-1]))
            raise UnsupportedError(
                f"cannot write {source.path} for {ranks} ranks: {name!r} is the state of each of "
                f"{other} ranks"
            )
    return ranks


def _files(values: Mapping[Keys, Any], ranks: int) -> dict[str, Any]:
    """Returns the content of each file by its name."""
    with_tensors = _items_with_tensors(values)
    states: dict[int, dict[str, Any]] = {rank: {} for rank in range(ranks)}
    for keys, value in values.items():
        own = _rank_of(keys)
        if own is None:
            of = (0,) if keys[0] in with_tensors else range(ranks)
            for rank in of:
                set_element(states[rank], keys, value)
        else:
            content = value[0] if isinstance(value, tuple) and len(value) == 1 else value
            set_element(states[own[0]], keys[:-1], content)
    return {f"{item}_{rank}.pt": value for rank, of in states.items() for item, value in of.items()}


def _items_with_tensors(values: Mapping[Keys, Any]) -> set[str | int]:
    return {keys[0] for keys, value in values.items() if isinstance(value, PendingTensor)}


def _metadata(values: Mapping[Keys, Any], ranks: int) -> dict[str, Any]:
    """Returns ``metadata.pkl``: rank 0 has each tensor whole. Other items are not in it.

    Source: ``DistributedMetadata.to_dict`` of torch_checkpointing 0.1.1.
    """
    mesh = {"device_type": "cpu", "mesh_shape": (1,), "mesh_data": (0,), "mesh_dim_names": None}
    items: dict[str, Any] = {
        str(item): {
            "nested_path_to_metadata": {},
            "rank_to_layout_info": dict.fromkeys(range(ranks)),
        }
        for item in sorted(map(str, _items_with_tensors(values)))
    }
    for (item, *within), value in values.items():
        if not isinstance(value, PendingTensor):
            continue
        facts = {
            "global_shape": list(value.sizes),
            "dtype": str(value.dtype),
            "stride": _strides(value.sizes),
            "mesh_spec": mesh,
            "placements": [{"type": "Replicate"}],
        }
        sharding = {"type": "DTensorShardingMetadata", "data": facts}
        path = json.dumps(within, separators=(",", ":"))
        group = {"sharding_metadata": sharding, "ranks": (0,)}
        items[str(item)]["nested_path_to_metadata"][path] = [group]
    return {"metadata": items, "world_size": ranks, "version": _VERSION}


def _strides(sizes: tuple[int, ...]) -> list[int]:
    """Returns the strides of a contiguous tensor, as torch states them."""
    steps = itertools.accumulate((max(size, 1) for size in sizes[:0:-1]), operator.mul, initial=1)
    return list(steps)[: len(sizes)][::-1]
