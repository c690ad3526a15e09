"""Files of ``torch.save`` that are written without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tensors import Tagged

from torch_ckpt import IoOptions
from torch_ckpt._core import _native
from torch_ckpt.filesystems.location import Location
from torch_ckpt.staging.live_state import FileStager, live_state
from torch_ckpt.storage.archive_writer import write_value

_BASE = torch.arange(600_000.0)  # Longer than a file that is written in one call.
_ALIASES = {
    "dtypes": lambda: {"a": _BASE, "b": _BASE.view(torch.int32), "c": _BASE.view(torch.float64)},
    "dtypes without a storage class": lambda: {"a": _BASE, "b": _BASE.view(torch.uint32)},
    "lengths": lambda: {"a": torch.from_numpy(_BASE.numpy()[:3]), "b": _BASE, "c": _BASE[1:]},
}


def written(path: Path, value: Any) -> Any:
    io, location = IoOptions(), Location(path)
    pool = _native.BufferPool(io.buffer_nbytes, io.block_nbytes(location.file_system))
    write_value(location, value, pool=pool, io=io)
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("kind", _ALIASES)
def test_aliases_of_memory_are_loaded_as_what_they_were(
    tmp_path: Path, kind: str, is_staged: bool
) -> None:
    value = _ALIASES[kind]()
    copied: Any = FileStager().begin(value)[0] if is_staged else live_state(value)
    found = written(tmp_path / "file.pt", copied)
    for name, expected in value.items():
        assert found[name].dtype == expected.dtype, name
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_view_with_gaps_shares_elements_after_a_load(tmp_path: Path, is_staged: bool) -> None:
    base = torch.arange(1 << 12)
    value = {"gaps": base[::64], "part": base[128:130], "list": [(base[::64], base[:2])]}
    copied: Any = FileStager().begin(value)[0] if is_staged else live_state(value)
    found = written(tmp_path / "file.pt", copied)
    found["part"].fill_(-1)
    assert found["gaps"][:4].tolist() == [0, 64, -1, 192]
    gaps, part = found["list"][0]
    part.fill_(-1)
    assert gaps[:2].tolist() == [-1, 64]


def _tagged() -> torch.Tensor:
    return _with_tags(torch.arange(4))


def _with_tags(tensor: Any) -> torch.Tensor:
    tensor.tags = {"of": "the client", "mask": torch.ones(3)}
    return tensor  # type: ignore[no-any-return]


_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "frozen": lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False),
    "attributes": _tagged,
    "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "meta": lambda: torch.empty(3, device="meta"),
    "parameter of meta": lambda: torch.nn.Parameter(torch.empty(3, device="meta")),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "one element with a stride": lambda: torch.arange(6.0)[::2][:1],
    "parameter of conj": lambda: torch.nn.Parameter(torch.ones(3, dtype=torch.complex64).conj()),
    "parameter of neg": lambda: torch.nn.Parameter(torch._neg_view(torch.ones(3))),
    "parameter of sparse": lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
    "attributes of conj": lambda: _with_tags(torch.ones(3, dtype=torch.complex64).conj()),
    "attributes of sparse": lambda: _with_tags(torch.eye(3).to_sparse()),
    "subclass": lambda: torch.ones(3).as_subclass(Tagged),
    "attributes of a subclass": lambda: _with_tags(torch.ones(3).as_subclass(Tagged)),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(9), 0.1, 3, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")  # Torch's nested tensors are a prototype.
@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("kind", _TENSORS)
def test_a_tensor_keeps_what_torch_save_keeps(tmp_path: Path, kind: str, is_staged: bool) -> None:
    tensor = _TENSORS[kind]()
    value = {"one": tensor, "list": [tensor], "tuple": (tensor, torch.ones(2))}
    torch.save(value, tmp_path / "stock.pt")
    stock = torch.load(tmp_path / "stock.pt", weights_only=False)
    copied: Any = FileStager().begin(value)[0] if is_staged else live_state(value)
    found = written(tmp_path / "file.pt", copied)
    for one, other in (
        (found["one"], stock["one"]),
        (found["list"][0], stock["list"][0]),
        (found["tuple"][0], stock["tuple"][0]),
    ):
        assert type(one) is type(other)
        assert one.requires_grad == other.requires_grad
        assert str(one) == str(other)
        assert str(vars(one)) == str(vars(other))
    assert found["one"] is found["list"][0]
