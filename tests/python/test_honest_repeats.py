"""Values that repeat others load, though their files are small; and what is too large says so."""

from __future__ import annotations

import collections
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import failure_of, load, save
from crafted import DOUBLED, StoredBytes, archive, number, text
from torch.distributed.checkpoint import FileSystemWriter

import torch_ckpt
from torch_ckpt import FastReader, FastWriter
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.formats.equality import is_equal
from torch_ckpt.formats.object_pickles import load_object

TUPLE = tuple(range(1000))
DICT = {f"key {i}": i for i in range(2000)}
QUANTIZED = torch.quantize_per_tensor(torch.arange(100.0), 0.1, 3, torch.qint8)


def sparse(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, (1000,) * len(indices), check_invariants=True)


def parameters(shared: object) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(2)) for _ in range(500)]
    for parameter in made:
        parameter.shared = shared  # type: ignore[attr-defined]
    return made


def ordered_dicts(shared: object) -> list[collections.OrderedDict[str, int]]:
    made = [collections.OrderedDict(a=1) for _ in range(500)]
    for one in made:
        one._metadata = shared  # type: ignore[attr-defined]
    return made


def objects(values: list[object]) -> Any:
    made = np.empty(len(values), object)
    made[:] = values
    return made


VALUES: dict[str, Callable[[], Any]] = {
    "sparse tensor, expanded values": lambda: sparse(
        torch.arange(1000)[None], torch.ones(1).expand(1000)
    ),
    "sparse tensor, expanded indices": lambda: sparse(
        torch.arange(1000).expand(2, 1000), torch.arange(1000.0)
    ),
    "sparse tensor, many expanded values": lambda: torch.sparse_coo_tensor(
        torch.arange(1 << 20)[None], torch.ones(1).expand(1 << 20), check_invariants=True
    ),
    "quantized tensor, 4 bits": lambda: torch.quantize_per_tensor(
        torch.arange(100.0), 0.1, 3, torch.quint4x2
    ),
    "quantized tensor, 2 bits": lambda: torch.quantize_per_tensor(
        torch.arange(100.0), 0.1, 3, torch.quint2x4
    ),
    "quantized tensor, expanded": lambda: QUANTIZED[:1].expand(100),
    "quantized tensors, slices of channels": lambda: [
        *torch.quantize_per_channel(
            torch.ones(64, 8), torch.ones(64), torch.zeros(64, dtype=torch.int64), 0, torch.qint8
        ).split(4, dim=1)
    ],
    "parameters with one list": lambda: parameters(list(range(5000))),
    "parameters with one dict": lambda: parameters(DICT),
    "OrderedDicts with one dict": lambda: ordered_dicts(DICT),
    "object array of dicts with one list": lambda: objects([{"a": [*TUPLE]} for _ in range(500)]),
    "object array of dicts that share a list": lambda: objects([{"a": DICT}] * 500),
    "object array of None": lambda: objects([None] * 50_000),
    "set of pairs with one tuple": lambda: {(i, TUPLE) for i in range(500)},
    "dict of pairs with one tuple": lambda: {(i, TUPLE): i for i in range(500)},
    "tuple of references": lambda: (TUPLE,) * 1000,
    "deque of references": lambda: collections.deque([TUPLE] * 1000),
    "ranges": lambda: {range(10**6), range(10**7)},
    "Counter": lambda: collections.Counter(DICT),
    "OrderedDict": lambda: collections.OrderedDict(DICT),
}


def same(x: Any, y: Any) -> bool:
    """As ``is_equal``, and for kinds of tensors and arrays that it does not compare bit for bit."""
    if isinstance(x, np.ndarray):
        return x.shape == y.shape and x.tolist() == y.tolist()
    if isinstance(x, list) and isinstance(x[0], torch.nn.Parameter):
        return len(x) == len(y) and all(
            torch.equal(*pair) and vars(pair[0]) == vars(pair[1]) for pair in zip(x, y, strict=True)
        )
    if isinstance(x, list) and isinstance(x[0], collections.OrderedDict):
        return x == y and [vars(one) for one in x] == [vars(one) for one in y]
    if isinstance(x, torch.Tensor) and x.is_quantized and x.dtype.itemsize == 1:
        same_kind = (x.dtype, x.shape) == (y.dtype, y.shape)
        return same_kind and torch.equal(x.int_repr(), y.int_repr())
    if isinstance(x, tuple | collections.deque) and type(x) is type(y) and len(x) == len(y):
        pairs = {(id(a), id(b)): (a, b) for a, b in zip(x, y, strict=True)}  # Each once.
        return all(is_equal(a, b) for a, b in pairs.values())
    return is_equal(x, y)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_repeats_others_loads(name: str) -> None:
    value = VALUES[name]()
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)

    assert same(value, load_object(stream))


