"""How the shards of a parameter on several ranks form the whole parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch_ckpt._core import _native
from torch_ckpt.errors import MismatchError

__all__ = [
    "Average",
    "Boxes",
    "Fused",
    "Operator",
    "Placed",
    "Replicated",
    "Shard",
    "Shards",
    "Sizes",
    "Union",
    "Unique",
    "check_cover",
    "fits",
    "listed",
    "slices",
]

Sizes = tuple[int, ...]
Shards = Mapping[int, Sizes]
"""Rank -> sizes of its shard of a parameter."""


@dataclass(frozen=True)
class Placed:
    """A box of a shard, its offsets in the shard, and its offsets ``at`` in the whole parameter.

    The shard contains the elements multiplied by ``scale``.
    """

    rank: int
    offsets: Sizes
    sizes: Sizes
    at: Sizes
    scale: float = 1.0


@dataclass(frozen=True)
class Operator:
    """A step from shards to a parameter. Prints as in the text of a rule."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not _is_of(value, str(one.type)):
                kind = str(one.type).replace("int", "int from 0 on")
                raise ValueError(f"{one.name} of {self.name} is {_text(value)}, not {kind}")

    def __str__(self) -> str:
        values = [getattr(self, one.name) for one in fields(self)]
        while values and values[-1] is None:
            values.pop()
        return f"{self.name}({', '.join(map(_text, values))})" if values else self.name


class Union(Operator):
    """An operator that unites the shards of ranks."""

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        """Returns the sizes of the whole parameter, and the boxes that form it.

        The shards are in the order of the ranks. Raises MismatchError if they cannot be united.
        """
        raise NotImplementedError


def _whole(shards: Shards) -> tuple[Sizes, list[Placed]]:
    rank, sizes = next(iter(shards.items()))
    origin = (0,) * len(sizes)
    return sizes, [Placed(rank, origin, sizes, origin)]


@dataclass(frozen=True)
class Unique(Union):
    """One rank has the parameter."""

    name = "unique"

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        if len(shards) > 1:
            raise MismatchError(f"{fqn!r} is unique, but ranks {listed(shards)} have it")
        return _whole(shards)


class _OfEqualSizes(Union):
    """All ranks have the whole parameter."""

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        if len(set(shards.values())) > 1:
            raise MismatchError(
                f"{fqn!r} is {self.name}, but has sizes {_sizes_by_rank(shards)} on its ranks"
            )
        return _whole(shards)


@dataclass(frozen=True)
class Replicated(_OfEqualSizes):
    """All ranks have the same elements. A load of a small parameter checks that."""

    name = "replicated"


@dataclass(frozen=True)
class Average(_OfEqualSizes):
    """The parameter is the mean over the ranks."""

    name = "average"


@dataclass(frozen=True)
class Shard(Union):
    """The shards are concatenated along a dimension."""

    dim: int

    name = "shard"

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        widths = _widths(fqn, shards, self.dim)
        first = next(iter(shards.values()))
        placed: list[Placed] = []
        end = 0
        for (rank, sizes), width in zip(shards.items(), widths, strict=True):
            placed.append(Placed(rank, (0,) * len(sizes), sizes, _at(sizes, self.dim, end)))
            end += width
        return _replaced(first, self.dim, end), placed


