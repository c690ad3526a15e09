"""Compares two checkpoints of any formats in bounded memory."""

from __future__ import annotations

import collections
import math
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_ckpt._core.tensors import DTYPE_CODES, bytes_of
from torch_ckpt.errors import NotFoundError, UnsupportedError, text_of
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.equality import is_equal
from torch_ckpt.formats.expansion import allowed_nbytes
from torch_ckpt.storage.stored_values import Box, StoredValues, in_batches, pieces_of

__all__ = ["Comparison", "compare"]

_PIECE_NBYTES = 64 << 20
"""Bytes of each checkpoint in memory at a time, counting at least 8 bytes per element."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 40

_MAX_DEPTH = 8
"""Depth of containers down to which differences are searched."""

_SHOWN_BEFORE = 10
"""Characters shown before the first difference between two strings."""

_VALUE_NBYTES = 64
"""Bytes charged for each value in an object."""


@dataclass
class Comparison:
    """The result of a comparison: the number of equal values, and FQN -> difference or obstacle.

    ``budget`` is the number of bytes of objects that may still be compared.
    """

    equal: int = 0
    differences: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    budget: float = 0.0


def compare(
    a: Location,
    b: Location,
    *,
    prefix: str = "",
    atol: float = 0.0,
    rtol: float = 0.0,
    trust_pickle: bool = False,
    rules: str | None = None,
) -> Comparison:
    """Compares two checkpoints of any formats, value by value.

    Compares only FQNs with the prefix, and removes the prefix. If one checkpoint has no such FQN,
    all of its FQNs are compared; if neither has one, raises NotFoundError. With both tolerances 0,
    tensors must be equal bit for bit; ``rtol`` is relative to ``b``. The rules apply to ``a``.
    """
    one = StoredValues(a, prefix, trust_pickle=trust_pickle, rules=rules)
    two = StoredValues(b, prefix, trust_pickle=trust_pickle)
    sides = [one, two]
    if not one.has_prefix and not two.has_prefix:
        raise NotFoundError(f"neither {a} nor {b} has a name that begins with {prefix!r}")
    found = Comparison()
    for fqn in sorted(one.names.keys() ^ two.names.keys()):
        where = "A" if fqn in one.names else "B"
        found.differences[fqn] = f"only in {where}"
    tensors: list[str] = []
    objects: list[str] = []
    for fqn in sorted(one.names.keys() & two.names.keys()):
        entries = [side.entry(fqn) for side in sides]
        kinds = [isinstance(entry, TensorStorageMetadata) for entry in entries]
        if not all(kinds):
            if any(kinds):
                found.differences[fqn] = "a tensor in one, an object in the other"
            else:
                objects.append(fqn)
            continue
        facts = [f"{entry.properties.dtype} {list(entry.size)}" for entry in entries]
        if facts[0] != facts[1]:
            found.differences[fqn] = f"{facts[0]} in A, {facts[1]} in B"
        elif entries[0].properties.dtype not in DTYPE_CODES:
            found.unknown[fqn] = f"only torch can read tensors of {entries[0].properties.dtype}"
        elif why := one.why_oversized.get(fqn) or two.why_oversized.get(fqn):
            found.unknown[fqn] = why
        else:
            tensors.append(fqn)
    _compare_tensors(sides, tensors, found, atol, rtol)
    if objects:
        found.budget = (
            math.inf if trust_pickle else sum(allowed_nbytes(side.stored_nbytes) for side in sides)
        )
        _compare_objects(sides, objects, found)
    return found


def _compare_tensors(
    sides: Sequence[StoredValues], fqns: Sequence[str], found: Comparison, atol: float, rtol: float
) -> None:
    different: dict[str, tuple[int, float]] = {}  # Count, largest absolute difference.
    for batch in in_batches(_pieces(sides[0], fqns), _PIECE_NBYTES):
        for fqn, x, y in _loaded(sides, batch, found):
            count, largest = _difference(x, y, atol, rtol)
            if count:
                known = different.get(fqn, (0, 0.0))
                different[fqn] = known[0] + count, _larger(known[1], largest)
    compared = [fqn for fqn in fqns if fqn not in found.unknown]
    for fqn in compared:
        if fqn in different:
            count, largest = different[fqn]
            numel = sides[0].entry(fqn).size.numel()
            found.differences[fqn] = f"{count} of {numel} elements differ, by {largest:.6g} at most"
            found.equal -= 1
    found.equal += len(compared)


def _loaded(
    sides: Sequence[StoredValues], batch: Sequence[tuple[str, Box]], found: Comparison
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Loads boxes of both checkpoints, except for tensors that cannot be loaded."""
    batch = [(fqn, box) for fqn, box in batch if fqn not in found.unknown]
    names = dict.fromkeys(fqn for fqn, _ in batch)
    try:
        loaded = [side.load(batch) for side in sides]
    except UnsupportedError as error:
        if len(names) == 1:
            found.unknown.update(dict.fromkeys(names, str(error)))
            return
        for name in names:
            yield from _loaded(sides, [(fqn, box) for fqn, box in batch if fqn == name], found)
        return
    yield from zip((fqn for fqn, _ in batch), *loaded, strict=True)


