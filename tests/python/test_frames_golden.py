"""The golden frames, read by stock torch and by Python's zipfile.

``tests/golden/frames`` holds frames as ``csrc/format`` writes them (tests/cpp/zip_frame_test.cc
compares), and ``tests/golden/stock`` what torch.save wrote, for that test to read. Run this file as
a script to write the latter anew.
"""

from __future__ import annotations

import pathlib
import sys
import zipfile

import pytest
import torch

pytestmark = pytest.mark.thin(1.0)  # Each file is a case.

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
FRAMES = sorted((GOLDEN / "frames").glob("*.pt"))


def expected_frame(name: str) -> torch.Tensor:
    """The tensor in a golden frame: its bytes are 0, 1, 0, 1, and so on, valid in every dtype."""
    shape = {"scalar": (), "empty": (0, 4)}.get(name, (2, 3))
    dtype = getattr(torch, name, torch.float32)
    if not isinstance(dtype, torch.dtype):
        dtype = torch.float32
    numel = torch.Size(shape).numel()
    raw = torch.arange(numel * dtype.itemsize).remainder(2).to(torch.uint8)
    return raw.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_stock_torch_loads_frames(path: pathlib.Path, mmap: bool) -> None:
    dtype = getattr(torch, path.stem, None)
    if path.stem not in ("scalar", "empty") and not isinstance(dtype, torch.dtype):
        pytest.skip(f"this torch has no {path.stem}")
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    expected = expected_frame(path.stem)
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    assert raw_bytes(loaded) == raw_bytes(expected)


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_zipfile_finds_frames_sound(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [
            "archive/data.pkl",
            "archive/byteorder",
            "archive/version",
            "archive/data/0",
        ]


def write_stock() -> None:
    """Writes tests/golden/stock with the torch at hand."""
    grid = torch.arange(6.0).reshape(2, 3)
    cases = {
        "float32": grid,
        "bfloat16": grid.bfloat16(),
        "uint16": grid.to(torch.uint16),
        "complex32": grid.to(torch.complex32),
        "float8_e4m3fn": grid.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "transposed": grid.t(),
        "channels_last": torch.arange(12.0)
        .reshape(1, 2, 3, 2)
        .contiguous(memory_format=torch.channels_last),
        "sliced": grid[1:, 1:],
        "empty_slice": grid[:, 2:2],
        "requires_grad": torch.ones(2, requires_grad=True),
        "protocol_4": grid,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "dict": {"weight": torch.ones(2)},
        "two_tensors": [torch.ones(2), torch.ones(2)],
        "number": 17,
    }
    folder = GOLDEN / "stock"
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in cases.items():
        torch.save(value, folder / f"{name}.pt", pickle_protocol=4 if name == "protocol_4" else 2)


if __name__ == "__main__":
    sys.exit(write_stock())
