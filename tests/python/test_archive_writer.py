"""Files of ``torch.save`` that are written without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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


def _tagged() -> torch.Tensor:
    tensor: Any = torch.arange(4)
    tensor.tags = {"of": "the client", "mask": torch.ones(3)}
    return tensor


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
