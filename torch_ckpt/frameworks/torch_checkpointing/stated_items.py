"""What a directory of ``torch_checkpointing`` says of its items: their files and their shardings.

``metadata.pkl`` states both for each item that was saved with a resharder, and maybe for no other.
The files of other items are found by their names.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ckpt.errors import CorruptionError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.pickles import ForbiddenPickleError, load_allowed
from torch_ckpt.formats.unions import Placed
from torch_ckpt.frameworks.rank_files.files import INVALID
from torch_ckpt.frameworks.rank_files.items import (
    JSON,
    TORCH,
    Item,
    ItemFile,
    RankShard,
    path_of,
    shard_of,
)
from torch_ckpt.known_frameworks import TORCH_CHECKPOINTING_FILE, TORCH_CHECKPOINTING_METADATA

__all__ = ["has_rank_files", "items_by_name", "stated_items"]

_RANK_FILE = re.compile(TORCH_CHECKPOINTING_FILE)
_VERSIONS = ("1.0", "2.0")
_MAX_SIZE = 2**60


class _Sharding:
    """How the ranks of a group have a tensor sharded, as the metadata states it."""

    def __init__(self, stated: Mapping[str, Any]) -> None:
        self._kind, self._facts = stated["type"], stated["data"]

    def of(self, rank: int, limit: int) -> RankShard:
        """Returns the shard of a rank.

        Raises UnsupportedError if the kind of the sharding is unknown, and one of ``INVALID`` if it
        is invalid, or has more boxes than ``limit``.
        """
        facts = self._facts
        if self._kind == "DTensorShardingMetadata":
            of_mesh, coordinate = self._mesh[0], self._mesh[1][rank]
            return shard_of(rank, self._sizes, of_mesh, coordinate, self._placements, limit)
        if self._kind == "default_tensor_v1":
            parts = (facts["local_offsets"], facts["local_sizes"], facts["global_offsets"])
            if len(parts[0]) > limit:
                raise ValueError(f"more than {limit} boxes")
            boxes = tuple(
                Placed(rank, _ints(local), _ints(sizes), _ints(at))
                for local, sizes, at in zip(*parts, strict=True)
            )
            return RankShard(self._sizes, boxes, has_rest=True)
        raise UnsupportedError(f"its sharding is of the unknown kind {self._kind!r}")

    @functools.cached_property
    def _sizes(self) -> tuple[int, ...]:
        return _ints(self._facts["global_shape"])

    @functools.cached_property
    def _placements(self) -> list[Placement]:
        return [_placement(one) for one in self._facts["placements"]]

    @functools.cached_property
    def _mesh(self) -> tuple[tuple[int, ...], dict[int, list[int]]]:
        """The sizes of the mesh, and the coordinate of each rank."""
        mesh = self._facts["mesh_spec"]
        sizes, ranks = _ints(mesh["mesh_shape"]), _ints(mesh["mesh_data"])
        if math.prod(sizes) != len(ranks):
            raise ValueError(f"a mesh of sizes {sizes} has {len(ranks)} ranks")
        strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        return sizes, {
            rank: [number // s % n for n, s in zip(sizes, strides, strict=True)]
            for number, rank in enumerate(ranks)
        }


def stated_items(path: Location, names: Sequence[str]) -> dict[str, Item] | None:
    """Returns the items that the metadata of a directory states; ``None`` if it has none.

    Raises CorruptionError if the metadata is damaged, and UnsupportedError if it requests a class
    or function; ``None`` in both cases if the directory has another format.
    """
    if TORCH_CHECKPOINTING_METADATA not in names:
        return None
    file = path / TORCH_CHECKPOINTING_METADATA
    try:
        value = load_allowed(file.read())
    except (ForbiddenPickleError, ValueError) as error:
        if _is_other(names):
            return None
        if isinstance(error, ForbiddenPickleError):
            raise UnsupportedError(f"cannot load {file}: {error}") from None
        raise _damaged(file, error) from None
    has_form = isinstance(value, dict) and value.keys() >= {"metadata", "world_size"}
    if not has_form and (_is_other(names) or not has_rank_files(names)):
        return None
    try:
        return _items_of(value)
    except INVALID as error:
        raise _damaged(file, error) from None


def _is_other(names: Sequence[str]) -> bool:
    """Returns whether a directory has a file that another format requires."""
    required = {"model.safetensors", "latest", "latest_universal"}
    return not required.isdisjoint(names) or any(
        name.endswith(".safetensors.index.json") for name in names
    )


def _damaged(path: Location, error: Exception) -> CorruptionError:
    return CorruptionError(
        f"cannot read {path}: it is not the metadata of torch_checkpointing: "
        f"{type(error).__name__}: {error}"
    )


def has_rank_files(names: Iterable[str]) -> bool:
    """Returns whether a directory has, for some item, the files of ranks 0, 1 and so on."""
    ranks: dict[str, set[int]] = {}
    for found in filter(None, map(_RANK_FILE.fullmatch, names)):
        ranks.setdefault(found[1], set()).add(int(found[2]))
    return any(max(one) == len(one) - 1 for one in ranks.values())


def items_by_name(
    path: Location, names: Iterable[str], stated: Mapping[str, Item]
) -> dict[str, Item]:
    """Returns the items whose files have default names, and which the metadata does not state.

    Raises CorruptionError if a rank has two files of an item.
    """
    found: dict[str, dict[int, ItemFile]] = {}
    used = {file.name for item in stated.values() for file in item.files.values()}
    for name in sorted(set(names) - used):
        parts = _RANK_FILE.fullmatch(name)
        if parts is None or parts[1] in stated:
            continue
        files, rank = found.setdefault(parts[1], {}), int(parts[2])
        if rank in files:
            raise CorruptionError(
                f"cannot load {path}: both {files[rank].name} and {name} are of rank {rank}"
            )
        files[rank] = ItemFile(name, TORCH if parts[3] == "pt" else JSON, is_required=True)
    counts = [item.ranks for item in stated.values()]
    counts += [max(files) + 1 for files in found.values()]
    return {name: Item(files, max(counts)) for name, files in found.items()}


def _items_of(metadata: Any) -> dict[str, Item]:
    """Returns the items that metadata of version 1.0 or 2.0 states. Raises one of ``INVALID``."""
    version, world_size = metadata.get("version", "1.0"), metadata["world_size"]
    if version not in _VERSIONS or type(world_size) is not int or world_size < 1:
        raise ValueError(f"its version is {version}, and its world_size {world_size}")
    groups: dict[str, dict[str, Any]] = {}
    layouts: dict[str, dict[int, Any]] = {}
    if version == "2.0":
        for name, item in metadata["metadata"].items():
            groups[name] = {
                path_of(json.loads(path)): of_path
                for path, of_path in item["nested_path_to_metadata"].items()
            }
            layouts[name] = item["rank_to_layout_info"]
    else:
        for path, of_path in metadata["metadata"].items():
            name, *within = json.loads(path)
            groups.setdefault(name, {})[path_of(within)] = of_path
        for rank, of_rank in metadata["rank_to_layout_info_mappings"].items():
            for name in groups:
                layouts.setdefault(name, {})[int(rank)] = of_rank.get(name)
    return {
        name: _item(name, of_item, layouts.get(name, {}), world_size)
        for name, of_item in groups.items()
    }


def _item(
    name: str, groups: Mapping[str, Any], layouts: Mapping[Any, Any], world_size: int
) -> Item:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not the name of an item")
    shardings = {
        path: [(_Sharding(one["sharding_metadata"]), _ints(one["ranks"])) for one in of_path]
        for path, of_path in groups.items()
    }
    owners = {rank for of_path in shardings.values() for _, ranks in of_path for rank in ranks}
    files: dict[int, ItemFile] = {}
    for key, layout in layouts.items():
        rank = int(key)
        file, serialization = f"{name}_{rank}.pt", TORCH
        if layout is not None:
            file, serialization = layout["file_path"], layout["serialization_format"]["type"]
        if file.startswith("/") or ".." in file.split("/"):
            raise ValueError(f"its file {file!r} is outside of the directory")
        files[rank] = ItemFile(file, serialization, rank in owners)
    if len(files) != world_size or max(files) != world_size - 1 or min(files) < 0:
        raise ValueError(f"{name!r} has files of ranks {sorted(files)[:9]} and more, not of all")
    return Item(files, world_size, shardings)


def _placement(stated: Mapping[str, Any]) -> Placement:
    kind = stated["type"]
    if kind == "Replicate":
        return Replicate()
    (dim,) = _ints([stated["dim"]])
    if kind == "Shard":
        return Shard(dim)
    if kind != "StridedShard":
        raise ValueError(f"unknown placement {stated}")
    (factor,) = _ints([stated["split_factor"]])
    return _StridedShard(dim, split_factor=factor)


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(value) is int and 0 <= value <= _MAX_SIZE for value in found):
        raise ValueError(f"{str(found)[:200]} are not sizes, offsets or ranks")
    return found
