"""Files of ``torch.save`` that are written without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt import IoOptions
from torch_ckpt._core import _native
from torch_ckpt.filesystems.location import Location
from torch_ckpt.staging.live_state import live_state
from torch_ckpt.staging.stager import SnapshotStager
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
    copied: Any = SnapshotStager().begin(value)[0] if is_staged else live_state(value)
    found = written(tmp_path / "file.pt", copied)
    for name, expected in value.items():
        assert found[name].dtype == expected.dtype, name
        assert torch.equal(found[name], expected), name
