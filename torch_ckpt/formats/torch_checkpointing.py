"""Opens directories of meta-pytorch's ``torch_checkpointing``, without a conversion.

Each rank writes one file for each item, such as ``model`` and ``optimizer``: by default
``<item>_<rank>.pt``, a file of ``torch.save``. ``metadata.pkl`` states how the tensors of an item
are sharded, and which files it has, if the item was saved with a resharder. Without one, a
``DTensor`` in a file states its own box. The FQNs are ``<item>.<path in the item>``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ckpt._core import _native
from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import CorruptionError, NotFoundError, UnsupportedError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.data_classes import NeedsState
from torch_ckpt.formats.object_pickles import StandIns
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.pickles import ForbiddenPickleError, load_allowed
from torch_ckpt.formats.placements import shard_ranges
from torch_ckpt.formats.rank_files import (
    Boxed,
    Computed,
    Entries,
    Files,
    Loaded,
    Stored,
    Value,
    as_boxed,
    part_of_box,
)
from torch_ckpt.formats.safetensors import read_tensors
from torch_ckpt.formats.torch_save import flatten, is_plain
from torch_ckpt.formats.unions import Placed, check_cover, fits

__all__ = ["has_metadata", "has_rank_files", "open_torch_checkpointing"]

_METADATA = "metadata.pkl"
_RANK_FILE = re.compile(r"(.+)_(\d+)\.(pt|json)")
_TORCH, _JSON, _RAW, _SAFETENSORS = (
    f"{kind}Serialization" for kind in ("Torch", "Json", "Raw", "Safetensors")
)
_MAX_SIZE = 2**60
_MAX_SPLIT = 2**20  # Ranks of a mesh dimension.
_INVALID = (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError)
"""What the use of a value of another type or form raises."""


def _mesh() -> NeedsState:
    """Builds a mesh without process groups, which the mesh of a checkpoint does not have."""

    def make(state: Any) -> DeviceMesh:
        mesh = DeviceMesh.__new__(DeviceMesh)
        vars(mesh).update(state)
        return mesh

    return NeedsState(make)


_STAND_INS: StandIns = {"torch.distributed.device_mesh.DeviceMesh": _mesh}


@dataclass
class _Item:
    """What is known of an item before its files are read.

    Attributes:
        files: Rank -> name of its file, and how the file is serialized.
        shardings: Path in the item -> sharding and the ranks that have it.
        world_size: Number of ranks that saved; ``None`` if it is unknown.
    """

    files: dict[int, tuple[str, str]] = field(default_factory=dict)
    shardings: Mapping[str, Sequence[tuple[Mapping[str, Any], frozenset[int]]]] = field(
        default_factory=dict
    )
    world_size: int | None = None

    def sharding(self, path: str, rank: int) -> Mapping[str, Any] | None:
        """Returns how a rank has a tensor sharded; ``None`` if that is unknown."""
        found = (one for one, ranks in self.shardings.get(path, ()) if rank in ranks)
        return next(found, None)


def has_metadata(path: Location, names: Sequence[str]) -> bool:
    """Returns whether a directory has the metadata of the format.

    Args:
        path: The directory.
        names: Its names.
    """
    if _METADATA not in names:
        return False
    try:
        value = load_allowed((path / _METADATA).read())
    except (ForbiddenPickleError, ValueError):
        return False
    return isinstance(value, dict) and value.keys() >= {"metadata", "world_size"}


def has_rank_files(names: Iterable[str]) -> bool:
    """Returns whether a directory with these names has files of all ranks, from 0 on, by item."""
    items = _rank_files(names).values()
    return bool(items) and all(sorted(files) == list(range(len(files))) for files in items)


def open_torch_checkpointing(path: Location, *, verify: bool, trust_pickle: bool) -> Opened:
    """Opens a directory.

    A value that is in the files of several ranks, and that is not sharded, is loaded from the first
    of them. If it differs between the ranks, each has it as an object under the name of a
    ``RankState``: ``rng.rank_00003_of_00008``.

    Args:
        path: The directory.
        verify: Whether to check pickles against their CRC-32.
        trust_pickle: Whether pickles may contain any class and run any code.

    Raises:
        NotFoundError: The file of a rank is missing.
        CorruptionError: A file is damaged, or contradicts the metadata. The message names it.
        MismatchError: The shards of a tensor overlap or do not cover it. The message names it.
        UnsupportedError: It is unknown how the tensors of several ranks make whole ones, or a
            pickle requests a forbidden class or function.
        StorageError: A file cannot be read.
    """
    files = Files(
        path,
        "torch_checkpointing",
        verify=verify,
        trust_pickle=trust_pickle,
        stand_ins=_STAND_INS,
    )
    entries = Entries(files)
    with gc_paused():
        for name, item in sorted(_items(path).items()):
            _Reader(files, name, item).add_to(entries)
        return entries.opened()


# ---- Metadata ----


def _items(directory: Location) -> dict[str, _Item]:
    """Returns the items of a checkpoint: those of its metadata, and those of its file names."""
    names = directory.names()
    items: dict[str, _Item] = {}
    if _METADATA in names:
        path = directory / _METADATA
        try:
            items = _items_of(load_allowed(path.read()))
        except ForbiddenPickleError as error:
            raise UnsupportedError(f"cannot load {path}: {error}") from None
        except _INVALID as error:
            raise CorruptionError(
                f"cannot read {path}: it is not the metadata of torch_checkpointing: {error}"
            ) from None
    stated = {name for item in items.values() for name, _ in item.files.values()}
    for key, files in _rank_files(set(names) - stated).items():
        if key in items:
            continue
        missing = sorted(set(range(max(files))) - set(files))
        if missing:
            raise NotFoundError(
                f"cannot load {directory}: it has {files[max(files)][0]}, and no file of {key!r} "
                f"of rank {missing[0]}"
            )
        items[key] = _Item(files)
    return items


def _rank_files(names: Iterable[str]) -> dict[str, dict[int, tuple[str, str]]]:
    """Returns item -> rank -> name of its file and how it is serialized, by the default names."""
    items: dict[str, dict[int, tuple[str, str]]] = {}
    for name in sorted(names):
        if (found := _RANK_FILE.fullmatch(name)) is not None:
            serialization = _TORCH if found[3] == "pt" else _JSON
            items.setdefault(found[1], {})[int(found[2])] = name, serialization
    return items


def _items_of(metadata: Any) -> dict[str, _Item]:
    """Returns the items that metadata states, of version 1.0 or 2.0.

    Raises:
        Exception: One of ``_INVALID``: it is not such metadata.
    """
    version, world_size = metadata.get("version", "1.0"), metadata["world_size"]
    if version not in ("1.0", "2.0"):
        raise ValueError(f"its version is {version}")
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"its world_size is {world_size}")
    paths: dict[str, dict[str, Any]] = {}
    layouts: dict[str, dict[int, Any]] = {}
    if version == "2.0":
        for name, item in metadata["metadata"].items():
            paths[name] = {
                _path(json.loads(path)): groups
                for path, groups in item["nested_path_to_metadata"].items()
            }
            layouts[name] = item["rank_to_layout_info"]
    else:
        for path, groups in metadata["metadata"].items():
            name, *within = json.loads(path)
            paths.setdefault(name, {})[_path(within)] = groups
        for rank, of_rank in metadata["rank_to_layout_info_mappings"].items():
            for name in paths:
                layouts.setdefault(name, {})[int(rank)] = of_rank.get(name)
    items: dict[str, _Item] = {}
    for name, of_item in paths.items():
        shardings = {
            path: [(group["sharding_metadata"], frozenset(group["ranks"])) for group in groups]
            for path, groups in of_item.items()
        }
        files: dict[int, tuple[str, str]] = {}
        for rank, layout in layouts[name].items():
            files[int(rank)] = f"{name}_{rank}.pt", _TORCH
            if layout is not None:
                serialization = layout["serialization_format"]["type"]
                files[int(rank)] = _inside(layout["file_path"]), serialization
        if set(files) != set(range(world_size)):
            raise ValueError(f"{name!r} has files of ranks {sorted(files)} of {world_size}")
        items[name] = _Item(files, shardings, world_size)
    return items


def _inside(name: str) -> str:
    """Returns the name of a file in the directory or in one below it."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"its file {name!r} is outside of the directory")
    return name


