"""Replaces a value of a file by another one, which no writer of the format puts there."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import io
import json
import pathlib
import pickle
import random
import struct
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from deepspeed_checkpoints import deepspeed_classes


def _list_of_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _doubled() -> list[Any]:
    value: list[Any] = [1]
    for _ in range(50):
        value = [value, value]
    return value


def _nested() -> list[Any]:
    value: list[Any] = []
    for _ in range(300):
        value = [value]
    return value


PLAIN: tuple[Callable[[], Any], ...] = (
    *(lambda: None, lambda: True, lambda: -1, lambda: 0, lambda: 1, lambda: 3, lambda: 1 << 31),
    *(lambda: 1 << 62, lambda: 1 << 70, lambda: -(1 << 70), lambda: 0.5, lambda: "", lambda: "x"),
    *(lambda: "a/../../b", lambda: "0", lambda: "nul\0", lambda: [], dict, lambda: [0]),
    *(lambda: {"": 1}, lambda: [[1], {"a": [2]}], lambda: "F32", lambda: [1, -1], _nested),
)
"""What JSON can have as well."""

ODD: tuple[Callable[[], Any], ...] = (
    *PLAIN,
    *(lambda: float("nan"), lambda: 1j, lambda: b"\xff", tuple, set, lambda: frozenset({1})),
    *(lambda: "\udc80", lambda: range(1 << 40), lambda: {1: 2}, lambda: {(1, 2): None}),
    *(lambda: torch.float32, lambda: torch.Size([2, 3]), lambda: torch.device("cpu")),
    *(lambda: torch.zeros(0), lambda: torch.ones(3), lambda: torch.tensor(2), lambda: torch.eye(3)),
    *(lambda: torch.ones(1).expand(1 << 40), lambda: torch.empty(5, device="meta")),
    *(lambda: torch.empty(1 << 40, device="meta"), lambda: torch.eye(3).to_sparse()),
    *(
        lambda: torch.ones(3, dtype=torch.int8),
        lambda: torch.ones(4)[::2],
        lambda: torch.ones(2).cfloat().conj(),
    ),
    *(lambda: np.zeros(3), lambda: np.float64("nan"), lambda: np.array([None, "x"], object)),
    *(lambda: np.dtype("f4"), collections.OrderedDict, lambda: collections.Counter("ab")),
    *(lambda: collections.deque([1]), lambda: decimal.Decimal("nan"), lambda: uuid.UUID(int=1)),
    *(lambda: datetime.datetime(2020, 1, 1), lambda: pathlib.PurePosixPath("a"), _list_of_itself),
    *(lambda: argparse.Namespace(a=[1]), lambda: types.SimpleNamespace(b=torch.ones(2))),
    *(_doubled, lambda: {"x": _doubled()}, lambda: io.BytesIO(b"x")),
)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the places in a value, and what is there."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif not isinstance(value, torch.Tensor | type) and hasattr(value, "__dict__"):
        yield from vars(value).items()


def _places(value: Any) -> list[tuple[Any, ...]]:
    """Returns the paths of all values within a value."""
    found: list[tuple[Any, ...]] = []
    pending: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while pending and len(found) < 5000:
        path, one = pending.pop()
        for key, child in _children(one):
            found.append((*path, key))
            pending.append(((*path, key), child))
    return found


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = dict(_children(value))[key]
    return value


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Returns a value with another one at a path; changes containers in place where it can."""
    if not path:
        return new
    key, *rest = path
    child = _replaced(dict(_children(value))[key], tuple(rest), new)
    if isinstance(value, tuple):
        elements = [*value[:key], child, *value[key + 1 :]]
        try:
            return type(value)(elements)
        except TypeError:  # A torch.Size, or a named tuple.
            return tuple(elements)
    if isinstance(value, dict | list):
        value[key] = child
    else:
        object.__setattr__(value, key, child)
    return value


def change(value: Any, rng: random.Random, odd: tuple[Callable[[], Any], ...]) -> tuple[Any, str]:
    """Changes one value within a value. Returns the whole, and what was done."""
    places = _places(value)
    if not places:
        return rng.choice(odd)(), "all of it"
    path = rng.choice(places)
    kind = rng.choice(["odd", "odd", "odd", "other", "gone", "key"])
    parent = _at(value, path[:-1])
    if kind == "gone" and isinstance(parent, dict | list):
        del parent[path[-1]]
        return value, f"{path} gone"
    if kind == "key" and isinstance(parent, dict):
        new = rng.choice(["x", "", "a.b"] if odd is PLAIN else [0, -1, "x", None, (1, 2), 1 << 70])
        parent[new] = parent.pop(path[-1])
        return value, f"{path} under {new!r}"
    if kind == "other":
        other = rng.choice(places)
        return _replaced(value, path, _at(value, other)), f"{path} as {other}"
    number = rng.randrange(len(odd))
    return _replaced(value, path, odd[number]()), f"{path} as odd value {number}"


def changed_file(name: str, data: bytes, rng: random.Random) -> tuple[bytes, str] | None:
    """Changes one value in a file; returns nothing for a file without values."""
    if name.endswith(".pt"):
        with deepspeed_classes():
            value = torch.load(io.BytesIO(data), weights_only=False)
            value, what = change(value, rng, ODD)
            stream = io.BytesIO()
            torch.save(value, stream)
        return stream.getvalue(), what
    if name.endswith((".metadata", ".pkl")):
        while True:
            value, what = change(pickle.loads(data), rng, ODD)
            with contextlib.suppress(RuntimeError):  # Properties pickle only valid formats.
                return pickle.dumps(value), what
    if name.endswith(".json"):
        value, what = change(json.loads(data), rng, PLAIN)
        return json.dumps(value).encode(), what
    if name.endswith(".safetensors"):
        (nbytes,) = struct.unpack("<Q", data[:8])
        value, what = change(json.loads(data[8 : 8 + nbytes]), rng, PLAIN)
        header = json.dumps(value).encode()
        return struct.pack("<Q", len(header)) + header + data[8 + nbytes :], what
    return None
