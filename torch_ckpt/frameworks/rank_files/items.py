"""Items: values that each rank wrote into one file, and how they are sharded over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.formats.placements import shard_boxes
from torch_ckpt.formats.unions import Placed, fits

__all__ = [
    "JSON",
    "RAW",
    "SAFETENSORS",
    "TORCH",
    "Item",
    "ItemFile",
    "RankShard",
    "item_of_ranks",
    "mesh_sizes",
    "path_of",
    "shard_of",
    "shard_of_tensor",
]

TORCH, JSON, RAW, SAFETENSORS = (
    f"{kind}Serialization" for kind in ("Torch", "Json", "Raw", "Safetensors")
)
"""How a file is serialized."""


class ItemFile(NamedTuple):
    """The file of an item that a rank wrote.

    ``serialization`` is one of ``TORCH``, ``JSON``, ``RAW`` and ``SAFETENSORS``. ``is_required``:
    whether the rank has tensors of the item according to the metadata.
    """

    name: str
    serialization: str
    is_required: bool


class RankShard(NamedTuple):
    """The boxes of a sharded tensor on a rank, and their places in the whole tensor.

    ``has_rest``: whether the rank may have elements outside all boxes.
    """

    sizes: tuple[int, ...]
    boxes: tuple[Placed, ...]
    has_rest: bool = False

    def __str__(self) -> str:
        boxes = " and ".join(f"{list(box.sizes)} at {list(box.at)}" for box in self.boxes)
        return f"{boxes or 'nothing'} of {list(self.sizes)}"

    def fits(self, sizes: tuple[int, ...]) -> bool:
        """Returns whether a local tensor of these sizes can have the boxes."""
        if any(not fits(box.at, box.sizes, self.sizes) for box in self.boxes):
            return False
        if self.has_rest:
            return all(fits(box.offsets, box.sizes, sizes) for box in self.boxes)
        ends = (map(sum, zip(box.offsets, box.sizes, strict=True)) for box in self.boxes)
        own = tuple(map(max, zip(*ends, strict=True))) if self.boxes else (0,)
        return own == sizes or not (math.prod(own) or math.prod(sizes))

    @property
    def is_whole(self) -> bool:
        """Whether the rank has the whole tensor."""
        return not self.has_rest and [box.sizes for box in self.boxes] == [self.sizes]


class Sharding(Protocol):
    """How a tensor is sharded over the ranks of a group."""

    def of(self, rank: int, limit: int) -> RankShard:
        """Returns the shard of a rank.

        Raises UnsupportedError if the kind of the sharding is unknown, and one of ``INVALID`` if it
        is invalid, or has more boxes than ``limit``.
        """
        ...


@dataclass
class Item:
    """What is known about an item before its files are read. ``ranks`` ranks saved it."""

    files: dict[int, ItemFile]
    ranks: int
    _shardings: Mapping[str, Sequence[tuple[Sharding, Sequence[int]]]] = field(default_factory=dict)

    def paths(self) -> set[str]:
        """Returns the paths of the tensors that the metadata states."""
        return set(self._shardings)

    def shardings(self, path: str) -> dict[int, Sharding]:
        """Returns, by rank, how the tensor at a path in the item is sharded, as far as known."""
        groups = self._shardings.get(path, ())
        return {rank: sharding for sharding, ranks in groups for rank in ranks}


def item_of_ranks(name: str, ranks: int) -> Item:
    """Returns an item for which each rank wrote a ``torch.save`` file: ``name.format(rank)``."""
    files = {rank: ItemFile(name.format(rank), TORCH, is_required=True) for rank in range(ranks)}
    return Item(files, ranks)


def path_of(keys: Iterable[str | int]) -> str:
    """Returns the path of a value in its item, as in its FQN."""
    return ".".join(map(str, keys))


def shard_of_tensor(rank: int, tensor: DTensor, limit: int) -> RankShard:
    """Returns the shard that a DTensor in a file contains.

    Raises UnsupportedError if it has a placement other than a shard or a replica, and one of
    ``INVALID`` if it is damaged, or has more boxes than ``limit``.
    """
    mesh: DeviceMesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    sizes = tuple(tensor.shape)
    if coordinate is None:
        return RankShard(sizes, ())
    return shard_of(rank, sizes, mesh_sizes(mesh), coordinate, tensor.placements, limit)


def mesh_sizes(mesh: DeviceMesh) -> tuple[int, ...]:
    """Returns the sizes of a mesh of a file, which another version of torch may have written."""
    ranks = vars(mesh).get("mesh")  # Later versions compute it.
    return tuple(mesh.shape if ranks is None else ranks.shape)


def shard_of(
    rank: int,
    sizes: tuple[int, ...],
    of_mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    limit: int,
) -> RankShard:
    """Returns the shard of a rank by its coordinate in a mesh of sizes ``of_mesh``.

    Raises as :func:`shard_of_tensor`.
    """
    for placement in placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            raise UnsupportedError(f"it has the placement {placement}")
    boxes = shard_boxes(sizes, of_mesh, coordinate, placements, limit)
    return RankShard(
        sizes, tuple(Placed(rank, box.local_offsets, box.sizes, box.offsets) for box in boxes)
    )