def _path(keys: Sequence[str | int]) -> str:
    return ".".join(map(str, keys))


# ---- Values ----


_Value = Stored | Boxed | Loaded


@dataclass(frozen=True)
class _Shard:
    """The part of a sharded tensor that a rank has.

    Attributes:
        sizes: Sizes of the whole tensor.
        boxes: Its boxes, and their places in the whole tensor.
    """

    sizes: tuple[int, ...]
    boxes: tuple[Placed, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the rank has the whole tensor."""
        return [box.sizes for box in self.boxes] == [self.sizes]


class _Reader:
    """Reads the files of an item, and unites the values of its ranks.

    Attributes:
        values: Path in the item -> rank -> value.
        paths: Path in the item -> its keys.
    """

    def __init__(self, files: Files, name: str, item: _Item) -> None:
        self.files, self.name, self.item = files, name, item
        self.values: dict[str, dict[int, _Value]] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        for rank, (file, serialization) in sorted(item.files.items()):
            try:
                values = self._read(file, serialization)
            except NotFoundError:
                raise NotFoundError(
                    f"cannot load {name!r} of {files.folder}: {file}, the file of rank {rank}, is "
                    "missing"
                ) from None
            for keys, value in values.items():
                path = _path(keys)
                self.paths.setdefault(path, keys)
                self.values.setdefault(path, {})[rank] = value

    def add_to(self, entries: Entries) -> None:
        """Adds the values of the item."""
        count = self.item.world_size or len(self.item.files)
        for path, by_rank in self.values.items():
            keys = (self.name, *self.paths[path])
            shards = {rank: self._shard(path, rank, value) for rank, value in by_rank.items()}
            known = {rank: shard for rank, shard in shards.items() if shard is not None}
            first = next(iter(by_rank.values()))
            if known:
                entries.add(keys, self._united(path, known, by_rank))
            elif all(_same(first, other) for other in by_rank.values()):
                entries.add(keys, first)
            else:
                for rank, value in by_rank.items():
                    assert isinstance(value, Stored | Loaded)
                    entries.add_rank_state(keys, rank, count, value)

    def _read(self, name: str, serialization: str) -> dict[tuple[str | int, ...], _Value]:
        """Reads a file, and returns its values by their keys in the item."""
        path = self.files.folder / name
        if serialization == _TORCH:
            file = self.files.read(name)
            flat, paths = flatten({"": file.state}, file.archive)
            keys = {fqn: tuple(paths[fqn][1:]) for fqn in flat}
            return {keys[fqn]: Stored(file, value, keys[fqn]) for fqn, value in flat.items()}
        if serialization == _SAFETENSORS:
            nbytes, digest, tensors = read_tensors(path, len(self.files.foreign.files))
            self.files.add(name, nbytes, digest)
            return {(fqn,): Boxed(*tensor) for fqn, tensor in tensors.items()}
        if serialization not in (_JSON, _RAW):
            raise UnsupportedError(
                f"cannot load {self.name!r} of {self.files.folder}: {name} is serialized by "
                f"{serialization}"
            )
        data = path.read()
        number = self.files.add(name, len(data), hashlib.sha256(data).digest())
        try:
            value = json.loads(data) if serialization == _JSON else data
        except (ValueError, RecursionError) as error:
            raise CorruptionError(f"cannot read {path}: invalid JSON: {error}") from None
        return {(): Loaded(value, number, len(data))}

    def _shard(self, path: str, rank: int, value: _Value) -> _Shard | None:
        """Returns the part of a tensor that a rank has; ``None`` if the value is not sharded.

        Raises:
            CorruptionError: The sharding is invalid, or is not that of the tensor in the file.
            UnsupportedError: The kind of the sharding is unknown.
        """
        tensor = value.value if isinstance(value, Stored) else value
        if not isinstance(tensor, torch.Tensor | Boxed):
            return None
        stated = self.item.sharding(path, rank)
        try:
            if stated is not None:
                shard = _stated_shard(rank, stated)
            elif isinstance(tensor, DTensor):
                shard = _own_shard(rank, tensor)
            else:
                return None
        except UnsupportedError as error:
            raise UnsupportedError(f"cannot load {self._named(path)}: {error}") from None
        except _INVALID as error:
            raise CorruptionError(
                f"cannot load {self._named(path)}: its sharding on rank {rank} is invalid: "
                f"{type(error).__name__}: {error}"
            ) from None
        sizes = tuple(_local(tensor).shape if isinstance(tensor, torch.Tensor) else tensor.sizes)
        for box in shard.boxes:
            if not fits(box.offsets, box.sizes, sizes) or not fits(box.at, box.sizes, shard.sizes):
                raise CorruptionError(
                    f"cannot load {self._named(path)}: by its sharding, rank {rank} has "
                    f"{list(box.sizes)} of it, and its file has {list(sizes)}"
                )
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and shard.is_whole:
            return None  # A plain tensor. That all ranks have the same one is an assumption.
        return shard

    def _united(
        self, path: str, shards: Mapping[int, _Shard], values: Mapping[int, _Value]
    ) -> Value:
        """Unites the shards of a tensor. Of boxes that several ranks have, the first one serves.

        Raises:
            CorruptionError: The ranks have other sizes or dtypes.
            MismatchError: The shards overlap, or do not cover the tensor.
        """
        if others := sorted(set(values) - set(shards)):
            raise CorruptionError(
                f"cannot load {self._named(path)}: it is sharded on rank {min(shards)}, and not "
                f"on rank {others[0]}"
            )
        if len({shard.sizes for shard in shards.values()}) > 1:
            found = ", ".join(f"{one.sizes} on rank {rank}" for rank, one in shards.items())
            raise CorruptionError(f"cannot load {self._named(path)}: its sizes are {found}")
        sizes = next(iter(shards.values())).sizes
        dtypes = {rank: _dtype(value) for rank, value in values.items()}
        if len(set(dtypes.values())) > 1:
            raise CorruptionError(f"cannot load {self._named(path)}: its dtypes are {dtypes}")
        boxes: dict[Any, Placed] = {}
        for shard in shards.values():
            for box in shard.boxes:
                if math.prod(box.sizes):
                    boxes.setdefault((box.at, box.sizes), box)
        placed = list(boxes.values())
        check_cover(f"{self.name}.{path}", sizes, placed)
        sources = {one.rank: values[one.rank] for one in placed} or values
        dtype = next(iter(dtypes.values()))
        if not all(map(_is_consecutive, sources.values())):
            first = next(iter(sources.values()))
            assert isinstance(first, Stored)
            assemble = functools.partial(_assembled, sizes, dtype, placed, sources)
            return Computed(first.file, dtype, sizes, assemble)
        parts: list[_native.IndexBox] = []
        for one in placed:
            for stored in as_boxed(path, _as_local(sources[one.rank])).boxes:
                parts += part_of_box(stored, one, dtype.itemsize)
        return Boxed(dtype, sizes, parts)

    def _named(self, path: str) -> str:
        return f"{_path((self.name, *self.paths[path]))!r} of {self.files.folder}"


def _stated_shard(rank: int, stated: Mapping[str, Any]) -> _Shard:
    """Returns the shard of a rank by the metadata.

    Raises:
        UnsupportedError: The kind of the sharding is unknown.
        Exception: One of ``_INVALID``: it is invalid.
    """
    kind, facts = stated["type"], stated["data"]
    if kind == "DTensorShardingMetadata":
        mesh = facts["mesh_spec"]
        mesh_sizes = _ints(mesh["mesh_shape"])
        number = mesh["mesh_data"].index(rank)
        strides = [math.prod(mesh_sizes[dim + 1 :]) for dim in range(len(mesh_sizes))]
        coordinate = [
            number // stride % size for size, stride in zip(mesh_sizes, strides, strict=True)
        ]
        placements = [_placement(one) for one in facts["placements"]]
        return _shard_of(rank, _ints(facts["global_shape"]), mesh_sizes, coordinate, placements)
    if kind == "default_tensor_v1":
        parts = (facts["local_offsets"], facts["local_sizes"], facts["global_offsets"])
        boxes = tuple(
            Placed(rank, _ints(local), _ints(sizes), _ints(at))
            for local, sizes, at in zip(*parts, strict=True)
        )
        return _Shard(_ints(facts["global_shape"]), boxes)
    raise UnsupportedError(f"the sharding is of the unknown kind {kind!r}")


def _own_shard(rank: int, tensor: DTensor) -> _Shard:
    """Returns the shard that a DTensor of a file has."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return _Shard(tuple(tensor.shape), ())
    mesh_sizes = tuple(tensor.device_mesh.shape)
    return _shard_of(rank, tuple(tensor.shape), mesh_sizes, coordinate, tensor.placements)


def _shard_of(
    rank: int,
    sizes: tuple[int, ...],
    mesh_sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> _Shard:
    ranges = shard_ranges(sizes, mesh_sizes, coordinate, placements)
    if any(len(of_dim) > 1 for of_dim in ranges):
        raise UnsupportedError("a rank has several ranges of a dimension of a strided shard")
    only = [of_dim[0] if of_dim else (0, 0) for of_dim in ranges]
    box_sizes = tuple(end - begin for begin, end in only)
    at = tuple(begin for begin, _ in only)
    return _Shard(sizes, (Placed(rank, (0,) * len(sizes), box_sizes, at),))


def _placement(stated: Mapping[str, Any]) -> Placement:
    kind = stated["type"]
    if kind == "Replicate":
        return Replicate()
    (dim,) = _ints([stated["dim"]])
    if kind == "Shard":
        return Shard(dim)
    (factor,) = _ints([stated["split_factor"]])
    if kind != "StridedShard" or not 0 < factor <= _MAX_SPLIT:
        raise ValueError(f"unknown placement {stated}")
    return _StridedShard(dim, split_factor=factor)


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(value) is int and 0 <= value <= _MAX_SIZE for value in found):
        raise ValueError(f"{found} are not sizes or offsets")
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _as_local(value: _Value) -> _Value:
    if isinstance(value, Stored):
        return Stored(value.file, _local(value.value), value.keys)
    return value


def _dtype(value: _Value) -> torch.dtype:
    dtype = value.value.dtype if isinstance(value, Stored) else getattr(value, "dtype", None)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _is_consecutive(value: _Value) -> bool:
    """Returns whether a shard is stored as its elements in row-major order."""
    if not isinstance(value, Stored):
        return True
    local = _local(value.value)
    return is_plain(local) and local.is_contiguous()


def _assembled(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    placed: Sequence[Placed],
    sources: Mapping[int, _Value],
) -> torch.Tensor:
    """Reads the shards of a tensor, and returns it."""
    tensor = torch.empty(sizes, dtype=dtype)
    for one in placed:
        source = sources[one.rank]
        assert isinstance(source, Stored)
        local: Any = source.read()
        box = [slice(o, o + n) for o, n in zip(one.offsets, one.sizes, strict=True)]
        at = [slice(o, o + n) for o, n in zip(one.at, one.sizes, strict=True)]
        tensor[tuple(at)] = _local(local)[tuple(box)]
    return tensor


def _same(value: _Value, other: _Value) -> bool:
    """Returns whether two ranks have the same value. Compares tensors by their CRC-32."""
    if isinstance(value, Stored) and isinstance(other, Stored):
        if isinstance(value.value, torch.Tensor) and not is_plain(value.value):
            return value is other  # Only torch can read it.
        return value.file.same_value(value.value, other.file, other.value)
    if isinstance(value, Loaded) and isinstance(other, Loaded):
        return repr(value.value) == repr(other.value)
    return value is other
