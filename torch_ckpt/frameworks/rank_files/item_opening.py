"""Opens directories in which each rank wrote a file for each item, without a conversion.

A ``DTensor`` in a file states its own box. The FQNs are ``<item>.<path in the item>``.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_ckpt._core.tensors import gc_paused
from torch_ckpt.errors import (
    CheckpointError,
    CorruptionError,
    MismatchError,
    NotFoundError,
    UnsupportedError,
)
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.allowed_classes import StandIns
from torch_ckpt.formats.data_classes import NeedsState
from torch_ckpt.formats.equality import is_equal
from torch_ckpt.formats.opened import Opened
from torch_ckpt.formats.safetensors.opening import read_tensors
from torch_ckpt.formats.torch_save import flatten, has_boxes, is_plain
from torch_ckpt.formats.unions import Placed, check_cover, slices
from torch_ckpt.frameworks.rank_files import sharded_tensors
from torch_ckpt.frameworks.rank_files.entries import Entries
from torch_ckpt.frameworks.rank_files.files import (
    INVALID,
    Boxed,
    Computed,
    Files,
    Loaded,
    Stored,
    Unreadable,
    as_boxed,
    united,
)
from torch_ckpt.frameworks.rank_files.items import (
    JSON,
    RAW,
    SAFETENSORS,
    TORCH,
    Item,
    RankShard,
    mesh_sizes,
    path_of,
    shard_of_tensor,
)
from torch_ckpt.frameworks.rank_files.sharded_tensors import ShardedParts
from torch_ckpt.options import Verification
from torch_ckpt.stored_json import from_json

__all__ = ["open_items"]

_COMPARED_NBYTES = 1 << 20
"""Tensors of safetensors, which have no checksums, are compared up to this size."""

_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)

_Keys = tuple[str | int, ...]
_Tensor = Stored | Boxed
_SHARDED = (DTensor, ShardedParts, ShardedTensor)
_Value = _Tensor | Loaded


def _mesh() -> NeedsState:
    """Builds a mesh without process groups, which the mesh of a checkpoint does not have."""

    def make(state: Any) -> DeviceMesh:
        mesh = DeviceMesh.__new__(DeviceMesh)
        vars(mesh).update(state)
        return mesh

    return NeedsState(make)


_STAND_INS: StandIns = {
    "torch.distributed.device_mesh.DeviceMesh": _mesh,
    **sharded_tensors.STAND_INS,
}


def open_items(
    path: Location,
    format: str,
    items: Mapping[str, Item],
    *,
    verify: Verification,
    trust_pickle: bool,
) -> Opened:
    """Opens the items of a directory of this format.

    A value that several ranks have whole is loaded from the first of them. If it differs between
    the ranks, each has it as an object under the name of a ``RankState``:
    ``rng.rank_00003_of_00008``.

    A value is unreadable if its ranks contradict one another or the metadata, or if it is sharded
    in a way that this package does not know. If the file of a rank is missing or damaged, all
    values of its item are unreadable, since any of them may be in the file. Raises CheckpointError
    if no file can be read.
    """
    files = Files(path, format, verify=verify, trust_pickle=trust_pickle, stand_ins=_STAND_INS)
    entries = Entries(files)
    with gc_paused():
        for name, item in sorted(items.items()):
            _Reader(files, name, item).add_to(entries)
        return entries.opened()


class _Reader:
    """Reads the files of an item, and unites the values of its ranks.

    ``values`` is path in the item -> rank -> value. ``errors`` is path -> why the value cannot be
    loaded. ``error`` is the error of the first rank whose file cannot be read.
    """

    def __init__(self, files: Files, name: str, item: Item) -> None:
        self.files, self.name, self.item = files, name, item
        self.values: dict[str, dict[int, _Value]] = {}
        self.keys: dict[str, _Keys] = {}
        self.errors: dict[str, CheckpointError] = {}
        self.error: CheckpointError | None = None
        for rank, file in sorted(item.files.items()):
            try:
                values = self._read(file.name, file.serialization)
            except NotFoundError:
                if file.is_required:
                    self.error = self.error or NotFoundError(
                        f"cannot load {name!r} of {files.folder}: {file.name}, the file of rank "
                        f"{rank}, is missing"
                    )
                continue
            except (CorruptionError, UnsupportedError) as error:
                self.error = self.error or error
                continue
            for keys, value in values.items():
                path = path_of(keys)
                self.keys.setdefault(path, keys)
                if isinstance(value, CheckpointError):
                    self.errors[path] = value
                else:
                    self.values.setdefault(path, {})[rank] = value

    def add_to(self, entries: Entries) -> None:
        """Adds the values of the item."""
        for path in self.item.paths() - set(self.keys):
            self.keys[path] = (path,)
            self.errors[path] = CorruptionError(
                f"cannot load {path_of((self.name, path))!r} of {self.files.folder}: the metadata "
                "has it, and no file of a rank"
            )
        if self.error is not None:
            self.keys = self.keys or {"": ()}
            self.errors = dict.fromkeys(self.keys, self.error)
        for path, keys in self.keys.items():
            if (why := self.errors.get(path)) is None:
                why = self._failure(entries, path, (self.name, *keys))
            if why is not None:
                entries.add((self.name, *keys), Unreadable(why))

    def _failure(self, entries: Entries, path: str, keys: _Keys) -> CheckpointError | None:
        """Adds a value. Returns the error if the value cannot be loaded."""
        try:
            self._add(entries, path, keys, self.values[path])
        except (CorruptionError, MismatchError, NotFoundError, UnsupportedError) as error:
            return error
        except RecursionError:
            return CorruptionError(f"cannot load {self._named(path)}: it is nested too deeply")
        return None

    def _add(self, entries: Entries, path: str, keys: _Keys, by_rank: Mapping[int, _Value]) -> None:
        """Adds a value, or raises a CheckpointError if it cannot be loaded."""
        self._check_inner(path, by_rank)
        shards = self._shards(path, by_rank)
        self._check_meshes(path, by_rank)
        by_rank = {
            rank: _local(value) if isinstance(value, Stored) else value
            for rank, value in by_rank.items()
        }
        first = next(iter(by_rank.values()))
        if shards and not all(shard.is_whole for shard in shards.values()):
            tensors = {rank: one for rank, one in by_rank.items() if not isinstance(one, Loaded)}
            entries.add(keys, self._united(path, shards, tensors))
        elif all(self._same(first, other) for other in by_rank.values()):
            entries.add(keys, first)
        else:
            for rank, value in by_rank.items():
                entries.add_rank_state(keys, rank, self.item.ranks, value)

    def _read(self, name: str, serialization: str) -> Mapping[_Keys, _Value | CheckpointError]:
        """Reads a file, and returns its values by their keys in the item."""
        path = self.files.folder / name
        if serialization == TORCH:
            file = self.files.read(name)
            flat, paths = flatten({"": file.state}, file.archive)
            keys = {fqn: tuple(paths[fqn][1:]) for fqn in flat}
            return {keys[fqn]: Stored(file, value, keys[fqn]) for fqn, value in flat.items()}
        if serialization == SAFETENSORS:
            nbytes, digest, tensors = read_tensors(path, len(self.files.foreign.files))
            self.files.add(name, nbytes, digest)
            return {
                (fqn,): found if isinstance(found, CheckpointError) else Boxed(*found)
                for fqn, found in tensors.items()
            }
        if serialization not in (JSON, RAW):
            raise UnsupportedError(
                f"cannot load {self.name!r} of {self.files.folder}: {name} is serialized by "
                f"{serialization}"
            )
        data = path.read()
        number = self.files.add(name, len(data), hashlib.sha256(data).digest())
        try:
            value = from_json(data, lambda parsed: parsed) if serialization == JSON else data
        except ValueError as error:
            raise CorruptionError(f"cannot read {path}: invalid JSON: {error}") from None
        return {(): Loaded(value, number, len(data))}

    def _check_inner(self, path: str, values: Mapping[int, _Value]) -> None:
        """Checks that no object contains a shard, since the shards of other ranks would be lost."""
        for rank, value in values.items():
            leaf = None if isinstance(value, Boxed) else value.value
            if isinstance(leaf, ShardedTensor):  # Its class allows no other rank to read it.
                raise UnsupportedError(
                    f"cannot load {self._named(path)}: it is a ShardedTensor, which needs a load "
                    "without trust_pickle"
                )
            inner = next((one for one in _inner(leaf) if isinstance(one, _SHARDED)), None)
            if inner is not None:
                kind = "DTensor" if isinstance(inner, DTensor) else "ShardedTensor"
                raise UnsupportedError(
                    f"cannot load {self._named(path)}: on rank {rank} it is a "
                    f"{type(leaf).__name__} that contains a {kind}; only dicts and lists may"
                )

    def _shards(self, path: str, values: Mapping[int, _Value]) -> dict[int, RankShard]:
        """Returns the shard of each rank; none if the value is not a sharded tensor.

        Raises CorruptionError if a sharding is invalid, or not that of the tensor in the file, and
        UnsupportedError if a tensor is sharded in a way that this package does not know.
        """
        shardings = self.item.shardings(path)
        shards: dict[int, RankShard] = {}
        for rank, value in values.items():
            tensor = value.value if isinstance(value, Stored) else value
            if isinstance(value, Loaded) or not (isinstance(value, Boxed) or has_boxes(tensor)):
                continue
            try:
                limit = self.files.box_limit
                shard = shardings[rank].of(rank, limit) if rank in shardings else None
                own = _own_shard(rank, tensor, limit, is_needed=shard is None)
                sizes = (_local(value) if isinstance(value, Stored) else value).sizes
            except UnsupportedError as error:
                raise UnsupportedError(f"cannot load {self._named(path)}: {error}") from None
            except INVALID as error:
                raise CorruptionError(
                    f"cannot load {self._named(path)}: its sharding on rank {rank} is invalid: "
                    f"{type(error).__name__}: {error}"
                ) from None
            shard, stated = shard or own, shard
            if shard is None:
                continue
            self.files.add_boxes(len(shard.boxes))
            if own is not None and stated is not None and own != stated:
                raise CorruptionError(
                    f"cannot load {self._named(path)}: rank {rank} has {stated} by the metadata, "
                    f"and {own} by its file"
                )
            if not shard.fits(sizes):
                # Torch describes some uneven shards of FSDP2 over tensor parallelism wrongly.
                kind = UnsupportedError if own and isinstance(tensor, DTensor) else CorruptionError
                raise kind(
                    f"cannot load {self._named(path)}: by its sharding, rank {rank} has {shard} of "
                    f"it, and {self.item.files[rank].name} has {list(sizes)}"
                )
            shards[rank] = shard
        if shards and (others := sorted(set(values) - set(shards))):
            raise UnsupportedError(
                f"cannot load {self._named(path)}: it is sharded on rank {min(shards)}, and not "
                f"on rank {others[0]}"
            )
        return shards

    def _check_meshes(self, path: str, values: Mapping[int, _Value]) -> None:
        """Checks that DTensors are on meshes of equal sizes, and that their ranks have files."""
        meshes = {
            rank: _mesh_of(value.value)
            for rank, value in values.items()
            if isinstance(value, Stored) and isinstance(value.value, _SHARDED)
        }
        for rank, sizes in meshes.items():
            first, of_first = next(iter(meshes.items()))
            files = [self.item.files[one].name for one in (first, rank)]
            if sizes != of_first:
                raise CorruptionError(
                    f"cannot load {self._named(path)}: it is on a mesh of {list(of_first)} in "
                    f"{files[0]}, and of {list(sizes)} in {files[1]}; are they of one save?"
                )
            if math.prod(sizes) > self.item.ranks:
                raise NotFoundError(
                    f"cannot load {self._named(path)}: by {files[1]}, {math.prod(sizes)} ranks "
                    f"have saved it, and the file of rank {self.item.ranks} is missing"
                )

    def _united(
        self, path: str, shards: Mapping[int, RankShard], values: Mapping[int, _Tensor]
    ) -> Boxed | Computed:
        """Unites the shards of a tensor. If several ranks have a box, that of the first is used.

        Raises CorruptionError if sizes or dtypes differ between ranks, and MismatchError if the
        shards overlap or do not cover the tensor, or if the elements of a shard differ between
        ranks.
        """
        if len({shard.sizes for shard in shards.values()}) > 1:
            found = ", ".join(
                f"{one.sizes} in {self.item.files[rank].name}" for rank, one in shards.items()
            )
            raise CorruptionError(f"cannot load {self._named(path)}: its sizes are {found}")
        sizes = next(iter(shards.values())).sizes
        dtypes = {rank: value.dtype for rank, value in values.items()}
        if len(set(dtypes.values())) > 1:
            raise CorruptionError(f"cannot load {self._named(path)}: its dtypes are {dtypes}")
        boxes: dict[Any, Placed] = {}
        for rank, shard in shards.items():
            for box in shard.boxes:
                if not math.prod(box.sizes):
                    continue
                first = boxes.setdefault((box.at, box.sizes), box)
                if first is not box and not self._same_box(first, box, values):
                    raise MismatchError(
                        f"cannot load {self._named(path)}: ranks {first.rank} and {rank} have the "
                        "same shard of it, with other elements"
                    )
        placed = list(boxes.values())
        check_cover(f"{self.name}.{path}", sizes, placed)
        dtype = next(iter(dtypes.values()))
        values = {one.rank: values[one.rank] for one in placed}
        stored = [value for value in values.values() if isinstance(value, Stored)]
        if stored and not all(map(_is_consecutive, values.values())):
            assemble = functools.partial(self._assembled, sizes, dtype, placed, values)
            return Computed(stored[0].file, dtype, sizes, assemble)
        boxed = {one.rank: as_boxed(path, values[one.rank]) for one in placed}
        return united(dtype, sizes, placed, boxed)

    def _same_box(self, box: Placed, other: Placed, values: Mapping[int, _Tensor]) -> bool:
        """Returns whether two ranks have the same elements in their boxes."""
        pair = [(values[one.rank], one) for one in (box, other)]
        if all(value.sizes == one.sizes for value, one in pair):
            return self._same(pair[0][0], pair[1][0])
        parts = (
            self.files.read_value(value)[slices(one.offsets, one.sizes)] for value, one in pair
        )
        return is_equal(*parts)

    def _assembled(
        self,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        placed: Sequence[Placed],
        values: Mapping[int, _Tensor],
    ) -> torch.Tensor:
        """Reads the shards of a tensor, and returns it."""
        tensor = torch.empty(sizes, dtype=dtype, device="cpu")
        for one in placed:
            local = self.files.read_value(values[one.rank])
            tensor[slices(one.at, one.sizes)] = local[slices(one.offsets, one.sizes)]
        return tensor

    def _same(self, value: _Value, other: _Value) -> bool:
        """Returns whether two ranks have the same value. Values that cannot be compared differ.

        Tensors of safetensors, which have no checksums, are assumed to be equal beyond 1 MiB.
        Raises UnsupportedError if the class of the value is forbidden.
        """
        if value is other:
            return True
        if isinstance(value, Boxed) and isinstance(other, Boxed):
            if (value.dtype, value.sizes) != (other.dtype, other.sizes):
                return False
            return value.nbytes > _COMPARED_NBYTES or is_equal(
                *map(self.files.read_value, (value, other))
            )
        if isinstance(value, Stored) and isinstance(other, Stored):
            tensors = value.value, other.value
            if all(isinstance(one, torch.Tensor) and is_plain(one) for one in tensors):
                same = value.file.same_record(tensors[0], other.file, tensors[1])
                if same is not None:
                    return same
        try:
            return is_equal(*map(self.files.read_value, (value, other)))
        except UnsupportedError:
            raise
        except Exception:
            return False

    def _named(self, path: str) -> str:
        return f"{path_of((self.name, *self.keys[path]))!r} of {self.files.folder}"


class _Local(Stored):
    """The part of a DTensor or ShardedTensor that a file has."""

    def read(self) -> object:
        return _local_tensor(super().read())


def _local(value: Stored) -> Stored:
    """Returns the local tensor of a DTensor or ShardedTensor; other values as they are."""
    if not isinstance(value.value, _SHARDED):
        return value
    local = _local_tensor(value.value)
    if not isinstance(local, torch.Tensor):
        raise TypeError(f"its local tensor is a {type(local).__name__}")
    return _Local(value.file, local, value.keys)


def _local_tensor(value: object) -> object:
    if isinstance(value, DTensor):
        return value._local_tensor
    if isinstance(value, ShardedParts):  # No parts if ranks outnumber rows.
        none = torch.empty(0, dtype=value.dtype, device="cpu")
        return value.parts[0].tensor if value.parts else none
    return value


def _mesh_of(value: object) -> tuple[int, ...]:
    if isinstance(value, ShardedParts):
        return (value.ranks,)
    assert isinstance(value, DTensor)
    return mesh_sizes(value.device_mesh)


def _own_shard(rank: int, tensor: object, limit: int, *, is_needed: bool) -> RankShard | None:
    """Returns the shard that the tensor in the file describes, if this torch can read it."""
    if isinstance(tensor, ShardedParts):
        return _shard_of_parts(rank, tensor)
    if not isinstance(tensor, DTensor):
        return None
    try:
        return shard_of_tensor(rank, tensor, limit)
    except INVALID:
        if is_needed:
            raise
        return None


def _shard_of_parts(rank: int, tensor: ShardedParts) -> RankShard:
    if len(tensor.parts) > 1:
        raise UnsupportedError("it is a ShardedTensor of which a rank has several shards")
    boxes = (
        Placed(rank, (0,) * part.ndim, tuple(part.shape), offsets) for part, offsets in tensor.parts
    )
    return RankShard(tuple(tensor.shape), tuple(boxes))


def _inner(value: object) -> Iterator[object]:
    """Yields the contents of the containers in an object, at any depth."""
    stack = [value] if isinstance(value, _CONTAINERS) else []
    seen: set[int] = set()
    while stack:
        container = stack.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        for one in container.values() if isinstance(container, dict) else container:
            if isinstance(one, _CONTAINERS):
                stack.append(one)
            else:
                yield one


def _is_consecutive(value: _Tensor) -> bool:
    """Returns whether a shard is stored as its elements in row-major order."""
    if not isinstance(value, Stored):
        return True
    tensor = value.value
    record = value.file.archive.record_of("", tensor) if is_plain(tensor) else None
    return record is not None and tensor.is_contiguous()