@dataclass(frozen=True)
class Fused(Union):
    """Several parameters in one, each of which is sharded: QKV, or gate and up.

    ``sizes`` are their sizes along ``dim``, in which they are concatenated and sharded. ``widths``
    contains, for each of them, its size on each rank; by default, all ranks have equal sizes.
    """

    sizes: tuple[int, ...]
    dim: int
    widths: tuple[tuple[int, ...], ...] | None = None

    name = "fused"

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = self.widths or ()
        if widths and (len(widths) != len(self.sizes) or len(set(map(len, widths))) > 1):
            raise ValueError("widths of fused does not have a size of each parameter on each rank")

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        count = len(shards)
        widths = self.widths
        if widths is None:
            if any(size % count for size in self.sizes):
                raise MismatchError(
                    f"{fqn!r} is {self}, but {count} ranks cannot have equal parts of it"
                )
            widths = tuple((size // count,) * count for size in self.sizes)
        found = _widths(fqn, shards, self.dim)
        asked = [sum(of_ranks) for of_ranks in zip(*widths, strict=True)]
        if asked != found or [sum(of_part) for of_part in widths] != list(self.sizes):
            raise MismatchError(
                f"{fqn!r} is {self}, but has sizes {_sizes_by_rank(shards)} on its ranks"
            )
        placed: list[Placed] = []
        begins, at = [0] * count, 0
        for of_part in widths:
            for number, (rank, sizes) in enumerate(shards.items()):
                box = _replaced(sizes, self.dim, of_part[number])
                offsets = _at(sizes, self.dim, begins[number])
                if of_part[number]:
                    placed.append(Placed(rank, offsets, box, _at(sizes, self.dim, at)))
                begins[number] += of_part[number]
                at += of_part[number]
        return _replaced(next(iter(shards.values())), self.dim, at), placed


@dataclass(frozen=True)
class Boxes(Union):
    """Arbitrary boxes: rank, offsets in its shard, sizes, and offsets in the whole parameter.

    An optional fifth element is the factor by which the elements in the shard are multiplied.
    """

    sizes: tuple[int, ...]
    boxes: tuple[tuple[Any, ...], ...]

    name = "boxes"

    def __post_init__(self) -> None:
        super().__post_init__()
        for box in self.boxes:
            sizes = "tuple[int, ...]"
            kinds = ["int", sizes, sizes, sizes]
            scale = box[4] if isinstance(box, tuple) and len(box) == 5 else 1.0
            scale = float(scale) if type(scale) is int and abs(scale) < 2**53 else scale
            is_box = isinstance(box, tuple) and len(box) in (4, 5)
            if (
                not is_box
                or not all(map(_is_of, box, kinds))
                or type(scale) is not float
                or not (scale and math.isfinite(scale))
            ):
                raise ValueError(
                    f"{_text(box)} is not a box: rank, offsets, sizes, offsets in the whole, and "
                    "perhaps a factor"
                )

    def place(self, fqn: str, shards: Shards) -> tuple[Sizes, list[Placed]]:
        placed = [one for box in self.boxes if math.prod((one := Placed(*box)).sizes)]
        for one in placed:
            inside = one.rank in shards and fits(one.offsets, one.sizes, shards[one.rank])
            if not inside or not fits(one.at, one.sizes, self.sizes):
                raise MismatchError(
                    f"{fqn!r} cannot be united: box {one.offsets} of {one.sizes} of rank "
                    f"{one.rank} at {one.at} exceeds its shard, {shards.get(one.rank)}, or the "
                    f"whole parameter, {self.sizes}"
                )
        return self.sizes, placed


def check_cover(fqn: str, sizes: Sizes, placed: Sequence[Placed]) -> None:
    """Raises MismatchError unless boxes cover each element of a parameter once."""
    boxes = [(one.at, one.sizes) for one in placed]
    fault = _native.cover_fault(((0,) * len(sizes), sizes), boxes)
    if fault is None:
        return
    is_missing, (at, part) = fault
    if is_missing:
        covered = sum(math.prod(one.sizes) for one in placed)
        raise MismatchError(
            f"{fqn!r} of sizes {sizes} has {math.prod(sizes)} elements, and its ranks have "
            f"{covered} of them: no rank has the box at {tuple(at)} of {tuple(part)}"
        )
    one, other = [
        one
        for one in placed
        if all(
            first <= a and a + n <= first + size
            for first, size, a, n in zip(one.at, one.sizes, at, part, strict=True)
        )
    ][:2]
    raise MismatchError(
        f"{fqn!r} has elements of both rank {one.rank} and rank {other.rank}: boxes at "
        f"{one.at} of {one.sizes} and at {other.at} of {other.sizes}"
    )


def _is_of(value: Any, kind: str) -> bool:
    """Returns whether a value is of the annotated type of a field."""
    if kind == "int":
        return type(value) is int and value >= 0
    if kind == "str":
        return isinstance(value, str)
    if kind.endswith("| None"):
        return value is None or _is_of(value, kind.removesuffix(" | None"))
    if not isinstance(value, tuple):
        return False
    inner = kind.removeprefix("tuple[").removesuffix(", ...]")
    return inner.startswith("tuple[Any") or all(_is_of(one, inner) for one in value)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _widths(fqn: str, shards: Shards, dim: int) -> list[int]:
    """Returns the sizes along a dimension, if the other sizes are equal."""
    first = next(iter(shards.values()))
    if not 0 <= dim < len(first):
        raise MismatchError(f"{fqn!r} of sizes {first} has no dimension {dim}")
    if len({_replaced(sizes, dim, 0) for sizes in shards.values()}) > 1:
        raise MismatchError(
            f"{fqn!r} cannot be united along dimension {dim}: its ranks have sizes "
            f"{_sizes_by_rank(shards)}"
        )
    return [sizes[dim] for sizes in shards.values()]


def _replaced(sizes: Sizes, dim: int, size: int) -> Sizes:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _at(sizes: Sizes, dim: int, offset: int) -> Sizes:
    return _replaced((0,) * len(sizes), dim, offset)


def fits(offsets: Sizes, sizes: Sizes, within: Sizes) -> bool:
    """Returns whether a box lies within a tensor of other sizes."""
    return len(offsets) == len(sizes) == len(within) and all(
        offset >= 0 and size >= 0 and offset + size <= end
        for offset, size, end in zip(offsets, sizes, within, strict=True)
    )


def slices(offsets: Sizes, sizes: Sizes) -> tuple[slice, ...]:
    """Returns the slices that select a box of a tensor."""
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def _sizes_by_rank(shards: Shards) -> str:
    return ", ".join(f"{sizes} on rank {rank}" for rank, sizes in shards.items())


def listed(ranks: Iterable[int]) -> str:
    """Returns ranks as text."""
    return ", ".join(map(str, ranks))