@pytest.mark.thin("fast")
@pytest.mark.parametrize("files", ["stock", "fast", "staged", "torch.save"])
def test_a_checkpoint_of_values_that_repeat_others_loads(files: str, tmp_path: Path) -> None:
    state = {name: (make(),) for name, make in VALUES.items()}
    path = tmp_path / "file"
    if files == "torch.save":
        torch.save(state, path)
    elif files == "staged":
        torch_ckpt.async_save(state, checkpoint_id=path).result()
    else:
        save(state, (FileSystemWriter if files == "stock" else FastWriter)(path))

    loaded = load(dict.fromkeys(state), FastReader(path))

    assert [name for name in state if not same(state[name][0], loaded[name][0])] == []


# What is too large

TOO_LARGE = b"c__builtin__\nset\n](K\x01" + DOUBLED + b"e\x85R"


@pytest.mark.parametrize("kind", ["set", "sparse tensor"])
def test_a_value_of_a_file_that_is_too_large_is_refused_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "set":
        crafted = b"\x80\x02}(" + text("step") + number(3) + text("large") + TOO_LARGE + b"u."
        path.write_bytes(archive(crafted).getvalue())
    else:
        large = torch.sparse_coo_tensor(
            torch.zeros(1, 1, dtype=torch.int64).expand(1, 1 << 25), torch.ones(1).expand(1 << 25)
        )
        torch.save({"step": 3, "w": torch.ones(3), "large": large}, path)
        assert load({"w": torch.zeros(3)}, FastReader(path))["w"].sum() == 3

    assert load({"step": None}, FastReader(path)) == {"step": 3}
    error = failure_of(load, {"step": None, "large": None}, FastReader(path))

    assert isinstance(error, UnsupportedError)
    for part in ("'large'", "file", "expands to more than its", "trust_pickle=True"):
        assert part in str(error)
    for part in ("run code", "add_safe_globals"):
        assert part not in str(error)


@pytest.mark.parametrize("writer", [FileSystemWriter, FastWriter])
def test_an_object_that_is_too_large_is_named_with_its_limit(writer: Any, tmp_path: Path) -> None:
    crafted = archive(b"\x80\x02" + TOO_LARGE + b".").getvalue()
    save({"large": crafted, "step": 3}, writer(tmp_path), planner=StoredBytes())

    error = failure_of(load, {"large": None, "step": None}, FastReader(tmp_path))

    assert isinstance(error, UnsupportedError)
    for part in ("'large'", ".distcp", "expands to more than its", "trust_pickle=True"):
        assert part in str(error)
    for part in ("run code", "add_safe_globals"):
        assert part not in str(error)


def test_the_bytes_that_objects_of_a_load_need_not_justify_are_limited_together(
    tmp_path: Path,
) -> None:
    """Each object alone would load."""
    pairs = b"".join(number(i) + b"h\x01\x86" for i in range(1, 2000))
    one = b"(" + b"K\x01" * 4000 + b"tq\x01c__builtin__\nset\n](" + pairs + b"e\x85R\x86"
    crafted = archive(b"\x80\x02" + one + b".").getvalue()
    names = [f"large {i}" for i in range(20)]
    save(dict.fromkeys(names, crafted), FastWriter(tmp_path), planner=StoredBytes())

    assert len(load({names[0]: None}, FastReader(tmp_path))[names[0]][1]) == 1999
    error = failure_of(load, dict.fromkeys(names), FastReader(tmp_path))

    assert isinstance(error, UnsupportedError)
    assert "expands to more than its" in str(error)