def _pieces(side: StoredValues, fqns: Sequence[str]) -> Iterator[tuple[tuple[str, Box], int]]:
    """Yields boxes of tensors, and the bytes needed to compare each."""
    for fqn in fqns:
        entry = side.entry(fqn)
        itemsize = max(entry.properties.dtype.itemsize, 8)  # Unequal elements become float64.
        for box in pieces_of(entry.size, itemsize, _PIECE_NBYTES):
            yield (fqn, box), math.prod(box[1]) * itemsize


def _difference(x: torch.Tensor, y: torch.Tensor, atol: float, rtol: float) -> tuple[int, float]:
    """Returns the number of different elements, and the largest absolute difference."""
    unequal = (bytes_of(x) != bytes_of(y)).view(-1, x.dtype.itemsize).any(dim=1)
    x, y = x.reshape(-1), y.reshape(-1)
    if not unequal.any():
        return 0, 0.0
    x, y = x[unequal], y[unequal]
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    distances = (x.to(wide) - y.to(wide)).abs()
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        # int64 is exact for close integers. It overflows for distant ones, which need float64.
        exact = (x.to(torch.int64) - y.to(torch.int64)).abs()
        distances = torch.where(distances < 2**53, exact.to(wide), distances)
    if atol or rtol:
        same = (distances <= atol + rtol * y.to(wide).abs()) | (x == y) | ((x != x) & (y != y))
        distances = distances[~same]
    if not len(distances):
        return 0, 0.0
    return len(distances), float(distances.max())


def _larger(x: float, y: float) -> float:
    return math.nan if math.isnan(x) or math.isnan(y) else max(x, y)


def _compare_objects(sides: Sequence[StoredValues], fqns: Sequence[str], found: Comparison) -> None:
    if not fqns:
        return
    try:
        loaded = [side.objects(fqns) for side in sides]
    except UnsupportedError as error:  # An object of a forbidden class.
        if len(fqns) == 1:
            found.unknown[fqns[0]] = str(error)
            return
        for fqn in fqns:
            _compare_objects(sides, [fqn], found)
        return
    for fqn, x, y in zip(fqns, *loaded, strict=True):
        try:
            found.budget -= sum(_compared_nbytes(value, found.budget / 2) for value in (x, y))
            same = is_equal(x, y)
        except Exception as error:
            found.unknown[fqn] = (
                f"objects of {type(x).__name__} cannot be compared: {text_of(error)}"
            )
            continue
        if same:
            found.equal += 1
        else:
            where, x, y = _first_difference(x, y)
            found.differences[fqn] = f"{where}{_short(x)} in A, {_short(y)} in B"


def _first_difference(x: Any, y: Any) -> tuple[str, Any, Any]:
    """Returns the innermost unequal values in two unequal objects, and the place of the first."""
    where = ""
    for _ in range(_MAX_DEPTH):
        if isinstance(x, dict) and isinstance(y, dict) and x.keys() == y.keys():
            keys: Iterable[Any] = x
        elif isinstance(x, list | tuple) and type(x) is type(y) and len(x) == len(y):
            keys = range(len(x))
        else:
            break
        key = next((key for key in keys if not is_equal(x[key], y[key])), None)
        if key is None:
            break
        where, x, y = f"{where}[{_short(key)}]", x[key], y[key]
    if isinstance(x, str) and isinstance(y, str):
        same = next(
            (n for n, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y))
        )
        if same > _SHOWN_BEFORE:
            x, y = (f"...{text[same - _SHOWN_BEFORE :]}" for text in (x, y))
    return f"at {where}: " if where else "", x, y


def _compared_nbytes(value: object, limit: float) -> int:
    """Returns the bytes that a comparison of an object reads, counting a value as 64 bytes.

    Raises ValueError if they exceed the limit: a list may contain itself, and an expanded tensor
    may have any number of elements.
    """
    nbytes = 0
    pending = [value]
    while pending:
        one = pending.pop()
        nbytes += _VALUE_NBYTES
        if isinstance(one, torch.Tensor) and one.layout == torch.strided and not one.is_nested:
            nbytes += one.numel() * one.itemsize
        elif isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, list | tuple | collections.deque):
            pending += one
        if nbytes > limit:
            raise ValueError("they have more values or elements than the files justify")
    return nbytes


def _short(value: object) -> str:
    """Returns the beginning of the ``repr`` of a value, or its type if it has none."""
    try:
        text = _REPR.repr(value)
    except Exception:  # Python refuses to print integers of more than 4300 digits.
        return f"a value of {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."
